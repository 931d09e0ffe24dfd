//! Atomic operations through whole agents: once or not at all, over the quickest path that can, and honest when nobody knows.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use weft_plan::{Place, Time};
use weft_protocol::agent::{AtomicError, AtomicId, Core, Event, PeerError, Reach, Settings, Slot, Target};
use weft_protocol::session::{Config, Secret};
use weft_protocol::transfer::{PeerId, SubmitError};
use weft_protocol::{
    Access, Atomic, AtomicAct, Body, Capabilities, Epoch, Failure, Faults, Faulty, Grant, HostBytes, Loopback,
    LoopbackEndpoint, Loss, Op, OpId, PathId, PeerAddress, Progress, Refusal, Region, RegionKey, RemoteRegion, Seeded,
    Signal, Transport, VecMemory,
};

type Agent = Core<dyn Transport>;
type Wrap = dyn Fn(LoopbackEndpoint) -> Box<dyn Transport>;

const WORDS: u64 = 8;

struct World {
    near: Agent,
    far: Option<Agent>,
    peer: PeerId,
    remote: Arc<RemoteRegion>,
    memory: Arc<VecMemory>,
    now: Time,
    ended: Vec<(AtomicId, Result<u64, AtomicError>)>,
}

fn agent(name: &str, epoch: u64, transports: Vec<Box<dyn Transport>>) -> Agent {
    let slots = transports.into_iter().map(|transport| Slot {
        reach: Reach::Anywhere,
        paths: 2,
        preference: 0,
        transport,
    });
    let mut chance = Seeded::new(epoch);
    let random = Box::new(move || {
        let mut bytes = [0; 32];
        chance.fill(&mut bytes);
        bytes
    });
    let config = Config::new(name, Epoch(epoch), Secret::new(b"secret"));
    Core::new(Settings::new(config), slots.collect(), random)
}

impl World {
    /// Two agents with one transport for each way to wrap it, each joined by two paths.
    fn new(wraps: &[&Wrap]) -> World {
        let networks: Vec<Loopback> = wraps.iter().map(|_| Loopback::new()).collect();
        let transports = |name: &str, epoch| {
            let ends = networks.iter().map(|network| network.endpoint(name, Epoch(epoch)));
            ends.zip(wraps).map(|(end, wrap)| wrap(end)).collect()
        };
        let mut near = agent("near", 1, transports("near", 1));
        let mut far = agent("far", 2, transports("far", 2));
        let memory = Arc::new(VecMemory::zeroed((WORDS * 8) as usize));
        let region = far
            .register(memory.clone(), Place::DRAM)
            .expect("loopback takes any memory");
        far.publish("words", &region.key, Access::READ_WRITE, Time::ZERO)
            .expect("the name is free");
        let target = Target {
            addresses: far.addresses(),
            ..Target::at(far.addresses()[0].clone(), Time::from_secs(60))
        };
        let peer = near.connect(target, Time::ZERO).expect("the addresses are understood");
        let mut paths = 0;
        let mut now = Time::ZERO;
        while paths < 2 * wraps.len() || near.region(peer, "words").is_none() {
            now = now.saturating_add(Time::from_us(100));
            // Handshakes begin again with ever longer pauses where much is refused; a seed has needed eleven seconds.
            assert!(now < Time::from_secs(60), "no session");
            near.pump(now);
            far.pump(now);
            let events = std::iter::from_fn(|| near.next_event());
            paths += events.filter(|e| matches!(e, Event::PathUp { .. })).count();
        }
        World {
            remote: Arc::new(near.region(peer, "words").expect("just seen").clone()),
            near,
            far: Some(far),
            peer,
            memory,
            now,
            ended: Vec::new(),
        }
    }

    fn ask(&mut self, word: u64, act: AtomicAct, patience: Time) -> Result<AtomicId, PeerError> {
        let atomic = Atomic {
            region: self.remote.clone(),
            offset: word * 8,
            act,
        };
        let deadline = self.now.saturating_add(patience);
        self.near.atomic(self.peer, atomic, deadline, self.now)
    }

    fn turn(&mut self) {
        self.now = self.now.saturating_add(Time::from_us(50));
        self.near.pump(self.now);
        if let Some(far) = &mut self.far {
            far.pump(self.now);
            while far.next_event().is_some() {}
        }
        while let Some(event) = self.near.next_event() {
            if let Event::AtomicEnded { id, outcome } = event {
                assert!(self.ended.iter().all(|(before, _)| *before != id), "{id:?} ended twice");
                self.ended.push((id, outcome));
            }
        }
    }

    fn until_ended(&mut self, count: usize) {
        let give_up = self.now.saturating_add(Time::from_secs(30));
        while self.ended.len() < count {
            self.turn();
            assert!(self.now < give_up, "atomic operations that do not end");
        }
    }

    fn word(&self, word: u64) -> u64 {
        self.memory.atomic(word * 8, AtomicAct::FetchAdd(0)).expect("aligned")
    }

