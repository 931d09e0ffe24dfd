//! Where a rank of a group sits: at its agent.

use std::fmt;

use weft_plan::Time;

use super::combine::Kernels;
use super::notes::Notes;
use crate::agent::Core;
use crate::memory::Memory;
use crate::region::Region;
use crate::transport::Transport;

/// A rank's agent and its notes of the group, whoever else has them: threads under a mutex in the real world, nobody in the simulated one.
///
/// The agent may be in use while [notes](Seat::notes) are asked for, and never the other way round.
pub trait Seat: fmt::Debug + Send {
    type Transport: ?Sized + Transport;
    type Kernels: Kernels;
    /// Memory of this rank's own, which stays registered while this is held.
    type Held: fmt::Debug + Send;
    /// Bytes that have come, as memory that kernels are quick with.
    type Came: Memory;

    fn now(&self) -> Time;
    /// Changes something at the agent, and gets that under way.
    fn act<R>(&self, change: impl FnOnce(&mut Core<Self::Transport>, Time) -> R) -> R;
    /// Lets the agent make progress, and looks at what that has brought.
    fn turn<R>(&self, look: impl FnOnce(&mut Core<Self::Transport>) -> R) -> R;
    /// Only looks.
    fn look<R>(&self, look: impl FnOnce(&Core<Self::Transport>) -> R) -> R;
    fn notes<R>(&self, change: impl FnOnce(&mut Notes) -> R) -> R;

    fn kernels(&self) -> &Self::Kernels;
    fn came(&self, bytes: Vec<u8>) -> Self::Came;
    /// `None`: there is none to be had.
    fn allocate(&self, bytes: usize) -> Option<Self::Held>;
    fn region(held: &Self::Held) -> &Region;
}
