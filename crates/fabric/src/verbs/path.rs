//! A path: one reliable queue pair, what this side has asked of it, and what the two ends know of each other's memory.
//!
//! Work goes to the device in order and completes in order, so what the device has is a queue of *segments*: runs of requests that
//! belong to one operation. A completion of one request is the completion of all before it.

mod atomics;
mod beginning;
mod ending;
mod inbound;
mod outbound;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Body, Done, Failure, Loss, Move, Op, PathId, Refusal, RegionKey, Signal};
use weft_sys::verbs as sys;

use super::address::Doorstep;
use super::batch::Batch;
use super::buffers::{Buffers, Landing, WINDOW};
use super::counters::VerbsCounters;
use super::credits::Credits;
use super::introduction::Letter;
use super::message::{Assembly, FRAME_BYTES_MAX, Frame, Location, PacketSize, Parcel, SUM_BYTES_MAX, SUM_RUNS_MAX};
use super::ops::{Moving, OpenOp, Ops, Serial, Stage, Work};
use super::options::VerbsOptions;
use super::queue::{AddressHandle, QueuePair};
use super::rail::Rail;
use super::regions::Regions;
use super::setup::Errand;
use super::tags::Tags;
use super::targets::{Found, State, Targets, permits};
use crate::Clock;

/// Packets that are sent from a buffer of ours at a time, because they do not fit into a request.
pub(super) const STAGED_MAX: usize = 16;
/// Answers that wait for credits. A peer that has more to be answered asks and never listens.
const ANSWERS_MAX: usize = 4096;
/// How soon an introduction is repeated at first.
const REPEAT_FIRST: Time = Time::from_ms(20);
const REPEAT_MAX: Time = Time::from_ms(500);
/// How long an answer may take before it is found out whether anybody is left to give it.
const PROBE_FIRST: Time = Time::from_ms(100);

