//! What a chosen algorithm and protocol cost on a system: hops, bytes, and the filling of pipelines.

use super::{DeviceAlgorithm, DeviceEstimate, DeviceModel, DeviceWork, Protocol, tuner};
use weft_plan::algorithms::Grid;
use weft_plan::collective::Collective;
use weft_plan::units::{Bandwidth, Picos};

/// Messages up to the first size go over one channel, from the second on over all.
const SPREAD: (f64, f64) = (8192.0, 32768.0);
/// The same through NICs, of what one rank sends in a step.
const NETWORK_SPREAD: (f64, f64) = (2048.0, 32768.0);
const LL128_DATA: f64 = 120.0 / 128.0;
/// LL sends a flag with every piece of data of the same size.
const LL_DATA: f64 = 0.5;

/// In seconds.
struct Price {
    latency: f64,
    transfer: f64,
}

pub(super) fn price(
    device: &DeviceModel<'_>,
    collective: Collective,
    bytes: f64,
    algorithm: DeviceAlgorithm,
    protocol: Protocol,
) -> DeviceEstimate {
    let work = DeviceWork::of(algorithm, collective, device.grid).expect("what was chosen is possible");
    let launch = device.system.collectives.launch.as_secs_f64();
    let terms = Terms { device, work, bytes };
    let mut price = match algorithm {
        DeviceAlgorithm::Ring | DeviceAlgorithm::Tree | DeviceAlgorithm::Pat => terms.stepwise(algorithm, protocol),
        DeviceAlgorithm::Nvls | DeviceAlgorithm::NvlsTree => terms.in_switch(),
        DeviceAlgorithm::Rail => terms.rail(),
        DeviceAlgorithm::Exchange => terms.exchange(),
    };
    price.latency += launch;
    DeviceEstimate {
        time: time(price.latency + price.transfer),
        algorithm,
        protocol,
        hops: work.hops(),
        latency: time(price.latency),
        transfer: time(price.transfer),
    }
}

struct Terms<'a> {
    device: &'a DeviceModel<'a>,
    work: DeviceWork,
    bytes: f64,
}

