//! From what waits to what the device has: packets while there are credits, moves while there is room.

use weft_protocol::{Arrival, Failure, Loss};
use weft_sys::verbs as sys;

use super::super::batch::{INLINE_PACKET_BYTES_MAX, REQUESTS_MAX, Room, Sides};
use super::super::buffers::Landing;
use super::super::message::{CREDITS_BYTES, Frame, Parcel, pack_credits};
use super::super::number;
use super::super::ops::{AskingStage, Serial, Stage, Work};
use super::super::tags::Telling;
use super::super::targets::State;
use super::{ANSWERS_MAX, Outgoing, Path, Phase, STAGED_MAX, Segment, World};

/// Requests that a move may need beside those of its bytes: the binding of its tag, and one more so that it makes progress.
const SPARE: usize = 2;

/// What became of trying to hand a move over.
enum Step {
    /// All of it has been handed over, or it has ended.
    Done,
    /// There is no room for the rest.
    Full,
    /// It needs credits that are not there.
    Stalled,
}

impl Path {
    /// Hands the device as much as it and the peer take, a list at a time.
    pub(in super::super) fn pump(&mut self, world: &mut World<'_>) {
        if !matches!(self.phase, Phase::Live | Phase::Greeting { .. } | Phase::Closing { .. }) {
            return;
        }
        if self.answers > ANSWERS_MAX {
            return self.lose(Loss::Garbage, world);
        }
        loop {
            world.batch.clear();
            self.pack(world);
            self.hand_over(world);
            let full = world.batch.len() + SPARE > REQUESTS_MAX || world.batch.bytes() >= list_bytes_max(world);
            let more = full || !self.parcels.is_empty();
            if world.batch.is_empty() || !self.ring(world) || !more {
                return;
            }
        }
    }

    /// Is there anything that the device or the peer could be given?
    fn has_more(&self) -> bool {
        !self.waiting.is_empty() || !self.parcels.is_empty() || self.credits.is_return_due()
    }

    /// Completions and packets may have set something free.
    pub(in super::super) fn is_stirred(&self) -> bool {
        self.stirred
    }

    /// Hands over what completions and packets have set free.
    pub(in super::super) fn pump_if_stirred(&mut self, world: &mut World<'_>) {
        if std::mem::take(&mut self.stirred) {
            self.pump(world);
        }
    }

    /// Requests that the device has room for, beyond those of the list that is being built.
    fn room(&self, world: &World<'_>) -> usize {
        let there = (self.posted - self.completed) as usize + world.batch.len();
        (world.options.send_depth as usize).saturating_sub(there)
    }

    /// Packs frames into packets, as many as there are credits for.
    fn pack(&mut self, world: &mut World<'_>) {
        while let Some(mut outgoing) = self.parcels.pop_front() {
            let bytes = outgoing.parcel.next_packet_bytes(self.packet_size);
            if self.credits.left() == 0 || !self.has_room_for_packet(bytes, world) {
                self.parcels.push_front(outgoing);
                break;
            }
            self.credits.spend();
            let owed = self.credits.take_owed();
            let op = outgoing.op;
            let size = self.packet_size;
            self.add_packet(bytes, op, world, |packet| outgoing.parcel.pack(owed, size, packet));
            if !outgoing.parcel.is_packed() {
                self.parcels.push_front(outgoing);
            } else {
                self.answers -= usize::from(outgoing.answer);
                match op.and_then(|op| self.ops.find(op)).map(|op| &mut op.work) {
                    Some(Work::Message { packed }) => *packed = true,
                    Some(Work::Atomic(asking)) => asking.stage = AskingStage::Asked,
                    Some(Work::Move(moving)) => moving.stage = Stage::HandedOver,
                    None => {}
                }
            }
        }
        // Credits travel with packets; alone only where no packet goes and the peer may soon have none.
        if self.credits.is_return_due() && self.has_room_for_packet(CREDITS_BYTES, world) {
            let owed = self.credits.take_owed();
            self.add_packet(CREDITS_BYTES, None, world, |packet| pack_credits(owed, packet));
        }
    }

