//! Runs what one rank does in a call.
//!
//! ```
//! use std::sync::Arc;
//! use weft_plan::algorithms::Direct;
//! use weft_plan::collective::{Collective, Counts, Partition, Problem};
//! use weft_plan::{Datatype, Rank, Reduction};
//! use weft_protocol::VecMemory;
//! use weft_protocol::group::{
//!     CallRecord, Combiner, Compiled, Execution, LoopbackGroup, LoopbackOptions, Reference, Scope, Source, Task, Turn,
//!     View,
//! };
//!
//! let problem = Problem::new(Collective::AllReduce, 2);
//! let program = Direct::new(problem).unwrap();
//! let partition = Partition::new(&problem, Counts::Equal(3), 1)?;
//! let source = Source { program: &program, partition: &partition, size: 1, average: false, scope: Scope::Known };
//! let sum = Combiner::Builtin { datatype: Datatype::U8, reduction: Reduction::Sum };
//! let group = LoopbackGroup::new(2, LoopbackOptions::default());
//! let outputs = [0, 1].map(|_| Arc::new(VecMemory::zeroed(3)));
//! let mut ranks: Vec<_> = (0..2)
//!     .map(|rank| {
//!         let input = Arc::new(VecMemory::new(vec![10 * rank as u8 + 1; 3]));
//!         let task = Arc::new(Task {
//!             compiled: Compiled::new(&source, Rank(rank)).unwrap(),
//!             combiners: vec![sum.clone()],
//!             ranks: 2,
//!             record: CallRecord::new(0, 1, "all-reduce sum of 3 u8"),
//!         });
//!         let mut buffers = vec![View::whole(input), View::whole(outputs[rank as usize].clone())];
//!         let (mut execution, mut exchange) = (Execution::default(), group.exchange(Rank(rank)));
//!         execution.begin(&task, 0, &mut buffers, &mut exchange).unwrap();
//!         (execution, exchange)
//!     })
//!     .collect();
//! let mut ended = 0;
//! while ended < 2 {
//!     let turns = ranks.iter_mut().map(|(execution, exchange)| execution.turn(exchange, &Reference, 1));
//!     ended = turns.filter(|turn| *turn == Ok(Turn::Ended)).count();
//! }
//! assert_eq!(outputs[1].snapshot(), [12, 12, 12]);
//! # Ok::<(), weft_plan::collective::PartitionError>(())
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use weft_plan::Rank;

use super::combine::{At, Combiner, Kernels};
use super::compile::{Act, Compiled, Flat};
use super::exchange::{Exchange, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View};
use super::history::History;
use super::record::{CallRecord, Waiting};
use crate::transport::Progress;

/// A call of this rank. Kept between calls, it allocates nothing once it has seen one as large.
#[derive(Debug)]
pub struct Execution {
    /// That of the last call, if none is under way: the next one is often like it.
    task: Option<Arc<Task>>,
    record: CallRecord,
    history: History,
    under_way: bool,
    /// By op: how much it still waits for.
    waits: Vec<u32>,
    /// Messages that may go or come.
    ready: Vec<u32>,
    /// What may be done on this rank alone.
    local: VecDeque<u32>,
    /// By lane: what has been offered and not settled, oldest first.
    open: Vec<VecDeque<(u32, OfferId)>>,
    /// Ops that have not ended.
    left: usize,
}

/// What to run: the same for all calls that are alike.
#[derive(Debug)]
pub struct Task {
    pub compiled: Compiled,
    /// One a part of the call, for those that reduce; the others' are not looked at.
    pub combiners: Vec<Combiner>,
    pub ranks: u32,
    /// With any number, which each call has its own of, and with a signature of such calls alone.
    pub record: CallRecord,
}

/// What came of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Turn {
    /// The call is done, and its buffers are the caller's again.
    Ended,
    /// Something was done.
    Moved,
    /// Nothing can be done before a peer has done something.
    Waiting,
}

/// Passes over the lanes in one turn, so that whoever turns can look at the clock now and then.
const PASSES: u32 = 16;

impl Default for Execution {
    fn default() -> Execution {
        Execution {
            task: None,
            record: CallRecord::NONE,
            history: History::default(),
            under_way: false,
            waits: Vec::new(),
            ready: Vec::new(),
            local: VecDeque::new(),
            open: Vec::new(),
            left: 0,
        }
    }
}

