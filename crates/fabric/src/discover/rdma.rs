//! RDMA devices, their ports, and the addresses of those, as sysfs tells them: without the library, and without opening anything.

use std::fmt;
use std::net::Ipv6Addr;

use weft_plan::Bandwidth;
use weft_plan::platform::{Gpu, Nic, NicKind};

use super::tree::Tree;
use super::{Absent, Feature, Reason};

const FOLDER: &str = "class/infiniband";

const NONE_FIX: &str = "TCP is used between machines; for RDMA load the device's driver (for example modprobe mlx5_ib)";
const PORT_FIX: &str = "bring the port up (ip link set … up, and a subnet manager on InfiniBand)";
const GID_FIX: &str = "give its interface an address (ip address add … dev …); the RoCE v2 address follows from it";
const LINK_FIX: &str = "fine within one subnet; to be routed, its interface needs an IPv4 or a global IPv6 address";
const IWARP_FIX: &str = "TCP is used over it; InfiniBand and RoCE devices are used by themselves";
const PEERMEM_FIX: &str =
    "modprobe nvidia-peermem; or, for dma-buf, NVIDIA's open kernel modules, Linux 5.12 and libibverbs 1.12";

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

/// [`find`], with the devices noted on their interfaces and what keeps them from being used.
pub(super) fn look(sys: &Tree, nics: &mut Vec<Nic>, absent: &mut Vec<Absent>) -> Vec<RdmaDevice> {
    let devices = find(sys).unwrap_or_else(|why| {
        absent.push(Absent {
            what: Feature::Rdma,
            why,
            fix: NONE_FIX,
        });
        Vec::new()
    });
    for device in &devices {
        attach(sys, device, nics);
        let found = judge(device);
        absent.extend(found.map(|(why, fix)| Absent {
            what: Feature::Rdma,
            why,
            fix,
        }));
    }
    devices
}

/// Whether RDMA devices reach the memory of GPUs by its address. Missed only where there are both.
pub(super) fn peer_memory(sys: &Tree, devices: &[RdmaDevice], gpus: &[Gpu], absent: &mut Vec<Absent>) -> bool {
    const MODULE: &str = "module/nvidia_peermem";
    let loaded = sys.exists(MODULE);
    if !loaded && !devices.is_empty() && !gpus.is_empty() {
        absent.push(Absent {
            what: Feature::GpuDirect,
            why: Reason::NotThere { path: sys.path(MODULE) },
            fix: PEERMEM_FIX,
        });
    }
    loaded
}

/// What keeps a device from being used, as far as it can be seen without opening it.
fn judge(device: &RdmaDevice) -> Option<(Reason, &'static str)> {
    if device.kind == RdmaKind::Iwarp {
        let device = device.name.clone();
        return Some((Reason::Iwarp { device }, IWARP_FIX));
    }
    let active: Vec<&RdmaPort> = device
        .ports
        .iter()
        .filter(|port| port.state == PortState::Active)
        .collect();
    if active.is_empty() {
        let device = device.name.clone();
        return Some((Reason::Down { device }, PORT_FIX));
    }
    let on_ethernet = active.into_iter().filter(|port| port.link_layer == LinkLayer::Ethernet);
    let mut shortcomings = on_ethernet.filter_map(|port| {
        let name = format!("{}:{}", device.name, port.number);
        let usable = port.gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
        match usable.map(Gid::reach).min() {
            None => Some((Reason::NoRoceV2 { port: name }, GID_FIX)),
            Some(Reach::Link) => Some((Reason::LinkOnly { port: name }, LINK_FIX)),
            Some(Reach::RoutableIpv4 | Reach::GlobalIpv6) => None,
        }
    });
    shortcomings.next()
}

/// Notes a device on the interfaces behind its ports, or as an interface of its own where it has none.
fn attach(sys: &Tree, device: &RdmaDevice, nics: &mut Vec<Nic>) {
    let of_device = sys
        .list(&format!("{FOLDER}/{}/device/net", device.name))
        .unwrap_or_default();
    let mut has_interface = false;
    for port in &device.ports {
        let of_port = port.interfaces();
        for nic in nics.iter_mut() {
            let is_its = match of_port.is_empty() {
                true => of_device.contains(&nic.name),
                false => of_port.contains(&nic.name.as_str()),
            };
            if is_its {
                nic.bandwidth = nic.bandwidth.or(port.bandwidth);
                nic.rdma = Some(device.name.clone());
                has_interface = true;
            }
        }
    }
    if !has_interface && !nics.iter().any(|nic| nic.name == device.name) {
        let active = device.ports.iter().find(|port| port.state == PortState::Active);
        nics.push(Nic {
            name: device.name.clone(),
            kind: NicKind::Infiniband,
            up: active.is_some(),
            bandwidth: active.or(device.ports.first()).and_then(|port| port.bandwidth),
            mtu: None,
            addresses: Vec::new(),
            numa: device.numa,
            pci: device.pci.clone(),
            rdma: Some(device.name.clone()),
        });
    }
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
    let entries = sys.list(&format!("{folder}/gids")).unwrap_or_default();
    let mut indices: Vec<u8> = entries.iter().filter_map(|index| index.parse().ok()).collect();
    indices.sort_unstable();
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
        gids: indices
            .into_iter()
            .filter_map(|index| gid(sys, &folder, index))
            .collect(),
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

/// How far an address reaches, furthest first. Data centres route IPv4 more often than not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reach {
    RoutableIpv4,
    GlobalIpv6,
    Link,
}

impl Gid {
    pub fn reach(&self) -> Reach {
        match self.address.to_ipv4_mapped() {
            Some(v4) if v4.is_link_local() || v4.is_loopback() || v4.is_unspecified() => Reach::Link,
            Some(_) => Reach::RoutableIpv4,
            None if self.address.is_unicast_link_local() || self.address.is_loopback() => Reach::Link,
            None => Reach::GlobalIpv6,
        }
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
