//! RDMA devices, their ports, and the addresses of those, as sysfs tells them: without the library, and without opening anything.

use std::fmt;
use std::net::Ipv6Addr;

use weft_plan::Bandwidth;

use super::Reason;
use super::tree::Tree;

const FOLDER: &str = "class/infiniband";

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// As the kernel calls it, `mlx5_0`.
    pub name: String,
    pub kind: RdmaKind,
    pub driver: Option<String>,
    pub firmware: Option<String>,
    pub pci: Option<String>,
    pub numa: Option<u16>,
    /// By number.
    pub ports: Vec<RdmaPort>,
}

/// What a device speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RdmaKind {
    /// InfiniBand's transport, over whatever link layer the port has: InfiniBand or RoCE.
    Infiniband,
    /// RDMA over TCP.
    Iwarp,
    /// Something else, or nothing that sysfs tells.
    Other,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// From 1 on.
    pub number: u8,
    pub state: PortState,
    pub link_layer: LinkLayer,
    pub bandwidth: Option<Bandwidth>,
    /// The address that a subnet manager gave. Zero on Ethernet.
    pub lid: u16,
    /// By index; empty entries are left out.
    pub gids: Vec<Gid>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortState {
    Down,
    /// The link is up, and the subnet manager has not configured it yet.
    Init,
    Armed,
    Active,
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkLayer {
    Infiniband,
    Ethernet,
    Unknown,
}

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Where it stands in the port's table. Work requests name it by this, in eight bits.
    pub index: u8,
    pub address: Ipv6Addr,
    pub kind: GidKind,
    /// The network interface that it belongs to.
    pub interface: Option<String>,
}

/// Which packets go out under an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidKind {
    /// The kernel uses one word for both; the port's link layer tells them apart.
    InfinibandOrRoceV1,
    RoceV2,
    Unknown,
}

/// The RDMA devices of this tree, by name.
pub(super) fn find(sys: &Tree) -> Result<Vec<RdmaDevice>, Reason> {
    let names = sys.list_some(FOLDER)?;
    let named = names.into_iter().filter(|name| super::nics::is_name(name));
    Ok(named.map(|name| device(sys, name)).collect())
}

fn device(sys: &Tree, name: String) -> RdmaDevice {
    let folder = format!("{FOLDER}/{name}");
    let kind = match sys.read(&format!("{folder}/node_type")).as_deref() {
        Ok(text) if text.ends_with("CA") => RdmaKind::Infiniband,
        Ok(text) if text.ends_with("RNIC") => RdmaKind::Iwarp,
        _ => RdmaKind::Other,
    };
    let numbers = sys.list(&format!("{folder}/ports")).unwrap_or_default();
    let mut numbers: Vec<u8> = numbers.iter().filter_map(|number| number.parse().ok()).collect();
    numbers.sort_unstable();
    let ports: Vec<RdmaPort> = numbers.into_iter().map(|number| port(sys, &folder, number)).collect();
    // A software device has no hardware of its own: where it sits is where its interface's hardware sits.
    let mut link = format!("{folder}/device");
    if !sys.exists(&link) {
        let interface = ports
            .iter()
            .flat_map(|port| &port.gids)
            .find_map(|gid| gid.interface.as_ref());
        if let Some(interface) = interface {
            link = format!("class/net/{interface}/device");
        }
    }
    let known = |text: &String| !text.is_empty() && text != "0.0.0";
    RdmaDevice {
        kind,
        driver: sys.link_name(&format!("{folder}/device/driver")),
        firmware: sys.read(&format!("{folder}/fw_ver")).ok().filter(known),
        pci: sys.pci_address(&link),
        numa: sys.numa_node(&link),
        ports,
        name,
    }
}

fn port(sys: &Tree, device: &str, number: u8) -> RdmaPort {
    let folder = format!("{device}/ports/{number}");
    let word = |file: &str| sys.read(&format!("{folder}/{file}")).unwrap_or_default();
    RdmaPort {
        number,
        // `4: ACTIVE`
        state: match word("state").rsplit(' ').next() {
            Some("DOWN") => PortState::Down,
            Some("INIT") => PortState::Init,
            Some("ARMED") => PortState::Armed,
            Some("ACTIVE") => PortState::Active,
            _ => PortState::Unknown,
        },
        link_layer: match word("link_layer").as_str() {
            "InfiniBand" => LinkLayer::Infiniband,
            "Ethernet" => LinkLayer::Ethernet,
            _ => LinkLayer::Unknown,
        },
        bandwidth: rate(&word("rate")),
        lid: sys
            .hex(&format!("{folder}/lid"))
            .and_then(|lid| lid.try_into().ok())
            .unwrap_or(0),
        gids: (0..=u8::MAX).filter_map(|index| gid(sys, &folder, index)).collect(),
    }
}

fn gid(sys: &Tree, port: &str, index: u8) -> Option<Gid> {
    let address: Ipv6Addr = sys.value(&format!("{port}/gids/{index}")).ok()?;
    if address.is_unspecified() {
        return None;
    }
    let kind = match sys.read(&format!("{port}/gid_attrs/types/{index}")).as_deref() {
        Ok("RoCE v2") => GidKind::RoceV2,
        Ok("IB/RoCE v1") => GidKind::InfinibandOrRoceV1,
        _ => GidKind::Unknown,
    };
    let interface = sys.read(&format!("{port}/gid_attrs/ndevs/{index}")).ok();
    Some(Gid {
        index,
        address,
        kind,
        interface: interface.filter(|name| super::nics::is_name(name)),
    })
}

/// From `400 Gb/sec (4X NDR)`.
fn rate(text: &str) -> Option<Bandwidth> {
    let (number, unit) = text.split_once(' ')?;
    if !unit.starts_with("Gb/sec") {
        return None;
    }
    let rate: Bandwidth = format!("{number} Gb/s").parse().ok()?;
    (rate > Bandwidth::default()).then_some(rate)
}

impl RdmaPort {
    /// The network interfaces behind it, each once.
    pub fn interfaces(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.gids.iter().filter_map(|gid| gid.interface.as_deref()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PortState::Down => "down",
            PortState::Init => "initialising",
            PortState::Armed => "armed",
            PortState::Active => "active",
            PortState::Unknown => "in an unknown state",
        })
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkLayer::Infiniband => "InfiniBand",
            LinkLayer::Ethernet => "Ethernet",
            LinkLayer::Unknown => "unknown link layer",
        })
    }
}

impl fmt::Display for Gid {
    /// An IPv4 address that is mapped into the GID is shown as such.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address.to_ipv4_mapped() {
            Some(address) => address.fmt(f),
            None => self.address.fmt(f),
        }
    }
}
