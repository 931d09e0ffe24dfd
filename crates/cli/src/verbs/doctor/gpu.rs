//! `weft doctor --gpu`: what the GPUs of this machine are and can do, and what kernels take there.

use std::fs;
use std::path::Path;

use serde::Serialize;
use weft_fabric::cuda::{Collective, Device, DeviceFacts, chosen_way, device_costs, device_count};
use weft_fabric::discover;
use weft_plan::cost::kernels::{DeviceCosts, Way};
use weft_plan::platform::Gpu;
use weft_plan::{Bytes, Datatype, Machine, Platform, Reduction};

use super::heading;
use crate::complaint::{Complain, Complaint, Exit};
use crate::table::{Align, Table};

/// Between how many ranks the choice is shown.
const SHOWN_RANKS: [usize; 3] = [2, 4, 8];

struct Found {
    ordinal: u16,
    facts: DeviceFacts,
    costs: DeviceCosts,
}

/// `platform`: where the constants go, in a file that is there already or into a new one.
pub fn run(platform: Option<&Path>, json: bool) -> Result<(), Complaint> {
    let count = device_count().or_complain(Exit::Failed, || "There is no GPU to look at.".to_owned())?;
    if count == 0 {
        return Err(Complaint::new(
            Exit::Failed,
            "The driver is there, and shows this process no GPU.",
        ));
    }
    // Before anything is measured, so that a file that is wrong costs no time.
    let known = platform.map(read).transpose()?;
    let found = (0..count).map(look).collect::<Result<Vec<Found>, Complaint>>()?;
    for found in &found {
        match json {
            true => print_json(found)?,
            false => print(found)?,
        }
    }
    if let (Some(path), Some(mut known)) = (platform, known) {
        note(&mut known, &found);
        fs::write(path, known.to_toml()).or_complain(Exit::Failed, || {
            format!("The platform file {} was not written.", path.display())
        })?;
        if !json {
            outln!();
            outln!(
                "  The constants are in {}; `--set platform={}` has collectives chosen by them.",
                path.display(),
                path.display()
            );
        }
    }
    Ok(())
}

fn look(ordinal: u16) -> Result<Found, Complaint> {
    let device = Device::open(ordinal).or_complain(Exit::Failed, || format!("GPU {ordinal} cannot be opened."))?;
    let facts = device
        .facts()
        .or_complain(Exit::Failed, || format!("GPU {ordinal} does not say what it is."))?;
    let costs = device_costs(&device).or_complain(Exit::Failed, || format!("GPU {ordinal} cannot be measured."))?;
    Ok(Found { ordinal, facts, costs })
}

/// The file, where there is one; this machine, where there is none.
fn read(path: &Path) -> Result<Platform, Complaint> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let machine = discover::machine().machine;
            return Ok(Platform {
                name: machine.name.clone(),
                machines: vec![machine],
                ..Platform::laptop()
            });
        }
        Err(error) => {
            return Err(error).or_complain(Exit::Failed, || format!("{} cannot be read.", path.display()));
        }
    };
    Platform::from_toml(&text).or_complain(Exit::Usage, || format!("{} is no platform file.", path.display()))
}

/// Puts the constants to the GPUs of the first machine, which is taken for this one.
fn note(platform: &mut Platform, found: &[Found]) {
    if platform.machines.is_empty() {
        platform.machines.push(Machine {
            name: "here".to_owned(),
            ..Machine::default()
        });
    }
    let gpus = &mut platform.machines[0].gpus;
    for Found { ordinal, facts, costs } in found {
        if !gpus.iter().any(|gpu| gpu.ordinal == *ordinal) {
            gpus.push(Gpu {
                ordinal: *ordinal,
                name: facts.name.clone(),
                pci: None,
                numa: None,
                memory: None,
                costs: None,
            });
        }
        for gpu in gpus.iter_mut().filter(|gpu| gpu.ordinal == *ordinal) {
            gpu.memory = Some(Bytes(facts.memory_bytes));
            gpu.costs = Some(*costs);
        }
    }
}

fn print(found: &Found) -> Result<(), Complaint> {
    let Found { ordinal, facts, costs } = found;
    heading(&format!("GPU {ordinal}: {}", facts.name))?;
    outln!(
        "  compute capability {}.{}, {} multiprocessors, {:.1} of memory, {:.1} of cache; a driver for CUDA {}.{}",
        facts.capability.0,
        facts.capability.1,
        facts.multiprocessors,
        Bytes(facts.memory_bytes),
        Bytes(facts.cache_bytes),
        facts.driver / 1000,
        facts.driver % 1000 / 10
    );
    let mut table = Table::new(&[("it can", Align::Left), ("", Align::Left), ("for", Align::Left)]);
    for (what, there, purpose) in abilities(facts) {
        let there = if there { "yes" } else { "no" };
        table.row(vec![what.to_owned(), there.to_owned(), purpose.to_owned()]);
    }
    out!("{}", table.render());
    outln!();
    outln!(
        "  a launch until its word is seen {:.1}; a word to a peer and back {:.2}, with fences {:.2}; a copy within it {:.2}, its memory {:.2}",
        costs.launch,
        costs.flag,
        costs.signal,
        costs.copy,
        costs.memory
    );
    let mut table = Table::new(&[
        ("kernels", Align::Left),
        ("a call of nothing", Align::Right),
        ("each other rank", Align::Right),
        ("in the cache", Align::Right),
    ]);
    for way in Way::ALL {
        let cost = costs.of(way);
        table.row(vec![
            name(way).to_owned(),
            format!("{:.2}", cost.latency),
            format!("{:.2}", cost.per_span),
            format!("{:.1}", cost.bandwidth),
        ]);
    }
    out!("{}", table.render());
    outln!();
    for ranks in SHOWN_RANKS {
        let until: Vec<String> = crossovers(costs, ranks)
            .iter()
            .map(|(way, last)| format!("{} up to {last}", name(*way)))
            .collect();
        outln!(
            "  all-reduce between {ranks} ranks: {}, in bulk from then on",
            until.join(", ")
        );
    }
    Ok(())
}

