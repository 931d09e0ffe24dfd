//! Ranks that go through the steps of a program: which messages begin when, and what waits for them.
//!
//! This is the part of running a program that is the same whatever the network is made of. A network is told of each message whose ends have
//! both come ([`Start`]), and tells when it has arrived.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;

use weft_plan::platform::fabric::Level;
use weft_plan::{Bandwidth, Bytes, Picos};

use crate::flow::classes::Classes;
use crate::flow::demand::{Kind, Like, Look, Messages, Quick, Work};
use crate::flow::{MessageSpan, StepSpan};

/// No more than this many steps are kept for a trace, and no more messages than these.
const SPANS_MAX: usize = 1 << 18;
const MESSAGE_SPANS_MAX: usize = 1 << 14;

/// Messages, all alike, whose ends have both come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Start {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) level: Level,
    pub(crate) channel: u16,
    pub(crate) count: u32,
    /// Of each.
    pub(crate) bytes: f64,
    pub(crate) reduces: bool,
    pub(crate) begun: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Actor {
    step: u32,
    pending: u32,
    begun: u64,
    ended: u64,
    core: u64,
}

/// Messages of which one end has come.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    count: u32,
    bytes: f64,
    signal: bool,
    reduces: bool,
}

#[derive(Debug)]
struct Queue {
    /// Whether it is the sender who waits.
    sends: bool,
    first: Waiting,
    more: VecDeque<Waiting>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Way {
    from: u32,
    to: u32,
    level: Level,
    channel: u16,
}

/// How fast ranks work, and what is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) reduction: Bandwidth,
    pub(crate) copy: Bandwidth,
    pub(crate) traced_ranks: u32,
}

/// Where every class of ranks is in a program.
pub(crate) struct Steps<'a, 'b> {
    classes: Classes,
    look: &'a mut Look<'b>,
    steps: u32,
    actors: Vec<Actor>,
    /// What each actor's core has to do in its step: from when on, and for how long.
    jobs: Vec<Vec<(u64, u64)>>,
    queues: HashMap<Way, Queue, BuildHasherDefault<Quick>>,
    messages: Vec<Messages>,
    /// Picoseconds for each byte.
    reduce_byte: f64,
    copy_byte: f64,
    /// Messages that can begin now.
    pub(crate) starts: Vec<Start>,
    /// Actors that come to their next step, and when.
    pub(crate) wakes: Vec<(u64, u32)>,
    pub(crate) sent: u64,
    pub(crate) left: u64,
    pub(crate) last: u64,
    pub(crate) spans: Vec<StepSpan>,
    pub(crate) message_spans: Vec<MessageSpan>,
    /// Every how many actors one is traced; none where it is zero.
    stride: u32,
    /// What each traced actor's step is about, as far as it is known when it begins.
    traced: Vec<StepSpan>,
}

impl<'a, 'b> Steps<'a, 'b> {
    pub(crate) fn new(classes: Classes, look: &'a mut Look<'b>, steps: u32, pace: Pace) -> Steps<'a, 'b> {
        let count = classes.count();
        // Fewer ranks, rather than a trace that breaks off.
        let most = u32::try_from(SPANS_MAX).unwrap_or(u32::MAX) / steps.max(1);
        let stride = match pace.traced_ranks {
            0 => 0,
            wanted => count.div_ceil(wanted.min(most.max(1))).max(1),
        };
        let byte = |bandwidth: Bandwidth| 1e12 / bandwidth.bytes_per_sec().max(1) as f64;
        Steps {
            classes,
            look,
            steps,
            actors: vec![Actor::default(); count as usize],
            jobs: vec![Vec::new(); count as usize],
            queues: HashMap::default(),
            messages: Vec::new(),
            reduce_byte: byte(pace.reduction),
            copy_byte: byte(pace.copy),
            starts: Vec::new(),
            wakes: (0..count).map(|actor| (0, actor)).collect(),
            sent: 0,
            left: count.into(),
            last: 0,
            spans: Vec::new(),
            message_spans: Vec::new(),
            stride,
            traced: vec![StepSpan::default(); count.checked_div(stride).map_or(0, |whole| whole as usize + 1)],
        }
    }

    fn is_traced(&self, actor: u32) -> bool {
        self.stride > 0 && actor.is_multiple_of(self.stride)
    }

    /// An actor comes to its next step, or to its end.
    pub(crate) fn begin(&mut self, actor: u32, now: u64) {
        let step = self.actors[actor as usize].step;
        if step == self.steps {
            self.left -= 1;
            self.last = self.last.max(now);
            return;
        }
        let mut messages = std::mem::take(&mut self.messages);
        let work = self
            .look
            .at(self.classes.rank(actor), step, &self.classes, &mut messages);
        let state = &mut self.actors[actor as usize];
        (state.begun, state.ended) = (now, now);
        // One more than there are messages, so that the step does not end while it is being begun.
        state.pending = 1 + messages.iter().map(|messages| messages.count).sum::<u32>();
        if work != Work::default() {
            let time = work.reduced * self.reduce_byte + work.copied * self.copy_byte;
            self.work(actor, time, now);
        }
        if self.is_traced(actor) {
            self.traced[(actor / self.stride) as usize] = self.about(actor, &messages);
        }
        for Messages { like, count } in &messages {
            self.come(actor, like, *count, now);
        }
        self.messages = messages;
        self.end_ops(actor, 1, now);
    }

