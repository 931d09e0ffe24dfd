//! What ranks tell each other beside the messages.

use weft_plan::Rank;

use super::Harness;
use super::bench::{Bench, CALL, record};
use crate::group::{Abort, Cause, Recent, Status, Trouble, Waiting};
use crate::transport::Progress;

/// Everybody hears why a call failed, whoever said it, and whoever hears it keeps it.
pub fn an_abort_reaches_everybody(harness: &mut dyn Harness) {
    for by in 0..3 {
        let mut bench = Bench::new(harness, 3);
        (0..3).for_each(|rank| bench.begin(rank, CALL, &[]));
        let abort = abort(by);
        bench.ends[by as usize].abort(&abort);
        for rank in [0, 1, 2, 0] {
            assert_eq!(bench.trouble(rank), Trouble::Aborted(Box::new(abort)));
        }
    }
}

/// A second abort changes nothing, wherever it is told.
pub fn the_first_abort_is_believed(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 3);
    (0..3).for_each(|rank| bench.begin(rank, CALL, &[]));
    bench.ends[2].abort(&abort(2));
    let first = Trouble::Aborted(Box::new(abort(2)));
    (0..3).for_each(|rank| assert_eq!(bench.trouble(rank), first));
    bench.ends[0].abort(&abort(0));
    bench.ends[2].abort(&abort(1));
    for _ in 0..20 {
        bench.harness.idle();
        (0..3).for_each(|rank| assert_eq!(bench.trouble(rank), first));
    }
}

/// What a rank has called, what it waits for, and that it has ended, are to be known by whoever keeps asking.
pub fn a_status_becomes_known(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    let mut recent = Recent::NONE;
    recent.begin(&record(CALL));
    let mut status = Status {
        recent,
        call: record(CALL),
        ended: false,
        waiting: Waiting { step: 0, peer: None },
    };
    bench.begin(0, CALL, &[]);
    bench.begin(1, CALL, &[]);
    await_status(&mut bench, status);
    status.waiting = Waiting {
        step: 7,
        peer: Some(Rank(1)),
    };
    bench.ends[0].publish(status.waiting);
    await_status(&mut bench, status);
    bench.until("a call to end", |ends| ends[0].end() == Progress::Idle);
    bench.until("the end of a call to be known", |ends| {
        ends[1]
            .status(Rank(0))
            .is_some_and(|known| known.call == status.call && known.ended)
    });
    // The next one is another.
    recent.begin(&record(CALL + 1));
    status = Status {
        recent,
        call: record(CALL + 1),
        ended: false,
        waiting: Waiting { step: 0, peer: None },
    };
    bench.begin(0, CALL + 1, &[]);
    await_status(&mut bench, status);
    bench.end_all();
}

/// Whoever is in a call and alive is seen to be.
pub fn a_rank_in_a_call_has_a_pulse(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness, 2);
    bench.begin(0, CALL, &[]);
    bench.begin(1, CALL, &[]);
    for step in 0..5 {
        let before = bench.ends[1].pulse(Rank(0));
        bench.ends[0].publish(Waiting { step, peer: None });
        bench.until("a pulse", |ends| {
            // Where ranks do not see each other, asking is what gives one.
            let _ = ends[1].status(Rank(0));
            ends[1].pulse(Rank(0)) != before
        });
    }
    bench.end_all();
}

fn await_status(bench: &mut Bench<'_>, status: Status) {
    bench.until("a status to be known", |ends| ends[1].status(Rank(0)) == Some(status));
}

fn abort(by: u32) -> Abort {
    Abort {
        by: Rank(by),
        blamed: Rank((by + 1) % 3),
        cause: Cause::Late,
        step: 9,
        called: record(CALL),
        instead: Some(record(CALL - 1)),
    }
}
