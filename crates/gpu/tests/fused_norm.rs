//! All-reduce, residual and RMSNorm in one, on a device, against what f64 says.

mod rows;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rows::{Chance, Guarded, Two, device, eight, error_of_eight, settings};
use weft_gpu::{
    CollectiveError, Device, DeviceSlice, FusedBuffers, FusedNorm, FusedNorms, Rounded, Stream, Team, TeamSettings, Way,
};
use weft_plan::Datatype;

const EPSILON: f32 = 1e-5;

/// A rank: its stream and its memory.
struct Seat {
    stream: Stream,
    input: Guarded,
    residual: Guarded,
    residual_out: Guarded,
    weight: Guarded,
    output: Guarded,
    scales: Guarded,
}

impl Seat {
    fn new(device: &Arc<Device>, norm: &FusedNorm) -> Seat {
        let bytes = norm.bytes();
        Seat {
            stream: Stream::new(device).expect("a stream"),
            input: Guarded::new(device, bytes.rows),
            residual: Guarded::new(device, bytes.rows),
            residual_out: Guarded::new(device, bytes.rows),
            weight: Guarded::new(device, bytes.weight),
            output: Guarded::new(device, bytes.output),
            scales: Guarded::new(device, bytes.scales.max(4)),
        }
    }

    fn buffers(&self, in_place: bool) -> FusedBuffers {
        let apart = FusedBuffers {
            input: self.input.slice(),
            residual: self.residual.slice(),
            residual_out: self.residual_out.slice(),
            weight: self.weight.slice(),
            output: self.output.slice(),
            scales: self.scales.slice(),
        };
        match in_place {
            true => FusedBuffers {
                residual_out: apart.residual,
                ..apart
            },
            false => apart,
        }
    }
}

/// Seats of all ranks, and what is in them.
struct Table {
    team: Arc<Team>,
    norms: FusedNorms,
    seats: Vec<Seat>,
    norm: FusedNorm,
    two: Two,
    inputs: Vec<Vec<u8>>,
    residual: Vec<u8>,
    weight: Vec<u8>,
}

impl Table {
    fn new(device: &Arc<Device>, team: &Arc<Team>, norm: FusedNorm, chance: &mut Chance) -> Table {
        let two = if norm.datatype == Datatype::F16 {
            Two::F16
        } else {
            Two::Bf16
        };
        let seats: Vec<Seat> = (0..team.ranks()).map(|_| Seat::new(device, &norm)).collect();
        let mut table = Table {
            team: team.clone(),
            norms: FusedNorms::new(team).expect("kernels"),
            seats,
            norm,
            two,
            inputs: Vec::new(),
            residual: Vec::new(),
            weight: Vec::new(),
        };
        table.refill(chance);
        table
    }

    fn refill(&mut self, chance: &mut Chance) {
        let (hidden, rows) = (self.norm.hidden as usize, self.norm.rows as usize);
        self.inputs = (0..self.seats.len())
            .map(|_| chance.rows(self.two, rows * hidden))
            .collect();
        self.residual = chance.rows(self.two, rows * hidden);
        self.weight = chance.rows(self.two, hidden);
        for (seat, input) in self.seats.iter().zip(&self.inputs) {
            seat.input.write(input);
            seat.residual.write(&self.residual);
            seat.weight.write(&self.weight);
        }
    }

    /// `each`: a launch for every rank, on its stream; else one for all.
    fn call(&self, way: Option<Way>, in_place: bool, each: bool) -> Result<(), CollectiveError> {
        if each {
            for (rank, seat) in self.seats.iter().enumerate() {
                // SAFETY: the memory lives until the streams have been waited for.
                unsafe {
                    self.norms
                        .call(seat.stream.handle(), rank, &self.norm, &seat.buffers(in_place), way)
                }?;
            }
            return Ok(());
        }
        let buffers: Vec<FusedBuffers> = self.seats.iter().map(|seat| seat.buffers(in_place)).collect();
        // SAFETY: as above.
        unsafe {
            self.norms
                .call_all(self.seats[0].stream.handle(), &self.norm, &buffers, way)
        }
    }

