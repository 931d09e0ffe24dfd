//! The paths of a session, and which of them to use.
//!
//! Each path has a label that both ends know it by. The end that initiated the session prefers the path with the shortest round
//! trip, which it measured when the path joined; the other end answers on the path it was last spoken to. A path on which
//! something had to be resent comes last until it is heard on again.

use std::cmp::Reverse;

use weft_plan::Time;

use super::config::MAX_PATHS;
use super::event::Via;
use super::keys::Role;
use crate::transport::Arrival;

/// The label of the path that the handshake went over.
const FIRST_LABEL: u64 = 0;
/// Lost paths that can still be fenced.
const MAX_GONE: usize = 1024;
/// Parts that may arrive over one path before the peer has proved itself there. It posts no more than that at once.
const MAX_EARLY: usize = 1024;
/// The first pause before a join is repeated.
const JOIN_PAUSE: Time = Time::from_ms(100);
const JOIN_PAUSE_MAX: Time = Time::from_secs(1);

#[derive(Debug)]
pub(super) struct Paths {
    role: Role,
    live: Vec<Path>,
    gone: Vec<Gone>,
    next_label: u64,
    turn: usize,
}

#[derive(Debug)]
pub(super) struct Path {
    pub(super) via: Via,
    pub(super) label: u64,
    /// The peer knows of this path.
    pub(super) joined: bool,
    next_join: Time,
    join_pause: Time,
    announced: Option<Time>,
    joins: u32,
    round_trip: Option<Time>,
    /// When a control last came in here.
    spoken: Time,
    /// How often something sent here had to be resent since anything was heard.
    failures: u32,
    /// Parts that were in place here before the peer was known to be behind the path.
    early: Vec<Arrival>,
    /// The peer has said elsewhere that it was behind the path.
    vouched: bool,
}

/// A path that is gone, or that the peer has asked to be.
#[derive(Debug)]
struct Gone {
    via: Option<Via>,
    label: u64,
    /// Parts that arrive over it still count, because the peer has not been told otherwise.
    counts: bool,
    /// The peer has been told that nothing that was sent over it has effect any more.
    fenced: bool,
    /// Parts that arrived over it before the peer was known to be behind it.
    early: Vec<Arrival>,
}

/// What is to be done with a part that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Counts,
    /// It is kept until the peer has proved itself on this path.
    Early,
    /// It came over a path that is not the peer's.
    Strange,
}

impl Paths {
    pub(super) fn new(role: Role, first: Via) -> Paths {
        let mut path = Path::new(first, FIRST_LABEL);
        path.joined = true;
        Paths {
            role,
            live: vec![path],
            gone: Vec::new(),
            next_label: 1,
            turn: 0,
        }
    }

    pub(super) fn find(&mut self, via: Via) -> Option<&mut Path> {
        self.live.iter_mut().find(|path| path.via == via)
    }

    pub(super) fn label(&self, via: Via) -> Option<u64> {
        let live = self.live.iter().find(|path| path.via == via).map(|path| path.label);
        live.or_else(|| {
            self.gone
                .iter()
                .find(|gone| gone.via == Some(via))
                .map(|gone| gone.label)
        })
    }

    /// The path of this label, live or lost.
    pub(super) fn via(&self, label: u64) -> Option<Via> {
        let live = self.live.iter().find(|path| path.label == label).map(|path| path.via);
        live.or_else(|| self.gone.iter().find(|gone| gone.label == label)?.via)
    }

    /// A path that this end has opened and must announce. False if there is no room, or the path is known.
    pub(super) fn open(&mut self, via: Via, now: Time) -> bool {
        if self.live.len() >= MAX_PATHS || self.label(via).is_some() {
            return false;
        }
        let label = self.next_label << 1 | u64::from(self.role == Role::Acceptor);
        self.next_label += 1;
        let mut path = Path::new(via, label);
        path.next_join = now;
        self.live.push(path);
        true
    }

    /// A path that the peer has announced. False if it cannot be what it says.
    pub(super) fn accept(&mut self, via: Via, label: u64) -> bool {
        if let Some(path) = self.find(via) {
            return path.label == label && path.joined;
        }
        if !self.is_theirs(label) || self.live.len() >= MAX_PATHS || self.via(label).is_some() {
            return false;
        }
        // A label that has been fenced is dead for good, even if its announcement comes in only now.
        if self.gone.iter().any(|gone| gone.label == label) {
            return false;
        }
        let mut path = Path::new(via, label);
        path.joined = true;
        self.live.push(path);
        true
    }

    pub(super) fn remove(&mut self, via: Via) -> Option<Path> {
        let index = self.live.iter().position(|path| path.via == via)?;
        let mut path = self.live.remove(index);
        self.bar(path.label, Some(via));
        if let Some(gone) = self.gone.last_mut().filter(|gone| gone.label == path.label) {
            gone.counts = path.joined || path.vouched;
            gone.early = std::mem::take(&mut path.early);
        }
        Some(path)
    }

