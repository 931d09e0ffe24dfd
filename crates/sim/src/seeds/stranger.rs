//! Somebody who does not know the secret, and peers that are dead: whom no agent may talk to.

use std::sync::Arc;

use weft_plan::{Place, Spans, Time};
use weft_protocol::agent::{Event, Target};
use weft_protocol::session::Secret;
use weft_protocol::transfer::PeerId;
use weft_protocol::{
    Access, Body, Direction, Epoch, Leg, Move, Op, OpId, PathId, Region, RegionKey, Signal, Transport, VecMemory,
};

use super::play::{Play, Tick};
use super::verdicts::Violation;
use crate::agent::{Birth, SimAgent};
use crate::transport::SimTransport;
use crate::world::NodeId;

/// How often the stranger tries something, and how often where little happens.
const TRIES_EVERY: Time = Time::from_ms(3);
const TRIES_RARELY: Time = Time::from_ms(200);
const NAME: &str = "stranger";
const LEN: u64 = 4096;

/// An agent with another secret, and a transport of its own that it uses without any session, with keys that it has got hold of.
pub(super) struct Stranger {
    pub(super) node: NodeId,
    agent: SimAgent,
    thief: SimTransport,
    paths: Vec<PathId>,
    loot: Region,
    next_op: u64,
    next_try: Time,
    /// The earliest turn that is arranged.
    wake: Option<Time>,
}

/// How long it may take until a dead peer is missed: its silence is borne for so long, paths are tried again, and the world may be slow to tell.
pub(super) fn noticed_within(silence_max: Time) -> Time {
    silence_max.saturating_mul(3).saturating_add(Time::from_secs(1))
}

impl Play {
    pub(super) fn invite_stranger(&mut self) {
        if !self.plan.stranger {
            return;
        }
        let node = self.world.add_node(NAME, "elsewhere");
        let rail = self.plan.rails[0];
        let birth = Birth {
            node,
            name: NAME.to_owned(),
            host: "elsewhere".to_owned(),
            secret: Secret::new(b"guessed"),
            epoch: Epoch(u64::MAX / 2),
            rails: vec![rail],
            paths: 1,
            heartbeat: Time::from_ms(50),
            silence_max: Time::from_ms(400),
            clock: Time::ZERO,
            device: false,
        };
        let epoch = Epoch(u64::MAX / 2 + 1);
        let agent = SimAgent::start(&self.world, &birth);
        let mut thief = SimTransport::start(&self.world, node, rail, epoch, Time::ZERO);
        let loot = Region {
            key: RegionKey {
                epoch,
                slot: 0,
                secret: 1,
            },
            memory: Arc::new(VecMemory::zeroed(LEN as usize)),
            place: Place::DRAM,
            access: Access::NONE,
        };
        thief.register(&loot).expect("a region of its own");
        self.stranger = Some(Stranger {
            node,
            agent,
            thief,
            paths: Vec::new(),
            loot,
            next_op: 0,
            next_try: Time::ZERO,
            wake: None,
        });
        self.arrange(TRIES_EVERY, Tick::Stranger, 0);
    }

    pub(super) fn turn_stranger(&mut self) -> Result<(), Violation> {
        let Some(mut stranger) = self.stranger.take() else {
            return Ok(());
        };
        let turned = self.try_everything(&mut stranger);
        self.stranger = Some(stranger);
        turned
    }

    fn try_everything(&mut self, stranger: &mut Stranger) -> Result<(), Violation> {
        let now = self.world.now();
        stranger.wake = stranger.wake.filter(|at| *at > now);
        if now >= stranger.next_try && !self.calm {
            let pause = if self.plan.quiet { TRIES_RARELY } else { TRIES_EVERY };
            stranger.next_try = now.saturating_add(pause);
            let victim = self.chance.below(self.nodes.len() as u64) as usize;
            self.try_to_connect(stranger, victim);
            self.try_to_steal(stranger, victim);
        }
        let mut events = Vec::new();
        stranger.agent.turn(&mut events);
        for event in events {
            if let Event::Connected { identity, .. } = event {
                let node = identity.name.trim_start_matches("node").parse().unwrap_or(0);
                let (name, why) = (NAME.to_owned(), "who does not know the secret");
                return Err(Violation::Stranger { node, name, why });
            }
        }
        let again = Some(stranger.next_try).filter(|_| !self.calm);
        let next = stranger.agent.next_timeout().into_iter().chain(again).min();
        if let Some(next) = next.map(|next| next.max(now.saturating_add(Time::from_ns(1))))
            && stranger.wake.is_none_or(|at| next < at)
        {
            stranger.wake = Some(next);
            self.arrange(next, Tick::Stranger, 0);
        }
        self.count_loot(stranger)
    }

