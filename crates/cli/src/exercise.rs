//! A collective with its buffers, ready to be done over and over: what a rank of `weft bench collective` measures.
//!
//! Every element is a small number that follows from its rank and its place, so that whatever a collective does to it can be
//! written down, and every datatype holds the result exactly.

use weft::quantized::{Block, Quantization};
use weft::{
    Agent, Call, Candidate, Communicator, Datatype, Error, Memory, Part, QuantizedOptions, Rank, Reduction, Schedule,
    Way,
};

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{self, Allocation};
use crate::ranks::Exercise;

/// Values repeat after so many elements.
const PERIOD: u64 = 7;
/// Where there is a root, it is this rank.
pub const ROOT: Rank = Rank(0);
const PAGE_BYTES: u64 = 4096;
/// How much of a buffer is written or looked at at a time: whole periods of every datatype.
const CHUNK_PERIODS: u64 = 4096;

/// Which buffers a collective has, and of how many blocks each is. A block is an equal share of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    Barrier,
}

impl Kind {
    pub const NAMES: [&str; 9] = [
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "barrier",
    ];

    pub fn named(name: &str) -> Option<Kind> {
        let all = [
            Kind::AllReduce,
            Kind::AllGather,
            Kind::ReduceScatter,
            Kind::AllToAll,
            Kind::Broadcast,
            Kind::Reduce,
            Kind::Gather,
            Kind::Scatter,
            Kind::Barrier,
        ];
        let at = Kind::NAMES.iter().position(|known| *known == name)?;
        Some(all[at])
    }

    /// Whether it can be done in place here. (A broadcast always is.)
    pub fn has_in_place(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter)
    }
}

/// Bytes of a memory, from one place on.
#[derive(Debug)]
struct Stretch {
    memory: Memory,
    at: u64,
    len: u64,
}

impl Stretch {
    fn part(&self) -> Part {
        self.memory.part(self.at..self.at + self.len)
    }
}

/// A collective ready to be done.
#[derive(Debug)]
pub struct Ready {
    group: Communicator,
    kind: Kind,
    datatype: Datatype,
    algorithm: Option<Candidate>,
    schedule: Option<Schedule>,
    deterministic: bool,
    quantization: Option<Quantization>,
    /// What is written to the input before every call.
    fresh: Option<Vec<u8>>,
    input: Stretch,
    output: Stretch,
    /// Elements of a rank's share, and of all.
    share: u64,
    whole: u64,
}

impl Ready {
    /// Allocates and fills the buffers. Sizes that do not divide are rounded down, as is usual when collectives are measured.
    pub fn new(group: &Communicator, exercise: &Exercise) -> Result<Ready, Complaint> {
        let usage = |what: String| Complaint::new(Exit::Usage, what);
        let kind = Kind::named(&exercise.collective)
            .ok_or_else(|| usage(format!("There is no collective `{}` here.", exercise.collective)))?;
        let datatype: Datatype = exercise
            .datatype
            .parse()
            .map_err(|_| usage(format!("There is no datatype `{}`.", exercise.datatype)))?;
        let algorithm = match &exercise.algorithm {
            None => None,
            Some(name) => {
                let algorithm = name
                    .parse()
                    .map_err(|_| usage(format!("There is no algorithm `{name}`.")))?;
                Some(algorithm)
            }
        };
        let schedule = exercise.schedule.as_deref().map(Schedule::from_json).transpose();
        let schedule = schedule.or_complain(Exit::Usage, || "The schedule is not to be run.".to_string())?;
        let code = exercise.quantized.as_deref().map(str::parse).transpose();
        let code = code.or_complain(Exit::Usage, || "There are no such codes.".to_string())?;
        let quantization = code.map(|code| Quantization {
            code,
            block: Block::Of128,
        });
        if quantization.is_some() && (kind, datatype) != (Kind::AllReduce, Datatype::F32) {
            return Err(usage("Only an all-reduce of f32 is quantised.".to_string()));
        }
        let ranks = u64::from(group.size());
        let share = exercise.bytes / datatype.size() as u64 / ranks;
        let whole = share * ranks;
        let (inputs, outputs) = match kind {
            Kind::AllReduce | Kind::Reduce | Kind::AllToAll => (whole, whole),
            Kind::AllGather | Kind::Gather => (share, whole),
            Kind::ReduceScatter | Kind::Scatter => (whole, share),
            Kind::Broadcast => (0, whole),
            Kind::Barrier => (0, 0),
        };
        let size = datatype.size() as u64;
        let own = u64::from(group.rank().0);
        let agent = group.agent();
        let allocate = |elements: u64| acquire(agent, elements * size, exercise.allocation);
        let (input, output) = match exercise.in_place && kind.has_in_place() {
            true => {
                let both = allocate(whole)?;
                // The smaller buffer is this rank's share of the larger one.
                let stretch = |elements: u64| Stretch {
                    memory: both.memory.clone(),
                    at: both.at + if elements == share { own * share * size } else { 0 },
                    len: elements * size,
                };
                (stretch(inputs), stretch(outputs))
            }
            false => (allocate(inputs)?, allocate(outputs)?),
        };
        let mut ready = Ready {
            group: group.clone(),
            kind,
            datatype,
            algorithm,
            schedule,
            deterministic: exercise.deterministic,
            quantization,
            fresh: None,
            input,
            output,
            share,
            whole,
        };
        ready.fill(inputs);
        if exercise.fresh {
            let mut bytes = vec![0; ready.input.len as usize];
            ready.input.memory.read(ready.input.at, &mut bytes);
            ready.fresh = Some(bytes);
        }
        Ok(ready)
    }

