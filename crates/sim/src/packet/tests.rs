use super::*;
use crate::flow::mixed;
use crate::traffic::permutation;
use weft_model::fabric::{Cluster, Fabric, Wire};
use weft_plan::Rank;
use weft_plan::algorithms::Algorithm;
use weft_plan::collective::Collective;

fn cluster(fabric: Fabric) -> Topology {
    let cluster = Cluster {
        node_ranks: 1,
        node_ports: 1,
        scale_up: None,
        fabric,
    };
    cluster.build().unwrap()
}

const WIRE: Wire = Wire {
    bandwidth: Bandwidth::from_bytes_per_sec(12_500_000_000),
    latency: Picos::from_us(1),
};

fn switch(ports: u32) -> Topology {
    cluster(Fabric::SingleSwitch { ports, wire: WIRE })
}

fn tree(radix: u32) -> Topology {
    cluster(Fabric::FatTree {
        hosts: radix * radix * radix / 4,
        tiers: 3,
        radix,
        oversubscription: 1,
        wire: WIRE,
    })
}

fn transfer(from: u32, to: u32, bytes: u64) -> Transfer {
    Transfer {
        from: Rank(from),
        to: Rank(to),
        bytes: Bytes(bytes),
        start: Picos::ZERO,
    }
}

/// All kinds of transports and switches that go together.
fn kinds() -> Vec<PacketOptions> {
    let rate = |recovery, dcqcn| Transport::Rate { recovery, dcqcn };
    vec![
        PacketOptions::default(),
        PacketOptions {
            routing: Routing::Ecmp,
            ..PacketOptions::default()
        },
        PacketOptions {
            overflow: Overflow::Drop,
            ..PacketOptions::default()
        },
        PacketOptions::roce(),
        PacketOptions {
            overflow: Overflow::Drop,
            queue: 40_000,
            ..PacketOptions::roce()
        },
        PacketOptions {
            transport: rate(Recovery::SelectiveRepeat, Some(Dcqcn::default())),
            overflow: Overflow::Drop,
            queue: 40_000,
            ..PacketOptions::roce()
        },
        PacketOptions {
            transport: rate(Recovery::SelectiveRepeat, None),
            routing: Routing::Adaptive,
            ..PacketOptions::roce()
        },
    ]
}

#[test]
fn alone_a_message_takes_its_bytes_and_its_way() {
    // 100 packets of 4150 bytes, 332 ns each; the last one also goes from the switch on.
    let expected = Picos::from_ns(101 * 332 + 2000);
    for options in kinds() {
        let report = run_transfers(&switch(2), &[transfer(0, 1, 409_600)], &options).unwrap();
        assert_eq!(report.ends, [expected], "{options:?}");
        assert_eq!((report.dropped, report.trimmed, report.again), (0, 0, 0));
    }
}

#[test]
fn everything_arrives_whatever_is_lost() {
    let topology = tree(4);
    for (nth, kind) in kinds().into_iter().enumerate() {
        let options = PacketOptions { loss: 0.01, ..kind };
        let list: Vec<Transfer> = permutation(16, 5)
            .into_iter()
            .map(|(from, to)| transfer(from.0, to.0, 300_000))
            .collect();
        let report = run_transfers(&topology, &list, &options).unwrap();
        assert!(report.dropped > 0 && report.again > 0, "kind {nth}: {report:?}");
        assert!(report.ends.iter().all(|end| *end < Picos::from_ms(100)), "kind {nth}");
    }
}

#[test]
fn an_incast_is_as_fast_as_its_last_link() {
    let topology = switch(9);
    let list: Vec<Transfer> = (1..9).map(|from| transfer(from, 0, 1 << 20)).collect();
    let ideal = 8.0 * 256.0 * 332e-9;
    for (nth, options) in kinds().into_iter().enumerate() {
        let report = run_transfers(&topology, &list, &options).unwrap();
        let slower = report.time.as_secs_f64() / ideal;
        // What drops and waits for timeouts, or goes back, or lowers its rate pays for it; what is trimmed or paused does not.
        let most = if options.overflow == Overflow::Drop || nth == 3 {
            20.0
        } else {
            1.05
        };
        assert!(slower >= 1.0 && slower < most, "kind {nth}: {slower}");
        match options.overflow {
            Overflow::Trim => assert!(report.trimmed > 0),
            Overflow::Drop => assert!(report.dropped > 0),
            Overflow::Pause { .. } => assert_eq!((report.dropped, report.pauses > 0), (0, true)),
        }
    }
}

#[test]
fn senders_that_share_a_link_share_it_evenly() {
    let topology = switch(5);
    let list: Vec<Transfer> = (1..5).map(|from| transfer(from, 0, 4 << 20)).collect();
    // DCQCN is fair in the long run, and four megabytes are a short one.
    for (options, least) in [(PacketOptions::default(), 0.85), (PacketOptions::roce(), 0.4)] {
        let report = run_transfers(&topology, &list, &options).unwrap();
        let first = report.ends.iter().min().unwrap().as_secs_f64();
        assert!(first / report.time.as_secs_f64() > least, "{:?}", report.ends);
    }
}

