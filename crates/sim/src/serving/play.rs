//! The clock, the events, and who serves whom.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use weft_model::handover::handover;
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_model::workload::serving::{Deployment, Pass, Pool, nics, room, token_bytes};
use weft_plan::{Bandwidth, Bytes, Picos, Rank};

use super::worker::{Ended, Place, Prompt, Worker};
use super::{Percentiles, Report, Request, ServingNetwork, ServingOptions, SimulationError};
use crate::flow::live::Live;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Something that is not serving begins on the network.
    Other(u32),
    PassEnds {
        worker: u32,
        generation: u32,
    },
    /// Both ends know what is to be handed over.
    Agreed(u32),
    Handed(u32),
    Arrives(u32),
}

/// How far a request has come; instants in picoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    reader: u32,
    writer: u32,
    read: u64,
    handed: u64,
    first: u64,
    done: u64,
    /// Flows of its hand-off that are under way.
    flows: u32,
}

/// One run.
pub(super) struct Play<'a> {
    requests: &'a [Request],
    /// Readers first where there are any, then those that decode.
    workers: Vec<Worker>,
    readers: usize,
    passes: [Pass; 2],
    apart: bool,
    network: Option<Live<'a>>,
    others: &'a [crate::traffic::Transfer],
    /// What a hand-off has for itself without a network.
    nics: Bandwidth,
    token_bytes: f64,
    /// Tokens of cache that every sequence takes besides its own.
    overhead: u64,
    /// How much later than its prompt's pass a first token is, where that keeps nobody else waiting.
    late: u64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    progress: Vec<Progress>,
    /// Requests that have been read and that no worker has room for.
    parked: VecDeque<u32>,
    found: u64,
    happened: u64,
}

/// Flows of the network that belong to nobody's hand-off.
const OTHERS: u32 = u32::MAX;
/// So many bytes show what share of a link pages reach.
const SAMPLE: Bytes = Bytes(1 << 40);

