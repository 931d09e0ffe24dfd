//! Rails: which device, which port of it, and which of that port's addresses.
//!
//! A port has many addresses, and on Ethernet the choice decides whether packets are routed at all. What sysfs tells is enough to
//! choose; the device is opened to see whether it can be.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::Bandwidth;
use weft_sys::verbs as sys;
use weft_sys::verbs::LoadError;

use super::device::{Device, DeviceError};
use super::library::Library;
use crate::discover::{self, Gid, GidKind, LinkLayer, PortState, RdmaDevice, RdmaKind, RdmaPort, Reason};

/// Which rails to use. The default is all, each with the address that suits it best.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RailOptions {
    /// Devices (`mlx5_0`) and ports of devices (`mlx5_0:1`). Empty means all.
    pub devices: Vec<String>,
    /// The index of the address, on every port.
    pub gid_index: Option<u8>,
}

/// A port that can be used, under one of its addresses.
#[derive(Clone, Debug)]
pub struct Rail {
    pub device: Arc<Device>,
    pub port: u8,
    pub gid: Gid,
    pub link_layer: LinkLayer,
    /// As the hardware says.
    pub bandwidth: Option<Bandwidth>,
    pub mtu: Mtu,
    /// The subnet manager's address for the port; zero on Ethernet.
    pub lid: u16,
    /// The largest message, in bytes.
    pub message_bytes_max: u32,
    pub numa: Option<u16>,
    pub pci: Option<String>,
}

/// The largest payload of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    Bytes256,
    Bytes512,
    Bytes1024,
    Bytes2048,
    Bytes4096,
}

/// All ports that were asked for: those that can be used, and why not the others.
#[derive(Debug, Default)]
pub struct Survey {
    pub rails: Vec<Rail>,
    pub refused: Vec<RefusedRail>,
}

/// A port that cannot be used.
#[derive(Debug)]
pub struct RefusedRail {
    pub device: String,
    /// `None` where it is the device that cannot be used.
    pub port: Option<u8>,
    pub why: RailRefusal,
}

