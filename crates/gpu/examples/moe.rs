//! What dispatch and combine take between ranks of one process on one device, beside the least that their bytes take to move.
//!
//! `cargo run --release -p weft-gpu --example moe`
//!
//! Hidden 7,168, eight of 256 experts by chance. All ranks in one launch, captured in a graph, by events; microseconds a call. `beside.py` runs this, and puts compositions of torch's operations beside it.

use std::sync::Arc;
use std::time::Duration;

use weft_gpu::{
    CombineBuffers, Device, DeviceMemory, DeviceSlice, DispatchBuffers, Moe, MoeError, MoeHandle, MoeSettings, Moment,
    Received, Sent, Stream, Team, TeamSettings,
};

/// What the device's memory moves in a microsecond, reads and writes together.
const BYTES_A_MICROSECOND: f64 = 4.3e6;
const REPEATS: usize = 5;
const HIDDEN: u32 = 7168;
const EXPERTS: u32 = 256;
const TOP_K: u32 = 8;

type Outcome<T> = Result<T, MoeError>;

struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    /// Numbers around one, of either sign.
    fn bf16(&mut self, bytes: usize) -> Vec<u8> {
        let word = |chance: u64| (chance & 0x80ff_80ff_80ff_80ff | 0x3f00_3f00_3f00_3f00).to_le_bytes();
        (0..bytes / 8).flat_map(|_| word(self.next())).collect()
    }
    fn experts(&mut self) -> Vec<i32> {
        let mut own = Vec::new();
        while own.len() < TOP_K as usize {
            let expert = (self.next() >> 20) as i32 & (EXPERTS as i32 - 1);
            if !own.contains(&expert) {
                own.push(expert);
            }
        }
        own
    }
}

struct Seat {
    input: DeviceMemory,
    experts: DeviceMemory,
    weights: DeviceMemory,
    rows: DeviceMemory,
    scales: DeviceMemory,
    counts: DeviceMemory,
    row_experts: DeviceMemory,
    row_weights: DeviceMemory,
    output: DeviceMemory,
    /// Rows that its tokens become.
    sent: u64,
}

fn whole(memory: &DeviceMemory) -> DeviceSlice {
    DeviceSlice {
        address: memory.address(),
        bytes: memory.len(),
    }
}

impl Seat {
    fn new(device: &Arc<Device>, moe: &Moe, tokens: u32, chance: &mut Chance) -> Outcome<Seat> {
        let (bytes, ranks) = (moe.shape().bytes(), moe.shape().ranks() as u32);
        let of = |bytes: u64| DeviceMemory::allocate(device, bytes.max(16));
        let rows = u64::from(tokens) * u64::from(HIDDEN) * 2;
        let seat = Seat {
            input: of(rows)?,
            experts: of(u64::from(tokens * TOP_K) * 4)?,
            weights: of(u64::from(tokens * TOP_K) * 4)?,
            rows: of(bytes.rows)?,
            scales: of(bytes.scales)?,
            counts: of(bytes.counts)?,
            row_experts: of(bytes.row_experts)?,
            row_weights: of(bytes.row_weights)?,
            output: of(rows)?,
            sent: 0,
        };
        let (mut experts, mut sent) = (Vec::new(), 0);
        for _ in 0..tokens {
            let own = chance.experts();
            let each = (EXPERTS / ranks) as i32;
            let mut owners: Vec<i32> = own.iter().map(|expert| expert / each).collect();
            owners.sort_unstable();
            owners.dedup();
            sent += match moe.shape().settings().received {
                Received::Slots => own.len(),
                Received::Compact { .. } => owners.len(),
            } as u64;
            experts.extend(own.iter().flat_map(|expert| expert.to_le_bytes()));
        }
        seat.experts.write(0, &experts)?;
        seat.weights.write(0, &vec![0x3e; experts.len()])?;
        seat.input.write(0, &chance.bf16(rows as usize))?;
        Ok(Seat { sent, ..seat })
    }
}

struct Bench {
    device: Arc<Device>,
    moe: Moe,
    seats: Vec<Seat>,
    handles: Vec<MoeHandle>,
}

impl Bench {
    fn new(device: &Arc<Device>, team: &Arc<Team>, settings: MoeSettings) -> Outcome<Bench> {
        let moe = Moe::new(team, settings)?;
        let mut chance = Chance(u64::from(std::process::id()) << 8 | 1);
        let seats: Outcome<Vec<Seat>> = (0..team.ranks())
            .map(|_| Seat::new(device, &moe, settings.tokens_max, &mut chance))
            .collect();
        let handles: Outcome<Vec<MoeHandle>> = (0..team.ranks()).map(|_| moe.handle()).collect();
        Ok(Bench {
            device: device.clone(),
            moe,
            seats: seats?,
            handles: handles?,
        })
    }

