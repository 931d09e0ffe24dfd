//! Ways to do a collective, one file each. Every one is a function of rank and step, for any number of ranks from two up.
//!
//! A constructor answers `None` to a problem that its algorithm is not for. All are proven by the verifier in this crate's tests, for every
//! number of ranks up to 64; what a new one must bring is told in `docs/schedules.md`. [`Algorithm`] names them all.
//!
//! ```
//! use weft_plan::algorithms::{Algorithm, Grid};
//! use weft_plan::collective::{Collective, Problem};
//! let problem = Problem::new(Collective::Barrier, 6);
//! let suited: Vec<_> = Algorithm::ALL.iter().filter(|a| a.program(&problem, Grid::flat(6)).is_some()).collect();
//! assert_eq!(suited.iter().map(|a| a.name()).collect::<Vec<_>>(), ["direct", "binomial-tree", "dissemination"]);
//! ```

mod alone;
mod bidirectional_ring;
mod binomial_tree;
mod bruck;
mod direct;
mod dissemination;
mod double_binary_tree;
mod halving_doubling;
mod hierarchical;
mod pairwise;
mod pat;
mod rabenseifner;
mod rail;
mod recursive_doubling;
mod ring;
mod striped;
mod two_shot;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::collective::Problem;
use crate::schedule::{Ops, Program, Slice};
use crate::units::Rank;

pub use alone::Alone;
pub use bidirectional_ring::BidirectionalRing;
pub use binomial_tree::BinomialTree;
pub use bruck::Bruck;
pub use direct::Direct;
pub use dissemination::Dissemination;
pub use double_binary_tree::DoubleBinaryTree;
pub use halving_doubling::HalvingDoubling;
pub use hierarchical::Hierarchical;
pub use pairwise::Pairwise;
pub use pat::Pat;
pub use rabenseifner::Rabenseifner;
pub use rail::{Across, Rail};
pub use recursive_doubling::RecursiveDoubling;
pub use ring::Ring;
pub use striped::Striped;
pub use two_shot::TwoShot;

/// Where ranks are: so many nodes with equally many ranks each, counted node by node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grid {
    pub nodes: u32,
    pub local: u32,
}

impl Grid {
    /// All on one node, or nothing known.
    pub const fn flat(ranks: u32) -> Grid {
        Grid { nodes: 1, local: ranks }
    }
    pub const fn ranks(&self) -> u32 {
        self.nodes.saturating_mul(self.local)
    }
    pub const fn node(&self, rank: Rank) -> u32 {
        rank.0 / self.local
    }
    /// The position of a rank on its node.
    pub const fn index(&self, rank: Rank) -> u32 {
        rank.0 % self.local
    }
    pub const fn rank(&self, node: u32, index: u32) -> Rank {
        Rank(node * self.local + index)
    }
    /// Whether there are several nodes with several ranks each.
    pub const fn is_deep(&self) -> bool {
        self.nodes >= 2 && self.local >= 2
    }
}

