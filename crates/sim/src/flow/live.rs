//! A network that somebody else's clock turns: flows begin when the caller says so, and it is told when they have ended.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use weft_model::fabric::Topology;
use weft_plan::{Bytes, Picos, Rank};

use super::report::hot_spots;
use super::solver::{Change, FlowId, Solver};
use super::ways::Ways;
use super::{FlowError, FlowOptions};
use crate::checks::knows_ranks;
use crate::traffic::Hot;

/// Flows under way on a topology.
#[derive(Debug)]
pub(crate) struct Live<'a> {
    topology: &'a Topology,
    ways: Ways<'a>,
    solver: Solver,
    ends: BinaryHeap<Reverse<(u64, u32, u32)>>,
    under: Vec<Under>,
    /// Flows without bytes or distance, which end without having been on a link.
    instant: BinaryHeap<Reverse<(u64, u32)>>,
    begun: u64,
    unsolved: bool,
    changes: Vec<Change>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Under {
    tag: u32,
    latency: u64,
    generation: u32,
}

impl<'a> Live<'a> {
    pub(crate) fn new(topology: &'a Topology, options: &FlowOptions) -> Live<'a> {
        let ways = Ways::links(topology, options);
        let solver = ways.solver(topology);
        Live {
            topology,
            ways,
            solver,
            ends: BinaryHeap::new(),
            under: Vec::new(),
            instant: BinaryHeap::new(),
            begun: 0,
            unsolved: false,
            changes: Vec::new(),
        }
    }

    /// Begins a flow. Whoever ends it is told `tag`.
    pub(crate) fn begin(&mut self, now: u64, ends: (Rank, Rank), bytes: Bytes, tag: u32) -> Result<(), FlowError> {
        knows_ranks(self.topology, [ends.0, ends.1])?;
        let mut uses = Vec::new();
        let latency = self.ways.rank_uses(ends, self.begun, &self.solver, &mut uses).as_ps();
        self.begun += 1;
        if ends.0 == ends.1 || bytes.0 == 0 {
            self.instant.push(Reverse((now.saturating_add(latency), tag)));
            return Ok(());
        }
        let flow = self.solver.add(&uses, bytes.0 as f64, now).0 as usize;
        if flow >= self.under.len() {
            self.under.resize(flow + 1, Under::default());
        }
        let generation = self.under[flow].generation.wrapping_add(1);
        self.under[flow] = Under {
            tag,
            latency,
            generation,
        };
        self.unsolved = true;
        Ok(())
    }

    /// When something ends next, if nothing else begins. Fair rates are found here, once for all that began together.
    pub(crate) fn next(&mut self, now: u64) -> Option<u64> {
        if std::mem::take(&mut self.unsolved) {
            self.changes.clear();
            self.solver.solve(now, &mut self.changes);
            for change in &self.changes {
                let state = &mut self.under[change.flow.0 as usize];
                state.generation = state.generation.wrapping_add(1);
                if let Some(at) = change.ends {
                    self.ends.push(Reverse((at, change.flow.0, state.generation)));
                }
            }
        }
        while let Some(&Reverse((_, flow, generation))) = self.ends.peek()
            && self.under[flow as usize].generation != generation
        {
            self.ends.pop();
        }
        let flow = self.ends.peek().map(|&Reverse((at, ..))| at);
        let instant = self.instant.peek().map(|&Reverse((at, _))| at);
        flow.into_iter().chain(instant).min()
    }

    /// Ends what ends by now: the tag, and when the last byte is there.
    pub(crate) fn end(&mut self, now: u64, ended: &mut Vec<(u32, Picos)>) {
        while let Some(&Reverse((at, tag))) = self.instant.peek()
            && at <= now
        {
            self.instant.pop();
            ended.push((tag, Picos::from_ps(at)));
        }
        while let Some(&Reverse((at, flow, generation))) = self.ends.peek()
            && at <= now
        {
            self.ends.pop();
            let state = &mut self.under[flow as usize];
            if state.generation != generation {
                continue;
            }
            state.generation = generation.wrapping_add(1);
            ended.push((state.tag, Picos::from_ps(now.saturating_add(state.latency))));
            self.solver.remove(FlowId(flow));
            self.unsolved = true;
        }
    }

    pub(crate) fn flows(&self) -> u64 {
        self.begun
    }

    /// Bytes over each link so far, by its number.
    pub(crate) fn carried(&self) -> Vec<f64> {
        (0..self.solver.resources())
            .map(|link| self.solver.carried(link))
            .collect()
    }

    /// The fullest links over a time.
    pub(crate) fn hot(&self, time: Picos) -> Vec<Hot> {
        hot_spots(self.topology, &self.ways, &self.solver, time)
    }
}
