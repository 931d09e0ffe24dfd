//! Streams of bytes between two agents, for `serve` and `copy`: bounded windows, transfers with checksums, and notifications.
//!
//! The end that asks publishes a window of a few slots, and the server moves the bytes: it writes into the slots what is asked for, and
//! reads from them what is put. So the server publishes nothing, and no client can touch what belongs to another. The sending end says
//! which chunk stands in which slot; the receiving end says that a slot is free again. Neither holds more than a window, whatever the length
//! of the stream, and a slow end slows the other.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft::{Access, Agent, Memory, Peer, Remote, Transfer};
use weft_plan::Spans;

use crate::tree::TreeError;

const SLOT_BYTES: u64 = 8 << 20;
const SLOTS: u64 = 4;
/// What the asking end publishes its window as. It has no other peer than the server.
const WINDOW: &str = "window";
/// How long to wait for the other end's window, and how often to look whether the other end still lives.
const WINDOW_WAIT: Duration = Duration::from_secs(10);
const LIVENESS_CHECK: Duration = Duration::from_secs(1);
/// The longest word that is looked at: the longest name, each byte of it escaped, and what is around it.
const WORD_BYTES_MAX: usize = 40 << 10;
/// Words of one stream that may wait to be looked at: a chunk for each slot, an end, and some to spare.
pub const WORDS_MAX: usize = 4 * SLOTS as usize;

/// What the two ends tell each other. Every word carries the stream that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "word")]
pub enum Word {
    /// To the server: send me this, unless I have it.
    Get {
        stream: u64,
        name: String,
        have: Option<Have>,
    },
    /// To the server: take this. With `resume`, what comes to no good end is kept for the next attempt.
    Put { stream: u64, name: String, resume: bool },
    /// To the server: is this the same as what I have?
    Compare { stream: u64, name: String, have: Have },
    /// To the server: make this directory, and those above it.
    Make { stream: u64, name: String },
    /// To the server: what is in this directory, or in all below it as well?
    List { stream: u64, name: String, deep: bool },
    /// Some of what is in a directory. The next are told when they are asked for.
    Entries {
        stream: u64,
        entries: Vec<Listed>,
        more: bool,
        /// How many things are neither files nor directories, or cannot be told.
        left_out: u64,
    },
    /// Tell the next entries.
    Next { stream: u64 },
    /// The sender begins behind so many bytes, and knows the whole length or not.
    Begin { stream: u64, bytes: Option<u64>, from: u64 },
    /// The server takes what is put, and has some of it already or not.
    Take { stream: u64, have: Option<Have> },
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

/// The beginning of a stream that the receiver has already: how much, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Have {
    pub bytes: u64,
    pub checksum: u64,
}

/// Something in a directory, by its way from there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    pub path: String,
    /// Of a file; a directory has none.
    pub bytes: Option<u64>,
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
            | Word::Compare { stream, .. }
            | Word::Make { stream, .. }
            | Word::List { stream, .. }
            | Word::Entries { stream, .. }
            | Word::Next { stream }
            | Word::Begin { stream, .. }
            | Word::Take { stream, .. }
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
    #[error("it is a directory")]
    IsDirectory,
    #[error("it is not a directory")]
    NotDirectory,
    #[error("it is {what}, and no file")]
    NotFile { what: String },
    #[error("the server takes nothing; it was started without --writable")]
    NotWritable,
    #[error("there is a file of this name already")]
    Exists,
    #[error("somebody else is sending a file of this name")]
    Taken,
    #[error("it changed while it was read")]
    Changed,
    #[error("it is something else")]
    Differs,
    #[error("the server has as many streams as it allows")]
    Busy,
    #[error("a file of the other end: {what}")]
    File { what: String },
}

impl From<TreeError> for Refusal {
    fn from(error: TreeError) -> Refusal {
        match error {
            TreeError::Outside => Refusal::Outside,
            TreeError::Absent => Refusal::NoSuchName,
            TreeError::IsDirectory => Refusal::IsDirectory,
            TreeError::NotDirectory => Refusal::NotDirectory,
            TreeError::Special(what) => Refusal::NotFile { what: what.to_owned() },
            TreeError::Exists => Refusal::Exists,
            TreeError::Busy => Refusal::Taken,
            other => Refusal::File {
                what: other.to_string(),
            },
        }
    }
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
    /// The agent has one stream at a time.
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
    /// Words that have come before their turn.
    early: RefCell<VecDeque<Word>>,
}

impl Line {
    pub fn new(agent: Agent, peer: Peer, stream: u64, inbox: Inbox) -> Line {
        Line {
            agent,
            peer,
            stream,
            inbox,
            early: RefCell::default(),
        }
    }

