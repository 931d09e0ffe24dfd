//! One worker: what waits, what is being read, what is being decoded.
//!
//! Between two changes of its batch a worker only repeats steps, so that all of them are one event; whoever joins meanwhile cuts
//! the event short at the end of the step that is under way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use weft_model::workload::serving::{Pass, PassBatch};

/// A prompt on its way through passes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prompt {
    pub(super) request: u32,
    /// All its tokens, those that no cache has, and those of them that are still to be read.
    pub(super) input: u32,
    pub(super) fresh: u32,
    pub(super) left: u32,
    /// Tokens of cache that it must find free before it is begun.
    pub(super) needs: u64,
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) first_gpu: u32,
    pub(super) gpus: u32,
    /// Attention ranks, among which requests are divided.
    ranks: f64,
    budget: u32,
    /// Whether prompts and decoding share passes.
    shares: bool,
    waiting: VecDeque<Prompt>,
    reading: Vec<(Prompt, u32)>,
    joining: Vec<(u32, u32, u32)>,
    /// Sequences by the step that gives them their last token, with how long they are then.
    active: BinaryHeap<Reverse<(u64, u32, u32)>>,
    contexts: f64,
    steps: u64,
    /// The pass under way: when it began, steps in it, and how long each takes.
    began: u64,
    repeats: u64,
    each: u64,
    pub(super) generation: u32,
    pub(super) busy: bool,
    /// Tokens that are waiting to be read, and tokens of cache that are spoken for.
    pub(super) queued: u64,
    pub(super) held: u64,
    pub(super) room: u64,
    prefixes: BTreeMap<u32, (u64, u32)>,
    prefix_tokens: u64,
    prefix_room: u64,
    uses: u64,
    pub(super) most: u32,
}

/// How a pass has ended: prompts that are read, and requests whose last token has come.
#[derive(Debug, Default)]
pub(super) struct Ended {
    pub(super) read: Vec<u32>,
    pub(super) done: Vec<u32>,
}

/// What a worker has, and what it is for.
pub(super) struct Place {
    pub(super) first_gpu: u32,
    pub(super) gpus: u32,
    pub(super) ranks: u32,
    pub(super) room: u64,
    pub(super) prefix_room: u64,
    pub(super) shares: bool,
}

/// Tokens of prompts in one pass of an attention rank.
const BUDGET: u32 = 8192;

impl Worker {
    pub(super) fn new(place: &Place) -> Worker {
        Worker {
            first_gpu: place.first_gpu,
            gpus: place.gpus,
            ranks: f64::from(place.ranks),
            budget: BUDGET.saturating_mul(place.ranks),
            shares: place.shares,
            waiting: VecDeque::new(),
            reading: Vec::new(),
            joining: Vec::new(),
            active: BinaryHeap::new(),
            contexts: 0.0,
            steps: 0,
            began: 0,
            repeats: 0,
            each: 0,
            generation: 0,
            busy: false,
            queued: 0,
            held: 0,
            room: place.room,
            prefixes: BTreeMap::new(),
            prefix_tokens: 0,
            prefix_room: place.prefix_room,
            uses: 0,
            most: 0,
        }
    }

    pub(super) fn sequences(&self) -> usize {
        self.active.len() + self.joining.len()
    }

    /// Tokens of a prefix that this worker has.
    pub(super) fn has(&self, family: u32) -> u32 {
        self.prefixes.get(&family).map_or(0, |&(_, tokens)| tokens)
    }

    /// Keeps a prefix, at the cost of those that were used least recently.
    pub(super) fn keep(&mut self, family: u32, tokens: u32) {
        self.uses += 1;
        let uses = self.uses;
        let entry = self.prefixes.entry(family).or_insert((uses, 0));
        entry.0 = uses;
        let more = tokens.saturating_sub(entry.1);
        entry.1 += more;
        self.prefix_tokens += u64::from(more);
        while self.prefix_tokens > self.prefix_room
            && let Some((&oldest, &(_, tokens))) = self.prefixes.iter().min_by_key(|(_, (used, _))| *used)
        {
            self.prefixes.remove(&oldest);
            self.prefix_tokens -= u64::from(tokens);
        }
    }

    pub(super) fn queue(&mut self, prompt: Prompt) {
        self.queued += u64::from(prompt.left);
        self.waiting.push_back(prompt);
    }

