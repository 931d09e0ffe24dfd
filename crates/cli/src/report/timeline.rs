//! Who did what when, thinned to what a page can hold: fewer ranks first, then several steps as one.

use serde::Serialize;
use weft_plan::Rank;
use weft_sim::scenario::Answer;
use weft_sim::traffic::{MessageSpan, StepSpan};
use weft_sim::training::{Doing, Trained};

/// So many slices and messages are written, of so many lanes.
const SLICES_MAX: usize = 24_000;
const MESSAGES_MAX: usize = 12_000;
const LANES_MAX: usize = 64;

#[derive(Debug, Serialize)]
pub struct Timeline {
    name: String,
    title: &'static str,
    note: String,
    /// What a slice is: `step`, `transfer` or `microbatch`.
    unit: &'static str,
    lanes: Vec<String>,
    ranks: Vec<u32>,
    kinds: Vec<&'static str>,
    end_ps: u64,
    slices: Vec<Slice>,
    messages: Vec<Message>,
}

/// Lane, begin, end, kind; first step and how many, or microbatch and chunk; messages, bytes sent and received, to and from. What there is
/// not is -1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Slice(u32, u64, u64, u32, i64, u32, u32, u64, u64, i64, i64);

/// Begin, end, from, to, step, bytes, how many, whether they are reduced.
#[derive(Clone, Copy, Debug, Serialize)]
struct Message(u64, u64, u32, u32, u32, u64, u32, bool);

impl Timeline {
    /// What an answer tells of time; `None` where it tells a time alone.
    pub fn of(answer: &Answer) -> Option<Timeline> {
        let name = answer.fidelity.to_string();
        let timeline = match &answer.trained {
            Some(trained) => training(name, trained),
            None if !answer.spans.is_empty() => steps(name, answer),
            None if !answer.message_spans.is_empty() => transfers(name, answer),
            None => return None,
        };
        (timeline.end_ps > 0 && !timeline.slices.is_empty()).then_some(timeline)
    }
}

