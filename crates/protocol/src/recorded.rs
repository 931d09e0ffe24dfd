//! A transport that remembers what was asked of it and what it said, as text that can be read, kept and played again.
//!
//! A recording holds what passed through the waist, not the bytes that moved: played again, it says when and how operations ended,
//! and memory stays as it is. Messages are kept whole, so a recording is as confidential as they are.

mod text;

use std::collections::VecDeque;

use thiserror::Error;
use weft_plan::Time;

use crate::atomic::AtomicAct;
use crate::error::{Loss, Refusal};
use crate::leg::Direction;
use crate::region::{Region, RegionKey};
use crate::transport::{
    Arrival, Body, Capabilities, Grant, Op, OpId, PathId, PeerAddress, Progress, Signal, Transport,
};

pub use text::ParseError;

/// What happened at a waist, in order. Its text has one line for each entry; `to_string` and `parse` are inverses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    pub entries: Vec<(Time, Entry)>,
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Open {
        peer: PeerAddress,
        outcome: Result<PathId, Loss>,
    },
    Vouch {
        path: PathId,
    },
    Close {
        path: PathId,
    },
    Post {
        path: PathId,
        ops: Vec<PostedOp>,
        outcome: Result<usize, Loss>,
    },
    Cancel {
        path: PathId,
        op: OpId,
    },
    Signal(Signal),
}

/// An operation as it is recorded: regions by their slot, no span lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostedOp {
    pub id: OpId,
    pub deadline: Time,
    pub body: PostedBody,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PostedBody {
    Move {
        direction: Direction,
        near_slot: u32,
        far_slot: u32,
        start: u64,
        end: u64,
        checksum: bool,
        arrival: Option<Arrival>,
    },
    Message(Vec<u8>),
    Atomic {
        far_slot: u32,
        offset: u64,
        act: AtomicAct,
    },
    Commit {
        far_slot: u32,
        tag: u64,
        parts: u32,
    },
}

impl From<&Op> for PostedOp {
    fn from(op: &Op) -> PostedOp {
        PostedOp {
            id: op.id,
            deadline: op.deadline,
            body: match &op.body {
                Body::Move(part) => PostedBody::Move {
                    direction: part.direction,
                    near_slot: part.leg.local().key.slot,
                    far_slot: part.leg.remote().key.slot,
                    start: part.range.start,
                    end: part.range.end,
                    checksum: part.checksum,
                    arrival: part.arrival,
                },
                Body::Message(bytes) => PostedBody::Message(bytes.to_vec()),
                Body::Atomic(atomic) => PostedBody::Atomic {
                    far_slot: atomic.region.key.slot,
                    offset: atomic.offset,
                    act: atomic.act,
                },
                Body::Commit(commit) => PostedBody::Commit {
                    far_slot: commit.region.key.slot,
                    tag: commit.tag,
                    parts: commit.parts,
                },
            },
        }
    }
}

/// Wraps a transport and keeps a [`Recording`] of it.
#[derive(Debug)]
pub struct Recorded<T> {
    inner: T,
    recording: Recording,
    max_entries: usize,
}

impl<T: Transport> Recorded<T> {
    /// Records the first `max_entries` things that happen.
    pub fn new(inner: T, max_entries: usize) -> Recorded<T> {
        Recorded {
            inner,
            recording: Recording::default(),
            max_entries,
        }
    }

    pub fn recording(&self) -> &Recording {
        &self.recording
    }

    fn note(&mut self, now: Time, entry: impl FnOnce() -> Entry) {
        if self.recording.entries.len() < self.max_entries {
            self.recording.entries.push((now, entry()));
        }
    }

    /// Vouching and closing are told without a time: they happened right after what came before it.
    fn last_time(&self) -> Time {
        self.recording.entries.last().map_or(Time::ZERO, |(time, _)| *time)
    }
}

