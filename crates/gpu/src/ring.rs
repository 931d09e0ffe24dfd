//! The ring through which kernels ask a proxy on the host for what they cannot do themselves, and the device's side of a team that has one.
//!
//! The memory of the ring is the host's: the proxy's agent moves bytes from it and into it. Slots are claimed by words in the device's own memory. What a request means is in
//! `weft_protocol::proxy`; who writes it is `include/weft/device.cuh`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::CollectiveError;
use crate::device::{Device, GpuError};
use crate::layout::{Layout, RANKS_MAX};
use crate::memory::DeviceMemory;
use crate::pinned::PinnedRange;
use crate::team::{HOST_CONTROL_BYTES, HOST_FAILED_AT, ProxiedPart, TeamView};

/// Requests that are under way at most.
pub const SLOTS: u64 = 256;
/// What a request carries with it.
pub const INLINE_BYTES: u64 = 192;
/// What goes through the memory beside a slot.
pub const STAGE_BYTES: u64 = 16 << 10;
pub const DESCRIPTOR_BYTES: usize = 64;

const SLOT_BYTES: u64 = DESCRIPTOR_BYTES as u64 + INLINE_BYTES;
const ENDED_BYTES: u64 = 16;
const ENDED_AT: u64 = 256;
const SLOTS_AT: u64 = ENDED_AT + SLOTS * ENDED_BYTES;
const STAGES_AT: u64 = SLOTS_AT + SLOTS * SLOT_BYTES;
const CONTROLS_AT: u64 = STAGES_AT + SLOTS * STAGE_BYTES;
const CLAIMS_BYTES: u64 = 128 + SLOTS * 8;

/// Where things lie in the memory of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout;

impl RingLayout {
    pub const BYTES: u64 = CONTROLS_AT + (RANKS_MAX * HOST_CONTROL_BYTES) as u64;
    /// A word: all requests with smaller tickets have ended.
    pub const COMPLETED_AT: u64 = 0;

    /// The descriptor of a request; its first word is the ticket and one when all of it is there.
    pub fn descriptor(ticket: u64) -> u64 {
        SLOTS_AT + ticket % SLOTS * SLOT_BYTES
    }
    pub fn inline(ticket: u64) -> u64 {
        RingLayout::descriptor(ticket) + DESCRIPTOR_BYTES as u64
    }
    pub fn stage(ticket: u64) -> u64 {
        STAGES_AT + ticket % SLOTS * STAGE_BYTES
    }
    /// Two words: the ticket and one when a request has ended, and what it brought.
    pub fn ended(ticket: u64) -> u64 {
        ENDED_AT + ticket % SLOTS * ENDED_BYTES
    }
    /// Of the nth rank here, two words: whether the host has ended the team, and what kernels tell of a failure.
    pub fn abort(nth: usize) -> u64 {
        CONTROLS_AT + (nth * HOST_CONTROL_BYTES) as u64
    }
    pub fn failed(nth: usize) -> u64 {
        RingLayout::abort(nth) + HOST_FAILED_AT as u64
    }
}

/// What a kernel writes into a slot, after its first word: the fields of `Descriptor` in `device.cuh`, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    pub act: u32,
    pub rank: u32,
    pub peer: u32,
    pub local: u32,
    pub to: u64,
    pub from: u64,
    pub bytes: u64,
    pub word: u64,
    pub value: u64,
}

impl Descriptor {
    pub fn of_bytes(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let short = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(short(at)) | u64::from(short(at + 4)) << 32;
        Descriptor {
            act: short(8),
            rank: short(12),
            peer: short(16),
            local: short(20),
            to: long(24),
            from: long(32),
            bytes: long(40),
            word: long(48),
            value: long(56),
        }
    }

