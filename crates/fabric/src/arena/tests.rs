use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use proptest::prelude::*;
use weft_plan::{Datatype, Reduction};
use weft_protocol::group::{Abort, Board, Cause, Combiner, Function, Waiting};
use weft_protocol::region::Epoch;
use weft_protocol::{HostBytes, memory};

use super::*;
use crate::memory::AllocateOptions;

/// All buffers of all ranks, by their keys: threads of one process see each other's memory anyway.
#[derive(Clone, Debug, Default)]
struct Everybody(Vec<(RegionKey, Arc<HostMemory>)>);

impl Neighbourhood for Everybody {
    fn map(&mut self, _: Rank, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Trouble> {
        let found = self.0.iter().find(|(known, _)| known == key);
        Ok(found.map(|(_, memory)| Arc::clone(memory) as Arc<dyn Seen>))
    }
}

fn key(slot: u32) -> RegionKey {
    RegionKey {
        epoch: Epoch(1),
        slot,
        secret: u128::from(slot) << 70 | 3,
    }
}

/// Ranks that do not count from zero, so that places and ranks differ.
fn rank(place: usize) -> Rank {
    Rank(place as u32 * 3 + 2)
}

fn arenas(count: usize, options: ArenaOptions, everybody: &Everybody) -> Vec<Arena> {
    let segments: Vec<_> = (0..count).map(|_| Arena::segment(count, options).unwrap()).collect();
    let arena = |own: usize| {
        let seen = |place: usize| Some(Arc::clone(&segments[place]) as Arc<dyn Seen>).filter(|_| place != own);
        let neighbours = (0..count).map(|place| (rank(place), seen(place))).collect();
        Arena::new(
            options,
            Arc::clone(&segments[own]),
            neighbours,
            Box::new(everybody.clone()),
        )
        .unwrap()
    };
    (0..count).map(arena).collect()
}

fn small() -> ArenaOptions {
    ArenaOptions {
        channels: 2,
        slots: 4,
        slot_bytes: 256,
        eager_bytes_max: 64,
    }
}

fn record(number: u64) -> CallRecord {
    CallRecord::new(number, 0x5151, "a test")
}

fn head(call: u64, len: u64) -> MessageHead {
    MessageHead {
        call,
        signature: 0x5151,
        index: 0,
        len,
    }
}

fn piece(buffer: u32, offset: u64, len: u64) -> Piece {
    Piece { buffer, offset, len }
}

/// One buffer in which a rank has its input, and one for its output, both `len` bytes.
fn buffers(len: usize, seed: u8, mapped: Option<u32>, everybody: &mut Everybody) -> Vec<View> {
    let fill = |memory: &HostMemory, salt: u8| {
        let bytes: Vec<u8> = (0..len)
            .map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed ^ salt))
            .collect();
        memory.write(0, &bytes);
    };
    let mut view = |salt: u8, slot: Option<u32>| {
        let memory = Arc::new(match slot {
            Some(_) => HostMemory::allocate(len, AllocateOptions::default()).unwrap(),
            None => HostMemory::from_vec(vec![0; len]),
        });
        fill(&memory, salt);
        let key = slot.map(key);
        if let Some(key) = key {
            everybody.0.push((key, Arc::clone(&memory)));
        }
        View {
            key,
            ..View::whole(memory)
        }
    };
    vec![
        view(0, mapped.map(|slot| slot * 2)),
        view(0x55, mapped.map(|slot| slot * 2 + 1)),
    ]
}

fn bytes_of(view: &View) -> Vec<u8> {
    let mut bytes = vec![0; view.len as usize];
    view.memory.bytes().read(view.offset, &mut bytes);
    bytes
}

