//! By what collectives run: what the model chooses, what callers ask for, and what comes out in the same bits.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use weft::quantized::{Block, Code, Quantization};
use weft::{
    Agent, Algorithm, CallError, Candidate, Communicator, Datatype, Error, JoinOptions, Memory, QuantizedOptions, Rank,
    Reduction, Schedule, Way,
};
use weft_plan::algorithms::{Grid, Ring, TwoShot};
use weft_plan::collective::{Collective, Problem, Sizes};
use weft_plan::cost::{Placement, Selector};
use weft_plan::{Bytes, Platform};

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    Arena,
    SharedMemoryPaths,
    Tcp,
}

const REACHES: [Reach; 3] = [Reach::Arena, Reach::SharedMemoryPaths, Reach::Tcp];

type Settings<'a> = &'a (dyn Fn(u32) -> Vec<(&'static str, String)> + Sync);

/// Has every rank join, each with an agent and a thread of its own, and run `body`.
fn joined<T: Send>(
    size: u32,
    reach: Reach,
    settings: Settings<'_>,
    body: impl Fn(Result<Communicator, Error>) -> T + Sync,
) -> Vec<T> {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    let job = format!(
        "selection-{}-{}",
        std::process::id(),
        JOBS.fetch_add(1, Ordering::Relaxed)
    );
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (job, body) = (&job, &body);
                scope.spawn(move || {
                    let transports = if reach == Reach::Tcp {
                        "tcp"
                    } else {
                        "shared_memory,tcp"
                    };
                    let builder = Agent::builder(&format!("{job}-{rank}"))
                        .secret("selection")
                        .set("rendezvous", "process")
                        .set("rendezvous_job", job)
                        .set("transports", transports);
                    let set = |builder: weft::AgentBuilder, (key, value): (&str, String)| builder.set(key, value);
                    let agent = settings(rank).into_iter().fold(builder, set).start().unwrap();
                    let options = JoinOptions {
                        arena: reach == Reach::Arena,
                        deadline: Duration::from_secs(20),
                        ..JoinOptions::new("all", Rank(rank), size)
                    };
                    let group = Communicator::join(&agent, options);
                    let keep = group.clone();
                    let result = body(group);
                    if let Ok(group) = keep {
                        group.barrier().run().ok();
                    }
                    result
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn ranks<T: Send>(size: u32, reach: Reach, body: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    joined(size, reach, &|_| Vec::new(), |group| body(group.unwrap()))
}

fn floats(group: &Communicator, values: &[f32]) -> Memory {
    let memory = group.agent().allocate((4 * values.len()).max(1)).unwrap();
    memory.write(
        0,
        &values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>(),
    );
    memory
}

fn values(memory: &Memory, count: usize) -> Vec<f32> {
    let bytes = memory.to_vec();
    let each = bytes.chunks_exact(4).take(count);
    each.map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

/// Numbers whose sum depends on the order in which they are added.
fn awkward(rank: u32, count: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9u32.wrapping_mul(rank + 1) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let mut number = || (next() as f32 / u32::MAX as f32 - 0.5) * 10f32.powi((next() % 9) as i32 - 4);
    (0..count).map(|_| number()).collect()
}

#[test]
fn what_runs_is_what_is_explained() {
    for (reach, grid, across) in [
        (Reach::Arena, Grid::flat(3), "tcp"),
        (Reach::Tcp, Grid { nodes: 3, local: 1 }, "tcp"),
        (Reach::SharedMemoryPaths, Grid { nodes: 3, local: 1 }, "shared_memory"),
    ] {
        let placement = Placement::over(&Platform::laptop(), grid, &[across]).unwrap();
        let sizes = Sizes::Equal;
        ranks(3, reach, |group| {
            for bytes in [12u64, 3 << 10, 192 << 10, 3 << 20] {
                let explained = |collective| {
                    let selector = Selector::new(Problem::new(collective, 3), placement);
                    vec![Way::Algorithm(selector.choose(Bytes(bytes)).unwrap())]
                };
                let large = group.agent().allocate(bytes as usize).unwrap();
                let other = group.agent().allocate(bytes as usize).unwrap();
                let small = large.part(0..bytes / 3);
                let (float, sum) = (Datatype::F32, Reduction::Sum);
                let all_reduce = group.all_reduce(&large, &other, float, sum);
                assert_eq!(
                    all_reduce.ways().unwrap(),
                    explained(Collective::AllReduce),
                    "{reach:?}"
                );
                all_reduce.run().unwrap();
                // In place it is the same, because others need not be.
                let in_place = group.all_reduce(&large, &large, float, sum);
                assert_eq!(in_place.ways().unwrap(), explained(Collective::AllReduce), "{reach:?}");
                let gathered = group.all_gather(&small, &other, float);
                assert_eq!(
                    gathered.ways().unwrap(),
                    explained(Collective::AllGather { sizes }),
                    "{reach:?}"
                );
                gathered.run().unwrap();
                let scattered = group.reduce_scatter(&other, &small, float, sum);
                assert_eq!(
                    scattered.ways().unwrap(),
                    explained(Collective::ReduceScatter { sizes }),
                    "{reach:?}"
                );
                scattered.run().unwrap();
                let root = Rank(1);
                let broadcast = group.broadcast(&large, root, float);
                assert_eq!(
                    broadcast.ways().unwrap(),
                    explained(Collective::Broadcast { root }),
                    "{reach:?}"
                );
                broadcast.run().unwrap();
            }
        });
    }
}

#[test]
fn ranks_with_different_platforms_are_told_of_both() {
    let path = std::env::temp_dir().join(format!("weft-selection-{}.toml", std::process::id()));
    let other = Platform {
        name: "another".to_owned(),
        ..Platform::laptop()
    };
    std::fs::write(&path, other.to_toml()).unwrap();
    let settings = |rank: u32| match rank {
        1 => vec![("platform", path.display().to_string())],
        _ => Vec::new(),
    };
    let errors = joined(2, Reach::Tcp, &settings, |group| group.unwrap_err());
    for error in errors {
        assert!(matches!(error, Error::DifferentPlatforms { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("`laptop`") && text.contains("`another`"), "{text}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_setting_says_by_what_a_collective_runs() {
    let settings = |_| vec![("collective.algorithms", "all-reduce=ring".to_owned())];
    joined(3, Reach::Arena, &settings, |group| {
        let group = group.unwrap();
        let data = floats(&group, &[1.0, 2.0, 3.0]);
        let call = || group.all_reduce(&data, &data, Datatype::F32, Reduction::Sum);
        assert_eq!(call().ways().unwrap(), [Way::Algorithm(Algorithm::Ring.into())]);
        // What the call says counts more.
        let asked: Candidate = "binomial-tree/4".parse().unwrap();
        assert_eq!(call().algorithm(asked).ways().unwrap(), [Way::Algorithm(asked)]);
        call().algorithm(asked).run().unwrap();
        assert_eq!(values(&data, 3), [3.0, 6.0, 9.0]);
    });
}

/// The bits of a sum, reduced while every rank is late now and then.
fn perturbed(group: &Communicator, count: usize, seed: u32, deterministic: bool) -> Vec<u32> {
    let input = floats(group, &awkward(group.rank().0, count));
    let output = floats(group, &vec![0.0; count]);
    let late = (seed.wrapping_mul(7919) ^ group.rank().0.wrapping_mul(104_729)) % 5;
    std::thread::sleep(Duration::from_micros(u64::from(late) * 300));
    let call = group.all_reduce(&input, &output, Datatype::F32, Reduction::Sum);
    let call = if deterministic { call.deterministic() } else { call };
    match seed % 2 {
        0 => call.run().unwrap(),
        _ => {
            // Begun early, and taken further by another thread.
            let pending = call.start().unwrap();
            std::thread::sleep(Duration::from_micros(u64::from(4 - late) * 200));
            pending.wait().unwrap();
        }
    }
    values(&output, count).into_iter().map(f32::to_bits).collect()
}

#[test]
fn timing_changes_no_bit() {
    for reach in REACHES {
        for count in [3usize, 1000, 70_000] {
            let all = ranks(4, reach, |group| {
                let runs: Vec<Vec<u32>> = (0..6).map(|seed| perturbed(&group, count, seed, false)).collect();
                assert!(runs.iter().all(|run| *run == runs[0]), "{reach:?}, {count}");
                runs.into_iter().next().unwrap()
            });
            assert!(all.iter().all(|bits| *bits == all[0]), "{reach:?}, {count}");
        }
    }
}

#[test]
fn what_is_deterministic_has_the_same_bits_wherever_the_ranks_are() {
    for count in [3usize, 1000, 70_000] {
        let everywhere: Vec<Vec<u32>> = REACHES
            .iter()
            .flat_map(|reach| ranks(4, *reach, |group| perturbed(&group, count, 1, true)))
            .collect();
        assert!(everywhere.iter().all(|bits| *bits == everywhere[0]), "{count}");
    }
    // The numbers are such that an order can be told from another.
    let by = |algorithm: Algorithm| {
        let sums = ranks(4, Reach::Arena, |group| {
            let data = floats(&group, &awkward(group.rank().0, 1000));
            let call = group.all_reduce(&data, &data, Datatype::F32, Reduction::Sum);
            call.algorithm(algorithm).run().unwrap();
            values(&data, 1000)
        });
        sums.into_iter().next().unwrap()
    };
    assert_ne!(by(Algorithm::Ring), by(Algorithm::RecursiveDoubling));
}

#[test]
fn a_schedule_of_ones_own_runs_and_a_different_one_is_found_out() {
    let problem = Problem::new(Collective::AllReduce, 3);
    let ring = Schedule::of("mine", problem, &Ring::new(problem).unwrap()).unwrap();
    let other = Schedule::of("mine", problem, &TwoShot::new(problem).unwrap()).unwrap();
    for reach in REACHES {
        ranks(3, reach, |group| {
            let data = floats(&group, &[1.0; 100]);
            let output = floats(&group, &[0.0; 100]);
            let (float, sum) = (Datatype::F32, Reduction::Sum);
            let call = group.all_reduce(&data, &output, float, sum).schedule(&ring);
            assert_eq!(call.ways().unwrap(), [Way::Schedule(ring.clone())]);
            call.run().unwrap();
            assert_eq!(values(&output, 100), [3.0; 100]);
            let gather = group.all_gather(&data, &output, float).schedule(&ring).run();
            assert!(
                matches!(gather, Err(Error::Call(CallError::WrongSchedule { .. }))),
                "{gather:?}"
            );
            // One rank has another schedule of the same name.
            let given = if group.rank() == Rank(1) { &other } else { &ring };
            let failed = group.all_reduce(&data, &output, float, sum).schedule(given).run();
            let text = failed.unwrap_err().to_string();
            assert!(text.contains("schedule mine"), "{text}");
        });
    }
}

#[test]
fn a_quantised_sum_is_as_near_as_it_says() {
    for reach in REACHES {
        for size in [1, 3] {
            for code in [Code::Int8, Code::Fp8E4m3] {
                ranks(size, reach, |group| {
                    for (count, block) in [(1usize, Block::Of32), (1000, Block::Of64), (40_000, Block::Of128)] {
                        let quantization = Quantization { code, block };
                        let inputs: Vec<Vec<f32>> = (0..size).map(|rank| awkward(rank, count)).collect();
                        let input = floats(&group, &inputs[group.rank().0 as usize]);
                        let output = floats(&group, &vec![0.0; count]);
                        for reduction in [Reduction::Sum, Reduction::Avg] {
                            let options = QuantizedOptions {
                                reduction,
                                ..QuantizedOptions::new(quantization)
                            };
                            group.all_reduce_quantized(&input, &output, options).unwrap();
                            let divisor = if reduction == Reduction::Avg { size as f64 } else { 1.0 };
                            for (at, found) in values(&output, count).into_iter().enumerate() {
                                let exact: f64 = inputs.iter().map(|input| f64::from(input[at])).sum();
                                let start = at / block.elements() * block.elements();
                                let end = (start + block.elements()).min(count);
                                let greatest =
                                    |input: &Vec<f32>| input[start..end].iter().fold(0f32, |m, v| m.max(v.abs()));
                                let bound = quantization.reduced_error_max(size, inputs.iter().map(greatest).sum());
                                let error = (f64::from(found) - exact / divisor).abs();
                                assert!(
                                    error <= f64::from(bound) / divisor * 1.000_01,
                                    "{error} {bound} at {at}"
                                );
                            }
                        }
                        // In place, and the same bits as apart.
                        let options = QuantizedOptions::new(quantization);
                        group.all_reduce_quantized(&input, &output, options).unwrap();
                        group.all_reduce_quantized(&input, &input, options).unwrap();
                        assert_eq!(values(&input, count), values(&output, count));
                    }
                });
            }
        }
    }
}

#[test]
fn a_quantised_call_is_not_taken_for_another() {
    let failed = ranks(2, Reach::Arena, |group| {
        let data = floats(&group, &[1.0; 2048]);
        let code = [Code::Int8, Code::Fp8E4m3][group.rank().0 as usize];
        let block = Block::Of32;
        let options = QuantizedOptions::new(Quantization { code, block });
        let product = QuantizedOptions {
            reduction: Reduction::Prod,
            ..options
        };
        let refused = group.all_reduce_quantized(&data, &data, product);
        assert!(
            matches!(refused, Err(Error::Call(CallError::NotQuantized { .. }))),
            "{refused:?}"
        );
        group
            .all_reduce_quantized(&data, &data, options)
            .unwrap_err()
            .to_string()
    });
    assert!(failed.iter().all(|text| text.contains("quantised")), "{failed:?}");
}
