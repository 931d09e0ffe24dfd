//! Where values come from, and which of them wins.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::value::{Raw, Value};
use super::{Setting, TABLE};

/// A settings file is written by hand; one larger than this is something else.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Names the file.
const FILE_VARIABLE: &str = "WEFT_CONFIG";
/// Variables with our prefix that are no settings of an agent: where the file is, the token by which the router of the command is administered, whether
/// Python's `nixl` is to be Weft, and what the tests have to find here and write down.
const OTHER_VARIABLES: [&str; 5] = [
    FILE_VARIABLE,
    "WEFT_ADMIN_TOKEN",
    "WEFT_NIXL",
    "WEFT_REQUIRE",
    "WEFT_LEFT_OUT",
];
/// How much of a bad value an error repeats.
const SHOWN_CHARS_MAX: usize = 80;

/// What the file, the environment and the caller say, before any of it is looked at.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    file: Option<(PathBuf, String)>,
    variables: Vec<(String, String)>,
    calls: Vec<(String, String)>,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    File(PathBuf),
    Environment,
    Call,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Environment => f.write_str("environment"),
            Origin::Call => f.write_str("call"),
        }
    }
}

#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SettingsError {
    #[error("unknown setting {key} ({origin}); did you mean {nearest}?")]
    Unknown {
        origin: Origin,
        key: String,
        nearest: String,
    },
    #[error("{key} = {value:?} ({origin}) is not a {expected}")]
    Invalid {
        origin: Origin,
        key: String,
        value: String,
        expected: &'static str,
    },
    #[error("{key} = {value:?} ({origin}) is outside {low} to {high}")]
    OutOfBounds {
        origin: Origin,
        key: String,
        value: String,
        low: u64,
        high: u64,
    },
    #[error("{key} needs {other}")]
    Disagree { key: &'static str, other: &'static str },
    #[error("cannot read the settings file {}: {source}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("the settings file {} is larger than {FILE_BYTES_MAX} bytes", path.display())]
    TooLarge { path: PathBuf },
    #[error("the settings file {} is not TOML: {message}", path.display())]
    NotToml { path: PathBuf, message: String },
}

impl Sources {
    /// The file that applies to this process, if there is one, and its environment.
    pub fn of_process() -> Result<Sources, SettingsError> {
        let mut sources = Sources::default();
        for (name, value) in std::env::vars_os() {
            let (Some(name), Some(value)) = (name.to_str(), value.to_str()) else {
                continue;
            };
            sources = sources.variable(name, value);
        }
        if let Some(path) = file_of_process() {
            let text = read_bounded(&path)?;
            sources = sources.file(path, text);
        }
        Ok(sources)
    }

    pub fn file(mut self, path: impl Into<PathBuf>, text: impl Into<String>) -> Sources {
        self.file = Some((path.into(), text.into()));
        self
    }

    /// An environment variable; those without our prefix are passed over.
    pub fn variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Sources {
        let name = name.into();
        if name.starts_with("WEFT_") && !OTHER_VARIABLES.contains(&name.as_str()) {
            self.variables.push((name, value.into()));
        }
        self
    }

    /// A setting by its key, from the caller. It wins over the file and the environment.
    pub fn set(mut self, key: impl Into<String>, value: impl Into<String>) -> Sources {
        self.calls.push((key.into(), value.into()));
        self
    }
}

/// The winning value of every row.
#[derive(Debug)]
pub(super) struct Chosen {
    values: Vec<(Raw, Origin)>,
}

impl Chosen {
    pub(super) fn new(sources: &Sources) -> Result<Chosen, SettingsError> {
        let mut values: Vec<_> = TABLE
            .iter()
            .map(|row| (Raw::Text(row.default.to_owned()), Origin::Default))
            .collect();
        if let Some((path, text)) = &sources.file {
            for (key, raw) in parse_file(path, text)? {
                let origin = Origin::File(path.clone());
                let index = find(&key, &origin, |row| row.key.to_owned())?;
                values[index] = (raw, origin);
            }
        }
        for (name, value) in &sources.variables {
            let index = find(name, &Origin::Environment, Setting::variable)?;
            values[index] = (Raw::Text(value.clone()), Origin::Environment);
        }
        for (key, value) in &sources.calls {
            let index = find(key, &Origin::Call, |row| row.key.to_owned())?;
            values[index] = (Raw::Text(value.clone()), Origin::Call);
        }
        Ok(Chosen { values })
    }

