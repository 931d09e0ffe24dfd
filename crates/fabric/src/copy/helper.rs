//! A second core for copies that take long.
//!
//! The caller offers numbered units of work and takes them itself, one by one; a helper thread that happens to be free takes
//! some too. When none is left the caller waits only for the unit that the helper is in. The thread starts with the first
//! offer, spins briefly for a next one, and then sleeps until it is woken.

use std::fmt;

use crate::sync::{Arc, AtomicU32, Ordering, UnsafeCell, thread};

/// Lends one helper thread to whoever calls [`Helper::share`].
pub struct Helper {
    shared: Arc<Shared>,
    state: Thread,
    /// Jobs to do alone before the helper is offered one again, because it kept the caller waiting: no core was idle.
    rest: u32,
    /// How long it rests when it does so the next time.
    next_rest: u32,
}

#[cfg(not(loom))]
const REST_MIN: u32 = 1;
/// The model waits at once, and shall share every job.
#[cfg(loom)]
const REST_MIN: u32 = 0;
const REST_MAX: u32 = 64;

enum Thread {
    NotStarted,
    Running(thread::JoinHandle<()>),
    /// The system gave us no thread; the caller does all the work.
    Unavailable,
}

/// Nothing offered; the job slot belongs to the caller.
const IDLE: u32 = 0;
/// A job lies in the slot for the helper to take, or for the caller to withdraw.
const OFFERED: u32 = 1;
/// The helper is taking units of the job.
const TAKEN: u32 = 2;
/// The helper has left the job and touches nothing of it any more.
const LEFT: u32 = 3;
/// As LEFT, but a unit panicked.
const PANICKED: u32 = 4;
/// The helper shall end.
const STOP: u32 = 5;

struct Shared {
    state: AtomicU32,
    next: AtomicU32,
    job: UnsafeCell<Option<Job>>,
}

// SAFETY: the job slot is written by the caller in IDLE only and read by the helper in TAKEN only; the state word orders the two.
unsafe impl Sync for Shared {}
// SAFETY: as above; a job's work is Sync and its caller's handle is Send.
unsafe impl Send for Shared {}

#[derive(Clone)]
struct Job {
    units: u32,
    /// Borrowed from the caller, who does not return before the helper has left.
    work: *const (dyn Fn(u32) + Sync),
    caller: thread::Thread,
}

impl Default for Helper {
    fn default() -> Helper {
        Helper::new()
    }
}

impl Helper {
    /// No thread is started before there is work for it.
    pub fn new() -> Helper {
        Helper {
            shared: Arc::new(Shared {
                state: AtomicU32::new(IDLE),
                next: AtomicU32::new(0),
                job: UnsafeCell::new(None),
            }),
            state: Thread::NotStarted,
            rest: 0,
            next_rest: REST_MIN,
        }
    }

    /// Runs `work` once for each of `0..units`, on this thread and, if it is free, on the helper. Returns when all are done.
    pub fn share(&mut self, units: u32, work: &(dyn Fn(u32) + Sync)) {
        if self.rest > 0 {
            self.rest -= 1;
            return (0..units).for_each(work);
        }
        let Some(helper) = self.thread() else {
            return (0..units).for_each(work);
        };
        self.shared.next.store(0, Ordering::Relaxed);
        // SAFETY: only the lifetime is widened. `finish` below, also when unwinding, returns after the helper has left the job.
        let work: &'static (dyn Fn(u32) + Sync) = unsafe { std::mem::transmute(work) };
        let job = Job {
            units,
            work,
            caller: thread::current(),
        };
        self.shared.job.with_mut(|slot| {
            // SAFETY: the state is IDLE, so the slot is ours.
            unsafe { *slot = Some(job) }
        });
        self.shared.state.store(OFFERED, Ordering::Release);
        helper.unpark();
        let mut waited = false;
        let finish = Finish(&self.shared, &mut waited);
        self.shared.take_units(units, work);
        drop(finish);
        if waited {
            self.rest = self.next_rest;
            self.next_rest = (self.next_rest * 2).min(REST_MAX);
        } else {
            self.next_rest = REST_MIN;
        }
    }

    fn thread(&mut self) -> Option<thread::Thread> {
        if let Thread::NotStarted = self.state {
            let shared = self.shared.clone();
            let spawned = thread::Builder::new()
                .name("weft-copy".into())
                .spawn(move || shared.help());
            self.state = spawned.map_or(Thread::Unavailable, Thread::Running);
        }
        match &self.state {
            Thread::Running(handle) => Some(handle.thread().clone()),
            _ => None,
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let Thread::Running(handle) = std::mem::replace(&mut self.state, Thread::Unavailable) {
            self.shared.state.store(STOP, Ordering::Release);
            handle.thread().unpark();
            // A panic of the helper was already reported by the call that it happened in.
            let _ = handle.join();
        }
    }
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            Thread::NotStarted => "Helper(not started)",
            Thread::Running(_) => "Helper(running)",
            Thread::Unavailable => "Helper(unavailable)",
        })
    }
}

