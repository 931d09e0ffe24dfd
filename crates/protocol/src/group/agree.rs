//! Agreeing on who is left, and on whether those have come together.
//!
//! After a failure the ranks that are alive must form a group of exactly the same members, although each has seen the failure in its
//! own way and more of them may fail meanwhile. They do so in rounds. In each, everybody says whom it suspects and that it follows the
//! lowest rank that it does not suspect; when all that are not suspected follow one, that one decides: these are the members, and
//! whether all of them are content with the group that the round before has led to. When they are, that group is the answer. When one is
//! not, because another has failed on the way, they form a new one and go into the next round.
//!
//! Should the one who decides fail, the next lowest takes over, and hears from everybody first: whoever knows of a decision answers with
//! it. A rank that follows somebody ignores what lower ones decide. So there is one decision a round among those that are alive, given that
//! ranks are suspected because they are gone. A rank that merely does not come may be left out as well, but only one that has never
//! said anything: it cannot know of a decision.
//!
//! A network that is torn in two would let both parts go on. So those that are left need a [quorum](Quorum): of the ranks that are not *known* to be dead, more than
//! half, or half of them with the lowest. A rank that nothing is heard of may be alive on the other side, and counts; what each knows of the dead it tells with
//! its promise.
//!
//! Messages may be lost, repeated and overtaken: all of them can be [said again](Agreement::repeat).

use std::collections::VecDeque;
use std::fmt;

use thiserror::Error;
use weft_plan::Rank;

use crate::wire::{DecodeError, Reader, Writer};

/// One rank's part in an agreement.
#[derive(Debug)]
pub struct Agreement {
    own: Rank,
    /// By rank: whom this rank takes for lost, or has heard that others do.
    suspected: Vec<bool>,
    /// By rank: who is known to be dead, here or elsewhere. They are among those that are suspected.
    dead: Vec<bool>,
    quorum: Quorum,
    /// By rank: who has ever said anything.
    heard: Vec<bool>,
    /// By rank: what it has promised in this round.
    promised: Vec<Option<Promised>>,
    /// Whom this rank follows in this round.
    follows: Rank,
    content: bool,
    /// How many calls of the old group have ended well here.
    ended: u64,
    /// By round. There is one for every round before the present one.
    decisions: Vec<Decision>,
    round: u32,
    /// The last word of each rank about the next round.
    early: Vec<Option<AgreementMessage>>,
    outbox: VecDeque<(Rank, AgreementMessage)>,
}

#[derive(Clone, Copy, Debug)]
struct Promised {
    /// Whom it follows.
    to: Rank,
    content: bool,
    ended: u64,
}

/// How many have to be left for a group to go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quorum {
    /// More than half of the ranks that are not known to be dead, or half of them with the lowest of them: never two parts of one group.
    #[default]
    Majority,
    /// Whoever is left. Two parts of a group that do not reach each other may both go on: for callers who prevent that by other means.
    Any,
}

/// Too few are left.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{} ranks are left, of which there would have to be {needed}: {} {} not known to be dead, and may go on elsewhere", left.len(), Ranks(missing), if missing.len() == 1 { "is" } else { "are" })]
pub struct NoQuorum {
    /// Those that this rank takes for alive.
    pub left: Vec<Rank>,
    /// Those that it does not reach, and that are not known to be dead.
    pub missing: Vec<Rank>,
    /// How many of all these would have been needed.
    pub needed: usize,
}

struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(|rank| rank.0.to_string()).collect();
        write!(f, "rank {}", numbers.join(", "))
    }
}

/// What a round has led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub round: u32,
    /// Who decided.
    pub by: Rank,
    /// Who is left, in ascending order.
    pub members: Vec<Rank>,
    /// All of them are content with the group that the round before has led to: there is no further round.
    pub content: bool,
    /// How many calls of the old group have ended well on every one of them.
    pub ended: u64,
}

