//! What is pushed to a reader, and lands.
//!
//! A landing place is memory of its own, because a peer that writes cannot be trusted to stop: it may be frozen in mid-copy and go on when the blocks
//! belong to somebody else. Its key ends with the hand-off, after which a late byte is refused or lands where nobody looks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use weft_plan::Time;

use super::super::cache::{Cache, Sequence, overlaps};
use super::super::machine::HandOffs;
use super::super::{Act, AskedShare, Event, Message, Mismatch, Over, Reason, Reserve};
use super::{Stage, Want};
use crate::agent::MAX_PARCEL_BYTES;
use crate::error::Refusal;
use crate::transfer::PeerId;

#[derive(Debug)]
pub(super) struct Landing {
    pub(super) number: u64,
    pub(super) bytes: u64,
    place: Cache,
    blocks: u64,
    /// Up to which token each layer has come from each worker that has a share in it.
    pub(super) upto: BTreeMap<u32, BTreeMap<PeerId, u64>>,
    shares: BTreeMap<PeerId, Vec<AskedShare>>,
    got: BTreeMap<PeerId, u64>,
    /// Layers that are being copied to their blocks, and those that are there.
    pub(super) settling: BTreeSet<u32>,
    pub(super) settled: BTreeSet<u32>,
}

impl Landing {
    /// How many bytes have come, by the words of those who wrote them. What was preempted was written twice.
    pub(super) fn came(&self) -> u64 {
        let all = self.got.values().fold(0, |all: u64, bytes| all.saturating_add(*bytes));
        all.min(self.bytes)
    }
}

impl HandOffs {
    /// Waits for its turn to have room to land in.
    pub(super) fn ask_room(
        &mut self,
        name: &str,
        peers: &[PeerId],
        caches: &[Arc<Cache>],
        now: Time,
    ) -> Result<(), (PeerId, Mismatch)> {
        let own = self.cache.clone();
        let others: Vec<&Cache> = caches.iter().map(|cache| &**cache).collect();
        let shares = own.shares(&others).map_err(|mismatch| (peers[0], mismatch))?;
        let number = self.next_landing;
        self.next_landing += 1;
        let Some(want) = self.wants.get_mut(name) else {
            return Ok(());
        };
        let (first, end) = (want.wanted.tokens.start, want.wanted.tokens.end);
        let blocks = end.div_ceil(own.block_tokens()) - first / own.block_tokens();
        let Ok((place, bytes)) = own.dense(blocks) else {
            self.fail(name, Reason::NoRoom, now);
            return Ok(());
        };
        let mut landing = Landing {
            number,
            bytes,
            place,
            blocks,
            upto: BTreeMap::new(),
            shares: BTreeMap::new(),
            got: BTreeMap::new(),
            settling: BTreeSet::new(),
            settled: BTreeSet::new(),
        };
        for share in shares {
            let (peer, layer) = (peers[share.worker], share.layer as u32);
            landing.upto.entry(layer).or_default().insert(peer, first);
            let asked = landing.shares.entry(peer).or_default();
            match asked.iter_mut().find(|asked| asked.heads == share.heads) {
                Some(asked) => asked.layers.push(layer),
                None => asked.push(AskedShare {
                    heads: share.heads,
                    layers: vec![layer],
                }),
            }
        }
        (want.landing, want.stage) = (Some(landing), Stage::Queueing);
        self.queue.push_back(name.to_owned());
        self.give_room();
        Ok(())
    }

    /// Lets those land for whom there is room, in their order.
    pub(super) fn give_room(&mut self) {
        while let Some(name) = self.queue.front() {
            let wanted = self.wants.get_mut(name).filter(|want| want.stage == Stage::Queueing);
            let Some((want, (number, bytes))) = wanted.and_then(|want| {
                want.landing
                    .as_ref()
                    .map(|l| (l.number, l.bytes))
                    .map(|room| (want, room))
            }) else {
                self.queue.pop_front();
                continue;
            };
            if self.taken > 0 && self.taken.saturating_add(bytes) > self.settings.landing_bytes {
                return;
            }
            want.stage = Stage::Landing;
            self.taken += bytes;
            if let Some(name) = self.queue.pop_front() {
                self.landings.insert(number, name);
            }
            self.act(Act::Land { landing: number, bytes });
        }
    }

