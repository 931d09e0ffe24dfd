//! New groups from old ones: a part of one, what is left of one, or one with more ranks.

use std::time::Duration;

use weft_plan::{Datatype, Rank, Time};
use weft_protocol::group::{Cause, Decision};
use weft_protocol::transfer::PeerId;

use super::board::Board;
use super::bootstrap::{Formation, JoinOptions, group_id};
use super::{Communicator, Inner};
use crate::driver::{PeerState, Shared, World};
use crate::error::Error;
use crate::interrupt;
use crate::memory::after;

/// How often to look whether another rank is gone.
const LOOK_AGAIN: Time = Time::from_ms(5);
/// How often to say again what others may have missed.
const SAY_AGAIN: Time = Time::from_ms(50);

impl Communicator {
    /// Splits the group: ranks that give the same colour form a group of their own, ordered by `key` and then by rank; those that give
    /// none form none. All ranks must call this.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Communicator>, Error> {
        let agent = self.agent();
        let own = [color.map_or(0, |color| u64::from(color) + 1), u64::from(key)];
        let input = agent.allocate(16)?;
        let output = agent.allocate(16 * self.size() as usize)?;
        input.write(0, &own.map(u64::to_ne_bytes).concat());
        self.all_gather(&input, &output, Datatype::U64).run()?;
        let words = output.to_vec();
        let word = |at: usize| u64::from_ne_bytes(words[8 * at..8 * at + 8].try_into().expect("eight bytes"));
        let same = (0..self.size()).filter(|rank| word(2 * *rank as usize) == own[0]);
        let mut members: Vec<Rank> = same.map(Rank).collect();
        if color.is_none() {
            return Ok(None);
        }
        members.sort_by_key(|rank| (word(2 * rank.0 as usize + 1), *rank));
        // Splits are numbered by the calls before them, which are the same everywhere.
        let number = self.inner.member()?.lock().number();
        let seed = [b"split", &number.to_le_bytes()[..], &own[0].to_le_bytes()].concat();
        self.inner.form(&members, &seed, self.inner.options.timeout).map(Some)
    }

    /// A group of those that are left. After a failure all ranks that are alive must call this; whoever does not within half of
    /// the time is left out. Ranks keep their order. Others may fail meanwhile: then it is a group of those that are left after that.
    ///
    /// A call that failed may have ended well on some ranks, which had all they needed when the others gave up. Which calls have ended well
    /// on all that are left, the new group [knows](Communicator::calls_ended_before).
    pub fn shrink(&self, timeout: Duration) -> Result<Communicator, Error> {
        let agreeing = Agreeing::begin(&self.inner, timeout)?;
        let mut formed = None;
        loop {
            let decision = agreeing.decision()?;
            if !decision.members.contains(&self.rank()) {
                return Err(Error::LeftOut {
                    group: self.inner.options.name.clone(),
                });
            }
            if decision.content {
                let formed: Option<Communicator> = formed;
                let formed = formed.ok_or_else(|| Error::Formation("the group has been shrunk already".to_owned()))?;
                // It is this rank's first handle of the group.
                let _ = formed.inner.inherited.set(decision.ended);
                return Ok(formed);
            }
            // What had been formed before has lost somebody.
            drop(formed.take());
            let members = decision.members.iter().flat_map(|rank| rank.0.to_le_bytes());
            let members: Vec<u8> = members.collect();
            let seed = [b"shrink", &decision.round.to_le_bytes()[..], &members].concat();
            formed = self.inner.form(&decision.members, &seed, agreeing.left()).ok();
            agreeing.go_on(formed.is_some());
        }
    }

    /// A group with more ranks: those of this one keep theirs, and the new ones [join](Communicator::join) under the same name and
    /// size.
    pub fn grow(&self, name: &str, size: u32) -> Result<Communicator, Error> {
        let options = JoinOptions {
            name: name.to_owned(),
            size,
            ..self.inner.options.clone()
        };
        Communicator::join(self.agent(), options)
    }
}

