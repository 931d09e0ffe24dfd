//! Operations on objects: reads by ranges, writes into drafts, and commits, which make of a draft the object.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::multipart::{MultipartStore, PartId};
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use weft_plan::Time;
use weft_protocol::memory::Digest;
use weft_protocol::{Arrival, Direction, Done, Failure, Memory, Move, OpId, PathId, Refusal, RegionKey};

use super::draft::NoPart;
use super::place::ObjectMemory;
use super::told::told;
use super::{Event, Inbox, ObjectHere, object_of};
use crate::memory::HostMemory;

/// Bytes between two pieces that are read and thrown away rather than asked for in two requests.
const GAP_BYTES_MAX: u64 = 64 << 10;
const REQUEST_BYTES_MAX: u64 = 4 << 20;
/// A part that goes before anybody has asked for a commit has no deadline of its own.
const PART_PATIENCE: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Running {
    pub path: PathId,
    pub id: OpId,
    pub deadline: Time,
    pub work: Work,
    pub uses: [RegionKey; 2],
}

#[derive(Debug)]
pub(super) enum Work {
    Read(Box<Reading>),
    Write(Box<Writing>),
    /// Of this object; and what is being asked of the server for it.
    Commit(Arc<dyn Memory>, Option<AbortHandle>),
}

/// Bytes of an object, and where they belong in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    object: u64,
    memory: u64,
    len: u64,
}

#[derive(Debug)]
pub(super) struct Reading {
    part: Move,
    object: Arc<dyn Memory>,
    host: Arc<dyn Memory>,
    object_is_far: bool,
    /// In the object's order.
    pieces: Vec<Piece>,
    requests: Vec<Request>,
    /// The next request to make.
    next: usize,
    open: usize,
}

#[derive(Debug)]
struct Request {
    start: u64,
    end: u64,
    /// Which pieces it has bytes of.
    pieces: std::ops::Range<usize>,
    task: Option<AbortHandle>,
}

#[derive(Debug)]
pub(super) struct Writing {
    part: Move,
    object: Arc<dyn Memory>,
    host: Arc<dyn Memory>,
    object_is_far: bool,
    /// In the leg's order.
    pieces: Vec<Piece>,
    /// The piece that is being taken in, and how much of it has been.
    next: usize,
    done: u64,
    digest: Digest,
}

/// What came of taking bytes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakenIn {
    More,
    Ended,
    /// Parts that are being sent have all the memory that there is.
    NoRoom,
}

impl Running {
    pub(super) fn stop(&self) {
        match &self.work {
            Work::Read(reading) => {
                let tasks = reading.requests.iter().filter_map(|request| request.task.as_ref());
                tasks.for_each(AbortHandle::abort);
            }
            Work::Commit(object, task) => {
                if let Some(task) = task {
                    task.abort();
                    // Nobody knows whether the server has made the object: what comes next is another upload.
                    of_object(&**object).forget_draft();
                }
                // Nobody waits for it any more, and what is written next must not be written over by it.
                of_object(&**object).draft().stop_whole();
            }
            Work::Write(_) => {}
        }
    }

    pub(super) fn arrival(&self) -> Option<Arrival> {
        let part = match &self.work {
            Work::Read(reading) => &reading.part,
            Work::Write(writing) => &writing.part,
            Work::Commit(..) => return None,
        };
        part.arrival.filter(|_| part.direction == Direction::Write)
    }
}

fn host_of(memory: &dyn Memory) -> &HostMemory {
    memory.as_any().downcast_ref().expect("looked at when it was accepted")
}

fn of_object(memory: &dyn Memory) -> &ObjectMemory {
    object_of(memory).expect("looked at when it was accepted")
}

/// The checksum of the host's side, in the order of the leg.
fn host_sum(part: &Move, host: &dyn Memory, object_is_far: bool) -> Result<u64, Refusal> {
    let (leg, range) = (&part.leg, part.range.clone());
    match object_is_far {
        true => host.sum(leg.local_spans().pieces(range)),
        false => host.sum(leg.remote_spans().pieces(range)),
    }
}