    pub fn say(&self, word: &Word) -> Result<(), CourierError> {
        Ok(self.peer.notify(&encode(word))?)
    }

    /// The next word of this stream. Waits as long as the other end lives: a slow source is no fault.
    pub fn hear(&self) -> Result<Word, CourierError> {
        let early = self.early.borrow_mut().pop_front();
        early.map_or_else(|| self.hear_new(), Ok)
    }

    /// How long the stream is, and where it begins. Notifications are in no order: its first chunks may be announced before that.
    pub fn hear_beginning(&self) -> Result<(Option<u64>, u64), CourierError> {
        loop {
            match self.hear_new()? {
                Word::Begin { bytes, from, .. } => return Ok((bytes, from)),
                word @ (Word::Chunk { .. } | Word::End { .. }) if self.early.borrow().len() < WORDS_MAX => {
                    self.early.borrow_mut().push_back(word);
                }
                _ => return Err(CourierError::Protocol("no beginning")),
            }
        }
    }

    fn hear_new(&self) -> Result<Word, CourierError> {
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

    /// The window of the end that has asked.
    fn window(&self) -> Result<Remote, CourierError> {
        let window = self.peer.region(WINDOW, WINDOW_WAIT)?;
        match window.len() == SLOT_BYTES * SLOTS {
            true => Ok(window),
            false => Err(CourierError::Protocol("a window of another size")),
        }
    }
}

/// The window of the end that asks, published for as long as its agent lives.
#[derive(Debug)]
pub struct Window {
    memory: Memory,
}

impl Window {
    /// `access`: what the server does with it.
    pub fn open(agent: &Agent, access: Access) -> Result<Window, CourierError> {
        let memory = agent.allocate((SLOT_BYTES * SLOTS) as usize)?;
        agent.publish(WINDOW, &memory, access)?;
        Ok(Window { memory })
    }

    /// Takes everything that the server writes into the window, in order, and returns how much that was. The caller says [`Word::Done`].
    pub fn receive(&self, line: &Line, sink: &mut dyn Write, progress: &dyn Fn(u64)) -> Result<u64, CourierError> {
        let mut order = Order::default();
        let mut chunk = vec![0; SLOT_BYTES as usize];
        let mut total = 0;
        while !order.is_over() {
            order.take_in(line.hear()?, |_| Ok(()))?;
            while let Some((place, ())) = order.next() {
                let part = &mut chunk[..place.bytes as usize];
                self.memory.read(place.slot * SLOT_BYTES, part);
                free(line, place.slot)?;
                sink.write_all(part).map_err(CourierError::Writing)?;
                total += place.bytes;
                progress(place.bytes);
            }
        }
        sink.flush().map_err(CourierError::Writing)?;
        Ok(total)
    }

