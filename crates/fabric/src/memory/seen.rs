//! Somebody else's memory where it lies: what a look at it gives, whichever transport made it visible.

use std::fmt;

use weft_protocol::Memory;

use super::HostMemory;
use crate::copy::copy_cached;

/// Memory of a neighbour that is visible here, read-only and without a copy.
///
/// The bytes stay readable as long as the value lives, also if their owner dies. What they hold is the owner's business: it changes them when
/// it likes, and once [`Seen::is_live`] is false it has taken them back.
///
/// # Safety
/// `bytes` bytes from `as_ptr` on must be readable for as long as the value lives. Others may write to them at any moment.
pub unsafe trait Seen: fmt::Debug + Send + Sync {
    /// The first byte. Reads must be raw or volatile, because the owner may write at any moment.
    fn as_ptr(&self) -> *const u8;
    fn bytes(&self) -> u64;
    /// Whether its owner still offers it.
    fn is_live(&self) -> bool;
    /// Forked children of this process find nothing at its address. Otherwise they have it, too, for as long as they live.
    fn keep_from_children(&self) {}

    /// Copies bytes out.
    ///
    /// # Panics
    /// Where they lie outside.
    fn copy_out(&self, offset: u64, into: &mut [u8]) {
        let end = offset.checked_add(into.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes()),
            "a read outside a borrowed region"
        );
        // SAFETY: as many bytes are readable as the implementor vouches for, and these are among them; `into` is uniquely borrowed.
        unsafe { copy_cached(into.as_mut_ptr(), self.as_ptr().add(offset as usize), into.len()) }
    }
}

// SAFETY: host memory has a stable address for as long as the value lives.
unsafe impl Seen for HostMemory {
    fn as_ptr(&self) -> *const u8 {
        HostMemory::as_ptr(self)
    }
    fn bytes(&self) -> u64 {
        Memory::len(self)
    }
    fn is_live(&self) -> bool {
        true
    }
}
