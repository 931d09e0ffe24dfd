//! What lowering, files and the plain executor must agree on, for every algorithm.

use super::*;
use crate::algorithms::{Algorithm, Grid};
use crate::collective::{Collective, Counts, Partition, Problem, Sizes};
use crate::harness;
use crate::schedule::encode::{DecodeError, Schedule, from_json, to_json};
use crate::schedule::lower::Portioned;
use proptest::prelude::*;

fn any_problem(most: u32) -> impl Strategy<Value = Problem> {
    let sizes = prop_oneof![Just(Sizes::Equal), Just(Sizes::Varying)];
    (2..=most, any::<u32>(), any::<bool>(), sizes, 0..10u32).prop_map(|(ranks, root, in_place, sizes, which)| {
        let root = Rank(root % ranks);
        let collective = match which {
            0 => Collective::AllReduce,
            1 => Collective::AllGather { sizes },
            2 => Collective::ReduceScatter { sizes },
            3 => Collective::Broadcast { root },
            4 => Collective::Reduce { root },
            5 => Collective::Gather { root, sizes },
            6 => Collective::Scatter { root, sizes },
            7 => Collective::AllToAll { sizes },
            8 => Collective::SendReceive {
                from: root,
                to: Rank((root.0 + 1) % ranks),
            },
            _ => Collective::Barrier,
        };
        let apart = Problem::new(collective, ranks);
        let in_place = in_place && apart.in_place().check().is_ok();
        Problem { in_place, ..apart }
    })
}

/// Every program for a problem; on as many nodes as divide its ranks.
fn programs(problem: &Problem) -> Vec<(Algorithm, Box<dyn Program>)> {
    let local = (2..problem.ranks).find(|local| problem.ranks.is_multiple_of(*local));
    let grid = local.map_or(Grid::flat(problem.ranks), |local| Grid {
        nodes: problem.ranks / local,
        local,
    });
    let built = Algorithm::ALL
        .iter()
        .map(|&algorithm| (algorithm, algorithm.program(problem, grid)));
    built
        .filter_map(|(algorithm, program)| Some((algorithm, program?)))
        .collect()
}

