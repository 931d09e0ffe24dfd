//! Tokens to experts and back, on a device, against what f64 and plain loops say.

mod rows;
mod seats;

use std::time::{Duration, Instant};

use rows::{Chance, Guarded, POISON, device, settings};
use seats::{Gate, Table, bytes_of, ints};
use weft_gpu::{
    CollectiveError, CombineBuffers, DeviceSlice, DispatchBuffers, Moe, MoeError, MoeHandle, MoeSettings, Received,
    Sent, Team, TeamSettings,
};

const PLAIN: MoeSettings = MoeSettings {
    hidden: 264,
    experts: 8,
    top_k: 2,
    tokens_max: 64,
    received: Received::Slots,
    sent: Sent::Bf16,
};

fn compact(ranks: usize, tokens_max: u32) -> Received {
    Received::Compact {
        capacity: ranks as u32 * tokens_max,
    }
}

#[test]
fn every_token_reaches_its_experts_and_comes_back() {
    let Some(device) = device() else { return };
    let mut chance = Chance(21);
    for ranks in 1..=8usize {
        let team = Team::in_process(&device, ranks, settings()).expect("a team");
        let mut nth = ranks;
        let all = ranks as u32;
        for (hidden, each, top_k, tokens_max) in [
            (8, 1, 1, 3),
            (264, 5, 3, 40),
            (1024, 4, 8, 130),
            (7168, 2, 2, 9),
            (128, 9, 16, 256),
        ] {
            for slots in [true, false] {
                for sent in [Sent::Bf16, Sent::Fp8] {
                    nth += 1;
                    if sent == Sent::Fp8 && hidden % 128 != 0 {
                        continue;
                    }
                    let of = MoeSettings {
                        hidden,
                        experts: each * all,
                        top_k: top_k.min(each * all),
                        tokens_max,
                        received: if slots {
                            Received::Slots
                        } else {
                            compact(ranks, tokens_max)
                        },
                        sent,
                    };
                    let gate = [
                        Gate::Any,
                        Gate::Careless,
                        Gate::One(each * all - 1),
                        Gate::Any,
                        Gate::None,
                    ][nth % 5];
                    // Ranks with all, some, one or no tokens.
                    let tokens: Vec<u32> = (0..all)
                        .map(|rank| match (rank + nth as u32) % 4 {
                            0 => tokens_max,
                            1 => chance.below(u64::from(tokens_max) + 1) as u32,
                            2 => 0,
                            _ => 1,
                        })
                        .collect();
                    let launch = nth % 2 == 0;
                    let what = format!("{of:?}, {gate:?}, tokens {tokens:?}, each {launch}");
                    Table::new(&device, &team, of, &tokens, gate, &mut chance).run(&what, launch);
                }
            }
        }
    }
}

/// More tokens than a block has places for at once, in few blocks.
#[test]
fn many_tokens_in_few_blocks() {
    let Some(device) = device() else { return };
    let mut chance = Chance(22);
    let few = TeamSettings {
        blocks_a_rank: Some(3),
        ..settings()
    };
    let team = Team::in_process(&device, 4, few).expect("a team");
    let of = MoeSettings {
        hidden: 72,
        experts: 64,
        top_k: 6,
        tokens_max: 3000,
        received: compact(4, 3000),
        sent: Sent::Bf16,
    };
    Table::new(&device, &team, of, &[3000, 1234, 0, 2999], Gate::Any, &mut chance).run("compact", true);
    let alone = TeamSettings {
        blocks_a_rank: Some(1),
        ..settings()
    };
    let team = Team::in_process(&device, 2, alone).expect("a team");
    let of = MoeSettings {
        tokens_max: 256,
        received: Received::Slots,
        ..of
    };
    Table::new(&device, &team, of, &[256, 131], Gate::Careless, &mut chance).run("slots", true);
}

