//! A program for people: as text, one line a rank and step, and as a space-time diagram in SVG.
//!
//! ```
//! use weft_plan::algorithms::Ring;
//! use weft_plan::collective::{Collective, Problem, Sizes};
//! use weft_plan::schedule::render;
//! let problem = Problem::new(Collective::AllGather { sizes: Sizes::Equal }, 2);
//! let shown = render::text(&problem, &Ring::new(problem).unwrap(), &render::Limits::default());
//! assert_eq!(shown, "\
//! all-gather among 2 ranks: 1 step, 1 piece a block
//! step 0
//!   rank 0  copy input[0] to output[0]; send input[0] to 1; receive output[1] from 1
//!   rank 1  copy input[0] to output[1]; send input[0] to 0; receive output[0] from 0
//! ");
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt::Write;

use super::{Channel, Op, Ops, Program};
use crate::collective::Problem;
use crate::units::Rank;

/// How much is shown: of a program for a hundred thousand ranks nobody wants to see all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub ranks: u32,
    pub steps: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { ranks: 64, steps: 256 }
    }
}

/// Every step with what the ranks do in it. What is beyond the limits is counted.
pub fn text(problem: &Problem, program: &dyn Program, limits: &Limits) -> String {
    let shape = program.shape();
    let mut text = format!(
        "{} among {}{}: {}, {} a block",
        problem.collective,
        plural(shape.ranks, "rank"),
        if problem.in_place { " in place" } else { "" },
        plural(shape.steps, "step"),
        plural(shape.pieces, "piece"),
    );
    if shape.scratch > 0 {
        let _ = write!(text, ", {} of scratch", plural(shape.scratch, "chunk"));
    }
    text.push('\n');
    let (ranks, steps) = (shape.ranks.min(limits.ranks), shape.steps.min(limits.steps));
    let width = ranks.saturating_sub(1).to_string().len();
    let mut ops = Ops::new();
    for step in 0..steps {
        let _ = writeln!(text, "step {step}");
        for rank in 0..ranks {
            let list = ops.fill(program, Rank(rank), step);
            if !list.is_empty() {
                let list: Vec<String> = list.iter().map(Op::to_string).collect();
                let _ = writeln!(text, "  rank {rank:>width$}  {}", list.join("; "));
            }
        }
    }
    if ranks < shape.ranks || steps < shape.steps {
        let _ = writeln!(
            text,
            "not shown: {} and {}",
            plural(shape.ranks - ranks, "rank"),
            plural(shape.steps - steps, "step")
        );
    }
    text
}

fn plural(count: u32, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

const COLUMN: u32 = 120;
const ROW: u32 = 44;
const LEFT: u32 = 90;
const TOP: u32 = 64;
/// One colour for each chunk, round and round; all legible on white and on black.
const COLOURS: [&str; 8] = [
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#e377c2", "#8c564b",
];

/// Ranks from left to right, time from top to bottom, and every message an arrow in the colour of its first chunk: dashed where it is
/// reduced into what lies there. Steps are drawn as if all ranks took them together.
pub fn svg(problem: &Problem, program: &dyn Program, limits: &Limits) -> String {
    let shape = program.shape();
    let (ranks, steps) = (shape.ranks.min(limits.ranks), shape.steps.min(limits.steps));
    let (width, height) = (LEFT + ranks * COLUMN, TOP + steps * ROW + 40);
    let x = |rank: u32| LEFT + rank * COLUMN + COLUMN / 2;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <defs>\n"
    );
    for (nth, colour) in COLOURS.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<marker id=\"head{nth}\" markerWidth=\"8\" markerHeight=\"8\" refX=\"7\" refY=\"3\" orient=\"auto\">\
             <path d=\"M0,0 L7,3 L0,6 z\" fill=\"{colour}\"/></marker>"
        );
    }
    let _ = writeln!(
        svg,
        "</defs>\n<text x=\"10\" y=\"20\" font-size=\"14\">{} among {}: {}</text>",
        problem.collective,
        plural(shape.ranks, "rank"),
        plural(shape.steps, "step")
    );
    for rank in 0..ranks {
        let _ = writeln!(
            svg,
            "<text x=\"{0}\" y=\"44\" text-anchor=\"middle\">rank {rank}</text>\
             <line x1=\"{0}\" y1=\"52\" x2=\"{0}\" y2=\"{1}\" stroke=\"#999\"/>",
            x(rank),
            height - 10
        );
    }
    for step in 0..steps {
        let y = TOP + step * ROW;
        let _ = writeln!(
            svg,
            "<text x=\"10\" y=\"{}\" fill=\"#666\">step {step}</text>\
             <line x1=\"{LEFT}\" y1=\"{y}\" x2=\"{width}\" y2=\"{y}\" stroke=\"#eee\"/>",
            y + ROW / 2
        );
    }
    for message in messages(program, ranks, steps) {
        let colour = message.chunk as usize % COLOURS.len();
        let dash = if message.reduced {
            " stroke-dasharray=\"5 3\""
        } else {
            ""
        };
        let (x1, x2) = (x(message.from.0), x(message.to.0));
        let (y1, y2) = (
            TOP + message.sent * ROW + 6,
            TOP + message.taken.max(message.sent) * ROW + ROW - 6,
        );
        let _ = writeln!(
            svg,
            "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"{0}\" stroke-width=\"1.5\"{dash} \
             marker-end=\"url(#head{colour})\"><title>{1} to {2}: {3}</title></line>",
            COLOURS[colour], message.from, message.to, message.what
        );
    }
    if ranks < shape.ranks || steps < shape.steps {
        let _ = writeln!(
            svg,
            "<text x=\"10\" y=\"{}\" fill=\"#666\">not shown: {} and {}</text>",
            height - 6,
            plural(shape.ranks - ranks, "rank"),
            plural(shape.steps - steps, "step")
        );
    }
    svg.push_str("</svg>\n");
    svg
}

struct Message {
    from: Rank,
    to: Rank,
    sent: u32,
    taken: u32,
    chunk: u32,
    reduced: bool,
    what: String,
}

/// The messages between the first ranks in the first steps, in order.
fn messages(program: &dyn Program, ranks: u32, steps: u32) -> Vec<Message> {
    let mut ops = Ops::new();
    let mut receives: HashMap<(Rank, Rank, Channel), VecDeque<(u32, bool)>> = HashMap::new();
    for rank in (0..ranks).map(Rank) {
        for step in 0..steps {
            for op in ops.fill(program, rank, step) {
                if let Op::Receive { from, channel, .. } | Op::ReceiveReduce { from, channel, .. } = *op {
                    let reduced = matches!(op, Op::ReceiveReduce { .. });
                    let list = receives.entry((from, rank, channel)).or_default();
                    list.push_back((step, reduced));
                }
            }
        }
    }
    let mut messages = Vec::new();
    for from in (0..ranks).map(Rank) {
        for step in 0..steps {
            for op in ops.fill(program, from, step) {
                if let Op::Send { to, slice, channel } = *op
                    && let Some((taken, reduced)) = receives.get_mut(&(from, to, channel)).and_then(VecDeque::pop_front)
                {
                    messages.push(Message {
                        from,
                        to,
                        sent: step,
                        taken,
                        chunk: slice.first,
                        reduced,
                        what: slice.to_string(),
                    });
                }
            }
        }
    }
    messages
}
