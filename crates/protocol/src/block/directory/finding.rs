//! Who has these blocks? Asked of the members that are to know, all at once.

use std::collections::BTreeMap;

use weft_plan::Time;

use super::super::BlockId;
use super::reading::FetchId;
use super::shard::{Replica, Replicas, placed};
use super::wire::{IDS_MAX, Named};
use super::{COPIES, Directory, Event, Message};
use crate::transfer::PeerId;

/// Names a question under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QuestionId(pub u64);

/// Another member that has a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub peer: PeerId,
    pub tiers: u8,
    pub parts: u8,
}

/// The other members that have a block; none, where none is known.
pub type Found = Vec<Holder>;

/// A question under way.
#[derive(Debug)]
pub(super) struct Question {
    ids: Vec<BlockId>,
    pub(super) found: Vec<Replicas>,
    /// Which of those that are to know have been asked, as bits.
    tried: Vec<u8>,
    left: usize,
    /// Whose blocks it is about.
    fetch: Option<FetchId>,
}

/// What one member was asked.
#[derive(Debug)]
pub(super) struct Ask {
    question: u64,
    peer: PeerId,
    nths: Vec<u32>,
    pub(super) until: Time,
}

impl Directory {
    /// Asks which other members have these blocks. [`Event::Found`] answers, by itself where nobody has to be asked.
    pub fn find(&mut self, ids: &[BlockId], now: Time) -> QuestionId {
        let question = self.question(ids.to_vec(), None, now);
        self.finish_question(question, now);
        QuestionId(question)
    }

    /// The same for a fetch, without an event.
    pub(super) fn question(&mut self, ids: Vec<BlockId>, fetch: Option<FetchId>, now: Time) -> u64 {
        let number = self.number();
        let (count, left) = (ids.len(), ids.len());
        let question = Question {
            found: vec![Replicas::default(); count],
            tried: vec![0; count],
            ids,
            left,
            fetch,
        };
        self.questions.insert(number, question);
        let mut nths = Vec::new();
        for nth in 0..count as u32 {
            match self.remembered(number, nth, now) {
                true => self.settle_question(number, 1),
                false => nths.push(nth),
            }
        }
        self.route(number, nths, now);
        number
    }

    /// Whether a late answer says enough.
    fn remembered(&mut self, number: u64, nth: u32, now: Time) -> bool {
        let Some(question) = self.questions.get_mut(&number) else {
            return true;
        };
        let id = question.ids[nth as usize];
        let fresh = |(_, at): &&(Replicas, Time)| now.saturating_sub(*at) <= self.settings.fresh;
        let found = self.answers.iter().find_map(|answers| answers.get(&id).filter(fresh));
        let Some((mut replicas, _)) = found.copied() else {
            return false;
        };
        let lives = &self.lives;
        replicas.retain(|one| lives.contains_key(&one.member));
        if replicas.is_empty() {
            return false;
        }
        question.found[nth as usize] = replicas;
        self.counts.remembered += 1;
        true
    }

    /// Asks the next of those that are to know, or looks here where that is this member.
    fn route(&mut self, number: u64, nths: Vec<u32>, now: Time) {
        let mut to_ask: BTreeMap<PeerId, Vec<u32>> = BTreeMap::new();
        let mut settled = 0;
        for nth in nths {
            let Some(question) = self.questions.get_mut(&number) else {
                return;
            };
            let at = nth as usize;
            let places = placed(&self.seats, &question.ids[at]);
            // What is known here costs nothing; what is not, the other may still know.
            let own = places.iter().flatten().any(|seat| seat.member == 0);
            if own && question.tried[at] & 1 << COPIES == 0 {
                question.tried[at] |= 1 << COPIES;
                let mut known = self.entries.find(&question.ids[at]).copied().unwrap_or_default();
                let lives = &self.lives;
                known.retain(|one| lives.contains_key(&one.member));
                if !known.is_empty() {
                    question.found[at] = known;
                    settled += 1;
                    continue;
                }
            }
            let next = places.iter().enumerate().find_map(|(place, seat)| {
                let peer = self.lives.get(&seat.as_ref()?.member)?;
                let untried = question.tried[at] & 1 << place == 0;
                let speaks = self.members.get(peer).is_some_and(|member| !member.silent);
                (untried && speaks).then_some((place, *peer))
            });
            match next {
                Some((place, peer)) => {
                    question.tried[at] |= 1 << place;
                    to_ask.entry(peer).or_default().push(nth);
                }
                None => settled += 1,
            }
        }
        for (peer, nths) in to_ask {
            for nths in nths.chunks(IDS_MAX) {
                let ask = self.number();
                let Some(question) = self.questions.get(&number) else {
                    return;
                };
                let ids: Vec<BlockId> = nths.iter().map(|nth| question.ids[*nth as usize]).collect();
                self.counts.asked += ids.len() as u64;
                let asked = Ask {
                    question: number,
                    peer,
                    nths: nths.to_vec(),
                    until: now.saturating_add(self.settings.answer_within),
                };
                self.asks.insert(ask, asked);
                self.say(peer, Message::Ask { ask, ids });
            }
        }
        self.settle_question(number, settled);
    }