/// Small, and all ranks in one launch, so that tools which let one kernel run at a time can look at it.
#[test]
fn one_launch_for_all_ranks() {
    let Some(device) = device() else { return };
    let team = Team::in_process(&device, 3, settings()).expect("a team");
    for received in [Received::Slots, compact(3, 20)] {
        for sent in [Sent::Bf16, Sent::Fp8] {
            let of = MoeSettings {
                hidden: 1280,
                experts: 9,
                top_k: 3,
                tokens_max: 20,
                received,
                sent,
            };
            let mut table = Table::new(&device, &team, of, &[20, 0, 7], Gate::Careless, &mut Chance(23));
            for _ in 0..2 {
                table.run(&format!("{of:?}"), false);
            }
        }
    }
}

/// There and back again a thousand times, with experts that do nothing: what comes back is what was sent, and is sent again. All of it is on the streams before anything is looked at.
#[test]
fn a_thousand_there_and_back_do_not_meet_each_other() {
    let Some(device) = device() else { return };
    for ranks in 2..=8usize {
        let team = Team::in_process(&device, ranks, settings()).expect("a team");
        for (slots, threads) in [(true, false), (false, false), (true, true), (false, true)] {
            let mut chance = Chance(24 + ranks as u64);
            let of = MoeSettings {
                experts: 2 * ranks as u32,
                // Two weights of a half, or the one row that a token has.
                top_k: if slots { 2 } else { 1 },
                tokens_max: 24,
                received: if slots { Received::Slots } else { compact(ranks, 24) },
                ..PLAIN
            };
            let tokens: Vec<u32> = (0..ranks as u32).map(|rank| 24 - rank * 3).collect();
            let mut table = Table::new(&device, &team, of, &tokens, Gate::Any, &mut chance);
            table.warm_up(&device);
            // Ten routings in turns.
            let routings: Vec<Vec<Guarded>> = table
                .seats
                .iter()
                .map(|seat| {
                    seat.weights.write(&bytes_of(
                        &vec![0.5f32; (seat.tokens * of.top_k) as usize],
                        f32::to_ne_bytes,
                    ));
                    (0..10)
                        .map(|_| {
                            let chosen = Gate::Any.experts(&of, seat.tokens, &mut chance);
                            let memory = Guarded::new(&device, u64::from(seat.tokens * of.top_k) * 4);
                            memory.write(&bytes_of(&chosen, i32::to_ne_bytes));
                            memory
                        })
                        .collect()
                })
                .collect();
            let (moe, seats) = (&table.moe, &table.seats);
            let turn = |rank: usize, nth: usize, handle: &mut MoeHandle| {
                let seat = &seats[rank];
                let (from, to) = match nth % 2 {
                    0 => (seat.input.slice(), seat.output.slice()),
                    _ => (seat.output.slice(), seat.input.slice()),
                };
                let out = DispatchBuffers {
                    input: from,
                    experts: routings[rank][nth % 10].slice(),
                    ..seat.dispatch()
                };
                let back = CombineBuffers {
                    input: seat.rows.slice(),
                    weights: seat.weights.slice(),
                    output: to,
                };
                // SAFETY: the memory lives until the streams have been waited for.
                unsafe {
                    moe.dispatch(seat.stream.handle(), rank, &out, handle)
                        .expect("a dispatch");
                    moe.combine(seat.stream.handle(), rank, &back, handle)
                        .expect("a combine");
                }
            };
            let turns = if threads { 250 } else { 1000 };
            match threads {
                false => {
                    for nth in 0..turns {
                        for (rank, handle) in table.handles.iter_mut().enumerate() {
                            turn(rank, nth, handle);
                        }
                    }
                }
                true => std::thread::scope(|scope| {
                    for (rank, handle) in table.handles.iter_mut().enumerate() {
                        let turn = &turn;
                        scope.spawn(move || {
                            for nth in 0..turns {
                                turn(rank, nth, handle);
                                // Whoever runs too far ahead fills the driver's queues, and keeps the others from theirs.
                                if nth % 20 == 19 {
                                    seats[rank].stream.synchronize().expect("an end");
                                }
                            }
                        });
                    }
                }),
            }
            let what = format!("{ranks} ranks, slots {slots}, threads {threads}");
            table.settle(&what);
            for (rank, seat) in table.seats.iter().enumerate() {
                assert!(seat.input.read(&what) == seat.x, "{what}: rank {rank}");
                assert!(seat.output.read(&what) == seat.x, "{what}: rank {rank}");
            }
        }
    }
}

