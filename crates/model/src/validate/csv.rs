//! Tables as text: commas, and quotation marks around cells that hold commas.

use super::{Unpredicted, ValidateError};

/// Longer than any sweep that somebody measured.
const MAX_FILE_BYTES: usize = 256 << 20;

/// One row, by the names of its columns.
#[derive(Debug)]
pub struct TruthRow<'a> {
    pub line: usize,
    headings: &'a [String],
    cells: &'a [String],
}

impl<'a> TruthRow<'a> {
    /// What the cell says; `None` where there is no such column, or nothing in it.
    pub fn text(&self, column: &str) -> Option<&'a str> {
        let nth = self.headings.iter().position(|heading| heading == column)?;
        let cell = self.cells.get(nth)?.trim();
        (!cell.is_empty()).then_some(cell)
    }

    /// The number in the cell; `None` where there is nothing.
    pub fn number(&self, column: &str) -> Result<Option<f64>, Unpredicted> {
        let Some(text) = self.text(column) else {
            return Ok(None);
        };
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(Unpredicted::NotANumber {
                line: self.line,
                column: column.to_owned(),
                text: text.chars().take(40).collect(),
            }),
        }
    }

    /// What the cell must say.
    pub fn need_text(&self, column: &str) -> Result<&'a str, Unpredicted> {
        self.text(column).ok_or_else(|| self.nothing(column))
    }

    /// The number that the cell must hold.
    pub fn need(&self, column: &str) -> Result<f64, Unpredicted> {
        self.number(column)?.ok_or_else(|| self.nothing(column))
    }

    /// A count that the cell must hold, as far as 32 bits go.
    pub fn need_count(&self, column: &str) -> Result<u32, Unpredicted> {
        let number = self.need(column)?;
        match (0.0..=f64::from(u32::MAX)).contains(&number) {
            true => Ok(number as u32),
            false => Err(Unpredicted::NotANumber {
                line: self.line,
                column: column.to_owned(),
                text: number.to_string(),
            }),
        }
    }

    fn nothing(&self, column: &str) -> Unpredicted {
        Unpredicted::Nothing {
            line: self.line,
            column: column.to_owned(),
        }
    }
}

/// Hands every row to `take`.
pub(super) fn rows(
    text: &str,
    columns: &[&'static str],
    mut take: impl FnMut(&TruthRow<'_>) -> Result<(), ValidateError>,
) -> Result<(), ValidateError> {
    if text.len() > MAX_FILE_BYTES {
        let (bytes, max) = (text.len(), MAX_FILE_BYTES);
        return Err(ValidateError::TooLong { bytes, max });
    }
    let mut rest = text.trim_start_matches('\u{feff}');
    let mut line = 1;
    let mut headings: Vec<String> = Vec::new();
    let mut cells = Vec::new();
    while !rest.is_empty() {
        cells.clear();
        let lines = record(&mut rest, &mut cells).ok_or(ValidateError::OpenQuotation { line })?;
        let blank = cells.iter().all(|cell: &String| cell.trim().is_empty());
        if !blank && headings.is_empty() {
            headings = cells.iter().map(|cell| cell.trim().to_owned()).collect();
            for column in columns {
                if !headings.iter().any(|heading| heading == column) {
                    return Err(ValidateError::NoColumn { column });
                }
            }
        } else if !blank {
            if cells.len() != headings.len() {
                let (cells, columns) = (cells.len(), headings.len());
                return Err(ValidateError::Ragged { line, cells, columns });
            }
            let row = TruthRow {
                line,
                headings: &headings,
                cells: &cells,
            };
            take(&row)?;
        }
        line += lines;
    }
    match headings.is_empty() {
        true => Err(ValidateError::NoHeading),
        false => Ok(()),
    }
}

/// Takes one record off the text, and says how many lines it had; `None` where a quotation does not end.
fn record(rest: &mut &str, cells: &mut Vec<String>) -> Option<usize> {
    let mut cell = String::new();
    let mut quoted = false;
    let mut lines = 1;
    let mut chars = rest.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' if quoted && chars.peek().is_some_and(|(_, next)| *next == '"') => {
                cell.push('"');
                chars.next();
            }
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(std::mem::take(&mut cell)),
            '\n' if !quoted => {
                cells.push(cell);
                *rest = &rest[at + 1..];
                return Some(lines);
            }
            '\r' if !quoted => {}
            c => {
                lines += usize::from(c == '\n');
                cell.push(c);
            }
        }
    }
    cells.push(cell);
    *rest = "";
    (!quoted).then_some(lines)
}