impl<T: Transport> Transport for Recorded<T> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        self.inner.register(region)
    }
    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        self.inner.release(key)
    }

    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss> {
        let outcome = self.inner.open(peer, now);
        self.note(now, || Entry::Open {
            peer: peer.clone(),
            outcome,
        });
        outcome
    }

    fn vouch(&mut self, path: PathId) {
        self.inner.vouch(path);
        let now = self.last_time();
        self.note(now, || Entry::Vouch { path });
    }

    fn close(&mut self, path: PathId) {
        self.inner.close(path);
        let now = self.last_time();
        self.note(now, || Entry::Close { path });
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        let outcome = self.inner.post(path, ops, now);
        self.note(now, || Entry::Post {
            path,
            ops: ops.iter().map(PostedOp::from).collect(),
            outcome,
        });
        outcome
    }

    fn cancel(&mut self, path: PathId, op: OpId, now: Time) {
        self.inner.cancel(path, op, now);
        self.note(now, || Entry::Cancel { path, op });
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        let before = signals.len();
        let progress = self.inner.poll(now, signals);
        for signal in &signals[before..] {
            self.note(now, || Entry::Signal(signal.clone()));
        }
        progress
    }
}

/// Something else was asked than when the recording was made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("entry {at} of the recording is {expected:?}, but {asked:?} was asked")]
pub struct Divergence {
    pub at: usize,
    pub expected: Option<Entry>,
    pub asked: Entry,
}

/// Plays a [`Recording`]: answers as the recorded transport did, as long as the same is asked in the same order.
///
/// What is asked must not overtake a recorded signal: poll until it has been told.
#[derive(Debug)]
pub struct Replayed {
    capabilities: Capabilities,
    rest: VecDeque<(Time, Entry)>,
    told: usize,
    divergence: Option<Divergence>,
}

impl Replayed {
    pub fn new(recording: Recording, capabilities: Capabilities) -> Replayed {
        Replayed {
            capabilities,
            rest: recording.entries.into(),
            told: 0,
            divergence: None,
        }
    }

    /// The first difference from the recording. After it, every path is lost.
    pub fn divergence(&self) -> Option<&Divergence> {
        self.divergence.as_ref()
    }

    pub fn is_finished(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next entry, if `matches` says that it is what `asked` was when it was recorded.
    fn expect(&mut self, asked: impl FnOnce() -> Entry, matches: impl FnOnce(&Entry) -> bool) -> Option<Entry> {
        if self.divergence.is_some() {
            return None;
        }
        match self.rest.pop_front() {
            Some((_, entry)) if matches(&entry) => {
                self.told += 1;
                Some(entry)
            }
            other => {
                self.divergence = Some(Divergence {
                    at: self.told,
                    expected: other.map(|(_, entry)| entry),
                    asked: asked(),
                });
                None
            }
        }
    }
}

impl Transport for Replayed {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn register(&mut self, _region: &Region) -> Result<Grant, Refusal> {
        Ok(Grant::default())
    }
    fn release(&mut self, _key: &RegionKey) -> Result<Progress, Refusal> {
        Ok(Progress::Idle)
    }

    fn open(&mut self, peer: &PeerAddress, _now: Time) -> Result<PathId, Loss> {
        let asked = || Entry::Open {
            peer: peer.clone(),
            outcome: Err(Loss::Closed),
        };
        match self.expect(
            asked,
            |entry| matches!(entry, Entry::Open { peer: then, .. } if then == peer),
        ) {
            Some(Entry::Open { outcome, .. }) => outcome,
            _ => Err(Loss::Closed),
        }
    }

    fn vouch(&mut self, path: PathId) {
        let asked = Entry::Vouch { path };
        self.expect(|| asked.clone(), |entry| *entry == asked);
    }

    fn close(&mut self, path: PathId) {
        let asked = Entry::Close { path };
        self.expect(|| asked.clone(), |entry| *entry == asked);
    }

    fn post(&mut self, path: PathId, ops: &[Op], _now: Time) -> Result<usize, Loss> {
        let posted: Vec<PostedOp> = ops.iter().map(PostedOp::from).collect();
        let same = |entry: &Entry| matches!(entry, Entry::Post { path: on, ops, .. } if *on == path && *ops == posted);
        let asked = || Entry::Post {
            path,
            ops: posted.clone(),
            outcome: Err(Loss::Closed),
        };
        match self.expect(asked, same) {
            Some(Entry::Post { outcome, .. }) => outcome,
            _ => Err(Loss::Closed),
        }
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        let asked = Entry::Cancel { path, op };
        self.expect(|| asked.clone(), |entry| *entry == asked);
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        while let Some((_, Entry::Signal(_))) = self.rest.pop_front_if(|(time, entry)| {
            let due = *time <= now && matches!(entry, Entry::Signal(_));
            if let (true, Entry::Signal(signal)) = (due, &*entry) {
                signals.push(signal.clone());
            }
            due
        }) {
            self.told += 1;
        }
        Progress::Idle
    }
}
