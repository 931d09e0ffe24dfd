//! Whether a program does what its collective asks, in the strictest world that [`schedule`](super) describes.
//!
//! The program is run once with symbolic contents: a chunk holds a datum and the set of ranks that contributed to it. Messages match in
//! order and no receive has a choice, so that every order of events gives the same contents and the same end: one run is a proof for
//! all timings, and for all sizes. Shown are: it ends; no two ops of a step touch a chunk that one of them writes; nothing is read
//! before it was written; the input stays as it was, except where the output shares its memory; nothing is reduced twice; every message has as
//! many elements at both ends; and every chunk of the output holds what it must, every contribution exactly once.
//!
//! ```
//! use weft_plan::algorithms::Ring;
//! use weft_plan::collective::{Collective, Problem};
//! use weft_plan::schedule::verify;
//! let problem = Problem::new(Collective::AllReduce, 5);
//! let summary = verify(&problem, &Ring::new(problem).unwrap())?;
//! assert_eq!(summary.messages, 5 * 2 * 4);
//! # Ok::<(), weft_plan::schedule::Fault>(())
//! ```

mod fault;
mod memory;
mod race;
mod sets;

use std::collections::{HashMap, VecDeque};

use super::{Channel, Op, Ops, Program, Shape, Slice};
use crate::collective::{Buffer, Collective, Contributors, Extent, Problem};
use crate::units::Rank;

pub use fault::{At, Fault, Holding};
use memory::Memory;
use sets::{SetId, Sets};

/// What a verified program does, all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub ops: u64,
    pub messages: u64,
    /// Chunks that messages carry.
    pub chunks_moved: u64,
    /// Chunks that are reduced into others.
    pub chunks_reduced: u64,
    /// Whether every rank that ends with a reduction has reduced in the same order, so that all have the same bits also where
    /// rounding depends on it. (Reductions commute; they need not be associative.)
    pub same_bits: bool,
}

/// Runs `program` symbolically and compares what comes out with what `problem` asks for.
///
/// The work is proportional to the ops there are, and the memory to ranks × chunks; this is for programs of up to some thousand
/// ranks. A program of more is right for the same reason as the small ones, and nobody can afford to look at each of its ops.
pub fn verify(problem: &Problem, program: &dyn Program) -> Result<Summary, Fault> {
    problem.check()?;
    let shape = program.shape();
    if shape.ranks != problem.ranks {
        return Err(Fault::WrongRanks {
            program: shape.ranks,
            problem: problem.ranks,
        });
    }
    if shape.pieces == 0 {
        return Err(Fault::NoPieces);
    }
    Memory::fits(problem, shape)?;
    for rank in (0..shape.ranks).map(Rank) {
        let bad = (0..shape.scratch).find(|&chunk| program.scratch(rank, chunk).piece >= shape.pieces);
        if let Some(chunk) = bad {
            return Err(Fault::BadExtent { rank, chunk });
        }
    }
    let mut run = Run::new(problem, program, shape);
    run.finish()?;
    run.post_condition()?;
    Ok(run.summary)
}

/// What a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    datum: u32,
    from: SetId,
    /// Stands for the order in which the contributions were reduced: equal orders give equal bits.
    order: u64,
}

/// One end of a message that has not met the other.
#[derive(Clone, Copy, Debug)]
struct Posted {
    rank: Rank,
    op: usize,
}

/// The ends that wait on a channel from one rank to another. Only one of the two lists ever holds something.
#[derive(Debug, Default)]
struct Waiting {
    sends: VecDeque<Posted>,
    receives: VecDeque<Posted>,
}

/// A rank in the middle of its program.
#[derive(Debug)]
struct Actor {
    step: u32,
    ops: Vec<Op>,
    /// Messages of this step that have not come or gone yet.
    pending: usize,
    /// What came, by op.
    arrived: Vec<Vec<Content>>,
    /// The ranks that had begun, as far as this one can know; kept for barriers.
    heard: SetId,
    heard_next: SetId,
}

struct Run<'a> {
    problem: &'a Problem,
    program: &'a dyn Program,
    shape: Shape,
    memory: Memory,
    sets: Sets,
    actors: Vec<Actor>,
    channels: HashMap<(Rank, Rank, Channel), Waiting>,
    ready: VecDeque<Rank>,
    scratch_pad: Ops,
    summary: Summary,
}

