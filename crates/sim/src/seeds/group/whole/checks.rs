//! What must hold when all is over: every rank has ended, and whoever is blamed is to blame.

use weft_plan::Rank;
use weft_protocol::group::Cause;

use super::trouble::Trouble;
use super::{Broken, GroupPlay, Phase, RECOVERY, Stage, Tick};
use crate::seat::SharedAgent;

impl GroupPlay {
    pub(super) fn all_over(&mut self) -> Result<(), Broken> {
        if self.phase == Phase::Calm {
            for (rank, player) in self.players.iter().enumerate() {
                if let Stage::NotMet(why) = &player.stage {
                    return Err(Broken::Calm { rank, why: why.clone() });
                }
                if player.agent.as_ref().is_some_and(SharedAgent::is_releasing) {
                    return Err(Broken::Kept { rank });
                }
            }
            self.phase = Phase::Over;
            return Ok(());
        }
        self.check_rest()?;
        if self.good {
            self.check_blame()?;
            self.check_left()?;
        }
        for player in &mut self.players {
            *self.ends.entry(player.end()).or_default() += 1;
            (player.member, player.rest) = (None, None);
        }
        self.world.calm();
        self.phase = Phase::Recovering;
        self.arrange(RECOVERY, Tick::Recovered, 0);
        Ok(())
    }

    /// Those that go on agree on with whom, and there is one group of them at most.
    pub(super) fn check_rest(&self) -> Result<(), Broken> {
        let answers = || {
            let players = self.players.iter().enumerate();
            players.filter_map(|(rank, player)| Some((rank, player.answer.as_ref()?)))
        };
        for (rank, (members, ended)) in answers() {
            for (other, theirs) in answers() {
                let common = members.contains(&Rank(other as u32));
                if common && *theirs != (members.clone(), *ended) {
                    let (members, ended) = (members.clone(), *ended);
                    return Err(Broken::Disagree {
                        rank,
                        other,
                        members,
                        ended,
                    });
                }
                // A group that has lost its ranks since is none any more.
                let lives = |members: &[Rank]| members.iter().all(|rank| self.players[rank.0 as usize].agent.is_some());
                let apart = !members.iter().any(|rank| theirs.0.contains(rank));
                if apart && lives(members) && lives(&theirs.0) {
                    let (one, other) = (members.clone(), theirs.0.clone());
                    return Err(Broken::Torn { one, other });
                }
            }
            let least = members.iter().filter_map(|rank| {
                let member = self.players[rank.0 as usize].member.as_ref();
                member.map(|member| member.ended_well)
            });
            let all_alive = members.iter().all(|rank| self.players[rank.0 as usize].agent.is_some());
            if all_alive && least.min() != Some(*ended) {
                return Err(Broken::Disagree {
                    rank,
                    other: rank,
                    members: members.clone(),
                    ended: *ended,
                });
            }
        }
        Ok(())
    }

    pub(super) fn check_blame(&self) -> Result<(), Broken> {
        for (rank, player) in self.players.iter().enumerate() {
            let Some(abort) = player.told.clone().filter(|_| player.agent.is_some()) else {
                if let Trouble::Odd(odd) = self.trouble
                    && player.agent.is_some()
                {
                    let state = format!("it was told nothing of {odd:?}");
                    return Err(Broken::NotOn { rank, state });
                }
                continue;
            };
            let blamed = abort.blamed.0 as usize;
            let right = match self.trouble {
                Trouble::None => return Err(Broken::Groundless { rank, abort }),
                // Of two, who knows which is the odd one.
                Trouble::Odd(odd) => abort.cause == Cause::WrongCall && (self.players.len() == 2 || blamed == odd.rank),
                Trouble::Late { rank, .. } => blamed == rank && abort.cause == Cause::Late,
                // Between two halves each sees the other fail.
                Trouble::Strikes { what, .. } if what.torn != 0 => true,
                // Who was frozen finds that the others have left it.
                Trouble::Strikes { what, .. } => {
                    what.freezes.is_some_and(|frozen| frozen == blamed || frozen == rank)
                        // Between two that have parted each sees the other go.
                        || what.parts.is_some_and(|(one, from)| one == blamed || from >> blamed & 1 != 0)
                        || what.dies >> blamed & 1 != 0
                }
            };
            if !right {
                let trouble = Box::new(self.trouble);
                return Err(Broken::WrongBlame { rank, abort, trouble });
            }
        }
        Ok(())
    }

    /// Where one rank has failed, and those that are left are enough, they go on.
    pub(super) fn check_left(&self) -> Result<(), Broken> {
        let failed = self.players.iter().any(|player| player.told.is_some());
        let Trouble::Strikes { what, .. } = self.trouble else {
            return match failed.then(|| self.players.iter().position(|player| player.answer.is_none())) {
                Some(Some(rank)) => Err(self.not_on(rank)),
                _ => Ok(()),
            };
        };
        let gone = what.dies.count_ones() as usize + usize::from(what.freezes.is_some());
        let enough = 2 * gone < self.players.len();
        if !failed || what.torn != 0 || what.parts.is_some() || !enough {
            return Ok(());
        }
        let left = |index: &usize| what.freezes != Some(*index) && what.dies >> index & 1 == 0;
        let not_on = (0..self.players.len())
            .filter(left)
            .find(|index| self.players[*index].answer.is_none());
        not_on.map_or(Ok(()), |rank| Err(self.not_on(rank)))
    }

    pub(super) fn not_on(&self, rank: usize) -> Broken {
        let state = format!("{:?}", self.players[rank].stage);
        Broken::NotOn { rank, state }
    }
}
