//! Ranks on a platform: who shares a node with whom, and what it costs to talk.

use thiserror::Error;

use super::LinkCost;
use crate::algorithms::Grid;
use crate::platform::{Arena, Platform};
use crate::units::Bandwidth;

/// Transports between nodes, the one that is used first.
const ACROSS: [&str; 2] = ["verbs", "tcp"];
const LOCAL: &str = "shared_memory";
/// How many channels there are between two ranks, where nobody says otherwise.
pub const CHANNELS: u16 = 4;

/// Where ranks are, and what the ways between them cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub grid: Grid,
    /// Between two ranks of a node.
    pub local: LinkCost,
    /// Between two nodes, over one rail.
    pub across: LinkCost,
    /// How many rails a node has; its ranks share them.
    pub rails: u32,
    /// How fast one core reduces what has come with what is there, in bytes of the result.
    pub reduction: Bandwidth,
    /// How fast one core copies.
    pub copy: Bandwidth,
    /// How ranks of a node take messages from each other's memory, where that is known; then `local` is not looked at.
    pub arena: Option<Arena>,
    /// Cores of a node. Ranks in excess of them take turns.
    pub cores: u32,
    /// How many channels there are between two ranks. A program that needs more is no candidate.
    pub channels: u16,
}

/// What a platform does not say.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    #[error("no ranks")]
    NoRanks,
    #[error("the platform `{platform}` says nothing of a transport {wanted} (known here: {known})")]
    NoTransport {
        platform: String,
        wanted: String,
        known: String,
    },
}

impl Placement {
    /// Places ranks on the machines of a platform, which are taken to be like its first.
    pub fn on(platform: &Platform, grid: Grid) -> Result<Placement, PlacementError> {
        Placement::over(platform, grid, &ACROSS)
    }

    /// The same, with nodes that reach each other over the first of these transports that the platform knows.
    pub fn over(platform: &Platform, grid: Grid, across: &[&str]) -> Result<Placement, PlacementError> {
        let find = |wanted: &[&str]| {
            let cost = |name: &&str| platform.messages.get(*name).or_else(|| platform.transports.get(*name));
            let found = wanted.iter().find_map(cost);
            found.copied().ok_or_else(|| PlacementError::NoTransport {
                platform: platform.name.clone(),
                wanted: wanted.join(" or "),
                known: platform.transports.keys().cloned().collect::<Vec<_>>().join(", "),
            })
        };
        let machine = platform.machines.first();
        // What is not used need not be known.
        let (local, across_cost) = match (grid.local, grid.nodes) {
            (0, _) | (_, 0) => return Err(PlacementError::NoRanks),
            (1, 1) => (LinkCost::NOTHING, LinkCost::NOTHING),
            (1, _) => (find(across)?, find(across)?),
            (_, 1) => (find(&[LOCAL])?, find(&[LOCAL])?),
            _ => (find(&[LOCAL])?, find(across)?),
        };
        let copy = machine
            .and_then(|machine| machine.memcpy)
            .map_or(local.bandwidth, |m| m.streaming);
        let rails = machine.map_or(0, |machine| {
            machine.nics.iter().filter(|nic| nic.rdma.is_some()).count()
        });
        let known = |name: &&&str| platform.messages.contains_key(**name) || platform.transports.contains_key(**name);
        let used = across.iter().find(known);
        let by_rail = used == Some(&"verbs");
        Ok(Placement {
            grid,
            local,
            across: across_cost,
            rails: if by_rail { (rails as u32).max(1) } else { 1 },
            reduction: machine.and_then(|machine| machine.reduction).unwrap_or(copy),
            copy,
            arena: machine.and_then(|machine| machine.arena),
            cores: machine.map_or(0, |machine| machine.core_count() as u32),
            channels: CHANNELS,
        })
    }

    /// Where ranks are when it must not matter where they are: each on a node of its own, of the built-in platform.
    pub fn reference(ranks: u32) -> Result<Placement, PlacementError> {
        let grid = Grid { nodes: ranks, local: 1 };
        Ok(Placement {
            channels: 1,
            ..Placement::over(&Platform::laptop(), grid, &["tcp"])?
        })
    }

    /// How much longer work of a core takes because ranks take turns.
    pub(super) fn crowding(&self) -> f64 {
        match self.cores {
            0 => 1.0,
            cores => (f64::from(self.grid.local) / f64::from(cores)).max(1.0),
        }
    }
}
