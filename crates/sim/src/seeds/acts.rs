//! What agents do in a seed's world, and what befalls them.

use std::sync::Arc;

use weft_plan::{Span, Spans, Time};
use weft_protocol::seeded::Seeded;
use weft_protocol::transfer::{PeerId, Request};
use weft_protocol::{Direction, Epoch, Leg, RemoteRegion};

use super::play::{Kind, Lease, Note, Play, Work};
use super::verdicts::Violation;

/// A transfer that is about to be submitted.
struct Draft {
    peer: PeerId,
    direction: Direction,
    remote: RemoteRegion,
    remote_spans: Spans,
    kind: Kind,
    /// What a read must bring.
    expected: Option<Vec<u8>>,
    patience: Time,
    in_calm: bool,
}

impl Play {
    /// One thing happens somewhere.
    pub(super) fn act(&mut self) -> Result<(), Violation> {
        let index = self.chance.below(self.nodes.len() as u64) as usize;
        let mut roll = self.chance.below(1000);
        let mut falls = |chance: u64| {
            let hit = roll < chance;
            roll = roll.wrapping_sub(chance);
            hit
        };
        if falls(self.plan.crash) {
            return self.crash(index);
        }
        if falls(self.plan.cut) {
            self.cut(index);
            return Ok(());
        }
        if falls(self.plan.freeze) {
            if self.is_active(index) {
                let duration = Time::from_us(self.chance.below(300_000));
                self.freeze(index, duration);
            }
            return Ok(());
        }
        if falls(self.plan.reset) {
            let pick = self.chance.next_u64();
            self.world.reset_path(pick);
            return Ok(());
        }
        if !self.is_active(index) {
            return Ok(());
        }
        match self.chance.below(if self.plan.counts { 130 } else { 100 }) {
            0..10 => self.meet(index),
            10..42 => self.read(index),
            42..72 => self.write(index),
            72..78 => self.notify(index),
            78..84 => self.cancel(index),
            84..89 => self.change_mind(index),
            89..94 => self.trespass(index),
            94..98 => self.borrow(index),
            98 => self.return_lease(index),
            100.. => self.count(index),
            _ => self.part(index),
        }
    }

    fn crash(&mut self, index: usize) -> Result<(), Violation> {
        if self.nodes[index].agent.is_none() {
            return Ok(());
        }
        let told = self.chance.chance(0.5);
        self.end_life(index, told)
    }

    fn cut(&mut self, index: usize) {
        let other = self.chance.below(self.nodes.len() as u64) as usize;
        if other != index {
            let duration = Time::from_us(100 << self.chance.below(13));
            let (a, b) = (self.nodes[index].id, self.nodes[other].id);
            self.world.cut(a, b, duration);
            if self.chance.chance(0.6) {
                self.world.cut(b, a, duration);
            }
        }
    }

    /// Pulls the cable of some rail of some node, for longer or shorter than a path's patience.
    pub(super) fn pull_cable(&mut self) {
        let node = self.chance.below(self.nodes.len() as u64) as usize;
        let rail = self.chance.below(self.plan.rails.len() as u64) as u32;
        let duration = Time::from_us(100 << self.chance.below(12));
        self.world.pull(self.nodes[node].id, rail, duration);
    }

    fn meet(&mut self, index: usize) -> Result<(), Violation> {
        let to = self.chance.below(self.nodes.len() as u64) as usize;
        let links = self.nodes[index].links.values().filter(|link| link.to == to).count();
        if to == index || links >= 2 {
            return Ok(());
        }
        let patience = Time::from_us(1 << self.chance.below(21));
        match self.chance.below(8) {
            0 => self.connect_to_the_dead(index, to, patience),
            _ => self.connect(index, to, patience),
        }
    }

    pub(super) fn any_peer(&mut self, index: usize) -> Option<PeerId> {
        let up = self.nodes[index].links.iter().filter(|(_, link)| link.up);
        let up: Vec<PeerId> = up.map(|(peer, _)| *peer).collect();
        let pick = self.chance.below(up.len().max(1) as u64) as usize;
        up.get(pick).copied()
    }

