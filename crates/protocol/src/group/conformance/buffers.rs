//! Memory: whose it is, from when on and until when.

use std::sync::Arc;

use super::Harness;
use super::bench::{Bench, CALL, Flow, SIZES, lane, piece, read, record, whole, write};
use super::messages::copies;
use crate::group::{CallRecord, Offered, Piece, Sink, Taken, Trouble, View};
use crate::transport::Progress;

/// A call has its buffers, in the order of the list, and keeps nothing of them after its end.
pub fn buffers_are_taken_and_given_back(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let len = SIZES.iter().sum();
    let buffers: Vec<_> = (0..2)
        .map(|rank| vec![bench.filled(rank, len), bench.zeroed(rank, len)])
        .collect();
    let count = |buffers: &[Vec<View>]| -> Vec<usize> {
        let all = buffers.iter().flatten();
        all.map(|view| Arc::strong_count(&view.memory)).collect()
    };
    let before = count(&buffers);
    bench.begin_all(&buffers);
    for (rank, buffers) in buffers.iter().enumerate() {
        for (place, view) in buffers.iter().enumerate() {
            let held = bench.ends[rank].buffer(place as u32);
            assert!(
                Arc::ptr_eq(&held.memory, &view.memory),
                "a buffer in the place of another"
            );
            assert_eq!((held.offset, held.len), (view.offset, view.len));
        }
    }
    let mut flows: Vec<_> = (0..2)
        .map(|from| Flow::new(from, 1 - from, 0, copies(&SIZES)))
        .collect();
    bench.run(&mut flows);
    bench.end_all();
    assert_eq!(count(&buffers), before, "a buffer is kept after the end of its call");
}

/// Call after call on the same lanes, with parts of larger memory as buffers.
pub fn calls_follow_each_other(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let memory: Vec<_> = (0..2)
        .map(|rank| (bench.filled(rank, 70_000), bench.zeroed(rank, 70_000)))
        .collect();
    for call in CALL..CALL + 20 {
        let at = 1 + bench.random.below(1000);
        let part = |view: &View| View {
            offset: view.offset + at,
            len: 65_000,
            ..view.clone()
        };
        for (rank, (sent, came)) in memory.iter().enumerate() {
            bench.begin(rank, call, &[part(sent), part(came)]);
        }
        let sizes = [bench.random.below(60_000), 4_000, bench.random.below(64)];
        let mut flows: Vec<_> = (0..2)
            .map(|from| Flow::new(from, 1 - from, (call % 2) as u16, copies(&sizes)).of_call(call))
            .collect();
        bench.run(&mut flows);
        bench.end_all();
        let len = sizes.iter().sum();
        for rank in 0..2 {
            let (sent, came) = (&memory[1 - rank].0, &memory[rank].1);
            assert!(read(came, at, len) == read(sent, at, len), "call {call} was not whole");
        }
    }
}

/// A rank that has done its part of a call may begin the next one. What it sends for that waits.
pub fn a_rank_may_be_a_call_ahead(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let (sent, came) = (bench.filled(0, 24), bench.zeroed(1, 24));
    let messages = |at: u64| vec![(piece(0, at, 12), Sink::Copy(piece(0, at, 12)))];
    let mut first = Flow::new(0, 1, 0, messages(0));
    let mut second = Flow::new(0, 1, 0, messages(12)).of_call(CALL + 1);
    bench.begin(0, CALL, std::slice::from_ref(&sent));
    bench.begin(1, CALL, std::slice::from_ref(&came));
    let (mut looks, mut is_ahead) = (0, false);
    bench.until("the sender to be a call ahead", |ends| {
        if is_ahead {
            second.offer(ends);
        } else {
            first.offer(ends);
            first.settle(ends);
            if first.has_settled() && ends[0].end() == Progress::Idle {
                let begun = ends[0].begin(&record(CALL + 1), &mut vec![sent.clone()]);
                begun.expect("memory that can be used");
                is_ahead = true;
            }
        }
        // Where it waits for the receiver first, it is not ahead before that has taken the message.
        looks += 1;
        if looks > 20 {
            first.take(ends);
        }
        second.offered == 1 && first.taken == 1
    });
    bench.end(1);
    bench.begin(1, CALL + 1, std::slice::from_ref(&came));
    bench.run(std::slice::from_mut(&mut second));
    bench.end_all();
    assert_eq!(whole(&came), whole(&sent));
}

/// Messages between two ranks have a channel and memory of their own, and a call that begins and ends meanwhile is nothing to them.
pub fn messages_go_beside_a_call(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let channel = bench.ends[0].channels();
    for len in [0, 8, 5_000, 40_000, 1_300_003] {
        let beside = [bench.filled(0, len), bench.zeroed(1, len)];
        let buffers: Vec<_> = (0..2)
            .map(|rank| vec![bench.filled(rank, 4_000), bench.zeroed(rank, 4_000)])
            .collect();
        let lent = [0, 1].map(|rank| lend(&mut bench, rank, &beside[rank]));
        let mut message = Flow::new(0, 1, channel, vec![(lent[0], Sink::Copy(lent[1]))]).of_call(CallRecord::PAIRWISE);
        message.offer(&mut bench.ends);
        bench.begin_all(&buffers);
        message.take(&mut bench.ends);
        let mut flows: Vec<_> = (0..2)
            .map(|from| Flow::new(from, 1 - from, 0, copies(&[4_000])))
            .collect();
        bench.run(&mut flows);
        bench.end_all();
        bench.run(std::slice::from_mut(&mut message));
        take_back(&mut bench, lent);
        assert!(whole(&beside[1]) == whole(&beside[0]), "what came is not what was sent");
        for rank in 0..2 {
            assert!(
                whole(&buffers[rank][1]) == whole(&buffers[1 - rank][0]),
                "the call was disturbed"
            );
        }
    }
}