    fn has_room_for_packet(&self, bytes: usize, world: &World<'_>) -> bool {
        let staged = bytes > inline_max(world);
        !(world.batch.is_full() || self.room(world) == 0 || staged && self.staged == STAGED_MAX)
    }

    /// Adds a packet that `pack` writes to the list.
    fn add_packet(
        &mut self,
        bytes: usize,
        op: Option<Serial>,
        world: &mut World<'_>,
        pack: impl FnOnce(&mut [u8]) -> usize,
    ) {
        let staged = bytes > inline_max(world);
        if staged {
            let place = self.staged_next;
            self.staged_next = (place + 1) % STAGED_MAX;
            self.staged += 1;
            // SAFETY: places are used in turn and given back in the same order, so the device does not have this one.
            let len = pack(unsafe { self.staging.bytes_mut(place) });
            let piece = self.staging.piece(place);
            world.batch.send(piece.addr, len as u32, piece.lkey);
        } else {
            world.batch.send_inline(pack);
        }
        world.counters.packets_sent += 1;
        self.add_segment(op, 0, staged, world);
    }

    /// Hands over moves until the list, the device or the room for bytes is full.
    fn hand_over(&mut self, world: &mut World<'_>) {
        if self.phase != Phase::Live {
            return;
        }
        while let Some(&serial) = self.waiting.front() {
            match self.hand_over_move(serial, world) {
                Step::Done => {
                    // One that has expired has been taken out already.
                    if self.waiting.front() == Some(&serial) {
                        self.waiting.pop_front();
                    }
                }
                Step::Stalled => {
                    self.waiting.pop_front();
                    self.stalled.push(serial);
                }
                Step::Full => return,
            }
        }
    }

    fn hand_over_move(&mut self, serial: Serial, world: &mut World<'_>) -> Step {
        let requests = self.room(world);
        let window = world.options.send_bytes.saturating_sub(self.posted_bytes);
        let bytes = window.min(list_bytes_max(world).saturating_sub(world.batch.bytes()));
        let Some(op) = self.ops.find(serial) else {
            return Step::Done;
        };
        // The last look at the clock: what is handed over touches far memory without asking anybody.
        if op.deadline <= world.now {
            self.end(serial, Failure::Expired, world);
            return Step::Done;
        }
        let moving = match &mut op.work {
            Work::Move(moving) => moving,
            Work::Atomic(_) => return self.hand_over_atomic(serial, world),
            Work::Message { .. } => return Step::Done,
        };
        let Some(State::Known(location)) = self.targets.at(moving.target).map(|target| target.state) else {
            return Step::Done;
        };
        let sides = Sides {
            local: moving.near.local,
            lkey: moving.near.lkey,
            visible: moving.near.visible,
            remote: location.iova,
            rkey: location.rkey,
            direction: moving.part.direction,
        };
        let arrival = moving.part.arrival.filter(|_| moving.is_write());
        let range = moving.at..moving.part.range.end;
        if range.is_empty() && arrival.is_none() {
            moving.stage = Stage::HandedOver;
            self.settle(serial, world);
            return Step::Done;
        }
        if requests < SPARE || bytes == 0 || world.batch.len() + SPARE > REQUESTS_MAX {
            return Step::Full;
        }
        let telling = match self.prepare_arrival(arrival, world) {
            Ok(telling) => telling,
            Err(stalled) => return stalled,
        };
        let before = world.batch.len();
        let room = Room {
            requests: self.room(world),
            bytes,
        };
        let Some(op) = self.ops.find(serial) else {
            return Step::Done;
        };
        let Work::Move(moving) = &mut op.work else {
            return Step::Done;
        };
        let end = range.end;
        let reached = if range.is_empty() {
            world.batch.move_nothing(&sides);
            end
        } else {
            world.batch.move_bytes(&moving.part.leg, range.clone(), &sides, room)
        };
        moving.at = reached;
        let done = reached == end;
        if done {
            moving.stage = match telling {
                Some((Telling::Frame, _)) => Stage::Telling,
                _ => Stage::HandedOver,
            };
        }
        let handed = reached - range.start;
        if world.batch.len() > before {
            self.add_segment(Some(serial), handed, false, world);
        }
        if !done {
            return Step::Full;
        }
        match telling {
            // Part of the move: it is not done before this has arrived.
            Some((Telling::Frame, arrival)) => self.parcels.push_back(Outgoing {
                parcel: Parcel::frame(&Frame::Arrived(arrival)),
                op: Some(serial),
                answer: false,
            }),
            Some((Telling::Immediate(immediate) | Telling::BindFirst { immediate, .. }, _)) => {
                self.credits.spend();
                world.batch.tell(immediate);
                world.counters.immediates_sent += 1;
            }
            None => {}
        }
        Step::Done
    }

