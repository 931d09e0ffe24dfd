//! `weft bench store`: what it prints, and what it says of traces that are none.

mod support;

use support::*;

fn bench(arguments: &[&str]) -> std::process::Output {
    output(&[&["bench", "store"], arguments].concat())
}

#[test]
fn made_up_sessions_are_the_same_for_a_seed_and_no_policy_beats_the_optimum() {
    let run = || {
        bench(&[
            "--sessions",
            "agents",
            "--count",
            "12",
            "--seed",
            "4",
            "--capacity",
            "5,20",
            "--json",
        ])
    };
    let said = run();
    assert!(said.status.success(), "{}", text(&said.stderr));
    assert_eq!(text(&run().stdout), text(&said.stdout));
    let lines: Vec<serde_json::Value> = text(&said.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 10);
    for few in lines.chunks(5) {
        let rate = |line: &serde_json::Value| line["hit_rate"].as_f64().unwrap();
        let names: Vec<&str> = few.iter().map(|line| line["policy"].as_str().unwrap()).collect();
        assert_eq!(names, ["lru", "arc", "frequency", "adaptive", "optimum"]);
        assert!(
            few.iter()
                .all(|line| rate(line) <= rate(&few[4]) && line["prefill_saved_s"].as_f64().unwrap() > 0.0)
        );
    }
}

#[test]
fn both_forms_of_a_trace_give_the_same_answer() {
    let scratch = Scratch::new("traces");
    let (csv, json) = (scratch.path("a.csv"), scratch.path("a.jsonl"));
    std::fs::write(
        &csv,
        "timestamp_ms,input_tokens,output_tokens,block_ids\n0,60,1,0-3\n5,76,1,0-2 4 5\n",
    )
    .unwrap();
    let lines = "{\"timestamp\": 0, \"input_length\": 60, \"output_length\": 1, \"hash_ids\": [0, 1, 2, 3]}\n\
                 {\"timestamp\": 5, \"input_length\": 76, \"output_length\": 1, \"hash_ids\": [0, 1, 2, 4, 5]}\n";
    std::fs::write(&json, lines).unwrap();
    let table = |path: &std::path::Path| {
        let said = bench(&["--trace", path.to_str().unwrap(), "--capacity", "100"]);
        assert!(said.status.success(), "{}", text(&said.stderr));
        let whole = text(&said.stdout).to_string();
        whole
            .split_once(": 2 requests, 9 blocks read, 6 distinct, 16 tokens each")
            .unwrap()
            .1
            .to_string()
    };
    assert_eq!(table(&csv), table(&json));
    assert!(table(&csv).contains("33.33 %"), "{}", table(&csv));
}

#[test]
fn traces_that_are_none_are_named_with_the_line() {
    let scratch = Scratch::new("no-traces");
    let file = scratch.path("trace");
    let header = "timestamp_ms,input_tokens,output_tokens,block_ids";
    for (content, sentence) in [
        (String::new(), "a trace begins with"),
        (header.to_string(), "there is no request in it"),
        (
            format!("{header}\n0,1,1,0\n0,1,x,0\n"),
            "line 3: `x` is not a number for the tokens of the answer",
        ),
        (
            format!("{header}\n0,1,1,0-99999999999\n"),
            "line 2: a request has at most",
        ),
        (
            "{\"timestamp\": 0}\n".to_string(),
            "line 1: missing field `input_length`",
        ),
        (
            "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[]}\n".to_string(),
            "line 1: the request has no blocks",
        ),
    ] {
        std::fs::write(&file, content).unwrap();
        let said = bench(&["--trace", file.to_str().unwrap()]);
        assert_eq!(said.status.code(), Some(2));
        assert!(
            text(&said.stderr).contains(sentence),
            "{sentence}: {}",
            text(&said.stderr)
        );
    }
    std::fs::write(&file, [0x1f, 0x8b, 8, 0, 0xff]).unwrap();
    let said = bench(&["--trace", file.to_str().unwrap()]);
    assert!(text(&said.stderr).contains("zcat FILE"), "{}", text(&said.stderr));
    for wrong in ["0", "-1", "nan", "5000"] {
        let said = bench(&[&format!("--capacity={wrong}")]);
        assert_eq!(said.status.code(), Some(2), "{wrong}");
    }
}
