//! Dragonfly and dragonfly+: groups with links from each to each other.
//!
//! The switches of a group that have links to other groups are its *gates*: all routers of a dragonfly, the spines of a dragonfly+. The links that leave
//! a group are dealt out in turn: the nth goes to the group `1 + n mod (groups - 1)` further. The shortest ways are one for each parallel
//! link between two groups; detours lead through a third group.

use super::error::{moves, numbered, within};
use super::network::{Link, LinkId, Vertex};
use super::{FabricError, Wire};
use weft_plan::units::Bandwidth;

#[derive(Clone, Copy, Debug)]
pub(super) struct Dragonfly {
    groups: u32,
    /// Switches of a group that have ports.
    leaves: u32,
    /// Switches of a group that have links to other groups; in a dragonfly, the leaves themselves.
    gates: u32,
    plus: bool,
    hosts: u32,
    global: u32,
    /// Parallel links between each two groups.
    parallel: u32,
    wire: Wire,
    global_wire: Wire,
}

impl Dragonfly {
    pub(super) fn new(
        (groups, routers, hosts, global): (u32, u32, u32, u32),
        wire: Wire,
        global_wire: Wire,
    ) -> Result<Dragonfly, FabricError> {
        within("routers", routers, 1, 1 << 12)?;
        Dragonfly::of((groups, routers, routers, hosts, global), false, wire, global_wire)
    }

    pub(super) fn plus(
        (groups, leaves, spines, hosts, global): (u32, u32, u32, u32, u32),
        wire: Wire,
        global_wire: Wire,
    ) -> Result<Dragonfly, FabricError> {
        within("leaves", leaves, 1, 1 << 12)?;
        within("spines", spines, 1, 1 << 12)?;
        Dragonfly::of((groups, leaves, spines, hosts, global), true, wire, global_wire)
    }

    fn of(
        (groups, leaves, gates, hosts, global): (u32, u32, u32, u32, u32),
        plus: bool,
        wire: Wire,
        global_wire: Wire,
    ) -> Result<Dragonfly, FabricError> {
        within("hosts", hosts, 1, 1 << 12)?;
        within("global", global, 1, 1 << 12)?;
        within("groups", groups, 2, u64::from(gates) * u64::from(global) + 1)?;
        moves("wire", wire)?;
        moves("global_wire", global_wire)?;
        let dragonfly = Dragonfly {
            groups,
            leaves,
            gates,
            plus,
            hosts,
            global,
            parallel: gates * global / (groups - 1),
            wire,
            global_wire,
        };
        let ports = u64::from(groups) * u64::from(leaves) * u64::from(hosts);
        numbered("groups", 2 * ports)?;
        let local = u64::from(groups) * u64::from(dragonfly.local_links());
        let across = u64::from(groups) * u64::from(groups - 1) * u64::from(dragonfly.parallel);
        numbered("groups", 2 * ports + local + across)?;
        Ok(dragonfly)
    }

    /// Links within a group.
    fn local_links(&self) -> u32 {
        match self.plus {
            true => 2 * self.leaves * self.gates,
            false => self.leaves * (self.leaves - 1),
        }
    }
    fn first_local(&self) -> u32 {
        2 * self.ports()
    }
    fn first_global(&self) -> u32 {
        self.first_local() + self.groups * self.local_links()
    }
    fn group_global(&self) -> u32 {
        (self.groups - 1) * self.parallel
    }

    pub(super) fn ports(&self) -> u32 {
        self.groups * self.leaves * self.hosts
    }
    pub(super) fn links(&self) -> u32 {
        self.first_global() + self.groups * self.group_global()
    }

    fn leaf_vertex(&self, group: u32, leaf: u32) -> u32 {
        self.ports() + group * self.leaves + leaf
    }
    fn gate_vertex(&self, group: u32, gate: u32) -> u32 {
        match self.plus {
            true => self.ports() + self.groups * self.leaves + group * self.gates + gate,
            false => self.leaf_vertex(group, gate),
        }
    }

    /// The group and the number there of the other end of a group's nth link to others.
    fn far_end(&self, group: u32, nth: u32) -> (u32, u32) {
        let (turn, by) = (nth / (self.groups - 1), nth % (self.groups - 1));
        let far = (group + 1 + by) % self.groups;
        (far, turn * (self.groups - 1) + self.groups - 2 - by)
    }
    /// The number of the nth parallel link from a group to another.
    fn towards(&self, group: u32, far: u32, nth: u32) -> u32 {
        let by = (far + self.groups - group - 1) % self.groups;
        nth * (self.groups - 1) + by
    }

    pub(super) fn link(&self, link: u32) -> Link {
        let wire = if link < self.first_global() {
            self.wire
        } else {
            self.global_wire
        };
        let (from, to) = self.ends(link);
        Link {
            from: Vertex(from),
            to: Vertex(to),
            bandwidth: wire.bandwidth,
            latency: wire.latency,
        }
    }

