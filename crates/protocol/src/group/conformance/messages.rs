//! Messages: whole, once, where they belong, and only if they are the ones that are expected.

use std::sync::Arc;

use weft_plan::{Datatype, Rank, Reduction};

use super::Harness;
use super::bench::{Bench, CALL, Flow, SIZES, lane, piece, read, whole};
use crate::group::{Combiner, Function, MessageHead, Offered, Sink, Taken, Trouble};

/// Both ranks send each other messages of every size at once.
pub fn messages_of_all_sizes_arrive_whole(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    both_ways(&mut bench, 0, &SIZES, "what came is not what was sent");
}

/// A message of no bytes waits its turn, is taken, and settles.
pub fn empty_messages_are_messages(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let buffers: Vec<_> = (0..2)
        .map(|rank| vec![bench.filled(rank, 64), bench.zeroed(rank, 64)])
        .collect();
    bench.begin_all(&buffers);
    let messages = copies(&[0, 8, 0, 0, 56, 0]);
    let mut flows = [Flow::new(0, 1, 1, messages)];
    bench.run(&mut flows);
    bench.end_all();
    assert_eq!(whole(&buffers[1][1]), whole(&buffers[0][0]));
}

/// What has been taken does not come again.
pub fn a_message_is_taken_once(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let buffers: Vec<_> = (0..2)
        .map(|rank| vec![bench.filled(rank, 80), bench.zeroed(rank, 80)])
        .collect();
    bench.begin_all(&buffers);
    let mut flows = [Flow::new(0, 1, 0, copies(&[40, 40]))];
    bench.run(&mut flows);
    for index in 0..3 {
        let head = MessageHead {
            index,
            ..flows[0].head(0)
        };
        let sink = Sink::Copy(piece(1, 0, 40));
        bench.let_pass();
        assert_eq!(bench.ends[1].take(lane(0, 0), &head, &sink), Ok(Taken::Nothing));
    }
    bench.end_all();
}

/// The target becomes what is there combined with what comes, in place and elsewhere.
pub fn what_comes_is_combined_with_what_is_there(harness: &mut dyn Harness) {
    let how = Combiner::Builtin {
        datatype: Datatype::I32,
        reduction: Reduction::Sum,
    };
    combined(harness, &how, 4, |into, from| {
        Datatype::I32
            .combine(Reduction::Sum, into, from)
            .expect("whole elements");
    });
}

/// A function of the caller's is given whole elements, however large and however long the message.
pub fn elements_of_a_callers_own_are_never_cut(harness: &mut dyn Harness) {
    for size in [3, 1000] {
        let function = Arc::new(XorOf(size));
        let how = Combiner::Custom { size, function };
        combined(harness, &how, size as u64, |into, from| XorOf(size).combine(into, from));
    }
}

/// What lies before and behind the target stays, and so does what is combined with.
pub fn a_sink_writes_its_target_and_nothing_else(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let how = Combiner::Builtin {
        datatype: Datatype::U8,
        reduction: Reduction::Max,
    };
    for len in [1, 100, 5_000, 200_000] {
        let sent = bench.filled(0, len);
        let (target, with) = (bench.filled(1, 2 * len + 200), bench.filled(1, len));
        let (before, other) = (whole(&target), whole(&with));
        bench.begin(0, CALL, std::slice::from_ref(&sent));
        bench.begin(1, CALL, &[target.clone(), with.clone()]);
        let second = Sink::Combine {
            with: piece(1, 0, len),
            into: piece(0, len + 133, len),
            how: &how,
        };
        let messages = vec![
            (piece(0, 0, len), Sink::Copy(piece(0, 67, len))),
            (piece(0, 0, len), second),
        ];
        bench.run(&mut [Flow::new(0, 1, 0, messages)]);
        bench.end_all();
        let (at, len) = (len as usize, len as usize);
        let mut expected = before;
        expected[67..67 + len].copy_from_slice(&whole(&sent));
        let mut most = other.clone();
        Datatype::U8
            .combine(Reduction::Max, &mut most, &whole(&sent))
            .expect("whole elements");
        expected[at + 133..at + 133 + len].copy_from_slice(&most);
        assert!(whole(&target) == expected, "something beside its target was written");
        assert!(whole(&with) == other, "what is combined with was written");
    }
}

pub fn what_is_sent_is_not_written(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let len = SIZES.iter().sum();
    let (sent, came) = (bench.filled(0, len), bench.zeroed(1, len));
    let before = whole(&sent);
    bench.begin(0, CALL, std::slice::from_ref(&sent));
    bench.begin(1, CALL, &[came.clone(), came]);
    bench.run(&mut [Flow::new(0, 1, 0, copies(&SIZES))]);
    bench.end_all();
    assert!(whole(&sent) == before, "what was sent has changed");
}

