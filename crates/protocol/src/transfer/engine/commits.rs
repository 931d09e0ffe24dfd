//! Commits: after the last part, one for each far region.

use std::sync::Arc;

use super::{Engine, OpenOp};
use crate::error::{Failure, Refusal};
use crate::transfer::state::Part;
use crate::transfer::{LaneId, Post, TransferId};
use crate::transport::{Body, Commit, Done, Op, OpId};

impl Engine {
    pub(super) fn open_commit(&mut self, id: TransferId, leg: usize, lane: LaneId) -> Post {
        let (Some(state), Some(transfer)) = (self.lanes.at_mut(lane.0), self.transfers.get_mut(id.0)) else {
            unreachable!("the lane was chosen and the transfer is to be committed");
        };
        state.inflight_ops += 1;
        transfer.open += 1;
        let region = Arc::new(transfer.request.legs[leg].remote().clone());
        let tag = transfer.request.tag.unwrap_or_default();
        let body = Body::Commit(Commit::new(region, tag, transfer.parts_to_commit(leg)));
        let deadline = transfer.request.deadline;
        let part = Part {
            leg: leg as u32,
            start: 0,
            end: 0,
            index: 0,
            attempts: 0,
            mismatches: 0,
        };
        let op = OpId(self.ops.insert(OpenOp {
            transfer: id,
            lane,
            transport: state.lane.transport,
            part,
            commit: true,
        }));
        Post {
            lane,
            op: Op::new(op, deadline, body),
        }
    }

    /// What a commit that is over means for its transfer.
    pub(super) fn settle_commit(&mut self, op: &OpenOp, outcome: Result<Done, Failure>) {
        let id = op.transfer;
        let Some(transfer) = self.transfers.get_mut(id.0) else {
            return;
        };
        match outcome {
            Ok(_) => {
                transfer.on_committed();
                self.make_ready(id);
            }
            Err(failure @ Failure::PathLost { .. }) if transfer.failure.is_none() => {
                transfer.setback = Some(failure);
                match transfer.on_commit_lost() >= self.limits.max_attempts {
                    true => self.fail(id, failure, Some(op.transport)),
                    false => self.make_ready(id),
                }
            }
            Err(Failure::Refused(Refusal::Late)) => self.fail(id, Failure::Expired, Some(op.transport)),
            Err(failure) => self.fail(id, failure, Some(op.transport)),
        }
        self.end_if_over(id);
    }
}
