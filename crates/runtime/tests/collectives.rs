//! Communicators over shared memory and over TCP: values against a plain loop, and what ranks are told when one of them fails.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use weft::{Agent, Communicator, Datatype, JoinOptions, Memory, Rank, Reduction};

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Arena,
    SharedMemoryPaths,
    Tcp,
}

const WAYS: [Way; 3] = [Way::Arena, Way::SharedMemoryPaths, Way::Tcp];

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
                        arena: way == Way::Arena,
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
