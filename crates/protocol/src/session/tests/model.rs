//! Whatever the paths do: each notification once, in order, never before its data; publications converge; loss is noticed.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Act {
    Notify { end: usize },
    NotifyAfter { end: usize, parts: u32 },
    Arrive { end: usize, pick: usize },
    Revoke { end: usize, pick: usize },
    Publish { end: usize, name: u8, slot: u32 },
    Withdraw { end: usize, name: u8 },
    AddPath { end: usize },
    LosePath { pick: usize },
    Wait { us: u64 },
}

fn act() -> impl Strategy<Value = Act> {
    let end = 0usize..2;
    prop_oneof![
        6 => end.clone().prop_map(|end| Act::Notify { end }),
        4 => (end.clone(), 1u32..5).prop_map(|(end, parts)| Act::NotifyAfter { end, parts }),
        8 => (end.clone(), any::<usize>()).prop_map(|(end, pick)| Act::Arrive { end, pick }),
        1 => (end.clone(), any::<usize>()).prop_map(|(end, pick)| Act::Revoke { end, pick }),
        3 => (end.clone(), 0u8..4, 0u32..3).prop_map(|(end, name, slot)| Act::Publish { end, name, slot }),
        1 => (end.clone(), 0u8..4).prop_map(|(end, name)| Act::Withdraw { end, name }),
        1 => end.prop_map(|end| Act::AddPath { end }),
        1 => any::<usize>().prop_map(|pick| Act::LosePath { pick }),
        6 => (1u64..30_000).prop_map(|us| Act::Wait { us }),
    ]
}

fn weather() -> impl Strategy<Value = Weather> {
    (0.0..0.3f64, 0.0..0.3f64, 1u64..2_000, 0u64..5_000).prop_map(|(loss, repeat, delay, jitter)| Weather {
        loss,
        repeat,
        delay: Time::from_us(delay),
        jitter: Time::from_us(jitter),
    })
}

/// A notification that waits for its data, as its sender knows it.
#[derive(Clone, Debug)]
struct Awaited {
    tag: u64,
    parts: u32,
    arrived: BTreeSet<u32>,
    revoked: bool,
    delivered: bool,
}

/// What must be true, beside the two ends.
#[derive(Default)]
struct Model {
    /// Notifications that each end must still be handed, in order.
    plain: [VecDeque<u64>; 2],
    awaited: [Vec<Awaited>; 2],
    published: [BTreeMap<String, RemoteRegion>; 2],
    seen: [BTreeMap<String, RemoteRegion>; 2],
    confirmed: [usize; 2],
    next: u64,
}

