//! Collectives between ranks of one process, on a device.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft_gpu::{
    Buffers, Collective, CollectiveError, Collectives, Device, DeviceMemory, DeviceSlice, Stream, Team, TeamSettings,
    Way,
};
use weft_plan::{Datatype, Reduction};
use weft_testing::{Need, has};

const REDUCED: [Datatype; 4] = [Datatype::F32, Datatype::F16, Datatype::Bf16, Datatype::I32];
/// What lies before and after an output, and must stay as it is.
const GUARD: u64 = 256;
const POISON: u8 = 0xa5;

fn device() -> Option<Arc<Device>> {
    // One team that is never used keeps the kernels loaded from test to test.
    static KEPT: OnceLock<(Arc<Device>, Arc<Team>)> = OnceLock::new();
    let open = || {
        // Streams that share one of the driver's queues wait for each other, and here kernels of one stream wait for those of others.
        // SAFETY: before the driver is loaded, and nothing else here changes the environment.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
        let device = Device::open(0).expect("a device");
        let team = Team::in_process(&device, 1, TeamSettings::default()).expect("a team");
        (device, team)
    };
    has(Need::Gpu).then(|| KEPT.get_or_init(open).0.clone())
}

/// A deadline that is long for a call, and short for whoever waits for the tests.
fn settings() -> TeamSettings {
    TeamSettings {
        deadline: Duration::from_secs(5),
        ..TeamSettings::default()
    }
}

/// Numbers by chance, the same every time.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
    /// Mostly numbers of ordinary size; one in thirty-two is any pattern of bits, infinities and NaNs among them.
    fn elements(&mut self, datatype: Datatype, count: usize) -> Vec<u8> {
        if datatype == Datatype::U8 {
            return self.bytes(count);
        }
        let mut bytes = Vec::with_capacity(count * datatype.size());
        for _ in 0..count {
            let chance = self.next();
            let value = (chance >> 40) as f32 / (1 << 23) as f32 - 1.0;
            let any = chance.is_multiple_of(32);
            match datatype {
                Datatype::F32 if !any => bytes.extend(value.to_ne_bytes()),
                // Shorter by cutting, which is as good as any other number.
                Datatype::Bf16 if !any => bytes.extend(((value.to_bits() >> 16) as u16).to_ne_bytes()),
                Datatype::F16 if !any => {
                    let half = 0x2c00 + (chance >> 8) as u16 % 0x1400;
                    bytes.extend((half | ((chance >> 32) as u16 & 0x8000)).to_ne_bytes());
                }
                _ => bytes.extend(&self.0.wrapping_mul(chance | 1).to_le_bytes()[8 - datatype.size()..]),
            }
        }
        bytes
    }
}

/// A rank: its stream, its memory and its handle.
struct Seat {
    stream: Stream,
    input: DeviceMemory,
    output: DeviceMemory,
    calls: Collectives,
}

fn seats(device: &Arc<Device>, ranks: usize, bytes: u64, settings: TeamSettings) -> (Arc<Team>, Vec<Seat>) {
    let team = Team::in_process(device, ranks, settings).expect("a team");
    let seats = (0..ranks)
        .map(|rank| Seat {
            stream: Stream::new(device).expect("a stream"),
            input: DeviceMemory::allocate(device, bytes).expect("memory"),
            output: DeviceMemory::allocate(device, bytes).expect("memory"),
            calls: Collectives::new(&team, rank).expect("a rank"),
        })
        .collect();
    (team, seats)
}

/// What each rank must have after a collective.
fn expected(collective: Collective, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let ranks = inputs.len();
    let fold = |datatype: Datatype, reduction: Reduction, sources: &[&[u8]]| {
        let mut into = vec![0; sources[0].len()];
        match reduction {
            Reduction::Avg => datatype.average(ranks as u64, &mut into, sources),
            _ => datatype.fold(reduction, &mut into, sources),
        }
        .expect("whole elements");
        into
    };
    match collective {
        Collective::AllReduce {
            datatype, reduction, ..
        } => {
            let sources: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            vec![fold(datatype, reduction, &sources); ranks]
        }
        Collective::ReduceScatter {
            count,
            datatype,
            reduction,
        } => {
            let bytes = count as usize * datatype.size();
            let part = |rank: usize| {
                let sources: Vec<&[u8]> = inputs
                    .iter()
                    .map(|input| &input[rank * bytes..(rank + 1) * bytes])
                    .collect();
                fold(datatype, reduction, &sources)
            };
            (0..ranks).map(part).collect()
        }
        Collective::AllGather { .. } => vec![inputs.concat(); ranks],
        Collective::AllToAll { bytes } => {
            let bytes = bytes as usize;
            let part = |rank: usize| {
                let parts = inputs.iter().map(|input| &input[rank * bytes..(rank + 1) * bytes]);
                parts.flatten().copied().collect()
            };
            (0..ranks).map(part).collect()
        }
        Collective::Broadcast { root, .. } => vec![inputs[root].clone(); ranks],
    }
}