    fn ends(&self, link: u32) -> (u32, u32) {
        let ports = self.ports();
        if link < 2 * ports {
            let port = link % ports;
            let switch = self.ports() + port / self.hosts;
            return if link < ports { (port, switch) } else { (switch, port) };
        }
        if let Some(nth) = link.checked_sub(self.first_global()) {
            let (group, nth) = (nth / self.group_global(), nth % self.group_global());
            let (far, there) = self.far_end(group, nth);
            return (
                self.gate_vertex(group, nth / self.global),
                self.gate_vertex(far, there / self.global),
            );
        }
        let nth = link - self.first_local();
        let (group, nth) = (nth / self.local_links(), nth % self.local_links());
        if self.plus {
            let cables = self.leaves * self.gates;
            let (rises, nth) = (nth < cables, nth % cables);
            let leaf = self.leaf_vertex(group, nth / self.gates);
            let gate = self.gate_vertex(group, nth % self.gates);
            return if rises { (leaf, gate) } else { (gate, leaf) };
        }
        let (from, nth) = (nth / (self.leaves - 1), nth % (self.leaves - 1));
        let to = nth + u32::from(nth >= from);
        (self.leaf_vertex(group, from), self.leaf_vertex(group, to))
    }

    fn place(&self, port: u32) -> (u32, u32) {
        let switch = port / self.hosts;
        (switch / self.leaves, switch % self.leaves)
    }

    pub(super) fn ways(&self, from: u32, to: u32) -> u32 {
        let ((group, leaf), (far, there)) = (self.place(from), self.place(to));
        match (group == far, leaf == there) {
            (false, _) => self.parallel,
            (true, false) if self.plus => self.gates,
            _ => 1,
        }
    }

    pub(super) fn detours(&self, from: u32, to: u32) -> u32 {
        match self.place(from).0 == self.place(to).0 {
            true => 0,
            false => (self.groups - 2) * self.parallel,
        }
    }

    pub(super) fn route(&self, from: u32, to: u32, way: u32, out: &mut Vec<LinkId>) {
        let ((group, leaf), (far, there)) = (self.place(from), self.place(to));
        let ways = self.ways(from, to);
        let way = way % (ways + self.detours(from, to));
        out.push(LinkId(from));
        if group == far {
            self.within_group(group, leaf, there, way, out);
        } else if way < ways {
            let gate = self.leave(group, leaf, far, way, out);
            self.come_down(far, gate, there, out);
        } else {
            let (between, nth) = ((way - ways) / self.parallel, (way - ways) % self.parallel);
            let through = (0..self.groups)
                .filter(|&other| other != group && other != far)
                .nth(between as usize)
                .expect("as many detours as there are other groups");
            let gate = self.leave(group, leaf, through, nth, out);
            let gate = self.pass_on(through, gate, far, nth, out);
            self.come_down(far, gate, there, out);
        }
        out.push(LinkId(self.ports() + to));
    }

    fn within_group(&self, group: u32, leaf: u32, there: u32, way: u32, out: &mut Vec<LinkId>) {
        if leaf == there {
            return;
        }
        if self.plus {
            self.rise(group, leaf, way, out);
            self.come_down(group, way, there, out);
        } else {
            self.hop(group, leaf, there, out);
        }
    }

    /// From a leaf to the gate that leads to another group, and there; the number of the gate at which it arrives.
    fn leave(&self, group: u32, leaf: u32, far: u32, nth: u32, out: &mut Vec<LinkId>) -> u32 {
        let link = self.towards(group, far, nth);
        let gate = link / self.global;
        if self.plus {
            self.rise(group, leaf, gate, out);
        } else {
            self.hop(group, leaf, gate, out);
        }
        self.cross(group, link, out)
    }

    /// From the gate at which it arrived in a group to the one that leads on.
    fn pass_on(&self, group: u32, gate: u32, far: u32, nth: u32, out: &mut Vec<LinkId>) -> u32 {
        let link = self.towards(group, far, nth);
        let next = link / self.global;
        if self.plus {
            if gate != next {
                self.come_down(group, gate, 0, out);
                self.rise(group, 0, next, out);
            }
        } else {
            self.hop(group, gate, next, out);
        }
        self.cross(group, link, out)
    }

    fn cross(&self, group: u32, link: u32, out: &mut Vec<LinkId>) -> u32 {
        out.push(LinkId(self.first_global() + group * self.group_global() + link));
        self.far_end(group, link).1 / self.global
    }

    fn rise(&self, group: u32, leaf: u32, gate: u32, out: &mut Vec<LinkId>) {
        let first = self.first_local() + group * self.local_links();
        out.push(LinkId(first + leaf * self.gates + gate));
    }

    fn come_down(&self, group: u32, gate: u32, leaf: u32, out: &mut Vec<LinkId>) {
        if self.plus {
            let first = self.first_local() + group * self.local_links() + self.leaves * self.gates;
            out.push(LinkId(first + leaf * self.gates + gate));
        } else {
            self.hop(group, gate, leaf, out);
        }
    }

    /// Between two routers of a group of a dragonfly.
    fn hop(&self, group: u32, from: u32, to: u32, out: &mut Vec<LinkId>) {
        if from != to {
            let first = self.first_local() + group * self.local_links();
            out.push(LinkId(first + from * (self.leaves - 1) + to - u32::from(to > from)));
        }
    }

    pub(super) fn route_links_max(&self) -> u32 {
        // Up, to a gate, across, on to the next gate (by a leaf in a dragonfly+), across, down to the leaf, down.
        if self.plus { 8 } else { 7 }
    }

    pub(super) fn bisection(&self) -> Bandwidth {
        let half = u64::from(self.groups / 2);
        let pairs = half * (u64::from(self.groups) - half);
        let links = pairs * u64::from(self.parallel);
        let all = self.global_wire.bandwidth.bytes_per_sec().saturating_mul(links);
        let ports = u64::from(self.ports() / 2).saturating_mul(self.wire.bandwidth.bytes_per_sec());
        Bandwidth::from_bytes_per_sec(all.min(ports))
    }
}