    fn hand_over_atomic(&mut self, serial: Serial, world: &mut World<'_>) -> Step {
        let Some(Work::Atomic(asking)) = self.ops.find(serial).map(|op| &op.work) else {
            return Step::Done;
        };
        let (offset, act, target) = (asking.atomic.offset, asking.atomic.act, asking.target);
        let Some(State::Known(location)) = self.targets.at(target).map(|target| target.state) else {
            return Step::Done;
        };
        if self.room(world) == 0 || world.batch.is_full() {
            return Step::Full;
        }
        // All are taken only while the device has some, of which the end of each makes room.
        let Some((place, piece)) = self.landing.as_mut().and_then(Landing::take) else {
            return Step::Full;
        };
        world.counters.device_atomics += 1;
        world.batch.atomic(location.iova + offset, location.rkey, act, piece);
        self.add_segment(Some(serial), 0, false, world);
        if let Some(segment) = self.segments.back_mut() {
            segment.landing = Some(place);
        }
        if let Some(Work::Atomic(asking)) = self.ops.find(serial).map(|op| &mut op.work) {
            asking.stage = AskingStage::Posted;
        }
        Step::Done
    }

    /// Makes sure that the arrival of a move can be told, by binding its tag where it is not bound.
    fn prepare_arrival(
        &mut self,
        arrival: Option<Arrival>,
        world: &mut World<'_>,
    ) -> Result<Option<(Telling, Arrival)>, Step> {
        let Some(arrival) = arrival else { return Ok(None) };
        let telling = self.tags_here.telling(arrival);
        let needed = match telling {
            Telling::Frame => 0,
            Telling::Immediate(_) => 1,
            Telling::BindFirst { .. } => 2,
        };
        if self.credits.left() < needed {
            return Err(Step::Stalled);
        }
        if let Telling::BindFirst { slot, .. } = telling {
            let mut parcel = Parcel::frame(&Frame::Bind { slot, tag: arrival.tag });
            let size = self.packet_size;
            let bytes = parcel.next_packet_bytes(size);
            if !self.has_room_for_packet(bytes, world) {
                return Err(Step::Full);
            }
            self.credits.spend();
            let owed = self.credits.take_owed();
            self.add_packet(bytes, None, world, |packet| parcel.pack(owed, size, packet));
            self.tags_here.bind(slot, arrival.tag);
        }
        Ok(Some((telling, arrival)))
    }

    /// Notes that the requests of the list since the last segment belong to `op`.
    fn add_segment(&mut self, op: Option<Serial>, bytes: u64, staged: bool, world: &World<'_>) {
        let end = self.posted + world.batch.len() as u64;
        self.posted_bytes += bytes;
        if self.segments.is_empty() {
            self.stalled_at = world.now.saturating_add(world.options.stall_max());
        }
        self.segments.push_back(Segment {
            end,
            bytes,
            op,
            staged,
            landing: None,
        });
        if let Some(op) = op.and_then(|op| self.ops.find(op)) {
            op.posted += 1;
        }
    }

