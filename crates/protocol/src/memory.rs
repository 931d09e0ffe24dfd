//! Memory as the protocol sees it: a length, and, where they are in host memory, bytes that others may be changing at the same time.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Mutex;

use weft_plan::Span;

use crate::atomic::{AtomicAct, WORD_BYTES};
use crate::error::Refusal;

/// What a transport may move bytes of: host memory, a device's, a file, an object.
///
/// All that everyone knows of it is its length. Who can do more with it asks: the CPU for [host bytes](Memory::host), a transport for the type
/// behind the trait that it was written for.
pub trait Memory: Debug + Send + Sync {
    fn len(&self) -> u64;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The bytes, where they are in host memory, so that this process can copy them.
    fn host(&self) -> Option<&dyn HostBytes>;
    /// Transports need the address, the descriptor or the name behind the trait; they downcast to the type that vouches for it.
    fn as_any(&self) -> &dyn Any;
}

/// Bytes of host memory.
///
/// Access is by copy, never by reference, because a peer may write at any moment. Offsets have been checked by the caller;
/// an implementation panics on one out of bounds rather than touch what is not its own.
pub trait HostBytes: Debug + Send + Sync {
    fn read(&self, offset: u64, into: &mut [u8]);
    fn write(&self, offset: u64, from: &[u8]);
    /// Feeds `len` bytes from `offset` on into a checksum. Refused where they turn out not to be there any more.
    fn digest(&self, offset: u64, len: u64, digest: &mut Digest) -> Result<(), Refusal>;
    /// Carries out an atomic operation on the word at `offset`, and returns what it held. Refused where the address is not a
    /// multiple of eight, and where the memory knows no atomic operations.
    fn atomic(&self, offset: u64, act: AtomicAct) -> Result<u64, Refusal> {
        let _ = (offset, act);
        Err(Refusal::Unsupported)
    }
}

impl dyn Memory + '_ {
    /// The bytes, for who knows them to be in host memory.
    ///
    /// # Panics
    /// Where they are elsewhere.
    pub fn bytes(&self) -> &dyn HostBytes {
        self.host().expect("bytes of host memory")
    }

    /// The bytes, for a transport that moves host memory only.
    pub fn host_bytes(&self) -> Result<&dyn HostBytes, Refusal> {
        self.host().ok_or(Refusal::Unsupported)
    }

    /// The checksum of these spans, in their order. Refused where the bytes are not in host memory, or not there any more.
    pub fn sum(&self, spans: impl Iterator<Item = Span>) -> Result<u64, Refusal> {
        let bytes = self.host_bytes()?;
        let mut digest = Digest::default();
        for span in spans {
            bytes.digest(span.offset, span.len, &mut digest)?;
        }
        Ok(digest.finish())
    }
}

/// The end-to-end checksum: CRC-64/NVME, which runs near memory speed where the CPU has carry-less multiplication.
#[derive(Debug)]
pub struct Digest(crc_fast::Digest);

const ALGORITHM: crc_fast::CrcAlgorithm = crc_fast::CrcAlgorithm::Crc64Nvme;

impl Default for Digest {
    fn default() -> Digest {
        Digest(crc_fast::Digest::new(ALGORITHM))
    }
}

impl Digest {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
    pub fn finish(self) -> u64 {
        self.0.finalize()
    }
    /// What it has come to, for whoever takes up bytes by other means.
    pub fn state(&self) -> u64 {
        self.0.get_state()
    }
    /// Goes on from what [`Digest::state`] said, or from 0, from where on equal remainders make equal checksums.
    pub fn at_state(state: u64) -> Digest {
        Digest(crc_fast::Digest::new_with_init_state(ALGORITHM, state))
    }
    /// Takes up `len` bytes that bring another digest from state 0 to `state`: so several threads can each take a part of what is summed.
    pub fn append(&mut self, state: u64, len: u64) {
        let mut before = self.state();
        let mut left = len;
        while left > 0 {
            before = times(before, SHIFTS[left.trailing_zeros() as usize]);
            left &= left - 1;
        }
        *self = Digest::at_state(before ^ state);
    }
}

/// The polynomial of CRC-64/NVME without its highest term, its bits in reverse, as those of states are.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// What a state is multiplied by when so many bytes follow, of every power of two.
const SHIFTS: [u64; 64] = {
    let mut shifts = [1 << 55; 64];
    let mut nth = 1;
    while nth < 64 {
        shifts[nth] = times(shifts[nth - 1], shifts[nth - 1]);
        nth += 1;
    }
    shifts
};

/// The remainder of the product of two polynomials. The topmost bit stands for 1, the next one for x.
const fn times(a: u64, mut b: u64) -> u64 {
    let (mut product, mut left) = (0, a);
    let mut nth = 0;
    while nth < 64 {
        product ^= b & (left >> 63).wrapping_neg();
        left <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & (b & 1).wrapping_neg());
        nth += 1;
    }
    product
}

/// Memory on the Rust heap, for the loopback transport, the simulator and tests.
#[derive(Debug)]
pub struct VecMemory(Mutex<Vec<u8>>);

impl VecMemory {
    pub fn new(bytes: Vec<u8>) -> VecMemory {
        VecMemory(Mutex::new(bytes))
    }
    pub fn zeroed(len: usize) -> VecMemory {
        VecMemory::new(vec![0; len])
    }
    pub fn snapshot(&self) -> Vec<u8> {
        self.bytes().clone()
    }
    fn bytes(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Memory for VecMemory {
    fn len(&self) -> u64 {
        self.bytes().len() as u64
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        Some(self)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl HostBytes for VecMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.bytes()[start..start + into.len()]);
    }
    fn write(&self, offset: u64, from: &[u8]) {
        let start = offset as usize;
        self.bytes()[start..start + from.len()].copy_from_slice(from);
    }
    fn digest(&self, offset: u64, len: u64, digest: &mut Digest) -> Result<(), Refusal> {
        digest.update(&self.bytes()[offset as usize..(offset + len) as usize]);
        Ok(())
    }
    fn atomic(&self, offset: u64, act: AtomicAct) -> Result<u64, Refusal> {
        if !offset.is_multiple_of(WORD_BYTES) {
            return Err(Refusal::Misaligned);
        }
        let mut bytes = self.bytes();
        let word = &mut bytes[offset as usize..][..WORD_BYTES as usize];
        let before = word.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        if let Some(after) = act.after(before) {
            word.copy_from_slice(&after.to_le_bytes());
        }
        Ok(before)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_sum_of_parts_is_that_of_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..3000), cuts in prop::collection::vec(0usize..3000, 0..5)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let (mut whole, mut parts) = (Digest::default(), Digest::default());
            whole.update(&bytes);
            for part in cuts.windows(2) {
                let part = &bytes[part[0]..part[1]];
                let mut digest = Digest::at_state(0);
                digest.update(part);
                parts.append(digest.state(), part.len() as u64);
            }
            prop_assert_eq!(parts.finish(), whole.finish());
        }
    }
}
