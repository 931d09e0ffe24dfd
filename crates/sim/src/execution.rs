//! Calls of a collective that ranks execute: which messages begin when, and what waits for them.
//!
//! This is the part of running a program that is the same whatever the network is made of. What a rank does is the [`Compiled`](weft_protocol::group::Compiled) that a
//! communicator executes, op by op: an op begins when those have ended that it conflicts with, so that ranks run ahead of their steps; what
//! is one pass over memory is one op. A short message is copied and goes at once, a long one waits in its sender's memory until the
//! receiver has come to it ([`Eager`]). A network is told of each message that begins, and tells when its last byte has left.
//!
//! Ranks that are alike are one class, and one of them is followed ([`Classes`]). Ops of it that nothing tells apart, and that can begin at
//! one time, go together.

mod batch;
pub(crate) mod classes;
pub(crate) mod look;
mod plan;
mod plans;
mod queues;
mod spans;

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;

use weft_model::fabric::Level;
use weft_plan::{Bandwidth, Bytes};
use weft_protocol::group::Act;

use batch::{Batch, Done};
use classes::Classes;
use look::{Is, Look, Quick};
use plan::{Before, Plan};
pub(crate) use plans::{Plans, Trust};
use spans::Spans;
pub use spans::{MessageSpan, StepSpan};

/// Up to so many kinds of messages are looked for one by one.
const FEW: usize = 12;

/// Up to which size messages are copied, so that they go before their receiver has come to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eager {
    /// Between ranks of one node.
    pub local: Bytes,
    pub across: Bytes,
}

impl Eager {
    /// Every message waits for its receiver.
    pub const NEVER: Eager = Eager {
        local: Bytes(0),
        across: Bytes(0),
    };
}

impl Default for Eager {
    /// As communicators do it with memory that they can read in place.
    fn default() -> Eager {
        Eager {
            local: Bytes(weft_protocol::group::EAGER_BYTES_MAX),
            across: Bytes(weft_protocol::group::LONG_BYTES - 1),
        }
    }
}

/// How fast ranks work, and what is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conduct {
    pub(crate) eager: Eager,
    pub(crate) reduction: Bandwidth,
    pub(crate) copy: Bandwidth,
    pub(crate) traced_ranks: u32,
    /// Keep which op ended when.
    pub(crate) ends: bool,
}

/// What is the same for all ranks of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Symmetry {
    /// Their peers are as many ranks ahead of them.
    Shifted,
    /// Their peers are as far away, on either side.
    Mirrored,
}

/// Messages, all alike, that begin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) level: Level,
    pub(crate) channel: u16,
    pub(crate) count: u32,
    /// Of each.
    pub(crate) bytes: f64,
}

/// What happens at a time that is known before, as a number that means something here alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wake(pub(crate) u32);

impl Wake {
    fn arrived(message: u32) -> Wake {
        Wake(message << 1)
    }
    fn worked(actor: u32) -> Wake {
        Wake(actor << 1 | 1)
    }
}

/// A class of ranks.
#[derive(Debug, Default)]
struct Actor {
    plan: u32,
    /// Ops that have not ended.
    left: u32,
    begun: Done,
    ended: Done,
    /// Of ops that wait for many: of how many it is not known yet whether they have ended.
    unknown: HashMap<u32, u32, BuildHasherDefault<Quick>>,
    /// Ops that go together and have begun: who stands for them, and how many have not ended.
    crowds: Vec<(u32, u32)>,
    /// What its core has to do, one after the other.
    core: VecDeque<Job>,
}

#[derive(Debug)]
struct Job {
    ops: Batch,
    time: u64,
}

/// Of an op that waits for more than this it is remembered which of them it was last found to wait for.
const MANY: usize = 16;

/// Which messages can be one another: those on one way are taken in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Way {
    from: u32,
    to: u32,
    level: Level,
    channel: u16,
    /// Of classes of several ranks a way is many lanes. What tells these apart is how far a message goes; where that is not enough, that both
    /// its ends are in the same step. Of ranks for themselves a way is a lane, and these are zero.
    step: u32,
    away: u32,
    chunks: u64,
}

/// What a batch of messages is to its actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Like {
    sends: bool,
    reduces: bool,
    peer: u32,
    level: Level,
    across: bool,
    channel: u16,
    step: u32,
    away: u32,
    chunks: u64,
}

