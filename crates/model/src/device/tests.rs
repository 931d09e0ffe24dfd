use super::*;
use weft_plan::algorithms::{Pairwise, Pat, Ring};
use weft_plan::collective::{Problem, Sizes};
use weft_plan::cost::{Placement, Profile};
use weft_plan::platform::Platform;
use weft_plan::schedule::Program;

const GATHER: Collective = Collective::AllGather { sizes: Sizes::Equal };
const SCATTER: Collective = Collective::ReduceScatter { sizes: Sizes::Equal };
const ALL_TO_ALL: Collective = Collective::AllToAll { sizes: Sizes::Equal };

/// Steps of a program, and the most that a rank sends in all of them, as its profile sees it.
fn profiled(collective: Collective, ranks: u32, program: &dyn Program) -> (u32, f64) {
    let mut platform = Platform::laptop();
    for cost in platform.transports.values_mut() {
        cost.latency = Picos::ZERO;
        cost.per_span = Picos::ZERO;
        cost.bandwidth = weft_plan::units::Bandwidth::from_gigabytes_per_sec(1.0);
    }
    // One rank a node, so that nothing is copied but what is sent.
    let placement = Placement::on(&platform, Grid { nodes: ranks, local: 1 }).unwrap();
    let problem = Problem::new(collective, ranks);
    let bytes = 1u64 << 30;
    let prediction = Profile::of(&problem, program, &placement).predict(Bytes(bytes));
    (prediction.steps, prediction.transfer.as_secs_f64() * 1e9 / bytes as f64)
}

#[test]
fn the_closed_forms_are_those_of_the_programs() {
    for n in 2..=16 {
        for collective in [Collective::AllReduce, GATHER, SCATTER] {
            let problem = Problem::new(collective, n);
            let (steps, sent) = profiled(collective, n, &Ring::new(problem).unwrap());
            let work = DeviceWork::of(DeviceAlgorithm::Ring, collective, Grid::flat(n)).unwrap();
            assert_eq!(work.hops(), steps, "{collective} among {n}");
            assert!((work.sent - sent).abs() < 1e-6, "{collective} among {n}: {sent}");
        }
        let problem = Problem::new(ALL_TO_ALL, n);
        let (steps, sent) = profiled(ALL_TO_ALL, n, &Pairwise::new(problem).unwrap());
        let work = DeviceWork::of(DeviceAlgorithm::Exchange, ALL_TO_ALL, Grid::flat(n)).unwrap();
        assert_eq!(work.hops(), steps);
        assert!((work.sent - sent).abs() < 1e-6, "{sent}");
    }
    for n in [4, 8, 16, 32] {
        let problem = Problem::new(GATHER, n);
        let (steps, sent) = profiled(GATHER, n, &Pat::new(problem).unwrap());
        let work = DeviceWork::of(DeviceAlgorithm::Pat, GATHER, Grid { nodes: n, local: 1 }).unwrap();
        assert_eq!(work.hops(), steps);
        assert!((work.through_nics - sent).abs() < 1e-6, "{sent}");
    }
    // The rail algorithm does in both dimensions what a ring does in one.
    let grid = Grid { nodes: 4, local: 8 };
    let work = DeviceWork::of(DeviceAlgorithm::Rail, Collective::AllReduce, grid).unwrap();
    let ring = |n| DeviceWork::of(DeviceAlgorithm::Ring, Collective::AllReduce, Grid::flat(n)).unwrap();
    assert_eq!(work.hops(), ring(8).hops() + ring(4).hops());
    assert_eq!((work.sent, work.through_nics), (ring(8).sent, ring(4).sent));
}

