//! Agreeing on who is left.
//!
//! After a failure the ranks that are alive must form a group of exactly the same members, although each has seen the failure in its
//! own way and more of them may fail meanwhile. The lowest rank that is not suspected coordinates: everybody promises to follow it and
//! says whom it suspects; when all that are not suspected have promised, the coordinator decides. Should it fail on the way, the
//! next lowest takes over, and hears with the promises of a decision that anybody has seen already. A rank that has promised to
//! follow a coordinator ignores lower ones, so that there is one decision among those that are alive.

use std::collections::VecDeque;

use weft_plan::Rank;

use crate::wire::{DecodeError, Reader, Writer};

/// One rank's part in an agreement.
#[derive(Debug)]
pub struct Agreement {
    own: Rank,
    /// By rank.
    suspected: Vec<bool>,
    promised: Vec<bool>,
    /// The highest coordinator that this rank follows.
    follows: Rank,
    /// What was decided, as far as this rank has seen.
    decision: Option<Vec<Rank>>,
    outbox: VecDeque<(Rank, AgreementMessage)>,
}

/// What ranks say to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgreementMessage {
    Promise {
        /// Whom the sender will follow.
        to: Rank,
        suspected: Vec<Rank>,
        decision: Option<Vec<Rank>>,
    },
    Decided {
        by: Rank,
        members: Vec<Rank>,
    },
}

impl Agreement {
    /// Among so many ranks, of which some are known to be lost.
    pub fn new(own: Rank, ranks: u32, lost: &[Rank]) -> Agreement {
        let mut agreement = Agreement {
            own,
            suspected: vec![false; ranks as usize],
            promised: vec![false; ranks as usize],
            follows: Rank(0),
            decision: None,
            outbox: VecDeque::new(),
        };
        for rank in lost.iter().filter(|rank| rank.0 < ranks && **rank != own) {
            agreement.suspected[rank.0 as usize] = true;
        }
        agreement.promise();
        agreement
    }

    /// The members of the new group, in ascending order, once they are known.
    pub fn decision(&self) -> Option<&[Rank]> {
        self.decision.as_deref()
    }

    pub fn next_message(&mut self) -> Option<(Rank, AgreementMessage)> {
        self.outbox.pop_front()
    }

    /// A rank is lost.
    pub fn on_lost(&mut self, rank: Rank) {
        if rank != self.own && self.is_rank(rank) && !self.suspected[rank.0 as usize] {
            let before = self.coordinator();
            self.suspected[rank.0 as usize] = true;
            self.after_suspicion(before);
        }
    }

    /// Whether the others wait for this rank.
    pub fn is_coordinator(&self) -> bool {
        self.coordinator() == self.own
    }

    /// Whoever this rank waits for is taken for lost. Those who follow should be more patient than the one who coordinates: its
    /// decision takes a moment to reach them.
    pub fn on_late(&mut self) {
        let before = self.coordinator();
        match self.is_coordinator() {
            true => {
                for rank in 0..self.suspected.len() {
                    self.suspected[rank] |= !self.promised[rank] && rank != self.own.0 as usize;
                }
            }
            false => self.suspected[before.0 as usize] = true,
        }
        self.after_suspicion(before);
    }

    /// Takes in what a rank says. What no rank would say changes nothing.
    pub fn on_message(&mut self, from: Rank, message: AgreementMessage) {
        if !self.is_rank(from) || message.decision().is_some_and(|members| !self.is_group(members)) {
            return;
        }
        match message {
            AgreementMessage::Promise {
                to,
                suspected,
                decision,
            } => {
                if let Some(members) = &self.decision {
                    // The sender has not heard of it, whoever was to tell it.
                    let (by, members) = (to.max(self.follows), members.clone());
                    self.outbox.push_back((from, AgreementMessage::Decided { by, members }));
                    return;
                }
                if to != self.own {
                    return;
                }
                let before = self.coordinator();
                for rank in suspected {
                    if rank != self.own && self.is_rank(rank) {
                        self.suspected[rank.0 as usize] = true;
                    }
                }
                self.promised[from.0 as usize] = true;
                if let Some(members) = decision {
                    return self.decide(self.own, members);
                }
                self.after_suspicion(before);
            }
            AgreementMessage::Decided { by, members } => {
                if by >= self.follows && self.decision.is_none() && self.is_rank(by) {
                    self.decide(by, members);
                }
            }
        }
    }

    fn is_rank(&self, rank: Rank) -> bool {
        (rank.0 as usize) < self.suspected.len()
    }

    /// Whether these can be the members of a new group: some of the ranks, in ascending order.
    fn is_group(&self, members: &[Rank]) -> bool {
        let ascending = members.is_sorted_by(|a, b| a < b);
        ascending && members.last().is_some_and(|last| self.is_rank(*last))
    }

