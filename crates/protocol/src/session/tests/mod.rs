//! Two sessions joined by paths that lose, repeat, delay and reorder, on a virtual clock, by seed.

mod arrivals;
mod close;
mod hostile;
mod idle;
mod model;
mod paths;
mod strangers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use weft_plan::{Place, Time};

use super::*;
use crate::region::{Access, Epoch};
use crate::seeded::Seeded;
use crate::transport::{Grant, PeerAddress};

pub(super) const INITIATOR: usize = 0;
pub(super) const ACCEPTOR: usize = 1;

/// What a path does to messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weather {
    pub(super) loss: f64,
    pub(super) repeat: f64,
    pub(super) delay: Time,
    pub(super) jitter: Time,
}

impl Weather {
    pub(super) const FINE: Weather = Weather {
        loss: 0.0,
        repeat: 0.0,
        delay: Time::from_us(10),
        jitter: Time::ZERO,
    };
}

/// Both ends and what lies between them.
pub(super) struct World {
    pub(super) ends: [Session; 2],
    pub(super) now: Time,
    pub(super) events: [Vec<SessionEvent>; 2],
    pub(super) sent: [Vec<(Via, Vec<u8>)>; 2],
    pub(super) weather: BTreeMap<Via, Weather>,
    chance: Seeded,
    flight: BTreeMap<(Time, u64), (usize, Via, Vec<u8>)>,
    sends: u64,
}

impl World {
    pub(super) fn new(seed: u64, weather: Weather) -> World {
        World::between(config("prefill", 1), config("decode", 2), seed, weather)
    }

    pub(super) fn between(initiator: Config, acceptor: Config, seed: u64, weather: Weather) -> World {
        let now = Time::from_ms(1);
        World {
            ends: [
                Session::initiate(initiator, [1; 32], Via(0), now),
                Session::accept(acceptor, [2; 32], Via(0), now),
            ],
            now,
            events: Default::default(),
            sent: Default::default(),
            weather: BTreeMap::from([(Via(0), weather)]),
            chance: Seeded::new(seed),
            flight: BTreeMap::new(),
            sends: 0,
        }
    }

    /// A world whose two ends know each other.
    pub(super) fn open(seed: u64) -> World {
        let mut world = World::new(seed, Weather::FINE);
        world.run_for(Time::from_ms(10));
        assert!(world.ends.iter().all(|end| end.id().is_some()));
        world
    }

    /// Does whatever is next, if it comes before `until`.
    pub(super) fn step(&mut self, until: Time) -> bool {
        self.drain();
        let timeouts = self.ends.iter().filter_map(Session::next_timeout);
        let arrival = self.flight.keys().next().map(|(at, _)| *at);
        let Some(next) = timeouts.chain(arrival).min().filter(|at| *at <= until) else {
            self.now = self.now.max(until);
            return false;
        };
        self.now = self.now.max(next);
        if arrival.is_some_and(|at| at <= self.now) {
            let (_, (to, via, bytes)) = self.flight.pop_first().unwrap();
            if self.weather.contains_key(&via) {
                self.ends[to].on_message(via, &bytes, self.now);
            }
        } else {
            for end in 0..2 {
                self.ends[end].on_timeout(self.now);
            }
            self.drain();
            // A timer that is over and stays over would keep a processor busy for nothing.
            for end in &self.ends {
                assert!(
                    end.next_timeout().is_none_or(|due| due > self.now),
                    "a timer that does not rest"
                );
            }
        }
        true
    }

    pub(super) fn run_until(&mut self, until: Time) {
        let mut steps = 0;
        while self.step(until) {
            steps += 1;
            assert!(steps < 1_000_000, "the two never come to rest");
        }
        self.drain();
    }

    pub(super) fn run_for(&mut self, time: Time) {
        self.run_until(self.now.saturating_add(time));
    }

    pub(super) fn lose_path(&mut self, via: Via) {
        self.weather.remove(&via);
        for end in &mut self.ends {
            end.on_path_lost(via, self.now);
        }
    }

    pub(super) fn add_path(&mut self, end: usize, via: Via, weather: Weather) {
        self.weather.insert(via, weather);
        self.ends[end].add_path(via, self.now);
    }

    pub(super) fn loss(&self, end: usize) -> Option<&SessionLoss> {
        self.events[end].iter().find_map(|event| match event {
            SessionEvent::Lost { cause } => Some(cause),
            _ => None,
        })
    }

    pub(super) fn notified(&self, end: usize) -> Vec<&[u8]> {
        let events = self.events[end].iter();
        events
            .filter_map(|event| match event {
                SessionEvent::Notified { payload } => Some(payload.as_slice()),
                _ => None,
            })
            .collect()
    }

    pub(super) fn take_events(&mut self, end: usize) -> Vec<SessionEvent> {
        self.drain();
        std::mem::take(&mut self.events[end])
    }

