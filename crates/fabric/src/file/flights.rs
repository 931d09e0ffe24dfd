//! Requests that the kernel has: how they are asked for, what comes back, and how they are stopped.

use std::sync::Arc;

use weft_protocol::{Failure, Refusal};

use super::kernel::{Act, Ask, Bytes, Target};
use super::running::{Flight, Flown, NOBODY, Running, Step, Work, file_of, refusal};
use super::{FileHere, directory, scatter};
use crate::here::LOST;

/// A request that comes back undone, without anybody having asked for it, is made so often again.
const RETRIES_MAX: u8 = 64;

impl FileHere {
    /// Asks the kernel for what is left of a request; where it has no room it is asked again. Tells whether it had.
    pub(super) fn ask(&mut self, index: u32) -> bool {
        let Some(running) = self.running.get(&self.flights[index as usize].of) else {
            return true;
        };
        let file = match &running.work {
            Work::Move(moving) => moving.file(),
            Work::Commit(commit) => commit.file(),
        };
        let by_threads = self.goes_by_threads(file);
        let kernel = if by_threads {
            &mut self.threads
        } else {
            &mut self.kernel
        };
        let Some(kernel) = kernel else { return true };
        let flight = &mut self.flights[index as usize];
        flight.by_threads = by_threads;
        let bytes = Bytes {
            offset: flight.request.offset + flight.done,
            memory: &flight.memory[flight.first..],
            buffer: flight.buffer,
        };
        let key = running.uses.iter().find_map(|key| self.files.get(&key.slot));
        let slots = key.copied().unwrap_or_default();
        let way = usize::from(flight.past);
        let mut target = Target {
            fd: file.descriptors()[way],
            slot: slots[way],
        };
        let act = match (flight.act, file.naming()) {
            (Flown::Read, _) => Act::Read(bytes),
            (Flown::Write, _) => Act::Write(bytes),
            (Flown::Commit(Step::Name), Some(naming)) => {
                target = directory(naming);
                Act::Rename(&naming.temporary, &naming.name)
            }
            (Flown::Commit(Step::Directory), Some(naming)) => {
                target = directory(naming);
                Act::SyncAll
            }
            (Flown::Commit(_), _) => Act::SyncData,
        };
        let asked = Ask {
            token: index.into(),
            act,
            file: target,
        };
        // SAFETY: the operation keeps both regions, which are not let go of while it uses them; staging is the transport's own. What a detached request needs
        // it keeps itself.
        let taken = unsafe { kernel.ask(asked) };
        if !taken {
            self.again.push_back(index);
        }
        taken
    }

    /// A request has come back.
    pub(super) fn on_ended(&mut self, index: u32, result: i32) {
        let flight = &mut self.flights[index as usize];
        let number = flight.of;
        let failed_sync = matches!(flight.act, Flown::Commit(Step::Data | Step::Directory))
            && result < 0
            && !matches!(-result, libc::EINTR | libc::EAGAIN | libc::ECANCELED);
        let Some(running) = self.running.get_mut(&number) else {
            // Nobody waits for it any more, but the next commit must not say that all is well.
            if failed_sync && let Some(file) = flight.keeps.as_deref().and_then(file_of) {
                file.on_spoiled();
            }
            return self.land(index);
        };
        if failed_sync && let Work::Commit(commit) = &running.work {
            commit.file().on_spoiled();
        }
        let stopped = running.ending.is_some();
        let may_retry = !stopped && flight.retries < RETRIES_MAX;
        match (flight.act, -result) {
            (Flown::Commit(step), ..=0) => {
                if let Work::Commit(commit) = &mut running.work {
                    match (step, commit.file().naming()) {
                        (Step::Name, Some(naming)) => naming.on_taken(),
                        (Step::Directory, Some(naming)) => naming.on_lasting(),
                        _ => {}
                    }
                    commit.next = commit.after(step);
                    running.incomplete |= stopped && commit.next.is_some();
                    if running.has_more() {
                        self.queue.push_front(number);
                    }
                }
                self.land(index);
            }
            (Flown::Read | Flown::Write, ..0) => {
                flight.advance(result as u64);
                if flight.done >= flight.request.len {
                    return self.on_moved(index);
                }
                if stopped {
                    running.incomplete = true;
                    return self.land(index);
                }
                // It ended at something that is no page's: the end of a file that is being cut, or of what a limit allows.
                let align = match &running.work {
                    Work::Move(moving) => moving.file().alignment(),
                    Work::Commit(_) => None,
                };
                let reached = flight.request.offset + flight.done;
                flight.past &= align.is_some_and(|align| reached.is_multiple_of(align.offset));
                self.count.continued += 1;
                self.ask(index);
            }
            (Flown::Read, 0) => {
                // The file has become shorter.
                self.fail(number, Refusal::NoMemory.into());
                self.land(index);
            }
            (Flown::Write, 0) => {
                self.fail(number, Refusal::DeviceFailed.into());
                self.land(index);
            }
            // Nobody asked for it: the thread that posted it has ended, and the kernel gave back what waited in its name.
            (_, libc::EINTR | libc::EAGAIN | libc::ECANCELED) if may_retry => {
                flight.retries += 1;
                self.count.retried += 1;
                self.ask(index);
            }
            (_, libc::ECANCELED | libc::EINTR | libc::EAGAIN) => {
                self.fail(number, Refusal::DeviceFailed.into());
                self.land(index);
            }
            (Flown::Read | Flown::Write, libc::EINVAL | libc::EOPNOTSUPP)
                if flight.past && may_retry && !running.is_only_direct() =>
            {
                flight.past = false;
                flight.retries += 1;
                if let Work::Move(moving) = &running.work {
                    moving.file().on_past_refused();
                }
                self.ask(index);
            }
            (_, error) => {
                self.fail(number, refusal(error).into());
                self.land(index);
            }
        }
    }

