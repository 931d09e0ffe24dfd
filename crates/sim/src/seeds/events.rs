//! What agents say in a seed's world, held against what they may say.

use std::ops::Range;

use weft_plan::Spans;
use weft_protocol::Memory;
use weft_protocol::agent::Event;
use weft_protocol::transfer::{PeerId, Summary, TransferError, TransferId};

use super::ledger::{Damage, gather};
use super::play::{Kind, Link, Play, Work};
use super::verdicts::Violation;

impl Play {
    pub(super) fn on_event(&mut self, index: usize, event: Event) -> Result<(), Violation> {
        self.world
            .note(&[20, index as u64], || format!("node {index}: {event:?}"));
        match event {
            Event::Connected { peer, identity, .. } => {
                let stale = self.nodes[index].links.get(&peer).is_some_and(|link| link.stale);
                let to = identity
                    .name
                    .strip_prefix("node")
                    .and_then(|number| number.parse().ok());
                let (node, name) = (index, identity.name);
                match (to, stale) {
                    (Some(to), false) => {
                        let link = Link { to, up: true, stale };
                        self.nodes[index].links.insert(peer, link);
                    }
                    (_, true) => {
                        let why = "in whose place it had looked for an earlier life";
                        return Err(Violation::Stranger { node, name, why });
                    }
                    (None, _) => {
                        let why = "who does not know the secret";
                        return Err(Violation::Stranger { node, name, why });
                    }
                }
            }
            Event::ConnectFailed { peer, error } => {
                let link = self.nodes[index].links.remove(&peer);
                if let (true, Some(Link { to, stale: false, .. })) = (self.calm && self.reconnected, link) {
                    return Err(Violation::NoCalmSession { node: index, to, error });
                }
            }
            Event::PeerLost { peer, .. } => {
                self.nodes[index].links.remove(&peer);
                self.forget_notes(index, peer);
                self.leases.retain(|(node, of, _), _| (*node, *of) != (index, peer));
            }
            Event::Notified { payload, .. } => self.on_notified(index, &payload)?,
            Event::AtomicEnded { id, outcome } => self.on_incremented(index, id, outcome)?,
            Event::Ended { id, outcome } => self.on_ended(index, id, outcome)?,
            Event::Leased { peer, lease, until } => {
                let until = self.nodes[index]
                    .agent
                    .as_ref()
                    .map(|agent| agent.on_world_clock(until));
                if let Some(state) = self.leases.get_mut(&(index, peer, lease)) {
                    state.until = until;
                }
            }
            Event::LeaseRefused { peer, lease, .. } | Event::LeaseEnded { peer, lease } => {
                self.leases.remove(&(index, peer, lease));
            }
            _ => {}
        }
        Ok(())
    }

    /// A session is over: what was said over it may have come or not. What waited to be announced is not waited for.
    pub(super) fn forget_notes(&mut self, index: usize, peer: PeerId) {
        let of_peer = self.notes.values_mut().filter(|n| (n.from, n.peer) == (index, peer));
        let mut done = Vec::new();
        for note in of_peer {
            note.due = false;
            done.extend(note.work.filter(|_| !note.received));
        }
        for work in done {
            if self.works.get(&work).is_some_and(|w| w.ended == Some(true)) {
                // Nothing is compared here: the bytes were compared when the transfer ended.
                let _ = self.reclaim(work);
            }
        }
    }

    fn on_notified(&mut self, index: usize, payload: &[u8]) -> Result<(), Violation> {
        self.notifications += 1;
        let note = payload.try_into().map_or(u64::MAX, u64::from_le_bytes);
        let Some(state) = self.notes.get_mut(&note) else {
            return Err(Violation::Repeated { node: index, note });
        };
        if std::mem::replace(&mut state.received, true) {
            return Err(Violation::Repeated { node: index, note });
        }
        let Some(number) = state.work else { return Ok(()) };
        let Some(work) = self.works.get(&number) else {
            return Ok(());
        };
        let early = match &work.kind {
            Kind::Read => work.ended != Some(true),
            Kind::Write {
                region,
                generation,
                spans,
                ..
            } => {
                let shared = &self.regions[*region];
                // After a failure the bytes are no longer the transfer's, and nothing can be told from them.
                let tells = work.ended != Some(false) && shared.generation == *generation && !shared.dead;
                tells && gather(&*shared.watched.memory, spans) != work.expected
            }
            Kind::Forbidden(_) => true,
        };
        if early {
            return Err(Violation::Early { node: index, note });
        }
        match work.ended {
            Some(true) => self.reclaim(number),
            None => self.consume(number),
            Some(false) => Ok(()),
        }
    }

