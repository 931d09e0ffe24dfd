//! Answers for programs: JSON, comma-separated values, and a trace. Nothing here depends on when or where it is written.

use serde_json::{Value, json};
use weft_sim::scenario::{Answer, Scenario};
use weft_sim::training::Trained;

pub fn json(scenario: &Scenario, answers: &[Answer]) -> String {
    let each = |answer: &Answer| {
        let hot = |hot: &weft_sim::traffic::Hot| {
            json!({
                "link": hot.name,
                "parallel": hot.width,
                "utilisation": rounded(hot.utilisation),
                "carried_bytes": hot.carried.0,
            })
        };
        let mut all = json!({
            "fidelity": answer.fidelity.to_string(),
            "what": answer.what,
            "ranks": answer.ranks,
            "bytes": answer.bytes.0,
            "time_ps": answer.time.as_ps(),
            "messages": answer.messages,
            "classes": answer.classes,
            "events": answer.events,
            "packets": answer.packets,
            "trimmed": answer.trimmed,
            "dropped": answer.dropped,
            "pauses": answer.pauses,
            "hot": answer.hot.iter().map(hot).collect::<Vec<_>>(),
        });
        if let Some(Trained {
            step, parallel, batch, ..
        }) = &answer.trained
        {
            all["training"] = json!({ "parallel": parallel, "batch": batch, "step": step, "fits": step.memory.fits() });
        }
        all
    };
    let all = json!({
        "scenario": scenario.name,
        "seed": scenario.seed,
        "answers": answers.iter().map(each).collect::<Vec<_>>(),
    });
    format!("{all:#}\n")
}

pub const HEADINGS: &str = "fidelity,what,ranks,bytes,time_us,messages,classes,events,packets,trimmed,dropped,pauses";

pub fn csv(answers: &[Answer]) -> String {
    let mut text = format!("{HEADINGS}\n");
    for answer in answers {
        text.push_str(&row(answer));
        text.push('\n');
    }
    text
}

/// One answer as a line, without its end.
pub fn row(answer: &Answer) -> String {
    format!(
        "{},{},{},{},{:.6},{},{},{},{},{},{},{}",
        answer.fidelity,
        answer.what.replace([',', '\n'], " "),
        answer.ranks,
        answer.bytes.0,
        answer.time.as_ps() as f64 * 1e-6,
        answer.messages,
        answer.classes,
        answer.events,
        answer.packets,
        answer.trimmed,
        answer.dropped,
        answer.pauses
    )
}

/// Steps as slices, a fidelity a process and a rank or a stage a thread, in the format that Perfetto and chrome://tracing read.
pub fn trace(answers: &[Answer]) -> String {
    let mut events: Vec<Value> = Vec::new();
    for (process, answer) in answers.iter().enumerate() {
        events.push(json!({
            "name": "process_name",
            "ph": "M",
            "pid": process,
            "args": { "name": format!("{} ({})", answer.fidelity, answer.what) },
        }));
        for span in &answer.spans {
            events.push(json!({
                "name": format!("step {}", span.step),
                "ph": "X",
                "pid": process,
                "tid": span.rank.0,
                "ts": span.begin.as_ps() as f64 * 1e-6,
                "dur": (span.end.as_ps() - span.begin.as_ps()) as f64 * 1e-6,
                "args": {
                    "to": span.to,
                    "from": span.from,
                    "sent_bytes": span.sent.0,
                    "received_bytes": span.received.0,
                    "messages": span.messages,
                },
            }));
        }
        for span in answer.trained.iter().flat_map(|trained| &trained.spans) {
            events.push(json!({
                "name": span.doing.name(),
                "ph": "X",
                "pid": process,
                "tid": span.stage,
                "ts": span.begin.as_ps() as f64 * 1e-6,
                "dur": (span.end.as_ps() - span.begin.as_ps()) as f64 * 1e-6,
                "args": { "microbatch": span.microbatch, "chunk": span.chunk },
            }));
        }
    }
    format!("{}\n", json!({ "traceEvents": events, "displayTimeUnit": "ns" }))
}

fn rounded(value: f64) -> f64 {
    (value * 1e6).round() * 1e-6
}
