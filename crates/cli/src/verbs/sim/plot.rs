//! Rows of a sweep as a drawing: time over the first field, a line for each combination of the others and the fidelity.

use std::collections::BTreeMap;

use super::sweep::series;
use crate::plot::{Across, Line, Plot};

pub fn times(fields: &[&str], rows: &[String]) -> String {
    let mut names: Vec<String> = Vec::new();
    let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for (x, name, time) in rows.iter().filter_map(|row| series(fields.len(), row)) {
        let place = names.iter().position(|other| *other == x).unwrap_or(names.len());
        if place == names.len() {
            names.push(x);
        }
        if time > 0.0 {
            lines.entry(name).or_default().push((place as f64, time));
        }
    }
    let line = |(name, mut solid): (String, Vec<(f64, f64)>)| {
        solid.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let dashed = Vec::new();
        Line { name, solid, dashed }
    };
    Plot {
        caption: fields.first().copied().unwrap_or_default().to_owned(),
        across: Across::Names(names),
        lines: lines.into_iter().map(line).collect(),
    }
    .svg()
}
