//! Ranks without agents, on a loopback of messages: calls in a row, of which one rank may make a different one, and what all are told then.
//!
//! What is checked: calls that are the same everywhere end well and have the right results; a rank that has made another call comes out
//! by the end of the next barrier, on all ranks, and is the one that is blamed, for that very call.

use std::sync::Arc;

use weft_plan::collective::Collective;
use weft_plan::{Rank, Time};
use weft_protocol::group::{
    Abort, Board, Cause, Exchange, Execution, LoopbackExchange, LoopbackGroup, LoopbackOptions, Reference, Trouble,
    Turn, View, Witness,
};
use weft_protocol::{Progress, Seeded, VecMemory};

use super::wish::{Odd, Wish};

/// Turns in which nothing moves before a rank takes it for too long.
const PATIENCE: u32 = 300;
/// Turns of a world. It takes a few hundred.
const TURNS_MAX: u32 = 2_000_000;

#[derive(Debug)]
struct Player {
    rank: Rank,
    exchange: LoopbackExchange,
    execution: Execution,
    /// Input, output and scratch of the present call.
    memory: [Arc<VecMemory>; 3],
    /// The number of the next call.
    next: usize,
    idle: u32,
    /// What it has run into, and how often it still looks what the others have called: those that are behind are given a moment.
    stuck: Option<(Option<Trouble>, u32)>,
    told: Option<Abort>,
}

#[derive(Debug)]
struct Play {
    ranks: u32,
    wishes: Vec<Wish>,
    odd: Option<Odd>,
    players: Vec<Player>,
}

/// Plays the group of a seed to its end. The error says what was broken.
pub(in crate::seeds) fn play(seed: u64) -> Result<(), String> {
    let mut chance = Seeded::new(seed ^ 0x6772_6f75);
    let mut play = Play::new(&mut chance, seed);
    for _ in 0..TURNS_MAX {
        if play.players.iter().all(|player| play.is_over(player)) {
            return play.check();
        }
        let rank = chance.below(play.ranks.into()) as usize;
        // Ranks come to their calls at different times.
        if chance.chance(0.9) {
            play.turn(rank)?;
        }
    }
    Err(format!("a group of {} ranks goes in circles", play.ranks))
}

impl Play {
    fn new(chance: &mut Seeded, seed: u64) -> Play {
        let ranks = 2 + chance.below(5) as u32;
        let calls = 1 + chance.below(6) as usize;
        let mut wishes: Vec<Wish> = (0..calls).map(|_| Wish::random(chance, ranks)).collect();
        let odd = chance.chance(0.6).then(|| {
            let at = chance.below(calls as u64) as usize;
            Odd {
                rank: chance.below(ranks.into()) as usize,
                at,
                wish: wishes[at].differently(chance, ranks),
            }
        });
        let odd = odd.filter(|odd| odd.wish != wishes[odd.at]);
        // Whatever came before, here all hear of all.
        wishes.push(Wish::new(chance, Collective::Barrier, ranks, 0));
        let options = LoopbackOptions {
            seed,
            room: 1 + chance.below(8) as usize,
            delay_max: chance.below(12),
            ..LoopbackOptions::default()
        };
        let group = LoopbackGroup::new(ranks, options);
        let player = |rank| Player {
            rank: Rank(rank),
            exchange: group.exchange(Rank(rank)),
            execution: Execution::default(),
            memory: [0; 3].map(|_| Arc::new(VecMemory::zeroed(0))),
            next: 0,
            idle: 0,
            stuck: None,
            told: None,
        };
        Play {
            ranks,
            wishes,
            odd,
            players: (0..ranks).map(player).collect(),
        }
    }

    fn is_over(&self, player: &Player) -> bool {
        player.told.is_some() || player.next == self.wishes.len() && player.execution.record().is_none()
    }

    fn wish(&self, rank: usize, number: usize) -> Wish {
        match &self.odd {
            Some(odd) if (odd.rank, odd.at) == (rank, number) => odd.wish,
            _ => self.wishes[number],
        }
    }