    /// Lets the server read everything that `source` gives, and returns when all of it is in its place. `check` says, when all has been
    /// read here, whether it is to be.
    pub fn send(
        &self,
        line: &Line,
        source: &mut dyn Read,
        progress: &dyn Fn(u64),
        check: impl FnOnce(u64) -> Result<(), CourierError>,
    ) -> Result<(), CourierError> {
        let mut in_use = [false; SLOTS as usize];
        let free_one = |in_use: &mut [bool], slot: u64| {
            let used = usize::try_from(slot).ok().and_then(|slot| in_use.get_mut(slot));
            match used.is_some_and(std::mem::take) {
                true => Ok(()),
                false => Err(CourierError::Protocol("a slot was freed that was not in use")),
            }
        };
        let mut chunk = vec![0; SLOT_BYTES as usize];
        let (mut total, mut index) = (0, 0);
        loop {
            let filled = fill(source, &mut chunk).map_err(CourierError::Reading)?;
            if filled == 0 {
                break;
            }
            let slot = index % SLOTS;
            while in_use[slot as usize] {
                match line.hear()? {
                    Word::Free { slot, .. } => free_one(&mut in_use, slot)?,
                    _ => return Err(CourierError::Protocol("not a free slot")),
                }
            }
            let bytes = filled as u64;
            self.memory.write(slot * SLOT_BYTES, &chunk[..filled]);
            in_use[slot as usize] = true;
            let stream = line.stream;
            line.say(&Word::Chunk {
                stream,
                index,
                slot,
                bytes,
            })?;
            index += 1;
            total += bytes;
            progress(bytes);
        }
        let (stream, chunks) = (line.stream, index);
        if let Err(error) = check(total) {
            let why = Refusal::Changed;
            line.say(&Word::Refuse { stream, why })?;
            return Err(error);
        }
        line.say(&Word::End { stream, chunks })?;
        loop {
            match line.hear()? {
                Word::Free { slot, .. } => free_one(&mut in_use, slot)?,
                Word::Done { .. } => return Ok(()),
                _ => return Err(CourierError::Protocol("neither a free slot nor the end")),
            }
        }
    }
}

/// At the server: writes everything that `source` gives into the window of the end that asked, and returns how much that was. All of it has
/// been taken out of the window then.
pub fn give(line: &Line, source: &mut dyn Read) -> Result<(u64, u64), CourierError> {
    let window = line.window()?;
    let buffer = line.agent.allocate((SLOT_BYTES * SLOTS) as usize)?;
    let mut chunk = vec![0; SLOT_BYTES as usize];
    let mut under_way = UnderWay::default();
    let (mut total, mut index) = (0, 0);
    loop {
        let filled = fill(source, &mut chunk).map_err(CourierError::Reading)?;
        if filled == 0 {
            break;
        }
        let slot = index % SLOTS;
        while under_way.0.contains_key(&slot) {
            under_way.settle_one(line)?;
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
        under_way.0.insert(slot, Ended(transfer));
        index += 1;
        total += bytes;
    }
    while !under_way.0.is_empty() {
        under_way.settle_one(line)?;
    }
    Ok((total, index))
}

/// At the server: reads everything that the end that asked has in its window, in order, and returns how much that was.
pub fn take(line: &Line, sink: &mut dyn Write) -> Result<u64, CourierError> {
    let window = line.window()?;
    let buffer = line.agent.allocate((SLOT_BYTES * SLOTS) as usize)?;
    let mut order: Order<Ended> = Order::default();
    let mut chunk = vec![0; SLOT_BYTES as usize];
    let mut total = 0;
    while !order.is_over() {
        // It is read at once, while what came before it is written.
        order.take_in(line.hear()?, |place| {
            let spans = Spans::contiguous(place.slot * SLOT_BYTES, place.bytes);
            let read = line.peer.read(&buffer, &window).spans(spans.clone(), spans);
            Ok(Ended(read.checksum(true).post()?))
        })?;
        while let Some((place, transfer)) = order.next() {
            transfer.0.wait()?;
            let part = &mut chunk[..place.bytes as usize];
            buffer.read(place.slot * SLOT_BYTES, part);
            free(line, place.slot)?;
            sink.write_all(part).map_err(CourierError::Writing)?;
            total += place.bytes;
        }
    }
    sink.flush().map_err(CourierError::Writing)?;
    Ok(total)
}

/// Where a chunk stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    slot: u64,
    bytes: u64,
}

/// Chunks in their order. Announcements may overtake each other; there are never more than slots.
#[derive(Debug)]
struct Order<T> {
    waiting: BTreeMap<u64, (Place, T)>,
    next: u64,
    end: Option<u64>,
}

impl<T> Default for Order<T> {
    fn default() -> Order<T> {
        Order {
            waiting: BTreeMap::new(),
            next: 0,
            end: None,
        }
    }
}

impl<T> Order<T> {
    fn is_over(&self) -> bool {
        self.end == Some(self.next)
    }

    /// Takes in a word of the sender. `begin` is done with a chunk as soon as it has come.
    fn take_in(
        &mut self,
        word: Word,
        begin: impl FnOnce(Place) -> Result<T, CourierError>,
    ) -> Result<(), CourierError> {
        match word {
            Word::Chunk { index, slot, bytes, .. } => {
                let in_window = index.checked_sub(self.next).is_some_and(|ahead| ahead < SLOTS);
                let is_slot = slot < SLOTS && (1..=SLOT_BYTES).contains(&bytes);
                // A slot that is in use, and a chunk that was there before, would be moved twice.
                let is_new = !self.waiting.contains_key(&index) && self.waiting.values().all(|(at, _)| at.slot != slot);
                if !(in_window && is_slot && is_new) || self.end.is_some_and(|end| index >= end) {
                    return Err(CourierError::Protocol("a chunk outside the window"));
                }
                let place = Place { slot, bytes };
                self.waiting.insert(index, (place, begin(place)?));
            }
            Word::End { chunks, .. } if self.end.is_none() && chunks >= self.next => self.end = Some(chunks),
            _ => return Err(CourierError::Protocol("neither a chunk nor the end")),
        }
        Ok(())
    }

