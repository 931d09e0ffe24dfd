//! Control messages in order and once, over paths that lose, repeat and reorder.
//!
//! [`Outbox`] numbers, keeps and resends; [`Inbox`] puts in order and drops repeats; [`Replay`] lets each sealed message in once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use weft_plan::Time;

use super::config::MAX_MESSAGE_BYTES;
use super::event::{NotificationId, SessionError, Via};
use super::keys::CODE_BYTES;
use super::wire::{CONTROL_OVERHEAD, SELECTIVE_BYTES, TRAFFIC_OVERHEAD};
use crate::wire::Writer;

/// Controls sent and not acknowledged, at most: as many as a selective acknowledgement can name.
const WINDOW_MESSAGES: usize = SELECTIVE_BYTES * 8;
/// Bytes of the same.
const WINDOW_BYTES: usize = 1 << 20;
/// How long an end may keep an acknowledgement back, in the hope that something goes the same way anyhow.
pub(super) const ACK_DELAY: Time = Time::from_ms(5);
/// An acknowledgement is not kept back beyond so many controls.
pub(super) const ACK_EVERY: u32 = 16;
/// Nothing is resent sooner, so that a busy peer on a fast link is not taken for a lossy link.
const RESEND_MIN: Time = Time::from_ms(50);
/// Nothing is resent later than this after it was last sent, unless the round trip itself takes longer.
const RESEND_MAX: Time = Time::from_secs(1);
/// A control counts as lost once so many later ones have been received.
const REORDER_MAX: usize = 3;

/// What this end has said and the peer has not acknowledged.
#[derive(Debug)]
pub(super) struct Outbox {
    /// The sequence of `entries[0]`.
    first: u64,
    entries: VecDeque<Entry>,
    /// The sequence of the first control that has never been sent.
    unsent: u64,
    /// Controls that were sent and must be sent again.
    lost: BTreeSet<u64>,
    queued_bytes: usize,
    sent_bytes: usize,
    max_messages: usize,
    max_bytes: usize,
    /// Smoothed, the peer's keeping back included.
    round_trip: Option<Time>,
    /// How many times in a row nothing came of waiting.
    backoff: u32,
}

#[derive(Debug)]
struct Entry {
    body: Vec<u8>,
    /// Told to the owner when the peer acknowledges it.
    notification: Option<NotificationId>,
    sent_at: Time,
    via: Via,
    sends: u32,
    acknowledged: bool,
}

/// What an acknowledgement brought.
#[derive(Debug, Default)]
pub(super) struct Acknowledged {
    pub(super) notifications: Vec<NotificationId>,
    /// How long a control that was sent once, on this path, took to be acknowledged.
    pub(super) sample: Option<(Via, Time)>,
}

/// An acknowledgement of what was never sent.
#[derive(Debug)]
pub(super) struct FalseAck;

impl Outbox {
    pub(super) fn new(max_messages: usize, max_bytes: usize) -> Outbox {
        Outbox {
            first: 1,
            entries: VecDeque::new(),
            unsent: 1,
            lost: BTreeSet::new(),
            queued_bytes: 0,
            sent_bytes: 0,
            max_messages,
            max_bytes,
            round_trip: None,
            backoff: 0,
        }
    }

    /// Whether the caller's own messages are still accepted.
    pub(super) fn room_for(&self, bytes: usize) -> Result<(), SessionError> {
        if self.entries.len() >= self.max_messages || self.queued_bytes.saturating_add(bytes) > self.max_bytes {
            return Err(SessionError::QueueFull);
        }
        Ok(())
    }

    /// Whether the peer has made this end queue more answers than any peer would need.
    pub(super) fn is_flooded(&self) -> bool {
        self.entries.len() > self.max_messages.saturating_mul(2) + 4 * super::config::MAX_HELD
    }

