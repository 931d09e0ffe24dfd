//! What NCCL expects of each algorithm and protocol, by which it chooses.
//!
//! These are figures of NCCL's source (`src/graph/tuning.cc`, version 2.30), inputs of its choice and not measurements; that they choose
//! as NCCL did is checked by the sweeps in the ground truth. Times are microseconds here, and bandwidths gigabytes a second.

use super::{DeviceAlgorithm, DeviceModel, DeviceOptions, DeviceWork, Protocol};
use crate::system::{Generation, ScaleUpKind};
use weft_plan::collective::Collective;

/// By protocol: LL, LL128, Simple.
type ByProtocol = [f64; 3];

const BASE_TREE: ByProtocol = [6.8, 14.0, 8.4];
const BASE_RING: ByProtocol = [6.6, 14.0, 8.4];
const BASE_PAT: f64 = 8.0;
const NVLINK_TREE: ByProtocol = [0.6, 1.25, 4.0];
const NVLINK_RING: ByProtocol = [0.6, 1.9, 3.4];
const PCI_TREE: ByProtocol = [1.0, 1.9, 4.0];
const PCI_RING: ByProtocol = [1.0, 2.5, 5.7];
const NETWORK_TREE: ByProtocol = [5.0, 8.5, 14.0];
const NETWORK_RING: ByProtocol = [2.7, 4.0, 14.0];
const NVLS: f64 = 25.0;
const NETWORK_NVLS_TREE: f64 = 20.9;
const NETWORK_PAT: f64 = 14.0;
/// What a proxy takes for a message; a ring cannot hop faster.
const PROXY: f64 = 1.0;

/// Of one, two, and more nodes.
type ByNodes = [f64; 3];

/// What differs between generations.
struct Limits {
    /// The most that LL reaches.
    ll: ByNodes,
    /// The most that LL128 reaches in a ring, a channel.
    ring_ll128: f64,
    /// The most that a tree reaches, a channel.
    tree: ByNodes,
    /// What is left of a link's bandwidth in the switches.
    nvls: f64,
    channels: f64,
    /// Most sweeps on Blackwell (2.23, 2.27.3 and 2.29.2 of five versions) go from LL to Simple at once.
    chooses_ll128: bool,
}

const AMPERE: Limits = Limits {
    ll: [87.7, 22.5, 19.0],
    ring_ll128: 20.0,
    tree: [24.0, 23.6, 17.8],
    nvls: 0.0,
    channels: 24.0,
    chooses_ll128: true,
};
const HOPPER: Limits = Limits {
    ll: [141.0, 45.0, 35.0],
    ring_ll128: 36.7,
    tree: [38.7, 41.4, 36.0],
    nvls: 0.85,
    channels: 24.0,
    chooses_ll128: true,
};
const BLACKWELL: Limits = Limits {
    ll: [282.0, 90.0, 70.0],
    ring_ll128: 40.0,
    tree: [70.0, 42.8, 24.0],
    nvls: 0.74,
    channels: 32.0,
    chooses_ll128: false,
};

/// How far trees stay behind the model, for powers of two from 64 B up.
const TREE_CORRECTION: [[f64; 23]; 3] = [
    [
        1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0,
        1.0,
    ],
    [
        1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0,
        1.0,
    ],
    [
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9,
        0.9,
    ],
];

/// What the topology search finds of the scale-up bandwidth: 20.6 of the 25 GB/s of an NVLink, in whole channels.
const FOUND_NVLINK: f64 = 0.8;
/// The same of PCIe in a pair; half of it beyond, through the host bridges.
const FOUND_PCIE: f64 = 0.838;
const FOUND_BEYOND_PAIR: f64 = 0.5;
/// What a ring of more than one node takes longer by, once its messages are not tiny.
const RING_PLATEAU: f64 = 1.4;

