//! How long kernels take on a device, as it is: what the choice between them goes by, and what predictions are put beside.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use weft_plan::cost::LinkCost;
use weft_plan::cost::kernels::{DeviceCosts, KernelCall, Way};
use weft_plan::{Bandwidth, Bytes, Datatype, Picos, Reduction};

use crate::collective::{Buffers, Collective, CollectiveError, DeviceSlice};
use crate::copier::{Copier, Piece};
use crate::device::{Device, GpuError, check};
use crate::memory::DeviceMemory;
use crate::pinned::Pinned;
use crate::stream::{Moment, Stream};
use crate::team::{Team, TeamSettings};

const REPEATS: usize = 5;
const DEADLINE: Duration = Duration::from_secs(5);
/// Words that go to and fro, and copies of next to nothing, in one measurement.
const ROUNDS: u32 = 10_001;
const COPIES: usize = 200;
/// For the rate of a copy: far more than any cache.
const COPIED_BYTES: u64 = 512 << 20;
/// Of a call, where it is the calls that take the time, and where it is the bytes.
const SMALL_BYTES: u64 = 1 << 10;
const FEW_RANKS: usize = 2;
const MANY_RANKS: usize = 8;

/// Ranks of this process that share a device, with memory for their calls.
#[derive(Debug)]
pub struct Gauge {
    device: Arc<Device>,
    team: Arc<Team>,
    stream: Stream,
    buffers: Vec<(DeviceMemory, DeviceMemory)>,
}

impl Gauge {
    /// For calls of which no buffer of a rank has more than `bytes_max`. What is in the buffers is any numbers.
    pub fn new(
        device: &Arc<Device>,
        ranks: usize,
        bytes_max: u64,
        costs: DeviceCosts,
    ) -> Result<Gauge, CollectiveError> {
        let settings = TeamSettings {
            deadline: DEADLINE,
            costs,
            ..TeamSettings::default()
        };
        let gauge = Gauge {
            device: device.clone(),
            team: Team::in_process(device, ranks, settings)?,
            stream: Stream::new(device)?,
            buffers: (0..ranks)
                .map(|_| {
                    let bytes = bytes_max.max(1);
                    Ok((
                        DeviceMemory::allocate(device, bytes)?,
                        DeviceMemory::allocate(device, bytes)?,
                    ))
                })
                .collect::<Result<_, GpuError>>()?,
        };
        let block = numbers(bytes_max.clamp(8, 16 << 20) as usize);
        for (input, _) in &gauge.buffers {
            for at in (0..bytes_max).step_by(block.len()) {
                input.write(at, &block[..block.len().min((bytes_max - at) as usize)])?;
            }
        }
        Ok(gauge)
    }

    /// How long a call takes, all ranks in one launch, one call after the other in a graph: the median. Without a way it goes the one that is chosen.
    pub fn time(&self, collective: Collective, way: Option<Way>, calls: u32) -> Result<Picos, CollectiveError> {
        let (input, output) = collective.bytes(self.team.ranks())?;
        let buffers = self.buffers.iter().map(|(of_input, of_output)| {
            let slice = |memory: &DeviceMemory, bytes: u64| match bytes <= memory.len() {
                true => Ok(DeviceSlice {
                    address: memory.address(),
                    bytes,
                }),
                false => Err(CollectiveError::BufferTooSmall {
                    needed: bytes,
                    found: memory.len(),
                }),
            };
            Ok(Buffers {
                input: slice(of_input, input)?,
                output: slice(of_output, output)?,
            })
        });
        let buffers = buffers.collect::<Result<Vec<Buffers>, CollectiveError>>()?;
        let (calls, stream) = (calls.max(1), self.stream.handle());
        let graph = self.stream.capture(|| {
            (0..calls).try_for_each(|_| {
                // SAFETY: the buffers are memory of the gauge's, as long as the call needs, and the stream is waited for below.
                unsafe { self.team.call_all(stream, collective, &buffers, way) }
            })
        })?;
        // SAFETY: as above.
        let all = self.by_events(|| Ok(unsafe { graph.launch(&self.stream) }?))?;
        Ok(Picos::from_ps(all.as_ps() / u64::from(calls)))
    }

