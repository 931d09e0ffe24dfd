//! The transfer engine against a model: random lanes, losses, orders of completion, cancels and deadlines.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use weft_plan::{Bandwidth, LinkCost, Picos, Place, Span, Spans, Time};
use weft_protocol::transfer::{Engine, Lane, LaneId, Limits, PeerId, Post, Request, TransferEvent, TransferId};
use weft_protocol::{
    Access, Body, Carriage, Direction, Done, Epoch, Failure, Leg, Loss, Move, OpId, Refusal, Region, RegionKey,
    RemoteRegion, VecMemory,
};

const PEERS: u32 = 3;
const LANE_OPS: usize = 4;

#[derive(Clone, Debug)]
enum Action {
    Submit {
        peer: u32,
        write: bool,
        legs: Vec<u16>,
        within_us: u64,
        checksum: bool,
        tag: bool,
    },
    Pump {
        room: usize,
    },
    Complete {
        pick: usize,
        outcome: Outcome,
    },
    Cancel {
        pick: usize,
    },
    Advance {
        us: u64,
    },
    LoseLane {
        pick: usize,
        fenced: bool,
    },
    AddLane {
        peer: u32,
        class: usize,
        max_bytes: u64,
    },
    Fence,
    PeerGone {
        peer: u32,
    },
}

#[derive(Clone, Copy, Debug)]
enum Outcome {
    Fine,
    Lost,
    LostUnfenced,
    Refused,
    Unsupported,
    Late,
    Spoiled,
    Cancelled,
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        12 => Just(Outcome::Fine),
        3 => Just(Outcome::Lost),
        2 => Just(Outcome::LostUnfenced),
        1 => Just(Outcome::Refused),
        1 => Just(Outcome::Unsupported),
        1 => Just(Outcome::Late),
        1 => Just(Outcome::Spoiled),
        1 => Just(Outcome::Cancelled),
    ]
}

