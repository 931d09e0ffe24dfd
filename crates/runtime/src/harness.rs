//! What must hold for any bytes at all, one function a decoder. The targets under `fuzz/` call them, and so does the suite.
//!
//! ```
//! weft::harness::name_server_frames(b"anything");
//! ```

/// Frames between the name server and its members are refused, or mean the same when they are written again.
pub fn name_server_frames(bytes: &[u8]) {
    crate::rendezvous::check_frames(bytes);
}
