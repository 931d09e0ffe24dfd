//! How a path or an agent's life ends.

use weft_protocol::{Direction, Failure, Loss, Signal};

use super::{Packet, Side, Stage, Wire};
use crate::world::{NodeId, State};

impl State {
    /// Ends one side of a path: its operations complete, then it is lost, and it acts on nothing that comes later.
    pub(crate) fn lose(&mut self, wire_id: u32, side: Side, loss: Loss, fenced: bool) {
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let half = wire.half_mut(side);
        if half.stage == Stage::Closed {
            return;
        }
        half.stage = Stage::Closed;
        half.inbound.clear();
        let ops = std::mem::take(&mut half.ops);
        let atomics = std::mem::take(&mut half.atomics);
        let seat = half.seat;
        let fenced = fenced || wire.fabric.local;
        if wire.opener.stage == Stage::Closed && wire.acceptor.stage == Stage::Closed {
            self.wires.remove(&wire_id);
        }
        let Some((end, path)) = seat else { return };
        self.ends[end].paths.remove(&path);
        for (op, outgoing) in ops {
            let fenced = fenced || outgoing.job.part.direction == Direction::Read;
            let outcome = Err(Failure::PathLost { loss, fenced });
            self.signal(end, Signal::Completed { path, op, outcome });
        }
        for op in atomics.into_keys() {
            let outcome = Err(Failure::PathLost { loss, fenced });
            self.signal(end, Signal::Completed { path, op, outcome });
        }
        self.signal(end, Signal::Lost { path, loss, fenced });
    }

    /// One side takes the other for dead, which need not be so, and may go without a word.
    pub(super) fn fall_silent(&mut self, wire_id: u32, side: Side, fenced: bool) {
        let mute = self.chance.chance(self.faults.mute);
        if let Some(wire) = self.wires.get_mut(&wire_id).filter(|_| mute) {
            wire.half_mut(side).draining = true;
        }
        self.lose(wire_id, side, Loss::Silent, fenced);
        if !mute {
            self.send(wire_id, side, Packet::Reset, 64);
        }
    }

    /// Closes one side and tells the other.
    pub(crate) fn close(&mut self, wire_id: u32, side: Side) {
        self.send(wire_id, side, Packet::Reset, 64);
        self.lose(wire_id, side, Loss::Closed, false);
    }

    pub(crate) fn crash(&mut self, node: NodeId, told: bool) {
        for end in 0..self.ends.len() {
            if self.ends[end].node == node {
                self.end_life(end, told);
            }
        }
        self.nodes[node.0 as usize].up = told;
    }

    /// The end of an agent's life: it hears no more, and its peers learn of it from its kernel, or from the silence.
    pub(crate) fn end_life(&mut self, end: usize, told: bool) {
        let state = &mut self.ends[end];
        if !std::mem::replace(&mut state.alive, false) {
            return;
        }
        state.inbox.clear();
        let paths = std::mem::take(&mut state.paths);
        for (wire_id, side) in paths.into_values() {
            let Some(wire) = self.wires.get_mut(&wire_id) else {
                continue;
            };
            let half = wire.half_mut(side);
            half.stage = Stage::Closed;
            half.ops.clear();
            half.atomics.clear();
            half.inbound.clear();
            half.seat = None;
            let over = wire.half(side.other()).stage == Stage::Closed;
            if over {
                self.wires.remove(&wire_id);
            } else if told || wire.fabric.local {
                self.send(wire_id, side, Packet::Reset, 64);
            }
        }
    }

    /// Cuts an open path, one in use if there is one: at both sides as a reset does, or at one, which then believes that its peer
    /// is silent.
    pub(crate) fn reset_path(&mut self, pick: u64) -> bool {
        let is_open = |w: &Wire| w.opener.stage == Stage::Open && w.acceptor.stage == Stage::Open;
        let is_used = |w: &Wire| w.opener.open() + w.acceptor.open() > 0;
        let open = self.wires.iter().filter(|(_, wire)| is_open(wire));
        let (used, unused): (Vec<_>, Vec<_>) = open.partition(|(_, wire)| is_used(wire));
        let open: Vec<u32> = if used.is_empty() { unused } else { used }
            .iter()
            .map(|(id, _)| **id)
            .collect();
        if open.is_empty() {
            return false;
        }
        let wire_id = open[(pick % open.len() as u64) as usize];
        self.tally.closed_paths += 1;
        let how = self.chance.below(4);
        self.note(&[4, u64::from(wire_id), how], || {
            format!("path {wire_id} is cut, manner {how}")
        });
        match how {
            0 => self.fall_silent(wire_id, Side::Opener, false),
            1 => self.fall_silent(wire_id, Side::Acceptor, false),
            _ => {
                self.lose(wire_id, Side::Opener, Loss::ClosedByPeer, true);
                self.lose(wire_id, Side::Acceptor, Loss::ClosedByPeer, true);
            }
        }
        true
    }
}