    fn dispatch(&mut self, stream: &Stream) -> Outcome<()> {
        let tokens = self.moe.shape().settings().tokens_max;
        let buffers: Vec<DispatchBuffers> = self
            .seats
            .iter()
            .map(|seat| DispatchBuffers {
                tokens,
                input: whole(&seat.input),
                experts: whole(&seat.experts),
                weights: whole(&seat.weights),
                rows: whole(&seat.rows),
                scales: whole(&seat.scales),
                counts: whole(&seat.counts),
                row_experts: whole(&seat.row_experts),
                row_weights: whole(&seat.row_weights),
            })
            .collect();
        // SAFETY: the memory lives as long as the bench, and whoever puts this on a stream waits for it.
        unsafe { self.moe.dispatch_all(stream.handle(), &buffers, &mut self.handles) }
    }

    /// Of the rows as they were received: experts that do nothing.
    fn combine(&self, stream: &Stream) -> Outcome<()> {
        let buffers: Vec<CombineBuffers> = self
            .seats
            .iter()
            .map(|seat| CombineBuffers {
                input: whole(&seat.rows),
                weights: whole(&seat.weights),
                output: whole(&seat.output),
            })
            .collect();
        // SAFETY: as above.
        unsafe { self.moe.combine_all(stream.handle(), &buffers, &self.handles) }
    }

    /// The median of a call's time, of several captured in a graph.
    fn time(&mut self, stream: &Stream, once: impl Fn(&mut Bench) -> Outcome<()>) -> Outcome<f64> {
        let calls = if self.moe.shape().settings().tokens_max >= 1024 {
            3
        } else {
            10
        };
        let graph = stream.capture(|| (0..calls).try_for_each(|_| once(self)))?;
        let (begin, end) = (Moment::unmarked(&self.device)?, Moment::unmarked(&self.device)?);
        let mut took = Vec::new();
        for repeat in 0..=REPEATS {
            begin.mark(stream)?;
            // SAFETY: as above.
            unsafe { graph.launch(stream) }?;
            end.mark(stream)?;
            stream.synchronize()?;
            (0..self.seats.len()).try_for_each(|rank| self.moe.check(rank))?;
            if repeat > 0 {
                took.push(end.since(&begin)?.as_secs_f64() * 1e6 / f64::from(calls));
            }
        }
        took.sort_by(f64::total_cmp);
        Ok(took[REPEATS / 2])
    }

    fn run(&mut self, stream: &Stream) -> Outcome<()> {
        let settings = *self.moe.shape().settings();
        let (row, scales) = match settings.sent {
            Sent::Bf16 => (u64::from(HIDDEN) * 2, 0),
            Sent::Fp8 => (u64::from(HIDDEN), u64::from(HIDDEN) / 128 * 4),
        };
        let beside = match settings.received {
            Received::Slots => 0,
            Received::Compact { .. } => u64::from(TOP_K) * 8,
        };
        let ranks = self.seats.len() as u64;
        let tokens = ranks * u64::from(settings.tokens_max);
        let sent: u64 = self.seats.iter().map(|seat| seat.sent).sum();
        let read = tokens * u64::from(HIDDEN) * 2;
        let floor = |bytes: u64| bytes as f64 / BYTES_A_MICROSECOND;
        let layout = match settings.received {
            Received::Slots => "slots",
            Received::Compact { .. } => "compact",
        };
        let elements = match settings.sent {
            Sent::Bf16 => "bf16",
            Sent::Fp8 => "fp8",
        };
        let took = self.time(stream, |bench| bench.dispatch(stream))?;
        let moved = read + tokens * u64::from(TOP_K) * 8 + sent * (row + scales + beside);
        print!(
            "moe {ranks} {} {layout} {elements}: {sent} rows; dispatch {took:.1}, {} MiB, floor {:.1}, {:.0} %",
            settings.tokens_max,
            moved >> 20,
            floor(moved),
            100.0 * floor(moved) / took
        );
        if settings.sent == Sent::Bf16 {
            let took = self.time(stream, |bench| bench.combine(stream))?;
            let moved = read + sent * row;
            print!(
                "; combine {took:.1}, {} MiB, floor {:.1}, {:.0} %",
                moved >> 20,
                floor(moved),
                100.0 * floor(moved) / took
            );
        }
        println!();
        Ok(())
    }
}

fn main() -> Outcome<()> {
    let device = Device::open(0)?;
    let stream = Stream::new(&device)?;
    let slots = (128, true);
    let all = [
        (slots, Sent::Bf16),
        (slots, Sent::Fp8),
        ((128, false), Sent::Bf16),
        ((4096, false), Sent::Bf16),
        ((4096, false), Sent::Fp8),
    ];
    for ranks in [2u32, 8] {
        let settings = TeamSettings {
            deadline: Duration::from_secs(2),
            ..TeamSettings::default()
        };
        let team = Team::in_process(&device, ranks as usize, settings)?;
        for ((tokens_max, slots), sent) in all {
            let settings = MoeSettings {
                hidden: HIDDEN,
                experts: EXPERTS,
                top_k: TOP_K,
                tokens_max,
                received: match slots {
                    true => Received::Slots,
                    false => Received::Compact {
                        capacity: ranks * tokens_max,
                    },
                },
                sent,
            };
            Bench::new(&device, &team, settings)?.run(&stream)?;
        }
    }
    Ok(())
}
