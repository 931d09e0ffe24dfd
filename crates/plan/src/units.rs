//! Quantities with their units: bytes, time, bandwidth, rank.
//!
//! Arithmetic is checked: an overflow in a plan is a mistake in the plan, and a wrapped number would hide it.
//! What is printed without a precision reads back as the same quantity; a precision rounds, for tables.
//!
//! ```
//! use weft_plan::{Bandwidth, Bytes, Picos, Time};
//! let cache: Bytes = "1.5 GiB".parse()?;
//! let link: Bandwidth = "400 Gb/s".parse()?;
//! assert_eq!(link.to_string(), "50 GB/s");
//! assert_eq!(format!("{:.1}", link.time_for(cache)), "32.2 ms");
//! assert_eq!(Time::from_ns(12_345).to_string(), "12.345 µs");
//! assert_eq!(Time::from(Picos::from_ps(1_001)), Time::from_ns(2));
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

/// A span of time, or an instant as time since the start of an agent, in nanoseconds: what protocols and transports reckon with.
///
/// 64 bits hold 584 years, so no agent lives to see the end of them. Instants saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time(u64);

/// How long something takes by a model, or an instant of a simulated network, in picoseconds.
///
/// Fine enough grains for a 1.6 Tb/s link (one byte takes 5 ps); 64 bits hold 213 days. Instants saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Picos(u64);

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

    pub const fn from_ns(ns: u64) -> Time {
        Time(ns)
    }
    pub const fn from_us(us: u64) -> Time {
        Time(us.saturating_mul(1_000))
    }
    pub const fn from_ms(ms: u64) -> Time {
        Time(ms.saturating_mul(1_000_000))
    }
    pub const fn from_secs(s: u64) -> Time {
        Time(s.saturating_mul(1_000_000_000))
    }
    pub const fn as_ns(self) -> u64 {
        self.0
    }
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 * 1e-9
    }
    pub const fn saturating_add(self, other: Time) -> Time {
        Time(self.0.saturating_add(other.0))
    }
    pub const fn saturating_sub(self, other: Time) -> Time {
        Time(self.0.saturating_sub(other.0))
    }
    pub const fn saturating_mul(self, times: u64) -> Time {
        Time(self.0.saturating_mul(times))
    }
}

impl Picos {
    pub const ZERO: Picos = Picos(0);
    /// More than anything takes.
    pub const MAX: Picos = Picos(u64::MAX);

    pub const fn from_ps(ps: u64) -> Picos {
        Picos(ps)
    }
    pub const fn from_ns(ns: u64) -> Picos {
        Picos(ns.saturating_mul(1_000))
    }
    pub const fn from_us(us: u64) -> Picos {
        Picos(us.saturating_mul(1_000_000))
    }
    pub const fn from_ms(ms: u64) -> Picos {
        Picos(ms.saturating_mul(1_000_000_000))
    }
    pub const fn from_secs(s: u64) -> Picos {
        Picos(s.saturating_mul(1_000_000_000_000))
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
    pub const fn saturating_add(self, other: Picos) -> Picos {
        Picos(self.0.saturating_add(other.0))
    }
    pub const fn saturating_sub(self, other: Picos) -> Picos {
        Picos(self.0.saturating_sub(other.0))
    }
}

impl From<std::time::Duration> for Time {
    fn from(d: std::time::Duration) -> Time {
        Time(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Time> for std::time::Duration {
    fn from(t: Time) -> std::time::Duration {
        std::time::Duration::from_nanos(t.0)
    }
}

impl From<std::time::Duration> for Picos {
    fn from(d: std::time::Duration) -> Picos {
        Picos(u64::try_from(d.as_nanos().saturating_mul(1_000)).unwrap_or(u64::MAX))
    }
}

impl From<Picos> for Time {
    /// Rounded up: what was predicted to take some time takes some.
    fn from(p: Picos) -> Time {
        match p {
            Picos::MAX => Time::MAX,
            Picos(ps) => Time(ps.div_ceil(1_000)),
        }
    }
}

impl From<Time> for Picos {
    fn from(t: Time) -> Picos {
        Picos::from_ns(t.0)
    }
}

impl From<Picos> for std::time::Duration {
    fn from(p: Picos) -> std::time::Duration {
        Time::from(p).into()
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
    pub fn measured(bytes: Bytes, time: Picos) -> Option<Bandwidth> {
        let rate = (u128::from(bytes.0) * 1_000_000_000_000).checked_div(u128::from(time.0))?;
        Some(Bandwidth(u64::try_from(rate).unwrap_or(u64::MAX)))
    }
    /// How long `bytes` take at this rate, rounded up; no bandwidth takes for ever.
    pub fn time_for(self, bytes: Bytes) -> Picos {
        if self.0 == 0 {
            return if bytes.0 == 0 { Picos::ZERO } else { Picos::MAX };
        }
        let ps = (u128::from(bytes.0) * 1_000_000_000_000).div_ceil(u128::from(self.0));
        Picos(u64::try_from(ps).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
