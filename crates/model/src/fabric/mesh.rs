//! Every port connected with every other.

use super::error::{fault, moves, numbered, within};
use super::network::{Link, LinkId, Vertex};
use super::{FabricError, FabricFault, Wire};
use weft_plan::units::Bandwidth;

#[derive(Clone, Copy, Debug)]
pub(super) struct Mesh {
    ports: u32,
    wire: Wire,
}

impl Mesh {
    pub(super) fn new(ports: u32, wire: Wire) -> Result<Mesh, FabricError> {
        within("ports", ports, 2, u64::from(u32::MAX))?;
        moves("wire", wire)?;
        let links = u64::from(ports).checked_mul(u64::from(ports) - 1);
        let links = links.ok_or_else(|| {
            fault(
                "ports",
                FabricFault::TooLarge {
                    most: super::error::MAX_LINKS,
                },
            )
        })?;
        numbered("ports", links)?;
        Ok(Mesh { ports, wire })
    }

    pub(super) fn ports(&self) -> u32 {
        self.ports
    }
    pub(super) fn links(&self) -> u32 {
        self.ports * (self.ports - 1)
    }
    pub(super) fn link(&self, link: u32) -> Link {
        let (from, nth) = (link / (self.ports - 1), link % (self.ports - 1));
        Link {
            from: Vertex(from),
            to: Vertex(nth + u32::from(nth >= from)),
            bandwidth: self.wire.bandwidth,
            latency: self.wire.latency,
        }
    }
    pub(super) fn ways(&self, _: u32, _: u32) -> u32 {
        1
    }
    pub(super) fn route(&self, from: u32, to: u32, _: u32, out: &mut Vec<LinkId>) {
        out.push(LinkId(from * (self.ports - 1) + to - u32::from(to > from)));
    }
    pub(super) fn route_links_max(&self) -> u32 {
        1
    }
    pub(super) fn bisection(&self) -> Bandwidth {
        let half = u64::from(self.ports / 2);
        let pairs = half * (u64::from(self.ports) - half);
        Bandwidth::from_bytes_per_sec(self.wire.bandwidth.bytes_per_sec().saturating_mul(pairs))
    }
}
