//! The thread that serves a ring: takes requests out, posts them, and tells what has ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weft_fabric::cuda::Layout;
use weft_fabric::cuda::ring::{DESCRIPTOR_BYTES, Descriptor, RingLayout};
use weft_fabric::{Clock, cpu};
use weft_plan::{Spans, Time};
use weft_protocol::proxy::{Failure, Job, Local, Proxy, Request, Work};

use super::{Far, State, Words};
use crate::agent::Agent;
use crate::atomic::AtomicOperation;
use crate::driver::Turns;
use crate::error::Error;
use crate::transfer::Transfer;

/// How often it looks at what is not in the ring: peers that are gone, words of failure, deadlines.
const LOOK_AROUND: Time = Time::from_us(100);
/// So many looks at the ring for nothing between two turns of the agent, of which each asks all its transports.
const LOOKS_A_TURN: u32 = 8;
/// What words of peers were last known to hold: so many are remembered.
const KNOWN_MAX: usize = 4096;
/// How long peers have to hear that this one has given up.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) struct Worker {
    agent: Agent,
    state: Arc<State>,
    peers: Vec<Option<Far>>,
    core: Proxy,
    clock: Clock,
    busy: Time,
    nap: Duration,
    under_way: Vec<Posted>,
    /// By rank and place. A signal is a store, which a compare-and-swap does in one round trip where the guess is right; of one who signals alone it always is.
    known: HashMap<(u32, u64), u64>,
    /// What the ring was last told.
    completed: u64,
}

/// A job that has been posted.
struct Posted {
    job: Job,
    handle: Handle,
}

enum Handle {
    Transfer(Transfer),
    Add(AtomicOperation),
    /// With what the word was thought to hold.
    Set(AtomicOperation, u64),
}

/// What has become of a job.
enum Step {
    UnderWay(Handle),
    Ended(u64),
}

impl Worker {
    pub(super) fn new(
        agent: Agent,
        state: Arc<State>,
        peers: Vec<Option<Far>>,
        core: Proxy,
        (busy, nap): (Duration, Duration),
    ) -> Worker {
        Worker {
            agent,
            state,
            peers,
            core,
            clock: Clock::start(),
            busy: busy.into(),
            nap,
            under_way: Vec::new(),
            known: HashMap::new(),
            completed: 0,
        }
    }

    pub(super) fn run(mut self) {
        let agent = self.agent.clone();
        let mut turns: Option<Turns<'_>> = None;
        let mut busy_until = self.clock.now();
        let mut look_around_at = self.clock.now();
        let mut looks = 0u32;
        while !self.state.stop.load(Ordering::Acquire) && self.core.failure().is_none() {
            let now = self.clock.now();
            let stirred = self.take_requests(now) | self.post() | self.look_at_posted();
            self.tell_ended();
            if now >= look_around_at {
                look_around_at = now.saturating_add(LOOK_AROUND);
                self.look_around(now);
                // Also where every look finds something: sessions and other peers have their time, too.
                if let Some(turns) = &turns {
                    turns.turn();
                }
            }
            if stirred || !self.under_way.is_empty() {
                busy_until = now.saturating_add(self.busy);
            }
            if now < busy_until {
                let turns = turns.get_or_insert_with(|| agent.take_turns());
                looks = if stirred { 0 } else { looks + 1 };
                if looks % LOOKS_A_TURN == 1 {
                    turns.turn();
                }
                if !stirred {
                    cpu::look_again();
                }
            } else {
                // The agent's own thread turns it again.
                turns = None;
                std::thread::sleep(self.nap);
            }
        }
        drop(turns);
        if let Some(failure) = self.core.failure() {
            self.give_up(failure);
        }
        self.settle();
    }

    fn take_requests(&mut self, now: Time) -> bool {
        let ring = &self.state.ring;
        let first = self.core.next_ticket();
        loop {
            let ticket = self.core.next_ticket();
            let at = RingLayout::descriptor(ticket);
            if ring.load(at) != ticket + 1 {
                return ticket > first;
            }
            let mut bytes = [0; DESCRIPTOR_BYTES];
            ring.read(at, &mut bytes);
            let asked = Descriptor::of_bytes(&bytes);
            let request = Request {
                act: asked.act,
                rank: asked.rank,
                peer: asked.peer,
                local: asked.local,
                to: asked.to,
                from: asked.from,
                bytes: asked.bytes,
                word: asked.word,
                value: asked.value,
            };
            if self.core.offer(ticket, &request, now).is_err() {
                return true;
            }
        }
    }

