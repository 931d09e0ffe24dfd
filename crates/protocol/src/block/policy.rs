//! Which block leaves when room is needed.
//!
//! A policy is told of each request once, block by block from the tail to the head, and asked for one victim at a time. It is pure: the same
//! requests give the same victims, in a store, in the simulator and in a [replay](super::replay). Blocks that others follow stay, because
//! without them the others could not be found.
//!
//! [`Adaptive`] is the default; [`Lru`], [`Arc`] and [`Frequency`] are there to be compared with, and for those who know their load.

mod adaptive;
mod arc;
mod ranked;
mod shadow;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

pub use adaptive::Adaptive;
pub use arc::Arc;
pub use ranked::{Frequency, Lru};

use super::{BlockId, Links, Slot};

/// What a policy is told of a block that a request has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    pub id: BlockId,
    pub slot: Slot,
    /// It is the last of its request, and nothing follows it: a block that is seldom asked for again, as the next turn fills it differently.
    pub last: bool,
    /// It belongs to a session that is over, and to no other: it goes before all others.
    pub over: bool,
    /// Somebody has said that it matters more than others.
    pub valued: bool,
}

/// The order in which blocks leave.
pub trait Policy: fmt::Debug + Send {
    /// A request has used these blocks, from its tail to its head. All of them are in the index.
    fn request(&mut self, links: &mut Links, touches: &[Touch]);

    /// Names the next block to leave, and forgets where it was in line. A block that may not leave goes to the end of its line.
    fn victim(&mut self, links: &mut Links, look: &dyn Look) -> Option<Slot>;

    /// A block has left for another reason.
    fn forget(&mut self, links: &mut Links, slot: Slot);
}

/// What a policy may ask of an index when it looks for a victim.
pub trait Look {
    fn may_leave(&self, slot: Slot) -> bool;
    fn id(&self, slot: Slot) -> BlockId;
}

impl Look for super::Index {
    fn may_leave(&self, slot: Slot) -> bool {
        super::Index::may_leave(self, slot)
    }

    fn id(&self, slot: Slot) -> BlockId {
        super::Index::id(self, slot)
    }
}

/// Policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    Lru,
    Arc,
    Frequency,
    #[default]
    Adaptive,
}

/// No policy has that name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no policy is called `{name}`; known are lru, arc, frequency and adaptive")]
pub struct UnknownPolicy {
    name: String,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Lru, Kind::Arc, Kind::Frequency, Kind::Adaptive];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Lru => "lru",
            Kind::Arc => "arc",
            Kind::Frequency => "frequency",
            Kind::Adaptive => "adaptive",
        }
    }

    /// A policy for a store of so many blocks.
    pub fn policy(self, blocks: usize) -> Box<dyn Policy> {
        match self {
            Kind::Lru => Box::new(Lru::new()),
            Kind::Arc => Box::new(Arc::new(blocks)),
            Kind::Frequency => Box::new(Frequency::new(blocks)),
            Kind::Adaptive => Box::new(Adaptive::new(blocks)),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Kind, UnknownPolicy> {
        let same = |kind: &Kind| kind.name() == name;
        Kind::ALL.into_iter().find(same).ok_or_else(|| UnknownPolicy {
            name: name.chars().take(80).collect(),
        })
    }
}

#[cfg(test)]
mod tests;