    fn turn(&mut self, rank: usize) -> Result<(), String> {
        if self.is_over(&self.players[rank]) {
            return Ok(());
        }
        if self.players[rank].execution.record().is_none() {
            let (number, wish) = (self.players[rank].next, self.wish(rank, self.players[rank].next));
            return self.players[rank].begin(number, wish, self.ranks);
        }
        let ranks = self.ranks;
        let player = &mut self.players[rank];
        if player.stuck.is_some() {
            player.inquire(ranks);
            return Ok(());
        }
        match player.execution.turn(&mut player.exchange, &Reference, 1) {
            Ok(Turn::Ended) => {
                let number = player.next - 1;
                match player.heard() {
                    Some(abort) if abort.called.number <= number as u64 => player.told = Some(abort),
                    _ => self.check_result(rank, number)?,
                }
            }
            Ok(Turn::Moved) => player.idle = 0,
            Ok(Turn::Waiting) => {
                player.idle += 1;
                if let Some(abort) = player.heard() {
                    player.end(abort);
                } else if player.idle > PATIENCE {
                    player.stuck = Some((None, PATIENCE));
                }
            }
            Err(trouble) => player.stuck = Some((Some(trouble), PATIENCE)),
        }
        Ok(())
    }

    /// What a call that has ended well has come to, where all have made the same.
    fn check_result(&self, rank: usize, number: usize) -> Result<(), String> {
        if self.odd.is_some_and(|odd| odd.at <= number) {
            return Ok(());
        }
        let wish = self.wishes[number];
        let (output, right) = (
            self.players[rank].memory[1].snapshot(),
            wish.result(rank, number, self.ranks),
        );
        match output == right {
            true => Ok(()),
            false => Err(format!(
                "rank {rank} has {output:?} and not {right:?} after {wish:?}, call {number}"
            )),
        }
    }

    fn check(&self) -> Result<(), String> {
        for player in &self.players {
            let rank = player.rank.0;
            match (&self.odd, &player.told) {
                (None, None) => {}
                (None, Some(abort)) => {
                    return Err(format!("rank {rank} was told: {abort}; and all have called the same"));
                }
                (Some(odd), None) => return Err(format!("rank {rank} was told nothing of {odd:?}")),
                // Of two, who knows which is the odd one.
                (Some(odd), Some(abort)) => {
                    let right = self.ranks == 2 || abort.blamed.0 as usize == odd.rank;
                    if !right || abort.cause != Cause::WrongCall || abort.called.number != odd.at as u64 {
                        return Err(format!(
                            "rank {rank} of {} was told: {abort}; it was {odd:?}",
                            self.ranks
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Player {
    fn begin(&mut self, number: usize, wish: Wish, ranks: u32) -> Result<(), String> {
        let (task, buffers) = wish.made(self.rank, number, ranks)?;
        self.memory = buffers.map(|bytes| Arc::new(VecMemory::new(bytes)));
        let mut views = self.memory.clone().map(|memory| View::whole(memory)).to_vec();
        (self.next, self.idle) = (number + 1, 0);
        let begun = self
            .execution
            .begin(&task, number as u64, &mut views, &mut self.exchange);
        begun.map_err(|trouble| trouble.to_string())?;
        if let Some(abort) = self.heard() {
            self.end(abort);
        }
        Ok(())
    }

    /// What somebody has told all.
    fn heard(&mut self) -> Option<Abort> {
        match self.exchange.poll(Time::ZERO) {
            Err(Trouble::Aborted(abort)) => Some(*abort),
            _ => None,
        }
    }

    /// Looks what the others have called, and when that is known, or has been looked for long enough, tells all.
    fn inquire(&mut self, ranks: u32) {
        if let Some(abort) = self.heard() {
            return self.end(abort);
        }
        let number = self.execution.latest().number;
        let is_here = |player: &mut Player, rank| {
            let status = player.exchange.status(Rank(rank));
            Rank(rank) == player.rank || status.is_some_and(|status| status.recent.begun > number)
        };
        let all_here = (0..ranks).all(|rank| is_here(self, rank));
        match &mut self.stuck {
            Some((_, looks)) if !all_here && *looks > 0 => *looks -= 1,
            Some((trouble, _)) => {
                let trouble = trouble.take();
                self.fail(trouble.as_ref(), ranks);
            }
            None => {}
        }
    }

    fn fail(&mut self, trouble: Option<&Trouble>, ranks: u32) {
        let waiting = self.execution.waiting();
        self.exchange.publish(waiting);
        let others: Vec<_> = (0..ranks).map(|rank| self.exchange.status(Rank(rank))).collect();
        let witness = Witness {
            rank: self.rank,
            call: *self.execution.latest(),
            history: self.execution.history(),
            waiting,
            others: &others,
            still: &[],
        };
        let abort = match trouble {
            Some(trouble) => witness.after(trouble),
            None => witness.after_deadline(),
        };
        self.exchange.abort(&abort);
        let first = self.heard().unwrap_or(abort);
        self.end(first);
    }

    fn end(&mut self, abort: Abort) {
        while self.execution.abandon(&mut self.exchange) == Progress::Busy {}
        self.told = Some(abort);
    }
}
