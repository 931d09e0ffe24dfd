use super::*;
use weft_protocol::seeded::Seeded;

/// Resources that are named by their position, and flows over them.
struct Case {
    solver: Solver,
    now: u64,
}

impl Case {
    fn new(capacities: &[Rate]) -> Case {
        Case {
            solver: Solver::new(capacities.iter().copied()),
            now: 0,
        }
    }
    fn flow(&mut self, resources: &[u32]) -> FlowId {
        self.weighted(resources, 1.0)
    }
    fn weighted(&mut self, resources: &[u32], weight: f64) -> FlowId {
        let uses: Vec<Use> = resources.iter().map(|&resource| Use { resource, weight }).collect();
        self.solver.add(&uses, 1e6, self.now)
    }
    fn rates(&mut self, flows: &[FlowId]) -> Vec<Rate> {
        self.solver.solve(self.now, &mut Vec::new());
        flows
            .iter()
            .map(|flow| self.solver.flows[flow.0 as usize].rate)
            .collect()
    }
}

#[test]
fn two_share_a_link_and_a_third_is_elsewhere() {
    let mut case = Case::new(&[10.0, 10.0]);
    let flows = [case.flow(&[0]), case.flow(&[0]), case.flow(&[1])];
    assert_eq!(case.rates(&flows), [5.0, 5.0, 10.0]);
    // The third is not looked at again when one of the others ends.
    let before = case.solver.solved();
    case.solver.remove(flows[0]);
    assert_eq!(case.rates(&flows[1..]), [10.0, 10.0]);
    assert_eq!(case.solver.solved() - before, 1);
}

#[test]
fn a_parking_lot() {
    // One long flow over three links and a short one on each; the last link is wider.
    let mut case = Case::new(&[12.0, 12.0, 30.0]);
    let long = case.flow(&[0, 1, 2]);
    let short = [case.flow(&[0]), case.flow(&[1]), case.flow(&[2])];
    assert_eq!(case.rates(&[long]), [6.0]);
    assert_eq!(case.rates(&short), [6.0, 6.0, 24.0]);
    // Two more on the second link make it the narrowest: the long flow gives way, and its neighbours gain.
    let more = [case.flow(&[1]), case.flow(&[1])];
    assert_eq!(case.rates(&[long, more[0], more[1]]), [3.0, 3.0, 3.0]);
    assert_eq!(case.rates(&short), [9.0, 3.0, 27.0]);
}

#[test]
fn what_one_cannot_take_others_get() {
    // The first flow is held back elsewhere.
    let mut case = Case::new(&[2.0, 12.0]);
    let flows = [case.flow(&[0, 1]), case.flow(&[1]), case.flow(&[1])];
    assert_eq!(case.rates(&flows), [2.0, 5.0, 5.0]);
}

#[test]
fn weights_are_several_flows_alike() {
    let mut case = Case::new(&[12.0]);
    let flows = [case.weighted(&[0], 3.0), case.flow(&[0])];
    assert_eq!(case.rates(&flows), [3.0, 3.0]);
}

#[test]
fn a_flow_that_comes_in_the_middle_slows_the_first_down() {
    // 1000 bytes at 10 a picosecond; after 50 ps a second one comes, after which both have 5.
    let mut solver = Solver::new([10.0]);
    let one = [Use {
        resource: 0,
        weight: 1.0,
    }];
    let mut changes = Vec::new();
    let first = solver.add(&one, 1000.0, 0);
    solver.solve(0, &mut changes);
    assert_eq!(
        changes,
        [Change {
            flow: first,
            ends: Some(100)
        }]
    );
    changes.clear();
    let second = solver.add(&one, 250.0, 50);
    solver.solve(50, &mut changes);
    changes.sort_by_key(|change| change.flow);
    assert_eq!(
        changes,
        [
            Change {
                flow: first,
                ends: Some(150)
            },
            Change {
                flow: second,
                ends: Some(100)
            }
        ]
    );
    changes.clear();
    solver.remove(second);
    solver.solve(100, &mut changes);
    // 250 bytes are left, at 10 again.
    assert_eq!(
        changes,
        [Change {
            flow: first,
            ends: Some(125)
        }]
    );
}

#[test]
fn a_cable_that_is_pulled_stops_its_flows_only() {
    let mut case = Case::new(&[10.0, 10.0]);
    let flows = [case.flow(&[0]), case.flow(&[1])];
    case.rates(&flows);
    case.solver.set_capacity(0, 0.0);
    let mut changes = Vec::new();
    case.solver.solve(5, &mut changes);
    assert_eq!(
        changes,
        [Change {
            flow: flows[0],
            ends: None
        }]
    );
    changes.clear();
    case.solver.set_capacity(0, 5.0);
    case.solver.solve(6, &mut changes);
    assert_eq!(changes.len(), 1);
    assert_eq!(case.rates(&flows), [5.0, 10.0]);
}

/// No flow can have more without taking it from one that has no more than itself: each has a full resource on which none is faster.
fn is_max_min(solver: &Solver) -> bool {
    let used = |id: usize| -> f64 {
        let members = solver.resources[id].members.iter();
        members
            .map(|&(flow, nth)| {
                solver.flows[flow as usize].rate * solver.flows[flow as usize].uses[nth as usize].weight
            })
            .sum()
    };
    let fits = (0..solver.resources.len()).all(|id| used(id) <= solver.resources[id].capacity * (1.0 + 1e-6));
    let live = solver.flows.iter().filter(|flow| flow.live);
    fits && live.into_iter().all(|flow| {
        flow.uses.iter().any(|one| {
            let resource = &solver.resources[one.resource as usize];
            let full = used(one.resource as usize) >= resource.capacity * (1.0 - 1e-6);
            let rates = resource
                .members
                .iter()
                .map(|&(other, _)| solver.flows[other as usize].rate);
            full && rates.fold(0.0, Rate::max) <= flow.rate * (1.0 + 1e-6)
        })
    })
}

#[test]
fn rates_stay_fair_whatever_comes_and_goes() {
    for seed in 0..60 {
        let mut chance = Seeded::new(seed);
        let resources = 2 + chance.below(12) as u32;
        let mut solver = Solver::new(
            (0..resources)
                .map(|_| 1.0 + chance.below(20) as f64)
                .collect::<Vec<_>>(),
        );
        let mut live = Vec::new();
        for now in 0..120 {
            if live.len() > 2 && chance.below(3) == 0 {
                let gone = live.swap_remove(chance.below(live.len() as u64) as usize);
                solver.remove(gone);
            } else {
                let uses: Vec<Use> = (0..1 + chance.below(4))
                    .map(|_| Use {
                        resource: chance.below(resources.into()) as u32,
                        weight: 1.0 + chance.below(2) as f64,
                    })
                    .collect();
                live.push(solver.add(&uses, 1e9, now));
            }
            if chance.below(2) == 0 {
                solver.solve(now, &mut Vec::new());
                assert!(is_max_min(&solver), "seed {seed}, time {now}");
            }
        }
    }
}
