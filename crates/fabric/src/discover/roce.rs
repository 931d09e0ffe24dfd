//! What keeps RoCE from dropping packets, as far as it can be read: congestion marks and flow control.
//!
//! RDMA over Ethernet slows to a crawl where switches drop. Two things prevent it: senders that slow down when a switch marks
//! packets (ECN), and ports that pause a priority (PFC). Each driver tells of them in its own place, or not at all.

use std::fmt;

use super::rdma::{LinkLayer, PortState, RdmaDevice, RdmaPort};
use super::tree::Tree;
use super::{Absent, Feature, Reason};

/// What is known of one port on Ethernet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceHints {
    /// `mlx5_0:1`
    pub port: String,
    pub interface: Option<String>,
    /// Whether the card slows down on marked packets.
    pub congestion_control: Priorities,
    /// Whether a priority is paused in the place of dropped.
    pub flow_control: Priorities,
    /// Counts since the driver was loaded, of those that the driver has.
    pub counters: Vec<(&'static str, u64)>,
}

/// On which of the eight priorities something is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priorities {
    /// A bit for each; none means off.
    On(u8),
    /// The driver does not say.
    Unreadable,
}

/// Marks seen, and what loss leaves behind, by the names of the drivers that have them.
const COUNTERS: [&str; 8] = [
    "np_ecn_marked_roce_packets",
    "np_cnp_sent",
    "rp_cnp_handled",
    "out_of_sequence",
    "out_of_seq_request",
    "packet_seq_err",
    "rcvd_seq_err",
    "local_ack_timeout_err",
];

const FIX: &str =
    "turn ECN on for RoCE's priority on cards and switches (or PFC with `dcb pfc`); what is lost is sent again, slowly";

/// For each port that is up and on Ethernet. `paused` tells the priorities of an interface that are paused.
pub(super) fn find(sys: &Tree, devices: &[RdmaDevice], paused: impl Fn(&str) -> Option<u8>) -> Vec<RoceHints> {
    let ports = devices
        .iter()
        .flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let is_roce = |port: &RdmaPort| port.state == PortState::Active && port.link_layer == LinkLayer::Ethernet;
    let roce = ports.filter(|(_, port)| is_roce(port));
    roce.map(|(device, port)| hints(sys, device, port, &paused)).collect()
}

/// Says which ports nothing protects. A port whose driver does not say is no reason to worry anybody.
pub(super) fn judge(hints: &[RoceHints], absent: &mut Vec<Absent>) {
    let unprotected = hints.iter().filter(|hints| hints.is_unprotected());
    absent.extend(unprotected.map(|hints| Absent {
        what: Feature::LosslessEthernet,
        why: Reason::Unprotected {
            port: hints.port.clone(),
        },
        fix: FIX,
    }));
}

fn hints(sys: &Tree, device: &RdmaDevice, port: &RdmaPort, paused: impl Fn(&str) -> Option<u8>) -> RoceHints {
    let interface = port.interfaces().first().map(|name| (*name).to_owned());
    let folder = format!("class/infiniband/{}/ports/{}/hw_counters", device.name, port.number);
    let count = |name: &'static str| Some((name, sys.value(&format!("{folder}/{name}")).ok()?));
    let of_interface = interface.as_deref();
    RoceHints {
        port: format!("{}:{}", device.name, port.number),
        congestion_control: of_interface.map_or(Priorities::Unreadable, |name| congestion_control(sys, name)),
        flow_control: of_interface
            .and_then(paused)
            .map_or(Priorities::Unreadable, Priorities::On),
        counters: COUNTERS.into_iter().filter_map(count).collect(),
        interface,
    }
}

/// From a file for each priority, under `roce_np` (who sees marks and says so) and `roce_rp` (who slows down when told).
fn congestion_control(sys: &Tree, interface: &str) -> Priorities {
    let side = |side: &str| -> Option<u8> {
        let mut bits = 0;
        for priority in 0..8 {
            let on: u8 = sys
                .value(&format!("class/net/{interface}/ecn/{side}/enable/{priority}"))
                .ok()?;
            bits |= u8::from(on != 0) << priority;
        }
        Some(bits)
    };
    match (side("roce_np"), side("roce_rp")) {
        (Some(notifies), Some(reacts)) => Priorities::On(notifies & reacts),
        _ => Priorities::Unreadable,
    }
}

impl RoceHints {
    /// Nothing that can be read keeps the network from dropping.
    pub fn is_unprotected(&self) -> bool {
        self.congestion_control == Priorities::On(0) && self.flow_control == Priorities::On(0)
    }
}

impl fmt::Display for Priorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Priorities::Unreadable => f.write_str("could not be read"),
            Priorities::On(0) => f.write_str("off"),
            Priorities::On(u8::MAX) => f.write_str("on"),
            Priorities::On(bits) => {
                let on: Vec<String> = (0..8)
                    .filter(|bit| bits & (1 << bit) != 0)
                    .map(|bit: u8| bit.to_string())
                    .collect();
                write!(f, "on for priority {}", on.join(", "))
            }
        }
    }
}
