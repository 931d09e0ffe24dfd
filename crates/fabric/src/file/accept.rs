//! Taking an operation on: what it is about, and which requests it becomes.

use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Body, Direction, Done, Failure, Memory, Move, Op, PathId, Refusal, RegionKey};

use super::FileHere;
use super::layout::{Piece, Rules};
use super::running::{Committing, Moving, Running, Step, Work, file_of};
use crate::memory::HostMemory;

impl FileHere {
    /// Takes an operation on, or says at once why not.
    pub(super) fn accept(&mut self, path: PathId, op: &Op, now: Time) {
        let accepted = match &op.body {
            _ if now >= op.deadline => Err(Failure::Expired),
            Body::Move(part) => self.accept_move(part).map_err(Failure::from),
            Body::Commit(commit) => match self.table.lookup(&commit.region.key) {
                Err(refusal) => Err(refusal.into()),
                Ok(region) => match file_of(&*region.memory) {
                    // Memory has nothing to be committed.
                    None => return self.complete(path, op.id, Ok(Done::default())),
                    Some(file) if !file.is_writable() => Err(Refusal::NotWritable.into()),
                    Some(file) if file.is_spoiled() => Err(Refusal::DeviceFailed.into()),
                    Some(_) => Ok((
                        Work::Commit(Committing {
                            file: Arc::clone(&region.memory),
                            next: Some(Step::Data),
                        }),
                        [commit.region.key; 2],
                    )),
                },
            },
            Body::Message(_) | Body::Atomic(_) => Err(Refusal::Unsupported.into()),
        };
        let (work, uses) = match accepted {
            Ok(accepted) => accepted,
            Err(failure) => return self.complete(path, op.id, Err(failure)),
        };
        let number = self.next_running;
        self.next_running += 1;
        let running = Running {
            path,
            id: op.id,
            deadline: op.deadline,
            work,
            uses,
            open: 0,
            ending: None,
            incomplete: false,
        };
        let has_more = running.has_more();
        self.running.insert(number, running);
        match has_more {
            true => self.queue.push_back(number),
            false => self.settle(number),
        }
    }

    pub(super) fn accept_move(&mut self, part: &Move) -> Result<(Work, [RegionKey; 2]), Refusal> {
        let leg = &part.leg;
        if part.range.start > part.range.end || part.range.end > leg.bytes() {
            return Err(Refusal::Malformed);
        }
        let near = self.table.check_own(&leg.local().key, leg.local_spans())?;
        let far = self.table.check_own(&leg.remote().key, leg.remote_spans())?;
        let file_is_far = file_of(&*far.memory).is_some();
        let (file, host) = match file_is_far {
            true => (Arc::clone(&far.memory), Arc::clone(&near.memory)),
            false => (Arc::clone(&near.memory), Arc::clone(&far.memory)),
        };
        let host_key = if file_is_far { near.key } else { far.key };
        let place = file_of(&*file).ok_or(Refusal::Unsupported)?;
        let memory: &HostMemory = host.as_any().downcast_ref().ok_or(Refusal::Unsupported)?;
        let to_file = (part.direction == Direction::Write) == file_is_far;
        if to_file && !place.is_writable() {
            return Err(Refusal::NotWritable);
        }
        let rules = Rules {
            align: place.alignment(),
            address: memory.as_ptr() as u64,
            staged: place.is_staged(),
        };
        let mut layout = self.spare_layouts.pop().unwrap_or_default();
        let pieces = leg
            .pieces(part.range.clone())
            .map(|(near, far, len)| match file_is_far {
                true => Piece {
                    file: far,
                    memory: near,
                    len,
                },
                false => Piece {
                    file: near,
                    memory: far,
                    len,
                },
            });
        layout.lay(pieces, rules);
        let buffer = match place.alignment() {
            Some(_) => self.buffer_of(&host_key, memory),
            // The page cache copies, and pins nothing.
            None => None,
        };
        let moving = Moving {
            part: part.clone(),
            file,
            host,
            file_is_far,
            layout,
            next: 0,
            buffer,
            handed_over: None,
        };
        Ok((Work::Move(Box::new(moving)), [leg.local().key, leg.remote().key]))
    }

    /// Where host memory is registered with the ring; that is tried once.
    pub(super) fn buffer_of(&mut self, key: &RegionKey, memory: &HostMemory) -> Option<u16> {
        if let Some(known) = self.buffers.get(&key.slot) {
            return known.map(|(buffer, _)| buffer);
        }
        let ring = self.kernel.as_mut()?.ring()?;
        let len = memory.len();
        let fits = self.count.registered_bytes + len <= self.options.registered_bytes;
        let added = match fits && !memory.may_vanish() {
            // SAFETY: the memory is registered with this transport, which removes the buffer before it lets go of it.
            true => unsafe { ring.add_buffer(memory.as_ptr(), len) }.ok(),
            false => None,
        };
        self.count.registered_bytes += added.map_or(0, |_| len);
        self.buffers.insert(key.slot, added.map(|buffer| (buffer, len)));
        added
    }
}
