//! Communicators against a loop over all inputs: random collectives, sizes, types, operators and algorithms, up to nine ranks, over the arena,
//! over shared memory and over TCP.

#[path = "../../protocol/tests/collectives/mod.rs"]
mod collectives;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use collectives::{Case, filled, programs, reference};
use weft::{
    Agent, Algorithm, Call, CallError, Communicator, Datatype, Error, Function, JoinOptions, Memory, Operator, Part,
    Rank, Reduction,
};
use weft_plan::collective::{Buffer, Collective, Counts, Layout, Problem, Sizes};
use weft_protocol::Seeded;

/// A reduction as a function of the caller's own.
#[derive(Debug)]
struct Own(Datatype, Reduction);

impl Function for Own {
    fn combine(&self, into: &mut [u8], from: &[u8]) {
        self.0.combine(self.1, into, from).expect("whole elements");
    }
}

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Arena,
    SharedMemoryPaths,
    Tcp,
}

/// Memory that Weft has allocated, or that was somebody else's; at least one byte of it.
fn memory(agent: &Agent, bytes: &[u8], foreign: bool) -> Memory {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().max(1), 0);
    if foreign {
        return agent.register_vec(padded).unwrap();
    }
    let memory = agent.allocate(padded.len()).unwrap();
    memory.write(0, &padded);
    memory
}

fn call<'a>(group: &'a Communicator, case: &Case, input: Part, output: Part, operator: Operator) -> Call<'a> {
    let own = group.rank().0 as usize;
    let datatype = case.datatype;
    match (case.problem.collective, &case.counts) {
        (Collective::AllReduce, _) => group.all_reduce(input, output, datatype, operator),
        (Collective::AllGather { .. }, Counts::PerRank(counts)) => group.all_gatherv(input, output, counts, datatype),
        (Collective::AllGather { .. }, _) => group.all_gather(input, output, datatype),
        (Collective::ReduceScatter { .. }, Counts::PerRank(counts)) => {
            group.reduce_scatterv(input, output, counts, datatype, operator)
        }
        (Collective::ReduceScatter { .. }, _) => group.reduce_scatter(input, output, datatype, operator),
        (Collective::Broadcast { root }, _) => {
            let data = if root == group.rank() { input } else { output };
            group.broadcast(data, root, datatype)
        }
        (Collective::Reduce { root }, _) => group.reduce(input, output, root, datatype, operator),
        (Collective::Gather { root, .. }, Counts::PerRank(counts)) => {
            let counts = (root == group.rank()).then_some(&counts[..]);
            group.gatherv(input, output, counts, root, datatype)
        }
        (Collective::Gather { root, .. }, _) => group.gather(input, output, root, datatype),
        (Collective::Scatter { root, .. }, Counts::PerRank(counts)) => {
            let counts = (root == group.rank()).then_some(&counts[..]);
            group.scatterv(input, output, counts, root, datatype)
        }
        (Collective::Scatter { root, .. }, _) => group.scatter(input, output, root, datatype),
        (Collective::AllToAll { .. }, Counts::PerPair(table)) => {
            let ranks = group.size() as usize;
            let sent = &table[own * ranks..(own + 1) * ranks];
            let received: Vec<u64> = (0..ranks).map(|from| table[from * ranks + own]).collect();
            group.all_to_allv(input, output, sent, &received, datatype)
        }
        (Collective::AllToAll { .. }, _) => group.all_to_all(input, output, datatype),
        (Collective::SendReceive { from, to }, _) => match own as u32 {
            own if own == from.0 => group.send(input, to, datatype),
            own if own == to.0 => group.receive(output, from, datatype),
            _ => group.group([]),
        },
        (Collective::Barrier, _) => group.barrier(),
    }
}

