//! Streams of bytes between two agents, for `serve` and `copy`: bounded windows, writes with checksums, and notifications.
//!
//! The receiving end publishes a window of a few slots. The sending end writes a chunk into a free slot and announces it; the
//! announcement arrives after the bytes. The receiver takes the bytes out and says that the slot is free again. So neither end
//! holds more than a window, whatever the length of the stream, and a slow end slows the other.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft::{Access, Agent, Memory, Peer, Transfer};
use weft_plan::Spans;

const SLOT_BYTES: u64 = 8 << 20;
const SLOTS: u64 = 4;
/// How long to wait for the other end's window, and how often to look whether the other end still lives.
const WINDOW_WAIT: Duration = Duration::from_secs(10);
const LIVENESS_CHECK: Duration = Duration::from_secs(1);
/// The longest word that is looked at.
const WORD_BYTES_MAX: usize = 16 << 10;

/// What the two ends tell each other. Every word carries the stream that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "word")]
pub enum Word {
    /// To the server: send me this. The window is published already.
    Get { stream: u64, name: String },
    /// To the server: take this.
    Put {
        stream: u64,
        name: String,
        bytes: Option<u64>,
    },
    /// The sender begins, and knows the length or not.
    Begin { stream: u64, bytes: Option<u64> },
    /// The receiver's window is published.
    Take { stream: u64 },
    /// Chunk `index` of the stream stands in `slot`.
    Chunk {
        stream: u64,
        index: u64,
        slot: u64,
        bytes: u64,
    },
    /// The receiver is done with a slot.
    Free { stream: u64, slot: u64 },
    /// The stream has this many chunks.
    End { stream: u64, chunks: u64 },
    /// The receiver has everything, and has put it in its place.
    Done { stream: u64 },
    /// It will not happen.
    Refuse { stream: u64, why: Refusal },
}

impl Word {
    pub fn decode(payload: &[u8]) -> Option<Word> {
        if payload.len() > WORD_BYTES_MAX {
            return None;
        }
        serde_json::from_slice(payload).ok()
    }

    pub fn stream(&self) -> u64 {
        match *self {
            Word::Get { stream, .. }
            | Word::Put { stream, .. }
            | Word::Begin { stream, .. }
            | Word::Take { stream }
            | Word::Chunk { stream, .. }
            | Word::Free { stream, .. }
            | Word::End { stream, .. }
            | Word::Done { stream }
            | Word::Refuse { stream, .. } => stream,
        }
    }
}

/// Why one end will not go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Refusal {
    #[error("nothing is served under this name")]
    NoSuchName,
    #[error("the name leads out of what is served")]
    Outside,
    #[error("the server takes nothing; it was started without --writable")]
    NotWritable,
    #[error("there is a file of this name already")]
    Exists,
    #[error("the server has as many streams as it allows")]
    Busy,
    #[error("a file of the other end: {what}")]
    File { what: String },
}

