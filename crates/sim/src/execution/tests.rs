//! The same call by the executor that communicators run and by this one, over networks that take the same time: the same ops end on every
//! rank at the same times.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use weft_model::fabric::{Cluster, Fabric, Topology, Wire};
use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Collective, Problem, Sizes};
use weft_plan::schedule::Program;
use weft_plan::schedule::lower::Portioned;
use weft_plan::{Bandwidth, Bytes, Datatype, Picos, Rank, Reduction, Time};
use weft_protocol::group::{
    Abort, Act, At, Board, CallRecord, Combiner, Compiled, Exchange, Execution as Real, Kernels, Lane, MessageHead,
    OfferId, Offered, Piece, Sink, Status, Taken, Task, Trouble, Turn, View, Waiting as WaitingFor,
};
use weft_protocol::{Progress, Seeded, VecMemory};

use super::classes::Classes;
use super::look::Look;
use super::*;
use crate::flow::live::Live;
use crate::flow::{self, FlowOptions, Folding, mixed};

const SEEDS: u64 = 400;

/// Who an op is, whoever executes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Who {
    Send(Lane, u32),
    Take(Lane, u32),
    /// On the rank alone: what it writes.
    Here(Piece),
}

fn who(compiled: &Compiled, op: u32) -> Who {
    match *compiled.act(op) {
        Act::Send { lane, .. } => Who::Send(lane, compiled.index(op)),
        Act::Receive { lane, .. } | Act::ReceiveReduce { lane, .. } => Who::Take(lane, compiled.index(op)),
        Act::Copy { to, .. } => Who::Here(to),
        Act::Reduce { into, .. } => Who::Here(into),
        Act::Divide { at } => Who::Here(at),
    }
}

/// What ended when, on one rank.
type Ends = Vec<(u64, u32)>;

/// How long messages take.
#[derive(Debug)]
enum Pace<'a> {
    /// By chance, each its own: until the last byte has left, and until it is there.
    Seed(u64),
    Flows(Box<Live<'a>>),
}

fn by_chance(seed: u64, (from, to): (u32, u32), channel: u16, index: u32) -> (u64, u64) {
    let ends = (u64::from(from) << 32) | u64::from(to);
    let number = mixed(seed ^ mixed(ends ^ mixed(u64::from(channel) << 32 | u64::from(index))));
    // So many picoseconds that no two things happen at once.
    (1 + number % 1_000_003, 1 + (number >> 32) % 1_000_033)
}

/// All ranks of a call by the real executor, and a clock.
#[derive(Debug)]
struct World<'a> {
    now: u64,
    pace: Pace<'a>,
    eager: u64,
    lanes: BTreeMap<(u32, u32, u16), Line>,
    /// Messages whose flow is under way: by tag.
    flowing: HashMap<u32, (u32, u32, u16, u64)>,
    flows: u32,
    /// When something happens next.
    events: BinaryHeap<Reverse<u64>>,
    ended: Vec<Vec<(u64, Who)>>,
}

/// A lane between two ranks.
#[derive(Debug, Default)]
struct Line {
    under_way: VecDeque<Sent>,
    offered: u64,
    taken: u64,
}

#[derive(Debug)]
struct Sent {
    head: MessageHead,
    number: u64,
    bytes: Vec<u8>,
    eager: bool,
    begun: bool,
    left: Option<u64>,
    there: Option<u64>,
}