fn any_action() -> impl Strategy<Value = Action> {
    let submit = (
        0..PEERS,
        any::<bool>(),
        prop::collection::vec(0u16..1500, 0..4),
        0u64..5000,
        any::<bool>(),
        any::<bool>(),
    );
    prop_oneof![
        4 => submit.prop_map(|(peer, write, legs, within_us, checksum, tag)| {
            Action::Submit { peer, write, legs, within_us, checksum, tag }
        }),
        8 => (0usize..6).prop_map(|room| Action::Pump { room }),
        16 => (any::<usize>(), any_outcome()).prop_map(|(pick, outcome)| Action::Complete { pick, outcome }),
        1 => any::<usize>().prop_map(|pick| Action::Cancel { pick }),
        4 => (0u64..900).prop_map(|us| Action::Advance { us }),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(pick, fenced)| Action::LoseLane { pick, fenced }),
        2 => (0..PEERS, 0usize..2, 50u64..600).prop_map(|(peer, class, max_bytes)| {
            Action::AddLane { peer, class, max_bytes }
        }),
        1 => Just(Action::Fence),
        1 => (0..PEERS * 8).prop_map(|peer| Action::PeerGone { peer }),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Byte {
    Untouched,
    Open,
    Done,
    Hanging(LaneId),
    /// Lost for certain, but perhaps after it had landed, so that the peer may have been notified.
    Withheld,
}

struct Expected {
    request: Request,
    bytes: Vec<Vec<Byte>>,
    parts: BTreeMap<u32, (usize, std::ops::Range<u64>)>,
    announced: Option<u32>,
    /// What the peer has counted.
    landed: BTreeSet<u32>,
    recalled: bool,
    /// The peer has heard of the recall in time.
    revoked: bool,
    notified: bool,
    /// The engine has been told that the peer was notified, or may conclude that it was not.
    decided: bool,
    cancelled: bool,
    trouble: bool,
    /// Where it has lost parts after it was announced.
    lanes: BTreeSet<LaneId>,
}

impl Expected {
    fn notify_if_all_is_there(&mut self) {
        let all = self.announced == Some(self.landed.len() as u32);
        self.notified |= all && !self.revoked && self.request.direction == Direction::Write;
    }

    /// Whether the engine cannot know if the peer was notified.
    fn is_undecided(&self) -> bool {
        self.announced.is_some() && !self.decided
    }
}

#[derive(Default)]
struct FakeLane {
    open: BTreeMap<OpId, Move>,
    lost: bool,
}

struct World {
    engine: Engine,
    now: Time,
    lanes: Vec<FakeLane>,
    live: BTreeMap<TransferId, Expected>,
    ended: BTreeSet<TransferId>,
    fences: BTreeSet<LaneId>,
}

impl World {
    fn new() -> World {
        let limits = Limits {
            max_transfers: 40,
            max_transfers_per_peer: 20,
            max_attempts: 4,
        };
        World {
            engine: Engine::new(limits),
            now: Time::from_us(1),
            lanes: Vec::new(),
            live: BTreeMap::new(),
            ended: BTreeSet::new(),
            fences: BTreeSet::new(),
        }
    }

    fn apply(&mut self, action: Action) {
        match action {
            Action::Submit {
                peer,
                write,
                legs,
                within_us,
                checksum,
                tag,
            } => {
                let request = Request::new(
                    PeerId(peer),
                    if write { Direction::Write } else { Direction::Read },
                    legs.iter().map(|len| Arc::new(leg(u64::from(*len)))).collect(),
                    self.now.saturating_add(Time::from_us(within_us)),
                )
                .checksum(checksum)
                .tag(tag.then_some(77));
                if let Ok(id) = self.engine.submit(request.clone(), self.now) {
                    let bytes = request
                        .legs
                        .iter()
                        .map(|l| vec![Byte::Untouched; l.bytes() as usize])
                        .collect();
                    let expected = Expected {
                        request,
                        bytes,
                        parts: BTreeMap::new(),
                        announced: None,
                        landed: BTreeSet::new(),
                        recalled: false,
                        revoked: false,
                        notified: false,
                        decided: false,
                        lanes: BTreeSet::new(),
                        cancelled: false,
                        trouble: false,
                    };
                    assert!(self.live.insert(id, expected).is_none());
                }
            }
            Action::Pump { room } => self.pump(room),
            Action::Complete { pick, outcome } => {
                let open: Vec<(usize, OpId)> = self.open_ops();
                if !open.is_empty() {
                    let (lane, op) = open[pick % open.len()];
                    self.complete(lane, op, outcome);
                }
            }
            Action::Cancel { pick } => {
                if let Some(id) = self.live.keys().copied().nth(pick % self.live.len().max(1)) {
                    let expected = self.live.get_mut(&id).unwrap();
                    expected.cancelled = true;
                    self.engine.cancel(id, self.now);
                }
            }
            Action::Advance { us } => {
                self.now = self.now.saturating_add(Time::from_us(us));
                self.engine.on_timeout(self.now);
            }
            Action::LoseLane { pick, fenced } => {
                let alive: Vec<usize> = (0..self.lanes.len()).filter(|i| !self.lanes[*i].lost).collect();
                if !alive.is_empty() {
                    self.lose(alive[pick % alive.len()], fenced);
                }
            }
            Action::AddLane { peer, class, max_bytes } => {
                let id = LaneId(self.lanes.len() as u32);
                self.lanes.push(FakeLane::default());
                self.engine.add_lane(Lane {
                    id,
                    peer: PeerId(peer),
                    transport: ["fast", "slow"][class],
                    carries: vec![Carriage::host(
                        LinkCost {
                            latency: Picos::from_us([1, 10][class]),
                            per_span: Picos::ZERO,
                            bandwidth: Bandwidth::from_bytes_per_sec([10_000_000_000, 1_000_000_000][class]),
                        },
                        max_bytes,
                    )],
                    preference: 0,
                    awaits_ready: false,
                    numa: None,
                    max_op_runs: 16,
                    max_inflight_ops: LANE_OPS,
                    max_inflight_bytes: 3 * max_bytes,
                });
            }
            Action::Fence => {
                self.hear_of_notifications();
                for lane in std::mem::take(&mut self.fences) {
                    self.lose(lane.0 as usize, false);
                    for expected in self.live.values_mut() {
                        let hangs = expected.bytes.iter().flatten().any(|b| *b == Byte::Hanging(lane));
                        expected.decided |= expected.revoked && (hangs || expected.lanes.contains(&lane));
                        let undecided = expected.is_undecided();
                        for byte in expected.bytes.iter_mut().flatten() {
                            match *byte {
                                Byte::Hanging(on) if on == lane => *byte = Byte::Withheld,
                                _ => {}
                            }
                            if *byte == Byte::Withheld && !undecided {
                                *byte = Byte::Untouched;
                            }
                        }
                    }
                    self.engine.on_lane_fenced(lane, self.now);
                    self.take_events();
                }
            }
            Action::PeerGone { peer } if peer < PEERS => {
                for expected in self.live.values_mut().filter(|e| e.request.peer == PeerId(peer)) {
                    expected.trouble = true;
                }
                self.engine.on_peer_gone(PeerId(peer), Loss::Silent, self.now);
            }
            Action::PeerGone { .. } => {}
        }
        self.take_events();
    }

    /// The peer says which notifications it has delivered, and has heard which were recalled.
    fn hear_of_notifications(&mut self) {
        let ids: Vec<TransferId> = self.live.keys().copied().collect();
        for id in ids {
            let Some(expected) = self.live.get_mut(&id) else {
                continue;
            };
            expected.revoked |= expected.recalled && !expected.notified;
            if !expected.notified {
                continue;
            }
            expected.decided = true;
            for byte in expected.bytes.iter_mut().flatten() {
                if matches!(byte, Byte::Hanging(_) | Byte::Withheld) {
                    *byte = Byte::Done;
                }
            }
            self.engine.on_all_arrived(id, self.now);
            self.take_events();
        }
    }

    fn open_ops(&self) -> Vec<(usize, OpId)> {
        let of_lane = |(i, lane): (usize, &FakeLane)| lane.open.keys().map(|op| (i, *op)).collect::<Vec<_>>();
        self.lanes.iter().enumerate().flat_map(of_lane).collect()
    }

    fn pump(&mut self, room: usize) {
        let mut accepted = 0;
        while let Some(post) = self.engine.next_post() {
            if accepted == room {
                self.engine.unaccepted(post);
                continue;
            }
            accepted += 1;
            self.accept(post);
        }
    }

    fn accept(&mut self, post: Post) {
        let lane = &mut self.lanes[post.lane.0 as usize];
        assert!(!lane.lost, "a post to a lost lane");
        let Body::Move(part) = post.op.body else {
            panic!("the engine moves bytes and nothing else")
        };
        let (leg, expected) = find(&mut self.live, &part);
        assert_eq!(post.op.deadline, expected.request.deadline);
        for byte in &mut expected.bytes[leg][part.range.start as usize..part.range.end as usize] {
            assert_eq!(
                *byte,
                Byte::Untouched,
                "a byte that is open, hanging or done is carried again"
            );
            *byte = Byte::Open;
        }
        if let Some(arrival) = part.arrival {
            let known = expected.parts.entry(arrival.index).or_insert((leg, part.range.clone()));
            assert_eq!(*known, (leg, part.range.clone()), "a counted part has changed");
        }
        assert!(lane.open.insert(post.op.id, part).is_none());
        assert!(lane.open.len() <= LANE_OPS);
    }

    fn complete(&mut self, lane: usize, op: OpId, outcome: Outcome) {
        let id = LaneId(lane as u32);
        let part = self.lanes[lane].open.remove(&op).expect("an open operation");
        let (leg, expected) = find(&mut self.live, &part);
        let sum = part.near_sum().expect("it is there");
        let outcome = match outcome {
            Outcome::Fine => Ok(Done::moved(sum, sum)),
            Outcome::Spoiled => Ok(Done::moved(sum.map(|s| s ^ 1), sum)),
            Outcome::Lost => Err(Failure::PathLost {
                loss: Loss::ClosedByPeer,
                fenced: true,
            }),
            Outcome::LostUnfenced => Err(Failure::PathLost {
                loss: Loss::Silent,
                fenced: false,
            }),
            Outcome::Refused => Err(Refusal::OutOfBounds.into()),
            Outcome::Unsupported => Err(Refusal::Unsupported.into()),
            Outcome::Late => Err(Refusal::Late.into()),
            Outcome::Cancelled => Err(Failure::Cancelled),
        };
        let is_write = part.direction == Direction::Write;
        let lost = matches!(outcome, Err(Failure::PathLost { .. }));
        let overdue = self.now >= expected.request.deadline;
        let after = match outcome {
            Ok(done) if done.far_sum == sum => Byte::Done,
            Err(Failure::PathLost { fenced, .. }) if is_write => match (fenced || overdue, expected.is_undecided()) {
                _ if expected.decided && expected.notified => Byte::Done,
                (true, true) => Byte::Withheld,
                (true, false) => Byte::Untouched,
                (false, _) => Byte::Hanging(id),
            },
            _ => Byte::Untouched,
        };
        if lost && expected.announced.is_some() {
            expected.lanes.insert(id);
        }
        // What is lost has landed as often as not.
        if is_write && (outcome.is_ok() || lost && op.0.is_multiple_of(2)) {
            assert!(!expected.notified, "a write that lands after the peer was notified");
            expected.landed.extend(part.arrival.map(|arrival| arrival.index));
            expected.notify_if_all_is_there();
        }
        expected.trouble |= after != Byte::Done;
        expected.bytes[leg][part.range.start as usize..part.range.end as usize].fill(after);
        self.engine.on_completion(id, op, outcome, self.now);
        // A second completion of the same operation must be without effect.
        self.engine.on_completion(id, op, outcome, self.now);
        self.take_events();
    }

    fn lose(&mut self, lane: usize, fenced: bool) {
        if std::mem::replace(&mut self.lanes[lane].lost, true) {
            return;
        }
        let open: Vec<OpId> = self.lanes[lane].open.keys().copied().collect();
        for op in open {
            self.complete(lane, op, if fenced { Outcome::Lost } else { Outcome::LostUnfenced });
        }
        if fenced {
            for expected in self.live.values_mut() {
                let undecided = expected.is_undecided();
                for byte in expected.bytes.iter_mut().flatten() {
                    if *byte == Byte::Hanging(LaneId(lane as u32)) {
                        *byte = if undecided { Byte::Withheld } else { Byte::Untouched };
                    }
                }
            }
        }
        self.engine
            .on_lane_lost(LaneId(lane as u32), Loss::Silent, fenced, self.now);
        self.take_events();
    }

    fn take_events(&mut self) {
        while let Some(event) = self.engine.next_event() {
            match event {
                TransferEvent::Cut { id, tag, parts } => {
                    let expected = self.live.get_mut(&id).expect("a live transfer is announced");
                    assert_eq!(tag, 77);
                    assert_eq!(expected.announced.replace(parts), None, "announced twice");
                    expected.notify_if_all_is_there();
                }
                TransferEvent::Recall { id, tag } => {
                    let expected = self.live.get_mut(&id).expect("a live transfer is recalled");
                    assert_eq!(tag, 77);
                    assert!(expected.announced.is_some(), "recalled before it was announced");
                    assert!(!std::mem::replace(&mut expected.recalled, true), "recalled twice");
                }
                TransferEvent::FenceWanted { lane, .. } => {
                    assert!(self.lanes[lane.0 as usize].lost, "a fence for a lane that lives");
                    assert!(self.fences.insert(lane), "a fence is wanted twice");
                }
                TransferEvent::Ended { id, outcome } => {
                    assert!(self.ended.insert(id), "ended twice");
                    let expected = self.live.remove(&id).expect("what ended was submitted");
                    self.check_end(expected, outcome);
                }
            }
        }
    }

    fn check_end(
        &self,
        expected: Expected,
        outcome: Result<weft_protocol::transfer::Summary, weft_protocol::transfer::TransferError>,
    ) {
        let overdue = self.now >= expected.request.deadline;
        let all = || expected.bytes.iter().flatten();
        assert!(all().all(|b| *b != Byte::Open), "ended with an operation open");
        if !overdue {
            assert!(
                !all().any(|b| matches!(b, Byte::Hanging(_))),
                "ended with a write hanging"
            );
        }
        match outcome {
            Ok(summary) => {
                assert!(all().all(|b| *b == Byte::Done), "success without every byte");
                assert_eq!(summary.bytes, all().count() as u64);
                assert_eq!(
                    summary.carried.iter().map(|(_, bytes)| bytes).sum::<u64>(),
                    summary.bytes
                );
                let counted = !expected.recalled || expected.notified;
                if expected.request.direction == Direction::Write && expected.request.tag.is_some() && counted {
                    assert_eq!(
                        expected.announced,
                        Some(expected.parts.len() as u32),
                        "announced another number of parts"
                    );
                }
            }
            Err(error) => {
                assert!(
                    expected.cancelled || overdue || expected.trouble,
                    "failed for no reason: {error}"
                );
                let mut done: Vec<Vec<bool>> = expected.bytes.iter().map(|leg| vec![false; leg.len()]).collect();
                for (leg, range) in &error.done {
                    for flag in &mut done[*leg][range.start as usize..range.end as usize] {
                        assert!(!std::mem::replace(flag, true), "done twice");
                    }
                }
                let truth: Vec<Vec<bool>> = expected
                    .bytes
                    .iter()
                    .map(|leg| leg.iter().map(|b| *b == Byte::Done).collect())
                    .collect();
                assert_eq!(done, truth, "the error tells wrongly what is done");
                let undone: u64 = error.undone.iter().map(|(_, range)| range.end - range.start).sum();
                assert_eq!(undone + error.bytes_done, error.bytes_total);
            }
        }
    }

    /// From here on the transports answer nothing but cancels, and time passes: everything must end by its deadline.
    fn finish(mut self) {
        let last = self.live.values().map(|e| e.request.deadline).max().unwrap_or(self.now);
        self.recall();
        while self.now <= last {
            let next = self
                .engine
                .next_timeout()
                .unwrap_or(last)
                .max(self.now.saturating_add(Time::from_ns(1)));
            self.now = next;
            self.engine.on_timeout(next);
            self.take_events();
            self.recall();
            let late: Vec<_> = self
                .live
                .iter()
                .filter(|(_, e)| e.request.deadline <= self.now)
                .map(|(id, _)| id)
                .collect();
            assert!(late.is_empty(), "{late:?} did not end by the deadline");
        }
        assert!(self.live.is_empty(), "transfers that never end");
        assert!(self.open_ops().is_empty());
        assert!(self.engine.next_post().is_none());
    }

    fn recall(&mut self) {
        while let Some((lane, op)) = self.engine.next_cancel() {
            if self.lanes[lane.0 as usize].open.contains_key(&op) {
                self.complete(lane.0 as usize, op, Outcome::Cancelled);
            }
        }
    }
}

fn find<'a>(live: &'a mut BTreeMap<TransferId, Expected>, part: &Move) -> (usize, &'a mut Expected) {
    live.values_mut()
        .find_map(|e| {
            let leg = e.request.legs.iter().position(|l| Arc::ptr_eq(l, &part.leg))?;
            Some((leg, e))
        })
        .expect("a post belongs to a live transfer")
}