impl Execution {
    /// Starts the call of this number. Its buffers are taken out of the list: input and output of each part, and what it needs of
    /// [scratch](Compiled::scratch), if it needs any.
    pub fn begin<E: Exchange + ?Sized>(
        &mut self,
        task: &Arc<Task>,
        number: u64,
        buffers: &mut Vec<View>,
        exchange: &mut E,
    ) -> Result<(), Trouble> {
        let another = !self.task.as_ref().is_some_and(|last| Arc::ptr_eq(last, task));
        if another {
            self.record = task.record;
            self.task = Some(Arc::clone(task));
        }
        self.record.number = number;
        self.record.signature = self.history.begin(number, &task.record, another);
        let compiled = &task.compiled;
        self.waits.clear();
        self.waits.extend_from_slice(&compiled.waits);
        self.left = compiled.ops.len();
        self.ready.clear();
        self.local.clear();
        self.open.iter_mut().for_each(VecDeque::clear);
        if self.open.len() < compiled.outgoing.len() {
            self.open.resize_with(compiled.outgoing.len(), VecDeque::new);
        }
        for &id in &compiled.first {
            queue(&compiled.ops[id as usize], id, &mut self.ready, &mut self.local);
        }
        exchange.begin(&self.record, buffers)?;
        self.under_way = true;
        Ok(())
    }

    /// Does what can be done now, and looks so often for something that can. After [`Turn::Ended`] and after an error it does nothing
    /// more.
    pub fn turn<E, K>(&mut self, exchange: &mut E, kernels: &K, looks: u32) -> Result<Turn, Trouble>
    where
        E: Exchange + ?Sized,
        K: Kernels + ?Sized,
    {
        let Some(task) = self.task.as_deref().filter(|_| self.under_way) else {
            return Ok(Turn::Ended);
        };
        let mut run = Run {
            task,
            record: &self.record,
            waits: &mut self.waits,
            ready: &mut self.ready,
            local: &mut self.local,
            open: &mut self.open,
            left: &mut self.left,
        };
        let (mut moved, mut looks) = (false, looks);
        for _ in 0..PASSES.max(looks) {
            let again = run.pass(exchange, kernels)?;
            moved |= again;
            if *run.left == 0 {
                // After a call that went well nothing is open, and this is immediate.
                if exchange.end() == Progress::Idle {
                    self.under_way = false;
                    return Ok(Turn::Ended);
                }
                return Ok(Turn::Moved);
            }
            if !again {
                looks = looks.saturating_sub(1);
                if looks == 0 {
                    break;
                }
            }
        }
        Ok(if moved { Turn::Moved } else { Turn::Waiting })
    }

    /// What the call waits for: the earliest of its ops that has begun and not ended.
    pub fn waiting(&self) -> Waiting {
        let first = self.ready.iter().copied();
        let offered = self.open.iter().filter_map(|open| open.front()).map(|(id, _)| *id);
        let op = first.chain(offered).min().and_then(|id| {
            let task = self.task.as_ref().filter(|_| self.under_way)?;
            task.compiled.ops.get(id as usize)
        });
        match op {
            Some(op) => Waiting {
                step: op.step,
                peer: match op.act {
                    Act::Send { lane, .. } | Act::Receive { lane, .. } | Act::ReceiveReduce { lane, .. } => {
                        Some(lane.peer)
                    }
                    Act::Copy { .. } | Act::Reduce { .. } | Act::Divide { .. } => None,
                },
            },
            None => Waiting { step: 0, peer: None },
        }
    }

    /// Whether anything that could be done now has to do with a rank.
    pub fn awaits(&self, rank: Rank) -> bool {
        let Some(task) = self.task.as_ref().filter(|_| self.under_way) else {
            return false;
        };
        let offered = self.open.iter().flatten().map(|(id, _)| id);
        self.ready
            .iter()
            .chain(offered)
            .any(|id| match task.compiled.ops[*id as usize].act {
                Act::Send { lane, .. } | Act::Receive { lane, .. } | Act::ReceiveReduce { lane, .. } => {
                    lane.peer == rank
                }
                Act::Copy { .. } | Act::Reduce { .. } | Act::Divide { .. } => false,
            })
    }

    /// The call under way, or else the last one.
    pub fn latest(&self) -> &CallRecord {
        &self.record
    }

    /// The calls so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// What is being called, while something is.
    pub fn record(&self) -> Option<&CallRecord> {
        self.under_way.then_some(&self.record)
    }

    /// Gives a call up. Call again until it answers [`Progress::Idle`]: then nothing touches the buffers any more.
    pub fn abandon<E: Exchange + ?Sized>(&mut self, exchange: &mut E) -> Progress {
        if self.under_way && exchange.end() == Progress::Busy {
            return Progress::Busy;
        }
        self.under_way = false;
        Progress::Idle
    }
}

/// An execution taken apart, so that its lists can be changed while its task is looked at.
struct Run<'a> {
    task: &'a Task,
    record: &'a CallRecord,
    waits: &'a mut [u32],
    ready: &'a mut Vec<u32>,
    local: &'a mut VecDeque<u32>,
    open: &'a mut [VecDeque<(u32, OfferId)>],
    left: &'a mut usize,
}

