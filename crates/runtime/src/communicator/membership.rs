//! New groups from old ones: a part of one, what is left of one, or one with more ranks.

use std::time::Duration;

use weft_plan::{Datatype, Rank, Time};
use weft_protocol::group::{Next, Quorum, ShrinkError, Shrinking, group_id};

use super::board::Board;
use super::bootstrap::{Formation, JoinOptions};
use super::{Communicator, Inner};
use crate::driver::Shared;
use crate::error::Error;
use crate::interrupt;

/// How often to look whether another rank is gone.
const LOOK_AGAIN: Time = Time::from_ms(5);

/// How a group is [shrunk](Communicator::shrink_with).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ShrinkOptions {
    /// In how much time.
    pub timeout: Duration,
    /// How many have to be left. All ranks give the same.
    pub quorum: Quorum,
}

impl ShrinkOptions {
    pub fn new(timeout: Duration) -> ShrinkOptions {
        ShrinkOptions {
            timeout,
            quorum: Quorum::Majority,
        }
    }

    /// Goes on with whoever is left. Two parts of the group that do not reach each other may then both go on: for callers who prevent that by other means.
    #[must_use]
    pub fn without_quorum(self) -> ShrinkOptions {
        ShrinkOptions {
            quorum: Quorum::Any,
            ..self
        }
    }
}

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
        // Whoever gave a colour is among those that gave the same.
        let at = members.iter().take_while(|rank| **rank != self.rank()).count();
        // Splits are numbered by the calls before them, which are the same everywhere.
        let number = self.inner.member()?.lock().number();
        let seed = [b"split", &number.to_le_bytes()[..], &own[0].to_le_bytes()].concat();
        let timeout = self.inner.options.timeout;
        self.inner.form(&members, Rank(at as u32), &seed, timeout).map(Some)
    }

    /// A group of those that are left. After a failure all ranks that are alive must call this; whoever does not within half of
    /// the time is left out. Ranks keep their order. Others may fail meanwhile: then it is a group of those that are left after that.
    ///
    /// There is never more than one such group: of the ranks that are not known to be dead, more than half have to be among those that are left, or half of them with the
    /// lowest. A rank is known to be dead when its host says that nobody is there any more, or when its agent was closed in order; one that is merely silent may be
    /// alive on the other side of a broken network, and counts. Where too few are left, this ends as [`Error::NoQuorum`]; see [`ShrinkOptions::without_quorum`].
    ///
    /// A call that failed may have ended well on some ranks, which had all they needed when the others gave up. Which calls have ended well
    /// on all that are left, the new group [knows](Communicator::calls_ended_before).
    pub fn shrink(&self, timeout: Duration) -> Result<Communicator, Error> {
        self.shrink_with(ShrinkOptions::new(timeout))
    }

    /// As [`shrink`](Communicator::shrink), by options.
    pub fn shrink_with(&self, options: ShrinkOptions) -> Result<Communicator, Error> {
        let mut agreeing = Agreeing::begin(&self.inner, options)?;
        let mut formed = None;
        loop {
            match agreeing.next()? {
                Next::LeftOut => {
                    return Err(Error::LeftOut {
                        group: self.inner.options.name.clone(),
                    });
                }
                Next::Formed { ended } => {
                    let formed: Option<Communicator> = formed;
                    let formed =
                        formed.ok_or_else(|| Error::Formation("the group has been shrunk already".to_owned()))?;
                    // It is this rank's first handle of the group.
                    let _ = formed.inner.inherited.set(ended);
                    return Ok(formed);
                }
                Next::Form { members, own, seed } => {
                    drop(formed.take());
                    formed = self.inner.form(&members, own, &seed, agreeing.left()).ok();
                    agreeing.go_on(formed.is_some());
                }
            }
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
    fn form(&self, members: &[Rank], own: Rank, seed: &[u8], timeout: Duration) -> Result<Communicator, Error> {
        let options = JoinOptions {
            rank: own,
            size: members.len() as u32,
            timeout,
            ..self.options.clone()
        };
        let board = &self.member()?.board;
        let id = group_id(&[&board.group.to_le_bytes(), seed]);
        let formation = Formation::new(&self.agent, id, options, Some(board.clone()))?;
        let peers = board.lock().peers().to_vec();
        let mut known = formation.board.lock();
        for (rank, member) in members.iter().enumerate() {
            if let Some(peer) = peers[member.0 as usize] {
                known.knows(Rank(rank as u32), peer);
            }
        }
        drop(known);
        formation.form()
    }
}

/// One rank's attempt to find out with the others who is left.
struct Agreeing<'a> {
    group: &'a Inner,
    shared: &'a Shared,
    board: &'a Board,
    machine: Shrinking,
}

impl Agreeing<'_> {
    fn begin(group: &Inner, options: ShrinkOptions) -> Result<Agreeing<'_>, Error> {
        let (shared, member) = (group.agent.shared()?, group.member()?);
        let (ended, now) = (member.lock().ended_well(), shared.clock.now());
        let ShrinkOptions { timeout, quorum } = options;
        Ok(Agreeing {
            group,
            shared,
            board: &member.board,
            machine: Shrinking::new(group.rank, ended, quorum, timeout.into(), now),
        })
    }

    fn left(&self) -> Duration {
        self.machine.until().saturating_sub(self.shared.clock.now()).into()
    }

    /// Waits for what the present round leads to.
    fn next(&mut self) -> Result<Next, Error> {
        let Agreeing {
            shared, board, machine, ..
        } = self;
        let in_vain = || shared.in_vain(|| "the ranks that are left to agree".to_owned());
        loop {
            if shared.is_stopped() || interrupt::is_due() {
                return Err(in_vain());
            }
            let polled = shared.act(|world, now| machine.poll(&mut world.core, &mut board.lock(), now));
            match polled {
                Ok(Some(decision)) => return Ok(machine.next(&decision)),
                Ok(None) => {}
                Err(ShrinkError::TimedOut) => return Err(in_vain()),
                Err(ShrinkError::NoQuorum(short)) => {
                    let group = self.group.options.name.clone();
                    return Err(Error::NoQuorum { group, short });
                }
            }
            let next = machine.until().min(shared.clock.now().saturating_add(LOOK_AGAIN));
            shared.wait_until(next, |_| board.lock().decision().map(drop));
        }
    }

    /// Goes into the next round, content or not with what has been formed.
    fn go_on(&mut self, content: bool) {
        let Agreeing {
            shared, board, machine, ..
        } = self;
        shared.act(|world, now| machine.go_on(content, &mut world.core, &mut board.lock(), now));
    }
}
