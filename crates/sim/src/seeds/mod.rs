//! A whole world out of a number: agents, work, faults, and checks that hold whatever happens.
//!
//! What is checked, for every seed:
//! - a transfer that succeeds has put exactly the right bytes in exactly the right place, and one that fails says truly which
//!   bytes it moved;
//! - no byte is written outside a transfer's spans, nor any after it has ended, been cancelled, expired, or lost its memory;
//! - a transfer ends once, and by its deadline;
//! - a key of an earlier life or of a withdrawn region opens nothing, nor does one without the permission or past the end;
//! - a notification comes after its data, at most once, and surely where the session lives; once it has come, the memory is the
//!   receiver's, and the transfer changes no more of it;
//! - an increment of a peer's word happens once where it is answered, not at all where it is said not to have happened, at most
//!   once where that is said to be unknown, and never after its deadline;
//! - a region is not free while it is borrowed;
//! - queues stay bounded;
//! - a peer that is dead is found to be, whoever plays its messages again;
//! - nobody talks to a stranger, nor to a life of a peer that is over, and a stranger reads and writes nothing, whatever keys it has;
//! - nothing is kept of what is over;
//! - collectives that all ranks of a group have called alike end well and right, and a rank that has called something else is found out, named
//!   to all and blamed by all;
//! - when nothing goes wrong any more, everything works again.

mod acts;
mod counters;
mod events;
mod group;
mod ledger;
mod plan;
mod play;
mod stranger;
mod verdicts;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::faults::Tally;
use crate::world::World;
use play::Play;

/// What became of a seed.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub seed: u64,
    /// Equal for equal seeds.
    pub trace_hash: u64,
    pub steps: u64,
    pub tally: Tally,
    /// How transfers ended: `done`, or the cause in words.
    pub ends: BTreeMap<String, u64>,
    pub notifications: u64,
    /// What was broken, where something was.
    pub violation: Option<String>,
    /// What happened before, where it was asked for.
    pub trace: String,
}

/// Whether to keep a readable trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    HashOnly,
    Lines,
}

/// Plays the world of a seed to its end.
pub fn run(seed: u64, detail: Detail) -> Outcome {
    let plan = plan::Plan::of(seed);
    let world = match detail {
        Detail::HashOnly => World::new(seed, plan.faults),
        Detail::Lines => World::verbose(seed, plan.faults),
    };
    let mut play = Play::new(seed, plan, world.clone());
    // An assertion in the code under test is a violation like any other, and its world is still there to be asked.
    let played = catch_unwind(AssertUnwindSafe(|| {
        play.run().map_err(|violation| violation.to_string())?;
        group::play(seed)
    }));
    let violation = match played {
        Ok(Ok(())) => None,
        Ok(Err(violation)) => Some(violation),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Some(format!(
                "panicked: {}",
                text.unwrap_or_else(|| "without words".to_owned())
            ))
        }
    };
    let (ends, notifications, steps) = play.totals();
    // An agent that panicked may panic again when it is taken apart.
    let _ = catch_unwind(AssertUnwindSafe(move || drop(play)));
    Outcome {
        seed,
        trace_hash: world.trace_hash(),
        steps,
        tally: world.tally(),
        ends,
        notifications,
        violation,
        trace: world.trace_text(),
    }
}
