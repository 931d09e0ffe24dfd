//! The host memory that staged transfers go through, and who may have how much of it.

use std::collections::BTreeMap;

use crate::region::{Region, RemoteRegion};
use crate::transfer::PeerId;

/// Host memory that bytes go through, in pieces of equal size.
///
/// A piece that waits for a peer is in use until that peer takes it, or until the deadline. Nobody knows before which peer will freeze, so none gets a piece
/// that would leave the others fewer than it has itself: one alone gets half of the ring, the next one half of what is left.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) region: Region,
    pub(super) remote: RemoteRegion,
    pub(super) piece_bytes: u64,
    free: Vec<u32>,
    /// Who uses each piece, or did so last.
    users: Vec<PeerId>,
    /// How many each uses.
    used: BTreeMap<PeerId, usize>,
}

impl Ring {
    pub(super) fn new(region: Region, remote: RemoteRegion, piece_bytes: u64, pieces: u32) -> Ring {
        Ring {
            region,
            remote,
            piece_bytes,
            free: (0..pieces).rev().collect(),
            users: vec![PeerId::HERE; pieces as usize],
            used: BTreeMap::new(),
        }
    }

    /// A piece for a transfer with this peer.
    pub(super) fn take(&mut self, peer: PeerId) -> Option<u32> {
        let used = self.used.get(&peer).copied().unwrap_or(0);
        if used >= self.free.len() {
            return None;
        }
        let piece = self.free.pop()?;
        self.users[piece as usize] = peer;
        self.used.insert(peer, used + 1);
        Some(piece)
    }

    pub(super) fn give_back(&mut self, piece: u32) {
        let peer = self.users[piece as usize];
        match self.used.get_mut(&peer) {
            Some(used) if *used > 1 => *used -= 1,
            _ => {
                self.used.remove(&peer);
            }
        }
        self.free.push(piece);
    }

    /// Pieces that are in use.
    pub(super) fn in_use(&self) -> usize {
        self.users.len() - self.free.len()
    }
}
