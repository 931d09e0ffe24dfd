//! Network interfaces.

use std::net::IpAddr;

use weft_plan::platform::{Nic, NicKind};
use weft_plan::{Bandwidth, Bytes};

use super::tree::Tree;
use super::{Absent, Feature};

const NICS_FIX: &str = "only shared memory works; mount sysfs at /sys to see the interfaces";

pub(super) fn find(sys: &Tree, addresses: &[(String, IpAddr)], absent: &mut Vec<Absent>) -> Vec<Nic> {
    match sys.list_some("class/net") {
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
    }
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
