//! One rank of a group: the call under way, those that wait behind it, and what it did when one failed.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use weft_fabric::Clock;
use weft_fabric::kernels::HostKernels;
use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::Buffer;
use weft_plan::{Rank, Time};
use weft_protocol::Progress;
use weft_protocol::group::{
    Board as _, CallRecord, CompileError, Exchange as _, Execution, Status, Task, Trouble, Turn, View, Witness,
};

use super::call::Described;
use super::choice::{Reach, Verified};
use super::exchange::GroupExchange;
use super::failure::CollectiveFailed;
use super::prepare::{CallError, Prepared, Spec};
use crate::agent::Agent;
use crate::ending::Ending;
use crate::error::Error;
use crate::memory::Memory;

/// So many calls are kept ready to be made again.
const PREPARED_MAX: usize = 64;
/// Turns in which nothing moves before a thread looks at the clock, where there are cores for all.
const SPINS: u32 = 4000;
/// Turns between two looks at the outside world while spinning.
const SPINS_PER_POLL: u32 = 256;
/// How long a thread keeps its core while it looks, where there are cores for all. It is longer than the kernel lets others run: a rank that
/// gave its core away whenever the one that it waits for has lost its own would be gone when that one is back, and so on in turn.
const SPINNING: Time = Time::from_ms(5);
/// How long a thread looks where there are not, letting others run in between, before it sleeps.
const YIELDING: Time = Time::from_us(300);
/// How long it sleeps at most before it looks at the clock and at its peers' lives.
const REST: Duration = Duration::from_millis(1);
/// How long answers are waited for when a call has failed.
const ANSWERS: Time = Time::from_ms(100);
/// How often they are asked meanwhile.
const ASK_AGAIN: Time = Time::from_ms(10);

#[derive(Debug)]
pub(super) struct State {
    pub(super) rank: Rank,
    pub(super) ranks: u32,
    pub(super) grid: Grid,
    clock: Clock,
    agent: Agent,
    pub(super) exchange: GroupExchange,
    execution: Execution,
    /// The latest first.
    prepared: Vec<Arc<Prepared>>,
    verified: Verified,
    scratch: Memory,
    /// The number of the next call.
    number: u64,
    current: Option<Current>,
    queue: VecDeque<Queued>,
    pub(super) failed: Option<Error>,
    patience: Patience,
}

#[derive(Debug)]
struct Current {
    /// With its buffers, which are registered until it has ended.
    call: Described,
    /// By when it ends: known once it has waited for so long that reading the clock does not matter.
    deadline: Option<Time>,
    outcome: Option<Arc<Ending<()>>>,
}

/// A call that waits for those before it.
#[derive(Debug)]
struct Queued {
    call: Described,
    outcome: Arc<Ending<()>>,
    /// Counted from when it was started.
    deadline: Time,
}

/// How long to look before letting others run, and how long to do that before sleeping.
#[derive(Debug)]
struct Patience {
    spins_max: u32,
    spins: u32,
    looking_since: Option<Time>,
    /// Everything has been polled, and then been looked at in vain.
    looked: bool,
}

impl State {
    pub(super) fn new(
        agent: Agent,
        exchange: GroupExchange,
        ranks: u32,
        grid: Grid,
        ranks_here: usize,
    ) -> Result<State, Error> {
        let cores = weft_fabric::cpu::cores_of_all();
        Ok(State {
            rank: exchange.rank(),
            ranks,
            grid,
            clock: agent.clock(),
            scratch: agent.allocate(4096)?,
            agent,
            exchange,
            execution: Execution::default(),
            prepared: Vec::new(),
            verified: Verified::default(),
            number: 0,
            current: None,
            queue: VecDeque::new(),
            failed: None,
            patience: Patience {
                // Where ranks share cores, the one that is waited for needs the core.
                spins_max: if ranks_here > cores { 0 } else { SPINS },
                spins: 0,
                looking_since: None,
                looked: false,
            },
        })
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none() && self.queue.is_empty()
    }

