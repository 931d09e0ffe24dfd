//! When which rank was in which step, and its messages, of some ranks that stand for all.

use weft_plan::{Bytes, Picos, Rank};
use weft_protocol::group::Compiled;

use super::Start;

/// No more than this many steps are kept for a trace, and no more messages than these.
const SPANS_MAX: usize = 1 << 18;
const MESSAGE_SPANS_MAX: usize = 1 << 14;

/// A step of a rank: from when the first of its ops began until the last of them had ended. Ranks run ahead, so that steps overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSpan {
    pub rank: Rank,
    pub step: u32,
    pub begin: Picos,
    pub end: Picos,
    /// Messages that it sent and received.
    pub messages: u32,
    pub sent: Bytes,
    pub received: Bytes,
    /// Of several peers the first. Where ranks are folded, the one that stands for it.
    pub to: Option<Rank>,
    pub from: Option<Rank>,
    /// Whether any of it left the node.
    pub across: bool,
}

/// Messages that nothing tells apart, from when they began until they had arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageSpan {
    pub from: Rank,
    pub to: Rank,
    /// In which step of the sender.
    pub step: u32,
    pub count: u32,
    /// Of each.
    pub bytes: Bytes,
    /// Whether the receiver reduces what comes.
    pub reduces: bool,
    pub begin: Picos,
    pub end: Picos,
}

/// What a message is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct About {
    pub(super) sends: bool,
    pub(super) peer: Rank,
    pub(super) bytes: f64,
    pub(super) across: bool,
}

/// Spans that are kept.
#[derive(Debug)]
pub(crate) struct Spans {
    pub(crate) steps: Vec<StepSpan>,
    pub(crate) messages: Vec<MessageSpan>,
    /// Every how many actors one is traced; none where it is zero.
    stride: u32,
    /// By traced actor: the steps that it is in.
    open: Vec<Vec<Open>>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    span: StepSpan,
    /// Ops of it that have not ended.
    left: u32,
    sent: f64,
    received: f64,
}

impl Spans {
    pub(super) fn new(actors: u32, steps: u32, wanted: u32) -> Spans {
        // Fewer ranks, rather than a trace that breaks off.
        let most = u32::try_from(SPANS_MAX).unwrap_or(u32::MAX) / steps.max(1);
        let stride = match wanted {
            0 => 0,
            wanted => actors.div_ceil(wanted.min(most.max(1))).max(1),
        };
        Spans {
            steps: Vec::new(),
            messages: Vec::new(),
            stride,
            open: vec![Vec::new(); actors.checked_div(stride).map_or(0, |whole| whole as usize + 1)],
        }
    }

    pub(super) fn is_traced(&self, actor: u32) -> bool {
        self.stride > 0 && actor.is_multiple_of(self.stride)
    }

    /// An op of a traced actor begins.
    pub(super) fn begins(
        &mut self,
        compiled: &Compiled,
        (actor, rank, op): (u32, Rank, u32),
        about: Option<About>,
        now: u64,
    ) {
        let step = compiled.listed(op).0;
        let open = &mut self.open[(actor / self.stride) as usize];
        let nth = open.iter().position(|open| open.span.step == step).unwrap_or_else(|| {
            open.push(Open {
                span: StepSpan {
                    rank,
                    step,
                    begin: Picos::from_ps(now),
                    ..StepSpan::default()
                },
                left: ops_of(compiled, step),
                sent: 0.0,
                received: 0.0,
            });
            open.len() - 1
        });
        let Open {
            span, sent, received, ..
        } = &mut open[nth];
        let Some(about) = about else { return };
        span.messages = span.messages.saturating_add(1);
        span.across |= about.across;
        match about.sends {
            true => {
                *sent += about.bytes;
                span.to.get_or_insert(about.peer);
            }
            false => {
                *received += about.bytes;
                span.from.get_or_insert(about.peer);
            }
        }
    }

    /// So many ops of a step of a traced actor end, of which this is one.
    pub(super) fn ends(&mut self, compiled: &Compiled, (actor, op): (u32, u32), count: u32, now: u64) {
        let step = compiled.listed(op).0;
        let open = &mut self.open[(actor / self.stride) as usize];
        let Some(nth) = open.iter().position(|open| open.span.step == step) else {
            return;
        };
        open[nth].left -= count;
        if open[nth].left > 0 {
            return;
        }
        let done = open.swap_remove(nth);
        if self.steps.len() < SPANS_MAX {
            self.steps.push(StepSpan {
                end: Picos::from_ps(now),
                sent: Bytes(done.sent as u64),
                received: Bytes(done.received as u64),
                ..done.span
            });
        }
    }

    /// Messages from or to a traced actor are there.
    pub(super) fn message(
        &mut self,
        start: &Start,
        (from, to): (Rank, Rank),
        step: u32,
        reduces: bool,
        (begun, there): (u64, u64),
    ) {
        if self.messages.len() < MESSAGE_SPANS_MAX {
            self.messages.push(MessageSpan {
                from,
                to,
                step,
                count: start.count,
                bytes: Bytes(start.bytes as u64),
                reduces,
                begin: Picos::from_ps(begun),
                end: Picos::from_ps(there),
            });
        }
    }
}

/// How many ops a step has. They are listed step by step.
fn ops_of(compiled: &Compiled, step: u32) -> u32 {
    let before = |step: u32| {
        let (mut low, mut high) = (0, compiled.len() as u32);
        while low < high {
            let middle = low + (high - low) / 2;
            match compiled.listed(middle).0 < step {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    };
    before(step + 1) - before(step)
}