/// What every rank must end with, written down once more and independently: over whole blocks, from the definition of the collective.
fn expected(problem: &Problem, sizes: &Counts, inputs: &[Vec<u64>]) -> Vec<Vec<u64>> {
    let n = problem.ranks as usize;
    let size = |from: usize, to: usize| match sizes {
        Counts::Equal(count) => *count as usize,
        Counts::PerRank(list) => list[to] as usize,
        Counts::PerPair(list) => list[from * n + to] as usize,
    };
    let sum = |at: std::ops::Range<usize>| -> Vec<u64> {
        at.map(|i| inputs.iter().fold(0u64, |sum, input| sum.wrapping_add(input[i])))
            .collect()
    };
    let block = |from: usize, to: usize| {
        let start: usize = (0..to).map(|block| size(from, block)).sum();
        start..start + size(from, to)
    };
    let everything = inputs.concat();
    (0..n)
        .map(|rank| match problem.collective {
            Collective::AllReduce => sum(0..inputs[rank].len()),
            Collective::AllGather { .. } => everything.clone(),
            Collective::ReduceScatter { .. } => sum(block(rank, rank)),
            Collective::Broadcast { root } => inputs[root.0 as usize].clone(),
            Collective::Reduce { root } if rank == root.0 as usize => sum(0..inputs[rank].len()),
            Collective::Gather { root, .. } if rank == root.0 as usize => everything.clone(),
            Collective::Scatter { root, .. } => inputs[root.0 as usize][block(rank, rank)].to_vec(),
            Collective::AllToAll { .. } => (0..n)
                .flat_map(|from| inputs[from][block(from, rank)].to_vec())
                .collect(),
            Collective::SendReceive { from, to } if rank == to.0 as usize => inputs[from.0 as usize].clone(),
            _ => Vec::new(),
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Verified, run plainly, and computed from the definition: three times the same, whatever the sizes, none included.
    #[test]
    fn the_plain_executor_gives_what_the_verifier_promises(
        problem in any_problem(9),
        lists in (prop::collection::vec(0u64..23, 81), 0u64..40),
        grain in 1u64..5,
        portions in 1u32..4,
        seed in any::<u64>(),
    ) {
        let n = problem.ranks as usize;
        let counts = match (problem.collective.sizes(), problem.collective) {
            (Sizes::Equal, _) => Counts::Equal(lists.1),
            (_, Collective::AllToAll { .. }) => Counts::PerPair(lists.0[..n * n].to_vec()),
            _ => Counts::PerRank(lists.0[..n].to_vec()),
        };
        for (algorithm, program) in programs(&problem) {
            let program: Box<dyn Program> = match portions {
                1 => program,
                _ => Box::new(Portioned::staggered(program, portions)),
            };
            let summary = verify(&problem, &*program);
            prop_assert!(summary.is_ok(), "{}: {}", algorithm, summary.unwrap_err());
            let partition = Partition::new(&problem, counts.clone(), program.shape().pieces).unwrap().with_grain(grain);
            let lengths = (0..problem.ranks).map(|rank| {
                let chunks = problem.chunks(Rank(rank), Buffer::Input, program.shape().pieces);
                partition.slice(&*program, Rank(rank), Slice::input(0, chunks))
            });
            let mut value = seed;
            let inputs: Vec<Vec<u64>> = lengths
                .map(|len| (0..len).map(|_| { value = value.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11); value }).collect())
                .collect();
            let wanted = expected(&problem, &counts, &inputs);
            let outputs = reference::run(&*program, &partition, inputs.clone(), u64::wrapping_add, seed);
            prop_assert_eq!(outputs, Some(wanted), "{}", algorithm);
            if problem.collective == Collective::AllReduce {
                // In floating point too, everybody gets the same bits.
                let reals = inputs.iter().map(|input| input.iter().map(|&v| v as f32 * 1e-9).collect()).collect();
                let outputs = reference::run(&*program, &partition, reals, |a: f32, b| a + b, seed).unwrap();
                let bits = |output: &Vec<f32>| output.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                prop_assert!(outputs.iter().all(|output| bits(output) == bits(&outputs[0])), "{}", algorithm);
            }
        }
    }

    #[test]
    fn portions_are_right_together_and_staggered(problem in any_problem(20), portions in 2u32..6) {
        for stagger in [false, true] {
            for (algorithm, program) in programs(&problem) {
                let lowered = if stagger { Portioned::staggered(program, portions) } else { Portioned::together(program, portions) };
                let summary = verify(&problem, &lowered);
                prop_assert!(summary.is_ok(), "{}: {}", algorithm, summary.unwrap_err());
            }
        }
    }

    #[test]
    fn a_schedule_reads_back_from_its_file(problem in any_problem(7)) {
        for (algorithm, program) in programs(&problem) {
            let schedule = Schedule::of(algorithm.name(), problem, &*program);
            let text = to_json(&schedule);
            let read = from_json(&text);
            prop_assert!(read.is_ok(), "{}: {:?}", algorithm, read);
            prop_assert_eq!(to_json(&read.unwrap()), text);
        }
    }

    #[test]
    fn a_changed_file_is_refused_or_right(at in 0usize..4000, change in "[ -~]{0,3}", cut in 0usize..4) {
        let problem = Problem::new(Collective::AllReduce, 3);
        let text = to_json(&Schedule::of("ring", problem, &crate::algorithms::Ring::new(problem).unwrap()));
        let at = at % text.len();
        let end = text.len().min(at + cut);
        harness::schedule(&format!("{}{change}{}", &text[..at], &text[end..]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn more_ranks_than_the_suite_counts_through(problem in any_problem(150)) {
        for (algorithm, program) in programs(&problem) {
            let summary = verify(&problem, &*program);
            prop_assert!(summary.is_ok_and(|summary| summary.same_bits), "{} by {}", problem.collective, algorithm);
        }
    }
}

#[test]
fn a_file_that_asks_for_too_much_is_refused_before_it_gets_it() {
    let file = |problem: &str, rest: &str| from_json(&format!(r#"{{"name": "x", "problem": {problem}, {rest}}}"#));
    let two = r#"{"collective": "all-reduce", "ranks": 2}"#;
    let many = r#"{"collective": "all-reduce", "ranks": 4000000000}"#;
    let too_much = |result: Result<Schedule, DecodeError>| matches!(result, Err(DecodeError::TooMuch { .. }));
    assert!(too_much(file(many, r#""ranks": []"#)));
    assert!(too_much(file(two, r#""pieces": 4000000000, "ranks": [[], []]"#)));
    assert!(too_much(file(two, r#""scratch": 4000000000, "ranks": [[], []]"#)));
    let slice = r#"{"buffer": "input", "first": 0, "count": 4000000000}"#;
    let send = format!(r#""ranks": [[[{{"send": {{"to": 1, "slice": {slice}}}}}]], []]"#);
    assert!(too_much(file(two, &send)));
    let extent = r#""scratch": 1, "scratch_extents": [[{"block": "common", "piece": 4294967295}]], "ranks": [[], []]"#;
    assert!(matches!(
        file(two, extent),
        Err(DecodeError::Wrong(Fault::BadExtent {
            rank: Rank(0),
            chunk: 0
        }))
    ));
    assert!(matches!(
        file(two, r#""ranks": [[]]"#),
        Err(DecodeError::WrongRanks { listed: 1, ranks: 2 })
    ));
    assert!(matches!(
        file(two, r#""ranks": [[], []]"#),
        Err(DecodeError::Wrong(Fault::WrongResult { .. }))
    ));
    let unknown = file(two, r#""colour": 1, "ranks": [[], []]"#).unwrap_err().to_string();
    assert!(
        unknown.starts_with("line 1, column 75: unknown field `colour`"),
        "{unknown}"
    );
}
