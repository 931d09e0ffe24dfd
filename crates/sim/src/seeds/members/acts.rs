//! What the stores of a world do, what befalls them, and what is held against what they were told.

use std::sync::Arc;

use weft_plan::{Place, Time};
use weft_protocol::agent::Event as AgentEvent;
use weft_protocol::block::BlockId;
use weft_protocol::block::directory::{Event, FetchId, Fetched, Lent, Message, Missed, Named, Said, Wanted};
use weft_protocol::transport::Progress;
use weft_protocol::{HostBytes, VecMemory};

use super::node::{Wish, content, id};
use super::{BLOCK_BYTES, BLOCKS, Broken, DEADLINE, MembersPlay, SLACK, Tick};

impl MembersPlay {
    pub(super) fn on_act(&mut self) -> Result<(), Broken> {
        if self.actions_left == 0 {
            self.arrange(Time::ZERO, Tick::Calm, 0);
            return Ok(());
        }
        self.actions_left -= 1;
        let pace = [50, 3_000, 40_000][self.chance.below(3) as usize];
        let pace = Time::from_us(self.chance.below(pace));
        self.arrange(pace, Tick::Act, 0);
        let index = self.chance.below(self.nodes.len() as u64) as usize;
        let mut roll = self.chance.below(1000);
        let mut falls = |chance: u64| {
            let hit = roll < chance;
            roll = roll.wrapping_sub(chance);
            hit
        };
        if falls(self.plan.crash) {
            if self.nodes[index].agent.is_some() {
                self.kill(index);
                self.count("killed");
            }
            return Ok(());
        }
        if falls(self.plan.cut) {
            let other = self.chance.below(self.nodes.len() as u64) as usize;
            if other != index {
                let duration = Time::from_us(100 << self.chance.below(13));
                let (a, b) = (self.nodes[index].id, self.nodes[other].id);
                self.world.cut(a, b, duration);
                if self.chance.chance(0.6) {
                    self.world.cut(b, a, duration);
                }
            }
            return Ok(());
        }
        if falls(self.plan.freeze) {
            if self.nodes[index].agent.is_some() && self.nodes[index].frozen_until.is_none() {
                let duration = Time::from_us(self.chance.below(900_000));
                self.nodes[index].frozen_until = Some(self.world.now().saturating_add(duration));
                self.world.count(|tally| tally.freezes += 1);
                self.arrange(duration, Tick::Thaw, index as u64);
            }
            return Ok(());
        }
        if falls(self.plan.reset) {
            let pick = self.chance.next_u64();
            self.world.reset_path(pick);
            return Ok(());
        }
        if self.liar && self.chance.chance(0.2) {
            return self.gossip();
        }
        if self.nodes[index].frozen_until.is_some() {
            return Ok(());
        }
        match self.chance.below(100) {
            0..40 => self.put(index),
            40..80 => {
                let count = 1 + self.chance.below(6);
                let blocks: Vec<u64> = (0..count).map(|_| self.chance.below(BLOCKS)).collect();
                self.fetch(index, &blocks, None)?;
            }
            80..92 => {
                let ids: Vec<BlockId> = (0..8).map(|_| id(self.chance.below(BLOCKS))).collect();
                let node = &mut self.nodes[index];
                if let (Some(agent), Some(store)) = (&node.agent, &mut node.store) {
                    let now = agent.now();
                    store.members.machine.find(&ids, now);
                }
            }
            92..97 => {
                let block = self.chance.below(BLOCKS);
                if let Some(store) = &mut self.nodes[index].store {
                    store.shelf.evict(id(block));
                    store.tell();
                }
            }
            _ => {
                if let Some(store) = &mut self.nodes[index].store {
                    store.damage(&mut self.chance);
                }
            }
        }
        self.turn(index)
    }

    fn put(&mut self, index: usize) {
        for _ in 0..=self.chance.below(5) {
            let block = self.chance.below(BLOCKS);
            let node = &mut self.nodes[index];
            if let (Some(agent), Some(store)) = (&node.agent, &mut node.store) {
                let what = store.put(block, agent.now());
                self.count(what);
            }
        }
    }