fn abilities(facts: &DeviceFacts) -> [(&'static str, bool, &'static str); 6] {
    [
        (
            "share memory by a descriptor",
            facts.shared_by_descriptor,
            "memory of Weft's in other processes",
        ),
        (
            "share memory by a handle",
            facts.shared_by_handle,
            "memory of frameworks in other processes",
        ),
        (
            "export a dma-buf",
            facts.dma_buf,
            "network cards that read and write it",
        ),
        (
            "be reached over the bus",
            facts.direct_rdma,
            "network cards that read and write it",
        ),
        (
            "reduce in switches (multimem)",
            facts.multimem,
            "nothing yet: Weft's kernels do not use it",
        ),
        (
            "be shared at once (MPS)",
            facts.is_served_by_mps,
            "processes on one GPU that need not take turns",
        ),
    ]
}

pub fn name(way: Way) -> &'static str {
    match way {
        Way::OneShot => "packets",
        Way::TwoShot => "packets in two hops",
        Way::Bulk => "bulk",
    }
}

/// Up to which power of two of bytes each way but the last is the fastest.
fn crossovers(costs: &DeviceCosts, ranks: usize) -> Vec<(Way, Bytes)> {
    let mut found: Vec<(Way, Bytes)> = Vec::new();
    for bytes in (3..28).map(|shift| 1u64 << shift) {
        let all_reduce = Collective::AllReduce {
            count: bytes / 2,
            datatype: Datatype::Bf16,
            reduction: Reduction::Sum,
        };
        // A length that cannot be reduced is none of these.
        let Ok(way) = chosen_way(&all_reduce, ranks, costs) else {
            break;
        };
        match found.last_mut() {
            Some((last, until)) if *last == way => *until = Bytes(bytes),
            _ => found.push((way, Bytes(bytes))),
        }
    }
    found.retain(|(way, _)| *way != Way::Bulk);
    found
}

#[derive(Serialize)]
struct Report<'a> {
    gpu: u16,
    name: &'a str,
    driver: i32,
    capability: String,
    multiprocessors: u32,
    memory_bytes: u64,
    cache_bytes: u64,
    can: Vec<&'static str>,
    costs: &'a DeviceCosts,
}

fn print_json(Found { ordinal, facts, costs }: &Found) -> Result<(), Complaint> {
    let can = abilities(facts).into_iter().filter(|(_, there, _)| *there);
    let report = Report {
        gpu: *ordinal,
        name: &facts.name,
        driver: facts.driver,
        capability: format!("{}.{}", facts.capability.0, facts.capability.1),
        multiprocessors: facts.multiprocessors,
        memory_bytes: facts.memory_bytes,
        cache_bytes: facts.cache_bytes,
        can: can.map(|(what, ..)| what).collect(),
        costs,
    };
    let line = serde_json::to_string(&report).or_complain(Exit::Failed, || "A result has no JSON.".to_owned())?;
    outln!("{line}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(ordinal: u16) -> Found {
        Found {
            ordinal,
            facts: DeviceFacts {
                name: "a GPU".to_owned(),
                driver: 13000,
                capability: (9, 0),
                multiprocessors: 132,
                memory_bytes: 1 << 37,
                cache_bytes: 60 << 20,
                shared_by_descriptor: true,
                shared_by_handle: true,
                dma_buf: false,
                direct_rdma: false,
                multimem: false,
                is_served_by_mps: false,
            },
            costs: DeviceCosts::default(),
        }
    }

    #[test]
    fn constants_survive_the_file_and_leave_the_rest_of_it_alone() {
        let mut platform = Platform::laptop();
        let before = platform.clone();
        note(&mut platform, &[found(0), found(1)]);
        let read = Platform::from_toml(&platform.to_toml()).unwrap();
        assert_eq!(read, platform);
        let gpus = &read.machines[0].gpus;
        assert_eq!(gpus.len(), before.machines[0].gpus.len().max(2));
        assert!(gpus.iter().take(2).all(|gpu| gpu.costs == Some(DeviceCosts::default())));
        assert_eq!(read.transports, before.transports);
        // Measured again, it is the same GPUs.
        note(&mut platform, &[found(0), found(1)]);
        assert_eq!(platform, read);
    }

    #[test]
    fn lighter_ways_end_where_heavier_ones_begin() {
        for ranks in SHOWN_RANKS {
            let found = crossovers(&DeviceCosts::default(), ranks);
            assert!(
                !found.is_empty() && found.is_sorted_by_key(|(_, until)| *until),
                "{found:?}"
            );
            assert_eq!(found[0].0, Way::OneShot);
        }
    }
}
