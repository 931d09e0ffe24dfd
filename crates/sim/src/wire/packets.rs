//! Packets under way: sent, lost, sent again, duplicated, delayed and delivered.

use weft_plan::{Bytes, Picos, Rank, Time};
use weft_protocol::{Done, Failure, Loss, Signal};

use super::{Cargo, Packet, Side, Stage, Verdict};
use crate::world::{Happening, State};

/// How often a message that was recorded is played again, and for how long.
const REPLAYS: u64 = 40;
const REPLAYED_US: u64 = 8_000_000;

impl State {
    /// Puts a packet on the wire as soon as the wire is free.
    pub(crate) fn send(&mut self, wire_id: u32, from: Side, packet: Packet, size: usize) {
        let now = self.now;
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let bandwidth = wire.fabric.cost.bandwidth;
        let queued_elsewhere = self.carrier.is_some() && !wire.fabric.local;
        let half = wire.half_mut(from);
        if queued_elsewhere {
            half.free_at = now;
        }
        let depart = now.max(half.free_at);
        // A network of packets has queues of its own.
        if !queued_elsewhere {
            half.free_at = depart.saturating_add(bandwidth.time_for(Bytes(size as u64)).into());
        }
        let at = half.free_at;
        self.schedule(
            at,
            Happening::Attempt {
                wire: wire_id,
                from,
                packet,
                attempt: 0,
            },
        );
    }

    /// One attempt to get a packet across.
    pub(crate) fn attempt(&mut self, wire_id: u32, from: Side, packet: Packet, attempt: u32) {
        let Some(wire) = self.wires.get(&wire_id) else { return };
        let fabric = wire.fabric;
        let (near, far) = (wire.half(from).node, wire.half(from.other()).node);
        let half = wire.half(from);
        let goes_out = match packet {
            Packet::Reset | Packet::Refused => true,
            Packet::Write { .. } | Packet::Atomic { .. } => half.stage != Stage::Closed || half.draining,
            _ => half.stage != Stage::Closed,
        };
        if !goes_out {
            return;
        }
        if !fabric.local {
            let lost = self.chance.chance(self.faults.loss);
            if lost {
                self.tally.losses += 1;
            }
            if lost || !self.passes(near, far, fabric.rail) {
                self.try_again(wire_id, from, packet, attempt);
                return;
            }
            if self.chance.chance(self.faults.unacknowledged) {
                self.tally.unacknowledged += 1;
                self.try_again(wire_id, from, packet.clone(), attempt);
            }
            self.replay(wire_id, from, &packet);
            if self.chance.chance(self.faults.duplication) {
                self.tally.duplicates += 1;
                self.travel(wire_id, from, packet.clone(), attempt);
            }
        }
        self.travel(wire_id, from, packet, attempt);
    }

    /// Perhaps a message is recorded, and played again for a while: long enough that whoever sent it could be dead meanwhile, and often enough
    /// that it could pass for a sign of life.
    fn replay(&mut self, wire: u32, from: Side, packet: &Packet) {
        if !matches!(packet, Packet::Message(_)) || !self.chance.chance(self.faults.replay) {
            return;
        }
        self.tally.replays += 1;
        for _ in 0..REPLAYS {
            let at = self.now.saturating_add(Time::from_us(self.chance.below(REPLAYED_US)));
            let (to, packet) = (from.other(), packet.clone());
            self.schedule(at, Happening::Delivery { wire, to, packet });
        }
    }

    pub(crate) fn try_again(&mut self, wire_id: u32, from: Side, packet: Packet, attempt: u32) {
        let Some(wire) = self.wires.get(&wire_id) else { return };
        let fabric = wire.fabric;
        match packet {
            Packet::Message(_) => {}
            _ if attempt < fabric.retries_max => {
                let wait = Time::from_ns(fabric.retry_after.as_ns() << attempt.min(6));
                let at = self.now.saturating_add(wait);
                self.schedule(
                    at,
                    Happening::Attempt {
                        wire: wire_id,
                        from,
                        packet,
                        attempt: attempt + 1,
                    },
                );
            }
            Packet::Reset | Packet::Refused => {}
            _ => {
                self.tally.given_up_paths += 1;
                // A path that was never open has carried nothing that could still land.
                let opening = wire.half(from).stage == Stage::Opening;
                self.fall_silent(wire_id, from, opening);
            }
        }
    }

    fn travel(&mut self, wire_id: u32, from: Side, packet: Packet, attempt: u32) {
        if let (Some(carrier), Some(wire)) = (&mut self.carrier, self.wires.get(&wire_id))
            && !wire.fabric.local
            && let (near, far) = (wire.half(from).node, wire.half(from.other()).node)
            && near != far
            && near.0.max(far.0) < carrier.ranks()
        {
            let ends = (Rank(near.0), Rank(far.0));
            let bytes = packet.size();
            let cargo = Cargo {
                wire: wire_id,
                from,
                packet,
                attempt,
            };
            carrier.send(ends.0, ends.1, bytes, Picos::from(self.now).as_ps(), cargo);
            return;
        }
        let (now, chance, faults) = (self.now, &mut self.chance, &self.faults);
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let latency = Time::from(wire.fabric.cost.latency);
        let mut at = now.saturating_add(latency);
        if wire.fabric.local {
            let half = wire.half_mut(from.other());
            at = at.max(half.last_arrival);
            half.last_arrival = at;
        } else {
            at = at.saturating_add(Time::from_ns(chance.below(latency.as_ns().max(1))));
            if chance.chance(faults.delay) {
                self.tally.delays += 1;
                at = at.saturating_add(Time::from_ns(chance.below(latency.as_ns().max(1)) * 400));
            }
        }
        self.schedule(
            at,
            Happening::Delivery {
                wire: wire_id,
                to: from.other(),
                packet,
            },
        );
    }