    pub(super) fn fetch(&mut self, index: usize, blocks: &[u64], surely_from: Option<usize>) -> Result<(), Broken> {
        let bytes = blocks.len() * BLOCK_BYTES as usize;
        let node = &mut self.nodes[index];
        let (Some(agent), Some(store)) = (&mut node.agent, &mut node.store) else {
            return Ok(());
        };
        let memory = Arc::new(VecMemory::zeroed(bytes));
        let region = agent.core.register(memory.clone(), Place::DRAM);
        let region = region.expect("the simulated fabrics take any memory");
        let now = agent.now();
        let wanted: Vec<Wanted> = (0..)
            .zip(blocks)
            .map(|(nth, block)| Wanted {
                id: id(*block),
                offset: nth * u64::from(BLOCK_BYTES),
                room: BLOCK_BYTES,
            })
            .collect();
        let patience = if surely_from.is_some() {
            Time::from_secs(5)
        } else {
            DEADLINE
        };
        let fetch = store
            .members
            .fetch(region.clone(), &wanted, now.saturating_add(patience), now);
        let wish = Wish {
            blocks: blocks.to_vec(),
            ended: vec![false; blocks.len()],
            memory,
            region,
            deadline: self.world.now().saturating_add(patience),
            surely_from,
            image: None,
        };
        store.wishes.insert(fetch, wish);
        Ok(())
    }

    /// Turns a store, unless it is frozen or dead.
    pub(super) fn turn(&mut self, index: usize) -> Result<(), Broken> {
        if self.nodes[index].frozen_until.is_some() || self.nodes[index].agent.is_none() {
            return Ok(());
        }
        for round in 0.. {
            let names: Vec<String> = self.nodes.iter().map(|node| node.name.clone()).collect();
            let node = &mut self.nodes[index];
            let (Some(agent), Some(store)) = (&mut node.agent, &mut node.store) else {
                return Ok(());
            };
            let mut events: Vec<AgentEvent> = Vec::new();
            agent.turn(&mut events);
            let now = agent.now();
            for event in &events {
                match event {
                    AgentEvent::Connected { peer, identity, .. } => {
                        node.connecting.retain(|_, trying| trying != peer);
                        if let Some(index) = names.iter().position(|name| *name == identity.name) {
                            node.peers.insert(*peer, index);
                            node.epochs.insert(*peer, identity.epoch);
                        }
                    }
                    AgentEvent::ConnectFailed { peer, .. } => node.connecting.retain(|_, trying| trying != peer),
                    AgentEvent::PeerLost { peer, .. } => {
                        node.peers.remove(peer);
                        node.epochs.remove(peer);
                    }
                    _ => {}
                }
                store.members.on_event(&mut agent.core, event, now);
            }
            let any = store.members.turn(&mut agent.core, now) || !events.is_empty();
            let told: Vec<Event> = std::iter::from_fn(|| store.members.machine.next_event()).collect();
            let any = any || !told.is_empty();
            for event in told {
                self.on_event(index, event)?;
            }
            if !any || round > 50 {
                break;
            }
        }
        let world_now = self.world.now();
        let node = &mut self.nodes[index];
        let (Some(agent), Some(store)) = (&mut node.agent, &mut node.store) else {
            return Ok(());
        };
        let now = agent.now();
        let core = &mut agent.core;
        node.releasing
            .retain(|key| core.release(key, now) == Ok(Progress::Busy));
        let again = (!node.releasing.is_empty()).then(|| now.saturating_add(Time::from_ms(1)));
        let due = store.members.next_timeout().into_iter().chain(again).min();
        let due = due.map(|at| agent.on_world_clock(at.max(now)));
        let next = due.into_iter().chain(agent.next_timeout()).min();
        if let Some(next) = next.map(|next| next.max(world_now.saturating_add(Time::from_ns(100))))
            && node.wake.is_none_or(|at| next < at)
        {
            node.wake = Some(next);
            self.world.at(next, (Tick::Wake as u64) << 56 | index as u64);
        }
        self.check_open(index)
    }

