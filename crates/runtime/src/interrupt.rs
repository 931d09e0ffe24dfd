//! Waits that end early, because whoever waits is wanted elsewhere: a person has pressed Ctrl-C, or a task was cancelled.
//!
//! Waiting is spread over the whole crate: for a session, a region, a lease, a name, the ranks of a group. So the question whether to go on
//! belongs to the thread and not to each call: [`interruptible`] hangs it up, and every wait of that thread asks it now and then. Once the
//! answer was yes, all waits of the thread end at once, until `interruptible` returns.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How often a wait asks.
pub(crate) const ASK_EVERY: Duration = Duration::from_millis(50);

thread_local! {
    static WATCH: RefCell<Option<Rc<Watch>>> = const { RefCell::new(None) };
}

/// The question that a thread has hung up, and what is known of the answer.
struct Watch {
    is_wanted: Rc<dyn Fn() -> bool>,
    asked: Cell<Option<Instant>>,
    interrupted: Cell<bool>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

/// Does something that may wait. Its waits ask a few times a second whether the calling thread `is_wanted` elsewhere; if so they end, and
/// calls that cannot go on without what they waited for return [`Error::Interrupted`](crate::Error::Interrupted).
///
/// What was begun is given up: a connection that was being made, a group that was being formed, a collective that was run. Transfers, and
/// collectives that were started and not run, go on by themselves.
pub fn interruptible<T>(is_wanted: Rc<dyn Fn() -> bool>, work: impl FnOnce() -> T) -> T {
    let watch = Rc::new(Watch {
        is_wanted,
        asked: Cell::new(None),
        interrupted: Cell::new(false),
    });
    let _restored = Restored(WATCH.replace(Some(watch)));
    work()
}

/// Whether waits of this thread have to ask at all.
pub(crate) fn is_watched() -> bool {
    WATCH.with_borrow(Option::is_some)
}

/// Whether waits of this thread are to end. It may be asked in every turn of a wait, and never while a lock is held: whoever answers may need
/// that lock, or wait for somebody who does.
pub(crate) fn is_due() -> bool {
    let Some(watch) = WATCH.with_borrow(Clone::clone) else {
        return false;
    };
    if watch.interrupted.get() {
        return true;
    }
    let now = Instant::now();
    match watch.asked.get() {
        // A wait that has only begun asks for the first time a moment later: most are over by then.
        None => watch.asked.set(Some(now)),
        Some(asked) if now.saturating_duration_since(asked) >= ASK_EVERY => {
            watch.asked.set(Some(now));
            watch.interrupted.set((watch.is_wanted)());
        }
        Some(_) => {}
    }
    watch.interrupted.get()
}

/// Whether waits of this thread have been ended.
pub(crate) fn has_happened() -> bool {
    WATCH.with_borrow(|watch| watch.as_ref().is_some_and(|watch| watch.interrupted.get()))
}

/// Puts back what was hung up before, also after a panic.
struct Restored(Option<Rc<Watch>>);

impl Drop for Restored {
    fn drop(&mut self) {
        WATCH.set(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_question_belongs_to_the_thread_and_ends_with_the_call() {
        assert!(!is_watched() && !is_due() && !has_happened());
        interruptible(Rc::new(|| true), || {
            assert!(is_watched() && !is_due(), "the first look asks nothing");
            std::thread::spawn(|| assert!(!is_watched()))
                .join()
                .expect("another thread");
            std::thread::sleep(ASK_EVERY);
            assert!(is_due() && is_due() && has_happened());
            interruptible(Rc::new(|| false), || assert!(!has_happened()));
            assert!(has_happened());
        });
        assert!(!is_watched() && !is_due() && !has_happened());
    }
}
