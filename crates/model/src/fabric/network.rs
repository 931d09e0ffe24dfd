//! A network that holds together: links, routes, bundles.

use super::clos::Clos;
use super::dragonfly::Dragonfly;
use super::mesh::Mesh;
use super::torus::Torus;
use weft_plan::units::{Bandwidth, Picos};

/// A place where a node is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(pub u32);

/// One direction of a cable. Numbers are dense, from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

/// What links connect: ports have the numbers that they have as ports, and switches those above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vertex(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    pub from: Vertex,
    pub to: Vertex,
    pub bandwidth: Bandwidth,
    pub latency: Picos,
}

/// Parallel links that spraying fills alike. Numbers are dense, from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BundleId(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Its links are this one and those that follow.
    pub first: LinkId,
    pub width: u32,
    /// Of each of them.
    pub bandwidth: Bandwidth,
    pub latency: Picos,
}

/// A network made by [`Fabric::build`](super::Fabric::build).
#[derive(Clone, Debug)]
pub struct Network(Shape);

#[derive(Clone, Debug)]
enum Shape {
    Clos(Clos),
    Mesh(Mesh),
    Torus(Torus),
    Dragonfly(Dragonfly),
}

macro_rules! each {
    ($self:ident, $shape:ident => $body:expr) => {
        match &$self.0 {
            Shape::Clos($shape) => $body,
            Shape::Mesh($shape) => $body,
            Shape::Torus($shape) => $body,
            Shape::Dragonfly($shape) => $body,
        }
    };
}

impl Network {
    pub(super) fn clos(clos: Clos) -> Network {
        Network(Shape::Clos(clos))
    }
    pub(super) fn mesh(mesh: Mesh) -> Network {
        Network(Shape::Mesh(mesh))
    }
    pub(super) fn torus(torus: Torus) -> Network {
        Network(Shape::Torus(torus))
    }
    pub(super) fn dragonfly(dragonfly: Dragonfly) -> Network {
        Network(Shape::Dragonfly(dragonfly))
    }

    pub fn ports(&self) -> u32 {
        each!(self, shape => shape.ports())
    }
    pub fn links(&self) -> u32 {
        each!(self, shape => shape.links())
    }
    /// What a link connects, and how well.
    ///
    /// # Panics
    /// Where there is no such link.
    pub fn link(&self, link: LinkId) -> Link {
        assert!(link.0 < self.links(), "link {} of {}", link.0, self.links());
        each!(self, shape => shape.link(link.0))
    }

    /// What people call a port or a switch.
    pub fn vertex_name(&self, vertex: Vertex) -> String {
        match vertex.0.checked_sub(self.ports()) {
            None => format!("port {}", vertex.0),
            Some(nth) => match &self.0 {
                Shape::Clos(clos) => clos.switch_name(nth),
                _ => format!("switch {nth}"),
            },
        }
    }

    /// How many ways there are between two ports that are as short as any. There are always as many back.
    pub fn ways(&self, from: Port, to: Port) -> u32 {
        match from == to {
            true => 1,
            false => each!(self, shape => shape.ways(from.0, to.0)),
        }
    }

    /// How many longer ways there are that lead round a crowd; they are numbered after the short ones.
    pub fn detours(&self, from: Port, to: Port) -> u32 {
        match &self.0 {
            Shape::Dragonfly(dragonfly) if from != to => dragonfly.detours(from.0, to.0),
            _ => 0,
        }
    }

    /// Appends the links of a way, which is taken modulo their number. Nothing leads from a port to itself.
    pub fn route(&self, from: Port, to: Port, way: u32, out: &mut Vec<LinkId>) {
        if from != to {
            each!(self, shape => shape.route(from.0, to.0, way, out));
        }
    }

    /// The most links that a route has, detours included.
    pub fn route_links_max(&self) -> u32 {
        each!(self, shape => shape.route_links_max())
    }

    /// What passes in one direction between two halves of the ports, split where that is narrowest.
    pub fn bisection(&self) -> Bandwidth {
        each!(self, shape => shape.bisection())
    }

    /// How many bundles there are one above the other, where the network is a tree of bundles; else none.
    pub fn levels(&self) -> Option<u32> {
        match &self.0 {
            Shape::Clos(clos) => Some(clos.tiers()),
            _ => None,
        }
    }

    /// Up to which level a flow between two ports climbs, from one; zero to itself, and where there are no levels.
    pub fn meet(&self, from: Port, to: Port) -> u32 {
        match &self.0 {
            Shape::Clos(clos) if from != to => clos.meet(from.0, to.0),
            _ => 0,
        }
    }

    /// The bundle by which what a port sends leaves this level, from one to [`Network::levels`].
    ///
    /// # Panics
    /// Where there is no such level.
    pub fn up(&self, port: Port, level: u32) -> BundleId {
        match &self.0 {
            Shape::Clos(clos) => BundleId(clos.up(port.0, level)),
            _ => panic!("a network without levels"),
        }
    }

    /// The bundle by which what is for a port comes down to this level.
    ///
    /// # Panics
    /// Where there is no such level.
    pub fn down(&self, port: Port, level: u32) -> BundleId {
        match &self.0 {
            Shape::Clos(clos) => BundleId(clos.down(port.0, level)),
            _ => panic!("a network without levels"),
        }
    }

    pub fn bundles(&self) -> u32 {
        match &self.0 {
            Shape::Clos(clos) => clos.bundles(),
            _ => 0,
        }
    }

    /// # Panics
    /// Where there is no such bundle.
    pub fn bundle(&self, bundle: BundleId) -> Bundle {
        match &self.0 {
            Shape::Clos(clos) => clos.bundle(bundle.0),
            _ => panic!("a network without bundles"),
        }
    }
}
