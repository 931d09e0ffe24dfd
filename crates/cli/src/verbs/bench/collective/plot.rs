//! Times over sizes as an SVG drawing, measured and predicted, both axes logarithmic.

use std::fmt::Write;

use weft_plan::{Bytes, Picos};

use super::figure::Figure;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 50.0;
/// The height of a line of the legend.
const LINE: f64 = 16.0;
/// Told apart by those who see no red or no green as well.
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999933",
];

/// What has one line: its name, and size, measured time and predicted time of each point.
struct Series {
    name: String,
    points: Vec<(f64, f64, Option<f64>)>,
}

pub(super) fn svg(figures: &[Figure]) -> String {
    let series = series(figures);
    let (sizes, times) = (Axis::sizes(&series), Axis::times(&series));
    let height = HEIGHT + series.len() as f64 * LINE;
    let mut text = String::new();
    let mut line = |content: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = text.write_fmt(content);
        text.push('\n');
    };
    line(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">"#
    ));
    line(format_args!(
        r#"<rect width="{WIDTH}" height="{height}" fill="white"/>"#
    ));
    for (at, label) in sizes.marks(|bytes| Bytes(bytes as u64).to_string()) {
        let x = LEFT + at * (WIDTH - LEFT - RIGHT);
        let bottom = HEIGHT - BOTTOM;
        line(format_args!(
            r##"<path d="M{x:.1} {TOP}V{bottom}" stroke="#ddd"/><text x="{x:.1}" y="{:.1}" text-anchor="middle">{label}</text>"##,
            bottom + LINE
        ));
    }
    for (at, label) in times.marks(|us| format!("{:.0}", Picos::from_ps((us * 1e6) as u64))) {
        let y = vertical(at);
        line(format_args!(
            r##"<path d="M{LEFT} {y:.1}H{}" stroke="#ddd"/><text x="{}" y="{:.1}" text-anchor="end">{label}</text>"##,
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0
        ));
    }
    for (nth, series) in series.iter().enumerate() {
        let colour = COLOURS[nth % COLOURS.len()];
        let place = |size: f64, time: f64| {
            let x = LEFT + sizes.at(size) * (WIDTH - LEFT - RIGHT);
            (x, vertical(times.at(time)))
        };
        let measured = series.points.iter().map(|(size, time, _)| place(*size, *time));
        let predicted = series
            .points
            .iter()
            .filter_map(|(size, _, time)| Some(place(*size, (*time)?)));
        line(format_args!(
            r#"<path d="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
            path(measured.clone())
        ));
        line(format_args!(
            r#"<path d="{}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="6 4"/>"#,
            path(predicted)
        ));
        for (x, y) in measured {
            line(format_args!(
                r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#
            ));
        }
        let y = HEIGHT + nth as f64 * LINE;
        line(format_args!(
            r#"<path d="M{LEFT} {:.1}h30" stroke="{colour}" stroke-width="2"/><text x="{}" y="{y:.1}">{}</text>"#,
            y - 4.0,
            LEFT + 38.0,
            series.name
        ));
    }
    line(format_args!(
        r#"<text x="{LEFT}" y="{:.1}">size of the larger buffer; solid: measured, dashed: predicted</text>"#,
        HEIGHT - BOTTOM + 2.0 * LINE
    ));
    text.push_str("</svg>\n");
    text
}

/// The lines, in the order in which they were measured. What has no size has no place on the axis.
fn series(figures: &[Figure]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for figure in figures.iter().filter(|figure| figure.bytes > 0 && figure.us_med > 0.0) {
        let name = figure.series();
        let point = (
            figure.bytes as f64,
            figure.us_med,
            figure.predicted_us.filter(|us| *us > 0.0),
        );
        match all.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => all.push(Series {
                name,
                points: vec![point],
            }),
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// The range of a logarithmic axis, and the base of its marks.
struct Axis {
    from: f64,
    to: f64,
    base: f64,
}

impl Axis {
    fn sizes(series: &[Series]) -> Axis {
        let sizes = series
            .iter()
            .flat_map(|series| series.points.iter().map(|point| point.0));
        Axis::over(sizes, 4.0)
    }

    fn times(series: &[Series]) -> Axis {
        let points = series.iter().flat_map(|series| series.points.iter());
        Axis::over(points.flat_map(|point| [Some(point.1), point.2]).flatten(), 10.0)
    }

    /// From one mark to another around all values.
    fn over(values: impl Iterator<Item = f64>, base: f64) -> Axis {
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let (low, high) = if low.is_finite() { (low, high) } else { (1.0, base) };
        let from = low.log(base).floor();
        let to = high.log(base).ceil().max(from + 1.0);
        Axis { from, to, base }
    }

    /// Where a value is, from 0 to 1.
    fn at(&self, value: f64) -> f64 {
        (value.log(self.base) - self.from) / (self.to - self.from)
    }

    fn marks(&self, label: impl Fn(f64) -> String) -> Vec<(f64, String)> {
        let powers = self.from as i32..=self.to as i32;
        powers
            .map(|power| self.base.powi(power))
            .map(|value| (self.at(value), label(value)))
            .collect()
    }
}

fn vertical(at: f64) -> f64 {
    HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM)
}

fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut text = String::new();
    for (nth, (x, y)) in points.enumerate() {
        let command = if nth == 0 { 'M' } else { 'L' };
        let _ = write!(text, "{command}{x:.1} {y:.1}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_hold_what_is_drawn() {
        let axis = Axis::over([3.0, 950.0].into_iter(), 10.0);
        assert_eq!((axis.from, axis.to), (0.0, 3.0));
        assert!((0.0..=1.0).contains(&axis.at(3.0)) && (0.0..=1.0).contains(&axis.at(950.0)));
        assert_eq!(axis.marks(|value| format!("{value}")).len(), 4);
        let nothing = Axis::over(std::iter::empty(), 10.0);
        assert_eq!((nothing.from, nothing.to), (0.0, 1.0));
    }

    #[test]
    fn a_plot_of_nothing_is_a_plot() {
        assert!(svg(&[]).ends_with("</svg>\n"));
    }
}
