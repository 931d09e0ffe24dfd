//! Communicators over shared memory and over TCP: values against a plain loop, and what ranks are told when one of them fails.

mod messages;
mod processes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use weft::{
    Agent, Algorithm, CallError, Cause, Communicator, Datatype, Error, JoinOptions, Memory, Rank, Reduction,
    ShrinkOptions,
};

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Arena,
    SharedMemoryPaths,
    Tcp,
    /// The arena between some, and paths between others.
    Mixed,
}

const WAYS: [Way; 4] = [Way::Arena, Way::SharedMemoryPaths, Way::Tcp, Way::Mixed];

impl Way {
    fn has_arena(self, rank: u32) -> bool {
        self == Way::Arena || self == Way::Mixed && rank != 1
    }
}

/// Runs `body` on every rank, each with an agent and a thread of its own.
fn ranks<T: Send>(size: u32, way: Way, body: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    let job = format!(
        "collectives-{}-{}",
        std::process::id(),
        JOBS.fetch_add(1, Ordering::Relaxed)
    );
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (job, body) = (&job, &body);
                scope.spawn(move || {
                    let transports = if way == Way::Tcp { "tcp" } else { "shared_memory,tcp" };
                    let agent = Agent::builder(&format!("{job}-{rank}"))
                        .secret("collectives")
                        .listen("127.0.0.1:0")
                        .set("rendezvous", "process")
                        .set("rendezvous_job", job)
                        .set("transports", transports)
                        .start()
                        .unwrap();
                    let options = JoinOptions {
                        arena: way.has_arena(rank),
                        ..JoinOptions::new("all", Rank(rank), size)
                    };
                    let group = Communicator::join(&agent, options).unwrap();
                    let result = body(group.clone());
                    group.barrier().run().ok();
                    result
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn floats(group: &Communicator, values: impl IntoIterator<Item = f32>) -> Memory {
    let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_ne_bytes).collect();
    let memory = group.agent().allocate(bytes.len().max(1)).unwrap();
    memory.write(0, &bytes);
    memory
}

fn values(memory: &Memory) -> Vec<f32> {
    let bytes = memory.to_vec();
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_ne_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn an_all_reduce_of_any_size_any_way() {
    for way in WAYS {
        for size in [2, 3] {
            ranks(size, way, |group| {
                for count in [1usize, 256, 5000, 300_000] {
                    let own = group.rank().0 as f32 + 1.0;
                    let input = floats(&group, (0..count).map(|at| own * (at % 10) as f32));
                    let output = floats(&group, vec![0.0; count]);
                    group
                        .all_reduce(&input, &output, Datatype::F32, Reduction::Sum)
                        .deadline(Duration::from_secs(20))
                        .run()
                        .unwrap();
                    let total = (size * (size + 1) / 2) as f32;
                    let right: Vec<f32> = (0..count).map(|at| total * (at % 10) as f32).collect();
                    assert_eq!(values(&output), right, "{way:?}, {size} ranks, {count} elements");
                    group
                        .all_reduce(&input, &input, Datatype::F32, Reduction::Sum)
                        .run()
                        .unwrap();
                    assert_eq!(values(&input), right);
                }
            });
        }
    }
}

fn longs(group: &Communicator, values: &[u64]) -> Memory {
    let memory = group.agent().allocate(8 * values.len().max(1)).unwrap();
    memory.write(0, &values.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>());
    memory
}

fn read_longs(memory: &Memory) -> Vec<u64> {
    let bytes = memory.to_vec();
    bytes
        .chunks_exact(8)
        .map(|b| u64::from_ne_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn every_collective_any_way() {
    for way in WAYS {
        ranks(3, way, |group| {
            let (own, n) = (u64::from(group.rank().0), 3u64);
            let long = Datatype::U64;
            // All-gather, apart, in place and of different sizes.
            let mine = longs(&group, &[10 * own, 10 * own + 1]);
            let all = longs(&group, &[0; 6]);
            group.all_gather(&mine, &all, long).run().unwrap();
            assert_eq!(read_longs(&all), [0, 1, 10, 11, 20, 21]);
            let in_place = longs(&group, &[9; 3]);
            in_place.write(8 * own, &(own + 5).to_ne_bytes());
            group
                .all_gather(in_place.part(8 * own..8 * own + 8), &in_place, long)
                .run()
                .unwrap();
            assert_eq!(read_longs(&in_place), [5, 6, 7]);
            let counts = [1, 0, 2];
            let some = longs(&group, &[own; 2]);
            let gathered = longs(&group, &[0; 3]);
            group
                .all_gatherv(some.part(0..8 * counts[own as usize]), &gathered, &counts, long)
                .run()
                .unwrap();
            assert_eq!(read_longs(&gathered), [0, 2, 2]);
            // Reduce-scatter, and of different sizes.
            let input = longs(&group, &[own, own + 1, own + 2]);
            let one = longs(&group, &[0]);
            group.reduce_scatter(&input, &one, long, Reduction::Max).run().unwrap();
            assert_eq!(read_longs(&one), [2 + own]);
            let output = longs(&group, &[0; 2]);
            group
                .reduce_scatterv(
                    &input,
                    output.part(0..8 * counts[own as usize]),
                    &counts,
                    long,
                    Reduction::Sum,
                )
                .run()
                .unwrap();
            let right = [vec![3, 0], vec![0, 0], vec![6, 9]];
            assert_eq!(read_longs(&output), right[own as usize]);
            // From and to a root.
            let root = Rank(1);
            let data = longs(&group, &[7 * own, 8 * own]);
            group.broadcast(&data, root, long).run().unwrap();
            assert_eq!(read_longs(&data), [7, 8]);
            let sum = longs(&group, &[0]);
            group
                .reduce(&longs(&group, &[own + 1]), &sum, root, long, Reduction::Prod)
                .run()
                .unwrap();
            assert_eq!(read_longs(&sum), [if own == 1 { 6 } else { 0 }]);
            let three = longs(&group, &[0; 3]);
            group.gather(&longs(&group, &[own]), &three, root, long).run().unwrap();
            assert_eq!(read_longs(&three), if own == 1 { [0, 1, 2] } else { [0; 3] });
            let at_root = (own == 1).then_some(&counts[..]);
            let varied = longs(&group, &[0; 3]);
            group
                .gatherv(some.part(0..8 * counts[own as usize]), &varied, at_root, root, long)
                .run()
                .unwrap();
            assert_eq!(read_longs(&varied), if own == 1 { [0, 2, 2] } else { [0; 3] });
            group
                .scatter(&longs(&group, &[4, 5, 6]), &one, root, long)
                .run()
                .unwrap();
            assert_eq!(read_longs(&one), [4 + own]);
            let output = longs(&group, &[0; 2]);
            group
                .scatterv(
                    &longs(&group, &[4, 5, 6]),
                    output.part(0..8 * counts[own as usize]),
                    at_root,
                    root,
                    long,
                )
                .run()
                .unwrap();
            assert_eq!(read_longs(&output), [[4, 0], [0, 0], [5, 6]][own as usize]);
            // All to all, in place too, and of different sizes: rank r has r + s elements for rank s.
            let input = longs(&group, &[10 * own, 10 * own + 1, 10 * own + 2]);
            let output = longs(&group, &[0; 3]);
            group.all_to_all(&input, &output, long).run().unwrap();
            assert_eq!(read_longs(&output), [own, 10 + own, 20 + own]);
            group.all_to_all(&input, &input, long).run().unwrap();
            assert_eq!(read_longs(&input), [own, 10 + own, 20 + own]);
            let counts: Vec<u64> = (0..n).map(|other| own + other).collect();
            let total = counts.iter().sum::<u64>() as usize;
            let (input, output) = (longs(&group, &vec![own; total]), longs(&group, &vec![9; total]));
            group
                .all_to_allv(&input, &output, &counts, &counts, long)
                .run()
                .unwrap();
            let right: Vec<u64> = (0..n).flat_map(|from| vec![from; (own + from) as usize]).collect();
            assert_eq!(read_longs(&output), right);
            // Between two ranks, and round the ring at once.
            match own {
                0 => group.send(&longs(&group, &[99]), Rank(2), long).run().unwrap(),
                2 => {
                    group.receive(&one, Rank(0), long).run().unwrap();
                    assert_eq!(read_longs(&one), [99]);
                }
                _ => {}
            }
            let (next, previous) = (Rank(((own + 1) % n) as u32), Rank(((own + n - 1) % n) as u32));
            let (out, back) = (longs(&group, &vec![own; 50_000]), longs(&group, &vec![9; 50_000]));
            group
                .group([group.send(&out, next, long), group.receive(&back, previous, long)])
                .run()
                .unwrap();
            assert_eq!(read_longs(&back), vec![(own + n - 1) % n; 50_000]);
            // Two collectives at once, and several started before the first is waited for.
            let (a, b) = (longs(&group, &[own]), longs(&group, &[own; 3]));
            let calls = [
                group.all_reduce(&a, &a, long, Reduction::Sum),
                group.all_reduce(&b, &b, long, Reduction::Avg),
            ];
            group.group(calls).run().unwrap();
            assert_eq!((read_longs(&a), read_longs(&b)), (vec![3], vec![1; 3]));
            let buffers: Vec<Memory> = (0..5).map(|at| longs(&group, &vec![at; 100])).collect();
            let started = buffers
                .iter()
                .map(|it| group.all_reduce(it, it, long, Reduction::Sum).start().unwrap());
            let started: Vec<_> = started.collect();
            group.barrier().run().unwrap();
            for (at, (pending, buffer)) in started.iter().zip(&buffers).enumerate() {
                assert!(pending.poll().expect("before the barrier").is_ok());
                assert_eq!(read_longs(buffer), vec![3 * at as u64; 100]);
            }
        });
    }
}

#[test]
fn a_call_that_makes_no_sense_is_refused_and_the_group_goes_on() {
    ranks(2, Way::Arena, |group| {
        let (a, b) = (longs(&group, &[1, 2]), longs(&group, &[0]));
        let refused = group.all_reduce(&a, &b, Datatype::U64, Reduction::Sum).run();
        assert!(matches!(refused, Err(Error::Call(_))), "{refused:?}");
        let odd = group.all_reduce(a.part(0..7), &b, Datatype::U64, Reduction::Sum).run();
        assert!(matches!(odd, Err(Error::Call(_))), "{odd:?}");
        let nobody = group.broadcast(&a, Rank(7), Datatype::U64).run();
        assert!(matches!(nobody, Err(Error::Call(_))), "{nobody:?}");
        let mixed = group
            .group([group.barrier(), group.send(&a, Rank(1 - group.rank().0), Datatype::U64)])
            .run();
        assert!(matches!(mixed, Err(Error::Call(_))), "{mixed:?}");
        group.all_reduce(&a, &a, Datatype::U64, Reduction::Sum).run().unwrap();
        assert_eq!(read_longs(&a), [2, 4]);
    });
}

fn failed(outcome: Result<(), Error>) -> Box<weft::CollectiveFailed> {
    match outcome {
        Err(Error::Collective(failed)) => failed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_group_of_more_calls_than_there_are_channels_runs() {
    for way in WAYS {
        ranks(2, way, |group| {
            let data: Vec<Memory> = (0..9u64).map(|at| longs(&group, &vec![at; 700])).collect();
            let sum = |data| group.all_reduce(data, data, Datatype::U64, Reduction::Sum);
            group.group(data.iter().map(sum)).run().unwrap();
            for (at, data) in data.iter().enumerate() {
                assert_eq!(read_longs(data), vec![2 * at as u64; 700], "{way:?}");
            }
        });
    }
}

#[test]
fn the_root_works_in_place_where_its_buffers_say_so() {
    for way in [Way::Arena, Way::Tcp] {
        ranks(3, way, |group| {
            let (own, root, long) = (u64::from(group.rank().0), Rank(1), Datatype::U64);
            let data = longs(&group, &[own, 5]);
            group.reduce(&data, &data, root, long, Reduction::Sum).run().unwrap();
            let reduced = if own == 1 { [3, 15] } else { [own, 5] };
            assert_eq!(read_longs(&data), reduced);
            let blocks = longs(&group, &[90, 91, 92]);
            let block = blocks.part(8 * own..8 * own + 8);
            group.gather(block.clone(), &blocks, root, long).run().unwrap();
            if own == 1 {
                assert_eq!(read_longs(&blocks), [90, 91, 92]);
            }
            group.scatter(&blocks, block, root, long).run().unwrap();
            assert_eq!(read_longs(&blocks), [90, 91, 92]);
        });
    }
}

#[test]
fn ranks_decide_by_themselves_whether_they_work_in_place() {
    for way in [Way::Arena, Way::Tcp] {
        for count in [1, 5000] {
            ranks(3, way, |group| {
                let (input, output) = (longs(&group, &vec![7; count]), longs(&group, &vec![0; count]));
                let into = if group.rank().0 == 1 { &input } else { &output };
                group
                    .all_reduce(&input, into, Datatype::U64, Reduction::Sum)
                    .run()
                    .unwrap();
                assert_eq!(read_longs(into), vec![21; count], "{way:?}");
            });
        }
    }
}

#[test]
fn buffers_that_overlap_are_refused_and_the_group_goes_on() {
    ranks(2, Way::Arena, |group| {
        let (data, long) = (longs(&group, &[1, 2, 3, 4]), Datatype::U64);
        let sum = |from, to| group.all_reduce(data.part(from), data.part(to), long, Reduction::Sum);
        let overlap = |outcome: Result<(), Error>| match outcome {
            Err(Error::Call(CallError::Overlap { .. })) => {}
            other => panic!("{other:?}"),
        };
        overlap(sum(0..16, 8..24).run());
        overlap(group.all_gather(data.part(8..24), &data, long).run());
        // Two calls of a group that write to the same memory, or one that writes what the other reads.
        overlap(group.group([sum(0..16, 0..16), sum(8..24, 8..24)]).run());
        overlap(group.group([sum(0..8, 8..16), sum(16..24, 0..8)]).run());
        group.group([sum(0..8, 16..24), sum(0..8, 24..32)]).run().unwrap();
        assert_eq!(read_longs(&data)[2..], [2, 2]);
    });
}

/// Panics on one rank.
#[derive(Debug)]
struct Panics(bool);

impl weft::Function for Panics {
    fn combine(&self, into: &mut [u8], from: &[u8]) {
        assert!(!self.0, "a function of the caller's");
        into.iter_mut().zip(from).for_each(|(a, b)| *a |= b);
    }
}

#[test]
fn a_function_that_panics_fails_the_call_on_all_ranks() {
    for way in WAYS {
        let errors = ranks(2, way, |group| {
            let function: Arc<dyn weft::Function> = Arc::new(Panics(group.rank().0 == 1));
            let data = longs(&group, &[1; 40]);
            let call = group.all_reduce(&data, &data, Datatype::U8, function);
            // Rank 0 may be done before rank 1 panics.
            let outcome = call.deadline(Duration::from_secs(20)).run();
            let outcome = outcome.and_then(|()| group.barrier().deadline(Duration::from_secs(20)).run());
            failed(outcome)
        });
        for error in errors {
            assert_eq!(
                (error.blamed(), error.cause()),
                (Rank(1), Cause::Broken),
                "{way:?}: {error}"
            );
        }
    }
}

#[test]
fn a_rank_that_leaves_in_mid_call_is_named() {
    for way in WAYS {
        ranks(2, way, |group| {
            let part = group.split(Some(0), 0).unwrap().unwrap();
            // One end may have its group before the other: nobody leaves while it is being formed.
            group.barrier().run().unwrap();
            let barrier = part.barrier().deadline(Duration::from_secs(20));
            if group.rank().0 == 0 {
                let error = failed(barrier.run());
                assert_eq!(
                    (error.blamed(), error.cause()),
                    (Rank(1), Cause::Withdrew),
                    "{way:?}: {error}"
                );
            } else {
                // A receive of what never comes, and then nobody is left who could wait for it.
                let data = longs(&group, &[0]);
                drop(part.receive(&data, Rank(0), Datatype::U64).start().unwrap());
            }
        });
    }
}

#[test]
fn a_call_can_be_started_while_another_thread_runs_one() {
    ranks(2, Way::Arena, |group| {
        let (own, long) = (u64::from(group.rank().0), Datatype::U64);
        let (flag, data) = (longs(&group, &[0]), longs(&group, &[own]));
        std::thread::scope(|scope| {
            // It lasts until rank 0 has sent something, which it does while the same runs there.
            let run = scope.spawn(|| match own {
                0 => group.barrier().run().unwrap(),
                _ => {
                    group.receive(&flag, Rank(0), long).run().unwrap();
                    group.barrier().run().unwrap();
                }
            });
            if own == 0 {
                std::thread::sleep(Duration::from_millis(50));
                group.send(&flag, Rank(1), long).start().unwrap().wait().unwrap();
            }
            run.join().unwrap();
        });
        group.all_reduce(&data, &data, long, Reduction::Sum).run().unwrap();
        assert_eq!(read_longs(&data), [1]);
    });
}

#[test]
fn an_algorithm_that_needs_all_sizes_is_refused_where_a_rank_knows_its_own() {
    ranks(3, Way::Arena, |group| {
        let (own, all) = (longs(&group, &[1]), longs(&group, &[0; 3]));
        let counts = (group.rank().0 == 0).then_some(&[1, 1, 1][..]);
        let call = || group.gatherv(&own, &all, counts, Rank(0), Datatype::U64);
        let refused = call().algorithm(Algorithm::BinomialTree).run();
        assert!(matches!(refused, Err(Error::Call(_))), "{refused:?}");
        call().algorithm(Algorithm::Direct).run().unwrap();
    });
}

#[test]
fn a_call_that_waits_behind_another_one_ends_by_its_own_deadline() {
    let errors = ranks(2, Way::Arena, |group| {
        if group.rank().0 == 1 {
            std::thread::sleep(Duration::from_millis(1500));
            return None;
        }
        let first = group.barrier().deadline(Duration::from_secs(3600)).start().unwrap();
        let second = group.barrier().deadline(Duration::from_millis(200)).start().unwrap();
        let error = failed(second.wait());
        assert_eq!(failed(first.wait()).blamed(), error.blamed());
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.blamed(), error.cause()), (Rank(1), Cause::Late), "{error}");
    }
}

#[test]
fn ranks_with_different_numbers_of_channels_make_no_group() {
    let job = format!("channels-{}", std::process::id());
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            let job = &job;
            scope.spawn(move || {
                let agent = Agent::builder(&format!("{job}-{rank}"))
                    .secret("collectives")
                    .listen("127.0.0.1:0")
                    .set("rendezvous", "process")
                    .set("rendezvous_job", job)
                    .start()
                    .unwrap();
                let options = JoinOptions {
                    channels: 2 + rank as u16,
                    ..JoinOptions::new("all", Rank(rank), 2)
                };
                let joined = Communicator::join(&agent, options);
                // One of them may find the other gone already.
                let told = matches!(&joined, Err(Error::Formation(why)) if why.contains("channels"));
                assert!(told || matches!(joined, Err(Error::PeerLost { .. })), "{joined:?}");
            });
        }
    });
}

#[test]
fn a_rank_that_calls_something_else_is_named_to_all() {
    for way in WAYS {
        let errors = ranks(3, way, |group| {
            let count = if group.rank().0 == 1 { 1000 } else { 1024 };
            let data = longs(&group, &vec![1; count]);
            let call = group.all_reduce(&data, &data, Datatype::U64, Reduction::Sum);
            failed(call.deadline(Duration::from_secs(5)).run())
        });
        for error in errors {
            assert_eq!(
                (error.blamed(), error.cause()),
                (Rank(1), Cause::WrongCall),
                "{way:?}: {error}"
            );
            let text = error.to_string();
            assert!(text.contains("of 1000 u64") && text.contains("of 1024 u64"), "{text}");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_by_the_deadline_and_left_out() {
    for way in WAYS {
        let errors = ranks(4, way, |group| {
            let data = longs(&group, &[1]);
            group
                .all_reduce(&data, &data, Datatype::U64, Reduction::Sum)
                .run()
                .unwrap();
            if group.rank().0 == 2 {
                // It sleeps through the call and through the agreement.
                std::thread::sleep(Duration::from_secs(3));
                return None;
            }
            let error = failed(group.barrier().deadline(Duration::from_millis(300)).run());
            let again = failed(group.barrier().run());
            assert_eq!(again.blamed(), error.blamed(), "it stays failed");
            let left = group.shrink(Duration::from_secs(2)).unwrap();
            assert_eq!(left.size(), 3);
            let data = longs(&left, &[1]);
            left.all_reduce(&data, &data, Datatype::U64, Reduction::Sum)
                .run()
                .unwrap();
            assert_eq!(read_longs(&data), [3]);
            Some(error)
        });
        for error in errors.into_iter().flatten() {
            assert_eq!(
                (error.blamed(), error.cause()),
                (Rank(2), Cause::Late),
                "{way:?}: {error}"
            );
            assert!(
                error.to_string().contains("all-reduce sum in place of 1 u64"),
                "{error}"
            );
        }
    }
}

#[test]
fn too_few_do_not_go_on_while_the_others_may_be_alive() {
    for way in [Way::Arena, Way::Tcp] {
        ranks(3, way, |group| {
            if group.rank().0 < 2 {
                // They are silent, and not known to be dead.
                std::thread::sleep(Duration::from_secs(3));
                return;
            }
            let alone = group.shrink(Duration::from_millis(500));
            let Err(Error::NoQuorum { short, .. }) = alone else {
                panic!("{way:?}: {alone:?}");
            };
            assert_eq!((short.missing, short.needed), (vec![Rank(0), Rank(1)], 2), "{way:?}");
            let options = ShrinkOptions::new(Duration::from_secs(1)).without_quorum();
            assert_eq!(group.shrink_with(options).unwrap().size(), 1, "{way:?}");
        });
    }
}

#[test]
fn a_group_is_split_and_its_parts_work_at_once() {
    for way in WAYS {
        ranks(4, way, |group| {
            let own = group.rank().0;
            // Odd and even, each in reverse order; rank 3 stays out.
            let part = group.split((own != 3).then_some(own % 2), 10 - own).unwrap();
            let Some(part) = part else {
                assert_eq!(own, 3);
                return;
            };
            let right = [(1, 2, 2), (0, 1, 1), (0, 2, 2)][own as usize];
            let data = longs(&part, &[u64::from(own)]);
            part.all_reduce(&data, &data, Datatype::U64, Reduction::Sum)
                .run()
                .unwrap();
            assert_eq!((part.rank().0, part.size(), read_longs(&data)[0] as u32), right);
        });
    }
}

/// A rooted collective, by number.
fn rooted(group: &Communicator, which: usize, root: Rank, one: &Memory, all: &Memory) -> Result<(), Error> {
    let call = match which {
        0 => group.broadcast(one, root, Datatype::U64),
        1 => group.scatter(all, one, root, Datatype::U64),
        2 => group.gather(one, all, root, Datatype::U64),
        _ => group.reduce(one, one, root, Datatype::U64, Reduction::Sum),
    };
    call.deadline(Duration::from_millis(400)).run()
}

#[test]
fn another_root_is_found_out_by_the_next_call_and_blamed_on_who_named_it() {
    for way in WAYS {
        for which in 0..4 {
            let errors = ranks(4, way, |group| {
                let (one, all) = (longs(&group, &[7]), longs(&group, &[7; 4]));
                group.barrier().run().unwrap();
                let number = group.calls_ended().unwrap();
                let root = Rank(if group.rank().0 == 3 { 3 } else { 0 });
                let outcome = rooted(&group, which, root, &one, &all);
                let next = || group.barrier().deadline(Duration::from_secs(5)).run();
                (failed(outcome.and_then(|()| next())), number)
            });
            for (error, number) in errors {
                let told = (error.blamed(), error.cause());
                assert_eq!(told, (Rank(3), Cause::WrongCall), "{way:?}, {which}: {error}");
                // The call that they parted in, though they may have been in another one when it came out.
                assert_eq!(error.abort.called.number, number, "{way:?}, {which}: {error}");
            }
        }
    }
}

#[test]
fn ranks_that_ran_ahead_still_know_who_named_another_root() {
    for way in WAYS {
        let errors = ranks(4, way, |group| {
            let (one, all) = (longs(&group, &[7]), longs(&group, &[7; 4]));
            let broadcast = |root| rooted(&group, 0, Rank(root), &one, &all);
            broadcast(0).unwrap();
            if group.rank().0 == 3 {
                // The others have begun many more by then.
                std::thread::sleep(Duration::from_millis(100));
                broadcast(3).unwrap();
            }
            let outcome = (0..6).try_for_each(|_| broadcast(0));
            let next = || group.barrier().deadline(Duration::from_secs(5)).run();
            failed(outcome.and_then(|()| next()))
        });
        for error in errors {
            let told = (error.blamed(), error.cause());
            assert_eq!(told, (Rank(3), Cause::WrongCall), "{way:?}: {error}");
        }
    }
}

#[test]
fn a_rank_that_comes_late_is_told_what_the_others_are() {
    for way in WAYS {
        let told = ranks(4, way, |group| {
            let data = longs(&group, &[1]);
            let all_reduce = || group.all_reduce(&data, &data, Datatype::U64, Reduction::Sum);
            all_reduce().run().unwrap();
            let before = group.calls_ended().unwrap();
            let is_late = group.rank().0 == 3;
            if is_late {
                std::thread::sleep(Duration::from_millis(700));
            }
            let patience = if is_late { 5000 } else { 200 };
            let error = failed(all_reduce().deadline(Duration::from_millis(patience)).run());
            assert_eq!(group.calls_ended().unwrap(), before);
            // It is alive, and one of those that are left.
            let left = group.shrink(Duration::from_secs(10)).unwrap();
            (error, left.size(), left.calls_ended_before() == Some(before))
        });
        for (error, left, all_ended) in told {
            assert_eq!(
                (error.blamed(), error.cause()),
                (Rank(3), Cause::Late),
                "{way:?}: {error}"
            );
            assert_eq!((left, all_ended), (4, true), "{way:?}");
        }
    }
}

#[test]
fn what_some_ranks_have_ended_and_others_have_not_is_known_after_a_shrink() {
    for way in WAYS {
        let ended = ranks(3, way, |group| {
            let data = longs(&group, &[1]);
            group.barrier().run().unwrap();
            let before = group.calls_ended().unwrap();
            let broadcast = || group.broadcast(&data, Rank(0), Datatype::U64);
            match group.rank().0 {
                // The root has nothing to wait for. It goes on when the others have failed.
                0 => {
                    broadcast().run().unwrap();
                    std::thread::sleep(Duration::from_millis(300));
                }
                // This one waits for what never comes, and everybody is told.
                1 => drop(failed(group.barrier().deadline(Duration::from_millis(200)).run())),
                _ => std::thread::sleep(Duration::from_millis(400)),
            }
            let own = group.calls_ended().unwrap() - before;
            let left = group.shrink(Duration::from_secs(10)).unwrap();
            (own, left.calls_ended_before().map(|all| all - before))
        });
        assert_eq!(ended, [(1, Some(0)), (0, Some(0)), (0, Some(0))], "{way:?}");
    }
}

#[test]
fn all_or_nothing_leaves_an_output_as_it_was_or_writes_all_of_it() {
    const COUNT: usize = 3 << 14;
    for way in WAYS {
        ranks(3, way, |group| {
            let (data, output) = (longs(&group, &[1; COUNT]), longs(&group, &[9; COUNT]));
            let ring = |output| {
                let call = group.all_reduce(&data, output, Datatype::U64, Reduction::Sum);
                call.algorithm(Algorithm::Ring).all_or_nothing()
            };
            ring(&output).run().unwrap();
            assert!(read_longs(&output).iter().all(|sum| *sum == 3), "{way:?}");
            // In place: the sum of what was there.
            ring(&data).run().unwrap();
            assert!(read_longs(&data).iter().all(|sum| *sum == 3), "{way:?}");
            if group.rank().0 == 2 {
                std::thread::sleep(Duration::from_millis(400));
            }
            // A ring gets some way without the last rank.
            let deadline = Duration::from_millis(200);
            failed(ring(&data).deadline(deadline).run());
            assert!(
                read_longs(&data).iter().all(|sum| *sum == 3),
                "{way:?}: in place, and given up"
            );
        });
    }
}