fn done(part: &Move, object_is_far: bool, object: u64, host: u64) -> Done {
    match (part.checksum, object_is_far) {
        (false, _) => Done::default(),
        (true, true) => Done::moved(Some(object), Some(host)),
        (true, false) => Done::moved(Some(host), Some(object)),
    }
}

impl ObjectHere {
    pub(super) fn accept_move(&mut self, part: &Move) -> Result<(Work, [RegionKey; 2]), Refusal> {
        let leg = &part.leg;
        if part.range.start > part.range.end || part.range.end > leg.bytes() {
            return Err(Refusal::Malformed);
        }
        let near = self.table.check_own(&leg.local().key, leg.local_spans())?;
        let far = self.table.check_own(&leg.remote().key, leg.remote_spans())?;
        let object_is_far = object_of(&*far.memory).is_some();
        let (object, host) = match object_is_far {
            true => (Arc::clone(&far.memory), Arc::clone(&near.memory)),
            false => (Arc::clone(&near.memory), Arc::clone(&far.memory)),
        };
        let place = object_of(&*object).ok_or(Refusal::Unsupported)?;
        host.as_any().downcast_ref::<HostMemory>().ok_or(Refusal::Unsupported)?;
        let to_object = (part.direction == Direction::Write) == object_is_far;
        if to_object && !place.is_writable() {
            return Err(Refusal::NotWritable);
        }
        let pieces = leg
            .pieces(part.range.clone())
            .map(|(near, far, len)| match object_is_far {
                true => Piece {
                    object: far,
                    memory: near,
                    len,
                },
                false => Piece {
                    object: near,
                    memory: far,
                    len,
                },
            });
        let pieces: Vec<Piece> = pieces.filter(|piece| piece.len > 0).collect();
        let uses = [leg.local().key, leg.remote().key];
        let part = part.clone();
        if to_object {
            let writing = Writing {
                part,
                object,
                host,
                object_is_far,
                pieces,
                next: 0,
                done: 0,
                digest: Digest::default(),
            };
            return Ok((Work::Write(Box::new(writing)), uses));
        }
        let reading = Reading::new(part, object, host, object_is_far, pieces)?;
        Ok((Work::Read(Box::new(reading)), uses))
    }

    /// Makes the next request of a read, or ends it where there is none left; false where there is nothing more to ask for.
    pub(super) fn ask_next(&mut self, number: u64, now: Time) -> bool {
        let Some(Running {
            work: Work::Read(reading),
            deadline,
            ..
        }) = self.running.get_mut(&number)
        else {
            return false;
        };
        if reading.next >= reading.requests.len() {
            if reading.open == 0 {
                self.end_read(number);
            }
            return false;
        }
        let place = of_object(&*reading.object);
        let Ok(bucket) = place.bucket.inner().cloned() else {
            self.settle(number, Err(Refusal::Unsupported.into()));
            return false;
        };
        let nth = reading.next;
        reading.next += 1;
        reading.open += 1;
        let request = &mut reading.requests[nth];
        let (start, end) = (request.start, request.end);
        let (key, patience) = (place.key.clone(), Duration::from(deadline.saturating_sub(now)));
        let answer = Answer {
            inbox: Arc::clone(&self.inbox),
            number,
            request: nth,
            ended: Err(Failure::Cancelled),
        };
        let store = Arc::clone(&bucket);
        let task = bucket.spawn(async move {
            // Told when this is dropped, also before its time.
            let mut answer = answer;
            answer.ended = match timeout(patience, receive(&store.store, &key, start, end)).await {
                Ok(ended) => ended,
                Err(_) => Err(Failure::Expired),
            };
        });
        request.task = Some(task);
        self.requests += 1;
        self.count.requests += 1;
        self.count.in_flight_most = self.count.in_flight_most.max(self.requests as u64);
        true
    }

