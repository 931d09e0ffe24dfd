//! The RDMA devices of this machine: a table for people, and the same for programs.

use serde::Serialize;
use weft_fabric::discover::{Discovery, Gid, GidKind, LinkLayer, RdmaDevice, RdmaPort};
use weft_fabric::verbs::checkup::Checkup;

use crate::table::{Align, Table};

/// What is printed, and what `--json` has.
#[derive(Debug, Serialize)]
pub struct RdmaReport {
    ports: Vec<PortReport>,
    /// Whether NVIDIA's module for the memory of GPUs is loaded.
    nvidia_peermem: bool,
    /// Whether the library can register what a dma-buf descriptor stands for.
    dma_buf: bool,
}

#[derive(Debug, Serialize)]
struct PortReport {
    device: String,
    port: u8,
    state: String,
    link_layer: String,
    bandwidth: Option<String>,
    /// Known only of ports that can be used.
    mtu_bytes: Option<usize>,
    lid: u16,
    /// The index of the address that Weft uses.
    gid_index: Option<u8>,
    gids: Vec<GidReport>,
    driver: Option<String>,
    firmware: Option<String>,
    numa: Option<u16>,
    pci: Option<String>,
    roce: Option<RoceReport>,
}

#[derive(Debug, Serialize)]
struct GidReport {
    index: u8,
    address: String,
    kind: &'static str,
    interface: Option<String>,
}

#[derive(Debug, Serialize)]
struct RoceReport {
    congestion_control: String,
    flow_control: String,
    counters: Vec<(&'static str, u64)>,
}

impl RdmaReport {
    pub fn new(found: &Discovery, checkup: &Checkup) -> RdmaReport {
        let ports = found
            .rdma
            .iter()
            .flat_map(|device| device.ports.iter().map(move |port| (device, port)));
        RdmaReport {
            ports: ports
                .map(|(device, port)| PortReport::new(device, port, found, checkup))
                .collect(),
            nvidia_peermem: found.nvidia_peermem,
            dma_buf: checkup.dma_buf,
        }
    }

    /// Lines, each indented by two.
    pub fn text(&self) -> String {
        if self.ports.is_empty() {
            return "  This machine has no RDMA device.\n".to_string();
        }
        let left = Align::Left;
        let mut table = Table::new(&[
            ("port", left),
            ("state", left),
            ("link layer", left),
            ("rate", Align::Right),
            ("MTU", Align::Right),
            ("address used", left),
            ("NUMA", Align::Right),
            ("PCI", left),
            ("driver, firmware", left),
        ]);
        self.ports.iter().for_each(|port| table.row(port.cells()));
        let mut text = table.render();
        text.push('\n');
        for port in &self.ports {
            port.details()
                .iter()
                .for_each(|line| text.push_str(&format!("  {line}\n")));
        }
        text.push_str(&format!(
            "  Memory of GPUs: nvidia-peermem is {}; the library {} dma-buf.\n",
            if self.nvidia_peermem { "loaded" } else { "not loaded" },
            if self.dma_buf { "knows" } else { "does not know" },
        ));
        text
    }
}

impl PortReport {
    fn new(device: &RdmaDevice, port: &RdmaPort, found: &Discovery, checkup: &Checkup) -> PortReport {
        let name = format!("{}:{}", device.name, port.number);
        let rail = checkup.rails.iter().find(|rail| rail.name() == name);
        let hints = found.roce.iter().find(|hints| hints.port == name);
        PortReport {
            device: device.name.clone(),
            port: port.number,
            state: port.state.to_string(),
            link_layer: port.link_layer.to_string(),
            bandwidth: port.bandwidth.map(|bandwidth| bandwidth.to_string()),
            mtu_bytes: rail.map(|rail| rail.mtu.bytes()),
            lid: port.lid,
            gid_index: rail.map(|rail| rail.gid.index),
            gids: port
                .gids
                .iter()
                .map(|gid| GidReport::new(gid, port.link_layer))
                .collect(),
            driver: device.driver.clone(),
            firmware: device.firmware.clone(),
            numa: device.numa,
            pci: device.pci.clone(),
            roce: hints.map(|hints| RoceReport {
                congestion_control: hints.congestion_control.to_string(),
                flow_control: hints.flow_control.to_string(),
                counters: hints.counters.clone(),
            }),
        }
    }