    /// How long a word takes to another rank and back: bare, or as a signal that orders memory.
    pub fn round_trip(&self, bare: bool) -> Result<Picos, CollectiveError> {
        let took = Pinned::allocate(&self.device, size_of::<u64>())?;
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe { self.team.round_trip(self.stream.handle(), ROUNDS, bare, took.address()) }?;
        self.settle()?;
        // SAFETY: eight bytes, which the kernel has written, and nobody writes any more.
        let ns = unsafe { took.as_ptr().cast::<u64>().read_volatile() };
        Ok(Picos::from_ps(ns.saturating_mul(1000) / u64::from(ROUNDS - 1)))
    }

    fn by_events(&self, mut once: impl FnMut() -> Result<(), CollectiveError>) -> Result<Picos, CollectiveError> {
        let (begin, end) = (Moment::unmarked(&self.device)?, Moment::unmarked(&self.device)?);
        let mut took = Vec::with_capacity(REPEATS);
        for repeat in 0..=REPEATS {
            begin.mark(&self.stream)?;
            once()?;
            end.mark(&self.stream)?;
            self.settle()?;
            // The first brings things where they are needed.
            if repeat > 0 {
                took.push(end.since(&begin)?);
            }
        }
        Ok(median(took))
    }

    fn settle(&self) -> Result<(), CollectiveError> {
        self.stream.synchronize()?;
        (0..self.team.ranks()).try_for_each(|rank| self.team.check(rank))
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        // What is on the stream uses the buffers, which go first otherwise.
        self.team.wait_for_device();
    }
}

/// Measures what calls take on a device, in a few seconds. It is disturbed by whatever else runs there.
pub fn device_costs(device: &Arc<Device>) -> Result<DeviceCosts, CollectiveError> {
    let known = DeviceCosts::default();
    let few = Gauge::new(device, FEW_RANKS, 1 << 20, known)?;
    let many = Gauge::new(device, MANY_RANKS, 1 << 20, known)?;
    let copy = copy_rate(device, &few)?;
    let way = |way: Way, large: u64| {
        let small = all_reduce(SMALL_BYTES);
        let (first, all) = (few.time(small, Some(way), 20)?, many.time(small, Some(way), 20)?);
        let heavy = many.time(all_reduce(large), Some(way), 20)?;
        let moved = |bytes| DeviceCosts::moved(way, &as_call(bytes), MANY_RANKS as u64).unwrap_or_default();
        let more = Bytes(moved(large).0.saturating_sub(moved(SMALL_BYTES).0));
        Ok::<LinkCost, CollectiveError>(fitted(first, all, heavy, more))
    };
    Ok(DeviceCosts {
        launch: launch(device)?,
        flag: few.round_trip(true)?,
        signal: few.round_trip(false)?,
        copy,
        memory: Bandwidth::from_bytes_per_sec(copy.bytes_per_sec().saturating_mul(2)),
        // Half of it: the other half is what was there before.
        cache: Bytes(device.facts()?.cache_bytes / 2),
        one_shot: way(Way::OneShot, 128 << 10)?,
        two_shot: way(Way::TwoShot, 256 << 10)?,
        bulk: way(Way::Bulk, 1 << 20)?,
    })
}

/// From calls of next to nothing among few ranks and among many, and one of many that moves so many bytes more.
fn fitted(few: Picos, many: Picos, heavy: Picos, more: Bytes) -> LinkCost {
    let each = many.saturating_sub(few).as_ps() / (MANY_RANKS - FEW_RANKS) as u64;
    let others = (FEW_RANKS - 1) as u64;
    LinkCost {
        latency: few.saturating_sub(Picos::from_ps(each * others)),
        per_span: Picos::from_ps(each),
        bandwidth: Bandwidth::measured(more, heavy.saturating_sub(many)).unwrap_or(Bandwidth::MAX),
    }
}

fn all_reduce(bytes: u64) -> Collective {
    Collective::AllReduce {
        count: bytes / 2,
        datatype: Datatype::Bf16,
        reduction: Reduction::Sum,
    }
}

