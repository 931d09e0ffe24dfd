//! What one rank does in a collective: hops on the way of its last byte, and bytes on its busiest link.

use super::DeviceAlgorithm;
use weft_plan::algorithms::Grid;
use weft_plan::collective::Collective;

/// Amounts are shares of the size of the collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceWork {
    /// Hops within a domain, one after the other.
    pub local_hops: u32,
    /// Hops between domains.
    pub network_hops: u32,
    /// What a rank sends, or takes, within its domain.
    pub sent: f64,
    /// What the ranks of a domain together send, or take, through their NICs.
    pub through_nics: f64,
    /// What a rank keeps for itself.
    pub kept: f64,
}

impl DeviceWork {
    /// What an algorithm asks of each rank; `None` where it does not do the collective.
    pub fn of(algorithm: DeviceAlgorithm, collective: Collective, grid: Grid) -> Option<DeviceWork> {
        let ranks = grid.ranks();
        let (n, local, nodes) = (f64::from(ranks), f64::from(grid.local), f64::from(grid.nodes));
        if ranks < 2 {
            return None;
        }
        let many = grid.nodes > 1;
        let reduces = matches!(collective, Collective::AllReduce | Collective::Barrier);
        let scatters = matches!(
            collective,
            Collective::AllGather { .. } | Collective::ReduceScatter { .. }
        );
        Some(match algorithm {
            DeviceAlgorithm::Ring => {
                let rounds = match collective {
                    Collective::AllReduce | Collective::Barrier => 2,
                    Collective::AllGather { .. } | Collective::ReduceScatter { .. } => 1,
                    // A chain from or to the root, which all bytes go along.
                    Collective::Broadcast { .. } | Collective::Reduce { .. } => 1,
                    _ => return None,
                };
                let steps = rounds * (ranks - 1);
                let network_hops = if many { rounds * (grid.nodes - 1) } else { 0 };
                let chain = !(reduces || scatters);
                let sent = match chain {
                    true => 1.0,
                    false => f64::from(rounds) * (n - 1.0) / n,
                };
                DeviceWork {
                    local_hops: steps - network_hops,
                    network_hops,
                    sent,
                    through_nics: if many { sent } else { 0.0 },
                    kept: if chain { 0.0 } else { 1.0 / n },
                }
            }
            DeviceAlgorithm::Tree if reduces => DeviceWork {
                local_hops: 2 * (grid.local - 1),
                network_hops: 2 * depth(grid.nodes),
                // Up and down a chain.
                sent: if grid.local > 1 { 2.0 } else { 0.0 },
                through_nics: tree_share(grid.nodes),
                kept: 0.0,
            },
            // Up to four ranks a ring is as fast, and the sweeps show that NCCL prefers it.
            DeviceAlgorithm::Nvls if !many && ranks > 4 && reduces => DeviceWork {
                local_hops: 1,
                network_hops: 0,
                sent: 1.0,
                through_nics: 0.0,
                kept: 0.0,
            },
            DeviceAlgorithm::NvlsTree if many && grid.local > 4 && reduces => DeviceWork {
                local_hops: 1,
                network_hops: 2 * depth(grid.nodes),
                sent: 1.0,
                through_nics: tree_share(grid.nodes),
                kept: 0.0,
            },
            DeviceAlgorithm::Pat if grid.local == 1 && many && scatters => DeviceWork {
                local_hops: 0,
                network_hops: depth(grid.nodes),
                sent: 0.0,
                through_nics: (n - 1.0) / n,
                kept: 1.0 / n,
            },
            DeviceAlgorithm::Rail if grid.is_deep() && reduces => DeviceWork {
                local_hops: 2 * (grid.local - 1),
                network_hops: 2 * (grid.nodes - 1),
                sent: 2.0 * (local - 1.0) / local,
                through_nics: 2.0 * (nodes - 1.0) / nodes,
                kept: 1.0 / local,
            },
            DeviceAlgorithm::Exchange => {
                let (peers, sent) = match collective {
                    Collective::AllToAll { .. } => (ranks - 1, (n - 1.0) / n),
                    Collective::Gather { .. } | Collective::Scatter { .. } => (ranks - 1, (n - 1.0) / n),
                    Collective::SendReceive { .. } => (1, 1.0),
                    _ => return None,
                };
                // Of everything that a rank sends, this much goes to other domains; all ranks of a domain do so.
                let away = if many { (n - local) / (n - 1.0) } else { 0.0 };
                let network_hops = if many { grid.nodes - 1 } else { 0 }.min(peers);
                DeviceWork {
                    local_hops: peers - network_hops,
                    network_hops,
                    sent: sent * (1.0 - away),
                    through_nics: sent * away * local,
                    kept: match collective {
                        Collective::SendReceive { .. } => 0.0,
                        _ => 1.0 / n,
                    },
                }
            }
            _ => return None,
        })
    }

    pub fn hops(&self) -> u32 {
        self.local_hops + self.network_hops
    }
}

/// Levels of a binary tree of so many nodes.
fn depth(nodes: u32) -> u32 {
    nodes.max(1).next_power_of_two().trailing_zeros()
}

/// What a domain sends in two complementary trees: to its parent and, where it is inside one of them, to two children.
fn tree_share(nodes: u32) -> f64 {
    match nodes {
        0 | 1 => 0.0,
        2 => 1.0,
        _ => 2.0,
    }
}