    /// What a peer has published under a name, and the region behind it where its key is still good.
    fn remote(&self, index: usize, peer: PeerId, name: &str) -> Option<(RemoteRegion, Option<usize>)> {
        let node = &self.nodes[index];
        let to = &self.nodes[node.links.get(&peer)?.to];
        let remote = node.agent.as_ref()?.core.region(peer, name)?.clone();
        let region = [to.source, to.sink]
            .into_iter()
            .find(|r| self.regions[*r].key == Some(remote.key));
        Some((remote, region))
    }

    fn read(&mut self, index: usize) -> Result<(), Violation> {
        let Some(peer) = self.any_peer(index) else {
            return Ok(());
        };
        let patience = self.patience();
        self.read_from(index, peer, patience, false)
    }

    pub(super) fn transfer_in_calm(&mut self, index: usize, peer: PeerId) -> Result<(), Violation> {
        self.read_from(index, peer, Time::from_secs(2), true)
    }

    fn read_from(&mut self, index: usize, peer: PeerId, patience: Time, in_calm: bool) -> Result<(), Violation> {
        let Some((remote, region)) = self.remote(index, peer, "source") else {
            return Ok(());
        };
        let len = self.plan.region_bytes as u64;
        let bytes = self.size();
        let spans = random_spans(&mut self.chance, 0, len, bytes);
        let (kind, expected) = match region {
            Some(region) => (Kind::Read, Some(self.regions[region].watched.expected(&spans))),
            None => (Kind::Forbidden("withdrawn"), None),
        };
        let draft = Draft {
            peer,
            direction: Direction::Read,
            remote,
            remote_spans: spans,
            kind,
            expected,
            patience,
            in_calm,
        };
        self.submit(index, draft)
    }

    fn write(&mut self, index: usize) -> Result<(), Violation> {
        let Some(peer) = self.any_peer(index) else {
            return Ok(());
        };
        let Some((remote, region)) = self.remote(index, peer, "sink") else {
            return Ok(());
        };
        let bytes = self.size();
        let (kind, spans) = match region {
            None => (Kind::Forbidden("withdrawn"), Spans::contiguous(0, bytes)),
            Some(region) => {
                let watched = &mut self.regions[region].watched;
                let cell_bytes = watched.cell_bytes() as u64;
                let Some(cell) = watched.lend() else {
                    return Ok(());
                };
                let spans = random_spans(&mut self.chance, cell as u64 * cell_bytes, cell_bytes, bytes);
                let generation = self.regions[region].generation;
                let kind = Kind::Write {
                    region,
                    generation,
                    cell,
                    spans: spans.clone(),
                };
                (kind, spans)
            }
        };
        let patience = self.patience();
        let draft = Draft {
            peer,
            direction: Direction::Write,
            remote,
            remote_spans: spans,
            kind,
            expected: None,
            patience,
            in_calm: false,
        };
        self.submit(index, draft)
    }

    /// Tries what must not be possible.
    fn trespass(&mut self, index: usize) -> Result<(), Violation> {
        let Some(peer) = self.any_peer(index) else {
            return Ok(());
        };
        let to = self.nodes[index].links[&peer].to;
        let bytes = self.size();
        let spans = Spans::contiguous(self.chance.below(64), bytes);
        let reads = self.chance.chance(0.5);
        let old: Vec<_> = self.stale.iter().filter(|(node, _)| *node == to).collect();
        let (why, remote, spans, direction) = match self.chance.below(4) {
            0 if !old.is_empty() => {
                let remote = old[self.chance.below(old.len() as u64) as usize].1.clone();
                let direction = if remote.access.read {
                    Direction::Read
                } else {
                    Direction::Write
                };
                ("an old key", remote, spans, direction)
            }
            3 => {
                let (name, direction) = match reads {
                    true => ("source", Direction::Read),
                    false => ("sink", Direction::Write),
                };
                let Some((mut remote, _)) = self.remote(index, peer, name) else {
                    return Ok(());
                };
                remote.key.epoch = Epoch(remote.key.epoch.0.wrapping_sub(1));
                ("another life", remote, spans, direction)
            }
            1 => {
                let (name, direction) = match reads {
                    true => ("sink", Direction::Read),
                    false => ("source", Direction::Write),
                };
                let Some((remote, _)) = self.remote(index, peer, name) else {
                    return Ok(());
                };
                ("no permission", remote, spans, direction)
            }
            _ => {
                let (name, direction) = match reads {
                    true => ("source", Direction::Read),
                    false => ("sink", Direction::Write),
                };
                let Some((mut remote, _)) = self.remote(index, peer, name) else {
                    return Ok(());
                };
                remote.len *= 2;
                // One part at most: of several, those within bounds would rightfully be moved.
                let bytes = bytes.min(1000);
                let beyond = Spans::contiguous(self.plan.region_bytes as u64 - bytes / 2, bytes);
                ("out of bounds", remote, beyond, direction)
            }
        };
        let patience = self.patience();
        let draft = Draft {
            peer,
            direction,
            remote,
            remote_spans: spans,
            kind: Kind::Forbidden(why),
            expected: None,
            patience,
            in_calm: false,
        };
        self.submit(index, draft)
    }

