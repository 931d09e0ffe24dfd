//! A network as a picture: places in rows, and lines between them that stand for all links between two places.
//!
//! A network of a million links is drawn with as few places as can be told apart: neighbours share one. What a line tells is the mean of its
//! links and the busiest of them.

use std::collections::BTreeMap;

use serde::Serialize;
use weft_model::fabric::{LinkId, Topology, Vertex};
use weft_plan::Picos;
use weft_sim::traffic::Hot;

use super::rounded;

/// So many places in a row at most, and fewer where there would be more lines than these.
const PLACES_MAX: u32 = 64;
const EDGES_MAX: usize = 2500;
/// A torus of up to so many ports is drawn port by port.
const GRID_MAX: u32 = 800;

#[derive(Debug, Serialize)]
pub struct Drawing {
    /// `tiers`; or, where a network has no top and bottom, `grid` or `circle`.
    layout: &'static str,
    /// Of a grid.
    sides: Vec<u32>,
    note: String,
    rows: Vec<Row>,
    places: Vec<Place>,
    edges: Vec<Edge>,
    pub views: Vec<View>,
    /// The edge of each link.
    #[serde(skip)]
    edge_of: Vec<Option<(u32, bool)>>,
}

/// What is alike, from the bottom.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    count: u32,
    /// How many of them share a place.
    each: u32,
}

#[derive(Debug, Serialize)]
struct Place {
    row: u32,
    name: String,
}

/// All links between two places: where, how many, and bytes a second of those in one direction.
#[derive(Debug, Serialize)]
struct Edge(u32, u32, u32, f64);

/// How busy everything was, as one fidelity has it.
#[derive(Debug, Serialize)]
pub struct View {
    name: String,
    /// Of each edge: mean and most in the direction in which it is named, then in the other.
    loads: Vec<[f64; 4]>,
    hottest: Vec<String>,
    hot: Vec<Spot>,
}

#[derive(Debug, Serialize)]
struct Spot {
    name: String,
    parallel: u32,
    busy: f64,
    edge: Option<u32>,
}

/// Which place every rank, node and switch has.
struct Plan {
    rows: Vec<Row>,
    /// Where the places of each row begin.
    first: Vec<u32>,
    /// The row and the number therein of each switch.
    switches: Vec<(u32, u32)>,
    has_nodes: bool,
}

impl Drawing {
    pub fn new(topology: &Topology) -> Drawing {
        let mut most = PLACES_MAX;
        loop {
            let drawing = Drawing::with(topology, most);
            if drawing.edges.len() <= EDGES_MAX || most <= 4 {
                return drawing;
            }
            most /= 2;
        }
    }

    /// A torus as what it is, as long as every port can have a place of its own.
    pub fn torus(topology: &Topology, sides: &[u32]) -> Drawing {
        if topology.node_ranks() > 1 || topology.ranks() > GRID_MAX {
            return Drawing::new(topology);
        }
        Drawing {
            layout: "grid",
            sides: sides.to_vec(),
            ..Drawing::with(topology, GRID_MAX)
        }
    }

    fn with(topology: &Topology, most: u32) -> Drawing {
        let plan = Plan::new(topology, most);
        let places: u32 = plan.rows.iter().map(Row::places).sum();
        let mut numbers: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        let mut edges: Vec<Edge> = Vec::new();
        let mut edge_of = Vec::with_capacity(topology.links() as usize);
        for link in (0..topology.links()).map(LinkId) {
            let Some((from, to)) = plan.ends(topology, link).filter(|(from, to)| from != to) else {
                edge_of.push(None);
                continue;
            };
            let ends = (from.min(to), from.max(to));
            let number = *numbers.entry(ends).or_insert_with(|| {
                edges.push(Edge(ends.0, ends.1, 0, 0.0));
                edges.len() as u32 - 1
            });
            let rises = from < to;
            if rises {
                let edge = &mut edges[number as usize];
                edge.2 += 1;
                edge.3 += topology.wire(link).bandwidth.bytes_per_sec() as f64;
            }
            edge_of.push(Some((number, rises)));
        }
        let grouped = plan.rows.iter().any(|row| row.each > 1);
        let mut note = String::from("Colour is the busiest direction of a line.");
        if grouped {
            note.push_str(" Neighbours share a box, and a line stands for all links between two boxes: its colour is the busiest of them.");
        }
        Drawing {
            layout: if topology.top().is_some() { "tiers" } else { "circle" },
            sides: Vec::new(),
            note,
            places: (0..places).map(|place| plan.place(place)).collect(),
            rows: plan.rows,
            edges,
            views: Vec::new(),
            edge_of,
        }
    }