/// The time that NCCL expects, in microseconds; `None` where it would not consider it.
pub(super) fn expected(
    device: &DeviceModel<'_>,
    collective: Collective,
    bytes: f64,
    (algorithm, protocol): (DeviceAlgorithm, Protocol),
    options: &DeviceOptions,
) -> Option<f64> {
    let work = DeviceWork::of(algorithm, collective, device.grid)?;
    let system = device.system;
    let limits = limits(system.gpu.generation);
    let p = protocol as usize;
    let nodes = device.grid.nodes;
    let by_nodes = nodes.clamp(1, 3) as usize - 1;
    let pcie = system.scale_up.kind == ScaleUpKind::Pcie;
    let in_switch = system.scale_up.in_network_reduction && system.collectives.in_switch.is_some();
    let only_simple = !matches!(algorithm, DeviceAlgorithm::Ring | DeviceAlgorithm::Tree);
    let by_itself = limits.chooses_ll128 || !options.protocols.is_empty();
    let impossible = (protocol == Protocol::Ll128 && (pcie || !by_itself))
        || (only_simple && protocol != Protocol::Simple)
        || (matches!(algorithm, DeviceAlgorithm::Nvls | DeviceAlgorithm::NvlsTree) && !in_switch);
    if impossible {
        return None;
    }
    let found = found(device);
    let local = f64::from(device.grid.local);
    let others = (local - 1.0) / local;
    let hops = |local: f64, network: f64| f64::from(work.local_hops) * local + f64::from(work.network_hops) * network;
    let (latency, bus) = match algorithm {
        DeviceAlgorithm::Ring => {
            let bus = match protocol {
                Protocol::Ll => limits.ll[by_nodes].min(found * 0.5),
                Protocol::Ll128 => (found * 120.0 / 128.0).min(limits.channels * limits.ring_ll128),
                Protocol::Simple => found,
            };
            let mut hop = if pcie { PCI_RING[p] } else { NVLINK_RING[p] };
            if nodes > 1 {
                hop = hop.max(if protocol == Protocol::Simple {
                    3.0 * PROXY
                } else {
                    PROXY
                });
            }
            let latency = BASE_RING[p] + hops(hop, NETWORK_RING[p]);
            let share = bytes / (limits.channels * f64::from(device.grid.ranks()));
            let plateau =
                nodes > 1 && protocol == Protocol::Simple && collective == Collective::AllReduce && share >= 64.0;
            (if plateau { latency * RING_PLATEAU } else { latency }, bus / work.sent)
        }
        DeviceAlgorithm::Tree => {
            let bus = (found * 0.92).min(limits.channels * limits.tree[by_nodes]);
            let bus = match protocol {
                Protocol::Ll => (bus / 3.8).min(limits.ll[by_nodes]),
                Protocol::Ll128 if nodes == 1 => bus * 7.0 / 9.0,
                Protocol::Ll128 => bus * 120.0 / 128.0,
                Protocol::Simple => bus,
            };
            let size = (bytes / 64.0).max(1.0).log2() as usize;
            let correction = TREE_CORRECTION[p].get(size).copied().unwrap_or(1.0);
            let hop = if pcie { PCI_TREE[p] } else { NVLINK_TREE[p] };
            (BASE_TREE[p] + hops(hop, NETWORK_TREE[p]), bus * 0.5 * correction)
        }
        DeviceAlgorithm::Nvls => (NVLS, found * limits.nvls),
        DeviceAlgorithm::NvlsTree => {
            let latency = NVLS + f64::from(work.network_hops) * NETWORK_NVLS_TREE;
            (latency, found * limits.nvls * others)
        }
        DeviceAlgorithm::Pat => (BASE_PAT + hops(0.0, NETWORK_PAT), found / work.through_nics),
        // Nothing else does what these do.
        DeviceAlgorithm::Rail | DeviceAlgorithm::Exchange => (0.0, found),
    };
    Some(latency + bytes / (bus * 1e3))
}

/// The part of LL's bandwidth that is left between nodes.
pub(super) fn ll_between_nodes(generation: Generation, nodes: u32) -> f64 {
    let ll = limits(generation).ll;
    ll[nodes.clamp(1, 3) as usize - 1] / ll[0]
}

/// How much longer, or shorter, a hop in a tree is than one in a ring.
pub(super) fn tree_hop(protocol: Protocol) -> f64 {
    NVLINK_TREE[protocol as usize] / NVLINK_RING[protocol as usize]
}

fn limits(generation: Generation) -> &'static Limits {
    match generation {
        Generation::Ampere | Generation::Ada | Generation::Battlemage => &AMPERE,
        Generation::Hopper => &HOPPER,
        Generation::Blackwell | Generation::BlackwellPcie => &BLACKWELL,
    }
}

/// The bandwidth that the topology search finds, of all channels together.
fn found(device: &DeviceModel<'_>) -> f64 {
    let system = device.system;
    let link = system.scale_up.bandwidth.bytes_per_sec() as f64 / 1e9;
    let local = match system.scale_up.kind {
        ScaleUpKind::Nvswitch => link * FOUND_NVLINK,
        ScaleUpKind::Pcie if device.grid.local > 2 => link * FOUND_PCIE * FOUND_BEYOND_PAIR,
        ScaleUpKind::Pcie => link * FOUND_PCIE,
    };
    let nics = system.nic_share().bytes_per_sec() as f64 / 1e9 * f64::from(device.grid.local);
    match device.grid {
        grid if grid.nodes <= 1 => local,
        grid if grid.local <= 1 => nics,
        // Two nodes are searched for what is within them.
        grid if grid.nodes == 2 => local,
        _ => local.min(nics),
    }
}