/// The error of floats against sums in f64, relative to what was summed: beside the comparison bit by bit, so that a fault that both share would show.
fn error_of_sum(datatype: Datatype, got: &[u8], inputs: &[Vec<u8>]) -> f64 {
    let value = |bytes: &[u8]| match datatype {
        Datatype::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().expect("four"))),
        Datatype::Bf16 => f64::from(f32::from_bits(
            u32::from(u16::from_ne_bytes(bytes.try_into().expect("two"))) << 16,
        )),
        _ => {
            let bits = u16::from_ne_bytes(bytes.try_into().expect("two"));
            let (sign, exponent, mantissa) = (bits >> 15, i32::from(bits >> 10 & 31), f64::from(bits & 1023));
            let magnitude = match exponent {
                0 => mantissa * 2f64.powi(-24),
                31 => f64::NAN,
                _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
            };
            if sign == 1 { -magnitude } else { magnitude }
        }
    };
    let (mut wrong, mut all) = (0.0, 0.0);
    for at in (0..got.len()).step_by(datatype.size()) {
        let of = |bytes: &[u8]| value(&bytes[at..at + datatype.size()]);
        let (sum, got) = (inputs.iter().map(|input| of(input)).sum::<f64>(), of(got));
        if sum.abs() < 1e4 && got.is_finite() {
            wrong += (got - sum).powi(2);
            all += sum.powi(2);
        }
    }
    if all == 0.0 { 0.0 } else { (wrong / all).sqrt() }
}

/// How the buffers of a case lie.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    Straight,
    /// Every rank's buffers lie another number of elements after a multiple of sixteen bytes.
    Askew,
    InPlace,
}

/// Who puts the calls on streams.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hand {
    /// A launch for each rank, on its stream.
    Each,
    /// One launch for all.
    One,
}

