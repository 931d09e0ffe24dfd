//! Several rails between two agents: which meets which, who carries how much, and what happens when one is lost and comes back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use weft_plan::{Bandwidth, Bytes, Picos};

use super::*;
use crate::error::Loss;
use crate::faulty::{Faults, Faulty};
use crate::region::RegionKey;
use crate::throttled::{Rate, Throttled};
use crate::transport::{Body, Capabilities, Grant, Op, OpId, PathId, PeerAddress, Signal};

const BYTES: usize = 8 << 20;

/// What a test does to a rail, and sees of it.
#[derive(Clone, Debug, Default)]
struct Cable {
    pulled: Arc<AtomicBool>,
    carried: Arc<AtomicU64>,
}

impl Cable {
    fn pull(&self, pulled: bool) {
        self.pulled.store(pulled, Ordering::Relaxed);
    }
    fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }
}

/// A rail that stands on a cable.
#[derive(Debug)]
struct Wired<T> {
    inner: T,
    cable: Cable,
    paths: Vec<PathId>,
}

impl<T: Transport> Transport for Wired<T> {
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
        if self.cable.pulled.load(Ordering::Relaxed) {
            return Err(Loss::Unreachable);
        }
        let path = self.inner.open(peer, now)?;
        self.paths.push(path);
        Ok(path)
    }
    fn vouch(&mut self, path: PathId) {
        self.inner.vouch(path);
    }
    fn close(&mut self, path: PathId) {
        self.inner.close(path);
    }
    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        let accepted = self.inner.post(path, ops, now)?;
        let bytes = |op: &Op| match &op.body {
            Body::Move(part) => part.range.end - part.range.start,
            _ => 0,
        };
        let moved = ops[..accepted].iter().map(bytes).sum();
        self.cable.carried.fetch_add(moved, Ordering::Relaxed);
        Ok(accepted)
    }
    fn cancel(&mut self, path: PathId, op: OpId, now: Time) {
        self.inner.cancel(path, op, now);
    }
    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        if self.cable.pulled.load(Ordering::Relaxed) {
            for path in std::mem::take(&mut self.paths) {
                self.inner.close(path);
            }
        }
        self.inner.poll(now, signals)
    }
}

fn slot(transport: impl Transport + 'static) -> Slot<dyn Transport> {
    Slot {
        reach: Reach::Anywhere,
        preference: 0,
        paths: 1,
        transport: Box::new(transport),
    }
}

fn rate(megabytes_per_sec: u64) -> Rate {
    Rate {
        bandwidth: Bandwidth::from_bytes_per_sec(megabytes_per_sec * 1_000_000),
        burst: Bytes(64 << 10),
    }
}

/// Two agents with two rails each, of those speeds at the near end; the far end names its rails in the other order.
fn two_rails(speeds: [u64; 2]) -> (Pair<dyn Transport>, [Cable; 2]) {
    let network = Loopback::new();
    let cables = [Cable::default(), Cable::default()];
    let near = (0..2).map(|rail: usize| {
        slot(Wired {
            inner: Throttled::new(
                network.endpoint(&format!("net{rail} near"), Epoch(1)),
                rate(speeds[rail]),
            ),
            cable: cables[rail].clone(),
            paths: Vec::new(),
        })
    });
    let far = [1, 0].map(|rail| slot(network.endpoint(&format!("net{rail} far"), Epoch(2))));
    let near = agent_over(near.collect(), "near", 1, b"secret");
    let far = agent_over(far.into(), "far", 2, b"secret");
    (Pair::of(near, far), cables)
}

/// A connected pair, a far region of sevens and near memory of nothing.
fn with_memory(pair: &mut Pair<dyn Transport>) -> (PeerId, Region, Region) {
    let peer = pair.connect();
    let far = pair.publish(vec![7; BYTES], Access::READ_WRITE);
    pair.until("the publication", |p| p.near.region(peer, "kv").is_some());
    let memory = Arc::new(VecMemory::zeroed(BYTES));
    let near = pair.near.register(memory, Place::DRAM).expect("memory");
    (peer, near, far)
}

/// Where the near end's rails lead.
fn meetings(pair: &Pair<dyn Transport>, peer: PeerId) -> Vec<(usize, String)> {
    let rails = &pair.near.peers.at(peer.0).expect("connected").rails;
    let mut meetings: Vec<_> = rails.iter().map(|rail| (rail.slot, rail.address.0.clone())).collect();
    meetings.sort();
    meetings
}