    /// Appends a control and returns its sequence.
    pub(super) fn push(&mut self, body: Vec<u8>, notification: Option<NotificationId>) -> u64 {
        self.queued_bytes += body.len();
        self.entries.push_back(Entry {
            body,
            notification,
            sent_at: Time::ZERO,
            via: Via(0),
            sends: 0,
            acknowledged: false,
        });
        self.first + self.entries.len() as u64 - 1
    }

    /// Whether something could be sent now.
    pub(super) fn is_ready(&self) -> bool {
        !self.lost.is_empty() || self.may_send_new()
    }

    /// The path that the next control to be resent was last sent on, so that another one can be tried.
    pub(super) fn resend_from(&self) -> Option<Via> {
        self.lost.first().map(|sequence| self.entry(*sequence).via)
    }

    /// Bytes that the next message would carry, roughly: enough to reserve.
    pub(super) fn ready_bytes(&self) -> usize {
        let next = self.lost.first().copied().unwrap_or(self.unsent);
        match self.entries.get((next - self.first) as usize) {
            Some(entry) => entry.body.len() + CONTROL_OVERHEAD,
            None => 0,
        }
    }

    /// Appends as many controls as fit, the lost ones first, and takes them for sent on `via`.
    pub(super) fn fill(&mut self, w: &mut Writer, via: Via, now: Time) -> usize {
        let mut count = 0;
        while let Some(sequence) = self.next_ready() {
            let index = (sequence - self.first) as usize;
            let entry = &mut self.entries[index];
            if w.buf.len() + entry.body.len() + CONTROL_OVERHEAD + CODE_BYTES > MAX_MESSAGE_BYTES {
                break;
            }
            w.varint(sequence).bytes(&entry.body);
            entry.sent_at = now;
            entry.via = via;
            entry.sends += 1;
            if !self.lost.remove(&sequence) {
                self.unsent += 1;
                self.sent_bytes += entry.body.len();
            }
            count += 1;
        }
        count
    }

    /// Takes note of what the peer has received: all before `next`, and those after it that `selective` names.
    pub(super) fn acknowledge(&mut self, next: u64, selective: &[u8], now: Time) -> Result<Acknowledged, FalseAck> {
        if next > self.unsent {
            return Err(FalseAck);
        }
        let mut brought = Acknowledged::default();
        let mut newest: Option<(Via, Time)> = None;
        while self.first < next {
            let Some(mut entry) = self.entries.pop_front() else {
                break;
            };
            self.queued_bytes -= entry.body.len();
            self.mark(self.first, &mut entry, &mut newest, &mut brought);
            self.first += 1;
        }
        for sequence in selected(next, selective) {
            if sequence >= self.unsent {
                return Err(FalseAck);
            }
            let Some(index) = sequence.checked_sub(self.first) else {
                continue;
            };
            let index = index as usize;
            if !self.entries[index].acknowledged {
                let mut entry = std::mem::replace(&mut self.entries[index], Entry::hole());
                self.mark(sequence, &mut entry, &mut newest, &mut brought);
                self.queued_bytes -= entry.body.len();
            }
        }
        if let Some((via, sent_at)) = newest {
            let sample = now.saturating_sub(sent_at);
            brought.sample = Some((via, sample));
            self.round_trip = Some(match self.round_trip {
                Some(before) => Time::from_ns(before.as_ns() / 8 * 7 + sample.as_ns() / 8),
                None => sample,
            });
        }
        self.find_losses(next, selective);
        Ok(brought)
    }

