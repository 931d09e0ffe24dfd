//! A set of cores, as the kernel writes it: `0-3,8,10-11`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// Core numbers, ascending, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cores(Vec<u16>);

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CoreListError {
    #[error("`{text}` is neither a core nor a range of cores")]
    BadRange { text: String },
    #[error("`{text}` runs backwards")]
    Backwards { text: String },
}

impl Cores {
    pub fn len(&self) -> usize {
        self.0.len()
    }
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().copied()
    }
    pub fn contains(&self, core: u16) -> bool {
        self.0.binary_search(&core).is_ok()
    }
}

impl FromIterator<u16> for Cores {
    fn from_iter<I: IntoIterator<Item = u16>>(cores: I) -> Cores {
        let mut cores: Vec<u16> = cores.into_iter().collect();
        cores.sort_unstable();
        cores.dedup();
        Cores(cores)
    }
}

impl FromStr for Cores {
    type Err = CoreListError;
    fn from_str(text: &str) -> Result<Cores, CoreListError> {
        let mut seen = vec![false; usize::from(u16::MAX) + 1];
        for range in text.trim().split(',').map(str::trim).filter(|r| !r.is_empty()) {
            let shown = || range.chars().take(32).collect::<String>();
            // A sign would be accepted by the standard library, but not by the kernel.
            let number = |digits: &str| match digits.bytes().all(|b| b.is_ascii_digit()) {
                true => digits.parse::<u16>().ok(),
                false => None,
            };
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (Some(first), Some(last)) = (number(first), number(last)) else {
                return Err(CoreListError::BadRange { text: shown() });
            };
            if last < first {
                return Err(CoreListError::Backwards { text: shown() });
            }
            seen[usize::from(first)..=usize::from(last)].fill(true);
        }
        Ok((0..=u16::MAX).filter(|&core| seen[usize::from(core)]).collect())
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        for (nth, run) in runs.enumerate() {
            let comma = if nth == 0 { "" } else { "," };
            match run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [only] => write!(f, "{comma}{only}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl Serialize for Cores {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cores {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Cores, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
