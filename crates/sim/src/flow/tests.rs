use super::*;
use crate::traffic::permutation;
use weft_model::fabric::{Cluster, Fabric, Wire};
use weft_plan::Rank;
use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Collective, Sizes};

fn wire(gigabytes: u64, latency_ns: u64) -> Wire {
    Wire {
        bandwidth: Bandwidth::from_bytes_per_sec(gigabytes * 1_000_000_000),
        latency: Picos::from_ns(latency_ns),
    }
}

fn switch(ports: u32) -> Topology {
    let fabric = Fabric::SingleSwitch {
        ports,
        wire: wire(10, 1000),
    };
    let cluster = Cluster {
        node_ranks: 1,
        node_ports: 1,
        scale_up: None,
        fabric,
    };
    cluster.build().unwrap()
}

fn rails(nodes: u32, tiers: u32, radix: u32, oversubscription: u32) -> Topology {
    let cluster = Cluster {
        node_ranks: 4,
        node_ports: 4,
        scale_up: Some(wire(400, 300)),
        fabric: Fabric::RailClos {
            nodes,
            rails: 4,
            tiers,
            radix,
            oversubscription,
            wire: wire(50, 500),
        },
    };
    cluster.build().unwrap()
}

fn transfer(from: u32, to: u32, bytes: u64, start_us: u64) -> Transfer {
    Transfer {
        from: Rank(from),
        to: Rank(to),
        bytes: Bytes(bytes),
        start: Picos::from_us(start_us),
    }
}

#[test]
fn transfers_that_share_a_port_take_turns_fairly() {
    let topology = switch(4);
    // Two into rank 2, and one elsewhere. 100 kB take 10 µs alone.
    let list = [
        transfer(0, 2, 100_000, 0),
        transfer(1, 2, 50_000, 0),
        transfer(3, 0, 100_000, 0),
    ];
    let (report, ends) = run_transfers(&topology, &list, &FlowOptions::default()).unwrap();
    // Half each until the second has ended at 10 µs, then the first alone for its other half; and 2 µs on the way.
    assert_eq!(ends, [Picos::from_us(17), Picos::from_us(12), Picos::from_us(12)]);
    assert_eq!(report.time, Picos::from_us(17));
    assert_eq!(report.hot[0].name, "switch → port 2");
    assert_eq!(report.hot[0].carried, Bytes(150_000));
}

#[test]
fn one_that_comes_in_the_middle() {
    let topology = switch(4);
    let list = [transfer(0, 2, 100_000, 0), transfer(1, 2, 100_000, 5)];
    let (_, ends) = run_transfers(&topology, &list, &FlowOptions::default()).unwrap();
    assert_eq!(ends, [Picos::from_us(17), Picos::from_us(22)]);
}

#[test]
fn a_link_that_is_down_for_a_while_delays_by_that() {
    let topology = switch(2);
    let mut route = Vec::new();
    topology.route(Rank(0), Rank(1), 0, &mut route);
    let fault = LinkFault {
        link: route[0],
        from: Picos::from_us(4),
        until: Picos::from_us(9),
        left: 0.0,
    };
    let options = FlowOptions {
        faults: vec![fault],
        ..FlowOptions::default()
    };
    let list = [transfer(0, 1, 100_000, 0)];
    let (_, ends) = run_transfers(&topology, &list, &options).unwrap();
    assert_eq!(ends, [Picos::from_us(17)]);
    let forever = FlowOptions {
        faults: vec![LinkFault {
            until: Picos::MAX,
            ..fault
        }],
        ..FlowOptions::default()
    };
    assert_eq!(
        run_transfers(&topology, &list, &forever).unwrap_err(),
        FlowError::Run(RunError::NeverEnds { waiting: 1 })
    );
}

