//! The end of a path, from the first connection that is lost to the last word on every move.

use std::io;
use std::net::Shutdown;

use weft_plan::Time;
use weft_protocol::{Failure, Loss, Progress, Signal};

use super::{Path, Phase, World, completed};
use crate::tcp::connection::Gone;
use crate::tcp::ops::{LocalOp, Stage};

/// How long the other connections of a lost path may take to be closed by the peer as well.
const CLOSING_MAX: Time = Time::from_ms(200);

impl Path {
    /// Watches a connection of a path that is closing until the peer has closed it as well.
    pub(super) fn drain(&mut self, index: usize) -> Result<Progress, Gone> {
        let Some(connection) = &mut self.connections[index] else {
            return Ok(Progress::Idle);
        };
        match connection.stream.discard(1 << 20) {
            Ok(0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(_) => Ok(Progress::Busy),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Progress::Idle),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Progress::Busy),
            Err(e) => Err(e.into()),
        }
    }

    /// One connection is gone, and with it the path.
    pub(super) fn lose(&mut self, index: usize, gone: Gone, now: Time, world: &mut World<'_>) {
        let loss = match self.phase {
            Phase::Over => return,
            Phase::Opening { .. } => {
                self.connections.clear();
                self.phase = Phase::Over;
                if self.opened_here {
                    world.signals.push(Signal::Lost {
                        path: self.id,
                        loss: gone.loss,
                        fenced: true,
                    });
                }
                return;
            }
            Phase::Live => {
                self.settle_harmless(gone.loss, world);
                for (at, connection) in self.connections.iter_mut().enumerate() {
                    if let Some(connection) = connection
                        && at != index
                    {
                        // The peer takes it as its own end of the path, and answers in kind.
                        let _ = connection.stream.socket().shutdown(Shutdown::Write);
                        let _ = connection.watch(world.epoll, false);
                    }
                }
                self.phase = Phase::Closing {
                    loss: gone.loss,
                    until: now.saturating_add(CLOSING_MAX),
                    fenced: true,
                };
                gone.loss
            }
            Phase::Closing { loss, .. } => loss,
        };
        let lost: Vec<u64> = self
            .ops
            .iter()
            .filter(|op| op.connection == index)
            .map(|op| op.wire)
            .collect();
        self.connections[index] = None;
        let unanswered = index == 0 && self.lose_atomics(loss, gone.fenced, world);
        if let Phase::Closing { fenced, .. } = &mut self.phase {
            *fenced &= gone.fenced || (lost.is_empty() && !unanswered);
        }
        for wire in lost {
            if let Some(op) = self.ops.remove(wire)
                && op.stage != Stage::Ended
            {
                let failure = Failure::PathLost {
                    loss,
                    fenced: gone.fenced,
                };
                world.signals.push(completed(self.id, op.id, Err(failure)));
            }
        }
        if self.connections.iter().all(Option::is_none) {
            self.finish(true, world);
        }
    }

    /// Completes what a lost path leaves no doubt about: reads, and writes that the peer never heard of.
    fn settle_harmless(&mut self, loss: Loss, world: &mut World<'_>) {
        let connections = &self.connections;
        let harmless = |op: &&LocalOp| {
            let job = op.job.unwrap_or(u64::MAX);
            let connection = connections[op.connection].as_ref();
            op.is_read() || connection.is_some_and(|c| !c.outbound.is_announced(job))
        };
        let settled: Vec<u64> = self.ops.iter().filter(harmless).map(|op| op.wire).collect();
        for wire in settled {
            if let Some(op) = self.ops.remove(wire)
                && op.stage != Stage::Ended
            {
                let failure = Failure::PathLost { loss, fenced: true };
                world.signals.push(completed(self.id, op.id, Err(failure)));
            }
        }
    }

    /// The end of a path: whatever is still open completes, and then the path is lost.
    pub(super) fn finish(&mut self, all_closed: bool, world: &mut World<'_>) {
        let Phase::Closing { loss, fenced, .. } = self.phase else {
            return;
        };
        let mut fenced = fenced;
        for op in self.ops.drain() {
            fenced &= all_closed;
            if op.stage != Stage::Ended {
                let failure = Failure::PathLost {
                    loss,
                    fenced: all_closed,
                };
                world.signals.push(completed(self.id, op.id, Err(failure)));
            }
        }
        fenced &= !self.lose_atomics(loss, all_closed, world) || all_closed;
        self.connections.clear();
        self.phase = Phase::Over;
        world.signals.push(Signal::Lost {
            path: self.id,
            loss,
            fenced,
        });
    }

    /// This side wants no more of the path.
    pub(in crate::tcp) fn close(&mut self, world: &mut World<'_>) {
        match self.phase {
            Phase::Over => return,
            Phase::Live => self.settle_harmless(Loss::Closed, world),
            Phase::Opening { .. } | Phase::Closing { .. } => {}
        }
        self.phase = Phase::Closing {
            loss: Loss::Closed,
            until: Time::ZERO,
            fenced: true,
        };
        self.finish(false, world);
    }
}
