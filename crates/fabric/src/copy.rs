//! Copying at the speed of the machine.
//!
//! [`copy`] streams large blocks past the cache, because a transfer's destination is rarely read by the core that wrote it and
//! a streaming store spares reading the destination first; [`copy_cached`] leaves them there. [`copy_summed`] takes a checksum on the way,
//! and [`copy_summed_twice`] one at each end.
//! [`Helper`] lends a second core to copies that take long.

mod cached;
mod helper;
mod streaming;
mod summed;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vectors;

pub use cached::copy_cached;
pub use helper::Helper;
pub use streaming::{STREAM_MIN_BYTES, copy, copy_streaming};
pub use summed::{copy_summed, copy_summed_twice, sum};