/// Runs one collective on fresh numbers, and compares every byte of every output, and those around it.
fn run(seats: &[Seat], collective: Collective, way: Option<Way>, lie: Lie, hand: Hand, chance: &mut Chance) {
    let ranks = seats.len();
    let what = format!("{collective:?}, {ranks} ranks, {way:?}, {lie:?}, {hand:?}");
    let (input, output) = collective.bytes(ranks).expect("lengths");
    let datatype = match collective {
        Collective::AllReduce { datatype, .. } | Collective::ReduceScatter { datatype, .. } => datatype,
        _ => Datatype::U8,
    };
    let inputs: Vec<Vec<u8>> = (0..ranks)
        .map(|_| chance.elements(datatype, input as usize / datatype.size()))
        .collect();
    let size = datatype.size() as u64;
    let mut buffers = Vec::new();
    for (rank, seat) in seats.iter().enumerate() {
        let shift = |salt: u64| {
            if lie == Lie::Askew {
                (rank as u64 * 3 + salt) % 8 * size
            } else {
                0
            }
        };
        let (from, to) = (GUARD + shift(1), GUARD + shift(2));
        assert!(
            to + output + GUARD <= seat.output.len() && from + input + GUARD <= seat.input.len(),
            "{what}"
        );
        let whole = vec![POISON; (to + output + GUARD) as usize];
        seat.output.write(0, &whole).expect("poisoned");
        let output_slice = DeviceSlice {
            address: seat.output.address() + to,
            bytes: output,
        };
        let mut input_slice = DeviceSlice {
            address: seat.input.address() + from,
            bytes: input,
        };
        let mut output_slice = output_slice;
        match (lie, collective) {
            (Lie::InPlace, Collective::ReduceScatter { .. }) => {
                output_slice.address = input_slice.address + rank as u64 * output
            }
            (Lie::InPlace, Collective::AllGather { bytes }) => {
                input_slice.address = output_slice.address + rank as u64 * bytes
            }
            (Lie::InPlace, Collective::AllToAll { .. }) => {}
            (Lie::InPlace, _) => input_slice.address = output_slice.address,
            _ => {}
        }
        let within = |memory: &DeviceMemory| input_slice.address.wrapping_sub(memory.address());
        match within(&seat.input) < seat.input.len() {
            true => seat.input.write(within(&seat.input), &inputs[rank]),
            false => seat.output.write(within(&seat.output), &inputs[rank]),
        }
        .expect("written");
        buffers.push(Buffers {
            input: input_slice,
            output: output_slice,
        });
    }
    let team = seats[0].calls.team();
    match hand {
        Hand::Each => {
            for (seat, buffers) in seats.iter().zip(&buffers) {
                let calls = way.map_or(seat.calls.clone(), |way| seat.calls.by(way));
                // SAFETY: the memory lives until the streams have been waited for.
                unsafe { calls.call(seat.stream.handle(), collective, *buffers) }.expect(&what);
            }
        }
        Hand::One => {
            // SAFETY: as above.
            unsafe { team.call_all(seats[0].stream.handle(), collective, &buffers, way) }.expect(&what);
        }
    }
    for seat in seats {
        seat.stream.synchronize().expect(&what);
    }
    for (rank, (seat, expected)) in seats.iter().zip(expected(collective, &inputs)).enumerate() {
        team.check(rank).expect(&what);
        let mut got = vec![0; output as usize];
        let address = buffers[rank].output.address;
        let memory = if address >= seat.output.address() && address - seat.output.address() < seat.output.len() {
            &seat.output
        } else {
            &seat.input
        };
        memory.read(address - memory.address(), &mut got).expect("read");
        if let Some(at) = (0..got.len()).find(|at| got[*at] != expected[*at]) {
            let end = (at + 8).min(got.len());
            panic!(
                "{what}: rank {rank}, byte {at} of {output}: {:x?} instead of {:x?}",
                &got[at..end],
                &expected[at..end]
            );
        }
        if let Collective::AllReduce {
            datatype,
            reduction: Reduction::Sum,
            ..
        } = collective
            && datatype.is_float()
        {
            let error = error_of_sum(datatype, &got, &inputs);
            assert!(
                error < if datatype == Datatype::F32 { 1e-5 } else { 1e-2 },
                "{what}: {error}"
            );
        }
        // In place in the input there is nothing of the sort around the output.
        if std::ptr::eq(memory, &raw const seat.output) {
            let (mut before, mut after) = (vec![0; GUARD as usize], vec![0; GUARD as usize]);
            let at = address - memory.address();
            memory.read(at - GUARD, &mut before).expect("read");
            memory.read(at + output, &mut after).expect("read");
            assert!(
                before.iter().chain(&after).all(|byte| *byte == POISON),
                "{what}: rank {rank} wrote outside"
            );
        }
    }
}

/// A reduction that goes with a number, a sum every other time.
fn nth_reduction(nth: usize) -> Reduction {
    match nth % 8 {
        1 => Reduction::Avg,
        3 => Reduction::Max,
        5 => Reduction::Min,
        7 => Reduction::Prod,
        _ => Reduction::Sum,
    }
}

