//! Whether the keys and values of a prefix are fetched or computed again, and how much of them.
//!
//! What computing takes is asked of [`Pass`], as everything that predicts serving does; what fetching takes is the tier's [`FetchCost`].
//!
//! ```
//! use weft_plan::{Bandwidth, LinkCost, Picos};
//! use weft_plan::platform::System;
//! use weft_plan::workload::model::Model;
//! use weft_plan::workload::serving::{Engine, FetchCost, FetchError, Quantisation, Recompute, Worker};
//! let (system, model) = (System::named("dgx-h200")?, Model::named("llama-3.1-8b")?);
//! let recompute = Recompute::new(&system, &model, Worker::tensor(1), Quantisation::bf16(), Engine::Vllm)?;
//! let tier = |gigabytes| FetchCost::of(Picos::from_us(100), Bandwidth::from_gigabytes_per_sec(gigabytes));
//! let fast = recompute.fetch(&tier(50.0), 8192, 8192, 16)?;
//! assert_eq!(fast.tokens, 8192);
//! assert!(matches!(recompute.fetch(&tier(0.1), 8192, 8192, 16), Err(FetchError::Slower { .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use thiserror::Error;

use super::{Batch, Engine, Pass, Quantisation, ServingError, Worker, token_bytes};
use crate::cost::LinkCost;
use crate::platform::System;
use crate::units::{Bandwidth, Bytes, Picos};
use crate::workload::model::Model;

/// What fetching from a tier takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchCost {
    /// Finding out what is there.
    pub lookup: Picos,
    /// What others have asked for before.
    pub queue: Picos,
    /// The way itself, as slow as it is one time in twenty rather than on average.
    pub link: LinkCost,
}

impl FetchCost {
    /// A tier that is known already, with nothing before us.
    pub fn of(latency: Picos, bandwidth: Bandwidth) -> FetchCost {
        FetchCost {
            lookup: Picos::ZERO,
            queue: Picos::ZERO,
            link: LinkCost {
                latency,
                per_span: Picos::ZERO,
                bandwidth,
            },
        }
    }

    pub fn time(&self, bytes: Bytes) -> Picos {
        self.lookup
            .saturating_add(self.queue)
            .saturating_add(self.link.time(bytes, 1))
    }
}

/// What computing KV again takes: one worker, one prompt, nothing else under way.
#[derive(Clone, Debug)]
pub struct Recompute {
    pass: Pass,
    token_bytes: f64,
}

/// What to fetch, and what the request takes then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Fetch the first so many tokens, and compute the rest.
    pub tokens: u32,
    pub bytes: Bytes,
    pub fetch: Picos,
    /// Computing what is not fetched.
    pub rest: Picos,
    /// Computing everything.
    pub compute: Picos,
}

/// Fetching loses, or cannot be asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FetchError {
    #[error("fetching {tokens} tokens takes {fetch:.1}, and computing them {compute:.1}")]
    Slower { tokens: u32, fetch: Picos, compute: Picos },
    #[error("{what} must be between 1 and {most}, not {value}")]
    OutOfRange { what: &'static str, value: u32, most: u32 },
}

const TOKENS_MAX: u32 = 10_000_000;

impl Recompute {
    pub fn new(
        system: &System,
        model: &Model,
        worker: Worker,
        quantisation: Quantisation,
        engine: Engine,
    ) -> Result<Recompute, ServingError> {
        Ok(Recompute {
            pass: Pass::new(system, model, worker, quantisation, engine)?,
            token_bytes: token_bytes(model, quantisation.cache.bytes()),
        })
    }

    /// Computing the tokens from `first` up to `end` of a prompt whose earlier ones are there. At least one token is computed always: the answer
    /// begins with it.
    pub fn time(&self, first: u32, end: u32) -> Picos {
        let batch = Batch {
            prompt_tokens: f64::from(end.saturating_sub(first).max(1)),
            prompts: 1.0,
            prompt_context: f64::from(end.max(1)),
            ..Batch::default()
        };
        let seconds = self.pass.gpu_seconds(&batch) + self.pass.first_token_seconds();
        Picos::from_ps((seconds * 1e12) as u64)
    }

