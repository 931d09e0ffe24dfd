//! What the library and the devices themselves say of RDMA here, beyond what sysfs tells: for `weft doctor`.

use weft_plan::Bytes;
use weft_sys::verbs::{LIBRARY_FILE, LoadError};

use super::device::DeviceError;
use super::library::Library;
use super::rail::{Mtu, Rail, RailOptions, RailRefusal, RefusedRail, Survey, VerbsUnavailable, survey};
use crate::discover::{Absent, Feature, LinkLayer, RdmaDevice, Reason};

const LIBRARY_FIX: &str = "apt install libibverbs1 ibverbs-providers (dnf install libibverbs)";
const OLD_FIX: &str = "install a newer rdma-core; what has no RDMA goes over TCP";
const DRIVER_FIX: &str = "apt install ibverbs-providers, or the vendor's user-space driver";
const OPEN_FIX: &str = "give this user /dev/infiniband/uverbs*; in a container, --device /dev/infiniband";
const ETHERNET_MTU_FIX: &str =
    "ip link set dev … mtu 9000 (4200 at least) on both ends and on the switches between them";
const INFINIBAND_MTU_FIX: &str = "let the subnet manager allow an MTU of 4096 (opensm: mtu=5 in partitions.conf)";
const DMA_BUF_FIX: &str = "install libibverbs 1.12 or later (rdma-core 34), or modprobe nvidia-peermem";
/// Below it, a packet's headers and its processing weigh more than they need to.
const MTU_WANTED: Mtu = Mtu::Bytes4096;

/// What came of opening every RDMA device.
#[derive(Debug, Default)]
pub struct Checkup {
    pub rails: Vec<Rail>,
    /// Whether the library can register memory by a dma-buf descriptor. Whether a device can is known when it is asked to.
    pub dma_buf: bool,
    pub absent: Vec<Absent>,
}

/// Opens every device that sysfs lists. With none, there is nothing to check.
pub fn checkup(devices: &[RdmaDevice]) -> Checkup {
    let mut checkup = Checkup::default();
    if devices.is_empty() {
        return checkup;
    }
    match survey(&RailOptions::default()) {
        Ok(survey) => checkup.take(survey),
        Err(VerbsUnavailable::Library(error)) => checkup.absent.push(missing_library(&error)),
        // The devices went away since they were listed.
        Err(_) => {}
    }
    checkup
}

impl Checkup {
    fn take(&mut self, survey: Survey) {
        self.dma_buf = Library::load().is_ok_and(|library| library.raw().ibv_reg_dmabuf_mr.is_some());
        if !self.dma_buf {
            self.absent.push(Absent {
                what: Feature::GpuDirect,
                why: Reason::OldLibrary {
                    file: LIBRARY_FILE,
                    symbol: "ibv_reg_dmabuf_mr",
                },
                fix: DMA_BUF_FIX,
            });
        }
        self.absent.extend(survey.refused.iter().filter_map(unopened));
        let small = survey
            .rails
            .iter()
            .filter_map(|rail| small_packets(rail.name(), rail.link_layer, rail.mtu));
        self.absent.extend(small);
        self.rails = survey.rails;
    }
}

fn missing_library(error: &LoadError) -> Absent {
    let (why, fix) = match error {
        LoadError::TooOld { symbol } => (
            Reason::OldLibrary {
                file: LIBRARY_FILE,
                symbol,
            },
            OLD_FIX,
        ),
        _ => (Reason::NoLibrary { file: LIBRARY_FILE }, LIBRARY_FIX),
    };
    Absent {
        what: Feature::RdmaLibrary,
        why,
        fix,
    }
}

/// Only what sysfs did not tell: the rest is said already.
fn unopened(refused: &RefusedRail) -> Option<Absent> {
    let device = refused.device.clone();
    let (what, why, fix) = match &refused.why {
        RailRefusal::Device(DeviceError::NoSuchDevice { .. }) => {
            (Feature::RdmaLibrary, Reason::NoUserDriver { device }, DRIVER_FIX)
        }
        RailRefusal::Device(DeviceError::Refused { source, .. } | DeviceError::List(source)) => {
            let kind = source.kind();
            (Feature::Rdma, Reason::CannotOpen { device, kind }, OPEN_FIX)
        }
        _ => return None,
    };
    Some(Absent { what, why, fix })
}

fn small_packets(port: String, link_layer: LinkLayer, mtu: Mtu) -> Option<Absent> {
    (mtu < MTU_WANTED).then(|| Absent {
        what: Feature::RdmaMtu,
        why: Reason::SmallPackets {
            port,
            have: Bytes(mtu.bytes() as u64),
            wanted: Bytes(MTU_WANTED.bytes() as u64),
        },
        fix: match link_layer {
            LinkLayer::Infiniband => INFINIBAND_MTU_FIX,
            _ => ETHERNET_MTU_FIX,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn without_devices_nothing_is_missed() {
        let checkup = checkup(&[]);
        assert!(checkup.rails.is_empty() && checkup.absent.is_empty());
    }

    #[test]
    fn each_finding_says_what_to_do() {
        let old = missing_library(&LoadError::TooOld {
            symbol: "ibv_query_port",
        });
        assert!(
            old.to_string()
                .starts_with("RDMA library: libibverbs.so.1 has no ibv_query_port; install"),
            "{old}"
        );
        let refused = |why: RailRefusal| RefusedRail {
            device: "mlx5_0".to_owned(),
            port: None,
            why,
        };
        let closed = refused(RailRefusal::Device(DeviceError::Refused {
            device: "mlx5_0".to_owned(),
            call: "ibv_open_device",
            source: io::ErrorKind::PermissionDenied.into(),
        }));
        let closed = unopened(&closed).unwrap().to_string();
        assert!(
            closed.contains("mlx5_0 cannot be opened: permission denied; give this user"),
            "{closed}"
        );
        let strange = refused(RailRefusal::Device(DeviceError::NoSuchDevice {
            name: "mlx5_0".to_owned(),
        }));
        assert!(
            unopened(&strange)
                .unwrap()
                .to_string()
                .contains("apt install ibverbs-providers")
        );
        assert_eq!(unopened(&refused(RailRefusal::NoRoceV2)), None, "sysfs has told it");
        assert_eq!(
            small_packets("mlx5_0:1".to_owned(), LinkLayer::Ethernet, Mtu::Bytes4096),
            None
        );
        let small = small_packets("mlx5_0:1".to_owned(), LinkLayer::Ethernet, Mtu::Bytes1024)
            .unwrap()
            .to_string();
        assert!(
            small.contains("mlx5_0:1 carries at most 1 KiB a packet, where 4 KiB are possible; ip link set"),
            "{small}"
        );
    }

    #[test]
    #[ignore = "needs an RDMA device"]
    fn the_devices_of_this_machine_are_opened() {
        let devices = crate::discover::rdma_devices().unwrap();
        let checkup = checkup(&devices);
        eprintln!("{checkup:?}");
        assert!(!checkup.rails.is_empty() && checkup.dma_buf);
    }
}
