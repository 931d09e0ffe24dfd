//! What must hold for any bytes at all, one function a decoder. The targets under `fuzz/` call them, and so does the suite.
//!
//! ```
//! weft_fabric::harness::shared_memory_frames(b"anything");
//! ```

/// Frames of a TCP connection are refused, or stay within their limits and mean the same when they are written again.
pub fn tcp_frames(bytes: &[u8]) {
    crate::tcp::frame::check_frames(bytes);
}

/// A datagram of shared memory is refused, or stays within its limits and means the same when it is written again.
pub fn shared_memory_frames(bytes: &[u8]) {
    crate::shared_memory::check_frame(bytes);
}

/// Packets of a verbs path are refused, or the frames in them stay within their limits and mean the same when written again.
pub fn verbs_packets(bytes: &[u8]) {
    crate::verbs::check_packets(bytes);
}

/// A datagram of a rail is refused, or means the same when it is written again.
pub fn verbs_letters(bytes: &[u8]) {
    crate::verbs::check_letter(bytes);
}
