//! Ranks on a platform: who shares a node with whom, and what it costs to talk.

use thiserror::Error;

use super::LinkCost;
use crate::algorithms::Grid;
use crate::platform::{Arena, Platform};
use crate::units::Bandwidth;

/// Transports between nodes, the one that is used first.
const ACROSS: [&str; 2] = ["verbs", "tcp"];
const LOCAL: &str = "shared_memory";

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
}

/// What a platform does not say.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    #[error("no ranks")]
    NoRanks,
    #[error("the platform `{platform}` says nothing of a transport {} (known here: {known})", wanted.join(" or "))]
    NoTransport {
        platform: String,
        wanted: &'static [&'static str],
        known: String,
    },
}

impl Placement {
    /// Places ranks on the machines of a platform, which are taken to be like its first.
    pub fn on(platform: &Platform, grid: Grid) -> Result<Placement, PlacementError> {
        if grid.ranks() == 0 {
            return Err(PlacementError::NoRanks);
        }
        let find = |wanted: &'static [&'static str]| {
            let found = wanted.iter().find_map(|name| platform.transports.get(*name));
            found.copied().ok_or_else(|| PlacementError::NoTransport {
                platform: platform.name.clone(),
                wanted,
                known: platform.transports.keys().cloned().collect::<Vec<_>>().join(", "),
            })
        };
        let machine = platform.machines.first();
        // What is not used need not be known.
        let (local, across) = match (grid.local, grid.nodes) {
            (1, _) => (find(&ACROSS)?, find(&ACROSS)?),
            (_, 1) => (find(&[LOCAL])?, find(&[LOCAL])?),
            _ => (find(&[LOCAL])?, find(&ACROSS)?),
        };
        let copy = machine
            .and_then(|machine| machine.memcpy)
            .map_or(local.bandwidth, |m| m.streaming);
        let rails = machine.map_or(0, |machine| {
            machine.nics.iter().filter(|nic| nic.rdma.is_some()).count()
        });
        let by_rail = platform.transports.contains_key(ACROSS[0]);
        Ok(Placement {
            grid,
            local,
            across,
            rails: if by_rail { (rails as u32).max(1) } else { 1 },
            reduction: machine.and_then(|machine| machine.reduction).unwrap_or(copy),
            copy,
            arena: machine.and_then(|machine| machine.arena),
            cores: machine.map_or(0, |machine| machine.core_count() as u32),
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
