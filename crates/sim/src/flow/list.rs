//! Transfers that do not wait for each other.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use weft_model::fabric::{Routing, Topology};
use weft_plan::Picos;

use super::report::{Report, carried_by_link, hot_spots};
use super::solver::{Change, FlowId};
use super::ways::{Ways, bundled, rate};
use super::{FlowError, FlowOptions};
use crate::checks::{RunError, knows_ranks};
use crate::execution::classes::Classes;
use crate::traffic::Transfer;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Fault(u32),
    Ends { flow: u32, generation: u32 },
    Begins(u32),
}

#[derive(Clone, Copy, Debug, Default)]
struct Under {
    transfer: u32,
    latency: u64,
    generation: u32,
}

pub(super) fn run(
    topology: &Topology,
    transfers: &[Transfer],
    options: &FlowOptions,
) -> Result<(Report, Vec<Picos>), FlowError> {
    knows_ranks(topology, transfers.iter().flat_map(Transfer::ends))?;
    let ranks = topology.ranks();
    let classes = Classes::each(ranks);
    let mut ways = match options.routing {
        Routing::Spray => bundled(topology, ranks, &classes).unwrap_or_else(|| Ways::links(topology, options)),
        _ => Ways::links(topology, options),
    };
    let mut solver = ways.solver(topology);
    let mut events: BinaryHeap<Reverse<(u64, Event)>> = BinaryHeap::new();
    for (nth, transfer) in transfers.iter().enumerate() {
        events.push(Reverse((transfer.start.as_ps(), Event::Begins(nth as u32))));
    }
    for (nth, fault) in options.faults.iter().enumerate() {
        ways.resource_of(topology, fault.link)?;
        events.push(Reverse((fault.from.as_ps(), Event::Fault(2 * nth as u32))));
        if fault.until < Picos::MAX {
            events.push(Reverse((fault.until.as_ps(), Event::Fault(2 * nth as u32 + 1))));
        }
    }
    let mut ends = vec![Picos::MAX; transfers.len()];
    let mut under: Vec<Under> = Vec::new();
    let (mut uses, mut changes) = (Vec::new(), Vec::<Change>::new());
    let (mut happened, mut flows) = (0u64, 0u64);
    while let Some(&Reverse((now, _))) = events.peek() {
        while let Some(&Reverse((at, event))) = events.peek()
            && at == now
        {
            events.pop();
            match event {
                Event::Fault(nth) => {
                    let fault = options.faults[(nth / 2) as usize];
                    if let Some((resource, share)) = ways.resource_of(topology, fault.link)? {
                        let link = rate(topology.wire(fault.link).bandwidth);
                        let left = if nth.is_multiple_of(2) {
                            fault.left.clamp(0.0, 1.0)
                        } else {
                            1.0
                        };
                        solver.set_capacity(resource, link / share - link * (1.0 - left));
                    }
                }
                Event::Ends { flow, generation } => {
                    let state = under[flow as usize];
                    if state.generation != generation {
                        continue;
                    }
                    under[flow as usize].generation = generation.wrapping_add(1);
                    solver.remove(FlowId(flow));
                    ends[state.transfer as usize] = Picos::from_ps(now.saturating_add(state.latency));
                }
                Event::Begins(nth) => {
                    let Transfer { from, to, bytes, .. } = transfers[nth as usize];
                    let latency = match &ways {
                        Ways::Bundles(_) => ways.class_uses(from.0, to.0, topology.level(from, to), 1.0, &mut uses),
                        Ways::Links { .. } => ways.rank_uses((from, to), nth.into(), &solver, &mut uses),
                    };
                    let latency = latency.saturating_add(options.message_overhead).as_ps();
                    if from == to || bytes.0 == 0 {
                        ends[nth as usize] = Picos::from_ps(now.saturating_add(latency));
                    } else {
                        let flow = solver.add(&uses, bytes.0 as f64, now);
                        flows += 1;
                        let place = flow.0 as usize;
                        if place >= under.len() {
                            under.resize(place + 1, Under::default());
                        }
                        let generation = under[place].generation.wrapping_add(1);
                        under[place] = Under {
                            transfer: nth,
                            latency,
                            generation,
                        };
                    }
                }
            }
            happened += 1;
        }
        changes.clear();
        solver.solve(now, &mut changes);
        for change in &changes {
            let state = &mut under[change.flow.0 as usize];
            state.generation = state.generation.wrapping_add(1);
            if let Some(at) = change.ends {
                let (flow, generation) = (change.flow.0, state.generation);
                events.push(Reverse((at, Event::Ends { flow, generation })));
            }
        }
    }
    let waiting = ends.iter().filter(|end| **end == Picos::MAX).count() as u64;
    if waiting > 0 {
        return Err(RunError::NeverEnds { waiting }.into());
    }
    let time = ends.iter().copied().max().unwrap_or(Picos::ZERO);
    let report = Report {
        time,
        messages: transfers.len() as u64,
        flows,
        events: happened,
        solved: solver.solved(),
        classes: ranks,
        rough: false,
        ranks,
        hot: hot_spots(topology, &ways, &solver, time),
        spans: Vec::new(),
        message_spans: Vec::new(),
        carried: match options.by_link {
            true => carried_by_link(topology, &ways, &solver, &classes, ranks),
            false => Vec::new(),
        },
    };
    Ok((report, ends))
}
