//! The text of a system's file: laid over its base, and with a line for whatever is wrong.

use toml::{Table, Value};

use super::{System, SystemError, shipped};
use weft_plan::spot::Spot;

/// No honest description of a kind of machine is longer.
const MAX_FILE_BYTES: usize = 1 << 20;
/// A base may have a base.
const MAX_BASES: usize = 4;

pub(super) fn read(text: &str) -> Result<System, SystemError> {
    if text.len() > MAX_FILE_BYTES {
        let (bytes, max) = (text.len(), MAX_FILE_BYTES);
        return Err(SystemError::TooLong { bytes, max });
    }
    let own: Table = toml::from_str(text).map_err(|error| SystemError::Unreadable(Spot::of(text, &error)))?;
    let whole = match own.contains_key("base") {
        // Its own text is what the spans of an error refer to.
        false => text.to_owned(),
        true => {
            let table = over_bases(text, own)?;
            toml::to_string(&table).expect("what was read as TOML has a form in TOML")
        }
    };
    let system: System = toml::from_str(&whole).map_err(|error| {
        let spot = Spot::of(&whole, &error);
        SystemError::Unreadable(match whole == text {
            true => spot,
            false => {
                let table = table_at(&whole, spot.line);
                Spot {
                    line: line_of(text, table, &spot.field).unwrap_or(1),
                    column: 1,
                    field: path(table, &spot.field),
                    ..spot
                }
            }
        })
    })?;
    system.validate().map_err(|error| match error {
        SystemError::Inconsistent { field, fault } => {
            let (table, key) = field.rsplit_once('.').unwrap_or(("", &field));
            match line_of(text, table, key) {
                Some(line) => SystemError::Refused { line, field, fault },
                None => SystemError::Inconsistent { field, fault },
            }
        }
        other => other,
    })?;
    Ok(system)
}

/// The file laid over its base, and that over its own.
fn over_bases(text: &str, mut table: Table) -> Result<Table, SystemError> {
    for _ in 0..MAX_BASES {
        let Some(base) = table.remove("base") else {
            return Ok(table);
        };
        let known = shipped::FILES.iter().find(|(name, _)| Some(*name) == base.as_str());
        let Some((_, file)) = known else {
            return Err(SystemError::Unreadable(Spot {
                line: line_of(text, "", "base").unwrap_or(1),
                column: 1,
                field: "base".to_owned(),
                message: format!("there is no system {base}"),
            }));
        };
        let mut below: Table = toml::from_str(file).expect("the embedded files are TOML");
        below.remove("aliases");
        lay_over(&mut below, table);
        table = below;
    }
    match table.contains_key("base") {
        false => Ok(table),
        true => Err(SystemError::Unreadable(Spot {
            line: line_of(text, "", "base").unwrap_or(1),
            column: 1,
            field: "base".to_owned(),
            message: format!("more than {MAX_BASES} systems stand on each other"),
        })),
    }
}

fn lay_over(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => lay_over(below, above),
            (_, value) => {
                below.insert(key, value);
            }
        }
    }
}

/// The header of the table that a line is in; empty before the first.
fn table_at(text: &str, line: usize) -> &str {
    let lines = text.lines().take(line);
    lines.filter_map(header).last().unwrap_or("")
}

/// The line on which a table says something about a key, or on which the table begins.
fn line_of(text: &str, table: &str, key: &str) -> Option<usize> {
    let mut current = "";
    let mut begins = None;
    for (nth, line) in text.lines().enumerate() {
        if let Some(header) = header(line) {
            current = header;
            if current == table {
                begins = Some(nth + 1);
            }
        } else if current == table && line.split('=').next().is_some_and(|k| k.trim() == key) {
            return Some(nth + 1);
        }
    }
    begins
}

fn header(line: &str) -> Option<&str> {
    let inner = line.trim().strip_prefix('[')?;
    Some(inner.split(']').next()?.trim_start_matches('[').trim())
}

fn path(table: &str, key: &str) -> String {
    match table.is_empty() {
        true => key.to_owned(),
        false => format!("{table}.{key}"),
    }
}
