//! A drawing of times over a field, as SVG.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::sweep::series;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 80.0;
const BOTTOM: f64 = 60.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 240.0;
const COLOURS: [&str; 8] = [
    "#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#c77d0a", "#3a9d9d", "#7a7a7a", "#b04aa0",
];

/// Rows of a sweep as lines: time over the first field, a line for each combination of the others and the fidelity. Time is drawn by its
/// logarithm, because sizes usually grow by factors.
pub fn times(fields: &[&str], rows: &[String]) -> String {
    let mut places: Vec<String> = Vec::new();
    let mut lines: BTreeMap<String, Vec<(usize, f64)>> = BTreeMap::new();
    for (x, name, time) in rows.iter().filter_map(|row| series(fields.len(), row)) {
        let place = match places.iter().position(|other| *other == x) {
            Some(place) => place,
            None => {
                places.push(x);
                places.len() - 1
            }
        };
        if time > 0.0 {
            lines.entry(name).or_default().push((place, time));
        }
    }
    let all = || lines.values().flatten().map(|(_, time)| *time);
    let (low, high) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
    let (low, high) = if lines.is_empty() {
        (1.0, 10.0)
    } else {
        (low, high.max(low * 1.2))
    };
    let across = |place: usize| {
        let steps = places.len().saturating_sub(1).max(1) as f64;
        LEFT + (WIDTH - LEFT - RIGHT) * place as f64 / steps
    };
    let up = |time: f64| {
        let part = (time / low).ln() / (high / low).ln();
        HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * part
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut draw = |text: std::fmt::Arguments<'_>| svg.write_fmt(text).expect("a string takes everything");
    for tick in 0..=4 {
        let time = low * (high / low).powf(f64::from(tick) / 4.0);
        let y = up(time);
        draw(format_args!(
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0,
            micros(time)
        ));
    }
    for (place, value) in places.iter().enumerate() {
        draw(format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
            across(place),
            HEIGHT - BOTTOM + 18.0,
            escaped(value)
        ));
    }
    draw(format_args!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-weight=\"bold\">{}</text>\n",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 16.0,
        escaped(fields.first().copied().unwrap_or(""))
    ));
    for (nth, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[nth % COLOURS.len()];
        let mut points = points.clone();
        points.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let path: Vec<String> = points
            .iter()
            .map(|&(place, time)| format!("{:.1},{:.1}", across(place), up(time)))
            .collect();
        draw(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
            path.join(" ")
        ));
        for (place, time) in points {
            draw(format_args!(
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{}</title></circle>\n",
                across(place),
                up(time),
                micros(time)
            ));
        }
        let y = TOP + 16.0 * nth as f64;
        draw(format_args!(
            "<text x=\"{:.1}\" y=\"{y:.1}\" fill=\"{colour}\">{}</text>\n",
            WIDTH - RIGHT + 16.0,
            escaped(name)
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

fn micros(time: f64) -> String {
    match time {
        time if time >= 1e6 => format!("{:.2} s", time * 1e-6),
        time if time >= 1e3 => format!("{:.2} ms", time * 1e-3),
        time => format!("{time:.2} µs"),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
