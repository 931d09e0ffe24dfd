//! Transfers through host memory, between transports that each carry a part of the way.

use weft_plan::PlaceKind;

use super::*;
use crate::agent::PeerError;
use crate::loopback::PlacedMemory;
use crate::transport::Carriage;

const GPU: Place = Place::Gpu { ordinal: 0 };
const PIECE: u64 = 64 << 10;
const PIECES: u64 = 4;
/// Many times what the ring holds, and no multiple of a piece.
const LEN: usize = 3_000_001;

/// An agent with a network, and with a transport of its own places that carries these.
fn agent_with(network: &Loopback, name: &str, epoch: u64, own: &[(PlaceKind, PlaceKind)]) -> Core<LoopbackEndpoint> {
    agent_over(slots_with(network, name, epoch, own), name, epoch, b"secret")
}

fn slots_with(
    network: &Loopback,
    name: &str,
    epoch: u64,
    own: &[(PlaceKind, PlaceKind)],
) -> Vec<Slot<LoopbackEndpoint>> {
    let cost = network.endpoint("costs as much", Epoch(0)).capabilities().carries[0].cost;
    let carries = own.iter().map(|(near, far)| Carriage::new(*near, *far, cost, 1 << 20));
    let here = Loopback::new().endpoint_carrying("own places", Epoch(epoch), carries.collect());
    let slot = |reach, paths, transport| Slot {
        reach,
        preference: 0,
        paths,
        transport: Box::new(transport),
    };
    let network = slot(Reach::Anywhere, 2, network.endpoint(name, Epoch(epoch)));
    vec![network, slot(Reach::Here, 1, here)]
}

fn pair_with(own: &[(PlaceKind, PlaceKind)]) -> Pair {
    let network = Loopback::new();
    let mut near = agent_with(&network, "near", 1, own);
    give_ring(&mut near, PIECES);
    Pair::of(near, agent(&network, "far", "far", 2, b"secret"))
}

fn give_ring(agent: &mut Core<LoopbackEndpoint>, pieces: u64) {
    let ring = Arc::new(VecMemory::zeroed((PIECE * pieces) as usize));
    let ring = agent.register(ring, Place::DRAM).expect("host memory");
    agent.stage_through(&ring.key, PIECE).expect("a ring");
}

fn pattern(len: usize, salt: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(31) ^ (i >> 9) ^ salt) as u8)
        .collect()
}

fn placed(pair: &mut Pair, place: Place, bytes: Vec<u8>) -> (Arc<PlacedMemory>, Region) {
    let memory = Arc::new(PlacedMemory::new(place, bytes));
    let region = pair
        .near
        .register(memory.clone(), place)
        .expect("its transport knows it");
    (memory, region)
}

fn request(pair: &Pair, peer: PeerId, direction: Direction, near: &Region, far: crate::RemoteRegion) -> Request {
    let spans = Spans::contiguous(0, far.len);
    let leg = Leg::new(near.clone(), spans.clone(), far, spans).expect("a leg");
    let deadline = pair.now.saturating_add(Time::from_secs(1));
    Request::new(peer, direction, Arc::from([Arc::new(leg)]), deadline).checksum(true)
}

#[test]
fn device_memory_goes_to_a_peer_and_back_through_the_ring() {
    // Whichever of the two sides its transport takes for the near one.
    for own in [(PlaceKind::Dram, PlaceKind::Gpu), (PlaceKind::Gpu, PlaceKind::Dram)] {
        let mut pair = pair_with(&[own]);
        let peer = pair.connect();
        let far = pair.publish(vec![0; LEN], Access::READ_WRITE);
        pair.until("the name", |p| p.near.region(peer, "kv").is_some());
        let (_, device) = placed(&mut pair, GPU, pattern(LEN, 1));
        let id = pair.transfer(peer, Direction::Write, &device, Some(b"there"));
        assert_eq!(pair.outcome(id), Ok(LEN as u64));
        let mut found = vec![0; LEN];
        far.memory.bytes().read(0, &mut found);
        assert!(found == pattern(LEN, 1), "{own:?}: what arrived is not what was sent");
        let told = |e: &Event| matches!(e, Event::Notified { payload, .. } if payload == b"there");
        pair.until("the notification", |p| p.heard_far.iter().any(told));
        let (back, device) = placed(&mut pair, GPU, vec![0; LEN]);
        let id = pair.transfer(peer, Direction::Read, &device, None);
        assert_eq!(pair.outcome(id), Ok(LEN as u64));
        assert!(back.look().snapshot() == pattern(LEN, 1), "{own:?}: what came back");
    }
}

