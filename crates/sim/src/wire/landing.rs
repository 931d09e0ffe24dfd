//! The target's side, and the data that comes back: what a packet does to memory once it has arrived.

use std::sync::Arc;

use weft_protocol::{Arrival, Done, Failure, PathId, Refusal, Signal};

use super::{Job, Packet, Side, Verdict};
use crate::world::State;

impl State {
    pub(super) fn on_message(&mut self, wire_id: u32, to: Side, bytes: &[u8], local: bool) {
        let Some((end, path)) = self.wires[&wire_id].half(to).seat else {
            return;
        };
        let mut payload = bytes.to_vec();
        if !local {
            self.flip(&mut payload);
        }
        self.signal(end, Signal::Message { path, payload });
    }

    fn flip(&mut self, bytes: &mut [u8]) {
        if !bytes.is_empty() && self.chance.chance(self.faults.flip) {
            self.tally.flips += 1;
            let bit = self.chance.below(bytes.len() as u64 * 8);
            bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
    }

    pub(super) fn on_write(&mut self, wire_id: u32, to: Side, job: &Arc<Job>, index: u32) {
        let Some(verdict) = self.land(wire_id, to, job, index) else {
            return;
        };
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) else {
            return;
        };
        half.inbound.entry(job.op).or_default().verdict = Some(verdict);
        if let (Verdict::Done(_), Some(arrival), Some((end, path))) = (verdict, job.part.arrival, half.seat) {
            self.arrived(end, path, arrival);
        }
        self.send(wire_id, to, Packet::Verdict { op: job.op, verdict }, 64);
    }

    pub(super) fn arrived(&mut self, end: usize, path: PathId, arrival: Arrival) {
        self.signal(end, Signal::Arrived { path, arrival });
    }

    /// Puts a packet of a write in place, and tells what became of the write where that is now known.
    fn land(&mut self, wire_id: u32, to: Side, job: &Job, index: u32) -> Option<Verdict> {
        let within = job.within(index);
        let mut bytes = job.bytes[within.clone()].to_vec();
        if job.part.checksum {
            self.flip(&mut bytes);
        }
        let half = self.wires.get_mut(&wire_id)?.half_mut(to);
        let (end, _) = half.seat?;
        let inbound = half.inbound.entry(job.op).or_default();
        if inbound.verdict.is_some() || inbound.landed.contains(&index) {
            return None;
        }
        if self.now >= job.deadline.saturating_sub(half.clock_error) {
            return Some(Verdict::Refused(Refusal::Late));
        }
        let leg = &job.part.leg;
        let table = &self.ends[end].table;
        let region = match table.check(
            &leg.remote().key,
            job.wanted(),
            &leg.remote_spans().slice(job.part.range.clone()),
        ) {
            Ok(region) => region,
            Err(refusal) => return Some(Verdict::Refused(refusal)),
        };
        let mut at = 0;
        for (_, far, len) in leg.pieces(job.of_leg(&within)) {
            region.memory.bytes().write(far, &bytes[at..at + len as usize]);
            at += len as usize;
        }
        inbound.landed.insert(index);
        let all = inbound.landed.len() as u32 == job.packets();
        all.then(|| Verdict::Done(Done::moved(job.far_sum(&*region.memory), None)))
    }

    pub(super) fn on_read(&mut self, wire_id: u32, to: Side, job: &Arc<Job>) {
        let now = self.now;
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) else {
            return;
        };
        let Some((end, _)) = half.seat else { return };
        let inbound = half.inbound.entry(job.op).or_default();
        if inbound.verdict.is_some() {
            return;
        }
        inbound.verdict = Some(Verdict::Done(Done::default()));
        let leg = &job.part.leg;
        let checked = if now >= job.deadline.saturating_sub(half.clock_error) {
            Err(Refusal::Late)
        } else {
            self.ends[end].table.check(
                &leg.remote().key,
                job.wanted(),
                &leg.remote_spans().slice(job.part.range.clone()),
            )
        };
        let region = match checked {
            Ok(region) => region,
            Err(refusal) => {
                let verdict = Verdict::Refused(refusal);
                self.send(wire_id, to, Packet::Verdict { op: job.op, verdict }, 64);
                return;
            }
        };
        let mut bytes = vec![0; job.total() as usize];
        let mut at = 0;
        for piece in leg.remote_spans().pieces(job.part.range.clone()) {
            region
                .memory
                .bytes()
                .read(piece.offset, &mut bytes[at..at + piece.len as usize]);
            at += piece.len as usize;
        }
        let sum = job.far_sum(&*region.memory);
        let bytes = Arc::new(bytes);
        for index in 0..job.packets() {
            let size = 64 + job.within(index).len();
            let packet = Packet::ReadData {
                job: job.clone(),
                index,
                bytes: bytes.clone(),
                sum,
            };
            self.send(wire_id, to, packet, size);
        }
    }

    pub(super) fn on_read_data(
        &mut self,
        wire_id: u32,
        to: Side,
        job: &Job,
        index: u32,
        source: &[u8],
        sum: Option<u64>,
    ) {
        let within = job.within(index);
        let mut bytes = source[within.clone()].to_vec();
        if job.part.checksum {
            self.flip(&mut bytes);
        }
        let now = self.now;
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) else {
            return;
        };
        let Some(outgoing) = half.ops.get_mut(&job.op) else {
            return;
        };
        if now >= job.deadline || !outgoing.landed.insert(index) {
            return;
        }
        let mut at = 0;
        for (near, _, len) in job.part.leg.pieces(job.of_leg(&within)) {
            job.part
                .leg
                .local()
                .memory
                .bytes()
                .write(near, &bytes[at..at + len as usize]);
            at += len as usize;
        }
        if outgoing.landed.len() as u32 == job.packets() {
            let done = Done::moved_to_host(&job.part, sum);
            self.complete(wire_id, to, job.op, done.map_err(Failure::Refused));
        }
    }
}