/// Both ranks of a pair send all of their input in messages of these lengths and put what comes into their output, in turns.
fn swap(lens: &[u64], mapped: [bool; 2], how: Option<&Combiner>) {
    let total: u64 = lens.iter().sum();
    let mut everybody = Everybody::default();
    let views: Vec<_> = (0..2u32)
        .map(|r| {
            buffers(
                total as usize,
                r as u8 * 91,
                mapped[r as usize].then_some(r),
                &mut everybody,
            )
        })
        .collect();
    let before: Vec<_> = views.iter().map(|v| (bytes_of(&v[0]), bytes_of(&v[1]))).collect();
    let mut ends = arenas(2, small(), &everybody);
    for (end, views) in ends.iter_mut().zip(&views) {
        end.begin(&record(3), &mut views.clone()).unwrap();
    }
    let mut sent = [(0usize, 0u64); 2];
    let mut got = [(0usize, 0u64); 2];
    let mut open: [Vec<OfferId>; 2] = Default::default();
    for turn in 0..200_000 {
        let me = turn % 2;
        let lane = Lane {
            peer: rank(1 - me),
            channel: 1,
        };
        let end = &mut ends[me];
        if let Some(&len) = lens.get(sent[me].0) {
            match end.offer(lane, &head(3, len), piece(0, sent[me].1, len)).unwrap() {
                Offered::Full => {}
                Offered::Settled => sent[me] = (sent[me].0 + 1, sent[me].1 + len),
                Offered::Open(id) => {
                    open[me].push(id);
                    sent[me] = (sent[me].0 + 1, sent[me].1 + len);
                }
            }
        }
        if let Some(&len) = lens.get(got[me].0) {
            let target = piece(1, got[me].1, len);
            let sink = match how {
                None => Sink::Copy(target),
                Some(how) => Sink::Combine {
                    with: target,
                    into: target,
                    how,
                },
            };
            if end.take(lane, &head(3, len), &sink).unwrap() == Taken::All {
                got[me] = (got[me].0 + 1, got[me].1 + len);
            }
        }
        open[me].retain(|id| !end.settled(lane, *id));
        let all = |done: &[(usize, u64); 2]| done.iter().all(|(n, _)| *n == lens.len());
        if all(&sent) && all(&got) && open.iter().all(Vec::is_empty) {
            break;
        }
    }
    for me in 0..2 {
        assert_eq!(
            (sent[me].0, got[me].0),
            (lens.len(), lens.len()),
            "messages did not all pass"
        );
        assert_eq!(ends[me].end(), Progress::Idle);
        let theirs = &before[1 - me].0;
        let expected = match how {
            None => theirs.clone(),
            Some(how) => {
                let mut ours = before[me].1.clone();
                match how {
                    Combiner::Builtin { datatype, reduction } => {
                        datatype.combine(*reduction, &mut ours, theirs).unwrap();
                    }
                    Combiner::Custom { function, .. } => function.combine(&mut ours, theirs),
                }
                ours
            }
        };
        assert_eq!(bytes_of(&views[me][1]), expected);
        assert_eq!(bytes_of(&views[me][0]), before[me].0, "an input was written");
    }
}

/// Elements of three bytes, which end nowhere near the end of a slot.
#[derive(Debug)]
struct XorOfThree;