    /// When, without an acknowledgement, something counts as lost.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        // The oldest one keeps the time; the others wait for it.
        let mut sent = (self.first..self.unsent).zip(&self.entries);
        let (sequence, oldest) = sent.find(|(_, entry)| !entry.acknowledged)?;
        (!self.lost.contains(&sequence)).then(|| oldest.sent_at.saturating_add(self.patience()))
    }

    /// Takes what has waited too long for lost, one message's worth at most, and returns the paths it was sent on.
    pub(super) fn on_timeout(&mut self, now: Time) -> Vec<Via> {
        let mut paths = Vec::new();
        if self.next_timeout().is_none_or(|due| due > now) {
            return paths;
        }
        let patience = self.patience();
        let mut bytes = 0;
        for (sequence, entry) in (self.first..self.unsent).zip(&self.entries) {
            let late = !entry.acknowledged && entry.sent_at.saturating_add(patience) <= now;
            if !late || self.lost.contains(&sequence) {
                continue;
            }
            bytes += entry.body.len() + CONTROL_OVERHEAD;
            if bytes > MAX_MESSAGE_BYTES - TRAFFIC_OVERHEAD && !paths.is_empty() {
                break;
            }
            self.lost.insert(sequence);
            if !paths.contains(&entry.via) {
                paths.push(entry.via);
            }
        }
        self.backoff = (self.backoff + 1).min(16);
        paths
    }

    /// What was sent on a path that is gone must be sent again.
    pub(super) fn on_path_lost(&mut self, via: Via) {
        for (sequence, entry) in (self.first..self.unsent).zip(&self.entries) {
            if entry.via == via && !entry.acknowledged {
                self.lost.insert(sequence);
            }
        }
        self.backoff = 0;
    }

    /// Whether the peer has acknowledged the control of this sequence.
    pub(super) fn is_acknowledged(&self, sequence: u64) -> bool {
        sequence < self.first
    }

    fn mark(&mut self, sequence: u64, entry: &mut Entry, newest: &mut Option<(Via, Time)>, brought: &mut Acknowledged) {
        self.lost.remove(&sequence);
        if entry.acknowledged {
            return;
        }
        self.sent_bytes -= entry.body.len();
        self.backoff = 0;
        brought.notifications.extend(entry.notification);
        // A control that was sent twice says nothing: nobody knows which of the two was acknowledged.
        if entry.sends == 1 && newest.is_none_or(|(_, at)| at <= entry.sent_at) {
            *newest = Some((entry.via, entry.sent_at));
        }
    }

    /// A control that later ones have overtaken, sent once, is taken for lost without waiting.
    fn find_losses(&mut self, next: u64, selective: &[u8]) {
        let mut later = selected(next, selective).count();
        if later < REORDER_MAX {
            return;
        }
        for (sequence, entry) in (self.first..self.unsent).zip(&self.entries) {
            if entry.acknowledged {
                later -= 1;
            } else if later >= REORDER_MAX && entry.sends == 1 {
                self.lost.insert(sequence);
            }
            if later < REORDER_MAX {
                break;
            }
        }
    }

    fn next_ready(&self) -> Option<u64> {
        match self.lost.first() {
            Some(sequence) => Some(*sequence),
            None => self.may_send_new().then_some(self.unsent),
        }
    }

    fn may_send_new(&self) -> bool {
        let sent = (self.unsent - self.first) as usize;
        match self.entries.get(sent) {
            Some(entry) => sent < WINDOW_MESSAGES && (sent == 0 || self.sent_bytes + entry.body.len() <= WINDOW_BYTES),
            None => false,
        }
    }

    fn patience(&self) -> Time {
        let round_trip = self.round_trip.unwrap_or(RESEND_MIN).as_ns();
        let base = Time::from_ns(round_trip.saturating_mul(2))
            .saturating_add(ACK_DELAY)
            .max(RESEND_MIN);
        let grown = Time::from_ns(base.as_ns().saturating_mul(1 << self.backoff));
        grown.min(RESEND_MAX.max(base))
    }

    fn entry(&self, sequence: u64) -> &Entry {
        &self.entries[(sequence - self.first) as usize]
    }
}

impl Entry {
    /// What stays of a control that was acknowledged before its predecessors.
    fn hole() -> Entry {
        Entry {
            body: Vec::new(),
            notification: None,
            sent_at: Time::ZERO,
            via: Via(0),
            sends: 1,
            acknowledged: true,
        }
    }
}

