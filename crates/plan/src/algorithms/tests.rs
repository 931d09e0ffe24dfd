use super::*;
use crate::collective::{Collective, Problem, Sizes};
use crate::schedule::{Program, verify};

/// Every collective among `ranks`, apart and in place; those with a root with several.
fn problems(ranks: u32) -> Vec<Problem> {
    let mut all = vec![Collective::AllReduce, Collective::Barrier];
    for sizes in [Sizes::Equal, Sizes::Varying] {
        all.extend([
            Collective::AllGather { sizes },
            Collective::ReduceScatter { sizes },
            Collective::AllToAll { sizes },
        ]);
    }
    let mut roots = vec![Rank(0), Rank(ranks / 2), Rank(ranks - 1)];
    roots.dedup();
    for root in roots {
        all.extend([Collective::Broadcast { root }, Collective::Reduce { root }]);
        for sizes in [Sizes::Equal, Sizes::Varying] {
            all.extend([Collective::Gather { root, sizes }, Collective::Scatter { root, sizes }]);
        }
        let to = Rank((root.0 + 1) % ranks);
        all.push(Collective::SendReceive { from: root, to });
    }
    all.into_iter()
        .flat_map(|collective| {
            let apart = Problem::new(collective, ranks);
            [apart, apart.in_place()]
        })
        .filter(|problem| problem.check().is_ok())
        .collect()
}

/// How `ranks` may be spread over nodes.
fn grids(ranks: u32) -> Vec<Grid> {
    let mut grids = vec![Grid::flat(ranks)];
    let deep = (2..ranks).filter(|local| ranks.is_multiple_of(*local));
    grids.extend(deep.map(|local| Grid {
        nodes: ranks / local,
        local,
    }));
    grids
}

/// Every program for a problem, with its name. A grid adds those that need one.
fn programs(problem: &Problem) -> Vec<(String, Box<dyn Program>)> {
    let mut programs: Vec<(String, Box<dyn Program>)> = Vec::new();
    for &algorithm in Algorithm::ALL {
        for grid in grids(problem.ranks) {
            let depends = matches!(
                algorithm,
                Algorithm::Hierarchical | Algorithm::RailRing | Algorithm::RailDoubling
            );
            if depends == grid.is_deep()
                && let Some(program) = algorithm.program(problem, grid)
            {
                programs.push((format!("{algorithm} {grid:?}"), program));
            }
        }
    }
    for aggregate in [1, 3] {
        let pat = Pat::with_aggregate(*problem, aggregate);
        programs.extend(boxed(pat).map(|program| (format!("pat {aggregate}"), program)));
    }
    programs
}

fn all_are_right(ranks: u32) {
    let mut wrong = Vec::new();
    for problem in problems(ranks) {
        for (name, program) in programs(&problem) {
            match verify(&problem, &*program) {
                Ok(summary) if summary.same_bits => {}
                Ok(_) => wrong.push(format!("{problem:?} by {name}: ranks differ in the order of reduction")),
                Err(fault) => wrong.push(format!("{problem:?} by {name}: {fault}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_algorithm_is_right_for_up_to_24_ranks() {
    (1..=24).for_each(all_are_right);
}
#[test]
fn every_algorithm_is_right_for_25_to_44_ranks() {
    (25..=44).for_each(all_are_right);
}
#[test]
fn every_algorithm_is_right_for_45_to_56_ranks() {
    (45..=56).for_each(all_are_right);
}
#[test]
fn every_algorithm_is_right_for_57_to_64_ranks() {
    (57..=64).for_each(all_are_right);
}

#[test]
fn every_collective_has_at_least_two_algorithms() {
    for problem in problems(8) {
        let names = programs(&problem).len();
        assert!(names >= 2, "{problem:?} has {names}");
    }
}
