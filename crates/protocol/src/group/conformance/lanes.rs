//! Lanes: each in order, none in the way of another, with room that ends and comes back.

use super::Harness;
use super::bench::{Bench, CALL, Flow, SIZES, piece, read, whole, write};
use super::messages::{both_ways, copies};
use crate::group::{Piece, Sink};

/// Many messages of mixed sizes are taken in the order in which they were offered.
pub fn a_lane_keeps_its_order(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let sizes: Vec<u64> = (0..200).map(|_| bench.random.below(3000)).collect();
    both_ways(&mut bench, 1, &sizes, "messages came out of order");
}

/// A lane on which nothing is taken keeps back neither other channels nor other peers, nor the way back.
pub fn lanes_do_not_wait_for_each_other(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 3);
    let len = SIZES.iter().sum::<u64>();
    let buffers: Vec<_> = (0..3)
        .map(|rank| vec![bench.filled(rank, len), bench.zeroed(rank, 4 * len)])
        .collect();
    bench.begin_all(&buffers);
    let mut stuck = Flow::new(0, 1, 0, many(60_000, 200));
    fill(&mut bench, &mut stuck);
    let messages = |quarter: u64| {
        let moved = copies(&SIZES).into_iter().map(|(from, sink)| {
            let to = sink.target();
            let offset = to.offset + quarter * len;
            (from, Sink::Copy(Piece { offset, ..to }))
        });
        moved.collect()
    };
    let mut flows = [
        Flow::new(0, 1, 1, messages(0)),
        Flow::new(0, 2, 0, messages(0)),
        Flow::new(1, 0, 0, messages(0)),
        Flow::new(2, 1, 0, messages(1)),
    ];
    bench.run(&mut flows);
    for flow in &flows {
        let at = flow.messages[0].1.target().offset;
        let came = read(&buffers[flow.to][1], at, len);
        assert!(came == whole(&buffers[flow.from][0]), "what came is not what was sent");
    }
    stuck.messages.truncate(stuck.offered);
    bench.run(std::slice::from_mut(&mut stuck));
    bench.end_all();
}

/// Whatever was accepted comes, once; what was not accepted does not; and there is room again when something has been taken.
pub fn full_means_that_nothing_happened(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    for len in [8, 2_000, 60_000, 200_000] {
        let messages = many(len, 400);
        let (sent, came) = (bench.filled(0, len), bench.zeroed(1, len));
        bench.begin(0, CALL, std::slice::from_ref(&sent));
        bench.begin(1, CALL, &[came.clone(), came.clone()]);
        let mut flow = Flow::new(0, 1, 0, messages);
        fill(&mut bench, &mut flow);
        let accepted = flow.offered;
        assert!(accepted > 0, "a fresh lane has no room");
        // Every one is recognised by its head, and none comes that was not accepted.
        bench.until("what was accepted", |ends| {
            while flow.taken < accepted && flow.take(ends) {}
            while flow.settle(ends) {}
            flow.taken == accepted
        });
        assert!(whole(&came) == whole(&sent), "what came is not what was sent");
        flow.messages.truncate(accepted + 3);
        bench.run(std::slice::from_mut(&mut flow));
        bench.end_all();
    }
}

/// Four ranks, all lanes, sizes and turns by chance.
pub fn all_lanes_at_once(harness: &mut dyn Harness) {
    const RANKS: usize = 4;
    let mut bench = Bench::new(harness, RANKS as u32);
    let mut flows = Vec::new();
    let mut lens = [[0; RANKS]; RANKS];
    let mut room = [0; RANKS];
    for (from, lens) in lens.iter_mut().enumerate() {
        for to in (0..RANKS).filter(|to| *to != from) {
            for channel in 0..2 {
                let mut messages = Vec::new();
                for _ in 0..20 {
                    let most = SIZES[bench.random.below(SIZES.len() as u64 - 1) as usize];
                    let len = bench.random.below(most + 1);
                    messages.push((piece(0, lens[to], len), Sink::Copy(piece(1, room[to], len))));
                    lens[to] += len;
                    room[to] += len;
                }
                flows.push(Flow::new(from, to, channel, messages));
            }
        }
    }
    let sent = |from: usize| lens[from].iter().copied().max().unwrap_or(0);
    let buffers: Vec<_> = (0..RANKS)
        .map(|rank| vec![bench.filled(rank, sent(rank)), bench.zeroed(rank, room[rank])])
        .collect();
    bench.begin_all(&buffers);
    bench.run(&mut flows);
    bench.end_all();
    for flow in &flows {
        for (from, sink) in &flow.messages {
            let to = sink.target();
            let (sent, came) = (
                read(&buffers[flow.from][0], from.offset, from.len),
                read(&buffers[flow.to][1], to.offset, to.len),
            );
            assert!(
                sent == came,
                "a message from {} to {} on {} is not whole",
                flow.from,
                flow.to,
                flow.channel
            );
        }
    }
}

/// The sender writes over every piece as soon as it may, while nothing has been taken yet or some has. What comes is what was offered.
pub fn a_piece_is_free_once_its_offer_has_settled(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let len = SIZES.iter().sum();
    let (sent, came) = (bench.filled(0, len), bench.zeroed(1, len));
    let before = whole(&sent);
    bench.begin(0, CALL, std::slice::from_ref(&sent));
    bench.begin(1, CALL, &[came.clone(), came.clone()]);
    let mut flow = Flow::new(0, 1, 0, copies(&SIZES));
    let mut written = 0;
    bench.until("messages to pass", |ends| {
        flow.offer(ends);
        while flow.settle(ends) {}
        for (piece, _) in flow.free.drain(..).map(|index| flow.messages[index]) {
            write(&sent, piece.offset, &vec![0xee; piece.len as usize]);
            written += 1;
        }
        flow.take(ends);
        flow.is_over() && written == SIZES.len()
    });
    bench.end_all();
    assert!(whole(&came) == before, "a message changed after its offer had settled");
    assert!(whole(&sent).iter().all(|byte| *byte == 0xee));
}

/// Once the receiver has taken everything, no offer stays open for long.
pub fn what_was_taken_settles(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    for len in [8, 5_000, 40_000, 200_000] {
        let (sent, came) = (bench.filled(0, len), bench.zeroed(1, len));
        bench.begin(0, CALL, std::slice::from_ref(&sent));
        bench.begin(1, CALL, &[came.clone(), came]);
        let mut flow = Flow::new(0, 1, 0, many(len, 5));
        bench.until("messages to be taken", |ends| {
            flow.offer(ends);
            flow.take(ends);
            flow.taken == 5
        });
        bench.until("offers to settle", |ends| {
            while flow.settle(ends) {}
            flow.has_settled()
        });
        bench.end_all();
    }
}

/// The same piece again and again, into the same place.
fn many(len: u64, count: usize) -> Vec<(Piece, Sink<'static>)> {
    let message = (piece(0, 0, len), Sink::Copy(piece(1, 0, len)));
    vec![message; count]
}

/// Offers until there is no room, and there is none however long one waits.
fn fill(bench: &mut Bench<'_>, flow: &mut Flow<'_>) {
    let mut in_vain = 0;
    while flow.offered < flow.messages.len() && in_vain < 20 {
        match flow.offer(&mut bench.ends) {
            true => in_vain = 0,
            false => {
                in_vain += 1;
                bench.step();
            }
        }
    }
}
