//! What a connection has to send, in the order in which it will: heads from a small buffer, long messages from where they lie, payloads
//! straight from registered memory, and zeros where memory had to be let go of in the middle of a frame.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use weft_plan::{Spans, Time};
use weft_protocol::memory::Digest;
use weft_protocol::{Move, Refusal, Region};

use super::frame::{self, Ended, Frame, ReadRequest, WriteRequest};
use super::gather::{gather, host};
use super::socket::Vectors;
use super::stream::Stream;
use crate::Clock;
use crate::far_clock::FarClock;

/// Payload of one data frame. Messages and acknowledgements pass between frames, so this bounds how long they wait.
const DATA_BYTES: u64 = 1 << 20;
/// Payload that is given an order at a time.
const WINDOW_BYTES: u64 = 1 << 20;
/// Payload of one system call.
const SEND_BYTES: usize = 1 << 20;
/// Heads and messages beyond which nothing more is accepted from the caller.
const WAITING_BYTES_SOFT: usize = 1 << 20;
/// Heads and messages beyond which the peer must be one that asks and never reads.
const WAITING_BYTES_HARD: usize = 8 << 20;

/// Shorter messages are copied behind the heads.
const LONG_MESSAGE_BYTES: usize = 4 << 10;

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The sending half of a connection.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    staged: Vec<u8>,
    staged_sent: usize,
    segments: VecDeque<Segment>,
    /// The long messages in `segments`, in their order.
    messages: VecDeque<Arc<[u8]>>,
    /// Bytes of them that have not been sent.
    message_bytes: usize,
    jobs: VecDeque<Job>,
    /// The serial number of `jobs[0]`.
    first: u64,
    /// The first of `jobs` that has not been given its place in `segments` whole.
    uncommitted: usize,
    /// Payload bytes in `segments`.
    committed_bytes: u64,
    responses: usize,
    response_runs: usize,
}

/// Whether everything went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    All,
    /// The socket is full.
    Blocked,
    /// Some of the memory is not there.
    Missing,
}

/// A job whose memory is not there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Missing {
    pub(super) job: u64,
    pub(super) op: u64,
    /// Whether it answers a read of the peer's.
    pub(super) is_response: bool,
}

#[derive(Clone, Copy, Debug)]
enum Segment {
    Staged(usize),
    /// What is left of a long message.
    Message {
        at: usize,
    },
    Payload {
        job: u64,
        at: u64,
        len: u64,
    },
    Zeros(u64),
    Trailer {
        job: u64,
        at: usize,
    },
}

/// A move whose bytes this side sends.
#[derive(Debug)]
struct Job {
    op: u64,
    content: Content,
    /// Bytes to send: those of the move, or those already committed once it has ended early.
    total: u64,
    committed: u64,
    announced: bool,
    ended: Option<Ended>,
    digest: Option<Digest>,
    trailer: Vec<u8>,
}

#[derive(Debug)]
enum Content {
    Write {
        part: Move,
        /// Until it has been sent.
        request: Option<Frame>,
    },
    Response {
        region: Region,
        spans: Spans,
        /// On the asker's clock.
        deadline: Time,
    },
}

impl Outbound {
    /// Heads and messages wait for a slow peer: accept no more of them.
    pub(super) fn is_crowded(&self) -> bool {
        self.waiting_bytes() > WAITING_BYTES_SOFT
    }
    /// The peer keeps asking for what it does not read.
    pub(super) fn is_abused(&self) -> bool {
        self.waiting_bytes() > WAITING_BYTES_HARD
    }
    fn waiting_bytes(&self) -> usize {
        self.staged.len() - self.staged_sent + self.message_bytes
    }
    /// May the peer have `runs` more runs answered?
    pub(super) fn admits(&self, runs: usize) -> bool {
        self.responses < frame::REQUESTS_MAX && self.response_runs + runs <= frame::REQUESTED_RUNS_MAX
    }

    pub(super) fn stage(&mut self, frame: &Frame) {
        stage(&mut self.staged, &mut self.segments, frame);
    }

    pub(super) fn message(&mut self, payload: &Arc<[u8]>) {
        let (before, long) = (self.staged.len(), payload.len() >= LONG_MESSAGE_BYTES);
        match long {
            true => frame::encode_message_head(payload.len(), &mut self.staged),
            false => frame::encode_message(payload, &mut self.staged),
        }
        append(&mut self.segments, self.staged.len() - before);
        if long {
            self.segments.push_back(Segment::Message { at: 0 });
            self.messages.push_back(Arc::clone(payload));
            self.message_bytes += payload.len();
        }
    }

