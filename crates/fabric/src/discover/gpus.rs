//! GPUs: those that the NVIDIA driver lists, and those on the bus that have no driver.

use weft_plan::platform::Gpu;

use super::tree::{Tree, is_pci_address};
use super::{Absent, Feature, Reason};

const NVIDIA: u64 = 0x10de;
const NONE_FIX: &str = "transfers use host memory; nothing to do unless this machine should have a GPU";
const DRIVER_FIX: &str =
    "install the NVIDIA driver and load its module (modprobe nvidia); in a container, hand the device in";

pub(super) fn find(sys: &Tree, proc: &Tree, absent: &mut Vec<Absent>) -> Vec<Gpu> {
    let addresses = match on_the_bus(sys) {
        Ok(addresses) => addresses,
        Err(why) => {
            absent.push(Absent {
                what: Feature::Gpus,
                why,
                fix: NONE_FIX,
            });
            Vec::new()
        }
    };
    // A container may show the driver's list without the bus, or the bus without the driver's list.
    let driven = proc.list("driver/nvidia/gpus").unwrap_or_default();
    let mut all: Vec<String> = driven
        .iter()
        .filter(|name| is_pci_address(name))
        .cloned()
        .chain(addresses)
        .collect();
    all.sort_unstable();
    all.dedup();
    if !all.is_empty() {
        // Without a bus but with a driver's list, there are GPUs after all.
        absent.retain(|a| a.what != Feature::Gpus);
    }

    let mut gpus = Vec::new();
    for (ordinal, pci) in (0u16..).zip(all) {
        if !driven.contains(&pci) {
            absent.push(Absent {
                what: Feature::Gpus,
                why: Reason::NoDriver { device: pci.clone() },
                fix: DRIVER_FIX,
            });
        }
        let device = format!("bus/pci/devices/{pci}");
        gpus.push(Gpu {
            ordinal,
            name: model(proc, &pci).unwrap_or_else(|| match sys.hex(&format!("{device}/device")) {
                Some(id) => format!("NVIDIA device {id:#06x}"),
                None => "NVIDIA GPU".to_owned(),
            }),
            numa: sys.numa_node(&device),
            pci: Some(pci),
            memory: None,
            costs: None,
        });
    }
    gpus
}

fn on_the_bus(sys: &Tree) -> Result<Vec<String>, Reason> {
    const FOLDER: &str = "bus/pci/devices";
    // Class 0x03 is a display controller; a data-centre GPU is one without a display.
    let is_gpu = |name: &String| {
        let file = |file: &str| sys.hex(&format!("{FOLDER}/{name}/{file}"));
        is_pci_address(name) && file("vendor") == Some(NVIDIA) && file("class").is_some_and(|class| class >> 16 == 0x03)
    };
    let gpus: Vec<String> = sys.list(FOLDER)?.into_iter().filter(is_gpu).collect();
    if gpus.is_empty() {
        return Err(Reason::NoneThere { path: sys.path(FOLDER) });
    }
    Ok(gpus)
}

/// The model, as the driver writes it in `Model:  NVIDIA H200`.
fn model(proc: &Tree, pci: &str) -> Option<String> {
    let text = proc.read(&format!("driver/nvidia/gpus/{pci}/information")).ok()?;
    let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim();
    (!model.is_empty()).then(|| model.chars().filter(|c| !c.is_control()).take(80).collect())
}
