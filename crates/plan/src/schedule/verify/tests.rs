//! Programs with one thing wrong, each found, and told with its place.

use super::*;
use crate::algorithms::{Algorithm, BinomialTree, Direct, Dissemination, Grid, Ring};
use crate::collective::Sizes;
use crate::schedule::Listed;

const ALL_REDUCE: Problem = Problem::new(Collective::AllReduce, 4);

fn ring() -> Listed {
    Listed::of(&Ring::new(ALL_REDUCE).unwrap())
}

/// What is said of the ring with one change.
fn broken(change: impl FnOnce(&mut Listed)) -> Fault {
    let mut program = ring();
    assert!(verify(&ALL_REDUCE, &program).is_ok());
    change(&mut program);
    verify(&ALL_REDUCE, &program).unwrap_err()
}

fn shape(ranks: u32, scratch: u32) -> Shape {
    Shape {
        ranks,
        steps: 0,
        pieces: 1,
        scratch,
        channels: 1,
    }
}

#[test]
fn a_missing_contribution() {
    let fault = broken(|program| {
        // Rank 1 passes on what comes, and forgets its own.
        let op = &mut program.step_mut(Rank(1), 0)[1];
        let Op::ReceiveReduce {
            from, into, channel, ..
        } = *op
        else {
            panic!("{op}")
        };
        *op = Op::Receive {
            from,
            slice: into,
            channel,
        };
    });
    assert_eq!(
        fault.to_string(),
        "rank 0: output[0] must hold datum 0 from all ranks and holds datum 0 from ranks 0, 2, 3"
    );
}

#[test]
fn a_contribution_counted_twice() {
    let fault = broken(|program| {
        // Rank 2 adds its own input once more before it passes the sum on.
        let step = program.step_mut(Rank(2), 1);
        step.push(Op::Reduce {
            from: Slice::input(3, 1),
            with: Slice::input(3, 1),
            into: Slice::output(3, 1),
        });
    });
    assert_eq!(
        fault.to_string(),
        "rank 2, step 1, op 2: the contribution of rank 2 would be counted twice in chunk 3"
    );
}

#[test]
fn a_deadlock_of_ranks_that_wait_for_each_other() {
    // Both receive first and send after: nobody ever sends.
    let problem = Problem::new(Collective::AllGather { sizes: Sizes::Equal }, 2);
    let rank = |me: u32| {
        let other = Rank(1 - me);
        let channel = Channel(0);
        vec![
            vec![
                Op::Receive {
                    from: other,
                    slice: Slice::output(other.0, 1),
                    channel,
                },
                Op::Copy {
                    from: Slice::input(0, 1),
                    to: Slice::output(me, 1),
                },
            ],
            vec![Op::Send {
                to: other,
                slice: Slice::input(0, 1),
                channel,
            }],
        ]
    };
    let fault = verify(&problem, &Listed::new(shape(2, 0), vec![rank(0), rank(1)])).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "rank 0, step 0, op 0: `receive output[1] from 1` waits for ever; rank 1 is stuck in step 0"
    );
    // Both send first and receive after: that ends only if somebody buffers, and nobody need do so.
    let turned = |me| rank(me).into_iter().rev().collect::<Vec<_>>();
    let fault = verify(&problem, &Listed::new(shape(2, 0), vec![turned(0), turned(1)])).unwrap_err();
    assert!(
        matches!(
            fault,
            Fault::Deadlock {
                at: At { step: 0, .. },
                ..
            }
        ),
        "{fault}"
    );
}

#[test]
fn a_message_that_nobody_takes() {
    let fault = broken(|program| {
        program.step_mut(Rank(3), 5).remove(1);
    });
    assert_eq!(
        fault.to_string(),
        "rank 2, step 5, op 0: `send output[1] to 3` waits for ever; rank 3 has ended"
    );
}

