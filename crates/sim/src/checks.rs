//! What any run on a network may be refused for, whether the network is one of flows or of packets.

use thiserror::Error;
use weft_model::fabric::{LinkId, Topology};
use weft_plan::Rank;
use weft_plan::collective::PartitionError;
use weft_plan::schedule::Shape;
use weft_protocol::group::CompileError;

/// What is to run does not fit the network, or does not end on it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RunError {
    #[error("{ranks} ranks on a network of {room}")]
    TooManyRanks { ranks: u32, room: u32 },
    #[error("rank {rank} of {ranks}")]
    NoSuchRank { rank: Rank, ranks: u32 },
    #[error("link {} of {links}", link.0)]
    NoSuchLink { link: LinkId, links: u32 },
    /// Ranks wait for each other, or a link is down for ever.
    #[error("{waiting} ranks or transfers never come to their end")]
    NeverEnds { waiting: u64 },
    #[error(transparent)]
    Sizes(#[from] PartitionError),
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// Ranks of which no two do the same, and each does much.
    #[error("ranks are too different from each other: more than {most} ops would have to be kept")]
    TooManyOps { most: u64 },
}

/// A program has no more ranks than the network.
pub(crate) fn has_room(topology: &Topology, shape: &Shape) -> Result<(), RunError> {
    let (ranks, room) = (shape.ranks, topology.ranks());
    match ranks > room {
        true => Err(RunError::TooManyRanks { ranks, room }),
        false => Ok(()),
    }
}

/// All these ranks are there.
pub(crate) fn knows_ranks(topology: &Topology, wanted: impl IntoIterator<Item = Rank>) -> Result<(), RunError> {
    let ranks = topology.ranks();
    match wanted.into_iter().find(|rank| rank.0 >= ranks) {
        Some(rank) => Err(RunError::NoSuchRank { rank, ranks }),
        None => Ok(()),
    }
}

pub(crate) fn knows_link(topology: &Topology, link: LinkId) -> Result<(), RunError> {
    let links = topology.links();
    match link.0 >= links {
        true => Err(RunError::NoSuchLink { link, links }),
        false => Ok(()),
    }
}
