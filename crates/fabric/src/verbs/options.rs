//! What can be chosen about a rail, and why it may not start.

use std::io;

use thiserror::Error;
use weft_plan::{LinkCost, Time};

/// How to use a rail.
#[derive(Clone, Debug)]
pub struct VerbsOptions {
    /// The traffic class of every packet: on RoCE its upper six bits are the DSCP that switches sort by.
    pub traffic_class: u8,
    /// The service level on InfiniBand; on RoCE the priority, where the driver takes it from here.
    pub service_level: u8,
    /// How long the device waits for an acknowledgement before it sends again. Devices round it up, to 4.096 µs times a power of two.
    pub timeout: Time,
    /// How often the device sends again before it gives a peer up.
    pub retries: u8,
    /// The largest packet: 256, 512, 1024, 2048 or 4096 bytes. The port's own where nothing is said.
    pub mtu: Option<u32>,
    /// Work requests that a path hands to the device at a time. More wait in software.
    pub send_depth: u32,
    /// Bytes that a path hands to the device at a time, and so what a cancel may have to wait for.
    pub send_bytes: u64,
    /// Paths at a time, those that others opened included.
    pub paths_max: usize,
    /// How long a new path may take until both ends have heard of each other.
    pub open_max: Time,
    /// How long a device may take, without any progress, over what has been cancelled or has expired. After that the queue is reset.
    pub grace: Time,
    /// How long peers may take to let go of a region. After that the device is told to refuse them, and they lose the path.
    pub release_max: Time,
    /// What peers are told of the speed of this transport.
    pub cost: LinkCost,
}

impl Default for VerbsOptions {
    fn default() -> VerbsOptions {
        VerbsOptions {
            traffic_class: 0,
            service_level: 0,
            timeout: Time::from_ms(67),
            retries: 7,
            mtu: None,
            send_depth: 256,
            send_bytes: 4 << 20,
            paths_max: 256,
            open_max: Time::from_secs(5),
            grace: Time::from_ms(200),
            release_max: Time::from_secs(2),
            cost: crate::cost_unmeasured(super::address::NAME),
        }
    }
}

/// Why a rail did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerbsError {
    #[error("{value} is not a packet size: it is 256, 512, 1024, 2048 or 4096 bytes")]
    Mtu { value: u32 },
    #[error("a service level is at most 15, not {value}")]
    ServiceLevel { value: u8 },
    #[error("a device retries at most 7 times, not {value}")]
    Retries { value: u8 },
    #[error("the device offers {offered} {what}, and {needed} are needed")]
    Device {
        what: &'static str,
        offered: u64,
        needed: u64,
    },
    #[error("{step} failed: {source}")]
    System { step: &'static str, source: io::Error },
}

impl VerbsOptions {
    pub(super) fn check(&self) -> Result<(), VerbsError> {
        if let Some(value) = self.mtu
            && mtu_code(value).is_none()
        {
            return Err(VerbsError::Mtu { value });
        }
        if self.service_level > 15 {
            return Err(VerbsError::ServiceLevel {
                value: self.service_level,
            });
        }
        if self.retries > 7 {
            return Err(VerbsError::Retries { value: self.retries });
        }
        Ok(())
    }

    /// The timeout as devices take it: the exponent of a multiple of 4.096 µs. Zero would mean for ever, so one is the least.
    pub(super) fn timeout_code(&self) -> u8 {
        const UNIT: Time = Time::from_ns(4_096);
        let steps = self.timeout.as_ps().div_ceil(UNIT.as_ps()).max(1);
        (steps.next_power_of_two().trailing_zeros() as u8).clamp(1, 31)
    }
}

/// The number under which devices know a packet size.
pub(super) fn mtu_code(bytes: u32) -> Option<u32> {
    (1..=5).find(|&code| mtu_bytes(code) == bytes)
}

pub(super) fn mtu_bytes(code: u32) -> u32 {
    128 << code.min(5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_sizes_have_their_numbers() {
        assert_eq!(mtu_code(256), Some(1));
        assert_eq!(mtu_code(4096), Some(5));
        assert_eq!(mtu_code(1500), None);
    }

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
    fn what_no_device_takes_is_refused_by_name() {
        let with = |change: fn(&mut VerbsOptions)| {
            let mut options = VerbsOptions::default();
            change(&mut options);
            options.check()
        };
        assert!(with(|_| {}).is_ok());
        assert!(matches!(with(|o| o.mtu = Some(1500)), Err(VerbsError::Mtu { value: 1500 })));
        assert!(matches!(with(|o| o.service_level = 16), Err(VerbsError::ServiceLevel { .. })));
        assert!(matches!(with(|o| o.retries = 8), Err(VerbsError::Retries { .. })));
    }
}
