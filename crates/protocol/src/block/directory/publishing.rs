//! What is here is told to the members that it is placed with: as it comes and goes, and again where members come and go.

use weft_plan::Time;

use super::super::BlockId;
use super::shard::{Change, Replica, SLICES, Seat, placed};
use super::wire::ENTRIES_MAX;
use super::{Directory, Message, Said};
use crate::transfer::PeerId;

/// So much may be due to a member. One that takes nothing is told all of it when it does again.
const DUE_MAX: usize = 1 << 20;
/// Going through what is here waits while so much is due to somebody who takes it.
const DUE_WHILE_SWEEPING: usize = 1 << 16;
/// A member that has taken nothing for so long is not waited for.
const STALLED_AFTER: Time = Time::from_secs(1);
/// Entries that are gone through in one turn, and those of one slice more.
const ENTRIES_PER_TURN: usize = 4096;

/// Going through what is here, because the members are not those of before.
#[derive(Debug)]
pub(super) struct Sweep {
    /// Whom everything was placed with, as far as it was told.
    before: Vec<Seat>,
    at: usize,
    waits: bool,
}

impl Directory {
    /// A block can be read here: from these tiers, with these parts. No tiers: it cannot any more.
    pub fn set(&mut self, id: BlockId, tiers: u8, parts: u8) {
        let slice = self.blocks.around(&id);
        let before = match tiers {
            0 => slice.remove(&id),
            _ => slice.insert(id, (tiers, parts)),
        };
        if before.unwrap_or((0, 0)) != (tiers, if tiers == 0 { 0 } else { parts }) {
            self.tell_placed(id);
        }
    }

    /// What is known to be here, as tiers and parts.
    pub fn here(&self, id: &BlockId) -> Option<(u8, u8)> {
        self.blocks.find(id).copied()
    }

    /// Whoever is to know of a block is told how things are.
    pub(super) fn tell_placed(&mut self, id: BlockId) {
        for seat in placed(&self.seats, &id).into_iter().flatten() {
            self.tell(seat, id);
        }
    }

    fn tell(&mut self, seat: Seat, id: BlockId) {
        let Some(peer) = self.lives.get(&seat.member) else {
            return;
        };
        let Some(member) = self.members.get_mut(peer) else {
            return;
        };
        match member.due.len() < DUE_MAX {
            true => member.due.push_back(id),
            false => member.missed = true,
        }
    }

    pub(super) fn begin_sweep(&mut self, before: Vec<Seat>) {
        match &mut self.sweep {
            // Some of it was told by the seats in between, some was not.
            Some(sweep) => {
                (sweep.at, sweep.waits) = (0, false);
                let lives = &self.lives;
                sweep
                    .before
                    .retain(|seat| seat.member == 0 || lives.contains_key(&seat.member));
            }
            None => {
                let (at, waits) = (0, false);
                self.sweep = Some(Sweep { before, at, waits });
            }
        }
    }

    pub(super) fn may_sweep(&self) -> bool {
        self.sweep.as_ref().is_some_and(|sweep| !sweep.waits)
    }

    pub(super) fn sweep_blocks(&mut self, now: Time) {
        let mut seen = 0;
        while seen < ENTRIES_PER_TURN {
            let behind = self.members.values_mut().any(|member| {
                let stalled = now.saturating_sub(member.told_at) > STALLED_AFTER;
                member.due.len() > DUE_WHILE_SWEEPING && !stalled
            });
            let Some(sweep) = &mut self.sweep else { return };
            sweep.waits = behind;
            if behind {
                return;
            }
            let at = sweep.at;
            sweep.at += 1;
            if at == SLICES {
                self.sweep = None;
                return;
            }
            let before = std::mem::take(&mut sweep.before);
            let ids: Vec<BlockId> = self.blocks.nth(at).keys().copied().collect();
            seen += ids.len();
            for id in ids {
                let old = placed(&before, &id);
                let known = |seat: &Seat| old.iter().flatten().any(|other| other == seat);
                for seat in placed(&self.seats, &id)
                    .into_iter()
                    .flatten()
                    .filter(|seat| !known(seat))
                {
                    self.tell(seat, id);
                }
            }
            if let Some(sweep) = &mut self.sweep {
                sweep.before = before;
            }
        }
    }