#[test]
fn every_reduction_is_what_plan_says_bit_by_bit() {
    let Some(device) = device() else { return };
    let mut chance = Chance(1);
    for ranks in 2..=8 {
        let (_team, seats) = seats(&device, ranks, 6 << 20, settings());
        let mut nth = ranks;
        for datatype in REDUCED {
            for count in [1, 3, 255, 1024, 4099, 33_333] {
                for (lie, hand) in [
                    (Lie::Straight, Hand::Each),
                    (Lie::Askew, Hand::One),
                    (Lie::InPlace, Hand::Each),
                ] {
                    for way in [None, Some(Way::OneShot), Some(Way::TwoShot), Some(Way::Bulk)] {
                        nth += 1;
                        let reduction = nth_reduction(nth);
                        let all = Collective::AllReduce {
                            count,
                            datatype,
                            reduction,
                        };
                        run(&seats, all, way, lie, hand, &mut chance);
                        if way != Some(Way::TwoShot) {
                            let scatter = Collective::ReduceScatter {
                                count,
                                datatype,
                                reduction,
                            };
                            run(&seats, scatter, way, lie, hand, &mut chance);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_move_brings_every_byte() {
    let Some(device) = device() else { return };
    let mut chance = Chance(2);
    for ranks in 2..=8 {
        let (_team, seats) = seats(&device, ranks, 6 << 20, settings());
        for bytes in [1, 7, 16, 1000, 4096, 65_538, 200_003, 1 << 18] {
            for (lie, hand) in [
                (Lie::Straight, Hand::Each),
                (Lie::Askew, Hand::One),
                (Lie::InPlace, Hand::Each),
            ] {
                for way in [Way::OneShot, Way::Bulk] {
                    let root = (bytes as usize + ranks) % ranks;
                    for collective in [
                        Collective::AllGather { bytes },
                        Collective::AllToAll { bytes },
                        Collective::Broadcast { bytes, root },
                    ] {
                        run(&seats, collective, Some(way), lie, hand, &mut chance);
                    }
                }
            }
        }
    }
}

#[test]
fn large_calls_are_right_too() {
    let Some(device) = device() else { return };
    let mut chance = Chance(3);
    for ranks in [2, 3, 8] {
        let (_team, seats) = seats(&device, ranks, 40 << 20, settings());
        let (datatype, reduction) = (Datatype::Bf16, Reduction::Sum);
        let count = (4 << 20) + 13;
        for hand in [Hand::Each, Hand::One] {
            run(
                &seats,
                Collective::AllReduce {
                    count,
                    datatype,
                    reduction,
                },
                None,
                Lie::Straight,
                hand,
                &mut chance,
            );
        }
        let count = (1 << 20) + 8;
        run(
            &seats,
            Collective::ReduceScatter {
                count,
                datatype,
                reduction,
            },
            None,
            Lie::Straight,
            Hand::Each,
            &mut chance,
        );
        for collective in [
            Collective::AllGather { bytes: 4_000_000 },
            Collective::AllToAll { bytes: 4_000_000 },
            Collective::Broadcast {
                bytes: 20_000_002,
                root: 1,
            },
        ] {
            run(&seats, collective, None, Lie::Straight, Hand::Each, &mut chance);
        }
    }
}

/// Every call on its own slice of the buffers, all of them on the streams before the first is looked at: by one thread in turns, or by a thread for each rank, which may run ahead.
#[test]
fn a_thousand_calls_in_a_row_do_not_meet_each_other() {
    let Some(device) = device() else { return };
    const CALLS: usize = 1000;
    const COUNT: usize = 700;
    let datatype = Datatype::F32;
    let (count, slice) = (COUNT as u64, (COUNT * 4) as u64);
    let mut chance = Chance(4);
    for ranks in 2..=8 {
        let (team, seats) = seats(&device, ranks, CALLS as u64 * slice, settings());
        for (threads, ways) in [
            (false, vec![Way::OneShot]),
            (false, vec![Way::TwoShot]),
            (false, vec![Way::Bulk]),
            (true, vec![Way::OneShot, Way::Bulk, Way::TwoShot]),
        ] {
            let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| chance.elements(datatype, CALLS * COUNT)).collect();
            for (seat, input) in seats.iter().zip(&inputs) {
                seat.input.write(0, input).expect("written");
                seat.output.write(0, &vec![POISON; input.len()]).expect("poisoned");
            }
            let call = |seat: &Seat, nth: usize| {
                let at = |memory: &DeviceMemory| DeviceSlice {
                    address: memory.address() + nth as u64 * slice,
                    bytes: slice,
                };
                let buffers = Buffers {
                    input: at(&seat.input),
                    output: at(&seat.output),
                };
                let calls = seat.calls.by(ways[nth % ways.len()]);
                // SAFETY: the memory lives until the streams have been waited for.
                unsafe { calls.all_reduce(seat.stream.handle(), buffers, count, datatype, Reduction::Sum) }
                    .expect("a call");
            };
            match threads {
                false => (0..CALLS).for_each(|nth| seats.iter().for_each(|seat| call(seat, nth))),
                true => std::thread::scope(|scope| {
                    for seat in &seats {
                        scope.spawn(move || {
                            for nth in 0..CALLS {
                                call(seat, nth);
                                // Whoever runs too far ahead fills the driver's queues, and keeps the others from theirs.
                                if nth % 100 == 99 {
                                    seat.stream.synchronize().expect("an end");
                                }
                            }
                        });
                    }
                }),
            }
            let sources: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            let mut sum = vec![0; inputs[0].len()];
            datatype
                .fold(Reduction::Sum, &mut sum, &sources)
                .expect("whole elements");
            for (rank, seat) in seats.iter().enumerate() {
                seat.stream.synchronize().expect("an end");
                team.check(rank).expect("no failure");
                let mut got = vec![0; sum.len()];
                seat.output.read(0, &mut got).expect("read");
                let wrong = (0..sum.len()).find(|at| got[*at] != sum[*at]);
                assert_eq!(
                    wrong.map(|at| at / slice as usize),
                    None,
                    "{ranks} ranks, {ways:?}, threads {threads}: rank {rank}, in call"
                );
            }
        }
    }
}

#[test]
fn calls_are_captured_and_replayed() {
    let Some(device) = device() else { return };
    let mut chance = Chance(5);
    let (datatype, reduction) = (Datatype::Bf16, Reduction::Sum);
    for ranks in [2, 5, 8] {
        let (team, seats) = seats(&device, ranks, 4 << 20, settings());
        let whole = |memory: &DeviceMemory, bytes: u64| DeviceSlice {
            address: memory.address(),
            bytes,
        };
        for (way, count) in [(Way::OneShot, 4096), (Way::TwoShot, 40_000), (Way::Bulk, 300_000)] {
            let bytes = count * 2;
            // Twice in place after once into the output, so that a replay depends on the order of all three.
            let graph = seats[0]
                .stream
                .capture(|| {
                    for seat in &seats[1..] {
                        seat.stream.after(&seats[0].stream)?;
                    }
                    for seat in &seats {
                        let (calls, stream) = (seat.calls.by(way), seat.stream.handle());
                        let first = Buffers {
                            input: whole(&seat.input, bytes),
                            output: whole(&seat.output, bytes),
                        };
                        let again = Buffers {
                            input: first.output,
                            ..first
                        };
                        for buffers in [first, again, again] {
                            // SAFETY: the memory lives until the last replay has been waited for.
                            unsafe { calls.all_reduce(stream, buffers, count, datatype, reduction) }?;
                        }
                    }
                    for seat in &seats[1..] {
                        seats[0].stream.after(&seat.stream)?;
                    }
                    Ok::<(), CollectiveError>(())
                })
                .expect("a graph");
            for _ in 0..20 {
                let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| chance.elements(datatype, count as usize)).collect();
                for (seat, input) in seats.iter().zip(&inputs) {
                    seat.input.write(0, input).expect("written");
                }
                for _ in 0..10 {
                    // SAFETY: as above.
                    unsafe { graph.launch(&seats[0].stream) }.expect("a replay");
                }
                seats[0].stream.synchronize().expect("an end");
                let call = Collective::AllReduce {
                    count,
                    datatype,
                    reduction,
                };
                let once = expected(call, &inputs);
                let thrice = expected(call, &expected(call, &once));
                for (rank, seat) in seats.iter().enumerate() {
                    team.check(rank).expect("no failure");
                    let mut got = vec![0; bytes as usize];
                    seat.output.read(0, &mut got).expect("read");
                    assert!(got == thrice[rank], "{ranks} ranks, {way:?}, rank {rank}");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_and_nobody_hangs() {
    let Some(device) = device() else { return };
    let settings = TeamSettings {
        deadline: Duration::from_millis(200),
        ..TeamSettings::default()
    };
    for way in [Way::OneShot, Way::TwoShot, Way::Bulk] {
        let (team, seats) = seats(&device, 4, 1 << 20, settings);
        let call = |seat: &Seat| {
            let slice = |memory: &DeviceMemory| DeviceSlice {
                address: memory.address(),
                bytes: 100_000,
            };
            let buffers = Buffers {
                input: slice(&seat.input),
                output: slice(&seat.output),
            };
            // SAFETY: the memory lives until the streams have been waited for.
            unsafe {
                seat.calls
                    .by(way)
                    .all_reduce(seat.stream.handle(), buffers, 25_000, Datatype::F32, Reduction::Sum)
            }
        };
        let began = Instant::now();
        for seat in &seats[..3] {
            call(seat).expect("a call");
        }
        for seat in &seats[..3] {
            seat.stream.synchronize().expect("an end");
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        let told: Vec<_> = (0..3).map(|rank| team.check(rank).expect_err("a failure")).collect();
        assert!(
            told.contains(&CollectiveError::PeerTimedOut { rank: 3 }),
            "{way:?}: {told:?}"
        );
        let known = |error: &CollectiveError| {
            matches!(
                error,
                CollectiveError::PeerTimedOut { rank: 3 } | CollectiveError::PeerGaveUp { rank: 0..3 }
            )
        };
        assert!(told.iter().all(known), "{way:?}: {told:?}");
        // Nothing more can be asked of those; and the one that comes late is told by its kernel, at once.
        assert!(call(&seats[0]).is_err());
        call(&seats[3]).expect("a call");
        seats[3].stream.synchronize().expect("an end");
        assert!(
            matches!(team.check(3), Err(CollectiveError::PeerGaveUp { rank: 0..3 })),
            "{:?}",
            team.check(3)
        );
    }
}

#[test]
fn an_abort_ends_every_wait() {
    let Some(device) = device() else { return };
    for way in [Way::OneShot, Way::Bulk] {
        let (team, seats) = seats(&device, 2, 1 << 20, settings());
        let slice = |memory: &DeviceMemory| DeviceSlice {
            address: memory.address(),
            bytes: 1000,
        };
        let buffers = Buffers {
            input: slice(&seats[0].input),
            output: slice(&seats[0].output),
        };
        let calls = seats[0].calls.by(way);
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe { calls.all_gather(seats[0].stream.handle(), buffers, 500) }.expect("a call");
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(team.check(0), Ok(()));
        let began = Instant::now();
        team.abort();
        seats[0].stream.synchronize().expect("an end");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        assert_eq!(team.check(0), Err(CollectiveError::Aborted));
        assert_eq!(team.check(1), Err(CollectiveError::Aborted));
    }
}

#[test]
fn one_rank_alone_copies_and_wrong_calls_are_refused() {
    let Some(device) = device() else { return };
    let (_team, alone) = seats(&device, 1, 1 << 16, settings());
    let mut chance = Chance(6);
    run(
        &alone,
        Collective::AllGather { bytes: 1001 },
        None,
        Lie::Straight,
        Hand::Each,
        &mut chance,
    );
    let too_many = Team::in_process(&device, 9, TeamSettings::default());
    assert!(matches!(too_many, Err(CollectiveError::TooManyRanks { ranks: 9 })));
    let hasty = TeamSettings {
        deadline: Duration::ZERO,
        ..TeamSettings::default()
    };
    assert!(matches!(
        Team::in_process(&device, 2, hasty),
        Err(CollectiveError::BadSettings)
    ));
    let (team, two) = seats(&device, 2, 1 << 16, settings());
    assert!(matches!(
        Collectives::new(&team, 2),
        Err(CollectiveError::RankOutOfRange { rank: 2, ranks: 2 })
    ));
    let slice = DeviceSlice {
        address: two[0].input.address(),
        bytes: 1 << 16,
    };
    let buffers = Buffers {
        input: slice,
        output: slice,
    };
    // SAFETY: refused before anything is launched.
    let refused = unsafe {
        [
            two[0].calls.all_to_all(two[0].stream.handle(), buffers, 1 << 15),
            two[0]
                .calls
                .all_reduce(two[0].stream.handle(), buffers, 1 << 20, Datatype::F32, Reduction::Sum),
            team.call_all(
                two[0].stream.handle(),
                Collective::AllGather { bytes: 8 },
                &[buffers],
                None,
            ),
        ]
    };
    assert!(
        matches!(refused[1], Err(CollectiveError::BufferTooSmall { .. })),
        "{refused:?}"
    );
    assert!(
        matches!(refused[2], Err(CollectiveError::WrongBuffers { .. })),
        "{refused:?}"
    );
    assert_eq!(refused[0], Err(CollectiveError::Overlap));
}