    fn submit(&mut self, index: usize, draft: Draft) -> Result<(), Violation> {
        let bytes = draft.remote_spans.bytes();
        let buffers = &mut self.nodes[index].buffers;
        let Some(buffer) = buffers.iter_mut().position(|b| b.watched.lend().is_some()) else {
            return self.give_up(draft.kind);
        };
        let chosen = &self.nodes[index].buffers[buffer];
        let local_spans = match draft.kind {
            // In one part, so that it is refused whole.
            Kind::Forbidden(_) => Spans::contiguous(0, bytes),
            _ => random_spans(&mut self.chance, 0, chosen.watched.cell_bytes() as u64, bytes),
        };
        let expected = draft.expected.unwrap_or_else(|| chosen.watched.expected(&local_spans));
        let leg = Leg::new(
            chosen.region.clone(),
            local_spans.clone(),
            draft.remote,
            draft.remote_spans,
        );
        let leg = leg.expect("both sides hold as many bytes, and lie where they should");
        let announces = !matches!(draft.kind, Kind::Forbidden(_)) && self.chance.chance(0.4);
        let note = announces.then_some(self.next_note);
        let Some(agent) = &mut self.nodes[index].agent else {
            return Ok(());
        };
        let now = agent.now();
        let deadline = now.saturating_add(draft.patience);
        let request = Request::new(draft.peer, draft.direction, Arc::from([Arc::new(leg)]), deadline)
            .checksum(self.chance.chance(0.5));
        let payload = note.map(u64::to_le_bytes);
        let submitted = agent.core.submit(request, payload.as_ref().map(|p| p.as_slice()), now);
        let Ok(id) = submitted else {
            // The session may have ended a moment ago, or have too much to say.
            let nothing = Spans::new();
            let _ = self.nodes[index].buffers[buffer]
                .watched
                .take_back(0, &nothing, &mut self.chance);
            return self.give_up(draft.kind);
        };
        let world_deadline = agent.on_world_clock(deadline);
        let number = self.next_work;
        self.next_work += 1;
        if let Some(note) = note {
            self.next_note += 1;
            let state = Note {
                from: index,
                peer: draft.peer,
                work: Some(number),
                due: false,
                received: false,
            };
            self.notes.insert(note, state);
        }
        let work = Work {
            node: index,
            id,
            kind: draft.kind,
            buffer,
            local_spans,
            expected,
            deadline: world_deadline,
            note,
            in_calm: draft.in_calm,
            ended: None,
            consumed: false,
        };
        self.world.note(&[10, index as u64, id.0], || {
            format!(
                "node {index} submits {id:?} of {bytes} bytes, {:?}, note {note:?}, by {world_deadline:?}",
                draft.direction
            )
        });
        self.works.insert(number, work);
        self.open.insert((index, id), number);
        self.watch(number, world_deadline);
        self.turn(index)
    }

    /// Nothing came of a transfer: what it had on loan goes back.
    fn give_up(&mut self, kind: Kind) -> Result<(), Violation> {
        if let Kind::Write { region, cell, .. } = kind {
            let nothing = Spans::new();
            self.take_cell_back(region, cell, &nothing)?;
        }
        Ok(())
    }

