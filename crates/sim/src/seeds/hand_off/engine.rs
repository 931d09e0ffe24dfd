//! The two engines of a world of hand-offs: how their caches lie in memory, which blocks are free, and what becomes of each prompt.

use std::collections::VecDeque;
use std::ops::Range;

use weft_plan::Time;
use weft_plan::pages::{Pages, Table, pair};
use weft_plan::spans::paired;
use weft_protocol::hand_off::{Cache, Layer, Lease, Origin, Over, Slots};
use weft_protocol::seeded::Seeded;

use crate::transport::Fabric;

const HEADS: u64 = 4;
const UNIT_BYTES: u64 = 16;
const BLOCKS: u64 = 96;
/// Blocks that are left for the end, when nothing goes wrong and everything must work.
const RESERVE: usize = 40;
pub(super) const TOKENS_MAX: u64 = 48;

/// What kind of engines a seed makes.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) holders: usize,
    pub(super) readers: usize,
    pub(super) layers: usize,
    block_tokens: [u64; 2],
    tokens_first: [bool; 2],
    /// The tokens of a block are packed and cannot be told apart.
    packed: bool,
    pub(super) lease: Time,
    pub(super) deadline: Time,
    pub(super) landing_bytes: u64,
    /// Somebody who knows the secret talks nonsense.
    pub(super) gossip: bool,
}

impl Shape {
    pub(super) fn of(seed: u64) -> Shape {
        let mut chance = Seeded::new(seed ^ 0x7368_6170);
        let mut of = |choices: &[u64]| choices[chance.below(choices.len() as u64) as usize];
        let packed = of(&[0, 0, 1]) == 1;
        let here = of(&[4, 8]);
        let there = if packed { here } else { of(&[4, 8]) };
        Shape {
            holders: of(&[1, 2, 2, 4]) as usize,
            readers: of(&[1, 1, 2]) as usize,
            layers: of(&[1, 2, 3]) as usize,
            block_tokens: [there, here],
            tokens_first: [of(&[0, 1]) == 1, of(&[0, 1]) == 1],
            packed,
            lease: Time::from_ms(of(&[300, 1_000, 9_000])),
            deadline: Time::from_ms(of(&[500, 1_000, 3_000])),
            landing_bytes: of(&[1, 20_000, 1 << 20]),
            gossip: of(&[0, 0, 1]) == 1,
        }
    }

    pub(super) fn address(&self, name: &str) -> String {
        format!("{}:0/{name}", Fabric::NETWORK.name)
    }
}

/// One of the two.
pub(super) struct Engine {
    pub(super) ranks: usize,
    layers: usize,
    block_tokens: u64,
    granule: u64,
    tokens_first: bool,
    pub(super) free: Vec<u64>,
    pub(super) slots: Slots,
}

impl Engine {
    pub(super) fn new(shape: &Shape, holds: bool) -> Engine {
        let which = usize::from(!holds);
        let block_tokens = shape.block_tokens[which];
        Engine {
            ranks: if holds { shape.holders } else { shape.readers },
            layers: shape.layers,
            block_tokens,
            granule: if shape.packed { block_tokens } else { 1 },
            tokens_first: shape.tokens_first[which],
            free: (0..BLOCKS).collect(),
            slots: Slots::new(0),
        }
    }

    pub(super) fn cache(&self, rank: usize) -> Cache {
        let layers = (0..self.layers).map(|nth| Layer {
            name: format!("layer.{nth}"),
            region: nth as u32,
            granule: self.granule,
            pages: self.pages(rank),
        });
        let (rank, ranks) = (rank as u32, self.ranks as u32);
        Cache::new(
            vec![("model".to_owned(), "simulated".to_owned())],
            rank,
            ranks,
            layers.collect(),
        )
        .expect("a small cache")
    }

    fn pages(&self, rank: usize) -> Pages {
        let share = HEADS / self.ranks as u64;
        let heads = rank as u64 * share..(rank as u64 + 1) * share;
        let (tokens, unit) = (self.block_tokens / self.granule, UNIT_BYTES * self.granule);
        let pages = match self.tokens_first {
            true => Pages::tokens_first(BLOCKS, tokens, heads, unit),
            false => Pages::heads_first(BLOCKS, tokens, heads, unit),
        };
        pages.expect("a small layer")
    }