impl<'a> Run<'a> {
    fn new(problem: &'a Problem, program: &'a dyn Program, shape: Shape) -> Run<'a> {
        let sets = Sets::new(problem.ranks);
        let memory = Memory::new(problem, shape, &sets);
        let actors = (0..problem.ranks)
            .map(|rank| {
                let heard = sets.one(Rank(rank));
                Actor {
                    step: 0,
                    ops: Vec::new(),
                    pending: 0,
                    arrived: Vec::new(),
                    heard,
                    heard_next: heard,
                }
            })
            .collect();
        Run {
            problem,
            program,
            shape,
            memory,
            sets,
            actors,
            channels: HashMap::new(),
            ready: VecDeque::new(),
            scratch_pad: Ops::new(),
            summary: Summary::default(),
        }
    }

    fn finish(&mut self) -> Result<(), Fault> {
        for rank in (0..self.problem.ranks).map(Rank) {
            if self.shape.steps > 0 {
                self.begin(rank)?;
            }
        }
        while let Some(rank) = self.ready.pop_front() {
            self.end(rank)?;
            let actor = &mut self.actors[rank.0 as usize];
            actor.step += 1;
            if actor.step < self.shape.steps {
                self.begin(rank)?;
            }
        }
        match self.actors.iter().position(|actor| actor.step < self.shape.steps) {
            Some(stuck) => Err(self.deadlock(Rank(stuck as u32))),
            None => Ok(()),
        }
    }

    /// Checks the ops of the step that `rank` is at, and posts its messages.
    fn begin(&mut self, rank: Rank) -> Result<(), Fault> {
        let step = self.actors[rank.0 as usize].step;
        let mut pad = std::mem::take(&mut self.scratch_pad);
        pad.fill(self.program, rank, step);
        for (op, what) in pad.as_slice().iter().enumerate() {
            self.well_formed(At { rank, step, op }, what)?;
        }
        race::none(&self.memory, rank, step, pad.as_slice())?;
        let actor = &mut self.actors[rank.0 as usize];
        actor.ops.clear();
        actor.ops.extend_from_slice(pad.as_slice());
        actor.arrived.clear();
        actor.arrived.resize(actor.ops.len(), Vec::new());
        actor.pending = actor.ops.iter().filter(|op| op.peer().is_some()).count();
        self.summary.ops += actor.ops.len() as u64;
        if actor.pending == 0 {
            self.ready.push_back(rank);
        }
        for (op, what) in pad.as_slice().iter().enumerate() {
            let here = Posted { rank, op };
            match *what {
                Op::Send { to, channel, .. } => {
                    let waiting = self.channels.entry((rank, to, channel)).or_default();
                    match waiting.receives.pop_front() {
                        Some(there) => self.meet(here, there)?,
                        None => waiting.sends.push_back(here),
                    }
                }
                Op::Receive { from, channel, .. } | Op::ReceiveReduce { from, channel, .. } => {
                    let waiting = self.channels.entry((from, rank, channel)).or_default();
                    match waiting.sends.pop_front() {
                        Some(there) => self.meet(there, here)?,
                        None => waiting.receives.push_back(here),
                    }
                }
                Op::Copy { .. } | Op::Reduce { .. } => {}
            }
        }
        self.scratch_pad = pad;
        Ok(())
    }

    /// A send and the receive that takes it end together.
    fn meet(&mut self, send: Posted, receive: Posted) -> Result<(), Fault> {
        let (sender, receiver) = (
            &self.actors[send.rank.0 as usize],
            &self.actors[receive.rank.0 as usize],
        );
        let at = At {
            rank: receive.rank,
            step: receiver.step,
            op: receive.op,
        };
        let sent_at = At {
            rank: send.rank,
            step: sender.step,
            op: send.op,
        };
        let (Op::Send { slice: sent, .. }, Some(taken)) = (sender.ops[send.op], receiver.ops[receive.op].writes())
        else {
            unreachable!("only sends and receives are posted");
        };
        let same = sent.count == taken.count
            && (0..sent.count).all(|i| {
                self.extent(send.rank, sent, sent.first + i) == self.extent(receive.rank, taken, taken.first + i)
            });
        if !same {
            return Err(Fault::SizeMismatch {
                at,
                from: sent_at,
                sent,
                taken,
            });
        }
        let contents = self.read(sent_at, sent)?;
        self.summary.messages += 1;
        self.summary.chunks_moved += contents.len() as u64;
        let told = self.actors[send.rank.0 as usize].heard;
        for rank in [send.rank, receive.rank] {
            let actor = &mut self.actors[rank.0 as usize];
            actor.pending -= 1;
            if actor.pending == 0 {
                self.ready.push_back(rank);
            }
        }
        let receiver = &mut self.actors[receive.rank.0 as usize];
        receiver.arrived[receive.op] = contents;
        if self.problem.collective == Collective::Barrier {
            receiver.heard_next = self.sets.union(receiver.heard_next, told);
        }
        Ok(())
    }

    /// Writes what the ops of the step have brought. None of them reads what another one writes, so that it may all happen now.
    fn end(&mut self, rank: Rank) -> Result<(), Fault> {
        let actor = &mut self.actors[rank.0 as usize];
        let (ops, arrived, step) = (
            std::mem::take(&mut actor.ops),
            std::mem::take(&mut actor.arrived),
            actor.step,
        );
        actor.heard = actor.heard_next;
        for (op, (what, came)) in ops.iter().zip(&arrived).enumerate() {
            let at = At { rank, step, op };
            match *what {
                Op::Send { .. } => {}
                Op::Receive { slice, .. } => self.write(rank, slice, came),
                Op::ReceiveReduce { with, into, .. } => self.reduce(at, came, with, into)?,
                Op::Copy { from, to } => {
                    let contents = self.read(at, from)?;
                    self.write(rank, to, &contents);
                }
                Op::Reduce { from, with, into } => {
                    let contents = self.read(at, from)?;
                    self.reduce(at, &contents, with, into)?;
                }
            }
        }
        let actor = &mut self.actors[rank.0 as usize];
        (actor.ops, actor.arrived) = (ops, arrived);
        Ok(())
    }

    fn reduce(&mut self, at: At, came: &[Content], with: Slice, into: Slice) -> Result<(), Fault> {
        let mut contents = self.read(at, with)?;
        for (i, (mine, theirs)) in contents.iter_mut().zip(came).enumerate() {
            let chunk = into.first + i as u32;
            if mine.datum != theirs.datum {
                return Err(Fault::DifferentData {
                    at,
                    chunk,
                    first: mine.datum,
                    second: theirs.datum,
                });
            }
            mine.from = self
                .sets
                .disjoint_union(mine.from, theirs.from)
                .map_err(|twice| Fault::CountedTwice { at, chunk, twice })?;
            mine.order = in_order(mine.order, theirs.order);
            self.summary.chunks_reduced += 1;
        }
        self.write(at.rank, into, &contents);
        Ok(())
    }

    fn read(&self, at: At, slice: Slice) -> Result<Vec<Content>, Fault> {
        (slice.first..slice.first + slice.count)
            .map(|chunk| {
                let content = self.memory.content(at.rank, slice.buffer, chunk);
                content.ok_or(Fault::Unwritten {
                    at,
                    buffer: slice.buffer,
                    chunk,
                })
            })
            .collect()
    }

    fn write(&mut self, rank: Rank, slice: Slice, contents: &[Content]) {
        for (chunk, &content) in (slice.first..).zip(contents) {
            self.memory.set(rank, slice.buffer, chunk, content);
        }
    }

    fn well_formed(&self, at: At, op: &Op) -> Result<(), Fault> {
        if let Some(peer) = op.peer()
            && (peer.0 >= self.problem.ranks || peer == at.rank)
        {
            return Err(Fault::BadPeer { at, peer });
        }
        if let Some(channel) = op.channel()
            && channel.0 >= self.shape.channels
        {
            return Err(Fault::BadChannel { at, channel });
        }
        for slice in op.reads().chain(op.writes()) {
            let chunks = self.memory.chunks(at.rank, slice.buffer);
            if !slice.is_empty() && slice.chunks().end > u64::from(chunks) {
                return Err(Fault::OutOfBounds { at, slice, chunks });
            }
        }
        let target = op.writes();
        if let Some(target) = target
            && target.buffer == Buffer::Input
            && !target.is_empty()
        {
            return Err(Fault::WritesInput { at, slice: target });
        }
        // What is combined or copied on a rank must be as long as what it becomes.
        if let (Op::Copy { .. } | Op::Reduce { .. } | Op::ReceiveReduce { .. }, Some(target)) = (op, target) {
            for source in op.reads() {
                let same = source.count == target.count
                    && (0..source.count).all(|i| {
                        self.extent(at.rank, source, source.first + i) == self.extent(at.rank, target, target.first + i)
                    });
                if !same {
                    return Err(Fault::SizeMismatch {
                        at,
                        from: at,
                        sent: source,
                        taken: target,
                    });
                }
            }
        }
        Ok(())
    }

    fn extent(&self, rank: Rank, slice: Slice, chunk: u32) -> Extent {
        match slice.buffer {
            Buffer::Scratch => self.program.scratch(rank, chunk),
            Buffer::Input | Buffer::Output => self.problem.extent(rank, slice.buffer, chunk, self.shape.pieces),
        }
    }

    /// Names the first op that a stuck rank waits for, and where the rank is that it waits for.
    fn deadlock(&self, rank: Rank) -> Fault {
        let mut waiting: Vec<(Posted, Rank)> = self
            .channels
            .iter()
            .flat_map(|(&(from, to, _), waiting)| {
                let sends = waiting.sends.iter().map(move |&posted| (posted, to));
                sends.chain(waiting.receives.iter().map(move |&posted| (posted, from)))
            })
            .filter(|(posted, _)| posted.rank == rank)
            .collect();
        waiting.sort_by_key(|(posted, _)| posted.op);
        let (posted, peer) = waiting[0];
        let actor = &self.actors[rank.0 as usize];
        let there = self.actors[peer.0 as usize].step;
        Fault::Deadlock {
            at: At {
                rank,
                step: actor.step,
                op: posted.op,
            },
            op: actor.ops[posted.op],
            peer,
            peer_step: (there < self.shape.steps).then_some(there),
        }
    }

    fn post_condition(&mut self) -> Result<(), Fault> {
        let all = self.sets.all();
        if self.problem.collective == Collective::Barrier {
            for (rank, actor) in self.actors.iter().enumerate() {
                if actor.heard != all {
                    let unheard = self.sets.missing(actor.heard);
                    return Err(Fault::EndsTooEarly {
                        rank: Rank(rank as u32),
                        unheard,
                    });
                }
            }
        }
        self.summary.same_bits = true;
        let mut orders: HashMap<u32, u64> = HashMap::new();
        for rank in (0..self.problem.ranks).map(Rank) {
            for chunk in 0..self.problem.chunks(rank, Buffer::Output, self.shape.pieces) {
                let wanted = self.problem.required(rank, chunk, self.shape.pieces);
                let from = match wanted.from {
                    Contributors::All => all,
                    Contributors::One(rank) => self.sets.one(rank),
                };
                let holds = self.memory.content(rank, Buffer::Output, chunk);
                let Some(content) = holds.filter(|content| (content.datum, content.from) == (wanted.datum, from))
                else {
                    return Err(Fault::WrongResult {
                        rank,
                        chunk,
                        wanted,
                        holds: holds.map(|content| self.sets.describe(content)),
                    });
                };
                if wanted.from == Contributors::All {
                    let order = *orders.entry(wanted.datum).or_insert(content.order);
                    self.summary.same_bits &= order == content.order;
                }
            }
        }
        Ok(())
    }
}

/// A number for "these two, reduced", whichever of them is named first.
fn in_order(a: u64, b: u64) -> u64 {
    let (low, high) = (a.min(b), a.max(b));
    let mixed = (low ^ high.rotate_left(29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 32) ^ low.wrapping_mul(0xd6e8_feb8_6659_fd93)).wrapping_mul(0xff51_afd7_ed55_8ccd)
}

#[cfg(test)]
mod tests;