#[test]
fn a_race_on_a_buffer() {
    // In place, a one-shot that adds into what the others still read.
    let problem = ALL_REDUCE.in_place();
    let apart = Listed::of(&Direct::new(ALL_REDUCE).unwrap());
    let fault = verify(&problem, &apart).unwrap_err();
    assert!(
        matches!(
            fault,
            Fault::Race {
                at: At {
                    rank: Rank(0),
                    step: 0,
                    ..
                },
                ..
            }
        ),
        "{fault}"
    );
    // Two messages into one place.
    let fault = broken(|program| {
        let first = program.step_mut(Rank(0), 0)[1];
        program.step_mut(Rank(0), 1).push(first);
        let second = program.step_mut(Rank(0), 1)[1];
        program.step_mut(Rank(0), 1)[2] = second;
    });
    assert!(
        matches!(fault, Fault::Race { other: 1, .. } | Fault::Deadlock { .. }),
        "{fault}"
    );
    // What is being sent is overwritten in the same step.
    let fault = broken(|program| {
        program.step_mut(Rank(1), 1).push(Op::Copy {
            from: Slice::input(0, 1),
            to: Slice::output(0, 1),
        });
    });
    assert_eq!(
        fault.to_string(),
        "rank 1, step 1, op 2: `copy input[0] to output[0]` and `send output[0] to 2` (op 0) touch the same memory at once"
    );
}

#[test]
fn the_wrong_chunk() {
    let fault = broken(|program| {
        let op = &mut program.step_mut(Rank(2), 0)[0];
        *op = op.with_slices(|_| Slice::input(1, 1));
    });
    // Pieces of a block differ in size, so that this is found before contents are looked at.
    assert_eq!(
        fault.to_string(),
        "rank 3, step 0, op 1: output[2] has not as many elements as input[1] at rank 2, step 0, op 0"
    );
    // Blocks of equal size, in the wrong order.
    let problem = Problem::new(Collective::AllGather { sizes: Sizes::Equal }, 3);
    let mut program = Listed::of(&Direct::new(problem).unwrap());
    for op in program.step_mut(Rank(0), 0) {
        *op = op.with_slices(|slice| match slice {
            Slice {
                buffer: Buffer::Output,
                first: first @ 1..,
                ..
            } => Slice::output(3 - first, 1),
            other => other,
        });
    }
    assert_eq!(
        verify(&problem, &program).unwrap_err().to_string(),
        "rank 0: output[1] must hold datum 0 from rank 1 and holds datum 0 from rank 2"
    );
}

#[test]
fn different_data_reduced_with_each_other() {
    let problem = Problem::new(Collective::ReduceScatter { sizes: Sizes::Equal }, 2);
    let mut program = Listed::of(&Direct::new(problem).unwrap());
    let op = &mut program.step_mut(Rank(0), 0)[0];
    *op = op.with_slices(|_| Slice::input(0, 1));
    assert_eq!(
        verify(&problem, &program).unwrap_err().to_string(),
        "rank 1, step 0, op 1: chunk 0 would be a reduction of datum 1 with datum 0"
    );
}

#[test]
fn scratch_read_before_it_was_written() {
    let problem = Problem::new(Collective::Reduce { root: Rank(0) }, 4);
    let mut program = Listed::of(&BinomialTree::new(problem).unwrap());
    let Op::ReceiveReduce { into, .. } = &mut program.step_mut(Rank(2), 0)[0] else {
        panic!()
    };
    *into = Slice::output(0, 1);
    let fault = verify(&problem, &program).unwrap_err();
    assert!(matches!(fault, Fault::OutOfBounds { chunks: 0, .. }), "{fault}");
    let mut program = Listed::of(&BinomialTree::new(problem).unwrap());
    program.step_mut(Rank(2), 0).clear();
    program.step_mut(Rank(3), 0).clear();
    assert_eq!(
        verify(&problem, &program).unwrap_err().to_string(),
        "rank 2, step 1, op 0: scratch[0] is read before anything was written to it"
    );
}

