//! A peer's region as this process can reach it.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use weft_protocol::{Access, Direction, Refusal};

use super::frame::Answer;
use super::ledger::{Entry, LedgerView};
use crate::copy::copy_cached;
use crate::fork::PerProcess;
use crate::memory::{Mapping, Protection, is_shared_memory, sealed_bytes};

/// A peer's region, and how to get at its bytes.
#[derive(Debug)]
pub(super) struct Target {
    pub len: u64,
    pub access: Access,
    pub entry: Entry,
    pub reach: Reach,
}

#[derive(Debug)]
pub(super) enum Reach {
    /// The owner's pages, mapped here.
    Mapped(Mapping),
    /// An address in the owner's process.
    Foreign(u64),
}

/// Of regions of this size the pages are entered before they are touched. In smaller ones there are too few, and for larger ones the page
/// table itself would take much memory.
const ENTERED_BYTES: RangeInclusive<u64> = 1 << 20..=32 << 30;

/// Why an answer cannot be used.
#[derive(Debug)]
pub(super) enum Unusable {
    /// This process is short of something.
    NoRoom,
    /// A mapping of the file could be made a trap: whoever can write to it could have us killed.
    Unsafe,
    /// The answer is not what a peer of this version sends.
    Garbage,
}

impl Target {
    pub(super) fn new(answer: Answer, file: Option<OwnedFd>) -> Result<Arc<Target>, Unusable> {
        let reach = match (answer.foreign, &file) {
            (Some(address), None) if address.checked_add(answer.len).is_some() => Reach::Foreign(address),
            (None, Some(file)) => {
                if !is_shared_memory(file.as_fd()) {
                    return Err(Unusable::Unsafe);
                }
                let bytes = sealed_bytes(file.as_fd()).filter(|&bytes| bytes as u64 >= answer.len);
                let bytes = bytes.ok_or(Unusable::Garbage)?;
                let protection = if answer.access.write {
                    Protection::ReadWrite
                } else {
                    Protection::ReadOnly
                };
                let mapping = Mapping::not_inherited(file.as_fd(), bytes, protection);
                Reach::Mapped(mapping.map_err(|_| Unusable::NoRoom)?)
            }
            _ => return Err(Unusable::Garbage),
        };
        let target = Arc::new(Target {
            len: answer.len,
            access: answer.access,
            entry: answer.entry,
            reach,
        });
        if let Some(file) = file.filter(|_| ENTERED_BYTES.contains(&answer.len)) {
            target.enter(file);
        }
        Ok(target)
    }

    /// Has the kernel enter the owner's pages, beside what is moved meanwhile: a page that is touched for the first time takes as long as
    /// a KiB of it.
    fn enter(self: &Arc<Target>, file: OwnedFd) {
        // One thread for all, and a short queue: what finds no place is entered page by page, when it is touched.
        static TO_ENTER: PerProcess<SyncSender<(Weak<Target>, OwnedFd)>> = PerProcess::new();
        let queue = TO_ENTER.get_or_make(|| {
            let (sender, receiver) = sync_channel::<(Weak<Target>, OwnedFd)>(16);
            let work = move || {
                for (target, file) in receiver {
                    if let Some(target) = target.upgrade()
                        && let Reach::Mapped(mapping) = &target.reach
                    {
                        mapping.enter(file.as_fd(), target.len as usize, || Arc::strong_count(&target) > 1);
                    }
                }
            };
            // Without a thread nobody receives, and nothing is entered.
            let _ = std::thread::Builder::new().name("weft-pages".into()).spawn(work);
            sender
        });
        let _ = queue.try_send((Arc::downgrade(self), file));
    }

    pub(super) fn permits(&self, direction: Direction) -> Result<(), Refusal> {
        match direction {
            Direction::Read if !self.access.read => Err(Refusal::NotReadable),
            Direction::Write if !self.access.write => Err(Refusal::NotWritable),
            _ => Ok(()),
        }
    }

    /// Where byte `offset` of the region is: an address here, or in the owner's process.
    pub(super) fn address(&self, offset: u64) -> usize {
        match &self.reach {
            Reach::Mapped(mapping) => mapping.as_ptr() as usize + offset as usize,
            Reach::Foreign(address) => (address + offset) as usize,
        }
    }
}

/// A peer's region, mapped so that it can be read where it lies, without any copy.
///
/// The pages stay valid as long as this value lives, also if the peer dies. What they hold is the owner's business: it changes
/// them when it likes, and once [`BorrowedMapping::is_live`] is false it has taken the region back.
#[derive(Debug)]
pub struct BorrowedMapping {
    mapping: Mapping,
    len: u64,
    entry: Entry,
    ledger: Arc<LedgerView>,
}

impl BorrowedMapping {
    pub(super) fn new(target: &Target, ledger: Arc<LedgerView>) -> Result<BorrowedMapping, Refusal> {
        target.permits(Direction::Read)?;
        let Reach::Mapped(mapping) = &target.reach else {
            return Err(Refusal::Unsupported);
        };
        Ok(BorrowedMapping {
            mapping: mapping.read_only_twin().map_err(|_| Refusal::Unsupported)?,
            len: target.len,
            entry: target.entry,
            ledger,
        })
    }

    /// Forked children of this process find nothing at its address. Otherwise they have it, too, for as long as they live.
    pub fn keep_from_children(&self) {
        self.mapping.keep_from_children();
    }

    /// The first byte. Reads must be raw or volatile, because the owner may write at any moment.
    pub fn as_ptr(&self) -> *const u8 {
        self.mapping.as_ptr()
    }
    pub fn len(&self) -> u64 {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Whether the owner still has the region registered.
    pub fn is_live(&self) -> bool {
        self.ledger.is_live(self.entry)
    }
    /// Copies bytes out.
    ///
    /// # Panics
    /// Where they lie outside the region.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let end = offset.checked_add(into.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "a read outside a borrowed region"
        );
        // SAFETY: the mapping holds at least `len` bytes and its file cannot shrink; `into` is uniquely borrowed.
        unsafe { copy_cached(into.as_mut_ptr(), self.as_ptr().add(offset as usize), into.len()) }
    }
}