#[test]
fn the_halves_of_a_network_exchange_as_much_as_its_bisection_says() {
    let fabrics = [
        Fabric::FatTree {
            hosts: 64,
            tiers: 2,
            radix: 24,
            oversubscription: 2,
            wire: wire(50, 500),
        },
        Fabric::FatTree {
            hosts: 128,
            tiers: 3,
            radix: 8,
            oversubscription: 1,
            wire: wire(50, 500),
        },
        Fabric::SingleSwitch {
            ports: 16,
            wire: wire(50, 500),
        },
    ];
    for fabric in fabrics {
        let bisection = fabric.build().unwrap().bisection().bytes_per_sec();
        let cluster = Cluster {
            node_ranks: 1,
            node_ports: 1,
            scale_up: None,
            fabric,
        };
        let topology = cluster.build().unwrap();
        let half = topology.ranks() / 2;
        let bytes = 1_000_000_000;
        let list: Vec<_> = (0..half).map(|rank| transfer(rank, rank + half, bytes, 0)).collect();
        let (report, _) = run_transfers(&topology, &list, &FlowOptions::default()).unwrap();
        let passed = bytes as f64 * f64::from(half) / report.time.as_secs_f64();
        assert!(
            (passed / bisection as f64 - 1.0).abs() < 0.001,
            "{passed} of {bisection}"
        );
    }
}

/// Folded and not folded must be the same, or nearly: adding many equal numbers rounds, and of two messages that come to a core in one
/// picosecond either may be the first to be reduced.
#[test]
fn one_rank_stands_for_others_without_a_difference() {
    let equal = Sizes::Equal;
    let topologies = [
        rails(16, 2, 16, 1),
        rails(16, 3, 16, 1),
        rails(32, 2, 24, 2),
        rails(12, 2, 16, 1),
    ];
    for topology in topologies {
        let ranks = topology.ranks();
        let grid = topology.grid(ranks).unwrap();
        for collective in [
            Collective::AllReduce,
            Collective::AllGather { sizes: equal },
            Collective::AllToAll { sizes: equal },
            Collective::Broadcast { root: Rank(0) },
        ] {
            let problem = Problem::new(collective, ranks);
            for algorithm in Algorithm::ALL {
                let Some(program) = algorithm.program(&problem, grid) else {
                    continue;
                };
                let shape = program.shape();
                if shape.steps > 130 {
                    continue;
                }
                let run = |folding| {
                    let options = FlowOptions {
                        folding,
                        reduction: Bandwidth::from_gigabytes_per_sec(300.0),
                        ..FlowOptions::default()
                    };
                    run_program(&topology, &problem, &*program, Bytes(1 << 22), &options).unwrap()
                };
                let (folded, whole) = (run(Folding::Alike), run(Folding::Never));
                assert_eq!(whole.classes, ranks);
                let apart = (folded.time.as_secs_f64() / whole.time.as_secs_f64() - 1.0).abs();
                assert!(
                    apart < 1e-4 && !folded.rough,
                    "{collective} by {algorithm} on {ranks}: {} in {} classes, {}",
                    folded.time,
                    folded.classes,
                    whole.time
                );
                assert_eq!(folded.messages, whole.messages, "{collective} by {algorithm}");
            }
        }
    }
}

/// How far off it is to let ranks stand for others that wait in other orders.
#[test]
fn foldings_that_are_rough_are_near() {
    let topology = rails(16, 2, 16, 1);
    let ranks = topology.ranks();
    let grid = topology.grid(ranks).unwrap();
    for collective in [Collective::AllReduce, Collective::AllToAll { sizes: Sizes::Equal }] {
        let problem = Problem::new(collective, ranks);
        for algorithm in [
            Algorithm::TwoShot,
            Algorithm::RailRing,
            Algorithm::RailDoubling,
            Algorithm::Direct,
        ] {
            let Some(program) = algorithm.program(&problem, grid) else {
                continue;
            };
            let run = |folding| {
                let options = FlowOptions {
                    folding,
                    ..FlowOptions::default()
                };
                run_program(&topology, &problem, &*program, Bytes(1 << 22), &options).unwrap()
            };
            let (rough, whole) = (run(Folding::Rough), run(Folding::Never));
            let apart = rough.time.as_secs_f64() / whole.time.as_secs_f64() - 1.0;
            // What is handed over on the node in another order than the rails want it is worst.
            let most = match (collective, algorithm) {
                (Collective::AllToAll { .. }, Algorithm::RailRing) => 0.2,
                _ => 0.03,
            };
            assert!(apart.abs() < most, "{collective} by {algorithm}: {apart}");
        }
    }
}

