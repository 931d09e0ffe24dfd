//! What a connection receives: heads through a small buffer, payloads straight into registered memory, and what nobody wants
//! any more into nothing.

use std::io;

use weft_plan::Spans;
use weft_protocol::memory::Digest;
use weft_protocol::{Access, Arrival, Refusal, Region, RegionTable};

use super::frame::{Ended, Frame, WriteRequest};
use super::gather::gather;
use super::ops::{LocalOp, Ops, Stage};
use super::outbound::Outbound;
use super::socket::Vectors;
use super::stream::Stream;
use crate::Clock;
use crate::far_clock::FarClock;

/// Room for heads. It grows only while one long head is coming in.
const BUFFER_BYTES: usize = 64 << 10;
/// The same for strangers, and the least that is free of it when they are heard.
const STRANGER_BYTES: usize = 1 << 10;
const STRANGER_AHEAD_BYTES: usize = 512;
/// Bytes that are received behind a payload or instead of one: a small answer whole, and of a large one little that must be
/// copied again.
const AHEAD_BYTES: usize = 8 << 10;
/// Payload of one system call. The target looks at the clock between two.
const RECEIVE_BYTES: u64 = 1 << 20;

/// The receiving half of a connection.
#[derive(Debug)]
pub(super) struct Inbound {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// How long the last head was. The next may be as long, and is fetched in one piece; what follows it goes to its place.
    last_head: usize,
    /// Bytes that are received at a time where a head is expected.
    ahead: usize,
    pub(super) payload: Option<Payload>,
    pub(super) write: Option<IncomingWrite>,
    /// What has found no memory where it was to go. To be refused before anything else is done.
    pub(super) missed: Option<Sink>,
}

/// A payload that is coming in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Payload {
    pub(super) sink: Sink,
    pub(super) left: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Sink {
    /// The answer to a read of ours.
    Read { op: u64 },
    /// The peer's write.
    Write,
}

/// A peer's write.
#[derive(Debug)]
pub(super) struct IncomingWrite {
    pub(super) op: u64,
    pub(super) total: u64,
    pub(super) received: u64,
    deadline: weft_plan::Time,
    pub(super) arrival: Option<Arrival>,
    spans: Spans,
    /// Where it lands; `None` once it has been refused.
    region: Option<Region>,
    digest: Option<Digest>,
}

/// What a payload is placed with.
#[derive(Debug)]
pub(super) struct Placing<'a> {
    pub(super) ops: &'a mut Ops,
    pub(super) outbound: &'a mut Outbound,
    pub(super) far_clock: &'a FarClock,
    pub(super) clock: Clock,
    pub(super) vectors: &'a mut Vectors,
}

/// What one receive brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// There may be more.
    Some,
    /// That was all for now.
    Last,
    Nothing,
}

impl Inbound {
    pub(super) fn new() -> Inbound {
        Inbound {
            buffer: vec![0; STRANGER_BYTES],
            start: 0,
            end: 0,
            last_head: 0,
            ahead: STRANGER_AHEAD_BYTES,
            payload: None,
            write: None,
            missed: None,
        }
    }

    /// Makes room for a peer that is known.
    pub(super) fn widen(&mut self) {
        self.buffer.resize(self.buffer.len().max(BUFFER_BYTES), 0);
        self.ahead = AHEAD_BYTES;
    }

    /// Bytes that have been received and not been decoded.
    pub(super) fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// A head has been decoded.
    pub(super) fn consume_head(&mut self, len: usize) {
        self.last_head = len;
        self.consume(len);
    }

    fn consume(&mut self, len: usize) {
        self.start += len;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// One system call's worth of bytes.
    pub(super) fn receive(&mut self, stream: &mut Stream, placing: &mut Placing<'_>) -> io::Result<Received> {
        let Some(payload) = self.payload.filter(|_| self.start == self.end) else {
            return self.receive_heads(stream, placing.vectors);
        };
        let wanted = payload.left.min(RECEIVE_BYTES);
        let placed = self.gather(payload.sink, wanted, placing);
        if placed == 0 {
            let dropped = stream.discard(usize::try_from(payload.left).unwrap_or(usize::MAX))?;
            return self.received(dropped, dropped as u64, stream, payload.left, placing);
        }
        if placed == payload.left {
            let ahead = &mut self.buffer[..AHEAD_BYTES];
            placing.vectors.push(ahead.as_mut_ptr(), ahead.len());
        }
        let asked = placing.vectors.bytes() as u64;
        let got = match stream.receive(placing.vectors) {
            // Nothing was taken; what comes now goes nowhere.
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                self.missed = Some(payload.sink);
                return Ok(Received::Some);
            }
            received => received?,
        };
        if placing.vectors.take_missed() {
            self.missed = Some(payload.sink);
        }
        let direct = (got as u64).min(placed);
        self.end = got - direct as usize;
        self.received(got, direct, stream, asked, placing)
    }

    fn received(
        &mut self,
        got: usize,
        direct: u64,
        stream: &Stream,
        asked: u64,
        placing: &mut Placing<'_>,
    ) -> io::Result<Received> {
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.placed(direct, placing);
        Ok(if (got as u64) < asked && stream.short_means_empty() {
            Received::Last
        } else {
            Received::Some
        })
    }

