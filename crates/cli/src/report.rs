//! One file that shows what was predicted: a page for a browser, with everything in it.
//!
//! A [`Report`] is plain data; [`Report::html`] puts it into the page (`report/page.html`, its style and its scripts), which draws it. Nothing is fetched, nothing
//! depends on when or where it is written, and nothing in the data can become markup or script.

pub mod comparison;
pub mod drawing;
pub mod timeline;

use serde::Serialize;

pub use comparison::Comparison;
pub use drawing::Drawing;
pub use timeline::Timeline;

const PAGE: &str = include_str!("report/page.html");
const STYLE: &str = include_str!("report/page.css");
const SCRIPT: &str = concat!(
    include_str!("report/page.js"),
    "\n",
    include_str!("report/topology.js"),
    "\n",
    include_str!("report/timeline.js"),
    "\n",
    include_str!("report/comparison.js"),
    "\n",
    include_str!("report/start.js"),
);

/// Names longer than this are cut.
const NAME_MAX: usize = 400;

/// What the page shows, from top to bottom. Sections without data are left out.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// What kind of thing was looked at, in two or three words.
    pub kind: String,
    pub title: String,
    pub summary: String,
    pub facts: Vec<(String, String)>,
    pub answers: Vec<Answered>,
    pub topology: Option<Drawing>,
    pub timelines: Vec<Timeline>,
    pub comparison: Option<Comparison>,
    pub tables: Vec<Figures>,
    /// How to get the same again.
    pub foot: String,
}

/// One answer among those that are shown side by side.
#[derive(Debug, Serialize)]
pub struct Answered {
    pub name: String,
    pub time_ps: u64,
    pub note: String,
    /// What the time consists of, as shares of it.
    pub parts: Vec<(String, f64)>,
}

/// A table to be read, and copied.
#[derive(Debug, Serialize)]
pub struct Figures {
    pub title: String,
    pub columns: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Report {
    /// The whole page.
    pub fn html(&self) -> String {
        let data = serde_json::to_string(self).expect("plain fields have a form in JSON");
        // One pass from mark to mark, so that nothing which the data says is taken for a mark.
        let mut page = String::with_capacity(PAGE.len() + STYLE.len() + SCRIPT.len() + data.len() + data.len() / 8);
        let mut rest = PAGE;
        for (mark, text) in [
            ("/*STYLE*/", STYLE),
            ("/*DATA*/", &inert(&data)),
            ("/*SCRIPT*/", SCRIPT),
        ] {
            let (before, after) = rest.split_once(mark).expect("the page has its marks in this order");
            page.push_str(before);
            page.push_str(text);
            rest = after;
        }
        page.push_str(rest);
        page
    }
}

/// JSON that cannot end the script element it stands in, open a comment there, or end a line of script.
fn inert(json: &str) -> String {
    let mut text = String::with_capacity(json.len() + json.len() / 16);
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => text.push_str(&format!("\\u{:04x}", c as u32)),
            c => text.push(c),
        }
    }
    text
}

/// A name as long as a page has room for.
pub fn short(name: &str) -> String {
    match name.char_indices().nth(NAME_MAX) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.to_owned(),
    }
}

/// Four digits behind the point are more than a picture shows.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() * 1e-4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_names() {
        let hostile = "</script><script>alert(1)</script><!-- /*DATA*/ /*SCRIPT*/ \u{2028}&amp;";
        let report = Report {
            title: hostile.to_owned(),
            facts: vec![(hostile.to_owned(), hostile.to_owned())],
            ..Report::default()
        };
        let page = report.html();
        assert_eq!(page.matches("</script>").count(), 2);
        assert_eq!(page.matches("<script").count(), 2);
        let data = page
            .split_once("id=\"data\">")
            .unwrap()
            .1
            .split_once("</script>")
            .unwrap()
            .0;
        assert!(!data.contains(['<', '>', '&', '\u{2028}']));
        let read: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(read["title"], hostile);
    }

    #[test]
    fn the_page_fetches_nothing() {
        let page = Report::default().html();
        // The name of the SVG namespace is the only address, and no address to fetch.
        assert_eq!(page.matches("http").count() - page.matches("http-equiv").count(), 1);
        assert!(!page.contains("src=") && !page.contains("@import") && !page.contains("url("));
        assert!(page.contains("default-src 'none'"));
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        assert_eq!(short(&"é".repeat(NAME_MAX + 1)).chars().count(), NAME_MAX + 1);
        assert_eq!(short("ring"), "ring");
    }
}
