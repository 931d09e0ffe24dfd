//! Max-min fair rates, kept up to date as flows come and go.
//!
//! Every flow gets as much as any other that shares its narrowest resource. When flows come, end, or a capacity changes, only what
//! can feel it is solved again: the flows that are connected with the change through resources that could be filled at all. A resource
//! that is wide enough for the most that its flows could ever ask connects nobody, which in a network that blocks nothing leaves components of
//! a flow or two.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Bytes in a picosecond.
pub(crate) type Rate = f64;

/// How much of a resource a flow takes for each unit of its rate. More than one stands for several flows that are alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Use {
    pub(crate) resource: u32,
    pub(crate) weight: f64,
}

/// A flow in the solver; numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FlowId(pub(crate) u32);

#[derive(Clone, Debug)]
struct Resource {
    capacity: Rate,
    /// What its flows would take if nothing else held them back.
    demand: Rate,
    /// Flows, and which of their uses this is.
    members: Vec<(u32, u32)>,
    /// Could be filled, now or when last solved.
    was_tight: bool,
    dirty: bool,
    /// In which round it was last looked at.
    round: u32,
    left: Rate,
    weight: f64,
    /// Members that have no rate yet.
    open: u32,
    carried: f64,
    most: u32,
}

#[derive(Clone, Debug, Default)]
struct Flow {
    uses: Vec<Use>,
    /// Where in its resource's members each use stands.
    places: Vec<u32>,
    /// The most that its resources would give it alone.
    limit: Rate,
    rate: Rate,
    next: Rate,
    bytes: f64,
    left: f64,
    since: u64,
    round: u32,
    frozen: bool,
    live: bool,
}

/// Flows, resources, and the rates that are fair.
#[derive(Clone, Debug, Default)]
pub(crate) struct Solver {
    resources: Vec<Resource>,
    flows: Vec<Flow>,
    free: Vec<u32>,
    dirty: Vec<u32>,
    fresh: Vec<u32>,
    round: u32,
    component: Vec<u32>,
    tight: Vec<u32>,
    shares: BinaryHeap<Share>,
    solved: u64,
}

/// A flow whose rate has changed, and when it will end if it does not change again; `None` where it stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) flow: FlowId,
    pub(crate) ends: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Share {
    level: Rate,
    resource: u32,
}

/// Rounding must not make a resource look narrower than its flows together.
const SLACK: f64 = 1.0 + 1e-9;

impl Solver {
    pub(crate) fn new(capacities: impl IntoIterator<Item = Rate>) -> Solver {
        let resources = capacities.into_iter().map(|capacity| Resource {
            capacity,
            demand: 0.0,
            members: Vec::new(),
            was_tight: false,
            dirty: false,
            round: 0,
            left: 0.0,
            weight: 0.0,
            open: 0,
            carried: 0.0,
            most: 0,
        });
        Solver {
            resources: resources.collect(),
            ..Solver::default()
        }
    }

    pub(crate) fn resources(&self) -> u32 {
        self.resources.len() as u32
    }
    pub(crate) fn capacity(&self, resource: u32) -> Rate {
        self.resources[resource as usize].capacity
    }
    /// Bytes that ended flows have brought over a resource.
    pub(crate) fn carried(&self, resource: u32) -> f64 {
        self.resources[resource as usize].carried
    }
    /// The most flows that were on it at once, those that are alike counted as one.
    pub(crate) fn most(&self, resource: u32) -> u32 {
        self.resources[resource as usize].most
    }
    /// How full a resource would be if its flows took what they could.
    pub(crate) fn pressure(&self, resource: u32) -> f64 {
        let resource = &self.resources[resource as usize];
        resource.demand / resource.capacity
    }
    /// How many flows were given a rate, each time counted.
    pub(crate) fn solved(&self) -> u64 {
        self.solved
    }

