//! Requests in a closed loop: so many at a time, each followed by the next as soon as it is answered.

use super::hand_off;
use super::{Engine, Pass, PassBatch, Quantisation, ServingError, Worker, room};
use crate::handover::handover;
use crate::system::System;
use crate::workload::model::{Mixer, Model};
use weft_plan::units::{Bytes, Picos};

/// What is asked of a deployment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServingLoad {
    /// Requests that are under way at any time.
    pub concurrency: f64,
    /// Tokens of a prompt and of an answer, on average.
    pub input: f64,
    pub output: f64,
    pub lengths: Lengths,
    /// The part of a prompt whose keys and values are found in a cache.
    pub cached: f64,
}

/// Whether requests that begin together also end together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Answers differ in length, so that requests spread out; each slot is used for this many requests after a common start.
    Varied { rounds: f64 },
    /// All are of one length, so that requests come in groups again and again.
    Equal,
}

/// A worker, and how many like it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    pub worker: Worker,
    pub count: u32,
}

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deployment {
    pub engine: Engine,
    pub quantisation: Quantisation,
    /// Workers that only read prompts; without them the others do that too.
    pub prefill: Option<Pool>,
    pub decode: Pool,
}

/// What a client sees, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServingEstimate {
    /// From a request to its first token, on average.
    pub first_token: Picos,
    /// From each token to the next, on average.
    pub per_token: Picos,
    /// One prompt alone on an idle worker, on the GPUs.
    pub prompt: Picos,
    /// A step that decodes the batch and nothing else.
    pub step: Picos,
    /// Handing one request's cache over, alone on the link.
    pub hand_off: Picos,
    /// Sequences that an attention rank decodes at a time, and how many it has room for.
    pub batch: f64,
    pub room: f64,
    /// Tokens of answers a second, all workers together.
    pub output_per_second: f64,
    pub gpus: u32,
    pub limit: Limit,
}

/// What more of would serve more requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The number of requests.
    Load,
    /// Memory for their caches: some wait for a place.
    Memory,
    /// Workers that read prompts.
    Prefill,
}

/// Tokens of prompts that engines put into one pass.
const PROMPT_BUDGET: f64 = 8192.0;
const PROMPTS_FIRST_BUDGET: f64 = 16384.0;
/// The part of an answer that engines keep room for when they admit a request.
const RESERVED: f64 = 0.75;
/// Kernels that a prompt starts one by one, relative to a layer of grouped attention.
const LATENT_STARTS: f64 = 1.9;
const STATE_STARTS: f64 = 6.0;
/// How prompts that share passes with decoding get in each other's way when all lengths are equal.
const GROUPED: f64 = 0.83;
/// The same for prefill workers of their own, which see requests only in bursts.
const BURST_AT_PREFILL: f64 = 2.1;
/// No queue is looked at closer to its limit than this.
const FULL: f64 = 0.9;
const MAX_COUNT: f64 = 1e9;

impl ServingLoad {
    /// As benchmarks do it: lengths between four fifths of the given ones and all of them, and ten requests for each slot.
    pub fn benchmark(concurrency: u32, input: u32, output: u32) -> ServingLoad {
        ServingLoad {
            input: 0.9 * f64::from(input),
            output: 0.9 * f64::from(output),
            lengths: Lengths::Varied { rounds: 10.0 },
            ..ServingLoad::closed(concurrency, input, output)
        }
    }

    /// Lengths are as given on average, and the start is long ago.
    pub fn closed(concurrency: u32, input: u32, output: u32) -> ServingLoad {
        ServingLoad {
            concurrency: concurrency.into(),
            input: input.into(),
            output: output.into(),
            lengths: Lengths::Varied { rounds: f64::INFINITY },
            cached: 0.0,
        }
    }
}

impl Deployment {
    /// Every worker reads prompts and decodes.
    pub fn aggregated(engine: Engine, quantisation: Quantisation, worker: Worker, count: u32) -> Deployment {
        Deployment {
            engine,
            quantisation,
            prefill: None,
            decode: Pool { worker, count },
        }
    }