macro_rules! algorithms {
    ($($(#[$doc:meta])* $variant:ident = $name:literal => |$problem:pat_param, $grid:pat_param| $build:expr;)*) => {
        /// Every algorithm by its name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Algorithm {
            $($(#[$doc])* $variant,)*
        }

        impl Algorithm {
            pub const ALL: &[Algorithm] = &[$(Algorithm::$variant),*];

            /// The name that commands and files know it by.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Algorithm::$variant => $name,)*
                }
            }

            /// The program that solves `problem` this way, for ranks placed as `grid` says; `None` where the algorithm is not for it.
            pub fn program(self, problem: &Problem, grid: Grid) -> Option<Box<dyn Program>> {
                match self {
                    $(Algorithm::$variant => {
                        let ($problem, $grid) = (*problem, grid);
                        boxed($build)
                    })*
                }
            }
        }
    };
}

algorithms! {
    /// One rank: its output is its input.
    Alone = "alone" => |problem, _| Alone::new(problem);
    /// Everybody talks to everybody at once.
    Direct = "direct" => |problem, _| Direct::new(problem);
    /// Everybody reduces a part, then all exchange the parts.
    TwoShot = "two-shot" => |problem, _| TwoShot::new(problem);
    Ring = "ring" => |problem, _| Ring::new(problem);
    BidirectionalRing = "bidirectional-ring" => |problem, _| BidirectionalRing::new(problem);
    BinomialTree = "binomial-tree" => |problem, _| BinomialTree::new(problem);
    DoubleBinaryTree = "double-binary-tree" => |problem, _| DoubleBinaryTree::new(problem);
    RecursiveDoubling = "recursive-doubling" => |problem, _| RecursiveDoubling::new(problem);
    HalvingDoubling = "halving-doubling" => |problem, _| HalvingDoubling::new(problem);
    Rabenseifner = "rabenseifner" => |problem, _| Rabenseifner::new(problem);
    Bruck = "bruck" => |problem, _| Bruck::new(problem);
    /// Parallel aggregated trees.
    Pat = "pat" => |problem, _| Pat::new(problem);
    Pairwise = "pairwise" => |problem, _| Pairwise::new(problem);
    Striped = "striped" => |problem, _| Striped::new(problem);
    Dissemination = "dissemination" => |problem, _| Dissemination::new(problem);
    /// On the node, across by one rank of each node, on the node.
    Hierarchical = "hierarchical" => |problem, grid| Hierarchical::new(problem, grid);
    /// On the node, across by every rank on its own rail in a ring, on the node.
    RailRing = "rail-ring" => |problem, grid| Rail::new(problem, grid, Across::Ring);
    /// The same with logarithmically many steps across.
    RailDoubling = "rail-doubling" => |problem, grid| Rail::new(problem, grid, Across::Doubling);
}

fn boxed<P: Program + 'static>(program: Option<P>) -> Option<Box<dyn Program>> {
    program.map(|program| Box::new(program) as Box<dyn Program>)
}

/// A name that no algorithm has.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{name}` is no algorithm; known are {}", Algorithm::ALL.iter().map(|a| a.name()).collect::<Vec<_>>().join(", "))]
pub struct UnknownAlgorithm {
    pub name: String,
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;
    fn from_str(text: &str) -> Result<Algorithm, UnknownAlgorithm> {
        let found = Algorithm::ALL.iter().find(|algorithm| algorithm.name() == text);
        found.copied().ok_or_else(|| UnknownAlgorithm {
            name: text.chars().take(64).collect(),
        })
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The rank that comes `by` after `rank`, round and round.
fn after(rank: Rank, by: u32, ranks: u32) -> Rank {
    Rank(((u64::from(rank.0) + u64::from(by)) % u64::from(ranks)) as u32)
}

/// The rank that comes `by` before `rank`, round and round.
fn before(rank: Rank, by: u32, ranks: u32) -> Rank {
    after(rank, ranks - by % ranks, ranks)
}

/// Everyone else, beginning with the next: so that not all begin with the same one.
fn others(rank: Rank, ranks: u32) -> impl Iterator<Item = Rank> {
    (1..ranks).map(move |by| after(rank, by, ranks))
}

/// Everyone else, in the order in which their messages come.
fn sources(rank: Rank, ranks: u32) -> impl Iterator<Item = Rank> {
    (1..ranks).map(move |by| before(rank, by, ranks))
}

/// Everyone else's contribution on top of the own one. Only this rank needs the sum, so that its order is nobody else's business.
fn reduce_all(rank: Rank, ranks: u32, own: Slice, into: Slice, out: &mut Ops) {
    for (nth, from) in sources(rank, ranks).enumerate() {
        out.receive_reduce(from, if nth == 0 { own } else { into }, into);
    }
}

/// How often one must double to reach `ranks`, which are two or more.
fn levels(ranks: u32) -> u32 {
    (ranks - 1).ilog2() + 1
}

/// The greatest power of two that is not greater.
fn power_below(ranks: u32) -> u32 {
    1 << ranks.ilog2()
}

/// What a rank does in a step of a program among some of the ranks, in the terms of the program among all.
fn embed(
    inner: &dyn Program,
    (rank, step): (Rank, u32),
    ranks: impl Fn(Rank) -> Rank,
    slices: impl Fn(Slice) -> Slice,
    out: &mut Ops,
) {
    let mut ops = Ops::new();
    for op in ops.fill(inner, rank, step) {
        out.push(op.with_peer(&ranks).with_slices(&slices));
    }
}

#[cfg(test)]
mod tests;
