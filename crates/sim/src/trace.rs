//! What happened, as one number to compare and, when asked for, as lines to read.

use std::collections::VecDeque;
use std::fmt;

use weft_plan::Time;

/// Lines kept of a world that is being replayed: the last ones, where the failure is.
const LINES_MAX: usize = 400_000;

/// The history of a world. Two worlds of one seed have the same hash after the same number of steps.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    lines: Option<VecDeque<String>>,
}

impl Trace {
    pub(crate) fn new(verbose: bool) -> Trace {
        Trace {
            hash: 0xcbf2_9ce4_8422_2325,
            lines: verbose.then(VecDeque::new),
        }
    }

    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The last lines, where the world was made to keep them.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().flatten().map(String::as_str)
    }

    /// Folds numbers that describe an event into the hash.
    pub(crate) fn fold(&mut self, numbers: &[u64]) {
        for &number in numbers {
            self.hash = (self.hash ^ number).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
        }
    }

    /// Keeps a line, which is only put together where somebody will read it.
    pub(crate) fn line(&mut self, now: Time, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            if lines.len() == LINES_MAX {
                lines.pop_front();
            }
            lines.push_back(format!("{:>12.3} us  {}", now.as_ns() as f64 / 1e3, text()));
        }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines().try_for_each(|line| writeln!(f, "{line}"))
    }
}
