//! The matrices of a layer that every token meets, as one GPU of a tensor-parallel group has them.

use super::{Experts, Feed, Mixer, Stack};

/// A matrix of weights: `depth` in, `columns` out, for this share of the tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    pub columns: f64,
    pub depth: f64,
    /// Below one where the GPUs of a tensor-parallel group divide tokens instead of the matrix.
    pub tokens: f64,
}

impl Stack {
    /// The matrices of one layer without its routed experts, divided among `tensor` GPUs.
    pub fn weights(&self, hidden: f64, tensor: f64) -> Vec<Weights> {
        let mut weights = Vec::with_capacity(8);
        if let Some(mixer) = self.mixer {
            mixer.weights(hidden, tensor, &mut weights);
        }
        match self.feed {
            Some(Feed::Dense { inner, gated }) => up_and_down(hidden, f64::from(inner), gated, tensor, &mut weights),
            Some(Feed::Experts(experts)) => experts.weights(hidden, tensor, &mut weights),
            None => {}
        }
        weights
    }
}

impl Mixer {
    /// The width of what is mixed: all heads together.
    pub fn width(&self) -> f64 {
        let (heads, head) = match *self {
            Mixer::Attention { heads, head, .. } | Mixer::StateSpace { heads, head, .. } => (heads, head),
            Mixer::Latent { heads, nope, rope, .. } => (heads, nope + rope),
            Mixer::Delta { value_heads, value, .. } => (value_heads, value),
        };
        f64::from(heads) * f64::from(head)
    }

    /// Whether tokens see each other pairwise.
    pub fn attends(&self) -> bool {
        matches!(self, Mixer::Attention { .. } | Mixer::Latent { .. })
    }

    fn weights(&self, hidden: f64, tensor: f64, out: &mut Vec<Weights>) {
        let mut push = |columns: f64, depth: f64| out.push(Weights::whole(columns, depth));
        let wide = self.width();
        match *self {
            Mixer::Attention {
                kv_heads,
                head,
                narrow,
                gated,
                ..
            } => {
                let keys = 2.0 * f64::from(kv_heads) * f64::from(head);
                let gate = if gated { wide } else { 0.0 };
                match narrow {
                    None => {
                        push((wide + gate + keys) / tensor, hidden);
                        push(hidden, wide / tensor);
                    }
                    Some(narrow) => {
                        let (query, groups) = (f64::from(narrow.query), f64::from(narrow.groups));
                        let output = f64::from(narrow.output) * groups;
                        push(query, hidden);
                        push((wide + gate) / tensor, query);
                        push(keys, hidden);
                        push(output, wide / groups / tensor);
                        push(hidden, output / tensor);
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
                push(query, hidden);
                push(wide / tensor, query);
                push(kv + f64::from(rope), hidden);
                push(heads * f64::from(nope + value) / tensor, kv);
                push(hidden, heads * f64::from(value) / tensor);
            }
            Mixer::StateSpace {
                heads, state, groups, ..
            } => {
                let states = 2.0 * f64::from(groups) * f64::from(state);
                push((2.0 * wide + states + f64::from(heads)) / tensor, hidden);
                push(hidden, wide / tensor);
            }
            Mixer::Delta {
                key_heads,
                value_heads,
                key,
                ..
            } => {
                let keys = 2.0 * f64::from(key_heads) * f64::from(key);
                push((keys + 2.0 * wide + 2.0 * f64::from(value_heads)) / tensor, hidden);
                push(hidden, wide / tensor);
            }
        }
    }
}

impl Experts {
    fn weights(&self, hidden: f64, tensor: f64, out: &mut Vec<Weights>) {
        if self.shared > 0 {
            up_and_down(hidden, f64::from(self.shared), self.gated, tensor, out);
        }
        if let Some(latent) = self.latent {
            let (latent, tokens) = (f64::from(latent), 1.0 / tensor);
            let way = |columns, depth| Weights { columns, depth, tokens };
            out.extend([way(latent, hidden), way(hidden, latent)]);
        }
    }
}

impl Weights {
    fn whole(columns: f64, depth: f64) -> Weights {
        Weights {
            columns,
            depth,
            tokens: 1.0,
        }
    }
}

fn up_and_down(hidden: f64, inner: f64, gated: bool, tensor: f64, out: &mut Vec<Weights>) {
    let up = if gated { 2.0 * inner } else { inner };
    out.extend([
        Weights::whole(up / tensor, hidden),
        Weights::whole(hidden, inner / tensor),
    ]);
}
