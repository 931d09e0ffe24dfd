//! The binary form of a trace: what is said of the whole, then nodes, each message with its length before it.
//!
//! The messages are those of Chakra's `et_def.proto`, with the fields that a replay needs; others are skipped.

use prost::Message;

use super::{ExecutionTraceError, MAX_NODES, Record};

#[derive(Clone, PartialEq, Message)]
pub(super) struct GlobalMetadata {
    #[prost(string, tag = "1")]
    pub(super) version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Node {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(int32, tag = "3")]
    pub(super) kind: i32,
    #[prost(uint64, repeated, tag = "4")]
    pub(super) ctrl_deps: Vec<u64>,
    #[prost(uint64, repeated, tag = "5")]
    pub(super) data_deps: Vec<u64>,
    #[prost(uint64, tag = "7")]
    pub(super) duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    pub(super) attr: Vec<Attribute>,
}

/// One of its values is there, or another that is no integer.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Attribute {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(int32, optional, tag = "7")]
    pub(super) int32_val: Option<i32>,
    #[prost(int64, optional, tag = "9")]
    pub(super) int64_val: Option<i64>,
    #[prost(uint32, optional, tag = "11")]
    pub(super) uint32_val: Option<u32>,
    #[prost(uint64, optional, tag = "13")]
    pub(super) uint64_val: Option<u64>,
}

/// What a file says of its nodes.
pub(super) fn records(bytes: &[u8]) -> Result<Vec<Record>, ExecutionTraceError> {
    let mut messages = Messages { rest: bytes, nth: 0 };
    messages.next::<GlobalMetadata>()?;
    let mut records = Vec::new();
    while let Some(node) = messages.next::<Node>()? {
        if records.len() == MAX_NODES {
            return Err(ExecutionTraceError::TooMany);
        }
        records.push(node.record());
    }
    Ok(records)
}

struct Messages<'a> {
    rest: &'a [u8],
    nth: usize,
}

impl Messages<'_> {
    /// The next message; `None` at the end of the file. A message is never longer than the file.
    fn next<M: Message + Default>(&mut self) -> Result<Option<M>, ExecutionTraceError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let nth = self.nth;
        let broken = |error: prost::DecodeError| ExecutionTraceError::Message {
            nth,
            why: error.to_string(),
        };
        let length = prost::decode_length_delimiter(&mut self.rest).map_err(broken)?;
        let (message, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(ExecutionTraceError::Truncated { nth })?;
        let message = M::decode(message).map_err(broken)?;
        (self.rest, self.nth) = (rest, nth + 1);
        Ok(Some(message))
    }
}

impl Node {
    fn record(self) -> Record {
        let mut record = Record {
            id: self.id,
            kind: self.kind.into(),
            after: self.data_deps,
            micros: self.duration_micros,
            ..Record::default()
        };
        record.after.extend(self.ctrl_deps);
        for attribute in &self.attr {
            if let Some(value) = attribute.integer() {
                record.note(&attribute.name, value);
            }
        }
        record
    }
}

impl Attribute {
    fn integer(&self) -> Option<i64> {
        self.int64_val
            .or(self.uint64_val.map(|value| value as i64))
            .or(self.int32_val.map(i64::from))
            .or(self.uint32_val.map(i64::from))
    }
}