#[test]
fn regular_programs_are_folded_to_few_classes() {
    let topology = rails(64, 3, 16, 1);
    let ranks = topology.ranks();
    let grid = topology.grid(ranks).unwrap();
    let folded = |collective, algorithm: Algorithm, folding| {
        let problem = Problem::new(collective, ranks);
        let program = algorithm.program(&problem, grid).unwrap();
        let options = FlowOptions {
            folding,
            ..FlowOptions::default()
        };
        let report = run_program(&topology, &problem, &*program, Bytes(1 << 20), &options).unwrap();
        (report.classes, report.rough)
    };
    let exchange = Collective::AllToAll { sizes: Sizes::Equal };
    assert_eq!(folded(exchange, Algorithm::Direct, Folding::Rough), (1, false));
    assert_eq!(folded(exchange, Algorithm::RailRing, Folding::Rough), (1, true));
    // A ring feels where a leaf and a pod end: eight nodes share a leaf, two leaves of each rail a pod.
    assert_eq!(
        folded(Collective::AllReduce, Algorithm::RailRing, Folding::Rough),
        (16, true)
    );
    assert_eq!(
        folded(Collective::AllReduce, Algorithm::Ring, Folding::Alike),
        (64, false)
    );
    // The rails of a node wait for what its ranks hand each other, which is in the order of the nodes: each node waits for something else.
    assert_eq!(folded(exchange, Algorithm::RailRing, Folding::Alike), (64, false));
}

#[test]
fn hashed_flows_collide_and_sprayed_ones_do_not() {
    let fabric = Fabric::FatTree {
        hosts: 128,
        tiers: 3,
        radix: 8,
        oversubscription: 1,
        wire: wire(50, 500),
    };
    let cluster = Cluster {
        node_ranks: 1,
        node_ports: 1,
        scale_up: None,
        fabric,
    };
    let topology = cluster.build().unwrap();
    let list: Vec<_> = permutation(128, 3)
        .into_iter()
        .map(|(from, to)| transfer(from.0, to.0, 50_000_000, 0))
        .collect();
    let time = |routing| {
        let options = FlowOptions {
            routing,
            ..FlowOptions::default()
        };
        run_transfers(&topology, &list, &options).unwrap().0.time
    };
    let (hashed, adaptive, sprayed) = (time(Routing::Ecmp), time(Routing::Adaptive), time(Routing::Spray));
    assert!(
        sprayed.as_ps().abs_diff(Picos::from_us(1003).as_ps()) < 1000,
        "{sprayed}"
    );
    assert!(
        hashed > adaptive && adaptive >= sprayed,
        "{hashed} {adaptive} {sprayed}"
    );
}

#[test]
fn other_networks_carry_programs_too() {
    let wire = wire(50, 500);
    let fabrics = [
        Fabric::Torus {
            sides: vec![4, 4, 2],
            wire,
        },
        Fabric::Dragonfly {
            groups: 4,
            routers: 4,
            hosts: 2,
            global: 1,
            wire,
            global_wire: None,
        },
        Fabric::DragonflyPlus {
            groups: 4,
            leaves: 4,
            spines: 4,
            hosts: 2,
            global: 1,
            wire,
            global_wire: None,
        },
        Fabric::Direct { ports: 32, wire },
    ];
    for fabric in fabrics {
        let cluster = Cluster {
            node_ranks: 1,
            node_ports: 1,
            scale_up: None,
            fabric,
        };
        let topology = cluster.build().unwrap();
        let problem = Problem::new(Collective::AllReduce, 32);
        let ring = Algorithm::Ring.program(&problem, Grid::flat(32)).unwrap();
        for routing in [Routing::Ecmp, Routing::Adaptive, Routing::Spray] {
            let options = FlowOptions {
                routing,
                ..FlowOptions::default()
            };
            let report = run_program(&topology, &problem, &*ring, Bytes(1 << 25), &options).unwrap();
            assert_eq!(report.messages, 32 * 62);
            assert!(report.time > Picos::from_us(1300), "{}", report.time);
        }
    }
}
