//! Chakra execution traces: a step as somebody recorded it, replayed on a system.
//!
//! A trace is a graph of nodes: compute of a known duration or so many operations, and collectives of so many bytes. [`Trace::read`] takes the JSON form
//! that Chakra's own `jsonizer` writes (objects one after the other), an array of nodes, or an object with `nodes`. The binary protobuf form must be
//! converted first; sends and receives are priced as if their peer were ready, and memory nodes by the GPU's bandwidth.
//!
//! ```
//! use weft_plan::platform::System;
//! use weft_plan::workload::trace::Trace;
//! let text = r#"{"version": "0.0.4"}
//! {"id": "1", "name": "forward", "type": "COMP_NODE", "durationMicros": "1000"}
//! {"id": "2", "name": "sum", "type": "COMM_COLL_NODE", "dataDeps": ["1"],
//!  "attr": [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val": "1048576"}]}"#;
//! let replay = Trace::read(text)?.replay(&System::named("dgx-h100").unwrap(), 8)?;
//! assert!(replay.seconds > 1e-3 && replay.communication > 0.0);
//! # Ok::<(), weft_plan::workload::trace::TraceError>(())
//! ```

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

use crate::collective::{Collective, Sizes};
use crate::cost::device::{Device, DeviceError, Options};
use crate::cost::roofline::{Recipe, Roofline, RooflineError};
use crate::platform::System;
use crate::units::{Bytes, Rank};

/// What one rank did in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, PartialEq)]
struct Node {
    kind: Kind,
    /// Places in `nodes` of what must be done before.
    after: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Takes this many seconds, as recorded.
    Recorded(f64),
    /// Operations, and bytes that they touch.
    Compute {
        operations: f64,
        bytes: f64,
    },
    Memory {
        bytes: f64,
    },
    Collective {
        collective: Collective,
        bytes: u64,
    },
    Message {
        bytes: f64,
    },
    Nothing,
}

/// What a replay takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Replay {
    pub seconds: f64,
    /// The sum of all compute, and of all communication; what overlaps counts in both.
    pub compute: f64,
    pub communication: f64,
    pub nodes: usize,
}