#[test]
fn a_spill_from_a_device_to_a_file_goes_through_the_ring() {
    let mut pair = pair_with(&[(PlaceKind::Dram, PlaceKind::Gpu), (PlaceKind::Dram, PlaceKind::File)]);
    let (_, device) = placed(&mut pair, GPU, pattern(LEN, 2));
    let (file, file_region) = placed(&mut pair, Place::File, vec![0; LEN]);
    let own = pair.near.own_region(&file_region.key).expect("registered");
    let spill = request(&pair, PeerId::HERE, Direction::Write, &device, own.clone());
    let id = pair.near.submit(spill, None, pair.now).expect("submitted");
    assert_eq!(pair.outcome(id), Ok(LEN as u64));
    assert!(file.look().snapshot() == pattern(LEN, 2));
    let (back, device) = placed(&mut pair, GPU, vec![0; LEN]);
    let fetch = request(&pair, PeerId::HERE, Direction::Read, &device, own);
    let id = pair.near.submit(fetch, None, pair.now).expect("submitted");
    assert_eq!(pair.outcome(id), Ok(LEN as u64));
    assert!(back.look().snapshot() == pattern(LEN, 2));
}

#[test]
fn transfers_share_the_ring_and_each_gets_its_own_bytes() {
    let mut pair = pair_with(&[(PlaceKind::Dram, PlaceKind::Gpu), (PlaceKind::Dram, PlaceKind::File)]);
    let works: Vec<_> = (0..9)
        .map(|i| {
            let (_, device) = placed(&mut pair, GPU, pattern(LEN / 3, i));
            let (file, file_region) = placed(&mut pair, Place::File, vec![0; LEN / 3]);
            let own = pair.near.own_region(&file_region.key).expect("registered");
            let spill = request(&pair, PeerId::HERE, Direction::Write, &device, own);
            let id = pair.near.submit(spill, None, pair.now).expect("submitted");
            (id, file, pattern(LEN / 3, i))
        })
        .collect();
    for (id, file, wanted) in works {
        assert_eq!(pair.outcome(id), Ok(wanted.len() as u64));
        assert!(file.look().snapshot() == wanted);
    }
}

