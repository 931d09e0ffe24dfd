//! Tables for people. Programs read `--json`, which comes from the same rows.

use console::{Style, measure_text_width};

/// On which side of its column a cell stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Rows under headings, with columns as wide as their widest cell.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(columns: &[(&str, Align)]) -> Table {
        Table {
            columns: columns
                .iter()
                .map(|(title, align)| (title.to_string(), *align))
                .collect(),
            rows: Vec::new(),
        }
    }

    /// # Panics
    /// Where the row has not one cell a column.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.columns.len(), "one cell a column");
        self.rows.push(cells);
    }

    /// The whole table, one line a row, each line indented by two.
    pub fn render(&self) -> String {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|c| {
                let cells = self
                    .rows
                    .iter()
                    .map(|row| measure_text_width(&row[c]))
                    .max()
                    .unwrap_or(0);
                cells.max(measure_text_width(&self.columns[c].0))
            })
            .collect();
        let heading = Style::new().bold().underlined();
        let titles = self.columns.iter().map(|(title, _)| title.as_str());
        let mut text = self.line(titles, &widths, Some(&heading));
        for row in &self.rows {
            text.push_str(&self.line(row.iter().map(String::as_str), &widths, None));
        }
        text
    }

    fn line<'a>(&self, cells: impl Iterator<Item = &'a str>, widths: &[usize], style: Option<&Style>) -> String {
        let mut line = String::from(" ");
        for ((cell, width), (_, align)) in cells.zip(widths).zip(&self.columns) {
            let pad = " ".repeat(width - measure_text_width(cell));
            let cell = match style {
                Some(style) => style.apply_to(cell).to_string(),
                None => cell.to_string(),
            };
            line.push(' ');
            match align {
                Align::Left => line.extend([cell, pad]),
                Align::Right => line.extend([pad, cell]),
            }
            line.push(' ');
        }
        line.truncate(line.trim_end().len());
        line.push('\n');
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&[("transport", Align::Left), ("GB/s", Align::Right)]);
        table.row(vec!["tcp".into(), "1.9".into()]);
        table.row(vec!["shared_memory".into(), "11.25".into()]);
        assert_eq!(
            console::strip_ansi_codes(&table.render()),
            "  transport       GB/s\n  tcp              1.9\n  shared_memory  11.25\n"
        );
    }
}