    /// The target has been told that a write is in place, before its sender has heard the same: it makes use of the memory at once, and from
    /// now on nothing of the write may change it.
    fn consume(&mut self, number: u64) -> Result<(), Violation> {
        let Some(work) = self.works.get_mut(&number) else {
            return Ok(());
        };
        let Kind::Write {
            region,
            generation,
            cell,
            ref spans,
        } = work.kind
        else {
            return Ok(());
        };
        let shared = &self.regions[region];
        if shared.generation != generation || shared.dead || std::mem::replace(&mut work.consumed, true) {
            return Ok(());
        }
        let spans = spans.clone();
        self.take_cell_back(region, cell, &spans)
    }

    fn on_ended(
        &mut self,
        index: usize,
        id: TransferId,
        outcome: Result<Summary, TransferError>,
    ) -> Result<(), Violation> {
        let Some(number) = self.open.remove(&(index, id)) else {
            return Err(Violation::EndedTwice { node: index, id });
        };
        let words = outcome
            .as_ref()
            .map_or_else(|e| e.cause.to_string(), |_| "done".to_owned());
        *self.ends.entry(words).or_default() += 1;
        let Some(mut work) = self.works.remove(&number) else {
            return Err(Violation::EndedTwice { node: index, id });
        };
        work.ended = Some(outcome.is_ok());
        if let (Err(error), true) = (&outcome, work.in_calm) {
            return Err(Violation::CalmFailure {
                node: index,
                id,
                cause: error.cause,
            });
        }
        self.compare(&work, &outcome)?;
        let nothing = Spans::new();
        let mine = match &work.kind {
            Kind::Read => &work.local_spans,
            // The near side of a write is only read; that of what is forbidden is not touched at all.
            _ => &nothing,
        };
        let buffer = &mut self.nodes[index].buffers[work.buffer].watched;
        let intact = buffer.take_back(0, mine, &mut self.chance);
        intact.map_err(|damage| damaged(index, "a buffer", damage))?;
        let note = work.note.and_then(|note| self.notes.get_mut(&note));
        let awaited = match note {
            Some(note) => {
                note.due = outcome.is_ok() && self.nodes[index].links.contains_key(&note.peer);
                note.due && !note.received
            }
            None => false,
        };
        self.works.insert(number, work);
        // What is announced stays as it is until the announcement has been held against it.
        if awaited { Ok(()) } else { self.reclaim(number) }
    }

    /// Holds what a transfer says it moved against what is there.
    fn compare(&self, work: &Work, outcome: &Result<Summary, TransferError>) -> Result<(), Violation> {
        let (node, id) = (work.node, work.id);
        let found = match &work.kind {
            Kind::Read => {
                let memory: &dyn Memory = &*self.nodes[node].buffers[work.buffer].watched.memory;
                gather(memory, &work.local_spans)
            }
            Kind::Write {
                region,
                generation,
                spans,
                ..
            } => {
                let shared = &self.regions[*region];
                if shared.generation != *generation || work.consumed {
                    return Ok(());
                }
                gather(&*shared.watched.memory, spans)
            }
            Kind::Forbidden(why) => {
                return match outcome {
                    Ok(_) => Err(Violation::Trespass { node, id, why }),
                    Err(_) => Ok(()),
                };
            }
        };
        let wrong = |range: Range<usize>| range.clone().find(|&at| found[at] != work.expected[at]);
        match outcome {
            Ok(_) => match wrong(0..found.len()) {
                Some(at) => Err(Violation::WrongBytes {
                    node,
                    id,
                    at,
                    total: found.len(),
                }),
                None => Ok(()),
            },
            Err(error) => {
                let moved = error
                    .done
                    .iter()
                    .map(|(_, range)| range.start as usize..range.end as usize);
                match moved.filter_map(wrong).next() {
                    Some(at) => Err(Violation::FalseReport { node, id, at }),
                    None => Ok(()),
                }
            }
        }
    }

    /// Takes back what a write had on loan at its target.
    pub(super) fn reclaim(&mut self, number: u64) -> Result<(), Violation> {
        let Some(work) = self.works.remove(&number) else {
            return Ok(());
        };
        let Kind::Write {
            region,
            generation,
            cell,
            spans,
        } = work.kind
        else {
            return Ok(());
        };
        let shared = &self.regions[region];
        if shared.generation != generation || shared.dead || work.consumed {
            return Ok(());
        }
        self.take_cell_back(region, cell, &spans)
    }

    pub(super) fn take_cell_back(&mut self, region: usize, cell: usize, spans: &Spans) -> Result<(), Violation> {
        let shared = &mut self.regions[region];
        let intact = shared.watched.take_back(cell, spans, &mut self.chance);
        intact.map_err(|damage| damaged(shared.node, shared.name, damage))
    }
}

fn damaged(node: usize, what: &str, damage: Damage) -> Violation {
    Violation::Damaged {
        node,
        what: what.to_owned(),
        damage,
    }
}