    /// The bytes of a request have come, or will not. Says how many were copied.
    pub(super) fn on_received(&mut self, number: u64, nth: usize, ended: Result<Vec<Bytes>, Failure>) -> u64 {
        let Some(Running {
            work: Work::Read(reading),
            ..
        }) = self.running.get_mut(&number)
        else {
            return 0;
        };
        reading.open -= 1;
        reading.requests[nth].task = None;
        let landed = ended.and_then(|chunks| reading.land(nth, &chunks).map_err(Failure::from));
        let is_last = reading.open == 0 && reading.next == reading.requests.len();
        match landed {
            Err(failure) => self.settle(number, Err(failure)),
            Ok(bytes) => {
                self.count.bytes_read += bytes;
                if is_last {
                    self.end_read(number);
                }
                return bytes;
            }
        }
        0
    }

    /// All that was asked for has come.
    fn end_read(&mut self, number: u64) {
        let Some(Running {
            work: Work::Read(reading),
            ..
        }) = self.running.get(&number)
        else {
            return;
        };
        let outcome = reading.lay_draft_over().and_then(|()| match reading.part.checksum {
            false => Ok(Done::default()),
            true => {
                let sum = host_sum(&reading.part, &*reading.host, reading.object_is_far)?;
                Ok(done(&reading.part, reading.object_is_far, sum, sum))
            }
        });
        self.settle(number, outcome.map_err(Failure::from));
    }

    /// Whether the server makes an object of the parts that this write would go to: it would be forgotten with them.
    fn is_being_completed(&self, number: u64) -> bool {
        let Some(Running {
            work: Work::Write(writing),
            ..
        }) = self.running.get(&number)
        else {
            return false;
        };
        let completes =
            |running: &Running| matches!(&running.work, Work::Commit(of, Some(_)) if Arc::ptr_eq(of, &writing.object));
        self.running.values().any(completes)
    }

    /// Takes bytes of a write into the object's draft, as many as `left` says.
    pub(super) fn take_in(&mut self, number: u64, left: &mut u64) -> TakenIn {
        if self.is_being_completed(number) {
            self.waits_for_room = true;
            return TakenIn::NoRoom;
        }
        let Some(Running {
            work: Work::Write(writing),
            ..
        }) = self.running.get_mut(&number)
        else {
            return TakenIn::Ended;
        };
        while let Some(piece) = writing.pieces.get(writing.next).copied() {
            if *left == 0 {
                return TakenIn::More;
            }
            let (at, len) = (piece.object + writing.done, (piece.len - writing.done).min(*left));
            let host = host_of(&*writing.host);
            let from = piece.memory + writing.done;
            let (checksum, digest) = (writing.part.checksum, &mut writing.digest);
            let place = of_object(&*writing.object);
            let mut draft = place.draft();
            let written = draft.write(at, len, &self.staging, |into| {
                // SAFETY: the slice is as long as what is written to it.
                unsafe { host.take(from, into.as_mut_ptr(), into.len()) }?;
                if checksum {
                    digest.update(into);
                }
                Ok::<(), Refusal>(())
            });
            let (moved, whole) = match written {
                Err(refusal) => {
                    drop(draft);
                    self.settle(number, Err(refusal.into()));
                    return TakenIn::Ended;
                }
                Ok(Err(NoPart::NoRoom)) => {
                    drop(draft);
                    if self.sending > 0 {
                        self.waits_for_room = true;
                        return TakenIn::NoRoom;
                    }
                    self.settle(number, Err(Refusal::NoRoom.into()));
                    return TakenIn::Ended;
                }
                Ok(Ok(written)) => written,
            };
            let in_parts = draft.is_in_parts();
            drop(draft);
            *left -= moved;
            self.count.bytes_written += moved;
            writing.done += moved;
            if writing.done == piece.len {
                (writing.next, writing.done) = (writing.next + 1, 0);
            }
            if let Some(part) = whole.filter(|_| in_parts) {
                let object = Arc::clone(&writing.object);
                self.send_part(&object, part);
                return TakenIn::More;
            }
        }
        let drafted = std::mem::take(&mut writing.digest).finish();
        let outcome = match writing.part.checksum {
            false => Ok(Done::default()),
            true => host_sum(&writing.part, &*writing.host, writing.object_is_far)
                .map(|host| done(&writing.part, writing.object_is_far, drafted, host)),
        };
        self.settle(number, outcome.map_err(Failure::from));
        TakenIn::Ended
    }

