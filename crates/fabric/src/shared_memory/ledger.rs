//! Words in shared memory by which an owner takes its memory back.
//!
//! Moves run in the initiator alone, so the owner cannot simply stop them. It has a *ledger*, a word for each region that peers
//! can read; the initiator has a *hazard* that its peers can read. Before it touches a region, the initiator stores the region in
//! its hazard and then looks into the ledger; to take a region back, the owner changes the ledger and then looks at the hazards.
//! Between the two steps each has a fence of the one order that all cores agree on, so one of them sees the other: either the initiator finds the region
//! revoked and stays out, or the owner finds it inside and waits. What another process writes is mapped read-only here, and is therefore loaded relaxed.

use std::collections::HashSet;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::fork::NotInherited;
use crate::memory::{Mapping, MemoryError, Protection, file_bytes, memory_file, page_bytes, seal, sealed_bytes};
use crate::sync::{AtomicU64, Ordering, SharedWords, fence};

/// Regions that can be registered at a time.
pub(super) const LEDGER_ENTRIES: u32 = 1 << 16;
const LEDGER_BYTES: usize = LEDGER_ENTRIES as usize * 8;
/// The first is for what this process copies itself, one part at a time; the others are for parts that a device copies.
const HAZARD_WORDS: u32 = if cfg!(loom) { 3 } else { 8 };
const HAZARD_BYTES: usize = HAZARD_WORDS as usize * 8;

/// A region's place in its owner's ledger, and what the word there holds while the region lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    pub index: u32,
    pub word: u64,
}

/// Words that this process writes and others can only read.
#[derive(Debug)]
struct Words {
    mapped: Mapped,
    file: NotInherited<OwnedFd>,
}

impl Words {
    fn new(name: &std::ffi::CStr, bytes: usize) -> Result<Words, MemoryError> {
        let file = memory_file(name, bytes, page_bytes(), 0)?;
        let mapping = Mapping::not_inherited(file.as_fd(), file_bytes(bytes, page_bytes())?, Protection::ReadWrite)?;
        // Our mapping stays writable; no later one can be.
        seal(&file, libc::F_SEAL_FUTURE_WRITE)?;
        let file = NotInherited::new(file);
        let mapped = Mapped::new(mapping);
        Ok(Words { mapped, file })
    }
}

/// A mapping that holds nothing but words.
#[derive(Debug)]
struct Mapped {
    words: SharedWords,
    _mapping: Mapping,
}

impl Mapped {
    fn new(mapping: Mapping) -> Mapped {
        Mapped {
            words: SharedWords::new(mapping.as_ptr()),
            _mapping: mapping,
        }
    }

    /// A word of a mapping that holds at least `index + 1` of them.
    fn word(&self, index: u32) -> &AtomicU64 {
        // SAFETY: the callers below keep `index` within the mapping, whose pages are aligned and live as long as the borrow. Both
        // processes access the word only as an atomic.
        unsafe { self.words.word(index as usize * 8) }
    }

    /// Words of another process, after everything that this one has stored, and before everything that it does next.
    fn look(&self, mut words: Range<u32>, is: impl Fn(u64) -> bool) -> bool {
        fence(Ordering::SeqCst);
        let found = words.any(|word| is(self.word(word).load(Ordering::Relaxed)));
        fence(Ordering::Acquire);
        found
    }
}

/// The owner's side: which regions live. An odd word is live; every change makes a value that was never there before.
#[derive(Debug)]
pub(super) struct Ledger {
    words: Words,
    free: Vec<u32>,
    used: u32,
}

impl Ledger {
    pub(super) fn new() -> Result<Ledger, MemoryError> {
        Ok(Ledger {
            words: Words::new(c"weft-ledger", LEDGER_BYTES)?,
            free: Vec::new(),
            used: 0,
        })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.words.file.as_fd()
    }

    /// A live entry, or `None` where all are taken.
    pub(super) fn admit(&mut self) -> Option<Entry> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.used < LEDGER_ENTRIES => {
                self.used += 1;
                self.used - 1
            }
            None => return None,
        };
        let word = self.words.mapped.word(index).fetch_add(1, Ordering::SeqCst) + 1;
        Some(Entry { index, word })
    }

    /// From now on nobody enters.
    pub(super) fn revoke(&mut self, entry: Entry) {
        let before = self
            .words
            .mapped
            .word(entry.index)
            .swap(entry.word + 1, Ordering::SeqCst);
        assert_eq!(before, entry.word, "a ledger entry is revoked once");
    }

    /// The index may be used again, because nobody is inside any more.
    pub(super) fn reclaim(&mut self, entry: Entry) {
        self.free.push(entry.index);
    }
}