impl Shared {
    fn take_units(&self, units: u32, work: &(dyn Fn(u32) + Sync)) {
        loop {
            let unit = self.next.fetch_add(1, Ordering::Relaxed);
            if unit >= units {
                return;
            }
            work(unit);
        }
    }

    fn help(&self) {
        let mut waited = 0;
        loop {
            match self.state.load(Ordering::Acquire) {
                OFFERED => {
                    let taken = self
                        .state
                        .compare_exchange(OFFERED, TAKEN, Ordering::Acquire, Ordering::Relaxed);
                    if taken.is_ok() {
                        self.help_with_job();
                        waited = 0;
                    }
                }
                STOP => return,
                _ if waited < SPINS => {
                    waited += 1;
                    std::hint::spin_loop();
                }
                _ => thread::park(),
            }
        }
    }

    fn help_with_job(&self) {
        let job = self.job.with(|slot| {
            // SAFETY: the state is TAKEN, so the caller leaves the slot alone.
            unsafe { (*slot).clone() }
        });
        let Some(job) = job else {
            unreachable!("a job was offered");
        };
        let leave = Leave(self, job.caller);
        // SAFETY: the caller keeps the work alive until this thread has left, which `leave` announces.
        self.take_units(job.units, unsafe { &*job.work });
        drop(leave);
    }
}

/// How often the helper looks for a next job before it sleeps: some tens of microseconds, the gap between two parts of a transfer.
#[cfg(not(loom))]
const SPINS: u32 = 2000;
#[cfg(loom)]
const SPINS: u32 = 0;

/// How often the caller looks whether the helper has left: longer than a unit takes on a core of its own, so that a longer wait
/// means that the helper has none.
#[cfg(not(loom))]
const UNIT_SPINS: u32 = 20_000;
#[cfg(loom)]
const UNIT_SPINS: u32 = 0;

/// Tells the caller that the helper has left, also when a unit panics.
struct Leave<'a>(&'a Shared, thread::Thread);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let state = if std::thread::panicking() { PANICKED } else { LEFT };
        self.0.state.store(state, Ordering::Release);
        self.1.unpark();
    }
}

/// Takes the offer back, or waits until the helper has left; also when the caller unwinds. Tells whether the wait was a long one.
struct Finish<'a>(&'a Shared, &'a mut bool);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        // A unit that panicked here shall not leave the helper with more to do.
        self.0.next.fetch_max(u32::MAX / 2, Ordering::Relaxed);
        let withdrawn = self
            .0
            .state
            .compare_exchange(OFFERED, IDLE, Ordering::Acquire, Ordering::Acquire);
        let mut waited = 0;
        let mut state = withdrawn.map_or_else(|state| state, |_| LEFT);
        while state == TAKEN {
            if waited < UNIT_SPINS {
                waited += 1;
                std::hint::spin_loop();
            } else {
                *self.1 = true;
                thread::park();
            }
            state = self.0.state.load(Ordering::Acquire);
        }
        self.0.state.store(IDLE, Ordering::Relaxed);
        assert!(
            state != PANICKED || std::thread::panicking(),
            "a shared copy panicked in its helper"
        );
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_unit_runs_once_job_after_job() {
        let mut helper = Helper::new();
        for units in (0..200).chain([5000]) {
            let counts: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
            helper.share(units, &|unit| {
                counts[unit as usize].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{units} units");
        }
    }

    #[test]
    fn the_helper_really_helps() {
        let mut helper = Helper::new();
        let (here, there) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let me = std::thread::current().id();
        // Each unit waits for the other thread to have taken one as well, or for all to be given out.
        helper.share(2, &|_| {
            let mine = if std::thread::current().id() == me {
                &here
            } else {
                &there
            };
            mine.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) + there.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        });
        assert_eq!((here.into_inner(), there.into_inner()), (1, 1));
    }

    #[test]
    fn a_panic_here_waits_for_the_helper_and_leaves_it_usable() {
        let mut helper = Helper::new();
        let me = std::thread::current().id();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            helper.share(1000, &|_| {
                assert!(std::thread::current().id() != me, "the caller's unit fails");
            });
        }));
        assert!(panicked.is_err());
        let done = AtomicUsize::new(0);
        helper.share(10, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 10);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell as Checked;

    #[test]
    fn units_are_exclusive_and_all_done_when_share_returns() {
        crate::sync::check(Some(3), || {
            let mut helper = Helper::new();
            for _ in 0..2 {
                struct Cells([Checked<u32>; 2]);
                // SAFETY: loom checks that each cell is touched by one thread at a time; that is the claim under test.
                unsafe impl Sync for Cells {}
                let cells = Cells([Checked::new(0), Checked::new(0)]);
                let cells = &cells;
                helper.share(2, &|unit| {
                    cells.0[unit as usize].with_mut(|c| {
                        // SAFETY: as above.
                        unsafe { *c += 1 }
                    });
                });
                for cell in &cells.0 {
                    // SAFETY: as above.
                    cell.with(|c| assert_eq!(unsafe { *c }, 1));
                }
            }
        });
    }
}