    /// Queues a write and returns the number of its job.
    pub(super) fn write(&mut self, part: Move, request: WriteRequest) -> u64 {
        let total = part.range.end - part.range.start;
        let op = request.op;
        let request = Some(Frame::WriteRequest(request));
        self.push(Job::new(op, total, None, Content::Write { part, request }))
    }

    /// Queues the answer to a read that has been checked.
    pub(super) fn respond(&mut self, region: Region, request: ReadRequest) {
        let digest = request.checksum.then(Digest::default);
        self.responses += 1;
        self.response_runs += request.spans.runs().len();
        let content = Content::Response {
            region,
            deadline: request.deadline,
            spans: request.spans,
        };
        let total = content.spans().bytes();
        self.push(Job::new(request.op, total, digest, content));
    }

    fn push(&mut self, job: Job) -> u64 {
        self.jobs.push_back(job);
        self.first + self.jobs.len() as u64 - 1
    }

    /// Has the peer been told of this job?
    pub(super) fn is_announced(&self, serial: u64) -> bool {
        match self.job(serial) {
            Some(job) => job.announced,
            None => true,
        }
    }

    /// Has the last byte of this job gone out?
    pub(super) fn is_sent(&self, serial: u64) -> bool {
        serial < self.first
    }

    /// Lets go of a job's memory: what is left of its frame becomes zeros, and its trailer says that they do not count.
    pub(super) fn end(&mut self, serial: u64, ended: Ended) {
        let Some(index) = serial.checked_sub(self.first).and_then(|i| usize::try_from(i).ok()) else {
            return;
        };
        let Some(job) = self.jobs.get_mut(index) else { return };
        let trailer_begun = self
            .segments
            .iter()
            .any(|s| matches!(s, Segment::Trailer { job, at } if *job == serial && *at > 0));
        if job.ended.is_some() || trailer_begun {
            return;
        }
        job.ended = Some(ended);
        job.total = job.committed;
        for segment in &mut self.segments {
            if let Segment::Payload { job, len, .. } = *segment
                && job == serial
            {
                *segment = Segment::Zeros(len);
            }
        }
        if index < self.uncommitted {
            job.seal();
        }
    }

    /// Ends the answer to a read that the asker no longer wants.
    pub(super) fn end_response(&mut self, op: u64, ended: Ended) {
        let found = self
            .jobs
            .iter()
            .position(|job| job.op == op && matches!(job.content, Content::Response { .. }));
        if let Some(index) = found {
            self.end(self.first + index as u64, ended);
        }
    }

    /// Ends the answers that read from a region.
    pub(super) fn release(&mut self, slot: u32) {
        for index in 0..self.jobs.len() {
            if matches!(&self.jobs[index].content, Content::Response { region, .. } if region.key.slot == slot) {
                self.end(self.first + index as u64, Ended::Refused(Refusal::Released));
            }
        }
    }