    /// Every byte of every result, and those around them.
    fn check(&self, what: &str, in_place: bool) {
        for (rank, seat) in self.seats.iter().enumerate() {
            seat.stream.synchronize().expect(what);
            self.team.check(rank).expect(what);
        }
        let hidden = self.norm.hidden as usize;
        let inputs: Vec<Vec<f64>> = self.inputs.iter().map(|input| self.two.values(input)).collect();
        let (residual, weight) = (self.two.values(&self.residual), self.two.values(&self.weight));
        let results = |seat: &Seat| {
            let next = if in_place { &seat.residual } else { &seat.residual_out };
            (next.read(what), seat.output.read(what), seat.scales.read(what))
        };
        let first = results(&self.seats[0]);
        for (rank, seat) in self.seats.iter().enumerate().skip(1) {
            assert!(
                results(seat) == first,
                "{what}: rank {rank} has other results than rank 0"
            );
        }
        let next = self.two.values(&first.0);
        for (at, got) in next.iter().enumerate() {
            let sum = inputs.iter().map(|input| input[at]).sum::<f64>() + residual[at];
            // What f32 loses on the way is relative to what was added.
            let added = inputs.iter().map(|input| input[at].abs()).sum::<f64>() + residual[at].abs();
            let error = self.two.error(sum) + added * 1e-6;
            assert!(
                (got - sum).abs() <= error,
                "{what}: residual {at}: {got} instead of {sum}"
            );
        }
        for (row, next) in next.chunks_exact(hidden).enumerate() {
            let mean = next.iter().map(|value| value * value).sum::<f64>() / hidden as f64;
            let inverse = 1.0 / (mean + f64::from(EPSILON)).sqrt();
            let exact: Vec<f64> = next
                .iter()
                .zip(&weight)
                .map(|(value, weight)| value * inverse * weight)
                .collect();
            let most = exact.iter().fold(0.0f64, |most, value| most.max(value.abs()));
            let scale = match self.norm.output {
                Rounded::Same => 1.0,
                Rounded::Fp8 { scale } => f64::from(scale),
                Rounded::Fp8ByRow => {
                    let four = first.2[row * 4..][..4].try_into().expect("four");
                    let scale = f64::from(f32::from_ne_bytes(four));
                    let right = (most / 448.0).max(1.0 / (448.0 * 512.0));
                    assert!(
                        (scale / right - 1.0).abs() < 1e-5,
                        "{what}: scale {row}: {scale} instead of {right}"
                    );
                    scale
                }
            };
            for (column, exact) in exact.iter().enumerate() {
                let at = row * hidden + column;
                let (got, of, error) = match self.norm.output {
                    Rounded::Same => {
                        let bits = u16::from_ne_bytes([first.1[at * 2], first.1[at * 2 + 1]]);
                        (
                            self.two.value(bits),
                            *exact,
                            self.two.error(*exact) + exact.abs() * 1e-5,
                        )
                    }
                    _ => {
                        let of = (exact / scale).clamp(-448.0, 448.0);
                        (eight(first.1[at]), of, error_of_eight(of))
                    }
                };
                assert!(
                    (got - of).abs() <= error,
                    "{what}: row {row}, column {column}: {got} instead of {of}"
                );
            }
        }
    }
}

fn norm(rows: u32, hidden: u32, datatype: Datatype, output: Rounded) -> FusedNorm {
    FusedNorm {
        rows,
        hidden,
        datatype,
        epsilon: EPSILON,
        output,
    }
}

#[test]
fn results_are_those_of_f64_for_every_shape_way_and_output() {
    let Some(device) = device() else { return };
    let mut chance = Chance(11);
    let outputs = [Rounded::Same, Rounded::Fp8ByRow, Rounded::Fp8 { scale: 0.02 }];
    for ranks in 1..=8 {
        let team = Team::in_process(&device, ranks, settings()).expect("a team");
        let mut nth = ranks;
        for (rows, hidden) in [
            (1, 8),
            (1, 2048),
            (3, 7168),
            (5, 520),
            (17, 2048),
            (2, 16_384),
            (61, 1032),
            (300, 256),
        ] {
            for way in [None, Some(Way::OneShot), Some(Way::Bulk)] {
                nth += 1;
                let datatype = [Datatype::Bf16, Datatype::F16][nth % 2];
                let norm = norm(rows, hidden, datatype, outputs[nth % 3]);
                let (in_place, each) = (nth % 4 < 2, nth % 5 < 3);
                let what = format!("{ranks} ranks, {norm:?}, {way:?}, in place {in_place}, each {each}");
                let table = Table::new(&device, &team, norm, &mut chance);
                match table.call(way, in_place, each) {
                    Ok(()) => table.check(&what, in_place),
                    // Packets do not take so much.
                    Err(CollectiveError::NotThisWay) => {
                        assert!(way == Some(Way::OneShot) && norm.bytes().rows > 256 << 10, "{what}")
                    }
                    Err(error) => panic!("{what}: {error}"),
                }
            }
        }
    }
}

/// Small, and all ranks in one launch, so that tools which let one kernel run at a time can look at it.
#[test]
fn one_launch_for_all_ranks() {
    let Some(device) = device() else { return };
    let team = Team::in_process(&device, 3, settings()).expect("a team");
    for way in [Way::OneShot, Way::Bulk] {
        for output in [Rounded::Same, Rounded::Fp8ByRow] {
            let norm = norm(7, 1040, Datatype::Bf16, output);
            let table = Table::new(&device, &team, norm, &mut Chance(17));
            for _ in 0..3 {
                table.call(Some(way), false, false).expect("a call");
            }
            table.check(&format!("{way:?}, {output:?}"), false);
        }
    }
}

