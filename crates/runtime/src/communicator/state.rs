//! One rank of a group: the call under way, those that wait behind it, messages beside it, and what it did when one failed.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use weft_fabric::Clock;
use weft_fabric::kernels::HostKernels;
use weft_plan::{Rank, Time};
use weft_protocol::Progress;
use weft_protocol::group::{
    Abort, At, Board as _, CallRecord, Cause, Exchange as _, Execution, Failing, Failure, Kernels as _, Stuck, Trouble,
    Turn, View, Waiting,
};

use super::Part;
use super::call::Described;
use super::choice::Choice;
use super::conversation::Conversations;
use super::exchange::GroupExchange;
use super::failure::CollectiveFailed;
use super::inbox::{Inbox, Queued};
use super::prepare::{CallError, Prepared};
use super::schedule::Way;
use crate::agent::Agent;
use crate::ending::Ending;
use crate::error::Error;
use crate::interrupt;
use crate::memory::Memory;

/// So many calls are kept ready to be made again.
const PREPARED_MAX: usize = 64;
/// Looks at the lanes in one turn, where there are cores for all and looking is enough to see what has come: a look is shorter than the way
/// back to it.
const LOOKS: u32 = 32;
/// Looks in which nothing moves before a thread looks at the clock, where there are cores for all.
const SPINS: u32 = 4000;
/// Looks between two at the outside world while spinning.
const SPINS_PER_POLL: u32 = 256;
/// How long a thread keeps its core while it looks, where there are cores for all. It is longer than the kernel lets others run: a rank that
/// gave its core away whenever the one that it waits for has lost its own would be gone when that one is back, and so on in turn.
const SPINNING: Time = Time::from_ms(5);
/// How long a thread looks where there are not, letting others run in between, before it sleeps.
const YIELDING: Time = Time::from_us(300);
/// How long it sleeps at most before it looks at the clock and at its peers' lives.
const REST: Duration = Duration::from_millis(1);
/// How long to wait between two looks at what the others answer.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

#[derive(Debug)]
pub(super) struct State {
    pub(super) rank: Rank,
    pub(super) ranks: u32,
    choice: Choice,
    clock: Clock,
    agent: Agent,
    pub(super) exchange: GroupExchange,
    execution: Execution,
    /// The latest first.
    prepared: Vec<Prepared>,
    /// On their way to the exchange.
    buffers: Vec<View>,
    scratch: Memory,
    /// Where calls work whose outputs are written when they have ended well. `None` before the first.
    spare: Option<Memory>,
    /// The number of the next call.
    number: u64,
    /// How many calls have ended as they should.
    ended_well: u64,
    inbox: Arc<Inbox>,
    current: Option<Current>,
    queue: VecDeque<Queued>,
    conversations: Conversations,
    /// What others are told once the mutex is free.
    ended: Vec<Ended>,
    pub(super) failed: Option<Error>,
    patience: Patience,
}

/// A handle whose call has ended, and how.
pub(super) type Ended = (Arc<Ending<()>>, Result<(), Error>);

#[derive(Debug)]
struct Current {
    /// How long it may take.
    allowed: Time,
    /// By when it ends: known once it has waited for so long that reading the clock does not matter.
    deadline: Option<Time>,
    outcome: Option<Arc<Ending<()>>>,
    /// What is written when it has ended well: from where, and to where.
    held_back: Vec<[Part; 2]>,
}

