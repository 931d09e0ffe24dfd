//! The agent's clock: one origin for every deadline of a process.

use std::time::Instant;

use weft_plan::Time;

/// Time since the agent's start. Copies share the origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { origin: Instant::now() }
    }
    pub fn now(&self) -> Time {
        self.origin.elapsed().into()
    }
}
