//! Chakra execution traces: a step as somebody recorded it, replayed on a system.
//!
//! A trace is a graph of nodes: compute of a known duration or so many operations, and collectives of so many bytes. [`ExecutionTrace::read`] takes the files that
//! tracers write (`.et`: protobuf messages one after the other, each with its length before it) and their JSON form, and tells them apart by what is in
//! them. Sends and receives are priced as if their peer were ready, and memory nodes by the GPU's bandwidth.
//!
//! ```
//! use weft_model::system::System;
//! use weft_model::workload::trace::ExecutionTrace;
//! let text = r#"{"version": "0.0.4"}
//! {"id": "1", "name": "forward", "type": "COMP_NODE", "durationMicros": "1000"}
//! {"id": "2", "name": "sum", "type": "COMM_COLL_NODE", "dataDeps": ["1"],
//!  "attr": [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val": "1048576"}]}"#;
//! let replay = ExecutionTrace::read(text.as_bytes())?.replay(&System::named("dgx-h100").unwrap(), 8)?;
//! assert!(replay.seconds > 1e-3 && replay.communication > 0.0);
//! # Ok::<(), weft_model::workload::trace::ExecutionTraceError>(())
//! ```

mod json;
mod protobuf;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use thiserror::Error;

use crate::device::{DeviceModel, DeviceModelError, DeviceOptions};
use crate::roofline::{Recipe, Roofline, RooflineError};
use crate::system::System;
use weft_plan::collective::{Collective, Sizes};
use weft_plan::units::{Bytes, Rank};

