//! Calls as they are described before they run.

use std::ops::Range;
use std::time::Duration;

use weft_plan::collective::{Collective, Counts, Problem, Sizes};
use weft_plan::cost::Candidate;
use weft_plan::datatype::quantized::Quantization;
use weft_plan::{Datatype, Rank, Reduction, Time};
use weft_protocol::group::CallRecord;

use super::pending::Pending;
use super::prepare::{CallError, Operator, Spec, sizes, words};
use super::schedule::{Schedule, Way};
use super::{Communicator, Part};
use crate::agent::Agent;
use crate::error::Error;

/// A call being described. Nothing happens before [`run`](Call::run) or [`start`](Call::start).
#[derive(Debug)]
#[must_use = "a described call does nothing until it is run or started"]
pub struct Call<'a> {
    group: &'a Communicator,
    described: Result<Described, CallError>,
}

/// A call with its buffers, ready to be queued.
#[derive(Debug)]
pub(super) struct Described {
    pub(super) first: One,
    /// What is grouped with it. A single call, which may be short, allocates nothing.
    pub(super) more: Vec<One>,
    pub(super) deadline: Time,
    /// The outputs are written when the call has ended well, and not before.
    pub(super) all_or_nothing: bool,
}

/// One collective, with its input and output.
#[derive(Debug)]
pub(super) struct One {
    pub(super) spec: Spec,
    /// Until it begins.
    pub(super) parts: Option<[Part; 2]>,
}

/// What a collective asks for.
struct Asked {
    collective: Collective,
    in_place: bool,
    counts: Result<Counts, CallError>,
    /// All ranks give the same sizes.
    counts_agree: bool,
    datatype: Datatype,
    operator: Operator,
}

impl Asked {
    fn new(collective: Collective, counts: Result<Counts, CallError>, datatype: Datatype) -> Asked {
        Asked {
            collective,
            in_place: false,
            counts,
            counts_agree: true,
            datatype,
            operator: Operator::Builtin(Reduction::Sum),
        }
    }
}

impl Described {
    /// Makes sure that other ranks can read its buffers where they lie, where that is worth it.
    pub(super) fn lend(&mut self, agent: &Agent, far: bool) -> Result<(), Error> {
        self.first.lend(agent, far)?;
        self.more.iter_mut().try_for_each(|one| one.lend(agent, far))
    }

    /// The collectives with their buffers.
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut One> {
        std::iter::once(&mut self.first).chain(&mut self.more)
    }

    /// Takes every buffer out of it: input and output of one collective after the other.
    pub(super) fn take_parts(&mut self, mut take: impl FnMut(Part)) {
        let mut take_both = |one: &mut One| {
            if let Some([input, output]) = one.parts.take() {
                take(input);
                take(output);
            }
        };
        take_both(&mut self.first);
        self.more.iter_mut().for_each(take_both);
    }

    /// Whether it is messages between two ranks and nothing else.
    pub(super) fn is_pairwise(&self) -> bool {
        self.all().all(|one| one.spec.is_message())
    }

    /// What a person is told of it, where it is messages.
    pub(super) fn message_record(&self, rank: Rank) -> CallRecord {
        let words = words(&self.first.spec, None, 1 + self.more.len(), rank);
        // Ranks may group such calls as they like, so that only what a single message is counts.
        CallRecord::new(CallRecord::PAIRWISE, 1, &words)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &One> {
        std::iter::once(&self.first).chain(&self.more)
    }

    /// A collective that writes what another one of the group reads or writes, if there is any.
    fn clash(&self) -> Option<Collective> {
        let mut touched: Vec<Touched> = self.all().flat_map(One::touched).collect();
        touched.sort_unstable_by_key(|touched| touched.bytes.start);
        // What begins before a range overlaps it if it ends behind its beginning.
        let (mut read_up_to, mut written_up_to) = (0, 0);
        touched.into_iter().find_map(|Touched { bytes, written, by }| {
            let clashes = bytes.start < if written { read_up_to } else { written_up_to };
            read_up_to = read_up_to.max(bytes.end);
            if written {
                written_up_to = written_up_to.max(bytes.end);
            }
            clashes.then_some(by)
        })
    }
}

/// Addresses that a collective reads, or writes and perhaps reads.
struct Touched {
    bytes: Range<usize>,
    written: bool,
    by: Collective,
}

impl One {
    fn lend(&mut self, agent: &Agent, far: bool) -> Result<(), Error> {
        let Some([input, output]) = &mut self.parts else {
            return Ok(());
        };
        input.lend(agent, far)?;
        output.lend(agent, far)
    }