#[derive(Debug)]
pub(super) struct Path {
    pub id: PathId,
    /// What the two ends know the path by before it is one.
    pub token: u128,
    pub opened_here: bool,
    pub peer: Doorstep,
    /// None once it is being destroyed. Whoever connects it has a share.
    pair: Option<Arc<QueuePair>>,
    /// The queue pair's, as the device has it.
    number: u32,
    /// Where letters to the peer go, once it has been found.
    pub route: Option<Arc<AddressHandle>>,
    /// It is being looked for.
    routing: bool,
    phase: Phase,
    /// The application above knows of it.
    told: bool,
    psn: u32,
    ops: Ops,
    /// Moves whose bytes are to be handed to the device.
    waiting: VecDeque<Serial>,
    /// Moves that cannot go on without credits.
    stalled: Vec<Serial>,
    parcels: VecDeque<Outgoing>,
    /// Those among them that the peer has asked for.
    answers: usize,
    segments: VecDeque<Segment>,
    /// Requests that have been handed to the device, and that have completed.
    posted: u64,
    completed: u64,
    /// Bytes that the device has.
    posted_bytes: u64,
    staging: Buffers,
    staged_next: usize,
    staged: usize,
    /// Where what the device's atomic operations find lands; none where the peer is asked.
    landing: Option<Landing>,
    credits: Credits,
    packet_size: PacketSize,
    assembly: Assembly,
    targets: Targets,
    /// Our regions that the peer knows the place of, and whether it has been asked to let go of them.
    granted: HashMap<u32, Granted>,
    /// What the peer may do at all.
    admitted: u32,
    /// For atomic operations that the peer asks for.
    target: atomics::Target,
    tags_here: Tags,
    tags_there: Tags,
    /// Questions that the peer has not answered.
    unanswered: u32,
    probe_at: Time,
    probe_gap: Time,
    /// When the device last completed anything.
    moved: Time,
    /// When the device has had something for too long without completing anything.
    stalled_at: Time,
    /// No operation that has ended early has waited for long enough before this.
    grace_at: Time,
    /// Something has come or completed that may let more be handed over.
    stirred: bool,
    /// A write was under way when the path was lost.
    unfenced: bool,
    bye_said: bool,
    /// The device has said that nothing more is received through the queue pair.
    received_all: bool,
    /// The queue pair is no more.
    destroyed: bool,
    /// Letters for the peer that whoever called is to send.
    pub letters: Vec<Letter>,
    /// What takes too long to be done at once.
    pub errands: Vec<Errand>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// An introduction is on its way, or its answer.
    Introducing {
        repeat: Time,
        gap: Time,
        until: Time,
    },
    /// The peer has answered, and the queue pair is being connected.
    Connecting {
        until: Time,
    },
    /// Connected; the first frame is on its way.
    Greeting {
        until: Time,
    },
    /// A peer has introduced itself, and the queue pair is being connected; then it is answered.
    Answering {
        until: Time,
    },
    /// The peer has been answered; its first frame is to come.
    Accepting {
        until: Time,
    },
    Live,
    /// Closed by this side: what the device has is let finish, then the peer is told.
    Closing {
        until: Time,
    },
    /// The queue pair is in error; what the device had comes back, and what it had received is heard.
    Failing {
        loss: Loss,
        until: Time,
        /// The look at the completions after which this began. What had come before is known after a later one that finds no more.
        since: u64,
    },
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Granted {
    Given,
    Revoking,
}

/// A frame that waits for its turn, and the operation that it is part of.
#[derive(Debug)]
struct Outgoing {
    parcel: Parcel,
    op: Option<Serial>,
    /// The peer has asked for it.
    answer: bool,
}

/// Requests of one operation, one after the other, that the device has.
#[derive(Clone, Copy, Debug)]
struct Segment {
    /// How many requests have been handed over up to and with its last.
    end: u64,
    bytes: u64,
    op: Option<Serial>,
    /// It is sent from one of our buffers.
    staged: bool,
    /// What an atomic operation finds lands here.
    landing: Option<u32>,
}

/// What a path needs of the transport that it is part of.
#[derive(Debug)]
pub(super) struct World<'a> {
    pub regions: &'a mut Regions,
    pub signals: &'a mut Vec<Signal>,
    pub batch: &'a mut Batch,
    pub counters: &'a mut VerbsCounters,
    pub options: &'a VerbsOptions,
    pub rail: &'a Rail,
    /// The last look at the completions, by its number, that found no more of them.
    pub dry: u64,
    /// Devices carry out atomic operations, of this side and on its words.
    pub device_atomics: bool,
    /// When this turn began.
    pub now: Time,
    pub clock: Clock,
}

/// What a path is made of.
#[derive(Debug)]
pub(super) struct Parts {
    pub id: PathId,
    pub token: u128,
    pub peer: Doorstep,
    pub pair: QueuePair,
    pub staging: Buffers,
    pub landing: Option<Landing>,
    pub psn: u32,
}