/// A peer's ledger.
#[derive(Debug)]
pub(super) struct LedgerView(Mapped);

impl LedgerView {
    /// `None` where the file is not what a peer of this version sends.
    pub(super) fn new(file: BorrowedFd<'_>) -> Option<LedgerView> {
        view(file, LEDGER_BYTES).map(LedgerView)
    }

    pub(super) fn is_live(&self, entry: Entry) -> bool {
        assert!(
            entry.index < LEDGER_ENTRIES,
            "entries are checked when they are received"
        );
        self.0.look(entry.index..entry.index + 1, |word| word == entry.word)
    }
}

/// Where this process is.
#[derive(Debug)]
pub(super) struct Hazard(Words);

impl Hazard {
    pub(super) fn new() -> Result<Hazard, MemoryError> {
        Words::new(c"weft-hazard", HAZARD_BYTES).map(Hazard)
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    /// Enters a region, if it lives. It cannot be taken back before the guard is dropped.
    pub(super) fn enter(&self, tag: u32, ledger: &LedgerView, entry: Entry) -> Option<Inside<'_>> {
        let inside = Inside(self.0.mapped.word(0));
        inside.0.store(mark(tag, entry.index), Ordering::Relaxed);
        ledger.is_live(entry).then_some(inside)
    }

    /// Enters a region for as long as a device copies, if it lives. It cannot be taken back before [`leave`](Hazard::leave).
    pub(super) fn enter_for_device(&self, tag: u32, ledger: &LedgerView, entry: Entry) -> Entering {
        let mut words = (1..HAZARD_WORDS).map(|word| (word, self.0.mapped.word(word)));
        let Some((word, free)) = words.find(|(_, word)| word.load(Ordering::Relaxed) == 0) else {
            return Entering::Full;
        };
        free.store(mark(tag, entry.index), Ordering::Relaxed);
        match ledger.is_live(entry) {
            true => Entering::Inside(word),
            false => {
                self.leave(word);
                Entering::Released
            }
        }
    }

    pub(super) fn leave(&self, word: u32) {
        assert!((1..HAZARD_WORDS).contains(&word), "a word that was entered by");
        self.0.mapped.word(word).store(0, Ordering::Release);
    }
}

/// How entering for a device went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entering {
    /// By this word.
    Inside(u32),
    Released,
    /// As much is under way as there are words.
    Full,
}

/// While it lives, the owner of a region waits for us.
#[derive(Debug)]
pub(super) struct Inside<'a>(&'a AtomicU64);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// A peer's hazard, as the owner sees it.
#[derive(Clone, Debug)]
pub(super) struct HazardView {
    mapped: Arc<Mapped>,
    /// The peer marks regions of this owner with this tag, so that those of its other peers are not mistaken for ours.
    tag: u32,
}

impl HazardView {
    pub(super) fn new(file: BorrowedFd<'_>, tag: u32) -> Option<HazardView> {
        let mapped = Arc::new(view(file, HAZARD_BYTES)?);
        Some(HazardView { mapped, tag })
    }

    pub(super) fn is_inside(&self, entry: Entry) -> bool {
        let mark = mark(self.tag, entry.index);
        self.mapped.look(0..HAZARD_WORDS, |word| word == mark)
    }

    /// Whether a device is inside one of these for the peer. Threads end with their process; a device goes on until the driver has stopped it.
    pub(super) fn is_inside_by_device(&self, entries: &HashSet<Entry>) -> bool {
        self.mapped.look(1..HAZARD_WORDS, |word| {
            word >> 32 == u64::from(self.tag) && entries.iter().any(|entry| mark(self.tag, entry.index) == word)
        })
    }
}

fn view(file: BorrowedFd<'_>, bytes: usize) -> Option<Mapped> {
    let len = sealed_bytes(file).filter(|&len| len >= bytes && len <= 2 * bytes.max(page_bytes()))?;
    Mapping::not_inherited(file, len, Protection::ReadOnly)
        .ok()
        .map(Mapped::new)
}