    /// All bytes of a request have moved.
    pub(super) fn on_moved(&mut self, index: u32) {
        let flight = &self.flights[index as usize];
        let mut refused = None;
        if let Some(Running {
            work: Work::Move(moving),
            ..
        }) = self.running.get(&flight.of)
            && let (Flown::Read, Some(_)) = (flight.act, flight.staging)
        {
            let memory = moving.layout.memory(&flight.request);
            let end = flight.memory[0].iov_base.cast::<u8>();
            let start = end.wrapping_sub(flight.request.len as usize);
            refused = scatter(moving.host(), memory, start).err();
        }
        if let Some(refusal) = refused {
            self.fail(self.flights[index as usize].of, refusal.into());
        }
        self.land(index);
    }

    /// A request of an operation has failed: what it was for ends with that, and the rest of it is not begun.
    pub(super) fn fail(&mut self, number: u64, failure: Failure) {
        if let Some(running) = self.running.get_mut(&number) {
            running.incomplete = true;
            running.ending.get_or_insert(failure);
        }
    }

    /// A request is over.
    pub(super) fn land(&mut self, index: u32) {
        let flight = &mut self.flights[index as usize];
        let number = std::mem::replace(&mut flight.of, NOBODY);
        flight.keeps = None;
        if let Some(piece) = flight.staging.take() {
            self.staging.give_back(piece);
        }
        self.free_flights.push(index);
        if let Some(running) = self.running.get_mut(&number) {
            running.open -= 1;
            self.settle(number);
        }
    }

    /// Ends an operation early, as soon as the kernel has let go of it.
    pub(super) fn stop(&mut self, number: u64, failure: Failure) {
        let Some(running) = self.running.get_mut(&number) else {
            return;
        };
        if running.ending.is_none() || failure == LOST {
            running.ending = Some(failure);
        }
        if running.open == 0 {
            return self.settle(number);
        }
        let file = match &running.work {
            Work::Move(moving) => &moving.file,
            Work::Commit(commit) => &commit.file,
        };
        let own = |flight: &&mut Flight| flight.of == number;
        // What the kernel has no memory of the caller's for, and will change nothing by, can go on without anybody.
        let harmless = |flight: &mut Flight| match flight.act {
            Flown::Read => flight.staging.is_some(),
            Flown::Commit(step) => step != Step::Name,
            Flown::Write => false,
        };
        let detached = self.flights.iter_mut().filter(own).all(harmless);
        for (index, flight) in self.flights.iter_mut().enumerate() {
            if flight.of != number {
                continue;
            }
            let kernel = if flight.by_threads {
                &mut self.threads
            } else {
                &mut self.kernel
            };
            if !flight.is_asked_to_stop
                && let Some(kernel) = kernel
            {
                flight.is_asked_to_stop = true;
                kernel.cancel(index as u64);
            }
            if detached {
                flight.of = NOBODY;
                flight.keeps = Some(Arc::clone(file));
            }
        }
        // What the kernel has not been given yet is not given any more.
        let given_back: Vec<u32> = self.again.iter().copied().collect();
        for index in given_back {
            let of = self.flights[index as usize].of;
            if of == number || of == NOBODY {
                self.again.retain(|again| *again != index);
                self.fail(number, failure);
                self.land(index);
            }
        }
        if let Some(kernel) = &mut self.kernel {
            kernel.flush();
        }
        if let Some(running) = self.running.get_mut(&number)
            && detached
        {
            (running.open, running.incomplete) = (0, true);
            self.settle(number);
        }
    }
}
