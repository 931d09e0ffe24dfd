//! How fast the network simulators are: `network ring 1024`, `network hierarchical 131072`, `network all-to-all 131072`,
//! `network permutation 1024`. Prints one line of JSON, with the CPU time and the peak of the memory of the whole process.

#![expect(clippy::disallowed_methods, reason = "it measures")]

use std::time::Instant;

use weft_plan::algorithms::Algorithm;
use weft_plan::collective::{Collective, Problem, Sizes};
use weft_plan::platform::fabric::{Cluster, Fabric, Topology, Wire};
use weft_plan::{Bandwidth, Bytes, Time};
use weft_sim::flow::{self, FlowOptions, Transfer, permutation};
use weft_sim::packet::{self, PacketOptions};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let what = arguments.first().map_or("ring", String::as_str);
    let count: u32 = arguments.get(1).and_then(|n| n.parse().ok()).unwrap_or(1024);
    let bytes = Bytes(1 << 30);
    match what {
        "permutation" => packets(count),
        "ring" => flows(count, Collective::AllReduce, Algorithm::Ring, bytes),
        "hierarchical" => flows(count, Collective::AllReduce, Algorithm::RailRing, bytes),
        "doubling" => flows(count, Collective::AllReduce, Algorithm::RailDoubling, bytes),
        "all-to-all" => flows(
            count,
            Collective::AllToAll { sizes: Sizes::Equal },
            Algorithm::RailRing,
            bytes,
        ),
        _ => flows(
            count,
            Collective::AllToAll { sizes: Sizes::Equal },
            Algorithm::Direct,
            bytes,
        ),
    }
}

/// Nodes of eight on a rail-optimised Clos of three tiers.
fn cluster(ranks: u32) -> Topology {
    let cluster = Cluster {
        node_ranks: 8,
        node_ports: 8,
        scale_up: Some(Wire {
            bandwidth: Bandwidth::from_gigabytes_per_sec(450.0),
            latency: Time::from_ns(250),
        }),
        fabric: Fabric::RailClos {
            nodes: ranks / 8,
            rails: 8,
            tiers: 3,
            radix: 128,
            oversubscription: 1,
            wire: Wire {
                bandwidth: Bandwidth::from_gigabytes_per_sec(50.0),
                latency: Time::from_ns(500),
            },
        },
    };
    cluster.build().expect("a network that holds together")
}

fn flows(ranks: u32, collective: Collective, algorithm: Algorithm, bytes: Bytes) {
    let topology = cluster(ranks);
    let problem = Problem::new(collective, ranks);
    let grid = topology.grid(ranks).expect("whole nodes");
    let program = algorithm.program(&problem, grid).expect("an algorithm for this");
    let begun = Instant::now();
    let report = flow::run_program(&topology, &problem, &*program, bytes, &FlowOptions::default()).expect("a run");
    println!(
        "{{\"what\":\"{collective} by {algorithm}\",\"ranks\":{ranks},\"time_us\":{:.3},\"messages\":{},\"flows\":{},\"classes\":{},{}}}",
        report.time.as_ps() as f64 * 1e-6,
        report.messages,
        report.flows,
        report.classes,
        costs(begun, report.events)
    );
}

fn packets(hosts: u32) {
    let radix = (f64::from(hosts) * 4.0).cbrt().round() as u32;
    let cluster = Cluster {
        node_ranks: 1,
        node_ports: 1,
        scale_up: None,
        fabric: Fabric::FatTree {
            hosts,
            tiers: 3,
            radix,
            oversubscription: 1,
            wire: Wire {
                bandwidth: Bandwidth::from_bytes_per_sec(12_500_000_000),
                latency: Time::from_us(1),
            },
        },
    };
    let topology = cluster.build().expect("a network that holds together");
    let list: Vec<Transfer> = permutation(hosts, 1)
        .into_iter()
        .map(|(from, to)| Transfer {
            from,
            to,
            bytes: Bytes(2_000_000),
            start: Time::ZERO,
        })
        .collect();
    let begun = Instant::now();
    let report = packet::run_transfers(&topology, &list, &PacketOptions::default()).expect("a run");
    println!(
        "{{\"what\":\"permutation\",\"ranks\":{hosts},\"time_us\":{:.3},\"packets\":{},\"trimmed\":{},\"queue_bytes\":{},{}}}",
        report.time.as_ps() as f64 * 1e-6,
        report.packets,
        report.trimmed,
        report.queue_max.0,
        costs(begun, report.events)
    );
}

/// What the run has cost: seconds on the clock and of the CPU, events, bytes of memory at the peak.
fn costs(begun: Instant, events: u64) -> String {
    let seconds = begun.elapsed().as_secs_f64();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name in parentheses; the 12th and 13th are the ticks in user and system mode, a hundred a second.
    let ticks: f64 = stat
        .rsplit(')')
        .next()
        .into_iter()
        .flat_map(|rest| rest.split_whitespace().skip(11).take(2))
        .filter_map(|ticks| ticks.parse::<f64>().ok())
        .sum();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak: u64 = peak
        .and_then(|peak| peak.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0);
    format!(
        "\"seconds\":{seconds:.3},\"cpu_seconds\":{:.2},\"events\":{events},\"peak_bytes\":{}",
        ticks / 100.0,
        peak * 1024
    )
}
