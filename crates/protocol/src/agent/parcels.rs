//! Parcels: ordered bytes between two agents, beside the session and at the price of a path message.
//!
//! A session's traffic carries codes, is acknowledged piece by piece and waits for its turn, which costs more than a small collective
//! may take. A parcel has none of this: it goes out on one path that the session vouches for, and the path keeps the order. What was
//! sent is kept until the peer has said that it came; if the path is lost, all of it goes again on another, and the peer drops what it
//! had. So parcels arrive once and in order for as long as the session lives.
//!
//! ```text
//! parcel   04  number  next expected  group  payload
//! receipt  05  next expected
//! ```
//!
//! A path that may drop messages may as well change and reorder them. There each carries a sum at its end, without which one flipped bit of a
//! receipt would let go of what never came; and what comes ahead of its turn is kept for a while.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use weft_plan::Time;

use super::paths::Stage;
use super::{Core, PeerError};
use crate::memory::Digest;
use crate::transfer::PeerId;
use crate::transport::{Body, Op, OpId, Transport};

const KIND_PARCEL: u8 = 4;
const KIND_RECEIPT: u8 = 5;
const HEAD_BYTES: usize = 1 + 3 * 8;
/// The most that one parcel carries, over any transport.
pub const MAX_PARCEL_BYTES: usize = crate::session::MAX_MESSAGE_BYTES - HEAD_BYTES - SUM_BYTES;
const SUM_BYTES: usize = 8;
/// Without a word to the peer that could carry it, a receipt goes out after so many parcels, or so many bytes.
const RECEIPT_AFTER: u64 = 32;
const RECEIPT_AFTER_BYTES: usize = 256 << 10;
/// What the peer has not confirmed. Beyond it, nothing more is taken.
const UNCONFIRMED_BYTES_MAX: usize = 8 << 20;
/// What nobody here has asked for. A peer that goes on beyond it is not one of ours.
const UNTAKEN_BYTES_MAX: usize = 1 << 30;
/// Over a path that may drop messages, what is not confirmed for so long goes again.
const RESEND_AFTER: Time = Time::from_ms(20);
/// So many parcels that come ahead of their turn are kept.
const AHEAD_MAX: u64 = 64;
/// Groups that are over and remembered, so that what comes late for them is dropped.
const CLOSED_GROUPS_MAX: usize = 256;
/// Buffers of long parcels that are used again, so that memory for them is neither fetched nor cleared each time.
const SPARE_MAX: usize = 16;
const SPARE_MIN_BYTES: usize = 8 << 10;
/// Parcels that may come on a path before this side knows that the session vouches for it.
const EARLY_MAX: usize = 64;

/// A message, as it came.
#[derive(Debug)]
pub struct Parcel {
    pub from: PeerId,
    bytes: Vec<u8>,
}

impl Parcel {
    /// How many bytes precede the payload in [`into_bytes`](Parcel::into_bytes).
    pub const PAYLOAD_AT: usize = HEAD_BYTES;

    pub fn payload(&self) -> &[u8] {
        &self.bytes[HEAD_BYTES..]
    }
    /// The whole of it, without a copy.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// What is under way to and from one peer.
#[derive(Debug, Default)]
pub(super) struct Parcels {
    /// The path that they go out on.
    via: Option<u32>,
    /// Not confirmed, oldest first.
    kept: VecDeque<Arc<[u8]>>,
    kept_bytes: usize,
    /// How many of those have gone out on the present path.
    posted: usize,
    /// The number of the first of them.
    first: u64,
    /// The number that comes next, and what came ahead of it.
    expected: u64,
    ahead: BTreeMap<u64, Vec<u8>>,
    /// What the peer was last told of that.
    confirmed: u64,
    unconfirmed_bytes: usize,
    answered_at: Time,
    /// When to send again what a path may have dropped.
    pub(super) resend_at: Option<Time>,
    untaken_bytes: usize,
}

#[cfg(test)]
impl Parcels {
    /// Whether all that was sent has been confirmed but for what no receipt is due for.
    pub(super) fn is_empty(&self) -> bool {
        self.kept.len() < RECEIPT_AFTER as usize
    }
}

/// Parcels of one group that wait to be taken.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) group: u64,
    waiting: VecDeque<Parcel>,
}

