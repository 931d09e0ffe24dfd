//! Moves among an agent's own places: transfers like any other, without a peer.

use weft_plan::PlaceKind;

use super::*;
use crate::agent::PeerError;
use crate::loopback::PlacedMemory;
use crate::region::RemoteRegion;
use crate::transport::Carriage;

/// One agent whose only transport reaches its own places.
struct Alone {
    core: Core<LoopbackEndpoint>,
    now: Time,
    heard: Vec<Event>,
}

impl Alone {
    fn new() -> Alone {
        Alone::over(Loopback::new().endpoint("alone", Epoch(1)))
    }

    fn over(transport: LoopbackEndpoint) -> Alone {
        let slot = Slot {
            reach: Reach::Here,
            preference: 0,
            paths: 2,
            transport: Box::new(transport),
        };
        Alone {
            core: agent_over(vec![slot], "alone", 1, b"secret"),
            now: Time::ZERO,
            heard: Vec::new(),
        }
    }

    fn turn(&mut self) {
        self.now = self.now.saturating_add(Time::from_us(100));
        self.core.pump(self.now);
        self.heard.extend(std::iter::from_fn(|| self.core.next_event()));
    }

    fn register(&mut self, bytes: Vec<u8>) -> (Arc<VecMemory>, Region, RemoteRegion) {
        let memory = Arc::new(VecMemory::new(bytes));
        let region = self.core.register(memory.clone(), Place::DRAM).expect("memory");
        let own = self.core.own_region(&region.key).expect("registered");
        (memory, region, own)
    }

    fn request(&self, near: &Region, far: RemoteRegion, direction: Direction) -> Request {
        let spans = Spans::contiguous(0, far.len);
        let leg = Leg::new(near.clone(), spans.clone(), far, spans).expect("a leg");
        let deadline = self.now.saturating_add(Time::from_secs(1));
        Request::new(PeerId::HERE, direction, Arc::from([Arc::new(leg)]), deadline).checksum(true)
    }

    fn outcome(&mut self, id: TransferId) -> Result<u64, Failure> {
        for _ in 0..100_000 {
            let is_end = |e: &Event| matches!(e, Event::Ended { id: ended, .. } if *ended == id);
            if let Some(at) = self.heard.iter().position(is_end) {
                return match self.heard.remove(at) {
                    Event::Ended { outcome, .. } => outcome.map(|s| s.bytes).map_err(|e| e.cause),
                    _ => unreachable!("it is an end"),
                };
            }
            self.turn();
        }
        panic!("waited in vain for the end of a transfer");
    }
}

#[test]
fn own_memory_is_moved_both_ways_without_a_peer_and_whatever_peers_may_do() {
    let mut alone = Alone::new();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7) as u8).collect();
    let (_, near, _) = alone.register(bytes.clone());
    let (spilled, _, far) = alone.register(vec![0; bytes.len()]);
    assert_eq!(far.access, Access::NONE, "no peer may touch it");
    let request = alone.request(&near, far.clone(), Direction::Write);
    let id = alone.core.submit(request, None, alone.now).expect("submitted");
    assert_eq!(alone.outcome(id), Ok(3_000_000));
    assert!(spilled.snapshot() == bytes);
    let (back, back_region, _) = alone.register(vec![0; bytes.len()]);
    let request = alone.request(&back_region, far, Direction::Read);
    let id = alone.core.submit(request, None, alone.now).expect("submitted");
    assert_eq!(alone.outcome(id), Ok(3_000_000));
    assert!(back.snapshot() == bytes);
    let ups = |e: &&Event| matches!(e, Event::PathUp { peer: PeerId::HERE, .. });
    assert_eq!(alone.heard.iter().filter(ups).count(), 2);
    assert!(alone.core.addresses().is_empty(), "no peer is told of it");
}