fn selected(next: u64, selective: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let bits = (0u64..).zip(
        selective
            .iter()
            .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)),
    );
    bits.filter(|(_, set)| *set)
        .filter_map(move |(bit, _)| next.checked_add(1 + bit))
}

/// What the peer has said, put in order.
#[derive(Debug)]
pub(super) struct Inbox {
    /// The sequence of the next control to be handed on.
    next: u64,
    /// Controls that came before their predecessors.
    early: BTreeMap<u64, Vec<u8>>,
    early_bytes: usize,
}

/// What to do with a control that came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It is the next one: handle it, then call [`Inbox::advance`].
    Now,
    /// Kept until its predecessors are here, or dropped for lack of room; the peer sends it again.
    Later,
    /// It has been here before.
    Past,
}

impl Inbox {
    pub(super) fn new() -> Inbox {
        Inbox {
            next: 1,
            early: BTreeMap::new(),
            early_bytes: 0,
        }
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn offer(&mut self, sequence: u64, body: &[u8]) -> Turn {
        if sequence < self.next || self.early.contains_key(&sequence) {
            return Turn::Past;
        }
        if sequence == self.next {
            return Turn::Now;
        }
        let near = sequence - self.next <= WINDOW_MESSAGES as u64;
        if near && self.early_bytes + body.len() <= 2 * WINDOW_BYTES {
            self.early_bytes += body.len();
            self.early.insert(sequence, body.to_vec());
        }
        Turn::Later
    }

    pub(super) fn advance(&mut self) {
        // Kept controls may have been sent again before their turn came.
        if let Some(body) = self.early.remove(&self.next) {
            self.early_bytes -= body.len();
        }
        self.next += 1;
    }

    /// The next control, if it came early.
    pub(super) fn take_early(&mut self) -> Option<Vec<u8>> {
        let body = self.early.remove(&self.next)?;
        self.early_bytes -= body.len();
        Some(body)
    }

    /// Which controls after the next one are here.
    pub(super) fn selective(&self) -> Vec<u8> {
        let mut bits = Vec::new();
        for sequence in self.early.keys() {
            let Some(bit) = sequence.checked_sub(self.next + 1) else {
                continue;
            };
            let byte = bit as usize / 8;
            if byte >= SELECTIVE_BYTES {
                break;
            }
            bits.resize(byte + 1, 0);
            bits[byte] |= 1 << (bit % 8);
        }
        bits
    }
}

/// Lets the message of each number in once.
#[derive(Debug)]
pub(super) struct Replay {
    /// One more than the highest number let in.
    end: u64,
    /// Bit `number % REPLAY_WINDOW` for the numbers just below `end`.
    seen: [u64; REPLAY_WORDS],
}

const REPLAY_WORDS: usize = 32;
const REPLAY_WINDOW: u64 = 64 * REPLAY_WORDS as u64;

impl Replay {
    pub(super) fn new() -> Replay {
        Replay {
            end: 0,
            seen: [0; REPLAY_WORDS],
        }
    }

    /// False for a number that was let in before, or is too old to tell. Only for messages whose code was right.
    pub(super) fn admit(&mut self, number: u64) -> bool {
        if number == u64::MAX || number.saturating_add(REPLAY_WINDOW) < self.end {
            return false;
        }
        if number >= self.end {
            if number - self.end >= REPLAY_WINDOW {
                self.seen = [0; REPLAY_WORDS];
            } else {
                for passed in self.end..=number {
                    self.clear(passed);
                }
            }
            self.end = number + 1;
        }
        let (word, bit) = place(number);
        let fresh = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        fresh
    }

    fn clear(&mut self, number: u64) {
        let (word, bit) = place(number);
        self.seen[word] &= !bit;
    }
}

fn place(number: u64) -> (usize, u64) {
    let at = number % REPLAY_WINDOW;
    ((at / 64) as usize, 1 << (at % 64))
}