/// Buffers of parcels that their peer has confirmed, for others as long. Collectives send the same lengths over and over.
#[derive(Debug, Default)]
pub(super) struct Spare(VecDeque<Arc<[u8]>>);

impl Spare {
    fn keep(&mut self, bytes: Arc<[u8]>) {
        if bytes.len() >= SPARE_MIN_BYTES {
            self.0.truncate(SPARE_MAX - 1);
            self.0.push_front(bytes);
        }
    }

    /// A buffer with anything in it, to be written by whoever has asked.
    fn take(&mut self, len: usize) -> Arc<[u8]> {
        // A transport may not have let go of it yet.
        let free = |bytes: &mut Arc<[u8]>| bytes.len() == len && Arc::get_mut(bytes).is_some();
        let found = self.0.iter_mut().position(free).and_then(|at| self.0.remove(at));
        found.unwrap_or_else(|| std::iter::repeat_n(0, len).collect())
    }
}

/// Whether a message on a path is one of these, and not the session's.
pub(super) fn is_parcel(message: &[u8]) -> bool {
    matches!(message.first(), Some(&(KIND_PARCEL | KIND_RECEIPT)))
}

impl<T: ?Sized + Transport> Core<T> {
    /// Sends a parcel: the parts, one after the other. `false`: too much is under way, so try again later.
    ///
    /// # Panics
    /// Where the parts are longer than [`MAX_PARCEL_BYTES`].
    pub fn send_parcel(&mut self, to: PeerId, group: u64, parts: &[&[u8]], now: Time) -> Result<bool, PeerError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.send_parcel_with(to, group, len, now, |mut payload| {
            for part in parts {
                let (first, rest) = payload.split_at_mut(part.len());
                first.copy_from_slice(part);
                payload = rest;
            }
        })
    }

    /// Sends a parcel of `len` bytes, all of which `fill` writes where they go out from. See [`send_parcel`](Core::send_parcel).
    ///
    /// # Panics
    /// Where it is longer than [`MAX_PARCEL_BYTES`].
    pub fn send_parcel_with(
        &mut self,
        to: PeerId,
        group: u64,
        len: usize,
        now: Time,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<bool, PeerError> {
        self.established(to)?;
        assert!(len <= MAX_PARCEL_BYTES, "a parcel of {len} bytes");
        let Some(peer) = self.peers.at_mut(to.0) else {
            return Err(PeerError::NotConnected);
        };
        let (parcels, spare) = (&mut peer.parcels, &mut self.spare);
        if parcels.kept_bytes + len > UNCONFIRMED_BYTES_MAX {
            return Ok(false);
        }
        let number = parcels.first + parcels.kept.len() as u64;
        let mut bytes = spare.take(HEAD_BYTES + len);
        let written = Arc::get_mut(&mut bytes).expect("a buffer that nobody else has");
        written[0] = KIND_PARCEL;
        for (at, word) in [number, parcels.expected, group].into_iter().enumerate() {
            written[1 + 8 * at..9 + 8 * at].copy_from_slice(&word.to_le_bytes());
        }
        fill(&mut written[HEAD_BYTES..]);
        parcels.confirmed = parcels.expected;
        parcels.unconfirmed_bytes = 0;
        parcels.kept_bytes += bytes.len();
        parcels.kept.push_back(bytes);
        self.post_parcels(to, now);
        Ok(true)
    }

    /// The next parcel of a group, from whichever peer.
    pub fn next_parcel(&mut self, group: u64) -> Option<Parcel> {
        let inbox = self.inboxes.iter_mut().find(|inbox| inbox.group == group)?;
        let parcel = inbox.waiting.pop_front()?;
        if let Some(peer) = self.peers.at_mut(parcel.from.0) {
            peer.parcels.untaken_bytes -= parcel.bytes.len();
        }
        Some(parcel)
    }

    pub fn has_parcels(&self, group: u64) -> bool {
        self.inboxes
            .iter()
            .any(|inbox| inbox.group == group && !inbox.waiting.is_empty())
    }

    /// Keeps what comes for a group from now on, also if it was over before.
    pub fn open_parcels(&mut self, group: u64) {
        self.closed_groups.retain(|closed| *closed != group);
    }

    /// Forgets what has come for a group that is over, and whatever still comes.
    pub fn drop_parcels(&mut self, group: u64) {
        while self.next_parcel(group).is_some() {}
        self.inboxes.retain(|inbox| inbox.group != group);
        self.closed_groups.push_back(group);
        if self.closed_groups.len() > CLOSED_GROUPS_MAX {
            self.closed_groups.pop_front();
        }
    }

    pub(super) fn on_parcel(&mut self, via: u32, mut message: Vec<u8>, now: Time) {
        let Some(path) = self.paths.at_mut(via) else { return };
        let Some(from) = path.peer else { return };
        if path.stage != Stage::Joined {
            // The session may vouch for the path in a moment; until then nothing on it is believed, and of a stranger nothing is kept. A transport
            // that strangers reach hands what they say over one by one, so what a peer says after its introduction is not lost here.
            let known = self.peers.at(from.0).is_some_and(|peer| peer.identity.is_some());
            let within_reach = !self.slots[path.slot].transport.capabilities().awaits_vouching;
            if !(known || within_reach) {
                return;
            }
            let is_receipt = |message: &[u8]| message.first() == Some(&KIND_RECEIPT);
            if is_receipt(&message) && path.early.last().is_some_and(|last| is_receipt(last)) {
                // A receipt says all that the one before it did.
                path.early.pop();
            }
            if path.early.len() == EARLY_MAX {
                // On a path that loses nothing, what has gone astray here would be missed for ever; what a lost path took with it goes again.
                if self.slots[path.slot].transport.capabilities().reliable_messages {
                    self.close_path(via);
                }
                return;
            }
            path.early.push(message);
            return;
        }
        let reliable = self.slots[path.slot].transport.capabilities().reliable_messages;
        if !reliable && !take_sum(&mut message) {
            return;
        }
        // What is confirmed here went out on a path of this side's choice, which need not be the one that the word came on.
        let lossy = self.may_drop_parcels(from);
        if lossy {
            // When to send again may change.
            self.touch(from);
        }
        let Some(peer) = self.peers.at_mut(from.0) else { return };
        let parcels = &mut peer.parcels;
        let (number, next, group) = match message.first() {
            Some(&KIND_PARCEL) => (word(&message, 1), word(&message, 9), word(&message, 17)),
            _ => (None, word(&message, 1), None),
        };
        let Some(next) = next else { return self.close_path(via) };
        // Only what has been sent can have come.
        if next > parcels.first + parcels.kept.len() as u64 {
            return self.close_path(via);
        }
        while parcels.first < next {
            if let Some(bytes) = parcels.kept.pop_front() {
                parcels.kept_bytes -= bytes.len();
                parcels.posted = parcels.posted.saturating_sub(1);
                self.spare.keep(bytes);
            }
            parcels.first += 1;
            // Those behind it may have been dropped.
            let left = lossy && !parcels.kept.is_empty();
            parcels.resend_at = left.then_some(now.saturating_add(RESEND_AFTER));
        }
        let (Some(number), Some(_)) = (number, group) else {
            return;
        };
        if number < parcels.expected {
            // It comes again because its sender does not know; all those before it do too, and one answer is enough.
            if number + 1 == parcels.expected || now >= parcels.answered_at.saturating_add(RESEND_AFTER) {
                self.send_receipt(from, now);
            }
            return;
        }
        if number > parcels.expected {
            if !reliable && number - parcels.expected <= AHEAD_MAX {
                parcels.ahead.insert(number, message);
            }
            return;
        }
        let mut turn = Some(message);
        while let Some(message) = turn {
            if !self.take_parcel(from, message, reliable, now) {
                return;
            }
            let Some(peer) = self.peers.at_mut(from.0) else { return };
            turn = peer.parcels.ahead.remove(&peer.parcels.expected);
        }
    }

    /// Takes in the parcel whose turn it is. `false`: the peer was parted with over it.
    fn take_parcel(&mut self, from: PeerId, message: Vec<u8>, reliable: bool, now: Time) -> bool {
        let (Some(peer), Some(group)) = (self.peers.at_mut(from.0), word(&message, 17)) else {
            return false;
        };
        let parcels = &mut peer.parcels;
        parcels.expected += 1;
        parcels.unconfirmed_bytes += message.len();
        let wanted = !self.closed_groups.contains(&group);
        if wanted {
            parcels.untaken_bytes += message.len();
        }
        if parcels.untaken_bytes > UNTAKEN_BYTES_MAX {
            self.disconnect(from, now);
            return false;
        }
        let due = parcels.expected - parcels.confirmed >= RECEIPT_AFTER
            || parcels.unconfirmed_bytes >= RECEIPT_AFTER_BYTES
            || !reliable;
        if wanted {
            let at = match self.inboxes.iter().position(|inbox| inbox.group == group) {
                Some(at) => at,
                None => {
                    self.inboxes.push(Inbox {
                        group,
                        waiting: VecDeque::new(),
                    });
                    self.inboxes.len() - 1
                }
            };
            self.inboxes[at].waiting.push_back(Parcel { from, bytes: message });
            self.parcels_came = true;
        }
        if due {
            self.send_receipt(from, now);
        }
        true
    }

    /// What came on a path before the session vouched for it.
    pub(super) fn on_early_parcels(&mut self, via: u32, now: Time) {
        let early = self.paths.at_mut(via).map(|path| std::mem::take(&mut path.early));
        for message in early.into_iter().flatten() {
            self.on_parcel(via, message, now);
        }
    }

    /// Whether any parcel has come since this was last asked.
    pub fn have_parcels_come(&mut self) -> bool {
        std::mem::take(&mut self.parcels_came)
    }

    /// Parcels that a path may have taken with it go again on another.
    pub(super) fn on_parcel_path_lost(&mut self, peer: PeerId, via: u32, now: Time) {
        if let Some(state) = self.peers.at_mut(peer.0)
            && state.parcels.via == Some(via)
        {
            state.parcels.via = None;
            state.parcels.posted = 0;
            self.post_parcels(peer, now);
        }
    }

    pub(super) fn on_parcels_due(&mut self, peer: PeerId, now: Time) {
        if let Some(state) = self.peers.at_mut(peer.0)
            && state.parcels.resend_at.is_some_and(|at| at <= now)
        {
            state.parcels.posted = 0;
            state.parcels.resend_at = None;
            self.post_parcels(peer, now);
        }
    }

    /// Hands over what the path has room for.
    pub(super) fn post_parcels(&mut self, to: PeerId, now: Time) {
        let Some(peer) = self.peers.at(to.0) else { return };
        if peer.parcels.kept.len() == peer.parcels.posted {
            return;
        }
        let Some(via) = peer.parcels.via.or_else(|| self.quickest_path(to)) else {
            return;
        };
        let deadline = now.saturating_add(self.settings.session.silence_max);
        let (Some(peer), Some(path)) = (self.peers.at_mut(to.0), self.paths.at(via)) else {
            return;
        };
        let parcels = &mut peer.parcels;
        parcels.via = Some(via);
        let transport = &mut self.slots[path.slot].transport;
        let reliable = transport.capabilities().reliable_messages;
        while let Some(bytes) = parcels.kept.get(parcels.posted) {
            let bytes = if reliable {
                bytes.clone()
            } else {
                add_sum(bytes.to_vec()).into()
            };
            let op = Op::new(
                OpId(super::turn::MESSAGE_BIT | self.next_message),
                deadline,
                Body::Message(bytes),
            );
            if transport.post(path.id, std::slice::from_ref(&op), now) != Ok(1) {
                break;
            }
            self.next_message += 1;
            self.posted[path.slot] = true;
            parcels.posted += 1;
        }
        if !reliable && parcels.resend_at.is_none() {
            parcels.resend_at = Some(now.saturating_add(RESEND_AFTER));
            self.touch(to);
        }
    }

    /// Whether the path that parcels to a peer go out on may drop some.
    fn may_drop_parcels(&self, to: PeerId) -> bool {
        let via = self.peers.at(to.0).and_then(|peer| peer.parcels.via);
        let path = via.and_then(|via| self.paths.at(via));
        path.is_some_and(|path| !self.slots[path.slot].transport.capabilities().reliable_messages)
    }

    fn send_receipt(&mut self, to: PeerId, now: Time) {
        let Some(peer) = self.peers.at_mut(to.0) else { return };
        let next = peer.parcels.expected;
        peer.parcels.confirmed = next;
        peer.parcels.unconfirmed_bytes = 0;
        peer.parcels.answered_at = now;
        let Some(via) = peer.parcels.via.or_else(|| self.quickest_path(to)) else {
            return;
        };
        let mut bytes = Vec::with_capacity(9 + SUM_BYTES);
        bytes.push(KIND_RECEIPT);
        bytes.extend_from_slice(&next.to_le_bytes());
        if let Some(path) = self.paths.at_mut(via) {
            if !self.slots[path.slot].transport.capabilities().reliable_messages {
                bytes = add_sum(bytes);
            }
            path.outbox.push_back(bytes.into());
            self.send_waiting(via, now);
        }
    }

    /// The path with the least latency among those that the session vouches for, rather one that drops nothing.
    fn quickest_path(&self, peer: PeerId) -> Option<u32> {
        let joined = self
            .paths
            .iter()
            .filter(|(_, path)| path.peer == Some(peer) && path.stage == Stage::Joined);
        let rated = joined.map(|(via, path)| {
            let capabilities = self.slots[path.slot].transport.capabilities();
            (!capabilities.reliable_messages, capabilities.latency(), via)
        });
        rated.min().map(|(_, _, via)| via)
    }
}

