//! How long a program takes on a placement, for any size at once.
//!
//! The model is that of the strict world: steps follow each other, and a step takes as long as its busiest rank or node. In a step a rank pays
//! the latency of its farthest message once, a gap for each message, the bytes that it sends or receives (whichever is more) at the
//! bandwidth of the link, and then what it copies and reduces itself; the ranks of a node share its rails and its cores. Where they
//! see each other's memory, sending costs nothing, and what is received is copied or reduced where it lies, at a speed that depends on
//! how much of all buffers fits the cache, and on whether its owner has only just written it. (Inputs are taken to be as they were when the
//! call before read them.) A program is looked at once, and its time for a size is a sum over its different steps.
//!
//! ```
//! use weft_plan::algorithms::{Grid, Ring};
//! use weft_plan::cost::{Placement, Profile};
//! use weft_plan::{Bytes, Collective, Platform, Problem};
//! let placement = Placement::on(&Platform::laptop(), Grid::flat(4))?;
//! let problem = Problem::new(Collective::AllReduce, 4);
//! let ring = Profile::of(&problem, &Ring::new(problem).unwrap(), &placement);
//! assert!(ring.predict(Bytes(1 << 20)).time > ring.predict(Bytes(1 << 10)).time);
//! // A million ranks are no more work than four: the ring says that its steps are alike.
//! let problem = Problem::new(Collective::AllReduce, 1 << 20);
//! let placement = Placement::on(&Platform::laptop(), Grid { nodes: 1 << 17, local: 8 })?;
//! let ring = Profile::of(&problem, &Ring::new(problem).unwrap(), &placement);
//! assert_eq!(ring.predict(Bytes(1 << 30)).steps, 2 * ((1 << 20) - 1));
//! # Ok::<(), weft_plan::cost::PlacementError>(())
//! ```

use std::collections::HashMap;

use super::{LinkCost, Placement};
use crate::collective::{Buffer, Problem};
use crate::platform::Memcpy;
use crate::schedule::{Op, Ops, Phase, Program, Shape, Slice};
use crate::units::{Bytes, Picos, Rank};

/// A program of more ranks × steps than this is looked at by its phases, where it has some.
const EVERY_STEP: u64 = 1 << 16;

/// What a program asks of a placement, step by step.
#[derive(Clone, Debug)]
pub struct Profile {
    placement: Placement,
    steps: Vec<Repeated>,
}

/// Steps that are alike, and what different ranks do in them.
#[derive(Clone, Debug, PartialEq)]
struct Repeated {
    times: u32,
    loads: Vec<Load>,
}

/// What one rank does in a step. Amounts are shares of the size of the collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
struct Load {
    local: Traffic,
    across: Traffic,
    /// Of all ranks of the node together.
    node: Traffic,
    reduced: f64,
    /// Of that, what comes from ranks of the same node, and is reduced where it lies if they have an arena.
    fused: f64,
    copied: f64,
    /// Of what it sends to ranks of the same node, what it has written itself in this call.
    fresh: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
struct Traffic {
    sent: f64,
    taken: f64,
    messages_sent: u32,
    messages_taken: u32,
}

/// How long, and what makes it so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    pub time: Picos,
    /// Steps in which somebody does something.
    pub steps: u32,
    /// Waiting for messages to come at all.
    pub latency: Picos,
    /// Bytes and gaps on links.
    pub transfer: Picos,
    /// Copying and reducing.
    pub work: Picos,
}

impl Profile {
    /// Looks at every rank and step, or at the phases that stand for them where there are too many.
    pub fn of(problem: &Problem, program: &dyn Program, placement: &Placement) -> Profile {
        let shape = program.shape();
        let small = u64::from(shape.ranks) * u64::from(shape.steps) <= EVERY_STEP;
        match program.phases() {
            Some(phases) if !small => Profile::by_phases(problem, program, placement, &phases),
            _ => Profile::by_steps(problem, program, placement),
        }
    }

    pub(super) fn by_steps(problem: &Problem, program: &dyn Program, placement: &Placement) -> Profile {
        let mut look = Look::new(problem, program, placement);
        let mut steps = Vec::new();
        for step in 0..program.shape().steps {
            let nodes = 0..placement.grid.nodes;
            let loads = look.at(step, nodes);
            add(&mut steps, Repeated { times: 1, loads });
        }
        Profile {
            placement: *placement,
            steps,
        }
    }

