//! A rank at its agent, which other threads use too.

use std::sync::Arc;

use weft_fabric::Live;
use weft_fabric::fork::Forked;
use weft_fabric::kernels::HostKernels;
use weft_fabric::memory::HostMemory;
use weft_plan::Time;
use weft_protocol::agent::Core;
use weft_protocol::group::{Notes, Seat};
use weft_protocol::region::Region;

use super::board::Board;
use crate::agent::Agent;
use crate::driver::Shared;
use crate::memory::Memory;

#[derive(Debug)]
pub(super) struct AgentSeat {
    agent: Agent,
    pub(super) shared: Arc<Shared>,
    pub(super) board: Arc<Board>,
}

impl AgentSeat {
    pub(super) fn new(agent: &Agent, board: Arc<Board>) -> Result<AgentSeat, Forked> {
        Ok(AgentSeat {
            agent: agent.clone(),
            shared: agent.shared()?.clone(),
            board,
        })
    }
}

impl Seat for AgentSeat {
    type Transport = dyn Live;
    type Kernels = HostKernels;
    type Held = Memory;
    type Came = HostMemory;

    fn now(&self) -> Time {
        self.shared.clock.now()
    }
    fn act<R>(&self, change: impl FnOnce(&mut Core<dyn Live>, Time) -> R) -> R {
        self.shared.act(|world, now| change(&mut world.core, now))
    }
    fn turn<R>(&self, look: impl FnOnce(&mut Core<dyn Live>) -> R) -> R {
        self.shared.turn_with(|world| look(&mut world.core))
    }
    fn look<R>(&self, look: impl FnOnce(&Core<dyn Live>) -> R) -> R {
        look(&self.shared.lock().core)
    }
    fn notes<R>(&self, change: impl FnOnce(&mut Notes) -> R) -> R {
        change(&mut self.board.lock())
    }
    fn kernels(&self) -> &HostKernels {
        &HostKernels
    }
    fn came(&self, bytes: Vec<u8>) -> HostMemory {
        HostMemory::from_vec(bytes)
    }
    fn allocate(&self, bytes: usize) -> Option<Memory> {
        self.agent.allocate(bytes).ok()
    }
    fn region(held: &Memory) -> &Region {
        &held.inner.region
    }
}
