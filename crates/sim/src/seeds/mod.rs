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
//! - the same where a transfer goes through host memory on its way from or to a device, and every piece of that memory is free in the end;
//! - a region is not free while it is borrowed;
//! - queues stay bounded;
//! - a peer that is dead is found to be, whoever plays its messages again;
//! - nobody talks to a stranger, nor to a life of a peer that is over, and a stranger reads and writes nothing, whatever keys it has;
//! - nothing is kept of what is over;
//! - the ranks of a group that has lost some, or that is torn in two, go on in one part at most, and agree on who they are;
//! - collectives that all ranks of a group have called alike end well and right, and a rank that has called something else is found out, named
//!   to all and blamed by all;
//! - stores that work together serve what was put, say of nobody that it has a block longer after its death than a session takes to notice, and keep nothing for
//!   ever (`members`);
//! - a tier of blocks on a disk that tears, forgets, flips, fills up and hangs believes no wrong byte and loses nothing that it has acknowledged (`shelf`);
//! - when nothing goes wrong any more, everything works again.

mod acts;
mod counters;
mod events;
mod group;
mod hand_off;
mod ledger;
mod members;
mod plan;
mod play;
mod shelf;
mod stranger;
mod verdicts;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::faults::Tally;
use crate::world::World;
use group::GroupPlay;
use hand_off::HandOffPlay;
use members::MembersPlay;
use play::Play;
use shelf::ShelfPlay;

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
    // Its world is still there to be asked, whatever happened.
    let played = catch_unwind(AssertUnwindSafe(|| {
        play.run().map_err(|violation| violation.to_string())?;
        group::play(seed)
    }));
    let violation = violation(played);
    let (ends, notifications, steps) = play.totals();
    // An agent that panicked may panic again when it is taken apart.
    let _ = catch_unwind(AssertUnwindSafe(move || drop(play)));
    let mut outcome = Outcome {
        seed,
        trace_hash: world.trace_hash(),
        steps,
        tally: world.tally(),
        ends,
        notifications,
        violation,
        trace: world.trace_text(),
    };
    if outcome.violation.is_none() && hand_off::is_played(seed) {
        hand_offs(seed, detail, &mut outcome);
    }
    if outcome.violation.is_none() && members::is_played(seed) {
        stores(seed, detail, &mut outcome);
    }
    if outcome.violation.is_none() && group::is_played(seed) {
        groups(seed, detail, &mut outcome);
    }
    if outcome.violation.is_none() {
        shelves(seed, &mut outcome);
    }
    outcome
}

/// Plays the seed's tier of blocks alone.
pub fn run_shelf(seed: u64) -> Outcome {
    let mut outcome = Outcome::empty(seed);
    shelves(seed, &mut outcome);
    outcome
}

/// Plays the seed's stores that work together alone.
pub fn run_members(seed: u64, detail: Detail) -> Outcome {
    let mut outcome = Outcome::empty(seed);
    stores(seed, detail, &mut outcome);
    outcome
}

fn shelves(seed: u64, outcome: &mut Outcome) {
    let mut play = ShelfPlay::new(seed);
    let played = catch_unwind(AssertUnwindSafe(|| play.run()));
    outcome.violation = violation(played);
    let (ends, steps, hash) = play.totals();
    outcome.trace_hash ^= hash.rotate_left(2);
    outcome.steps += steps;
    for (end, count) in ends {
        *outcome.ends.entry(format!("tier: {end}")).or_default() += count;
    }
}

/// Plays the seed's world of groups too.
fn groups(seed: u64, detail: Detail, outcome: &mut Outcome) {
    let faults = GroupPlay::faults(seed);
    let world = match detail {
        Detail::HashOnly => World::new(seed, faults),
        Detail::Lines => World::verbose(seed, faults),
    };
    let mut play = GroupPlay::new(seed, world.clone());
    let played = catch_unwind(AssertUnwindSafe(|| play.run()));
    outcome.violation = violation(played);
    let (ends, steps) = play.totals();
    let _ = catch_unwind(AssertUnwindSafe(move || drop(play)));
    outcome.add(&world, "group", ends, steps);
}

/// Plays the seed's world of hand-offs too.
fn hand_offs(seed: u64, detail: Detail, outcome: &mut Outcome) {
    let plan = plan::Plan::of(seed);
    let world = match detail {
        Detail::HashOnly => World::new(seed, plan.faults),
        Detail::Lines => World::verbose(seed, plan.faults),
    };
    let mut play = HandOffPlay::new(seed, world.clone());
    let played = catch_unwind(AssertUnwindSafe(|| play.run()));
    outcome.violation = violation(played);
    let (ends, steps) = play.totals();
    let _ = catch_unwind(AssertUnwindSafe(move || drop(play)));
    outcome.add(&world, "hand-off", ends, steps);
}

/// Plays the seed's world of stores too.
fn stores(seed: u64, detail: Detail, outcome: &mut Outcome) {
    let plan = plan::Plan::of(seed);
    let world = match detail {
        Detail::HashOnly => World::new(seed, plan.faults),
        Detail::Lines => World::verbose(seed, plan.faults),
    };
    let mut play = MembersPlay::new(seed, world.clone());
    let played = catch_unwind(AssertUnwindSafe(|| play.run()));
    outcome.violation = violation(played);
    let (ends, steps) = play.totals();
    let _ = catch_unwind(AssertUnwindSafe(move || drop(play)));
    outcome.add(&world, "stores", ends, steps);
}

impl Outcome {
    fn empty(seed: u64) -> Outcome {
        Outcome {
            seed,
            trace_hash: 0,
            steps: 0,
            tally: Tally::default(),
            ends: BTreeMap::new(),
            notifications: 0,
            violation: None,
            trace: String::new(),
        }
    }

    /// Takes in what came of another world of the same seed.
    fn add(&mut self, world: &World, of: &str, ends: BTreeMap<String, u64>, steps: u64) {
        self.trace_hash ^= world.trace_hash().rotate_left(1);
        self.steps += steps;
        self.tally.add(&world.tally());
        for (end, count) in ends {
            *self.ends.entry(format!("{of}: {end}")).or_default() += count;
        }
        self.trace.push_str(&world.trace_text());
    }
}

/// What was broken, in words. An assertion in the code under test is a violation like any other.
fn violation<V: std::fmt::Display>(played: std::thread::Result<Result<(), V>>) -> Option<String> {
    match played {
        Ok(Ok(())) => None,
        Ok(Err(violation)) => Some(violation.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            let text = text.unwrap_or_else(|| "without words".to_owned());
            Some(format!("panicked: {text}"))
        }
    }
}