    /// What a member is to be told next. Whoever carries it says it before asking for more.
    pub fn next_published(&mut self, peer: PeerId, now: Time) -> Option<Message> {
        let member = self.members.get_mut(&peer)?;
        let take = member.due.len().min(ENTRIES_MAX);
        let ids: Vec<BlockId> = member.due.drain(..take).collect();
        if take > 0 {
            member.told_at = now;
        }
        if member.due.is_empty() {
            // What was queued once may be so again, and a queue that was long is not kept so.
            member.due.shrink_to(4 * ENTRIES_MAX);
            if std::mem::take(&mut member.missed) {
                let number = member.seat.member;
                // A sweep that is under way goes on for those that it was for.
                let known = self
                    .sweep
                    .take()
                    .map_or_else(|| self.seats.clone(), |sweep| sweep.before);
                let before = known.into_iter().filter(|seat| seat.member != number).collect();
                self.begin_sweep(before);
            }
        }
        if let Some(sweep) = &mut self.sweep {
            sweep.waits = false;
        }
        if ids.is_empty() {
            return None;
        }
        self.counts.published += ids.len() as u64;
        let said = |id: BlockId| {
            let (tiers, parts) = self.blocks.find(&id).copied().unwrap_or_default();
            Said { id, tiers, parts }
        };
        Some(Message::Publish {
            entries: ids.into_iter().map(said).collect(),
        })
    }

    /// Whom something is due to.
    pub fn owed(&self) -> impl Iterator<Item = PeerId> + '_ {
        let owed = self.members.iter().filter(|(_, member)| !member.due.is_empty());
        owed.map(|(peer, _)| *peer)
    }

    pub(super) fn on_published(&mut self, peer: PeerId, said: &[Said]) {
        let Some(member) = self.members.get_mut(&peer) else {
            return;
        };
        self.counts.heard += said.len() as u64;
        let (number, lives) = (member.seat.member, &self.lives);
        for said in said {
            // It may always take back what it has said.
            if said.tiers != 0 && member.entries >= self.settings.entries {
                self.counts.left_out += 1;
                if self.unswept == 0 {
                    (self.crowded, self.unswept) = (true, SLICES);
                }
                continue;
            }
            let replica = Replica {
                member: number,
                tiers: said.tiers,
                parts: said.parts,
            };
            match self.entries.set(said.id, replica, |other| lives.contains_key(&other)) {
                Change::Added => member.entries += 1,
                Change::Removed => member.entries -= 1,
                Change::Same => {}
                Change::NoPlace => self.counts.left_out += 1,
            }
        }
    }

    /// Entries of those that are gone go a slice at a time; nobody is told of them meanwhile.
    pub(super) fn sweep_entries(&mut self) {
        let mut seen = 0;
        while seen < ENTRIES_PER_TURN {
            let Some(slice) = self.unswept.checked_sub(1) else {
                return;
            };
            self.unswept = slice;
            let (seats, lives, members, crowded) = (&self.seats, &self.lives, &mut self.members, self.crowded);
            let mut gone: Vec<u32> = Vec::new();
            seen += self.entries.nth(slice).len();
            self.entries.nth(slice).retain(|id, replicas| {
                // What is placed elsewhere is not asked for here; but others may see other members, so it goes only for want of room.
                let here = || placed(seats, id).into_iter().flatten().any(|seat| seat.member == 0);
                let here = !crowded || here();
                let keep = |one: &Replica| here && lives.contains_key(&one.member);
                gone.extend(
                    replicas
                        .as_slice()
                        .iter()
                        .filter(|one| !keep(one))
                        .map(|one| one.member),
                );
                replicas.retain(keep);
                !replicas.is_empty()
            });
            for number in gone {
                if let Some(member) = lives.get(&number).and_then(|peer| members.get_mut(peer)) {
                    member.entries -= 1;
                }
            }
            if slice == 0 {
                self.crowded = false;
            }
        }
    }
}