/// Why a port cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RailRefusal {
    #[error("the port is {0}")]
    Inactive(PortState),
    #[error("the port has no RoCE v2 address")]
    NoRoceV2,
    #[error("the port has no address at index {index}")]
    NoSuchGid { index: u8 },
    #[error("the port has no address at all")]
    NoGid,
    #[error("the port has no LID: no subnet manager has seen it")]
    NoLid,
    #[error("its queue pairs are connected by iWARP's own means, which are not used here")]
    Iwarp,
    #[error("its link layer is neither InfiniBand nor Ethernet")]
    UnknownLinkLayer,
    #[error("it reports an MTU of code {0}, which means nothing")]
    UnknownMtu(u32),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why there is no RDMA here.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerbsUnavailable {
    #[error(transparent)]
    Library(#[from] LoadError),
    #[error("there is no RDMA device: {0}")]
    NoDevice(Reason),
    #[error("there is no RDMA device or port `{wanted}`")]
    NoSuchDevice { wanted: String },
    #[error("no RDMA port can be used: {}", list(.refused))]
    NoUsablePort { refused: Vec<RefusedRail> },
}

/// The rails of this machine, by device and port. At least one, or the reason why there is none.
pub fn rails(options: &RailOptions) -> Result<Vec<Rail>, VerbsUnavailable> {
    let Survey { rails, refused } = survey(options)?;
    if rails.is_empty() {
        return Err(VerbsUnavailable::NoUsablePort { refused });
    }
    Ok(rails)
}

/// Every port that the options name, with what came of trying to use it.
pub fn survey(options: &RailOptions) -> Result<Survey, VerbsUnavailable> {
    let devices = discover::rdma_devices().map_err(VerbsUnavailable::NoDevice)?;
    if let Some(wanted) = options.devices.iter().find(|wanted| !is_there(wanted, &devices)) {
        return Err(VerbsUnavailable::NoSuchDevice { wanted: wanted.clone() });
    }
    let library = Library::load()?;
    let mut survey = Survey::default();
    for device in &devices {
        survey.add(library, device, options);
    }
    Ok(survey)
}

impl Survey {
    fn add(&mut self, library: Library, device: &RdmaDevice, options: &RailOptions) {
        let ports: Vec<&RdmaPort> = device.ports.iter().filter(|port| options.names(device, port)).collect();
        if ports.is_empty() {
            return;
        }
        let opened = match device.kind {
            RdmaKind::Iwarp => Err(RailRefusal::Iwarp),
            _ => Device::open(library, &device.name).map_err(RailRefusal::from),
        };
        let opened = opened.and_then(|opened| {
            if opened.is_iwarp() {
                Err(RailRefusal::Iwarp)
            } else {
                Ok(opened)
            }
        });
        let opened = match opened {
            Ok(opened) => opened,
            Err(why) => {
                return self.refused.push(RefusedRail {
                    device: device.name.clone(),
                    port: None,
                    why,
                });
            }
        };
        for port in ports {
            match rail(&opened, device, port, options) {
                Ok(rail) => self.rails.push(rail),
                Err(why) => self.refused.push(RefusedRail {
                    device: device.name.clone(),
                    port: Some(port.number),
                    why,
                }),
            }
        }
    }
}

impl RailOptions {
    fn names(&self, device: &RdmaDevice, port: &RdmaPort) -> bool {
        self.devices.is_empty() || self.devices.iter().any(|wanted| is_named(wanted, device, port))
    }
}

impl Rail {
    /// What tells it from the other rails of this machine, `mlx5_0:1`.
    pub fn name(&self) -> String {
        format!("{}:{}", self.device.name(), self.port)
    }
}

impl Mtu {
    pub fn bytes(self) -> usize {
        128 << self.code()
    }

    /// As attributes of ports and queue pairs have it.
    pub fn code(self) -> sys::ibv_mtu {
        match self {
            Mtu::Bytes256 => sys::IBV_MTU_256,
            Mtu::Bytes512 => sys::IBV_MTU_512,
            Mtu::Bytes1024 => sys::IBV_MTU_1024,
            Mtu::Bytes2048 => sys::IBV_MTU_2048,
            Mtu::Bytes4096 => sys::IBV_MTU_4096,
        }
    }

    pub fn from_code(code: sys::ibv_mtu) -> Option<Mtu> {
        Some(match code {
            sys::IBV_MTU_256 => Mtu::Bytes256,
            sys::IBV_MTU_512 => Mtu::Bytes512,
            sys::IBV_MTU_1024 => Mtu::Bytes1024,
            sys::IBV_MTU_2048 => Mtu::Bytes2048,
            sys::IBV_MTU_4096 => Mtu::Bytes4096,
            _ => return None,
        })
    }

    pub fn from_bytes(bytes: usize) -> Option<Mtu> {
        let all = [
            Mtu::Bytes256,
            Mtu::Bytes512,
            Mtu::Bytes1024,
            Mtu::Bytes2048,
            Mtu::Bytes4096,
        ];
        all.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
}

impl fmt::Display for RefusedRail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}: {}", self.device, self.why),
            None => write!(f, "{}: {}", self.device, self.why),
        }
    }
}

/// The address to use: the one that was asked for, or the one that reaches furthest.
pub fn choose_gid(port: &RdmaPort, wanted: Option<u8>) -> Result<&Gid, RailRefusal> {
    if let Some(index) = wanted {
        let found = port.gids.iter().find(|gid| gid.index == index);
        return found.ok_or(RailRefusal::NoSuchGid { index });
    }
    match port.link_layer {
        LinkLayer::Infiniband => port.gids.iter().find(|gid| gid.index == 0).ok_or(RailRefusal::NoGid),
        LinkLayer::Ethernet => {
            let reaching = port.gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
            let best = reaching.min_by_key(|gid| (gid.reach(), gid.index));
            best.ok_or(if port.gids.is_empty() {
                RailRefusal::NoGid
            } else {
                RailRefusal::NoRoceV2
            })
        }
        LinkLayer::Unknown => Err(RailRefusal::UnknownLinkLayer),
    }
}

