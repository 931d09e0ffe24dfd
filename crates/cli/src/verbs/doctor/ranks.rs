//! What messages between ranks cost here: a few collectives between ranks of their own, and what follows from their times.
//!
//! Of two ranks, a barrier is one message each way. In place, an all-gather is that and the copying of what the other has, and a
//! reduce-scatter is that and its reduction with what is there: so three constants are measured one at a time, and by whoever will
//! use them. All-reduce is none of them, so that it can be predicted.

use weft_plan::cost::{Measurement, fit};
use weft_plan::platform::{Arena, Memcpy};
use weft_plan::{Bandwidth, Bytes, LinkCost, Time};

use crate::complaint::Complaint;
use crate::ends::{Allocation, Overrides};
use crate::ranks::{Exercise, Formation, Ranks};

/// What ranks exchange when it stays in their caches, and when it does not.
const CACHED_BYTES: u64 = 1 << 20;
const STREAMED_BYTES: u64 = 64 << 20;
/// What they exchange over sockets: short messages, and long ones.
const FAR_BYTES: [u64; 6] = [1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 32 << 20];
/// How long one figure is measured, in all its repeats.
const BUDGET_NS: u64 = 60_000_000;
const REPEATS: u64 = 3;
/// With more ranks than this, the turns that they take on their cores are not measured.
const CROWD_MAX: u32 = 32;

/// What was measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    pub arena: Option<Arena>,
    /// How fast a rank reduces what has come over a socket with what is there.
    pub reduction: Option<Bandwidth>,
    pub tcp: Option<LinkCost>,
}

/// Starts ranks and measures. What cannot be measured here is left out: `weft doctor` tries every transport by itself.
pub fn measure(overrides: &Overrides, cache: Bytes) -> Measured {
    let far = sockets(overrides).ok();
    Measured {
        arena: arena(overrides, cache).ok(),
        reduction: far.and_then(|(_, reduction)| reduction),
        tcp: far.and_then(|(cost, _)| cost),
    }
}

fn arena(overrides: &Overrides, cache: Bytes) -> Result<Arena, Complaint> {
    let overrides = overrides.with("transports", "shared_memory");
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let mut pair = spawn(2, true, cores, &overrides)?;
    let latency = time(&mut pair, "barrier", 0)?;
    let mut speed = |collective: &str| {
        let mut at = |bytes: u64| Ok::<_, Complaint>(rate(bytes / 2, time(&mut pair, collective, bytes)?, latency));
        Ok::<_, Complaint>(Memcpy {
            cached: at(CACHED_BYTES)?,
            streaming: at(STREAMED_BYTES)?,
        })
    };
    let (copy, reduce) = (speed("all-gather")?, speed("reduce-scatter")?);
    drop(pair);
    let turn = match cores.checked_mul(2) {
        Some(ranks) if (4..=CROWD_MAX).contains(&ranks) => {
            let mut crowd = spawn(ranks, true, cores, &overrides)?;
            Some(time(&mut crowd, "barrier", 0)?.max(latency))
        }
        _ => None,
    };
    Ok(Arena {
        latency,
        turn,
        copy,
        reduce,
        cache,
    })
}

/// What a message over a socket costs, and how fast it is reduced.
fn sockets(overrides: &Overrides) -> Result<(Option<LinkCost>, Option<Bandwidth>), Complaint> {
    let overrides = overrides.with("transports", "tcp");
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let mut pair = spawn(2, false, cores, &overrides)?;
    let mut gathered = Vec::new();
    for bytes in FAR_BYTES {
        gathered.push(Measurement {
            bytes: Bytes(bytes / 2),
            spans: 1,
            time: time(&mut pair, "all-gather", bytes)?,
        });
    }
    let bytes = FAR_BYTES[FAR_BYTES.len() - 1];
    let (moved, reduced) = (
        gathered[gathered.len() - 1].time,
        time(&mut pair, "reduce-scatter", bytes)?,
    );
    let cost = fit(&gathered).ok().map(|fit| fit.cost);
    Ok((cost, Some(rate(bytes / 2, reduced, moved))))
}

fn spawn(count: u32, arena: bool, cores: u32, overrides: &Overrides) -> Result<Ranks, Complaint> {
    let formation = Formation {
        count,
        arena,
        pin: count <= cores,
    };
    Ranks::spawn(formation, overrides)
}

/// The least of some repeats, of the slowest rank: others only ever slow a measurement down.
fn time(ranks: &mut Ranks, collective: &str, bytes: u64) -> Result<Time, Complaint> {
    let tried = ranks.attempt(&Exercise {
        collective: collective.to_string(),
        bytes,
        datatype: "f32".to_string(),
        algorithm: Some("direct".to_string()),
        schedule: None,
        deterministic: false,
        quantized: None,
        allocation: Allocation::Mapped,
        in_place: true,
    })?;
    let slowest = tried.iter().map(|tried| tried.ns).max().unwrap_or(0).max(1);
    let iterations = (BUDGET_NS / REPEATS / slowest).clamp(3, 20_000);
    let measured = ranks.measure(iterations, REPEATS)?;
    let repeat = |nth: usize| {
        measured
            .iter()
            .filter_map(|rank| rank.mean_ns.get(nth))
            .fold(0.0, |a, b| f64::max(a, *b))
    };
    let least = (0..REPEATS as usize).map(repeat).fold(f64::INFINITY, f64::min);
    Ok(Time::from_ps((least * 1e3) as u64).max(Time::from_ns(1)))
}

/// How fast so many bytes went in what a time has in excess of another.
fn rate(bytes: u64, took: Time, without: Time) -> Bandwidth {
    let took = took.saturating_sub(without).max(Time::from_ns(1));
    Bandwidth::measured(Bytes(bytes), took).unwrap_or(Bandwidth::MAX)
}
