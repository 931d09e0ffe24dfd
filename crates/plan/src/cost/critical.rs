//! How long a program takes when every rank goes on as soon as it can, op by op.
//!
//! Where [`Profile`](super::Profile) lets all ranks step together, this follows each message: it begins when both ends have come to it, takes
//! its turn at the port of each end (and at the rails of each node) for its gap and its bytes, and is there a latency after the later of
//! these; then it is reduced, where it is to be, as soon as the core is free. The ports do not wait for each other, as if links were
//! shared fairly. For programs that are small enough to be looked at op by op; it is what the others are held against.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use super::{LinkCost, Placement};
use crate::collective::Partition;
use crate::schedule::{Channel, Op, Ops, Program};
use crate::units::{Bandwidth, Bytes, Picos, Rank};

/// The time at which the last rank ends, for chunks as `partition` cuts them and elements of `element` bytes; `None` where the program
/// comes to no end.
///
/// ```
/// use weft_plan::algorithms::{Grid, Ring};
/// use weft_plan::collective::{Collective, Counts, Partition, Problem};
/// use weft_plan::cost::{Placement, critical_path};
/// use weft_plan::schedule::Program;
/// use weft_plan::{Bytes, Platform};
/// let problem = Problem::new(Collective::AllReduce, 4);
/// let ring = Ring::new(problem).unwrap();
/// let placement = Placement::on(&Platform::laptop(), Grid::flat(4))?;
/// let partition = Partition::new(&problem, Counts::Equal(1 << 18), ring.shape().pieces)?;
/// let time = critical_path(&ring, &partition, Bytes(4), &placement).unwrap();
/// assert!(time > placement.local.time(Bytes(6 << 18), 6));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn critical_path(
    program: &dyn Program,
    partition: &Partition,
    element: Bytes,
    placement: &Placement,
) -> Option<Picos> {
    let ranks = program.shape().ranks as usize;
    let mut world = World {
        program,
        partition,
        element,
        placement,
        ranks: vec![Actor::default(); ranks],
        rails: vec![Port::default(); placement.grid.nodes as usize],
        channels: HashMap::new(),
        events: (0..ranks as u32)
            .map(|rank| Reverse((Picos::ZERO, Rank(rank))))
            .collect(),
        ops: Ops::new(),
        last: Picos::ZERO,
    };
    world.turn()
}

/// When something is free again, in each direction.
#[derive(Clone, Copy, Debug, Default)]
struct Port {
    sends: Picos,
    takes: Picos,
}

#[derive(Clone, Debug, Default)]
struct Actor {
    step: u32,
    pending: u32,
    /// When the ops of the step that have ended so far have all ended.
    ended: Picos,
    core: Picos,
    local: Port,
    across: Port,
}

/// A message of which one end has come: where, and how it is reduced.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    bytes: Bytes,
    signal: bool,
    reduces: bool,
}

#[derive(Debug, Default)]
struct Queue {
    sends: VecDeque<Waiting>,
    receives: VecDeque<Waiting>,
}

struct World<'a> {
    program: &'a dyn Program,
    partition: &'a Partition,
    element: Bytes,
    placement: &'a Placement,
    ranks: Vec<Actor>,
    /// By node: all its rails as one.
    rails: Vec<Port>,
    channels: HashMap<(Rank, Rank, Channel), Queue>,
    events: BinaryHeap<Reverse<(Picos, Rank)>>,
    ops: Ops,
    last: Picos,
}

