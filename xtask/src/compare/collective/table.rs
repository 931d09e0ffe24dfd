//! What Weft must reach, and how far it is.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::Best;
use super::sides::Side;
use crate::compare::figures;

pub const OPS: [&str; 4] = ["allreduce", "allgather", "reduce_scatter", "alltoall"];

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A collective of a size among so many ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    pub ranks: u32,
    pub op: String,
    pub bytes: u64,
}

/// Weft beside the best of some others.
#[derive(Debug)]
pub struct Row {
    point: Point,
    ours: Side,
    theirs: Side,
    our_us: f64,
    their_us: f64,
    /// Our time over theirs, at most; nothing is required without.
    bound: Option<f64>,
}

/// Through sockets, and where ranks share cores, only one collective is compared. What some sides take for all of them then is minutes.
pub fn takes_part(side: Side, ranks: u32, op: &str) -> bool {
    let sockets = matches!(side, Side::OpenMpiTcp | Side::WeftTcp);
    match ranks > cores() {
        true => op == OPS[0] && !sockets,
        false => op == OPS[0] || !sockets,
    }
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, usize::from) as u32
}

/// Every ratio that can be formed of what was measured.
pub fn rows(best: &Best) -> Vec<Row> {
    let points: BTreeSet<&Point> = best.keys().map(|(_, point)| point).collect();
    let cores = cores();
    let mut rows = Vec::new();
    for point in points {
        let us = |side: Side| best.get(&(side, point.clone())).copied();
        let fastest = |sides: &[Side]| {
            let known = sides.iter().filter_map(|side| Some((*side, us(*side)?)));
            known.min_by(|a, b| a.1.total_cmp(&b.1))
        };
        for (ours, others) in [
            (Side::Weft, &Side::MPIS[..]),
            (Side::WeftForeign, &Side::MPIS[..]),
            (Side::WeftTcp, &[Side::OpenMpiTcp]),
            (Side::WeftTorch, &[Side::Gloo]),
        ] {
            if let (Some(our_us), Some((theirs, their_us))) = (us(ours), fastest(others)) {
                rows.push(Row {
                    point: point.clone(),
                    ours,
                    theirs,
                    our_us,
                    their_us,
                    bound: bound(ours, point, cores),
                });
            }
        }
    }
    rows
}

/// How much of the others' time Weft may take.
fn bound(ours: Side, point: &Point, cores: u32) -> Option<f64> {
    let Point { ranks, op, bytes } = point;
    let crowded = *ranks > cores;
    let reduces = matches!(op.as_str(), "allreduce" | "reduce_scatter");
    match ours {
        Side::Weft if crowded => Some(1.5),
        Side::Weft => Some(match *bytes {
            MIB.. if reduces => 0.6,
            MIB.. => 0.9,
            bytes if bytes >= 64 * KIB => 1.0,
            _ => 1.2,
        }),
        Side::WeftForeign if crowded => None,
        Side::WeftForeign => (*bytes >= 64 * KIB).then_some(1.0),
        Side::WeftTcp if crowded => None,
        Side::WeftTcp => Some(if *bytes >= 64 * KIB { 0.8 } else { 1.0 }),
        Side::WeftTorch => Some(if *bytes <= 64 * KIB { 0.1 } else { 0.5 }),
        _ => None,
    }
}

impl Row {
    fn ratio(&self) -> f64 {
        self.our_us / self.their_us.max(1e-9)
    }
    pub fn is_required(&self) -> bool {
        self.bound.is_some()
    }
    pub fn is_reached(&self) -> bool {
        self.bound.is_none_or(|bound| self.ratio() <= bound)
    }

    pub fn to_figures(&self) -> figures::Row {
        figures::Row {
            workload: name(&self.point),
            peer: format!("{} {} µs", self.theirs, time(self.their_us)),
            weft: format!("{} {} µs", self.ours, time(self.our_us)),
            ratio: format!("{:.2} ×", self.ratio()),
            required: self.bound.map_or(String::new(), |bound| format!("≤ {bound:.2}")),
            reached: self.is_reached(),
        }
    }

