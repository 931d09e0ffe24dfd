//! Times as lines in an SVG drawing, over sizes or over whatever else has names. Times, and sizes, go by their logarithm.

use std::fmt::Write;

use weft_plan::{Bytes, Picos};

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

/// What is drawn.
#[derive(Debug)]
pub struct Plot {
    /// What stands below the axis.
    pub caption: String,
    pub across: Across,
    pub lines: Vec<Line>,
}

/// What times are drawn over.
#[derive(Debug)]
pub enum Across {
    /// Bytes.
    Sizes,
    /// Names, in their order: the first stands at 0, the next at 1.
    Names(Vec<String>),
}

/// One line, and its name. Points are in the order in which they are joined: where across, and how many microseconds.
#[derive(Debug, Default)]
pub struct Line {
    pub name: String,
    pub solid: Vec<(f64, f64)>,
    pub dashed: Vec<(f64, f64)>,
}

impl Plot {
    pub fn svg(&self) -> String {
        let across = self.axis_across();
        let times = Axis::over(self.points().map(|point| point.1), 10.0);
        let height = HEIGHT + self.lines.len() as f64 * LINE;
        let mut text = String::new();
        let mut draw = |content: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = text.write_fmt(content);
            text.push('\n');
        };
        draw(format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">"#
        ));
        draw(format_args!(
            r#"<rect width="{WIDTH}" height="{height}" fill="white"/>"#
        ));
        for (at, label) in self.marks_across(&across) {
            let (x, bottom) = (horizontal(at), HEIGHT - BOTTOM);
            draw(format_args!(
                r##"<path d="M{x:.1} {TOP}V{bottom}" stroke="#ddd"/><text x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
                bottom + LINE,
                escaped(&label)
            ));
        }
        for (at, label) in times.marks(|us| format!("{:.0}", Picos::from_ps((us * 1e6) as u64))) {
            let y = vertical(at);
            draw(format_args!(
                r##"<path d="M{LEFT} {y:.1}H{}" stroke="#ddd"/><text x="{}" y="{:.1}" text-anchor="end">{label}</text>"##,
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0
            ));
        }
        for (nth, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[nth % COLOURS.len()];
            let place = |&(at, time): &(f64, f64)| (horizontal(across.at(at)), vertical(times.at(time)));
            draw(format_args!(
                r#"<path d="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
                path(line.solid.iter().map(place))
            ));
            if !line.dashed.is_empty() {
                draw(format_args!(
                    r#"<path d="{}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="6 4"/>"#,
                    path(line.dashed.iter().map(place))
                ));
            }
            for point in &line.solid {
                let (x, y) = place(point);
                draw(format_args!(
                    r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"><title>{:.2}</title></circle>"#,
                    Picos::from_ps((point.1 * 1e6) as u64)
                ));
            }
            let y = HEIGHT + nth as f64 * LINE;
            draw(format_args!(
                r#"<path d="M{LEFT} {:.1}h30" stroke="{colour}" stroke-width="2"/><text x="{}" y="{y:.1}">{}</text>"#,
                y - 4.0,
                LEFT + 38.0,
                escaped(&line.name)
            ));
        }
        draw(format_args!(
            r#"<text x="{LEFT}" y="{:.1}">{}</text>"#,
            HEIGHT - BOTTOM + 2.0 * LINE,
            escaped(&self.caption)
        ));
        text.push_str("</svg>\n");
        text
    }

    fn points(&self) -> impl Iterator<Item = &(f64, f64)> {
        self.lines.iter().flat_map(|line| line.solid.iter().chain(&line.dashed))
    }

    fn axis_across(&self) -> Axis {
        match &self.across {
            Across::Sizes => Axis::over(self.points().map(|point| point.0), 4.0),
            Across::Names(names) => Axis {
                from: 0.0,
                to: names.len().saturating_sub(1).max(1) as f64,
                base: None,
            },
        }
    }

    fn marks_across(&self, axis: &Axis) -> Vec<(f64, String)> {
        match &self.across {
            Across::Sizes => axis.marks(|bytes| Bytes(bytes as u64).to_string()),
            Across::Names(names) => (0..)
                .zip(names)
                .map(|(nth, name)| (axis.at(f64::from(nth)), name.clone()))
                .collect(),
        }
    }
}

/// The range of an axis; where it is logarithmic, as exponents of the base of its marks.
struct Axis {
    from: f64,
    to: f64,
    base: Option<f64>,
}

impl Axis {
    /// A logarithmic one, from one mark to another around all values.
    fn over(values: impl Iterator<Item = f64>, base: f64) -> Axis {
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let (low, high) = if low.is_finite() { (low, high) } else { (1.0, base) };
        let from = low.log(base).floor();
        let to = high.log(base).ceil().max(from + 1.0);
        let base = Some(base);
        Axis { from, to, base }
    }

    /// Where a value is, from 0 to 1.
    fn at(&self, value: f64) -> f64 {
        let value = self.base.map_or(value, |base| value.log(base));
        (value - self.from) / (self.to - self.from)
    }

    fn marks(&self, label: impl Fn(f64) -> String) -> Vec<(f64, String)> {
        let powers = self.from as i32..=self.to as i32;
        powers
            .map(|power| self.base.map_or(f64::from(power), |base| base.powi(power)))
            .map(|value| (self.at(value), label(value)))
            .collect()
    }
}

fn horizontal(at: f64) -> f64 {
    LEFT + at * (WIDTH - LEFT - RIGHT)
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

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
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
    fn names_stand_in_their_order_and_say_no_more_than_they_are() {
        let line = Line {
            name: "<a & b>".to_owned(),
            solid: vec![(0.0, 1.0), (1.0, 10.0)],
            dashed: Vec::new(),
        };
        let plot = Plot {
            caption: "x".to_owned(),
            across: Across::Names(vec!["one".to_owned(), "two".to_owned()]),
            lines: vec![line],
        };
        let svg = plot.svg();
        assert!(svg.find("one").unwrap() < svg.find("two").unwrap());
        assert!(svg.contains("&lt;a &amp; b&gt;") && !svg.contains("<a & b>") && !svg.contains("dasharray"));
        assert!(svg.contains(r#"d="M90.0 510.0L880.0 20.0""#), "{svg}");
    }

    #[test]
    fn a_plot_of_nothing_is_a_plot() {
        for across in [Across::Sizes, Across::Names(Vec::new())] {
            let (caption, lines) = (String::new(), Vec::new());
            assert!(Plot { caption, across, lines }.svg().ends_with("</svg>\n"));
        }
    }
}