/// Of all-reduce among many ranks, at lengths that every rank has an equal part of.
fn as_call(bytes: u64) -> KernelCall {
    let ranks = MANY_RANKS as u64;
    KernelCall {
        one_hop: bytes,
        two_hops: Some(bytes / ranks),
        read: bytes * ranks,
        written: bytes * ranks,
    }
}

fn copy_rate(device: &Arc<Device>, gauge: &Gauge) -> Result<Bandwidth, CollectiveError> {
    let (from, to) = (
        DeviceMemory::allocate(device, COPIED_BYTES)?,
        DeviceMemory::allocate(device, COPIED_BYTES)?,
    );
    let block = numbers(16 << 20);
    for at in (0..COPIED_BYTES).step_by(block.len()) {
        from.write(at, &block)?;
    }
    let took = gauge.by_events(|| {
        let _entered = device.enter()?;
        let stream = gauge.stream.handle() as sys::CUstream;
        // SAFETY: both are as long as that, and live until the stream has been waited for.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), COPIED_BYTES as usize, stream) };
        Ok(check("cuMemcpyDtoDAsync", copied)?)
    })?;
    Ok(Bandwidth::measured(Bytes(COPIED_BYTES), took).unwrap_or(Bandwidth::MAX))
}

/// Kernels that stay are not what is meant.
fn launch(device: &Arc<Device>) -> Result<Picos, CollectiveError> {
    const LEN: u64 = 16;
    let (from, to) = (
        DeviceMemory::allocate(device, LEN)?,
        DeviceMemory::allocate(device, LEN)?,
    );
    let mut copier = Copier::new(device, Duration::ZERO)?;
    let piece = Piece {
        to: to.address(),
        from: from.address(),
        len: LEN,
    };
    let mut took = Vec::with_capacity(COPIES);
    for _ in 0..COPIES {
        let began = Instant::now();
        // SAFETY: both memories live until the copy has ended, which is waited for.
        let ticket = unsafe { copier.begin(&[piece], false) }?;
        copier.wait(ticket)?;
        took.push(began.elapsed());
    }
    Ok(median(took))
}

fn median(mut took: Vec<Duration>) -> Picos {
    took.sort_unstable();
    let middle = took.get(took.len() / 2).copied().unwrap_or_default();
    Picos::from_ns(u64::try_from(middle.as_nanos()).unwrap_or(u64::MAX))
}

/// Numbers of bf16 around one, of either sign.
fn numbers(bytes: usize) -> Vec<u8> {
    let mut state = u64::from(std::process::id()) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state & 0x80ff_80ff_80ff_80ff | 0x3f00_3f00_3f00_3f00).to_le_bytes()
    };
    (0..bytes.div_ceil(8)).flat_map(|_| next()).take(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_those_that_made_the_times() {
        let made = LinkCost {
            latency: Picos::from_ns(2_400),
            per_span: Picos::from_ns(80),
            bandwidth: Bandwidth::from_bytes_per_sec(4_000_000_000_000),
        };
        let more = Bytes(16_000_000);
        let time = |ranks: u64, bytes| made.time(bytes, ranks - 1);
        let found = fitted(time(2, Bytes(0)), time(8, Bytes(0)), time(8, more), more);
        assert_eq!(found, made);
        // Noise that makes less of more is nothing that moves.
        let noise = fitted(time(8, Bytes(0)), time(2, Bytes(0)), Picos::ZERO, more);
        assert_eq!((noise.per_span, noise.bandwidth), (Picos::ZERO, Bandwidth::MAX));
    }

    #[test]
    fn what_is_measured_is_what_the_choice_goes_by() {
        for bytes in [SMALL_BYTES, 64 << 10, 512 << 10, 1 << 20] {
            let said = crate::choice::predicted(&all_reduce(bytes), MANY_RANKS, &DeviceCosts::default()).unwrap();
            for (way, time) in said {
                let own = DeviceCosts::default().time(way, &as_call(bytes), MANY_RANKS as u64);
                assert_eq!(time, own, "{way:?} {bytes}");
            }
        }
    }
}
