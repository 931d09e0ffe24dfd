//! Words in shared memory by which an owner takes its memory back.
//!
//! Moves run in the initiator alone, so the owner cannot simply stop them. It has a *ledger*, a word for each region that peers
//! can read; the initiator has a *hazard* that its peers can read. Before it touches a region, the initiator stores the region in
//! its hazard and then looks into the ledger; to take a region back, the owner changes the ledger and then looks at the hazards.
//! Both do so in the one order that all cores agree on, so one of them sees the other: either the initiator finds the region
//! revoked and stays out, or the owner finds it inside and waits.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fork::NotInherited;
use crate::memory::{Mapping, MemoryError, Protection, file_bytes, memory_file, page_bytes, seal, sealed_bytes};

/// Regions that can be registered at a time.
pub(super) const LEDGER_ENTRIES: u32 = 1 << 16;
const LEDGER_BYTES: usize = LEDGER_ENTRIES as usize * 8;
const HAZARD_BYTES: usize = 64;

/// A region's place in its owner's ledger, and what the word there holds while the region lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    pub index: u32,
    pub word: u64,
}

/// Words that this process writes and others can only read.
#[derive(Debug)]
struct Words {
    mapping: Mapping,
    file: NotInherited<OwnedFd>,
}

impl Words {
    fn new(name: &std::ffi::CStr, bytes: usize) -> Result<Words, MemoryError> {
        let file = memory_file(name, bytes, page_bytes(), 0)?;
        let mapping = Mapping::not_inherited(file.as_fd(), file_bytes(bytes, page_bytes())?, Protection::ReadWrite)?;
        // Our mapping stays writable; no later one can be.
        seal(&file, libc::F_SEAL_FUTURE_WRITE)?;
        let file = NotInherited::new(file);
        Ok(Words { mapping, file })
    }
}

/// A word of a mapping that holds at least `index + 1` of them.
fn word(mapping: &Mapping, index: u32) -> &AtomicU64 {
    // SAFETY: the callers below keep `index` within the mapping, whose pages are aligned and live as long as the borrow. Both
    // processes access the word only as an atomic.
    unsafe { &*mapping.as_ptr().cast::<AtomicU64>().add(index as usize) }
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
        let word = word(&self.words.mapping, index).fetch_add(1, Ordering::SeqCst) + 1;
        Some(Entry { index, word })
    }

    /// From now on nobody enters.
    pub(super) fn revoke(&mut self, entry: Entry) {
        let before = word(&self.words.mapping, entry.index).swap(entry.word + 1, Ordering::SeqCst);
        assert_eq!(before, entry.word, "a ledger entry is revoked once");
    }

    /// The index may be used again, because nobody is inside any more.
    pub(super) fn reclaim(&mut self, entry: Entry) {
        self.free.push(entry.index);
    }
}

/// A peer's ledger.
#[derive(Debug)]
pub(super) struct LedgerView(Mapping);

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
        word(&self.0, entry.index).load(Ordering::SeqCst) == entry.word
    }
}

/// Where this process is: one word, because it copies one part at a time.
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
        let inside = Inside(word(&self.0.mapping, 0));
        inside.0.store(mark(tag, entry.index), Ordering::SeqCst);
        ledger.is_live(entry).then_some(inside)
    }
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
    mapping: Arc<Mapping>,
    /// The peer marks regions of this owner with this tag, so that those of its other peers are not mistaken for ours.
    tag: u32,
}

impl HazardView {
    pub(super) fn new(file: BorrowedFd<'_>, tag: u32) -> Option<HazardView> {
        let mapping = Arc::new(view(file, HAZARD_BYTES)?);
        Some(HazardView { mapping, tag })
    }

    pub(super) fn is_inside(&self, entry: Entry) -> bool {
        word(&self.mapping, 0).load(Ordering::SeqCst) == mark(self.tag, entry.index)
    }
}

fn view(file: BorrowedFd<'_>, bytes: usize) -> Option<Mapping> {
    let len = sealed_bytes(file).filter(|&len| len >= bytes && len <= 2 * bytes.max(page_bytes()))?;
    Mapping::not_inherited(file, len, Protection::ReadOnly).ok()
}

fn mark(tag: u32, index: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(index + 1)
}

#[cfg(test)]
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