/// Memory of messages is numbered apart from buffers of calls, and is let go of when it is taken back.
pub fn lent_memory_is_given_back(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let channel = bench.ends[0].channels();
    for _ in 0..3 {
        let memory: Vec<_> = (0..3)
            .map(|_| [bench.filled(0, 20_000), bench.zeroed(1, 20_000)])
            .collect();
        let counts = |memory: &[[View; 2]]| -> Vec<usize> {
            let all = memory.iter().flatten();
            all.map(|view| Arc::strong_count(&view.memory)).collect()
        };
        let before = counts(&memory);
        let lent: Vec<_> = memory
            .iter()
            .map(|views| [0, 1].map(|rank| lend(&mut bench, rank, &views[rank])))
            .collect();
        for rank in 0..2 {
            let mut numbers: Vec<_> = lent.iter().map(|lent| lent[rank].buffer).collect();
            numbers.dedup();
            assert_eq!(numbers.len(), 3, "two memories under one number");
        }
        let messages = lent.iter().map(|[from, to]| (*from, Sink::Copy(*to))).collect();
        let mut flow = Flow::new(0, 1, channel, messages).of_call(CallRecord::PAIRWISE);
        bench.run(std::slice::from_mut(&mut flow));
        lent.into_iter().for_each(|lent| take_back(&mut bench, lent));
        assert_eq!(counts(&memory), before, "memory is kept after it was taken back");
        for [sent, came] in &memory {
            assert!(whole(sent) == whole(came), "what came is not what was sent");
        }
    }
}

/// A sender gives its call up before its message was taken, and writes over the memory. The receiver may have the message, or trouble, or nothing;
/// never something else.
pub fn what_is_given_up_is_not_taken_for_the_message(harness: &mut dyn Harness) {
    for len in [8, 300, 5_000, 40_000, 200_000, 1_300_003, 4 << 20] {
        let mut bench = Bench::new(harness, 2);
        let (sent, came) = (bench.filled(0, len), bench.zeroed(1, len));
        let before = whole(&sent);
        bench.begin(0, CALL, std::slice::from_ref(&sent));
        bench.begin(1, CALL, std::slice::from_ref(&came));
        let flow = Flow::new(0, 1, 0, vec![(piece(0, 0, len), Sink::Copy(piece(0, 0, len)))]);
        let (head, sink) = (flow.head(0), flow.messages[0].1);
        let offered = bench.ends[0]
            .offer(lane(1, 0), &head, piece(0, 0, len))
            .expect("a rightful offer");
        assert_ne!(offered, Offered::Full, "a fresh lane has room");
        // Some of it may have been taken by then.
        let mut taken = Ok(Taken::Nothing);
        for _ in 0..bench.random.below(4) {
            bench.step();
            if !matches!(taken, Ok(Taken::All)) {
                taken = bench.ends[1].take(lane(0, 0), &head, &sink);
            }
        }
        bench.end(0);
        write(&sent, 0, &vec![0xee; len as usize]);
        for _ in 0..100 {
            if matches!(taken, Ok(Taken::All) | Err(_)) {
                break;
            }
            let now = bench.harness.now();
            let polled: Vec<_> = bench.ends.iter_mut().map(|end| end.poll(now).map(drop)).collect();
            bench.harness.idle();
            taken = polled[1].clone().map(|()| Taken::Nothing);
            if taken.is_ok() {
                taken = bench.ends[1].take(lane(0, 0), &head, &sink);
            }
        }
        match taken {
            Ok(Taken::All) => assert!(
                whole(&came) == before,
                "{len} bytes that were given up were taken for the message"
            ),
            Ok(_) | Err(Trouble::Withdrew { .. } | Trouble::Lost { .. }) => {}
            Err(trouble) => panic!("a message that was given up: {trouble}"),
        }
    }
}

fn lend(bench: &mut Bench<'_>, rank: usize, view: &View) -> Piece {
    let peer = weft_plan::Rank(1 - rank as u32);
    let buffer = bench.ends[rank].lend(peer, view).expect("memory that can be used");
    let piece = piece(buffer, 0, view.len);
    assert!(piece.is_lent(), "lent memory with the number of a call's buffer");
    piece
}

fn take_back(bench: &mut Bench<'_>, lent: [Piece; 2]) {
    for (rank, piece) in lent.into_iter().enumerate() {
        let peer = weft_plan::Rank(1 - rank as u32);
        bench.until("memory to be given back", |ends| {
            ends[rank].take_back(peer, piece.buffer) == Progress::Idle
        });
    }
}