    pub fn gpus(&self) -> u32 {
        let of = |pool: &Pool| pool.worker.gpus().saturating_mul(pool.count);
        of(&self.decode).saturating_add(self.prefill.as_ref().map_or(0, of))
    }

    /// What clients see under a load. An error where the model does not fit or the description does not hold together.
    pub fn estimate(
        &self,
        system: &System,
        model: &Model,
        load: &ServingLoad,
    ) -> Result<ServingEstimate, ServingError> {
        self.check(load)?;
        let prompting = self.prefill.unwrap_or(self.decode);
        let at = |pool: Pool| Pass::new(system, model, pool.worker, self.quantisation, self.engine);
        let (prompt_pass, decode_pass) = (at(prompting)?, at(self.decode)?);
        let room = room(system, model, self.decode.worker, self.quantisation)?;
        if self.prefill.is_some() {
            super::room(system, model, prompting.worker, self.quantisation)?;
        }
        let pieces = Pieces {
            deployment: self,
            habits: self.engine.habits(),
            load,
            prompting,
            room: room.sequences(load.input + RESERVED * load.output).max(1.0),
            prompt_pass,
            decode_pass,
        };
        let hand_off = match self.prefill {
            None => Picos::ZERO,
            Some(pool) => {
                let bytes = hand_off::token_bytes(model, self.quantisation.cache.bytes()) * load.input;
                let nics = hand_off::nics(system, pool.worker.gpus().min(self.decode.worker.gpus()));
                handover(Bytes(bytes as u64), nics)
            }
        };
        Ok(pieces.estimate(hand_off))
    }

    fn check(&self, load: &ServingLoad) -> Result<(), ServingError> {
        let counts = [
            ("the number of workers", f64::from(self.decode.count)),
            (
                "the number of prefill workers",
                self.prefill.map_or(1.0, |pool| f64::from(pool.count)),
            ),
            ("the concurrency", load.concurrency),
            ("the tokens of a prompt", load.input),
            ("the tokens of an answer", load.output),
        ];
        for (what, value) in counts {
            if !(0.5..=MAX_COUNT).contains(&value) {
                return Err(ServingError::OutOfRange {
                    what,
                    value: value as u64,
                    most: MAX_COUNT as u64,
                });
            }
        }
        Ok(())
    }
}

/// What the estimate is put together from; all times in seconds.
struct Pieces<'a> {
    deployment: &'a Deployment,
    habits: super::engine::Habits,
    load: &'a ServingLoad,
    prompting: Pool,
    room: f64,
    prompt_pass: Pass,
    decode_pass: Pass,
}

