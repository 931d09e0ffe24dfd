//! Quantities with their units: bytes, time, bandwidth, rank.
//!
//! Arithmetic is checked: an overflow in a plan is a mistake in the plan, and a wrapped number would hide it.
//! What is printed without a precision reads back as the same quantity; a precision rounds, for tables.
//!
//! ```
//! use weft_plan::{Bandwidth, Bytes, Time};
//! let cache: Bytes = "1.5 GiB".parse()?;
//! let link: Bandwidth = "400 Gb/s".parse()?;
//! assert_eq!(link.to_string(), "50 GB/s");
//! assert_eq!(format!("{:.1}", link.time_for(cache)), "32.2 ms");
//! assert_eq!(Time::from_ns(12_345).to_string(), "12.345 µs");
//! # Ok::<(), weft_plan::units::UnitError>(())
//! ```

mod arithmetic;
mod text;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use text::UnitError;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A span of time, or an instant as time since the start of its world, in picoseconds.
///
/// 64 bits hold 213 days, and fine enough grains for a 1.6 Tb/s link (one byte takes 5 ps). Instants saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time(u64);

/// Bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bandwidth(u64);

/// The position of a process in a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl Time {
    pub const ZERO: Time = Time(0);
    /// The end of time: a deadline that never comes.
    pub const MAX: Time = Time(u64::MAX);

    pub const fn from_ps(ps: u64) -> Time {
        Time(ps)
    }
    pub const fn from_ns(ns: u64) -> Time {
        Time(ns.saturating_mul(1_000))
    }
    pub const fn from_us(us: u64) -> Time {
        Time(us.saturating_mul(1_000_000))
    }
    pub const fn from_ms(ms: u64) -> Time {
        Time(ms.saturating_mul(1_000_000_000))
    }
    pub const fn from_secs(s: u64) -> Time {
        Time(s.saturating_mul(1_000_000_000_000))
    }
    pub const fn as_ps(self) -> u64 {
        self.0
    }
    pub const fn as_ns(self) -> u64 {
        self.0 / 1_000
    }
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 * 1e-12
    }
    pub const fn saturating_add(self, other: Time) -> Time {
        Time(self.0.saturating_add(other.0))
    }
    pub const fn saturating_sub(self, other: Time) -> Time {
        Time(self.0.saturating_sub(other.0))
    }
}

impl From<std::time::Duration> for Time {
    fn from(d: std::time::Duration) -> Time {
        Time(u64::try_from(d.as_nanos().saturating_mul(1_000)).unwrap_or(u64::MAX))
    }
}

impl From<Time> for std::time::Duration {
    fn from(t: Time) -> std::time::Duration {
        // Rounded up, so that a sleep never ends before the instant it waits for.
        std::time::Duration::from_nanos(t.0.div_ceil(1_000))
    }
}

impl Bandwidth {
    /// More than any link has: moving bytes takes no time.
    pub const MAX: Bandwidth = Bandwidth(u64::MAX);

    pub const fn from_bytes_per_sec(v: u64) -> Bandwidth {
        Bandwidth(v)
    }
    pub fn from_gigabytes_per_sec(v: f64) -> Bandwidth {
        Bandwidth((v * 1e9) as u64)
    }
    pub const fn bytes_per_sec(self) -> u64 {
        self.0
    }
    /// The rate at which `bytes` were moved in `time`; `None` where no time passed.
    pub fn measured(bytes: Bytes, time: Time) -> Option<Bandwidth> {
        let rate = (u128::from(bytes.0) * 1_000_000_000_000).checked_div(u128::from(time.0))?;
        Some(Bandwidth(u64::try_from(rate).unwrap_or(u64::MAX)))
    }
    /// How long `bytes` take at this rate, rounded up; no bandwidth takes for ever.
    pub fn time_for(self, bytes: Bytes) -> Time {
        if self.0 == 0 {
            return if bytes.0 == 0 { Time::ZERO } else { Time::MAX };
        }
        let ps = (u128::from(bytes.0) * 1_000_000_000_000).div_ceil(u128::from(self.0));
        Time(u64::try_from(ps).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
