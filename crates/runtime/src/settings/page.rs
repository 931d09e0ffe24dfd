//! The table as people read it: in a terminal, and as a page of the documentation.

use std::fmt::Write;

use super::{Setting, Settings, TABLE};

/// The settings in force, one per line: key, value, where it came from.
pub fn table(settings: &Settings) -> String {
    let rows = settings.rows();
    let key_width = rows.iter().map(|(row, ..)| row.key.len()).max().unwrap_or(0);
    let value_width = rows
        .iter()
        .map(|(_, value, _)| shown(value).chars().count())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for (row, value, origin) in rows {
        let _ = writeln!(out, "{:key_width$}  {:value_width$}  {origin}", row.key, shown(&value));
    }
    out
}

/// `docs/settings.md`.
pub fn markdown() -> String {
    let mut out = String::from(
        "# Settings\n\n\
         This page is written by `BLESS=1 cargo test -p weft settings`; the table in `crates/runtime/src/settings.rs` is the only place to \
         change it.\n\n\
         A value comes from the last of these that names it: the default; the file (`WEFT_CONFIG`, or `./weft.toml`, or \
         `$XDG_CONFIG_HOME/weft/weft.toml`; a dot in a key is a TOML table); the environment variable; the call. A name that \
         is not in this table is refused with the nearest one that is. Durations are written `50us`, `1.5s`, `2min`; sizes \
         `64KiB`, `256MiB`; lists with commas, or as lists in the file.\n\n\
         | key | variable | value | default | what it does |\n|---|---|---|---|---|\n",
    );
    for row in TABLE {
        let _ = writeln!(
            out,
            "| `{}` | `{}` | {} | {} | {} |",
            row.key,
            row.variable(),
            row.kind,
            if row.default.is_empty() {
                "unset".to_owned()
            } else {
                format!("`{}`", row.default)
            },
            explanation(row),
        );
    }
    out
}

fn explanation(row: &Setting) -> &'static str {
    row.explanation.trim_start()
}

fn shown(value: &str) -> &str {
    if value.is_empty() { "–" } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_the_repository_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/settings.md");
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(path, markdown()).unwrap();
        }
        let page = std::fs::read_to_string(path).unwrap();
        assert!(
            page == markdown(),
            "docs/settings.md is out of date: run `BLESS=1 cargo test -p weft settings`"
        );
    }

    #[test]
    fn the_terminal_table_has_every_row() {
        assert_eq!(table(&Settings::default()).lines().count(), TABLE.len());
    }
}
