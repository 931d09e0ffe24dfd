//! Memory of the transport's own, for bytes whose own memory a file cannot be reached from: pieces of one size, aligned.

use std::ptr::NonNull;

use super::layout::REQUEST_BYTES_MAX;
use crate::memory::{AllocateOptions, HostMemory};

/// Pieces, allocated when the first is needed.
#[derive(Debug)]
pub(super) struct Staging {
    memory: Option<HostMemory>,
    free: Vec<u16>,
    pieces: u16,
}

impl Staging {
    /// So many bytes, and one piece at least.
    pub fn of(bytes: u64) -> Staging {
        let pieces = (bytes / REQUEST_BYTES_MAX).clamp(1, 4096) as u16;
        Staging {
            memory: None,
            free: (0..pieces).rev().collect(),
            pieces,
        }
    }

    /// A piece that nobody has; none where all are in use, or there is no memory.
    pub fn take(&mut self) -> Option<(u16, NonNull<u8>)> {
        if self.memory.is_none() {
            let bytes = usize::from(self.pieces) * REQUEST_BYTES_MAX as usize;
            let options = AllocateOptions {
                not_inherited: true,
                ..AllocateOptions::default()
            };
            self.memory = HostMemory::allocate(bytes, options).ok();
        }
        let start = self.memory.as_ref()?.as_ptr();
        let piece = self.free.pop()?;
        // SAFETY: there are as many pieces as the memory holds.
        let piece_start = unsafe { start.add(usize::from(piece) * REQUEST_BYTES_MAX as usize) };
        Some((piece, NonNull::new(piece_start)?))
    }

    pub fn give_back(&mut self, piece: u16) {
        self.free.push(piece);
    }

    /// All of it, once there is any.
    pub fn memory(&self) -> Option<&HostMemory> {
        self.memory.as_ref()
    }

    /// Something may still be written to it, so it stays for ever.
    pub fn leak(&mut self) {
        std::mem::forget(self.memory.take());
    }
}
