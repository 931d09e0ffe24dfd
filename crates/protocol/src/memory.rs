//! Memory as the protocol sees it: a length, and bytes that others may be changing at the same time.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Mutex;

use crate::atomic::{AtomicAct, WORD_BYTES};
use crate::error::Refusal;

/// Bytes that a transport may move.
///
/// Access is by copy, never by reference, because a peer may write at any moment. Offsets have been checked by the caller;
/// an implementation panics on one out of bounds rather than touch what is not its own.
pub trait Memory: Debug + Send + Sync {
    fn len(&self) -> u64;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
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
    /// Real transports need the address behind the trait; they downcast to the type that vouches for it.
    fn as_any(&self) -> &dyn Any;
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
    fn as_any(&self) -> &dyn Any {
        self
    }
}
