//! Executions against the meaning of a collective: whatever the algorithm, the sizes, the type and the order of events, every rank ends
//! with what a loop over all inputs says.

mod collectives;

use std::sync::Arc;

use collectives::{Case, filled, programs, reference};
use proptest::prelude::*;
use weft_plan::algorithms::{Algorithm, Ring};
use weft_plan::collective::{Buffer, Collective, Counts, Layout, Partition, Problem, Sizes};
use weft_plan::schedule::{Program, Slice, verify};
use weft_plan::{Datatype, Rank, Reduction};
use weft_protocol::group::{
    CallRecord, Combiner, Compiled, Execution, LoopbackExchange, LoopbackGroup, LoopbackOptions, Reference, Scope,
    Source, Task, Turn, View,
};
use weft_protocol::{HostBytes, Seeded, VecMemory};

struct Player {
    execution: Execution,
    exchange: LoopbackExchange,
    memory: [Arc<VecMemory>; 3],
    ended: bool,
}

/// A case, and a program for it.
type Way<'a> = (&'a Case, &'a dyn Program);

/// Lets all ranks begin a case, each in its own way.
fn players<'a>(ranks: u32, way: impl Fn(Rank) -> Way<'a>, group: &LoopbackGroup, number: u64) -> Vec<Player> {
    let begin = |rank: Rank| {
        let (case, program) = way(rank);
        let source = Source {
            program,
            partition: &case.partition(program),
            size: case.datatype.size(),
            average: case.reduction == Reduction::Avg && case.problem.collective.reduces(),
            scope: Scope::Known,
        };
        let compiled = Compiled::new(&source, rank).unwrap();
        let layout = Layout::new(source.partition, program, rank);
        let bytes = |buffer| layout.elements(buffer) as usize * source.size;
        let memory = [
            Arc::new(VecMemory::new(filled(case, rank, bytes(Buffer::Input)))),
            Arc::new(VecMemory::new(vec![0xaa; bytes(Buffer::Output)])),
            Arc::new(VecMemory::new(vec![0x55; compiled.scratch() as usize])),
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
        let task = Arc::new(Task {
            compiled,
            combiners: vec![Combiner::Builtin {
                datatype: case.datatype,
                reduction: case.reduction,
            }],
            ranks: case.problem.ranks,
            record: CallRecord::new(0, 1, case.problem.collective.name()),
        });
        let mut views = player.memory.clone().map(|memory| View::whole(memory)).to_vec();
        let begun = player.execution.begin(&task, number, &mut views, &mut player.exchange);
        begun.unwrap();
        player
    };
    (0..ranks).map(Rank).map(begin).collect()
}

/// Turns all, in an order that the seed says, until all have ended.
fn play(players: &mut [Player], chance: &mut Seeded) {
    let mut idle = 0;
    while players.iter().any(|player| !player.ended) {
        let player = &mut players[chance.below(players.len() as u64) as usize];
        let turn = player.execution.turn(&mut player.exchange, &Reference, 1).unwrap();
        player.ended = turn == Turn::Ended;
        idle = if turn == Turn::Moved { 0 } else { idle + 1 };
        assert!(idle < 100_000, "nobody moves any more");
    }
}

fn run<'a>(ranks: u32, way: impl Fn(Rank) -> Way<'a>, options: LoopbackOptions) {
    let group = LoopbackGroup::new(ranks, options);
    let mut players = players(ranks, &way, &group, 0);
    play(&mut players, &mut Seeded::new(options.seed ^ 0x5eed));
    for (rank, player) in players.iter().enumerate() {
        let rank = Rank(rank as u32);
        let (case, program) = way(rank);
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
    (2u32..=9, 0u64..70, any::<u64>()).prop_map(|(ranks, most, seed)| Case::random(ranks, most, seed))
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
            let options = LoopbackOptions { seed, room, eager_max, delay_max, ..LoopbackOptions::default() };
            run(case.problem.ranks, |_| (&case, &*program), options);
        }
    }

    #[test]
    fn some_ranks_work_in_place_and_others_do_not(case in case(), in_place: u16, seed: u64) {
        let apart = Case { problem: Problem { in_place: false, ..case.problem }, ..case };
        let both = apart.problem.in_place();
        prop_assume!(both.check().is_ok());
        let within = Case { problem: both, ..apart.clone() };
        let (programs_apart, programs_within) = (programs(&apart.problem), programs(&both));
        let names = |programs: &[(Algorithm, Box<dyn Program>)]| programs.iter().map(|it| it.0).collect::<Vec<_>>();
        prop_assert_eq!(names(&programs_apart), names(&programs_within));
        for ((algorithm, a), (_, b)) in programs_apart.iter().zip(&programs_within) {
            prop_assert_eq!((a.shape().pieces, a.shape().channels), (b.shape().pieces, b.shape().channels), "{}", algorithm);
            let way = |rank: Rank| match in_place >> rank.0 & 1 {
                0 => (&apart, &**a),
                _ => (&within, &**b),
            };
            run(apart.problem.ranks, way, LoopbackOptions { seed, ..LoopbackOptions::default() });
        }
    }
}