    /// The number of the next call.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Queues a call.
    pub(super) fn enqueue(&mut self, call: Described, outcome: Arc<Ending<()>>) {
        let deadline = self.clock.now().saturating_add(call.deadline);
        self.queue.push_back(Queued {
            call,
            outcome,
            deadline,
        });
    }

    /// Runs a call from beginning to end. There must be none under way.
    pub(super) fn run(&mut self, call: Described) -> Result<(), Error> {
        self.begin(call, None)?;
        loop {
            if let Some(outcome) = self.turn() {
                return outcome;
            }
        }
    }

    /// Takes the calls under way a step further: looks, and if there is nothing to see, waits a little.
    pub(super) fn advance(&mut self) {
        if self.current.is_none() {
            let Some(Queued {
                call,
                outcome,
                deadline,
            }) = self.queue.pop_front()
            else {
                return;
            };
            if let Err(error) = self.begin(call, Some(outcome.clone())) {
                outcome.end_and_wake(Err(error));
                return;
            }
            if let Some(current) = &mut self.current {
                current.deadline = Some(deadline);
            }
        }
        let outcome = self.current.as_ref().and_then(|current| current.outcome.clone());
        if let Some(result) = self.turn()
            && let Some(outcome) = outcome
        {
            outcome.end_and_wake(result);
        }
    }

