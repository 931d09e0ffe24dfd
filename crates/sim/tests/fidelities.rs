//! Where nothing is congested, the closed form, flows and packets must say the same.
//!
//! The closed form and flows know the same of a message: its bytes at the bandwidth of the link, and the latency of its way. They may differ by rounding
//! where every step is alike and has to wait for the one before it (0.1 %). Where it has not, the closed form lets all step together and executors do not:
//! what could follow each other goes at once. Packets also have headers (54 bytes in 4,096: 1.3 %) and are stored at every switch, so that a message takes a
//! packet's time longer for each switch on its way, and acknowledgements take some of the links: 4 % for messages of 256 KiB and more.

use weft_model::fabric::{Cluster, Fabric, Topology, Wire};
use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Collective, Problem, Sizes};
use weft_plan::cost::{Candidate, Placement, Profile};
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
    flow: f64,
    packet: f64,
}

fn answers(collective: Collective, algorithm: Algorithm, ranks: u32, bytes: u64) -> Answers {
    let problem = Problem::new(collective, ranks);
    let placement = placement(ranks);
    let program = algorithm.program(&problem, placement.grid).unwrap();
    let topology = switch(ranks);
    let closed = Profile::of(&problem, &*program, &placement).predict(Bytes(bytes)).time;
    let flow = flow::run_program(&topology, &problem, &*program, Bytes(bytes), &FlowOptions::default()).unwrap();
    let packet = packet::run_program(&topology, &problem, &*program, Bytes(bytes), &PacketOptions::default()).unwrap();
    Answers {
        closed: closed.as_secs_f64(),
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
        agree(&what, answers.packet, answers.flow, 0.04);
    }
}

/// A rank of a tree sends to all its children at once, so that the first of them has to share the link with the others and hands on late. With one
/// child each there is nothing to share.
#[test]
fn a_tree() {
    let broadcast = Collective::Broadcast { root: Rank(0) };
    for ranks in [2, 4, 16, 64] {
        let answers = answers(broadcast, Algorithm::BinomialTree, ranks, 1 << 22);
        let what = format!("a tree of {ranks}");
        // The root has as many children as there are levels, its first child one less, and so on: 1 + 2 + … instead of one each level.
        let levels = f64::from(ranks.ilog2());
        let later = levels * (levels + 1.0) / 2.0 / levels;
        agree(&what, answers.flow, answers.closed * later, 0.05);
        agree(&what, answers.packet, answers.flow, 0.04);
    }
}

#[test]
fn an_exchange_of_all_with_all() {
    let exchange = Collective::AllToAll { sizes: Sizes::Equal };
    for ranks in [4, 16, 64] {
        let bytes = u64::from(ranks) << 18;
        let direct = answers(
            exchange,
            Algorithm::Direct,
            ranks.min(16),
            u64::from(ranks.min(16)) << 18,
        );
        let what = format!("direct of {ranks}");
        agree(&what, direct.flow, direct.closed, 0.001);
        // All at once is not uncongested: first windows collide at the receivers, and what is trimmed is sent again. Of more ranks that takes
        // long to follow.
        agree(&what, direct.packet, direct.flow, 0.3);
        // In pairs, no step waits for the one before it: all go at once here too.
        let problem = Problem::new(exchange, ranks);
        let flow = |algorithm: Algorithm| {
            let program = algorithm.program(&problem, Grid { nodes: ranks, local: 1 }).unwrap();
            let options = FlowOptions::default();
            let report = flow::run_program(&switch(ranks), &problem, &*program, Bytes(bytes), &options);
            report.unwrap().time.as_secs_f64()
        };
        let (pairwise, direct) = (flow(Algorithm::Pairwise), flow(Algorithm::Direct));
        agree(&format!("pairwise of {ranks}"), pairwise, direct, 0.001);
    }
}

/// What a communicator chooses by the closed form, held against what its executor would do.
#[test]
fn what_runs_is_not_far_from_the_closed_form() {
    let (sizes, root) = (Sizes::Equal, Rank(3));
    let collectives = [
        Collective::AllReduce,
        Collective::AllGather { sizes },
        Collective::ReduceScatter { sizes },
        Collective::Broadcast { root },
        Collective::Reduce { root },
        Collective::Gather { root, sizes },
        Collective::Scatter { root, sizes },
        Collective::AllToAll { sizes },
        Collective::Barrier,
    ];
    for ranks in [8, 12] {
        let (topology, placement) = (switch(ranks), placement(ranks));
        for collective in collectives {
            let problem = Problem::new(collective, ranks);
            for candidate in Candidate::all(&problem) {
                let Some(program) = candidate.program(&problem, placement.grid) else {
                    continue;
                };
                let profile = Profile::of(&problem, &*program, &placement);
                for bytes in [1u64 << 14, 1 << 22] {
                    let options = FlowOptions::default();
                    let report = flow::run_program(&topology, &problem, &*program, Bytes(bytes), &options).unwrap();
                    let closed = profile.predict(Bytes(bytes)).time.as_secs_f64();
                    let ratio = report.time.as_secs_f64() / closed;
                    // What could follow each other goes at once, which takes less where latencies count and more where links are shared. Worst is
                    // who reduces all others' contributions in the order of the ranks, and so takes them all from the same rank at a time.
                    let direct = candidate.algorithm == Algorithm::Direct && collective == Collective::AllReduce;
                    let most = if direct { f64::from(ranks) / 2.0 + 0.1 } else { 2.1 };
                    // Portions that overlap do not pay for the latency of each step.
                    let least = if candidate.portions > 1 { 0.03 } else { 0.1 };
                    assert!(
                        (least..most).contains(&ratio),
                        "{collective} by {candidate} of {ranks}, {bytes} bytes: {ratio}"
                    );
                }
            }
        }
    }
}