#[test]
fn more_parts_than_channels_share_them() {
    let problem = Problem::new(Collective::ReduceScatter { sizes: Sizes::Equal }, 3);
    let program = Ring::new(problem).unwrap();
    let partition = Partition::new(&problem, Counts::Equal(9), program.shape().pieces).unwrap();
    let source = Source {
        program: &program,
        partition: &partition,
        size: 1,
        average: false,
        scope: Scope::Known,
    };
    const PARTS: usize = 5;
    for channels in [1, 2, 4] {
        let options = LoopbackOptions {
            channels,
            room: 1,
            ..LoopbackOptions::default()
        };
        let group = LoopbackGroup::new(3, options);
        let begin = |rank: Rank| {
            let compiled = Compiled::group(&[source; PARTS], rank, channels).unwrap();
            assert!(compiled.channels() <= channels);
            let memory: Vec<[Arc<VecMemory>; 2]> = (0..PARTS)
                .map(|part| {
                    let input = vec![rank.0 as u8 + 10 * part as u8; 27];
                    [input, vec![0; 9]].map(|bytes| Arc::new(VecMemory::new(bytes)))
                })
                .collect();
            assert!(compiled.scratch() > 0, "all of them share one buffer for it");
            let scratch = Arc::new(VecMemory::zeroed(compiled.scratch() as usize));
            let sum = Combiner::Builtin {
                datatype: Datatype::U8,
                reduction: Reduction::Sum,
            };
            let task = Arc::new(Task {
                compiled,
                combiners: vec![sum; PARTS],
                ranks: 3,
                record: CallRecord::new(0, 1, "several"),
            });
            let (mut execution, mut exchange) = (Execution::default(), group.exchange(rank));
            let views = memory.iter().flatten().map(|memory| View::whole(memory.clone()));
            let mut views: Vec<View> = views.chain([View::whole(scratch)]).collect();
            execution.begin(&task, 0, &mut views, &mut exchange).unwrap();
            let outputs: Vec<Arc<VecMemory>> = memory.iter().map(|of| of[1].clone()).collect();
            (execution, exchange, outputs)
        };
        let mut ranks: Vec<_> = (0..3).map(Rank).map(begin).collect();
        let mut ended = [false; 3];
        for _ in 0..100_000 {
            for (at, (execution, exchange, _)) in ranks.iter_mut().enumerate() {
                ended[at] |= execution.turn(exchange, &Reference, 1).unwrap() == Turn::Ended;
            }
        }
        assert_eq!(ended, [true; 3], "{channels} channels");
        for (part, output) in ranks.iter().flat_map(|(_, _, outputs)| outputs.iter().enumerate()) {
            assert_eq!(output.snapshot(), [30 * part as u8 + 3; 9]);
        }
    }
}