    /// All but the first word, which comes last and by itself.
    pub fn to_bytes(self) -> [u8; DESCRIPTOR_BYTES - 8] {
        let mut bytes = [0; DESCRIPTOR_BYTES - 8];
        for (nth, word) in [self.act, self.rank, self.peer, self.local].into_iter().enumerate() {
            bytes[nth * 4..nth * 4 + 4].copy_from_slice(&word.to_le_bytes());
        }
        let long = [self.to, self.from, self.bytes, self.word, self.value];
        for (nth, word) in long.into_iter().enumerate() {
            bytes[16 + nth * 8..24 + nth * 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// Where the ranks of this process have their heaps, and the ring: addresses of host memory.
#[derive(Clone, Debug)]
pub struct ProxiedSettings {
    pub first_rank: usize,
    pub ranks: usize,
    pub deadline: Duration,
    pub data_bytes: u64,
    /// Of each rank that is here.
    pub heaps: Vec<u64>,
    pub ring: u64,
}

/// The device's side of a team with a proxy: heaps and ring pinned, and words to claim slots by.
pub struct Proxied {
    device: Arc<Device>,
    view: TeamView,
    here: usize,
    _claims: DeviceMemory,
    _pins: Vec<Arc<PinnedRange>>,
}

impl fmt::Debug for Proxied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxied(gpu:{}, {} ranks here)", self.device.ordinal(), self.here)
    }
}

impl Proxied {
    /// # Safety
    /// Each heap must be as long as its [layout](Layout::of_host) says, the ring [`RingLayout::BYTES`], and all of them must stay mapped until the value is dropped and
    /// all kernels that were passed its view have ended.
    pub unsafe fn new(device: &Arc<Device>, settings: &ProxiedSettings) -> Result<Proxied, CollectiveError> {
        let here = settings.heaps.len();
        let (rank, ranks) = (settings.first_rank, settings.ranks);
        if ranks > RANKS_MAX {
            return Err(CollectiveError::TooManyRanks { ranks });
        }
        if here == 0 || rank.checked_add(here).is_none_or(|end| end > ranks) {
            return Err(CollectiveError::RankOutOfRange { rank, ranks });
        }
        let layout = Layout::of_host(settings.data_bytes)?;
        let mut pins = Vec::with_capacity(here + 1);
        let all = settings.heaps.iter().map(|heap| (*heap, layout.bytes));
        for (address, bytes) in all.chain([(settings.ring, RingLayout::BYTES)]) {
            // SAFETY: the caller's promise.
            pins.push(unsafe { PinnedRange::shared(device, address as usize, bytes as usize, true) }?);
        }
        let claims = DeviceMemory::allocate(device, CLAIMS_BYTES)?;
        claims.zero(CLAIMS_BYTES)?;
        let mut heaps = [0; RANKS_MAX];
        heaps[rank..rank + here].copy_from_slice(&settings.heaps);
        let view = TeamView::proxied(ProxiedPart {
            rank: rank as u32,
            ranks: ranks as u32,
            deadline: settings.deadline,
            layout: &layout,
            host: settings.ring + RingLayout::abort(0),
            heaps,
            ring: settings.ring,
            claims: claims.address(),
        });
        Ok(Proxied {
            device: device.clone(),
            view,
            here,
            _claims: claims,
            _pins: pins,
        })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What a kernel is passed for the nth rank that is here.
    pub fn view(&self, nth: usize) -> Option<TeamView> {
        (nth < self.here).then(|| self.view.of_rank(nth))
    }

    /// Waits for whatever is on the device: after it no kernel reads or writes the memory any more, unless it was launched since.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        // SAFETY: the device is entered.
        crate::device::check("cuCtxSynchronize", unsafe { cudarc::driver::sys::cuCtxSynchronize() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_what_they_were() {
        let asked = Descriptor {
            act: 1,
            rank: 2,
            peer: 3,
            local: 4,
            to: 5,
            from: 6,
            bytes: u64::MAX,
            word: 8,
            value: 9,
        };
        let mut bytes = [0xff; DESCRIPTOR_BYTES];
        bytes[8..].copy_from_slice(&asked.to_bytes());
        assert_eq!(Descriptor::of_bytes(&bytes), asked);
    }

    #[test]
    fn parts_follow_each_other() {
        let parts = [
            RingLayout::COMPLETED_AT,
            RingLayout::ended(0),
            RingLayout::descriptor(0),
            RingLayout::stage(0),
            RingLayout::abort(0),
            RingLayout::BYTES,
        ];
        assert!(
            parts.is_sorted() && parts.iter().all(|part| part % 128 == 0),
            "{parts:?}"
        );
        assert_eq!(RingLayout::descriptor(SLOTS + 1) - RingLayout::descriptor(0), 256);
        assert_eq!(RingLayout::inline(SLOTS - 1) + INLINE_BYTES, RingLayout::stage(0));
        assert_eq!(RingLayout::stage(SLOTS - 1) + STAGE_BYTES, RingLayout::abort(0));
    }

    #[test]
    fn kernels_agree() {
        let header = include_str!("../include/weft/device.cuh");
        for line in [
            format!("SLOTS = {SLOTS};"),
            format!("INLINE_BYTES = {INLINE_BYTES};"),
            format!("STAGE_BYTES = {STAGE_BYTES};"),
            "enum Act : u32 { PUT = 1, PUT_SIGNAL = 2, GET = 3, SIGNAL = 4, FETCH_ADD = 5 };".to_owned(),
            "enum Local : u32 { INLINE = 0, HEAP = 1, STAGE = 2 };".to_owned(),
        ] {
            assert!(header.contains(&line), "{line}");
        }
        let fields = |name: &str| {
            let rest = header.split(&format!("struct {name} {{")).nth(1).expect("the struct");
            let body = rest.split("};").next().expect("its end");
            let lines = body.lines().filter_map(|line| line.trim().strip_suffix(';'));
            lines.map(str::to_owned).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(
            fields("Descriptor"),
            "u64 turn, u32 act, u32 rank, u32 peer, u32 local, u64 to, u64 from, u64 bytes, u64 word, u64 value"
        );
        assert_eq!(
            fields("Ring"),
            "u64 completed, u64 unused[31], Ended ended[SLOTS], Slot slots[SLOTS], u8 stages[SLOTS][STAGE_BYTES]"
        );
        assert_eq!(
            fields("Claims"),
            "u64 head, u64 completed, u64 unused[14], u64 held[SLOTS]"
        );
    }
}
