//! What collectives between ranks of one process take on one device, beside the least that their bytes take to move.
//!
//! `cargo run --release -p weft-gpu --example collectives`
//!
//! `--ranks 8` is about eight ranks alone, `--few` leaves out what is no row of a comparison, and `--nccl libnccl.so.2` puts NCCL beside it, launched by the same threads: several ranks of NCCL share a device
//! from 2.30 on, where `NCCL_MULTI_RANK_GPU_ENABLE=1` is set, and four or more need fewer blocks (`NCCL_MAX_CTAS`), which is set here, for all ranks of a process: one number of ranks a run.
//!
//! Four ways to launch: a thread for each rank (`threads`, by the host's clock, many calls in a row), one launch for all ranks (`together`), and both captured in a graph (`graph`,
//! `graph 1`), by events. Microseconds a call; bf16; the bytes are those of the whole buffer.

mod nccl;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use weft_gpu::{
    Buffers, Collective, CollectiveError, Collectives, Device, DeviceMemory, DeviceSlice, GpuError, Moment, Pinned,
    Stream, Team, TeamSettings, Way,
};
use weft_plan::{Datatype, Reduction};

/// What the device's memory moves in a microsecond, reads and writes together.
const BYTES_A_MICROSECOND: f64 = 4.3e6;
const LARGEST: u64 = 256 << 20;
const REPEATS: usize = 3;
const ROUNDS: u32 = 10_001;

type Outcome<T> = Result<T, CollectiveError>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
}

impl Op {
    /// Of a buffer of so many bytes: that of all ranks together, where a rank has a part.
    fn collective(self, bytes: u64, ranks: u64) -> Collective {
        let (datatype, reduction) = (Datatype::Bf16, Reduction::Sum);
        let part = bytes / ranks;
        match self {
            Op::AllReduce => Collective::AllReduce {
                count: bytes / 2,
                datatype,
                reduction,
            },
            Op::ReduceScatter => Collective::ReduceScatter {
                count: part / 2,
                datatype,
                reduction,
            },
            Op::AllGather => Collective::AllGather { bytes: part },
            Op::AllToAll => Collective::AllToAll { bytes: part },
            Op::Broadcast => Collective::Broadcast { bytes, root: 0 },
        }
    }

    /// Each input read once, each output written once.
    fn bytes_moved(self, bytes: u64, ranks: u64) -> u64 {
        match self {
            Op::AllReduce | Op::AllToAll => 2 * ranks * bytes,
            Op::AllGather | Op::ReduceScatter => (ranks + 1) * bytes,
            Op::Broadcast => (ranks + 1) * bytes,
        }
    }
}

struct Bench {
    device: Arc<Device>,
    team: Arc<Team>,
    streams: Vec<Stream>,
    buffers: Vec<(DeviceMemory, DeviceMemory)>,
    beside: Option<Beside>,
}

/// NCCL, and its ranks.
struct Beside {
    nccl: nccl::Nccl,
    ranks: Vec<nccl::Rank>,
}

impl Bench {
    /// `alone`: a team of one rank.
    fn new(device: &Arc<Device>, ranks: usize, alone: &Arc<Team>) -> Outcome<Bench> {
        let mut bench = Bench {
            device: device.clone(),
            team: team(device, ranks)?,
            streams: Vec::new(),
            buffers: Vec::new(),
            beside: None,
        };
        let block = random_bf16(16 << 20);
        for _ in 0..ranks {
            bench.streams.push(Stream::new(device)?);
            let (input, output) = (
                DeviceMemory::allocate(device, LARGEST)?,
                DeviceMemory::allocate(device, LARGEST)?,
            );
            for at in (0..LARGEST).step_by(block.len()) {
                input.write(at, &block)?;
            }
            bench.buffers.push((input, output));
        }
        // The driver prepares a stream at its first kernel, and may wait for the device meanwhile: never, if that waits for the kernel.
        for rank in 0..ranks {
            let nothing = Op::AllReduce.collective(1024, 1);
            let (stream, buffers) = (bench.streams[rank].handle(), bench.buffers(rank, nothing));
            // SAFETY: the memory lives as long as the bench, which waits for its streams.
            unsafe { Collectives::new(alone, 0)?.call(stream, nothing, buffers) }?;
            bench.streams[rank].synchronize()?;
        }
        Ok(bench)
    }

