//! Two threads on two cores that read each other's memory, as ranks in an [arena](crate::arena) do: how long a word takes from one to the
//! other, and how fast each copies and reduces what the other has.

use std::fs;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weft_plan::platform::{Arena, Memcpy};
use weft_plan::{Bandwidth, Bytes, Datatype, Reduction, Time};

use crate::copy::{STREAM_MIN_BYTES, copy_streaming};
use crate::cpu;
use crate::memory::{AllocateOptions, HostMemory};
use crate::reduce::{Cache, Reducer};

/// Buffers of this size stay in a cache that two cores share, if they share one.
const CACHED_BYTES: usize = 1 << 20;
/// Looks before a thread lets another run, in case that it needs this core.
const LOOKS: u32 = 4096;
/// Where the system does not say how large its caches are.
const CACHE_GUESS: Bytes = Bytes(8 << 20);

/// What two threads have in common.
struct Table {
    /// By thread: how many phases it has done.
    done: [Line; 2],
    inputs: [HostMemory; 2],
    outputs: [HostMemory; 2],
    bytes: usize,
}

/// A word in a cache line of its own, and that of its neighbour.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

/// The best times of the phases of a round.
#[derive(Clone, Copy, Debug)]
struct Phases {
    nothing: Duration,
    reduce: Duration,
    copy: Duration,
}

/// `None` where there is one core, or no memory.
pub(super) fn neighbours(streaming_bytes: Bytes, budget: Duration) -> Option<Arena> {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return None;
    }
    let large = usize::try_from(streaming_bytes.0).ok()?.max(4 * STREAM_MIN_BYTES);
    let (cached, streaming) = (measure(CACHED_BYTES, budget)?, measure(large, budget)?);
    let speed = |phase: fn(&Phases) -> Duration| Memcpy {
        cached: rate(CACHED_BYTES / 2, phase(&cached), cached.nothing),
        streaming: rate(large / 2, phase(&streaming), streaming.nothing),
    };
    Some(Arena {
        latency: Time::from(cached.nothing).max(Time::from_ns(1)),
        copy: speed(|phases| phases.copy),
        reduce: speed(|phases| phases.reduce),
        cache: shared_cache(),
    })
}

fn rate(bytes: usize, took: Duration, nothing: Duration) -> Bandwidth {
    let took = Time::from(took.saturating_sub(nothing)).max(Time::from_ns(1));
    Bandwidth::measured(Bytes(bytes as u64), took).unwrap_or(Bandwidth::MAX)
}

/// Lets two threads do an all-reduce of so many bytes over and over, each phase timed.
fn measure(bytes: usize, budget: Duration) -> Option<Phases> {
    let options = AllocateOptions {
        prefault: true,
        ..AllocateOptions::default()
    };
    let memory = || HostMemory::allocate(bytes, options).ok();
    let table = Arc::new(Table {
        done: Default::default(),
        inputs: [memory()?, memory()?],
        outputs: [memory()?, memory()?],
        bytes,
    });
    let rounds = Arc::new(AtomicU64::new(u64::MAX));
    let name = || std::thread::Builder::new().name("weft-calibrate".to_owned());
    // Both on threads of their own, because a thread that was pinned stays so.
    let first = move || {
        let (theirs, limit) = (table.clone(), rounds.clone());
        let second = name().spawn(move || work(&theirs, 1, &limit, Duration::MAX)).ok()?;
        let measured = work(&table, 0, &rounds, budget);
        second.join().ok()?;
        Some(measured)
    };
    name().spawn(first).ok()?.join().ok()?
}

/// One thread's part. The first decides when it is enough, three rounds ahead, so that both stop after the same.
fn work(table: &Table, own: usize, rounds: &AtomicU64, budget: Duration) -> Phases {
    // Where pinning is not allowed the kernel decides, which it mostly does well.
    let _ = cpu::pin(own);
    let start = Instant::now();
    let mut best = Phases {
        nothing: Duration::MAX,
        reduce: Duration::MAX,
        copy: Duration::MAX,
    };
    let mut round = 0;
    while round < rounds.load(Ordering::Acquire) {
        if round >= 2 && start.elapsed() >= budget {
            rounds.fetch_min(round + 3, Ordering::AcqRel);
        }
        let nothing = table.phase(own, || {});
        let reduce = table.phase(own, || table.reduce(own));
        let copy = table.phase(own, || table.copy(own));
        best.nothing = best.nothing.min(nothing);
        best.reduce = best.reduce.min(reduce);
        best.copy = best.copy.min(copy);
        round += 1;
    }
    best
}

impl Table {
    /// Does something, and waits until the other has as well.
    fn phase(&self, own: usize, work: impl FnOnce()) -> Duration {
        let start = Instant::now();
        work();
        let phase = self.done[own].0.load(Ordering::Relaxed) + 1;
        self.done[own].0.store(phase, Ordering::Release);
        let mut looks = 0;
        while self.done[1 - own].0.load(Ordering::Acquire) < phase {
            looks += 1;
            match looks % LOOKS {
                0 => std::thread::yield_now(),
                _ => spin_loop(),
            }
        }
        start.elapsed()
    }

    /// Reduces one's own half of both inputs.
    fn reduce(&self, own: usize) {
        let half = self.bytes / 2;
        let cache = if half >= STREAM_MIN_BYTES {
            Cache::Bypass
        } else {
            Cache::Keep
        };
        let reducer = Reducer::new(Datatype::F32, Reduction::Sum);
        let at = |memory: &HostMemory| memory.as_ptr().wrapping_add(own * half);
        let (into, ours, theirs) = (at(&self.outputs[own]), at(&self.inputs[own]), at(&self.inputs[1 - own]));
        // SAFETY: half of each buffer, which is there while the table is; the inputs are only read, and this half of this output is
        // written by nobody else, and read by the other thread in another phase.
        unsafe { reducer.combine(into, ours, theirs, half / size_of::<f32>(), cache) }
    }

    /// Copies the other half of the output from the other thread's.
    fn copy(&self, own: usize) {
        let half = self.bytes / 2;
        let at = |memory: &HostMemory| memory.as_ptr().wrapping_add((1 - own) * half);
        let (into, from) = (at(&self.outputs[own]), at(&self.outputs[1 - own]));
        // SAFETY: as above; what is read was written in the phase before, and what is written nobody reads in this one.
        unsafe {
            match half >= STREAM_MIN_BYTES {
                true => copy_streaming(into, from, half),
                false => into.copy_from_nonoverlapping(from, half),
            }
        }
    }
}

/// The largest cache of the first core.
fn shared_cache() -> Bytes {
    let largest = (0..8).filter_map(|index| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = fs::read_to_string(path).ok()?;
        let (number, unit) = text.trim().split_at_checked(text.trim().len().checked_sub(1)?)?;
        let unit = match unit {
            "K" => 1 << 10,
            "M" => 1 << 20,
            _ => return None,
        };
        number.parse::<u64>().ok()?.checked_mul(unit)
    });
    largest.max().map_or(CACHE_GUESS, Bytes)
}