#[test]
fn a_staged_transfer_is_cancelled_expires_and_is_refused_as_one_of_one_hop() {
    let mut pair = pair_with(&[(PlaceKind::Dram, PlaceKind::Gpu)]);
    let peer = pair.connect();
    let far = pair.publish(vec![0; LEN], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let (_, device) = placed(&mut pair, GPU, pattern(LEN, 3));
    let remote = pair.near.region(peer, "kv").expect("published").clone();
    for late in [false, true] {
        let mut write = request(&pair, peer, Direction::Write, &device, remote.clone());
        if late {
            write.deadline = pair.now.saturating_add(Time::from_us(2500));
        }
        let id = pair.near.submit(write, None, pair.now).expect("submitted");
        pair.turn();
        if !late {
            pair.near.cancel(id, pair.now);
        }
        let cause = if late { Failure::Expired } else { Failure::Cancelled };
        let is_end = move |e: &Event| matches!(e, Event::Ended { id: ended, .. } if *ended == id);
        pair.until("the end", |p| p.heard.iter().any(is_end));
        let Some(Event::Ended {
            outcome: Err(error), ..
        }) = pair.heard.iter().find(|e| is_end(e))
        else {
            panic!("it must not have succeeded");
        };
        assert_eq!((error.cause, error.peer), (cause, peer));
        let done: u64 = error.done.iter().map(|(_, range)| range.end - range.start).sum();
        let undone: u64 = error.undone.iter().map(|(_, range)| range.end - range.start).sum();
        assert_eq!((done, done + undone), (error.bytes_done, LEN as u64));
        let mut found = vec![0; LEN];
        far.memory.bytes().read(0, &mut found);
        let wanted = pattern(LEN, 3);
        for (_, range) in &error.done {
            let range = range.start as usize..range.end as usize;
            assert!(
                found[range.clone()] == wanted[range],
                "said to be done, and is not there"
            );
        }
        far.memory.bytes().write(0, &vec![7; LEN]);
        for _ in 0..20 {
            pair.turn();
        }
        far.memory.bytes().read(0, &mut found);
        assert!(found.iter().all(|byte| *byte == 7), "touched after its end");
    }
    assert_eq!(pair.near.release(&device.key, pair.now), Ok(Progress::Idle));
    let write = request(&pair, peer, Direction::Write, &device, remote);
    let id = pair.near.submit(write, None, pair.now).expect("submitted");
    assert_eq!(pair.outcome(id), Err(Failure::Refused(Refusal::Released)));
    assert_eq!(pair.near.under_way().pieces, 0, "a piece was lost");
}

#[test]
fn a_staged_transfer_ends_with_its_peer_also_where_it_has_not_begun() {
    let mut pair = pair_with(&[(PlaceKind::Dram, PlaceKind::Gpu)]);
    let peer = pair.connect();
    pair.publish(vec![0; LEN], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let (_, device) = placed(&mut pair, GPU, pattern(LEN, 4));
    let ids: Vec<_> = (0..5)
        .map(|_| pair.transfer(peer, Direction::Write, &device, None))
        .collect();
    pair.turn();
    pair.near.disconnect(peer, pair.now);
    for id in ids {
        assert!(matches!(pair.outcome(id), Err(Failure::PathLost { .. })));
    }
    assert_eq!(pair.near.under_way().pieces, 0, "a piece was lost");
}

#[test]
fn without_a_way_or_without_a_ring_nothing_is_begun() {
    let network = Loopback::new();
    let near = agent_with(&network, "near", 1, &[(PlaceKind::Dram, PlaceKind::Gpu)]);
    let mut pair = Pair::of(near, agent(&network, "far", "far", 2, b"secret"));
    let peer = pair.connect();
    pair.publish(vec![0; LEN], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let remote = pair.near.region(peer, "kv").expect("published").clone();
    let (_, device) = placed(&mut pair, GPU, vec![0; LEN]);
    let write = request(&pair, peer, Direction::Write, &device, remote.clone());
    assert_eq!(pair.near.submit(write, None, pair.now), Err(PeerError::NoStage));
    let elsewhere = crate::RemoteRegion {
        place: Place::Object,
        ..remote
    };
    let write = request(&pair, peer, Direction::Write, &device, elsewhere);
    let refused = pair.near.submit(write, None, pair.now);
    assert!(matches!(refused, Err(PeerError::NoRoute(_))), "{refused:?}");
}

#[test]
fn a_staged_transfer_comes_after_what_its_caller_does() {
    let mut pair = pair_with(&[(PlaceKind::Dram, PlaceKind::Gpu)]);
    let peer = pair.connect();
    let far = pair.publish(vec![0; LEN], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let (memory, device) = placed(&mut pair, GPU, vec![0; LEN]);
    let remote = pair.near.region(peer, "kv").expect("published").clone();
    let flag = Arc::new(crate::Flag::default());
    let write = request(&pair, peer, Direction::Write, &device, remote).after(Some(flag.clone()));
    let id = pair.near.submit(write, None, pair.now).expect("submitted");
    for _ in 0..5 {
        pair.turn();
    }
    assert_eq!(pair.near.under_way().pieces, 0, "it holds nothing before it begins");
    crate::HostBytes::write(memory.look(), 0, &pattern(LEN, 6));
    flag.raise();
    assert_eq!(pair.outcome(id), Ok(LEN as u64));
    let mut found = vec![0; LEN];
    far.memory.bytes().read(0, &mut found);
    assert!(found == pattern(LEN, 6), "read before its time had come");
}

#[test]
fn a_transport_that_the_peer_has_not_is_no_way_to_it() {
    let network = Loopback::new();
    let mut slots = slots_with(&network, "near", 1, &[(PlaceKind::Dram, PlaceKind::Gpu)]);
    let cost = slots[0].transport.capabilities().carries[0].cost;
    let at_once = Carriage::new(PlaceKind::Gpu, PlaceKind::Dram, cost, 1 << 20);
    let nearer = Loopback::new().endpoint_carrying("near", Epoch(1), vec![at_once]);
    slots.push(Slot {
        reach: Reach::Anywhere,
        preference: 0,
        paths: 1,
        transport: Box::new(nearer.called("nearer")),
    });
    let mut near = agent_over(slots, "near", 1, b"secret");
    give_ring(&mut near, PIECES);
    let mut pair = Pair::of(near, agent(&network, "far", "far", 2, b"secret"));
    let peer = pair.connect();
    let far = pair.publish(vec![0; LEN], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let (_, device) = placed(&mut pair, GPU, pattern(LEN, 7));
    let id = pair.transfer(peer, Direction::Write, &device, None);
    assert_eq!(pair.outcome(id), Ok(LEN as u64), "through the ring");
    let mut found = vec![0; LEN];
    far.memory.bytes().read(0, &mut found);
    assert!(found == pattern(LEN, 7));
}

#[test]
fn a_frozen_peer_leaves_the_others_a_share_of_the_ring() {
    for direction in [Direction::Write, Direction::Read] {
        let network = Loopback::new();
        let mut near = agent_with(&network, "near", 1, &[(PlaceKind::Dram, PlaceKind::Gpu)]);
        give_ring(&mut near, PIECES);
        let mut pair = Pair::of(near, agent(&network, "far", "far", 2, b"secret"));
        let peer = pair.connect();
        pair.publish(pattern(LEN, 8), Access::READ_WRITE);
        let mut frozen = agent(&network, "frozen", "frozen", 3, b"secret");
        let target = Target::at(frozen.addresses()[0].clone(), Time::from_secs(5));
        let stuck = pair.near.connect(target, pair.now).expect("the address is understood");
        let region = frozen.register(Arc::new(VecMemory::zeroed(LEN)), Place::DRAM);
        let key = region.expect("memory").key;
        frozen
            .publish("kv", &key, Access::READ_WRITE, pair.now)
            .expect("the name is free");
        for _ in 0..50 {
            frozen.pump(pair.now);
            pair.turn();
        }
        let [there, nowhere] = [peer, stuck].map(|peer| pair.near.region(peer, "kv").expect("published").clone());
        frozen.slots[0].transport.freeze();
        let (_, device) = placed(&mut pair, GPU, pattern(LEN, 8));
        let lost = request(&pair, stuck, direction, &device, nowhere);
        let deadline = lost.deadline;
        let lost = pair.near.submit(lost, None, pair.now).expect("submitted");
        for _ in 0..20 {
            pair.turn();
        }
        assert!(pair.near.under_way().pieces > 0, "it has begun, and waits for its peer");
        let (_, device) = placed(&mut pair, GPU, pattern(LEN, 8));
        let healthy = request(&pair, peer, direction, &device, there);
        let healthy = pair.near.submit(healthy, None, pair.now).expect("submitted");
        assert_eq!(pair.outcome(healthy), Ok(LEN as u64), "{direction:?}");
        assert!(pair.now < deadline, "{direction:?}: it has waited for the other");
        assert_eq!(pair.outcome(lost), Err(Failure::Expired), "{direction:?}");
        assert_eq!(pair.near.under_way().pieces, 0, "a piece was lost");
    }
}

#[test]
fn a_hop_goes_from_the_side_that_carries_such_spans() {
    let network = Loopback::new();
    let mut slots = slots_with(&network, "near", 1, &[]);
    let cost = slots[0].transport.capabilities().carries[0].cost;
    // The cheaper way carries whole pages only.
    let pages = Carriage::new(PlaceKind::Dram, PlaceKind::Gpu, cost, 1 << 20).align(4096);
    let dear = weft_plan::LinkCost {
        latency: weft_plan::Picos::from_us(100),
        ..cost
    };
    let bytes = Carriage::new(PlaceKind::Gpu, PlaceKind::Dram, dear, 1 << 20);
    *slots[1].transport = Loopback::new().endpoint_carrying("own places", Epoch(1), vec![pages, bytes]);
    let mut near = agent_over(slots, "near", 1, b"secret");
    give_ring(&mut near, PIECES);
    let mut pair = Pair::of(near, agent(&network, "far", "far", 2, b"secret"));
    let peer = pair.connect();
    pair.publish(vec![0; LEN], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let (_, device) = placed(&mut pair, GPU, pattern(LEN, 9));
    let id = pair.transfer(peer, Direction::Write, &device, None);
    assert_eq!(pair.outcome(id), Ok(LEN as u64));
}
