//! The JSON form of a trace: what Chakra's `jsonizer` writes (objects one after the other), an array of nodes, or an object with `nodes`.

use serde_json::Value;

use super::{ExecutionTraceError, Record};

/// What a file says of its nodes.
pub(super) fn records(text: &[u8]) -> Result<Vec<Record>, ExecutionTraceError> {
    let mut values = Vec::new();
    for value in serde_json::Deserializer::from_slice(text).into_iter::<Value>() {
        match value.map_err(|error| ExecutionTraceError::Syntax(error.to_string()))? {
            Value::Array(many) => values.extend(many),
            Value::Object(mut object) => match object.remove("nodes") {
                Some(Value::Array(many)) => values.extend(many),
                _ => values.push(Value::Object(object)),
            },
            other => values.push(other),
        }
    }
    // Metadata comes first, and is no node.
    values.retain(|value| field(value, &["id"]).is_some());
    values
        .iter()
        .enumerate()
        .map(|(nth, value)| record(nth, value))
        .collect()
}

fn record(nth: usize, value: &Value) -> Result<Record, ExecutionTraceError> {
    let missing = |field| ExecutionTraceError::Missing { nth, field };
    let id = integer(field(value, &["id"])).ok_or_else(|| missing("id"))? as u64;
    let kind = field(value, &["type"]).ok_or_else(|| missing("type"))?;
    let mut record = Record {
        id,
        kind: self::kind(id, kind)?,
        micros: integer(field(value, &["durationMicros", "duration_micros"])).map_or(0, |time| time.max(0) as u64),
        ..Record::default()
    };
    for names in [["dataDeps", "data_deps"], ["ctrlDeps", "ctrl_deps"]] {
        let before = field(value, &names).and_then(Value::as_array).into_iter().flatten();
        record
            .after
            .extend(before.map(|before| integer(Some(before)).unwrap_or(-1) as u64));
    }
    let attributes = field(value, &["attr"]).and_then(Value::as_array);
    for attribute in attributes.into_iter().flatten() {
        let name = attribute.get("name").and_then(Value::as_str);
        if let (Some(name), Some(value)) = (name, integer(field(attribute, INTEGERS))) {
            record.note(name, value);
        }
    }
    Ok(record)
}

/// How an attribute that is an integer, of any width, is written.
const INTEGERS: &[&str] = &[
    "int64Val",
    "int64_val",
    "uint64Val",
    "uint64_val",
    "int32Val",
    "int32_val",
    "uint32Val",
    "uint32_val",
];

/// Types are names, or the numbers behind them.
fn kind(id: u64, kind: &Value) -> Result<i64, ExecutionTraceError> {
    let names = [
        "METADATA_NODE",
        "MEM_LOAD_NODE",
        "MEM_STORE_NODE",
        "COMP_NODE",
        "COMM_SEND_NODE",
        "COMM_RECV_NODE",
        "COMM_COLL_NODE",
    ];
    let known = match kind {
        Value::String(name) => names
            .iter()
            .zip(1..)
            .find(|(known, _)| **known == name)
            .map(|(_, number)| number),
        other => integer(Some(other)),
    };
    known.ok_or_else(|| ExecutionTraceError::Kind {
        id,
        kind: kind.as_str().unwrap_or_default().chars().take(40).collect(),
    })
}

fn field<'a>(value: &'a Value, names: &[&str]) -> Option<&'a Value> {
    names.iter().find_map(|name| value.get(name))
}

/// Protobuf writes 64-bit integers as strings.
fn integer(value: Option<&Value>) -> Option<i64> {
    match value? {
        Value::Number(number) => number.as_i64().or_else(|| number.as_u64().map(|number| number as i64)),
        Value::String(text) => text
            .parse()
            .ok()
            .or_else(|| text.parse().ok().map(|number: u64| number as i64)),
        _ => None,
    }
}