    /// Blocks for so many tokens, unless too few are left.
    pub(super) fn take(&mut self, tokens: u64, in_calm: bool, chance: &mut Seeded) -> Option<Vec<u64>> {
        let wanted = tokens.div_ceil(self.block_tokens) as usize;
        if self.free.len() < wanted + if in_calm { 0 } else { RESERVE } {
            return None;
        }
        let picks = (0..wanted).map(|_| self.free.swap_remove(chance.below(self.free.len() as u64) as usize));
        Some(picks.collect())
    }

    /// Where tokens of a layer lie at a rank, beside where they lie in the one order in which contents are kept: offset here, offset there, length.
    pub(super) fn pieces(&self, rank: usize, blocks: &[u64], tokens: Range<u64>) -> Vec<(u64, u64, u64)> {
        let pages = self.pages(rank);
        let granules = tokens.start / self.granule..tokens.end.div_ceil(self.granule);
        let whole = self.whole();
        let table = |pages, blocks| Table { pages, blocks };
        let heads = pages.shape().heads.clone();
        let (near, far) =
            pair(table(&pages, blocks), table(&whole, &[0]), granules, heads).expect("tokens of the prompt");
        paired(&near, &far, 0..near.bytes()).collect()
    }

    /// The order in which contents are kept: all heads of all tokens.
    fn whole(&self) -> Pages {
        Pages::heads_first(1, TOKENS_MAX / self.granule, 0..HEADS, UNIT_BYTES * self.granule).expect("a small layer")
    }

    /// All bytes of a layer of a prompt.
    pub(super) fn content(&self, prompt: usize, layer: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.whole().end() as usize];
        Seeded::new((prompt as u64) << 8 | layer as u64).fill(&mut bytes);
        bytes
    }

    pub(super) fn block_tokens(&self) -> u64 {
        self.block_tokens
    }
}

/// What happens to a prompt next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Compute,
    /// All layers, one after the other, up to this token.
    Chunk(u64),
    Preempt,
    Offer,
    Stop,
    Want,
    Fetch,
    Leave,
}

/// How far its engine is with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Computing,
    Offered,
    Stopped,
}

pub(super) struct Prompt {
    pub(super) number: usize,
    pub(super) pushed: bool,
    pub(super) tokens: u64,
    /// The first token that the reading engine lacks.
    pub(super) first: u64,
    pub(super) there: Vec<u64>,
    pub(super) here: Vec<u64>,
    pub(super) lease: Option<Lease>,
    pub(super) stage: Stage,
    pub(super) life: VecDeque<(Time, Step)>,
    /// By rank of the engine that holds it.
    pub(super) freed: Vec<Option<Over>>,
    pub(super) fenced: Vec<bool>,
    pub(super) wanted: bool,
    pub(super) fetched: bool,
    /// By rank of the engine that reads it: whether it was handed off.
    pub(super) ended: Vec<Option<bool>>,
    /// A rank that had something to do with it has died, and its last word with it.
    pub(super) bereaved: bool,
    /// Its blocks belong to others by now.
    pub(super) given_up: bool,
    pub(super) in_calm: bool,
}

impl Prompt {
    pub(super) fn name(&self) -> String {
        format!("p{}", self.number)
    }
    pub(super) fn digest(&self) -> [u8; 32] {
        [self.number as u8; 32]
    }
    pub(super) fn origin(&self, addresses: Vec<String>) -> Option<Origin> {
        Some(Origin {
            hand_off: self.name(),
            addresses,
            blocks: self.there.clone(),
            tokens: self.tokens,
            lease: self.lease?,
        })
    }
    /// Whether every rank that wanted it has said, in some life of its session, that it reads no more.
    pub(super) fn is_done_with(&self) -> bool {
        let done = self.wanted && !self.bereaved && self.ended.iter().all(Option::is_some);
        self.stage == Stage::Stopped || self.stage == Stage::Offered && done
    }
}