    fn try_to_connect(&mut self, stranger: &mut Stranger, victim: usize) {
        let Some(agent) = &self.nodes[victim].agent else { return };
        let address = agent.core.addresses()[0].clone();
        let now = stranger.agent.now();
        let target = Target::at(address.clone(), now.saturating_add(Time::from_ms(300)));
        // It may have too many attempts under way, or speak to a network that it is not on.
        let _ = stranger.agent.core.connect(target, now);
        if stranger.paths.len() < 8 {
            stranger.paths.extend(stranger.thief.open(&address, now));
        }
    }

    /// With the very key of a region, on paths that no session vouches for.
    fn try_to_steal(&mut self, stranger: &mut Stranger, victim: usize) {
        let shared = [self.nodes[victim].source, self.nodes[victim].sink];
        let region = &self.regions[shared[self.chance.below(2) as usize]];
        let Some(remote) = region.remote(self.plan.region_bytes as u64) else {
            return;
        };
        let direction = match remote.access.read {
            true => Direction::Read,
            false => Direction::Write,
        };
        let spans = Spans::contiguous(0, LEN.min(remote.len));
        let Ok(leg) = Leg::new(stranger.loot.clone(), spans.clone(), remote, spans) else {
            return;
        };
        let leg = Arc::new(leg);
        let now = stranger.agent.now();
        for path in &stranger.paths {
            stranger.next_op += 1;
            let op = Op::new(
                OpId(stranger.next_op),
                now.saturating_add(Time::from_ms(20)),
                Body::Move(Move::new(direction, leg.clone(), 0..leg.bytes())),
            );
            let _ = stranger.thief.post(*path, &[op], now);
        }
    }

    fn count_loot(&mut self, stranger: &mut Stranger) -> Result<(), Violation> {
        let mut signals = Vec::new();
        stranger.thief.poll(stranger.agent.now(), &mut signals);
        for signal in signals {
            match signal {
                Signal::Lost { path, .. } => stranger.paths.retain(|known| *known != path),
                Signal::Completed { outcome: Ok(_), .. } => {
                    let (node, name, why) = (0, NAME.to_owned(), "and has served it without a session");
                    return Err(Violation::Stranger { node, name, why });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A node has died. Everybody who was connected with it must notice: by a word of its kernel's, or by its silence.
    pub(super) fn expect_notice(&mut self, dead: usize) {
        for (index, node) in self.nodes.iter().enumerate() {
            let linked = node.links.iter().filter(|(_, link)| link.to == dead && link.up);
            for (peer, _) in linked {
                let at = self.world.now().saturating_add(noticed_within(self.plan.silence_max));
                // Peers are numbered anew in every life of the node that waits.
                let about = (index as u64) << 48 | node.epoch.0 << 24 | u64::from(peer.0);
                self.arrange(at, Tick::Noticed, about);
            }
        }
    }

    pub(super) fn on_noticed(&mut self, about: u64) -> Result<(), Violation> {
        let (index, epoch, peer) = ((about >> 48) as usize, about >> 24 & 0xff_ffff, about & 0xff_ffff);
        let (node, peer) = (&self.nodes[index], PeerId(peer as u32));
        if node.agent.is_none() || node.epoch != Epoch(epoch) {
            return Ok(());
        }
        if let Some(until) = node.frozen_until {
            let at = until.saturating_add(self.plan.silence_max.saturating_mul(2));
            self.arrange(at, Tick::Noticed, about);
            return Ok(());
        }
        match node.links.get(&peer) {
            Some(link) if link.up => {
                let waited = noticed_within(self.plan.silence_max);
                let (node, to) = (index, link.to);
                Err(Violation::Undead { node, to, waited })
            }
            _ => Ok(()),
        }
    }
}