/// What one rank did in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutionTrace {
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
pub enum ExecutionTraceError {
    #[error("{bytes} bytes; {MAX_BYTES} is the most")]
    TooLong { bytes: usize },
    #[error("more than {MAX_NODES} nodes")]
    TooMany,
    #[error("not JSON: {0}")]
    Syntax(String),
    /// The zeroth message is what is said of the whole trace; then come nodes.
    #[error("message {nth} is none of a trace: {why}")]
    Message { nth: usize, why: String },
    #[error("message {nth} ends after the file does")]
    Truncated { nth: usize },
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
    Device(#[from] DeviceModelError),
    #[error(transparent)]
    Roofline(#[from] RooflineError),
}

const MAX_BYTES: usize = 1 << 30;
/// A node of no bytes takes memory too.
const MAX_NODES: usize = 1 << 22;

/// What a file says of a node, in either form.
#[derive(Clone, Debug, Default, PartialEq)]
struct Record {
    id: u64,
    /// As the schema numbers it.
    kind: i64,
    after: Vec<u64>,
    micros: u64,
    comm_type: Option<i64>,
    comm_size: Option<i64>,
    num_ops: Option<i64>,
    tensor_size: Option<i64>,
    root: Option<i64>,
}

impl ExecutionTrace {
    /// Reads a trace in either form.
    pub fn read(bytes: &[u8]) -> Result<ExecutionTrace, ExecutionTraceError> {
        if bytes.len() > MAX_BYTES {
            return Err(ExecutionTraceError::TooLong { bytes: bytes.len() });
        }
        // JSON has no such bytes; every node of the binary form has the tag of its type, which is one.
        let is_control = |byte: &u8| *byte < b' ' && !b"\t\n\r".contains(byte);
        let records = match bytes.iter().any(is_control) {
            true => protobuf::records(bytes)?,
            false => json::records(bytes)?,
        };
        let mut places = BTreeMap::new();
        for (nth, record) in records.iter().enumerate() {
            if places.insert(record.id, nth).is_some() {
                return Err(ExecutionTraceError::Twice { id: record.id });
            }
        }
        let mut nodes = Vec::with_capacity(records.len());
        for record in &records {
            let id = record.id;
            let place = |&before: &u64| {
                places
                    .get(&before)
                    .copied()
                    .ok_or(ExecutionTraceError::Dangling { id, before })
            };
            nodes.push(Node {
                kind: record.work()?,
                after: record.after.iter().map(place).collect::<Result<_, _>>()?,
            });
        }
        match nodes.is_empty() {
            true => Err(ExecutionTraceError::Empty),
            false => Ok(ExecutionTrace { nodes }),
        }
    }

    /// Replays the trace on a system with `ranks` ranks that do the same. Compute runs one node after the other, and so does communication;
    /// the two overlap as far as the graph allows.
    pub fn replay(&self, system: &System, ranks: u32) -> Result<Replay, ExecutionTraceError> {
        let device = DeviceModel::of(system, ranks)?;
        let roofline = Roofline::of(&system.gpu, Recipe::Bf16)?;
        let mut waits: Vec<usize> = self.nodes.iter().map(|node| node.after.len()).collect();
        let mut then: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        for (nth, node) in self.nodes.iter().enumerate() {
            for before in &node.after {
                then[*before].push(nth);
            }
        }
        // Nodes start in the order in which they become ready, those of one moment in the order of the file.
        let mut ready: BTreeSet<(u64, usize)> = (0..waits.len())
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
            return Err(ExecutionTraceError::Circle);
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
        device: &DeviceModel<'_>,
        roofline: &Roofline,
    ) -> Result<(Option<usize>, f64), ExecutionTraceError> {
        Ok(match self.nodes[nth].kind {
            Kind::Recorded(seconds) => (Some(0), seconds),
            Kind::Compute { operations, bytes } => {
                let time = (operations / roofline.product_rate()).max(roofline.stream(bytes));
                (Some(0), time + roofline.kernel())
            }
            Kind::Memory { bytes } => (Some(0), roofline.stream(bytes)),
            Kind::Collective { collective, bytes } => {
                let estimate = device.predict(collective, Bytes(bytes), &DeviceOptions::default())?;
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

impl Record {
    /// Notes an attribute, if it is one that says how much there is to do. The first of a name counts.
    fn note(&mut self, name: &str, value: i64) {
        let known = match name {
            "comm_type" => &mut self.comm_type,
            "comm_size" => &mut self.comm_size,
            "num_ops" => &mut self.num_ops,
            "tensor_size" => &mut self.tensor_size,
            "root" => &mut self.root,
            _ => return,
        };
        known.get_or_insert(value);
    }

    /// What there is to do.
    fn work(&self) -> Result<Kind, ExecutionTraceError> {
        let id = self.id;
        let amount = |attribute: Option<i64>| attribute.unwrap_or(0).max(0);
        Ok(match self.kind {
            1 => Kind::Nothing,
            2 | 3 => Kind::Memory {
                bytes: amount(self.tensor_size) as f64,
            },
            4 if self.micros > 0 => Kind::Recorded(self.micros as f64 * 1e-6),
            4 => Kind::Compute {
                operations: amount(self.num_ops) as f64,
                bytes: amount(self.tensor_size) as f64,
            },
            5 | 6 => Kind::Message {
                bytes: amount(self.comm_size) as f64,
            },
            7 => Kind::Collective {
                collective: self.collective()?,
                bytes: amount(self.comm_size) as u64,
            },
            kind => {
                let kind = kind.to_string();
                return Err(ExecutionTraceError::Kind { id, kind });
            }
        })
    }

    fn collective(&self) -> Result<Collective, ExecutionTraceError> {
        let sizes = Sizes::Equal;
        let root = Rank(self.root.unwrap_or(0).clamp(0, i64::from(u32::MAX)) as u32);
        Ok(match self.comm_type.unwrap_or(-1) {
            0 => Collective::AllReduce,
            1 => Collective::Reduce { root },
            2 => Collective::AllGather { sizes },
            5 => Collective::Broadcast { root },
            6 => Collective::AllToAll { sizes },
            7 | 8 => Collective::ReduceScatter { sizes },
            9 => Collective::Barrier,
            kind => return Err(ExecutionTraceError::CollectiveKind { id: self.id, kind }),
        })
    }
}

#[cfg(test)]
mod tests;