#[test]
fn a_barrier_that_lets_somebody_go_early() {
    let problem = Problem::new(Collective::Barrier, 4);
    let mut program = Listed::of(&Dissemination::new(problem).unwrap());
    for rank in 0..4 {
        program.step_mut(Rank(rank), 1).clear();
    }
    assert_eq!(
        verify(&problem, &program).unwrap_err().to_string(),
        "rank 0 may end before ranks 1, 2 have begun"
    );
}

#[test]
fn what_is_not_well_formed() {
    let input = broken(|program| {
        program.step_mut(Rank(0), 0)[1] = Op::Copy {
            from: Slice::input(0, 1),
            to: Slice::input(0, 1),
        };
    });
    assert!(matches!(input, Fault::WritesInput { .. }), "{input}");
    for (slice, end) in [(Slice::output(4, 1), 5), (Slice::output(u32::MAX, u32::MAX), 0)] {
        let fault = broken(|program| {
            let op = &mut program.step_mut(Rank(0), 3)[0];
            *op = op.with_slices(|_| slice);
        });
        assert!(matches!(fault, Fault::OutOfBounds { .. }), "{end}: {fault}");
    }
    for peer in [0, 4, u32::MAX] {
        let fault = broken(|program| {
            let op = &mut program.step_mut(Rank(0), 0)[0];
            *op = op.with_peer(|_| Rank(peer));
        });
        assert!(matches!(fault, Fault::BadPeer { .. }), "{fault}");
    }
    let fault = verify(&Problem::new(Collective::AllReduce, 5), &ring()).unwrap_err();
    assert_eq!(fault, Fault::WrongRanks { program: 4, problem: 5 });
    let fault = verify(&Problem::new(Collective::Broadcast { root: Rank(9) }, 4), &ring()).unwrap_err();
    assert_eq!(fault.to_string(), "rank 9 of 4");
}

#[test]
fn ranks_that_reduce_in_different_orders_are_noticed() {
    // Everybody begins with its own contribution.
    let problem = Problem::new(Collective::AllReduce, 3);
    let ranks = (0..3u32).map(|me| {
        let peers = [(me + 1) % 3, (me + 2) % 3].map(Rank);
        let channel = Channel(0);
        let sends = peers.map(|to| Op::Send {
            to,
            slice: Slice::input(0, 1),
            channel,
        });
        let sums =
            [(peers[0], Slice::input(0, 1)), (peers[1], Slice::output(0, 1))].map(|(from, with)| Op::ReceiveReduce {
                from,
                with,
                into: Slice::output(0, 1),
                channel,
            });
        vec![sends.into_iter().chain(sums).collect()]
    });
    let summary = verify(&problem, &Listed::new(shape(3, 0), ranks.collect())).unwrap();
    assert!(!summary.same_bits);
    assert!(verify(&problem, &Direct::new(problem).unwrap()).unwrap().same_bits);
}

/// Every op of every algorithm matters: without any single one of them the program is found wrong, or it was a copy in place.
#[test]
fn no_op_can_be_left_out() {
    for &algorithm in Algorithm::ALL {
        for problem in [
            ALL_REDUCE,
            Problem::new(Collective::AllToAll { sizes: Sizes::Equal }, 4),
        ] {
            let grid = Grid { nodes: 2, local: 2 };
            let Some(program) = algorithm.program(&problem, grid) else {
                continue;
            };
            let whole = Listed::of(&*program);
            for rank in (0..4).map(Rank) {
                for step in 0..whole.shape().steps {
                    for op in 0..whole.ranks()[rank.0 as usize][step as usize].len() {
                        let mut less = whole.clone();
                        let gone = less.step_mut(rank, step).remove(op);
                        assert!(verify(&problem, &less).is_err(), "{algorithm}: {rank}, {step}: {gone}");
                    }
                }
            }
        }
    }
}