fn steps(name: String, answer: &Answer) -> Timeline {
    let mut ranks: Vec<Rank> = answer.spans.iter().map(|span| span.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    // A lane that shows every step is worth more than a further lane.
    let longest = answer.spans.len().div_ceil(ranks.len().max(1));
    let lanes = (SLICES_MAX / longest.max(1)).clamp(4, LANES_MAX).min(ranks.len());
    let ranks = spread(&ranks, lanes);
    let merged = longest.div_ceil(SLICES_MAX / ranks.len().max(1)).max(1);
    let mut slices = Vec::new();
    for (lane, &rank) in (0..).zip(&ranks) {
        let mut own: Vec<&StepSpan> = answer.spans.iter().filter(|span| span.rank == rank).collect();
        own.sort_by_key(|span| span.step);
        slices.extend(own.chunks(merged).map(|some| step_slice(lane, some)));
    }
    let messages = messages(&answer.message_spans, &ranks);
    let mut note = shown(ranks.len(), answer.ranks, "ranks");
    if answer.classes < answer.ranks {
        note.push_str(&format!(
            " Ranks that are alike were simulated once, {} for all; a peer is the one that stands for it.",
            answer.classes
        ));
    }
    if merged > 1 {
        note.push_str(&format!(" {merged} steps are drawn as one."));
    }
    note.push_str(" Wheel: zoom. Drag: move.");
    if !messages.is_empty() {
        note.push_str(" Click a rank to see its messages.");
    }
    Timeline {
        name,
        title: "Timeline of ranks",
        note,
        unit: "step",
        lanes: ranks.iter().map(|rank| format!("rank {}", rank.0)).collect(),
        ranks: ranks.iter().map(|rank| rank.0).collect(),
        kinds: vec!["within the node", "between nodes", "on its own"],
        end_ps: answer.time.as_ps(),
        slices,
        messages,
    }
}

/// Steps of one rank that follow each other, as one.
fn step_slice(lane: u32, steps: &[&StepSpan]) -> Slice {
    let (first, last) = (steps[0], steps[steps.len() - 1]);
    let sum = |of: fn(&StepSpan) -> u64| steps.iter().map(|span| of(span)).fold(0, u64::saturating_add);
    let messages = sum(|span| span.messages.into());
    let kind = match (messages, steps.iter().any(|span| span.across)) {
        (0, _) => 2,
        (_, across) => u32::from(across),
    };
    Slice(
        lane,
        first.begin.as_ps(),
        last.end.as_ps(),
        kind,
        first.step.into(),
        steps.len() as u32,
        u32::try_from(messages).unwrap_or(u32::MAX),
        sum(|span| span.sent.0),
        sum(|span| span.received.0),
        peer(first.to),
        peer(first.from),
    )
}

fn messages(spans: &[MessageSpan], ranks: &[Rank]) -> Vec<Message> {
    let ours = |span: &&MessageSpan| ranks.binary_search(&span.from).is_ok() || ranks.binary_search(&span.to).is_ok();
    let message = |span: &MessageSpan| {
        let MessageSpan {
            from,
            to,
            step,
            count,
            bytes,
            reduces,
            begin,
            end,
        } = *span;
        Message(begin.as_ps(), end.as_ps(), from.0, to.0, step, bytes.0, count, reduces)
    };
    spans.iter().filter(ours).take(MESSAGES_MAX).map(message).collect()
}

/// Every sender a lane, every transfer a slice.
fn transfers(name: String, answer: &Answer) -> Timeline {
    let mut ranks: Vec<Rank> = answer.message_spans.iter().map(|span| span.from).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let senders = ranks.len();
    let ranks = spread(&ranks, LANES_MAX);
    let slice = |span: &MessageSpan| {
        let lane = ranks.binary_search(&span.from).ok()?;
        Some(Slice(
            lane as u32,
            span.begin.as_ps(),
            span.end.as_ps(),
            0,
            0,
            1,
            1,
            span.bytes.0,
            0,
            span.to.0.into(),
            -1,
        ))
    };
    let slices = answer.message_spans.iter().filter_map(slice).take(SLICES_MAX).collect();
    Timeline {
        name,
        title: "Timeline of transfers",
        note: format!(
            "{} Wheel: zoom. Drag: move.",
            shown(ranks.len(), senders as u32, "senders")
        ),
        unit: "transfer",
        lanes: ranks.iter().map(|rank| format!("rank {}", rank.0)).collect(),
        ranks: ranks.iter().map(|rank| rank.0).collect(),
        kinds: vec!["transfer"],
        end_ps: answer.time.as_ps(),
        slices,
        messages: Vec::new(),
    }
}

/// Every stage of the pipeline a lane.
fn training(name: String, trained: &Trained) -> Timeline {
    let all: Vec<u32> = (0..trained.parallel.pipeline).collect();
    let longest = trained.spans.len() / all.len().max(1);
    let lanes = (SLICES_MAX / longest.max(1)).clamp(1, LANES_MAX);
    let stages = spread(&all, lanes);
    let slice = |span: &weft_sim::training::StageSpan| {
        let lane = stages.binary_search(&span.stage).ok()?;
        let kind = Doing::ALL.iter().position(|doing| *doing == span.doing)?;
        Some(Slice(
            lane as u32,
            span.begin.as_ps(),
            span.end.as_ps(),
            kind as u32,
            span.microbatch.map_or(-1, i64::from),
            span.chunk,
            0,
            0,
            0,
            -1,
            -1,
        ))
    };
    let slices = trained.spans.iter().filter_map(slice).take(SLICES_MAX).collect();
    let end = trained.spans.iter().map(|span| span.end.as_ps()).max().unwrap_or(0);
    Timeline {
        name,
        title: "Timeline of pipeline stages",
        note: format!(
            "{} A stage is as many GPUs that do the same. Gaps are the bubble. Wheel: zoom. Drag: move.",
            shown(stages.len(), trained.parallel.pipeline, "stages")
        ),
        unit: "microbatch",
        lanes: stages.iter().map(|stage| format!("stage {stage}")).collect(),
        ranks: stages.clone(),
        kinds: Doing::ALL.map(Doing::name).to_vec(),
        end_ps: end,
        slices,
        messages: Vec::new(),
    }
}

/// Some of them, spread evenly.
fn spread<T: Copy>(all: &[T], most: usize) -> Vec<T> {
    let stride = all.len().div_ceil(most.max(1)).max(1);
    all.iter().copied().step_by(stride).collect()
}

fn shown(some: usize, all: u32, what: &str) -> String {
    match some as u64 == u64::from(all) {
        true => format!("All {all} {what}."),
        false => format!("{some} of {all} {what}, spread evenly."),
    }
}

fn peer(rank: Option<Rank>) -> i64 {
    rank.map_or(-1, |rank| rank.0.into())
}

#[cfg(test)]
mod tests {
    use weft_sim::scenario::Scenario;

    use super::*;

    fn timelines(text: &str) -> Vec<Timeline> {
        let answers = Scenario::from_toml(text).unwrap().run().unwrap();
        answers.iter().filter_map(Timeline::of).collect()
    }

    #[test]
    fn a_ring_is_shown_step_by_step() {
        let shown = timelines(Scenario::shipped("ring").unwrap());
        assert_eq!(shown.len(), 2);
        // Of flows, the ranks of a node stand for all.
        assert_eq!((shown[0].lanes.len(), shown[0].slices.len()), (8, 8 * 62));
        assert_eq!((shown[1].lanes.len(), shown[1].slices.len()), (32, 32 * 62));
        let first = shown[1].slices[0];
        assert_eq!((first.9, first.10, first.7, first.3), (1, 31, 1 << 19, 1));
        assert!(!shown[0].messages.is_empty());
    }

    #[test]
    fn many_steps_are_drawn_as_one() {
        let text = "name = 'long'\nfidelities = ['flow']\n[cluster.fabric.single-switch]\nports = 16384\n\
                    wire = { bandwidth = '100 Gb/s', latency = '1 µs' }\n\
                    [workload.collective]\ncollective = 'all-reduce'\nalgorithm = 'ring'\nbytes = '1 GiB'\n";
        let shown = timelines(text);
        let timeline = &shown[0];
        let steps = 2 * (16_384 - 1);
        assert_eq!((timeline.lanes.len(), timeline.slices.len()), (1, steps / 2));
        assert!(timeline.note.contains("2 steps are drawn as one"));
        let last = timeline.slices.iter().map(|slice| slice.2).max();
        assert_eq!(last, Some(timeline.end_ps));
    }

    #[test]
    fn stages_of_a_pipeline_are_lanes() {
        let shown = timelines(Scenario::shipped("training").unwrap());
        assert_eq!((shown[0].lanes.len(), shown[0].unit), (8, "microbatch"));
        assert!(shown[0].slices.len() <= SLICES_MAX);
    }
}