    /// Begins a flow. It has no rate before the next [`Solver::solve`].
    pub(crate) fn add(&mut self, uses: &[Use], bytes: f64, now: u64) -> FlowId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.flows.push(Flow::default());
            (self.flows.len() - 1) as u32
        });
        let flow = &mut self.flows[id as usize];
        flow.uses.clear();
        for one in uses {
            match flow.uses.iter_mut().find(|other| other.resource == one.resource) {
                Some(other) => other.weight += one.weight,
                None => flow.uses.push(*one),
            }
        }
        flow.places.clear();
        (flow.bytes, flow.left, flow.since) = (bytes, bytes, now);
        (flow.rate, flow.live, flow.round) = (0.0, true, 0);
        flow.limit = limit(&self.resources, &flow.uses);
        for (nth, one) in flow.uses.iter().enumerate() {
            let resource = &mut self.resources[one.resource as usize];
            flow.places.push(resource.members.len() as u32);
            resource.members.push((id, nth as u32));
            resource.most = resource.most.max(resource.members.len() as u32);
            resource.demand += one.weight * flow.limit;
            touch(&mut self.dirty, resource, one.resource);
        }
        self.fresh.push(id);
        FlowId(id)
    }

    /// Ends a flow, whatever is left of it.
    pub(crate) fn remove(&mut self, id: FlowId) {
        let mut flow = std::mem::take(&mut self.flows[id.0 as usize]);
        for (one, &place) in flow.uses.iter().zip(&flow.places) {
            let resource = &mut self.resources[one.resource as usize];
            resource.members.swap_remove(place as usize);
            if let Some(&(moved, nth)) = resource.members.get(place as usize) {
                self.flows[moved as usize].places[nth as usize] = place;
            }
            resource.demand = match resource.members.is_empty() {
                true => 0.0,
                false => resource.demand - one.weight * flow.limit,
            };
            resource.carried += flow.bytes * one.weight;
            touch(&mut self.dirty, resource, one.resource);
        }
        flow.live = false;
        self.flows[id.0 as usize] = flow;
        self.free.push(id.0);
    }

    pub(crate) fn set_capacity(&mut self, id: u32, capacity: Rate) {
        self.resources[id as usize].capacity = capacity;
        let members = self.resources[id as usize].members.clone();
        touch(&mut self.dirty, &mut self.resources[id as usize], id);
        self.resources[id as usize].was_tight = true;
        for (member, _) in members {
            let flow = &mut self.flows[member as usize];
            let (before, after) = (flow.limit, limit(&self.resources, &flow.uses));
            flow.limit = after;
            for one in &flow.uses {
                let resource = &mut self.resources[one.resource as usize];
                resource.demand += one.weight * (after - before);
                resource.was_tight = true;
                touch(&mut self.dirty, resource, one.resource);
            }
        }
    }

    /// Gives every flow that can feel what has changed its fair rate, and tells of those whose rate is another now.
    pub(crate) fn solve(&mut self, now: u64, changes: &mut Vec<Change>) {
        self.round = self.round.wrapping_add(1).max(1);
        self.gather();
        self.fill();
        self.solved += self.component.len() as u64;
        for &id in &self.component {
            let flow = &mut self.flows[id as usize];
            if (flow.next - flow.rate).abs() <= flow.rate * 1e-12 && flow.rate > 0.0 {
                continue;
            }
            flow.left = (flow.left - flow.rate * (now - flow.since) as f64).max(0.0);
            flow.since = now;
            flow.rate = flow.next;
            let takes = (flow.left / flow.rate).ceil();
            changes.push(Change {
                flow: FlowId(id),
                ends: (takes < u64::MAX as f64).then(|| now.saturating_add(takes as u64)),
            });
        }
    }

    /// Collects the flows that can feel the changes since the last time, and the resources that connect them.
    fn gather(&mut self) {
        self.component.clear();
        self.tight.clear();
        for id in std::mem::take(&mut self.fresh) {
            self.join(id);
        }
        for id in std::mem::take(&mut self.dirty) {
            let resource = &mut self.resources[id as usize];
            resource.dirty = false;
            if resource.was_tight || resource.is_tight() {
                self.visit(id);
            }
        }
        let mut next = 0;
        while let Some(&id) = self.component.get(next) {
            next += 1;
            for nth in 0..self.flows[id as usize].uses.len() {
                let resource = self.flows[id as usize].uses[nth].resource;
                if self.resources[resource as usize].is_tight() {
                    self.visit(resource);
                }
            }
        }
    }

    fn join(&mut self, id: u32) {
        let flow = &mut self.flows[id as usize];
        if flow.live && flow.round != self.round {
            flow.round = self.round;
            flow.frozen = false;
            self.component.push(id);
        }
    }

    fn visit(&mut self, id: u32) {
        let resource = &mut self.resources[id as usize];
        if resource.round == self.round {
            return;
        }
        resource.round = self.round;
        resource.was_tight = resource.is_tight();
        if resource.was_tight {
            self.tight.push(id);
        }
        for nth in 0..resource.members.len() {
            let (member, _) = self.resources[id as usize].members[nth];
            self.join(member);
        }
    }

    /// Raises all rates together, and lets those flows stay behind whose resource is full or that cannot go faster.
    fn fill(&mut self) {
        if self.tight.is_empty() {
            for &id in &self.component {
                let flow = &mut self.flows[id as usize];
                flow.next = flow.limit;
            }
            return;
        }
        self.shares.clear();
        for &id in &self.tight {
            let resource = &mut self.resources[id as usize];
            resource.left = resource.capacity;
            let weight = |&(member, nth): &(u32, u32)| self.flows[member as usize].uses[nth as usize].weight;
            resource.weight = resource.members.iter().map(weight).sum();
            resource.open = resource.members.len() as u32;
            let level = resource.left / resource.weight;
            self.shares.push(Share { level, resource: id });
        }
        let flows = &self.flows;
        let by_limit = |a: &u32, b: &u32| {
            let (first, second) = (&flows[*a as usize], &flows[*b as usize]);
            first.limit.total_cmp(&second.limit).then(a.cmp(b))
        };
        self.component.sort_unstable_by(by_limit);
        let mut slowest = 0;
        while let Some(Share { level, resource }) = self.shares.pop() {
            // Whoever cannot reach this level stays behind first.
            while let Some(&id) = self.component.get(slowest)
                && self.flows[id as usize].limit <= level
            {
                slowest += 1;
                let limit = self.flows[id as usize].limit;
                self.freeze(id, limit);
            }
            let entry = &self.resources[resource as usize];
            if entry.open == 0 {
                continue;
            }
            let now = entry.left.max(0.0) / entry.weight;
            if now > level * SLACK {
                // Others have stayed behind meanwhile, so that more is left for the rest.
                self.shares.push(Share { level: now, resource });
                continue;
            }
            for nth in 0..entry.members.len() {
                let (member, _) = self.resources[resource as usize].members[nth];
                self.freeze(member, now);
            }
        }
        while let Some(&id) = self.component.get(slowest) {
            slowest += 1;
            let limit = self.flows[id as usize].limit;
            self.freeze(id, limit);
        }
    }

    fn freeze(&mut self, id: u32, rate: Rate) {
        let flow = &mut self.flows[id as usize];
        if std::mem::replace(&mut flow.frozen, true) {
            return;
        }
        flow.next = rate;
        for one in &flow.uses {
            let resource = &mut self.resources[one.resource as usize];
            if resource.round == self.round && resource.was_tight {
                resource.left -= rate * one.weight;
                resource.weight -= one.weight;
                resource.open -= 1;
            }
        }
    }
}

impl Resource {
    fn is_tight(&self) -> bool {
        self.demand > self.capacity * SLACK
    }
}

fn touch(dirty: &mut Vec<u32>, resource: &mut Resource, id: u32) {
    if !std::mem::replace(&mut resource.dirty, true) {
        dirty.push(id);
    }
}

fn limit(resources: &[Resource], uses: &[Use]) -> Rate {
    let alone = |one: &Use| resources[one.resource as usize].capacity / one.weight;
    uses.iter().map(alone).fold(Rate::MAX, Rate::min)
}

// The lowest level first.
impl Ord for Share {
    fn cmp(&self, other: &Share) -> Ordering {
        let by_level = other.level.total_cmp(&self.level);
        by_level.then(other.resource.cmp(&self.resource))
    }
}
impl PartialOrd for Share {
    fn partial_cmp(&self, other: &Share) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Share {
    fn eq(&self, other: &Share) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Share {}

#[cfg(test)]
mod tests;