/// A leg of `len` bytes, in pieces so that runs matter.
fn leg(len: u64) -> Leg {
    let key = RegionKey {
        epoch: Epoch(1),
        slot: 0,
        secret: 0,
    };
    let mut near = Spans::new();
    let mut left = len;
    let mut offset = 0;
    while left > 0 {
        let piece = left.min(10 + offset % 31);
        near.push(Span { offset, len: piece });
        offset += piece + 1;
        left -= piece;
    }
    let local = Region {
        key,
        memory: Arc::new(VecMemory::new((0..offset).map(|i| i as u8).collect())),
        place: Place::DRAM,
        access: Access::NONE,
    };
    let remote = RemoteRegion {
        key,
        len,
        place: Place::DRAM,
        access: Access::READ_WRITE,
        grants: Arc::from([]),
    };
    Leg::new(local, near, remote, Spans::contiguous(0, len)).expect("a leg within its regions")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000,
        failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn transfers_keep_their_promises(actions in prop::collection::vec(any_action(), 1..250)) {
        let mut world = World::new();
        for peer in 0..PEERS {
            world.apply(Action::AddLane { peer, class: (peer % 2) as usize, max_bytes: 100 + u64::from(peer) * 200 });
        }
        for action in actions {
            world.apply(action);
        }
        world.finish();
    }
}
