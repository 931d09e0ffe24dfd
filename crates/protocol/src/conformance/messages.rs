//! Messages arrive whole, and arrivals after their data.

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_plan::Spans;

use super::bench::{Bench, How};
use super::{Harness, Side};
use crate::leg::Direction;
use crate::transport::{Arrival, Body, Op};

pub fn messages_are_echoed(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let count = 100;
    let longest = bench.end(Side::Initiator).transport().capabilities().max_message_bytes;
    let mut sent = Vec::new();
    for i in 0..count {
        // Long ones may go another way, and must not overtake the others.
        let len = if i % 10 == 9 { longest - i } else { 1 + (i * 37) % 900 };
        let mut payload = vec![0; len];
        bench.random.fill(&mut payload);
        sent.push(payload);
    }
    for (side, path) in [(Side::Initiator, bench.near), (Side::Target, bench.far)] {
        let ops: Vec<Op> = sent
            .iter()
            .map(|payload| bench.op(Body::Message(Arc::from(payload.as_slice()))))
            .collect();
        for outcome in bench.carry_out(side, path, &ops) {
            outcome.expect("a message can be sent");
        }
        let (other, far_path) = match side {
            Side::Initiator => (Side::Target, bench.far),
            Side::Target => (Side::Initiator, bench.near),
        };
        bench.until("all messages", |b| b.end(other).messages.len() >= count);
        bench.settle();
        let reliable = bench.end(other).transport().capabilities().reliable_messages;
        let mut received = std::mem::take(&mut bench.end(other).messages);
        let mut wanted: Vec<_> = sent.iter().map(|payload| (far_path, payload.clone())).collect();
        if !reliable {
            received.sort();
            wanted.sort();
        }
        assert!(received == wanted, "messages were changed, lost, repeated or reordered");
    }
}

pub fn largest_message_arrives_whole(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    for (side, path, other) in [
        (Side::Initiator, bench.near, Side::Target),
        (Side::Target, bench.far, Side::Initiator),
    ] {
        let mut payload = vec![0; bench.end(side).transport().capabilities().max_message_bytes];
        bench.random.fill(&mut payload);
        let op = bench.op(Body::Message(Arc::from(payload.as_slice())));
        bench.carry_out(side, path, &[op])[0].expect("the largest message can be sent");
        bench.until("the largest message", |b| !b.end(other).messages.is_empty());
        assert!(
            bench.end(other).messages[0].1 == payload,
            "the largest message was changed"
        );
    }
}

pub fn arrivals_follow_their_data(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let (leg, far) = bench.whole_leg(6 << 20);
    let tag = 0xfeed_beef_0000_0001;
    let how = How {
        tag: Some(tag),
        checksum: false,
    };
    let ops = bench.parts(Side::Initiator, Direction::Write, &leg, how);
    let wanted = bench.contents(&*leg.local().memory);
    let path = bench.near;
    let mut posted = 0;
    let mut seen = 0;
    let mut distinct = BTreeSet::new();
    bench.until("all arrivals", |b| {
        while seen < b.end(Side::Target).arrivals.len() {
            let Arrival { tag: found, index } = b.end(Side::Target).arrivals[seen];
            seen += 1;
            assert_eq!(found, tag, "an arrival under a tag that nobody used");
            let Some(Body::Move(part)) = ops.get(index as usize).map(|op| &op.body) else {
                panic!("the arrival of part {index}, which nobody sent");
            };
            let range = part.range.clone();
            let there = b.gather(&*far.memory, &Spans::contiguous(range.start, range.end - range.start));
            assert!(
                there == wanted[range.start as usize..range.end as usize],
                "part {index} was announced before its bytes were in place"
            );
            distinct.insert(index);
        }
        if posted < ops.len() {
            posted += b.post(Side::Initiator, path, &ops[posted..]);
        }
        distinct.len() == ops.len()
    });
    bench.until_all_completed(Side::Initiator);
    for op in &ops {
        bench.initiator.outcome(op.id).expect("a rightful move succeeds");
    }
    assert_eq!(far.memory.len(), leg.bytes());
}
