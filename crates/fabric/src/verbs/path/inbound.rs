//! What the peer says: packets, immediates, and the frames in them.

use weft_protocol::memory::Digest;
use weft_protocol::{Failure, Loss, Refusal, RegionKey, Signal};

use super::super::message::{Frame, Location, Packet};
use super::super::ops::{AskingStage, OpenOp, Serial, Stage, Work};
use super::super::targets::{State, permits};
use super::{Granted, PROBE_FIRST, Path, Phase, World, rights};

/// The peer did not keep to the protocol.
struct Garbage;

impl<E: Into<NotKept>> From<E> for Garbage {
    fn from(_: E) -> Garbage {
        Garbage
    }
}

/// Errors that mean the same wherever they come from.
struct NotKept;

impl From<weft_protocol::wire::DecodeError> for NotKept {
    fn from(_: weft_protocol::wire::DecodeError) -> NotKept {
        NotKept
    }
}

impl From<super::super::credits::Overdrawn> for NotKept {
    fn from(_: super::super::credits::Overdrawn) -> NotKept {
        NotKept
    }
}

impl From<super::atomics::TooMany> for NotKept {
    fn from(_: super::atomics::TooMany) -> NotKept {
        NotKept
    }
}

impl Path {
    /// A packet has come.
    pub(in super::super) fn on_packet(&mut self, bytes: &[u8], world: &mut World<'_>) {
        world.counters.packets_received += 1;
        if self.overhears() {
            return self.overhear(bytes, world);
        }
        self.hear(world, |path, world| path.read_packet(bytes, world));
    }

    /// A write with an immediate has come, and its bytes are in place.
    pub(in super::super) fn on_immediate(&mut self, immediate: u32, world: &mut World<'_>) {
        world.counters.immediates_received += 1;
        if self.overhears() {
            let arrival = self.tags_there.arrival(immediate);
            return world
                .signals
                .extend(arrival.map(|arrival| Signal::Arrived { path: self.id, arrival }));
        }
        self.hear(world, |path, world| {
            path.credits.received()?;
            let arrival = path.tags_there.arrival(immediate).ok_or(Garbage)?;
            world.signals.push(Signal::Arrived { path: path.id, arrival });
            Ok(())
        });
    }

    /// Is it being drained of what had come before it was lost? The peer was told that it has arrived, and holds it for done.
    fn overhears(&self) -> bool {
        matches!(self.phase, Phase::Failing { loss, .. } if loss != Loss::Garbage) && self.told
    }

    /// Hears what was said before the path was lost, and answers nothing.
    fn overhear(&mut self, bytes: &[u8], world: &mut World<'_>) {
        let Ok(Packet { piece: Some(piece), .. }) = Packet::decode(bytes, self.packet_size) else {
            return;
        };
        match self.assembly.take(piece) {
            Ok(Some(Frame::Message(payload))) => world.signals.push(Signal::Message { path: self.id, payload }),
            Ok(Some(Frame::Bind { slot, tag })) => self.tags_there.bind(slot, tag),
            Ok(Some(Frame::Arrived(arrival))) => world.signals.push(Signal::Arrived { path: self.id, arrival }),
            // There is nobody left to answer, and who spoke garbage last is lost already.
            Ok(_) | Err(_) => {}
        }
    }