    /// The lowest rank that is not suspected: at the latest this one.
    fn coordinator(&self) -> Rank {
        let first = self.suspected.iter().position(|suspected| !suspected);
        first.map_or(self.own, |rank| Rank(rank as u32)).min(self.own)
    }

    fn after_suspicion(&mut self, before: Rank) {
        match self.coordinator() == before {
            true => self.decide_if_all_promised(),
            // Also with a decision: the next coordinator may not have heard of it.
            false => self.promise(),
        }
    }

    fn promise(&mut self) {
        let to = self.coordinator();
        self.follows = self.follows.max(to);
        if to == self.own {
            self.promised[to.0 as usize] = true;
            return match self.decision.take() {
                Some(members) => self.decide(to, members),
                None => self.decide_if_all_promised(),
            };
        }
        let message = AgreementMessage::Promise {
            to,
            suspected: self.ranks_where(|rank| self.suspected[rank]),
            decision: self.decision.clone(),
        };
        self.outbox.push_back((to, message));
    }

    fn decide_if_all_promised(&mut self) {
        let heard = |rank: usize| self.suspected[rank] || self.promised[rank];
        if self.decision.is_none() && self.coordinator() == self.own && (0..self.suspected.len()).all(heard) {
            self.decide(self.own, self.ranks_where(|rank| !self.suspected[rank]));
        }
    }

    /// Whoever hears of a decision tells all others, so that it does not depend on the life of one.
    fn decide(&mut self, by: Rank, members: Vec<Rank>) {
        for to in members.iter().filter(|to| **to != self.own) {
            let members = members.clone();
            self.outbox.push_back((*to, AgreementMessage::Decided { by, members }));
        }
        self.follows = self.follows.max(by);
        self.decision = Some(members);
    }

    fn ranks_where(&self, holds: impl Fn(usize) -> bool) -> Vec<Rank> {
        let ranks = 0..self.suspected.len();
        ranks
            .filter(|rank| holds(*rank))
            .map(|rank| Rank(rank as u32))
            .collect()
    }
}

/// No group has more ranks.
const RANKS_MAX: u64 = 1 << 20;

