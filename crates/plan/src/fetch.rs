//! Whether the keys and values of a prefix are fetched or computed again, and how much of them.
//!
//! What computing takes is asked of a [`Prefill`]: a model of serving, or what somebody has measured. What fetching takes is the tier's
//! [`FetchCost`].
//!
//! ```
//! use weft_plan::fetch::{FetchCost, FetchError, Prefill};
//! use weft_plan::{Bandwidth, Bytes, Picos};
//! /// So many tokens a second, measured.
//! #[derive(Debug)]
//! struct Measured(f64);
//! impl Prefill for Measured {
//!     fn time(&self, first: u32, end: u32) -> Picos {
//!         Picos::from_us((f64::from(end.saturating_sub(first).max(1)) / self.0 * 1e6) as u64)
//!     }
//!     fn bytes(&self, tokens: u32) -> Bytes {
//!         Bytes(u64::from(tokens) << 17)
//!     }
//! }
//! let tier = |gigabytes| FetchCost::of(Picos::from_us(100), Bandwidth::from_gigabytes_per_sec(gigabytes));
//! let gpu = Measured(20_000.0);
//! assert_eq!(gpu.fetch(&tier(50.0), 8192, 8192, 16)?.tokens, 8192);
//! assert!(matches!(gpu.fetch(&tier(0.1), 8192, 8192, 16), Err(FetchError::Slower { .. })));
//! # Ok::<(), FetchError>(())
//! ```

use std::fmt;

use thiserror::Error;

use crate::cost::LinkCost;
use crate::units::{Bandwidth, Bytes, Picos};

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

/// What computing the keys and values of a prompt takes, and how much they are: what fetching is weighed against.
pub trait Prefill: fmt::Debug {
    /// Computing the tokens from `first` up to `end` of a prompt whose earlier ones are there. At least one token is computed always: the answer
    /// begins with it.
    fn time(&self, first: u32, end: u32) -> Picos;

    /// Keys and values of so many tokens.
    fn bytes(&self, tokens: u32) -> Bytes;

    /// How much of a prefix to fetch: of a prompt of `prompt` tokens, the first `there` can be had from a tier, in blocks of `block`. The answer
    /// is the length that ends soonest, and an error with both figures where that is nothing at all.
    fn fetch(&self, tier: &FetchCost, prompt: u32, there: u32, block: u32) -> Result<Fetch, FetchError> {
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
            None => Err(refusal(self, tier, prompt, there)),
        }
    }

    /// The bandwidth from which on fetching a whole prompt of so many tokens is no slower than computing it. `None` where the tier's latency
    /// alone takes longer.
    fn break_even(&self, tier: &FetchCost, prompt: u32) -> Option<Bandwidth> {
        let saved = self.time(0, prompt).saturating_sub(self.time(prompt, prompt));
        let fixed = tier.time(Bytes(0));
        let left = saved.saturating_sub(fixed).as_secs_f64();
        (left > 0.0).then(|| Bandwidth::from_bytes_per_sec((self.bytes(prompt).0 as f64 / left).ceil() as u64))
    }

    /// The shortest prompt, in whole blocks up to `most` tokens, that is fetched as a whole rather than computed.
    fn shortest(&self, tier: &FetchCost, block: u32, most: u32) -> Option<u32> {
        let block = block.max(1);
        let wins = |tokens: u32| {
            let (fetch, rest) = (tier.time(self.bytes(tokens)), self.time(tokens, tokens));
            fetch.saturating_add(rest) < self.time(0, tokens)
        };
        (1..=most / block)
            .map(|blocks| blocks * block)
            .find(|tokens| wins(*tokens))
    }
}

fn refusal<P: Prefill + ?Sized>(prefill: &P, tier: &FetchCost, prompt: u32, there: u32) -> FetchError {
    FetchError::Slower {
        tokens: there,
        fetch: tier.time(prefill.bytes(there)),
        compute: prefill.time(0, prompt).saturating_sub(prefill.time(there, prompt)),
    }
}