impl World<'_> {
    fn turn(&mut self) -> Option<Picos> {
        let steps = self.program.shape().steps;
        let mut left = self.ranks.len();
        while let Some(Reverse((now, rank))) = self.events.pop() {
            if self.ranks[rank.0 as usize].step == steps {
                self.last = self.last.max(now);
                left -= 1;
            } else {
                self.begin(rank, now);
            }
        }
        (left == 0).then_some(self.last)
    }

    /// A rank comes to its next step.
    fn begin(&mut self, rank: Rank, now: Picos) {
        let mut ops = std::mem::take(&mut self.ops);
        let actor = &mut self.ranks[rank.0 as usize];
        let list = ops.fill(self.program, rank, actor.step);
        actor.ended = now;
        // One more than there are messages, so that the step does not end while it is being begun.
        actor.pending = 1 + list.iter().filter(|op| op.peer().is_some()).count() as u32;
        for op in list {
            let slice = op
                .writes()
                .or_else(|| op.reads().next())
                .unwrap_or(crate::schedule::Slice::NOTHING);
            let elements = self.partition.slice(self.program, rank, slice);
            let here = Waiting {
                bytes: Bytes(elements.saturating_mul(self.element.0)),
                signal: slice.is_empty(),
                reduces: matches!(op, Op::ReceiveReduce { .. }),
            };
            match *op {
                Op::Send { to, channel, .. } => {
                    let queue = self.channels.entry((rank, to, channel)).or_default();
                    match queue.receives.pop_front() {
                        Some(there) => self.carry(rank, to, there, now),
                        None => queue.sends.push_back(here),
                    }
                }
                Op::Receive { from, channel, .. } | Op::ReceiveReduce { from, channel, .. } => {
                    let queue = self.channels.entry((from, rank, channel)).or_default();
                    match queue.sends.pop_front() {
                        Some(_) => self.carry(from, rank, here, now),
                        None => queue.receives.push_back(here),
                    }
                }
                Op::Copy { .. } => self.work(rank, here.bytes, self.placement.copy, now),
                Op::Reduce { .. } => self.work(rank, here.bytes, self.placement.reduction, now),
            }
        }
        self.ops = ops;
        self.end_op(rank, now);
    }

    /// A message whose ends have both come.
    fn carry(&mut self, from: Rank, to: Rank, message: Waiting, now: Picos) {
        if message.bytes == Bytes(0) && !message.signal {
            // No elements: executors leave it out.
            self.end_op(from, now);
            return self.end_op(to, now);
        }
        let grid = self.placement.grid;
        let (node_from, node_to) = (grid.node(from) as usize, grid.node(to) as usize);
        let local = node_from == node_to;
        let link: &LinkCost = if local {
            &self.placement.local
        } else {
            &self.placement.across
        };
        let bytes = link.bandwidth.time_for(message.bytes);
        let bytes = if local { self.crowded(bytes) } else { bytes };
        let busy = bytes.saturating_add(link.per_span);
        let mut free = Picos::ZERO;
        let mut hold = |port: &mut Picos, busy: Picos| {
            *port = (*port).max(now).saturating_add(busy);
            free = free.max(*port);
        };
        let (sender, taker) = (from.0 as usize, to.0 as usize);
        if local {
            hold(&mut self.ranks[sender].local.sends, busy);
            hold(&mut self.ranks[taker].local.takes, busy);
        } else {
            hold(&mut self.ranks[sender].across.sends, busy);
            hold(&mut self.ranks[taker].across.takes, busy);
            let all = u128::from(link.bandwidth.bytes_per_sec()) * u128::from(self.placement.rails.max(1));
            let all = Bandwidth::from_bytes_per_sec(u64::try_from(all).unwrap_or(u64::MAX));
            hold(&mut self.rails[node_from].sends, all.time_for(message.bytes));
            hold(&mut self.rails[node_to].takes, all.time_for(message.bytes));
        }
        let there = free.saturating_add(link.latency);
        if message.reduces {
            self.work(to, message.bytes, self.placement.reduction, there);
        }
        self.end_op(from, there);
        self.end_op(to, there);
    }

    /// Keeps the core of a rank busy from `from` on, or from when it is free.
    fn work(&mut self, rank: Rank, bytes: Bytes, rate: Bandwidth, from: Picos) {
        let time = self.crowded(rate.time_for(bytes));
        let actor = &mut self.ranks[rank.0 as usize];
        actor.core = actor.core.max(from).saturating_add(time);
        actor.ended = actor.ended.max(actor.core);
    }

    fn end_op(&mut self, rank: Rank, at: Picos) {
        let actor = &mut self.ranks[rank.0 as usize];
        actor.ended = actor.ended.max(at);
        actor.pending -= 1;
        if actor.pending == 0 {
            actor.step += 1;
            self.events.push(Reverse((actor.ended, rank)));
        }
    }

    fn crowded(&self, time: Picos) -> Picos {
        Picos::from_ps((time.as_ps() as f64 * self.placement.crowding()) as u64)
    }
}