#[test]
fn it_chooses_as_nccl_does() {
    let chosen = |system: &str, n, collective, bytes| {
        let system = System::named(system).unwrap();
        let device = DeviceModel::of(&system, n).unwrap();
        let estimate = device
            .predict(collective, Bytes(bytes), &DeviceOptions::default())
            .unwrap();
        (estimate.algorithm, estimate.protocol)
    };
    use DeviceAlgorithm::{Exchange, Nvls, NvlsTree, Ring, Tree};
    use Protocol::{Ll, Ll128, Simple};
    let all = Collective::AllReduce;
    // nccl-tests issue 309: NVLS from 2 MiB on for 8 H100, LL below.
    assert_eq!(chosen("dgx-h100", 8, all, 1 << 20), (Ring, Ll));
    assert_eq!(chosen("dgx-h100", 8, all, 2 << 20), (Nvls, Simple));
    // The jumps in the sweeps of 2 GPUs are where LL ends.
    assert_eq!(chosen("dgx-h100", 2, all, 1 << 20), (Ring, Ll));
    assert_eq!(chosen("dgx-h100", 2, all, 2 << 20), (Ring, Simple));
    assert_eq!(chosen("dgx-a100", 2, all, 1 << 20), (Ring, Simple));
    assert_eq!(chosen("dgx-b200", 2, all, 2 << 20), (Ring, Ll));
    assert_eq!(chosen("dgx-b200", 2, all, 4 << 20), (Ring, Simple));
    assert_eq!(chosen("gb200-nvl72", 4, all, 4 << 20), (Ring, Ll));
    assert_eq!(chosen("gb200-nvl72", 4, all, 8 << 20), (Ring, Simple));
    assert_eq!(chosen("dgx-b200", 8, all, 4 << 20), (Nvls, Simple));
    assert_eq!(chosen("dgx-h100", 4, all, 8 << 20), (Ring, Ll128));
    assert_eq!(chosen("dgx-h100", 16, all, 64), (Tree, Ll));
    assert_eq!(chosen("dgx-h100", 16, all, 1 << 20), (Tree, Ll128));
    assert_eq!(chosen("dgx-h100", 16, all, 1 << 30), (NvlsTree, Simple));
    assert_eq!(chosen("dgx-h100", 8, ALL_TO_ALL, 1 << 20).0, Exchange);
}

#[test]
fn settings_restrict_the_choice() {
    let options = DeviceOptions::parse("NCCL_ALGO=Ring NCCL_PROTO=LL128 NCCL_NVLS_ENABLE=0");
    assert_eq!(options.algorithms, [DeviceAlgorithm::Ring]);
    assert_eq!(options.protocols, [Protocol::Ll128]);
    assert!(options.without_nvls);
    assert_eq!(DeviceOptions::parse("Ring+LL128, NVLS off"), options);
    assert_eq!(DeviceOptions::parse("defaults (NVLS)"), DeviceOptions::default());
    assert_eq!(
        DeviceOptions::parse("NCCL_ALGO=Ring MIN_CTAS=24 IB_QPS=2").algorithms,
        [DeviceAlgorithm::Ring]
    );
}

#[test]
fn more_bytes_and_more_ranks_take_longer_for_the_same_algorithm() {
    for name in System::names() {
        let system = System::named(name).unwrap();
        let ring = DeviceOptions::parse("NCCL_ALGO=Ring NCCL_PROTO=Simple");
        let mut last = Picos::ZERO;
        for n in [2, 8, 64, 1024, 1 << 20] {
            let device = DeviceModel::of(&system, n).unwrap();
            let mut smaller = Picos::ZERO;
            for bytes in (0..40).map(|k| Bytes(1 << k)) {
                let time = device.predict(Collective::AllReduce, bytes, &ring).unwrap().time;
                assert!(time >= smaller, "{name} {n} {bytes}");
                smaller = time;
            }
            assert!(smaller > last, "{name} {n}");
            last = smaller;
        }
    }
}

#[test]
fn every_collective_has_a_time_at_every_scale() {
    let system = System::named("gb300-nvl72").unwrap();
    for n in [2, 3, 7, 64, 72, 128, 131_072, 1 << 20] {
        let device = DeviceModel::of(&system, n).unwrap();
        assert_eq!(device.grid().ranks(), n);
        for name in Collective::NAMES {
            let collective = Collective::named(name, weft_plan::Rank(0), weft_plan::Rank(1)).unwrap();
            let estimate = device
                .predict(collective, Bytes(1 << 20), &DeviceOptions::default())
                .unwrap();
            assert!(estimate.time > Picos::ZERO);
        }
    }
    assert!(matches!(
        DeviceModel::of(&system, 0),
        Err(DeviceModelError::Ranks { .. })
    ));
    let grid = Grid { nodes: 2, local: 100 };
    assert!(matches!(
        DeviceModel::placed(&system, grid),
        Err(DeviceModelError::Domain { .. })
    ));
}