    /// Sends a part, or the whole object where it is one.
    fn send_part(&mut self, object: &Arc<dyn Memory>, nth: u64) {
        let place = of_object(&**object);
        let Ok(bucket) = place.bucket.inner().cloned() else {
            return;
        };
        let Some((bytes, generation)) = place.begin_sending(nth) else {
            return;
        };
        let in_parts = place.draft().is_in_parts();
        let (key, upload, inbox) = (place.key.clone(), place.upload(), Arc::clone(&self.inbox));
        let store = Arc::clone(&bucket);
        let answer = SentAnswer {
            inbox,
            object: Arc::clone(object),
            part: nth,
            generation,
            ended: Err(Failure::Cancelled),
        };
        self.sending += 1;
        self.count.requests += 1;
        let task = bucket.spawn(async move {
            // Told when this is dropped, also before its time.
            let mut answer = answer;
            let payload = PutPayload::from(Bytes::from_owner(Sent(bytes)));
            let request = async {
                let store = &store.store;
                if !in_parts {
                    store.put(&key, payload).await.map_err(|error| told(&error).failure)?;
                    let content_id = String::new();
                    return Ok(PartId { content_id });
                }
                let id = upload.id.get_or_try_init(|| store.create_multipart(&key)).await;
                let id = id.map_err(|error| told(&error).failure)?;
                let sent = store.put_part(&key, id, nth as usize, payload).await;
                sent.map_err(|error| told(&error).failure)
            };
            answer.ended = timeout(PART_PATIENCE, request).await.unwrap_or(Err(Failure::Expired));
        });
        place.draft().on_sending(nth, generation, task);
    }

    pub(super) fn on_part_sent(
        &mut self,
        object: &Arc<dyn Memory>,
        part: u64,
        generation: u64,
        ended: Result<PartId, Failure>,
    ) {
        self.sending -= 1;
        self.waits_for_room = false;
        let place = of_object(&**object);
        match ended {
            Ok(id) => {
                self.count.parts_sent += 1;
                place.draft().on_sent(part, generation, id);
            }
            Err(failure) => place.draft().on_unsent(part, generation, failure),
        }
        let is_of = |running: &Running| matches!(&running.work, Work::Commit(of, None) if Arc::ptr_eq(of, object));
        let commits = self.running.iter().filter(|(_, running)| is_of(running));
        let commits: Vec<u64> = commits.map(|(number, _)| *number).collect();
        for number in commits {
            let failed = place.draft().failed;
            match failed {
                Some(failure) => self.settle(number, Err(failure)),
                None => self.advance_commit(number),
            }
        }
    }

    /// Does of a commit what can be done now.
    pub(super) fn advance_commit(&mut self, number: u64) {
        let Some(Running {
            work: Work::Commit(object, None),
            ..
        }) = self.running.get(&number)
        else {
            return;
        };
        let object = Arc::clone(object);
        let place = of_object(&*object);
        let mut draft = place.draft();
        if draft.is_empty() {
            drop(draft);
            self.count.commits += 1;
            return self.settle(number, Ok(Done::default()));
        }
        if !draft.is_whole() {
            drop(draft);
            // An object is made as a whole, or not at all.
            return self.settle(number, Err(Refusal::Malformed.into()));
        }
        draft.failed = None;
        let held = draft.held();
        let (sent, in_parts) = (draft.sent(), draft.is_in_parts());
        drop(draft);
        if let Some(parts) = sent {
            if !in_parts {
                place.draft().clear();
                self.count.commits += 1;
                return self.settle(number, Ok(Done::default()));
            }
            return self.complete_upload(number, &object, parts);
        }
        for part in held {
            self.send_part(&object, part);
        }
    }