    /// Posts the list. False where that was the end of the path.
    fn ring(&mut self, world: &mut World<'_>) -> bool {
        let (id, base, count) = (self.id, self.posted, world.batch.len());
        let list = world.batch.finish(|i| number::request(id, base + i as u64));
        let Some(pair) = &self.pair else { return false };
        world.counters.doorbells += 1;
        world.counters.work_requests += count as u64;
        world.counters.inline_requests += world.batch.inline() as u64;
        // SAFETY: the pieces name the batch's own bytes, which inline requests are done with when the call returns; buffers of the
        // path that are not used again before their segment is over; and regions whose memory the open operations keep alive and
        // registered until their segments are.
        match unsafe { pair.post(list) } {
            Ok(()) => {
                self.posted += count as u64;
                true
            }
            Err((error, refused)) => {
                self.posted += world.batch.position(refused) as u64;
                self.forget_unposted();
                self.lose(Loss::System(error), world);
                false
            }
        }
    }

    /// Takes back what the device did not take of the last list.
    fn forget_unposted(&mut self) {
        while let Some(last) = self.segments.back_mut()
            && last.end > self.posted
        {
            let before = match self.segments.len() {
                0 | 1 => self.completed,
                len => self.segments[len - 2].end,
            };
            let Some(last) = self.segments.back_mut() else { return };
            if before < self.posted {
                last.end = self.posted;
                return;
            }
            let Some(last) = self.segments.pop_back() else { return };
            self.posted_bytes -= last.bytes;
            self.land(&last);
            if let Some(op) = last.op.and_then(|op| self.ops.find(op)) {
                op.posted -= 1;
            }
        }
    }

    /// The device has completed a request, and with it all before.
    pub(in super::super) fn on_sent(&mut self, completion: &sys::ibv_wc, world: &mut World<'_>) {
        let ahead = u64::from(number::sequence(completion.wr_id).wrapping_sub(self.completed as u32));
        if ahead >= self.posted - self.completed {
            return;
        }
        let before = self.completed + ahead;
        if completion.status == sys::IBV_WC_SUCCESS {
            self.moved = world.now;
            self.stalled_at = world.now.saturating_add(world.options.stall_max());
            self.advance(before + 1, true, world);
            if let Phase::Greeting { .. } = self.phase {
                self.enter(world);
            }
            self.let_go_of_revoked();
            self.go_on_closing(world);
            self.stirred |= self.has_more();
        } else {
            self.advance(before, true, world);
            self.on_failed(completion.status, world);
            self.advance(before + 1, false, world);
        }
    }

    /// Takes what has completed off the queue of segments.
    pub(super) fn advance(&mut self, to: u64, finished: bool, world: &mut World<'_>) {
        while let Some(&segment) = self.segments.front() {
            if segment.end > to {
                if !finished
                    && to > self.completed
                    && let Some(op) = segment.op.and_then(|op| self.ops.find(op))
                {
                    op.flushed = true;
                }
                break;
            }
            self.segments.pop_front();
            self.posted_bytes -= segment.bytes;
            if segment.staged {
                self.staged -= 1;
            }
            let found = self.land(&segment).filter(|_| finished);
            let Some(serial) = segment.op else { continue };
            if let Some(op) = self.ops.find(serial) {
                op.posted -= 1;
                op.flushed |= !finished;
                if let (Work::Atomic(asking), Some(found)) = (&mut op.work, found) {
                    asking.stage = AskingStage::Found(found);
                }
                if op.posted == 0 {
                    self.settle(serial, world);
                }
            }
        }
        self.completed = self.completed.max(to);
    }

    /// What has landed for a segment that the device is done with, whose place is free again.
    fn land(&mut self, segment: &Segment) -> Option<u64> {
        Some(self.landing.as_mut()?.give_back(segment.landing?))
    }

    /// Credits have come: what was stalled goes on.
    pub(super) fn unstall(&mut self) {
        for serial in self.stalled.drain(..).rev() {
            self.waiting.push_front(serial);
        }
    }
}

/// Bytes of one list. Its last request alone is signalled, so that with longer ones the device would run dry before anybody knew that
/// there is room again.
fn list_bytes_max(world: &World<'_>) -> u64 {
    (world.options.send_bytes / 4).max(1)
}

fn inline_max(world: &World<'_>) -> usize {
    INLINE_PACKET_BYTES_MAX.min(world.batch.limits().inline_bytes as usize)
}