#[test]
fn a_sprayed_permutation_nearly_fills_a_tree() {
    let topology = tree(8);
    let list: Vec<Transfer> = permutation(128, 1)
        .into_iter()
        .map(|(from, to)| transfer(from.0, to.0, 2_000_000))
        .collect();
    let sprayed = run_transfers(&topology, &list, &PacketOptions::default()).unwrap();
    let ideal = 489.0 * 332e-9 + 6e-6;
    let slower = sprayed.time.as_secs_f64() / ideal;
    assert!(slower > 1.0 && slower < 1.25, "{slower}");
    let hashed = PacketOptions {
        routing: Routing::Ecmp,
        ..PacketOptions::default()
    };
    let hashed = run_transfers(&topology, &list, &hashed).unwrap();
    assert!(
        hashed.time > sprayed.time + sprayed.time,
        "{} {}",
        hashed.time,
        sprayed.time
    );
}

#[test]
fn shuffling_gives_every_place_once() {
    for count in [1, 2, 3, 7, 16, 64, 100, 256, 1000, 4096] {
        for order in [0, 1, u64::MAX, mixed(count), mixed(mixed(count))] {
            let mut places: Vec<u64> = (0..count).map(|nth| transport::shuffled(nth, count, order)).collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..count), "{count} {order}");
        }
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    let topology = tree(4);
    let list: Vec<Transfer> = permutation(16, 1)
        .into_iter()
        .map(|(from, to)| transfer(from.0, to.0, 200_000))
        .collect();
    for kind in kinds() {
        let options = PacketOptions { loss: 0.005, ..kind };
        let run = || run_transfers(&topology, &list, &options).unwrap();
        assert_eq!(run(), run());
    }
}

/// A number that stands for what happened in some runs, in their order.
fn digest(reports: &[PacketReport]) -> u64 {
    let counts = |report: &PacketReport| {
        let (events, packets, again) = (report.events, report.packets, report.again);
        let (trimmed, dropped, marked) = (report.trimmed, report.dropped, report.marked);
        let times = report.ends.iter().chain([&report.time]).map(|time| time.as_ps());
        let counted = [
            events,
            packets,
            again,
            trimmed,
            dropped,
            marked,
            report.pauses,
            report.queue_max.0,
        ];
        times.chain(counted).collect::<Vec<u64>>()
    };
    let all = reports.iter().flat_map(counts);
    all.fold(0, |digest, number| mixed(digest ^ number))
}

/// How the simulator stores things may change, but not what happens: whoever changes this number has changed the network.
#[test]
fn a_seed_has_one_history() {
    let tree_of_sixteen = tree(4);
    // Its ways are longer than what packets have room for.
    let torus = cluster(Fabric::Torus {
        sides: vec![24, 3],
        wire: WIRE,
    });
    let mut reports = Vec::new();
    for kind in kinds() {
        for (topology, loss) in [(&tree_of_sixteen, 0.005), (&tree_of_sixteen, 0.0), (&torus, 0.0)] {
            let options = PacketOptions { loss, ..kind.clone() };
            let list: Vec<Transfer> = permutation(topology.ranks(), 3)
                .into_iter()
                .map(|(from, to)| transfer(from.0, to.0, 150_000))
                .collect();
            reports.push(run_transfers(topology, &list, &options).unwrap());
        }
    }
    assert_eq!(digest(&reports), 1_257_415_821_534_660_123);
    let collective = Collective::AllReduce;
    let problem = Problem::new(collective, 16);
    let program = Algorithm::Ring
        .program(&problem, tree_of_sixteen.grid(16).unwrap())
        .unwrap();
    let options = PacketOptions::default();
    let ring = run_program(&tree_of_sixteen, &problem, &*program, Bytes(1 << 20), &options).unwrap();
    assert_eq!(digest(&[ring]), 7_496_697_693_365_557_304);
}

#[test]
fn what_cannot_be_is_refused() {
    let topology = switch(2);
    let sprayed = PacketOptions {
        routing: Routing::Spray,
        ..PacketOptions::roce()
    };
    assert_eq!(
        run_transfers(&topology, &[], &sprayed).unwrap_err(),
        PacketError::SprayedGoBackN
    );
    let narrow = PacketOptions {
        queue: 100,
        ..PacketOptions::default()
    };
    assert!(matches!(
        run_transfers(&topology, &[], &narrow).unwrap_err(),
        PacketError::OutOfBounds { field: "queue", .. }
    ));
    assert_eq!(
        run_transfers(&topology, &[transfer(0, 2, 1)], &PacketOptions::default()).unwrap_err(),
        PacketError::Run(RunError::NoSuchRank {
            rank: Rank(2),
            ranks: 2
        })
    );
}

#[test]
fn a_link_that_flaps_costs_what_it_was_down_for() {
    let topology = switch(2);
    let mut route = Vec::new();
    topology.route(Rank(0), Rank(1), 0, &mut route);
    let fault = LinkFault {
        link: route[1],
        from: Picos::from_us(10),
        until: Picos::from_us(30),
        left: 0.0,
    };
    let list = [transfer(0, 1, 409_600)];
    let options = PacketOptions {
        faults: vec![fault],
        ..PacketOptions::roce()
    };
    let report = run_transfers(&topology, &list, &options).unwrap();
    let whole = Picos::from_ns(101 * 332 + 2000);
    assert!(
        report.time >= whole.saturating_add(Picos::from_us(19)),
        "{}",
        report.time
    );
    assert!(
        report.time <= whole.saturating_add(Picos::from_us(25)),
        "{}",
        report.time
    );
}