    /// Posts what may begin. What ends at once lets others begin.
    fn post(&mut self) -> bool {
        let mut any = false;
        while let Some(job) = self.core.begin() {
            any = true;
            let step = match &self.peers[job.peer as usize] {
                None => self.carry_out_here(&job),
                Some(_) => self.begin(&job),
            };
            self.took(job, step);
        }
        any
    }

    fn took(&mut self, job: Job, step: Result<Step, Error>) {
        match step {
            Ok(Step::Ended(value)) => self.core.ended(job.ticket, Ok(value)),
            Ok(Step::UnderWay(handle)) => self.under_way.push(Posted { job, handle }),
            Err(error) => self.broken(&job, error),
        }
    }

    fn begin(&mut self, job: &Job) -> Result<Step, Error> {
        let Some(Far { peer, heap }) = &self.peers[job.peer as usize] else {
            return self.carry_out_here(job);
        };
        let deadline = self.state.deadline;
        let handle = match job.work {
            Work::Write { bytes: 0, .. } | Work::Read { bytes: 0, .. } => return Ok(Step::Ended(0)),
            Work::Write { from, to, bytes } => {
                let (words, at) = self.place(job.ticket, from);
                let spans = (Spans::contiguous(at, bytes), Spans::contiguous(to, bytes));
                let write = peer.write(&words.memory, heap).spans(spans.0, spans.1);
                Handle::Transfer(write.deadline(deadline).checksum(false).post()?)
            }
            Work::Read { into, from, bytes } => {
                let (words, at) = self.place(job.ticket, into);
                let spans = (Spans::contiguous(at, bytes), Spans::contiguous(from, bytes));
                let read = peer.read(&words.memory, heap).spans(spans.0, spans.1);
                Handle::Transfer(read.deadline(deadline).checksum(false).post()?)
            }
            Work::Add { word, value } => Handle::Add(peer.fetch_add(heap, word, value).deadline(deadline).post()?),
            Work::Set { word, value } => {
                let guess = self.known.get(&(job.peer, word)).copied().unwrap_or(0);
                let swap = peer.compare_swap(heap, word, guess, value).deadline(deadline).post()?;
                Handle::Set(swap, guess)
            }
        };
        self.look_at(job, handle)
    }

    /// Whether something has ended; most of what goes over shared memory has when it has been posted.
    fn look_at(&mut self, job: &Job, handle: Handle) -> Result<Step, Error> {
        let outcome = match &handle {
            Handle::Transfer(transfer) => transfer.poll().map(|outcome| outcome.map(|_| 0)),
            Handle::Add(operation) | Handle::Set(operation, _) => operation.poll(),
        };
        let held = match outcome {
            None => return Ok(Step::UnderWay(handle)),
            Some(outcome) => outcome?,
        };
        if let (Handle::Set(_, guess), Work::Set { word, value }) = (&handle, job.work) {
            if self.known.len() >= KNOWN_MAX {
                self.known.clear();
            }
            if held != *guess {
                self.known.insert((job.peer, word), held);
                return self.begin(job);
            }
            self.known.insert((job.peer, word), value);
        }
        Ok(Step::Ended(held))
    }

    /// For ranks that are here; kernels reach them by themselves, but for additions.
    fn carry_out_here(&self, job: &Job) -> Result<Step, Error> {
        let nth = job.peer as usize - self.state.here.start;
        let heap = &self.state.heaps[nth];
        let copy = |(from, at): (&Words, u64), (to, into): (&Words, u64), bytes: u64| {
            let mut through = vec![0; bytes as usize];
            from.read(at, &mut through);
            to.write(into, &through);
        };
        let held = match job.work {
            Work::Write { from, to, bytes } => {
                copy(self.place(job.ticket, from), (heap, to), bytes);
                0
            }
            Work::Read { into, from, bytes } => {
                copy((heap, from), self.place(job.ticket, into), bytes);
                0
            }
            Work::Set { word, value } => {
                heap.store(word, value);
                0
            }
            Work::Add { word, value } => heap.memory.fetch_add(word, value)?,
        };
        Ok(Step::Ended(held))
    }