/// What ranks say to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgreementMessage {
    Promise {
        round: u32,
        /// Whom the sender follows.
        to: Rank,
        /// With the group that the round before has led to.
        content: bool,
        /// How many calls of the old group have ended well at the sender.
        ended: u64,
        suspected: Vec<Rank>,
        /// Those of them that are known to be dead.
        dead: Vec<Rank>,
    },
    Decided(Decision),
}

impl Agreement {
    /// Among so many ranks, of which some are known to be lost. `ended` calls of theirs have ended well here.
    pub fn new(own: Rank, ranks: u32, lost: &[Rank], ended: u64, quorum: Quorum) -> Agreement {
        let ranks = ranks as usize;
        let mut agreement = Agreement {
            own,
            suspected: vec![false; ranks],
            dead: vec![false; ranks],
            quorum,
            heard: vec![false; ranks],
            promised: vec![None; ranks],
            follows: Rank(0),
            content: false,
            ended,
            decisions: Vec::new(),
            round: 0,
            early: vec![None; ranks],
            outbox: VecDeque::new(),
        };
        for rank in lost {
            agreement.suspect(*rank);
        }
        agreement.promise();
        agreement
    }

    /// What the present round has led to.
    pub fn decision(&self) -> Option<&Decision> {
        self.decisions.get(self.round as usize)
    }

    /// Goes into the next round, content or not with what the present one has led to. It must have led to something else than
    /// everybody's content.
    pub fn next_round(&mut self, content: bool) {
        let Some(decision) = self.decision().filter(|decision| !decision.content) else {
            return;
        };
        let members = decision.members.clone();
        // Whoever is left out stays out.
        for rank in (0..self.suspected.len() as u32).map(Rank) {
            if !members.contains(&rank) {
                self.suspect(rank);
            }
        }
        self.round += 1;
        self.content = content;
        self.follows = Rank(0);
        self.promised.fill(None);
        self.promise();
        for from in 0..self.early.len() {
            if let Some(message) = self.early[from].take() {
                self.on_message(Rank(from as u32), message);
            }
        }
    }

    pub fn next_message(&mut self) -> Option<(Rank, AgreementMessage)> {
        self.outbox.pop_front()
    }

    /// Says again what the others may have missed. To be called now and then until there is a decision.
    pub fn repeat(&mut self) {
        if self.decision().is_none() {
            self.say_promise();
        }
    }

    /// A rank is lost.
    pub fn on_lost(&mut self, rank: Rank) {
        if self.suspect(rank) {
            self.promise();
        }
    }

    /// A rank is lost, and will never do anything again.
    pub fn on_dead(&mut self, rank: Rank) {
        if self.bury(rank) {
            self.promise();
        }
    }

    /// From now on so many have to be left.
    pub fn require(&mut self, quorum: Quorum) {
        if self.quorum != quorum {
            self.quorum = quorum;
            self.decide_if_all_follow();
        }
    }

    /// Why there is no decision, where that is for want of a quorum.
    pub fn shortfall(&self) -> Option<NoQuorum> {
        let left = self.ranks_where(|rank| !self.suspected[rank]);
        if self.decision().is_some() || self.is_quorum(&left) {
            return None;
        }
        let counted = self.ranks_where(|rank| !self.dead[rank]);
        let half = counted.len() / 2;
        let needed = match counted.first().is_some_and(|lowest| left.contains(lowest)) {
            true => counted.len() - half,
            false => half + 1,
        };
        Some(NoQuorum {
            missing: counted.into_iter().filter(|rank| !left.contains(rank)).collect(),
            left,
            needed,
        })
    }

    /// Whether the others wait for this rank.
    pub fn is_coordinator(&self) -> bool {
        self.coordinator() == self.own
    }

    /// Whoever this rank waits for and has never heard of is taken for lost. Those who follow should be more patient than the one who
    /// coordinates: its decision takes a moment to reach them.
    pub fn on_late(&mut self) {
        let coordinator = self.coordinator();
        let late: Vec<Rank> = match coordinator == self.own {
            true => self.ranks_where(|rank| !self.heard[rank]),
            false => self.ranks_where(|rank| !self.heard[rank] && rank == coordinator.0 as usize),
        };
        if late.into_iter().filter(|rank| self.suspect(*rank)).count() > 0 {
            self.promise();
        }
    }