impl Terms<'_> {
    fn stepwise(&self, algorithm: DeviceAlgorithm, protocol: Protocol) -> Price {
        let Terms { device, work, bytes } = self;
        let system = device.system;
        let constants = &system.collectives;
        let network = &system.scale_out.hops;
        let tree = algorithm == DeviceAlgorithm::Tree;
        let hop_factor = if tree { tuner::tree_hop(protocol) } else { 1.0 };
        let local_hops = f64::from(work.local_hops);
        let spread = ramp(*bytes, SPREAD);
        // A tree is a pipeline whose messages grow with the data; a ring's step has its share of it.
        let step_bytes = if tree {
            *bytes
        } else {
            bytes / f64::from(device.grid.ranks())
        };
        let network_hop = |hop: Picos| {
            let spread = network.spread.as_secs_f64() * ramp(step_bytes, NETWORK_SPREAD);
            f64::from(work.network_hops) * (hop.as_secs_f64() + spread)
        };
        let sent = work.sent * bytes;
        let through_nics = work.through_nics * bytes;
        let link = self.link();
        match protocol {
            Protocol::Ll => {
                let ll = &constants.ll;
                let share = tuner::ll_between_nodes(system.gpu.generation, device.grid.nodes);
                let bandwidth = per_second(ll.bandwidth) * self.beyond_pair() * share;
                let hop = ll.hop.as_secs_f64() * hop_factor;
                let transfer = (sent / bandwidth).max(through_nics / (self.nics() * LL_DATA));
                let narrow = local_hops * hop;
                let wide =
                    spread * ll.spread_start.as_secs_f64() + local_hops * (hop + spread * ll.spread_hop.as_secs_f64());
                // The one is waited for while the other goes on.
                Price {
                    latency: wide + network_hop(network.ll),
                    transfer: (narrow + transfer - wide).max(0.0),
                }
            }
            Protocol::Ll128 => Price {
                latency: local_hops * constants.ll128.hop.as_secs_f64() * hop_factor + network_hop(network.ll128),
                transfer: (sent / (constants.ll128.efficiency * link)).max(through_nics / (self.nics() * LL128_DATA)),
            },
            Protocol::Simple => {
                let simple = &constants.simple;
                let share = bytes / f64::from(device.grid.ranks());
                let filled = match device.grid.nodes {
                    0 | 1 => 0.0,
                    _ => system.scale_out.fill.seconds(*bytes),
                };
                Price {
                    latency: simple.start.as_secs_f64()
                        + local_hops * simple.hop.as_secs_f64() * hop_factor
                        + network_hop(network.simple)
                        + simple.fill.seconds(share)
                        + filled,
                    transfer: (sent / (simple.efficiency * link)).max(through_nics / self.nics())
                        + work.kept * bytes / per_second(simple.copy),
                }
            }
        }
    }

    fn in_switch(&self) -> Price {
        let Terms { device, work, bytes } = self;
        let system = device.system;
        let Some(switch) = &system.collectives.in_switch else {
            return self.stepwise(DeviceAlgorithm::Ring, Protocol::Simple);
        };
        let (mut latency, nics) = match device.grid.nodes {
            0 | 1 => (0.0, 0.0),
            _ => (
                system.scale_out.fill.seconds(*bytes),
                work.through_nics * bytes / self.nics(),
            ),
        };
        latency += switch.start.as_secs_f64()
            + switch.fill.seconds(*bytes)
            + f64::from(work.network_hops) * system.scale_out.hops.simple.as_secs_f64();
        Price {
            latency,
            transfer: (work.sent * bytes / (switch.efficiency * self.link())).max(nics),
        }
    }

    /// A ring within each domain, and one along each rail, one after the other.
    fn rail(&self) -> Price {
        let Terms { device, bytes, .. } = self;
        let Grid { nodes, local } = device.grid;
        let part = |grid: Grid, bytes: f64| {
            let device = DeviceModel {
                system: device.system,
                grid,
            };
            let work = DeviceWork::of(DeviceAlgorithm::Ring, Collective::AllReduce, grid);
            work.map_or(
                Price {
                    latency: 0.0,
                    transfer: 0.0,
                },
                |work| {
                    let terms = Terms {
                        device: &device,
                        work,
                        bytes,
                    };
                    terms.stepwise(DeviceAlgorithm::Ring, Protocol::Simple)
                },
            )
        };
        let within = part(Grid { nodes: 1, local }, *bytes);
        let between = part(Grid { nodes, local: 1 }, bytes / f64::from(local));
        Price {
            latency: within.latency + between.latency,
            transfer: within.transfer + between.transfer,
        }
    }

    fn exchange(&self) -> Price {
        let Terms { device, work, bytes } = self;
        let system = device.system;
        let exchange = &system.collectives.exchange;
        let message = bytes / f64::from(device.grid.ranks());
        let large = exchange.large_bytes.0 as f64;
        let mut latency = exchange.start.as_secs_f64()
            + f64::from(work.hops()) * exchange.peer.as_secs_f64()
            + ramp(message, (large / 4.0, large)) * exchange.large_start.as_secs_f64()
            + exchange.fill.seconds(message);
        if work.network_hops > 0 {
            // Messages to all peers are under way at once.
            latency += system.scale_out.hops.simple.as_secs_f64();
        }
        Price {
            latency,
            transfer: (work.sent * bytes / (exchange.efficiency * self.link()))
                .max(work.through_nics * bytes / self.nics())
                + work.kept * bytes / per_second(exchange.copy),
        }
    }

    /// Bytes a second of one GPU's scale-up link.
    fn link(&self) -> f64 {
        per_second(self.device.system.scale_up.bandwidth) * self.beyond_pair()
    }

    fn beyond_pair(&self) -> f64 {
        match self.device.grid.local {
            0..=2 => 1.0,
            _ => self.device.system.scale_up.beyond_pair.unwrap_or(1.0),
        }
    }

    /// Bytes a second of the NICs that the ranks of one domain have.
    fn nics(&self) -> f64 {
        let system = self.device.system;
        per_second(system.nic_share()) * f64::from(self.device.grid.local) * system.scale_out.efficiency
    }
}

fn per_second(bandwidth: Bandwidth) -> f64 {
    bandwidth.bytes_per_sec().max(1) as f64
}

/// From 0 at the first size to 1 at the second, in the logarithm.
fn ramp(bytes: f64, (low, high): (f64, f64)) -> f64 {
    ((bytes / low).max(1e-9).log2() / (high / low).log2()).clamp(0.0, 1.0)
}

fn time(seconds: f64) -> Picos {
    Picos::from_ps((seconds * 1e12).round() as u64)
}