    /// Where bytes of a request are on this side.
    fn place(&self, ticket: u64, local: Local) -> (&Words, u64) {
        match local {
            Local::Inline => (&self.state.ring, RingLayout::inline(ticket)),
            Local::Stage => (&self.state.ring, RingLayout::stage(ticket)),
            Local::Heap { rank, at } => (&self.state.heaps[rank as usize - self.state.here.start], at),
        }
    }

    fn look_at_posted(&mut self) -> bool {
        let mut any = false;
        for Posted { job, handle } in std::mem::take(&mut self.under_way) {
            let step = self.look_at(&job, handle);
            any |= !matches!(step, Ok(Step::UnderWay(_)));
            self.took(job, step);
        }
        any
    }

    fn tell_ended(&mut self) {
        let ring = &self.state.ring;
        while let Some((ticket, value)) = self.core.take_finished() {
            let at = RingLayout::ended(ticket);
            ring.store(at + 8, value);
            ring.store(at, ticket + 1);
        }
        let completed = self.core.completed();
        if completed != self.completed {
            self.completed = completed;
            ring.store(RingLayout::COMPLETED_AT, completed);
        }
    }

    /// What nobody puts into the ring.
    fn look_around(&mut self, now: Time) {
        for (rank, far) in self.peers.iter().enumerate() {
            if far.as_ref().is_some_and(|far| !far.peer.is_connected()) {
                let peer = rank as u32;
                self.core.fail(Failure::Lost { peer });
            }
        }
        if let Some(told) = (0..self.state.heaps.len()).find_map(|nth| self.state.told(nth)) {
            self.core.fail(told);
        }
        if self.state.abort.load(Ordering::Acquire) {
            self.core.fail(Failure::Aborted);
        }
        self.core.expire(now);
    }

    fn broken(&mut self, job: &Job, error: Error) {
        let peer = job.peer;
        let far = self.peers[peer as usize].as_ref();
        let failure = match error.failure() {
            _ if far.is_some_and(|far| !far.peer.is_connected()) => Failure::Lost { peer },
            Some(weft_protocol::Failure::Expired | weft_protocol::Failure::Unanswered) => Failure::TimedOut { peer },
            _ => Failure::Broken { peer },
        };
        if self.core.failure().is_none() {
            // The first to say why; what the words say is the same.
            let _ = self.state.failed.set(self.state.failed(failure, Some(error)));
        }
        self.core.ended(job.ticket, Err(failure));
    }

    /// Tells everybody that the team is over.
    fn give_up(&mut self, failure: Failure) {
        // Before the word that callers look at, which has no room for all of it.
        let _ = self.state.failed.set(self.state.failed(failure, None));
        self.state.tell(failure);
        let own = self.state.here.start as u32;
        for (rank, far) in self.peers.iter().enumerate() {
            let Some(Far { peer, heap }) = far else { continue };
            let word = Failure::GaveUp { peer: own }.word(rank as u32);
            let told = peer.compare_swap(heap, Layout::FAILED_AT, 0, word).deadline(LAST_WORDS);
            // Whoever is gone need not hear it, and the others hear it by what they wait for.
            let _ = told.post();
        }
    }

    /// Until nothing that was posted touches the memory any more.
    fn settle(&mut self) {
        for posted in &self.under_way {
            match &posted.handle {
                Handle::Transfer(transfer) => transfer.cancel(),
                Handle::Add(operation) | Handle::Set(operation, _) => operation.cancel(),
            }
        }
        for posted in self.under_way.drain(..) {
            match posted.handle {
                Handle::Transfer(transfer) => drop(transfer.wait()),
                Handle::Add(operation) | Handle::Set(operation, _) => drop(operation.wait()),
            }
        }
    }
}
