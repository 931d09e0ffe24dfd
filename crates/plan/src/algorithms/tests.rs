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

fn programs(problem: Problem) -> Vec<Box<dyn Program>> {
    let mut all: Vec<Box<dyn Program>> = Vec::new();
    all.extend(Alone::new(problem).map(|p| Box::new(p) as Box<dyn Program>));
    all.extend(Ring::new(problem).map(|p| Box::new(p) as Box<dyn Program>));
    all.extend(Direct::new(problem).map(|p| Box::new(p) as Box<dyn Program>));
    all
}

#[test]
fn every_algorithm_is_right_for_every_number_of_ranks() {
    for ranks in 1..=64 {
        for problem in problems(ranks) {
            for program in programs(problem) {
                match verify(&problem, &*program) {
                    Ok(summary) => assert!(summary.same_bits, "{problem:?} {program:?}"),
                    Err(fault) => panic!("{problem:?} {program:?}: {fault}"),
                }
            }
        }
    }
}
