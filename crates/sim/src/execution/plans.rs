//! What each class of ranks executes: compiled once for all that execute the same.
//!
//! Ranks execute the same if their ops are of the same kinds and sizes in the same order and wait for each other in the same way; to whom messages go
//! and where bytes lie may differ. Where ranks do not have much to do each of them is compiled and compared. Where they do, those are grouped
//! that do alike in some of their steps, and of a group some are compiled, spread evenly. An execution checks besides, message by
//! message, that a rank has what its plan says ([`Execution::unlike`](super::Execution::unlike)).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use weft_plan::Rank;
use weft_plan::schedule::Op;
use weft_protocol::group::{Act, Compiled};

use super::classes::{Classes, QuickMap, looked_at_steps};
use super::look::{Look, Quick};
use super::plan::{Plan, kind};
use crate::checks::RunError;
use crate::flow::mixed;

/// So many ops are compiled beyond what is kept, to find out whether ranks execute the same.
const COMPARED_MAX: usize = 1 << 15;
/// So many ranks are compared with those that stand for them.
const OTHERS_MAX: usize = 4;
/// Ranks with more ops are not compared with those that stand for them.
const LOOKED_AT_MAX: usize = 1 << 17;
/// So many ops are kept.
const KEPT_MAX: usize = 1 << 24;

/// What classes execute.
#[derive(Debug)]
pub(crate) struct Plans {
    plans: Vec<Plan>,
    /// By class.
    of: Vec<u32>,
    /// Whether ranks of a class were found that do the same in every step, and wait for it in other orders than the one that stands for
    /// them.
    pub(crate) rough: bool,
    pub(crate) trust: Trust,
}

/// What is thought to be alike before it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Ranks that do alike in some of their steps.
    Alike,
    /// None: each class is compiled.
    Nobody,
}

impl Plans {
    /// The plans of classes.
    pub(crate) fn new(look: &mut Look<'_>, classes: &Classes, trust: Trust) -> Result<Plans, RunError> {
        let mut making = Making {
            plans: Plans {
                plans: Vec::new(),
                of: vec![0; classes.count() as usize],
                rough: false,
                trust,
            },
            known: QuickMap::default(),
            kept: 0,
        };
        if trust == Trust::Nobody {
            for class in 0..classes.count() {
                making.add(look.compile(classes.rank(class))?, class)?;
            }
            return Ok(making.plans);
        }
        for group in groups(look, classes) {
            let first = look.compile(classes.rank(group[0]))?;
            let (digest, ops) = (digest(&first), first.len());
            making.add(first, group[0])?;
            // One at least, where there is another.
            let budget = (COMPARED_MAX / (ops + 1)).max(1);
            let compared = spread(group.len() - 1, budget).map(|nth| group[nth + 1]);
            let mut same = true;
            for class in compared {
                same &= self::digest(&look.compile(classes.rank(class))?) == digest;
            }
            for &class in &group[1..] {
                match same {
                    true => making.plans.of[class as usize] = making.plans.of[group[0] as usize],
                    false => making.add(look.compile(classes.rank(class))?, class)?,
                }
            }
        }
        making.plans.rough = is_rough(look, classes, making.plans.mean_ops() as usize)?;
        Ok(making.plans)
    }

    /// How many ops a class has, on average.
    pub(crate) fn mean_ops(&self) -> u64 {
        let ops = |&plan: &u32| self.plan(plan).compiled.len() as u64;
        self.of.iter().map(ops).sum::<u64>() / self.of.len().max(1) as u64
    }

    /// Lets ops of crowded steps go together: where ranks stand for others that wait in other orders, that order means nothing.
    pub(crate) fn crowd(&mut self) {
        self.plans.iter_mut().for_each(Plan::crowd);
    }

    pub(super) fn of(&self, class: u32) -> u32 {
        self.of[class as usize]
    }
    pub(super) fn plan(&self, plan: u32) -> &Plan {
        &self.plans[plan as usize]
    }
}

/// Plans, while there come more of them.
struct Making {
    plans: Plans,
    /// By digest.
    known: QuickMap<u64, u32>,
    kept: usize,
}

impl Making {
    fn add(&mut self, compiled: Compiled, class: u32) -> Result<(), RunError> {
        let next = self.plans.plans.len() as u32;
        let plan = *self.known.entry(digest(&compiled)).or_insert(next);
        if plan == next {
            self.kept += compiled.len();
            if self.kept > KEPT_MAX {
                return Err(RunError::TooManyOps { most: KEPT_MAX as u64 });
            }
            self.plans.plans.push(Plan::new(compiled));
        }
        self.plans.of[class as usize] = plan;
        Ok(())
    }
}

