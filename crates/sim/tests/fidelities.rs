//! Where nothing is congested, the closed form, flows and packets must say the same.
//!
//! The closed form and flows know the same of a message: its bytes at the bandwidth of the link, and the latency of its way. They may differ by rounding
//! where every step is alike (0.1 %), and by what ranks that go ahead of others win where it is not (the closed form lets all step
//! together: 2 %). Packets also have headers (54 bytes in 4,096: 1.3 %) and are stored at every switch, so that a message takes a
//! packet's time longer for each switch on its way, and acknowledgements take some of the links: 4 % for messages of 256 KiB and more.

use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Collective, Counts, Partition, Problem, Sizes};
use weft_plan::cost::{Placement, Profile, critical_path};
use weft_plan::platform::fabric::{Cluster, Fabric, Topology, Wire};
use weft_plan::{Bandwidth, Bytes, LinkCost, Picos, Rank};
use weft_sim::flow::{self, FlowOptions};
use weft_sim::packet::{self, PacketOptions};

const WIRE: Wire = Wire {
    bandwidth: Bandwidth::from_bytes_per_sec(50_000_000_000),
    latency: Picos::from_ns(500),
};

fn switch(ranks: u32) -> Topology {
    let cluster = Cluster {
        node_ranks: 1,
        node_ports: 1,
        scale_up: None,
        fabric: Fabric::SingleSwitch {
            ports: ranks,
            wire: WIRE,
        },
    };
    cluster.build().unwrap()
}

fn placement(ranks: u32) -> Placement {
    let link = LinkCost {
        latency: Picos::from_us(1),
        per_span: Picos::ZERO,
        bandwidth: WIRE.bandwidth,
    };
    Placement {
        grid: Grid { nodes: ranks, local: 1 },
        local: link,
        across: link,
        rails: 1,
        reduction: Bandwidth::MAX,
        copy: Bandwidth::MAX,
        arena: None,
        cores: 0,
        channels: u16::MAX,
    }
}

struct Answers {
    closed: f64,
    followed: f64,
    flow: f64,
    packet: f64,
}

fn answers(collective: Collective, algorithm: Algorithm, ranks: u32, bytes: u64) -> Answers {
    let problem = Problem::new(collective, ranks);
    let placement = placement(ranks);
    let program = algorithm.program(&problem, placement.grid).unwrap();
    let topology = switch(ranks);
    let closed = Profile::of(&problem, &*program, &placement).predict(Bytes(bytes)).time;
    let per_block = match collective {
        Collective::AllToAll { .. } | Collective::AllGather { .. } => bytes / u64::from(ranks),
        _ => bytes,
    };
    let partition = Partition::new(&problem, Counts::Equal(per_block), program.shape().pieces).unwrap();
    let followed = critical_path(&*program, &partition, Bytes(1), &placement).unwrap();
    let flow = flow::run_program(&topology, &problem, &*program, Bytes(bytes), &FlowOptions::default()).unwrap();
    let packet = packet::run_program(&topology, &problem, &*program, Bytes(bytes), &PacketOptions::default()).unwrap();
    Answers {
        closed: closed.as_secs_f64(),
        followed: followed.as_secs_f64(),
        flow: flow.time.as_secs_f64(),
        packet: packet.time.as_secs_f64(),
    }
}

fn agree(what: &str, one: f64, other: f64, tolerance: f64) {
    let apart = one / other - 1.0;
    assert!(apart.abs() < tolerance, "{what}: {:.3} %", apart * 100.0);
}

#[test]
fn a_ring() {
    for ranks in [2, 3, 8, 16, 64] {
        let bytes = u64::from(ranks) << 18;
        let answers = answers(Collective::AllReduce, Algorithm::Ring, ranks, bytes);
        let what = format!("a ring of {ranks}");
        agree(&what, answers.flow, answers.closed, 0.001);
        agree(&what, answers.flow, answers.followed, 0.001);
        agree(&what, answers.packet, answers.flow, 0.04);
    }
}

#[test]
fn a_tree() {
    let broadcast = Collective::Broadcast { root: Rank(0) };
    for ranks in [2, 4, 16, 64] {
        let answers = answers(broadcast, Algorithm::BinomialTree, ranks, 1 << 22);
        let what = format!("a tree of {ranks}");
        agree(&what, answers.flow, answers.closed, 0.02);
        agree(&what, answers.flow, answers.followed, 0.001);
        agree(&what, answers.packet, answers.flow, 0.04);
    }
}

#[test]
fn an_exchange_of_all_with_all() {
    let exchange = Collective::AllToAll { sizes: Sizes::Equal };
    for ranks in [4, 16, 64] {
        for algorithm in [Algorithm::Pairwise, Algorithm::Direct] {
            // Collisions of 63 first windows at each of 64 receivers take long to follow.
            if algorithm == Algorithm::Direct && ranks > 16 {
                continue;
            }
            let bytes = u64::from(ranks) << 18;
            let answers = answers(exchange, algorithm, ranks, bytes);
            let what = format!("{algorithm} of {ranks}");
            agree(&what, answers.flow, answers.closed, 0.001);
            agree(&what, answers.flow, answers.followed, 0.001);
            // All at once is not uncongested: first windows collide at the receivers, and what is trimmed is sent again.
            let tolerance = if algorithm == Algorithm::Direct { 0.3 } else { 0.04 };
            agree(&what, answers.packet, answers.flow, tolerance);
        }
    }
}
