//! How the ends agree over time.
//!
//! Everything here is a state machine without I/O, threads or a clock: events and `now` go in, posts, timeouts and events
//! come out. A pinned thread turns it in the real world and a seeded queue turns it in the simulated one.
#![forbid(unsafe_code)]

pub mod agent;
pub mod atomic;
pub mod block;
pub mod conformance;
pub mod error;
pub mod faulty;
pub mod group;
pub mod hand_off;
pub mod harness;
pub mod leg;
pub mod loopback;
pub mod matched;
pub mod memory;
mod numbered;
pub mod proxy;
pub mod region;
pub mod seeded;
pub mod session;
pub mod throttled;
pub mod transfer;
pub mod transport;
pub mod wire;

pub use atomic::{Atomic, AtomicAct};
pub use error::{Failure, Loss, Refusal};
pub use faulty::{Faults, Faulty};
pub use leg::{Direction, Leg, LegError};
pub use loopback::{Loopback, LoopbackEndpoint, PlacedMemory};
pub use memory::{HostBytes, Memory, VecMemory};
pub use region::{Access, Epoch, Region, RegionKey, RegionTable, RemoteRegion};
pub use seeded::Seeded;
pub use throttled::{Rate, Throttled};
pub use transport::{
    Arrival, Body, Capabilities, Carriage, Commit, Done, Flag, Grant, Move, Op, OpId, PathId, PeerAddress, Progress,
    Ready, Signal, Transport,
};
