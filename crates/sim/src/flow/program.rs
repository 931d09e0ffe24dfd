//! A program on the network: every class of ranks goes on as soon as it can.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use weft_plan::collective::Problem;
use weft_plan::platform::fabric::{Routing, Topology};
use weft_plan::schedule::{Program, Shape};
use weft_plan::{Bytes, Picos, Rank};

use super::classes::Classes;
use super::demand::Look;
use super::report::{Report, carried_by_link, hot_spots};
use super::solver::{Change, FlowId, Solver, Use};
use super::ways::{Ways, bundled, rate};
use super::{FlowError, FlowOptions};
use crate::checks::{RunError, has_room};
use crate::steps::{Pace, Start, Steps};

/// More ranks × steps than this are not followed one by one.
const FOLLOWED_MAX: u64 = 1 << 33;

pub(super) fn run(
    topology: &Topology,
    problem: &Problem,
    program: &dyn Program,
    bytes: Bytes,
    options: &FlowOptions,
) -> Result<Report, FlowError> {
    let shape = program.shape();
    has_room(topology, &shape)?;
    let mut look = Look::new(topology, problem, program, bytes.0);
    let bundles = topology.top().is_some() && options.routing == Routing::Spray;
    let candidates = match bundles {
        // What is different at one link is different for whoever uses it.
        true if options.every_rank || !options.faults.is_empty() => vec![Classes::each(shape.ranks)],
        true => Classes::candidates(topology, shape.ranks),
        false => vec![Classes::by_links(shape.ranks)],
    };
    let mut outcome = Err(FlowError::TooLarge {
        ranks: shape.ranks,
        steps: shape.steps,
    });
    for classes in candidates {
        if u64::from(classes.count()) * u64::from(shape.steps) > FOLLOWED_MAX {
            break;
        }
        let ways = match bundles {
            true => bundled(topology, shape.ranks, &classes),
            false => Some(Ways::links(topology, options)),
        };
        let Some(ways) = ways else { continue };
        if !classes.hold(&mut look, topology, program) {
            continue;
        }
        outcome = Run::new(topology, (classes, &shape), ways, &mut look, options)?.turn(&shape);
        // A folding that does not come to its end was none, although it looked like one.
        if outcome.is_ok() || classes.count() == shape.ranks {
            break;
        }
    }
    outcome
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Fault(u32),
    Ends { flow: u32, generation: u32 },
    Begins(u32),
}

/// What a flow carries.
#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    start: Start,
    latency: u64,
    generation: u32,
}

struct Run<'a, 'b> {
    topology: &'a Topology,
    classes: Classes,
    ways: Ways<'a>,
    options: &'a FlowOptions,
    steps: Steps<'a, 'b>,
    solver: Solver,
    carried: Vec<Carried>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    uses: Vec<Use>,
    flows: u64,
    happened: u64,
}

impl<'a, 'b> Run<'a, 'b> {
    fn new(
        topology: &'a Topology,
        (classes, shape): (Classes, &Shape),
        ways: Ways<'a>,
        look: &'a mut Look<'b>,
        options: &'a FlowOptions,
    ) -> Result<Run<'a, 'b>, FlowError> {
        let mut events = BinaryHeap::new();
        for (nth, fault) in options.faults.iter().enumerate() {
            ways.resource_of(topology, fault.link)?;
            events.push(Reverse((fault.from.as_ps(), Event::Fault(2 * nth as u32))));
            if fault.until < Picos::MAX {
                events.push(Reverse((fault.until.as_ps(), Event::Fault(2 * nth as u32 + 1))));
            }
        }
        let pace = Pace {
            reduction: options.reduction,
            copy: options.copy,
            traced_ranks: options.traced_ranks,
        };
        Ok(Run {
            topology,
            classes,
            options,
            steps: Steps::new(classes, look, shape.steps, pace),
            solver: ways.solver(topology),
            ways,
            carried: Vec::new(),
            events,
            uses: Vec::new(),
            flows: 0,
            happened: 0,
        })
    }

