//! Times over sizes, measured and predicted, as a drawing.

use super::figure::Figure;
use crate::plot::{Across, Line, Plot};

/// The lines stand in the order in which they were measured. What has no size has no place on the axis.
pub(super) fn svg(figures: &[Figure]) -> String {
    let mut lines: Vec<Line> = Vec::new();
    for figure in figures.iter().filter(|figure| figure.bytes > 0 && figure.us_med > 0.0) {
        let name = figure.series();
        let at = lines.iter().position(|line| line.name == name).unwrap_or(lines.len());
        if at == lines.len() {
            let (solid, dashed) = Default::default();
            lines.push(Line { name, solid, dashed });
        }
        let size = figure.bytes as f64;
        lines[at].solid.push((size, figure.us_med));
        let predicted = figure.predicted_us.filter(|us| *us > 0.0);
        lines[at].dashed.extend(predicted.map(|us| (size, us)));
    }
    for line in &mut lines {
        line.solid.sort_by(|a, b| a.0.total_cmp(&b.0));
        line.dashed.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    let caption = "size of the larger buffer; solid: measured, dashed: predicted".to_owned();
    let across = Across::Sizes;
    Plot { caption, across, lines }.svg()
}
