//! KV stores under a load: traces and made-up sessions, through the very index and policies that a store has.
//!
//! [`Sessions`] makes requests of chats, documents and agents out of a seed, so that nothing has to be downloaded to compare policies;
//! [`compare`] replays requests at some capacities, and says of each policy what it would have hit, beside LRU and the offline optimum.

mod sessions;

use weft_plan::fetch::Prefill;
use weft_plan::{Bytes, Picos};
pub use weft_protocol::block::policy::Kind;
pub use weft_protocol::block::replay::distinct;
use weft_protocol::block::replay::{Outcome, optimum, replay};
pub use weft_protocol::block::trace::{self, Request};

pub use sessions::{Sessions, SessionsError};

/// What is compared.
#[derive(Clone, Debug)]
pub struct Comparison<'a> {
    pub requests: &'a [Request],
    /// Capacities, as shares of the distinct blocks.
    pub shares: &'a [f64],
    /// Policies are told of each request whether its session will come back.
    pub hints: bool,
    /// What a hit saves: what computing takes, and the tokens of a block.
    pub recompute: &'a dyn Prefill,
    pub block_tokens: u32,
}

/// What one policy did at one capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Of the distinct blocks.
    pub share: f64,
    pub capacity: usize,
    /// `None` is the offline optimum.
    pub policy: Option<Kind>,
    pub hit_rate: f64,
    pub written: Bytes,
    /// Time of prefill that hits have spared.
    pub saved: Picos,
}

/// The tokens of a block, from the lengths of prompts: the last block of each is partly filled.
pub fn block_tokens(requests: &[Request]) -> u32 {
    let each = |request: &Request| request.input_tokens.div_ceil(request.blocks.len().max(1) as u32);
    requests.iter().map(each).max().unwrap_or(1).max(1)
}

/// Replays under every policy, capacity by capacity, the optimum last.
pub fn compare(comparison: &Comparison<'_>) -> Vec<Row> {
    let requests = comparison.requests;
    let blocks = distinct(requests);
    let bits = comparison.hints.then(|| trace::comes_back(requests));
    let mut rows = Vec::new();
    for share in comparison.shares {
        let capacity = ((blocks as f64 * share) as usize).max(1);
        let row = |policy, outcome: &Outcome| Row {
            share: *share,
            capacity,
            policy,
            hit_rate: outcome.hit_rate(),
            written: comparison.written(outcome),
            saved: comparison.saved(outcome),
        };
        for kind in Kind::ALL {
            rows.push(row(Some(kind), &replay(requests, capacity, kind, bits.as_deref())));
        }
        rows.push(row(None, &optimum(requests, capacity)));
    }
    rows
}

impl Comparison<'_> {
    fn written(&self, outcome: &Outcome) -> Bytes {
        Bytes(
            self.recompute
                .bytes(self.block_tokens)
                .0
                .saturating_mul(outcome.written),
        )
    }

    fn saved(&self, outcome: &Outcome) -> Picos {
        let mut saved = Picos::ZERO;
        for (request, hits) in self.requests.iter().zip(&outcome.hits_each) {
            let prompt = request.input_tokens.max(1);
            let there = hits.saturating_mul(self.block_tokens).min(prompt);
            if there > 0 {
                let rest = self.recompute.time(there, prompt);
                saved = saved.saturating_add(self.recompute.time(0, prompt).saturating_sub(rest));
            }
        }
        saved
    }
}

#[cfg(test)]
mod tests {
    use weft_model::system::System;
    use weft_model::workload::model::Model;
    use weft_model::workload::serving::{Engine, Quantisation, Recompute, Worker};

    use super::*;

    #[test]
    fn hits_save_prefill_and_the_optimum_saves_most() {
        let (system, model) = (
            System::named("dgx-h200").unwrap(),
            Model::named("llama-3.1-8b").unwrap(),
        );
        let worker = Worker::tensor(1);
        let recompute = Recompute::new(&system, &model, worker, Quantisation::bf16(), Engine::Vllm).unwrap();
        let requests = Sessions {
            count: 120,
            ..Sessions::mixed(3)
        }
        .requests()
        .unwrap();
        let block_tokens = block_tokens(&requests);
        let rows = compare(&Comparison {
            requests: &requests,
            shares: &[0.05, 2.0],
            hints: false,
            recompute: &recompute,
            block_tokens,
        });
        assert_eq!(rows.len(), 10);
        for few in rows.chunks(5) {
            let optimum = &few[4];
            assert_eq!(optimum.policy, None);
            assert!(
                few.iter()
                    .all(|row| row.hit_rate <= optimum.hit_rate && row.written >= optimum.written)
            );
        }
        // Where everything fits all policies are alike.
        assert!(
            rows[5..]
                .iter()
                .all(|row| row.saved == rows[5].saved && row.saved > rows[0].saved)
        );
        assert!(rows[0].saved > Picos::ZERO);
    }
}
