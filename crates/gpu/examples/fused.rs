//! What all-reduce, residual and RMSNorm take in one kernel, beside Weft's all-reduce alone and the least that the bytes take to move.
//!
//! `cargo run --release -p weft-gpu --example fused`
//!
//! All ranks in one launch, captured in a graph, by events; microseconds a call. `beside.py` runs this, and puts what torch takes for the rest of the three calls beside it.

use std::sync::Arc;
use std::time::Duration;

use weft_gpu::{
    Buffers, Collective, CollectiveError, Device, DeviceMemory, DeviceSlice, FusedBuffers, FusedNorm, FusedNorms,
    Moment, Rounded, Stream, Team, TeamSettings, Way,
};
use weft_plan::{Datatype, Reduction};

/// What the device's memory moves in a microsecond, reads and writes together.
const BYTES_A_MICROSECOND: f64 = 4.3e6;
const REPEATS: usize = 5;

type Outcome<T> = Result<T, CollectiveError>;

struct Seat {
    input: DeviceMemory,
    residual: DeviceMemory,
    weight: DeviceMemory,
    output: DeviceMemory,
    scales: DeviceMemory,
}

impl Seat {
    fn new(device: &Arc<Device>, norm: &FusedNorm, block: &[u8]) -> Outcome<Seat> {
        let bytes = norm.bytes();
        let filled = |bytes: u64| -> Outcome<DeviceMemory> {
            let memory = DeviceMemory::allocate(device, bytes)?;
            for at in (0..bytes).step_by(block.len()) {
                memory.write(at, &block[..block.len().min((bytes - at) as usize)])?;
            }
            Ok(memory)
        };
        Ok(Seat {
            input: filled(bytes.rows)?,
            residual: filled(bytes.rows)?,
            weight: filled(bytes.weight)?,
            output: DeviceMemory::allocate(device, bytes.rows)?,
            scales: DeviceMemory::allocate(device, u64::from(norm.rows) * 4)?,
        })
    }

    fn buffers(&self) -> FusedBuffers {
        FusedBuffers {
            input: whole(&self.input),
            residual: whole(&self.residual),
            residual_out: whole(&self.residual),
            weight: whole(&self.weight),
            output: whole(&self.output),
            scales: whole(&self.scales),
        }
    }
}

fn whole(memory: &DeviceMemory) -> DeviceSlice {
    DeviceSlice {
        address: memory.address(),
        bytes: memory.len(),
    }
}

struct Bench {
    device: Arc<Device>,
    stream: Stream,
    team: Arc<Team>,
    norms: FusedNorms,
}

impl Bench {
    /// The median of a call's time, or nothing where this way does not take it.
    fn time(&self, calls: usize, once: impl Fn() -> Outcome<()>) -> Outcome<Option<f64>> {
        let graph = match self.stream.capture(|| (0..calls).try_for_each(|_| once())) {
            Err(CollectiveError::NotThisWay) => return Ok(None),
            graph => graph?,
        };
        let (begin, end) = (Moment::unmarked(&self.device)?, Moment::unmarked(&self.device)?);
        let mut took = Vec::new();
        for repeat in 0..=REPEATS {
            begin.mark(&self.stream)?;
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe { graph.launch(&self.stream) }?;
            end.mark(&self.stream)?;
            self.stream.synchronize()?;
            (0..self.team.ranks()).try_for_each(|rank| self.team.check(rank))?;
            if repeat > 0 {
                took.push(end.since(&begin)?.as_secs_f64() * 1e6 / calls as f64);
            }
        }
        took.sort_by(f64::total_cmp);
        Ok(Some(took[REPEATS / 2]))
    }
}

/// Numbers around one, of either sign.
fn random_bf16(bytes: usize) -> Vec<u8> {
    let mut state = u64::from(std::process::id()) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let word = |chance: u64| (chance & 0x80ff_80ff_80ff_80ff | 0x3f00_3f00_3f00_3f00).to_le_bytes();
    (0..bytes / 8).flat_map(|_| word(next())).collect()
}

fn cell(took: Option<f64>) -> String {
    took.map_or("-".to_owned(), |took| format!("{took:.2}"))
}

fn main() -> Outcome<()> {
    let device = Device::open(0)?;
    let block = random_bf16(8 << 20);
    println!("ranks rows hidden: chosen, packets, bulk, to fp8 by row; all-reduce alone; floor, share of it (chosen)");
    for ranks in [2usize, 4, 8] {
        let settings = TeamSettings {
            deadline: Duration::from_secs(2),
            ..TeamSettings::default()
        };
        let team = Team::in_process(&device, ranks, settings)?;
        let bench = Bench {
            norms: FusedNorms::new(&team)?,
            stream: Stream::new(&device)?,
            device: device.clone(),
            team,
        };
        for hidden in [4096u32, 7168] {
            for rows in [1u32, 2, 4, 8, 16, 32, 64, 256, 1024, 4096] {
                let norm = FusedNorm {
                    rows,
                    hidden,
                    datatype: Datatype::Bf16,
                    epsilon: 1e-6,
                    output: Rounded::Same,
                };
                let eight = FusedNorm {
                    output: Rounded::Fp8ByRow,
                    ..norm
                };
                let seats: Outcome<Vec<Seat>> = (0..ranks).map(|_| Seat::new(&device, &norm, &block)).collect();
                let seats = seats?;
                let buffers: Vec<FusedBuffers> = seats.iter().map(Seat::buffers).collect();
                let calls = if rows >= 1024 { 5 } else { 20 };
                let stream = bench.stream.handle();
                // SAFETY: the memory lives until the stream has been waited for.
                let fused = |norm: &FusedNorm, way| unsafe { bench.norms.call_all(stream, norm, &buffers, way) };
                let by = |norm: &FusedNorm, way| bench.time(calls, || fused(norm, way));
                let chosen = by(&norm, None)?;
                let (packets, bulk) = (by(&norm, Some(Way::OneShot))?, by(&norm, Some(Way::Bulk))?);
                let rounded = by(&eight, None)?;
                let both: Vec<Buffers> = seats
                    .iter()
                    .map(|seat| Buffers {
                        input: whole(&seat.input),
                        output: whole(&seat.output),
                    })
                    .collect();
                let sum = Collective::AllReduce {
                    count: u64::from(rows) * u64::from(hidden),
                    datatype: Datatype::Bf16,
                    reduction: Reduction::Sum,
                };
                // SAFETY: as above.
                let alone = bench.time(calls, || unsafe { bench.team.call_all(stream, sum, &both, None) })?;
                // Each input read once, each row's residual by one rank; residual and result written on every rank.
                let moved = norm.bytes().rows * (3 * ranks as u64 + 1);
                let floor = moved as f64 / BYTES_A_MICROSECOND;
                println!(
                    "fused {ranks} {rows} {hidden}: {}, {}, {}, {}; {}; {floor:.2}, {:.0} %",
                    cell(chosen),
                    cell(packets),
                    cell(bulk),
                    cell(rounded),
                    cell(alone),
                    chosen.map_or(0.0, |took| 100.0 * floor / took)
                );
            }
        }
    }
    Ok(())
}