/// What is wrong with a trace.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum TraceError {
    #[error("{bytes} bytes; {MAX_BYTES} is the most")]
    TooLong { bytes: usize },
    #[error("not JSON: {0}")]
    Syntax(String),
    #[error("node {nth} has no {field}")]
    Missing { nth: usize, field: &'static str },
    #[error("two nodes are called {id}")]
    Twice { id: u64 },
    #[error("node {id} is of the type {kind:?}, which is not known")]
    Kind { id: u64, kind: String },
    #[error("node {id} is a collective of the type {kind}, which is not known")]
    CollectiveKind { id: u64, kind: i64 },
    #[error("node {id} waits for {before}, which there is not")]
    Dangling { id: u64, before: u64 },
    #[error("nodes wait for each other in a circle")]
    Circle,
    #[error("there are no nodes")]
    Empty,
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Roofline(#[from] RooflineError),
}

const MAX_BYTES: usize = 1 << 30;

impl Trace {
    /// Reads the JSON form of a trace.
    pub fn read(text: &str) -> Result<Trace, TraceError> {
        if text.len() > MAX_BYTES {
            return Err(TraceError::TooLong { bytes: text.len() });
        }
        let mut values = Vec::new();
        for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
            match value.map_err(|error| TraceError::Syntax(error.to_string()))? {
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
        let mut places = BTreeMap::new();
        for (nth, value) in values.iter().enumerate() {
            let id = integer(field(value, &["id"])).ok_or(TraceError::Missing { nth, field: "id" })? as u64;
            if places.insert(id, nth).is_some() {
                return Err(TraceError::Twice { id });
            }
        }
        let mut nodes = Vec::with_capacity(values.len());
        for (&id, &nth) in &places {
            let value = &values[nth];
            let mut after = Vec::new();
            for names in [["dataDeps", "data_deps"], ["ctrlDeps", "ctrl_deps"]] {
                for before in field(value, &names).and_then(Value::as_array).into_iter().flatten() {
                    let before = integer(Some(before)).unwrap_or(-1) as u64;
                    after.push(*places.get(&before).ok_or(TraceError::Dangling { id, before })?);
                }
            }
            nodes.push((nth, kind(id, nth, value)?, after));
        }
        if nodes.is_empty() {
            return Err(TraceError::Empty);
        }
        nodes.sort_by_key(|(nth, _, _)| *nth);
        let nodes = nodes.into_iter().map(|(_, kind, after)| Node { kind, after }).collect();
        Ok(Trace { nodes })
    }

    /// Replays the trace on a system with `ranks` ranks that do the same. Compute runs one node after the other, and so does communication;
    /// the two overlap as far as the graph allows.
    pub fn replay(&self, system: &System, ranks: u32) -> Result<Replay, TraceError> {
        let device = Device::of(system, ranks)?;
        let roofline = Roofline::of(&system.gpu, Recipe::Bf16)?;
        let mut waits: Vec<usize> = self.nodes.iter().map(|node| node.after.len()).collect();
        let mut then: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        for (nth, node) in self.nodes.iter().enumerate() {
            for before in &node.after {
                then[*before].push(nth);
            }
        }
        // Nodes start in the order in which they become ready, those of one moment in the order of the file.
        let mut ready: std::collections::BTreeSet<(u64, usize)> = (0..waits.len())
            .filter(|nth| waits[*nth] == 0)
            .map(|nth| (0, nth))
            .collect();
        let mut earliest = vec![0.0f64; self.nodes.len()];
        let (mut busy, mut sums) = ([0.0f64; 2], [0.0f64; 2]);
        let (mut done, mut end) = (0, 0.0f64);
        while let Some((_, nth)) = ready.pop_first() {
            let (lane, time) = self.price(nth, system, &device, &roofline)?;
            let finish = match lane {
                Some(lane) => {
                    busy[lane] = busy[lane].max(earliest[nth]) + time;
                    sums[lane] += time;
                    busy[lane]
                }
                None => earliest[nth],
            };
            done += 1;
            end = end.max(finish);
            for &next in &then[nth] {
                earliest[next] = earliest[next].max(finish);
                waits[next] -= 1;
                if waits[next] == 0 {
                    // Times are positive, so their bits order as they do.
                    ready.insert((earliest[next].to_bits(), next));
                }
            }
        }
        if done < self.nodes.len() {
            return Err(TraceError::Circle);
        }
        Ok(Replay {
            seconds: end,
            compute: sums[0],
            communication: sums[1],
            nodes: done,
        })
    }

    /// On which lane a node runs (0 computes, 1 communicates) and for how long.
    fn price(
        &self,
        nth: usize,
        system: &System,
        device: &Device<'_>,
        roofline: &Roofline,
    ) -> Result<(Option<usize>, f64), TraceError> {
        Ok(match self.nodes[nth].kind {
            Kind::Recorded(seconds) => (Some(0), seconds),
            Kind::Compute { operations, bytes } => {
                let time = (operations / roofline.product_rate()).max(roofline.stream(bytes));
                (Some(0), time + roofline.kernel())
            }
            Kind::Memory { bytes } => (Some(0), roofline.stream(bytes)),
            Kind::Collective { collective, bytes } => {
                let estimate = device.predict(collective, Bytes(bytes), &Options::default())?;
                (Some(1), estimate.time.as_secs_f64())
            }
            Kind::Message { bytes } => {
                let rate = if device.grid().nodes > 1 {
                    system.nic_share()
                } else {
                    system.scale_up.bandwidth
                };
                (Some(1), bytes / rate.bytes_per_sec() as f64)
            }
            Kind::Nothing => (None, 0.0),
        })
    }
}

fn kind(id: u64, nth: usize, value: &Value) -> Result<Kind, TraceError> {
    let kind = field(value, &["type"]).ok_or(TraceError::Missing { nth, field: "type" })?;
    let name = match kind {
        Value::String(name) => name.as_str(),
        number => match integer(Some(number)) {
            Some(1) => "METADATA_NODE",
            Some(2) => "MEM_LOAD_NODE",
            Some(3) => "MEM_STORE_NODE",
            Some(4) => "COMP_NODE",
            Some(5) => "COMM_SEND_NODE",
            Some(6) => "COMM_RECV_NODE",
            Some(7) => "COMM_COLL_NODE",
            _ => "INVALID_NODE",
        },
    };
    let attribute = |name: &str| attribute(value, name);
    let bytes = |name: &str| attribute(name).unwrap_or(0).max(0);
    match name {
        "METADATA_NODE" => Ok(Kind::Nothing),
        "MEM_LOAD_NODE" | "MEM_STORE_NODE" => Ok(Kind::Memory {
            bytes: bytes("tensor_size") as f64,
        }),
        "COMP_NODE" => {
            let recorded = integer(field(value, &["durationMicros", "duration_micros"])).filter(|time| *time > 0);
            Ok(match recorded {
                Some(micros) => Kind::Recorded(micros as f64 * 1e-6),
                None => Kind::Compute {
                    operations: bytes("num_ops") as f64,
                    bytes: bytes("tensor_size") as f64,
                },
            })
        }
        "COMM_SEND_NODE" | "COMM_RECV_NODE" => Ok(Kind::Message {
            bytes: bytes("comm_size") as f64,
        }),
        "COMM_COLL_NODE" => {
            let kind = attribute("comm_type").unwrap_or(-1);
            let sizes = Sizes::Equal;
            let root = Rank(attribute("root").unwrap_or(0).clamp(0, i64::from(u32::MAX)) as u32);
            let collective = match kind {
                0 => Collective::AllReduce,
                1 => Collective::Reduce { root },
                2 => Collective::AllGather { sizes },
                5 => Collective::Broadcast { root },
                6 => Collective::AllToAll { sizes },
                7 | 8 => Collective::ReduceScatter { sizes },
                9 => Collective::Barrier,
                kind => return Err(TraceError::CollectiveKind { id, kind }),
            };
            Ok(Kind::Collective {
                collective,
                bytes: bytes("comm_size") as u64,
            })
        }
        kind => Err(TraceError::Kind {
            id,
            kind: kind.chars().take(40).collect(),
        }),
    }
}

fn field<'a>(value: &'a Value, names: &[&str]) -> Option<&'a Value> {
    names.iter().find_map(|name| value.get(name))
}

