//! How fast reductions are on this machine, beside the copy of the standard library and beside what the memory allows.
//!
//! `cargo bench -p weft-fabric --bench reduce [-- PART]`, where PART is a part of a row's name. A figure is the best of several runs, in GB of
//! one buffer per second of this thread's time: what one buffer's worth of results takes, whatever the number of buffers that are read
//! for it. Out of the caches the limit is the traffic: a copy past the cache reads one buffer and writes one, so `combine` (two read, one
//! written) can reach two thirds of it.

use std::time::{Duration, Instant};

use weft_fabric::memory::{AllocateOptions, HostMemory, HugePages};
use weft_fabric::reduce::quantized::Quantizer;
use weft_fabric::reduce::{Cache, InstructionSet, Reducer};
use weft_plan::datatype::quantized::{Block, Code, Quantization};
use weft_plan::{Datatype, Reduction};

const SIZES: [usize; 3] = [32 << 10, 1 << 20, 64 << 20];
const BUFFERS: usize = 6;
const TIME_PER_FIGURE: Duration = Duration::from_millis(60);

fn main() {
    let wanted = std::env::args()
        .skip(1)
        .find(|a| !a.starts_with('-'))
        .unwrap_or_default();
    let options = AllocateOptions {
        huge_pages: HugePages::Transparent,
        prefault: true,
        ..AllocateOptions::default()
    };
    let buffers: Vec<HostMemory> = (0..BUFFERS)
        .map(|_| HostMemory::allocate(SIZES[2], options).expect("memory for the buffers"))
        .collect();
    let at: Vec<*mut u8> = buffers.iter().map(HostMemory::as_ptr).collect();
    println!(
        "{:<44}{:>9}{:>9}{:>9}",
        "GB/s of one buffer", "32 KiB", "1 MiB", "64 MiB"
    );
    let row = |name: &str, work: &dyn Fn(usize)| {
        if !name.contains(&wanted) {
            return;
        }
        let figures = SIZES.map(|bytes| bytes as f64 / best(|| work(bytes)).as_secs_f64() / 1e9);
        println!("{name:<44}{:>9.1}{:>9.1}{:>9.1}", figures[0], figures[1], figures[2]);
    };
    row("memcpy", &|bytes| {
        // SAFETY: every buffer holds the greatest size, and no two overlap.
        unsafe { at[0].copy_from_nonoverlapping(at[1], bytes) }
    });
    row("weft copy", &|bytes| {
        // SAFETY: every buffer holds the greatest size, and no two overlap.
        unsafe { weft_fabric::copy::copy(at[0], at[1], bytes) }
    });
    for &set in InstructionSet::ALL.iter().rev().filter(|set| set.is_available()) {
        for datatype in Datatype::ALL {
            for reduction in Reduction::ALL {
                if reduction != Reduction::Sum && datatype != Datatype::F32 && wanted.is_empty() {
                    continue;
                }
                let reducer = Reducer::with(set, datatype, reduction).finishing(3.try_into().expect("not zero"));
                let count = |bytes| bytes / datatype.size();
                let name = |form| format!("{set:?} {datatype} {reduction} {form}");
                row(&name("reduce_into"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe { reducer.reduce_into(at[0], at[1], count(bytes)) }
                });
                row(&name("combine"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe {
                        reducer.combine(at[2], at[0], at[1], count(bytes), Cache::BySize);
                    }
                });
                if datatype != Datatype::F32 && wanted.is_empty() {
                    continue;
                }
                row(&name("combine, cached"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe {
                        reducer.combine(at[2], at[0], at[1], count(bytes), Cache::Keep);
                    }
                });
                row(&name("combine_both"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe {
                        reducer.combine_both([at[2], at[3]], at[0], at[1], count(bytes), Cache::BySize);
                    }
                });
                let from = [at[0].cast_const(), at[1], at[2], at[3]];
                row(&name("combine_many of 4"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe {
                        reducer.combine_many(at[4], &from, count(bytes), Cache::BySize);
                    }
                });
            }
        }
    }
    for &set in InstructionSet::ALL.iter().rev().filter(|set| set.is_available()) {
        for code in [Code::Int8, Code::Fp8E4m3] {
            for block in [Block::Of32, Block::Of128] {
                let quantizer = Quantizer::with(set, Quantization { code, block });
                let name = |form| format!("{set:?} {code:?} {block:?} {form}");
                row(&name("encode"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe { quantizer.encode(at[0], at[1], bytes / 4) }
                });
                row(&name("decode"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe { quantizer.decode(at[2], at[0], bytes / 4) }
                });
                row(&name("accumulate"), &|bytes| {
                    // SAFETY: every buffer holds the greatest size, and no two overlap.
                    unsafe { quantizer.accumulate(at[2], at[0], bytes / 4) }
                });
            }
        }
    }
}

/// The best time of one call: after a warm-up, of as many as fit.
fn best(mut work: impl FnMut()) -> Duration {
    work();
    let begin = Instant::now();
    let mut best = Duration::MAX;
    let mut calls = 1;
    while begin.elapsed() < TIME_PER_FIGURE {
        let start = processor_time();
        for _ in 0..calls {
            work();
        }
        let took = processor_time() - start;
        best = best.min(took / calls);
        // A clock's reading should be a small part of what is timed.
        if took < Duration::from_micros(20) {
            calls *= 2;
        }
    }
    best
}

/// What this thread has run: time that others take on a busy machine does not count.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the local structure.
    let read = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(read, 0, "the clock of a thread");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