    /// Every increment that was answered counts, none counts twice, and none that was certainly not made.
    fn assert_honest(&self) {
        let answered: Vec<u64> = self.ended.iter().filter_map(|(_, outcome)| outcome.ok()).collect();
        let unknown = self
            .ended
            .iter()
            .filter(|(_, outcome)| outcome.is_err_and(|e| e.may_have_happened));
        let (certain, unknown, sum) = (answered.len() as u64, unknown.count() as u64, self.word(0));
        assert!(
            (certain..=certain + unknown).contains(&sum),
            "{certain} increments and perhaps {unknown} more, but the sum is {sum}"
        );
        let distinct: BTreeSet<u64> = answered.iter().copied().collect();
        assert_eq!(distinct.len(), answered.len(), "two increments found the same");
        assert!(distinct.last().is_none_or(|last| *last < sum));
    }
}

fn act() -> impl Strategy<Value = AtomicAct> {
    prop_oneof![
        any::<u64>().prop_map(AtomicAct::FetchAdd),
        (0u64..3).prop_map(AtomicAct::FetchAdd),
        (0u64..4, 0u64..4).prop_map(|(expected, new)| AtomicAct::CompareSwap { expected, new }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// One after the other they do what they would do to a plain list.
    #[test]
    fn words_follow_a_plain_model(acts in prop::collection::vec((0..WORDS, act(), any::<bool>()), 1..60)) {
        let mut world = World::new(&[&|end| Box::new(end)]);
        let mut model = [0u64; WORDS as usize];
        for (i, (word, act, by_owner)) in acts.into_iter().enumerate() {
            let value = &mut model[word as usize];
            if by_owner {
                prop_assert_eq!(world.memory.atomic(word * 8, act), Ok(*value));
            } else {
                let id = world.ask(word, act, Time::from_secs(1)).unwrap();
                let before = world.ended.len();
                world.until_ended(before + 1);
                prop_assert_eq!(world.ended.last().copied(), Some((id, Ok(*value))), "act {}", i);
            }
            *value = act.after(*value).unwrap_or(*value);
        }
        for word in 0..WORDS {
            prop_assert_eq!(world.word(word), model[word as usize]);
        }
    }

    /// Operations lost, answers lost, posts refused, paths closed and cancels: what is told is true.
    #[test]
    fn nothing_happens_twice_whatever_goes_wrong(
        seed: u64,
        rates in prop::array::uniform4(0.0f64..0.4),
        events in prop::collection::vec(0u8..40, 20..200),
    ) {
        let wrap = move |end| -> Box<dyn Transport> {
            Box::new(Faulty::new(end, Faults {
                seed,
                lose_move: rates[0],
                lose_answer: rates[1],
                refuse_post: rates[2],
                delay: rates[3],
                delay_max: Time::from_ms(1),
                ..Faults::default()
            }))
        };
        let mut world = World::new(&[&wrap]);
        let mut asked = Vec::new();
        for event in events {
            match event {
                0 => if let Some((transport, path)) = world.near.path_over(world.peer, "loopback") {
                    transport.close(path);
                },
                1..4 => if let Some(id) = asked.last() {
                    world.near.cancel_atomic(*id, world.now);
                },
                4..12 => world.turn(),
                12 => asked.extend(world.ask(0, AtomicAct::FetchAdd(1), Time::ZERO)),
                13..16 => asked.extend(world.ask(0, AtomicAct::FetchAdd(1), Time::from_us(40))),
                _ => asked.extend(world.ask(0, AtomicAct::FetchAdd(1), Time::from_secs(1))),
            }
        }
        world.until_ended(asked.len());
        world.assert_honest();
    }
}

#[test]
fn many_wait_for_room_and_more_than_many_are_not_accepted() {
    let mut world = World::new(&[&|end| Box::new(end)]);
    let mut accepted = 0;
    let refused = loop {
        match world.ask(0, AtomicAct::FetchAdd(1), Time::from_secs(10)) {
            Ok(_) => accepted += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, PeerError::Submit(SubmitError::TooManyAtomics));
    world.until_ended(accepted);
    assert!(world.ended.iter().all(|(_, outcome)| outcome.is_ok()));
    assert_eq!(world.word(0), accepted as u64);
    world.assert_honest();
}

#[test]
fn refusals_of_the_target_are_typed_and_certain() {
    let mut world = World::new(&[&|end| Box::new(end)]);
    let rightful = world.remote.clone();
    for (spoil, refusal) in [
        (
            RemoteRegion {
                key: RegionKey {
                    secret: 1,
                    ..rightful.key
                },
                ..(*rightful).clone()
            },
            Refusal::UnknownKey,
        ),
        (
            RemoteRegion {
                key: RegionKey {
                    epoch: Epoch(77),
                    ..rightful.key
                },
                ..(*rightful).clone()
            },
            Refusal::StaleEpoch,
        ),
    ] {
        world.remote = Arc::new(spoil);
        let id = world
            .ask(0, AtomicAct::FetchAdd(1), Time::from_secs(1))
            .expect("accepted");
        let count = world.ended.len();
        world.until_ended(count + 1);
        let error = AtomicError {
            peer: world.peer,
            cause: Failure::Refused(refusal),
            transport: "loopback",
            may_have_happened: false,
        };
        assert_eq!(world.ended.last(), Some(&(id, Err(error))));
    }
    assert_eq!(world.word(0), 0);
}

#[test]
fn a_peer_that_is_gone_leaves_no_doubt_about_what_was_never_sent() {
    let mut world = World::new(&[&|end| Box::new(end)]);
    for _ in 0..3000 {
        world
            .ask(0, AtomicAct::FetchAdd(1), Time::from_secs(10))
            .expect("accepted");
    }
    world.near.disconnect(world.peer, world.now);
    world.until_ended(3000);
    let as_it_should = |outcome: &Result<u64, AtomicError>| match outcome {
        Ok(_) => true,
        Err(e) => matches!(
            e.cause,
            Failure::PathLost { .. } | Failure::Cancelled | Failure::Unanswered
        ),
    };
    assert!(world.ended.iter().all(|(_, outcome)| as_it_should(outcome)));
    let certain = world
        .ended
        .iter()
        .filter(|(_, outcome)| outcome.is_err_and(|e| !e.may_have_happened));
    assert!(certain.count() > 0, "most had not been sent");
    world.assert_honest();
    let late = world.ask(0, AtomicAct::FetchAdd(1), Time::from_secs(1));
    assert_eq!(late, Err(PeerError::NotConnected));
}

#[test]
fn a_dead_peer_ends_them_by_their_deadline() {
    let mut world = World::new(&[&|end| Box::new(end)]);
    world.far = None;
    for _ in 0..10 {
        world
            .ask(0, AtomicAct::FetchAdd(1), Time::from_ms(100))
            .expect("accepted");
    }
    world.until_ended(10);
    assert!(world.ended.iter().all(|(_, outcome)| outcome.is_err()));
    world.assert_honest();
}

/// A quicker transport under another name, which says that it can and then finds that it cannot.
#[derive(Debug)]
struct Unable {
    inner: LoopbackEndpoint,
    capabilities: Capabilities,
    refused: Vec<Signal>,
}

impl Unable {
    fn boxed(inner: LoopbackEndpoint, atomics: bool) -> Box<dyn Transport> {
        let mut capabilities = inner.capabilities().clone();
        capabilities.name = "quick";
        capabilities.address = PeerAddress(format!("quick:{}", capabilities.address.rest()));
        capabilities.carries[0].cost.latency = weft_plan::Picos::from_ns(1);
        capabilities.atomics = atomics;
        Box::new(Unable {
            inner,
            capabilities,
            refused: Vec::new(),
        })
    }
}

impl Transport for Unable {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        self.inner.register(region)
    }
    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        self.inner.release(key)
    }
    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss> {
        self.inner.open(&PeerAddress(format!("loopback:{}", peer.rest())), now)
    }
    fn vouch(&mut self, path: PathId) {
        self.inner.vouch(path);
    }
    fn close(&mut self, path: PathId) {
        self.inner.close(path);
    }
    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        for (i, op) in ops.iter().enumerate() {
            if matches!(op.body, Body::Atomic(_)) {
                self.refused.push(Signal::Completed {
                    path,
                    op: op.id,
                    outcome: Err(Refusal::Unsupported.into()),
                });
            } else if self.inner.post(path, std::slice::from_ref(op), now)? == 0 {
                return Ok(i);
            }
        }
        Ok(ops.len())
    }
    fn cancel(&mut self, path: PathId, op: OpId, now: Time) {
        self.inner.cancel(path, op, now);
    }
    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        signals.append(&mut self.refused);
        self.inner.poll(now, signals)
    }
}

#[test]
fn what_one_transport_cannot_do_goes_over_another() {
    for says_it_can in [true, false] {
        let quick = move |end| Unable::boxed(end, says_it_can);
        let mut world = World::new(&[&quick, &|end| Box::new(end)]);
        for _ in 0..20 {
            world
                .ask(0, AtomicAct::FetchAdd(1), Time::from_secs(1))
                .expect("accepted");
        }
        world.until_ended(20);
        assert!(
            world.ended.iter().all(|(_, outcome)| outcome.is_ok()),
            "{:?}",
            world.ended
        );
        assert_eq!(world.word(0), 20);
    }
}

#[test]
fn what_no_transport_can_do_is_refused() {
    for says_it_can in [true, false] {
        let quick = move |end| Unable::boxed(end, says_it_can);
        let mut world = World::new(&[&quick]);
        world
            .ask(0, AtomicAct::FetchAdd(1), Time::from_secs(1))
            .expect("accepted");
        world.until_ended(1);
        let error = world.ended[0].1.expect_err("nobody can");
        assert_eq!(error.cause, Failure::Refused(Refusal::Unsupported));
        assert!(!error.may_have_happened);
    }
}
