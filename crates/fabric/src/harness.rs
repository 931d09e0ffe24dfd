//! What must hold for any bytes at all, one function a decoder. The targets under `fuzz/` call them, and so does the suite.
//!
//! ```
//! weft_fabric::harness::shared_memory_frames(b"anything");
//! ```

/// A datagram of shared memory is refused, or stays within its limits and means the same when it is written again.
pub fn shared_memory_frames(bytes: &[u8]) {
    crate::shared_memory::check_frame(bytes);
}