impl World<'_> {
    /// A message begins.
    fn begin(&mut self, key: (u32, u32, u16), number: u64) {
        let World { now, pace, lanes, .. } = self;
        let lane = lanes.get_mut(&key).expect("a lane");
        let sent = lane.under_way.iter_mut().find(|sent| sent.number == number);
        let sent = sent.expect("a message");
        sent.begun = true;
        match pace {
            Pace::Seed(seed) => {
                let (leaves, late) = by_chance(*seed, (key.0, key.1), key.2, sent.head.index);
                sent.left = Some(*now + leaves);
                sent.there = Some(*now + leaves + late);
                self.events.push(Reverse(*now + leaves));
                self.events.push(Reverse(*now + leaves + late));
            }
            Pace::Flows(live) => {
                let ends = (Rank(key.0), Rank(key.1));
                live.begin(*now, ends, Bytes(sent.head.len), self.flows)
                    .expect("ranks of the network");
                self.flowing.insert(self.flows, (key.0, key.1, key.2, number));
                self.flows += 1;
            }
        }
    }

    /// Goes to the next time at which something happens; says whether there is one.
    fn advance(&mut self) -> bool {
        if let Pace::Flows(live) = &mut self.pace {
            let next = live.next(self.now);
            let arrives = self.events.peek().map(|&Reverse(at)| at);
            let Some(next) = next.into_iter().chain(arrives).min() else {
                return false;
            };
            self.now = next;
            let mut ended = Vec::new();
            live.end(next, &mut ended);
            for (tag, there) in ended {
                let (from, to, channel, number) = self.flowing.remove(&tag).expect("a flow");
                let lane = self.lanes.get_mut(&(from, to, channel)).expect("a lane");
                let sent = lane.under_way.iter_mut().find(|sent| sent.number == number);
                let sent = sent.expect("a message");
                (sent.left, sent.there) = (Some(next), Some(there.as_ps()));
                self.events.push(Reverse(there.as_ps()));
            }
        }
        let mut any = matches!(self.pace, Pace::Flows(_));
        while let Some(&Reverse(at)) = self.events.peek() {
            if at > self.now && any {
                break;
            }
            (self.now, any) = (at, true);
            self.events.pop();
        }
        any
    }

    fn ends(&mut self, rank: Rank, who: Who) {
        let now = self.now;
        self.ended[rank.0 as usize].push((now, who));
    }
}

/// One rank's end of the world.
#[derive(Debug)]
struct End<'a, 'w> {
    world: &'w Mutex<World<'a>>,
    rank: Rank,
    buffers: Vec<View>,
    /// By offer that has not settled: which message it is.
    open: HashMap<(Lane, u64), u32>,
}

impl<'a> End<'a, '_> {
    fn world(&self) -> MutexGuard<'_, World<'a>> {
        self.world.lock().unwrap()
    }
}

impl Board for End<'_, '_> {
    fn publish(&mut self, _: WaitingFor) {}
    fn status(&mut self, _: Rank) -> Option<Status> {
        None
    }
    fn pulse(&mut self, _: Rank) -> u64 {
        0
    }
    fn abort(&mut self, abort: &Abort) {
        panic!("{abort}");
    }
}

impl Exchange for End<'_, '_> {
    fn channels(&self) -> u16 {
        u16::MAX - 1
    }
    fn begin(&mut self, _: &CallRecord, buffers: &mut Vec<View>) -> Result<(), Trouble> {
        self.buffers = std::mem::take(buffers);
        Ok(())
    }
    fn buffer(&self, place: u32) -> &View {
        &self.buffers[place as usize]
    }

    fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        let key = (self.rank.0, lane.peer.0, lane.channel);
        let mut bytes = vec![0; from.len as usize];
        if from.len > 0 {
            let view = self.buffer(from.buffer);
            view.memory.bytes().read(view.offset + from.offset, &mut bytes);
        }
        let mut world = self.world();
        let (now, eager) = (world.now, from.len <= world.eager);
        let wire = world.lanes.entry(key).or_default();
        // What was copied leaves before the next one goes.
        let leaving = |sent: &Sent| sent.eager && sent.left.is_none_or(|left| left > now);
        if wire.under_way.iter().any(leaving) {
            return Ok(Offered::Full);
        }
        let number = wire.offered;
        wire.offered += 1;
        wire.under_way.push_back(Sent {
            head: *head,
            number,
            bytes,
            eager,
            begun: false,
            left: None,
            there: None,
        });
        if eager {
            world.begin(key, number);
            world.ends(self.rank, Who::Send(lane, head.index));
            return Ok(Offered::Settled);
        }
        drop(world);
        self.open.insert((lane, number), head.index);
        Ok(Offered::Open(OfferId(number)))
    }

    fn settled(&mut self, lane: Lane, offer: OfferId) -> bool {
        let mut world = self.world();
        let wire = &world.lanes[&(self.rank.0, lane.peer.0, lane.channel)];
        if wire.taken <= offer.0 {
            return false;
        }
        let index = self.open[&(lane, offer.0)];
        world.ends(self.rank, Who::Send(lane, index));
        true
    }

    fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        let key = (lane.peer.0, self.rank.0, lane.channel);
        let mut world = self.world();
        let now = world.now;
        let Some(first) = world.lanes.get(&key).and_then(|wire| wire.under_way.front()) else {
            return Ok(Taken::Nothing);
        };
        assert_eq!(first.head, *head, "a message of another call");
        let number = first.number;
        if !first.begun {
            world.begin(key, number);
            return Ok(Taken::Nothing);
        }
        if first.there.is_none_or(|there| there > now) {
            return Ok(Taken::Nothing);
        }
        let wire = world.lanes.get_mut(&key).expect("a lane");
        let sent = wire.under_way.pop_front().expect("a message");
        wire.taken += 1;
        world.ends(self.rank, Who::Take(lane, head.index));
        drop(world);
        let into = sink.target();
        let view = self.buffer(into.buffer);
        if into.len > 0 {
            view.memory.bytes().write(view.offset + into.offset, &sent.bytes);
        }
        Ok(Taken::All)
    }

    fn poll(&mut self, _: Time) -> Result<Progress, Trouble> {
        Ok(Progress::Idle)
    }
    fn end(&mut self) -> Progress {
        Progress::Idle
    }
    fn lend(&mut self, _: Rank, _: &View) -> Result<u32, Trouble> {
        unreachable!("calls of this group lend nothing")
    }
    fn take_back(&mut self, _: Rank, _: u32) -> Progress {
        Progress::Idle
    }
}

