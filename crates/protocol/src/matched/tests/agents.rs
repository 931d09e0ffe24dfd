//! Channels of two agents over loopback, turned by hand.

use std::sync::Arc;

use weft_plan::{Place as Where, Time};

use super::super::channels::{ChannelId, Channels, Place, Settings};
use super::super::{ChannelError, Ticket};
use crate::agent::{self, Core, Event, Reach, Slot};
use crate::loopback::{Loopback, LoopbackEndpoint};
use crate::memory::VecMemory;
use crate::region::{Epoch, Region};
use crate::seeded::Seeded;
use crate::session::{Config, Secret};

struct Side {
    core: Core<LoopbackEndpoint>,
    channels: Channels,
}

impl Side {
    fn new(network: &Loopback, name: &str, epoch: u64) -> Side {
        let slot = Slot {
            reach: Reach::Anywhere,
            preference: 0,
            paths: 2,
            transport: Box::new(network.endpoint(name, Epoch(epoch))),
        };
        let config = Config::new(name, Epoch(epoch), Secret::new(b"secret"));
        let mut chance = Seeded::new(epoch);
        let random = Box::new(move || {
            let mut bytes = [0; 32];
            chance.fill(&mut bytes);
            bytes
        });
        let settings = Settings {
            eager_max: 1024,
            deadline: Time::from_secs(5),
            checksum: false,
        };
        Side {
            core: Core::new(agent::Settings::new(config), vec![slot], random),
            channels: Channels::new(settings),
        }
    }

    fn turn(&mut self, now: Time) {
        self.core.pump(now);
        while let Some(event) = self.core.next_event() {
            let mine = self.channels.on_event(&mut self.core, &event, now);
            assert!(
                mine || !matches!(event, Event::Arrived { .. }),
                "an arrival that nobody awaits"
            );
        }
        self.channels.turn(&mut self.core, now);
    }

    fn memory(&mut self, bytes: Vec<u8>) -> Region {
        self.core
            .register(Arc::new(VecMemory::new(bytes)), Where::DRAM)
            .expect("memory")
    }
}

struct Two {
    near: Side,
    far: Side,
    now: Time,
}

fn place(region: &Region, offset: u64, len: u64, tag: i32) -> Place {
    let region = region.clone();
    Place {
        region,
        offset,
        len,
        tag,
    }
}

impl Two {
    /// With a channel from near to far.
    fn new() -> (Two, ChannelId, ChannelId) {
        let network = Loopback::new();
        let mut two = Two {
            near: Side::new(&network, "near", 1),
            far: Side::new(&network, "far", 2),
            now: Time::ZERO,
        };
        two.far.channels.listen(77);
        let (sender, open) = two.connect(77);
        open.expect("it opens");
        let receiver = two.far.channels.accept(77).expect("it has come");
        assert_eq!(two.far.channels.accept(77), None, "a token is good once");
        (two, sender, receiver)
    }

    fn connect(&mut self, token: u128) -> (ChannelId, Result<(), ChannelError>) {
        let addresses = self.far.core.addresses();
        let id = self
            .near
            .channels
            .connect(&mut self.near.core, addresses, token, self.now)
            .expect("it begins");
        for _ in 0..1000 {
            match self.near.channels.is_open(id, self.now) {
                Ok(true) => return (id, Ok(())),
                Ok(false) => self.turn(),
                Err(error) => return (id, Err(error)),
            }
        }
        panic!("neither open nor refused");
    }

    fn turn(&mut self) {
        self.now = self.now.saturating_add(Time::from_ms(1));
        self.near.turn(self.now);
        self.far.turn(self.now);
    }

    fn ended(&mut self, ticket: &Ticket) -> Result<Vec<u64>, ChannelError> {
        for _ in 0..20_000 {
            if let Some(outcome) = ticket.outcome() {
                return outcome.map(<[u64]>::to_vec).map_err(Clone::clone);
            }
            self.turn();
        }
        panic!("a request that never ends");
    }
}

#[test]
fn messages_long_and_short_meet_their_receives_between_agents() {
    let (mut two, sender, receiver) = Two::new();
    let from = two.near.memory((0..100_000u32).map(|i| i as u8).collect());
    let to = two.far.memory(vec![0; 100_000]);
    // A short and a long one of the same tag, the long one first, and one of another tag.
    let sends: Vec<Arc<Ticket>> = [(0, 50_000, 1), (50_000, 100, 1), (60_000, 0, 2)]
        .map(|(offset, len, tag)| {
            let place = place(&from, offset, len, tag);
            let Side { core, channels } = &mut two.near;
            channels.send(core, sender, place, two.now).expect("sent")
        })
        .into();
    for _ in 0..20 {
        two.turn();
    }
    assert!(sends[0].outcome().is_none(), "nobody wants the long one yet");
    assert!(sends[1].outcome().is_some(), "the short one has gone ahead");
    let places = vec![
        place(&to, 0, 60_000, 1),
        place(&to, 70_000, 10, 2),
        place(&to, 60_000, 4096, 1),
    ];
    let Side { core, channels } = &mut two.far;
    let group = channels.receive(core, receiver, places, two.now).expect("posted");
    assert_eq!(two.ended(&group), Ok(vec![50_000, 0, 100]));
    assert_eq!(two.ended(&sends[0]), Ok(vec![50_000]));
    let (mut sent, mut found) = (vec![0; 50_100], vec![0; 50_100]);
    from.memory.bytes().read(0, &mut sent);
    to.memory.bytes().read(0, &mut found[..50_000]);
    to.memory.bytes().read(60_000, &mut found[50_000..]);
    assert!(sent == found);
}