/// One end of messages whose other end has not come.
#[derive(Debug)]
enum Waiting {
    Sends(Batch),
    /// Messages under way, of which so many have nobody yet who takes them.
    Gone {
        message: u32,
        count: u32,
    },
    Receives {
        ops: Batch,
        reduces: bool,
    },
}

#[derive(Debug)]
struct Queue {
    first: Waiting,
    more: VecDeque<Waiting>,
}

/// Messages under way, or there.
#[derive(Debug)]
struct Message {
    start: Start,
    begun: u64,
    /// In which step of its sender.
    step: u32,
    /// The sends: they end when it is there, or have ended when it was copied.
    sends: Batch,
    eager: bool,
    there: bool,
    takers: Vec<(Batch, bool)>,
    /// How many of them nobody has come for.
    untaken: u32,
}

/// Where every class of ranks is in a call.
pub(crate) struct Execution<'a, 'b> {
    classes: Classes,
    ranks: u32,
    /// Whether classes are of several ranks, and what is the same for them.
    folded: bool,
    symmetry: Symmetry,
    look: &'a mut Look<'b>,
    plans: &'a Plans,
    actors: Vec<Actor>,
    queues: HashMap<Way, Queue, BuildHasherDefault<Quick>>,
    messages: Vec<Message>,
    free: Vec<u32>,
    /// Ops that can begin: of which actor, and which.
    ready: Vec<(u32, u32)>,
    /// Kept between turns, so that they need not be allocated for each.
    beginning: Vec<(u32, u32)>,
    batches: Vec<(Like, Batch)>,
    index: HashMap<Like, u32, BuildHasherDefault<Quick>>,
    eager: Eager,
    /// Picoseconds for each byte.
    reduce_byte: f64,
    copy_byte: f64,
    /// Messages that begin now.
    pub(crate) starts: Vec<u32>,
    /// What happens later, and when.
    pub(crate) wakes: Vec<(u64, Wake)>,
    pub(crate) sent: u64,
    /// Actors that have not come to their end.
    pub(crate) left: u64,
    pub(crate) last: u64,
    /// Whether an actor was found to do something else than its plan says.
    pub(crate) unlike: bool,
    pub(crate) spans: Spans,
    /// Which op of which actor ended when, in order, where somebody wants to know.
    ends: Option<Vec<(u32, u32, u64)>>,
}