    /// Sends as much as the socket takes, with at most `sends` system calls of about [`SEND_BYTES`] each. What is left then waits
    /// for room like what the socket did not take.
    pub(super) fn flush(
        &mut self,
        stream: &mut Stream,
        far_clock: &FarClock,
        clock: Clock,
        vectors: &mut Vectors,
        mut sends: u32,
    ) -> io::Result<Flushed> {
        loop {
            self.commit();
            if self.segments.is_empty() {
                self.staged.clear();
                self.staged_sent = 0;
                return if stream.flush()? {
                    Ok(Flushed::All)
                } else {
                    Ok(Flushed::Blocked)
                };
            }
            self.refuse_late(far_clock, clock);
            // Before anything is collected: what is collected is sent, or it would be found by the next to use the vectors.
            if sends == 0 {
                return Ok(Flushed::Blocked);
            }
            self.collect(vectors);
            let wanted = vectors.bytes();
            if wanted == 0 {
                // Only the empty trailer of a job that was never announced.
                self.advance(0);
                continue;
            }
            sends -= 1;
            match stream.send(vectors) {
                Ok(sent) => {
                    self.advance(sent);
                    if sent < wanted {
                        return Ok(Flushed::Blocked);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Flushed::Blocked),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.raw_os_error() == Some(libc::EFAULT) => return Ok(Flushed::Missing),
                Err(e) => return Err(e),
            }
        }
    }

    /// The jobs in line that have no memory to be sent from.
    pub(super) fn missing(&self) -> Vec<Missing> {
        let mut missing: Vec<Missing> = Vec::new();
        for segment in &self.segments {
            if let Segment::Payload { job: serial, at, len } = *segment
                && let Some(job) = self.job(serial)
                && missing.iter().all(|known| known.job != serial)
                && !job.content.is_there(at, len)
            {
                missing.push(Missing {
                    job: serial,
                    op: job.op,
                    is_response: matches!(job.content, Content::Response { .. }),
                });
            }
        }
        missing
    }

    fn job(&self, serial: u64) -> Option<&Job> {
        self.jobs.get(usize::try_from(serial.checked_sub(self.first)?).ok()?)
    }

    /// Gives the next payloads their place, until a window is full.
    fn commit(&mut self) {
        while self.committed_bytes < WINDOW_BYTES
            && let Some(job) = self.jobs.get_mut(self.uncommitted)
        {
            let serial = self.first + self.uncommitted as u64;
            if !job.announced && job.ended.is_none() {
                job.announced = true;
                if let Some(request) = job.take_request() {
                    stage(&mut self.staged, &mut self.segments, &request);
                }
            }
            let mut len = (job.total - job.committed).min(DATA_BYTES);
            if let Err(refusal) = job.sum(len) {
                job.ended = Some(Ended::Refused(refusal));
                job.total = job.committed;
                len = 0;
            }
            if len > 0 {
                stage(&mut self.staged, &mut self.segments, &job.data(len));
                let at = job.committed;
                self.segments.push_back(Segment::Payload { job: serial, at, len });
                self.committed_bytes += len;
                job.committed += len;
            }
            if job.committed == job.total {
                job.seal();
                self.segments.push_back(Segment::Trailer { job: serial, at: 0 });
                self.uncommitted += 1;
            }
        }
    }

    /// Ends the committed answers whose asker may be past its deadline: it has told its caller that nobody reads any more.
    fn refuse_late(&mut self, far_clock: &FarClock, clock: Clock) {
        if self.responses == 0 {
            return;
        }
        let now = clock.now();
        for index in 0..self.uncommitted.saturating_add(1).min(self.jobs.len()) {
            let job = &self.jobs[index];
            if let Content::Response { deadline, .. } = job.content
                && job.ended.is_none()
                && far_clock.may_have_reached(deadline, now)
            {
                self.end(self.first + index as u64, Ended::Refused(Refusal::Late));
            }
        }
    }

    fn collect(&self, vectors: &mut Vectors) {
        debug_assert_eq!(
            vectors.bytes(),
            0,
            "the vectors are shared and must have been left empty"
        );
        let (mut staged, mut messages) = (self.staged_sent, self.messages.iter());
        for segment in &self.segments {
            if vectors.is_full() || vectors.bytes() >= SEND_BYTES {
                break;
            }
            match *segment {
                Segment::Staged(len) => {
                    vectors.push(self.staged[staged..staged + len].as_ptr().cast_mut(), len);
                    staged += len;
                }
                Segment::Message { at } => {
                    let left = &messages.next().expect("a message of every such segment")[at..];
                    vectors.push(left.as_ptr().cast_mut(), left.len());
                }
                Segment::Zeros(len) => {
                    let mut left = usize::try_from(len).unwrap_or(usize::MAX);
                    while left > 0 && !vectors.is_full() {
                        let n = left.min(ZEROS.len());
                        vectors.push(ZEROS.as_ptr().cast_mut(), n);
                        left -= n;
                    }
                    if left > 0 {
                        break;
                    }
                }
                Segment::Payload { job, at, len } => {
                    let content = &self.job(job).expect("a job outlives its segments").content;
                    let from = content.base() + at;
                    let end = from + len;
                    if gather(content.region(), content.spans(), from..end, vectors) < len {
                        break;
                    }
                }
                Segment::Trailer { job, at } => {
                    let trailer = &self.job(job).expect("a job outlives its segments").trailer[at..];
                    vectors.push(trailer.as_ptr().cast_mut(), trailer.len());
                }
            }
        }
    }

    /// Takes `sent` bytes off the front, and with them whatever is complete.
    fn advance(&mut self, sent: usize) {
        let mut left = sent as u64;
        while let Some(segment) = self.segments.front_mut() {
            let taken;
            let done = match segment {
                Segment::Staged(len) => {
                    taken = left.min(*len as u64);
                    self.staged_sent += taken as usize;
                    *len -= taken as usize;
                    *len == 0
                }
                Segment::Message { at } => {
                    let whole = self.messages[0].len();
                    taken = left.min((whole - *at) as u64);
                    self.message_bytes -= taken as usize;
                    *at += taken as usize;
                    if *at == whole {
                        self.messages.pop_front();
                    }
                    *at == whole
                }
                Segment::Zeros(len) => {
                    taken = left.min(*len);
                    self.committed_bytes -= taken;
                    *len -= taken;
                    *len == 0
                }
                Segment::Payload { at, len, .. } => {
                    taken = left.min(*len);
                    self.committed_bytes -= taken;
                    *at += taken;
                    *len -= taken;
                    *len == 0
                }
                Segment::Trailer { at, .. } => {
                    let whole = self.jobs[0].trailer.len();
                    taken = left.min((whole - *at) as u64);
                    *at += taken as usize;
                    *at == whole
                }
            };
            left -= taken;
            if !done {
                break;
            }
            if let Some(Segment::Trailer { .. }) = self.segments.pop_front() {
                self.forget_first_job();
            }
        }
        debug_assert_eq!(left, 0, "more was sent than there was");
        // A peer that is always a little behind must not make the buffer grow for ever.
        if self.staged_sent > 64 << 10 {
            self.staged.drain(..self.staged_sent);
            self.staged_sent = 0;
        }
    }

    fn forget_first_job(&mut self) {
        if let Some(job) = self.jobs.pop_front() {
            self.first += 1;
            self.uncommitted -= 1;
            if let Content::Response { spans, .. } = job.content {
                self.responses -= 1;
                self.response_runs -= spans.runs().len();
            }
        }
    }
}

fn stage(staged: &mut Vec<u8>, segments: &mut VecDeque<Segment>, frame: &Frame) {
    let before = staged.len();
    frame::encode(frame, staged);
    append(segments, staged.len() - before);
}

/// Gives freshly staged bytes their place.
fn append(segments: &mut VecDeque<Segment>, len: usize) {
    match segments.back_mut() {
        Some(Segment::Staged(n)) => *n += len,
        _ => segments.push_back(Segment::Staged(len)),
    }
}

impl Job {
    fn new(op: u64, total: u64, digest: Option<Digest>, content: Content) -> Job {
        Job {
            op,
            content,
            total,
            committed: 0,
            announced: false,
            ended: None,
            digest,
            trailer: Vec::new(),
        }
    }

