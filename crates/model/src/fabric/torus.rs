//! Rings, tori and three-dimensional tori: dimension after dimension, the shorter way round. The ways are the orders of the dimensions, and both
//! directions where they are equally short.

use super::error::{fault, moves, numbered, within};
use super::network::{Link, LinkId, Vertex};
use super::{FabricError, FabricFault, Wire};
use weft_plan::units::Bandwidth;

const DIMENSIONS_MAX: usize = 3;
/// All orders of up to three things.
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [1, 0, 2], [2, 0, 1], [0, 2, 1], [1, 2, 0], [2, 1, 0]];

#[derive(Clone, Copy, Debug)]
pub(super) struct Torus {
    /// One where there is no such dimension.
    sides: [u32; DIMENSIONS_MAX],
    wire: Wire,
}

/// How far it is in one dimension.
#[derive(Clone, Copy, Debug, Default)]
struct Offset {
    dimension: usize,
    hops: u32,
    backwards: bool,
    /// Both directions are equally short.
    either: bool,
}

impl Torus {
    pub(super) fn new(sides: &[u32], wire: Wire) -> Result<Torus, FabricError> {
        let count = sides.len() as u64;
        if count == 0 {
            return Err(fault("sides", FabricFault::TooFew { value: 0, least: 1 }));
        }
        if count > DIMENSIONS_MAX as u64 {
            let most = DIMENSIONS_MAX as u64;
            return Err(fault("sides", FabricFault::TooMany { value: count, most }));
        }
        moves("wire", wire)?;
        let mut all = [1; DIMENSIONS_MAX];
        let mut ports = 1u64;
        for (nth, &side) in sides.iter().enumerate() {
            within(&format!("sides[{nth}]"), side, 2, 1 << 16)?;
            all[nth] = side;
            ports *= u64::from(side);
            numbered(&format!("sides[{nth}]"), ports * 2 * DIMENSIONS_MAX as u64)?;
        }
        Ok(Torus { sides: all, wire })
    }

    pub(super) fn ports(&self) -> u32 {
        self.sides.iter().product()
    }
    pub(super) fn links(&self) -> u32 {
        self.ports() * 2 * self.dimensions()
    }
    fn dimensions(&self) -> u32 {
        self.sides.iter().filter(|&&side| side > 1).count() as u32
    }
    /// How far apart the numbers of neighbours in a dimension are.
    fn stride(&self, dimension: usize) -> u32 {
        self.sides[..dimension].iter().product()
    }
    fn coordinate(&self, port: u32, dimension: usize) -> u32 {
        port / self.stride(dimension) % self.sides[dimension]
    }
    fn neighbour(&self, port: u32, dimension: usize, backwards: bool) -> u32 {
        let (at, side, stride) = (
            self.coordinate(port, dimension),
            self.sides[dimension],
            self.stride(dimension),
        );
        let next = if backwards {
            (at + side - 1) % side
        } else {
            (at + 1) % side
        };
        port - at * stride + next * stride
    }

    pub(super) fn link(&self, link: u32) -> Link {
        let degree = 2 * self.dimensions();
        let (from, nth) = (link / degree, link % degree);
        let to = self.neighbour(from, (nth / 2) as usize, nth % 2 == 1);
        Link {
            from: Vertex(from),
            to: Vertex(to),
            bandwidth: self.wire.bandwidth,
            latency: self.wire.latency,
        }
    }

    /// The dimensions in which two ports differ.
    fn offsets(&self, from: u32, to: u32) -> ([Offset; DIMENSIONS_MAX], usize) {
        let mut offsets = [Offset::default(); DIMENSIONS_MAX];
        let mut count = 0;
        for dimension in 0..DIMENSIONS_MAX {
            let side = self.sides[dimension];
            let forwards = (self.coordinate(to, dimension) + side - self.coordinate(from, dimension)) % side;
            if forwards > 0 {
                offsets[count] = Offset {
                    dimension,
                    hops: forwards.min(side - forwards),
                    backwards: forwards > side - forwards,
                    either: forwards * 2 == side,
                };
                count += 1;
            }
        }
        (offsets, count)
    }

    pub(super) fn ways(&self, from: u32, to: u32) -> u32 {
        let (offsets, count) = self.offsets(from, to);
        let either = offsets[..count].iter().filter(|offset| offset.either).count();
        orders(count) << either
    }

    pub(super) fn route(&self, from: u32, to: u32, way: u32, out: &mut Vec<LinkId>) {
        let (offsets, count) = self.offsets(from, to);
        let way = way % self.ways(from, to);
        let order = ORDERS[(way % orders(count)) as usize];
        let mut choices = way / orders(count);
        let mut at = from;
        for nth in order.into_iter().filter(|&nth| nth < count) {
            let offset = offsets[nth];
            let mut backwards = offset.backwards;
            if offset.either {
                backwards = choices % 2 == 1;
                choices /= 2;
            }
            for _ in 0..offset.hops {
                let link = at * 2 * self.dimensions() + offset.dimension as u32 * 2 + u32::from(backwards);
                out.push(LinkId(link));
                at = self.neighbour(at, offset.dimension, backwards);
            }
        }
    }

    pub(super) fn route_links_max(&self) -> u32 {
        self.sides.iter().map(|side| side / 2).sum()
    }

    pub(super) fn bisection(&self) -> Bandwidth {
        // Cut across the longest side, twice because it closes to a ring.
        let longest = self.sides.iter().copied().max().unwrap_or(1);
        let links = 2 * u64::from(self.ports() / longest);
        Bandwidth::from_bytes_per_sec(self.wire.bandwidth.bytes_per_sec().saturating_mul(links))
    }
}

/// How many of [`ORDERS`] differ, and come first, for so many things.
fn orders(count: usize) -> u32 {
    [1, 1, 2, 6][count]
}
