//! What computing a prefix again takes: the serving model, as [`Prefill`] wants it.
//!
//! ```
//! use weft_model::system::System;
//! use weft_model::workload::model::Model;
//! use weft_model::workload::serving::{Engine, Quantisation, Recompute, Worker};
//! use weft_plan::fetch::{FetchCost, FetchError, Prefill};
//! use weft_plan::{Bandwidth, Picos};
//! let (system, model) = (System::named("dgx-h200")?, Model::named("llama-3.1-8b")?);
//! let recompute = Recompute::new(&system, &model, Worker::tensor(1), Quantisation::bf16(), Engine::Vllm)?;
//! let tier = |gigabytes| FetchCost::of(Picos::from_us(100), Bandwidth::from_gigabytes_per_sec(gigabytes));
//! let fast = recompute.fetch(&tier(50.0), 8192, 8192, 16)?;
//! assert_eq!(fast.tokens, 8192);
//! assert!(matches!(recompute.fetch(&tier(0.1), 8192, 8192, 16), Err(FetchError::Slower { .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use weft_plan::fetch::Prefill;
use weft_plan::units::{Bytes, Picos};

use super::{Engine, Pass, PassBatch, Quantisation, ServingError, Worker, token_bytes};
use crate::system::System;
use crate::workload::model::Model;

/// What computing KV again takes: one worker, one prompt, nothing else under way.
#[derive(Clone, Debug)]
pub struct Recompute {
    pass: Pass,
    token_bytes: f64,
}

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
}

impl Prefill for Recompute {
    fn time(&self, first: u32, end: u32) -> Picos {
        let batch = PassBatch {
            prompt_tokens: f64::from(end.saturating_sub(first).max(1)),
            prompts: 1.0,
            prompt_context: f64::from(end.max(1)),
            ..PassBatch::default()
        };
        let seconds = self.pass.gpu_seconds(&batch) + self.pass.first_token_seconds();
        Picos::from_ps((seconds * 1e12) as u64)
    }

    fn bytes(&self, tokens: u32) -> Bytes {
        Bytes((self.token_bytes * f64::from(tokens)) as u64)
    }
}

#[cfg(test)]
mod tests {
    use weft_plan::fetch::{FetchCost, FetchError};
    use weft_plan::units::Bandwidth;

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
        let whole = pass.gpu_seconds(&PassBatch::prompts(1.0, 4096.0)) + pass.first_token_seconds();
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