impl Inner {
    /// Makes a group of some of this one's ranks.
    fn form(&self, members: &[Rank], seed: &[u8], timeout: Duration) -> Result<Communicator, Error> {
        let own = members.iter().position(|rank| *rank == self.rank);
        let own = own.ok_or_else(|| Error::LeftOut {
            group: self.options.name.clone(),
        })?;
        let options = JoinOptions {
            rank: Rank(own as u32),
            size: members.len() as u32,
            timeout,
            ..self.options.clone()
        };
        let board = &self.member()?.board;
        let id = group_id(&[&board.group.to_le_bytes(), seed]);
        let formation = Formation::new(&self.agent, id, options, Some(board.clone()))?;
        let peers = board.peers();
        for (rank, member) in members.iter().enumerate() {
            if let Some(peer) = peers[member.0 as usize] {
                formation.board.knows(Rank(rank as u32), peer);
            }
        }
        formation.form()
    }
}

/// One rank's attempt to find out with the others who is left.
struct Agreeing<'a> {
    rank: Rank,
    shared: &'a Shared,
    board: &'a Board,
    until: Time,
    /// From when on whoever has never been heard of is left out: by the rank that coordinates, and by those that wait for that one.
    late: [Time; 2],
    /// How many calls have ended well here.
    ended: u64,
    /// Who has been named as lost is, even if its session still lingers.
    named: Option<Rank>,
}

impl Agreeing<'_> {
    fn begin(group: &Inner, timeout: Duration) -> Result<Agreeing<'_>, Error> {
        let (shared, member) = (group.agent.shared()?, group.member()?);
        let (board, ended) = (&member.board, member.lock().ended_well());
        let named = board.abort().filter(|abort| abort.cause == Cause::Lost);
        Ok(Agreeing {
            rank: group.rank,
            shared,
            board,
            until: after(shared, timeout),
            ended,
            late: [after(shared, timeout / 2), after(shared, timeout * 3 / 4)],
            named: named.map(|abort| abort.blamed),
        })
    }

    fn left(&self) -> Duration {
        self.until.saturating_sub(self.shared.clock.now()).into()
    }

    /// Waits for what the present round leads to.
    fn decision(&self) -> Result<Decision, Error> {
        let Agreeing { shared, board, .. } = self;
        let peers = board.peers();
        let mut repeat_at = shared.clock.now().saturating_add(SAY_AGAIN);
        loop {
            let now = shared.clock.now();
            if now >= self.until || shared.is_stopped() || interrupt::is_due() {
                return Err(shared.in_vain(|| "the ranks that are left to agree".to_owned()));
            }
            let decision = shared.act(|world, now| {
                let lost = lost(world, &peers).chain(self.named);
                board.agree(self.rank, &lost.collect::<Vec<Rank>>(), self.ended);
                board.with_agreement(|agreement| {
                    let patience = if agreement.is_coordinator() {
                        self.late[0]
                    } else {
                        self.late[1]
                    };
                    if now >= patience {
                        agreement.on_late();
                    }
                    if now >= repeat_at {
                        agreement.repeat();
                        repeat_at = now.saturating_add(SAY_AGAIN);
                    }
                });
                board.send_agreement(&mut world.core, now);
                board.decision()
            });
            if let Some(decision) = decision {
                return Ok(decision);
            }
            let next = self.until.min(now.saturating_add(LOOK_AGAIN));
            shared.wait_until(next, |_| board.decision().map(drop));
        }
    }

    /// Goes into the next round, content or not with what has been formed.
    fn go_on(&self, content: bool) {
        let board = self.board;
        self.shared.act(|world, now| {
            board.with_agreement(|agreement| agreement.next_round(content));
            board.send_agreement(&mut world.core, now);
        });
    }
}

/// The ranks whose sessions are over.
fn lost<'a>(world: &'a World, peers: &'a [Option<PeerId>]) -> impl Iterator<Item = Rank> + 'a {
    let gone = |peer: &PeerId| !matches!(world.peers.get(peer), Some(PeerState::Connected { .. }));
    let places = peers.iter().enumerate();
    places.filter_map(move |(rank, peer)| peer.as_ref().filter(|peer| gone(peer)).map(|_| Rank(rank as u32)))
}
