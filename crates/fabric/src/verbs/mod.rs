//! RDMA: bytes moved by the network card itself, between registered memories of two machines, over InfiniBand or RoCE.
//!
//! A *rail* is what one transport runs on: a device, one of its ports, and one of that port's addresses.

pub mod checkup;
pub mod device;
pub mod library;
pub mod rail;
pub mod registration;

pub use device::{Device, DeviceError, DeviceEvent, ProtectionDomain};
pub use library::Library;
pub use rail::{Mtu, Rail, RailOptions, RailRefusal, VerbsUnavailable, rails};
pub use registration::{
    OnDemandPaging, Registration, RegistrationError, RegistrationOptions, Registrations, RemoteAccess,
};