    /// Has the server make an object of the parts that it has.
    fn complete_upload(&mut self, number: u64, object: &Arc<dyn Memory>, parts: Vec<PartId>) {
        let place = of_object(&**object);
        let upload = place.upload();
        let (Ok(bucket), Some(id)) = (place.bucket.inner().cloned(), upload.id.get().cloned()) else {
            return self.settle(number, Err(Refusal::Unsupported.into()));
        };
        let now = self.clock.now();
        let Some(Running {
            work: Work::Commit(_, task),
            deadline,
            ..
        }) = self.running.get_mut(&number)
        else {
            return;
        };
        let patience = Duration::from(deadline.saturating_sub(now));
        let (key, inbox, store) = (place.key.clone(), Arc::clone(&self.inbox), Arc::clone(&bucket));
        self.count.requests += 1;
        *task = Some(bucket.spawn(async move {
            let request = store.store.complete_multipart(&key, &id, parts);
            let ended = match timeout(patience, request).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(told(&error).failure),
                Err(_) => Err(Failure::Expired),
            };
            inbox.tell(Event::Committed { number, ended });
        }));
    }

    pub(super) fn on_committed(&mut self, number: u64, ended: Result<(), Failure>) {
        let Some(Running {
            work: Work::Commit(object, _),
            ..
        }) = self.running.get(&number)
        else {
            return;
        };
        let place = of_object(&**object);
        match ended {
            Ok(()) => {
                place.draft().clear();
                place.next_upload();
                self.count.commits += 1;
                self.settle(number, Ok(Done::default()));
            }
            Err(failure) => self.settle(number, Err(failure)),
        }
    }
}

/// Bytes of a part, shared with its draft.
struct Sent(Arc<Vec<u8>>);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Tells what came of a request when it is dropped: also where it was given up, so that requests are counted right.
struct Answer {
    inbox: Arc<Inbox>,
    number: u64,
    request: usize,
    ended: Result<Vec<Bytes>, Failure>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        let ended = std::mem::replace(&mut self.ended, Err(Failure::Cancelled));
        self.inbox.tell(Event::Received {
            number: self.number,
            request: self.request,
            ended,
        });
    }
}

/// The same of a part that is sent.
struct SentAnswer {
    inbox: Arc<Inbox>,
    object: Arc<dyn Memory>,
    part: u64,
    generation: u64,
    ended: Result<PartId, Failure>,
}

impl Drop for SentAnswer {
    fn drop(&mut self) {
        let ended = std::mem::replace(&mut self.ended, Err(Failure::Cancelled));
        self.inbox.tell(Event::PartSent {
            object: Arc::clone(&self.object),
            part: self.part,
            generation: self.generation,
            ended,
        });
    }
}