    /// Takes in what a rank says. What no rank would say changes nothing.
    pub fn on_message(&mut self, from: Rank, message: AgreementMessage) {
        if from == self.own || !self.is_rank(from) {
            return;
        }
        self.heard[from.0 as usize] = true;
        match message {
            AgreementMessage::Promise {
                round,
                to,
                content,
                ended,
                ref suspected,
                ref dead,
            } => {
                if let Some(decision) = self.decisions.get(round as usize) {
                    // The one that would decide hears of it, and its own word counts; others must not be led away from whom they
                    // follow.
                    let by = if to == from || to == self.own { to } else { decision.by };
                    let decision = Decision { by, ..decision.clone() };
                    self.outbox.push_back((from, AgreementMessage::Decided(decision)));
                } else if round == self.round {
                    let suspected = suspected.iter().filter(|rank| self.suspect(**rank)).count();
                    let dead = dead.iter().filter(|rank| self.bury(**rank)).count();
                    self.promised[from.0 as usize] = Some(Promised { to, content, ended });
                    match suspected + dead > 0 {
                        true => self.promise(),
                        false => self.decide_if_all_follow(),
                    }
                } else if round == self.round + 1 {
                    self.early[from.0 as usize] = Some(message);
                }
            }
            AgreementMessage::Decided(decision) => self.on_decided(from, decision),
        }
    }