    fn notify(&mut self, index: usize) -> Result<(), Violation> {
        let Some(peer) = self.any_peer(index) else {
            return Ok(());
        };
        let note = self.next_note;
        let Some(agent) = &mut self.nodes[index].agent else {
            return Ok(());
        };
        let now = agent.now();
        if agent.core.notify(peer, &note.to_le_bytes(), now).is_ok() {
            self.next_note += 1;
            let state = Note {
                from: index,
                peer,
                work: None,
                due: true,
                received: false,
            };
            self.notes.insert(note, state);
        }
        self.turn(index)
    }

    fn cancel(&mut self, index: usize) -> Result<(), Violation> {
        let open: Vec<_> = self
            .open
            .keys()
            .filter(|(node, _)| *node == index)
            .map(|(_, id)| *id)
            .collect();
        let pick = self.chance.below(open.len().max(1) as u64) as usize;
        if let (Some(id), Some(agent)) = (open.get(pick), &mut self.nodes[index].agent) {
            let now = agent.now();
            agent.core.cancel(*id, now);
        }
        self.turn(index)
    }

    fn change_mind(&mut self, index: usize) -> Result<(), Violation> {
        let node = &self.nodes[index];
        let region = if self.chance.chance(0.5) {
            node.source
        } else {
            node.sink
        };
        if self.regions[region].key.is_some() {
            self.withdraw(region)?;
        } else {
            self.publish(region);
        }
        self.turn(index)
    }

    fn borrow(&mut self, index: usize) -> Result<(), Violation> {
        let Some(peer) = self.any_peer(index) else {
            return Ok(());
        };
        let Some((remote, Some(region))) = self.remote(index, peer, "source") else {
            return Ok(());
        };
        let duration = Time::from_us(self.chance.below(100_000));
        let Some(agent) = &mut self.nodes[index].agent else {
            return Ok(());
        };
        let now = agent.now();
        if let Ok(lease) = agent.core.borrow(peer, remote.key, duration, now) {
            self.leases.insert((index, peer, lease), Lease { region, until: None });
        }
        self.turn(index)
    }

    fn return_lease(&mut self, index: usize) -> Result<(), Violation> {
        let mine = self.leases.keys().find(|(node, ..)| *node == index).copied();
        if let (Some((_, peer, lease)), Some(agent)) = (mine, &mut self.nodes[index].agent) {
            let now = agent.now();
            agent.core.give_back(peer, lease, now);
            self.leases.remove(&(index, peer, lease));
        }
        self.turn(index)
    }

    fn part(&mut self, index: usize) -> Result<(), Violation> {
        let Some(peer) = self.any_peer(index) else {
            return Ok(());
        };
        if let Some(agent) = &mut self.nodes[index].agent {
            let now = agent.now();
            agent.core.disconnect(peer, now);
            // What was said before the goodbye still arrives, but nothing after: no promise is left to be checked.
            self.forget_notes(index, peer);
        }
        self.turn(index)
    }

    fn size(&mut self) -> u64 {
        let most = (self.plan.region_bytes / self.plan.cells) as u64;
        let most = (16 << self.chance.below(12)).min(most);
        1 + self.chance.below(most)
    }

    pub(super) fn patience(&mut self) -> Time {
        Time::from_us(20 << self.chance.below(15))
    }
}

/// Bytes of a window, in pieces of a random size and in a random order, none twice.
fn random_spans(chance: &mut Seeded, start: u64, window: u64, bytes: u64) -> Spans {
    let piece = match chance.below(3) {
        0 => bytes,
        _ => (1 + chance.below(bytes)).max(bytes / 64 + 1),
    };
    let (places, wanted) = (window / piece, bytes.div_ceil(piece));
    if places < wanted {
        return Spans::contiguous(start, bytes);
    }
    let mut order = chance.shuffled(places);
    if chance.chance(0.3) {
        order.sort_unstable();
    }
    let mut left = bytes;
    let mut spans = Spans::new();
    for place in order.into_iter().take(wanted as usize) {
        let len = left.min(piece);
        spans.push(Span {
            offset: start + place * piece,
            len,
        });
        left -= len;
    }
    spans
}