#[test]
fn calls_are_captured_and_replayed() {
    let Some(device) = device() else { return };
    let mut chance = Chance(25);
    for ranks in [2usize, 5, 8] {
        let team = Team::in_process(&device, ranks, settings()).expect("a team");
        for slots in [true, false] {
            let of = MoeSettings {
                experts: 3 * ranks as u32,
                top_k: 3,
                received: if slots { Received::Slots } else { compact(ranks, 64) },
                ..PLAIN
            };
            let tokens: Vec<u32> = (0..ranks as u32).map(|rank| 64 - rank).collect();
            let mut table = Table::new(&device, &team, of, &tokens, Gate::Any, &mut chance);
            table.dispatch(true).expect("a dispatch");
            table.settle("the first");
            table.check_received("the first");
            let Table {
                moe, seats, handles, ..
            } = &mut table;
            let root = &seats[0].stream;
            let graph = root
                .capture(|| {
                    for seat in &seats[1..] {
                        seat.stream.after(root)?;
                    }
                    for (rank, (seat, handle)) in seats.iter().zip(handles).enumerate() {
                        // Three calls, so that every replay begins with the other parity.
                        // SAFETY: the memory lives until the last replay has been waited for.
                        unsafe {
                            moe.dispatch(seat.stream.handle(), rank, &seat.dispatch(), handle)?;
                            moe.dispatch(seat.stream.handle(), rank, &seat.dispatch(), handle)?;
                            moe.combine(seat.stream.handle(), rank, &seat.combine(), handle)?;
                        }
                    }
                    for seat in &seats[1..] {
                        root.after(&seat.stream)?;
                    }
                    Ok::<(), MoeError>(())
                })
                .expect("a graph");
            for _ in 0..5 {
                for seat in &table.seats {
                    seat.output.poison();
                }
                for _ in 0..10 {
                    // SAFETY: as above.
                    unsafe { graph.launch(&table.seats[0].stream) }.expect("a replay");
                }
                let what = format!("{ranks} ranks, slots {slots}");
                table.settle(&what);
                table.check_received(&what);
                table.check_combined(&what);
            }
        }
    }
}

#[test]
fn too_many_rows_make_the_call_void_and_nothing_else() {
    let Some(device) = device() else { return };
    let mut chance = Chance(26);
    let team = Team::in_process(&device, 3, settings()).expect("a team");
    let of = MoeSettings {
        experts: 6,
        top_k: 1,
        received: Received::Compact { capacity: 50 },
        ..PLAIN
    };
    // All of them to the second rank, one more than it has room for.
    let mut table = Table::new(&device, &team, of, &[20, 30, 1], Gate::One(3), &mut chance);
    table.dispatch(true).expect("a dispatch");
    table.combine(true).expect("a combine");
    for (rank, seat) in table.seats.iter().enumerate() {
        seat.stream.synchronize().expect("an end");
        let told = table.moe.check(rank);
        let right = MoeError::OverCapacity {
            rank: 1,
            needed: 51,
            capacity: 50,
        };
        assert_eq!(told, Err(right), "rank {rank}");
        assert_eq!(table.moe.check(rank), Ok(()), "told once");
        assert!(seat.rows.read("rows").iter().all(|byte| *byte == POISON));
        assert!(ints(&seat.counts.read("counts")).iter().all(|count| *count == 0));
        assert!(seat.output.read("output").iter().all(|byte| *byte == 0));
    }
    // Just enough, by the same team.
    let mut table = Table::new(&device, &team, of, &[20, 30, 0], Gate::One(3), &mut chance);
    table.run("just enough", true);
}