/// One case on one rank, by an algorithm that all ranks pick alike.
fn play(group: &Communicator, case: &Case, way: Way) {
    let mut chance = Seeded::new(!case.seed);
    let rank = group.rank();
    let programs = programs(&case.problem);
    let layout = Layout::new(&case.partition(&*programs[0].1), &*programs[0].1, rank);
    let bytes = |buffer| layout.elements(buffer) as usize * case.datatype.size();
    let operator = match chance.chance(0.3) && case.reduction != Reduction::Avg {
        true => Operator::Custom(Arc::new(Own(case.datatype, case.reduction))),
        false => Operator::Builtin(case.reduction),
    };
    let algorithm: Option<Algorithm> = match chance.chance(0.5) {
        true => Some(programs[chance.below(programs.len() as u64) as usize].0),
        false => None,
    };
    let foreign = chance.chance(0.5);
    let agent = group.agent();
    let right = reference(case, rank);
    for algorithm in [algorithm, None] {
        let (input_bytes, output_bytes) = (bytes(Buffer::Input), bytes(Buffer::Output));
        let input = memory(agent, &filled(case, rank, input_bytes), foreign);
        let output = memory(agent, &vec![0xaa; output_bytes], foreign);
        let (from, to) = (input.part(0..input_bytes as u64), output.part(0..output_bytes as u64));
        let described = call(group, case, from, to, operator.clone());
        let described = match algorithm {
            Some(algorithm) => described.algorithm(algorithm),
            None => described,
        };
        // Each rank for itself.
        let described = match (case.seed >> 9).wrapping_add(rank.0.into()) % 3 == 0 {
            true => described.all_or_nothing(),
            false => described,
        };
        match described.run() {
            Ok(()) => {}
            // Not between ranks of one host, or not with so few channels: on all ranks alike.
            Err(Error::Call(CallError::NotForThis { .. })) if algorithm.is_some() => continue,
            Err(Error::Call(CallError::Nothing)) => return,
            Err(error) => panic!("{way:?}, rank {}, {case:?}, {algorithm:?}: {error}", rank.0),
        }
        let at_root = matches!(case.problem.collective, Collective::Broadcast { root } if root == rank);
        let came = if at_root { input.to_vec() } else { output.to_vec() };
        assert_eq!(
            came[..right.len()],
            right,
            "{way:?}, rank {}, {case:?}, {algorithm:?}",
            rank.0
        );
    }
}

/// Runs cases, the same on all ranks, each with an agent and a thread of its own.
fn ranks(size: u32, way: Way, cases: impl Iterator<Item = Case> + Clone + Send + Sync) {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    let number = JOBS.fetch_add(1, Ordering::Relaxed);
    let job = format!("differential-{}-{number}", std::process::id());
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (job, cases) = (&job, cases.clone());
            scope.spawn(move || {
                let transports = if way == Way::Tcp { "tcp" } else { "shared_memory,tcp" };
                let agent = Agent::builder(&format!("{job}-{rank}"))
                    .secret("differential")
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
                for case in cases {
                    play(&group, &case, way);
                }
                group.barrier().run().unwrap();
            });
        }
    });
}

/// So many random cases of at most so many elements a block.
fn random(size: u32, count: u64, most: u64) -> impl Iterator<Item = Case> + Clone + Send + Sync {
    (0..count).map(move |at| {
        let mut chance = Seeded::new(u64::from(size) << 32 ^ most << 40 ^ at);
        let mut case = Case::random(size, chance.below(most), chance.next_u64());
        case.problem.in_place = false;
        case
    })
}

#[test]
fn a_communicator_does_what_the_collective_means() {
    for way in [Way::Arena, Way::SharedMemoryPaths, Way::Tcp] {
        for size in [2, 3, 5, 9] {
            ranks(size, way, random(size, 40, 300));
        }
        // Messages that are left where they lie, and such that take several pieces.
        ranks(2, way, random(2, 12, 60_000));
        ranks(4, way, random(4, 6, 60_000));
    }
}

#[test]
fn every_type_with_every_operator() {
    let types = Datatype::ALL.into_iter();
    let cases = types.flat_map(|datatype| {
        Reduction::ALL.into_iter().flat_map(move |reduction| {
            let collectives = [Collective::AllReduce, Collective::ReduceScatter { sizes: Sizes::Equal }];
            collectives.map(|collective| Case {
                problem: Problem::new(collective, 3),
                counts: Counts::Equal(37),
                datatype,
                reduction,
                seed: 7,
            })
        })
    });
    for way in [Way::Arena, Way::Tcp] {
        ranks(3, way, cases.clone());
    }
}