impl Model {
    fn check(&mut self, world: &mut World) -> Result<(), TestCaseError> {
        for end in 0..2 {
            for event in world.take_events(end) {
                match event {
                    SessionEvent::Notified { payload } => {
                        let number = u64::from_le_bytes(payload[1..9].try_into().unwrap());
                        if payload[0] == 0 {
                            prop_assert_eq!(self.plain[end].pop_front(), Some(number), "out of order or twice");
                            continue;
                        }
                        let waiting = self.awaited[1 - end].iter_mut().find(|a| a.tag == number).unwrap();
                        prop_assert!(
                            (0..waiting.parts).all(|part| waiting.arrived.contains(&part)),
                            "before its data"
                        );
                        prop_assert!(!waiting.delivered, "twice");
                        waiting.delivered = true;
                    }
                    SessionEvent::Published { name, region } => drop(self.seen[end].insert(name, region)),
                    SessionEvent::Withdrawn { name } => prop_assert!(self.seen[end].remove(&name).is_some()),
                    SessionEvent::NotificationDelivered { .. } => self.confirmed[end] += 1,
                    SessionEvent::Lost { cause } => prop_assert!(false, "lost: {}", cause),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn act(&mut self, world: &mut World, act: Act, weather: Weather) {
        let now = world.now;
        self.next += 1;
        let number = self.next;
        match act {
            Act::Notify { end } => {
                let payload = [&[0], &number.to_le_bytes()[..]].concat();
                world.ends[end].notify(&payload, None, now).unwrap();
                self.plain[1 - end].push_back(number);
            }
            Act::NotifyAfter { end, parts } => {
                let payload = [&[1], &number.to_le_bytes()[..]].concat();
                world.ends[end].notify(&payload, Some((number, parts)), now).unwrap();
                self.awaited[end].push(Awaited {
                    tag: number,
                    parts,
                    arrived: BTreeSet::new(),
                    revoked: false,
                    delivered: false,
                });
            }
            Act::Arrive { end, pick } => {
                let open: Vec<&mut Awaited> = self.awaited[end].iter_mut().collect();
                let count = open.len().max(1);
                if let Some(awaited) = open.into_iter().nth(pick % count) {
                    let index = (pick / 7) as u32 % awaited.parts;
                    awaited.arrived.insert(index);
                    world.ends[1 - end].on_arrival(
                        Via(0),
                        Arrival {
                            tag: awaited.tag,
                            index,
                        },
                        now,
                    );
                }
            }
            Act::Revoke { end, pick } => {
                let count = self.awaited[end].len().max(1);
                if let Some(awaited) = self.awaited[end].get_mut(pick % count) {
                    awaited.revoked = true;
                    world.ends[end].revoke(awaited.tag, now);
                }
            }
            Act::Publish { end, name, slot } => {
                let region = region(1 + end as u64, slot);
                world.ends[end].publish(&name.to_string(), &region, now).unwrap();
                self.published[end].insert(name.to_string(), region);
            }
            Act::Withdraw { end, name } => {
                world.ends[end].withdraw(&name.to_string(), now).unwrap();
                self.published[end].remove(&name.to_string());
            }
            Act::AddPath { end } => {
                let via = Via(number as u32);
                world.add_path(end, via, weather);
            }
            Act::LosePath { pick } => {
                let spare = world.weather.len() > 1 && world.ends.iter().all(|end| end.id().is_some());
                let joined: Vec<Via> = world.weather.keys().copied().collect();
                if spare {
                    world.lose_path(joined[pick % joined.len()]);
                }
            }
            Act::Wait { us } => world.run_for(Time::from_us(us)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn facts_arrive_once_and_in_order(seed: u64, weather in weather(), acts in prop::collection::vec(act(), 1..120)) {
        let mut world = World::new(seed, weather);
        let mut model = Model::default();
        // Greetings may take many attempts in this weather; what follows is about the time after.
        world.run_for(Time::from_secs(4));
        prop_assume!(world.ends.iter().all(|end| end.id().is_some()));
        for act in acts {
            model.act(&mut world, act, weather);
            model.check(&mut world)?;
        }
        // The rest of the data arrives, and a path is there for what is left.
        for end in 0..2 {
            for awaited in &mut model.awaited[end] {
                for index in 0..awaited.parts {
                    awaited.arrived.insert(index);
                    world.ends[1 - end].on_arrival(Via(0), Arrival { tag: awaited.tag, index }, world.now);
                }
            }
        }
        world.add_path(INITIATOR, Via(u32::MAX), Weather::FINE);
        world.run_for(Time::from_secs(30));
        model.check(&mut world)?;
        for end in 0..2 {
            prop_assert!(model.plain[end].is_empty(), "{} never arrived", model.plain[end].len());
            for awaited in &model.awaited[end] {
                prop_assert!(awaited.delivered || awaited.revoked, "{awaited:?} never arrived");
            }
            prop_assert_eq!(&model.seen[end], &model.published[1 - end]);
            let regions: BTreeMap<_, _> = world.ends[end].regions().map(|(n, r)| (n.to_owned(), r.clone())).collect();
            prop_assert_eq!(&model.seen[end], &regions);
        }
        // Once all is said, nothing more is sent but signs of life: one a second, on every path where some were lost.
        let sent = world.sent[0].len() + world.sent[1].len();
        world.run_for(Time::from_secs(10));
        prop_assert!(world.sent[0].len() + world.sent[1].len() - sent <= 40 * world.weather.len());
    }

    #[test]
    fn a_partition_is_noticed_by_both(seed: u64, weather in weather(), busy: bool) {
        let mut world = World::new(seed, weather);
        world.run_for(Time::from_secs(4));
        prop_assume!(world.ends.iter().all(|end| end.id().is_some()));
        world.weather.clear();
        if busy {
            for _ in 0..1000 {
                world.ends[INITIATOR].notify(&[0; 100], None, world.now).unwrap();
            }
        }
        let sent = world.sent[INITIATOR].iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        world.run_for(Time::from_secs(6));
        for end in 0..2 {
            prop_assert_eq!(world.loss(end), Some(&SessionLoss::Silent));
            prop_assert_eq!(world.ends[end].next_timeout(), None);
            prop_assert_eq!(world.ends[end].next_message(), None);
        }
        let resent = world.sent[INITIATOR].iter().map(|(_, bytes)| bytes.len()).sum::<usize>() - sent;
        prop_assert!(resent < 20 * MAX_MESSAGE_BYTES, "{} bytes into the void", resent);
    }
}
