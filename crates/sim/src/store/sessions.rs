//! Requests of chats, documents and agents, by seed.
//!
//! The shapes are those that published traces have: most blocks of chats are used once, and the next turn comes after minutes; questions about
//! documents share long beginnings; agents come back within seconds, dozens of times, with all that they had and a little more.

use thiserror::Error;
use weft_protocol::Seeded;

use super::Request;

/// What sessions are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sessions {
    /// How many there are.
    pub count: u32,
    /// How many begin in a second, on average.
    pub rate: f64,
    /// How common each kind is, relative to the others.
    pub chats: f64,
    pub documents: f64,
    pub agents: f64,
    pub block_tokens: u32,
    pub seed: u64,
}

/// Sessions that cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SessionsError {
    #[error("between 1 and {SESSIONS_MAX} sessions can be made, not {count}")]
    Count { count: u32 },
    #[error("sessions begin at a rate above 0, not at {rate} a second")]
    Rate { rate: f64 },
    #[error("at least one kind of session must be common, and none less than not at all")]
    Kinds,
    #[error("a block has at least one token")]
    BlockTokens,
}

const SESSIONS_MAX: u32 = 1_000_000;

/// Of one kind: how long sessions are, and how long they wait.
struct Habits {
    /// Tokens that all sessions of the kind begin with, one of so many beginnings.
    common_tokens: f64,
    commons: u64,
    /// Tokens of the first prompt after that, by the median, and how far they spread (a factor of e at one deviation).
    first_tokens: f64,
    spread: f64,
    /// Tokens that each further turn adds, answers included.
    turn_tokens: f64,
    answer_tokens: f64,
    /// The chance of a first return, and of each further one.
    returns: f64,
    returns_again: f64,
    /// Seconds until the next turn, on average.
    pause: f64,
}

const CHAT: Habits = Habits {
    common_tokens: 500.0,
    commons: 1,
    first_tokens: 3000.0,
    spread: 1.3,
    turn_tokens: 1500.0,
    answer_tokens: 350.0,
    returns: 0.35,
    returns_again: 0.65,
    pause: 165.0,
};

const DOCUMENT: Habits = Habits {
    common_tokens: 20_000.0,
    commons: 40,
    first_tokens: 200.0,
    spread: 0.8,
    turn_tokens: 300.0,
    answer_tokens: 30.0,
    returns: 0.7,
    returns_again: 0.7,
    pause: 85.0,
};

const AGENT: Habits = Habits {
    common_tokens: 1400.0,
    commons: 2,
    first_tokens: 800.0,
    spread: 0.7,
    turn_tokens: 500.0,
    answer_tokens: 120.0,
    returns: 0.98,
    returns_again: 0.95,
    pause: 7.0,
};

impl Sessions {
    /// Some of each kind.
    pub fn mixed(seed: u64) -> Sessions {
        Sessions {
            count: 1000,
            rate: 1.0,
            chats: 0.7,
            documents: 0.2,
            agents: 0.1,
            block_tokens: 64,
            seed,
        }
    }

    pub fn chats(seed: u64) -> Sessions {
        Sessions {
            chats: 1.0,
            documents: 0.0,
            agents: 0.0,
            ..Sessions::mixed(seed)
        }
    }

    pub fn documents(seed: u64) -> Sessions {
        Sessions {
            chats: 0.0,
            documents: 1.0,
            agents: 0.0,
            ..Sessions::mixed(seed)
        }
    }

    pub fn agents(seed: u64) -> Sessions {
        Sessions {
            chats: 0.0,
            documents: 0.0,
            agents: 1.0,
            count: 100,
            rate: 0.05,
            ..Sessions::mixed(seed)
        }
    }

    /// All requests, in the order in which they come.
    pub fn requests(&self) -> Result<Vec<Request>, SessionsError> {
        let kinds = [self.chats, self.documents, self.agents];
        if !(1..=SESSIONS_MAX).contains(&self.count) {
            return Err(SessionsError::Count { count: self.count });
        }
        if !(self.rate.is_finite() && self.rate > 0.0) {
            return Err(SessionsError::Rate { rate: self.rate });
        }
        if kinds.iter().any(|kind| !(kind.is_finite() && *kind >= 0.0)) || kinds.iter().sum::<f64>() <= 0.0 {
            return Err(SessionsError::Kinds);
        }
        if self.block_tokens == 0 {
            return Err(SessionsError::BlockTokens);
        }
        let mut making = Making {
            seeded: Seeded::new(self.seed),
            block_tokens: self.block_tokens,
            commons: Default::default(),
            unused: 0,
            requests: Vec::new(),
        };
        let mut start = 0.0;
        for _ in 0..self.count {
            start += making.exponential(1.0 / self.rate);
            let mut drawn = making.uniform() * kinds.iter().sum::<f64>();
            let mut kind = 0;
            while kind < 2 && drawn >= kinds[kind] {
                drawn -= kinds[kind];
                kind += 1;
            }
            making.session(kind, start);
        }
        // Sorted by time; those of the same millisecond stay in the order in which they were made.
        making.requests.sort_by_key(|request| request.at_ms);
        Ok(making.requests)
    }
}