impl Path {
    fn new(parts: Parts, opened_here: bool, phase: Phase) -> Path {
        Path {
            id: parts.id,
            token: parts.token,
            opened_here,
            peer: parts.peer,
            number: parts.pair.number(),
            pair: Some(Arc::new(parts.pair)),
            route: None,
            routing: false,
            phase,
            told: opened_here,
            psn: parts.psn,
            ops: Ops::default(),
            waiting: VecDeque::new(),
            stalled: Vec::new(),
            parcels: VecDeque::new(),
            answers: 0,
            segments: VecDeque::new(),
            posted: 0,
            completed: 0,
            posted_bytes: 0,
            staging: parts.staging,
            staged_next: 0,
            staged: 0,
            landing: parts.landing,
            credits: Credits::new(WINDOW),
            packet_size: PacketSize::of_mtu(0),
            assembly: Assembly::default(),
            targets: Targets::default(),
            granted: HashMap::new(),
            admitted: 0,
            target: atomics::Target::default(),
            tags_here: Tags::default(),
            tags_there: Tags::default(),
            unanswered: 0,
            probe_at: Time::MAX,
            probe_gap: PROBE_FIRST,
            moved: Time::ZERO,
            stalled_at: Time::MAX,
            grace_at: Time::MAX,
            stirred: false,
            unfenced: false,
            bye_said: false,
            received_all: false,
            destroyed: false,
            letters: Vec::new(),
            errands: Vec::new(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }
    /// The buffers of a path that is over.
    pub(super) fn into_buffers(self) -> impl Iterator<Item = Buffers> {
        let landing = self.landing.map(Landing::into_buffers);
        [self.staging].into_iter().chain(landing)
    }
    /// Only a peer's introduction speaks for it.
    pub(super) fn is_half_open(&self) -> bool {
        matches!(self.phase, Phase::Answering { .. } | Phase::Accepting { .. })
    }
    /// Takes operations.
    pub(super) fn is_open(&self) -> bool {
        matches!(
            self.phase,
            Phase::Live | Phase::Introducing { .. } | Phase::Connecting { .. } | Phase::Greeting { .. }
        )
    }
    pub(super) fn is_failing(&self) -> bool {
        matches!(self.phase, Phase::Failing { .. })
    }
    /// The device has given everything back.
    fn is_drained(&self) -> bool {
        self.segments.is_empty() && self.received_all
    }
    /// The peer has as many paths as it can.
    pub(super) fn on_no_room(&mut self, world: &mut World<'_>) {
        if matches!(self.phase, Phase::Introducing { .. }) {
            self.lose(Loss::Unreachable, world);
        }
    }
    /// Ends the queue pair at once. Nobody is left to be told.
    pub(super) fn destroy(&mut self) {
        self.pair = None;
        self.phase = Phase::Over;
    }
    /// The peer has said goodbye, by letter.
    pub(super) fn on_goodbye(&mut self, world: &mut World<'_>) {
        self.bye_said = true;
        self.lose(Loss::ClosedByPeer, world);
    }

    /// Takes an operation, if there is room. What cannot be is completed at once.
    pub(super) fn take(&mut self, op: &Op, world: &mut World<'_>) -> bool {
        if self.ops.len() >= super::INFLIGHT_OPS_MAX {
            return false;
        }
        let refused = match &op.body {
            _ if op.deadline <= world.now => Some(Failure::Expired),
            Body::Message(payload) if payload.len() >= FRAME_BYTES_MAX => Some(Refusal::Malformed.into()),
            Body::Message(payload) => {
                let serial = self.ops.insert(open(op, Work::Message { packed: false }));
                self.parcels.push_back(Outgoing {
                    parcel: Parcel::message(payload.clone()),
                    op: Some(serial),
                    answer: false,
                });
                None
            }
            Body::Move(part) => self.take_move(op, part, world).err().map(Failure::Refused),
            Body::Atomic(atomic) => self.take_atomic(op, atomic, world).err().map(Failure::Refused),
            Body::Commit(_) => {
                // Memory has nothing to be committed.
                world.signals.push(Signal::Completed {
                    path: self.id,
                    op: op.id,
                    outcome: Ok(Done::default()),
                });
                None
            }
        };
        if let Some(failure) = refused {
            world.signals.push(Signal::Completed {
                path: self.id,
                op: op.id,
                outcome: Err(failure),
            });
        }
        true
    }

    fn take_move(&mut self, op: &Op, part: &Move, world: &mut World<'_>) -> Result<(), Refusal> {
        if part.checksum && !can_be_summed(part) {
            return Err(Refusal::Malformed);
        }
        let near = world.regions.near(part.leg.local())?;
        let key = &part.leg.remote().key;
        let (index, ask) = match self.targets.find_or_ask(key) {
            Found::Here(index) => (index, false),
            Found::Ask(index) => (index, true),
            Found::Full => return Err(Refusal::Unsupported),
        };
        let Some(target) = self.targets.at(index) else {
            return Err(Refusal::UnknownKey);
        };
        let stage = match &target.state {
            State::Asked => Stage::AwaitsTarget,
            State::Known(location) => {
                permits(location, part)?;
                Stage::Waiting
            }
            State::Revoked => return Err(Refusal::Released),
        };
        target.moves += 1;
        let serial = self.ops.insert(open(
            op,
            Work::Move(Moving {
                part: part.clone(),
                near,
                target: index,
                at: part.range.start,
                stage,
            }),
        ));
        if stage == Stage::Waiting {
            self.waiting.push_back(serial);
        }
        if ask {
            self.ask(&Frame::Resolve { key: *key }, world.now);
        }
        Ok(())
    }

    /// Queues a frame.
    fn say(&mut self, frame: &Frame) {
        self.parcels.push_back(Outgoing {
            parcel: Parcel::frame(frame),
            op: None,
            answer: false,
        });
    }

    /// Queues a frame that the peer has asked for.
    fn reply(&mut self, frame: &Frame) {
        self.parcels.push_back(Outgoing {
            parcel: Parcel::frame(frame),
            op: None,
            answer: true,
        });
        self.answers += 1;
    }

    /// Queues a frame that the peer must answer.
    fn ask(&mut self, frame: &Frame, now: Time) {
        self.say(frame);
        self.await_answer(now);
    }

    fn await_answer(&mut self, now: Time) {
        self.unanswered += 1;
        self.probe_at = self.probe_at.min(now.saturating_add(self.probe_gap));
    }

    fn answered(&mut self) {
        self.unanswered = self.unanswered.saturating_sub(1);
        if self.unanswered == 0 {
            self.probe_at = Time::MAX;
        }
    }

    /// When something must be done even if nothing comes in.
    pub(super) fn next_timeout(&self, options: &VerbsOptions) -> Time {
        let ops = self.ops.iter().map(|(_, op)| match op.ending {
            None => op.deadline,
            Some((_, since)) => ending::patience(since, self.moved, options.grace),
        });
        ops.chain([self.own_timeout()]).min().unwrap_or(Time::MAX)
    }

    /// The same, deadlines left out.
    pub(super) fn own_timeout(&self) -> Time {
        let phase = match self.phase {
            Phase::Introducing { repeat, until, .. } => repeat.min(until),
            // All that is left is for somebody to come by and end it.
            Phase::Failing { .. } if self.is_drained() || self.destroyed => Time::ZERO,
            // Whoever destroys the queue pair will tell.
            Phase::Failing { .. } if self.pair.is_none() => Time::MAX,
            Phase::Connecting { until }
            | Phase::Answering { until }
            | Phase::Greeting { until }
            | Phase::Accepting { until }
            | Phase::Closing { until }
            | Phase::Failing { until, .. } => until,
            Phase::Live if !self.segments.is_empty() => self.stalled_at,
            Phase::Live | Phase::Over => Time::MAX,
        };
        phase.min(self.probe_at).min(self.grace_at)
    }

    /// Does what has come due.
    pub(super) fn on_timeout(&mut self, from: &Doorstep, world: &mut World<'_>) {
        let now = world.now;
        match self.phase {
            Phase::Introducing { until, .. } if until <= now => self.lose(Loss::Unreachable, world),
            Phase::Introducing { repeat, gap, until } if repeat <= now => {
                let gap = gap.saturating_add(gap).min(REPEAT_MAX);
                let end = self.end_here(world);
                self.phase = Phase::Introducing {
                    repeat: now.saturating_add(gap),
                    gap,
                    until,
                };
                if self.route.is_none() {
                    // The first one has not gone out yet.
                    self.look_for_route(world);
                } else {
                    self.letters.push(Letter::Introduction {
                        token: self.token,
                        from: from.clone(),
                        end,
                    });
                }
            }
            Phase::Connecting { until }
            | Phase::Answering { until }
            | Phase::Greeting { until }
            | Phase::Accepting { until }
                if until <= now =>
            {
                self.lose(Loss::Unreachable, world);
            }
            Phase::Closing { until } if until <= now => self.lose(Loss::Closed, world),
            // The device neither sends nor gives up, perhaps because its way out is blocked for good. Another rail may be free.
            Phase::Live if !self.segments.is_empty() && self.stalled_at <= now => self.lose(Loss::Silent, world),
            _ => {}
        }
        self.grace_at = Time::MAX;
        self.expire(world);
        if self.probe_at <= now {
            self.probe_gap = self.probe_gap.saturating_add(self.probe_gap);
            self.probe_at = now.saturating_add(self.probe_gap);
            // What the device has not completed finds out as well as a probe would.
            if self.segments.is_empty() && self.parcels.is_empty() && self.credits.left() > 2 {
                self.say(&Frame::Probe);
                self.pump(world);
            }
        }
    }

    /// Ends the moves that use a region of ours which is being taken back, and asks the peer to let go of it.
    pub(super) fn release(&mut self, key: &RegionKey, world: &mut World<'_>) {
        let uses = |op: &OpenOp| matches!(&op.work, Work::Move(moving) if moving.near.slot == key.slot);
        for serial in self.ops.pick(uses) {
            self.end(serial, Refusal::Released.into(), world);
        }
        if let Some(granted) = self.granted.get_mut(&key.slot)
            && *granted == Granted::Given
        {
            *granted = Granted::Revoking;
            self.say(&Frame::Revoke { slot: key.slot });
        }
        self.pump(world);
    }

    /// Does the device have anything to do with this region of ours?
    pub(super) fn is_inside(&self, key: &RegionKey) -> bool {
        let uses = |op: &OpenOp| matches!(&op.work, Work::Move(moving) if moving.near.slot == key.slot);
        self.ops.iter().any(|(_, op)| op.posted > 0 && uses(op))
    }

    /// Has the peer still to say that it has let go of this region of ours?
    pub(super) fn is_granted(&self, key: &RegionKey) -> bool {
        self.granted.contains_key(&key.slot)
    }

    /// Completes an operation that the device has nothing of.
    fn complete(&mut self, serial: Serial, outcome: Result<Done, Failure>, world: &mut World<'_>) {
        let Some(op) = self.ops.remove(serial) else { return };
        if let Some(target) = op.work.target().and_then(|target| self.targets.at(target)) {
            target.moves -= 1;
        }
        if matches!(&op.work, Work::Move(moving) if moving.stage == Stage::AwaitsSum) {
            self.answered();
        }
        world.signals.push(Signal::Completed {
            path: self.id,
            op: op.id,
            outcome,
        });
    }
}

fn open(op: &Op, work: Work) -> OpenOp {
    OpenOp {
        id: op.id,
        deadline: op.deadline,
        work,
        posted: 0,
        flushed: false,
        refused: false,
        ending: None,
    }
}

/// Can the checksum of all of it be asked for at once?
fn can_be_summed(part: &Move) -> bool {
    let (spans, range) = (part.leg.remote_spans(), &part.range);
    let runs = match range.is_empty() {
        true => 0,
        false => spans.run_at(range.end - 1) - spans.run_at(range.start) + 1,
    };
    runs <= SUM_RUNS_MAX && range.end - range.start <= SUM_BYTES_MAX
}

/// The rights of a queue pair that correspond to those of a region.
fn rights(location: &Location) -> u32 {
    let (access, mut flags) = (location.access, 0);
    if location.atomics {
        flags |= sys::IBV_ACCESS_REMOTE_ATOMIC;
    }
    if access.read {
        flags |= sys::IBV_ACCESS_REMOTE_READ;
    }
    if access.write {
        flags |= sys::IBV_ACCESS_REMOTE_WRITE;
    }
    flags
}