#[test]
fn a_token_that_nobody_listens_with_is_refused() {
    let (mut two, ..) = Two::new();
    assert_eq!(two.connect(78).1, Err(ChannelError::Refused));
    assert_eq!(
        two.connect(77).1,
        Err(ChannelError::Refused),
        "another has come with it"
    );
}

#[test]
fn a_peer_that_goes_ends_all_that_waits_for_it() {
    for closes in [true, false] {
        let (mut two, sender, receiver) = Two::new();
        let from = two.near.memory(vec![1; 50_000]);
        let to = two.far.memory(vec![0; 50_000]);
        let Side { core, channels } = &mut two.near;
        let waits = channels
            .send(core, sender, place(&from, 0, 50_000, 1), two.now)
            .expect("sent");
        two.turn();
        if closes {
            let Side { core, channels } = &mut two.far;
            assert!(channels.close(core, receiver, two.now));
            assert_eq!(two.ended(&waits), Err(ChannelError::Closed));
        } else {
            let peer = two.far.channels.peer(receiver).expect("a peer");
            two.far.core.disconnect(peer, two.now);
            assert!(matches!(two.ended(&waits), Err(ChannelError::PeerLost(_))));
            let Side { core, channels } = &mut two.far;
            let after = channels.receive(core, receiver, vec![place(&to, 0, 10, 1)], two.now);
            assert!(after.is_err() || after.is_ok_and(|ticket| ticket.outcome().is_some()));
        }
        let again = two
            .near
            .channels
            .send(&mut two.near.core, sender, place(&from, 0, 1, 1), two.now);
        assert!(again.is_err(), "it is over");
        assert!(two.near.channels.is_out(sender));
    }
}

#[test]
fn bytes_outside_of_a_memory_are_refused_and_cost_the_channel_nothing() {
    let (mut two, sender, receiver) = Two::new();
    let from = two.near.memory(vec![1; 100]);
    let to = two.far.memory(vec![0; 100]);
    for (offset, len) in [(0, 101), (100, 1), (u64::MAX, 2)] {
        let Side { core, channels } = &mut two.near;
        let refused = channels.send(core, sender, place(&from, offset, len, 1), two.now);
        assert!(matches!(refused, Err(ChannelError::OutOfBounds { .. })));
    }
    let Side { core, channels } = &mut two.near;
    let sent = channels
        .send(core, sender, place(&from, 0, 100, 1), two.now)
        .expect("sent");
    let Side { core, channels } = &mut two.far;
    let got = channels
        .receive(core, receiver, vec![place(&to, 0, 100, 1)], two.now)
        .expect("posted");
    assert_eq!(two.ended(&got), Ok(vec![100]));
    assert_eq!(two.ended(&sent), Ok(vec![100]));
}

/// What is still to be received into memory that its owner takes back must not come any more: neither what is posted beforehand nor what was told to the sender.
#[test]
fn memory_that_is_released_ends_the_channels_that_would_touch_it() {
    for len in [100, 50_000] {
        let (mut two, sender, receiver) = Two::new();
        let from = two.near.memory(vec![1; 50_000]);
        let (to, other) = (two.far.memory(vec![0; 50_000]), two.far.memory(vec![0; 100]));
        let Side { core, channels } = &mut two.far;
        let posted = channels
            .receive(core, receiver, vec![place(&to, 0, 50_000, 1)], two.now)
            .expect("posted");
        for _ in 0..20 {
            two.turn();
        }
        let Side { core, channels } = &mut two.far;
        channels.forget(core, &other.key, two.now);
        assert!(posted.outcome().is_none(), "other memory is nothing to it");
        channels.forget(core, &to.key, two.now);
        let _ = core.release(&to.key, two.now);
        let Side { core, channels } = &mut two.near;
        let sent = channels.send(core, sender, place(&from, 0, len, 1), two.now);
        assert_eq!(two.ended(&posted), Err(ChannelError::ClosedHere));
        if let Ok(sent) = sent {
            // A short one had gone before it was known; it has gone nowhere.
            let _ = two.ended(&sent);
        }
        for _ in 0..20 {
            two.turn();
        }
        let mut found = vec![9; 50_000];
        to.memory.bytes().read(0, &mut found);
        assert!(found.iter().all(|byte| *byte == 0), "its owner has it back");
    }
}

#[test]
fn a_peer_that_takes_nothing_in_is_not_kept_words_for_without_end() {
    let (mut two, sender, _) = Two::new();
    let from = two.near.memory(vec![1; 1024]);
    // The far end turns no more: short messages go on being sent, until there is too much that waits for it.
    let mut sent = 0u64;
    loop {
        let Side { core, channels } = &mut two.near;
        match channels.send(core, sender, place(&from, 0, 1024, 1), two.now) {
            Ok(_) => sent += 1024,
            Err(_) => break,
        }
        assert!(
            sent < 256 << 20,
            "{sent} bytes were taken for a peer that does not listen"
        );
        if sent.is_multiple_of(64 << 10) {
            core.pump(two.now);
            while let Some(event) = core.next_event() {
                channels.on_event(core, &event, two.now);
            }
            channels.turn(core, two.now);
        }
    }
    // Whichever bound comes first, of messages or of bytes: some run-ahead has to be possible.
    assert!(sent > 1 << 20, "only {sent} bytes were taken");
}