    pub fn to_json(&self) -> Value {
        json!({
            "ranks": self.point.ranks,
            "op": self.point.op,
            "bytes": self.point.bytes,
            "side": self.ours.to_string(),
            "beside": self.theirs.to_string(),
            "us": self.our_us,
            "their_us": self.their_us,
            "ratio": self.ratio(),
            "required": self.bound,
            "reached": self.is_reached(),
        })
    }
}

/// First all times, one column a side, then all ratios.
pub fn print(best: &Best, rows: &[Row]) {
    let sides: BTreeSet<Side> = best.keys().map(|(side, _)| *side).collect();
    let points: BTreeSet<&Point> = best.keys().map(|(_, point)| point).collect();
    let titles: Vec<String> = sides.iter().map(|side| format!("{:>13}", side.to_string())).collect();
    println!("{:36}  {}", "µs, the median of calls, best run", titles.join("  "));
    for point in points {
        let cells: Vec<String> = sides
            .iter()
            .map(|side| match best.get(&(*side, point.clone())) {
                Some(us) => format!("{:>13}", time(*us)),
                None => format!("{:>13}", "–"),
            })
            .collect();
        println!("{:36}  {}", name(point), cells.join("  "));
    }
    println!();
    println!(
        "{:36}  {:13}  {:>10}  {:13}  {:>10}  {:>7}  {:>8}",
        "collective", "side", "µs", "beside", "µs", "ratio", "required"
    );
    for row in rows {
        println!(
            "{:36}  {:13}  {:>10}  {:13}  {:>10}  {:>7}  {:>8}  {}",
            name(&row.point),
            row.ours.to_string(),
            time(row.our_us),
            row.theirs.to_string(),
            time(row.their_us),
            format!("{:.2} ×", row.ratio()),
            row.bound.map_or(String::new(), |bound| format!("≤ {bound:.2}")),
            if row.is_reached() { "" } else { "MISSED" },
        );
    }
}

fn name(point: &Point) -> String {
    let size = match point.bytes {
        MIB.. => format!("{} MiB", point.bytes / MIB),
        _ => format!("{} KiB", point.bytes / KIB),
    };
    format!("{} of {size}, {} ranks", point.op, point.ranks)
}

fn time(us: f64) -> String {
    if us < 100.0 {
        format!("{us:.2}")
    } else {
        format!("{us:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(ranks: u32, op: &str, bytes: u64) -> Point {
        Point {
            ranks,
            op: op.to_owned(),
            bytes,
        }
    }

    #[test]
    fn bounds_follow_size_and_crowd() {
        let of = |side, ranks, op, bytes| bound(side, &point(ranks, op, bytes), 2);
        assert_eq!(of(Side::Weft, 2, "allreduce", KIB), Some(1.2));
        assert_eq!(of(Side::Weft, 2, "allreduce", 64 * KIB), Some(1.0));
        assert_eq!(of(Side::Weft, 2, "reduce_scatter", MIB), Some(0.6));
        assert_eq!(of(Side::Weft, 2, "alltoall", 256 * MIB), Some(0.9));
        assert_eq!(of(Side::Weft, 4, "allreduce", MIB), Some(1.5));
        assert_eq!(of(Side::WeftForeign, 2, "allreduce", KIB), None);
        assert_eq!(of(Side::WeftTcp, 2, "allreduce", 64 * KIB), Some(0.8));
        assert_eq!(of(Side::WeftTorch, 4, "allreduce", 64 * KIB), Some(0.1));
    }

    #[test]
    fn weft_is_beside_the_fastest_of_the_others() {
        let at = point(2, "allreduce", MIB);
        let best = [
            (Side::Weft, 50.0),
            (Side::Mpich, 200.0),
            (Side::IntelMpi, 100.0),
            (Side::Gloo, 9.0),
        ];
        let best: Best = best.into_iter().map(|(side, us)| ((side, at.clone()), us)).collect();
        let rows = rows(&best);
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].theirs, rows[0].ratio()), (Side::IntelMpi, 0.5));
        assert!(rows[0].is_reached());
    }
}