    pub(super) fn origin(&self, index: usize) -> &Origin {
        &self.values[index].1
    }

    pub(super) fn parse<T: Value>(&self, index: usize, row: &Setting) -> Result<T, SettingsError> {
        let (raw, origin) = &self.values[index];
        let key = match origin {
            Origin::Environment => row.variable(),
            _ => row.key.to_owned(),
        };
        let value = || raw.to_string().chars().take(SHOWN_CHARS_MAX).collect::<String>();
        let Some(parsed) = T::parse(raw) else {
            return Err(SettingsError::Invalid {
                origin: origin.clone(),
                key,
                value: value(),
                expected: row.kind,
            });
        };
        if let (Some((low, high)), Some(measure)) = (row.bounds, parsed.measure())
            && !(low..=high).contains(&measure)
        {
            return Err(SettingsError::OutOfBounds {
                origin: origin.clone(),
                key,
                value: value(),
                low,
                high,
            });
        }
        Ok(parsed)
    }
}

/// The row that a source calls `name`, or the error that says what it may have meant.
fn find(name: &str, origin: &Origin, naming: impl Fn(&Setting) -> String) -> Result<usize, SettingsError> {
    if let Some(index) = TABLE.iter().position(|row| naming(row) == name) {
        return Ok(index);
    }
    let shown: String = name.chars().take(SHOWN_CHARS_MAX).collect();
    let likeness = |known: &String| strsim::normalized_damerau_levenshtein(known, &shown);
    let nearest = TABLE
        .iter()
        .map(naming)
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
        .unwrap_or_default();
    Err(SettingsError::Unknown {
        origin: origin.clone(),
        key: shown,
        nearest,
    })
}

fn parse_file(path: &Path, text: &str) -> Result<BTreeMap<String, Raw>, SettingsError> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| SettingsError::NotToml {
        path: path.to_owned(),
        message: error.to_string(),
    })?;
    let mut flat = BTreeMap::new();
    let mut pending = vec![(String::new(), table)];
    while let Some((prefix, table)) = pending.pop() {
        for (name, value) in table {
            let key = if prefix.is_empty() {
                name
            } else {
                format!("{prefix}.{name}")
            };
            match value {
                toml::Value::Table(inner) if inner.is_empty() => {
                    // An empty table says nothing, but a misspelt one was meant to say something.
                    if !TABLE.iter().any(|row| row.key.starts_with(&format!("{key}."))) {
                        find(&key, &Origin::File(path.to_owned()), |row| row.key.to_owned())?;
                    }
                }
                toml::Value::Table(inner) => pending.push((key, inner)),
                toml::Value::Array(items) => {
                    flat.insert(key, Raw::List(items.iter().map(scalar).collect()));
                }
                value => {
                    flat.insert(key, Raw::Text(scalar(&value)));
                }
            }
        }
    }
    Ok(flat)
}