fn rail(
    opened: &Arc<Device>,
    device: &RdmaDevice,
    port: &RdmaPort,
    options: &RailOptions,
) -> Result<Rail, RailRefusal> {
    if port.state != PortState::Active {
        return Err(RailRefusal::Inactive(port.state));
    }
    let gid = choose_gid(port, options.gid_index)?.clone();
    let now = opened.port(port.number)?;
    if now.state != sys::IBV_PORT_ACTIVE {
        return Err(RailRefusal::Inactive(PortState::Down));
    }
    if port.link_layer == LinkLayer::Infiniband && now.lid == 0 {
        return Err(RailRefusal::NoLid);
    }
    Ok(Rail {
        device: Arc::clone(opened),
        port: port.number,
        gid,
        link_layer: port.link_layer,
        bandwidth: port.bandwidth,
        mtu: Mtu::from_code(now.active_mtu).ok_or(RailRefusal::UnknownMtu(now.active_mtu))?,
        lid: now.lid,
        message_bytes_max: now.max_msg_sz,
        numa: device.numa,
        pci: device.pci.clone(),
    })
}

fn is_there(wanted: &str, devices: &[RdmaDevice]) -> bool {
    let ports = devices
        .iter()
        .flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    ports.into_iter().any(|(device, port)| is_named(wanted, device, port))
}

fn is_named(wanted: &str, device: &RdmaDevice, port: &RdmaPort) -> bool {
    match wanted.rsplit_once(':') {
        Some((name, number)) => name == device.name && number.parse() == Ok(port.number),
        None => wanted == device.name,
    }
}