/// Takes note of what is done on a rank alone, which takes no time.
#[derive(Debug)]
struct Noted<'a, 'w> {
    world: &'w Mutex<World<'a>>,
    rank: Rank,
    memory: Vec<Arc<VecMemory>>,
}

impl Noted<'_, '_> {
    fn note(&self, at: At<'_>, len: u64) {
        let is = |memory: &Arc<VecMemory>| std::ptr::addr_eq(Arc::as_ptr(memory), at.memory);
        let buffer = self.memory.iter().position(is).expect("a buffer of the call") as u32;
        let piece = Piece {
            buffer,
            offset: at.offset,
            len,
        };
        self.world.lock().unwrap().ends(self.rank, Who::Here(piece));
    }
}

impl Kernels for Noted<'_, '_> {
    fn copy(&self, _: At<'_>, to: At<'_>, len: u64) {
        self.note(to, len);
    }
    fn combine(&self, _: &Combiner, _: At<'_>, _: At<'_>, into: At<'_>, len: u64) {
        self.note(into, len);
    }
    fn divide(&self, _: Datatype, at: At<'_>, len: u64, _: u64) {
        self.note(at, len);
    }
}

/// Runs a call by the executor of communicators.
fn really(look: &Look<'_>, problem: &Problem, pace: Pace<'_>, eager: u64, what: &str) -> (Vec<Ends>, u64) {
    let ranks = problem.ranks;
    let compiled: Vec<Compiled> = (0..ranks).map(|rank| look.compile(Rank(rank)).unwrap()).collect();
    let world = Mutex::new(World {
        now: 0,
        pace,
        eager,
        lanes: BTreeMap::new(),
        flowing: HashMap::new(),
        flows: 0,
        events: BinaryHeap::new(),
        ended: vec![Vec::new(); ranks as usize],
    });
    let mut players: Vec<_> = (0..ranks)
        .map(|rank| {
            let compiled = compiled[rank as usize].clone();
            let room = |buffer: u32| {
                let piece = |op: u32| {
                    let pieces = match *compiled.act(op) {
                        Act::Send { from, .. } => [from; 3],
                        Act::Receive { into, .. } => [into; 3],
                        Act::ReceiveReduce { with, into, .. } => [with, with, into],
                        Act::Copy { from, to } => [from, to, to],
                        Act::Reduce { from, with, into } => [from, with, into],
                        Act::Divide { at } => [at; 3],
                    };
                    let own = pieces.into_iter().filter(|piece| piece.buffer == buffer);
                    own.map(|piece| piece.offset + piece.len).max().unwrap_or(0)
                };
                (0..compiled.len() as u32).map(piece).max().unwrap_or(0)
            };
            let memory: Vec<Arc<VecMemory>> = (0..3)
                .map(|buffer| Arc::new(VecMemory::zeroed(room(buffer) as usize)))
                .collect();
            let mut views: Vec<View> = memory.iter().map(|memory| View::whole(memory.clone())).collect();
            let task = Arc::new(Task {
                compiled,
                combiners: vec![Combiner::Builtin {
                    datatype: Datatype::U8,
                    reduction: Reduction::Sum,
                }],
                ranks,
                record: CallRecord::new(0, 1, "a call"),
            });
            let rank = Rank(rank);
            let mut exchange = End {
                world: &world,
                rank,
                buffers: Vec::new(),
                open: HashMap::new(),
            };
            let mut real = Real::default();
            real.begin(&task, 0, &mut views, &mut exchange).unwrap();
            let world = &world;
            (real, exchange, Noted { world, rank, memory })
        })
        .collect();
    let (mut last, mut ended) = (0, 0);
    loop {
        let mut moved = true;
        while moved {
            let before = std::mem::take(&mut ended);
            moved = false;
            for (real, exchange, kernels) in &mut players {
                match real.turn(exchange, kernels, 1).unwrap() {
                    Turn::Ended => ended += 1,
                    Turn::Moved => moved = true,
                    Turn::Waiting => {}
                }
            }
            moved |= ended > before;
        }
        let mut world = world.lock().unwrap();
        if ended == players.len() {
            break;
        }
        let waiting = || players.iter().map(|(real, ..)| real.waiting()).collect::<Vec<_>>();
        assert!(world.advance(), "{what}: ranks wait for each other: {:?}", waiting());
        last = world.now;
    }
    drop(players);
    let world = world.into_inner().unwrap();
    let ends = world.ended.into_iter().zip(&compiled).map(|(ended, compiled)| {
        let mut ops: HashMap<Who, VecDeque<u32>> = HashMap::new();
        for op in 0..compiled.len() as u32 {
            ops.entry(who(compiled, op)).or_default().push_back(op);
        }
        let mut op = |who| ops.get_mut(&who).and_then(VecDeque::pop_front).expect("an op");
        let mut ends: Ends = ended.into_iter().map(|(at, who)| (at, op(who))).collect();
        ends.sort_unstable();
        ends
    });
    (ends.collect(), last)
}