#[test]
fn rows_of_nothing_and_rows_without_a_number_stay_by_themselves() {
    let Some(device) = device() else { return };
    let team = Team::in_process(&device, 4, settings()).expect("a team");
    let mut chance = Chance(12);
    for way in [Way::OneShot, Way::Bulk] {
        for output in [Rounded::Same, Rounded::Fp8ByRow] {
            let (rows, hidden) = (6, 512);
            let norm = norm(rows, hidden, Datatype::Bf16, output);
            let table = Table::new(&device, &team, norm, &mut chance);
            // Row 1 is zero everywhere, row 3 has a NaN on one rank.
            let row = hidden as usize * 2;
            for seat in &table.seats {
                let mut input = table.inputs[2].clone();
                input[row..2 * row].fill(0);
                seat.input.write(&input);
                let mut residual = table.residual.clone();
                residual[row..2 * row].fill(0);
                seat.residual.write(&residual);
            }
            let mut broken = table.inputs[2].clone();
            broken[row..2 * row].fill(0);
            broken[3 * row..3 * row + 2].copy_from_slice(&0x7fc0u16.to_ne_bytes());
            table.seats[2].input.write(&broken);
            table.call(Some(way), false, true).expect("a call");
            for (rank, seat) in table.seats.iter().enumerate() {
                seat.stream.synchronize().expect("an end");
                team.check(rank).expect("no failure");
                let got = seat.output.read("output");
                let values: Vec<f64> = match output {
                    Rounded::Same => Two::Bf16.values(&got),
                    _ => got.iter().map(|byte| eight(*byte)).collect(),
                };
                for (nth, row) in values.chunks_exact(hidden as usize).enumerate() {
                    match nth {
                        1 => assert!(row.iter().all(|value| *value == 0.0)),
                        3 => assert!(row.iter().all(|value| value.is_nan())),
                        _ => {
                            assert!(row.iter().all(|value| value.is_finite()) && row.iter().any(|value| *value != 0.0))
                        }
                    }
                }
            }
        }
    }
}

/// Each call works on the residual that the one before it has left, so that one wrong call makes all later ones wrong. Inputs are -1, 0 and 1, and every 250 calls begin anew, so that sums are exact in f16.
#[test]
fn a_thousand_calls_in_a_row_do_not_meet_each_other() {
    let Some(device) = device() else { return };
    const CALLS: usize = 250;
    for ranks in 2..=8 {
        let mut chance = Chance(13);
        let team = Team::in_process(&device, ranks, settings()).expect("a team");
        let norm = norm(9, 128, Datatype::F16, Rounded::Fp8ByRow);
        let table = Table::new(&device, &team, norm, &mut chance);
        let count = (norm.rows * norm.hidden) as usize;
        let call = |rank: usize, nth: usize| {
            let way = [Way::OneShot, Way::Bulk, Way::Bulk][nth % 3];
            let seat = &table.seats[rank];
            // SAFETY: the memory lives until the streams have been waited for.
            unsafe {
                table
                    .norms
                    .call(seat.stream.handle(), rank, &norm, &seat.buffers(true), Some(way))
            }
            .expect("a call");
        };
        for threads in [false, true] {
            for round in 0..4 {
                let inputs: Vec<Vec<i32>> = (0..ranks)
                    .map(|_| (0..count).map(|_| chance.below(3) as i32 - 1).collect())
                    .collect();
                for (seat, input) in table.seats.iter().zip(&inputs) {
                    let bits = input
                        .iter()
                        .flat_map(|value| Two::F16.bits(*value as f32).to_ne_bytes());
                    seat.input.write(&bits.collect::<Vec<u8>>());
                    seat.residual.write(&vec![0; count * 2]);
                }
                match threads {
                    false => (0..CALLS).for_each(|nth| (0..ranks).for_each(|rank| call(rank, nth))),
                    true => std::thread::scope(|scope| {
                        for rank in 0..ranks {
                            let (call, seat) = (&call, &table.seats[rank]);
                            scope.spawn(move || {
                                for nth in 0..CALLS {
                                    call(rank, nth);
                                    // Whoever runs too far ahead fills the driver's queues, and keeps the others from theirs.
                                    if nth % 50 == 49 {
                                        seat.stream.synchronize().expect("an end");
                                    }
                                }
                            });
                        }
                    }),
                }
                for (rank, seat) in table.seats.iter().enumerate() {
                    seat.stream.synchronize().expect("an end");
                    team.check(rank).expect("no failure");
                }
                let first = table.seats[0].output.read("output");
                for (rank, seat) in table.seats.iter().enumerate() {
                    let what = format!("{ranks} ranks, threads {threads}, round {round}, rank {rank}");
                    let got = Two::F16.values(&seat.residual.read(&what));
                    for (at, got) in got.iter().enumerate() {
                        let sum = inputs.iter().map(|input| input[at]).sum::<i32>() * CALLS as i32;
                        assert_eq!(*got, f64::from(sum), "{what}, element {at}");
                    }
                    assert!(seat.output.read(&what) == first, "{what}");
                }
            }
        }
    }
}

