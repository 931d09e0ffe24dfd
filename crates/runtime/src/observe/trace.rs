//! Events as a trace that Perfetto and `chrome://tracing` open.
//!
//! The file is a JSON array of trace events that is always whole but for its closing bracket, which both viewers do without:
//! a trace is worth most after a crash.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use serde_json::{Value, json};
use weft_plan::Time;

use super::ObserveError;
use super::event::{Event, word};

/// A forgotten trace must not fill the disk.
const TRACE_BYTES_MAX: u64 = 1 << 30;

#[derive(Debug)]
pub(super) struct TraceFile {
    file: File,
    buffer: Vec<u8>,
    bytes: u64,
    process: u32,
    broken: bool,
}

impl TraceFile {
    pub(super) fn create(path: PathBuf, agent: &str) -> Result<TraceFile, ObserveError> {
        let process = std::process::id();
        let name =
            json!({"ph": "M", "name": "process_name", "pid": process, "args": {"name": format!("weft {agent}")}});
        let first = format!("[\n{name}");
        let created = File::create(&path).and_then(|mut file| file.write_all(first.as_bytes()).map(|()| file));
        match created {
            Ok(file) => {
                let bytes = first.len() as u64;
                Ok(TraceFile {
                    file,
                    buffer: Vec::new(),
                    bytes,
                    process,
                    broken: false,
                })
            }
            Err(source) => Err(ObserveError::TraceFile { path, source }),
        }
    }

    pub(super) fn write(&mut self, at: Time, event: &Event) {
        let instant = |name: &str, args: Value| json!({"ph": "i", "s": "p", "name": name, "args": args});
        let entry = match event {
            Event::AgentStarted { address } => instant("agent started", json!({"address": address})),
            Event::AgentStopped => instant("agent stopped", json!({})),
            Event::SessionEstablished { peer } => instant("session established", json!({"peer": &**peer})),
            Event::SessionClosed { peer, cause } => {
                instant("session closed", json!({"peer": &**peer, "cause": cause.to_string()}))
            }
            Event::SessionLost { peer, cause } => {
                instant("session lost", json!({"peer": &**peer, "cause": cause.to_string()}))
            }
            Event::PathOpened { peer, transport } => {
                instant("path opened", json!({"peer": &**peer, "transport": transport}))
            }
            Event::PathClosed { peer, transport } => {
                instant("path closed", json!({"peer": &**peer, "transport": transport}))
            }
            Event::PathLost { peer, transport, loss } => instant(
                "path lost",
                json!({"peer": &**peer, "transport": transport, "loss": loss.to_string()}),
            ),
            // The end tells the beginning too, so that a transfer is drawn whole or not at all.
            Event::TransferSubmitted { .. } => return,
            Event::TransferEnded {
                id,
                peer,
                transport,
                direction,
                bytes,
                started,
                ended,
                outcome,
            } => {
                let name = format!("{} {peer}", word(*direction));
                let args = json!({"bytes": bytes, "transport": transport, "outcome": outcome.to_string()});
                let begin = json!({"ph": "b", "cat": "transfer", "id": id, "name": name, "args": args});
                self.push(begin, *started);
                self.push(json!({"ph": "e", "cat": "transfer", "id": id, "name": name}), *ended);
                return;
            }
            Event::CollectiveEnded {
                function,
                way,
                bytes,
                bus_bytes,
                started,
                ended,
            } => {
                let seconds = ended.saturating_sub(*started).as_secs_f64();
                let bus = *bus_bytes as f64 / seconds.max(1e-9) / 1e9;
                let args = json!({"bytes": bytes, "way": &**way, "bus GB/s": bus});
                let length = seconds * 1e6;
                self.push(
                    json!({"ph": "X", "cat": "collective", "name": function, "dur": length, "args": args}),
                    *started,
                );
                return;
            }
            Event::NotificationSent { peer, bytes } => {
                instant("notification sent", json!({"peer": &**peer, "bytes": bytes}))
            }
            Event::NotificationReceived { peer, bytes } => {
                instant("notification received", json!({"peer": &**peer, "bytes": bytes}))
            }
        };
        self.push(entry, at);
    }

    fn push(&mut self, mut entry: Value, at: Time) {
        entry["ts"] = json!(at.as_ns() as f64 / 1e3);
        entry["pid"] = json!(self.process);
        entry["tid"] = json!(self.process);
        self.buffer.extend_from_slice(b",\n");
        // Writing a value of our own making into a vector cannot fail.
        let _ = serde_json::to_writer(&mut self.buffer, &entry);
    }

    /// Hands everything written so far to the kernel, which keeps it when this process dies.
    pub(super) fn flush(&mut self) {
        let bytes = self.bytes + self.buffer.len() as u64;
        if !self.broken && bytes <= TRACE_BYTES_MAX {
            self.broken = self.file.write_all(&self.buffer).is_err();
            self.bytes = bytes;
        }
        self.buffer.clear();
    }

    pub(super) fn finish(mut self) {
        self.flush();
        if !self.broken {
            let _ = self.file.write_all(b"\n]\n");
        }
    }
}