fn scalar(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn file_of_process() -> Option<PathBuf> {
    // A file that was named must exist; the others apply if they do.
    if let Some(named) = std::env::var_os(FILE_VARIABLE).filter(|path| !path.is_empty()) {
        return Some(named.into());
    }
    let configuration = configuration_home().map(|home| home.join("weft/weft.toml"));
    [Some(PathBuf::from("weft.toml")), configuration]
        .into_iter()
        .flatten()
        .find(|path| path.is_file())
}

pub(super) fn configuration_home() -> Option<PathBuf> {
    let directory = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    directory("XDG_CONFIG_HOME").or_else(|| directory("HOME").map(|home| home.join(".config")))
}

fn read_bounded(path: &Path) -> Result<String, SettingsError> {
    let unreadable = |source| SettingsError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(SettingsError::TooLarge { path: path.to_owned() });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::super::{Settings, TransportChoice};
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn load(sources: Sources) -> Result<Settings, SettingsError> {
        Settings::from_sources(&sources)
    }

    #[test]
    fn the_last_source_wins() {
        let file = Sources::default().file("weft.toml", "spin = \"1us\"\ndeadline = \"9s\"\nheartbeat = \"2s\"");
        let all = file
            .variable("WEFT_SPIN", "2us")
            .variable("WEFT_DEADLINE", "8s")
            .set("spin", "3us");
        let settings = load(all).unwrap();
        assert_eq!(settings.spin, Duration::from_micros(3));
        assert_eq!(settings.deadline, Duration::from_secs(8));
        assert_eq!(settings.heartbeat, Duration::from_secs(2));
        let origins: BTreeMap<_, _> = settings
            .rows()
            .into_iter()
            .map(|(row, _, origin)| (row.key, origin))
            .collect();
        assert_eq!(origins["spin"], &Origin::Call);
        assert_eq!(origins["deadline"], &Origin::Environment);
        assert_eq!(origins["heartbeat"], &Origin::File("weft.toml".into()));
        assert_eq!(origins["checksum"], &Origin::Default);
    }

    #[test]
    fn a_file_has_tables_lists_numbers_and_booleans() {
        let text =
            "transports = [\"tcp\"]\nchecksum = true\n[tcp]\nconnections = 8\nrails = [\"10.0.0.1\", \"10.0.0.2\"]";
        let settings = load(Sources::default().file("f", text)).unwrap();
        assert_eq!(settings.transports, [TransportChoice::Tcp]);
        assert_eq!(
            (settings.checksum, settings.tcp_connections, settings.tcp_rails.len()),
            (true, 8, 2)
        );
    }

    #[test]
    fn unknown_names_are_refused_with_the_nearest() {
        let nearest = |sources| match load(sources) {
            Err(SettingsError::Unknown { nearest, .. }) => nearest,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            nearest(Sources::default().variable("WEFT_TCP_CONECTIONS", "1")),
            "WEFT_TCP_CONNECTIONS"
        );
        assert_eq!(nearest(Sources::default().set("hartbeat", "1s")), "heartbeat");
        assert_eq!(
            nearest(Sources::default().file("f", "[tpc]\nconnections = 1")),
            "tcp.connections"
        );
        assert_eq!(
            nearest(Sources::default().file("f", "[tcp.zero]\ncopy = \"on\"")),
            "tcp.connections"
        );
        assert!(load(Sources::default().file("f", "[tpc]")).is_err());
        assert!(load(Sources::default().file("f", "[tcp]")).is_ok());
        for name in [
            "WEFT_CONFIG",
            "WEFT_ADMIN_TOKEN",
            "WEFT_NIXL",
            "WEFT_REQUIRE",
            "WEFT_LEFT_OUT",
            "PATH",
        ] {
            assert!(load(Sources::default().variable(name, "x")).is_ok(), "{name}");
        }
    }

    #[test]
    fn bad_values_name_source_and_key() {
        let error = load(Sources::default().variable("WEFT_SPIN", "fast"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("WEFT_SPIN") && error.contains("environment") && error.contains("duration"),
            "{error}"
        );
        let error = load(Sources::default().file("a/weft.toml", "tcp = 4"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("a/weft.toml") && error.contains("tcp"), "{error}");
        assert!(matches!(
            load(Sources::default().set("tcp.connections", "0")),
            Err(SettingsError::OutOfBounds { .. })
        ));
        assert!(matches!(
            load(Sources::default().file("f", "spin = [1]")),
            Err(SettingsError::Invalid { .. })
        ));
        assert!(matches!(
            load(Sources::default().file("f", "spin = ")),
            Err(SettingsError::NotToml { .. })
        ));
    }

    proptest! {
        #[test]
        fn no_file_panics(text in "[a-z\\[\\]=\". \n0-9]{0,200}") {
            let _ = load(Sources::default().file("f", text));
        }
    }
}
