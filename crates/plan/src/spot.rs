//! Where in a file a mistake is, for those who have to mend it.

use std::fmt;

/// The place of a mistake in a TOML file, and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    pub line: usize,
    pub column: usize,
    /// What the line is about: its key, or its table's header.
    pub field: String,
    pub message: String,
}

impl Spot {
    pub fn of(text: &str, error: &toml::de::Error) -> Spot {
        let start = error.span().map_or(0, |span| span.start);
        let before = text.get(..start).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line_text = text[line_start..].lines().next().unwrap_or("");
        let key = line_text.split('=').next().unwrap_or(line_text).trim();
        Spot {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            field: key.chars().take(80).collect(),
            message: error.message().to_owned(),
        }
    }
}

impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spot {
            line,
            column,
            field,
            message,
        } = self;
        write!(f, "line {line}, column {column}, at `{field}`: {message}")
    }
}