fn word(message: &[u8], at: usize) -> Option<u64> {
    let bytes = message.get(at..at + 8)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

fn sum_of(bytes: &[u8]) -> [u8; SUM_BYTES] {
    let mut digest = Digest::default();
    digest.update(bytes);
    digest.finish().to_le_bytes()
}

fn add_sum(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = sum_of(&bytes);
    bytes.extend_from_slice(&sum);
    bytes
}

/// Whether the sum at the end of a message is that of the rest, which is left.
fn take_sum(message: &mut Vec<u8>) -> bool {
    let Some(len) = message.len().checked_sub(SUM_BYTES) else {
        return false;
    };
    let (rest, sum) = message.split_at(len);
    let right = sum_of(rest) == sum;
    message.truncate(len);
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_when_nobody_has_it() {
        let mut spare = Spare::default();
        let first = spare.take(SPARE_MIN_BYTES);
        let (address, held) = (first.as_ptr(), Arc::clone(&first));
        spare.keep(first);
        assert_ne!(
            spare.take(SPARE_MIN_BYTES).as_ptr(),
            address,
            "a transport still reads it"
        );
        drop(held);
        assert_ne!(spare.take(SPARE_MIN_BYTES + 1).as_ptr(), address, "it is too short");
        assert_eq!(spare.take(SPARE_MIN_BYTES).as_ptr(), address);
    }

    #[test]
    fn few_buffers_are_kept_and_no_short_ones() {
        let mut spare = Spare::default();
        spare.keep(spare_bytes(SPARE_MIN_BYTES - 1));
        assert!(spare.0.is_empty());
        (0..2 * SPARE_MAX).for_each(|more| spare.keep(spare_bytes(SPARE_MIN_BYTES + more)));
        let kept: Vec<usize> = spare.0.iter().map(|bytes| bytes.len() - SPARE_MIN_BYTES).collect();
        assert_eq!(
            kept,
            (SPARE_MAX..2 * SPARE_MAX).rev().collect::<Vec<_>>(),
            "the latest stay"
        );
    }

    fn spare_bytes(len: usize) -> Arc<[u8]> {
        vec![0; len].into()
    }
}