    /// The chunk whose turn it is, if it has come.
    fn next(&mut self) -> Option<(Place, T)> {
        let taken = self.waiting.remove(&self.next)?;
        self.next += 1;
        Some(taken)
    }
}

fn free(line: &Line, slot: u64) -> Result<(), CourierError> {
    let stream = line.stream;
    line.say(&Word::Free { stream, slot })
}

/// A transfer that touches nothing any more once this is gone: its slot may belong to the next stream by then.
#[derive(Debug)]
struct Ended(Transfer);

impl Drop for Ended {
    fn drop(&mut self) {
        if !self.0.is_ended() {
            self.0.cancel();
            // However it ends, it has.
            let _ = self.0.wait();
        }
    }
}

/// Writes that are under way, by their slots.
#[derive(Debug, Default)]
struct UnderWay(BTreeMap<u64, Ended>);

impl UnderWay {
    /// Waits for a slot that the receiver has emptied. Our own side of that transfer ends at about the same time.
    fn settle_one(&mut self, line: &Line) -> Result<(), CourierError> {
        // A failed transfer is never announced, so nobody would ever free its slot.
        for transfer in self.0.values() {
            if let Some(Err(error)) = transfer.0.poll() {
                return Err(error.into());
            }
        }
        let Word::Free { slot, .. } = line.hear()? else {
            return Err(CourierError::Protocol("not a free slot"));
        };
        match self.0.remove(&slot) {
            Some(transfer) => Ok(transfer.0.wait().map(drop)?),
            None => Err(CourierError::Protocol("a slot was freed that was not in use")),
        }
    }
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

/// Entries in portions, each of which fits into a word.
pub fn pages(entries: Vec<Listed>) -> Vec<Vec<Listed>> {
    let mut pages = vec![Vec::new()];
    let mut bytes = 0;
    for entry in entries {
        // As JSON writes it, whatever characters it has, with the length of a file.
        let long = serde_json::to_string(&entry.path).map_or(WORD_BYTES_MAX, |text| text.len()) + 64;
        bytes += long;
        if bytes > WORD_BYTES_MAX / 2 {
            pages.push(Vec::new());
            bytes = long;
        }
        if let Some(page) = pages.last_mut() {
            page.push(entry);
        }
    }
    pages
}

pub fn encode(word: &Word) -> Vec<u8> {
    serde_json::to_vec(word).expect("words are plain data")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::NAME_BYTES_MAX;

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

    #[test]
    fn chunks_come_out_in_their_order_and_only_those_that_can_be() {
        let chunk = |index, slot, bytes| Word::Chunk {
            stream: 1,
            index,
            slot,
            bytes,
        };
        let mut order: Order<u64> = Order::default();
        let take = |order: &mut Order<u64>, word| order.take_in(word, |place| Ok(place.slot));
        take(&mut order, chunk(1, 1, 5)).unwrap();
        assert!(order.next().is_none());
        take(&mut order, chunk(0, 0, SLOT_BYTES)).unwrap();
        for wrong in [
            chunk(1, 2, 5),
            chunk(2, 1, 5),
            chunk(2, 4, 5),
            chunk(2, 2, 0),
            chunk(2, 2, SLOT_BYTES + 1),
            chunk(4, 2, 5),
            chunk(u64::MAX, 2, 5),
            Word::Done { stream: 1 },
        ] {
            assert!(take(&mut order, wrong.clone()).is_err(), "{wrong:?}");
        }
        assert_eq!(
            order.next(),
            Some((
                Place {
                    slot: 0,
                    bytes: SLOT_BYTES
                },
                0
            ))
        );
        assert_eq!(order.next(), Some((Place { slot: 1, bytes: 5 }, 1)));
        assert!(
            take(&mut order, chunk(0, 0, 5)).is_err(),
            "what has been taken does not come again"
        );
        assert!(!order.is_over());
        let end = |chunks| Word::End { stream: 1, chunks };
        assert!(take(&mut order, end(1)).is_err());
        take(&mut order, end(2)).unwrap();
        assert!(order.is_over());
    }

    #[test]
    fn entries_of_any_names_fit_into_words() {
        let name = |nth: u64| "\u{1}\"é".repeat(1 + (nth as usize * 37) % 1024);
        let entries: Vec<Listed> = (0..200)
            .map(|nth| Listed {
                path: name(nth),
                bytes: Some(u64::MAX),
            })
            .collect();
        // As long as a name can be, of what takes most.
        let longest = Listed {
            path: "\u{1}".repeat(NAME_BYTES_MAX),
            bytes: None,
        };
        let entries = [entries, vec![longest]].concat();
        let pages = pages(entries.clone());
        assert!(pages.len() > 10);
        for page in &pages {
            let word = Word::Entries {
                stream: u64::MAX,
                entries: page.clone(),
                more: true,
                left_out: u64::MAX,
            };
            assert!(Word::decode(&encode(&word)).is_some(), "{} bytes", encode(&word).len());
        }
        assert_eq!(pages.concat(), entries);
    }
}