    /// Adds how busy links were, by what each of them carried in that time; nothing where nobody looked at links.
    pub fn look(&mut self, name: &str, topology: &Topology, carried: &[f64], time: Picos, hot: &[Hot]) {
        let seconds = time.as_secs_f64();
        let mut loads = Vec::new();
        let mut hottest = Vec::new();
        if !carried.is_empty() && seconds > 0.0 {
            loads = vec![[0.0f64; 4]; self.edges.len()];
            let mut counts = vec![[0u32; 2]; self.edges.len()];
            let mut busiest: Vec<(f64, u32)> = vec![(0.0, 0); self.edges.len()];
            for (link, (edge, bytes)) in (0..).zip(self.edge_of.iter().zip(carried)) {
                let Some((edge, rises)) = *edge else { continue };
                let bandwidth = topology.wire(LinkId(link)).bandwidth.bytes_per_sec() as f64;
                let busy = bytes / (bandwidth * seconds).max(f64::MIN_POSITIVE);
                let (edge, at) = (edge as usize, if rises { 0 } else { 2 });
                loads[edge][at] += busy;
                counts[edge][at / 2] += 1;
                loads[edge][at + 1] = loads[edge][at + 1].max(busy);
                if busy > busiest[edge].0 {
                    busiest[edge] = (busy, link);
                }
            }
            for (load, counts) in loads.iter_mut().zip(&counts) {
                load[0] /= f64::from(counts[0].max(1));
                load[2] /= f64::from(counts[1].max(1));
                *load = load.map(rounded);
            }
            hottest = busiest
                .iter()
                .map(|&(busy, link)| match busy > 0.0 {
                    true => topology.link_name(LinkId(link)),
                    false => String::new(),
                })
                .collect();
        }
        let spot = |hot: &Hot| Spot {
            name: hot.name.clone(),
            parallel: hot.width,
            busy: rounded(hot.utilisation),
            edge: self
                .edge_of
                .get(hot.link.0 as usize)
                .copied()
                .flatten()
                .map(|(edge, _)| edge),
        };
        let hot = hot.iter().map(spot).collect();
        self.views.push(View {
            name: name.to_owned(),
            loads,
            hottest,
            hot,
        });
    }
}

impl Row {
    fn new(name: String, count: u32, most: u32) -> Row {
        let each = match count <= most {
            true => 1,
            // Clusters come in powers of two; and boxes that stand for many need room for what they stand for.
            false => count.div_ceil((most / 2).max(1)).next_power_of_two(),
        };
        Row { name, count, each }
    }

    fn places(&self) -> u32 {
        self.count.div_ceil(self.each)
    }
}

impl Plan {
    fn new(topology: &Topology, most: u32) -> Plan {
        let network = topology.network();
        let ranks = topology.ranks();
        let has_nodes = topology.node_ranks() > 1;
        let mut rows = Vec::new();
        if has_nodes {
            rows.push(Row::new("scale-up".to_owned(), ranks / topology.node_ranks(), most));
        }
        rows.push(Row::new("ranks".to_owned(), ranks, most));
        // A network says what it is made of by the names of its switches: `leaf 3`, `spine 1.2`.
        let ends = (0..network.links()).map(|link| network.link(LinkId(link)));
        let last = ends.map(|link| link.from.0.max(link.to.0)).max().unwrap_or(0);
        let mut kinds: Vec<(String, u32)> = Vec::new();
        let mut switches = Vec::new();
        for vertex in network.ports()..=last {
            let name = network.vertex_name(Vertex(vertex));
            let kind = name.split(' ').next().unwrap_or_default();
            if kinds.last().is_none_or(|(known, _)| known != kind) {
                kinds.push((kind.to_owned(), 0));
            }
            let row = rows.len() + kinds.len() - 1;
            if let Some((_, count)) = kinds.last_mut() {
                switches.push((row as u32, *count));
                *count += 1;
            }
        }
        rows.extend(
            kinds
                .into_iter()
                .map(|(kind, count)| Row::new(plural(&kind, count), count, most)),
        );
        let first = rows.iter().scan(0, |next, row| {
            let first = *next;
            *next += row.places();
            Some(first)
        });
        Plan {
            first: first.collect(),
            rows,
            switches,
            has_nodes,
        }
    }

    /// The places that a link joins; `None` where it is never used.
    fn ends(&self, topology: &Topology, link: LinkId) -> Option<(u32, u32)> {
        let ranks = topology.ranks();
        if link.0 < 2 * ranks {
            if !self.has_nodes {
                return None;
            }
            let rank = link.0 % ranks;
            let (below, above) = (self.at(0, rank / topology.node_ranks()), self.at(1, rank));
            return Some(if link.0 < ranks { (above, below) } else { (below, above) });
        }
        let link = topology.network().link(LinkId(link.0 - 2 * ranks));
        Some((self.vertex(topology, link.from), self.vertex(topology, link.to)))
    }

    fn vertex(&self, topology: &Topology, vertex: Vertex) -> u32 {
        match vertex.0.checked_sub(topology.network().ports()) {
            Some(switch) => {
                let (row, number) = self.switches[switch as usize];
                self.at(row, number)
            }
            None => {
                // A port belongs to the first of the ranks that share it.
                let (node, nth) = (vertex.0 / topology.node_ports(), vertex.0 % topology.node_ports());
                let rank = node * topology.node_ranks() + nth * topology.node_ranks() / topology.node_ports();
                self.at(u32::from(self.has_nodes), rank)
            }
        }
    }

