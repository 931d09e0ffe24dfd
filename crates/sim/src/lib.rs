//! The simulated world: the same engines as the real one, on a virtual clock.
//!
//! A [`World`] has a seed, a clock that only it advances, nodes that live and die, and links that lose, repeat, reorder, delay
//! and flip. [`SimTransport`] is one end of such links behind the `Transport` waist, so the very agent core that runs on
//! threads runs here. [`seeds::run`] makes a whole world out of a number: agents, work, faults, and the checks that hold whatever
//! happens. The same number gives the same world, event by event.
#![forbid(unsafe_code)]

pub mod agent;
pub mod faults;
pub mod flow;
pub mod harness;
pub mod packet;
pub mod scenario;
pub mod seat;
pub mod seeds;
pub mod serving;
pub mod store;
pub mod trace;
pub mod traffic;
pub mod training;
pub mod transport;
pub mod world;

mod checks;
mod execution;
mod wire;

pub use agent::{Birth, SimAgent};
pub use checks::RunError;
pub use faults::{Faults, Tally};
pub use seat::{SharedAgent, SimSeat};
pub use trace::Trace;
pub use transport::{Fabric, SimTransport};
pub use world::{NodeId, World};
