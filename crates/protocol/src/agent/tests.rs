//! Two agents over loopback, turned by hand.

mod arrived;
mod bounds;
mod here;
mod parcels;
mod rails;
mod staged;

use std::sync::Arc;

use weft_plan::{Place, Spans, Time};

use super::{ConnectError, Core, Event, Reach, Settings, Slot, Target};
use crate::error::{Failure, Refusal};
use crate::leg::{Direction, Leg};
use crate::loopback::{Loopback, LoopbackEndpoint};
use crate::memory::VecMemory;
use crate::region::{Access, Epoch, Region};
use crate::seeded::Seeded;
use crate::session::{Config, Secret, SessionLoss};
use crate::transfer::{PeerId, Request, TransferId};
use crate::transport::{Progress, Transport};

struct Pair<T: ?Sized + Transport = LoopbackEndpoint> {
    near: Core<T>,
    far: Core<T>,
    now: Time,
    heard: Vec<Event>,
    heard_far: Vec<Event>,
}

fn agent(network: &Loopback, place: &str, name: &str, epoch: u64, secret: &[u8]) -> Core<LoopbackEndpoint> {
    let slot = Slot {
        reach: Reach::Anywhere,
        preference: 0,
        paths: 2,
        transport: Box::new(network.endpoint(place, Epoch(epoch))),
    };
    agent_over(vec![slot], name, epoch, secret)
}

fn agent_over<T: ?Sized + Transport>(slots: Vec<Slot<T>>, name: &str, epoch: u64, secret: &[u8]) -> Core<T> {
    let config = Config::new(name, Epoch(epoch), Secret::new(secret));
    let mut chance = Seeded::new(epoch);
    let random = Box::new(move || {
        let mut bytes = [0; 32];
        chance.fill(&mut bytes);
        bytes
    });
    Core::new(Settings::new(config), slots, random)
}

impl Pair {
    fn new() -> Pair {
        let network = Loopback::new();
        Pair::of(
            agent(&network, "near", "near", 1, b"secret"),
            agent(&network, "far", "far", 2, b"secret"),
        )
    }
}

impl<T: ?Sized + Transport> Pair<T> {
    fn of(near: Core<T>, far: Core<T>) -> Pair<T> {
        Pair {
            near,
            far,
            now: Time::ZERO,
            heard: Vec::new(),
            heard_far: Vec::new(),
        }
    }

    fn turn(&mut self) {
        self.now = self.now.saturating_add(Time::from_ms(1));
        self.near.pump(self.now);
        self.far.pump(self.now);
        self.heard.extend(std::iter::from_fn(|| self.near.next_event()));
        self.heard_far.extend(std::iter::from_fn(|| self.far.next_event()));
    }

    fn until(&mut self, what: &str, met: impl Fn(&Pair<T>) -> bool) {
        for _ in 0..10_000 {
            if met(self) {
                return;
            }
            self.turn();
        }
        panic!(
            "waited in vain for {what}; heard {:?} and {:?}",
            self.heard, self.heard_far
        );
    }

    fn connect(&mut self) -> PeerId {
        let target = Target::at(self.far.addresses()[0].clone(), Time::from_secs(5));
        let peer = self.near.connect(target, self.now).expect("the address is understood");
        self.until("a session", |p| {
            let ups = |events: &[Event]| events.iter().filter(|e| matches!(e, Event::PathUp { .. })).count();
            ups(&p.heard) >= 2 && ups(&p.heard_far) >= 2
        });
        peer
    }

    fn publish(&mut self, bytes: Vec<u8>, access: Access) -> Region {
        let region = self
            .far
            .register(Arc::new(VecMemory::new(bytes)), Place::DRAM)
            .expect("memory");
        self.far
            .publish("kv", &region.key, access, self.now)
            .expect("the name is free");
        region
    }

    fn transfer(&mut self, peer: PeerId, direction: Direction, local: &Region, announce: Option<&[u8]>) -> TransferId {
        let remote = self.near.region(peer, "kv").expect("published").clone();
        let spans = Spans::contiguous(0, remote.len);
        let leg = Leg::new(local.clone(), spans.clone(), remote, spans).expect("a leg");
        let request = Request::new(
            peer,
            direction,
            Arc::from([Arc::new(leg)]),
            self.now.saturating_add(Time::from_secs(1)),
        );
        self.near.submit(request, announce, self.now).expect("submitted")
    }

    fn outcome(&mut self, id: TransferId) -> Result<u64, Failure> {
        let is_end = move |e: &Event| matches!(e, Event::Ended { id: ended, .. } if *ended == id);
        self.until("the end of a transfer", |p| p.heard.iter().any(is_end));
        match self.heard.iter().find(|e| is_end(e)) {
            Some(Event::Ended { outcome: Ok(s), .. }) => Ok(s.bytes),
            Some(Event::Ended { outcome: Err(e), .. }) => Err(e.cause),
            _ => unreachable!("just found"),
        }
    }
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.memory.len() as usize];
    region.memory.bytes().read(0, &mut bytes);
    bytes
}