    fn cells(&self) -> Vec<String> {
        let used = self.gids.iter().find(|gid| Some(gid.index) == self.gid_index);
        let software: Vec<&str> = [&self.driver, &self.firmware]
            .into_iter()
            .filter_map(Option::as_deref)
            .collect();
        vec![
            self.name(),
            self.state.clone(),
            self.link_layer.clone(),
            self.bandwidth.clone().unwrap_or_default(),
            self.mtu_bytes.map_or(String::new(), |bytes| bytes.to_string()),
            used.map_or("none".to_string(), |gid| format!("{}, {}", gid.address, gid.kind)),
            self.numa.map_or(String::new(), |node| node.to_string()),
            self.pci.clone().unwrap_or_default(),
            software.join(", "),
        ]
    }

    fn details(&self) -> Vec<String> {
        let gids: Vec<String> = self.gids.iter().map(GidReport::line).collect();
        let mut lines = vec![format!("{} addresses: {}", self.name(), listed(&gids, "none"))];
        if self.lid != 0 {
            lines.push(format!("{} LID: {}", self.name(), self.lid));
        }
        if let Some(roce) = &self.roce {
            lines.push(format!(
                "{} congestion control (ECN): {}; flow control (PFC): {}",
                self.name(),
                roce.congestion_control,
                roce.flow_control
            ));
            let counted = roce.counters.iter().filter(|(_, count)| *count > 0);
            let counted: Vec<String> = counted.map(|(name, count)| format!("{name} {count}")).collect();
            lines.push(format!(
                "{} marks and losses: {}",
                self.name(),
                listed(&counted, "none counted")
            ));
        }
        lines
    }

    fn name(&self) -> String {
        format!("{}:{}", self.device, self.port)
    }
}

impl GidReport {
    fn new(gid: &Gid, link_layer: LinkLayer) -> GidReport {
        GidReport {
            index: gid.index,
            address: gid.to_string(),
            kind: match (gid.kind, link_layer) {
                (GidKind::RoceV2, _) => "RoCE v2",
                (GidKind::InfinibandOrRoceV1, LinkLayer::Ethernet) => "RoCE v1",
                (GidKind::InfinibandOrRoceV1, _) => "InfiniBand",
                _ => "unknown kind",
            },
            interface: gid.interface.clone(),
        }
    }

    fn line(&self) -> String {
        let interface = self
            .interface
            .as_ref()
            .map_or(String::new(), |name| format!(" on {name}"));
        format!("[{}] {} {}{interface}", self.index, self.address, self.kind)
    }
}

fn listed(items: &[String], none: &str) -> String {
    if items.is_empty() {
        return none.to_string();
    }
    items.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_fabric::discover;

    #[test]
    fn a_port_is_described_in_full_and_absence_in_a_sentence() {
        let none = RdmaReport {
            ports: Vec::new(),
            nvidia_peermem: false,
            dma_buf: false,
        };
        assert_eq!(none.text(), "  This machine has no RDMA device.\n");
        let gid = |index, address: &str, kind| GidReport {
            index,
            address: address.to_string(),
            kind,
            interface: Some("eth0".to_string()),
        };
        let report = RdmaReport {
            ports: vec![PortReport {
                device: "mlx5_0".to_string(),
                port: 1,
                state: "active".to_string(),
                link_layer: "Ethernet".to_string(),
                bandwidth: Some("50 GB/s".to_string()),
                mtu_bytes: Some(4096),
                lid: 0,
                gid_index: Some(3),
                gids: vec![gid(0, "fe80::1", "RoCE v1"), gid(3, "10.0.0.1", "RoCE v2")],
                driver: Some("mlx5_core".to_string()),
                firmware: Some("28.39.1002".to_string()),
                numa: Some(1),
                pci: Some("0000:18:00.0".to_string()),
                roce: Some(RoceReport {
                    congestion_control: "could not be read".to_string(),
                    flow_control: "on for priority 3".to_string(),
                    counters: vec![("np_cnp_sent", 17), ("out_of_sequence", 0)],
                }),
            }],
            nvidia_peermem: true,
            dma_buf: true,
        };
        let text = report.text();
        for part in [
            "10.0.0.1, RoCE v2",
            "4096",
            "0000:18:00.0",
            "mlx5_core, 28.39.1002",
            "mlx5_0:1 addresses: [0] fe80::1 RoCE v1 on eth0, [3] 10.0.0.1 RoCE v2 on eth0",
            "mlx5_0:1 congestion control (ECN): could not be read; flow control (PFC): on for priority 3",
            "mlx5_0:1 marks and losses: np_cnp_sent 17",
            "nvidia-peermem is loaded; the library knows dma-buf",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn this_machine_can_be_reported() {
        let found = discover::machine();
        let report = RdmaReport::new(&found, &weft_fabric::verbs::checkup::checkup(&found.rdma));
        assert_eq!(
            report.ports.len(),
            found.rdma.iter().map(|device| device.ports.len()).sum::<usize>()
        );
    }
}
