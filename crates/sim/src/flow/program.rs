//! A call on the network: every class of ranks executes it, and every message is a flow.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use weft_model::fabric::{Routing, Topology};
use weft_plan::collective::Problem;
use weft_plan::schedule::{Program, Shape};
use weft_plan::{Bytes, Picos, Rank};

use super::report::{Report, carried_by_link, hot_spots};
use super::solver::{Change, FlowId, Solver, Use};
use super::ways::{Ways, bundled, rate};
use super::{FlowError, FlowOptions, Folding};
use crate::checks::{RunError, has_room};
use crate::execution::classes::Classes;
use crate::execution::look::Look;
use crate::execution::{Conduct, Execution, Plans, Start, Symmetry, Trust, Wake};

/// More ranks × steps than this are not followed one by one.
const FOLLOWED_MAX: u64 = 1 << 33;
/// So many ops are followed in order that ranks need not stand for others that do the same in other orders.
const FINER_MAX: u64 = 1 << 20;

pub(super) fn run(
    topology: &Topology,
    problem: &Problem,
    program: &dyn Program,
    bytes: Bytes,
    options: &FlowOptions,
) -> Result<Report, FlowError> {
    let shape = program.shape();
    has_room(topology, &shape)?;
    let look = &mut Look::new(topology, problem, program, bytes.0)?;
    let candidates = match uses_bundles(topology, options) {
        // What is different at one link is different for whoever uses it.
        true if options.folding == Folding::Never || !options.faults.is_empty() => vec![Classes::each(shape.ranks)],
        true => Classes::candidates(topology, shape.ranks),
        false => vec![Classes::by_links(shape.ranks)],
    };
    let mut outcome = Err(FlowError::TooLarge {
        ranks: shape.ranks,
        steps: shape.steps,
    });
    // The coarsest folding of ranks that do the same in other orders.
    let mut rough: Option<(Classes, Ways<'_>, Plans)> = None;
    for classes in candidates {
        let count = u64::from(classes.count());
        let too_fine = |(_, _, plans): &(Classes, Ways<'_>, Plans)| count * plans.mean_ops() > FINER_MAX;
        if count * u64::from(shape.steps) > FOLLOWED_MAX || rough.as_ref().is_some_and(too_fine) {
            break;
        }
        let Some(ways) = ways(topology, shape.ranks, &classes, options) else {
            continue;
        };
        if !classes.hold(look, topology, program) {
            continue;
        }
        let plans = Plans::new(look, &classes, Trust::Alike)?;
        if plans.rough {
            rough.get_or_insert((classes, ways, plans));
            match options.folding {
                Folding::Rough => break,
                Folding::Alike | Folding::Never => continue,
            }
        }
        outcome = execute(topology, (classes, ways), (look, plans), options);
        // A folding that does not come to its end was none, although it looked like one.
        if outcome.is_ok() || classes.count() == shape.ranks {
            return outcome;
        }
    }
    match rough {
        Some((classes, ways, mut plans)) if options.folding != Folding::Never => {
            plans.crowd();
            execute(topology, (classes, ways), (look, plans), options)
        }
        Some(_) | None => outcome,
    }
}

/// Whether flows use bundles of links, all of them alike.
fn uses_bundles(topology: &Topology, options: &FlowOptions) -> bool {
    topology.top().is_some() && options.routing == Routing::Spray
}

/// What the flows of classes use; `None` where the network does not look the same from all ranks of one.
fn ways<'a>(topology: &'a Topology, ranks: u32, classes: &Classes, options: &FlowOptions) -> Option<Ways<'a>> {
    match uses_bundles(topology, options) {
        true => bundled(topology, ranks, classes),
        false => Some(Ways::links(topology, options)),
    }
}