fn list(refused: &[RefusedRail]) -> String {
    let refused: Vec<String> = refused.iter().map(ToString::to_string).collect();
    refused.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv6Addr;

    fn port(link_layer: LinkLayer, gids: &[(u8, &str, GidKind)]) -> RdmaPort {
        let gid = |(index, address, kind): &(u8, &str, GidKind)| Gid {
            index: *index,
            address: address.parse().unwrap(),
            kind: *kind,
            interface: None,
        };
        RdmaPort {
            number: 1,
            state: PortState::Active,
            link_layer,
            bandwidth: None,
            lid: 0,
            gids: gids.iter().map(gid).collect(),
        }
    }

    #[test]
    fn on_ethernet_the_address_that_reaches_furthest_is_chosen() {
        use GidKind::{InfinibandOrRoceV1 as V1, RoceV2 as V2};
        let all = [
            (0, "fe80::1", V1),
            (1, "fe80::1", V2),
            (2, "::ffff:169.254.3.4", V2),
            (3, "2001:db8::7", V1),
            (4, "2001:db8::7", V2),
            (5, "::ffff:10.0.0.1", V1),
            (6, "::ffff:10.0.0.1", V2),
            (7, "::ffff:10.0.1.1", V2),
        ];
        let chosen = |count: usize| choose_gid(&port(LinkLayer::Ethernet, &all[..count]), None).map(|gid| gid.index);
        assert_eq!(chosen(8).unwrap(), 6);
        assert_eq!(chosen(6).unwrap(), 4);
        assert_eq!(chosen(4).unwrap(), 1);
        assert!(matches!(chosen(1), Err(RailRefusal::NoRoceV2)));
        assert!(matches!(chosen(0), Err(RailRefusal::NoGid)));
    }

    #[test]
    fn an_index_that_was_asked_for_is_taken_or_refused() {
        let port = port(LinkLayer::Ethernet, &[(3, "fe80::1", GidKind::InfinibandOrRoceV1)]);
        assert_eq!(choose_gid(&port, Some(3)).unwrap().index, 3);
        assert!(matches!(
            choose_gid(&port, Some(0)),
            Err(RailRefusal::NoSuchGid { index: 0 })
        ));
    }

    #[test]
    fn infiniband_uses_its_first_address() {
        let ib = GidKind::InfinibandOrRoceV1;
        let port = port(
            LinkLayer::Infiniband,
            &[(0, "fe80::ec0d:9a03:78:1", ib), (1, "2001:db8::1", ib)],
        );
        assert_eq!(choose_gid(&port, None).unwrap().index, 0);
    }

    #[test]
    fn devices_are_named_with_and_without_their_port() {
        let port = port(LinkLayer::Ethernet, &[]);
        let device = RdmaDevice {
            name: "mlx5_0".to_owned(),
            kind: RdmaKind::Infiniband,
            driver: None,
            firmware: None,
            pci: None,
            numa: None,
            ports: vec![port.clone()],
        };
        for (wanted, named) in [
            ("mlx5_0", true),
            ("mlx5_0:1", true),
            ("mlx5_0:2", false),
            ("mlx5_1", false),
            (":", false),
        ] {
            assert_eq!(is_named(wanted, &device, &port), named, "{wanted}");
        }
    }

    #[test]
    fn an_mtu_has_a_code_and_a_size() {
        for code in 1..=5 {
            let mtu = Mtu::from_code(code).unwrap();
            assert_eq!((mtu.code(), Mtu::from_bytes(mtu.bytes())), (code, Some(mtu)));
        }
        assert_eq!(Mtu::Bytes4096.bytes(), 4096);
        assert_eq!(
            (Mtu::from_code(0), Mtu::from_code(6), Mtu::from_bytes(1500)),
            (None, None, None)
        );
    }

    proptest! {
        #[test]
        fn a_choice_is_never_worse_than_another(
            entries in prop::collection::vec((any::<u8>(), any::<u128>(), 0..3u8), 0..20),
        ) {
            let mut port = port(LinkLayer::Ethernet, &[]);
            port.gids = entries.into_iter().map(|(index, bits, kind)| Gid {
                index,
                address: Ipv6Addr::from(bits),
                kind: [GidKind::InfinibandOrRoceV1, GidKind::RoceV2, GidKind::Unknown][usize::from(kind)],
                interface: None,
            }).collect();
            match choose_gid(&port, None) {
                Ok(chosen) => {
                    prop_assert_eq!(chosen.kind, GidKind::RoceV2);
                    let others = port.gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
                    prop_assert!(others.into_iter().all(|gid| chosen.reach() <= gid.reach()));
                }
                Err(_) => prop_assert!(port.gids.iter().all(|gid| gid.kind != GidKind::RoceV2)),
            }
        }
    }

    #[test]
    #[ignore = "needs an RDMA device"]
    fn the_rails_of_this_machine_are_found_and_can_be_opened() {
        use super::super::device::ProtectionDomain;
        let rails = rails(&RailOptions::default()).unwrap();
        for rail in &rails {
            eprintln!("{}: {rail:?}", rail.name());
            let domain = ProtectionDomain::new(&rail.device).unwrap();
            assert!(rail.device.attributes().max_qp > 0);
            assert_eq!(rail.device.next_event().unwrap(), None);
            drop(domain);
        }
        let first = rails[0].name();
        let options = RailOptions {
            devices: vec![first.clone()],
            gid_index: Some(rails[0].gid.index),
        };
        let again = super::rails(&options).unwrap();
        assert_eq!((again.len(), again[0].name()), (1, first));
        let options = RailOptions {
            devices: vec!["nobody7".to_owned()],
            gid_index: None,
        };
        assert!(matches!(
            super::rails(&options),
            Err(VerbsUnavailable::NoSuchDevice { .. })
        ));
        let options = RailOptions {
            devices: Vec::new(),
            gid_index: Some(200),
        };
        assert!(matches!(
            super::rails(&options),
            Err(VerbsUnavailable::NoUsablePort { .. })
        ));
    }
}