    pub(super) fn by_phases(
        problem: &Problem,
        program: &dyn Program,
        placement: &Placement,
        phases: &[Phase],
    ) -> Profile {
        let mut look = Look::new(problem, program, placement);
        let mut steps = Vec::new();
        for phase in phases {
            let mut nodes: Vec<u32> = phase.ranks.iter().map(|&rank| placement.grid.node(rank)).collect();
            nodes.sort_unstable();
            nodes.dedup();
            let loads = look.at(phase.steps.start, nodes);
            let times = phase.steps.end - phase.steps.start;
            add(&mut steps, Repeated { times, loads });
        }
        Profile {
            placement: *placement,
            steps,
        }
    }

    /// How long the collective takes for `bytes`: those of the larger of a rank's buffers, as is usual when collectives are measured.
    pub fn predict(&self, bytes: Bytes) -> Prediction {
        let (mut latency, mut transfer, mut work) = (0.0, 0.0, 0.0);
        let mut steps = 0;
        for repeated in &self.steps {
            let costs = repeated
                .loads
                .iter()
                .map(|load| load.cost(&self.placement, bytes.0 as f64));
            let longest = costs.max_by(|a, b| a.total().total_cmp(&b.total()));
            if let Some(longest) = longest {
                let times = f64::from(repeated.times);
                latency += longest.latency * times;
                transfer += longest.transfer * times;
                work += longest.work * times;
                steps += repeated.times;
            }
        }
        Prediction {
            time: picoseconds(latency + transfer + work),
            steps,
            latency: picoseconds(latency),
            transfer: picoseconds(transfer),
            work: picoseconds(work),
        }
    }
}

/// Looks at what ranks do.
struct Look<'a> {
    problem: &'a Problem,
    program: &'a dyn Program,
    placement: &'a Placement,
    pieces: u32,
    /// The share of the size that a chunk has.
    chunk: f64,
    ops: Ops,
}

impl<'a> Look<'a> {
    fn new(problem: &'a Problem, program: &'a dyn Program, placement: &'a Placement) -> Look<'a> {
        let Shape { pieces, .. } = program.shape();
        Look {
            problem,
            program,
            placement,
            pieces,
            chunk: 1.0 / (f64::from(pieces) * f64::from(problem.blocks_in_size())),
            ops: Ops::new(),
        }
    }

    /// The different loads of the ranks of some nodes in a step.
    fn at(&mut self, step: u32, nodes: impl IntoIterator<Item = u32>) -> Vec<Load> {
        let grid = self.placement.grid;
        let mut loads: Vec<Load> = Vec::new();
        let mut on_node = Vec::with_capacity(grid.local as usize);
        for node in nodes {
            on_node.clear();
            let mut sum = Traffic::default();
            for index in 0..grid.local {
                let load = self.load(grid.rank(node, index), step);
                sum.sent += load.across.sent;
                sum.taken += load.across.taken;
                on_node.push(load);
            }
            for load in &on_node {
                let load = Load { node: sum, ..*load };
                if load != Load::default() && !loads.contains(&load) {
                    loads.push(load);
                }
            }
        }
        loads
    }

    fn load(&mut self, rank: Rank, step: u32) -> Load {
        let grid = self.placement.grid;
        let share = |slice: Slice| f64::from(slice.count) * self.chunk;
        let mut load = Load::default();
        let ops = self.ops.fill(self.program, rank, step);
        let joined = Joined::of(ops);
        for (nth, op) in ops.iter().enumerate() {
            let amount = op.writes().or_else(|| op.reads().next()).map_or(0.0, share);
            if let Some(peer) = op.peer() {
                let way = match grid.node(peer) == grid.node(rank) {
                    true => &mut load.local,
                    false => &mut load.across,
                };
                match op {
                    Op::Send { slice, .. } => {
                        way.sent += amount;
                        way.messages_sent += 1;
                        if slice.buffer != Buffer::Input && grid.node(peer) == grid.node(rank) {
                            load.fresh += amount;
                        }
                    }
                    _ => {
                        way.taken += amount;
                        way.messages_taken += 1;
                    }
                }
            }
            match op {
                Op::ReceiveReduce { from, .. } => {
                    load.reduced += amount;
                    if grid.node(*from) == grid.node(rank) {
                        load.fused += amount;
                    }
                }
                Op::Reduce { .. } => load.reduced += amount,
                Op::Copy { from, to } => {
                    // In place, many a copy is onto itself.
                    let pieces = self.pieces;
                    let shared = |slice: &Slice| {
                        let shared = self.problem.shared(rank, slice.buffer, slice.first, pieces);
                        shared.unwrap_or((slice.buffer, slice.first))
                    };
                    if shared(from) != shared(to) && !joined.after(nth, *to) {
                        load.copied += amount;
                    }
                }
                // Reduced as it comes, where it is next reduced with what is here.
                Op::Receive { from, slice, .. } if joined.after(nth, *slice) => {
                    if grid.node(*from) == grid.node(rank) {
                        load.fused += amount;
                    }
                }
                Op::Send { .. } | Op::Receive { .. } => {}
            }
        }
        load
    }
}

/// What of a step is reduced onto, and from which op on: what was copied or received there before is one pass with that, as executors
/// do it.
struct Joined(HashMap<Slice, usize>);

impl Joined {
    fn of(ops: &[Op]) -> Joined {
        let mut first = HashMap::new();
        for (nth, op) in ops.iter().enumerate() {
            if let Op::ReceiveReduce { with, into, .. } | Op::Reduce { with, into, .. } = op
                && with == into
            {
                first.entry(*into).or_insert(nth);
            }
        }
        Joined(first)
    }

