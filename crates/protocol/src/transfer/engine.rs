//! The engine: which part goes over which lane, when, and what follows.

mod commits;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use weft_plan::Time;

use super::cut::PartLimits;
use super::error::SubmitError;
use super::held::Held;
use super::lane::{Choice, Classes, Lane, LaneState, Next, Rest};
use super::slab::Slab;
use super::state::{Hanging, Measure, Notice, Part, Transfer};
use super::{LaneId, Limits, PeerId, Post, Request, TransferEvent, TransferId};
use crate::error::{Failure, Loss, Refusal};
use crate::leg::Direction;
use crate::numbered::Numbered;
use crate::transport::{Arrival, Body, Done, Move, Op, OpId};

/// How long a lane rests on which an operation was lost, if nothing more is heard of it.
const SHAKEN: Time = Time::from_ms(1);
/// A part is carried this often in all if its checksums differ.
const MISMATCHES_MAX: u8 = 2;

/// Turns requests into posts, and completions into events. See the [module](super) for the promises and an example.
///
/// Operations that it numbers have the topmost bit of their [`OpId`] clear; whoever turns it sets that bit in those of its own.
#[derive(Debug)]
pub struct Engine {
    limits: Limits,
    now: Time,
    /// Those that are live.
    lanes: Numbered<Box<LaneState>>,
    peers: Numbered<Peer>,
    transfers: Slab<Transfer>,
    ops: Slab<OpenOp>,
    /// Peers that may have something to post, each in its turn.
    turn: VecDeque<PeerId>,
    deadlines: BinaryHeap<Reverse<(Time, TransferId)>>,
    resting: Vec<(Time, LaneId)>,
    held: Held,
    cancels: VecDeque<(LaneId, OpId)>,
    events: VecDeque<TransferEvent>,
}

#[derive(Debug, Default)]
struct Peer {
    classes: Classes,
    /// Transfers with parts to post, each in its turn.
    ready: VecDeque<TransferId>,
    in_turn: bool,
    transfers: usize,
    gone: Option<Loss>,
    /// Nobody will ask for it again: to be dropped once nothing of it is left.
    forgotten: bool,
    /// Why the last lane went, and which transport's it was, while there is no other: the reason behind the peer's absence.
    last_loss: Option<(Loss, &'static str)>,
}

#[derive(Debug)]
struct OpenOp {
    transfer: TransferId,
    lane: LaneId,
    transport: &'static str,
    part: Part,
    /// It is a commit, and moves nothing.
    commit: bool,
}

/// Whose word it is that the far end acts no more on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// The transport of this end says so.
    Ours,
    /// The far end has been asked.
    TheirOwn,
}

