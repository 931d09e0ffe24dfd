//! Lanes: which of a peer's paths carries the next part.

use weft_plan::{Bytes, Picos, PlaceKind, Time};

use super::cut::PartLimits;
use super::{LaneId, PeerId};
use crate::numbered::Numbered;
use crate::transport::{Capabilities, Carriage};

/// A path to a peer, with what it costs and what it holds.
#[derive(Clone, Debug)]
pub struct Lane {
    pub id: LaneId,
    pub peer: PeerId,
    /// Lanes of one transport are one class: they share the parts between them.
    pub transport: &'static str,
    /// The class of the smallest number is used first, and among equals the cheapest.
    pub preference: u8,
    /// Between which kinds of places, and at what cost.
    pub carries: Vec<Carriage>,
    /// The NUMA node it is near to, where that matters.
    pub numa: Option<u16>,
    pub max_op_runs: usize,
    pub max_inflight_ops: usize,
    /// At least one part is always allowed.
    pub max_inflight_bytes: u64,
    /// It waits itself for what an operation comes after.
    pub awaits_ready: bool,
}

impl Lane {
    /// A lane over a path of the transport with these capabilities, a quarter of whose places are left to messages.
    pub fn of(capabilities: &Capabilities, id: LaneId, peer: PeerId) -> Lane {
        Lane {
            id,
            peer,
            transport: capabilities.name,
            preference: 0,
            carries: capabilities.carries.clone(),
            numa: capabilities.numa,
            awaits_ready: capabilities.awaits_ready,
            max_op_runs: capabilities.max_op_runs,
            max_inflight_ops: (capabilities.max_inflight_ops - capabilities.max_inflight_ops / 4).max(1),
            max_inflight_bytes: capabilities
                .carries
                .iter()
                .map(|c| c.max_op_bytes.saturating_mul(8))
                .max()
                .unwrap_or(0),
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
    paces: Vec<Pace>,
}

/// What a lane does between two kinds of places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    between: Between,
    max_op_bytes: u64,
    align: u64,
    /// Parts smaller than this would cost more in latency than they gain by being spread.
    pub min_part: u64,
    latency_ps: f64,
    ps_per_byte: f64,
}

/// The kinds of the two ends of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Between {
    pub near: PlaceKind,
    pub far: PlaceKind,
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
        LaneState {
            inflight_ops: 0,
            inflight_bytes: 0,
            rest: Rest::None,
            fence_wanted: false,
            room_again: ROOM_AGAIN,
            paces: lane.carries.iter().map(Pace::of).collect(),
            lane,
        }
    }

    /// What it does between these kinds of places; none where it does nothing.
    pub fn pace(&self, between: Between) -> Option<&Pace> {
        self.paces.iter().find(|pace| pace.between == between)
    }

    pub fn part_limits(&self, pace: &Pace) -> PartLimits {
        PartLimits {
            max_bytes: pace.max_op_bytes,
            max_runs: self.lane.max_op_runs,
            align: pace.align,
        }
    }

    /// What it is chosen as where its class has no other lane; none while it has no room.
    fn chosen_alone(&self, between: Between) -> Option<Chosen> {
        let pace = self.pace(between)?;
        (self.rest == Rest::None && !self.is_full(pace)).then(|| Chosen {
            lane: self.lane.id,
            share: 1.0,
            class_ops: self.inflight_ops,
            limits: self.part_limits(pace),
            min_part: pace.min_part,
        })
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
    fn is_full(&self, pace: &Pace) -> bool {
        self.inflight_ops >= self.lane.max_inflight_ops
            || (self.inflight_ops > 0
                && self.inflight_bytes.saturating_add(pace.max_op_bytes) > self.lane.max_inflight_bytes)
    }

    fn is_far(&self, numa: Option<u16>) -> bool {
        matches!((self.lane.numa, numa), (Some(here), Some(there)) if here != there)
    }

    /// What it carries of memory on that node, in bytes a picosecond.
    fn speed(&self, pace: &Pace, numa: Option<u16>) -> f64 {
        let discount = if self.is_far(numa) { FAR_SPEED } else { 1.0 };
        discount / pace.ps_per_byte
    }

    /// When a part posted now would be there, as far as the lane's backlog tells.
    fn eta_ps(&self, pace: &Pace, next: &Next) -> f64 {
        let detour = if self.is_far(next.numa) { FAR_LATENCY_PS } else { 0.0 };
        let bytes = self.inflight_bytes.saturating_add(next.bytes.min(pace.max_op_bytes));
        pace.latency_ps + detour + bytes as f64 / self.speed(pace, next.numa)
    }
}

impl Pace {
    fn of(carriage: &Carriage) -> Pace {
        let ps_per_byte = 1e12 / carriage.cost.bandwidth.bytes_per_sec().max(1) as f64;
        let latency_ps = carriage.cost.latency.as_ps() as f64;
        let worthwhile = (latency_ps * LATENCIES_PER_PART / ps_per_byte) as u64;
        Pace {
            between: Between::of(carriage),
            max_op_bytes: carriage.max_op_bytes,
            align: carriage.align,
            min_part: worthwhile
                .max(PART_BYTES_MIN)
                .next_multiple_of(4096)
                .min(carriage.max_op_bytes.max(1)),
            latency_ps,
            ps_per_byte,
        }
    }
}

