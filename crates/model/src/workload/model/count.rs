//! Counting: parameters, and the matrix products that a token takes part in.

use super::{Experts, Feed, Mixer, Model, Stack};

impl Model {
    pub fn layers(&self) -> u32 {
        self.stacks.iter().map(|stack| stack.layers).sum()
    }

    /// All parameters, without the extra layers that predict further tokens.
    pub fn parameters(&self) -> f64 {
        let h = f64::from(self.hidden);
        let stacks: f64 = self
            .stacks
            .iter()
            .map(|stack| f64::from(stack.layers) * stack.parameters(h))
            .sum();
        stacks + self.embedding_parameters() + self.output_parameters() + f64::from(self.positions) * h + h
    }

    /// The parameters that one token meets. An embedding is looked up, yet counted, as is the custom.
    pub fn active_parameters(&self) -> f64 {
        let h = f64::from(self.hidden);
        let idle: f64 = self
            .stacks
            .iter()
            .map(|stack| f64::from(stack.layers) * (stack.expert_parameters(h) - stack.active_expert_parameters(h)))
            .sum();
        self.parameters() - idle
    }

    pub fn embedding_parameters(&self) -> f64 {
        f64::from(self.vocabulary) * f64::from(self.hidden)
    }

    /// The output projection, where it is not the embedding.
    pub fn output_parameters(&self) -> f64 {
        if self.tied { 0.0 } else { self.embedding_parameters() }
    }

    /// Multiplications and additions of a forward pass over one sequence, by token: weights, the output projection and the attention
    /// over `context` tokens. With `causal`, a token attends to half of them on average; published rates often count the whole.
    pub fn forward_operations(&self, context: u32, causal: bool) -> f64 {
        let h = f64::from(self.hidden);
        let stacks: f64 = self
            .stacks
            .iter()
            .map(|stack| f64::from(stack.layers) * stack.forward_operations(h, context, causal))
            .sum();
        let predictors = f64::from(self.predictors);
        let deepest = self
            .stacks
            .last()
            .map_or(0.0, |stack| stack.forward_operations(h, context, causal));
        stacks + predictors * (deepest + 4.0 * h * h) + (1.0 + predictors) * 2.0 * self.embedding_parameters()
    }
}

impl Stack {
    /// Parameters of one layer, its norms included.
    pub fn parameters(&self, hidden: f64) -> f64 {
        self.mixer.map_or(0.0, |mixer| mixer.parameters(hidden) + hidden)
            + self.feed.map_or(0.0, |feed| feed.parameters(hidden) + hidden)
    }

    /// Parameters of the routed experts of one layer: what expert parallelism divides.
    pub fn expert_parameters(&self, hidden: f64) -> f64 {
        match self.feed {
            Some(Feed::Experts(experts)) => experts.routed_parameters(hidden),
            _ => 0.0,
        }
    }

    /// Those of them that one token goes through.
    pub fn active_expert_parameters(&self, hidden: f64) -> f64 {
        match self.feed {
            Some(Feed::Experts(experts)) => {
                experts.routed_parameters(hidden) * f64::from(experts.chosen) / f64::from(experts.experts)
            }
            _ => 0.0,
        }
    }

    /// Multiplications and additions of one token through one layer.
    pub fn forward_operations(&self, hidden: f64, context: u32, causal: bool) -> f64 {
        let weights = self.mixer.map_or(0.0, |mixer| mixer.parameters(hidden))
            + self.feed.map_or(0.0, |feed| feed.active_parameters(hidden));
        2.0 * weights + self.mixer.map_or(0.0, |mixer| mixer.mixing_operations(context, causal))
    }
}

