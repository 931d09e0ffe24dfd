//! A peer's region as this process can reach it.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock, Weak};

use weft_gpu::{Device, DeviceMemory, PinnedRange};
use weft_protocol::{Access, Direction, Refusal};

use super::frame::{Answer, OfDevice};
use super::ledger::{Entry, LedgerView};
use crate::cuda::{End, Pin, memory_here};
use crate::fork::PerProcess;
use crate::memory::{Mapping, Protection, Seen, is_shared_memory, sealed_bytes};

/// A peer's region, and how to get at its bytes.
#[derive(Debug)]
pub(super) struct Target {
    pub len: u64,
    pub access: Access,
    pub entry: Entry,
    /// Goes before the mapping that it pins.
    pin: OnceLock<Option<Arc<PinnedRange>>>,
    pub reach: Reach,
}

#[derive(Debug)]
pub(super) enum Reach {
    /// The owner's pages, mapped here.
    Mapped(Mapping),
    /// An address in the owner's process.
    Foreign(u64),
    /// Memory of a device, mapped here where it is another process's.
    Device {
        device: Arc<Device>,
        address: u64,
        _held: Arc<DeviceMemory>,
    },
}

/// Of regions of this size the pages are entered before they are touched. In smaller ones there are too few, and for larger ones the page
/// table itself would take much memory.
const ENTERED_BYTES: RangeInclusive<u64> = 1 << 20..=32 << 30;

/// Memory of a peer that is larger goes to a device through pinned memory of our own: pinning takes all of its pages, in one go.
const PINNED_MAX_BYTES: u64 = 64 << 30;

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
    /// `own`: whether the owner is this very process.
    pub(super) fn new(answer: Answer, file: Option<OwnedFd>, own: bool) -> Result<Arc<Target>, Unusable> {
        if let Some(described) = &answer.device {
            return Target::of_device(&answer, described, file, own);
        }
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
            pin: OnceLock::new(),
            reach,
        });
        if let Some(file) = file.filter(|_| ENTERED_BYTES.contains(&answer.len)) {
            target.enter(file);
        }
        Ok(target)
    }

    /// Memory of a device. A driver that cannot map it may have lost the device meanwhile, so that nobody is called a liar.
    fn of_device(
        answer: &Answer,
        described: &OfDevice,
        file: Option<OwnedFd>,
        own: bool,
    ) -> Result<Arc<Target>, Unusable> {
        let reach = if own {
            let held = memory_here(described.address).filter(|held| held.len() >= answer.len);
            let held = held.ok_or(Unusable::Unsafe)?;
            Reach::Device {
                device: held.device().clone(),
                address: held.address(),
                _held: held,
            }
        } else {
            let file = file.as_ref().map(AsFd::as_fd);
            let mapped = DeviceMemory::import(&described.export, file, answer.access.write);
            let mapped = mapped.map_err(|_| Unusable::Unsafe)?;
            if mapped.len() < answer.len {
                return Err(Unusable::Garbage);
            }
            Reach::Device {
                device: mapped.device().clone(),
                address: mapped.address(),
                _held: Arc::new(mapped),
            }
        };
        Ok(Arc::new(Target {
            len: answer.len,
            access: answer.access,
            entry: answer.entry,
            pin: OnceLock::new(),
            reach,
        }))
    }

    /// The region as an end of what a device copies. Pages that are mapped here are pinned the first time.
    pub(super) fn end<'a>(&'a self, for_device: &Arc<Device>) -> End<'a> {
        match &self.reach {
            Reach::Device { device, address, .. } => End::Device {
                device,
                address: *address,
                len: self.len,
            },
            Reach::Foreign(_) => End::Elsewhere { len: self.len },
            Reach::Mapped(mapping) => {
                let (address, len) = (mapping.as_ptr() as usize, self.len);
                let pin = || {
                    // SAFETY: the mapping is this target's alone and lives as long as it, and the pin goes before it; a flight that shares the pin keeps the target.
                    let pin = || unsafe { PinnedRange::shared(for_device, address, len as usize, self.access.write) };
                    // All of it is pinned at once, and the peer says how much that is.
                    (len <= PINNED_MAX_BYTES).then(pin)?.ok()
                };
                let pinned = match self.pin.get_or_init(pin).clone() {
                    Some(pin) => Pin::Ours { _pin: pin },
                    None => Pin::Not,
                };
                let memory = None;
                End::Host {
                    address,
                    len,
                    pinned,
                    memory,
                }
            }
        }
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
            Reach::Foreign(address) | Reach::Device { address, .. } => (address + offset) as usize,
        }
    }
}

/// A peer's region, mapped so that it can be read where it lies, without any copy.
#[derive(Debug)]
pub(super) struct BorrowedMapping {
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
}

// SAFETY: a mapping stays for as long as the value lives, it holds at least `len` bytes, and its file cannot shrink.
unsafe impl Seen for BorrowedMapping {
    fn as_ptr(&self) -> *const u8 {
        self.mapping.as_ptr()
    }
    fn bytes(&self) -> u64 {
        self.len
    }
    /// Whether the owner still has the region registered.
    fn is_live(&self) -> bool {
        self.ledger.is_live(self.entry)
    }
    fn keep_from_children(&self) {
        self.mapping.keep_from_children();
    }
}