    fn buffers(&self, rank: usize, collective: Collective) -> Buffers {
        let (input, output) = collective.bytes(self.buffers.len()).expect("lengths");
        let slice = |memory: &DeviceMemory, bytes| DeviceSlice {
            address: memory.address(),
            bytes,
        };
        Buffers {
            input: slice(&self.buffers[rank].0, input),
            output: slice(&self.buffers[rank].1, output),
        }
    }

    fn each(&self, calls: &Collectives, collective: Collective) -> Outcome<()> {
        let rank = calls.rank();
        // SAFETY: the memory lives as long as the bench, which waits for its streams.
        unsafe { calls.call(self.streams[rank].handle(), collective, self.buffers(rank, collective)) }
    }

    fn together(&self, collective: Collective, way: Option<Way>) -> Outcome<()> {
        let buffers: Vec<Buffers> = (0..self.streams.len())
            .map(|rank| self.buffers(rank, collective))
            .collect();
        // SAFETY: as above.
        unsafe { self.team.call_all(self.streams[0].handle(), collective, &buffers, way) }
    }

    fn settle(&self) -> Outcome<()> {
        for stream in &self.streams {
            stream.synchronize()?;
        }
        (0..self.streams.len()).try_for_each(|rank| self.team.check(rank))
    }

    fn by_threads(&self, collective: Collective, calls: usize) -> Outcome<f64> {
        let own: Outcome<Vec<_>> = (0..self.streams.len())
            .map(|rank| Collectives::new(&self.team, rank))
            .collect();
        let own = own?;
        let took = self.threads(calls, |rank| self.each(&own[rank], collective), CollectiveError::from);
        self.settle()?;
        took
    }

    /// The same by NCCL.
    fn by_nccl(&self, collective: Collective, calls: usize) -> Option<Result<f64, String>> {
        let Beside { nccl, ranks } = self.beside.as_ref()?;
        let call = |rank: usize| {
            let buffers = self.buffers(rank, collective);
            let places = (buffers.input.address, buffers.output.address);
            nccl.call(ranks[rank], collective, places, &self.streams[rank])
        };
        Some(self.threads(calls, call, |error| error.to_string()))
    }