    /// Does it once.
    pub fn run(&self) -> Result<(), Error> {
        if let Some(bytes) = &self.fresh {
            self.input.memory.write(self.input.at, bytes);
        }
        match self.quantization {
            Some(quantization) => {
                let options = QuantizedOptions::new(quantization);
                let (input, output) = (self.input.part(), self.output.part());
                self.group.all_reduce_quantized(input, output, options)
            }
            None => self.call().run(),
        }
    }

    /// What it runs by.
    pub fn algorithm(&self) -> Result<String, Complaint> {
        if let Some(quantization) = self.quantization {
            return Ok(format!("quantised as {:?}", quantization.code));
        }
        let ways = self.call().ways();
        let ways = ways.map_err(|error| ends::explain(&error, "There is no such call."))?;
        Ok(match ways.first() {
            Some(Way::Schedule(schedule)) => schedule.name().to_string(),
            Some(Way::Algorithm(candidate)) => candidate.to_string(),
            None => String::new(),
        })
    }

    fn call(&self) -> Call<'_> {
        let Ready { group, datatype, .. } = self;
        let (input, output) = (self.input.part(), self.output.part());
        let sum = Reduction::Sum;
        let call = match self.kind {
            Kind::AllReduce => group.all_reduce(input, output, *datatype, sum),
            Kind::AllGather => group.all_gather(input, output, *datatype),
            Kind::ReduceScatter => group.reduce_scatter(input, output, *datatype, sum),
            Kind::AllToAll => group.all_to_all(input, output, *datatype),
            Kind::Broadcast => group.broadcast(output, ROOT, *datatype),
            Kind::Reduce => group.reduce(input, output, ROOT, *datatype, sum),
            Kind::Gather => group.gather(input, output, ROOT, *datatype),
            Kind::Scatter => group.scatter(input, output, ROOT, *datatype),
            Kind::Barrier => group.barrier(),
        };
        let call = match self.deterministic {
            true => call.deterministic(),
            false => call,
        };
        match (&self.schedule, self.algorithm) {
            (Some(schedule), _) => call.schedule(schedule),
            (None, Some(algorithm)) => call.algorithm(algorithm),
            (None, None) => call,
        }
    }

    /// Whether the output is what the collective must have made of the inputs. To be asked after the first call.
    pub fn is_correct(&self) -> bool {
        let (own, ranks) = (u64::from(self.group.rank().0), u64::from(self.group.size()));
        let of = |rank: u64| Values::of(self.datatype, rank, ranks);
        let share = self.share;
        // Parts of the output: where each begins and ends, what is in it, and from which element of that on.
        let parts: Vec<(u64, u64, Values, u64)> = match self.kind {
            Kind::AllReduce => vec![(0, self.whole, Values::sum(self.datatype, ranks), 0)],
            Kind::ReduceScatter => vec![(0, share, Values::sum(self.datatype, ranks), own * share)],
            Kind::AllGather => (0..ranks).map(|r| (r * share, (r + 1) * share, of(r), 0)).collect(),
            Kind::AllToAll => (0..ranks)
                .map(|r| (r * share, (r + 1) * share, of(r), own * share))
                .collect(),
            Kind::Broadcast => vec![(0, self.whole, of(ROOT.0.into()), 0)],
            Kind::Scatter => vec![(0, share, of(ROOT.0.into()), own * share)],
            Kind::Reduce | Kind::Gather if self.group.rank() != ROOT => Vec::new(),
            Kind::Reduce => vec![(0, self.whole, Values::sum(self.datatype, ranks), 0)],
            Kind::Gather => (0..ranks).map(|r| (r * share, (r + 1) * share, of(r), 0)).collect(),
            Kind::Barrier => Vec::new(),
        };
        parts.iter().all(|(start, end, values, from)| {
            let mut found = Vec::new();
            values.chunks(*from, end - start).all(|(at, expected)| {
                found.resize(expected.len(), 0);
                let at = self.output.at + (start + at) * self.datatype.size() as u64;
                self.output.memory.read(at, &mut found);
                match self.quantization {
                    Some(quantization) => is_near(&found, &expected, quantization, ranks),
                    None => found == expected,
                }
            })
        })
    }

    fn fill(&self, inputs: u64) {
        let (own, ranks) = (u64::from(self.group.rank().0), u64::from(self.group.size()));
        let values = Values::of(self.datatype, own, ranks);
        if self.kind == Kind::Broadcast {
            if self.group.rank() == ROOT {
                values.write(self.whole, &self.output);
            }
            return;
        }
        values.write(inputs, &self.input);
    }
}

