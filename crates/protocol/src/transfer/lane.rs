//! Lanes: which of a peer's paths carries the next part.

use weft_plan::{Bytes, LinkCost, Picos, Time};

use super::cut::PartLimits;
use super::{LaneId, PeerId};
use crate::numbered::Numbered;
use crate::transport::Capabilities;

/// A path to a peer, with what it costs and what it holds.
#[derive(Clone, Debug)]
pub struct Lane {
    pub id: LaneId,
    pub peer: PeerId,
    /// Lanes of one transport are one class: they share the parts between them.
    pub transport: &'static str,
    /// The class of the smallest number is used first, and among equals the cheapest.
    pub preference: u8,
    pub cost: LinkCost,
    /// The NUMA node it is near to, where that matters.
    pub numa: Option<u16>,
    pub max_op_bytes: u64,
    pub max_op_runs: usize,
    pub max_inflight_ops: usize,
    /// At least one part is always allowed.
    pub max_inflight_bytes: u64,
}

impl Lane {
    /// A lane over a path of the transport with these capabilities, a quarter of whose places are left to messages.
    pub fn of(capabilities: &Capabilities, id: LaneId, peer: PeerId) -> Lane {
        Lane {
            id,
            peer,
            transport: capabilities.name,
            preference: 0,
            cost: capabilities.cost,
            numa: capabilities.numa,
            max_op_bytes: capabilities.max_op_bytes,
            max_op_runs: capabilities.max_op_runs,
            max_inflight_ops: (capabilities.max_inflight_ops - capabilities.max_inflight_ops / 4).max(1),
            max_inflight_bytes: capabilities.max_op_bytes.saturating_mul(8),
        }
    }
}

/// Why a lane takes nothing for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    None,
    /// It was full, and something of ours will complete on it.
    UntilCompletion,
    /// It was full of what is not ours.
    UntilRoom(Time),
    /// An operation failed on it; perhaps its loss is about to be told.
    Shaken(Time),
}

#[derive(Debug)]
pub(super) struct LaneState {
    pub lane: Lane,
    pub inflight_ops: usize,
    pub inflight_bytes: u64,
    pub rest: Rest,
    /// Writes hang on it: when it is lost, the far end is asked to confirm.
    pub fence_wanted: bool,
    /// The next rest of a lane that has no room.
    room_again: Time,
    /// Parts smaller than this would cost more in latency than they gain by being spread.
    pub min_part: u64,
    latency_ps: f64,
    ps_per_byte: f64,
}

/// How long a lane rests at first that is full of what is not ours, and at most: each time in vain doubles it.
const ROOM_AGAIN: Time = Time::from_us(50);
const ROOM_AGAIN_MAX: Time = Time::from_ms(10);

/// A part is worth the latencies of this many operations at least.
const LATENCIES_PER_PART: f64 = 8.0;
const PART_BYTES_MIN: u64 = 16 << 10;

/// What a lane is taken to lose where the memory is another NUMA node's: every byte crosses the link between the sockets, which adds
/// to the latency and is shared with all else that crosses it. Small transfers therefore stay on near lanes while those are
/// idle, and large ones use far lanes too, for a smaller share. Guesses of the right order; nobody here has measured them.
const FAR_LATENCY_PS: f64 = 1e6;
const FAR_SPEED: f64 = 0.75;

impl LaneState {
    pub fn new(lane: Lane) -> LaneState {
        let ps_per_byte = 1e12 / lane.cost.bandwidth.bytes_per_sec().max(1) as f64;
        let latency_ps = lane.cost.latency.as_ps() as f64;
        let worthwhile = (latency_ps * LATENCIES_PER_PART / ps_per_byte) as u64;
        LaneState {
            inflight_ops: 0,
            inflight_bytes: 0,
            rest: Rest::None,
            fence_wanted: false,
            room_again: ROOM_AGAIN,
            min_part: worthwhile
                .max(PART_BYTES_MIN)
                .next_multiple_of(4096)
                .min(lane.max_op_bytes.max(1)),
            latency_ps,
            ps_per_byte,
            lane,
        }
    }

    pub fn part_limits(&self) -> PartLimits {
        PartLimits {
            max_bytes: self.lane.max_op_bytes,
            max_runs: self.lane.max_op_runs,
        }
    }

    /// It is full of what is not ours. Returns when to try again: ever later, so that a lane which stays full costs nothing.
    pub fn on_full(&mut self, now: Time) -> Time {
        let wake = now.saturating_add(self.room_again);
        self.room_again = self.room_again.saturating_add(self.room_again).min(ROOM_AGAIN_MAX);
        self.rest = Rest::UntilRoom(wake);
        wake
    }

    /// Something has completed on it.
    pub fn on_room(&mut self) {
        self.room_again = ROOM_AGAIN;
        if matches!(self.rest, Rest::UntilRoom(_) | Rest::UntilCompletion) {
            self.rest = Rest::None;
        }
    }