fn mark(tag: u32, index: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(index + 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_of_the_two_always_sees_the_other() {
        let mut ledger = Ledger::new().unwrap();
        let hazard = Hazard::new().unwrap();
        let seen = LedgerView::new(ledger.file()).unwrap();
        let watched = HazardView::new(hazard.file(), 3).unwrap();
        let entry = ledger.admit().unwrap();
        let inside = hazard.enter(3, &seen, entry).unwrap();
        assert!(watched.is_inside(entry));
        ledger.revoke(entry);
        assert!(watched.is_inside(entry));
        drop(inside);
        assert!(!watched.is_inside(entry));
        assert!(hazard.enter(3, &seen, entry).is_none());
        assert!(!watched.is_inside(entry));
    }

    #[test]
    fn each_part_that_a_device_copies_has_a_word_of_its_own() {
        let mut ledger = Ledger::new().unwrap();
        let hazard = Hazard::new().unwrap();
        let seen = LedgerView::new(ledger.file()).unwrap();
        let [watched, other] = [3, 4].map(|tag| HazardView::new(hazard.file(), tag).unwrap());
        let [one, two] = [(); 2].map(|()| ledger.admit().unwrap());
        let all = HashSet::from([one, two]);
        let thread = hazard.enter(3, &seen, one).unwrap();
        assert!(watched.is_inside(one) && !watched.is_inside_by_device(&all));
        drop(thread);
        let words: Vec<u32> = (1..HAZARD_WORDS)
            .map(|_| match hazard.enter_for_device(3, &seen, one) {
                Entering::Inside(word) => word,
                entering => panic!("{entering:?}"),
            })
            .collect();
        assert_eq!(words, (1..HAZARD_WORDS).collect::<Vec<_>>());
        assert_eq!(hazard.enter_for_device(3, &seen, two), Entering::Full);
        assert!(watched.is_inside(one) && watched.is_inside_by_device(&all) && !watched.is_inside(two));
        assert!(!watched.is_inside_by_device(&HashSet::from([two])));
        // Another peer of the same process is not meant.
        assert!(!other.is_inside(one) && !other.is_inside_by_device(&all));
        ledger.revoke(one);
        hazard.leave(words[2]);
        // Whoever is too late leaves its word again.
        for _ in 0..3 {
            assert_eq!(hazard.enter_for_device(3, &seen, one), Entering::Released);
        }
        assert_eq!(hazard.enter_for_device(3, &seen, two), Entering::Inside(words[2]));
        for word in words.iter().filter(|word| **word != words[2]) {
            assert!(watched.is_inside(one));
            hazard.leave(*word);
        }
        assert!(!watched.is_inside(one) && watched.is_inside(two));
        hazard.leave(words[2]);
        assert!(!watched.is_inside_by_device(&all));
    }

    #[test]
    fn an_index_that_is_used_again_does_not_revive_the_entry_before() {
        let mut ledger = Ledger::new().unwrap();
        let seen = LedgerView::new(ledger.file()).unwrap();
        let old = ledger.admit().unwrap();
        ledger.revoke(old);
        ledger.reclaim(old);
        let new = ledger.admit().unwrap();
        assert_eq!(old.index, new.index);
        assert!(!seen.is_live(old) && seen.is_live(new));
    }

    #[test]
    fn a_full_ledger_admits_nobody() {
        let mut ledger = Ledger::new().unwrap();
        assert_eq!((0..).map_while(|_| ledger.admit()).count(), LEDGER_ENTRIES as usize);
    }

    #[test]
    fn peers_can_neither_write_nor_replace_the_words() {
        let ledger = Ledger::new().unwrap();
        assert!(Mapping::new(ledger.file(), LEDGER_BYTES, Protection::ReadWrite).is_err());
        let unsealed = memory_file(c"weft-test", LEDGER_BYTES, page_bytes(), 0).unwrap();
        assert!(LedgerView::new(unsealed.as_fd()).is_none());
        let small = Hazard::new().unwrap();
        assert!(LedgerView::new(small.file()).is_none());
    }
}

/// The owner takes its memory back while an initiator is on its way in, in every order of their steps.
#[cfg(all(test, loom))]
mod model {
    use loom::cell::UnsafeCell;
    use loom::thread;

    use super::*;
    use crate::sync::{check, spawn};

    const TAG: u32 = 3;

    /// What peers see of two processes in one model: their own words.
    fn seen(ledger: &Ledger, hazard: &Hazard) -> (LedgerView, HazardView) {
        let mut lives = LedgerView::new(ledger.file()).unwrap();
        lives.0.words = ledger.words.mapped.words.clone();
        let mut inside = view(hazard.file(), HAZARD_BYTES).unwrap();
        inside.words = hazard.0.mapped.words.clone();
        let mapped = Arc::new(inside);
        (lives, HazardView { mapped, tag: TAG })
    }

    /// An owner that has taken its region back and found nobody inside does with the memory what it likes.
    #[test]
    fn memory_that_was_taken_back_is_touched_by_its_owner_alone() {
        check(None, || {
            struct Region(UnsafeCell<u32>);
            // SAFETY: loom checks that it is touched by one thread at a time; that is the claim under test.
            unsafe impl Sync for Region {}
            let region = Arc::new(Region(UnsafeCell::new(0)));
            let mut ledger = Ledger::new().unwrap();
            let hazard = Hazard::new().unwrap();
            let (lives, inside) = seen(&ledger, &hazard);
            let entry = ledger.admit().unwrap();
            assert!(!inside.is_inside(entry));
            let copied = Arc::clone(&region);
            let initiator = spawn(move || {
                if let Some(_inside) = hazard.enter(TAG, &lives, entry) {
                    // SAFETY: as above.
                    copied.0.with_mut(|word| unsafe { *word += 1 });
                }
            });
            ledger.revoke(entry);
            while inside.is_inside(entry) {
                thread::yield_now();
            }
            // SAFETY: as above.
            region.0.with_mut(|word| unsafe { *word += 1 });
            initiator.join().unwrap();
        });
    }

    /// The same where devices copy: several parts at a time, each by a word of its own, as long as there are words.
    #[test]
    fn memory_that_was_taken_back_is_touched_by_no_device() {
        check(Some(6), || {
            struct Region(UnsafeCell<u32>);
            // SAFETY: loom checks that it is touched by one thread at a time; that is the claim under test.
            unsafe impl Sync for Region {}
            let region = Arc::new(Region(UnsafeCell::new(0)));
            let mut ledger = Ledger::new().unwrap();
            let hazard = Hazard::new().unwrap();
            let (lives, inside) = seen(&ledger, &hazard);
            let entry = ledger.admit().unwrap();
            assert!(!inside.is_inside(entry));
            let copied = Arc::clone(&region);
            let initiator = spawn(move || {
                // SAFETY: as above.
                let copy = || copied.0.with_mut(|word| unsafe { *word += 1 });
                let entered = [(); 2].map(|()| hazard.enter_for_device(TAG, &lives, entry));
                match entered {
                    [Entering::Inside(one), Entering::Inside(two)] => {
                        assert_eq!(hazard.enter_for_device(TAG, &lives, entry), Entering::Full);
                        hazard.leave(one);
                        copy();
                        hazard.leave(two);
                    }
                    [Entering::Inside(one), Entering::Released] => {
                        copy();
                        hazard.leave(one);
                    }
                    [Entering::Released, Entering::Released] => {}
                    entered => panic!("{entered:?}"),
                }
            });
            ledger.revoke(entry);
            while inside.is_inside(entry) {
                thread::yield_now();
            }
            // SAFETY: as above.
            region.0.with_mut(|word| unsafe { *word += 1 });
            initiator.join().unwrap();
            assert!(!inside.is_inside_by_device(&HashSet::from([entry])));
        });
    }

    /// The place of a region that was taken back is that of another one at once. Whoever comes with the old entry stays out of it.
    #[test]
    fn an_entry_that_was_revoked_admits_nobody_to_what_came_after() {
        check(None, || {
            let mut ledger = Ledger::new().unwrap();
            let hazard = Hazard::new().unwrap();
            let (lives, inside) = seen(&ledger, &hazard);
            let old = ledger.admit().unwrap();
            assert!(!inside.is_inside(old));
            let initiator = spawn(move || {
                let first = hazard.enter(TAG, &lives, old).is_some();
                let again = hazard.enter(TAG, &lives, old).is_some();
                assert!(first || !again, "a region lives again");
            });
            ledger.revoke(old);
            while inside.is_inside(old) {
                thread::yield_now();
            }
            ledger.reclaim(old);
            let new = ledger.admit().unwrap();
            assert_eq!(old.index, new.index);
            assert_ne!(old.word, new.word);
            initiator.join().unwrap();
        });
    }
}