/// Whether sums are as near to what they should be as quantisation lets them be.
fn is_near(found: &[u8], expected: &[u8], quantization: Quantization, ranks: u64) -> bool {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        let each = bytes.chunks_exact(4);
        each.map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    // No block of any rank holds a number that is greater than the last of a period.
    let magnitudes: u64 = (0..ranks).map(|rank| rank + PERIOD).sum();
    let bound = quantization.reduced_error_max(ranks as u32, magnitudes as f32);
    let pairs = floats(found).into_iter().zip(floats(expected));
    pairs
        .into_iter()
        .all(|(found, expected)| (found - expected).abs() <= bound)
}

/// Memory for a buffer, which begins with a page, as those of others who measure collectives do.
fn acquire(agent: &Agent, bytes: u64, allocation: Allocation) -> Result<Stretch, Complaint> {
    let spare = match allocation {
        Allocation::Mapped | Allocation::Gpu => 0,
        Allocation::Foreign => PAGE_BYTES,
    };
    let memory = ends::acquire(agent, bytes.max(1) + spare, allocation)?;
    let at = memory.as_ptr().align_offset(PAGE_BYTES as usize) as u64;
    Ok(Stretch { memory, at, len: bytes })
}

/// What stands in a buffer: a period of elements, over and over.
#[derive(Debug)]
struct Values {
    /// Two periods, so that one that begins anywhere is a slice of them.
    twice: Vec<u8>,
    size: u64,
}

impl Values {
    /// A rank's input.
    fn of(datatype: Datatype, rank: u64, ranks: u64) -> Values {
        Values::new(datatype, ranks, |at| term(datatype, rank, at))
    }

    /// The sum of everybody's.
    fn sum(datatype: Datatype, ranks: u64) -> Values {
        Values::new(datatype, ranks, |at| {
            (0..ranks).map(|rank| term(datatype, rank, at)).sum()
        })
    }