impl<'a, 'b> Execution<'a, 'b> {
    /// All ranks come to the call at once; what can begin begins.
    pub(crate) fn new(
        classes: Classes,
        (look, plans): (&'a mut Look<'b>, &'a Plans),
        symmetry: Symmetry,
        conduct: &Conduct,
    ) -> Execution<'a, 'b> {
        let count = classes.count();
        let byte = |bandwidth: Bandwidth| 1e12 / bandwidth.bytes_per_sec().max(1) as f64;
        let mut actors = Vec::with_capacity(count as usize);
        let mut ready = Vec::new();
        for actor in 0..count {
            let plan = plans.of(actor);
            actors.push(Actor {
                plan,
                left: plans.plan(plan).len(),
                ..Actor::default()
            });
            ready.extend(plans.plan(plan).first().iter().map(|&op| (actor, op)));
        }
        let left = actors.iter().filter(|actor| actor.left > 0).count() as u64;
        let shape = look.program().shape();
        let mut execution = Execution {
            classes,
            ranks: shape.ranks,
            folded: count != shape.ranks,
            symmetry,
            look,
            plans,
            actors,
            queues: HashMap::default(),
            messages: Vec::new(),
            free: Vec::new(),
            ready,
            beginning: Vec::new(),
            batches: Vec::new(),
            index: HashMap::default(),
            eager: conduct.eager,
            reduce_byte: byte(conduct.reduction),
            copy_byte: byte(conduct.copy),
            starts: Vec::new(),
            wakes: Vec::new(),
            sent: 0,
            left,
            last: 0,
            unlike: false,
            spans: Spans::new(count, shape.steps, conduct.traced_ranks),
            ends: conduct.ends.then(Vec::new),
        };
        execution.go_on(0);
        execution
    }

    /// Where a message goes, and how much it is.
    pub(crate) fn start(&self, message: u32) -> Start {
        self.messages[message as usize].start
    }

    /// The last byte of a message has left its sender, and is there after a latency.
    pub(crate) fn has_left(&mut self, message: u32, now: u64, latency: u64) {
        let state = &mut self.messages[message as usize];
        if state.eager {
            // The lane is free for the next one.
            let ops = std::mem::replace(&mut state.sends, Batch::NONE);
            let from = state.start.from;
            for &op in ops.singles() {
                self.begun(from, op);
            }
        }
        self.wakes.push((now.saturating_add(latency), Wake::arrived(message)));
        self.go_on(now);
    }

    pub(crate) fn happen(&mut self, wake: Wake, now: u64) {
        let number = wake.0 >> 1;
        match wake.0 & 1 {
            0 => self.arrive(number, now),
            _ => self.has_worked(number, now),
        }
        self.go_on(now);
    }

    /// Lets everything begin that can.
    fn go_on(&mut self, now: u64) {
        while !self.ready.is_empty() {
            let mut ready = std::mem::take(&mut self.beginning);
            std::mem::swap(&mut ready, &mut self.ready);
            for ops in ready.chunk_by(|one, next| one.0 == next.0) {
                self.begin(ops, now);
            }
            ready.clear();
            self.beginning = ready;
        }
    }

    /// Ops of one actor begin.
    fn begin(&mut self, ops: &[(u32, u32)], now: u64) {
        if let &[(actor, op)] = ops {
            if self.begin_crowd(actor, op, now) {
                return;
            }
            if let Some(like) = self.like(actor, op, now) {
                self.come(actor, &like, Batch::One(op), now);
            }
            return;
        }
        let mut batches = std::mem::take(&mut self.batches);
        for &(actor, op) in ops {
            if self.begin_crowd(actor, op, now) {
                continue;
            }
            if let Some(like) = self.like(actor, op, now) {
                self.sort(&mut batches, like, Batch::One(op));
            }
        }
        self.come_all(ops[0].0, batches, now);
    }

    /// Ops that go together begin, if this one goes with others.
    fn begin_crowd(&mut self, actor: u32, leader: u32, now: u64) -> bool {
        let plan = self.plans.plan(self.actors[actor as usize].plan);
        let Some(crowd) = plan.crowd_of(leader) else {
            return false;
        };
        let mut batches = Vec::new();
        let (mut count, mut time) = (0, 0.0);
        for op in crowd {
            count += 1;
            match self.byte_of(plan.compiled.act(op)) {
                Some(byte) => {
                    time += plan.compiled.act(op).bytes() as f64 * self.look.chunk * byte;
                    self.traced(actor, op, None, now);
                }
                None => {
                    if let Some(like) = self.like(actor, op, now) {
                        self.sort(&mut batches, like, Batch::Crowd { leader, count: 1 });
                    }
                }
            }
        }
        self.actors[actor as usize].crowds.push((leader, count));
        self.begun(actor, leader);
        match batches.is_empty() {
            true => self.work(actor, Batch::Crowd { leader, count }, time, now),
            false => self.come_all(actor, batches, now),
        }
        true
    }

    /// Puts a message to those that it is like.
    fn sort(&mut self, batches: &mut Vec<(Like, Batch)>, like: Like, one: Batch) {
        if batches.is_empty() {
            self.index.clear();
        }
        let known = match batches.len() <= FEW {
            true => batches.iter().position(|(other, _)| *other == like),
            false => {
                if self.index.is_empty() {
                    let all = batches.iter().enumerate();
                    self.index.extend(all.map(|(nth, (like, _))| (*like, nth as u32)));
                }
                self.index.get(&like).map(|&nth| nth as usize)
            }
        };
        match (known, one.first()) {
            (Some(nth), Some(op)) => batches[nth].1.push(op),
            _ => {
                if !self.index.is_empty() {
                    self.index.insert(like, batches.len() as u32);
                }
                batches.push((like, one));
            }
        }
    }

    fn come_all(&mut self, actor: u32, mut batches: Vec<(Like, Batch)>, now: u64) {
        for (like, batch) in batches.drain(..) {
            self.come(actor, &like, batch, now);
        }
        self.batches = batches;
    }

    /// How long a byte takes of what is done on an actor alone.
    fn byte_of(&self, act: &Act) -> Option<f64> {
        match act {
            Act::Copy { .. } => Some(self.copy_byte),
            Act::Reduce { .. } | Act::Divide { .. } => Some(self.reduce_byte),
            Act::Send { .. } | Act::Receive { .. } | Act::ReceiveReduce { .. } => None,
        }
    }

    fn traced(&mut self, actor: u32, op: u32, about: Option<spans::About>, now: u64) {
        if self.spans.is_traced(actor) {
            let compiled = &self.plans.plan(self.actors[actor as usize].plan).compiled;
            let rank = self.classes.rank(actor);
            self.spans.begins(compiled, (actor, rank, op), about, now);
        }
    }

    /// What a message is to its actor. What is done on the actor alone is given to its core instead.
    fn like(&mut self, actor: u32, op: u32, now: u64) -> Option<Like> {
        let plan = self.plans.plan(self.actors[actor as usize].plan);
        let compiled = &plan.compiled;
        let act = compiled.act(op);
        let (lane, sends, reduces) = match act {
            Act::Send { lane, .. } => (lane, true, false),
            Act::Receive { lane, .. } => (lane, false, false),
            Act::ReceiveReduce { lane, .. } => (lane, false, true),
            Act::Copy { .. } | Act::Reduce { .. } | Act::Divide { .. } => {
                let time = act.bytes() as f64 * self.look.chunk * self.byte_of(act).unwrap_or(0.0);
                self.traced(actor, op, None, now);
                self.work(actor, Batch::One(op), time, now);
                return None;
            }
        };
        let rank = self.classes.rank(actor);
        let is = Is {
            sends,
            chunks: act.bytes(),
        };
        let Some(aim) = self.look.aim(rank, compiled.listed(op), &is, &self.classes) else {
            self.unlike = true;
            return None;
        };
        let (step, away) = match (self.folded, compiled.listed(op).0) {
            (false, _) => (0, 0),
            (true, step) if plan.is_crowded(step) => (step, 0),
            (true, step) => match self.symmetry {
                Symmetry::Shifted => (0, aim.ahead),
                Symmetry::Mirrored => (step, aim.ahead.min(self.ranks - aim.ahead)),
            },
        };
        let like = Like {
            sends,
            reduces,
            peer: aim.peer,
            level: aim.level,
            across: aim.across,
            channel: lane.channel,
            step,
            away,
            chunks: is.chunks,
        };
        let about = spans::About {
            sends,
            peer: self.classes.rank(aim.peer),
            bytes: is.chunks as f64 * self.look.chunk,
            across: aim.across,
        };
        self.traced(actor, op, Some(about), now);
        Some(like)
    }

    /// One end of messages comes.
    fn come(&mut self, actor: u32, like: &Like, ops: Batch, now: u64) {
        let (from, to) = if like.sends {
            (actor, like.peer)
        } else {
            (like.peer, actor)
        };
        let way = Way {
            from,
            to,
            level: like.level,
            channel: like.channel,
            step: like.step,
            away: like.away,
            chunks: like.chunks,
        };
        match like.sends {
            true => self.come_to_send(way, like.across, ops, now),
            false => self.come_to_receive(way, ops, like.reduces, now),
        }
    }

    fn come_to_send(&mut self, way: Way, across: bool, mut ops: Batch, now: u64) {
        let bytes = way.chunks as f64 * self.look.chunk;
        let limit = if across { self.eager.across } else { self.eager.local };
        if bytes <= limit.0 as f64 {
            return self.send_eagerly(way, bytes, ops, now);
        }
        for &op in ops.singles() {
            self.begun(way.from, op);
        }
        while ops.len() > 0 {
            let Some((mut takers, reduces)) = self.next_receives(way) else {
                return self.wait(way, Waiting::Sends(ops));
            };
            let count = ops.len().min(takers.len());
            let (sends, taken) = (ops.split(count), takers.split(count));
            self.wait_first(way, takers, |ops| Waiting::Receives { ops, reduces });
            self.meet(way, bytes, (sends, taken, reduces), now);
        }
    }

    /// Messages that are copied, so that they go now and their sends end.
    fn send_eagerly(&mut self, way: Way, bytes: f64, ops: Batch, now: u64) {
        let count = ops.len();
        let message = self.begin_message(way, bytes, ops.clone(), true, now);
        let mut untaken = count;
        let mut takers = Vec::new();
        while untaken > 0 {
            let Some((mut waiting, reduces)) = self.next_receives(way) else {
                break;
            };
            let taken = waiting.split(untaken.min(waiting.len()));
            self.wait_first(way, waiting, |ops| Waiting::Receives { ops, reduces });
            untaken -= taken.len();
            takers.push((taken, reduces));
        }
        if untaken > 0 {
            self.wait(
                way,
                Waiting::Gone {
                    message,
                    count: untaken,
                },
            );
        }
        let state = &mut self.messages[message as usize];
        (state.untaken, state.takers) = (untaken, takers);
        self.end(way.from, &ops, now);
    }

    fn come_to_receive(&mut self, way: Way, mut ops: Batch, reduces: bool, now: u64) {
        let bytes = way.chunks as f64 * self.look.chunk;
        while ops.len() > 0 {
            match self.next_sends(way) {
                None => return self.wait(way, Waiting::Receives { ops, reduces }),
                Some(Waiting::Sends(mut senders)) => {
                    let count = ops.len().min(senders.len());
                    let (sends, taken) = (senders.split(count), ops.split(count));
                    self.wait_first(way, senders, Waiting::Sends);
                    self.meet(way, bytes, (sends, taken, reduces), now);
                }
                Some(Waiting::Gone { message, count }) => {
                    let taken = ops.split(count.min(ops.len()));
                    let count = count - taken.len();
                    if count > 0 {
                        self.put_first(way, Waiting::Gone { message, count });
                    }
                    let state = &mut self.messages[message as usize];
                    state.untaken = count;
                    if state.there {
                        if count == 0 {
                            self.free.push(message);
                        }
                        self.take(way.to, taken, reduces, bytes, now);
                    } else {
                        state.takers.push((taken, reduces));
                    }
                }
                Some(Waiting::Receives { .. }) => {}
            }
        }
    }

    /// Messages whose ends have both come.
    fn meet(&mut self, way: Way, bytes: f64, (sends, taken, reduces): (Batch, Batch, bool), now: u64) {
        let message = self.begin_message(way, bytes, sends, false, now);
        self.messages[message as usize].takers.push((taken, reduces));
    }

    fn begin_message(&mut self, way: Way, bytes: f64, sends: Batch, eager: bool, now: u64) -> u32 {
        let count = sends.len();
        self.sent += u64::from(count);
        let Way {
            from,
            to,
            level,
            channel,
            ..
        } = way;
        let start = Start {
            from,
            to,
            level,
            channel,
            count,
            bytes,
        };
        let compiled = &self.plans.plan(self.actors[from as usize].plan).compiled;
        let step = sends.first().map_or(0, |op| compiled.listed(op).0);
        let place = self.free.pop();
        let number = place.unwrap_or(self.messages.len() as u32);
        match place {
            Some(place) => {
                // The list of its takers is used again.
                let state = &mut self.messages[place as usize];
                (state.start, state.begun, state.step, state.sends) = (start, now, step, sends);
                (state.eager, state.there, state.untaken) = (eager, false, 0);
            }
            None => self.messages.push(Message {
                start,
                begun: now,
                step,
                sends,
                eager,
                there: false,
                takers: Vec::with_capacity(1),
                untaken: 0,
            }),
        }
        self.starts.push(number);
        number
    }

    /// The last byte of a message is there.
    fn arrive(&mut self, message: u32, now: u64) {
        let state = &mut self.messages[message as usize];
        state.there = true;
        let (start, begun, step) = (state.start, state.begun, state.step);
        let sends = std::mem::replace(&mut state.sends, Batch::NONE);
        let mut takers = std::mem::take(&mut state.takers);
        if state.untaken == 0 {
            self.free.push(message);
        }
        if self.spans.is_traced(start.from) || self.spans.is_traced(start.to) {
            let ends = (self.classes.rank(start.from), self.classes.rank(start.to));
            let reduces = takers.iter().any(|(_, reduces)| *reduces);
            self.spans.message(&start, ends, step, reduces, (begun, now));
        }
        self.end(start.from, &sends, now);
        for (ops, reduces) in takers.drain(..) {
            self.take(start.to, ops, reduces, start.bytes, now);
        }
        self.messages[message as usize].takers = takers;
    }

    /// Receives have what they are for.
    fn take(&mut self, actor: u32, ops: Batch, reduces: bool, bytes: f64, now: u64) {
        match reduces {
            true => {
                let time = bytes * f64::from(ops.len()) * self.reduce_byte;
                self.work(actor, ops, time, now);
            }
            false => self.end(actor, &ops, now),
        }
    }

    /// Gives the core of an actor something to do, after what it has to do already.
    fn work(&mut self, actor: u32, ops: Batch, time: f64, now: u64) {
        let time = time.round() as u64;
        let core = &mut self.actors[actor as usize].core;
        if time == 0 && core.is_empty() {
            return self.end(actor, &ops, now);
        }
        core.push_back(Job { ops, time });
        if core.len() == 1 {
            self.wakes.push((now.saturating_add(time), Wake::worked(actor)));
        }
    }

    fn has_worked(&mut self, actor: u32, now: u64) {
        let core = &mut self.actors[actor as usize].core;
        let done = core.pop_front();
        if let Some(next) = core.front() {
            let at = now.saturating_add(next.time);
            self.wakes.push((at, Wake::worked(actor)));
        }
        if let Some(done) = done {
            self.end(actor, &done.ops, now);
        }
    }

    /// Ops of an actor end.
    fn end(&mut self, actor: u32, ops: &Batch, now: u64) {
        if self.spans.is_traced(actor)
            && let Some(op) = ops.first()
        {
            let compiled = &self.plans.plan(self.actors[actor as usize].plan).compiled;
            match ops {
                Batch::Crowd { count, .. } => self.spans.ends(compiled, (actor, op), *count, now),
                _ => {
                    let singles = ops.singles().iter();
                    singles.for_each(|&op| self.spans.ends(compiled, (actor, op), 1, now));
                }
            }
        }
        match *ops {
            Batch::Crowd { leader, count } => {
                let crowds = &mut self.actors[actor as usize].crowds;
                let Some(nth) = crowds.iter().position(|crowd| crowd.0 == leader) else {
                    return;
                };
                crowds[nth].1 -= count;
                if crowds[nth].1 == 0 {
                    crowds.swap_remove(nth);
                    self.end_op(actor, leader, now);
                }
            }
            Batch::One(op) => self.end_op(actor, op, now),
            Batch::Many(ref ops) => ops.iter().for_each(|&op| self.end_op(actor, op, now)),
        }
    }

    fn end_op(&mut self, actor: u32, op: u32, now: u64) {
        if let Some(ends) = &mut self.ends {
            ends.push((actor, op, now));
        }
        self.actors[actor as usize].ended.insert(op);
        self.release(actor, op, Plan::on_end);
        let state = &mut self.actors[actor as usize];
        state.left -= 1;
        if state.left == 0 {
            self.left -= 1;
            self.last = self.last.max(now);
        }
    }

    /// A send has begun, as far as the next one of its lane is concerned.
    fn begun(&mut self, actor: u32, op: u32) {
        let released = |plan: &Plan| !plan.on_begin(op).is_empty();
        if released(self.plans.plan(self.actors[actor as usize].plan)) {
            self.actors[actor as usize].begun.insert(op);
            self.release(actor, op, Plan::on_begin);
        }
    }

    /// An op has begun, or has ended: those go on that wait for nothing else.
    fn release(&mut self, actor: u32, op: u32, whom: fn(&Plan, u32) -> &[u32]) {
        let Actor {
            plan,
            begun,
            ended,
            unknown,
            ..
        } = &mut self.actors[actor as usize];
        let plan = self.plans.plan(*plan);
        for &after in whom(plan, op) {
            let befores = plan.befores(after);
            let is_done = |before: &Before| match before.begins() {
                true => begun.contains(before.op()),
                false => ended.contains(before.op()),
            };
            // What comes last in the program usually ends last.
            let mut left = befores.len();
            if !befores.last().is_none_or(is_done) {
                continue;
            }
            if left > MANY {
                left = unknown.get(&after).map_or(left, |&left| left as usize);
            }
            while left > 0 && is_done(&befores[left - 1]) {
                left -= 1;
            }
            match left {
                0 => self.ready.push((actor, after)),
                _ if befores.len() > MANY => drop(unknown.insert(after, left as u32)),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
