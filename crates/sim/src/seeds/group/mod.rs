//! Groups of ranks: on a loopback of messages, and whole, on agents and links.

mod loopback;
mod member;
mod whole;
mod wish;

pub(super) use loopback::play;
pub(super) use whole::{GroupPlay, is_played};