    pub(super) fn receive_heads(&mut self, stream: &mut Stream, vectors: &mut Vectors) -> io::Result<Received> {
        let ahead = self.ahead;
        if self.buffer.len() - self.end < ahead {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            // Only bytes that have really come make the buffer grow, and the codec bounds how many may.
            if self.buffer.len() - self.end < ahead {
                self.buffer.resize(self.buffer.len() * 2, 0);
            }
        }
        // A long head that has begun is fetched in larger pieces.
        let room = self.buffer.len() - self.end;
        let ask = match self.end - self.start >= ahead {
            true => room,
            false => self.last_head.clamp(ahead, room),
        };
        let free = &mut self.buffer[self.end..self.end + ask];
        vectors.push(free.as_mut_ptr(), free.len());
        let got = stream.receive(vectors)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.end += got;
        Ok(if got < ask && stream.short_means_empty() {
            Received::Last
        } else {
            Received::Some
        })
    }

    /// Moves what the buffer holds of a payload to its place.
    pub(super) fn place_buffered(&mut self, placing: &mut Placing<'_>) {
        while let Some(payload) = self.payload
            && self.start < self.end
        {
            let held = payload.left.min((self.end - self.start) as u64);
            let placed = match self.gather(payload.sink, held, placing) {
                0 => held,
                _ => placing
                    .vectors
                    .fill(&self.buffer[self.start..self.start + held as usize]) as u64,
            };
            placing.vectors.clear();
            if placing.vectors.take_missed() {
                self.missed = Some(payload.sink);
            }
            self.consume(placed as usize);
            self.placed(placed, placing);
        }
    }

    /// The addresses for up to `len` bytes of the payload; none where they must go nowhere.
    fn gather(&mut self, sink: Sink, len: u64, placing: &mut Placing<'_>) -> u64 {
        match sink {
            Sink::Read { op } => match placing.ops.find(op) {
                Some(LocalOp {
                    stage: Stage::Open,
                    part,
                    received,
                    ..
                }) => {
                    let from = part.range.start + *received;
                    let leg = &part.leg;
                    gather(leg.local(), leg.local_spans(), from..from + len, placing.vectors)
                }
                _ => 0,
            },
            Sink::Write => {
                let Some(write) = &mut self.write else { return 0 };
                // The last look at the clock before the bytes land: once the asker may be past its deadline, they do not.
                if write.region.is_some() && placing.far_clock.may_have_reached(write.deadline, placing.clock.now()) {
                    write.refuse(Refusal::Late, placing.outbound);
                }
                let Some(region) = &write.region else { return 0 };
                let from = write.received;
                gather(region, &write.spans, from..from + len, placing.vectors)
            }
        }
    }

    /// Accounts for payload bytes that are in place, or that went nowhere.
    fn placed(&mut self, len: u64, placing: &mut Placing<'_>) {
        let Some(payload) = &mut self.payload else { return };
        match payload.sink {
            Sink::Read { op } => {
                if let Some(op) = placing.ops.find(op) {
                    op.received += len;
                }
            }
            Sink::Write => {
                if let Some(write) = &mut self.write
                    && write.landed(len).is_err()
                {
                    self.missed = Some(Sink::Write);
                }
            }
        }
        payload.left -= len;
        if payload.left == 0 {
            self.payload = None;
        }
    }

    /// Stops a peer's write to a region that is being released.
    pub(super) fn release(&mut self, slot: u32, outbound: &mut Outbound) {
        if let Some(write) = &mut self.write
            && write.region.as_ref().is_some_and(|region| region.key.slot == slot)
        {
            write.refuse(Refusal::Released, outbound);
        }
    }
}

impl IncomingWrite {
    /// Checks a request; one that is refused stays, so that the bytes which follow it find their way into nothing.
    pub(super) fn begin(
        request: WriteRequest,
        regions: &RegionTable,
        late: bool,
        outbound: &mut Outbound,
    ) -> IncomingWrite {
        let verdict = if late {
            Err(Refusal::Late)
        } else {
            regions.check(&request.key, Access::WRITE, &request.spans).cloned()
        };
        let mut write = IncomingWrite {
            op: request.op,
            total: request.spans.bytes(),
            received: 0,
            deadline: request.deadline,
            arrival: request.arrival,
            spans: request.spans,
            region: None,
            digest: request.checksum.then(Digest::default),
        };
        match verdict {
            Ok(region) => write.region = Some(region),
            Err(refusal) => write.refuse(refusal, outbound),
        }
        write
    }

    pub(super) fn refuse(&mut self, refusal: Refusal, outbound: &mut Outbound) {
        self.region = None;
        self.spans = Spans::new();
        outbound.stage(&Frame::WriteAck {
            op: self.op,
            outcome: Err(Ended::Refused(refusal)),
        });
    }

    fn landed(&mut self, len: u64) -> Result<(), Refusal> {
        let from = self.received;
        self.received += len;
        if let (Some(region), Some(digest)) = (&self.region, &mut self.digest) {
            for piece in self.spans.pieces(from..from + len) {
                region.memory.host_bytes()?.digest(piece.offset, piece.len, digest)?;
            }
        }
        Ok(())
    }

    /// The sender's last word: acknowledges, and returns the arrival to signal.
    pub(super) fn finish(self, complete: bool, outbound: &mut Outbound) -> Option<Arrival> {
        // What was refused has been answered already.
        self.region?;
        let outcome = if complete {
            Ok(self.digest.map(Digest::finish))
        } else {
            Err(Ended::Aborted)
        };
        outbound.stage(&Frame::WriteAck { op: self.op, outcome });
        self.arrival.filter(|_| complete)
    }
}
