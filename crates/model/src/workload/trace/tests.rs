use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::harness;

fn h100() -> System {
    System::named("dgx-h100").unwrap()
}

#[test]
fn what_does_not_depend_overlaps() {
    let node = |id: u32, after: &str, more: &str| format!(r#"{{"id": {id}, "data_deps": [{after}], {more}}}"#);
    let compute = r#""type": 4, "duration_micros": 5000"#;
    let sum =
        r#""type": 7, "attr": [{"name": "comm_type", "int64_val": 0}, {"name": "comm_size", "int64_val": 104857600}]"#;
    let apart = format!("[{}, {}]", node(1, "", compute), node(2, "", sum));
    let chained = format!("[{}, {}]", node(1, "", compute), node(2, "1", sum));
    let apart = ExecutionTrace::read(apart.as_bytes())
        .unwrap()
        .replay(&h100(), 8)
        .unwrap();
    let chained = ExecutionTrace::read(chained.as_bytes())
        .unwrap()
        .replay(&h100(), 8)
        .unwrap();
    assert!((apart.seconds - 5e-3).abs() < 1e-9);
    assert!((chained.seconds - 5e-3 - chained.communication).abs() < 1e-9);
}

#[test]
fn what_is_no_trace_is_refused() {
    let read = |text: &str| ExecutionTrace::read(text.as_bytes()).unwrap_err();
    assert_eq!(read(""), ExecutionTraceError::Empty);
    assert!(matches!(read("{"), ExecutionTraceError::Syntax(_)));
    assert!(matches!(read(r#"{"id": 1}"#), ExecutionTraceError::Missing { .. }));
    assert!(matches!(
        read(r#"[{"id": 1, "type": 4}, {"id": "1", "type": 4}]"#),
        ExecutionTraceError::Twice { id: 1 }
    ));
    let dangling = r#"{"id": 1, "type": "COMP_NODE", "dataDeps": ["7"]}"#;
    assert!(matches!(
        read(dangling),
        ExecutionTraceError::Dangling { before: 7, .. }
    ));
    let circle = r#"[{"id": 1, "type": 4, "data_deps": [2]}, {"id": 2, "type": 4, "data_deps": [1]}]"#;
    assert_eq!(
        ExecutionTrace::read(circle.as_bytes()).unwrap().replay(&h100(), 8),
        Err(ExecutionTraceError::Circle)
    );
}

/// The binary form of nodes.
fn binary(nodes: &[protobuf::Node]) -> Vec<u8> {
    let version = "0.0.4".to_owned();
    let mut out = protobuf::GlobalMetadata { version }.encode_length_delimited_to_vec();
    for node in nodes {
        out.extend(node.encode_length_delimited_to_vec());
    }
    out
}

/// The same in JSON, as `jsonizer` writes it.
fn json(nodes: &[protobuf::Node]) -> String {
    let mut out = serde_json::json!({"version": "0.0.4"}).to_string();
    for node in nodes {
        let strings = |ids: &[u64]| ids.iter().map(u64::to_string).collect::<Vec<_>>();
        let attributes = node.attr.iter().map(|attribute| match attribute.int64_val {
            Some(value) => serde_json::json!({"name": attribute.name, "int64Val": value.to_string()}),
            None => serde_json::json!({"name": attribute.name, "uint32Val": attribute.uint32_val}),
        });
        let node = serde_json::json!({
            "id": node.id.to_string(),
            "type": node.kind,
            "dataDeps": strings(&node.data_deps),
            "ctrlDeps": strings(&node.ctrl_deps),
            "durationMicros": node.duration_micros.to_string(),
            "attr": attributes.collect::<Vec<_>>(),
        });
        out.push_str(&format!("\n{node:#}"));
    }
    out
}

fn any_attribute() -> impl Strategy<Value = protobuf::Attribute> {
    let name = prop::sample::select(vec![
        "comm_type",
        "comm_size",
        "num_ops",
        "tensor_size",
        "root",
        "is_cpu_op",
    ]);
    (name, -1i64..12, any::<bool>()).prop_map(|(name, value, wide)| protobuf::Attribute {
        name: name.to_owned(),
        int64_val: wide.then_some(value),
        uint32_val: (!wide).then_some(value.max(0) as u32),
        ..protobuf::Attribute::default()
    })
}

/// Nodes that wait for earlier ones, now and then for one that there is not.
fn any_nodes() -> impl Strategy<Value = Vec<protobuf::Node>> {
    let node = (
        0i32..9,
        prop::collection::vec(any::<u64>(), 0..3),
        0u64..3000,
        prop::collection::vec(any_attribute(), 0..4),
    );
    prop::collection::vec(node, 1..12).prop_map(|nodes| {
        let nodes = nodes.into_iter().enumerate().map(|(nth, (kind, deps, micros, attr))| {
            let before = |dep: &u64| {
                if dep.is_multiple_of(50) {
                    1 << 40
                } else {
                    1 + dep % (nth as u64).max(1)
                }
            };
            let deps: Vec<u64> = deps.iter().map(before).filter(|_| nth > 0).collect();
            let (data, ctrl) = deps.split_at(deps.len() / 2);
            protobuf::Node {
                id: nth as u64 + 1,
                kind,
                data_deps: data.to_vec(),
                ctrl_deps: ctrl.to_vec(),
                duration_micros: micros / 2,
                attr,
            }
        });
        nodes.collect()
    })
}

#[test]
fn a_file_of_a_tracer_is_read() {
    // Written by hand after the schema: version 0.0.4; node 7, a collective after node 3; fields that we do not know in between.
    let all_reduce = [
        0x08, 7, 0x12, 3, b's', b'u', b'm', 0x18, 7, 0x2a, 1, 3, 0x42, 2, 0x0a, 0, 0x52, 13, 0x0a, 9, b'c', b'o', b'm',
        b'm', b'_', b't', b'y', b'p', b'e', 0x48, 0, 0x52, 15, 0x0a, 9, b'c', b'o', b'm', b'm', b'_', b's', b'i', b'z',
        b'e', 0x48, 0x80, 0x80, 0x40,
    ];
    let compute = [0x08, 3, 0x18, 4, 0x38, 0xe8, 0x07];
    let mut file = vec![7, 0x0a, 5, b'0', b'.', b'0', b'.', b'4', compute.len() as u8];
    file.extend(compute);
    file.push(all_reduce.len() as u8);
    file.extend(all_reduce);
    let trace = ExecutionTrace::read(&file).unwrap();
    assert_eq!(trace.nodes[0].kind, Kind::Recorded(1e-3));
    assert_eq!(trace.nodes[1].after, [0]);
    let collective = Collective::AllReduce;
    assert_eq!(
        trace.nodes[1].kind,
        Kind::Collective {
            collective,
            bytes: 1 << 20
        }
    );
    assert!(trace.replay(&h100(), 8).unwrap().seconds > 1e-3);

    let cut = &file[..file.len() - 1];
    assert_eq!(
        ExecutionTrace::read(cut),
        Err(ExecutionTraceError::Truncated { nth: 2 })
    );
    let no_metadata = &file[8..];
    assert!(matches!(
        ExecutionTrace::read(no_metadata),
        Err(ExecutionTraceError::Message { nth: 0, .. })
    ));
    let endless = [vec![7, 0x0a, 5, b'0', b'.', b'0', b'.', b'4'], vec![0xff; 10]].concat();
    assert!(matches!(
        ExecutionTrace::read(&endless),
        Err(ExecutionTraceError::Message { nth: 1, .. })
    ));
}

proptest! {
    #[test]
    fn both_forms_of_a_trace_say_the_same(nodes in any_nodes()) {
        let (binary, json) = (binary(&nodes), json(&nodes));
        let read = ExecutionTrace::read(&binary);
        prop_assert_eq!(&read, &ExecutionTrace::read(json.as_bytes()));
        if let Ok(trace) = read {
            prop_assert_eq!(trace.replay(&h100(), 8).unwrap().nodes, nodes.len());
        }
    }

    #[test]
    fn nothing_panics(text in ".{0,200}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        harness::trace(text.as_bytes());
        harness::trace(&bytes);
    }

    #[test]
    fn a_changed_trace_is_refused_or_replayed(nodes in any_nodes(), at in any::<usize>(), new in prop::collection::vec(any::<u8>(), 0..4)) {
        for mut file in [binary(&nodes), json(&nodes).into_bytes()] {
            let at = at % file.len();
            file.splice(at..at + 1, new.iter().copied());
            harness::trace(&file);
        }
    }
}
