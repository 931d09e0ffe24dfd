//! What can be chosen about a rail, and why it may not start.

use std::io;

use thiserror::Error;
use weft_plan::{LinkCost, Time};
use weft_sys::verbs as sys;

use super::device::DeviceError;
use super::rail::Mtu;
use super::registration::{RegistrationError, RegistrationOptions};
use crate::memory::MemoryError;

/// How to use a rail.
#[derive(Clone, Debug)]
pub struct VerbsOptions {
    /// The traffic class of every packet: on RoCE its upper six bits are the DSCP that switches sort by.
    pub traffic_class: u8,
    /// The service level on InfiniBand; on RoCE the priority, where the driver takes it from here.
    pub service_level: u8,
    /// How long the device waits for an acknowledgement before it sends again. Devices round it up, to 4.096 µs times a power of two.
    pub timeout: Time,
    /// How often the device sends again before it gives a peer up. Some take seven, the most there is, to mean for ever.
    pub retries: u8,
    /// The largest packet, if it is to be smaller than the port's own.
    pub mtu: Option<Mtu>,
    /// Work requests that a path hands to the device at a time. More wait in software.
    pub send_depth: u32,
    /// Bytes that a path hands to the device at a time, and so what a cancel may have to wait for.
    pub send_bytes: u64,
    /// Paths at a time, those that others opened included.
    pub paths_max: usize,
    /// How long a new path may take until both ends have heard of each other.
    pub open_max: Time,
    /// How long a device may take, without any progress, over what has been cancelled or has expired. After that the queue is reset.
    /// Longer than the device itself takes to give up a peer that does not answer, so that this is only for one which hangs.
    pub grace: Time,
    /// How long peers may take to let go of a region. After that the device is told to refuse them, and they lose the path.
    pub release_max: Time,
    pub atomics: AtomicsBy,
    pub registration: RegistrationOptions,
    /// What peers are told of the speed of this transport. A guess, with the bandwidth that the port reports, where nothing is said.
    pub cost: Option<LinkCost>,
}

impl Default for VerbsOptions {
    fn default() -> VerbsOptions {
        VerbsOptions {
            traffic_class: 0,
            service_level: 0,
            timeout: Time::from_ms(67),
            retries: 6,
            mtu: None,
            send_depth: 256,
            send_bytes: 4 << 20,
            paths_max: 256,
            open_max: Time::from_secs(5),
            grace: Time::from_secs(1),
            release_max: Time::from_secs(2),
            atomics: AtomicsBy::Auto,
            registration: RegistrationOptions::default(),
            cost: None,
        }
    }
}

/// Who carries out atomic operations on the words of this side, and whom this side asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtomicsBy {
    /// Devices, where theirs are atomic with those of processors; else processors.
    #[default]
    Auto,
    /// Devices. Where theirs are atomic among their own only, all who touch a word must do it through one device, its owner included; and
    /// after the deadline of an operation nobody keeps the device from carrying it out.
    Device,
    /// The owner's processor, asked by a message.
    Host,
}

impl AtomicsBy {
    /// Whether devices are used, where this one's are of this kind. `None` where it should be and cannot.
    pub(super) fn by_device(self, kind: sys::ibv_atomic_cap) -> Option<bool> {
        match self {
            AtomicsBy::Host => Some(false),
            AtomicsBy::Auto => Some(kind == sys::IBV_ATOMIC_GLOB),
            AtomicsBy::Device => (kind != sys::IBV_ATOMIC_NONE).then_some(true),
        }
    }
}

/// A rail that is merely slow moves a part of what it was given in this time.
const STALL_MIN: Time = Time::from_secs(5);

/// Why a rail did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerbsError {
    #[error("a service level is at most 15, not {value}")]
    ServiceLevel { value: u8 },
    #[error("a device retries at most 7 times, not {value}")]
    Retries { value: u8 },
    #[error("a path that may hand no bytes to its device moves none")]
    SendBytes,
    #[error("the device has no atomic operations")]
    NoAtomics,
    #[error("the device offers {offered} {what}, and {needed} are needed")]
    Device {
        what: &'static str,
        offered: u64,
        needed: u64,
    },
    #[error(transparent)]
    Opening(#[from] DeviceError),
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{step} failed: {source}")]
    System { step: &'static str, source: io::Error },
}

impl VerbsOptions {
    pub(super) fn check(&self) -> Result<(), VerbsError> {
        if self.service_level > 15 {
            return Err(VerbsError::ServiceLevel {
                value: self.service_level,
            });
        }
        if self.retries > 7 {
            return Err(VerbsError::Retries { value: self.retries });
        }
        if self.send_bytes == 0 {
            return Err(VerbsError::SendBytes);
        }
        Ok(())
    }

    /// How long a device may have requests without completing any: much longer than it should take to give up a peer.
    pub(super) fn stall_max(&self) -> Time {
        let patience = self.timeout.as_ns().saturating_mul(u64::from(self.retries) + 1);
        Time::from_ns(patience.saturating_mul(4)).max(STALL_MIN)
    }

    /// The timeout as devices take it: the exponent of a multiple of 4.096 µs. Zero would mean for ever, so one is the least.
    pub(super) fn timeout_code(&self) -> u8 {
        const UNIT: Time = Time::from_ns(4_096);
        let steps = self.timeout.as_ns().div_ceil(UNIT.as_ns()).max(1);
        (steps.next_power_of_two().trailing_zeros() as u8).clamp(1, 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up_to_what_a_device_knows() {
        let code = |timeout| {
            VerbsOptions {
                timeout,
                ..VerbsOptions::default()
            }
            .timeout_code()
        };
        assert_eq!(code(Time::ZERO), 1);
        assert_eq!(code(Time::from_ns(4_097)), 1);
        assert_eq!(code(Time::from_ms(67)), 14);
        assert_eq!(code(Time::MAX), 31);
    }

    #[test]
    fn devices_carry_out_atomics_where_that_is_as_good_or_wanted() {
        use sys::{IBV_ATOMIC_GLOB, IBV_ATOMIC_HCA, IBV_ATOMIC_NONE};
        let each = |by: AtomicsBy| [IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB].map(|kind| by.by_device(kind));
        assert_eq!(each(AtomicsBy::Auto), [Some(false), Some(false), Some(true)]);
        assert_eq!(each(AtomicsBy::Device), [None, Some(true), Some(true)]);
        assert_eq!(each(AtomicsBy::Host), [Some(false); 3]);
    }

    #[test]
    fn what_no_device_takes_is_refused_by_name() {
        let with = |change: fn(&mut VerbsOptions)| {
            let mut options = VerbsOptions::default();
            change(&mut options);
            options.check()
        };
        assert!(with(|_| {}).is_ok());
        assert!(matches!(
            with(|o| o.service_level = 16),
            Err(VerbsError::ServiceLevel { .. })
        ));
        assert!(matches!(with(|o| o.retries = 8), Err(VerbsError::Retries { .. })));
        assert!(matches!(with(|o| o.send_bytes = 0), Err(VerbsError::SendBytes)));
    }
}