    fn on_decided(&mut self, from: Rank, decision: Decision) {
        if !self.is_group(&decision.members) || !self.is_rank(decision.by) {
            return;
        }
        let (round, undecided) = (self.round, self.decision().is_none());
        let left_out = !decision.members.contains(&self.own);
        if undecided && left_out && decision.round >= round {
            // Whatever this rank was about to agree on, the others are past it.
            self.decisions.push(Decision { round, ..decision });
        } else if undecided && decision.round == round && decision.by >= self.follows {
            self.decide(decision);
        } else if decision.round == round + 1 {
            self.early[from.0 as usize] = Some(AgreementMessage::Decided(decision));
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

    /// Whether that is new.
    fn suspect(&mut self, rank: Rank) -> bool {
        let new = rank != self.own && self.is_rank(rank) && !self.suspected[rank.0 as usize];
        if new {
            self.suspected[rank.0 as usize] = true;
        }
        new
    }

    /// Whether that is new.
    fn bury(&mut self, rank: Rank) -> bool {
        self.suspect(rank);
        let new = rank != self.own && self.is_rank(rank) && !self.dead[rank.0 as usize];
        if new {
            self.dead[rank.0 as usize] = true;
        }
        new
    }

    /// Whether so many are left that no others can be.
    fn is_quorum(&self, members: &[Rank]) -> bool {
        if self.quorum == Quorum::Any {
            return true;
        }
        let counted = self.ranks_where(|rank| !self.dead[rank]);
        let of_them = members.iter().filter(|rank| counted.contains(rank)).count();
        let has_lowest = counted.first().is_some_and(|lowest| members.contains(lowest));
        2 * of_them > counted.len() || 2 * of_them == counted.len() && has_lowest
    }

    /// The lowest rank that is not suspected: at the latest this one.
    fn coordinator(&self) -> Rank {
        let first = self.suspected.iter().position(|suspected| !suspected);
        first.map_or(self.own, |rank| Rank(rank as u32)).min(self.own)
    }

    fn promise(&mut self) {
        if self.decision().is_some() {
            return;
        }
        self.follows = self.follows.max(self.coordinator());
        self.promised[self.own.0 as usize] = Some(Promised {
            to: self.follows,
            content: self.content,
            ended: self.ended,
        });
        self.say_promise();
        self.decide_if_all_follow();
    }

    /// Everybody is told: one that has not begun, or is past this, answers or remembers.
    fn say_promise(&mut self) {
        let message = AgreementMessage::Promise {
            round: self.round,
            to: self.follows,
            content: self.content,
            ended: self.ended,
            suspected: self.ranks_where(|rank| self.suspected[rank]),
            dead: self.ranks_where(|rank| self.dead[rank]),
        };
        for to in self.ranks_where(|rank| !self.suspected[rank] && rank != self.own.0 as usize) {
            self.outbox.push_back((to, message.clone()));
        }
    }

    fn decide_if_all_follow(&mut self) {
        if self.decision().is_some() || !self.is_coordinator() || self.follows != self.own {
            return;
        }
        let members = self.ranks_where(|rank| !self.suspected[rank]);
        let promised = members.iter().map(|rank| self.promised[rank.0 as usize]);
        let Some(promised) = promised.collect::<Option<Vec<Promised>>>() else {
            return;
        };
        if promised.iter().any(|promised| promised.to != self.own) {
            return;
        }
        if !self.is_quorum(&members) {
            return;
        }
        let all_content = promised.iter().all(|promised| promised.content);
        let ended = promised.iter().map(|promised| promised.ended).min();
        let before = self.decisions.last();
        let content = all_content && before.is_some_and(|before| before.members == members);
        self.decide(Decision {
            round: self.round,
            by: self.own,
            members,
            content,
            ended: ended.unwrap_or(0),
        });
    }

    /// Whoever hears of a decision tells all others, so that it does not depend on the life of one.
    fn decide(&mut self, decision: Decision) {
        for to in decision.members.iter().filter(|to| **to != self.own) {
            let decision = decision.clone();
            self.outbox.push_back((*to, AgreementMessage::Decided(decision)));
        }
        self.decisions.push(decision);
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
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::new();
        let ranks = |w: &mut Writer, ranks: &[Rank]| {
            w.varint(ranks.len() as u64);
            for rank in ranks {
                w.varint(rank.0.into());
            }
        };
        let (kind, content, round, rank, ended, list, dead) = match self {
            AgreementMessage::Promise {
                round,
                to,
                content,
                ended,
                suspected,
                dead,
            } => (0, content, round, to, ended, suspected, Some(dead)),
            AgreementMessage::Decided(decision) => {
                let Decision {
                    round,
                    by,
                    members,
                    content,
                    ended,
                } = decision;
                (2, content, round, by, ended, members, None)
            }
        };
        w.u8(kind | u8::from(*content));
        w.varint(u64::from(*round));
        w.varint(rank.0.into());
        w.varint(*ended);
        ranks(&mut w, list);
        if let Some(dead) = dead {
            ranks(&mut w, dead);
        }
        w.buf
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<AgreementMessage, DecodeError> {
        fn number(r: &mut Reader<'_>) -> Result<u32, DecodeError> {
            u32::try_from(r.varint()?).map_err(|_| DecodeError::Invalid)
        }
        fn ranks(r: &mut Reader<'_>) -> Result<Vec<Rank>, DecodeError> {
            let count = r.varint()?;
            if count > RANKS_MAX || count > r.remaining() as u64 {
                return Err(DecodeError::TooLong);
            }
            (0..count).map(|_| Ok(Rank(number(r)?))).collect()
        }
        let mut r = Reader::new(bytes);
        let kind = r.u8()?;
        if kind > 3 {
            return Err(DecodeError::Invalid);
        }
        let content = kind & 1 != 0;
        let (round, rank) = (number(&mut r)?, Rank(number(&mut r)?));
        let ended = r.varint()?;
        let list = ranks(&mut r)?;
        let dead = if kind & 2 == 0 { ranks(&mut r)? } else { Vec::new() };
        r.end()?;
        Ok(match kind & 2 {
            0 => AgreementMessage::Promise {
                round,
                to: rank,
                content,
                ended,
                suspected: list,
                dead,
            },
            _ => AgreementMessage::Decided(Decision {
                round,
                by: rank,
                members: list,
                content,
                ended,
            }),
        })
    }
}

#[cfg(test)]
mod tests;
