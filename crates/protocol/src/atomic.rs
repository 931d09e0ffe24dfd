//! Atomic operations on a word of a peer's memory: what they are, and what they leave behind.
//!
//! A word is eight bytes, little-endian, at an address that is a multiple of eight. Whatever way the operations on it come, they
//! are atomic with respect to each other and to the owner's own: in the end each of them is one instruction of a CPU, or of a
//! device that is coherent with it, on the memory itself.
//!
//! ```
//! use weft_protocol::AtomicAct;
//! assert_eq!(AtomicAct::FetchAdd(2).after(u64::MAX), Some(1));
//! assert_eq!(AtomicAct::CompareSwap { expected: 4, new: 5 }.after(4), Some(5));
//! assert_eq!(AtomicAct::CompareSwap { expected: 4, new: 5 }.after(3), None);
//! ```

use std::sync::Arc;

use crate::error::Refusal;
use crate::region::{Access, RemoteRegion};

/// The bytes of a word, and what its address is a multiple of.
pub const WORD_BYTES: u64 = 8;

/// An atomic operation on one word of a peer's region, which must permit reading and writing.
///
/// It is carried out once or not at all, and nobody repeats it on his own account: see
/// [`Failure::may_have_happened`](crate::Failure::may_have_happened).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Atomic {
    pub region: Arc<RemoteRegion>,
    /// Where in the region the word begins.
    pub offset: u64,
    pub act: AtomicAct,
}

/// What is done to the word. What it held before is the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicAct {
    /// Adds, and wraps around.
    FetchAdd(u64),
    /// Stores `new` if the word is `expected`; else leaves it alone.
    CompareSwap { expected: u64, new: u64 },
}

impl AtomicAct {
    /// What a word holds afterwards that held `before`; `None` where it is left alone.
    pub fn after(self, before: u64) -> Option<u64> {
        match self {
            AtomicAct::FetchAdd(value) => Some(before.wrapping_add(value)),
            AtomicAct::CompareSwap { expected, new } => (before == expected).then_some(new),
        }
    }
}

/// May a peer operate on the word at `offset` of a region of `len` bytes with this `access`? One check for every transport, made
/// by whoever carries the operation out.
pub fn check_word(access: Access, len: u64, offset: u64) -> Result<(), Refusal> {
    if !access.read {
        return Err(Refusal::NotReadable);
    }
    if !access.write {
        return Err(Refusal::NotWritable);
    }
    match offset.checked_add(WORD_BYTES) {
        Some(end) if end <= len => {}
        _ => return Err(Refusal::OutOfBounds),
    }
    if !offset.is_multiple_of(WORD_BYTES) {
        return Err(Refusal::Misaligned);
    }
    Ok(())
}
