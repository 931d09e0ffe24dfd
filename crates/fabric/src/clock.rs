//! The agent's clock: one origin for every deadline of a process.

use std::time::Instant;

use weft_plan::Time;

/// Time since the agent's start. Copies share the origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    already: Time,
}

impl Clock {
    pub fn start() -> Clock {
        Clock::reading(Time::ZERO)
    }
    /// A clock that reads `already` now, as that of an agent which has run for so long.
    pub fn reading(already: Time) -> Clock {
        let origin = Instant::now();
        Clock { origin, already }
    }
    pub fn now(&self) -> Time {
        self.already.saturating_add(self.origin.elapsed().into())
    }
}