/// The bytes of a range, all of them, and of one object: where an answer breaks off it is gone on with, as long as each brings something.
async fn receive(
    store: &object_store::aws::AmazonS3,
    key: &object_store::path::Path,
    start: u64,
    end: u64,
) -> Result<Vec<Bytes>, Failure> {
    let (mut chunks, mut at, mut tag) = (Vec::new(), start, None);
    while at < end {
        let before = at;
        match receive_some(store, key, &mut at, end, &mut tag, &mut chunks).await {
            // The object is shorter than it was when it was opened.
            Ok(()) if at < end => return Err(Refusal::NoMemory.into()),
            Ok(()) => {}
            Err(_) if at > before => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(chunks)
}

async fn receive_some(
    store: &object_store::aws::AmazonS3,
    key: &object_store::path::Path,
    at: &mut u64,
    end: u64,
    tag: &mut Option<String>,
    chunks: &mut Vec<Bytes>,
) -> Result<(), Failure> {
    let failed = |error: object_store::Error| told(&error).failure;
    let options = GetOptions::new().with_range(Some(GetRange::Bounded(*at..end)));
    let options = options.with_if_match(tag.clone());
    let answer = store.get_opts(key, options).await.map_err(failed)?;
    // What follows is of the same object, or of none.
    tag.clone_from(&answer.meta.e_tag);
    let mut stream = answer.into_stream();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(failed)?;
        if chunk.len() as u64 > end - *at {
            // Whoever sends more than it was asked for sends something else.
            return Err(Refusal::DeviceFailed.into());
        }
        *at += chunk.len() as u64;
        chunks.push(chunk);
    }
    Ok(())
}

impl Reading {
    fn new(
        part: Move,
        object: Arc<dyn Memory>,
        host: Arc<dyn Memory>,
        object_is_far: bool,
        mut pieces: Vec<Piece>,
    ) -> Result<Reading, Refusal> {
        pieces.sort_unstable_by_key(|piece| piece.object);
        let mut requests: Vec<Request> = Vec::new();
        {
            let draft = of_object(&*object).draft();
            for (nth, piece) in pieces.iter().enumerate() {
                // What a server has as a part, and nobody else, cannot be read before it is the object.
                let missing = draft.missing(piece.object..piece.object + piece.len);
                for gap in missing.ok_or(Refusal::NotReadable)? {
                    let mut start = gap.start;
                    if let Some(last) = requests.last_mut()
                        && last.start <= start
                        && start <= last.end + GAP_BYTES_MAX
                        && last.start + REQUEST_BYTES_MAX > start
                    {
                        let until = gap.end.min(last.start + REQUEST_BYTES_MAX);
                        last.end = last.end.max(until);
                        last.pieces.end = nth + 1;
                        start = start.max(last.end);
                    }
                    while start < gap.end {
                        let end = gap.end.min(start + REQUEST_BYTES_MAX);
                        requests.push(Request {
                            start,
                            end,
                            pieces: nth..nth + 1,
                            task: None,
                        });
                        start = end;
                    }
                }
            }
        }
        Ok(Reading {
            part,
            object,
            host,
            object_is_far,
            pieces,
            requests,
            next: 0,
            open: 0,
        })
    }

    /// Puts what has come where it belongs; says how many bytes.
    fn land(&self, nth: usize, chunks: &[Bytes]) -> Result<u64, Refusal> {
        let request = &self.requests[nth];
        let host = host_of(&*self.host);
        let mut begins = Vec::with_capacity(chunks.len());
        let mut at = request.start;
        for chunk in chunks {
            begins.push(at);
            at += chunk.len() as u64;
        }
        let mut copied = 0;
        for piece in &self.pieces[request.pieces.clone()] {
            let mut from = piece.object.max(request.start);
            let end = (piece.object + piece.len).min(request.end);
            while from < end {
                let which = begins.partition_point(|begin| *begin <= from) - 1;
                let chunk = &chunks[which][(from - begins[which]) as usize..];
                let len = chunk.len().min((end - from) as usize);
                let to = piece.memory + (from - piece.object);
                // SAFETY: the slice has as many bytes as are read from it.
                unsafe { host.put(to, chunk.as_ptr(), len) }?;
                from += len as u64;
                copied += len as u64;
            }
        }
        Ok(copied)
    }

    /// What has been written and not committed is what this agent reads.
    fn lay_draft_over(&self) -> Result<(), Refusal> {
        let host = host_of(&*self.host);
        let draft = of_object(&*self.object).draft();
        for (nth, piece) in self.pieces.iter().enumerate() {
            // What was a draft when this began and is none any more: nobody was asked for it.
            let missing = draft.missing(piece.object..piece.object + piece.len);
            for gap in missing.ok_or(Refusal::NotReadable)? {
                let mut at = gap.start;
                while at < gap.end {
                    let covers =
                        |request: &&Request| request.pieces.contains(&nth) && request.start <= at && at < request.end;
                    at = self.requests.iter().find(covers).ok_or(Refusal::NotReadable)?.end;
                }
            }
            draft.each(piece.object..piece.object + piece.len, |at, bytes| {
                // SAFETY: the slice has as many bytes as are read from it.
                unsafe { host.put(piece.memory + (at - piece.object), bytes.as_ptr(), bytes.len()) }
            })?;
        }
        Ok(())
    }
}