    fn after(&self, nth: usize, slice: Slice) -> bool {
        self.0.get(&slice).is_some_and(|first| *first > nth)
    }
}

/// What a load costs, in picoseconds.
#[derive(Clone, Copy, Debug)]
struct Cost {
    latency: f64,
    transfer: f64,
    work: f64,
}

impl Cost {
    fn total(&self) -> f64 {
        self.latency + self.transfer + self.work
    }
}

impl Load {
    fn cost(&self, placement: &Placement, bytes: f64) -> Cost {
        let crowding = placement.crowding();
        let rate = |bandwidth: crate::units::Bandwidth| 1e12 / bandwidth.bytes_per_sec().max(1) as f64;
        let busy = |traffic: &Traffic, link: &LinkCost| {
            let gap = link.per_span.as_ps() as f64;
            let byte = rate(link.bandwidth);
            let sent = f64::from(traffic.messages_sent) * gap + traffic.sent * bytes * byte;
            let taken = f64::from(traffic.messages_taken) * gap + traffic.taken * bytes * byte;
            sent.max(taken)
        };
        let latency = |traffic: &Traffic, link: &LinkCost| match traffic.messages_sent + traffic.messages_taken {
            0 => 0.0,
            _ => link.latency.as_ps() as f64,
        };
        let rails = self.node.sent.max(self.node.taken) * bytes * rate(placement.across.bandwidth)
            / f64::from(placement.rails.max(1));
        let away = busy(&self.across, &placement.across).max(rails);
        let Some(arena) = &placement.arena else {
            return Cost {
                latency: latency(&self.local, &placement.local).max(latency(&self.across, &placement.across)),
                transfer: (busy(&self.local, &placement.local) * crowding).max(away),
                work: (self.reduced * rate(placement.reduction) + self.copied * rate(placement.copy))
                    * bytes
                    * crowding,
            };
        };
        // Every rank of the node has an input and an output.
        let footprint = 2.0 * bytes * f64::from(placement.grid.local);
        let cached = (arena.cache.0 as f64 / footprint.max(1.0)).min(1.0);
        let speed = |speed: Memcpy| cached * rate(speed.cached) + (1.0 - cached) * rate(speed.streaming);
        // What does not fit is written past the caches, and read like anything else.
        let fresh = match arena.fresh {
            Some(fresh) if cached >= 1.0 => self.fresh * (rate(fresh) - rate(arena.copy.cached)).max(0.0),
            _ => 0.0,
        };
        // What is reduced as it comes is not copied before.
        let taken = (self.local.taken - self.fused).max(0.0) * speed(arena.copy) + fresh;
        let here = match self.local.messages_sent + self.local.messages_taken {
            0 => 0.0,
            _ if crowding > 1.0 => arena.turn.unwrap_or(arena.latency).as_ps() as f64,
            _ => arena.latency.as_ps() as f64,
        };
        Cost {
            latency: here.max(latency(&self.across, &placement.across)),
            transfer: (taken * bytes * crowding).max(away),
            work: (self.reduced * speed(arena.reduce) + self.copied * speed(arena.copy)) * bytes * crowding,
        }
    }
}

/// Appends a step, as one more of the last where it is like that.
fn add(steps: &mut Vec<Repeated>, next: Repeated) {
    match steps.last_mut() {
        _ if next.loads.is_empty() => {}
        Some(last) if last.loads == next.loads => last.times += next.times,
        _ => steps.push(next),
    }
}

fn picoseconds(value: f64) -> Picos {
    Picos::from_ps(value.round() as u64)
}