    /// What a step is about.
    fn about(&self, actor: u32, messages: &[Messages]) -> StepSpan {
        let mut span = StepSpan {
            rank: self.classes.rank(actor),
            ..StepSpan::default()
        };
        let (mut sent, mut received) = (0.0, 0.0);
        for Messages { like, count } in messages {
            let bytes = like.bytes() * f64::from(*count);
            let peer = self.classes.rank(like.peer);
            span.messages = span.messages.saturating_add(*count);
            span.across |= self.look.leaves_node(span.rank, like, &self.classes);
            match like.kind {
                Kind::Send => {
                    sent += bytes;
                    span.to.get_or_insert(peer);
                }
                Kind::Receive | Kind::ReceiveReduce => {
                    received += bytes;
                    span.from.get_or_insert(peer);
                }
            }
        }
        (span.sent, span.received) = (Bytes(sent as u64), Bytes(received as u64));
        span
    }

    /// Messages have arrived.
    pub(crate) fn arrived(&mut self, start: &Start, there: u64) {
        if (self.is_traced(start.from) || self.is_traced(start.to)) && self.message_spans.len() < MESSAGE_SPANS_MAX {
            self.message_spans.push(MessageSpan {
                from: self.classes.rank(start.from),
                to: self.classes.rank(start.to),
                step: self.actors[start.from as usize].step,
                count: start.count,
                bytes: Bytes(start.bytes as u64),
                reduces: start.reduces,
                begin: Picos::from_ps(start.begun),
                end: Picos::from_ps(there),
            });
        }
        if start.reduces {
            self.work(start.to, start.bytes * f64::from(start.count) * self.reduce_byte, there);
        }
        self.end_ops(start.from, start.count, there);
        self.end_ops(start.to, start.count, there);
    }

    /// One end of messages has come.
    fn come(&mut self, actor: u32, like: &Like, count: u32, now: u64) {
        let sends = like.kind == Kind::Send;
        let (from, to) = if sends { (actor, like.peer) } else { (like.peer, actor) };
        let mut here = Waiting {
            count,
            bytes: like.bytes(),
            signal: like.signal,
            reduces: like.kind == Kind::ReceiveReduce,
        };
        let way = Way {
            from,
            to,
            level: like.level,
            channel: like.channel,
        };
        while here.count > 0 {
            let there = match self.queues.entry(way) {
                Entry::Vacant(entry) => {
                    entry.insert(Queue {
                        sends,
                        first: here,
                        more: VecDeque::new(),
                    });
                    return;
                }
                Entry::Occupied(mut entry) if entry.get().sends == sends => {
                    entry.get_mut().more.push_back(here);
                    return;
                }
                Entry::Occupied(mut entry) => {
                    let queue = entry.get_mut();
                    let there = queue.first;
                    if queue.first.count > here.count {
                        queue.first.count -= here.count;
                    } else if let Some(next) = queue.more.pop_front() {
                        queue.first = next;
                    } else {
                        entry.remove();
                    }
                    there
                }
            };
            let count = here.count.min(there.count);
            here.count -= count;
            // The receiver knows what it takes.
            let taken = if sends { there } else { here };
            self.meet(way, Waiting { count, ..taken }, now);
        }
    }

    /// Messages whose ends have both come.
    fn meet(&mut self, way: Way, taken: Waiting, now: u64) {
        let Way {
            from,
            to,
            level,
            channel,
        } = way;
        self.sent += u64::from(taken.count);
        if taken.bytes == 0.0 && !taken.signal {
            // No elements: executors leave it out.
            self.end_ops(from, taken.count, now);
            return self.end_ops(to, taken.count, now);
        }
        self.starts.push(Start {
            from,
            to,
            level,
            channel,
            count: taken.count,
            bytes: taken.bytes,
            reduces: taken.reduces,
            begun: now,
        });
    }

    /// Gives the core of an actor something to do, from `from` on or from when it is free.
    fn work(&mut self, actor: u32, time: f64, from: u64) {
        let time = time.round() as u64;
        if time > 0 {
            self.jobs[actor as usize].push((from, time));
        }
    }

    /// Lets a core do what it had to do in a step, first come, first served.
    fn catch_up(&mut self, actor: u32) {
        let jobs = &mut self.jobs[actor as usize];
        if jobs.is_empty() {
            return;
        }
        jobs.sort_unstable();
        let actor = &mut self.actors[actor as usize];
        for (from, time) in jobs.drain(..) {
            actor.core = actor.core.max(from).saturating_add(time);
        }
        actor.ended = actor.ended.max(actor.core);
    }

    fn end_ops(&mut self, actor: u32, count: u32, at: u64) {
        let state = &mut self.actors[actor as usize];
        state.ended = state.ended.max(at);
        state.pending -= count;
        if state.pending == 0 {
            self.catch_up(actor);
            let traced = self.is_traced(actor);
            let state = &mut self.actors[actor as usize];
            if traced && self.spans.len() < SPANS_MAX {
                self.spans.push(StepSpan {
                    step: state.step,
                    begin: Picos::from_ps(state.begun),
                    end: Picos::from_ps(state.ended),
                    ..self.traced[(actor / self.stride) as usize]
                });
            }
            state.step += 1;
            self.wakes.push((state.ended, actor));
        }
    }
}