/// Runs the same here.
fn simulated(look: &mut Look<'_>, ranks: u32, seed: u64, eager: u64) -> Vec<Ends> {
    let classes = Classes::by_links(ranks);
    let plans = Plans::new(look, &classes, Trust::Alike).unwrap();
    let conduct = Conduct {
        eager: Eager {
            local: Bytes(eager),
            across: Bytes(eager),
        },
        reduction: Bandwidth::MAX,
        copy: Bandwidth::MAX,
        traced_ranks: 0,
        ends: true,
    };
    let mut execution = Execution::new(classes, (look, &plans), Symmetry::Shifted, &conduct);
    let mut events: BinaryHeap<Reverse<(u64, u8, u32, u64)>> = BinaryHeap::new();
    loop {
        while let Some(message) = execution.starts.pop() {
            let Message {
                start, sends, begun, ..
            } = &execution.messages[message as usize];
            assert_eq!(start.count, 1, "ranks for themselves");
            let compiled = &plans.plan(execution.actors[start.from as usize].plan).compiled;
            let index = compiled.index(sends.singles()[0]);
            let (leaves, late) = by_chance(seed, (start.from, start.to), start.channel, index);
            events.push(Reverse((begun + leaves, 0, message, late)));
        }
        while let Some((at, Wake(wake))) = execution.wakes.pop() {
            events.push(Reverse((at, 1, wake, 0)));
        }
        match events.pop() {
            None => break,
            Some(Reverse((now, 0, message, late))) => execution.has_left(message, now, late),
            Some(Reverse((now, _, wake, _))) => execution.happen(Wake(wake), now),
        }
    }
    assert_eq!(execution.left, 0, "ranks wait for each other");
    assert!(!execution.unlike);
    let mut ends = vec![Ends::new(); ranks as usize];
    for (actor, op, at) in execution.ends.unwrap() {
        ends[actor as usize].push((at, op));
    }
    ends.iter_mut().for_each(|ends| ends.sort_unstable());
    ends
}

fn network(fabric: Fabric) -> Topology {
    let cluster = Cluster {
        node_ranks: 1,
        node_ports: 1,
        scale_up: None,
        fabric,
    };
    cluster.build().unwrap()
}

fn problem(nth: u64, ranks: u32, chance: &mut Seeded) -> Problem {
    let sizes = Sizes::Equal;
    let root = Rank(chance.below(ranks.into()) as u32);
    let collective = match nth % 10 {
        0 => Collective::AllReduce,
        1 => Collective::AllGather { sizes },
        2 => Collective::ReduceScatter { sizes },
        3 => Collective::Broadcast { root },
        4 => Collective::Reduce { root },
        5 => Collective::Gather { root, sizes },
        6 => Collective::Scatter { root, sizes },
        7 => Collective::AllToAll { sizes },
        8 if ranks > 1 => Collective::SendReceive {
            from: root,
            to: Rank((root.0 + 1) % ranks),
        },
        _ => Collective::Barrier,
    };
    let apart = Problem::new(collective, ranks);
    match chance.chance(0.3) && apart.in_place().check().is_ok() {
        true => apart.in_place(),
        false => apart,
    }
}