    pub(crate) fn deliver(&mut self, wire_id: u32, to: Side, packet: Packet) {
        if let Packet::Syn { address } = &packet {
            self.on_syn(wire_id, address);
            return;
        }
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let local = wire.fabric.local;
        let half = wire.half_mut(to);
        match half.stage {
            Stage::Closed => {
                let tells = !matches!(packet, Packet::Reset | Packet::Refused);
                let half_node = half.node;
                if tells && self.nodes[half_node.0 as usize].up {
                    self.send(wire_id, to, Packet::Reset, 64);
                }
                return;
            }
            // Whatever comes from the acceptor shows that it has accepted.
            Stage::Opening if !matches!(packet, Packet::Reset | Packet::Refused) => {
                half.stage = Stage::Open;
                if let Some((end, path)) = half.seat {
                    self.signal(end, Signal::Opened { path });
                }
            }
            _ => {}
        }
        let half = self.wires.get_mut(&wire_id).map(|wire| wire.half_mut(to));
        if let Some(half) = half.filter(|half| !half.vouched && !local && packet.asks_to_be_served()) {
            half.held.push(packet);
            return;
        }
        match packet {
            Packet::Syn { .. } | Packet::SynAck => {}
            Packet::Refused => self.lose(wire_id, to, Loss::Refused, true),
            Packet::Reset => {
                let opening = self.wires[&wire_id].half(to).stage == Stage::Opening;
                self.lose(
                    wire_id,
                    to,
                    if opening { Loss::Unreachable } else { Loss::ClosedByPeer },
                    true,
                );
            }
            Packet::Message(bytes) => self.on_message(wire_id, to, &bytes, local),
            Packet::Write { job, index } => self.on_write(wire_id, to, &job, index),
            Packet::Atomic { job } => self.on_atomic(wire_id, to, &job),
            Packet::Read { job } => self.on_read(wire_id, to, &job),
            Packet::ReadData { job, index, bytes, sum } => self.on_read_data(wire_id, to, &job, index, &bytes, sum),
            Packet::Cancel { op } => {
                let inbound = self
                    .wires
                    .get_mut(&wire_id)
                    .map(|w| w.half_mut(to).inbound.entry(op).or_default());
                if let Some(inbound) = inbound.filter(|i| i.verdict.is_none()) {
                    inbound.verdict = Some(Verdict::Cancelled);
                    let verdict = Verdict::Cancelled;
                    self.send(wire_id, to, Packet::Verdict { op, verdict }, 64);
                }
            }
            Packet::Verdict { op, verdict } => {
                let half = self.wires[&wire_id].half(to);
                if half.ops.contains_key(&op) || half.atomics.contains_key(&op) {
                    let part = half.ops.get(&op).map(|outgoing| &outgoing.job.part);
                    let outcome = match verdict {
                        Verdict::Done(done) => match part {
                            Some(part) => Done::moved_to_host(part, done.far_sum).map_err(Failure::Refused),
                            None => Ok(done),
                        },
                        Verdict::Refused(refusal) => Err(Failure::Refused(refusal)),
                        Verdict::Cancelled => Err(Failure::Cancelled),
                    };
                    self.complete(wire_id, to, op, outcome);
                }
            }
        }
    }

    /// Serves a path from now on, and what has waited for it.
    pub(crate) fn vouch(&mut self, wire_id: u32, side: Side) {
        let Some(half) = self.wires.get_mut(&wire_id).map(|wire| wire.half_mut(side)) else {
            return;
        };
        half.vouched = true;
        for packet in std::mem::take(&mut half.held) {
            self.deliver(wire_id, side, packet);
        }
    }

    fn on_syn(&mut self, wire_id: u32, address: &str) {
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        if wire.acceptor.stage != Stage::Opening {
            return;
        }
        let node = wire.acceptor.node;
        let meant = (wire.fabric.name, wire.fabric.rail);
        let listener = self
            .ends
            .iter()
            .rposition(|e| e.alive && e.node == node && (e.fabric.name, e.fabric.rail) == meant);
        let Some(end) = listener else {
            wire.acceptor.stage = Stage::Closed;
            self.send(wire_id, Side::Acceptor, Packet::Refused, 64);
            return;
        };
        debug_assert_eq!(self.nodes[node.0 as usize].name, address);
        let path = self.ends[end].new_path(wire_id, Side::Acceptor);
        wire.acceptor.seat = Some((end, path));
        wire.acceptor.stage = Stage::Open;
        self.signal(end, Signal::Accepted { path });
        self.send(wire_id, Side::Acceptor, Packet::SynAck, 64);
    }
}