    fn begin(&mut self, mut call: Described, outcome: Option<Arc<Ending<()>>>) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let prepared = self.prepare(&call)?;
        check(&prepared, &call)?;
        let far = self.exchange.is_far();
        call.parts_mut().try_for_each(|part| part.lend(&self.agent, far))?;
        let needed = scratch_bytes(&prepared).ok_or(CallError::Compile(CompileError::TooLarge))?;
        if self.scratch.len() < needed as u64 {
            self.scratch = self.agent.allocate(needed)?;
            self.scratch.lent()?;
        }
        let views = views(&prepared, &call, &self.scratch);
        let mut record = prepared.record;
        if !prepared.is_pairwise() {
            record.number = self.number;
            self.number += 1;
        }
        let task = Task {
            compiled: prepared.compiled.clone(),
            combiners: prepared.combiners.clone(),
            ranks: self.ranks,
            record,
        };
        self.patience.reset();
        if let Err(trouble) = self.execution.begin(task, views, &mut self.exchange) {
            return Err(self.fail(&record, Some(&trouble)));
        }
        self.current = Some(Current {
            call,
            deadline: None,
            outcome,
        });
        Ok(())
    }

    /// What a call like this would run by.
    pub(super) fn algorithms(&self, call: &Described) -> Result<Vec<Algorithm>, CallError> {
        let reach = self.reach();
        call.all().map(|one| one.spec.algorithm(self.grid, reach)).collect()
    }

    fn reach(&self) -> Reach {
        Reach {
            channels: self.exchange.channels(),
            far: self.exchange.is_far(),
        }
    }

    fn prepare(&mut self, call: &Described) -> Result<Arc<Prepared>, CallError> {
        let same = |prepared: &Arc<Prepared>| prepared.specs.iter().eq(call.all().map(|one| &one.spec));
        if let Some(at) = self.prepared.iter().position(same) {
            // What is called again and again stays in front.
            self.prepared[..=at].rotate_right(1);
            return Ok(self.prepared[0].clone());
        }
        let reach = self.reach();
        let specs: Vec<Spec> = call.all().map(|one| one.spec.clone()).collect();
        let prepared = Arc::new(Prepared::new(&specs, self.rank, self.grid, reach, &mut self.verified)?);
        self.prepared.truncate(PREPARED_MAX - 1);
        self.prepared.insert(0, prepared.clone());
        Ok(prepared)
    }

    /// One look at the call under way, and where nothing moves, one step of waiting.
    fn turn(&mut self) -> Option<Result<(), Error>> {
        self.current.as_ref()?;
        let trouble = match self.look() {
            Ok(Turn::Ended) => {
                self.execution.release();
                self.current = None;
                return Some(Ok(()));
            }
            Ok(Turn::Moved) => {
                self.patience.reset();
                return None;
            }
            Ok(Turn::Waiting) => match self.wait() {
                Ok(true) => return None,
                Ok(false) => None,
                // Its last words may have come just before.
                Err(trouble @ Trouble::Lost { .. }) => match self.last_look() {
                    Some(outcome) => return outcome,
                    None => Some(trouble),
                },
                Err(trouble) => Some(trouble),
            },
            Err(trouble) => Some(trouble),
        };
        let record = self.execution.record().copied().unwrap_or(CallRecord::new(0, 0, ""));
        let error = self.fail(&record, trouble.as_ref());
        self.current = None;
        Some(Err(error))
    }

    /// Does what can be done now. A function of the caller's that panics is a failure like others: the other ranks hear of it, and nothing
    /// touches the buffers any more.
    fn look(&mut self) -> Result<Turn, Trouble> {
        let turn = AssertUnwindSafe(|| self.execution.turn(&mut self.exchange, &HostKernels));
        catch_unwind(turn).unwrap_or(Err(Trouble::Panicked))
    }

    /// Looks once more at what a rank that is gone may have left. `Some`: there was something, and this came of it.
    fn last_look(&mut self) -> Option<Option<Result<(), Error>>> {
        self.exchange.poll(self.clock.now()).ok()?;
        match self.look() {
            Ok(Turn::Ended) => {
                self.execution.release();
                self.current = None;
                Some(Some(Ok(())))
            }
            Ok(Turn::Moved) => Some(None),
            Ok(Turn::Waiting) | Err(_) => None,
        }
    }

    /// Waits a little. `false`: the deadline has passed.
    fn wait(&mut self) -> Result<bool, Trouble> {
        let far = self.exchange.is_far();
        self.patience.spins += 1;
        if !far && self.patience.spins < self.patience.spins_max {
            if self.patience.spins.is_multiple_of(SPINS_PER_POLL) {
                self.exchange.poll(Time::ZERO)?;
            }
            std::hint::spin_loop();
            return Ok(true);
        }
        let now = self.clock.now();
        let Some(current) = &mut self.current else {
            return Ok(false);
        };
        let allowed = current.call.deadline;
        let deadline = *current.deadline.get_or_insert(now.saturating_add(allowed));
        // A call that is late behind another one is late because of that one.
        let queued = self.queue.iter().map(|queued| queued.deadline);
        let deadline = queued.fold(deadline, Time::min);
        if now >= deadline {
            return Ok(false);
        }
        let looked = std::mem::take(&mut self.patience.looked);
        if !looked && self.exchange.poll(now)? == Progress::Busy {
            self.patience.reset();
            return Ok(true);
        }
        let since = *self.patience.looking_since.get_or_insert(now);
        let (waited, alone) = (now.saturating_sub(since), self.patience.spins_max > 0);
        if waited < if alone { SPINNING } else { YIELDING } {
            match (alone, far) {
                (true, _) => std::hint::spin_loop(),
                (false, true) => weft_fabric::cpu::look_again(),
                (false, false) => std::thread::yield_now(),
            }
            return Ok(true);
        }
        // What the poll has taken in is looked at before sleeping: no news of it will come.
        if !looked {
            self.patience.looked = true;
            return Ok(true);
        }
        // It takes long: the others may want to know what for.
        self.exchange.publish(self.execution.waiting());
        self.exchange.check_lost(|rank| self.execution.awaits(rank))?;
        let left = Duration::from(deadline.saturating_sub(now));
        self.exchange.rest(now, REST.min(left));
        Ok(true)
    }

    /// Ends the call under way, tells everybody, and makes sure that nothing touches its buffers any more.
    fn fail(&mut self, record: &CallRecord, trouble: Option<&Trouble>) -> Error {
        let waiting = self.execution.waiting();
        self.exchange.publish(waiting);
        let told = matches!(trouble, Some(Trouble::Aborted(_)));
        let others = self.inquire(record, told);
        let witness = Witness {
            rank: self.rank,
            call: *record,
            waiting,
            others: &others,
        };
        let ours = match trouble {
            Some(trouble) => witness.after(trouble),
            None => witness.after_deadline(),
        };
        if !told {
            self.exchange.abort(&ours);
        }
        // Somebody may have been first.
        let abort = match self.exchange.poll(self.clock.now()) {
            Err(Trouble::Aborted(abort)) => *abort,
            _ => ours,
        };
        while self.execution.abandon(&mut self.exchange) == Progress::Busy {
            std::thread::yield_now();
        }
        let others = others.into_iter().enumerate();
        let others = others.filter_map(|(rank, status)| Some((Rank(rank as u32), status?)));
        let error = Error::from(CollectiveFailed {
            rank: self.rank,
            called: Some(*record),
            abort,
            others: others.collect(),
        });
        self.failed = Some(error.clone());
        while let Some(queued) = self.queue.pop_front() {
            queued.outcome.end_and_wake(Err(error.clone()));
        }
        error
    }

    /// What the others have called. Those that are not to be seen are asked, and those that are behind are given a moment to come
    /// as far as this rank.
    fn inquire(&mut self, record: &CallRecord, told: bool) -> Vec<Option<Status>> {
        let until = self.clock.now().saturating_add(ANSWERS);
        loop {
            self.exchange.ask_all();
            let asked = self.clock.now();
            while self.clock.now() < asked.saturating_add(ASK_AGAIN) {
                let status = |rank: u32| self.exchange.status(Rank(rank));
                let statuses: Vec<Option<Status>> = (0..self.ranks).map(status).collect();
                let here =
                    |status: &&Status| record.number == CallRecord::PAIRWISE || status.call.number >= record.number;
                let known = statuses
                    .iter()
                    .enumerate()
                    .filter(|(rank, _)| *rank != self.rank.0 as usize);
                let known = known.filter_map(|(_, status)| status.as_ref()).filter(here).count();
                // Whoever is told has nothing to find out.
                if told || known + 1 >= self.ranks as usize || self.clock.now() >= until {
                    return statuses;
                }
                let _ = self.exchange.poll(asked);
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

impl Patience {
    fn reset(&mut self) {
        self.spins = 0;
        self.looking_since = None;
        self.looked = false;
    }
}

/// How much scratch to have for a call and for somewhat larger ones. `None`: more than there are addresses.
fn scratch_bytes(prepared: &Prepared) -> Option<usize> {
    let mut parts = prepared.bytes.iter().map(|bytes| bytes[2].checked_next_multiple_of(64));
    let sum = parts.try_fold(0, |sum: u64, part| sum.checked_add(part?))?;
    usize::try_from(sum).ok()?.checked_next_power_of_two()
}

/// Whether the buffers of a call are what it needs.
fn check(prepared: &Prepared, call: &Described) -> Result<(), Error> {
    for (one, needed) in call.all().zip(&prepared.bytes) {
        for (buffer, (given, needed)) in [Buffer::Input, Buffer::Output]
            .into_iter()
            .zip(one.parts.iter().zip(needed))
        {
            if given.len != *needed {
                return Err(Error::Call(CallError::WrongBytes {
                    collective: one.spec.problem.collective,
                    buffer,
                    needed: *needed,
                    given: given.len,
                }));
            }
        }
    }
    Ok(())
}

/// The buffers of a call in the order in which its execution wants them: input, output and scratch of each part.
fn views<'a>(prepared: &'a Prepared, call: &'a Described, scratch: &'a Memory) -> impl Iterator<Item = View> + 'a {
    let mut scratch_at = 0;
    call.all().zip(&prepared.bytes).flat_map(move |(one, needed)| {
        let [input, output] = &one.parts;
        let start = scratch_at;
        scratch_at += needed[2].next_multiple_of(64);
        [
            input.view(),
            output.view(),
            scratch.part(start..start + needed[2]).view(),
        ]
    })
}