    fn at(&self, row: u32, number: u32) -> u32 {
        self.first[row as usize] + number / self.rows[row as usize].each
    }

    fn place(&self, place: u32) -> Place {
        let row = self.first.iter().rposition(|&first| first <= place).unwrap_or(0);
        let Row { name, count, each } = &self.rows[row];
        let begin = (place - self.first[row]) * each;
        let end = (begin + each).min(*count) - 1;
        Place {
            row: row as u32,
            name: match (begin == end, name.as_str()) {
                (true, "scale-up") => format!("scale-up of node {begin}"),
                (false, "scale-up") => format!("scale-up of nodes {begin}–{end}"),
                (true, name) => format!("{} {begin}", singular(name)),
                (false, name) => format!("{name} {begin}–{end}"),
            },
        }
    }
}

fn plural(kind: &str, count: u32) -> String {
    match (kind, count) {
        (kind, 1) => kind.to_owned(),
        ("leaf", _) => "leaves".to_owned(),
        ("switch", _) => "switches".to_owned(),
        (kind, _) => format!("{kind}s"),
    }
}

fn singular(name: &str) -> &str {
    match name {
        "leaves" => "leaf",
        "switches" => "switch",
        name => name.strip_suffix('s').unwrap_or(name),
    }
}

#[cfg(test)]
mod tests {
    use weft_model::fabric::{Cluster, Fabric, Wire};

    use super::*;

    fn topology(fabric: Fabric, node: u32) -> Topology {
        let wire = fabric.wire();
        let cluster = Cluster {
            node_ranks: node,
            node_ports: node,
            scale_up: Some(wire),
            fabric,
        };
        cluster.build().unwrap()
    }

    fn wire() -> Wire {
        Wire {
            bandwidth: "100 Gb/s".parse().unwrap(),
            latency: "1 µs".parse().unwrap(),
        }
    }

    fn rails(nodes: u32, tiers: u32, radix: u32) -> Topology {
        let fabric = Fabric::RailClos {
            nodes,
            rails: 8,
            tiers,
            radix,
            oversubscription: 1,
            wire: wire(),
        };
        topology(fabric, 8)
    }

    #[test]
    fn every_link_of_a_small_network_is_drawn() {
        let drawing = Drawing::new(&rails(4, 2, 64));
        let rows: Vec<(&str, u32, u32)> = drawing
            .rows
            .iter()
            .map(|row| (&*row.name, row.count, row.each))
            .collect();
        assert_eq!(
            rows,
            [
                ("scale-up", 4, 1),
                ("ranks", 32, 1),
                ("leaves", 8, 1),
                ("spines", 32, 1)
            ]
        );
        // To the scale-up switch, to the leaf, and from each leaf to each spine.
        assert_eq!(drawing.edges.len(), 32 + 32 + 8 * 32);
        assert!(drawing.edges.iter().all(|edge| edge.2 == 1));
    }

    #[test]
    fn a_large_one_is_small_as_a_picture() {
        let topology = rails(16384, 3, 128);
        assert_eq!(topology.ranks(), 131_072);
        let mut drawing = Drawing::new(&topology);
        assert!(drawing.edges.len() <= EDGES_MAX);
        let links: u32 = drawing.edges.iter().map(|edge| edge.2).sum();
        assert_eq!(2 * links, topology.links());
        drawing.look(
            "flow",
            &topology,
            &vec![1e6; topology.links() as usize],
            Picos::from_ms(1),
            &[],
        );
        assert!(serde_json::to_string(&drawing).unwrap().len() < 400_000);
    }

    #[test]
    fn loads_are_those_of_the_links() {
        let topology = topology(Fabric::SingleSwitch { ports: 4, wire: wire() }, 1);
        let mut carried = vec![0.0; topology.links() as usize];
        // Port 2 to the switch: half of what it can in that time.
        carried[8 + 2] = 12.5e9 * 1e-3 / 2.0;
        let mut drawing = Drawing::new(&topology);
        drawing.look("flow", &topology, &carried, Picos::from_ms(1), &[]);
        let view = &drawing.views[0];
        assert_eq!(view.loads[2], [0.5, 0.5, 0.0, 0.0]);
        assert_eq!(view.hottest[2], "port 2 → switch");
        assert_eq!(view.loads[0], [0.0; 4]);
    }

    #[test]
    fn a_torus_has_no_top() {
        let fabric = Fabric::Torus {
            sides: vec![4, 4],
            wire: wire(),
        };
        let topology = topology(fabric, 1);
        let drawing = Drawing::new(&topology);
        assert_eq!(
            (drawing.layout, drawing.rows.len(), drawing.edges.len()),
            ("circle", 1, 32)
        );
        let drawing = Drawing::torus(&topology, &[4, 4]);
        assert_eq!(
            (drawing.layout, drawing.places.len(), drawing.edges.len()),
            ("grid", 16, 32)
        );
    }
}