    /// Keys and values of so many tokens.
    pub fn bytes(&self, tokens: u32) -> Bytes {
        Bytes((self.token_bytes * f64::from(tokens)) as u64)
    }

    /// How much of a prefix to fetch: of a prompt of `prompt` tokens, the first `there` can be had from a tier, in blocks of `block`. The answer
    /// is the length that ends soonest, and an error with both figures where that is nothing at all.
    pub fn fetch(&self, tier: &FetchCost, prompt: u32, there: u32, block: u32) -> Result<Fetch, FetchError> {
        for (what, value) in [("the tokens of the prompt", prompt), ("the tokens of a block", block)] {
            if !(1..=TOKENS_MAX).contains(&value) {
                let most = TOKENS_MAX;
                return Err(FetchError::OutOfRange { what, value, most });
            }
        }
        let there = there.min(prompt) / block * block;
        let compute = self.time(0, prompt);
        let of = |tokens: u32| {
            let bytes = self.bytes(tokens);
            Fetch {
                tokens,
                bytes,
                fetch: tier.time(bytes),
                rest: self.time(tokens, prompt),
                compute,
            }
        };
        let total = |fetch: &Fetch| fetch.fetch.saturating_add(fetch.rest);
        let lengths = (1..=there / block).map(|blocks| of(blocks * block));
        // Of equals the longest: it leaves the GPU to others.
        let best = lengths.min_by_key(|fetch| (total(fetch), std::cmp::Reverse(fetch.tokens)));
        match best.filter(|best| total(best) < compute) {
            Some(best) => Ok(best),
            None => Err(self.refusal(tier, prompt, there)),
        }
    }

    /// The bandwidth from which on fetching a whole prompt of so many tokens is no slower than computing it. `None` where the tier's latency
    /// alone takes longer.
    pub fn break_even(&self, tier: &FetchCost, prompt: u32) -> Option<Bandwidth> {
        let saved = self.time(0, prompt).saturating_sub(self.time(prompt, prompt));
        let fixed = tier.time(Bytes(0));
        let left = saved.saturating_sub(fixed).as_secs_f64();
        (left > 0.0).then(|| Bandwidth::from_bytes_per_sec((self.bytes(prompt).0 as f64 / left).ceil() as u64))
    }

    /// The shortest prompt, in whole blocks up to `most` tokens, that is fetched as a whole rather than computed.
    pub fn shortest(&self, tier: &FetchCost, block: u32, most: u32) -> Option<u32> {
        let block = block.max(1);
        let wins = |tokens: u32| {
            let (fetch, rest) = (tier.time(self.bytes(tokens)), self.time(tokens, tokens));
            fetch.saturating_add(rest) < self.time(0, tokens)
        };
        (1..=most / block)
            .map(|blocks| blocks * block)
            .find(|tokens| wins(*tokens))
    }