    /// It holds as much of ours as it may. A completion makes room.
    fn is_full(&self) -> bool {
        self.inflight_ops >= self.lane.max_inflight_ops
            || (self.inflight_ops > 0
                && self.inflight_bytes.saturating_add(self.lane.max_op_bytes) > self.lane.max_inflight_bytes)
    }

    fn is_far(&self, numa: Option<u16>) -> bool {
        matches!((self.lane.numa, numa), (Some(here), Some(there)) if here != there)
    }

    /// What it carries of memory on that node, in bytes a picosecond.
    fn speed(&self, numa: Option<u16>) -> f64 {
        let discount = if self.is_far(numa) { FAR_SPEED } else { 1.0 };
        discount / self.ps_per_byte
    }

    /// When a part posted now would be there, as far as the lane's backlog tells.
    fn eta_ps(&self, next: &Next) -> f64 {
        let detour = if self.is_far(next.numa) { FAR_LATENCY_PS } else { 0.0 };
        let bytes = self
            .inflight_bytes
            .saturating_add(next.bytes.min(self.lane.max_op_bytes));
        self.latency_ps + detour + bytes as f64 / self.speed(next.numa)
    }
}

/// Lanes of one transport to one peer.
#[derive(Debug)]
pub(super) struct Class {
    pub transport: &'static str,
    /// Its preference, and how long a typical part takes on its best lane; the smallest comes first.
    score: (u8, Picos),
    pub lanes: Vec<LaneId>,
}

/// What is to be carried next, as far as the choice of its lane depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Next {
    /// The NUMA node of the near memory, where that is known.
    pub numa: Option<u16>,
    /// What is left of the transfer, or of the part that is carried again.
    pub bytes: u64,
}

/// Where the next part may go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Choice {
    /// This lane of a class.
    Lane(Chosen),
    /// A lane is there, but full.
    Full,
    /// No lane is there.
    Nowhere,
}

/// A lane for the next part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Chosen {
    pub lane: LaneId,
    /// What it has of its class's speed.
    pub share: f64,
    /// Operations under way in the whole class.
    pub class_ops: usize,
}

/// The live lanes of a peer, the best class first.
#[derive(Debug, Default)]
pub(super) struct Classes {
    classes: Vec<Class>,
}

impl Classes {
    pub fn add(&mut self, lane: &Lane) {
        let score = (lane.preference, lane.cost.time(Bytes(1 << 20), 1));
        match self.classes.iter_mut().find(|c| c.transport == lane.transport) {
            Some(class) => {
                class.lanes.push(lane.id);
                class.score = class.score.min(score);
            }
            None => self.classes.push(Class {
                transport: lane.transport,
                score,
                lanes: vec![lane.id],
            }),
        }
        self.classes.sort_by_key(|c| c.score);
    }

    pub fn remove(&mut self, lane: LaneId) {
        for class in &mut self.classes {
            class.lanes.retain(|l| *l != lane);
        }
        self.classes.retain(|c| !c.lanes.is_empty());
    }

    pub fn transports(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.classes.iter().map(|c| c.transport)
    }

    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    pub fn lanes(&self) -> impl Iterator<Item = LaneId> + '_ {
        self.classes.iter().flat_map(|c| c.lanes.iter().copied())
    }

    /// The lane of the best class that would be done with the part first. A class whose lanes are merely full is waited for; one
    /// whose lanes have all been shaken is passed over, unless there is no other.
    pub fn choose(&self, lanes: &Numbered<Box<LaneState>>, avoid: &[&'static str], next: &Next) -> Choice {
        let mut none = Choice::Nowhere;
        for class in self.classes.iter().filter(|class| !avoid.contains(&class.transport)) {
            let states = || class.lanes.iter().filter_map(|id| lanes.at(id.0));
            if let Some(choice) = best_of(states(), next) {
                return choice;
            }
            none = Choice::Full;
            if states().any(|state| !matches!(state.rest, Rest::Shaken(_))) {
                break;
            }
        }
        none
    }
}

/// The best of a class's lanes; none where all of them are full or rest.
fn best_of<'a>(states: impl Iterator<Item = &'a Box<LaneState>>, next: &Next) -> Option<Choice> {
    let mut best: Option<(f64, &LaneState)> = None;
    let mut soonest_full = f64::INFINITY;
    let (mut together, mut class_ops) = (0.0, 0);
    for state in states {
        together += state.speed(next.numa);
        class_ops += state.inflight_ops;
        if state.rest != Rest::None {
            continue;
        }
        let eta = state.eta_ps(next);
        if state.is_full() {
            soonest_full = soonest_full.min(eta);
        } else if best.is_none_or(|(soonest, _)| eta < soonest) {
            best = Some((eta, state));
        }
    }
    let (eta, state) = best?;
    // A slow lane that is busy already is not filled up just because a fast one is full, or it would be the last to finish.
    if state.inflight_ops > 0 && soonest_full < eta {
        return Some(Choice::Full);
    }
    Some(Choice::Lane(Chosen {
        lane: state.lane.id,
        share: state.speed(next.numa) / together,
        class_ops,
    }))
}