impl AgreementMessage {
    /// What the sender says was decided.
    fn decision(&self) -> Option<&[Rank]> {
        match self {
            AgreementMessage::Promise { decision, .. } => decision.as_deref(),
            AgreementMessage::Decided { members, .. } => Some(members),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::new();
        let ranks = |w: &mut Writer, ranks: &[Rank]| {
            w.varint(ranks.len() as u64);
            for rank in ranks {
                w.varint(rank.0.into());
            }
        };
        match self {
            AgreementMessage::Promise {
                to,
                suspected,
                decision,
            } => {
                w.u8(decision.is_some().into());
                w.varint(to.0.into());
                ranks(&mut w, suspected);
                if let Some(members) = decision {
                    ranks(&mut w, members);
                }
            }
            AgreementMessage::Decided { by, members } => {
                w.u8(2);
                w.varint(by.0.into());
                ranks(&mut w, members);
            }
        }
        w.buf
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<AgreementMessage, DecodeError> {
        fn rank(r: &mut Reader<'_>) -> Result<Rank, DecodeError> {
            let rank = u32::try_from(r.varint()?).map_err(|_| DecodeError::Invalid)?;
            Ok(Rank(rank))
        }
        fn ranks(r: &mut Reader<'_>) -> Result<Vec<Rank>, DecodeError> {
            let count = r.varint()?;
            if count > RANKS_MAX || count > r.remaining() as u64 {
                return Err(DecodeError::TooLong);
            }
            (0..count).map(|_| rank(r)).collect()
        }
        let mut r = Reader::new(bytes);
        let kind = r.u8()?;
        let message = match kind {
            0 | 1 => AgreementMessage::Promise {
                to: rank(&mut r)?,
                suspected: ranks(&mut r)?,
                decision: match kind {
                    0 => None,
                    _ => Some(ranks(&mut r)?),
                },
            },
            2 => AgreementMessage::Decided {
                by: rank(&mut r)?,
                members: ranks(&mut r)?,
            },
            _ => return Err(DecodeError::Invalid),
        };
        r.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded::Seeded;
    use proptest::prelude::*;

    /// Lets ranks agree while some of them die, messages of a pair staying in order. What each that is alive has decided.
    fn agree(ranks: u32, deaths: u32, seed: u64) -> Vec<(Rank, Option<Vec<Rank>>)> {
        let mut chance = Seeded::new(seed);
        let doomed: Vec<u64> = chance
            .shuffled(ranks.into())
            .into_iter()
            .take(deaths as usize)
            .collect();
        // The first is dead before anybody begins; the others die somewhere on the way.
        let mut dead = vec![false; ranks as usize];
        let mut left: Vec<u64> = doomed.clone();
        if let Some(first) = left.pop() {
            dead[first as usize] = true;
        }
        let mut parts: Vec<Agreement> = (0..ranks)
            .map(|own| {
                let seen = chance.chance(0.5);
                let lost = dead.iter().enumerate().filter(|(_, dead)| **dead && seen);
                let lost: Vec<Rank> = lost.map(|(rank, _)| Rank(rank as u32)).collect();
                Agreement::new(Rank(own), ranks, &lost)
            })
            .collect();
        let mut network: Vec<VecDeque<AgreementMessage>> = vec![VecDeque::new(); (ranks * ranks) as usize];
        for _ in 0..20_000 {
            for own in 0..ranks as usize {
                // Who dies may have said a part of what it was going to say.
                let all = if dead[own] { 0 } else { usize::MAX };
                for _ in 0..all.min(parts[own].outbox.len()) {
                    if let Some((to, message)) = parts[own].next_message() {
                        let bytes = message.to_bytes();
                        let message = AgreementMessage::from_bytes(&bytes).unwrap();
                        network[own * ranks as usize + to.0 as usize].push_back(message);
                    }
                    if !left.is_empty() && doomed.contains(&(own as u64)) && chance.chance(0.2) {
                        left.retain(|rank| *rank != own as u64);
                        dead[own] = true;
                        break;
                    }
                }
            }
            let place = chance.below(u64::from(ranks * ranks)) as usize;
            let (from, to) = (place / ranks as usize, place % ranks as usize);
            if dead[to] {
                continue;
            }
            match network[place].pop_front() {
                Some(message) => parts[to].on_message(Rank(from as u32), message),
                // Everything that was sent before has come.
                None if dead[from] => parts[to].on_lost(Rank(from as u32)),
                None => {}
            }
        }
        let alive = parts.iter().filter(|part| !dead[part.own.0 as usize]);
        alive.map(|part| (part.own, part.decision.clone())).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn all_that_are_alive_decide_the_same_and_are_in_it(ranks in 1u32..8, deaths in 0u32..6, seed: u64) {
            let decisions = agree(ranks, deaths.min(ranks - 1), seed);
            let first = decisions[0].1.clone().expect("decided");
            for (rank, decision) in &decisions {
                prop_assert_eq!(decision.as_ref(), Some(&first), "rank {}", rank.0);
                prop_assert!(first.contains(rank));
            }
        }

        #[test]
        fn any_bytes_are_refused_or_read_back(bytes: Vec<u8>) {
            if let Ok(message) = AgreementMessage::from_bytes(&bytes) {
                prop_assert_eq!(AgreementMessage::from_bytes(&message.to_bytes()), Ok(message));
            }
        }
    }

    #[test]
    fn a_decision_that_cannot_be_is_not_heard() {
        let lists: [&[u32]; 4] = [&[], &[0, 7], &[1, 0], &[1, 1]];
        for members in lists.map(|list| list.iter().copied().map(Rank).collect::<Vec<Rank>>()) {
            let said = [
                AgreementMessage::Promise {
                    to: Rank(0),
                    suspected: vec![Rank(9)],
                    decision: Some(members.clone()),
                },
                AgreementMessage::Decided { by: Rank(1), members },
            ];
            for message in said {
                let mut part = Agreement::new(Rank(0), 3, &[]);
                part.on_message(Rank(1), message);
                assert_eq!(part.decision(), None);
                assert_eq!(part.next_message(), None);
            }
        }
    }

    #[test]
    fn who_does_not_answer_is_left_out() {
        let mut parts = [0, 1, 2].map(|own| Agreement::new(Rank(own), 3, &[]));
        let (to, message) = parts[1].next_message().unwrap();
        assert_eq!(to, Rank(0));
        parts[0].on_message(Rank(1), message);
        assert_eq!(parts[0].decision(), None);
        parts[0].on_late();
        assert_eq!(parts[0].decision(), Some(&[Rank(0), Rank(1)][..]));
        let (to, message) = parts[0].next_message().unwrap();
        assert_eq!(to, Rank(1));
        parts[1].on_message(Rank(0), message);
        assert_eq!(parts[1].decision(), parts[0].decision());
        // The one that comes too late is told that it is out.
        let (_, message) = parts[2].next_message().unwrap();
        parts[0].on_message(Rank(2), message);
        let told = std::iter::from_fn(|| parts[0].next_message()).last().unwrap();
        parts[2].on_message(Rank(0), told.1);
        assert_eq!(parts[2].decision(), parts[0].decision());
    }
}
