//! Cores, NUMA nodes and memory.

use weft_plan::Bytes;
use weft_plan::platform::{Cores, NumaNode};

use super::tree::Tree;
use super::{Absent, Feature, Reason};

/// No machine has more; what claims more is not a machine's.
const MAX_NODES: usize = 1024;

const NUMA_FIX: &str = "all cores count as one node; mount sysfs at /sys to see the nodes";
const CORES_FIX: &str = "mount sysfs at /sys";

pub(super) fn numa_nodes(sys: &Tree, absent: &mut Vec<Absent>) -> Vec<NumaNode> {
    match nodes(sys) {
        Ok(nodes) => nodes,
        Err(why) => {
            absent.push(Absent {
                what: Feature::Numa,
                why,
                fix: NUMA_FIX,
            });
            one_node(sys, absent)
        }
    }
}

fn nodes(sys: &Tree) -> Result<Vec<NumaNode>, Reason> {
    const FOLDER: &str = "devices/system/node";
    let online: Cores = sys.value(&format!("{FOLDER}/online"))?;
    let mut nodes: Vec<NumaNode> = Vec::new();
    for id in online.iter().take(MAX_NODES) {
        let cores: Cores = sys.value(&format!("{FOLDER}/node{id}/cpulist"))?;
        // A core in two nodes belongs to the first: the kernel never says so, but a file may.
        let cores = cores
            .iter()
            .filter(|core| !nodes.iter().any(|node| node.cores.contains(*core)))
            .collect();
        nodes.push(NumaNode {
            id,
            cores,
            memory: sys
                .read(&format!("{FOLDER}/node{id}/meminfo"))
                .ok()
                .and_then(|text| mem_total(&text)),
        });
    }
    if nodes.is_empty() {
        return Err(Reason::NoneThere { path: sys.path(FOLDER) });
    }
    Ok(nodes)
}

fn one_node(sys: &Tree, absent: &mut Vec<Absent>) -> Vec<NumaNode> {
    match sys.value::<Cores>("devices/system/cpu/online") {
        Ok(cores) => vec![NumaNode {
            id: 0,
            cores,
            memory: None,
        }],
        Err(why) => {
            absent.push(Absent {
                what: Feature::Cores,
                why,
                fix: CORES_FIX,
            });
            Vec::new()
        }
    }
}

pub(super) fn total_memory(proc: &Tree) -> Option<Bytes> {
    mem_total(&proc.read("meminfo").ok()?)
}

/// From `MemTotal: 24684100 kB`, with or without a node in front.
fn mem_total(text: &str) -> Option<Bytes> {
    let (_, rest) = text.split_once("MemTotal:")?;
    let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
    Bytes(kib).checked_mul(1024)
}