    fn touched(&self) -> impl Iterator<Item = Touched> {
        let [input, output] = match &self.parts {
            Some(parts) => parts.each_ref().map(Part::addresses),
            None => [0..0, 0..0],
        };
        let by = self.spec.problem.collective;
        let touch = |bytes: Range<usize>, written| Touched { bytes, written, by };
        let both = match self.spec.problem.in_place {
            // One of them lies within the other.
            true => [
                touch(input.start.min(output.start)..input.end.max(output.end), true),
                touch(0..0, false),
            ],
            false => [touch(input, false), touch(output, true)],
        };
        both.into_iter().filter(|touched| !touched.bytes.is_empty())
    }
}

impl<'a> Call<'a> {
    /// By when the call ends, counted from its start.
    pub fn deadline(mut self, after: Duration) -> Call<'a> {
        if let Ok(described) = &mut self.described {
            described.deadline = after.into();
        }
        self
    }

    /// Which algorithm to use, and in how many portions. All ranks must say the same.
    pub fn algorithm(self, algorithm: impl Into<Candidate>) -> Call<'a> {
        let way = Way::Algorithm(algorithm.into());
        self.with(|spec| spec.way = Some(way.clone()))
    }

    /// Run by this schedule instead of an algorithm. All ranks must give the same: one that has another is found out by its first message.
    pub fn schedule(self, schedule: &Schedule) -> Call<'a> {
        self.with(|spec| spec.way = Some(Way::Schedule(schedule.clone())))
    }

    /// Choose the algorithm by the collective, the size and the number of ranks alone, and not by what is the fastest here: then the
    /// result has the same bits wherever the ranks are. (For an algorithm it always has, whatever the timing.) All ranks must say the same.
    pub fn deterministic(self) -> Call<'a> {
        self.with(|spec| spec.deterministic = true)
    }

    /// The output holds what it held before the call, or all of the result: the call works in memory of its own, as large as the
    /// output, and what it has come to is copied when it has ended well. Without this, the output of a call that fails is partly
    /// written; in place that is also the input, which is lost. It is each rank's own affair. Not for messages between two ranks.
    pub fn all_or_nothing(mut self) -> Call<'a> {
        if let Ok(described) = &mut self.described {
            described.all_or_nothing = !described.is_pairwise();
        }
        match &self.described {
            Ok(described) if described.all_or_nothing => self.with(|spec| spec.problem.in_place = false),
            _ => self,
        }
    }

    /// A part of a quantised call, which those of calls that are quantised otherwise must not be taken for.
    pub(super) fn quantized(self, quantization: Quantization) -> Call<'a> {
        self.with(|spec| spec.quantized = Some(quantization))
    }

    fn with(mut self, change: impl Fn(&mut Spec)) -> Call<'a> {
        if let Ok(described) = &mut self.described {
            described.all_mut().for_each(|one| change(&mut one.spec));
        }
        self
    }

    /// What it would run by; of a group, one for each of its calls.
    pub fn ways(&self) -> Result<Vec<Way>, Error> {
        let described = self.described.as_ref().map_err(CallError::clone)?;
        Ok(self.group.inner.member()?.lock().ways(described)?)
    }

    /// Runs it, after the calls that were started before, and waits for its end. Sends and receives wait for no other call.
    pub fn run(mut self) -> Result<(), Error> {
        if let Ok(described) = &mut self.described
            && let Some(outcome) = self.group.run_at_once(described)
        {
            return outcome;
        }
        let pending = self.group.leave(self.described?)?;
        self.group.see_through(&pending)
    }

    /// Starts it and goes on. The buffers must not be touched until it has ended.
    pub fn start(self) -> Result<Pending, Error> {
        self.group.start(self.described?)
    }
}