    /// What a part counts for that has arrived over this path.
    pub(super) fn on_arrival(&mut self, via: Via, arrival: Arrival, established: bool) -> Standing {
        match self.live.iter_mut().find(|path| path.via == via) {
            Some(path) if (path.joined || path.vouched) && established => Standing::Counts,
            Some(path) => {
                if path.early.len() < MAX_EARLY {
                    path.early.push(arrival);
                }
                Standing::Early
            }
            None if self.gone.iter().any(|gone| gone.via == Some(via) && gone.counts) => Standing::Counts,
            None => Standing::Strange,
        }
    }

    /// The peer says that it was behind a path of this label. Returns what arrived over it and has not been counted.
    pub(super) fn on_joined(&mut self, label: u64) -> Vec<Arrival> {
        if let Some(path) = self.live.iter_mut().find(|path| path.label == label) {
            path.vouched = true;
            return std::mem::take(&mut path.early);
        }
        match self.gone.iter_mut().find(|gone| gone.label == label && !gone.fenced) {
            Some(gone) => {
                gone.counts = true;
                std::mem::take(&mut gone.early)
            }
            None => Vec::new(),
        }
    }

    /// Whether the peer has opened the path of this label; both know of the first one.
    pub(super) fn is_theirs(&self, label: u64) -> bool {
        let own = (label & 1 == 1) == (self.role == Role::Acceptor);
        !own && label != FIRST_LABEL
    }

    /// The parts that arrived too early over paths on which the peer has proved itself by now.
    pub(super) fn take_early(&mut self) -> Vec<(Via, Arrival)> {
        let joined = self.live.iter_mut().filter(|path| path.joined);
        let early = joined.map(|path| (path.via, std::mem::take(&mut path.early)));
        early
            .flat_map(|(via, early)| early.into_iter().map(move |arrival| (via, arrival)))
            .collect()
    }

    /// The peer is told that nothing has effect any more that was sent over this path.
    pub(super) fn on_fence_done(&mut self, label: u64) {
        for gone in self.gone.iter_mut().filter(|gone| gone.label == label) {
            gone.counts = false;
            gone.fenced = true;
            gone.early.clear();
        }
    }

    /// Never again a path of this label.
    pub(super) fn bar(&mut self, label: u64, via: Option<Via>) {
        if self.gone.iter().any(|gone| gone.label == label) {
            return;
        }
        if self.gone.len() >= MAX_GONE {
            self.gone.remove(0);
        }
        self.gone.push(Gone {
            via,
            label,
            counts: false,
            fenced: via.is_none(),
            early: Vec::new(),
        });
    }

    pub(super) fn any_joined(&self) -> bool {
        self.live.iter().any(|path| path.joined)
    }

    /// The best path, other than `not` if there is a choice.
    pub(super) fn best(&self, not: Option<Via>) -> Option<&Path> {
        self.live.iter().filter(|path| path.joined).min_by_key(|path| {
            let measured = match self.role {
                Role::Initiator => path.round_trip.unwrap_or(Time::MAX),
                Role::Acceptor => Time::ZERO,
            };
            (
                Some(path.via) == not,
                path.failures,
                measured,
                Reverse(path.spoken),
                path.label,
            )
        })
    }

    /// Each joined path in its turn.
    pub(super) fn in_turn(&mut self) -> Option<&Path> {
        self.turn = self.turn.wrapping_add(1);
        let joined = self.live.iter().filter(|path| path.joined).count();
        let nth = self.turn.checked_rem(joined)?;
        self.live.iter().filter(|path| path.joined).nth(nth)
    }

    pub(super) fn joined(&self) -> impl Iterator<Item = &Path> {
        self.live.iter().filter(|path| path.joined)
    }

    /// A path that must be announced now.
    pub(super) fn next_join(&mut self, now: Time) -> Option<&mut Path> {
        self.live.iter_mut().find(|path| !path.joined && path.next_join <= now)
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.live
            .iter()
            .filter(|path| !path.joined)
            .map(|path| path.next_join)
            .min()
    }
}

impl Path {
    fn new(via: Via, label: u64) -> Path {
        Path {
            via,
            label,
            joined: false,
            next_join: Time::ZERO,
            join_pause: JOIN_PAUSE,
            announced: None,
            joins: 0,
            round_trip: None,
            spoken: Time::ZERO,
            failures: 0,
            early: Vec::new(),
            vouched: false,
        }
    }

    pub(super) fn on_announced(&mut self, now: Time) {
        self.announced = Some(now);
        self.joins += 1;
        self.next_join = now.saturating_add(self.join_pause);
        self.join_pause = self.join_pause.saturating_mul(2).min(JOIN_PAUSE_MAX);
    }

    /// Something authentic came in. True if that makes the path a joined one.
    pub(super) fn on_heard(&mut self, now: Time) -> bool {
        self.failures = 0;
        if self.joined {
            return false;
        }
        self.joined = true;
        // After a repeat nobody knows which of the two was answered.
        if let (1, Some(announced)) = (self.joins, self.announced) {
            self.on_round_trip(now.saturating_sub(announced));
        }
        true
    }

    pub(super) fn on_spoken(&mut self, now: Time) {
        self.spoken = now;
    }

    pub(super) fn on_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// The shortest counts: the others include what the peer kept back.
    pub(super) fn on_round_trip(&mut self, sample: Time) {
        self.round_trip = Some(self.round_trip.map_or(sample, |before| before.min(sample)));
    }
}