/// A message of another call, of another kind, out of turn or of another length is reported, and nothing of it is used.
pub fn messages_of_another_kind_are_refused_untouched(harness: &mut dyn Harness) {
    type Change = fn(&mut MessageHead);
    let others: [Change; 4] = [
        |head| head.call += 1,
        |head| head.signature ^= 1,
        |head| head.index += 1,
        |head| head.len -= 8,
    ];
    for change in others {
        for len in [16, 300, 40_000, 200_000] {
            let mut bench = Bench::new(harness, 2);
            let (sent, came) = (bench.filled(0, len), bench.zeroed(1, len));
            bench.begin(0, CALL, std::slice::from_ref(&sent));
            bench.begin(1, CALL, std::slice::from_ref(&came));
            let flow = Flow::new(0, 1, 0, vec![(piece(0, 0, len), Sink::Copy(piece(0, 0, len)))]);
            let found = flow.head(0);
            let mut expected = found;
            change(&mut expected);
            let offered = bench.ends[0].offer(lane(1, 0), &found, piece(0, 0, len));
            assert!(!matches!(offered, Ok(Offered::Full) | Err(_)), "a fresh lane has room");
            let sink = Sink::Copy(piece(0, 0, expected.len));
            let mut refused = None;
            bench.until("a message of another kind", |ends| {
                match ends[1].take(lane(0, 0), &expected, &sink) {
                    Ok(Taken::Nothing) => {}
                    Ok(taken) => panic!("{taken:?} of a message that nobody sent"),
                    Err(trouble) => refused = Some(trouble),
                }
                refused.is_some()
            });
            let wrong = Trouble::WrongMessage {
                peer: Rank(0),
                expected,
                found,
            };
            assert_eq!(refused, Some(wrong));
            assert!(whole(&came).iter().all(|byte| *byte == 0), "a refused message was used");
        }
    }
}

/// Two ranks send each other messages of these sizes at once, and what came is compared.
pub(super) fn both_ways(bench: &mut Bench<'_>, channel: u16, sizes: &[u64], otherwise: &str) {
    let len = sizes.iter().sum();
    let buffers: Vec<_> = (0..2)
        .map(|rank| vec![bench.filled(rank, len), bench.zeroed(rank, len)])
        .collect();
    bench.begin_all(&buffers);
    let mut flows: Vec<_> = (0..2)
        .map(|from| Flow::new(from, 1 - from, channel, copies(sizes)))
        .collect();
    bench.run(&mut flows);
    bench.end_all();
    for rank in 0..2 {
        assert!(whole(&buffers[rank][1]) == whole(&buffers[1 - rank][0]), "{otherwise}");
    }
}

/// Messages that lie one behind the other in the first buffer of their sender, and go to the second of their receiver.
pub(super) fn copies(sizes: &[u64]) -> Vec<(crate::group::Piece, Sink<'static>)> {
    let mut at = 0;
    let each = sizes.iter().map(|&len| {
        let (from, to) = (piece(0, at, len), piece(1, at, len));
        at += len;
        (from, Sink::Copy(to))
    });
    each.collect()
}

fn combined(harness: &mut dyn Harness, how: &Combiner, unit: u64, reference: impl Fn(&mut [u8], &[u8])) {
    let mut bench = Bench::new(harness, 2);
    let sizes: Vec<u64> = SIZES.iter().map(|size| size.div_ceil(unit) * unit).collect();
    let len: u64 = sizes.iter().sum();
    let sent = bench.filled(0, len);
    // In place, and from one buffer into another.
    let (there, with, into) = (bench.filled(1, len), bench.filled(1, len), bench.zeroed(1, len));
    let (before, other) = (whole(&there), whole(&with));
    bench.begin(0, CALL, std::slice::from_ref(&sent));
    bench.begin(1, CALL, &[there.clone(), with, into.clone()]);
    let mut messages = Vec::new();
    let mut at = 0;
    for &len in &sizes {
        let here = piece(0, at, len);
        messages.push((
            here,
            Sink::Combine {
                with: here,
                into: here,
                how,
            },
        ));
        let (with, into) = (piece(1, at, len), piece(2, at, len));
        messages.push((here, Sink::Combine { with, into, how }));
        at += len;
    }
    bench.run(&mut [Flow::new(0, 1, 0, messages)]);
    bench.end_all();
    let mut at = 0;
    for &len in &sizes {
        let range = at as usize..(at + len) as usize;
        let came = read(&sent, at, len);
        for (before, view) in [(&before, &there), (&other, &into)] {
            let mut expected = before[range.clone()].to_vec();
            reference(&mut expected, &came);
            assert!(
                read(view, at, len) == expected,
                "{len} bytes were not combined as they should"
            );
        }
        at += len;
    }
}

/// Elements of so many bytes.
#[derive(Debug)]
struct XorOf(usize);

impl Function for XorOf {
    fn combine(&self, into: &mut [u8], from: &[u8]) {
        assert_eq!(into.len(), from.len(), "as much comes as is there");
        assert!(into.len().is_multiple_of(self.0), "an element was cut");
        into.iter_mut().zip(from).for_each(|(a, b)| *a ^= b);
    }
}
