//! RDMA: bytes moved by the network card itself, between registered memories of two machines, over InfiniBand or RoCE.
//!
//! A *rail* is what one transport runs on: a device, one of its ports, and one of that port's addresses.

mod address;
mod batch;
mod buffers;
pub mod checkup;
mod counters;
mod credits;
mod datagrams;
pub mod device;
mod introduction;
pub mod library;
mod live;
mod message;
mod number;
mod ops;
mod options;
mod path;
mod queue;
pub mod rail;
mod regions;
pub mod registration;
mod setup;
mod tags;
mod targets;
mod transport;

pub use counters::VerbsCounters;
pub use device::{Device, DeviceError, DeviceEvent, ProtectionDomain};
pub(crate) use introduction::check as check_letter;
pub use library::Library;
pub(crate) use message::check as check_packets;
pub use options::{AtomicsBy, VerbsError, VerbsOptions};
pub use rail::{Mtu, Rail, RailOptions, RailRefusal, VerbsUnavailable, rails};
pub use registration::{
    OnDemandPaging, Registration, RegistrationError, RegistrationOptions, Registrations, RemoteAccess,
};
pub use transport::Verbs;

/// Moves and messages that a path holds at a time.
const INFLIGHT_OPS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    #[test]
    fn tests_that_need_a_device() {
        weft_testing::has(weft_testing::Need::Rdma);
    }
}