    fn new(datatype: Datatype, ranks: u64, value: impl Fn(u64) -> u64) -> Values {
        let numbers = numbers(datatype, ranks * (ranks + PERIOD));
        let twice = (0..2 * PERIOD).flat_map(|at| numbers[value(at % PERIOD) as usize].iter().copied());
        Values {
            twice: twice.collect(),
            size: datatype.size() as u64,
        }
    }

    /// `count` elements from element `from` on, in chunks: which element each begins with, counted from zero, and its bytes.
    fn chunks(&self, from: u64, count: u64) -> impl Iterator<Item = (u64, Vec<u8>)> + use<> {
        let (size, per_chunk) = (self.size, CHUNK_PERIODS * PERIOD);
        let first = (from % PERIOD * size) as usize;
        let period = &self.twice[first..first + (PERIOD * size) as usize];
        let chunk = period.repeat(CHUNK_PERIODS as usize);
        (0..count.div_ceil(per_chunk)).map(move |nth| {
            let elements = per_chunk.min(count - nth * per_chunk);
            (nth * per_chunk, chunk[..(elements * size) as usize].to_vec())
        })
    }

    fn write(&self, count: u64, to: &Stretch) {
        for (at, bytes) in self.chunks(0, count) {
            to.memory.write(to.at + at * self.size, &bytes);
        }
    }
}

/// The number that a rank contributes. Those of one byte stay so small that no sum of them is rounded.
fn term(datatype: Datatype, rank: u64, at: u64) -> u64 {
    match datatype.size() {
        1 => u64::from((at + 3 * rank).is_multiple_of(PERIOD)),
        _ => rank + 1 + at % PERIOD,
    }
}

/// The first numbers as elements.
fn numbers(datatype: Datatype, count: u64) -> Vec<Vec<u8>> {
    let one: &[u8] = match datatype {
        Datatype::F64 => &1f64.to_ne_bytes(),
        Datatype::F32 => &1f32.to_ne_bytes(),
        Datatype::F16 => &0x3c00u16.to_ne_bytes(),
        Datatype::Bf16 => &0x3f80u16.to_ne_bytes(),
        Datatype::Fp8E4m3 => &[0x38],
        Datatype::Fp8E5m2 => &[0x3c],
        Datatype::I8 | Datatype::U8 => &[1],
        Datatype::I16 | Datatype::U16 => &1u16.to_ne_bytes(),
        Datatype::I32 | Datatype::U32 => &1u32.to_ne_bytes(),
        Datatype::I64 | Datatype::U64 => &1u64.to_ne_bytes(),
    };
    let number = |count: usize| {
        let mut element = vec![0; one.len()];
        if count > 0 {
            let folded = datatype.fold(Reduction::Sum, &mut element, &vec![one; count]);
            folded.expect("elements of one size");
        }
        element
    };
    (0..=count as usize).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_inputs() {
        for datatype in Datatype::ALL {
            for ranks in [1, 2, 5, 8] {
                let inputs: Vec<Values> = (0..ranks).map(|rank| Values::of(datatype, rank, ranks)).collect();
                let inputs: Vec<&[u8]> = inputs.iter().map(|values| values.twice.as_slice()).collect();
                let mut sum = vec![0; inputs[0].len()];
                datatype.fold(Reduction::Sum, &mut sum, &inputs).unwrap();
                assert_eq!(sum, Values::sum(datatype, ranks).twice, "{datatype} of {ranks}");
            }
        }
    }

    #[test]
    fn chunks_go_on_where_the_last_ended() {
        let values = Values::of(Datatype::U16, 0, 2);
        let count = 2 * CHUNK_PERIODS * PERIOD + 5;
        let mut all = Vec::new();
        for (at, bytes) in values.chunks(3, count) {
            assert_eq!(all.len() as u64, at * 2);
            all.extend(bytes);
        }
        assert_eq!(all.len() as u64, count * 2);
        let element = |at: usize| u16::from_ne_bytes([all[2 * at], all[2 * at + 1]]);
        assert!((0..count as usize).all(|at| u64::from(element(at)) == 1 + (at as u64 + 3) % PERIOD));
    }
}