    /// Lets the peer speak, unless this side has closed its ears; who speaks garbage is not heard again.
    fn hear(&mut self, world: &mut World<'_>, read: impl FnOnce(&mut Path, &mut World<'_>) -> Result<(), Garbage>) {
        match self.phase {
            // The first word of a peer makes its path one.
            Phase::Accepting { .. } | Phase::Greeting { .. } => self.enter(world),
            Phase::Live | Phase::Closing { .. } => {}
            Phase::Introducing { .. }
            | Phase::Connecting { .. }
            | Phase::Answering { .. }
            | Phase::Failing { .. }
            | Phase::Over => return,
        }
        self.probe_gap = PROBE_FIRST;
        match read(self, world) {
            Ok(()) => self.stirred = true,
            Err(Garbage) => self.lose(Loss::Garbage, world),
        }
    }

    /// Both ends are there.
    pub(super) fn enter(&mut self, world: &mut World<'_>) {
        self.phase = Phase::Live;
        self.told = true;
        world.signals.push(if self.opened_here {
            Signal::Opened { path: self.id }
        } else {
            Signal::Accepted { path: self.id }
        });
    }

    fn read_packet(&mut self, bytes: &[u8], world: &mut World<'_>) -> Result<(), Garbage> {
        let packet = Packet::decode(bytes, self.packet_size)?;
        if packet.credits > 0 {
            self.credits.returned(packet.credits)?;
            self.unstall();
        }
        let Some(piece) = packet.piece else {
            // One that returns nothing would cost a buffer and say nothing.
            return if packet.credits > 0 { Ok(()) } else { Err(Garbage) };
        };
        self.credits.received()?;
        match self.assembly.take(piece)? {
            Some(frame) => self.on_frame(frame, world),
            None => Ok(()),
        }
    }

    fn on_frame(&mut self, frame: Frame, world: &mut World<'_>) -> Result<(), Garbage> {
        match frame {
            Frame::Message(payload) => world.signals.push(Signal::Message { path: self.id, payload }),
            Frame::Resolve { key } => {
                let answer = self.locate(&key, world);
                self.reply(&Frame::Resolved { key, answer });
            }
            Frame::Resolved { key, answer } => self.on_resolved(&key, answer, world),
            Frame::Revoke { slot } => self.on_revoke(slot, world),
            Frame::Revoked { slot } => {
                if self.granted.get(&slot) == Some(&Granted::Revoking) {
                    self.granted.remove(&slot);
                }
            }
            Frame::Bind { slot, tag } => self.tags_there.bind(slot, tag),
            Frame::Arrived(arrival) => world.signals.push(Signal::Arrived { path: self.id, arrival }),
            Frame::Sum { serial, key, spans } => {
                let checked = world.regions.table.check(&key, weft_protocol::Access::READ, &spans);
                let sum = checked.and_then(|region| {
                    let mut digest = Digest::default();
                    for piece in spans.pieces(0..spans.bytes()) {
                        region
                            .memory
                            .host_bytes()?
                            .digest(piece.offset, piece.len, &mut digest)?;
                    }
                    Ok(digest.finish())
                });
                self.reply(&Frame::Summed { serial, sum });
            }
            Frame::Summed { serial, sum } => self.on_summed(Serial(serial), sum, world),
            Frame::AtomicAsk(ask) => self.on_atomic_ask(ask, world)?,
            Frame::AtomicAnswer { serial, found } => self.on_atomic_answer(Serial(serial), found, world),
            Frame::ReadClock { sent } => self.reply(&Frame::Clock {
                sent,
                read: world.clock.now(),
            }),
            Frame::Clock { sent, read } => self.on_clock(sent, read, world),
            Frame::Probe | Frame::Ready => {}
            Frame::Bye => {
                self.bye_said = true;
                self.lose(Loss::ClosedByPeer, world);
            }
        }
        Ok(())
    }

    /// Tells a peer that has the key where the memory is, and lets its requests in.
    fn locate(&mut self, key: &RegionKey, world: &World<'_>) -> Result<Location, Refusal> {
        let location = world.regions.locate(key)?;
        let wanted = self.admitted | rights(&location);
        if wanted != self.admitted {
            let admitted = self.pair.as_ref().map(|pair| pair.admit(wanted));
            if !matches!(admitted, Some(Ok(()))) {
                return Err(Refusal::Unsupported);
            }
            self.admitted = wanted;
        }
        self.granted.insert(key.slot, Granted::Given);
        Ok(location)
    }

    fn on_resolved(&mut self, key: &RegionKey, answer: Result<Location, Refusal>, world: &mut World<'_>) {
        self.answered();
        let Some(index) = self.targets.by_key(key) else { return };
        let Some(target) = self.targets.at(index) else { return };
        if target.state != State::Asked {
            return;
        }
        if let Ok(location) = answer {
            target.state = State::Known(location);
        }
        let awaits = |op: &OpenOp| {
            op.work.target() == Some(index)
                && match &op.work {
                    Work::Move(moving) => moving.stage == Stage::AwaitsTarget,
                    Work::Atomic(asking) => asking.stage == AskingStage::AwaitsTarget,
                    Work::Message { .. } => false,
                }
        };
        for serial in self.ops.pick(awaits) {
            let moving = match self.ops.find(serial).map(|op| &mut op.work) {
                Some(Work::Move(moving)) => moving,
                Some(Work::Atomic(_)) => {
                    self.place_atomic(serial, answer, world);
                    continue;
                }
                _ => continue,
            };
            let verdict = answer.and_then(|location| permits(&location, &moving.part));
            match verdict {
                Ok(()) => {
                    moving.stage = Stage::Waiting;
                    self.waiting.push_back(serial);
                }
                Err(refusal) => self.complete(serial, Err(refusal.into()), world),
            }
        }
        if answer.is_err() {
            self.targets.remove(index);
        }
    }

    /// The peer wants its memory back.
    fn on_revoke(&mut self, slot: u32, world: &mut World<'_>) {
        let known = self.targets.revoke(slot);
        if known.is_empty() {
            // Forgotten in the meantime, so there is nothing left to let go of.
            return self.reply(&Frame::Revoked { slot });
        }
        let uses =
            |op: &OpenOp| op.work.target().is_some_and(|target| known.contains(&target)) && !op.work.is_handed_over();
        for serial in self.ops.pick(uses) {
            self.end(serial, Refusal::Released.into(), world);
        }
        self.let_go_of_revoked();
    }

    /// Tells the peer of the regions that it wants back and that the device has nothing left of.
    pub(super) fn let_go_of_revoked(&mut self) {
        // Usually there are none.
        for slot in self.targets.revoked().to_vec() {
            let known: Vec<u32> = self.targets.with_slot(slot).collect();
            let uses = |op: &OpenOp| op.work.target().is_some_and(|target| known.contains(&target));
            if self.ops.iter().any(|(_, op)| op.posted > 0 && uses(op)) {
                continue;
            }
            // Moves that wait for a checksum of theirs outlive what is known of the region.
            for serial in self.ops.pick(uses) {
                if let Some(op) = self.ops.find(serial) {
                    op.work.forget_target();
                }
            }
            self.targets.remove_slot(slot);
            self.reply(&Frame::Revoked { slot });
        }
    }

    fn on_summed(&mut self, serial: Serial, sum: Result<u64, Refusal>, world: &mut World<'_>) {
        let outcome = match self.ops.find(serial).map(|op| &op.work) {
            Some(Work::Move(moving)) if moving.stage == Stage::AwaitsSum => {
                sum.and_then(|sum| weft_protocol::Done::moved_to_host(&moving.part, Some(sum)))
            }
            _ => return,
        };
        self.complete(serial, outcome.map_err(Failure::Refused), world);
    }
}