    /// A thread for each rank, by the host's clock.
    fn threads<E: Send>(
        &self,
        calls: usize,
        call: impl Fn(usize) -> Result<(), E> + Sync,
        gpu: impl Fn(GpuError) -> E + Sync,
    ) -> Result<f64, E> {
        let barrier = Barrier::new(self.streams.len());
        let one = |rank: usize| -> Result<f64, E> {
            let mut took = Vec::new();
            for repeat in 0..=REPEATS {
                barrier.wait();
                let began = Instant::now();
                let put = (0..calls).try_for_each(|_| call(rank));
                let ended = self.streams[rank].synchronize();
                barrier.wait();
                put?;
                ended.map_err(&gpu)?;
                if repeat > 0 {
                    took.push(began.elapsed().as_secs_f64() * 1e6 / calls as f64);
                }
            }
            Ok(median(took))
        };
        let one = &one;
        let took = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.streams.len())
                .map(|rank| scope.spawn(move || one(rank)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a thread"))
                .collect::<Vec<_>>()
        });
        took.into_iter().next().expect("a rank")
    }

    /// By events on the first stream.
    fn by_events(&self, calls: usize, mut once: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
        let (begin, end) = (Moment::unmarked(&self.device)?, Moment::unmarked(&self.device)?);
        let mut took = Vec::new();
        for repeat in 0..=REPEATS {
            begin.mark(&self.streams[0])?;
            once()?;
            end.mark(&self.streams[0])?;
            self.settle()?;
            if repeat > 0 {
                took.push(end.since(&begin)?.as_secs_f64() * 1e6 / calls as f64);
            }
        }
        Ok(median(took))
    }

    fn by_one_launch(&self, collective: Collective, calls: usize) -> Outcome<f64> {
        self.by_events(calls, || (0..calls).try_for_each(|_| self.together(collective, None)))
    }

    /// `apart`: a branch for each rank.
    fn by_graph(&self, collective: Collective, way: Option<Way>, calls: usize, apart: bool) -> Outcome<f64> {
        let root = &self.streams[0];
        let graph = root.capture(|| {
            if !apart {
                return (0..calls).try_for_each(|_| self.together(collective, way));
            }
            for stream in &self.streams[1..] {
                stream.after(root)?;
            }
            for rank in 0..self.streams.len() {
                let own = Collectives::new(&self.team, rank)?;
                let own = way.map_or(own.clone(), |way| own.by(way));
                (0..calls).try_for_each(|_| self.each(&own, collective))?;
            }
            for stream in &self.streams[1..] {
                root.after(stream)?;
            }
            Ok::<(), CollectiveError>(())
        })?;
        // SAFETY: the memory lives as long as the bench, which waits for its streams.
        self.by_events(calls, || Ok(unsafe { graph.launch(root) }?))
    }

    /// What a measure has found, or a word for why not; a team that has failed is replaced.
    fn cell(&mut self, measure: impl FnOnce(&Bench) -> Outcome<f64>) -> String {
        let found = measure(self);
        match found {
            Ok(took) if took < 100.0 => format!("{took:.2}"),
            Ok(took) => format!("{took:.0}"),
            Err(CollectiveError::NotThisWay) => "-".to_owned(),
            Err(error) => {
                let ranks = self.streams.len();
                eprintln!("{error}");
                if self.settle().is_err() {
                    self.team = team(&self.device, ranks).expect("a team");
                }
                "failed".to_owned()
            }
        }
    }
}

fn team(device: &Arc<Device>, ranks: usize) -> Outcome<Arc<Team>> {
    let settings = TeamSettings {
        deadline: Duration::from_secs(2),
        ..TeamSettings::default()
    };
    Team::in_process(device, ranks, settings)
}

fn median(mut took: Vec<f64>) -> f64 {
    took.sort_by(f64::total_cmp);
    took[took.len() / 2]
}

/// Numbers around one, of either sign.
fn random_bf16(bytes: usize) -> Vec<u8> {
    let mut state = std::process::id() as u64 | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let word = |chance: u64| (chance & 0x80ff_80ff_80ff_80ff | 0x3f00_3f00_3f00_3f00).to_le_bytes();
    (0..bytes / 8).flat_map(|_| word(next())).collect()
}

fn length(bytes: u64) -> String {
    match bytes {
        ..1_048_576 => format!("{}K", bytes >> 10),
        _ => format!("{}M", bytes >> 20),
    }
}

struct Arguments {
    ranks: Vec<usize>,
    few: bool,
    nccl: Option<String>,
}

impl Arguments {
    fn read() -> Arguments {
        let mut read = Arguments {
            ranks: vec![2, 4, 8],
            few: false,
            nccl: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--few" => read.few = true,
                "--nccl" => read.nccl = arguments.next(),
                "--ranks" => {
                    let ranks = arguments.next().and_then(|ranks| ranks.parse().ok());
                    read.ranks = vec![ranks.expect("--ranks is followed by how many")];
                }
                other => panic!("{other}: --ranks N, --few and --nccl LIBRARY are known"),
            }
        }
        read
    }
}

/// Makes NCCL take several ranks on a device, with as many blocks of each as all have room for together.
///
/// # Safety
/// No other thread may look at the environment meanwhile.
unsafe fn ask_for_several_ranks(ranks: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        std::env::set_var("NCCL_MULTI_RANK_GPU_ENABLE", "1");
        if ranks > 2 {
            std::env::set_var("NCCL_MAX_CTAS", if ranks > 4 { "8" } else { "16" });
        }
    }
}