impl Function for XorOfThree {
    fn combine(&self, into: &mut [u8], from: &[u8]) {
        assert!(into.len().is_multiple_of(3) && into.len() == from.len());
        into.iter_mut().zip(from).for_each(|(a, b)| *a ^= b);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn messages_of_all_sizes_pass_through_all_kinds_of_memory(
        lens in prop::collection::vec(prop_oneof![0u64..70, 200u64..300, 1000u64..3000], 1..12),
        mapped: [bool; 2],
        kind in 0..3,
    ) {
        let builtin = Combiner::Builtin { datatype: Datatype::I32, reduction: Reduction::Sum };
        let custom = Combiner::Custom { size: 3, function: Arc::new(XorOfThree) };
        let (how, unit) = match kind {
            0 => (None, 1),
            1 => (Some(&builtin), 4),
            _ => (Some(&custom), 3),
        };
        let lens: Vec<u64> = lens.into_iter().map(|len| len / unit * unit).collect();
        swap(&lens, mapped, how);
    }
}

#[test]
fn a_message_of_another_call_is_not_touched() {
    let mut everybody = Everybody::default();
    let views: Vec<_> = (0..2).map(|r| buffers(64, r, None, &mut everybody)).collect();
    let mut ends = arenas(2, small(), &everybody);
    ends[0].begin(&record(1), &mut views[0].clone()).unwrap();
    ends[1].begin(&record(2), &mut views[1].clone()).unwrap();
    let (to, from) = (rank(1), rank(0));
    let sent = ends[0].offer(Lane { peer: to, channel: 0 }, &head(1, 8), piece(0, 0, 8));
    assert_eq!(sent, Ok(Offered::Settled));
    let before = bytes_of(&views[1][1]);
    let lane = Lane { peer: from, channel: 0 };
    let taken = ends[1].take(lane, &head(2, 8), &Sink::Copy(piece(1, 0, 8)));
    let wrong = Trouble::WrongMessage {
        peer: from,
        expected: head(2, 8),
        found: head(1, 8),
    };
    assert_eq!(taken, Err(wrong));
    assert_eq!(bytes_of(&views[1][1]), before);
    let status = ends[1].status(from).unwrap();
    assert_eq!(
        (status.call, status.ended, status.waiting.peer),
        (record(1), false, None)
    );
    ends[0].publish(Waiting {
        step: 4,
        peer: Some(to),
    });
    assert_eq!(
        ends[1].status(from).unwrap().waiting,
        Waiting {
            step: 4,
            peer: Some(to)
        }
    );
}

/// One rank leaves a message in its memory and gives up, with or without saying why; the other finds it afterwards.
fn taken_back(call: u64, abort: Option<&Abort>) -> Trouble {
    let mut everybody = Everybody::default();
    let views: Vec<_> = (0..2)
        .map(|r| buffers(4096, r, Some(r.into()), &mut everybody))
        .collect();
    let mut ends = arenas(2, small(), &everybody);
    for (end, views) in ends.iter_mut().zip(&views) {
        end.begin(&record(call), &mut views.clone()).unwrap();
    }
    let (to, from) = (rank(1), rank(0));
    let offered = ends[0].offer(Lane { peer: to, channel: 0 }, &head(call, 4096), piece(0, 0, 4096));
    assert!(matches!(offered, Ok(Offered::Open(_))));
    if let Some(abort) = abort {
        ends[0].abort(abort);
    }
    assert_eq!(ends[0].end(), Progress::Idle);
    let lane = Lane { peer: from, channel: 0 };
    let taken = ends[1].take(lane, &head(call, 4096), &Sink::Copy(piece(1, 0, 4096)));
    taken.expect_err("a message that was taken back")
}

#[test]
fn what_was_left_in_memory_that_is_taken_back_is_not_used() {
    // Messages between two ranks, which are not counted, as well as those of a collective.
    for call in [5, CallRecord::PAIRWISE] {
        assert_eq!(taken_back(call, None), Trouble::Withdrew { rank: rank(0) });
    }
}

#[test]
fn whoever_finds_a_message_taken_back_says_what_the_first_said() {
    let abort = Abort {
        by: rank(0),
        blamed: rank(1),
        cause: Cause::Late,
        step: 3,
        called: record(5),
        instead: None,
    };
    assert_eq!(taken_back(5, Some(&abort)), Trouble::Aborted(Box::new(abort)));
}

#[test]
fn the_first_abort_is_the_one_that_everybody_believes() {
    let mut ends = arenas(3, small(), &Everybody::default());
    let abort = |by: usize| Abort {
        by: rank(by),
        blamed: rank(1),
        cause: Cause::Late,
        step: 9,
        called: record(1),
        instead: Some(record(0)),
    };
    ends[2].abort(&abort(2));
    thread::sleep(Duration::from_millis(2));
    ends[0].abort(&abort(0));
    for end in &mut ends {
        assert_eq!(end.poll(Time::ZERO), Err(Trouble::Aborted(Box::new(abort(2)))));
    }
}

#[test]
fn a_message_beside_a_call_has_memory_of_its_own() {
    for mapped in [None, Some(7)] {
        let mut everybody = Everybody::default();
        let views: Vec<_> = (0..2)
            .map(|r| buffers(40_000, r, mapped.map(|slot| slot + u32::from(r)), &mut everybody))
            .collect();
        let mut ends = arenas(2, small(), &everybody);
        let lent: Vec<u32> = ends
            .iter_mut()
            .zip(&views)
            .map(|(end, views)| end.lend(rank(1), &views[0]).unwrap())
            .collect();
        let (before, len) = (bytes_of(&views[0][0]), 40_000);
        let whole = |buffer| piece(buffer, 0, len);
        let (to, from) = (
            Lane {
                peer: rank(1),
                channel: 1,
            },
            Lane {
                peer: rank(0),
                channel: 1,
            },
        );
        let head = head(CallRecord::PAIRWISE, len);
        let Ok(Offered::Open(offer)) = ends[0].offer(to, &head, whole(lent[0])) else {
            panic!("so many bytes do not go at once");
        };
        // A call of no messages begins and ends meanwhile, and takes nothing of it away.
        for end in &mut ends {
            end.begin(&record(0), &mut Vec::new()).unwrap();
            assert_eq!(end.end(), Progress::Idle);
        }
        loop {
            let taken = ends[1].take(from, &head, &Sink::Copy(whole(lent[1]))).unwrap();
            ends[0].poll(Time::ZERO).unwrap();
            if taken == Taken::All {
                break;
            }
        }
        assert!(ends[0].settled(to, offer));
        for (end, lent) in ends.iter_mut().zip(lent) {
            assert_eq!(end.take_back(rank(1), lent), Progress::Idle);
        }
        assert_eq!(bytes_of(&views[1][0]), before, "{mapped:?}");
        // One that is taken back unread is not used.
        let lent = ends[0].lend(rank(1), &views[0][0]).unwrap();
        let offered = ends[0].offer(to, &head, whole(lent)).unwrap();
        assert!(matches!(offered, Offered::Open(_)));
        assert_eq!(ends[0].take_back(rank(1), lent), Progress::Idle);
        if mapped.is_some() {
            let into = ends[1].lend(rank(0), &views[1][0]).unwrap();
            let taken = ends[1].take(from, &head, &Sink::Copy(whole(into)));
            assert_eq!(taken, Err(Trouble::Withdrew { rank: rank(0) }));
        }
    }
}

#[test]
fn whoever_rests_is_woken_by_news() {
    let mut everybody = Everybody::default();
    let views: Vec<_> = (0..2).map(|r| buffers(64, r, None, &mut everybody)).collect();
    let mut ends = arenas(2, small(), &everybody);
    let (mut other, mut sleeper) = (ends.remove(0), ends.remove(0));
    let asleep = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&asleep);
    let sleeping = thread::spawn(move || {
        let lane = Lane {
            peer: rank(0),
            channel: 0,
        };
        sleeper.begin(&record(0), &mut views[1].clone()).unwrap();
        for rests in 0.. {
            sleeper.poll(Time::ZERO).unwrap();
            let taken = sleeper.take(lane, &head(0, 16), &Sink::Copy(piece(1, 0, 16))).unwrap();
            if taken == Taken::All {
                return rests;
            }
            told.store(true, Ordering::Relaxed);
            sleeper.rest(Duration::from_secs(3600));
        }
        unreachable!()
    });
    let begun = Instant::now();
    while !asleep.load(Ordering::Relaxed) && begun.elapsed() < Duration::from_secs(60) {
        thread::yield_now();
    }
    thread::sleep(Duration::from_millis(20));
    let views = buffers(64, 9, None, &mut Everybody::default());
    other.begin(&record(0), &mut views.clone()).unwrap();
    let lane = Lane {
        peer: rank(1),
        channel: 0,
    };
    assert_eq!(other.offer(lane, &head(0, 16), piece(0, 0, 16)), Ok(Offered::Settled));
    assert!(sleeping.join().unwrap() >= 1);
}

#[test]
fn a_segment_of_other_dimensions_is_refused() {
    let (ours, theirs) = (
        Arena::segment(2, small()).unwrap(),
        Arena::segment(2, ArenaOptions::new(2)).unwrap(),
    );
    let neighbours = vec![(Rank(0), None), (Rank(1), Some(theirs as Arc<dyn Seen>))];
    let made = Arena::new(small(), ours, neighbours, Box::new(Everybody::default()));
    assert!(matches!(made, Err(ArenaError::NotASegment { rank: Rank(1) })));
    let odd = ArenaOptions { slots: 3, ..small() };
    assert!(matches!(Arena::segment(2, odd), Err(ArenaError::Dimensions)));
}

#[test]
fn memory_that_is_not_of_this_host_is_refused() {
    let mut ends = arenas(2, small(), &Everybody::default());
    let memory = Arc::new(memory::VecMemory::zeroed(8));
    let begun = ends[0].begin(&record(0), &mut vec![View::whole(memory.clone())]);
    let refusal = Refusal::Unsupported;
    assert_eq!(begun, Err(Trouble::Unusable { buffer: 0, refusal }));
    assert_eq!(Arc::strong_count(&memory), 1, "what is refused is not kept");
}