/// Protobuf writes 64-bit integers as strings.
fn integer(value: Option<&Value>) -> Option<i64> {
    match value? {
        Value::Number(number) => number.as_i64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

/// The attribute of that name, if it is an integer of any width.
fn attribute(node: &Value, name: &str) -> Option<i64> {
    let attributes = field(node, &["attr"])?.as_array()?;
    let found = attributes
        .iter()
        .find(|attribute| attribute.get("name").and_then(Value::as_str) == Some(name))?;
    let values = [
        "int64Val",
        "int64_val",
        "uint64Val",
        "uint64_val",
        "int32Val",
        "int32_val",
        "uint32Val",
        "uint32_val",
    ];
    integer(field(found, &values))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn h100() -> System {
        System::named("dgx-h100").unwrap()
    }

    #[test]
    fn what_does_not_depend_overlaps() {
        let node = |id: u32, after: &str, more: &str| format!(r#"{{"id": {id}, "data_deps": [{after}], {more}}}"#);
        let compute = r#""type": 4, "duration_micros": 5000"#;
        let sum = r#""type": 7, "attr": [{"name": "comm_type", "int64_val": 0}, {"name": "comm_size", "int64_val": 104857600}]"#;
        let apart = format!("[{}, {}]", node(1, "", compute), node(2, "", sum));
        let chained = format!("[{}, {}]", node(1, "", compute), node(2, "1", sum));
        let apart = Trace::read(&apart).unwrap().replay(&h100(), 8).unwrap();
        let chained = Trace::read(&chained).unwrap().replay(&h100(), 8).unwrap();
        assert!((apart.seconds - 5e-3).abs() < 1e-9);
        assert!((chained.seconds - 5e-3 - chained.communication).abs() < 1e-9);
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        let read = |text: &str| Trace::read(text).unwrap_err();
        assert_eq!(read(""), TraceError::Empty);
        assert!(matches!(read("{"), TraceError::Syntax(_)));
        assert!(matches!(read(r#"{"id": 1}"#), TraceError::Missing { .. }));
        assert!(matches!(
            read(r#"[{"id": 1, "type": 4}, {"id": "1", "type": 4}]"#),
            TraceError::Twice { id: 1 }
        ));
        let dangling = r#"{"id": 1, "type": "COMP_NODE", "dataDeps": ["7"]}"#;
        assert!(matches!(read(dangling), TraceError::Dangling { before: 7, .. }));
        let circle = r#"[{"id": 1, "type": 4, "data_deps": [2]}, {"id": 2, "type": 4, "data_deps": [1]}]"#;
        assert_eq!(Trace::read(circle).unwrap().replay(&h100(), 8), Err(TraceError::Circle));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,200}") {
            let _ = Trace::read(&text);
        }
    }
}