    /// A sequence comes with its cache, and decodes from the next step on.
    pub(super) fn join(&mut self, request: u32, context: u32, tokens: u32) {
        self.joining.push((request, context, tokens));
    }

    /// Cuts repeated steps short, because there is something new to do. Returns when the pass ends now.
    pub(super) fn cut(&mut self, now: u64) -> Option<u64> {
        if !self.busy || !self.reading.is_empty() || self.repeats <= 1 {
            return None;
        }
        let begun = (now.saturating_sub(self.began) / self.each.max(1)) + 1;
        if begun >= self.repeats {
            return None;
        }
        self.repeats = begun;
        self.generation += 1;
        Some(self.began.saturating_add(begun.saturating_mul(self.each)))
    }

    /// Begins the next pass if there is anything to do, and says when it ends.
    pub(super) fn begin(&mut self, now: u64, pass: &Pass) -> Option<u64> {
        for (request, context, tokens) in self.joining.drain(..) {
            // The first token came with the prompt.
            let last = context.saturating_add(tokens);
            self.active
                .push(Reverse((self.steps + u64::from(tokens), request, last)));
            self.contexts += f64::from(context);
        }
        self.most = self.most.max(self.active.len() as u32);
        self.take_prompts();
        let sequences = self.active.len() as f64;
        if self.reading.is_empty() && self.active.is_empty() {
            self.busy = false;
            return None;
        }
        let decodes = !self.active.is_empty() && (self.reading.is_empty() || self.shares);
        let mut batch = PassBatch::default();
        if !self.reading.is_empty() {
            let count = self.reading.len() as f64;
            let tokens: u64 = self.reading.iter().map(|&(_, part)| u64::from(part)).sum();
            let seen: u64 = self
                .reading
                .iter()
                .map(|(prompt, part)| u64::from(prompt.input - prompt.left + part))
                .sum();
            // The fullest attention rank decides, and has at least one whole prompt.
            let each = (count / self.ranks).max(1.0);
            batch.prompts = each;
            batch.prompt_tokens = tokens as f64 / count * each;
            batch.prompt_context = seen as f64 / count;
        }
        self.repeats = 0;
        if decodes {
            self.repeats = if self.reading.is_empty() {
                let first = self.active.peek().map_or(self.steps, |Reverse((step, ..))| *step);
                first.saturating_sub(self.steps).max(1)
            } else {
                1
            };
            batch.sequences = (sequences / self.ranks).max(1.0);
            batch.context = self.contexts / sequences + self.repeats as f64 / 2.0;
        }
        let mut seconds = pass.step_seconds(&batch);
        if !self.reading.is_empty() && !self.shares {
            seconds += pass.first_token_seconds();
        }
        self.each = ((seconds * 1e12) as u64).max(1);
        self.began = now;
        self.busy = true;
        self.generation += 1;
        Some(now.saturating_add(self.each.saturating_mul(self.repeats.max(1))))
    }

    /// Ends the pass under way.
    pub(super) fn end(&mut self, ended: &mut Ended) {
        self.busy = false;
        self.steps += self.repeats;
        self.contexts += self.repeats as f64 * self.active.len() as f64;
        while let Some(&Reverse((last, request, context))) = self.active.peek()
            && last <= self.steps
        {
            self.active.pop();
            self.contexts -= f64::from(context);
            ended.done.push(request);
        }
        if self.active.is_empty() {
            self.contexts = 0.0;
        }
        for (mut prompt, part) in self.reading.drain(..) {
            prompt.left -= part;
            if prompt.left == 0 {
                ended.read.push(prompt.request);
            } else {
                self.waiting.push_front(prompt);
            }
        }
    }

    /// Moves prompts that fit into the next pass, in the order of their arrival.
    fn take_prompts(&mut self) {
        let mut left = self.budget;
        while let Some(&prompt) = self.waiting.front() {
            // A prompt longer than a pass is read in parts; a shorter one is not divided for the sake of a full pass.
            let part = prompt.left.min(self.budget);
            let begins = prompt.left == prompt.fresh;
            if part > left || (begins && self.held + prompt.needs > self.room) {
                break;
            }
            self.held += if begins { prompt.needs } else { 0 };
            left -= part;
            self.queued -= u64::from(part);
            self.reading.push((prompt, part));
            self.waiting.pop_front();
        }
    }
}
