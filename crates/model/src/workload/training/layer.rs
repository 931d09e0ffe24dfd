//! What one microbatch takes in all layers, before they are divided into stages.

use super::{StepPart, TrainingJob, Tuned, exchange, software};
use crate::roofline::{Recipe, Roofline};
use crate::system::{Generation, Precision, System};
use crate::workload::model::{Experts, Feed, Mixer, Stack};

/// The time of one microbatch on one GPU, forward and backward, as if it had all layers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Microbatch {
    products: f64,
    rounding: f64,
    mixing: f64,
    streaming: f64,
    experts: f64,
    launches: f64,
    dispatch: f64,
    tensor: f64,
    context: f64,
    recomputing: f64,
    output: f64,
}

/// One GPU at work on one microbatch.
struct Worker<'a> {
    job: &'a TrainingJob,
    system: &'a System,
    roofline: &'a Roofline,
    hidden: f64,
    tensor: f64,
    /// Tokens that matrices see, and those that are left when sequences are divided too.
    tokens: f64,
    divided: f64,
    /// Forward, backward by inputs and, where weights are trained, by weights.
    passes: f64,
    /// 16-bit operations a second, at the peak.
    peak: f64,
}

/// A fused backward pass of attention takes two and a half times the forward one.
const ATTENTION_PASSES: f64 = 3.5;

impl Microbatch {
    pub(super) fn of(job: &TrainingJob, system: &System, roofline: &Roofline, recomputed: f64) -> Microbatch {
        let tokens = job.micro_tokens();
        let tensor = f64::from(job.parallel.tensor);
        let worker = Worker {
            job,
            system,
            roofline,
            hidden: f64::from(job.model.hidden),
            tensor,
            tokens,
            divided: tokens / tensor,
            passes: if job.tuned == Tuned::All { 3.0 } else { 2.0 },
            peak: system.gpu.flops(Precision::Bf16).unwrap_or(f64::INFINITY),
        };
        let mut sum = Microbatch::default();
        for stack in &job.model.stacks {
            let mut layer = worker.layer(stack);
            layer.recomputing = recomputed * layer.forward(worker.passes);
            sum.add(&layer, f64::from(stack.layers));
        }
        let (layers, predictors) = (f64::from(job.model.layers()), f64::from(job.model.predictors));
        sum.scale((layers + predictors) / layers);
        sum.output = (1.0 + predictors) * worker.output();
        sum
    }

    /// All layers.
    pub(super) fn layers(&self) -> f64 {
        self.parts().iter().map(|(_, time)| time).sum::<f64>() - self.output
    }

    pub(super) fn output(&self) -> f64 {
        self.output
    }

    pub(super) fn parts(&self) -> Vec<(StepPart, f64)> {
        vec![
            (StepPart::Products, self.products),
            (StepPart::Rounding, self.rounding),
            (StepPart::Mixing, self.mixing),
            (StepPart::Streaming, self.streaming),
            (StepPart::Experts, self.experts),
            (StepPart::Launches, self.launches),
            (StepPart::Dispatch, self.dispatch),
            (StepPart::Tensor, self.tensor),
            (StepPart::Context, self.context),
            (StepPart::Recomputing, self.recomputing),
            (StepPart::Output, self.output),
        ]
    }

    /// The forward pass within what forward and backward take together.
    fn forward(&self, passes: f64) -> f64 {
        self.products / passes
            + self.mixing / ATTENTION_PASSES
            + (self.streaming + self.experts) / 3.0
            + (self.tensor + self.dispatch) / 2.0
            + self.context / 3.0
    }

    fn add(&mut self, other: &Microbatch, times: f64) {
        self.products += times * other.products;
        self.rounding += times * other.rounding;
        self.mixing += times * other.mixing;
        self.streaming += times * other.streaming;
        self.experts += times * other.experts;
        self.launches += times * other.launches;
        self.dispatch += times * other.dispatch;
        self.tensor += times * other.tensor;
        self.context += times * other.context;
        self.recomputing += times * other.recomputing;
    }

    fn scale(&mut self, by: f64) {
        let once = *self;
        *self = Microbatch::default();
        self.add(&once, by);
    }
}