    fn on_event(&mut self, index: usize, event: Event) -> Result<(), Broken> {
        self.world
            .note(&[60, index as u64], || format!("store {index}: {event:?}"));
        match event {
            Event::Found { question, found } => self.on_found(index, question, &found),
            Event::Landed { loan, fetch, blocks } => {
                let node = &mut self.nodes[index];
                let (Some(agent), Some(store)) = (&node.agent, &mut node.store) else {
                    return Ok(());
                };
                let Some(wish) = store.wishes.get(&fetch) else {
                    return Ok(());
                };
                let sums: Vec<Option<u64>> = blocks
                    .iter()
                    .map(|piece| {
                        let mut bytes = vec![0; piece.length as usize];
                        wish.memory.read(piece.offset, &mut bytes);
                        Some(weft_protocol::block::checksum(&bytes))
                    })
                    .collect();
                store.members.machine.summed(loan, &sums, agent.now());
                Ok(())
            }
            Event::Fetched { fetch, nth, ended } => self.on_fetched(index, fetch, nth, ended),
            Event::Asked { peer, loan, ids } => {
                let number = self.chance.next_u64() & 0xffff_ffff_ffff;
                if let Some(store) = &mut self.nodes[index].store {
                    store.asked.push((number, peer, loan, ids));
                }
                // From memory at once, from a file a while later.
                let wait = match self.chance.below(3) {
                    0 if !self.probing => Time::from_us(self.chance.below(30_000)),
                    _ => Time::ZERO,
                };
                self.arrange(wait, Tick::Lend, index as u64);
                Ok(())
            }
            Event::Free { token } => {
                let Some(store) = &mut self.nodes[index].store else {
                    return Ok(());
                };
                let Some(read) = store.tokens.remove(&token) else {
                    return Err(Broken::FreedTwice { store: index });
                };
                store.shelf.drop_read(read);
                Ok(())
            }
            Event::Doubted { ids } => {
                let node = &mut self.nodes[index];
                if let (Some(agent), Some(store)) = (&node.agent, &mut node.store) {
                    store.look_at(&ids, agent.now());
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Lends what was asked for first.
    pub(super) fn lend(&mut self, index: usize) -> Result<(), Broken> {
        if self.nodes[index].frozen_until.is_some() {
            self.arrange(Time::from_ms(5), Tick::Lend, index as u64);
            return Ok(());
        }
        let node = &mut self.nodes[index];
        let (Some(agent), Some(store)) = (&node.agent, &mut node.store) else {
            return Ok(());
        };
        if store.asked.is_empty() {
            return Ok(());
        }
        let (_, peer, loan, ids) = store.asked.remove(0);
        let lent = store.lend(peer, loan, &ids, agent.now());
        for _ in 0..lent {
            self.count("lent");
        }
        self.turn(index)
    }

    fn on_fetched(
        &mut self,
        index: usize,
        fetch: FetchId,
        nth: usize,
        ended: Result<Fetched, Missed>,
    ) -> Result<(), Broken> {
        let what = match &ended {
            Ok(_) => "fetched".to_owned(),
            Err(missed) => format!("missed: {missed}"),
        };
        self.count(what);
        let (world_now, probing) = (self.world.now(), self.probing);
        let Some(wish) = self.nodes[index]
            .store
            .as_mut()
            .and_then(|store| store.wishes.get_mut(&fetch))
        else {
            return Ok(());
        };
        if std::mem::replace(&mut wish.ended[nth], true) {
            return Err(Broken::EndedTwice { store: index });
        }
        let block = wish.blocks[nth];
        let over = world_now.saturating_sub(wish.deadline);
        if over > SLACK {
            return Err(Broken::NeverEnded { store: index, over });
        }
        match ended {
            Ok(fetched) => {
                let mut bytes = vec![0; fetched.length as usize];
                wish.memory.read(nth as u64 * u64::from(BLOCK_BYTES), &mut bytes);
                let right = content(block);
                if bytes != right {
                    let at = bytes.iter().zip(&right).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(Broken::WrongBytes {
                        store: index,
                        block,
                        at,
                    });
                }
            }
            Err(missed) => {
                // A copy may have been damaged; then it is found out and gone by now.
                if let Some(holder) = wish.surely_from
                    && probing
                    && missed != Missed::Wrong
                    && self.nodes[holder].has(block)
                {
                    let why = missed.to_string();
                    let store = index;
                    return Err(Broken::CalmMiss {
                        store,
                        holder,
                        block,
                        why,
                    });
                }
            }
        }
        let Some(store) = self.nodes[index].store.as_mut() else {
            return Ok(());
        };
        if let Some(wish) = store.wishes.get_mut(&fetch)
            && wish.ended.iter().all(|ended| *ended)
        {
            // Whoever owns the memory uses it for something else.
            let image = vec![0xe5; wish.memory.snapshot().len()];
            wish.memory.write(0, &image);
            wish.image = Some(image);
        }
        Ok(())
    }

    /// Memory of fetches that have ended stays as its owner left it, and no fetch is late.
    fn check_open(&mut self, index: usize) -> Result<(), Broken> {
        let now = self.world.now();
        let node = &mut self.nodes[index];
        let Some(store) = &mut node.store else {
            return Ok(());
        };
        let mut done = Vec::new();
        for (fetch, wish) in &store.wishes {
            if let Some(image) = &wish.image {
                if wish.memory.snapshot() != *image {
                    return Err(Broken::WrittenLate { store: index });
                }
                if now.saturating_sub(wish.deadline) > SLACK {
                    done.push(*fetch);
                }
            }
        }
        for fetch in done {
            if let (Some(wish), Some(agent)) = (store.wishes.remove(&fetch), &mut node.agent) {
                let key = wish.region.key;
                let now = agent.now();
                if agent.core.release(&key, now) == Ok(Progress::Busy) {
                    node.releasing.push(key);
                }
            }
        }
        let tally = store.shelf.tally();
        if !tally.balances() {
            let tally = format!("{tally:?}");
            return Err(Broken::Books { store: index, tally });
        }
        Ok(())
    }

    pub(super) fn check_rest(&mut self, index: usize) -> Result<(), Broken> {
        let Some(store) = &self.nodes[index].store else {
            return Ok(());
        };
        let kept = store.tokens.len() + store.members.machine.lent();
        if kept > 0 {
            return Err(Broken::KeptForEver { store: index, kept });
        }
        let open = store.wishes.values().filter(|wish| wish.image.is_none()).count();
        let under_way = store.members.machine.under_way().max(open);
        if under_way > 0 {
            let store = index;
            return Err(Broken::UnderWay { store, under_way });
        }
        assert_eq!(store.shape().parts().len(), 1);
        self.check_open(index)
    }

    /// Somebody who knows the secret says what makes no sense, or is not so, to everybody.
    fn gossip(&mut self) -> Result<(), Broken> {
        let from = self.nodes.len() - 1;
        if self.nodes[from].frozen_until.is_some() {
            return Ok(());
        }
        let mut some_ids = |most: u64| -> Vec<BlockId> {
            let count = self.chance.below(most) + 1;
            (0..count).map(|_| id(self.chance.below(BLOCKS))).collect()
        };
        let ids = some_ids(20);
        let number = self.chance.below(200);
        let lent = Lent {
            region: self.chance.below(2) as u8,
            tier: 0,
            parts: 1,
            length: BLOCK_BYTES,
            offset: self.chance.below(20) * 4096,
            sequence: self.chance.below(50),
            sum: self.chance.next_u64(),
        };
        let words = match self.chance.below(10) {
            0 => Message::Hello {
                shape: self.chance.next_u64(),
            }
            .encode(),
            1 | 2 => {
                let said = |id: &BlockId| Said {
                    id: *id,
                    tiers: 1,
                    parts: 1,
                };
                let entries = ids.iter().map(said).collect();
                Message::Publish { entries }.encode()
            }
            3 => Message::Ask { ask: number, ids }.encode(),
            4 => {
                let one = Named {
                    holder: 0,
                    tiers: 1,
                    parts: 1,
                };
                let holders = vec![self.chance.next_u64()];
                let found = vec![vec![one]; ids.len()];
                let ask = number;
                Message::Answer { ask, holders, found }.encode()
            }
            5 => {
                let (loan, lasts) = (number, Time::from_ms(1 + self.chance.below(2000)));
                Message::Read { loan, lasts, ids }.encode()
            }
            6 => {
                let blocks = vec![Some(lent); 1 + self.chance.below(4) as usize];
                let loan = number;
                Message::Lent { loan, blocks }.encode()
            }
            7 => Message::Done { loan: number }.encode(),
            8 => Message::Doubt { ids }.encode(),
            _ => {
                let mut noise = vec![0; self.chance.below(80) as usize];
                self.chance.fill(&mut noise);
                [vec![1, self.chance.below(9) as u8], noise].concat()
            }
        };
        let node = &mut self.nodes[from];
        let peers: Vec<_> = node.peers.keys().copied().collect();
        if let (Some(agent), Some(store)) = (&mut node.agent, &mut node.store) {
            let now = agent.now();
            for peer in peers {
                store.members.say_words(&mut agent.core, peer, &words, now);
            }
        }
        self.turn(from)
    }
}