impl Communicator {
    /// Every rank ends with the reduction of all inputs. In place where input and output are the same.
    pub fn all_reduce(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        datatype: Datatype,
        operator: impl Into<Operator>,
    ) -> Call<'_> {
        let (input, output) = (input.into(), output.into());
        let in_place = input.begins_at(&output, Some(0));
        let count = elements(input.len, datatype);
        self.describe(
            Asked {
                in_place,
                operator: operator.into(),
                ..Asked::new(Collective::AllReduce, count.map(Counts::Equal), datatype)
            },
            input,
            output,
        )
    }

    /// Every rank ends with all inputs, one after the other. In place where the input is the rank's own block of the output.
    pub fn all_gather(&self, input: impl Into<Part>, output: impl Into<Part>, datatype: Datatype) -> Call<'_> {
        let input = input.into();
        self.all_gather_of(
            elements(input.len, datatype).map(Counts::Equal),
            input,
            output.into(),
            datatype,
        )
    }

    /// As [`all_gather`](Communicator::all_gather) with `counts` elements from each rank.
    pub fn all_gatherv(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        counts: &[u64],
        datatype: Datatype,
    ) -> Call<'_> {
        self.all_gather_of(
            Ok(Counts::PerRank(counts.to_vec())),
            input.into(),
            output.into(),
            datatype,
        )
    }

    fn all_gather_of(
        &self,
        counts: Result<Counts, CallError>,
        input: Part,
        output: Part,
        datatype: Datatype,
    ) -> Call<'_> {
        let in_place = input.begins_at(&output, self.before(&counts, datatype));
        let collective = Collective::AllGather {
            sizes: counts.as_ref().map_or(Sizes::Equal, sizes),
        };
        self.describe(
            Asked {
                in_place,
                ..Asked::new(collective, counts, datatype)
            },
            input,
            output,
        )
    }

    /// Rank *r* ends with the reduction of everyone's block *r*. In place where the output is the rank's own block of the input.
    pub fn reduce_scatter(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        datatype: Datatype,
        operator: impl Into<Operator>,
    ) -> Call<'_> {
        let output = output.into();
        let counts = elements(output.len, datatype).map(Counts::Equal);
        self.reduce_scatter_of(counts, input.into(), output, datatype, operator.into())
    }

    /// As [`reduce_scatter`](Communicator::reduce_scatter) with `counts` elements for each rank.
    pub fn reduce_scatterv(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        counts: &[u64],
        datatype: Datatype,
        operator: impl Into<Operator>,
    ) -> Call<'_> {
        let counts = Ok(Counts::PerRank(counts.to_vec()));
        self.reduce_scatter_of(counts, input.into(), output.into(), datatype, operator.into())
    }

    fn reduce_scatter_of(
        &self,
        counts: Result<Counts, CallError>,
        input: Part,
        output: Part,
        datatype: Datatype,
        operator: Operator,
    ) -> Call<'_> {
        let in_place = output.begins_at(&input, self.before(&counts, datatype));
        let collective = Collective::ReduceScatter {
            sizes: counts.as_ref().map_or(Sizes::Equal, sizes),
        };
        self.describe(
            Asked {
                in_place,
                operator,
                ..Asked::new(collective, counts, datatype)
            },
            input,
            output,
        )
    }

    /// Every rank ends with the root's data, in the same place.
    pub fn broadcast(&self, data: impl Into<Part>, root: Rank, datatype: Datatype) -> Call<'_> {
        let data = data.into();
        let input = if root == self.rank() {
            data.clone()
        } else {
            data.nothing()
        };
        let counts = elements(data.len, datatype).map(Counts::Equal);
        let collective = Collective::Broadcast { root };
        self.describe(
            Asked {
                in_place: true,
                ..Asked::new(collective, counts, datatype)
            },
            input,
            data,
        )
    }

    /// The root ends with the reduction of all inputs; the others' output is not looked at. In place where the root's input and output
    /// are the same.
    pub fn reduce(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        root: Rank,
        datatype: Datatype,
        operator: impl Into<Operator>,
    ) -> Call<'_> {
        let (input, output) = (input.into(), self.at_root(root, output.into()));
        let in_place = root == self.rank() && input.begins_at(&output, Some(0));
        let counts = elements(input.len, datatype).map(Counts::Equal);
        let collective = Collective::Reduce { root };
        self.describe(
            Asked {
                in_place,
                operator: operator.into(),
                ..Asked::new(collective, counts, datatype)
            },
            input,
            output,
        )
    }

    /// The root ends with all inputs, one after the other; the others' output is not looked at. In place where the root's input is its
    /// own block of the output.
    pub fn gather(&self, input: impl Into<Part>, output: impl Into<Part>, root: Rank, datatype: Datatype) -> Call<'_> {
        let input = input.into();
        let counts = elements(input.len, datatype).map(Counts::Equal);
        self.gather_of(Sizes::Equal, counts, input, output.into(), root, datatype)
    }

    /// As [`gather`](Communicator::gather) with `counts` elements from each rank, which only the root has to know.
    pub fn gatherv(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        counts: Option<&[u64]>,
        root: Rank,
        datatype: Datatype,
    ) -> Call<'_> {
        let input = input.into();
        let counts = self.own_or_all(counts, input.len, datatype);
        self.gather_of(Sizes::Varying, counts, input, output.into(), root, datatype)
    }

    fn gather_of(
        &self,
        sizes: Sizes,
        counts: Result<Counts, CallError>,
        input: Part,
        output: Part,
        root: Rank,
        datatype: Datatype,
    ) -> Call<'_> {
        let output = self.at_root(root, output);
        let in_place = root == self.rank() && input.begins_at(&output, self.before(&counts, datatype));
        self.describe(
            Asked {
                in_place,
                counts_agree: sizes == Sizes::Equal,
                ..Asked::new(Collective::Gather { root, sizes }, counts, datatype)
            },
            input,
            output,
        )
    }

    /// Rank *r* ends with the root's block *r*; the others' input is not looked at. In place where the root's output is its own block of
    /// the input.
    pub fn scatter(&self, input: impl Into<Part>, output: impl Into<Part>, root: Rank, datatype: Datatype) -> Call<'_> {
        let output = output.into();
        let counts = elements(output.len, datatype).map(Counts::Equal);
        self.scatter_of(Sizes::Equal, counts, input.into(), output, root, datatype)
    }

    /// As [`scatter`](Communicator::scatter) with `counts` elements for each rank, which only the root has to know.
    pub fn scatterv(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        counts: Option<&[u64]>,
        root: Rank,
        datatype: Datatype,
    ) -> Call<'_> {
        let output = output.into();
        let counts = self.own_or_all(counts, output.len, datatype);
        self.scatter_of(Sizes::Varying, counts, input.into(), output, root, datatype)
    }

    fn scatter_of(
        &self,
        sizes: Sizes,
        counts: Result<Counts, CallError>,
        input: Part,
        output: Part,
        root: Rank,
        datatype: Datatype,
    ) -> Call<'_> {
        let input = self.at_root(root, input);
        let in_place = root == self.rank() && output.begins_at(&input, self.before(&counts, datatype));
        self.describe(
            Asked {
                in_place,
                counts_agree: sizes == Sizes::Equal,
                ..Asked::new(Collective::Scatter { root, sizes }, counts, datatype)
            },
            input,
            output,
        )
    }

    /// Block *r* of rank *s* becomes block *s* of rank *r*. In place where input and output are the same.
    pub fn all_to_all(&self, input: impl Into<Part>, output: impl Into<Part>, datatype: Datatype) -> Call<'_> {
        let (input, output) = (input.into(), output.into());
        let in_place = input.begins_at(&output, Some(0));
        let ranks = u64::from(self.size());
        let counts = elements(input.len, datatype).and_then(|count| match count.is_multiple_of(ranks) {
            true => Ok(Counts::Equal(count / ranks)),
            false => Err(CallError::Uneven {
                bytes: input.len,
                datatype,
            }),
        });
        let collective = Collective::AllToAll { sizes: Sizes::Equal };
        self.describe(
            Asked {
                in_place,
                ..Asked::new(collective, counts, datatype)
            },
            input,
            output,
        )
    }

    /// As [`all_to_all`](Communicator::all_to_all) with `sent` elements for each rank and `received` from each.
    pub fn all_to_allv(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        sent: &[u64],
        received: &[u64],
        datatype: Datatype,
    ) -> Call<'_> {
        let (ranks, own) = (self.size() as usize, self.rank().0 as usize);
        // Of the whole table this rank knows its row and its column.
        let mut table = vec![0; ranks * ranks];
        for (other, count) in sent.iter().enumerate().take(ranks) {
            table[own * ranks + other] = *count;
        }
        for (other, count) in received.iter().enumerate().take(ranks) {
            table[other * ranks + own] = *count;
        }
        let counts = match sent.len() == ranks && received.len() == ranks && sent[own] == received[own] {
            true => Ok(Counts::PerPair(table)),
            false => Err(CallError::Uneven {
                bytes: sent.iter().fold(0, |sum: u64, count| sum.saturating_add(*count)),
                datatype,
            }),
        };
        let collective = Collective::AllToAll { sizes: Sizes::Varying };
        let (input, output) = (input.into(), output.into());
        self.describe(
            Asked {
                counts_agree: false,
                ..Asked::new(collective, counts, datatype)
            },
            input,
            output,
        )
    }

    /// Sends to one rank, which must [`receive`](Communicator::receive) as many elements.
    pub fn send(&self, data: impl Into<Part>, to: Rank, datatype: Datatype) -> Call<'_> {
        let input = data.into();
        let (collective, output) = (Collective::SendReceive { from: self.rank(), to }, input.nothing());
        let counts = elements(input.len, datatype).map(Counts::Equal);
        self.describe(Asked::new(collective, counts, datatype), input, output)
    }

    /// Receives what one rank [sends](Communicator::send).
    pub fn receive(&self, data: impl Into<Part>, from: Rank, datatype: Datatype) -> Call<'_> {
        let output = data.into();
        let (collective, input) = (Collective::SendReceive { from, to: self.rank() }, output.nothing());
        let counts = elements(output.len, datatype).map(Counts::Equal);
        self.describe(Asked::new(collective, counts, datatype), input, output)
    }

    /// Nobody ends before everybody has begun.
    pub fn barrier(&self) -> Call<'_> {
        let nothing = self.nothing();
        let counts = Ok(Counts::Equal(0));
        let (input, output) = (nothing.clone(), nothing);
        self.describe(Asked::new(Collective::Barrier, counts, Datatype::U8), input, output)
    }

    /// Several calls that run at once, as one. All of them are collectives, in the same order on all ranks, or all of them are
    /// sends and receives.
    pub fn group<'a>(&'a self, calls: impl IntoIterator<Item = Call<'a>>) -> Call<'a> {
        let mut calls = calls.into_iter().map(|call| call.described);
        let mut described = calls.next().unwrap_or(Err(CallError::Nothing));
        for call in calls {
            described = match (described, call) {
                (Ok(mut all), Ok(call)) => {
                    all.more.push(call.first);
                    all.more.extend(call.more);
                    all.deadline = all.deadline.max(call.deadline);
                    Ok(all)
                }
                (Err(error), _) | (_, Err(error)) => Err(error),
            };
        }
        let described = described.and_then(|all| match all.clash() {
            Some(collective) => Err(CallError::Overlap { collective }),
            None => Ok(all),
        });
        Call { group: self, described }
    }

    fn describe(&self, asked: Asked, input: Part, output: Part) -> Call<'_> {
        let problem = Problem {
            in_place: asked.in_place,
            ..Problem::new(asked.collective, self.size())
        };
        let (overlap, collective) = (input.overlaps(&output), asked.collective);
        let counts = asked.counts.and_then(|counts| match overlap && !asked.in_place {
            true => Err(CallError::Overlap { collective }),
            false => Ok(counts),
        });
        let described = counts.map(|counts| Described {
            first: One {
                spec: Spec {
                    problem,
                    counts,
                    counts_agree: asked.counts_agree,
                    datatype: asked.datatype,
                    operator: asked.operator,
                    way: None,
                    deterministic: false,
                    quantized: None,
                },
                parts: Some([input, output]),
            },
            more: Vec::new(),
            deadline: self.default_deadline(),
            all_or_nothing: false,
        });
        Call { group: self, described }
    }

    /// Bytes of the blocks of ranks before this one. `None` where there can be no so many.
    fn before(&self, counts: &Result<Counts, CallError>, datatype: Datatype) -> Option<u64> {
        let own = self.rank().0 as usize;
        let elements = match counts.as_ref().ok()? {
            Counts::Equal(count) => count.checked_mul(own as u64)?,
            Counts::PerRank(list) | Counts::PerPair(list) => {
                let mut before = list.iter().take(own);
                before.try_fold(0, |sum: u64, count| sum.checked_add(*count))?
            }
        };
        elements.checked_mul(datatype.size() as u64)
    }

    fn at_root(&self, root: Rank, part: Part) -> Part {
        if root == self.rank() { part } else { part.nothing() }
    }

    /// The sizes that the root knows, or only this rank's own.
    fn own_or_all(&self, counts: Option<&[u64]>, own: u64, datatype: Datatype) -> Result<Counts, CallError> {
        match counts {
            Some(counts) => Ok(Counts::PerRank(counts.to_vec())),
            None => {
                let mut counts = vec![0; self.size() as usize];
                counts[self.rank().0 as usize] = elements(own, datatype)?;
                Ok(Counts::PerRank(counts))
            }
        }
    }
}

fn elements(bytes: u64, datatype: Datatype) -> Result<u64, CallError> {
    let size = datatype.size() as u64;
    match bytes.is_multiple_of(size) {
        true => Ok(bytes / size),
        false => Err(CallError::Uneven { bytes, datatype }),
    }
}