#[test]
fn a_rank_that_never_comes_is_named_and_nobody_hangs() {
    let Some(device) = device() else { return };
    let hasty = TeamSettings {
        deadline: Duration::from_millis(200),
        ..TeamSettings::default()
    };
    for received in [Received::Slots, compact(2, 64)] {
        let team = Team::in_process(&device, 2, hasty).expect("a team");
        let of = MoeSettings { received, ..PLAIN };
        let mut table = Table::new(&device, &team, of, &[64, 64], Gate::Any, &mut Chance(27));
        let began = Instant::now();
        let (seat, handle) = (&table.seats[0], &mut table.handles[0]);
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe { table.moe.dispatch(seat.stream.handle(), 0, &seat.dispatch(), handle) }.expect("a dispatch");
        seat.stream.synchronize().expect("an end");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        let late = MoeError::Collective(CollectiveError::PeerTimedOut { rank: 1 });
        assert_eq!(table.moe.check(0), Err(late));
        assert!(table.seats[1].rows.read("rows").iter().all(|byte| *byte == POISON));
        let (seat, handle) = (&table.seats[0], &table.handles[0]);
        // SAFETY: refused before anything is launched.
        let refused = unsafe { table.moe.combine(seat.stream.handle(), 0, &seat.combine(), handle) };
        assert!(refused.is_err());
    }
}

#[test]
fn wrong_calls_are_refused() {
    let Some(device) = device() else { return };
    let team = Team::in_process(&device, 2, settings()).expect("a team");
    let mut table = Table::new(&device, &team, PLAIN, &[64, 64], Gate::Any, &mut Chance(28));
    let other = MoeSettings { top_k: 1, ..PLAIN };
    let mut others = Moe::new(&team, other).expect("kernels").handle().expect("a handle");
    let uneven = MoeSettings { experts: 7, ..PLAIN };
    assert!(matches!(Moe::new(&team, uneven), Err(MoeError::UnevenExperts { .. })));
    let (moe, seat, handle) = (&table.moe, &table.seats[0], &mut table.handles[0]);
    let (stream, right) = (seat.stream.handle(), seat.dispatch());
    let askew = DispatchBuffers {
        input: DeviceSlice {
            address: right.input.address + 2,
            ..right.input
        },
        ..right
    };
    let many = DispatchBuffers { tokens: 65, ..right };
    let short = DispatchBuffers {
        rows: DeviceSlice {
            bytes: right.rows.bytes - 1,
            ..right.rows
        },
        ..right
    };
    let over = CombineBuffers {
        output: seat.results.slice(),
        ..seat.combine()
    };
    // SAFETY: refused before anything is launched.
    let refused = unsafe {
        [
            moe.dispatch(stream, 0, &askew, handle),
            moe.dispatch(stream, 0, &many, handle),
            moe.dispatch(stream, 0, &short, handle),
            moe.dispatch(stream, 5, &right, handle),
            moe.dispatch(stream, 0, &right, &mut others),
            moe.dispatch_all(stream, &[right], std::slice::from_mut(handle)),
            moe.combine(stream, 0, &seat.combine(), &others),
        ]
    };
    use CollectiveError::{BufferTooSmall, Misaligned, RankOutOfRange, WrongBuffers};
    assert!(
        matches!(refused[0], Err(MoeError::Collective(Misaligned { .. }))),
        "{refused:?}"
    );
    assert_eq!(refused[1], Err(MoeError::TooManyTokens { tokens: 65, most: 64 }));
    assert!(
        matches!(refused[2], Err(MoeError::Collective(BufferTooSmall { .. }))),
        "{refused:?}"
    );
    assert!(
        matches!(refused[3], Err(MoeError::Collective(RankOutOfRange { .. }))),
        "{refused:?}"
    );
    assert_eq!(refused[4], Err(MoeError::OtherHandle));
    assert!(
        matches!(refused[5], Err(MoeError::Collective(WrongBuffers { .. }))),
        "{refused:?}"
    );
    assert_eq!(refused[6], Err(MoeError::OtherHandle));
    // Of no tokens there is no output to overlap; of some there is.
    table.dispatch(true).expect("a dispatch");
    table.settle("a dispatch");
    // SAFETY: refused before anything is launched.
    let refused = unsafe {
        table
            .moe
            .combine(table.seats[0].stream.handle(), 0, &over, &table.handles[0])
    };
    assert_eq!(refused, Err(MoeError::Collective(CollectiveError::Overlap)));
}