fn main() -> Outcome<()> {
    // Streams that share one of the driver's queues wait for each other, and here kernels of one stream wait for those of others.
    // SAFETY: the only thread, before the driver is loaded.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    let Arguments { ranks, few, nccl } = Arguments::read();
    let began = Instant::now();
    let device = Device::open(0)?;
    // Keeps the kernels loaded.
    let alone = team(&device, 1)?;
    for ranks in ranks {
        let mut bench = Bench::new(&device, ranks, &alone)?;
        if let Some(path) = &nccl {
            // SAFETY: no other thread looks at the environment.
            unsafe { ask_for_several_ranks(ranks) };
            let nccl = nccl::Nccl::load(path);
            let beside = nccl.and_then(|nccl| nccl.ranks(ranks).map(|ranks| Beside { nccl, ranks }));
            match beside {
                Ok(beside) => {
                    println!("NCCL {}", beside.nccl.version);
                    bench.beside = Some(beside);
                }
                Err(why) => println!("no NCCL: {why}"),
            }
        }
        let blocks = bench.team.blocks_max();
        println!(
            "{device:?}, {ranks} ranks, {blocks} blocks a rank at most, after {:.1} s",
            began.elapsed().as_secs_f64()
        );
        let took = Pinned::allocate(&device, 8)?;
        for bare in [true, false] {
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe {
                bench
                    .team
                    .round_trip(bench.streams[0].handle(), ROUNDS, bare, took.address())
            }?;
            bench.settle()?;
            // SAFETY: eight bytes, which the kernel has written.
            let ns = unsafe { took.as_ptr().cast::<u64>().read_volatile() } as f64 / f64::from(ROUNDS - 1);
            println!(
                "round trip of a {}: {:.2} us",
                if bare { "bare flag" } else { "signal" },
                ns / 1e3
            );
        }
        println!("op bytes: threads, together, graph, graph 1; floor, share of it (graph 1)");
        for op in [
            Op::AllReduce,
            Op::AllGather,
            Op::ReduceScatter,
            Op::AllToAll,
            Op::Broadcast,
        ] {
            for shift in [10, 13, 16, 19, 22, 25, 28] {
                let (bytes, all) = (1u64 << shift, ranks as u64);
                if few && op == Op::Broadcast {
                    continue;
                }
                let collective = op.collective(bytes, all);
                let calls = if bytes >= 32 << 20 { 5 } else { 20 };
                let threads = bench.cell(|bench| bench.by_threads(collective, calls));
                let together = bench.cell(|bench| bench.by_one_launch(collective, calls));
                let graph = bench.cell(|bench| bench.by_graph(collective, None, calls, true));
                let one = bench.cell(|bench| bench.by_graph(collective, None, calls, false));
                let floor = op.bytes_moved(bytes, all) as f64 / BYTES_A_MICROSECOND;
                let share = one.parse::<f64>().map_or(0.0, |took| 100.0 * floor / took);
                let beside = match bench.by_nccl(collective, calls) {
                    Some(Ok(took)) => format!("; NCCL {took:.2}"),
                    Some(Err(why)) => format!("; {why}"),
                    None => String::new(),
                };
                println!(
                    "{op:?} {}: {threads}, {together}, {graph}, {one}; {floor:.2}, {share:.0} %{beside}",
                    length(bytes)
                );
            }
        }
        if nccl.is_some() {
            continue;
        }
        println!("all-reduce by way (graph 1): one-shot, two-shot, bulk");
        for shift in 13..=20 {
            let collective = Op::AllReduce.collective(1 << shift, ranks as u64);
            let cells = [Way::OneShot, Way::TwoShot, Way::Bulk]
                .map(|way| bench.cell(|bench| bench.by_graph(collective, Some(way), 20, false)));
            println!("{}: {}", length(1 << shift), cells.join(", "));
        }
        println!("all-gather by way (graph 1): packets, bulk");
        for shift in 16..=20 {
            let collective = Op::AllGather.collective(1 << shift, ranks as u64);
            let cells = [Way::OneShot, Way::Bulk]
                .map(|way| bench.cell(|bench| bench.by_graph(collective, Some(way), 20, false)));
            println!("{}: {}", length(1 << shift), cells.join(", "));
        }
    }
    println!("{:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}