    fn turn(mut self, shape: &Shape) -> Result<Report, FlowError> {
        let mut changes: Vec<Change> = Vec::new();
        self.go_on(0);
        while let Some(&Reverse((now, _))) = self.events.peek() {
            while let Some(&Reverse((at, event))) = self.events.peek()
                && at == now
            {
                self.events.pop();
                match event {
                    Event::Fault(nth) => self.fault(nth),
                    Event::Ends { flow, generation } => {
                        if self.carried[flow as usize].generation != generation {
                            continue;
                        }
                        self.arrive(FlowId(flow), now);
                    }
                    Event::Begins(actor) => self.steps.begin(actor, now),
                }
                self.happened += 1;
                self.go_on(now);
            }
            if self.steps.left == 0 {
                break;
            }
            changes.clear();
            self.solver.solve(now, &mut changes);
            for change in &changes {
                let carried = &mut self.carried[change.flow.0 as usize];
                carried.generation = carried.generation.wrapping_add(1);
                if let Some(at) = change.ends {
                    let (flow, generation) = (change.flow.0, carried.generation);
                    self.events.push(Reverse((at, Event::Ends { flow, generation })));
                }
            }
        }
        if self.steps.left > 0 {
            let waiting = self.steps.left;
            return Err(RunError::NeverEnds { waiting }.into());
        }
        let time = Picos::from_ps(self.steps.last);
        let alike = u64::from(shape.ranks / self.classes.count());
        Ok(Report {
            time,
            messages: self.steps.sent * alike,
            flows: self.flows,
            events: self.happened,
            solved: self.solver.solved(),
            classes: self.classes.count(),
            ranks: shape.ranks,
            hot: hot_spots(self.topology, &self.ways, &self.solver, time),
            spans: std::mem::take(&mut self.steps.spans),
            message_spans: std::mem::take(&mut self.steps.message_spans),
            carried: match self.options.by_link {
                true => carried_by_link(self.topology, &self.ways, &self.solver, &self.classes, shape.ranks),
                false => Vec::new(),
            },
        })
    }

    /// Lets everything begin that can.
    fn go_on(&mut self, now: u64) {
        while let Some(start) = self.steps.starts.pop() {
            self.carry(start, now);
        }
        while let Some((at, actor)) = self.steps.wakes.pop() {
            self.events.push(Reverse((at, Event::Begins(actor))));
        }
    }

    fn fault(&mut self, nth: u32) {
        let fault = self.options.faults[(nth / 2) as usize];
        let Ok(Some((resource, share))) = self.ways.resource_of(self.topology, fault.link) else {
            return;
        };
        let link = rate(self.topology.wire(fault.link).bandwidth);
        let left = if nth.is_multiple_of(2) {
            fault.left.clamp(0.0, 1.0)
        } else {
            1.0
        };
        self.solver.set_capacity(resource, link / share - link * (1.0 - left));
    }

    /// Messages whose ends have both come.
    fn carry(&mut self, start: Start, now: u64) {
        let Start { from, to, level, .. } = start;
        let mut uses = std::mem::take(&mut self.uses);
        let latency = match self.classes.levels() {
            true => self.ways.class_uses(from, to, level, f64::from(start.count), &mut uses),
            false => {
                let ends = (Rank(from), Rank(to));
                self.ways.rank_uses(ends, start.channel.into(), &self.solver, &mut uses)
            }
        };
        let latency = latency.saturating_add(self.options.message_overhead).as_ps();
        if start.bytes == 0.0 {
            self.steps.arrived(&start, now.saturating_add(latency));
        } else {
            if !self.classes.levels() {
                // By links, several messages between two ranks are as many flows.
                uses.iter_mut().for_each(|one| one.weight *= f64::from(start.count));
            }
            let flow = self.solver.add(&uses, start.bytes, now);
            self.flows += 1;
            let place = flow.0 as usize;
            if place >= self.carried.len() {
                self.carried.resize(place + 1, Carried::default());
            }
            let generation = self.carried[place].generation.wrapping_add(1);
            self.carried[place] = Carried {
                start,
                latency,
                generation,
            };
        }
        self.uses = uses;
    }

    /// The last byte of a flow has been sent.
    fn arrive(&mut self, flow: FlowId, now: u64) {
        self.solver.remove(flow);
        let carried = &mut self.carried[flow.0 as usize];
        carried.generation = carried.generation.wrapping_add(1);
        let Carried { start, latency, .. } = *carried;
        self.steps.arrived(&start, now.saturating_add(latency));
    }
}
