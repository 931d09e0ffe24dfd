//! Executions against the meaning of a collective: whatever the algorithm, the sizes, the type and the order of events, every rank ends
//! with what a loop over all inputs says.

mod collectives;

use std::sync::Arc;

use collectives::{Case, filled, programs, reference};
use proptest::prelude::*;
use weft_plan::collective::{Buffer, Collective, Counts, Layout, Problem, Sizes};
use weft_plan::schedule::{Program, Slice, verify};
use weft_plan::{Datatype, Rank, Reduction};
use weft_protocol::group::{
    CallRecord, Combiner, Compiled, Execution, LoopbackExchange, LoopbackGroup, LoopbackOptions, Reference, Source,
    Task, Turn, View,
};
use weft_protocol::{Memory, Seeded, VecMemory};

struct Player {
    execution: Execution,
    exchange: LoopbackExchange,
    memory: [Arc<VecMemory>; 3],
    ended: bool,
}

/// Lets all ranks begin a case.
fn players(case: &Case, program: &dyn Program, group: &LoopbackGroup, number: u64) -> Vec<Player> {
    let source = Source {
        program,
        partition: &case.partition(program),
        size: case.datatype.size(),
        average: case.reduction == Reduction::Avg && case.problem.collective.reduces(),
        pairwise: false,
    };
    let begin = |rank: Rank| {
        let compiled = Arc::new(Compiled::new(&source, rank).unwrap());
        let layout = Layout::new(source.partition, program, rank);
        let bytes = |buffer| layout.elements(buffer) as usize * source.size;
        let memory = [
            Arc::new(VecMemory::new(filled(case, rank, bytes(Buffer::Input)))),
            Arc::new(VecMemory::new(vec![0xaa; bytes(Buffer::Output)])),
            Arc::new(VecMemory::new(vec![0x55; compiled.scratch(0) as usize])),
        ];
        if case.problem.in_place {
            // What both share is in the output already, or stays in the input.
            let mut from = 0;
            for chunk in 0..case.problem.chunks(rank, Buffer::Input, source.partition.pieces()) {
                let (buffer, at) = layout.locate(Slice::input(chunk, 1));
                let start = from;
                from += at.end - at.start;
                if buffer == Buffer::Output {
                    let mut bytes = vec![0; (at.end - at.start) as usize * source.size];
                    memory[0].read(start * source.size as u64, &mut bytes);
                    memory[1].write(at.start * source.size as u64, &bytes);
                }
            }
        }
        let mut player = Player {
            execution: Execution::default(),
            exchange: group.exchange(rank),
            memory,
            ended: false,
        };
        let task = Task {
            compiled,
            combiners: Arc::new([Combiner::Builtin {
                datatype: case.datatype,
                reduction: case.reduction,
            }]),
            ranks: case.problem.ranks,
            record: CallRecord::new(number, 1, case.problem.collective.name()),
        };
        let views = player.memory.clone().map(|memory| View::whole(memory));
        player.execution.begin(task, views, &mut player.exchange).unwrap();
        player
    };
    (0..case.problem.ranks).map(Rank).map(begin).collect()
}

/// Turns all, in an order that the seed says, until all have ended.
fn play(players: &mut [Player], chance: &mut Seeded) {
    let mut idle = 0;
    while players.iter().any(|player| !player.ended) {
        let player = &mut players[chance.below(players.len() as u64) as usize];
        let turn = player.execution.turn(&mut player.exchange, &Reference).unwrap();
        player.ended = turn == Turn::Ended;
        idle = if turn == Turn::Moved { 0 } else { idle + 1 };
        assert!(idle < 100_000, "nobody moves any more");
    }
}

fn run(case: &Case, program: &dyn Program, options: LoopbackOptions) {
    let group = LoopbackGroup::new(case.problem.ranks, options);
    let mut players = players(case, program, &group, 0);
    play(&mut players, &mut Seeded::new(options.seed ^ 0x5eed));
    for (rank, player) in players.iter().enumerate() {
        let rank = Rank(rank as u32);
        let layout = Layout::new(&case.partition(program), program, rank);
        let chunks = case.problem.chunks(rank, Buffer::Output, program.shape().pieces);
        let (buffer, at) = layout.locate(Slice::output(0, chunks));
        let size = case.datatype.size() as u64;
        let bytes = player.memory[buffer as usize].snapshot();
        let output = &bytes[(at.start * size) as usize..(at.end * size) as usize];
        assert_eq!(
            output,
            reference(case, rank),
            "rank {} of {case:?} by {program:?}",
            rank.0
        );
    }
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = prop_oneof![Just(Sizes::Equal), Just(Sizes::Varying)];
    let problem =
        (2u32..=9, 0usize..10, sizes, any::<u32>(), any::<bool>()).prop_map(|(n, kind, sizes, root, in_place)| {
            let root = Rank(root % n);
            let collective = match kind {
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
                    to: Rank((root.0 + 1) % n),
                },
                _ => Collective::Barrier,
            };
            let apart = Problem::new(collective, n);
            match in_place && apart.in_place().check().is_ok() {
                true => apart.in_place(),
                false => apart,
            }
        });
    let types = (0usize..14, 0usize..5);
    (problem, types, 0u64..70, any::<u64>()).prop_map(|(problem, (datatype, reduction), most, seed)| {
        let mut chance = Seeded::new(seed);
        let mut several = |count: u32| (0..count).map(|_| chance.below(most + 1)).collect();
        let counts = match (problem.collective.sizes(), problem.collective) {
            (Sizes::Equal, _) => Counts::Equal(most),
            (Sizes::Varying, Collective::AllToAll { .. }) => Counts::PerPair(several(problem.ranks * problem.ranks)),
            (Sizes::Varying, _) => Counts::PerRank(several(problem.ranks)),
        };
        Case {
            problem,
            counts,
            datatype: Datatype::ALL[datatype],
            reduction: Reduction::ALL[reduction],
            seed,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn an_execution_does_what_the_collective_means(
        case in case(),
        room in 1usize..5,
        eager_max in 0u64..300,
        delay_max in 0u64..4,
        seed: u64,
    ) {
        for (algorithm, program) in programs(&case.problem) {
            verify(&case.problem, &*program).unwrap_or_else(|fault| panic!("{algorithm:?}: {fault}"));
            run(&case, &*program, LoopbackOptions { seed, room, eager_max, delay_max, ..LoopbackOptions::default() });
        }
    }
}
