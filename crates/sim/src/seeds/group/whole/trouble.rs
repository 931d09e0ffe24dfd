//! What happens to a group in one seed: the trouble, and when it strikes.

use weft_plan::Time;
use weft_plan::collective::Collective;
use weft_protocol::seeded::Seeded;

use super::CALL;
use crate::seeds::group::wish::{Odd, Wish};

/// What goes wrong besides the links.
#[derive(Clone, Copy, Debug)]
pub(in crate::seeds) enum Trouble {
    None,
    Odd(Odd),
    /// A rank waits before its call.
    Late {
        rank: usize,
        at: usize,
        wait: Time,
    },
    /// Soon after a rank has begun a call.
    Strikes {
        at: usize,
        after: Time,
        what: Strike,
    },
}

#[derive(Clone, Copy, Debug)]
pub(in crate::seeds) struct Strike {
    /// Ranks that die, as bits; `told`: their kernels say so.
    pub(super) dies: u32,
    pub(super) told: bool,
    pub(super) freezes: Option<usize>,
    /// A rank that ends its sessions with some others, as bits, and lives on.
    pub(super) parts: Option<(usize, u32)>,
    /// Those on one side of the tear, as bits.
    pub(super) torn: u32,
    /// Only words in one direction are lost.
    pub(super) one_way: bool,
    pub(super) lasts: Time,
}

impl Trouble {
    pub(super) fn random(chance: &mut Seeded, ranks: u32, wishes: &[Wish]) -> Trouble {
        let at = 1 + chance.below(wishes.len() as u64 - 1) as usize;
        let rank = chance.below(ranks.into()) as usize;
        let after = Time::from_us(chance.below(400));
        let strike = Strike {
            dies: 0,
            told: chance.chance(0.6),
            freezes: None,
            parts: None,
            torn: 0,
            one_way: false,
            lasts: Time::from_ms(50 << chance.below(9)),
        };
        // Somebody is on each side, and somebody lives.
        let some = 1 + chance.below((1 << ranks) - 2) as u32;
        let one = 1 << rank;
        let what = match chance.below(9) {
            0 => return Trouble::None,
            1 => {
                let wish = wishes[at].differently(chance, ranks);
                return match wish == wishes[at] {
                    true => Trouble::None,
                    false => Trouble::Odd(Odd { rank, at, wish }),
                };
            }
            2 => {
                let wait = CALL.saturating_add(Time::from_ms(300 + chance.below(1000)));
                return Trouble::Late { rank, at, wait };
            }
            3 => Strike { dies: one, ..strike },
            4 => Strike { dies: some, ..strike },
            5 => Strike {
                freezes: Some(rank),
                lasts: Time::from_secs(20),
                ..strike
            },
            6 => Strike { torn: some, ..strike },
            7 => Strike {
                torn: some,
                one_way: chance.chance(0.5),
                lasts: Time::from_secs(20),
                ..strike
            },
            _ => Strike {
                torn: some,
                dies: one,
                lasts: Time::from_secs(20),
                ..strike
            },
        };
        Trouble::Strikes { at, after, what }
    }
}

impl Trouble {
    /// Has one of the ranks end its sessions with some others instead, now and then.
    pub(super) fn part(&mut self, chance: &mut Seeded, ranks: u32) {
        let Trouble::Strikes { what, .. } = self else { return };
        let rank = chance.below(ranks.into()) as usize;
        let from = chance.below(1 << ranks) as u32 & !(1 << rank);
        if from != 0 && chance.chance(0.15) {
            *what = Strike {
                parts: Some((rank, from)),
                dies: 0,
                freezes: None,
                torn: 0,
                ..*what
            };
        }
    }
}

/// What all that are alive call in the end.
pub(super) fn calm_wish(number: usize, ranks: u32) -> Wish {
    let collective = match number {
        0 => Collective::Barrier,
        _ => Collective::AllReduce,
    };
    let count = 10 * number as u64;
    Wish::new(&mut Seeded::new(number as u64), collective, ranks, count)
}