/// Classes that do alike in some of their steps.
fn groups(look: &mut Look<'_>, classes: &Classes) -> Vec<Vec<u32>> {
    let steps = looked_at_steps(look.program());
    let mut nth: HashMap<u64, usize, BuildHasherDefault<Quick>> = HashMap::default();
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for class in 0..classes.count() {
        let rank = classes.rank(class);
        let mut hash = Quick::default();
        for &step in &steps {
            let ops = look.ops(rank, step);
            hash.write_usize(ops.len());
            for op in ops {
                hash.write_u8(match op {
                    Op::Send { .. } => 0,
                    Op::Receive { .. } => 1,
                    Op::ReceiveReduce { .. } => 2,
                    Op::Copy { .. } => 3,
                    Op::Reduce { .. } => 4,
                });
                hash.write_u32(op.writes().or_else(|| op.reads().next()).map_or(0, |slice| slice.count));
            }
        }
        let group = *nth.entry(hash.finish()).or_insert_with(|| {
            groups.push(Vec::new());
            groups.len() - 1
        });
        groups[group].push(class);
    }
    groups
}

/// Whether a rank waits for what it does in another order than the one that stands for it. So many are looked at as can be afforded.
fn is_rough(look: &Look<'_>, classes: &Classes, ops: usize) -> Result<bool, RunError> {
    let ranks = look.program().shape().ranks;
    if classes.count() == ranks {
        return Ok(false);
    }
    // Not known is not alike.
    let most = match COMPARED_MAX / (2 * ops + 1) {
        0 if ops > LOOKED_AT_MAX => return Ok(true),
        most => most.clamp(1, OTHERS_MAX),
    };
    for rank in spread(ranks as usize, most).map(|rank| Rank(rank as u32)) {
        let first = classes.rank(classes.class(rank));
        if first != rank && likeness(look, first)? != likeness(look, rank)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// So many of the first numbers, or fewer, spread evenly; the last is among them.
fn spread(all: usize, most: usize) -> impl Iterator<Item = usize> {
    let count = all.min(most);
    (1..=count).map(move |nth| nth * all / count - 1)
}

/// A number that is the same for what is executed in the same way, op by op.
fn digest(compiled: &Compiled) -> u64 {
    let mut hash = Quick::default();
    hash.write_usize(compiled.len());
    for op in 0..compiled.len() as u32 {
        hash.write_u64(label(compiled, op));
        hash.write_u32(compiled.listed(op).1);
        hash.write_u32(compiled.waits(op));
        for list in [compiled.on_begin(op), compiled.on_end(op)] {
            hash.write_usize(list.len());
            list.iter().for_each(|&after| hash.write_u32(after));
        }
    }
    hash.finish()
}

/// A number that is the same for ranks whose ops are of the same kinds, with peers as far away, and follow each other in the same way, in whatever
/// order a step lists them.
fn likeness(look: &Look<'_>, rank: Rank) -> Result<u64, RunError> {
    let compiled = &look.compile(rank)?;
    let ranks = look.program().shape().ranks;
    let place = |op: u32| match compiled.act(op) {
        Act::Send { lane, .. } | Act::Receive { lane, .. } | Act::ReceiveReduce { lane, .. } => {
            let level = look.level(rank, lane.peer);
            let away = rank.0.abs_diff(lane.peer.0);
            u64::from(level.0) << 32 | u64::from(away.min(ranks - away))
        }
        Act::Copy { .. } | Act::Reduce { .. } | Act::Divide { .. } => u64::MAX,
    };
    // By op: what it waits for, and what these wait for, all the way back.
    let mut befores = vec![0u64; compiled.len()];
    let mut all = 0u64;
    for op in 0..compiled.len() as u32 {
        let own = mixed(label(compiled, op) ^ mixed(befores[op as usize] ^ mixed(place(op))));
        all = all.wrapping_add(own);
        for (list, edge) in [(compiled.on_begin(op), 1), (compiled.on_end(op), 2)] {
            for &after in list {
                let before = &mut befores[after as usize];
                *before = before.wrapping_add(mixed(own ^ edge));
            }
        }
    }
    Ok(all)
}

/// What an op is, without whom it is about.
fn label(compiled: &Compiled, op: u32) -> u64 {
    mixed(u64::from(compiled.listed(op).0)) ^ kind(compiled, op)
}