#[test]
fn calls_are_captured_and_replayed() {
    let Some(device) = device() else { return };
    let mut chance = Chance(14);
    for ranks in [2, 5, 8] {
        let team = Team::in_process(&device, ranks, settings()).expect("a team");
        for (way, rows) in [(Way::OneShot, 3), (Way::Bulk, 40)] {
            let norm = norm(rows, 1024, Datatype::Bf16, Rounded::Same);
            let mut table = Table::new(&device, &team, norm, &mut chance);
            let root = &table.seats[0].stream;
            let graph = root
                .capture(|| {
                    for seat in &table.seats[1..] {
                        seat.stream.after(root)?;
                    }
                    // An odd number of calls, so that every replay begins with the other parity.
                    for _ in 0..3 {
                        table.call(Some(way), false, true)?;
                    }
                    for seat in &table.seats[1..] {
                        root.after(&seat.stream)?;
                    }
                    Ok::<(), CollectiveError>(())
                })
                .expect("a graph");
            for _ in 0..10 {
                table.refill(&mut chance);
                for _ in 0..10 {
                    // SAFETY: the memory lives until the last replay has been waited for.
                    unsafe { graph.launch(&table.seats[0].stream) }.expect("a replay");
                }
                table.check(&format!("{ranks} ranks, {way:?}"), false);
            }
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_and_nobody_hangs() {
    let Some(device) = device() else { return };
    let hasty = TeamSettings {
        deadline: Duration::from_millis(200),
        ..TeamSettings::default()
    };
    for way in [Way::OneShot, Way::Bulk] {
        let team = Team::in_process(&device, 3, hasty).expect("a team");
        let table = Table::new(
            &device,
            &team,
            norm(5, 2048, Datatype::Bf16, Rounded::Fp8ByRow),
            &mut Chance(15),
        );
        let call = |rank: usize| {
            let seat = &table.seats[rank];
            // SAFETY: the memory lives until the streams have been waited for.
            unsafe {
                table
                    .norms
                    .call(seat.stream.handle(), rank, &table.norm, &seat.buffers(false), Some(way))
            }
        };
        let began = Instant::now();
        call(0).and_then(|()| call(1)).expect("calls");
        table.seats[0].stream.synchronize().expect("an end");
        table.seats[1].stream.synchronize().expect("an end");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        let told: Vec<_> = (0..2).map(|rank| team.check(rank).expect_err("a failure")).collect();
        assert!(
            told.contains(&CollectiveError::PeerTimedOut { rank: 2 }),
            "{way:?}: {told:?}"
        );
        assert!(call(0).is_err());
        call(2).expect("a call");
        table.seats[2].stream.synchronize().expect("an end");
        assert!(matches!(team.check(2), Err(CollectiveError::PeerGaveUp { .. })));
    }
}

#[test]
fn wrong_calls_are_refused() {
    let Some(device) = device() else { return };
    let team = Team::in_process(&device, 2, settings()).expect("a team");
    let norm = norm(4, 64, Datatype::Bf16, Rounded::Same);
    let table = Table::new(&device, &team, norm, &mut Chance(16));
    let stream = table.seats[0].stream.handle();
    let right = table.seats[0].buffers(false);
    let askew = FusedBuffers {
        input: DeviceSlice {
            address: right.input.address + 2,
            ..right.input
        },
        ..right
    };
    // SAFETY: refused before anything is launched.
    let refused = unsafe {
        [
            table.norms.call(stream, 2, &norm, &right, None),
            table.norms.call(stream, 0, &norm, &askew, None),
            table.norms.call(stream, 0, &norm, &right, Some(Way::TwoShot)),
            table.norms.call_all(stream, &norm, &[right], None),
        ]
    };
    assert!(
        matches!(refused[0], Err(CollectiveError::RankOutOfRange { .. })),
        "{refused:?}"
    );
    assert!(
        matches!(refused[1], Err(CollectiveError::Misaligned { .. })),
        "{refused:?}"
    );
    assert_eq!(refused[2], Err(CollectiveError::NotThisWay));
    assert!(
        matches!(refused[3], Err(CollectiveError::WrongBuffers { .. })),
        "{refused:?}"
    );
}