/// How long to look before letting others run, and how long to do that before sleeping.
#[derive(Debug)]
struct Patience {
    looks: u32,
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
        choice: Choice,
        ranks_here: usize,
    ) -> Result<State, Error> {
        let cores = weft_fabric::cpu::cores_of_all();
        let rank = exchange.rank();
        // Where ranks share cores, the one that is waited for needs the core.
        let crowded = ranks_here > cores;
        Ok(State {
            rank,
            ranks,
            choice,
            clock: agent.shared()?.clock,
            scratch: agent.allocate(4096)?,
            agent,
            patience: Patience {
                looks: if crowded || exchange.is_far() { 1 } else { LOOKS },
                spins_max: if crowded { 0 } else { SPINS },
                spins: 0,
                looking_since: None,
                looked: false,
            },
            exchange,
            execution: Execution::default(),
            prepared: Vec::new(),
            buffers: Vec::new(),
            spare: None,
            number: 0,
            ended_well: 0,
            inbox: Arc::default(),
            current: None,
            queue: VecDeque::new(),
            conversations: Conversations::new(rank, ranks),
            ended: Vec::new(),
            failed: None,
        })
    }

    /// Where calls are left that this rank is to make.
    pub(super) fn inbox(&self) -> Arc<Inbox> {
        self.inbox.clone()
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.has_no_call() && self.conversations.is_empty()
    }

    /// Whether a call could begin at once.
    pub(super) fn has_no_call(&self) -> bool {
        self.current.is_none() && self.queue.is_empty() && self.inbox.is_empty()
    }

    /// The number of the next call.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// How many calls have ended well here. It is also the number of the first that has not.
    pub(super) fn ended_well(&self) -> u64 {
        self.ended_well
    }

    /// Whom to tell of which end, when the mutex is free.
    pub(super) fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// Runs a call to its end. There must be none under way. `Some`: somebody has to be told something first, or asked; the call is left to
    /// whoever takes it further, and its outcome goes to this handle.
    pub(super) fn run(&mut self, call: &mut Described) -> Result<Option<Arc<Ending<()>>>, Error> {
        self.begin(call, None, None)?;
        loop {
            if let Some(outcome) = self.turn() {
                return outcome.map(|()| None);
            }
            self.take_in();
            let asks = self.asks();
            match &mut self.current {
                // What was taken in has failed, and the call with it.
                None => return self.failed.clone().map_or(Ok(None), Err),
                Some(current) if asks || !self.ended.is_empty() => {
                    return Ok(Some(current.outcome.insert(Arc::default()).clone()));
                }
                Some(_) => {}
            }
        }
    }

    /// Whether the caller has waited so long that it has to be asked now and then whether it is wanted elsewhere. That is not done here, where
    /// it holds the group.
    fn asks(&self) -> bool {
        let since = self.patience.looking_since.filter(|_| interrupt::is_watched());
        since.is_some_and(|since| self.clock.now().saturating_sub(since) >= interrupt::ASK_EVERY.into())
    }

    /// Takes the calls under way a step further: looks, and if there is nothing to see, waits a little.
    pub(super) fn advance(&mut self) {
        self.take_in();
        if self.current.is_none()
            && let Some(queued) = self.queue.pop_front()
        {
            let Queued {
                mut call,
                outcome,
                deadline,
            } = queued;
            if let Err(error) = self.begin(&mut call, Some(deadline), Some(outcome.clone())) {
                self.ended.push((outcome, Err(error)));
                return;
            }
        }
        if self.current.is_none() && self.conversations.is_empty() {
            return;
        }
        let outcome = self.current.as_ref().and_then(|current| current.outcome.clone());
        if let Some(result) = self.turn()
            && let Some(outcome) = outcome
        {
            self.ended.push((outcome, result));
        }
    }

    /// Gives up whatever is under way, because nobody is left who could learn of its end. `Some`: the others have been told this.
    pub(super) fn withdraw(&mut self) -> Option<Abort> {
        self.take_in();
        if self.failed.is_some() || self.is_idle() {
            return None;
        }
        let called = self.execution.record().copied();
        let called = called.or(self.conversations.record()).unwrap_or(CallRecord::NONE);
        let abort = Abort {
            by: self.rank,
            blamed: self.rank,
            cause: Cause::Withdrew,
            step: self.execution.waiting().step,
            called,
            instead: None,
        };
        self.exchange.abort(&abort);
        self.abandon();
        Some(abort)
    }

    /// Gives up whatever is under way, because its caller is wanted elsewhere. The group is of no further use.
    pub(super) fn give_up(&mut self) {
        if let Some(abort) = self.withdraw() {
            let error = Error::from(CollectiveFailed {
                rank: self.rank,
                called: Some(abort.called),
                abort,
                others: Vec::new(),
            });
            self.end_all(&error);
        }
    }

    /// Gives up whatever is under way, because the agent is being closed, and takes on nothing more.
    pub(super) fn stop(&mut self) {
        self.withdraw();
        self.end_all(&Error::Stopped);
    }

    /// Nothing is under way any more, and nothing will be.
    fn end_all(&mut self, error: &Error) {
        self.failed = Some(error.clone());
        let current = self.current.take().and_then(|current| current.outcome);
        let queued = self.queue.drain(..).map(|queued| queued.outcome);
        let outcomes = current.into_iter().chain(queued).chain(self.conversations.drain());
        self.ended.extend(outcomes.map(|outcome| (outcome, Err(error.clone()))));
    }

    /// Takes in what was started meanwhile. Messages begin at once, calls in their turn.
    fn take_in(&mut self) {
        if self.inbox.is_empty() {
            return;
        }
        for queued in self.inbox.take() {
            match (queued.call.is_pairwise(), &self.failed) {
                (true, Some(error)) => self.ended.push((queued.outcome, Err(error.clone()))),
                (true, None) => self.begin_messages(queued),
                (false, _) => self.queue.push_back(queued),
            }
        }
    }

    fn begin_messages(&mut self, mut queued: Queued) {
        let far = self.exchange.is_far();
        let checked = queued.call.all().try_for_each(|one| one.spec.check_message());
        let lent = checked
            .map_err(Error::from)
            .and_then(|()| queued.call.lend(&self.agent, far));
        if let Err(error) = lent {
            return self.ended.push((queued.outcome, Err(error)));
        }
        self.patience.reset();
        if let Err(trouble) = self.conversations.begin(queued, &mut self.exchange) {
            let stuck = self.stuck_message(Some(trouble));
            let error = self.fail(*stuck);
            // The call under way has been given up as well.
            if let Some(outcome) = self.current.take().and_then(|current| current.outcome) {
                self.ended.push((outcome, Err(error)));
            }
        }
    }

    fn begin(
        &mut self,
        call: &mut Described,
        deadline: Option<Time>,
        outcome: Option<Arc<Ending<()>>>,
    ) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.prepare(call)?;
        let prepared = &self.prepared[0];
        prepared.check(call)?;
        let far = self.exchange.is_far();
        call.lend(&self.agent, far)?;
        if self.scratch.len() < prepared.scratch as u64 {
            let larger = self.agent.allocate(prepared.scratch)?;
            larger.lent()?;
            self.scratch = larger;
        }
        let held_back = match call.all_or_nothing {
            true => self.hold_back(call)?,
            false => Vec::new(),
        };
        let prepared = &self.prepared[0];
        // From here on nothing fails before the exchange has the buffers.
        let allowed = call.deadline;
        self.buffers.clear();
        call.take_parts(|part| self.buffers.push(part.into_view()));
        if prepared.scratch > 0 {
            self.buffers.push(Part::from(&self.scratch).into_view());
        }
        let number = self.number;
        self.number += 1;
        self.patience.reset();
        let begun = self
            .execution
            .begin(&prepared.task, number, &mut self.buffers, &mut self.exchange);
        // Whoever comes late may find all it needs, and the others gone.
        let told = begun.and_then(|()| self.exchange.check_told());
        if let Err(trouble) = told {
            return Err(self.fail(*self.stuck_latest(trouble)));
        }
        self.current = Some(Current {
            allowed,
            deadline,
            outcome,
            held_back,
        });
        Ok(())
    }

    /// Puts memory of this rank's own in the place of the outputs.
    fn hold_back(&mut self, call: &mut Described) -> Result<Vec<[Part; 2]>, Error> {
        const ALIGNED: u64 = 64;
        let outputs = call
            .all_mut()
            .filter_map(|one| one.parts.as_mut().map(|[_, output]| output));
        let mut outputs: Vec<&mut Part> = outputs.collect();
        let bytes: u64 = outputs.iter().map(|output| output.len.next_multiple_of(ALIGNED)).sum();
        let spare = match &self.spare {
            Some(spare) if spare.len() >= bytes => spare,
            _ => {
                let larger = self.agent.allocate((bytes.max(ALIGNED) as usize).next_power_of_two())?;
                larger.lent()?;
                self.spare.insert(larger)
            }
        };
        let mut at = 0;
        let held_back = outputs.iter_mut().map(|output| {
            let instead = spare.part(at..at + output.len);
            at += output.len.next_multiple_of(ALIGNED);
            [instead.clone(), std::mem::replace(*output, instead)]
        });
        Ok(held_back.collect())
    }

    /// What a call like this would run by.
    pub(super) fn ways(&mut self, call: &Described) -> Result<Vec<Way>, CallError> {
        call.all().map(|one| one.spec.runs_by(&mut self.choice)).collect()
    }

    /// Brings what was prepared for calls like this one to the front.
    fn prepare(&mut self, call: &Described) -> Result<(), CallError> {
        match self.prepared.iter().position(|prepared| prepared.is_for(call)) {
            Some(0) => {}
            Some(at) => self.prepared[..=at].rotate_right(1),
            None => {
                let specs = call.all().map(|one| one.spec.clone()).collect();
                let prepared = Prepared::new(specs, self.rank, &mut self.choice)?;
                self.prepared.truncate(PREPARED_MAX - 1);
                self.prepared.insert(0, prepared);
            }
        }
        Ok(())
    }

    /// One look at what is under way, and where nothing moves, one step of waiting. `Some`: the call under way has ended.
    fn turn(&mut self) -> Option<Result<(), Error>> {
        let stuck = match self.look() {
            Ok(Turn::Ended) => return Some(self.end_call()),
            Ok(Turn::Moved) => {
                self.patience.reset();
                return None;
            }
            Ok(Turn::Waiting) if self.inbox.is_closed() => {
                let waited_for = self.current.is_some();
                self.stop();
                return waited_for.then_some(Err(Error::Stopped));
            }
            Ok(Turn::Waiting) => match self.wait() {
                Ok(()) => return None,
                // Its last words may have come just before.
                Err(stuck) if matches!(stuck.trouble, Some(Trouble::Lost { .. })) => match self.last_look() {
                    Some(Turn::Ended) => return Some(self.end_call()),
                    Some(_) => return None,
                    None => stuck,
                },
                Err(stuck) => stuck,
            },
            Err(stuck) => stuck,
        };
        let error = self.fail(*stuck);
        self.current.take().map(|_| Err(error))
    }

    /// The call under way has done all that it had to. It has ended well unless others have given it up meanwhile.
    fn end_call(&mut self) -> Result<(), Error> {
        let number = self.execution.latest().number;
        let later = |trouble: &Trouble| matches!(trouble, Trouble::Aborted(abort) if !abort.is_of(number));
        if let Err(trouble) = self.exchange.check_told()
            && !later(&trouble)
        {
            let error = self.fail(*self.stuck_latest(trouble));
            self.current = None;
            return Err(error);
        }
        let held_back = self.current.take().map(|current| current.held_back);
        for [from, to] in held_back.iter().flatten() {
            HostKernels.copy(at(from), at(to), to.len);
        }
        self.ended_well += 1;
        Ok(())
    }

    /// Does what can be done now. A function of the caller's that panics is a failure like others: the other ranks hear of it, and nothing
    /// touches the buffers any more.
    fn look(&mut self) -> Result<Turn, Box<Stuck>> {
        let mut turn = Turn::Waiting;
        if self.current.is_some() {
            let once = AssertUnwindSafe(|| {
                self.execution
                    .turn(&mut self.exchange, &HostKernels, self.patience.looks)
            });
            let once = catch_unwind(once).unwrap_or(Err(Trouble::Panicked));
            turn = once.map_err(|trouble| self.stuck_call(Some(trouble)))?;
        }
        if turn == Turn::Ended || self.conversations.is_empty() {
            return Ok(turn);
        }
        let alone = self.current.is_none();
        match self.conversations.turn(&mut self.exchange, &mut self.ended, alone) {
            Ok(Progress::Idle) => Ok(turn),
            Ok(Progress::Busy) => Ok(Turn::Moved),
            Err(trouble) => Err(self.stuck_message(Some(trouble))),
        }
    }

    /// Looks once more at what a rank that is gone may have left. `Some`: there was something, and this came of it.
    fn last_look(&mut self) -> Option<Turn> {
        self.exchange.poll(self.clock.now()).ok()?;
        self.look().ok().filter(|turn| *turn != Turn::Waiting)
    }

    fn stuck_call(&self, trouble: Option<Trouble>) -> Box<Stuck> {
        Box::new(Stuck {
            record: self.execution.record().copied().unwrap_or(CallRecord::NONE),
            waiting: self.execution.waiting(),
            trouble,
        })
    }

    /// A trouble before or after the call was under way.
    fn stuck_latest(&self, trouble: Trouble) -> Box<Stuck> {
        Box::new(Stuck {
            record: *self.execution.latest(),
            waiting: NO_WAIT,
            trouble: Some(trouble),
        })
    }

    fn stuck_message(&self, trouble: Option<Trouble>) -> Box<Stuck> {
        Box::new(Stuck {
            record: self.conversations.record().unwrap_or(CallRecord::NONE),
            waiting: self.conversations.waiting(),
            trouble,
        })
    }

    /// A trouble that is not that of one message is that of the call, where there is one.
    fn stuck(&self, trouble: Trouble) -> Box<Stuck> {
        let call = match &trouble {
            Trouble::Lost { rank, .. } => self.execution.awaits(*rank),
            _ => self.current.is_some(),
        };
        match call {
            true => self.stuck_call(Some(trouble)),
            false => self.stuck_message(Some(trouble)),
        }
    }

    /// Waits a little.
    fn wait(&mut self) -> Result<(), Box<Stuck>> {
        let far = self.exchange.is_far();
        let before = self.patience.spins;
        // Messages beside a call are looked at once in a turn.
        self.patience.spins += if self.current.is_some() { self.patience.looks } else { 1 };
        if !far && self.patience.spins < self.patience.spins_max {
            if before / SPINS_PER_POLL < self.patience.spins / SPINS_PER_POLL {
                self.poll(Time::ZERO)?;
            }
            std::hint::spin_loop();
            return Ok(());
        }
        let now = self.clock.now();
        let deadline = self.check_deadlines(now)?;
        let looked = std::mem::take(&mut self.patience.looked);
        if !looked && self.poll(now)? == Progress::Busy {
            self.patience.reset();
            return Ok(());
        }
        let since = *self.patience.looking_since.get_or_insert(now);
        let (waited, alone) = (now.saturating_sub(since), self.patience.spins_max > 0);
        if waited < if alone { SPINNING } else { YIELDING } {
            match (alone, far) {
                (true, _) => std::hint::spin_loop(),
                (false, true) => weft_fabric::cpu::look_again(),
                (false, false) => std::thread::yield_now(),
            }
            return Ok(());
        }
        // What the poll has taken in is looked at before sleeping: no news of it will come.
        if !looked {
            self.patience.looked = true;
            return Ok(());
        }
        // It takes long: the others may want to know what for.
        match self.current {
            Some(_) => self.exchange.publish(self.execution.waiting()),
            None => self
                .conversations
                .announce(&mut self.exchange)
                .map_err(|it| self.stuck(it))?,
        }
        let awaited = |rank| self.execution.awaits(rank) || self.conversations.awaits(rank);
        self.exchange
            .check_lost(awaited)
            .map_err(|trouble| self.stuck(trouble))?;
        let left = Duration::from(deadline.saturating_sub(now));
        self.exchange.rest(now, REST.min(left));
        Ok(())
    }

    fn poll(&mut self, now: Time) -> Result<Progress, Box<Stuck>> {
        self.exchange.poll(now).map_err(|trouble| self.stuck(trouble))
    }

    /// The next deadline of all that is under way, unless one has passed.
    fn check_deadlines(&mut self, now: Time) -> Result<Time, Box<Stuck>> {
        let mut next = Time::MAX;
        if let Some(current) = &mut self.current {
            let allowed = current.allowed;
            let own = *current.deadline.get_or_insert(now.saturating_add(allowed));
            // A call that is late behind another one is late because of that one.
            let queued = self.queue.iter().map(|queued| queued.deadline);
            next = queued.fold(own, Time::min);
            if now >= next {
                return Err(self.stuck_call(None));
            }
        }
        match self.conversations.deadline() {
            Some(deadline) if now >= deadline => Err(self.stuck_message(None)),
            Some(deadline) => Ok(next.min(deadline)),
            None => Ok(next),
        }
    }

    /// Ends all that is under way, tells everybody, and makes sure that nothing touches its buffers any more.
    fn fail(&mut self, stuck: Stuck) -> Error {
        let (record, now) = (stuck.record, self.clock.now());
        let failing = Failing::new(&mut self.exchange, self.rank, self.ranks, stuck, now);
        let Failure { abort, others } = loop {
            let (history, now) = (self.execution.history(), self.clock.now());
            match failing.poll(&mut self.exchange, history, now) {
                Some(failure) => break failure,
                None => std::thread::sleep(LOOK_AGAIN),
            }
        };
        self.abandon();
        let others = others.into_iter().enumerate();
        let others = others.filter_map(|(rank, status)| Some((Rank(rank as u32), status?)));
        let error = Error::from(CollectiveFailed {
            rank: self.rank,
            called: Some(record),
            abort,
            others: others.collect(),
        });
        // How the call under way has ended is told by who took it here.
        let current = self.current.take();
        self.end_all(&error);
        self.current = current;
        error
    }

    fn abandon(&mut self) {
        while self.execution.abandon(&mut self.exchange) == Progress::Busy
            || self.conversations.abandon(&mut self.exchange) == Progress::Busy
        {
            std::thread::yield_now();
        }
    }
}

const NO_WAIT: Waiting = Waiting { step: 0, peer: None };

fn at(part: &Part) -> At<'_> {
    let (memory, offset) = part.bytes();
    At { memory, offset }
}

impl Patience {
    fn reset(&mut self) {
        self.spins = 0;
        self.looking_since = None;
        self.looked = false;
    }
}
