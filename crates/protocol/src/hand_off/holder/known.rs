//! Hand-offs that are known though nobody here holds them: those that are over, and those that only readers have spoken of.

use std::collections::{BTreeMap, VecDeque};

use super::super::Over;

/// Those that are over are remembered, to be able to answer those who still ask for them.
const OVER_MAX: usize = 4096;
/// Those that only readers have spoken of, in all and by one reader.
const SPOKEN_OF_MAX: usize = 8192;
const SPOKEN_OF_BY_ONE_MAX: usize = 1024;

/// How many hand-offs only readers have spoken of, in all and by reader.
#[derive(Debug, Default)]
pub(in super::super) struct Spoken {
    all: usize,
    by: BTreeMap<String, usize>,
}

impl Spoken {
    pub(super) fn add(&mut self, reader: &str) -> Result<(), Over> {
        if self.all >= SPOKEN_OF_MAX || self.by.get(reader).is_some_and(|of| *of >= SPOKEN_OF_BY_ONE_MAX) {
            return Err(Over::TooMany);
        }
        self.all += 1;
        *self.by.entry(reader.to_owned()).or_default() += 1;
        Ok(())
    }

    /// One of them is known here now, or over.
    pub(super) fn remove(&mut self, spoken_by: Option<String>) {
        let Some(reader) = spoken_by else { return };
        self.all -= 1;
        if let Some(of) = self.by.get_mut(&reader) {
            *of -= 1;
            if *of == 0 {
                self.by.remove(&reader);
            }
        }
    }
}

/// The last hand-offs that are over, and why.
#[derive(Debug, Default)]
pub(in super::super) struct Ring {
    why: BTreeMap<String, Over>,
    order: VecDeque<String>,
}

impl Ring {
    pub(super) fn why(&self, name: &str) -> Option<Over> {
        self.why.get(name).copied()
    }

    pub(super) fn remember(&mut self, name: &str, why: Over) {
        if self.why.insert(name.to_owned(), why).is_none() {
            self.order.push_back(name.to_owned());
        }
        if self.order.len() > OVER_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.why.remove(&oldest);
        }
    }
}
