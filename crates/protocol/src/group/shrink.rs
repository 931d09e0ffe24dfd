//! Finding out who is left of a group, and going on with those.

use weft_plan::{Rank, Time};

use super::agree::{Decision, NoQuorum, Quorum};
use super::notes::Notes;
use super::record::Cause;
use crate::agent::Core;
use crate::transport::Transport;

/// How often to say again what others may have missed.
const SAY_AGAIN: Time = Time::from_ms(50);

/// One rank's attempt to agree with the others on who is left. It ends by its time, whatever the others do.
#[derive(Debug)]
pub struct Shrinking {
    rank: Rank,
    /// How many calls have ended well here.
    ended: u64,
    quorum: Quorum,
    until: Time,
    /// From when on whoever has never been heard of is left out: by the rank that coordinates, and by those that wait for that one.
    late: [Time; 2],
    repeat_at: Time,
}

/// Why those that are left did not come together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShrinkError {
    NoQuorum(NoQuorum),
    TimedOut,
}

/// What a rank does about a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: it is not one of the members.
    LeftOut,
    /// It goes on in the group that was formed of the members; `ended` calls have ended well on all of them.
    Formed { ended: u64 },
    /// It forms a group with the members, as this rank of it, and says then whether that has come about. What it had formed before is of no use any more.
    Form {
        members: Vec<Rank>,
        own: Rank,
        seed: Vec<u8>,
    },
}

impl Shrinking {
    /// In so much time. `ended` calls have ended well on this rank.
    pub fn new(rank: Rank, ended: u64, quorum: Quorum, timeout: Time, now: Time) -> Shrinking {
        let part = |quarters: u64| now.saturating_add(Time::from_ns(timeout.as_ns() / 4).saturating_mul(quarters));
        Shrinking {
            rank,
            ended,
            quorum,
            until: now.saturating_add(timeout),
            late: [part(2), part(3)],
            repeat_at: now.saturating_add(SAY_AGAIN),
        }
    }

    /// By when it ends.
    pub fn until(&self) -> Time {
        self.until
    }

    /// Goes on, and says what the present round has led to, once it has. What that may be, [`Decision`] tells; a rank that is not among the members is left out.
    pub fn poll<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        notes: &mut Notes,
        now: Time,
    ) -> Result<Option<Decision>, ShrinkError> {
        let peers = notes.peers().iter().zip((0..).map(Rank));
        let peers = peers.filter_map(|(peer, rank)| Some((rank, (*peer)?)));
        let gone: Vec<_> = peers.filter(|(_, peer)| !core.is_connected(*peer)).collect();
        // Who has been named as lost is, even if its session still lingers.
        let named = notes.abort().filter(|abort| abort.cause == Cause::Lost);
        let lost: Vec<Rank> = gone
            .iter()
            .map(|(rank, _)| *rank)
            .chain(named.map(|abort| abort.blamed))
            .collect();
        notes.agree(self.rank, &lost, self.ended, self.quorum);
        let Some(agreement) = notes.agreement() else {
            return Ok(None);
        };
        for (rank, peer) in gone {
            if core.ending(peer).is_some_and(|cause| cause.is_death()) {
                agreement.on_dead(rank);
            }
        }
        if now >= self.late[usize::from(!agreement.is_coordinator())] {
            agreement.on_late();
        }
        if now >= self.repeat_at {
            agreement.repeat();
            self.repeat_at = now.saturating_add(SAY_AGAIN);
        }
        let short = agreement.shortfall();
        notes.send_agreement(core, now);
        match (notes.decision(), short) {
            (Some(decision), _) => Ok(Some(decision.clone())),
            (None, _) if now < self.until => Ok(None),
            (None, Some(short)) => Err(ShrinkError::NoQuorum(short)),
            (None, None) => Err(ShrinkError::TimedOut),
        }
    }

    /// Goes into the next round, content or not with the group that has been formed of the members.
    pub fn go_on<T: ?Sized + Transport>(&mut self, content: bool, core: &mut Core<T>, notes: &mut Notes, now: Time) {
        if let Some(agreement) = notes.agreement() {
            agreement.next_round(content);
        }
        notes.send_agreement(core, now);
    }

    /// What a decision means for this rank.
    pub fn next(&self, decision: &Decision) -> Next {
        match decision.members.iter().position(|rank| *rank == self.rank) {
            None => Next::LeftOut,
            Some(_) if decision.content => Next::Formed { ended: decision.ended },
            Some(own) => Next::Form {
                members: decision.members.clone(),
                own: Rank(own as u32),
                seed: Shrinking::seed(decision),
            },
        }
    }

    /// What tells the group of the members of a decision from all others of this one.
    fn seed(decision: &Decision) -> Vec<u8> {
        let members = decision.members.iter().flat_map(|rank| rank.0.to_le_bytes());
        let round = decision.round.to_le_bytes();
        b"shrink".iter().copied().chain(round).chain(members).collect()
    }

    /// When to poll again if nothing is heard before.
    pub fn next_timeout(&self, now: Time) -> Time {
        let later = self.late.into_iter().chain([self.until]).filter(|at| *at > now);
        later.fold(self.repeat_at, Time::min)
    }
}