/// Why a stream came to no good end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CourierError {
    #[error("{0}")]
    Refused(Refusal),
    #[error(transparent)]
    Weft(#[from] weft::Error),
    #[error("the other end is gone")]
    Gone,
    #[error("the other end does not keep to the protocol: {0}")]
    Protocol(&'static str),
    #[error("reading here: {0}")]
    Reading(std::io::Error),
    #[error("writing here: {0}")]
    Writing(std::io::Error),
}

/// Where the words of one stream come from.
#[derive(Debug)]
pub enum Inbox {
    /// The agent has one stream only.
    Agent,
    /// Somebody else sorts the words of many streams.
    Sorted(Receiver<Word>),
}

/// One stream's connection to the other end.
#[derive(Debug)]
pub struct Line {
    pub agent: Agent,
    pub peer: Peer,
    pub stream: u64,
    pub inbox: Inbox,
}

impl Line {
    /// The name of the receiving end's window.
    fn window_name(&self) -> String {
        format!("window-{:016x}", self.stream)
    }

    pub fn say(&self, word: &Word) -> Result<(), CourierError> {
        Ok(self.peer.notify(&encode(word))?)
    }

    /// The next word of this stream. Waits as long as the other end lives: a slow source is no fault.
    pub fn hear(&self) -> Result<Word, CourierError> {
        loop {
            let word = match &self.inbox {
                Inbox::Agent => self
                    .agent
                    .next_notification(LIVENESS_CHECK)
                    .and_then(|notification| Word::decode(&notification.payload)),
                Inbox::Sorted(words) => match words.recv_timeout(LIVENESS_CHECK) {
                    Ok(word) => Some(word),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return Err(CourierError::Gone),
                },
            };
            match word {
                Some(Word::Refuse { stream, why }) if stream == self.stream => return Err(CourierError::Refused(why)),
                Some(word) if word.stream() == self.stream => return Ok(word),
                Some(_) => {}
                None if self.peer.is_connected() => {}
                None => return Err(CourierError::Gone),
            }
        }
    }
}

/// A published window, withdrawn and released when it is dropped.
#[derive(Debug)]
pub struct Window {
    agent: Agent,
    name: String,
    memory: Memory,
}

impl Window {
    pub fn open(line: &Line) -> Result<Window, CourierError> {
        let memory = line.agent.allocate((SLOT_BYTES * SLOTS) as usize)?;
        let name = line.window_name();
        line.agent.publish(&name, &memory, Access::WRITE)?;
        Ok(Window {
            agent: line.agent.clone(),
            name,
            memory,
        })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // If it is no longer published, that is what was wanted.
        let _ = self.agent.withdraw(&self.name);
    }
}

/// Sends everything that `source` gives into the other end's window, and returns how much that was once all of it has arrived.
pub fn send(line: &Line, source: &mut dyn Read, progress: &dyn Fn(u64)) -> Result<u64, CourierError> {
    let window = line.peer.region(&line.window_name(), WINDOW_WAIT)?;
    let slots = window.len() / SLOT_BYTES;
    if slots == 0 {
        return Err(CourierError::Protocol("the window holds no slot"));
    }
    let slots = slots.min(SLOTS);
    let buffer = line.agent.allocate((SLOT_BYTES * slots) as usize)?;
    let mut chunk = vec![0; SLOT_BYTES as usize];
    let mut under_way: BTreeMap<u64, Transfer> = BTreeMap::new();
    let mut total = 0;
    let mut index = 0;
    loop {
        let filled = fill(source, &mut chunk).map_err(CourierError::Reading)?;
        if filled == 0 {
            break;
        }
        let slot = index % slots;
        while under_way.contains_key(&slot) {
            free_one(line, &mut under_way)?;
        }
        let bytes = filled as u64;
        buffer.write(slot * SLOT_BYTES, &chunk[..filled]);
        let there = Spans::contiguous(slot * SLOT_BYTES, bytes);
        let word = Word::Chunk {
            stream: line.stream,
            index,
            slot,
            bytes,
        };
        let transfer = line
            .peer
            .write(&buffer, &window)
            .spans(there.clone(), there)
            .checksum(true)
            .notify(&encode(&word))
            .post()?;
        under_way.insert(slot, transfer);
        index += 1;
        total += bytes;
        progress(bytes);
    }
    line.say(&Word::End {
        stream: line.stream,
        chunks: index,
    })?;
    loop {
        match line.hear()? {
            Word::Free { slot, .. } => settle(&mut under_way, slot)?,
            Word::Done { .. } => return Ok(total),
            _ => return Err(CourierError::Protocol("neither a free slot nor the end")),
        }
    }
}

fn free_one(line: &Line, under_way: &mut BTreeMap<u64, Transfer>) -> Result<(), CourierError> {
    // A failed transfer is never announced, so nobody would ever free its slot.
    for transfer in under_way.values() {
        if let Some(Err(error)) = transfer.poll() {
            return Err(error.into());
        }
    }
    match line.hear()? {
        Word::Free { slot, .. } => settle(under_way, slot),
        _ => Err(CourierError::Protocol("not a free slot")),
    }
}

/// The receiver has taken a slot's bytes; our own side of that transfer ends at about the same time.
fn settle(under_way: &mut BTreeMap<u64, Transfer>, slot: u64) -> Result<(), CourierError> {
    match under_way.remove(&slot) {
        Some(transfer) => Ok(transfer.wait().map(drop)?),
        None => Err(CourierError::Protocol("a slot was freed that was not in use")),
    }
}

/// Takes everything that the other end sends, in order, and returns how much that was. The caller says [`Word::Done`].
pub fn receive(
    line: &Line,
    window: &Window,
    sink: &mut dyn Write,
    progress: &dyn Fn(u64),
) -> Result<u64, CourierError> {
    // Announcements may overtake each other; there are never more than slots.
    let mut waiting: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut chunk = vec![0; SLOT_BYTES as usize];
    let mut next = 0;
    let mut end = None;
    let mut total = 0;
    while end != Some(next) {
        match line.hear()? {
            Word::Chunk { index, slot, bytes, .. } => {
                if slot >= SLOTS || bytes > SLOT_BYTES || index < next || index - next >= SLOTS {
                    return Err(CourierError::Protocol("a chunk outside the window"));
                }
                waiting.insert(index, (slot, bytes));
            }
            Word::End { chunks, .. } if chunks >= next => end = Some(chunks),
            _ => return Err(CourierError::Protocol("neither a chunk nor the end")),
        }
        while let Some((slot, bytes)) = waiting.remove(&next) {
            let part = &mut chunk[..bytes as usize];
            window.memory.read(slot * SLOT_BYTES, part);
            line.say(&Word::Free {
                stream: line.stream,
                slot,
            })?;
            sink.write_all(part).map_err(CourierError::Writing)?;
            next += 1;
            total += bytes;
            progress(bytes);
        }
    }
    sink.flush().map_err(CourierError::Writing)?;
    Ok(total)
}

/// Reads until the chunk is full or the source has ended.
fn fill(source: &mut dyn Read, chunk: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < chunk.len() {
        match source.read(&mut chunk[filled..]) {
            Ok(0) => break,
            Ok(more) => filled += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

pub fn encode(word: &Word) -> Vec<u8> {
    serde_json::to_vec(word).expect("words are plain data")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_journey_and_garbage_does_not() {
        let word = Word::Refuse {
            stream: u64::MAX,
            why: Refusal::File {
                what: "no space".into(),
            },
        };
        assert_eq!(Word::decode(&encode(&word)), Some(word));
        assert_eq!(Word::decode(b"{\"word\":\"get\"}"), None);
        assert_eq!(Word::decode(&vec![b' '; WORD_BYTES_MAX + 1]), None);
    }
}
