//! The unreliable queue pair of a rail: introductions come and go through it.

use std::io;
use std::sync::Arc;

use weft_sys::verbs as sys;

use super::address::Doorstep;
use super::buffers::Buffers;
use super::device::ProtectionDomain;
use super::introduction::{LETTER_BYTES_MAX, Letter, ROUTE_BYTES, sender};
use super::number;
use super::options::VerbsError;
use super::queue::{AddressHandle, CompletionQueue, QueuePair, QueueSize};
use super::rail::Rail;
use super::registration::Registrations;
use crate::discover::LinkLayer;

/// Datagrams that can come in before somebody looks.
pub(super) const RECEIVES: usize = 64;
/// Datagrams that can be on their way out.
pub(super) const SENDS: usize = 32;

/// Sends and receives letters.
#[derive(Debug)]
pub(super) struct Datagrams {
    // The queue pair goes before the memory that it was given.
    pair: QueuePair,
    incoming: Buffers,
    outgoing: Buffers,
    /// Where the datagrams under way go to; a place without one is free.
    under_way: Vec<Option<Arc<AddressHandle>>>,
    qkey: u32,
    /// How often the queue pair was started. A completion of an earlier life means nothing.
    life: u8,
    broken: bool,
}

impl Datagrams {
    pub(super) fn start(
        rail: &Rail,
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        registrations: &mut Registrations,
        qkey: u32,
    ) -> Result<Datagrams, VerbsError> {
        let failed = |step| move |source| VerbsError::System { step, source };
        let size = QueueSize {
            sends: SENDS as u32,
            receives: RECEIVES as u32,
            pieces: 1,
            inline_bytes: 0,
        };
        let pair = QueuePair::new(domain, completions, None, size).map_err(failed("making a datagram queue pair"))?;
        let mut made = Datagrams {
            pair,
            incoming: Buffers::new(RECEIVES, ROUTE_BYTES + LETTER_BYTES_MAX, registrations)?,
            outgoing: Buffers::new(SENDS, LETTER_BYTES_MAX, registrations)?,
            under_way: (0..SENDS).map(|_| None).collect(),
            qkey,
            life: 0,
            broken: false,
        };
        made.begin(rail.port)
            .map_err(failed("starting the datagram queue pair"))?;
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

    pub(super) fn number(&self) -> u32 {
        self.pair.number()
    }

    /// Sends a letter, or loses it where too many are under way: whoever needs an answer sends again.
    pub(super) fn send(&mut self, letter: &Letter, to: &Doorstep, route: &Arc<AddressHandle>) {
        let Some(place) = self.under_way.iter().position(Option::is_none) else {
            return;
        };
        let bytes = letter.encode();
        // SAFETY: the place is free, so no datagram is being sent from it.
        let buffer = unsafe { self.outgoing.bytes_mut(place) };
        buffer[..bytes.len()].copy_from_slice(&bytes);
        let mut piece = self.outgoing.piece(place);
        piece.length = bytes.len() as u32;
        let mut request = sys::ibv_send_wr {
            wr_id: number::datagram_sent(place, self.life),
            sg_list: &mut piece,
            num_sge: 1,
            opcode: sys::IBV_WR_SEND,
            send_flags: sys::IBV_SEND_SIGNALED,
            wr: sys::ibv_send_wr_target {
                ud: sys::ibv_wr_ud {
                    ah: route.raw(),
                    remote_qpn: to.qpn,
                    remote_qkey: to.qkey,
                },
            },
            ..Default::default()
        };
        // SAFETY: the piece is registered memory that stays as it is, and the handle stays, until the place is free again.
        if unsafe { self.pair.post(&mut request) }.is_ok() {
            self.under_way[place] = Some(Arc::clone(route));
        }
    }

    /// A datagram has gone out, or has come back because the queue pair failed.
    pub(super) fn sent(&mut self, place: usize, life: u8, completion: &sys::ibv_wc) {
        if life != self.life {
            return;
        }
        self.broken |= completion.status != sys::IBV_WC_SUCCESS;
        if let Some(under_way) = self.under_way.get_mut(place) {
            *under_way = None;
        }
    }

    pub(super) fn is_sending(&self) -> bool {
        self.under_way.iter().any(Option::is_some)
    }

    /// Reads what has come into a buffer, and from whom, and offers the buffer again. Garbage is nothing.
    pub(super) fn received(
        &mut self,
        place: usize,
        life: u8,
        completion: &sys::ibv_wc,
        rail: &Rail,
    ) -> Option<(Letter, Doorstep)> {
        if life != self.life || place >= RECEIVES {
            return None;
        }
        if completion.status != sys::IBV_WC_SUCCESS {
            // To offer the buffer again would only bring it back.
            self.broken = true;
            return None;
        }
        let len = (completion.byte_len as usize).min(ROUTE_BYTES + LETTER_BYTES_MAX);
        // SAFETY: the device has given the buffer back with this completion.
        let bytes = unsafe { self.incoming.bytes(place, len) };
        let letter = read(bytes, completion, rail);
        let again = std::iter::once((number::datagram(place, self.life), self.incoming.piece(place)));
        // SAFETY: nobody looks at the buffer any more. Where it fails the device is gone, of which an event tells.
        let _ = unsafe { self.pair.offer(again) };
        letter
    }

    /// The device has said that the queue pair has failed.
    pub(super) fn on_failed(&mut self) {
        self.broken = true;
    }

    /// Has the queue pair failed? Then nothing is sent or received before [`Datagrams::revive`].
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Starts a queue pair that has failed again. It keeps its number, so that peers find it where it was; letters that were under
    /// way are lost.
    pub(super) fn revive(&mut self, port: u8) -> io::Result<()> {
        self.pair.reset()?;
        self.life = self.life.wrapping_add(1);
        self.under_way.fill(None);
        self.begin(port)?;
        self.broken = false;
        Ok(())
    }

    fn begin(&mut self, port: u8) -> io::Result<()> {
        self.pair.start_datagrams(port, self.qkey)?;
        let life = self.life;
        let all = (0..RECEIVES).map(|i| (number::datagram(i, life), self.incoming.piece(i)));
        // SAFETY: the device has none of these buffers: they are fresh, or the queue that had them was emptied. Only completions give
        // them back, and they outlive the queue pair.
        unsafe { self.pair.offer(all) }
    }

    #[cfg(test)]
    pub(super) fn break_down(&self) {
        self.pair.fail().expect("a queue pair can always fail");
    }
}

/// The letter in a datagram, and where an answer to its sender goes: as the network says, not as the sender does.
fn read(bytes: &[u8], completion: &sys::ibv_wc, rail: &Rail) -> Option<(Letter, Doorstep)> {
    let (route, body) = bytes.split_first_chunk::<ROUTE_BYTES>()?;
    let letter = Letter::decode(body).ok()?;
    let qkey = match &letter {
        Letter::Introduction { from, .. } => from.qkey,
        _ => 0,
    };
    let from = Doorstep {
        gid: sender(route).filter(|_| completion.wc_flags & sys::IBV_WC_GRH != 0)?,
        lid: match rail.link_layer {
            LinkLayer::Infiniband => completion.slid,
            _ => 0,
        },
        qpn: completion.src_qp,
        qkey,
    };
    Some((letter, from))
}