impl Mixer {
    /// Parameters of its projections.
    pub fn parameters(&self, hidden: f64) -> f64 {
        match *self {
            Mixer::Attention {
                heads,
                kv_heads,
                head,
                narrow,
                gated,
                ..
            } => {
                let wide = f64::from(heads) * f64::from(head);
                let keys = 2.0 * f64::from(kv_heads) * f64::from(head) * hidden;
                let gate = if gated { hidden * wide } else { 0.0 };
                match narrow {
                    None => 2.0 * hidden * wide + keys + gate,
                    Some(narrow) => {
                        let (query, output) = (f64::from(narrow.query), f64::from(narrow.output));
                        let query = query * (hidden + wide);
                        let output = output * (wide + f64::from(narrow.groups) * hidden);
                        query + output + keys + gate
                    }
                }
            }
            Mixer::Latent {
                heads,
                query_rank,
                kv_rank,
                nope,
                rope,
                value,
            } => {
                let (heads, query, kv) = (f64::from(heads), f64::from(query_rank), f64::from(kv_rank));
                let (nope, rope, value) = (f64::from(nope), f64::from(rope), f64::from(value));
                query * (hidden + heads * (nope + rope))
                    + hidden * (kv + rope)
                    + kv * heads * (nope + value)
                    + heads * value * hidden
            }
            Mixer::StateSpace {
                heads,
                head,
                state,
                groups,
            } => {
                let inner = f64::from(heads) * f64::from(head);
                let states = 2.0 * f64::from(groups) * f64::from(state);
                hidden * (2.0 * inner + states + f64::from(heads)) + inner * hidden + 4.0 * (inner + states)
            }
            Mixer::Delta {
                key_heads,
                value_heads,
                key,
                value,
            } => {
                let keys = 2.0 * f64::from(key_heads) * f64::from(key);
                let values = f64::from(value_heads) * f64::from(value);
                hidden * (keys + 2.0 * values + 2.0 * f64::from(value_heads)) + values * hidden + 4.0 * (keys + values)
            }
        }
    }

    /// Multiplications and additions of one token that meets `context` others, beyond the projections.
    pub fn mixing_operations(&self, context: u32, causal: bool) -> f64 {
        let seen = |window: Option<u32>| {
            let context = f64::from(context);
            let whole = if causal { context / 2.0 } else { context };
            window.map_or(whole, |window| whole.min(f64::from(window)))
        };
        match *self {
            Mixer::Attention {
                heads, head, window, ..
            } => 4.0 * f64::from(heads) * f64::from(head) * seen(window),
            Mixer::Latent {
                heads,
                nope,
                rope,
                value,
                ..
            } => 2.0 * f64::from(heads) * f64::from(nope + rope + value) * seen(None),
            // Within a chunk of 256 tokens the scan is a matrix product; across chunks it is one of states.
            Mixer::StateSpace { heads, head, state, .. } => 7.0 * f64::from(heads) * f64::from(head) * f64::from(state),
            Mixer::Delta {
                value_heads,
                key,
                value,
                ..
            } => 10.0 * f64::from(value_heads) * f64::from(key) * f64::from(value),
        }
    }

    /// Bytes that decoding keeps for each token of the context, or `None` where the state does not grow with it.
    pub fn cached_elements(&self) -> Option<f64> {
        match *self {
            Mixer::Attention { kv_heads, head, .. } => Some(2.0 * f64::from(kv_heads) * f64::from(head)),
            Mixer::Latent { kv_rank, rope, .. } => Some(f64::from(kv_rank + rope)),
            Mixer::StateSpace { .. } | Mixer::Delta { .. } => None,
        }
    }
}

impl Feed {
    pub fn parameters(&self, hidden: f64) -> f64 {
        match self {
            Feed::Dense { inner, gated } => matrices(*gated) * hidden * f64::from(*inner),
            Feed::Experts(experts) => experts.routed_parameters(hidden) + experts.common_parameters(hidden),
        }
    }

    /// The parameters that one token meets.
    pub fn active_parameters(&self, hidden: f64) -> f64 {
        match self {
            Feed::Dense { .. } => self.parameters(hidden),
            Feed::Experts(experts) => {
                experts.routed_parameters(hidden) * f64::from(experts.chosen) / f64::from(experts.experts)
                    + experts.common_parameters(hidden)
            }
        }
    }
}

impl Experts {
    /// The width of what is sent to an expert.
    pub fn width(&self, hidden: f64) -> f64 {
        self.latent.map_or(hidden, f64::from)
    }

    pub fn routed_parameters(&self, hidden: f64) -> f64 {
        f64::from(self.experts) * matrices(self.gated) * self.width(hidden) * f64::from(self.inner)
    }

    /// What every token meets: the router, the shared expert, and the way into the experts' own width and back.
    pub fn common_parameters(&self, hidden: f64) -> f64 {
        hidden * f64::from(self.experts)
            + matrices(self.gated) * hidden * f64::from(self.shared)
            + self.latent.map_or(0.0, |latent| 2.0 * hidden * f64::from(latent))
    }
}

/// How many matrices a feed-forward has.
fn matrices(gated: bool) -> f64 {
    if gated { 3.0 } else { 2.0 }
}