#[test]
fn reads_and_writes_and_tells() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let far = pair.publish(vec![7; 300_000], Access::READ_WRITE);
    pair.until("the publication", |p| p.near.region(peer, "kv").is_some());
    let memory = Arc::new(VecMemory::zeroed(300_000));
    let near = pair.near.register(memory, Place::DRAM).expect("memory");

    let read = pair.transfer(peer, Direction::Read, &near, Some(b"was read"));
    assert_eq!(pair.outcome(read), Ok(300_000));
    assert_eq!(contents(&near), vec![7; 300_000]);

    near.memory.bytes().write(0, &[9; 300_000]);
    let write = pair.transfer(peer, Direction::Write, &near, Some(b"was written"));
    assert_eq!(pair.outcome(write), Ok(300_000));
    assert_eq!(contents(&far), vec![9; 300_000]);
    let payloads = |p: &Pair| -> Vec<Vec<u8>> {
        let of = |e: &Event| match e {
            Event::Notified { payload, .. } => Some(payload.clone()),
            _ => None,
        };
        p.heard_far.iter().filter_map(of).collect()
    };
    pair.until("both notifications", |p| payloads(p).len() == 2);
    assert_eq!(payloads(&pair), [b"was read".to_vec(), b"was written".to_vec()]);
}

#[test]
fn withdrawn_is_refused_and_released_is_free() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let far = pair.publish(vec![7; 1000], Access::READ);
    pair.until("the publication", |p| p.near.region(peer, "kv").is_some());
    let near = pair
        .near
        .register(Arc::new(VecMemory::zeroed(1000)), Place::DRAM)
        .expect("memory");
    // The key that the peer knows outlives the name, but not the region.
    let late = pair.transfer(peer, Direction::Read, &near, None);
    let (key, _) = pair.far.withdraw("kv", pair.now).expect("published");
    assert_eq!(pair.outcome(late), Err(Failure::Refused(Refusal::Released)));
    assert_eq!(pair.far.release(&key, pair.now), Err(Refusal::Released));
    assert_eq!(pair.far.release(&far.key, pair.now), Ok(Progress::Idle));
    pair.until("the withdrawal", |p| p.near.region(peer, "kv").is_none());
}

#[test]
fn a_lease_holds_a_release_up() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let far = pair.publish(vec![7; 1000], Access::READ);
    pair.until("the publication", |p| p.near.region(peer, "kv").is_some());
    let key = pair.near.region(peer, "kv").expect("published").key;
    let lease = pair
        .near
        .borrow(peer, key, Time::from_ms(200), pair.now)
        .expect("asked");
    pair.until("the lease", |p| {
        p.heard.iter().any(|e| matches!(e, Event::Leased { .. }))
    });
    assert_eq!(pair.far.release(&far.key, pair.now), Ok(Progress::Busy));
    let ended = |e: &Event| matches!(e, Event::LeaseEnded { lease: ended, .. } if *ended == lease);
    for _ in 0..500 {
        let over = pair.heard.iter().any(ended);
        let progress = pair.far.release(&far.key, pair.now);
        if progress == Ok(Progress::Idle) {
            assert!(over, "released under a lease");
            return;
        }
        pair.turn();
    }
    panic!("never released");
}

#[test]
fn a_wrong_secret_is_a_typed_error_within_the_deadline() {
    let network = Loopback::new();
    let near = agent(&network, "near", "near", 1, b"secret");
    let mut pair = Pair::of(near, agent(&network, "far", "far", 2, b"another"));
    let target = Target::at(pair.far.addresses()[0].clone(), Time::from_secs(5));
    pair.near
        .connect(target, Time::ZERO)
        .expect("the address is understood");
    pair.until("a refusal", |p| !p.heard.is_empty());
    let cause = match &pair.heard[0] {
        Event::ConnectFailed {
            error: ConnectError::NoSession { cause, .. },
            ..
        } => cause.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(cause, SessionLoss::WrongSecret);
}

#[test]
fn a_later_life_takes_the_name_over() {
    let network = Loopback::new();
    let far = agent(&network, "far", "far", 9, b"secret");
    let mut pair = Pair::of(agent(&network, "near", "near", 1, b"secret"), far);
    pair.connect();
    let second = agent(&network, "near again", "near", 2, b"secret");
    let first = std::mem::replace(&mut pair.near, second);
    pair.heard.clear();
    pair.heard_far.clear();
    pair.connect();
    let replaced = |p: &Pair| p.heard_far.iter().any(|e| matches!(e, Event::PeerLost { .. }));
    pair.until("the end of the first life's session", replaced);
    drop(first);
}