    /// What a write begins with. A response is announced by the request that it answers.
    fn take_request(&mut self) -> Option<Frame> {
        match &mut self.content {
            Content::Write { request, .. } => request.take(),
            Content::Response { .. } => None,
        }
    }

    fn data(&self, len: u64) -> Frame {
        match self.content {
            Content::Write { .. } => Frame::WriteData { op: self.op, len },
            Content::Response { .. } => Frame::ReadData { op: self.op, len },
        }
    }

    /// Adds the next `len` bytes to the checksum, where one was asked for.
    fn sum(&mut self, len: u64) -> Result<(), Refusal> {
        if let Some(digest) = &mut self.digest {
            let memory = &self.content.region().memory;
            for piece in self.content.spans().pieces(self.committed..self.committed + len) {
                memory.host_bytes()?.digest(piece.offset, piece.len, digest)?;
            }
        }
        Ok(())
    }

    /// Writes the last word on this job.
    fn seal(&mut self) {
        self.trailer.clear();
        let op = self.op;
        let last = match (&self.content, self.ended) {
            (Content::Response { .. }, None) => Frame::ReadEnd {
                op,
                outcome: Ok(self.digest.take().map(Digest::finish)),
            },
            (Content::Response { .. }, Some(ended)) => Frame::ReadEnd {
                op,
                outcome: Err(ended),
            },
            (Content::Write { .. }, ended) => Frame::WriteEnd {
                op,
                complete: ended.is_none(),
            },
        };
        // A write that ended before it was announced leaves no trace.
        if self.announced || matches!(self.content, Content::Response { .. }) {
            frame::encode(&last, &mut self.trailer);
        }
    }
}

impl Content {
    fn region(&self) -> &Region {
        match self {
            Content::Write { part, .. } => part.leg.local(),
            Content::Response { region, .. } => region,
        }
    }
    fn spans(&self) -> &Spans {
        match self {
            Content::Write { part, .. } => part.leg.local_spans(),
            Content::Response { spans, .. } => spans,
        }
    }
    /// Whether the memory of so many bytes is there.
    fn is_there(&self, at: u64, len: u64) -> bool {
        let Ok(memory) = host(self.region()) else { return false };
        let from = self.base() + at;
        let mut pieces = self.spans().pieces(from..from + len);
        pieces.all(|piece| memory.is_there(piece.offset, piece.len))
    }
    /// Where in the spans the job's first byte is.
    fn base(&self) -> u64 {
        match self {
            Content::Write { part, .. } => part.range.start,
            Content::Response { .. } => 0,
        }
    }
}
