//! Network interfaces and the RDMA devices behind them.

use std::net::IpAddr;

use weft_plan::platform::{Nic, NicKind};
use weft_plan::{Bandwidth, Bytes};

use super::tree::Tree;
use super::{Absent, Feature, Reason};

const NICS_FIX: &str = "only shared memory works; mount sysfs at /sys to see the interfaces";
const RDMA_FIX: &str = "TCP is used between machines; for RDMA load the device's driver (for example modprobe mlx5_ib)";
const PORT_FIX: &str = "bring the port up (ip link set … up, and a subnet manager on InfiniBand)";

pub(super) fn find(sys: &Tree, addresses: &[(String, IpAddr)], absent: &mut Vec<Absent>) -> Vec<Nic> {
    let mut nics = match sys.list_some("class/net") {
        Ok(names) => names
            .into_iter()
            .filter(|name| is_name(name))
            .map(|name| interface(sys, name, addresses))
            .collect(),
        Err(why) => {
            absent.push(Absent {
                what: Feature::NetworkInterfaces,
                why,
                fix: NICS_FIX,
            });
            Vec::new()
        }
    };
    match sys.list_some("class/infiniband") {
        Ok(devices) => devices
            .into_iter()
            .filter(|name| is_name(name))
            .for_each(|device| attach(sys, device, &mut nics, absent)),
        Err(why) => absent.push(Absent {
            what: Feature::Rdma,
            why,
            fix: RDMA_FIX,
        }),
    }
    nics
}

/// What the kernel accepts as a name, and a platform file too.
pub(super) fn is_name(name: &str) -> bool {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    !name.is_empty() && !name.contains(bad)
}

fn interface(sys: &Tree, name: String, addresses: &[(String, IpAddr)]) -> Nic {
    let folder = format!("class/net/{name}");
    let file = |file: &str| format!("{folder}/{file}");
    let has_device = sys.exists(&file("device"));
    let kind = match sys.value::<u32>(&file("type")) {
        Ok(code) if code == u32::from(libc::ARPHRD_LOOPBACK) => NicKind::Loopback,
        Ok(code) if code == u32::from(libc::ARPHRD_INFINIBAND) => NicKind::Infiniband,
        _ if has_device => NicKind::Ethernet,
        _ => NicKind::Virtual,
    };
    let up = match sys.read(&file("operstate")).as_deref() {
        Ok("up") => true,
        // Loopback and some virtual interfaces have no state but their flags.
        Ok("unknown") => sys
            .hex(&file("flags"))
            .is_some_and(|flags| flags & libc::IFF_UP as u64 != 0),
        _ => false,
    };
    // In Mb/s; -1, or an error, where the hardware does not say.
    let megabits = sys.value::<u64>(&file("speed")).ok().filter(|speed| *speed > 0);
    let device = file("device");
    Nic {
        kind,
        up,
        bandwidth: megabits.and_then(|v| Bandwidth::from_bytes_per_sec(125_000).checked_mul(v)),
        mtu: sys.value(&file("mtu")).ok().map(Bytes),
        addresses: addresses
            .iter()
            .filter(|(of, _)| *of == name)
            .map(|(_, address)| *address)
            .collect(),
        numa: sys.numa_node(&device),
        pci: if has_device { sys.pci_address(&device) } else { None },
        rdma: None,
        name,
    }
}

/// Notes an RDMA device on its interface, or as an interface of its own where it has none.
fn attach(sys: &Tree, device: String, nics: &mut Vec<Nic>, absent: &mut Vec<Absent>) {
    let folder = format!("class/infiniband/{device}");
    let ports = sys.list(&format!("{folder}/ports")).unwrap_or_default();
    let is_active = |port: &&String| {
        sys.read(&format!("{folder}/ports/{port}/state"))
            .is_ok_and(|state| state.ends_with("ACTIVE"))
    };
    let active = ports.iter().find(is_active);
    if active.is_none() {
        absent.push(Absent {
            what: Feature::Rdma,
            why: Reason::Down { device: device.clone() },
            fix: PORT_FIX,
        });
    }
    let bandwidth = active
        .or(ports.first())
        .and_then(|port| sys.read(&format!("{folder}/ports/{port}/rate")).ok())
        .and_then(|rate| port_rate(&rate));

    let interfaces = sys.list(&format!("{folder}/device/net")).unwrap_or_default();
    if let Some(nic) = nics.iter_mut().find(|nic| interfaces.contains(&nic.name)) {
        nic.bandwidth = nic.bandwidth.or(bandwidth);
        nic.rdma = Some(device);
    } else if !nics.iter().any(|nic| nic.name == device) {
        let link = format!("{folder}/device");
        nics.push(Nic {
            name: device.clone(),
            kind: NicKind::Infiniband,
            up: active.is_some(),
            bandwidth,
            mtu: None,
            addresses: Vec::new(),
            numa: sys.numa_node(&link),
            pci: sys.pci_address(&link),
            rdma: Some(device),
        });
    }
}

/// From `400 Gb/sec (4X NDR)`.
fn port_rate(text: &str) -> Option<Bandwidth> {
    let (number, unit) = text.split_once(' ')?;
    if !unit.starts_with("Gb/sec") {
        return None;
    }
    let rate: Bandwidth = format!("{number} Gb/s").parse().ok()?;
    (rate > Bandwidth::default()).then_some(rate)
}