    fn settle_question(&mut self, number: u64, settled: usize) {
        if let Some(question) = self.questions.get_mut(&number) {
            question.left -= settled;
        }
    }

    /// Tells whoever asked, if there is nothing left to be asked.
    pub(super) fn finish_question(&mut self, number: u64, now: Time) {
        if self.questions.get(&number).is_none_or(|question| question.left > 0) {
            return;
        }
        let Some(question) = self.questions.remove(&number) else {
            return;
        };
        match question.fetch {
            Some(fetch) => self.on_placed(fetch, question.found, now),
            None => {
                let found = question.found.iter().map(|replicas| self.holders(replicas)).collect();
                let question = QuestionId(number);
                self.events.push_back(Event::Found { question, found });
            }
        }
    }

    fn holders(&self, replicas: &Replicas) -> Found {
        let holder = |one: &Replica| {
            Some(Holder {
                peer: *self.lives.get(&one.member)?,
                tiers: one.tiers,
                parts: one.parts,
            })
        };
        replicas.as_slice().iter().filter_map(holder).collect()
    }

    /// Says who has blocks, as far as that is known here; and what is here itself.
    pub(super) fn on_ask(&mut self, peer: PeerId, ask: u64, ids: &[BlockId]) {
        let (mut holders, mut found): (Vec<u64>, Vec<Vec<Named>>) = (Vec::new(), Vec::with_capacity(ids.len()));
        let mut name = |digest: u64| {
            let known = holders.iter().position(|other| *other == digest);
            let at = known.unwrap_or_else(|| {
                holders.push(digest);
                holders.len() - 1
            });
            u8::try_from(at).ok()
        };
        for id in ids {
            let mut named = Vec::new();
            if let Some((tiers, parts)) = self.here(id)
                && let Some(holder) = name(self.own.digest)
            {
                named.push(Named { holder, tiers, parts });
            }
            for one in self.entries.find(id).map_or(&[][..], Replicas::as_slice) {
                let member = self.lives.get(&one.member).and_then(|peer| self.members.get(peer));
                // Whoever asks knows what it has itself.
                let other = member.filter(|_| self.lives.get(&one.member) != Some(&peer));
                if let Some(holder) = other.and_then(|member| name(member.seat.digest)) {
                    named.push(Named {
                        holder,
                        tiers: one.tiers,
                        parts: one.parts,
                    });
                }
            }
            named.truncate(super::REPLICAS_MAX);
            found.push(named);
        }
        // More holders than a byte counts are not named, and none of them is missed.
        holders.truncate(256);
        self.say(peer, Message::Answer { ask, holders, found });
    }

    pub(super) fn on_answer(&mut self, peer: PeerId, ask: u64, holders: &[u64], found: &[Vec<Named>], now: Time) {
        let asked = self.asks.get(&ask);
        if asked.is_none_or(|asked| asked.peer != peer || asked.nths.len() != found.len()) {
            return;
        }
        let Some(Ask {
            question: number, nths, ..
        }) = self.asks.remove(&ask)
        else {
            return;
        };
        // Only who lives here, too, is believed to have anything.
        let by_digest = |digest: &u64| {
            let seat = self.seats.iter().find(|seat| seat.digest == *digest);
            seat.map(|seat| seat.member).filter(|member| *member != 0)
        };
        let holders: Vec<Option<u32>> = holders.iter().map(by_digest).collect();
        let Some(question) = self.questions.get_mut(&number) else {
            return;
        };
        for (nth, named) in nths.iter().zip(found) {
            let mut replicas = Replicas::default();
            for one in named {
                if let Some(member) = holders[usize::from(one.holder)] {
                    replicas.set(Replica {
                        member,
                        tiers: one.tiers,
                        parts: one.parts,
                    });
                }
            }
            question.found[*nth as usize] = replicas;
            if !replicas.is_empty() {
                let id = question.ids[*nth as usize];
                let [young, old] = &mut self.answers;
                if young.len() >= self.settings.answers / 2 {
                    std::mem::swap(young, old);
                    young.clear();
                }
                young.insert(id, (replicas, now));
            }
        }
        self.settle_question(number, nths.len());
        self.finish_question(number, now);
    }

    /// What was believed of a block has turned out not to be so.
    pub(super) fn forget_answer(&mut self, id: &BlockId) {
        for answers in &mut self.answers {
            answers.remove(id);
        }
    }

    pub(super) fn end_asks(&mut self, now: Time) {
        let late = |_: &u64, ask: &mut Ask| ask.until <= now;
        for (_, ask) in self.asks.extract_if(.., late).collect::<Vec<_>>() {
            self.on_silent(ask.peer);
            self.ask_another(ask, now);
        }
    }

    pub(super) fn on_asked_gone(&mut self, peer: PeerId, now: Time) {
        let gone = |_: &u64, ask: &mut Ask| ask.peer == peer;
        for (_, ask) in self.asks.extract_if(.., gone).collect::<Vec<_>>() {
            self.ask_another(ask, now);
        }
    }

    fn ask_another(&mut self, ask: Ask, now: Time) {
        self.route(ask.question, ask.nths, now);
        self.finish_question(ask.question, now);
    }
}
