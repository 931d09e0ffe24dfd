//! Who asks for what, and when.

use weft_plan::Picos;
use weft_protocol::seeded::Seeded;

use super::SimulationError;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub arrives: Picos,
    /// Tokens of the prompt and of the answer.
    pub input: u32,
    pub output: u32,
    /// The beginning that it shares with others.
    pub prefix: Option<Prefix>,
}

/// A beginning of prompts, such as instructions or a conversation so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    pub family: u32,
    pub tokens: u32,
}

/// Requests by chance: times between arrivals are exponential, lengths uniform.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrivals {
    pub count: u32,
    /// Requests a second.
    pub rate: f64,
    /// The longest prompt and answer.
    pub input: u32,
    pub output: u32,
    /// How short they may be, as a part of the longest.
    pub shortest: f64,
    /// Into how many families requests fall, and what of the longest prompt those of a family share.
    pub families: u32,
    pub shared: f64,
}

impl Default for Arrivals {
    fn default() -> Arrivals {
        Arrivals {
            count: 1000,
            rate: 1.0,
            input: 1024,
            output: 256,
            shortest: 0.8,
            families: 0,
            shared: 0.0,
        }
    }
}

const MAX_REQUESTS: u32 = 10_000_000;
const MAX_TOKENS: f64 = 1e8;

impl Arrivals {
    pub fn requests(&self, seed: u64) -> Result<Vec<Request>, SimulationError> {
        for (what, value, least, most) in [
            (
                "the number of requests",
                f64::from(self.count),
                1.0,
                f64::from(MAX_REQUESTS),
            ),
            ("the rate of arrivals", self.rate, 1e-6, 1e9),
            ("the tokens of a prompt", f64::from(self.input), 1.0, MAX_TOKENS),
            ("the tokens of an answer", f64::from(self.output), 1.0, MAX_TOKENS),
            ("the shortest length", self.shortest, 0.0, 1.0),
            ("the shared part of prompts", self.shared, 0.0, 1.0),
        ] {
            if !(least..=most).contains(&value) {
                return Err(SimulationError::OutOfRange {
                    what,
                    value,
                    least,
                    most,
                });
            }
        }
        let mut chance = Seeded::new(seed);
        let mut unit = move || (chance.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut now = 0.0;
        let mut requests = Vec::with_capacity(self.count as usize);
        for _ in 0..self.count {
            now -= (1.0 - unit()).ln() / self.rate;
            let mut length = |longest: u32| {
                let part = self.shortest + (1.0 - self.shortest) * unit();
                ((f64::from(longest) * part).round() as u32).max(1)
            };
            let (input, output) = (length(self.input), length(self.output));
            let tokens = (f64::from(self.input) * self.shared) as u32;
            let prefix = (self.families > 0 && tokens > 0).then(|| Prefix {
                family: (unit() * f64::from(self.families)) as u32,
                tokens: tokens.min(input - 1),
            });
            requests.push(Request {
                arrives: Picos::from_ps((now * 1e12) as u64),
                input,
                output,
                prefix,
            });
        }
        Ok(requests)
    }
}
