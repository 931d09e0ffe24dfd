//! How fast the network simulators are: `network ring 1024`, `network hierarchical 131072`, `network all-to-all 131072`,
//! `network permutation 1024`.

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
        "{collective} by {algorithm} on {ranks}: {} in {:.2} s; {} messages as {} flows in {} classes, {} events; hottest {:?}",
        report.time,
        begun.elapsed().as_secs_f64(),
        report.messages,
        report.flows,
        report.classes,
        report.events,
        report.hot.first()
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
    let took = begun.elapsed().as_secs_f64();
    println!(
        "permutation of {hosts}: tail {} in {took:.2} s; {} events, {:.2} M a second; {} packets, {} trimmed, queue {}",
        report.time,
        report.events,
        report.events as f64 / took * 1e-6,
        report.packets,
        report.trimmed,
        report.queue_max
    );
}