/// Lets classes of ranks execute what they have to.
fn execute(
    topology: &Topology,
    (classes, ways): (Classes, Ways<'_>),
    (look, mut plans): (&mut Look<'_>, Plans),
    options: &FlowOptions,
) -> Result<Report, FlowError> {
    let shape = look.program().shape();
    let mut symmetry = Symmetry::Shifted;
    loop {
        let mut run = Run::new(topology, (classes, symmetry), ways.clone(), (look, &plans), options)?;
        let outcome = run.turn(&shape);
        if run.execution.unlike && plans.trust == Trust::Alike {
            // A class does something else than those that it was thought to be like.
            let rough = plans.rough;
            plans = Plans::new(look, &classes, Trust::Nobody)?;
            plans.rough = rough;
            if rough {
                plans.crowd();
            }
        } else if outcome.is_err() && classes.count() < shape.ranks && symmetry == Symmetry::Shifted {
            symmetry = Symmetry::Mirrored;
        } else {
            return outcome.map(|report| Report {
                rough: plans.rough,
                ..report
            });
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Fault(u32),
    Ends { flow: u32, generation: u32 },
    Happens(Wake),
}

/// What a flow carries.
#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    message: u32,
    latency: u64,
    generation: u32,
}

struct Run<'a, 'b> {
    topology: &'a Topology,
    classes: Classes,
    ways: Ways<'a>,
    options: &'a FlowOptions,
    execution: Execution<'a, 'b>,
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
        (classes, symmetry): (Classes, Symmetry),
        ways: Ways<'a>,
        (look, plans): (&'a mut Look<'b>, &'a Plans),
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
        let conduct = Conduct {
            eager: options.eager,
            reduction: options.reduction,
            copy: options.copy,
            traced_ranks: options.traced_ranks,
            ends: false,
        };
        Ok(Run {
            topology,
            classes,
            options,
            execution: Execution::new(classes, (look, plans), symmetry, &conduct),
            solver: ways.solver(topology),
            ways,
            carried: Vec::new(),
            events,
            uses: Vec::new(),
            flows: 0,
            happened: 0,
        })
    }

    fn turn(&mut self, shape: &Shape) -> Result<Report, FlowError> {
        let mut changes: Vec<Change> = Vec::new();
        self.go_on(0);
        self.solve(0, &mut changes);
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
                        self.leave(FlowId(flow), now);
                    }
                    Event::Happens(wake) => self.execution.happen(wake, now),
                }
                self.happened += 1;
                self.go_on(now);
            }
            if self.execution.left == 0 || self.execution.unlike {
                break;
            }
            self.solve(now, &mut changes);
        }
        if self.execution.left > 0 || self.execution.unlike {
            let waiting = self.execution.left;
            return Err(RunError::NeverEnds { waiting }.into());
        }
        let time = Picos::from_ps(self.execution.last);
        let alike = u64::from(shape.ranks / self.classes.count());
        Ok(Report {
            time,
            messages: self.execution.sent * alike,
            flows: self.flows,
            events: self.happened,
            solved: self.solver.solved(),
            classes: self.classes.count(),
            rough: false,
            ranks: shape.ranks,
            hot: hot_spots(self.topology, &self.ways, &self.solver, time),
            spans: std::mem::take(&mut self.execution.spans.steps),
            message_spans: std::mem::take(&mut self.execution.spans.messages),
            carried: match self.options.by_link {
                true => carried_by_link(self.topology, &self.ways, &self.solver, &self.classes, shape.ranks),
                false => Vec::new(),
            },
        })
    }

    /// Gives flows their rates, and notes when they end.
    fn solve(&mut self, now: u64, changes: &mut Vec<Change>) {
        changes.clear();
        self.solver.solve(now, changes);
        for change in changes {
            let carried = &mut self.carried[change.flow.0 as usize];
            carried.generation = carried.generation.wrapping_add(1);
            if let Some(at) = change.ends {
                let (flow, generation) = (change.flow.0, carried.generation);
                self.events.push(Reverse((at, Event::Ends { flow, generation })));
            }
        }
    }

    /// Lets everything begin that can.
    fn go_on(&mut self, now: u64) {
        while let Some(message) = self.execution.starts.pop() {
            self.carry(message, now);
        }
        while let Some((at, wake)) = self.execution.wakes.pop() {
            self.events.push(Reverse((at, Event::Happens(wake))));
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

    /// Messages that begin.
    fn carry(&mut self, message: u32, now: u64) {
        let start = self.execution.start(message);
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
            self.execution.has_left(message, now, latency);
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
                message,
                latency,
                generation,
            };
        }
        self.uses = uses;
    }

    /// The last byte of a flow has been sent.
    fn leave(&mut self, flow: FlowId, now: u64) {
        self.solver.remove(flow);
        let carried = &mut self.carried[flow.0 as usize];
        carried.generation = carried.generation.wrapping_add(1);
        let Carried { message, latency, .. } = *carried;
        self.execution.has_left(message, now, latency);
    }
}