#[test]
fn rails_of_one_network_meet_whatever_their_order() {
    let (mut pair, _) = two_rails([100, 100]);
    let peer = pair.connect();
    let expected = [(0, "loopback:net0 far".to_owned()), (1, "loopback:net1 far".to_owned())];
    assert_eq!(meetings(&pair, peer), expected);
}

#[test]
fn rails_of_unequal_speed_share_by_it() {
    let (mut pair, cables) = two_rails([120, 40]);
    let (peer, near, far) = with_memory(&mut pair);
    let started = pair.now;
    let read = pair.transfer(peer, Direction::Read, &near, None);
    assert_eq!(pair.outcome(read), Ok(BYTES as u64));
    assert!(contents(&near) == contents(&far));
    let share = cables[0].carried() as f64 / BYTES as f64;
    assert!((0.6..0.9).contains(&share), "the fast rail's share is {share}");
    let alone = rate(120).bandwidth.time_for(Bytes(BYTES as u64));
    let took = pair.now.saturating_sub(started);
    assert!(
        Picos::from(took) < alone,
        "{took} with both, {alone} with the fast one alone"
    );
}

/// Moves everything once while a rail is pulled in the middle, and once more after it has come back.
fn pulled_in_mid_transfer(direction: Direction, pulled: usize) {
    let (mut pair, cables) = two_rails([100, 100]);
    let (peer, near, far) = with_memory(&mut pair);
    near.memory.bytes().write(0, &[9; BYTES]);
    let expected = match direction {
        Direction::Read => vec![7; BYTES],
        Direction::Write => vec![9; BYTES],
    };
    let id = pair.transfer(peer, direction, &near, Some(b"all of it"));
    pair.until("the middle", |p| {
        cables.iter().all(|c| c.carried() > BYTES as u64 / 8)
            || p.heard.iter().any(|e| matches!(e, Event::Ended { .. }))
    });
    cables[pulled].pull(true);
    let before = cables[pulled].carried();
    assert_eq!(
        pair.outcome(id),
        Ok(BYTES as u64),
        "the other rail carries what was left"
    );
    assert_eq!(cables[pulled].carried(), before, "and the lost one nothing");
    assert!(
        contents(&near) == expected && contents(&far) == expected,
        "both ends are exact"
    );
    let notified = |e: &&Event| matches!(e, Event::Notified { .. });
    pair.until("the notification", |p| p.heard_far.iter().filter(notified).count() == 1);

    cables[pulled].pull(false);
    pair.until("the rail's return", |p| p.near.paths.iter().count() == 2);
    for _ in 0..10 {
        pair.turn();
    }
    let again = pair.transfer(peer, direction, &near, None);
    assert_eq!(pair.outcome(again), Ok(BYTES as u64));
    assert!(
        cables[pulled].carried() > before + BYTES as u64 / 4,
        "it carries its share again"
    );
}

#[test]
fn a_lost_rail_leaves_its_reads_to_the_other_and_joins_again() {
    (0..2).for_each(|rail| pulled_in_mid_transfer(Direction::Read, rail));
}

#[test]
fn a_lost_rail_leaves_its_writes_to_the_other_and_joins_again() {
    (0..2).for_each(|rail| pulled_in_mid_transfer(Direction::Write, rail));
}

#[test]
fn a_rail_that_loses_moves_is_made_up_for() {
    let network = Loopback::new();
    let faults = Faults {
        seed: 5,
        lose_move: 0.5,
        ..Faults::default()
    };
    let lossy = Faulty::new(network.endpoint("net0 near", Epoch(1)), faults);
    let sound = network.endpoint("net1 near", Epoch(1));
    let near = agent_over(vec![slot(lossy), slot(sound)], "near", 1, b"secret");
    let far = [0, 1].map(|rail| slot(network.endpoint(&format!("net{rail} far"), Epoch(2))));
    let mut pair = Pair::of(near, agent_over(far.into(), "far", 2, b"secret"));
    let (peer, near, far) = with_memory(&mut pair);
    for _ in 0..4 {
        near.memory.bytes().write(0, &vec![0; BYTES]);
        let read = pair.transfer(peer, Direction::Read, &near, None);
        assert_eq!(pair.outcome(read), Ok(BYTES as u64));
        assert!(contents(&near) == contents(&far));
    }
}
