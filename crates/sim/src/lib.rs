//! The simulated world: the same engines as the real one, on a virtual clock.
#![forbid(unsafe_code)]
