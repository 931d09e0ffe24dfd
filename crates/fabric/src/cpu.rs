//! Which core a thread runs on, as far as it matters to threads that look for work in a loop.

use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

/// A yield that takes longer than this means that somebody else ran meanwhile.
const CROWDED: Duration = Duration::from_micros(2);
/// How long a thread watches before it judges whether its core is crowded.
const WATCH: Duration = Duration::from_millis(4);
/// One part in so many, lost to others, makes a thread look for another core.
const LOST_PART: u32 = 4;

thread_local! {
    /// When this thread began to watch, and what it has lost since.
    static WATCHED: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// One step of looking for work in a loop.
///
/// Two ends that look for each other's bytes on one core would keep each other from sending them, so each step lets whoever
/// else is ready run first. The kernel likes to put a thread that is woken by a packet on the core of its sender, which it expects to
/// go to sleep; where that does not happen both would share the core for good while others are idle. So a thread that keeps
/// finding its core crowded steps aside to another one.
pub fn look_again() {
    let before = Instant::now();
    std::thread::yield_now();
    let now = Instant::now();
    let took = now - before;
    let (since, mut lost) = WATCHED.get().unwrap_or((before, Duration::ZERO));
    if took > CROWDED {
        lost += took;
    }
    if now - since < WATCH {
        WATCHED.set(Some((since, lost)));
        return;
    }
    WATCHED.set(None);
    // Of two that crowd each other one should move; the low bit of the time is a good enough coin.
    if lost * LOST_PART > now - since && took.subsec_nanos() & 1 == 0 {
        step_aside();
    }
}

/// Moves the calling thread to another of the cores that it may run on, where there is one.
fn step_aside() {
    let size = size_of::<libc::cpu_set_t>();
    // SAFETY: an all-zero set is the empty set; the calls and helpers read and write local sets of the size that they are told.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        let current = libc::sched_getcpu();
        if current < 0 || libc::sched_getaffinity(0, size, &mut allowed) != 0 {
            return;
        }
        let mut others = allowed;
        libc::CPU_CLR(current as usize, &mut others);
        if libc::CPU_COUNT(&others) == 0 || libc::sched_setaffinity(0, size, &others) != 0 {
            return;
        }
        libc::sched_setaffinity(0, size, &allowed);
    }
}

/// How many cores several processes of this host have together, as far as one of them can tell.
///
/// One that may run on several cores is taken to share them with the others. One that is kept on a single core is taken to have been put there
/// by a launcher, which has given the others theirs.
pub fn cores_of_all() -> usize {
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    if own > 1 {
        return own;
    }
    // SAFETY: a plain question.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(online).unwrap_or(own).max(own)
}

/// Keeps the calling thread on one core.
pub fn pin(core: usize) -> io::Result<()> {
    // SAFETY: as in `step_aside`; the helper checks that the core fits the set.
    let pinned = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if pinned == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stepping_aside_leaves_the_allowed_cores_as_they_were() {
        let cores = || std::thread::available_parallelism().unwrap();
        let before = cores();
        step_aside();
        assert_eq!(cores(), before);
    }

    #[test]
    fn a_core_that_is_not_there_is_an_error() {
        std::thread::spawn(|| assert!(pin(1000).is_err())).join().unwrap();
    }
}