    fn drain(&mut self) {
        for end in 0..2 {
            self.events[end].extend(std::iter::from_fn(|| self.ends[end].next_event()));
            while let Some((via, bytes)) = self.ends[end].next_message() {
                assert!(bytes.len() <= MAX_MESSAGE_BYTES);
                self.sent[end].push((via, bytes.clone()));
                let Some(weather) = self.weather.get(&via).copied() else {
                    continue;
                };
                let copies = 1 + u32::from(self.chance.chance(weather.repeat));
                for _ in 0..copies {
                    if self.chance.chance(weather.loss) {
                        continue;
                    }
                    let jitter = self.chance.below(weather.jitter.as_ns() + 1);
                    let at = self
                        .now
                        .saturating_add(weather.delay)
                        .saturating_add(Time::from_ns(jitter));
                    self.sends += 1;
                    self.flight.insert((at, self.sends), (1 - end, via, bytes.clone()));
                }
            }
        }
    }
}

pub(super) fn config(name: &str, epoch: u64) -> Config {
    let mut config = Config::new(name, Epoch(epoch), Secret::new(b"between us"));
    config.host = "here".into();
    config.addresses = vec![PeerAddress(format!("tcp:{name}:1"))];
    config
}

/// A region of the agent with this epoch.
pub(super) fn region(epoch: u64, slot: u32) -> RemoteRegion {
    RemoteRegion {
        key: RegionKey {
            epoch: Epoch(epoch),
            slot,
            secret: u128::from(slot) << 64 | 7,
        },
        len: 4096 * u64::from(slot + 1),
        place: Place::DRAM,
        access: Access::READ,
        grants: Arc::from([("tcp".to_owned(), Grant(vec![slot as u8; 9]))]),
    }
}

/// The bytes of every message of a short, full life: greetings, a join, and each kind of control.
pub(super) fn whole_life() -> World {
    let mut world = World::open(1);
    let now = world.now;
    let [a, b] = &mut world.ends;
    a.publish("kv", &region(1, 0), now).unwrap();
    b.notify(b"plain", None, now).unwrap();
    a.notify(b"after", Some((9, 1)), now).unwrap();
    b.on_arrival(Via(0), Arrival { tag: 9, index: 0 }, now);
    let lease = b.ask_lease(region(1, 0).key, Time::from_ms(50), now).unwrap();
    world.add_path(INITIATOR, Via(1), Weather::FINE);
    world.run_for(Time::from_ms(20));
    world.ends[INITIATOR].answer_lease(lease, Ok(Time::from_ms(50)), world.now);
    world.run_for(Time::from_ms(20));
    world.ends[ACCEPTOR].return_lease(lease, world.now);
    world.ends[INITIATOR].withdraw("kv", world.now).unwrap();
    world.ends[INITIATOR].revoke(10, world.now);
    world.ends[INITIATOR].ask_fence(Via(1), world.now).unwrap();
    world.run_for(Time::from_ms(20));
    let label = world.events[ACCEPTOR].iter().find_map(|event| match event {
        SessionEvent::FenceAsked { label, .. } => Some(*label),
        _ => None,
    });
    world.ends[ACCEPTOR].fence_done(label.unwrap(), world.now);
    world.run_for(Time::from_ms(20));
    world.ends[ACCEPTOR].close(world.now);
    world.run_for(Time::from_ms(20));
    world
}

#[test]
fn a_whole_life() {
    let world = whole_life();
    let kinds = |end: usize| -> Vec<String> {
        let name = |event: &SessionEvent| {
            let text = format!("{event:?}");
            text.split([' ', '{']).next().unwrap_or_default().to_owned()
        };
        world.events[end].iter().map(name).collect()
    };
    let expected = "Established Notified LeaseAsked PathJoined NotificationDelivered LeaseReturned Fenced Lost";
    assert_eq!(sorted(kinds(INITIATOR)), sorted(expected.split(' ').map(str::to_owned)));
    let expected =
        "Established NotificationDelivered Published Notified PathJoined LeaseGranted Withdrawn FenceAsked Lost";
    assert_eq!(sorted(kinds(ACCEPTOR)), sorted(expected.split(' ').map(str::to_owned)));
    let reason = CloseReason::Done;
    assert_eq!(world.loss(INITIATOR), Some(&SessionLoss::ClosedByPeer { reason }));
    assert_eq!(world.loss(ACCEPTOR), Some(&SessionLoss::Closed));
    assert!(world.ends.iter().all(|end| end.refused_messages() == 0));
}

fn sorted(names: impl IntoIterator<Item = String>) -> Vec<String> {
    names.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

#[test]
fn both_ends_learn_who_the_other_is() {
    let world = World::open(1);
    for (end, name, epoch) in [(INITIATOR, "decode", 2), (ACCEPTOR, "prefill", 1)] {
        let identity = world.ends[end].identity().unwrap();
        assert_eq!((identity.name.as_str(), identity.epoch), (name, Epoch(epoch)));
        assert_eq!(identity.host, "here");
        assert_eq!(identity.addresses, [PeerAddress(format!("tcp:{name}:1"))]);
        assert_eq!(identity.version, Versions::CURRENT.max);
    }
    assert_eq!(world.ends[0].id(), world.ends[1].id());
}