struct Making {
    seeded: Seeded,
    block_tokens: u32,
    /// Beginnings that are shared, by kind: blocks and tokens.
    commons: [Vec<(Vec<u64>, u32)>; 3],
    unused: u64,
    requests: Vec<Request>,
}

impl Making {
    fn session(&mut self, kind: usize, start: f64) {
        let habits = [&CHAT, &DOCUMENT, &AGENT][kind];
        let (mut blocks, mut tokens) = self.common(kind, habits);
        let (mut at, mut turn) = (start, 0);
        let mut added = self.spread(habits.first_tokens, habits.spread);
        loop {
            // The last block was not full; with more tokens in it, it is another one.
            if !tokens.is_multiple_of(self.block_tokens) {
                blocks.pop();
            }
            tokens += added;
            while (blocks.len() as u32) < tokens.div_ceil(self.block_tokens) {
                blocks.push(self.unused);
                self.unused += 1;
            }
            let answer = self.spread(habits.answer_tokens, 0.8);
            self.requests.push(Request {
                at_ms: (at * 1000.0) as u64,
                input_tokens: tokens,
                output_tokens: answer,
                blocks: blocks.clone(),
            });
            let returns = if turn == 0 {
                habits.returns
            } else {
                habits.returns_again
            };
            turn += 1;
            if turn >= 200 || !self.seeded.chance(returns) {
                return;
            }
            added = answer + self.spread(habits.turn_tokens, habits.spread);
            at += self.exponential(habits.pause);
        }
    }

    /// A beginning that others share, popular ones more often.
    fn common(&mut self, kind: usize, habits: &Habits) -> (Vec<u64>, u32) {
        if self.commons[kind].is_empty() {
            for _ in 0..habits.commons {
                let whole = self.spread(habits.common_tokens, 0.5) / self.block_tokens;
                let blocks = (self.unused..self.unused + u64::from(whole)).collect();
                self.unused += u64::from(whole);
                self.commons[kind].push((blocks, whole * self.block_tokens));
            }
        }
        let popular = self.uniform() * self.uniform();
        let nth = (popular * habits.commons as f64) as usize;
        self.commons[kind][nth].clone()
    }

    fn uniform(&mut self) -> f64 {
        (self.seeded.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.uniform()).ln()
    }

    /// Tokens around a median, some much longer, none beyond what prompts are.
    fn spread(&mut self, median: f64, spread: f64) -> u32 {
        // The sum of twelve is close enough to a bell.
        let bell = (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0;
        (median * (spread * bell).exp()).clamp(1.0, 120_000.0) as u32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn used_once(requests: &[Request]) -> f64 {
        let mut uses: HashMap<u64, u32> = HashMap::new();
        for block in requests.iter().flat_map(|request| &request.blocks) {
            *uses.entry(*block).or_default() += 1;
        }
        uses.values().filter(|uses| **uses == 1).count() as f64 / uses.len() as f64
    }

    #[test]
    fn a_seed_makes_the_same_requests_and_another_makes_others() {
        let make = |seed| {
            Sessions {
                count: 50,
                ..Sessions::mixed(seed)
            }
            .requests()
            .unwrap()
        };
        assert_eq!(make(1), make(1));
        assert_ne!(make(1), make(2));
        for request in make(3) {
            super::super::trace::check(&request).unwrap();
            assert_eq!(request.blocks.len() as u32, request.input_tokens.div_ceil(64));
        }
    }

    #[test]
    fn kinds_have_the_shapes_that_traces_have() {
        let once = |sessions: Sessions| used_once(&sessions.requests().unwrap());
        let [chats, documents, agents] = [Sessions::chats(1), Sessions::documents(1), Sessions::agents(1)].map(once);
        assert!(chats > 0.55 && chats < 0.85, "{chats}");
        assert!(documents < 0.5, "{documents}");
        assert!(agents < 0.3, "{agents}");
    }

    #[test]
    fn sessions_that_cannot_be_are_refused() {
        let wrong = [
            Sessions {
                count: 0,
                ..Sessions::mixed(1)
            },
            Sessions {
                rate: 0.0,
                ..Sessions::mixed(1)
            },
            Sessions {
                rate: f64::NAN,
                ..Sessions::mixed(1)
            },
            Sessions {
                chats: -1.0,
                ..Sessions::mixed(1)
            },
            Sessions {
                chats: 0.0,
                documents: 0.0,
                agents: 0.0,
                ..Sessions::mixed(1)
            },
            Sessions {
                block_tokens: 0,
                ..Sessions::mixed(1)
            },
        ];
        for sessions in wrong {
            assert!(sessions.requests().is_err(), "{sessions:?}");
        }
    }
}
