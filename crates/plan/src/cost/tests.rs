use super::*;
use crate::algorithms::{Algorithm, Grid, Ring};
use crate::collective::{Collective, Problem, Sizes};
use crate::platform::Platform;
use crate::units::Rank;

fn cluster(grid: Grid) -> Placement {
    let link = |latency, gap, gigabytes| LinkCost {
        latency: Picos::from_ns(latency),
        per_span: Picos::from_ns(gap),
        bandwidth: Bandwidth::from_gigabytes_per_sec(gigabytes),
    };
    Placement {
        grid,
        local: link(500, 20, 100.0),
        across: link(5_000, 100, 25.0),
        rails: grid.local,
        reduction: Bandwidth::from_gigabytes_per_sec(50.0),
        copy: Bandwidth::from_gigabytes_per_sec(80.0),
        arena: None,
        cores: 0,
        channels: u16::MAX,
    }
}

fn problems(ranks: u32) -> Vec<Problem> {
    let (sizes, root) = (Sizes::Equal, Rank(ranks / 3));
    [
        Collective::AllReduce,
        Collective::AllGather { sizes },
        Collective::ReduceScatter { sizes },
        Collective::Broadcast { root },
        Collective::Reduce { root },
        Collective::Gather { root, sizes },
        Collective::Scatter { root, sizes },
        Collective::AllToAll { sizes },
        Collective::Barrier,
    ]
    .map(|collective| Problem::new(collective, ranks))
    .to_vec()
}

#[test]
fn a_ring_costs_what_the_formula_says() {
    // One rank a node: 2 (n - 1) steps, each with latency, gap, an nth of the bytes, and in the first half its reduction.
    let placement = cluster(Grid { nodes: 8, local: 1 });
    let problem = Problem::new(Collective::AllReduce, 8);
    let profile = Profile::of(&problem, &Ring::new(problem).unwrap(), &placement);
    let bytes = Bytes(8 << 20);
    let nth = Bytes(1 << 20);
    let step = placement.across.time(nth, 1).as_ps();
    let reduction = placement.reduction.time_for(nth).as_ps();
    let expected = 14 * step + 7 * reduction;
    let predicted = profile.predict(bytes);
    assert_eq!(predicted.steps, 14);
    assert!(
        predicted.time.as_ps().abs_diff(expected) <= 14,
        "{predicted:?}, {expected}"
    );
}

