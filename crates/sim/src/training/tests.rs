use super::pipeline::{Lengths, Shape, Turn};
use super::*;

#[test]
fn a_plain_pipeline_takes_as_long_as_its_closed_form() {
    let shape = Shape {
        stages: 4,
        chunks: 1,
        microbatches: 8,
    };
    let lengths = Lengths {
        forward: 1.0,
        backward: 2.0,
    };
    assert_eq!(end(shape, lengths), (8.0 + 3.0) * 3.0);
}

#[test]
fn chunks_shorten_the_bubble() {
    let shape = Shape {
        stages: 4,
        chunks: 2,
        microbatches: 8,
    };
    let lengths = Lengths {
        forward: 0.5,
        backward: 1.0,
    };
    assert_eq!(end(shape, lengths), (8.0 + 3.0 / 2.0) * 3.0);
}

fn end(shape: Shape, lengths: Lengths) -> f64 {
    shape.turns(lengths).iter().map(|turn| turn.end).fold(0.0, f64::max)
}

/// Everything passes once, a stage does one thing at a time, and nobody goes before it can.
#[test]
fn turns_are_whole() {
    for stages in 1..7 {
        for chunks in 1..4 {
            for microbatches in 1..15 {
                check(Shape {
                    stages,
                    chunks,
                    microbatches,
                });
            }
        }
    }
}

fn check(shape: Shape) {
    let lengths = Lengths {
        forward: 1.0,
        backward: 2.0,
    };
    let mut turns = shape.turns(lengths);
    let whole = 2 * shape.stages * shape.chunks * shape.microbatches;
    assert_eq!(turns.len() as u32, whole, "{shape:?}");
    turns.sort_by(|a, b| a.stage.cmp(&b.stage).then(a.begin.total_cmp(&b.begin)));
    for pair in turns.windows(2) {
        assert!(pair[0].stage != pair[1].stage || pair[0].end <= pair[1].begin);
    }
    for turn in &turns {
        let end = |doing, stage| {
            let there = |other: &&Turn| {
                let of = |turn: &Turn| (turn.microbatch, turn.chunk);
                (other.doing, other.stage) == (doing, stage) && of(other) == of(turn)
            };
            turns.iter().find(there).map(|other| other.end).unwrap()
        };
        let since = match turn.doing {
            Doing::Forward if turn.stage > 0 => end(Doing::Forward, turn.stage - 1),
            Doing::Forward => 0.0,
            _ if turn.stage + 1 < shape.stages => end(Doing::Backward, turn.stage + 1),
            _ => end(Doing::Forward, turn.stage),
        };
        assert!(since <= turn.begin, "{shape:?} {turn:?}");
    }
}

#[test]
fn a_step_ends_when_the_closed_form_says() {
    let choice = TrainingChoice {
        model: "llama-3.1-405b".into(),
        gpus: None,
        precision: Recipe::Bf16,
        parallel: Some(Parallel {
            tensor: 8,
            pipeline: 8,
            chunks: 8,
            context: 2,
            ..Parallel::default()
        }),
        batch: TrainingBatch {
            sequences: 256,
            micro: 1,
            tokens: 8192,
        },
        recompute: Recomputation::default(),
    };
    let system = System::named("dgx-h100").unwrap();
    let trained = train(&choice.job(&system, 512).unwrap(), &system).unwrap();
    let end = trained.spans.iter().map(|span| span.end).max().unwrap();
    assert!((end.as_secs_f64() / trained.step.seconds - 1.0).abs() < 1e-9);
    let stages: std::collections::BTreeSet<u32> = trained.spans.iter().map(|span| span.stage).collect();
    assert_eq!(stages.len(), 8);
    assert!(trained.spans.iter().any(|span| span.doing == Doing::Exchange));
}
