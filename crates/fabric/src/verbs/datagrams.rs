//! The unreliable queue pair of a rail: introductions come and go through it.

use std::sync::Arc;

use weft_sys::verbs as sys;

use super::address::Doorstep;
use super::buffers::Buffers;
use super::device::ProtectionDomain;
use super::introduction::{LETTER_BYTES_MAX, Letter};
use super::options::{VerbsError, VerbsOptions};
use super::queue::{AddressHandle, CompletionQueue, QueuePair, QueueSize};
use super::rail::Rail;
use super::registration::Registrations;

/// Datagrams that can come in before somebody looks.
pub(super) const RECEIVES: usize = 64;
/// Datagrams that can be on their way out.
pub(super) const SENDS: usize = 32;
/// The device puts the sender's route before every datagram.
const ROUTE_BYTES: usize = 40;

/// Sends and receives letters.
#[derive(Debug)]
pub(super) struct Datagrams {
    // The queue pair goes before the memory that it was given.
    pair: QueuePair,
    domain: Arc<ProtectionDomain>,
    incoming: Buffers,
    outgoing: Buffers,
    /// Where the datagrams under way go to; a place without one is free.
    under_way: Vec<Option<AddressHandle>>,
    qkey: u32,
}

impl Datagrams {
    pub(super) fn start(
        rail: &Rail,
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        registrations: &mut Registrations,
        qkey: u32,
        number: impl Fn(usize) -> u64,
    ) -> Result<Datagrams, VerbsError> {
        let failed = |step| move |source| VerbsError::System { step, source };
        let size = QueueSize {
            sends: SENDS as u32,
            receives: RECEIVES as u32,
            pieces: 1,
            inline_bytes: 0,
        };
        let pair = QueuePair::new(domain, completions, None, size).map_err(failed("making a datagram queue pair"))?;
        pair.start_datagrams(rail.port, qkey)
            .map_err(failed("starting the datagram queue pair"))?;
        let made = Datagrams {
            pair,
            domain: Arc::clone(domain),
            incoming: Buffers::new(RECEIVES, ROUTE_BYTES + LETTER_BYTES_MAX, registrations)?,
            outgoing: Buffers::new(SENDS, LETTER_BYTES_MAX, registrations)?,
            under_way: (0..SENDS).map(|_| None).collect(),
            qkey,
        };
        let all = (0..RECEIVES).map(|i| (number(i), made.incoming.piece(i)));
        // SAFETY: fresh memory that only completions give back, and that outlives the queue pair.
        unsafe { made.pair.offer(all) }.map_err(failed("offering datagram buffers"))?;
        Ok(made)
    }

    /// Where others reach it.
    pub(super) fn doorstep(&self, rail: &Rail) -> Doorstep {
        Doorstep {
            gid: rail.gid.address.octets(),
            lid: rail.lid,
            qpn: self.pair.number(),
            qkey: self.qkey,
        }
    }

    /// Sends a letter, or loses it where too many are under way or there is no route: whoever needs an answer sends again.
    pub(super) fn send(
        &mut self,
        letter: &Letter,
        to: &Doorstep,
        rail: &Rail,
        options: &VerbsOptions,
        number: impl Fn(usize) -> u64,
    ) {
        let Some(place) = self.under_way.iter().position(Option::is_none) else {
            return;
        };
        let route = AddressHandle::new(&self.domain, rail, to, options.traffic_class, options.service_level);
        let Ok(handle) = route else { return };
        let bytes = letter.encode();
        // SAFETY: the place is free, so no datagram is being sent from it.
        let buffer = unsafe { self.outgoing.bytes_mut(place) };
        buffer[..bytes.len()].copy_from_slice(&bytes);
        let mut piece = self.outgoing.piece(place);
        piece.length = bytes.len() as u32;
        let mut request = sys::ibv_send_wr {
            wr_id: number(place),
            sg_list: &mut piece,
            num_sge: 1,
            opcode: sys::IBV_WR_SEND,
            send_flags: sys::IBV_SEND_SIGNALED,
            wr: sys::ibv_send_wr_target {
                ud: sys::ibv_wr_ud {
                    ah: handle.raw(),
                    remote_qpn: to.qpn,
                    remote_qkey: to.qkey,
                },
            },
            ..Default::default()
        };
        // SAFETY: the piece is registered memory that stays as it is, and the handle stays, until the place is free again.
        if unsafe { self.pair.post(&mut request) }.is_ok() {
            self.under_way[place] = Some(handle);
        }
    }

    /// A datagram has gone out.
    pub(super) fn sent(&mut self, place: usize) {
        if let Some(under_way) = self.under_way.get_mut(place) {
            *under_way = None;
        }
    }

    pub(super) fn is_sending(&self) -> bool {
        self.under_way.iter().any(Option::is_some)
    }

    /// Reads what has come into a buffer, and offers the buffer again. Garbage is nothing.
    pub(super) fn received(&mut self, place: usize, len: u32, number: impl Fn(usize) -> u64) -> Option<Letter> {
        if place >= RECEIVES {
            return None;
        }
        let whole = ROUTE_BYTES + LETTER_BYTES_MAX;
        // SAFETY: the device has given the buffer back with this completion.
        let bytes = unsafe { self.incoming.bytes(place, (len as usize).min(whole)) };
        let letter = bytes.get(ROUTE_BYTES..).and_then(|body| Letter::decode(body).ok());
        let again = std::iter::once((number(place), self.incoming.piece(place)));
        // SAFETY: nobody looks at the buffer any more. Where it fails the device is gone, of which an event tells.
        let _ = unsafe { self.pair.offer(again) };
        letter
    }
}
