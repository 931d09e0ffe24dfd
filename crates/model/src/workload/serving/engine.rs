//! What differs between serving engines, as a handful of times each.

use std::fmt;
use std::str::FromStr;

use super::ServingError;

/// A serving engine whose habits are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Engine {
    Vllm,
    Sglang,
    TensorRtLlm,
}

/// What an engine adds to the work of the GPUs. Calibrated against end-to-end measurements of many models on Hopper and Blackwell
/// (`aic_e2e_serving.csv`), one value for all of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// Kernels of one layer with grouped attention and a dense feed-forward, besides their bytes and operations: starts, tails, norms.
    pub layer_us: f64,
    /// The host's work for each step, which the GPU waits for.
    pub step_ms: f64,
    /// And for each sequence in it: scheduling, sampling, text.
    pub sequence_us: f64,
    /// A prompt is not replayed from a recorded graph: what starting a layer's kernels one by one costs it.
    pub prompt_layer_ms: f64,
    /// Steps between a first token's being computed and its being sent, together with those that a request waits for.
    pub steps_to_first: f64,
    /// What each request of a burst keeps the next ones waiting besides its prompt.
    pub admission_ms: f64,
    /// How much requests that came together stay together, by the root of their number.
    pub crowding: f64,
    /// Prompts go first, and nothing is decoded while one waits; elsewhere they share steps with decoding.
    pub prompts_first: bool,
    /// With attention divided by requests, steps that a request may wait until all ranks have a prompt.
    pub balancing_steps: f64,
}

impl Engine {
    pub const ALL: [Engine; 3] = [Engine::Vllm, Engine::Sglang, Engine::TensorRtLlm];

    pub fn name(self) -> &'static str {
        match self {
            Engine::Vllm => "vllm",
            Engine::Sglang => "sglang",
            Engine::TensorRtLlm => "trtllm",
        }
    }

    /// Whether prompts hold decoding up until all of them are done.
    pub fn puts_prompts_first(self) -> bool {
        self.habits().prompts_first
    }

    pub(super) fn habits(self) -> Habits {
        match self {
            Engine::Vllm => Habits {
                layer_us: 61.0,
                step_ms: 0.3,
                sequence_us: 25.0,
                prompt_layer_ms: 0.24,
                steps_to_first: 0.8,
                admission_ms: 5.6,
                crowding: 0.26,
                prompts_first: false,
                balancing_steps: 0.0,
            },
            Engine::Sglang => Habits {
                layer_us: 58.0,
                step_ms: 0.0,
                sequence_us: 47.0,
                prompt_layer_ms: 0.68,
                steps_to_first: 0.8,
                admission_ms: 148.0,
                crowding: 0.06,
                prompts_first: true,
                balancing_steps: 0.0,
            },
            Engine::TensorRtLlm => Habits {
                layer_us: 51.0,
                step_ms: 0.1,
                sequence_us: 14.0,
                prompt_layer_ms: 0.9,
                steps_to_first: 2.9,
                admission_ms: 1.3,
                crowding: 0.0,
                prompts_first: false,
                balancing_steps: 39.0,
            },
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Engine {
    type Err = ServingError;

    fn from_str(text: &str) -> Result<Engine, ServingError> {
        Engine::ALL
            .into_iter()
            .find(|engine| engine.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| ServingError::UnknownEngine {
                name: text.chars().take(80).collect(),
            })
    }
}