    fn refusal(&self, tier: &FetchCost, prompt: u32, there: u32) -> FetchError {
        FetchError::Slower {
            tokens: there,
            fetch: tier.time(self.bytes(there)),
            compute: self.time(0, prompt).saturating_sub(self.time(there, prompt)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recompute(model: &str, gpus: u32) -> Recompute {
        let (system, model) = (System::named("dgx-h200").unwrap(), Model::named(model).unwrap());
        Recompute::new(
            &system,
            &model,
            Worker::tensor(gpus),
            Quantisation::bf16(),
            Engine::Vllm,
        )
        .unwrap()
    }

    fn tier(gigabytes: f64) -> FetchCost {
        FetchCost::of(Picos::from_us(100), Bandwidth::from_gigabytes_per_sec(gigabytes))
    }

    #[test]
    fn computing_is_what_the_serving_model_says_and_parts_add_up_to_no_less_than_the_whole() {
        let recompute = recompute("llama-3.1-8b", 1);
        let (system, model) = (
            System::named("dgx-h200").unwrap(),
            Model::named("llama-3.1-8b").unwrap(),
        );
        let pass = Pass::new(&system, &model, Worker::tensor(1), Quantisation::bf16(), Engine::Vllm).unwrap();
        let whole = pass.gpu_seconds(&Batch::prompts(1.0, 4096.0)) + pass.first_token_seconds();
        assert!((recompute.time(0, 4096).as_secs_f64() - whole).abs() < 1e-9);
        let parts = recompute.time(0, 2048).saturating_add(recompute.time(2048, 4096));
        assert!(parts >= recompute.time(0, 4096));
        assert!(
            recompute.time(2048, 4096) > recompute.time(0, 2048),
            "later tokens see more"
        );
        // 32 layers, 8 heads of 128, keys and values, two bytes each.
        assert_eq!(recompute.bytes(1), Bytes(32 * 8 * 128 * 2 * 2));
    }

    #[test]
    fn the_chosen_length_is_the_best_of_all() {
        let recompute = recompute("llama-3.1-70b", 8);
        for gigabytes in [0.5, 2.0, 5.0, 8.0, 20.0] {
            let tier = tier(gigabytes);
            let total = |tokens: u32| {
                tier.time(recompute.bytes(tokens))
                    .saturating_add(recompute.time(tokens, 9000))
            };
            let best = (1..=500).map(|blocks| total(blocks * 16)).min().unwrap();
            match recompute.fetch(&tier, 9000, 8009, 16) {
                Ok(fetch) => {
                    assert_eq!(fetch.fetch.saturating_add(fetch.rest), best);
                    assert!(fetch.tokens.is_multiple_of(16) && fetch.tokens <= 8000);
                    assert!(best < fetch.compute);
                }
                Err(FetchError::Slower { tokens, fetch, compute }) => {
                    assert!(best >= recompute.time(0, 9000));
                    assert_eq!(tokens, 8000);
                    assert!(fetch >= compute, "{fetch} beside {compute}");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn a_losing_fetch_is_refused_with_both_figures_and_taken_once_the_tier_is_fast() {
        let recompute = recompute("llama-3.1-8b", 1);
        let even = recompute.break_even(&tier(1.0), 8192).unwrap();
        let at = |times: f64| {
            let bandwidth = Bandwidth::from_bytes_per_sec((even.bytes_per_sec() as f64 * times) as u64);
            recompute.fetch(&FetchCost::of(Picos::from_us(100), bandwidth), 8192, 8192, 16)
        };
        let error = at(0.5).unwrap_err();
        assert!(matches!(error, FetchError::Slower { tokens: 8192, fetch, compute } if fetch > compute));
        assert!(at(1.1).unwrap().tokens > 0);
        let late = FetchCost::of(Picos::from_ms(60_000), Bandwidth::MAX);
        assert_eq!(recompute.break_even(&late, 8192), None);
        assert_eq!(recompute.shortest(&late, 16, 100_000), None);
    }

    #[test]
    fn what_is_not_there_is_not_fetched_and_questions_without_sense_are_refused() {
        let recompute = recompute("llama-3.1-8b", 1);
        assert!(matches!(
            recompute.fetch(&tier(50.0), 100, 15, 16),
            Err(FetchError::Slower { tokens: 0, .. })
        ));
        assert!(matches!(
            recompute.fetch(&tier(50.0), 0, 0, 16),
            Err(FetchError::OutOfRange { .. })
        ));
        assert!(matches!(
            recompute.fetch(&tier(50.0), 10, 0, 0),
            Err(FetchError::OutOfRange { .. })
        ));
    }
}
