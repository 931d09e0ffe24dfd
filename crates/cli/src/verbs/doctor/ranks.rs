//! What messages between ranks cost here: a few collectives between ranks of their own, and what follows from their times.
//!
//! Of two ranks, a barrier is one message each way. In place, an all-gather is that and the copying of what the other has; out of place, as
//! most programs reduce, a reduce-scatter is that and its reduction with what is there: so three constants are measured one at a time, and by
//! whoever will use them. An all-gather of what has only just been written tells what it costs that a line is in another core's cache. All-reduce is
//! none of them, so that it can be predicted.

use weft_fabric::calibrate::Calibration;
use weft_plan::cost::{Measurement, fit};
use weft_plan::platform::{Arena, Memcpy};
use weft_plan::{Bandwidth, Bytes, LinkCost, Picos};

use crate::complaint::Complaint;
use crate::ends::{Allocation, Overrides};
use crate::ranks::{Exercise, Formation, Ranks};

/// What ranks exchange when it stays in their caches, be it the next or the last, and when it does not.
const CACHED_BYTES: [u64; 2] = [512 << 10, 4 << 20];
const STREAMED_BYTES: u64 = 64 << 20;
/// What is exchanged afresh.
const FRESH_BYTES: u64 = 1 << 20;
/// What they exchange over sockets: short messages, and long ones.
const FAR_BYTES: [u64; 8] = [
    1 << 10,
    64 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];
/// Of which of these it is measured how fast they are reduced.
const FAR_REDUCED: [usize; 3] = [3, 5, 6];
/// How long one figure is measured, in all its repeats.
const BUDGET_NS: u64 = 100_000_000;
const REPEATS: u64 = 5;
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
pub fn measure(overrides: &Overrides, speed: &Calibration) -> Measured {
    let far = sockets(overrides).ok();
    Measured {
        arena: arena(overrides, speed).ok(),
        reduction: far.and_then(|(_, reduction)| reduction),
        tcp: far.and_then(|(cost, _)| cost),
    }
}

fn arena(overrides: &Overrides, speed: &Calibration) -> Result<Arena, Complaint> {
    let overrides = overrides.with("transports", "shared_memory");
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let mut pair = spawn(2, true, cores, &overrides)?;
    let latency = time(&mut pair, "barrier", 0, WARM)?;
    // `held`: what both ranks have in their buffers.
    let mut measured = |collective: &str, how: How, held: u64| {
        let mut at = |bytes: u64| {
            let took = time(&mut pair, collective, bytes, how)?;
            Ok::<f64, Complaint>(cost(bytes / 2, took.saturating_sub(latency)))
        };
        let cached = (at(CACHED_BYTES[0])? * at(CACHED_BYTES[1])?).sqrt();
        // Some of it does fit.
        let fits = (speed.cache.0 as f64 / held as f64).min(0.9);
        let streamed = ((at(STREAMED_BYTES)? - fits * cached) / (1.0 - fits)).max(cached);
        Ok::<Memcpy, Complaint>(Memcpy {
            cached: bandwidth(cached),
            streaming: bandwidth(streamed),
        })
    };
    let copy = measured("all-gather", WARM, 2 * STREAMED_BYTES)?;
    let reduce = measured("reduce-scatter", OUT_OF_PLACE, 3 * STREAMED_BYTES)?;
    // Less what the rank itself takes to write it.
    let own = speed.memcpy.cached.time_for(Bytes(FRESH_BYTES / 2));
    let took = time(&mut pair, "all-gather", FRESH_BYTES, How { fresh: true, ..WARM })?;
    let fresh = cost(FRESH_BYTES / 2, took.saturating_sub(latency).saturating_sub(own));
    drop(pair);
    let turn = match cores.checked_mul(2) {
        Some(ranks) if (4..=CROWD_MAX).contains(&ranks) => {
            let mut crowd = spawn(ranks, true, cores, &overrides)?;
            Some(time(&mut crowd, "barrier", 0, WARM)?.max(latency))
        }
        _ => None,
    };
    Ok(Arena {
        latency,
        turn,
        copy,
        reduce,
        fresh: Some(bandwidth(fresh)),
        cache: speed.cache,
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
            time: time(&mut pair, "all-gather", bytes, WARM)?,
        });
    }
    let mut reductions = Vec::new();
    for nth in FAR_REDUCED {
        let (bytes, moved) = (FAR_BYTES[nth], gathered[nth].time);
        let reduced = time(&mut pair, "reduce-scatter", bytes, OUT_OF_PLACE)?;
        reductions.push(cost(bytes / 2, reduced.saturating_sub(moved)));
    }
    reductions.sort_by(f64::total_cmp);
    let link = fit(&gathered).ok().map(|fit| fit.cost);
    Ok((link, reductions.get(1).map(|median| bandwidth(*median))))
}

fn spawn(count: u32, arena: bool, cores: u32, overrides: &Overrides) -> Result<Ranks, Complaint> {
    let formation = Formation {
        count,
        arena,
        pin: count <= cores,
    };
    Ranks::spawn(formation, overrides)
}

/// How a collective is called.
#[derive(Clone, Copy, Debug)]
struct How {
    in_place: bool,
    /// Each rank writes its input before each call.
    fresh: bool,
}

const WARM: How = How {
    in_place: true,
    fresh: false,
};
const OUT_OF_PLACE: How = How {
    in_place: false,
    fresh: false,
};

/// The median of some repeats, each as slow as its slowest rank: what `weft bench collective` compares with a prediction.
fn time(ranks: &mut Ranks, collective: &str, bytes: u64, how: How) -> Result<Picos, Complaint> {
    let tried = ranks.attempt(&Exercise {
        collective: collective.to_string(),
        bytes,
        datatype: "f32".to_string(),
        algorithm: Some("direct".to_string()),
        schedule: None,
        deterministic: false,
        quantized: None,
        allocation: Allocation::Mapped,
        in_place: how.in_place,
        fresh: how.fresh,
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
    let mut repeats: Vec<f64> = (0..REPEATS as usize).map(repeat).collect();
    repeats.sort_by(f64::total_cmp);
    let median = repeats[repeats.len() / 2];
    Ok(Picos::from_ps((median * 1e3) as u64).max(Picos::from_ns(1)))
}

/// Picoseconds a byte.
fn cost(bytes: u64, took: Picos) -> f64 {
    took.as_ps().max(1) as f64 / bytes.max(1) as f64
}

fn bandwidth(picoseconds_per_byte: f64) -> Bandwidth {
    Bandwidth::from_bytes_per_sec((1e12 / picoseconds_per_byte).max(1.0) as u64)
}