/// Every algorithm for a problem, some of them in portions.
fn programs(problem: &Problem, chance: &mut Seeded) -> Vec<(Algorithm, Box<dyn Program>)> {
    let ways = (1..=problem.ranks).filter(|nodes| problem.ranks.is_multiple_of(*nodes));
    let ways: Vec<u32> = ways.collect();
    let mut programs = Vec::new();
    for &algorithm in Algorithm::ALL {
        let nodes = ways[chance.below(ways.len() as u64) as usize];
        let grid = Grid {
            nodes,
            local: problem.ranks / nodes,
        };
        let Some(program) = algorithm.program(problem, grid) else {
            continue;
        };
        let portioned: Box<dyn Program> = match chance.below(4) {
            0 => Box::new(Portioned::staggered(program, 3)),
            1 => Box::new(Portioned::together(program, 2)),
            _ => program,
        };
        programs.push((algorithm, portioned));
    }
    programs
}

#[test]
fn what_runs_and_what_is_simulated_end_the_same_ops_at_the_same_times() {
    let wire = Wire {
        bandwidth: Bandwidth::from_gigabytes_per_sec(1.0),
        latency: Picos::ZERO,
    };
    let (mut seen, mut ops) = (BTreeSet::new(), 0);
    for seed in 0..SEEDS {
        let mut chance = Seeded::new(seed ^ 0xd1ff);
        let ranks = 1 + chance.below(12) as u32;
        let problem = problem(seed, ranks, &mut chance);
        let topology = network(Fabric::SingleSwitch { ports: ranks, wire });
        for (algorithm, program) in programs(&problem, &mut chance) {
            let eager = chance.below(4);
            let what = format!("seed {seed}: {} of {ranks} by {algorithm}", problem.collective);
            // One byte a chunk.
            let bytes = u64::from(program.shape().pieces) * u64::from(problem.blocks_in_size());
            let mut look = Look::new(&topology, &problem, &*program, bytes).unwrap();
            let (real, _) = really(&look, &problem, Pace::Seed(seed), eager, &what);
            let simulated = simulated(&mut look, ranks, seed, eager);
            for (rank, (real, simulated)) in real.iter().zip(&simulated).enumerate() {
                assert_eq!(real, simulated, "{what}: rank {rank}");
                ops += real.len();
            }
            seen.insert(algorithm);
        }
    }
    let missing: Vec<_> = Algorithm::ALL.iter().filter(|one| !seen.contains(one)).collect();
    assert!(missing.is_empty(), "no seed has {missing:?}");
    assert!(ops > 50_000, "{ops} ops");
}

#[test]
fn what_runs_takes_as_long_as_is_simulated_on_a_network_of_flows() {
    for seed in 0..SEEDS / 8 {
        let mut chance = Seeded::new(seed ^ 0xf10);
        let wire = Wire {
            bandwidth: Bandwidth::from_bytes_per_sec(1_000_000 * (1 + chance.below(50))),
            latency: Picos::from_ns(chance.below(1000)),
        };
        let ranks = 4 + 2 * chance.below(5) as u32;
        let fabric = match chance.chance(0.5) {
            true => Fabric::SingleSwitch { ports: ranks, wire },
            false => Fabric::Torus {
                sides: vec![ranks / 2, 2],
                wire,
            },
        };
        let topology = network(fabric);
        let problem = problem(seed, ranks, &mut chance);
        for (algorithm, program) in programs(&problem, &mut chance) {
            let eager = chance.below(4);
            let what = format!("seed {seed}: {} of {ranks} by {algorithm}", problem.collective);
            let bytes = u64::from(program.shape().pieces) * u64::from(problem.blocks_in_size());
            let look = Look::new(&topology, &problem, &*program, bytes).unwrap();
            let options = FlowOptions {
                eager: Eager {
                    local: Bytes(eager),
                    across: Bytes(eager),
                },
                ..FlowOptions::default()
            };
            let (_, real) = really(
                &look,
                &problem,
                Pace::Flows(Box::new(Live::new(&topology, &options))),
                eager,
                &what,
            );
            for folding in [Folding::Never, Folding::Alike] {
                let options = FlowOptions {
                    folding,
                    ..options.clone()
                };
                let report = flow::run_program(&topology, &problem, &*program, Bytes(bytes), &options).unwrap();
                // Rates are solved in another order, and rounded.
                let apart = report.time.as_ps().abs_diff(real);
                assert!(
                    apart <= 50 + real / 1_000_000,
                    "{what}: {real} ps, simulated in {} classes {} eager {eager}",
                    report.classes,
                    report.time
                );
            }
        }
    }
}