impl Worker<'_> {
    fn layer(&self, stack: &Stack) -> Microbatch {
        let mut layer = Microbatch::default();
        let mut operands = 0.0;
        for weights in stack.weights(self.hidden, self.tensor) {
            let rows = self.tokens * weights.tokens;
            let operations = 2.0 * rows * weights.columns * weights.depth;
            layer.products += self.passes * (operations / self.roofline.product_rate() + software::AROUND_PRODUCT);
            operands += rows * (weights.columns + weights.depth);
        }
        layer.rounding = self.rounding(operands);
        let mut halves = 0.0;
        if let Some(mixer) = &stack.mixer {
            halves += 1.0;
            layer.mixing = self.mixing(mixer);
            layer.streaming += self.residual();
            let passes = if mixer.attends() {
                software::HEAD_PASSES
            } else {
                software::STATE_PASSES
            };
            layer.streaming += self.roofline.stream(self.divided * mixer.width() * 2.0 * passes);
        }
        if let Some(feed) = &stack.feed {
            layer.streaming += self.residual();
            match feed {
                Feed::Dense { inner, gated } => {
                    halves += 1.0;
                    layer.streaming += self.roofline.stream(self.divided * inner_bytes(*inner, *gated));
                }
                Feed::Experts(experts) => {
                    halves += if experts.shared > 0 { 1.0 } else { 0.0 };
                    self.experts(experts, &mut layer);
                }
            }
        }
        layer.tensor = exchange::tensor(self.job, self.system, halves);
        layer.context = stack
            .mixer
            .map_or(0.0, |mixer| exchange::context(self.job, self.system, &mixer));
        layer
    }

    /// Norms and residual additions of one half of a layer.
    fn residual(&self) -> f64 {
        let tokens = if self.job.software.sequence_parallel {
            self.divided
        } else {
            self.tokens
        };
        self.roofline
            .stream(tokens * self.hidden * 2.0 * software::RESIDUAL_PASSES)
    }

    fn rounding(&self, operands: f64) -> f64 {
        match self.job.recipe {
            Recipe::Nvfp4 => self.roofline.stream(operands * 4.0 * software::ROUNDING_PASSES),
            _ => 0.0,
        }
    }

    fn mixing(&self, mixer: &Mixer) -> f64 {
        let context = self.job.batch.tokens;
        let forward = mixer.mixing_operations(context, true) * self.divided;
        if !mixer.attends() {
            return software::SCAN * 3.0 * forward / (self.peak * 0.3);
        }
        if self.job.software.fused_attention {
            return self.roofline.attention(ATTENTION_PASSES * forward);
        }
        let heads = match *mixer {
            Mixer::Attention { heads, .. } | Mixer::Latent { heads, .. } => f64::from(heads),
            _ => 0.0,
        };
        let whole = mixer.mixing_operations(context, false) * self.divided;
        let scores = self.divided * f64::from(context) * heads * 2.0;
        3.0 * whole / (self.peak * software::SCORE_PRODUCTS) + self.roofline.stream(scores * software::SCORE_PASSES)
    }

    fn experts(&self, experts: &Experts, layer: &mut Microbatch) {
        let job = self.job;
        let (width, inner) = (experts.width(self.hidden), f64::from(experts.inner));
        let matrices = if experts.gated { 3.0 } else { 2.0 };
        let routed = self.divided * f64::from(experts.chosen);
        // The kernel that fuses a loop of experts is for gated ones, in blocks of eight bits or fewer, on Blackwell.
        let fused = job.software.fused_experts
            && experts.gated
            && job.recipe.rounds()
            && self.system.gpu.generation == Generation::Blackwell;
        let operations = 2.0 * routed * matrices * width * inner;
        let mut bytes =
            3.0 * routed * (width * 2.0 * software::SORTING_PASSES + inner_bytes(experts.inner, experts.gated));
        if experts.biased && !fused {
            bytes += routed * inner * 4.0 * software::BIAS_PASSES;
        }
        layer.experts = self.passes * operations / self.roofline.product_rate() + self.roofline.stream(bytes);
        layer.rounding += self.rounding(routed * (2.0 * width + matrices * inner));
        let group = job.parallel.expert;
        let mut exposed = software::DISPATCH_EXPOSED;
        if job.software.hidden_dispatch && job.parallel.chunks > 1 {
            exposed *= software::HIDDEN_DISPATCH_EXPOSED;
        }
        // There and back, forward and backward.
        let way = exchange::dispatch(self.system, self.divided, width * 2.0, experts.chosen, group);
        layer.dispatch = 4.0 * way * exposed;
        if !fused {
            let each = if job.recipe.rounds() {
                software::EXPERT_EACH_ROUNDED
            } else {
                software::EXPERT_EACH
            };
            layer.launches = software::EXPERT_LAYER + f64::from(experts.experts) / f64::from(group) * each;
        }
    }

    /// The output projection, in 16 bits, and the loss.
    fn output(&self) -> f64 {
        let vocabulary = f64::from(self.job.model.vocabulary) / self.tensor;
        let operations = 2.0 * self.tokens * self.hidden * vocabulary;
        3.0 * operations / self.roofline.half_rate()
            + self.roofline.stream(self.tokens * vocabulary * software::LOSS_BYTES)
    }
}

/// What streams through the inner width of a feed-forward, for each token.
fn inner_bytes(inner: u32, gated: bool) -> f64 {
    f64::from(inner) * 2.0 * software::INNER_PASSES * if gated { 2.0 } else { 1.0 }
}