impl Run<'_> {
    /// Looks at everything once: what has settled, what may go or come, and one thing on this rank.
    fn pass<E, K>(&mut self, exchange: &mut E, kernels: &K) -> Result<bool, Trouble>
    where
        E: Exchange + ?Sized,
        K: Kernels + ?Sized,
    {
        let mut moved = false;
        let mut at = 0;
        // What is released here goes to the end of the list, and is looked at in this same pass.
        while let Some(&id) = self.ready.get(at) {
            let op = &self.task.compiled.ops[id as usize];
            let (gone, some) = self.message(op, id, exchange)?;
            moved |= some;
            match gone {
                true => drop(self.ready.swap_remove(at)),
                false => at += 1,
            }
        }
        for queue in 0..self.task.compiled.outgoing.len() {
            let lane = self.task.compiled.outgoing[queue];
            while let Some(&(id, offer)) = self.open[queue].front() {
                if !exchange.settled(lane, offer) {
                    break;
                }
                self.open[queue].pop_front();
                self.ended(id);
                moved = true;
            }
        }
        if let Some(id) = self.local.pop_front() {
            self.here(&self.task.compiled.ops[id as usize], exchange, kernels);
            self.ended(id);
            moved = true;
        }
        Ok(moved)
    }

    /// Tries to send or to receive. Says whether the op is off the list, and whether anything was done.
    fn message<E: Exchange + ?Sized>(&mut self, op: &Flat, id: u32, exchange: &mut E) -> Result<(bool, bool), Trouble> {
        let head = |len| MessageHead {
            call: self.record.number,
            signature: self.record.signature,
            index: op.index,
            len,
        };
        let (lane, sink) = match op.act {
            Act::Send { lane, queue, from } => {
                match exchange.offer(lane, &head(from.len), from)? {
                    Offered::Full => return Ok((false, false)),
                    Offered::Settled => {
                        self.released(&op.on_begin);
                        self.ended(id);
                    }
                    Offered::Open(offer) => {
                        self.open[queue as usize].push_back((id, offer));
                        self.released(&op.on_begin);
                    }
                }
                return Ok((true, true));
            }
            Act::Receive { lane, into } => (lane, Sink::Copy(into)),
            Act::ReceiveReduce { lane, with, into } => {
                let how = &self.task.combiners[op.part as usize];
                (lane, Sink::Combine { with, into, how })
            }
            Act::Copy { .. } | Act::Reduce { .. } | Act::Divide { .. } => return Ok((true, false)),
        };
        Ok(match exchange.take(lane, &head(sink.target().len), &sink)? {
            Taken::Nothing => (false, false),
            Taken::Part => (false, true),
            Taken::All => {
                self.ended(id);
                (true, true)
            }
        })
    }

    /// Does something on this rank alone.
    fn here<E, K>(&self, op: &Flat, exchange: &E, kernels: &K)
    where
        E: Exchange + ?Sized,
        K: Kernels + ?Sized,
    {
        let at = |piece: Piece| {
            let view = exchange.buffer(piece.buffer);
            At {
                memory: &*view.memory,
                offset: view.offset + piece.offset,
            }
        };
        match op.act {
            Act::Copy { from, to } => kernels.copy(at(from), at(to), to.len),
            Act::Reduce { from, with, into } => {
                let how = &self.task.combiners[op.part as usize];
                kernels.combine(how, at(with), at(from), at(into), into.len);
            }
            Act::Divide { at: piece } => {
                if let Combiner::Builtin { datatype, .. } = &self.task.combiners[op.part as usize] {
                    kernels.divide(*datatype, at(piece), piece.len, self.task.ranks.into());
                }
            }
            Act::Send { .. } | Act::Receive { .. } | Act::ReceiveReduce { .. } => {}
        }
    }

    fn ended(&mut self, id: u32) {
        *self.left -= 1;
        self.released(&self.task.compiled.ops[id as usize].on_end);
    }

    fn released(&mut self, range: &std::ops::Range<u32>) {
        let compiled = &self.task.compiled;
        for &id in &compiled.released[range.start as usize..range.end as usize] {
            let waits = &mut self.waits[id as usize];
            *waits -= 1;
            if *waits == 0 {
                queue(&compiled.ops[id as usize], id, self.ready, self.local);
            }
        }
    }
}

fn queue(op: &Flat, id: u32, ready: &mut Vec<u32>, local: &mut VecDeque<u32>) {
    match op.act {
        Act::Send { .. } | Act::Receive { .. } | Act::ReceiveReduce { .. } => ready.push(id),
        Act::Copy { .. } | Act::Reduce { .. } | Act::Divide { .. } => local.push_back(id),
    }
}