impl Pieces<'_> {
    fn estimate(&self, hand_off: Picos) -> ServingEstimate {
        let (load, habits) = (self.load, &self.habits);
        let decode = self.deployment.decode;
        let slots = f64::from(decode.count) * f64::from(decode.worker.data);
        let asked = load.concurrency / slots;
        let batch = asked.min(self.room);
        let apart = self.deployment.prefill.is_some();

        // A prompt in company, and alone.
        let fresh = (load.input - load.cached).max(1.0);
        let company = (PROMPT_BUDGET / fresh).min(asked).max(1.0);
        let each = self.prompt_pass.gpu_seconds(&self.prompts(company, fresh)) / company;
        let alone = self.prompt_pass.gpu_seconds(&self.prompts(1.0, fresh));

        let step = self.step(batch);
        let disturbed = if apart {
            0.0
        } else {
            self.prompts_in_between(batch, fresh) * each / load.output
        };
        let mut per_token = step + disturbed;

        // Prefill workers of their own may be what everything waits for; then fewer sequences are decoded at a time.
        let readers = f64::from(self.prompting.count) * f64::from(self.prompting.worker.data);
        let capacity = readers / each;
        let wanted = batch * slots / (load.output * per_token + alone);
        let starved = apart && wanted > capacity;
        let mut decoded = batch;
        if starved {
            decoded = batch.min(capacity * load.output * step / slots).max(0.5);
            per_token = self.step(decoded);
        }

        let begun = alone + self.prompt_pass.first_token_seconds();
        let mut first = habits.steps_to_first * per_token + begun;
        let waiting = load.concurrency / if apart { readers } else { slots };
        let busy = if apart {
            (wanted / capacity).min(FULL)
        } else {
            (asked * each / (asked * each + load.output * step)).min(FULL)
        };
        first += self.queue(waiting, busy, each, fresh, apart);
        if self.load.lengths != Lengths::Equal {
            first += habits.crowding * (waiting - 1.0).max(0.0).sqrt() * begun;
        }
        if !apart && decode.worker.data > 1 {
            first += habits.balancing_steps * per_token;
        }
        if !starved && asked > self.room {
            first += (asked / self.room - 1.0) * load.output * per_token;
        }
        if starved {
            first += (load.concurrency / capacity - load.output * per_token - alone).max(0.0);
        }
        first += hand_off.as_secs_f64();

        let rate = load.concurrency / (first + load.output * per_token);
        ServingEstimate {
            first_token: time(first),
            per_token: time(per_token),
            prompt: time(alone),
            step: time(self.step(decoded)),
            hand_off,
            batch: decoded,
            room: self.room,
            output_per_second: rate * load.output,
            gpus: self.deployment.gpus(),
            limit: if starved {
                Limit::Prefill
            } else if asked > self.room {
                Limit::Memory
            } else {
                Limit::Load
            },
        }
    }

    fn prompts(&self, count: f64, fresh: f64) -> PassBatch {
        PassBatch {
            prompt_tokens: count * fresh,
            prompts: count,
            prompt_context: self.load.input,
            ..PassBatch::default()
        }
    }

    fn step(&self, sequences: f64) -> f64 {
        let context = self.load.input + self.load.output / 2.0;
        self.decode_pass.step_seconds(&PassBatch::sequences(sequences, context))
    }

    /// How many other prompts a request sees read between its first token and its last.
    fn prompts_in_between(&self, batch: f64, fresh: f64) -> f64 {
        if self.load.lengths == Lengths::Equal && self.habits.prompts_first {
            // All that began together are decoded together, after the last of their prompts.
            let together = (PROMPTS_FIRST_BUDGET / fresh).max(1.0);
            return (batch - batch.min(together)) / 2.0;
        }
        (batch - 1.0).max(0.0)
    }

    /// Seconds that a prompt waits for others.
    fn queue(&self, waiting: f64, busy: f64, each: f64, fresh: f64, apart: bool) -> f64 {
        match self.load.lengths {
            Lengths::Equal if self.habits.prompts_first => {
                let together = (PROMPTS_FIRST_BUDGET / fresh).max(1.0).min(waiting);
                ((together + waiting) / 2.0 - 1.0).max(0.0) * each
            }
            Lengths::Equal => GROUPED * (waiting - 1.0).max(0.0).sqrt() * each,
            Lengths::Varied { rounds } => {
                // The first of all rounds begins with everybody at once; the others arrive as if at random.
                let burst = (waiting - 1.0).max(0.0) / 2.0 / rounds * if apart { BURST_AT_PREFILL } else { 1.0 };
                let steady = busy / (2.0 * (1.0 - busy));
                burst * (each + 1e-3 * self.habits.admission_ms) + steady * each
            }
        }
    }
}

/// Layers, weighted by the kernels that a prompt starts in them.
pub(super) fn starts(model: &Model) -> f64 {
    let weight = |mixer: &Option<Mixer>| match mixer {
        Some(Mixer::Latent { .. }) => 1.0 + LATENT_STARTS,
        Some(Mixer::StateSpace { .. } | Mixer::Delta { .. }) => 1.0 + STATE_STARTS,
        Some(Mixer::Attention { .. }) | None => 1.0,
    };
    model
        .stacks
        .iter()
        .map(|stack| f64::from(stack.layers) * weight(&stack.mixer))
        .sum()
}

fn time(seconds: f64) -> Picos {
    Picos::from_ps((seconds * 1e12) as u64)
}
