//! Whether the fields of a platform hold together.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fmt::Display;
use std::hash::Hash;

use super::{Endpoint, Fault, Machine, Part, Platform, PlatformError};
use crate::place::Place;
use crate::units::Bandwidth;

impl Platform {
    /// Checks that names are unique, that what is referred to exists, and that nothing has no bandwidth.
    pub fn validate(&self) -> Result<(), PlatformError> {
        if self.name.is_empty() {
            return Err(at("name", Fault::Empty));
        }
        for (name, cost) in &self.transports {
            has_bandwidth(cost.bandwidth, || format!("transports.{name}.bandwidth"))?;
        }
        for (name, cost) in &self.messages {
            has_bandwidth(cost.bandwidth, || format!("messages.{name}.bandwidth"))?;
        }
        let machine_names = self.machines.iter().map(|m| m.name.as_str());
        unique(machine_names, |i| format!("machines[{i}].name"))?;
        for (i, machine) in self.machines.iter().enumerate() {
            machine.validate(&format!("machines[{i}]"))?;
        }
        let machines: HashMap<&str, &Machine> = self.machines.iter().map(|m| (m.name.as_str(), m)).collect();
        for (i, link) in self.links.iter().enumerate() {
            for (end, endpoint) in [("from", &link.from), ("to", &link.to)] {
                if !machines
                    .get(endpoint.machine.as_str())
                    .is_some_and(|m| m.has(&endpoint.part))
                {
                    let endpoint = Endpoint::clone(endpoint);
                    return Err(at(format!("links[{i}].{end}"), Fault::NoSuchEndpoint { endpoint }));
                }
            }
            if link.from == link.to {
                return Err(at(format!("links[{i}]"), Fault::LinkToItself));
            }
            has_bandwidth(link.cost.bandwidth, || format!("links[{i}].cost.bandwidth"))?;
        }
        Ok(())
    }
}

impl Machine {
    /// Whether a link may end at this part.
    fn has(&self, part: &Part) -> bool {
        match part {
            Part::Place(Place::Dram { numa: Some(id) }) => self.numa.iter().any(|n| n.id == *id),
            Part::Place(Place::Gpu { ordinal }) => self.gpus.iter().any(|g| g.ordinal == *ordinal),
            Part::Place(Place::Dram { numa: None } | Place::File | Place::Object) => true,
            Part::Nic(name) => self.nics.iter().any(|n| n.name == *name),
        }
    }

    fn validate(&self, path: &str) -> Result<(), PlatformError> {
        is_name(&self.name, || format!("{path}.name"))?;
        if let Some(memcpy) = &self.memcpy {
            has_bandwidth(memcpy.streaming, || format!("{path}.memcpy.streaming"))?;
            has_bandwidth(memcpy.cached, || format!("{path}.memcpy.cached"))?;
        }
        if let Some(reduction) = self.reduction {
            has_bandwidth(reduction, || format!("{path}.reduction"))?;
        }
        if let Some(arena) = &self.arena {
            for (name, speed) in [("copy", arena.copy), ("reduce", arena.reduce)] {
                has_bandwidth(speed.streaming, || format!("{path}.arena.{name}.streaming"))?;
                has_bandwidth(speed.cached, || format!("{path}.arena.{name}.cached"))?;
            }
            if let Some(fresh) = arena.fresh {
                has_bandwidth(fresh, || format!("{path}.arena.fresh"))?;
            }
        }
        unique(self.numa.iter().map(|n| n.id), |i| format!("{path}.numa[{i}].id"))?;
        unique(self.gpus.iter().map(|g| g.ordinal), |i| {
            format!("{path}.gpus[{i}].ordinal")
        })?;
        unique(self.nics.iter().map(|n| n.name.as_str()), |i| {
            format!("{path}.nics[{i}].name")
        })?;

        let mut cores = HashSet::new();
        for (i, node) in self.numa.iter().enumerate() {
            for core in node.cores.iter() {
                if !cores.insert(core) {
                    let name = format!("core {core}");
                    return Err(at(format!("{path}.numa[{i}].cores"), Fault::Twice { name }));
                }
            }
        }
        for (i, gpu) in self.gpus.iter().enumerate() {
            let Some(costs) = &gpu.costs else { continue };
            let path = format!("{path}.gpus[{i}].costs");
            has_bandwidth(costs.copy, || format!("{path}.copy"))?;
            has_bandwidth(costs.memory, || format!("{path}.memory"))?;
            for (name, cost) in [
                ("one_shot", costs.one_shot),
                ("two_shot", costs.two_shot),
                ("bulk", costs.bulk),
            ] {
                has_bandwidth(cost.bandwidth, || format!("{path}.{name}.bandwidth"))?;
            }
        }
        let gpus = self.gpus.iter().map(|g| g.numa).enumerate();
        let nics = self.nics.iter().map(|n| n.numa).enumerate();
        for (list, (i, numa)) in gpus.map(|g| ("gpus", g)).chain(nics.map(|n| ("nics", n))) {
            if let Some(id) = numa
                && !self.numa.iter().any(|n| n.id == id)
            {
                return Err(at(format!("{path}.{list}[{i}].numa"), Fault::NoSuchNumaNode { id }));
            }
        }
        for (i, nic) in self.nics.iter().enumerate() {
            is_name(&nic.name, || format!("{path}.nics[{i}].name"))?;
            if let Some(bandwidth) = nic.bandwidth {
                has_bandwidth(bandwidth, || format!("{path}.nics[{i}].bandwidth"))?;
            }
        }
        Ok(())
    }
}

fn at(field: impl Into<String>, fault: Fault) -> PlatformError {
    PlatformError::Inconsistent {
        field: field.into(),
        fault,
    }
}

fn unique<T: Eq + Hash + Display + Clone>(
    items: impl Iterator<Item = T>,
    field: impl Fn(usize) -> String,
) -> Result<(), PlatformError> {
    let mut seen = HashSet::new();
    for (i, item) in items.enumerate() {
        if !seen.insert(item.clone()) {
            let name = item.to_string();
            return Err(at(field(i), Fault::Twice { name }));
        }
    }
    Ok(())
}

/// A name must survive in an endpoint's text and in a terminal.
fn is_name(name: &str, field: impl Fn() -> String) -> Result<(), PlatformError> {
    if name.is_empty() {
        return Err(at(field(), Fault::Empty));
    }
    if name
        .chars()
        .any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
    {
        let name = name.escape_debug().to_string();
        return Err(at(field(), Fault::BadName { name }));
    }
    Ok(())
}

fn has_bandwidth(bandwidth: Bandwidth, field: impl Fn() -> String) -> Result<(), PlatformError> {
    if bandwidth == Bandwidth::default() {
        return Err(at(field(), Fault::NoBandwidth));
    }
    Ok(())
}