#[test]
fn own_moves_are_cancelled_expire_and_are_refused_as_any_other() {
    let mut alone = Alone::new();
    let (_, near, _) = alone.register(vec![1; 8 << 20]);
    let (far, far_region, own) = alone.register(vec![0; 8 << 20]);
    let request = alone.request(&near, own.clone(), Direction::Write);
    let id = alone.core.submit(request, None, alone.now).expect("submitted");
    alone.turn();
    alone.core.cancel(id, alone.now);
    assert_eq!(alone.outcome(id), Err(Failure::Cancelled));
    let mut late = alone.request(&near, own.clone(), Direction::Write);
    late.deadline = alone.now.saturating_add(Time::from_us(150));
    let id = alone.core.submit(late, None, alone.now).expect("submitted");
    assert_eq!(alone.outcome(id), Err(Failure::Expired));
    let stamp = vec![9; far.snapshot().len()];
    crate::HostBytes::write(&*far, 0, &stamp);
    for _ in 0..10 {
        alone.turn();
    }
    assert!(far.snapshot() == stamp, "touched after the end");
    let announced = alone.request(&near, own.clone(), Direction::Write);
    let refused = alone.core.submit(announced, Some(b"hello"), alone.now);
    assert_eq!(refused, Err(PeerError::NobodyThere));
    assert_eq!(alone.core.release(&far_region.key, alone.now), Ok(Progress::Idle));
    let request = alone.request(&near, own, Direction::Write);
    let id = alone.core.submit(request, None, alone.now).expect("submitted");
    assert_eq!(alone.outcome(id), Err(Failure::Refused(Refusal::Released)));
}

#[test]
fn a_lost_lane_to_own_places_is_opened_again() {
    let mut alone = Alone::new();
    let (_, near, _) = alone.register(vec![5; 4 << 20]);
    let (far, _, own) = alone.register(vec![0; 4 << 20]);
    alone.turn();
    let request = alone.request(&near, own, Direction::Write);
    let id = alone.core.submit(request, None, alone.now).expect("submitted");
    alone.turn();
    let (transport, path) = alone.core.path_over(PeerId::HERE, "loopback").expect("a lane");
    transport.close(path);
    assert_eq!(alone.outcome(id), Ok(4 << 20));
    assert!(far.snapshot().iter().all(|b| *b == 5));
    for _ in 0..1_000 {
        alone.turn();
    }
    let downs = alone
        .heard
        .iter()
        .filter(|e| matches!(e, Event::PathDown { .. }))
        .count();
    let ups = alone.heard.iter().filter(|e| matches!(e, Event::PathUp { .. })).count();
    assert_eq!((downs, ups), (1, 3));
    assert_eq!(alone.core.path_count(PeerId::HERE, "loopback"), 2);
    assert_eq!(
        alone.core.atomics.lane_count(PeerId::HERE),
        2,
        "nothing is left of the lost one"
    );
}

#[test]
fn a_lane_to_files_is_opened_with_the_first_of_them() {
    let cost = Loopback::new().endpoint("any", Epoch(0)).capabilities().carries[0].cost;
    let to_files = Carriage::new(PlaceKind::Dram, PlaceKind::File, cost, 1 << 20);
    let mut alone = Alone::over(Loopback::new().endpoint_carrying("alone", Epoch(1), vec![to_files]));
    let (_, near, _) = alone.register(vec![7; 64]);
    for _ in 0..10 {
        alone.turn();
    }
    assert_eq!(alone.core.path_count(PeerId::HERE, "loopback"), 0);
    assert_eq!(alone.core.next_timeout(), None, "nobody is woken for it");
    let file = Arc::new(PlacedMemory::zeroed(Place::File, 64));
    let region = alone.core.register(file.clone(), Place::File).expect("a file");
    let far = alone.core.own_region(&region.key).expect("registered");
    let request = alone.request(&near, far, Direction::Write);
    let id = alone.core.submit(request, None, alone.now).expect("submitted");
    // A short turn will do, which looks at no timer.
    alone.core.push(alone.now);
    assert_eq!(alone.core.path_count(PeerId::HERE, "loopback"), 2);
    assert_eq!(alone.outcome(id), Ok(64));
    assert_eq!(file.look().snapshot(), [7; 64]);
    // The second one finds them open.
    let second = Arc::new(PlacedMemory::zeroed(Place::File, 64));
    alone.core.register(second, Place::File).expect("a file");
    alone.turn();
    assert_eq!(alone.core.path_count(PeerId::HERE, "loopback"), 2);
}

#[test]
fn what_nothing_here_carries_is_refused_at_once_between_host_memory_too() {
    let cost = Loopback::new().endpoint("any", Epoch(0)).capabilities().carries[0].cost;
    let to_files = Carriage::new(PlaceKind::Dram, PlaceKind::File, cost, 1 << 20);
    let mut alone = Alone::over(Loopback::new().endpoint_carrying("alone", Epoch(1), vec![to_files]));
    let (_, near, _) = alone.register(vec![1; 64]);
    let (_, _, far) = alone.register(vec![0; 64]);
    let request = alone.request(&near, far, Direction::Write);
    let refused = alone.core.submit(request, None, alone.now);
    assert!(matches!(refused, Err(PeerError::NoRoute(_))), "{refused:?}");
}