impl Between {
    fn of(carriage: &Carriage) -> Between {
        Between {
            near: carriage.near,
            far: carriage.far,
        }
    }
}

/// Lanes of one transport to one peer, as they carry between two kinds of places.
#[derive(Debug)]
pub(super) struct Class {
    pub transport: &'static str,
    between: Between,
    align: u64,
    /// Its preference, and how long a typical part takes on its best lane; the smallest comes first.
    score: (u8, Picos),
    pub lanes: Vec<LaneId>,
}

/// What is to be carried next, as far as the choice of its lane depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Next {
    pub between: Between,
    /// What its spans are multiples of.
    pub align: u64,
    /// The NUMA node of the near memory, where that is known.
    pub numa: Option<u16>,
    /// What is left of the transfer, or of the part that is carried again.
    pub bytes: u64,
}

impl Next {
    pub const NOTHING: Next = Next {
        between: Between {
            near: PlaceKind::Dram,
            far: PlaceKind::Dram,
        },
        align: 1 << 63,
        numa: None,
        bytes: 0,
    };
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
    pub limits: PartLimits,
    /// Parts smaller than this are not worth their latency.
    pub min_part: u64,
}

/// The live lanes of a peer, the best class first.
#[derive(Debug, Default)]
pub(super) struct Classes {
    classes: Vec<Class>,
    /// Whether some carry what others cannot, so that one transfer may have to wait where another need not.
    differ: bool,
}

impl Classes {
    pub fn add(&mut self, lane: &Lane) {
        for carriage in &lane.carries {
            let score = (lane.preference, carriage.cost.time(Bytes(1 << 20), 1));
            let between = Between::of(carriage);
            let same = |c: &&mut Class| c.transport == lane.transport && c.between == between;
            match self.classes.iter_mut().find(same) {
                Some(class) => {
                    class.lanes.push(lane.id);
                    class.score = class.score.min(score);
                    class.align = class.align.max(carriage.align);
                }
                None => self.classes.push(Class {
                    transport: lane.transport,
                    between,
                    align: carriage.align,
                    score,
                    lanes: vec![lane.id],
                }),
            }
        }
        self.classes.sort_by_key(|c| c.score);
        self.compare();
    }

    pub fn remove(&mut self, lane: LaneId) {
        for class in &mut self.classes {
            class.lanes.retain(|l| *l != lane);
        }
        self.classes.retain(|c| !c.lanes.is_empty());
        self.compare();
    }

    fn compare(&mut self) {
        let first = self.classes.first().map(|c| c.between);
        self.differ = self.classes.iter().any(|c| Some(c.between) != first || c.align > 1);
    }

    /// Whether some of them carry what others cannot.
    pub fn differ(&self) -> bool {
        self.differ
    }

    /// Those that carry it.
    fn able(&self, next: Next) -> impl Iterator<Item = &Class> {
        let able = move |c: &&Class| c.between == next.between && next.align >= c.align;
        self.classes.iter().filter(able)
    }

    /// The transports that carry it.
    pub fn carriers(&self, next: Next) -> impl Iterator<Item = &'static str> {
        self.able(next).map(|c| c.transport)
    }

    pub fn transports(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.classes.iter().map(|c| c.transport)
    }

    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// The lanes that carry it.
    pub fn lanes(&self, next: Next) -> impl Iterator<Item = LaneId> {
        self.able(next).flat_map(|c| c.lanes.iter().copied())
    }

    /// The lane of the best class that would be done with the part first. A class whose lanes are merely full is waited for; one
    /// whose lanes have all been shaken is passed over, unless there is no other.
    pub fn choose(&self, lanes: &Numbered<Box<LaneState>>, avoid: &[&'static str], next: &Next) -> Choice {
        let mut none = Choice::Nowhere;
        for class in self.able(*next).filter(|class| !avoid.contains(&class.transport)) {
            // Nothing has to be weighed where there is one lane, and it is free.
            if let [only] = class.lanes[..]
                && let Some(chosen) = lanes.at(only.0).and_then(|state| state.chosen_alone(next.between))
            {
                return Choice::Lane(chosen);
            }
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
    let mut best: Option<(f64, &LaneState, &Pace)> = None;
    let mut soonest_full = f64::INFINITY;
    let (mut together, mut class_ops) = (0.0, 0);
    for state in states {
        let Some(pace) = state.pace(next.between) else { continue };
        together += state.speed(pace, next.numa);
        class_ops += state.inflight_ops;
        if state.rest != Rest::None {
            continue;
        }
        let eta = state.eta_ps(pace, next);
        if state.is_full(pace) {
            soonest_full = soonest_full.min(eta);
        } else if best.is_none_or(|(soonest, ..)| eta < soonest) {
            best = Some((eta, state, pace));
        }
    }
    let (eta, state, pace) = best?;
    // A slow lane that is busy already is not filled up just because a fast one is full, or it would be the last to finish.
    if state.inflight_ops > 0 && soonest_full < eta {
        return Some(Choice::Full);
    }
    Some(Choice::Lane(Chosen {
        lane: state.lane.id,
        share: state.speed(pace, next.numa) / together,
        class_ops,
        limits: state.part_limits(pace),
        min_part: pace.min_part,
    }))
}