impl<'a> Play<'a> {
    pub(super) fn new(
        system: &System,
        model: &Model,
        deployment: &Deployment,
        requests: &'a [Request],
        options: &'a ServingOptions<'a>,
    ) -> Result<Play<'a>, SimulationError> {
        let pass = |pool: &Pool| Pass::new(system, model, pool.worker, deployment.quantisation, deployment.engine);
        let decode = deployment.decode;
        let reading = deployment.prefill.unwrap_or(decode);
        let space = room(system, model, decode.worker, deployment.quantisation)?;
        let each = space.token_bytes.max(1.0);
        let tokens = (space.cache.0 as f64 / each * f64::from(decode.worker.data)) as u64;
        let mut workers = Vec::new();
        let mut gpu = 0;
        let mut place = |pool: &Pool, room: u64| {
            for _ in 0..pool.count {
                workers.push(Worker::new(&Place {
                    first_gpu: gpu,
                    gpus: pool.worker.gpus(),
                    ranks: pool.worker.data,
                    room,
                    prefix_room: options.prefix_tokens,
                    shares: !deployment.engine.puts_prompts_first(),
                }));
                gpu += pool.worker.gpus();
            }
        };
        if let Some(pool) = &deployment.prefill {
            room(system, model, pool.worker, deployment.quantisation)?;
            place(pool, u64::MAX);
        }
        place(&decode, tokens);
        let apart = deployment.prefill.is_some();
        let overhead = (space.sequence_bytes / each) as u64;
        for (nth, request) in requests.iter().enumerate() {
            let needed = needs(request, overhead);
            if needed > tokens {
                return Err(SimulationError::TooLong {
                    request: nth as u32,
                    tokens: needed,
                    room: tokens,
                });
            }
        }
        let network = options.network.as_ref();
        if let Some(ServingNetwork { topology, .. }) = network
            && topology.ranks() < gpu
        {
            let ranks = topology.ranks();
            return Err(SimulationError::NetworkTooSmall { gpus: gpu, ranks });
        }
        let mut events = BinaryHeap::new();
        for (nth, request) in requests.iter().enumerate() {
            events.push(Reverse((request.arrives.as_ps(), Event::Arrives(nth as u32))));
        }
        let others = network.map_or(&[][..], |network| &network.others);
        for (nth, other) in others.iter().enumerate() {
            events.push(Reverse((other.start.as_ps(), Event::Other(nth as u32))));
        }
        let passes = [pass(&reading)?, pass(&decode)?];
        let late = match deployment.engine.puts_prompts_first() {
            true => 0,
            false => (passes[0].first_token_seconds() * 1e12) as u64,
        };
        Ok(Play {
            requests,
            readers: if apart { reading.count as usize } else { workers.len() },
            workers,
            passes,
            late,
            apart,
            network: network.map(|network| Live::new(network.topology, &network.options)),
            others,
            nics: nics(system, reading.worker.gpus().min(decode.worker.gpus())),
            token_bytes: token_bytes(model, deployment.quantisation.cache.bytes()),
            overhead,
            events,
            progress: vec![Progress::default(); requests.len()],
            parked: VecDeque::new(),
            found: 0,
            happened: 0,
        })
    }

    pub(super) fn run(mut self) -> Result<Report, SimulationError> {
        let mut now = 0;
        let mut over = Vec::new();
        loop {
            let flow = self.network.as_mut().and_then(|network| network.next(now));
            let event = self.events.peek().map(|&Reverse((at, _))| at);
            // What ends on the network makes room before anything else begins.
            match (flow, event) {
                (None, None) => break,
                (Some(flow), event) if event.is_none_or(|event| flow <= event) => {
                    now = flow;
                    if let Some(network) = &mut self.network {
                        network.end(now, &mut over);
                    }
                    for (tag, at) in over.drain(..) {
                        self.flow_ended(tag, at);
                    }
                }
                _ => {
                    let Some(Reverse((at, event))) = self.events.pop() else {
                        break;
                    };
                    now = at;
                    self.turn(now, event)?;
                }
            }
            self.happened += 1;
        }
        Ok(self.report())
    }

    fn turn(&mut self, now: u64, event: Event) -> Result<(), SimulationError> {
        match event {
            Event::Other(nth) => {
                let other = self.others[nth as usize];
                if let Some(network) = &mut self.network {
                    network.begin(now, (other.from, other.to), other.bytes, OTHERS)?;
                }
            }
            Event::Arrives(nth) => self.arrives(now, nth),
            Event::PassEnds { worker, generation } => {
                if self.workers[worker as usize].generation == generation {
                    self.pass_ends(now, worker);
                }
            }
            Event::Agreed(nth) => self.hand_over(now, nth)?,
            Event::Handed(nth) => self.handed(now, nth),
        }
        Ok(())
    }

    /// Sends a request to whoever will have read it first.
    fn arrives(&mut self, now: u64, nth: u32) {
        let request = &self.requests[nth as usize];
        let fresh = |worker: &Worker| {
            let had = request
                .prefix
                .map_or(0, |prefix| worker.has(prefix.family).min(prefix.tokens));
            request.input.saturating_sub(had).max(1)
        };
        let load = |(index, worker): &(usize, &Worker)| {
            let sequences = if self.apart { 0 } else { worker.sequences() };
            (worker.queued + u64::from(fresh(worker)), sequences, *index)
        };
        let workers = self.workers[..self.readers].iter().enumerate();
        let Some((index, worker)) = workers.min_by_key(load) else {
            return;
        };
        let fresh = fresh(worker);
        self.found += u64::from(request.input - fresh);
        self.progress[nth as usize].reader = index as u32;
        let needs = if self.apart { 0 } else { needs(request, self.overhead) };
        self.workers[index].queue(Prompt {
            request: nth,
            input: request.input,
            fresh,
            left: fresh,
            needs,
        });
        self.wake(now, index);
    }

    fn pass_ends(&mut self, now: u64, index: u32) {
        let mut ended = Ended::default();
        self.workers[index as usize].end(&mut ended);
        for &nth in &ended.done {
            let request = &self.requests[nth as usize];
            self.progress[nth as usize].done = now;
            self.workers[index as usize].held -= needs(request, self.overhead);
        }
        for &nth in &ended.read {
            let request = &self.requests[nth as usize];
            if let Some(prefix) = request.prefix {
                self.workers[index as usize].keep(prefix.family, prefix.tokens);
            }
            self.progress[nth as usize].read = now.saturating_add(self.late);
            if self.apart {
                self.parked.push_back(nth);
            } else {
                self.progress[nth as usize].writer = index;
                self.events
                    .push(Reverse((now.saturating_add(self.late), Event::Handed(nth))));
            }
        }
        if self.apart && !(ended.read.is_empty() && ended.done.is_empty()) {
            self.place_parked(now);
        }
        self.wake(now, index as usize);
    }

    /// Finds room for what has been read, first come, first served.
    fn place_parked(&mut self, now: u64) {
        while let Some(&nth) = self.parked.front() {
            let needed = needs(&self.requests[nth as usize], self.overhead);
            let writers = self.workers.iter().enumerate().skip(self.readers);
            let fitting = writers.filter(|(_, worker)| worker.held + needed <= worker.room);
            let Some((index, _)) = fitting.min_by_key(|(index, worker)| (worker.held, *index)) else {
                return;
            };
            self.parked.pop_front();
            self.workers[index].held += needed;
            self.progress[nth as usize].writer = index as u32;
            let at = now
                .saturating_add(self.late)
                .saturating_add(handover(Bytes(0), self.nics).as_ps());
            self.events.push(Reverse((at, Event::Agreed(nth))));
        }
    }

    /// Every GPU of the worker that has fewer of them exchanges its part with one of the other's.
    fn hand_over(&mut self, now: u64, nth: u32) -> Result<(), SimulationError> {
        let bytes = f64::from(self.requests[nth as usize].input) * self.token_bytes;
        let state = &mut self.progress[nth as usize];
        let Some(network) = &mut self.network else {
            let at = now.saturating_add(alone(Bytes(bytes as u64), self.nics).as_ps());
            self.events.push(Reverse((at, Event::Handed(nth))));
            return Ok(());
        };
        let (reader, writer) = (
            &self.workers[state.reader as usize],
            &self.workers[state.writer as usize],
        );
        let pairs = reader.gpus.min(writer.gpus).max(1);
        state.flows = pairs;
        // Small pieces do not fill a link; what they leave empty travels along.
        let share = alone(SAMPLE, self.nics).as_secs_f64() / self.nics.time_for(SAMPLE).as_secs_f64();
        let part = Bytes((bytes * share / f64::from(pairs)) as u64);
        for pair in 0..pairs {
            let from = Rank(reader.first_gpu + pair * (reader.gpus / pairs));
            let to = Rank(writer.first_gpu + pair * (writer.gpus / pairs));
            network.begin(now, (from, to), part, nth)?;
        }
        Ok(())
    }

    fn flow_ended(&mut self, tag: u32, at: Picos) {
        if tag == OTHERS {
            return;
        }
        let state = &mut self.progress[tag as usize];
        state.flows -= 1;
        state.handed = state.handed.max(at.as_ps());
        if state.flows == 0 {
            self.events.push(Reverse((state.handed, Event::Handed(tag))));
        }
    }

    /// The cache is where the request is decoded; its first token goes out.
    fn handed(&mut self, now: u64, nth: u32) {
        let request = &self.requests[nth as usize];
        let state = &mut self.progress[nth as usize];
        (state.handed, state.first) = (now, now);
        let writer = state.writer as usize;
        if request.output <= 1 {
            state.done = now;
            self.workers[writer].held -= needs(request, self.overhead);
        } else {
            self.workers[writer].join(nth, request.input + 1, request.output - 1);
        }
        self.wake(now, writer);
    }

    /// Lets a worker begin something, or stop repeating itself.
    fn wake(&mut self, now: u64, index: usize) {
        let reads = index < self.readers;
        let pass = &self.passes[usize::from(!reads)];
        let worker = &mut self.workers[index];
        let ends = if worker.busy {
            worker.cut(now)
        } else {
            worker.begin(now, pass)
        };
        if let Some(at) = ends {
            let (worker, generation) = (index as u32, worker.generation);
            self.events.push(Reverse((at, Event::PassEnds { worker, generation })));
        }
    }

    fn report(self) -> Report {
        let begin = self
            .requests
            .iter()
            .map(|request| request.arrives.as_ps())
            .min()
            .unwrap_or(0);
        let end = self.progress.iter().map(|state| state.done).max().unwrap_or(0);
        let time = Picos::from_ps(end.saturating_sub(begin));
        let each = || self.requests.iter().zip(&self.progress);
        let since = |from: fn(&Request, &Progress) -> u64| each().map(|(r, s)| from(r, s)).collect::<Vec<_>>();
        let tokens: u64 = self.requests.iter().map(|request| u64::from(request.output)).sum();
        let prompts: u64 = self.requests.iter().map(|request| u64::from(request.input)).sum();
        let per_token = each()
            .filter(|(request, _)| request.output > 1)
            .map(|(request, state)| (state.done - state.first) / u64::from(request.output - 1))
            .collect();
        Report {
            requests: self.requests.len() as u32,
            time,
            first_token: Percentiles::of(since(|r, s| s.first - r.arrives.as_ps())),
            per_token: Percentiles::of(per_token),
            whole: Percentiles::of(since(|r, s| s.done - r.arrives.as_ps())),
            hand_off: Percentiles::of(if self.apart {
                since(|_, s| s.handed - s.read)
            } else {
                Vec::new()
            }),
            output_per_second: tokens as f64 / time.as_secs_f64().max(1e-12),
            found: self.found as f64 / prompts.max(1) as f64,
            batch_max: self.workers.iter().map(|worker| worker.most).max().unwrap_or(0),
            events: self.happened,
            flows: self.network.as_ref().map_or(0, Live::flows),
            hot: self.network.as_ref().map_or_else(Vec::new, |network| network.hot(time)),
            carried: self.network.as_ref().map_or_else(Vec::new, Live::carried),
        }
    }
}

fn needs(request: &Request, overhead: u64) -> u64 {
    u64::from(request.input) + u64::from(request.output) + overhead
}

/// The bytes of a hand-off by themselves, without what both ends agree on first.
fn alone(bytes: Bytes, nics: Bandwidth) -> Picos {
    handover(bytes, nics).saturating_sub(handover(Bytes(0), nics))
}