impl Engine {
    pub fn new(limits: Limits) -> Engine {
        Engine {
            limits,
            now: Time::ZERO,
            lanes: Numbered::new(),
            peers: Numbered::new(),
            transfers: Slab::new(),
            ops: Slab::new(),
            turn: VecDeque::new(),
            deadlines: BinaryHeap::new(),
            resting: Vec::new(),
            held: Held::default(),
            cancels: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// A path to a peer is there. Transfers that wait for one go on.
    pub fn add_lane(&mut self, lane: Lane) {
        let (id, peer) = (lane.id, lane.peer);
        let entry = self.peer(peer);
        entry.gone = None;
        entry.last_loss = None;
        entry.classes.remove(id);
        entry.classes.add(&lane);
        self.lanes.insert(id.0, Box::new(LaneState::new(lane)));
        self.take_turn(peer);
    }

    /// A lane is gone. Its operations count as lost where their completions have not come before.
    pub fn on_lane_lost(&mut self, lane: LaneId, loss: Loss, fenced: bool, now: Time) {
        self.advance(now);
        let Some(state) = self.lanes.at(lane.0) else { return };
        let (peer, transport) = (state.lane.peer, state.lane.transport);
        let entry = self.peer(peer);
        entry.classes.remove(lane);
        entry.last_loss = entry.classes.is_empty().then_some((loss, transport));
        let open: Vec<u64> = self
            .ops
            .iter()
            .filter(|(_, op)| op.lane == lane)
            .map(|(id, _)| id)
            .collect();
        for id in open {
            if let Some(op) = self.ops.remove(id) {
                self.settle(op, Err(Failure::PathLost { loss, fenced }));
            }
        }
        if fenced {
            self.release_hanging(lane, Word::Ours);
        }
        // Last, so that what is recalled because of this lane is recalled before the far end confirms that it is closed.
        let hangs = |(_, t): (u64, &Transfer)| t.hanging.iter().any(|lost| lost.lane == lane);
        let state = self.lanes.remove(lane.0);
        if state.is_some_and(|state| state.fence_wanted) && self.transfers.iter().any(hangs) {
            self.events.push_back(TransferEvent::FenceWanted { peer, lane });
        }
        self.take_turn(peer);
        self.drop_forgotten(peer);
    }

    /// The far end has confirmed that it acts no more on what was sent over a lost lane, nor counts its arrivals.
    pub fn on_lane_fenced(&mut self, lane: LaneId, now: Time) {
        self.advance(now);
        self.release_hanging(lane, Word::TheirOwn);
    }

    /// Something that is not the engine's has completed on a lane, so there is room.
    pub fn on_room(&mut self, lane: LaneId) {
        if let Some(state) = self.lanes.at_mut(lane.0)
            && matches!(state.rest, Rest::UntilRoom(_))
        {
            state.on_room();
            let peer = state.lane.peer;
            self.take_turn(peer);
        }
    }

    /// The notification of a tagged write has been delivered: whatever of it seems lost has arrived, and must not be repeated. That
    /// holds for what a failing transfer has given up as well.
    pub fn on_all_arrived(&mut self, id: TransferId, now: Time) {
        self.advance(now);
        let Some(transfer) = self.transfers.get_mut(id.0) else {
            return;
        };
        if !transfer.may_be_delivered() {
            return;
        }
        transfer.notice = Notice::Delivered;
        for lost in std::mem::take(&mut transfer.hanging) {
            transfer.on_part_done(&lost.part, lost.transport);
        }
        self.end_if_over(id);
    }

    /// The peer is gone for good: its transfers fail, each as soon as nothing of it is open.
    pub fn on_peer_gone(&mut self, peer: PeerId, loss: Loss, now: Time) {
        self.advance(now);
        let entry = self.peer(peer);
        // What happened to the last path says more than that there is none.
        let loss = entry.last_loss.map_or(loss, |(loss, _)| loss);
        entry.gone = Some(loss);
        let of_peer = |(_, t): &(u64, &Transfer)| t.request.peer == peer;
        let ids: Vec<u64> = self.transfers.iter().filter(of_peer).map(|(id, _)| id).collect();
        for id in ids {
            self.fail(TransferId(id), Failure::PathLost { loss, fenced: true }, None);
        }
    }

    /// Nothing more is asked of this peer: it is dropped with the last of its transfers and lanes.
    pub fn forget_peer(&mut self, peer: PeerId) {
        if let Some(entry) = self.peers.at_mut(peer.0) {
            entry.forgotten = true;
        }
        self.drop_forgotten(peer);
    }

    /// Accepts a transfer. What becomes of it is told by [`TransferEvent::Ended`], and by nothing else.
    pub fn submit(&mut self, request: Request, now: Time) -> Result<TransferId, SubmitError> {
        self.advance(now);
        let mut bytes = 0u64;
        for leg in request.legs.iter() {
            bytes = bytes.checked_add(leg.bytes()).ok_or(SubmitError::TooLarge)?;
        }
        let (peer, deadline) = (request.peer, request.deadline);
        let full = self.transfers.len() >= self.limits.max_transfers || self.transfers.is_full();
        let max_per_peer = self.limits.max_transfers_per_peer;
        let entry = self.peer(peer);
        if let Some(loss) = entry.gone {
            return Err(SubmitError::PeerGone(loss));
        }
        if full || entry.transfers >= max_per_peer {
            return Err(SubmitError::TooManyTransfers);
        }
        entry.transfers += 1;
        let id = TransferId(self.transfers.insert(Transfer::new(request, bytes, now)));
        if deadline <= now {
            self.fail(id, Failure::Expired, None);
        } else if bytes == 0 && self.transfers.get(id.0).is_some_and(Transfer::is_over) {
            self.end_if_over(id);
        } else {
            if deadline != Time::MAX {
                self.deadlines.push(Reverse((deadline, id)));
            }
            self.make_ready(id);
        }
        Ok(id)
    }

    /// Ends a transfer early. Its [`TransferEvent::Ended`] still comes: success if it was too late, else [`Failure::Cancelled`].
    pub fn cancel(&mut self, id: TransferId, now: Time) {
        self.advance(now);
        self.fail(id, Failure::Cancelled, None);
    }

    /// The next operation to hand to a lane. Peers take turns, and so do the transfers of one peer.
    pub fn next_post(&mut self) -> Option<Post> {
        if self.ops.is_full() {
            return None;
        }
        while let Some(peer) = self.turn.pop_front() {
            let Some(entry) = self.peers.at_mut(peer.0) else {
                continue;
            };
            entry.in_turn = false;
            if let Some(post) = self.post_for(peer) {
                if !self.peer(peer).ready.is_empty() {
                    self.take_turn(peer);
                }
                return Some(post);
            }
        }
        None
    }

    /// Takes back what a lane did not accept, be it full or lost. The lane rests until something completes on it, or for a while if nothing of ours is
    /// on it.
    pub fn unaccepted(&mut self, post: Post) {
        let Some(op) = self.ops.remove(post.op.id.0) else {
            return;
        };
        if let Some(lane) = self.lanes.at_mut(op.lane.0) {
            lane.inflight_ops -= 1;
            lane.inflight_bytes -= op.part.len();
            if lane.inflight_ops > 0 {
                lane.rest = Rest::UntilCompletion;
            } else {
                self.resting.push((lane.on_full(self.now), op.lane));
            }
        }
        if let Some(transfer) = self.transfers.get_mut(op.transfer.0) {
            transfer.open -= 1;
            match op.commit {
                true => transfer.on_commit_unposted(),
                false => transfer.redo.push(op.part),
            }
            self.make_ready(op.transfer);
            self.end_if_over(op.transfer);
        }
    }

    /// The next operation to cancel.
    pub fn next_cancel(&mut self) -> Option<(LaneId, OpId)> {
        while let Some((lane, op)) = self.cancels.pop_front() {
            if self.ops.get(op.0).is_some() {
                return Some((lane, op));
            }
        }
        None
    }

    /// An operation has completed. One that the engine does not know is none of its business.
    pub fn on_completion(&mut self, lane: LaneId, op: OpId, outcome: Result<Done, Failure>, now: Time) {
        self.advance(now);
        if self.ops.get(op.0).is_none_or(|open| open.lane != lane) {
            return;
        }
        let Some(op) = self.ops.remove(op.0) else { return };
        if let Some(state) = self.lanes.at_mut(lane.0) {
            state.inflight_ops -= 1;
            state.inflight_bytes -= op.part.len();
            match outcome {
                Ok(_) => {
                    state.on_room();
                    state.rest = Rest::None;
                }
                Err(Failure::PathLost { .. }) if matches!(state.rest, Rest::Shaken(_)) => {}
                Err(Failure::PathLost { .. }) => {
                    let wake = self.now.saturating_add(SHAKEN);
                    state.rest = Rest::Shaken(wake);
                    self.resting.push((wake, lane));
                }
                Err(_) => state.on_room(),
            }
            let peer = state.lane.peer;
            if self.peers.at(peer.0).is_some_and(|p| !p.ready.is_empty()) {
                self.take_turn(peer);
            }
        }
        self.settle(op, outcome);
    }

    /// Lets transfers expire whose deadline is over, and lanes work that have rested.
    pub fn on_timeout(&mut self, now: Time) {
        self.advance(now);
        while let Some(&Reverse((deadline, id))) = self.deadlines.peek() {
            if deadline > now && self.transfers.get(id.0).is_some() {
                break;
            }
            self.deadlines.pop();
            if let Some(transfer) = self.transfers.get_mut(id.0) {
                transfer.overdue = true;
                // The target itself touches nothing after the deadline, so what hung on a lost lane hangs no more.
                for lost in &mut transfer.hanging {
                    lost.may_land = false;
                }
                self.fail(id, Failure::Expired, None);
            }
        }
        self.ask_held(now);
        let mut at = 0;
        while at < self.resting.len() {
            let (wake, lane) = self.resting[at];
            if wake > now {
                at += 1;
                continue;
            }
            self.resting.swap_remove(at);
            if let Some(state) = self.lanes.at_mut(lane.0)
                && matches!(state.rest, Rest::UntilRoom(until) | Rest::Shaken(until) if until <= now)
            {
                state.rest = Rest::None;
                let peer = state.lane.peer;
                self.take_turn(peer);
            }
        }
    }

    /// When [`Engine::on_timeout`] must be called at the latest.
    pub fn next_timeout(&self) -> Option<Time> {
        let deadline = self.deadlines.peek().map(|Reverse((deadline, _))| *deadline);
        let rested = self.resting.iter().map(|(wake, _)| *wake).min();
        deadline.into_iter().chain(rested).chain(self.held.next_timeout()).min()
    }

    pub fn next_event(&mut self) -> Option<TransferEvent> {
        self.events.pop_front()
    }

    /// Lets those go on whose time has come.
    fn ask_held(&mut self, now: Time) {
        let transfers = &self.transfers;
        let due = self
            .held
            .ask(now, |id| transfers.get(id.0).is_some_and(Transfer::is_early));
        for id in due {
            if let Some(transfer) = self.transfers.get_mut(id.0) {
                transfer.request.after = None;
                self.make_ready(id);
            }
        }
    }

    fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    fn peer(&mut self, id: PeerId) -> &mut Peer {
        self.peers.at_or_insert(id.0, Peer::default)
    }

    fn drop_forgotten(&mut self, peer: PeerId) {
        let over = |p: &Peer| p.forgotten && p.transfers == 0 && p.classes.is_empty();
        if self.peers.at(peer.0).is_some_and(over) {
            self.peers.remove(peer.0);
        }
    }

    fn take_turn(&mut self, peer: PeerId) {
        let entry = self.peer(peer);
        if !entry.in_turn {
            entry.in_turn = true;
            self.turn.push_back(peer);
        }
    }

    fn make_ready(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get_mut(id.0) else {
            return;
        };
        if !transfer.has_parts_to_post() {
            return;
        }
        let peer = transfer.request.peer;
        if !std::mem::replace(&mut transfer.queued, true) {
            self.peer(peer).ready.push_back(id);
        }
        self.take_turn(peer);
    }

    /// The next post of a peer, if one of its transfers has a part and a lane for it.
    fn post_for(&mut self, peer: PeerId) -> Option<Post> {
        let entry = self.peers.at_mut(peer.0)?;
        let mut waiting = 0;
        while waiting < entry.ready.len() {
            let id = entry.ready.pop_front()?;
            let Some(transfer) = self.transfers.get_mut(id.0) else {
                continue;
            };
            if !transfer.has_parts_to_post() {
                transfer.queued = false;
                continue;
            }
            let next = transfer.next();
            let chosen = match entry.classes.choose(&self.lanes, &transfer.avoid, &next) {
                Choice::Lane(chosen) => chosen,
                // All wait for the same: for any lane, or for room on those that carry whatever there is.
                _ if entry.classes.is_empty() => {
                    entry.ready.push_front(id);
                    return None;
                }
                Choice::Full if transfer.avoid.is_empty() && !entry.classes.differ() => {
                    entry.ready.push_front(id);
                    return None;
                }
                // Others may use lanes that this one cannot.
                Choice::Full | Choice::Nowhere => {
                    entry.ready.push_back(id);
                    waiting += 1;
                    continue;
                }
            };
            let lane = chosen.lane;
            if let Some(after) = &transfer.request.after {
                if after.is_ready() {
                    transfer.request.after = None;
                } else if !self.lanes.at(lane.0).is_some_and(|state| state.lane.awaits_ready) {
                    // It stands in no queue until its time has come, and holds up nobody.
                    transfer.queued = false;
                    self.held.add(id, self.now);
                    continue;
                }
            }
            if let Some(leg) = transfer.commit_due() {
                transfer.on_commit_posted();
                transfer.queued = false;
                return Some(self.open_commit(id, leg, lane));
            }
            let mut limits = chosen.limits;
            if transfer.request.tag.is_some() {
                // Counted parts stay as they are cut, so every lane on which they may end up must be able to carry them.
                limits = tightest(&self.lanes, &entry.classes, next, limits);
            }
            let measure = Measure {
                limits,
                // Where other transfers keep the lanes busy, there is nothing to be gained by spreading this one over them.
                share: if chosen.class_ops > transfer.open as usize {
                    1.0
                } else {
                    chosen.share
                },
                min_part: chosen.min_part,
            };
            let part = transfer.next_part(measure)?;
            if transfer.has_parts_to_post() {
                entry.ready.push_back(id);
            } else {
                transfer.queued = false;
            }
            return Some(self.open(id, part, lane));
        }
        None
    }

    fn open(&mut self, id: TransferId, part: Part, lane: LaneId) -> Post {
        let (Some(state), Some(transfer)) = (self.lanes.at_mut(lane.0), self.transfers.get_mut(id.0)) else {
            unreachable!("the lane was chosen and the transfer has a part");
        };
        state.inflight_ops += 1;
        state.inflight_bytes += part.len();
        transfer.open += 1;
        let request = &transfer.request;
        let last = request.arrives.is_some() && transfer.all_cut() && part.index + 1 == transfer.parts;
        let index = part.index | if last { Arrival::LAST } else { 0 };
        let after = request.after.clone();
        let body = Body::Move(
            Move::new(
                request.direction,
                request.legs[part.leg as usize].clone(),
                part.start..part.end,
            )
            .checksum(request.checksum)
            .arrival(request.tag.map(|tag| Arrival { tag, index })),
        );
        // With a checksum it must wait until every part is known to be whole. With a part that was repeated, until the repeat is
        // known to have landed: the peer may have counted the first attempt, and would believe the memory its own too early.
        let tell = transfer.all_cut()
            && !request.checksum
            && !transfer.repeated
            && !transfer.is_unannounced()
            && transfer.notice == Notice::Held;
        if let Some(tag) = request.tag.filter(|_| tell) {
            transfer.notice = Notice::Told;
            self.events.push_back(TransferEvent::Cut {
                id,
                tag,
                parts: transfer.parts,
            });
        }
        let deadline = transfer.request.deadline;
        let op = OpId(self.ops.insert(OpenOp {
            transfer: id,
            lane,
            transport: state.lane.transport,
            part,
            commit: false,
        }));
        Post {
            lane,
            op: Op::new(op, deadline, body).after(after),
        }
    }

    /// What an operation that is over means for its transfer.
    fn settle(&mut self, op: OpenOp, outcome: Result<Done, Failure>) {
        let id = op.transfer;
        let Some(transfer) = self.transfers.get_mut(id.0) else {
            return;
        };
        transfer.open -= 1;
        if op.commit {
            self.settle_commit(&op, outcome);
            return;
        }
        let outcome = match outcome {
            Ok(done) if transfer.request.checksum => match (done.far_sum, done.near_sum) {
                (Some(far), Some(near)) if far == near => Ok(()),
                (Some(_), Some(_)) => Err(Failure::ChecksumMismatch),
                _ => Err(Refusal::Unsupported.into()),
            },
            Ok(_) => Ok(()),
            Err(failure) => Err(failure),
        };
        match outcome {
            Ok(()) => {
                transfer.on_part_done(&op.part, op.transport);
                if transfer.open == 0 {
                    let commits = transfer.commit_due().is_some();
                    self.end_if_over(id);
                    if commits {
                        self.make_ready(id);
                    }
                }
            }
            Err(failure) => self.on_part_failed(op, failure),
        }
    }

    fn on_part_failed(&mut self, op: OpenOp, failure: Failure) {
        let OpenOp {
            transfer: id,
            lane,
            transport,
            mut part,
            ..
        } = op;
        let Some(transfer) = self.transfers.get_mut(id.0) else {
            return;
        };
        part.attempts += 1;
        // It may have landed, and the far application may have been told: it is not carried again.
        let once = transfer.request.arrives.is_some();
        if let Failure::PathLost { fenced, .. } = failure
            && transfer.request.direction == Direction::Write
        {
            match (transfer.notice, transfer.request.tag) {
                (Notice::Delivered, _) => {
                    transfer.on_part_done(&part, transport);
                    self.end_if_over(id);
                    return;
                }
                (Notice::Told, Some(tag)) if transfer.failure.is_none() => {
                    transfer.notice = Notice::Recalled;
                    self.events.push_back(TransferEvent::Recall { id, tag });
                }
                _ => {}
            }
            let may_land = !fenced && !transfer.overdue;
            if may_land || transfer.may_be_delivered() {
                transfer.repeated = true;
                if let Some(state) = self.lanes.at_mut(lane.0) {
                    state.fence_wanted |= may_land || transfer.is_undecided();
                }
                transfer.hanging.push(Hanging {
                    lane,
                    transport,
                    part,
                    may_land,
                });
                if transfer.failure.is_none() {
                    transfer.setback = Some(failure);
                }
                if once {
                    self.fail(id, failure, Some(transport));
                }
                self.end_if_over(id);
                return;
            }
        }
        // What was refused has not touched the far end's memory.
        transfer.repeated |= !matches!(failure, Failure::Refused(_));
        let give_up = match failure {
            Failure::Cancelled | Failure::PathLost { .. } => once || part.attempts >= self.limits.max_attempts,
            Failure::ChecksumMismatch => {
                part.mismatches += 1;
                once || part.mismatches >= MISMATCHES_MAX
            }
            Failure::Refused(Refusal::Unsupported) => {
                if !transfer.avoid.contains(&transport) {
                    transfer.avoid.push(transport);
                }
                let (peer, kinds) = (self.peers.at(transfer.request.peer.0), transfer.kinds(&part));
                let mut transports = peer.into_iter().flat_map(|p| p.classes.carriers(kinds));
                transports.all(|other| transfer.avoid.contains(&other))
            }
            Failure::Expired | Failure::Unanswered | Failure::Refused(_) => true,
        };
        transfer.redo.push(part);
        if give_up {
            let cause = match failure {
                Failure::Refused(Refusal::Late) => Failure::Expired,
                other => other,
            };
            self.fail(id, cause, Some(transport));
        } else if transfer.failure.is_some() {
            self.end_if_over(id);
        } else {
            transfer.retries += 1;
            transfer.setback = Some(failure);
            self.make_ready(id);
        }
    }

    /// Carries again what hung on a lane that is now known to be closed at the far end, unless it must be known first whether the
    /// peer's application has been notified.
    fn release_hanging(&mut self, lane: LaneId, word: Word) {
        let hangs = |(_, t): &(u64, &Transfer)| t.hanging.iter().any(|lost| lost.lane == lane);
        let ids: Vec<u64> = self.transfers.iter().filter(hangs).map(|(id, _)| id).collect();
        for id in ids {
            let Some(transfer) = self.transfers.get_mut(id) else {
                continue;
            };
            for lost in transfer.hanging.iter_mut().filter(|lost| lost.lane == lane) {
                lost.may_land = false;
            }
            if word == Word::TheirOwn && transfer.notice == Notice::Recalled {
                // It was asked after the recall and has said nothing of a delivery before it answered: there was none, and none
                // will be. Nobody counts the parts any more.
                transfer.notice = Notice::Held;
                transfer.request.tag = None;
            }
            if transfer.is_undecided() {
                continue;
            }
            if transfer.failure.is_some() {
                self.end_if_over(TransferId(id));
                continue;
            }
            let freed = transfer.unhang();
            transfer.retries += freed.len() as u32;
            let worn = freed.iter().any(|part| part.attempts >= self.limits.max_attempts);
            transfer.redo.extend(freed);
            let setback = transfer.setback;
            match setback {
                Some(failure) if worn => self.fail(TransferId(id), failure, None),
                _ => {
                    self.make_ready(TransferId(id));
                    self.end_if_over(TransferId(id));
                }
            }
        }
    }

    /// Decides that a transfer fails, unless that is decided already, and recalls what is open of it.
    fn fail(&mut self, id: TransferId, failure: Failure, transport: Option<&'static str>) {
        let Some(transfer) = self.transfers.get_mut(id.0) else {
            return;
        };
        if transfer.failure.is_none() {
            let peer = self.peers.at(transfer.request.peer.0);
            let next = || peer.and_then(|p| p.classes.transports().next());
            let lost = || peer.and_then(|p| p.last_loss).map(|(_, transport)| transport);
            let transport = transport.or_else(next).or_else(lost).unwrap_or("none");
            transfer.failure = Some((failure, transport));
            if transfer.open > 0 {
                let recalled = self.ops.iter().filter(|(_, op)| op.transfer == id);
                self.cancels.extend(recalled.map(|(op_id, op)| (op.lane, OpId(op_id))));
            }
        }
        self.end_if_over(id);
    }

    fn end_if_over(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get(id.0).filter(|transfer| transfer.is_over()) else {
            return;
        };
        let peer = transfer.request.peer;
        let succeeded = transfer.has_succeeded();
        let outcome = match transfer.failure {
            Some((cause, transport)) if !succeeded || transfer.bytes_total == 0 => {
                Err(transfer.error(cause, transport))
            }
            _ => {
                let held = transfer.notice == Notice::Held && !transfer.is_unannounced();
                if let Some(tag) = transfer.request.tag.filter(|_| held) {
                    self.events.push_back(TransferEvent::Cut {
                        id,
                        tag,
                        parts: transfer.parts,
                    });
                }
                Ok(transfer.summary(self.now))
            }
        };
        self.events.push_back(TransferEvent::Ended { id, outcome });
        self.transfers.discard(id.0);
        self.peer(peer).transfers -= 1;
        self.drop_forgotten(peer);
        self.forget_deadlines();
    }

    /// Deadlines of transfers that have ended are dropped once they come first, or are most of what is there.
    fn forget_deadlines(&mut self) {
        while let Some(Reverse((_, id))) = self.deadlines.peek()
            && self.transfers.get(id.0).is_none()
        {
            self.deadlines.pop();
        }
        if self.deadlines.len() > 2 * self.transfers.len() + 64 {
            let transfers = &self.transfers;
            self.deadlines.retain(|Reverse((_, id))| transfers.get(id.0).is_some());
        }
    }
}

/// The limits that every live lane of a peer keeps which can carry it.
fn tightest(lanes: &Numbered<Box<LaneState>>, classes: &Classes, next: Next, of_lane: PartLimits) -> PartLimits {
    let live = classes.lanes(next).filter_map(|id| {
        let state = lanes.at(id.0)?;
        Some(state.part_limits(state.pace(next.between)?))
    });
    live.fold(of_lane, PartLimits::tightest)
}