    /// What [`Act::Land`] has led to.
    pub fn on_made(&mut self, landing: u64, made: bool, now: Time) {
        let Some(name) = self.landings.get(&landing).cloned() else {
            return;
        };
        if !made {
            return self.fail(&name, Reason::NoMemory, now);
        }
        let Some(want) = self.wants.get(&name).filter(|want| want.stage == Stage::Landing) else {
            return;
        };
        let Some(room) = &want.landing else { return };
        let (mut reserves, mut idle) = (Vec::new(), Vec::new());
        for (address, (peer, _)) in want.addresses.iter().zip(&want.peers) {
            let Some(shares) = room.shares.get(peer) else {
                // Others write all that is needed.
                idle.push(address.clone());
                continue;
            };
            let reserve = Reserve {
                hand_off: name.clone(),
                landing,
                tokens: want.wanted.tokens.clone(),
                prompt_tokens: want.wanted.prompt_tokens,
                digest: want.wanted.digest,
                blocks: room.blocks,
                readers: want.readers,
                lasts: self.settings.deadline,
                shares: shares.clone(),
            };
            reserves.push((*peer, Message::Reserve(reserve)));
        }
        let (readers, until) = (want.readers, now.saturating_add(want.lasts));
        if reserves
            .iter()
            .any(|(_, reserve)| reserve.encode().len() > MAX_PARCEL_BYTES)
        {
            return self.fail(&name, Reason::TooMany, now);
        }
        reserves.into_iter().for_each(|(peer, reserve)| self.say(peer, reserve));
        idle.iter()
            .for_each(|address| self.owe(address, &name, readers, until, now));
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub(in super::super) fn on_landed(
        &mut self,
        landing: u64,
        peer: PeerId,
        layers: &[u32],
        upto: u64,
        bytes: u64,
        way: &str,
        now: Time,
    ) {
        let Some(name) = self.landings.get(&landing).cloned() else {
            return;
        };
        let Some(want) = self.wants.get_mut(&name).filter(|want| want.stage == Stage::Landing) else {
            return;
        };
        let end = want.wanted.tokens.end;
        let Some(room) = &mut want.landing else { return };
        let mut grown = false;
        for layer in layers {
            // Only who was asked for it can say that it has come.
            if let Some(before) = room.upto.get_mut(layer).and_then(|workers| workers.get_mut(&peer))
                && upto > *before
            {
                *before = upto;
                grown = true;
            }
        }
        if !grown {
            return;
        }
        // As it says: it cannot have written more than there is room for.
        room.got.insert(peer, bytes.min(room.bytes));
        want.ways.insert(way.to_owned());
        // It works on it, so that it may take as long again.
        want.expires = now.saturating_add(self.settings.deadline);
        let is_whole = |layer: &u32, workers: &BTreeMap<PeerId, u64>| {
            workers.values().all(|upto| *upto >= end) && !room.settling.contains(layer) && !room.settled.contains(layer)
        };
        let whole: Vec<u32> = room
            .upto
            .iter()
            .filter(|(layer, workers)| is_whole(layer, workers))
            .map(|(layer, _)| *layer)
            .collect();
        if whole.is_empty() {
            return;
        }
        room.settling.extend(&whole);
        let tokens = want.wanted.tokens.clone();
        let before = tokens.start / room.place.block_tokens();
        let landed: Vec<u64> = std::iter::repeat_n(0, before as usize).chain(0..room.blocks).collect();
        let near = Sequence {
            cache: &self.cache,
            blocks: &want.wanted.blocks,
        };
        let far = Sequence {
            cache: &room.place,
            blocks: &landed,
        };
        let of = |layer: &u32| {
            let layer = &self.cache.layers()[*layer as usize];
            (layer.name.as_str(), layer.pages.shape().heads.clone())
        };
        match overlaps(near, far, whole.iter().map(of), tokens) {
            Ok(copies) => self.events.push_back(Event::Settle {
                hand_off: name,
                landing,
                layers: whole,
                copies,
            }),
            Err(mismatch) => {
                room.settling.clear();
                let peer = self.name_of(peer);
                self.fail(&name, Reason::Mismatch { peer, mismatch }, now);
            }
        }
    }

    pub(in super::super) fn on_failed(&mut self, landing: u64, peer: PeerId, why: Over, now: Time) {
        let Some(name) = self.landings.get(&landing).cloned() else {
            return;
        };
        let asked = |want: &&Want| {
            want.landing
                .as_ref()
                .is_some_and(|room| room.shares.contains_key(&peer))
        };
        if self.wants.get(&name).filter(asked).is_some() {
            let peer = self.name_of(peer);
            self.fail(&name, Reason::Refused { peer, why }, now);
        }
    }

    /// Layers that [`Event::Settle`] spoke of are in their blocks.
    pub fn settled(&mut self, landing: u64, layers: &[u32], now: Time) {
        let Some(name) = self.landings.get(&landing).cloned() else {
            return;
        };
        let Some(room) = self.wants.get_mut(&name).and_then(|want| want.landing.as_mut()) else {
            return;
        };
        for layer in layers {
            if room.settling.remove(layer) {
                room.settled.insert(*layer);
            }
        }
        self.look_ended(&name, now);
    }

    /// Layers that [`Event::Settle`] spoke of could not be copied to their blocks, and are not being copied any more: the hand-off has failed.
    pub fn unsettled(&mut self, landing: u64, layers: &[u32], refusal: Refusal, now: Time) {
        let Some(name) = self.landings.get(&landing).cloned() else {
            return;
        };
        if let Some(room) = self.wants.get_mut(&name).and_then(|want| want.landing.as_mut()) {
            room.settling.retain(|layer| !layers.contains(layer));
            self.fail(&name, Reason::Unsettled(refusal), now);
        }
    }

    /// A landing place is free: nobody can touch it any more.
    pub fn on_released(&mut self, landing: u64) {
        if let Some(bytes) = self.releasing.remove(&landing) {
            self.taken -= bytes;
            self.give_room();
        }
    }
}