#[test]
fn phases_tell_what_all_steps_tell() {
    let mut differ = Vec::new();
    for (nodes, local) in [(1, 16), (16, 1), (4, 8), (3, 5), (7, 2), (2, 3)] {
        let grid = Grid { nodes, local };
        let placement = cluster(grid);
        for problem in problems(grid.ranks()) {
            for candidate in Candidate::all(&problem) {
                let Some(program) = candidate.program(&problem, grid) else {
                    continue;
                };
                let Some(phases) = program.phases() else { continue };
                let steps: u32 = phases.iter().map(|phase| phase.steps.len() as u32).sum();
                assert_eq!(steps, program.shape().steps, "{candidate} for {problem:?}");
                let all = profile::Profile::by_steps(&problem, &*program, &placement);
                let few = profile::Profile::by_phases(&problem, &*program, &placement, &phases);
                for bytes in [0, 1 << 12, 1 << 20, 1 << 30] {
                    let (all, few) = (all.predict(Bytes(bytes)).time, few.predict(Bytes(bytes)).time);
                    let ratio = few.as_secs_f64() / all.as_secs_f64().max(1e-12);
                    if !(0.75..=1.25).contains(&ratio) && all != few {
                        differ.push(format!(
                            "{candidate} for {problem:?} on {grid:?}, {bytes} bytes: {few} by phases, {all} by steps"
                        ));
                    }
                }
            }
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

#[test]
fn the_envelope_is_the_fastest_everywhere() {
    for grid in [Grid::flat(2), Grid::flat(6), Grid { nodes: 4, local: 4 }] {
        for problem in problems(grid.ranks()) {
            let selector = Selector::new(problem, cluster(grid));
            for exponent in 0..36 {
                for bytes in [1u64 << exponent, 3 << exponent] {
                    let ranked = selector.ranked(Bytes(bytes));
                    let chosen = selector.choose(Bytes(bytes)).unwrap();
                    let time = selector.predict(chosen, Bytes(bytes)).unwrap().time.as_secs_f64();
                    let best = ranked[0].1.time.as_secs_f64();
                    // Someone who is ahead only in the midst of an octave may be missed, by little.
                    assert!(
                        time <= best * 1.05,
                        "{problem:?} {bytes}: {chosen} takes {time}, {} takes {best}",
                        ranked[0].0
                    );
                }
            }
        }
    }
}

#[test]
fn far_more_ranks_than_anybody_has_are_selected_for_at_once() {
    let grid = Grid {
        nodes: 16_384,
        local: 8,
    };
    for collective in [Collective::AllReduce, Collective::AllGather { sizes: Sizes::Equal }] {
        let selector = Selector::new(Problem::new(collective, grid.ranks()), cluster(grid));
        let large = selector.choose(Bytes(16 << 30)).unwrap();
        assert!(
            matches!(large.algorithm, Algorithm::RailRing | Algorithm::RailDoubling),
            "{large}"
        );
        assert_eq!(selector.choose(Bytes(16 << 30)), Some(large));
    }
}

#[test]
fn a_platform_without_the_transport_is_told() {
    let mut platform = Platform::laptop();
    platform.transports.remove("tcp");
    platform.transports.remove("verbs");
    let error = Placement::on(&platform, Grid { nodes: 2, local: 1 }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the platform `laptop` says nothing of a transport verbs or tcp (known here: file, object, shared_memory, shared_memory.foreign)"
    );
    assert!(Placement::on(&platform, Grid::flat(2)).is_ok());
}

#[test]
fn ranks_that_see_each_others_memory_talk_at_once_while_it_is_little() {
    for ranks in [2, 4] {
        let placement = Placement::on(&Platform::laptop(), Grid::flat(ranks)).unwrap();
        let selector = Selector::new(Problem::new(Collective::AllReduce, ranks), placement);
        let chosen = |bytes| selector.choose(Bytes(bytes)).map(|candidate| candidate.algorithm);
        assert_eq!(chosen(1 << 10), Some(Algorithm::Direct));
        assert_eq!(chosen(64 << 20), Some(Algorithm::TwoShot));
    }
}

#[test]
fn what_others_have_just_written_costs_more_than_what_they_have_had() {
    let arena = Platform::laptop().machines[0].arena.unwrap();
    let problem = Problem::new(Collective::AllReduce, 2);
    let time = |fresh, algorithm: Algorithm, bytes| {
        let arena = Some(crate::platform::Arena { fresh, ..arena });
        let placement = Placement {
            arena,
            ..Placement::on(&Platform::laptop(), Grid::flat(2)).unwrap()
        };
        let program = algorithm.program(&problem, placement.grid).unwrap();
        Profile::of(&problem, &*program, &placement).predict(Bytes(bytes)).time
    };
    let slow = Some(Bandwidth::from_gigabytes_per_sec(2.0));
    let (small, large) = (1 << 20, 1 << 28);
    // The second half of two steps passes on what the first has made; one step reads inputs alone.
    assert!(time(slow, Algorithm::TwoShot, small) > time(None, Algorithm::TwoShot, small));
    assert_eq!(
        time(slow, Algorithm::Direct, small),
        time(None, Algorithm::Direct, small)
    );
    // What does not fit the cache has long left it.
    assert_eq!(
        time(slow, Algorithm::TwoShot, large),
        time(None, Algorithm::TwoShot, large)
    );
}
