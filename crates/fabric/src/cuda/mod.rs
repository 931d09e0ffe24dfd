//! Memory of a device as a place, and who copies from it and into it.
//!
//! A transport that moves device memory has `Devices`: it lays a part of a move out as pieces and has the device copy them, by one kernel. Nothing here waits for
//! the device; a copy that was begun is looked after until it has ended, and until then neither side of it is let go.

mod conversion;
mod here;
mod proxied;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use weft_gpu::{Copied, Copier, KeptList, PIECES_MAX, Piece, Pinned, PinnedRange, Ticket};
use weft_protocol::memory::Digest;
use weft_protocol::{Direction, HostBytes, Leg, Memory, Ready, Refusal};

use crate::memory::{HostMemory, page_bytes};

pub use conversion::{ConversionPlaces, convert};
pub use here::CudaHere;
pub(crate) use here::carriages;
pub use proxied::ProxiedTeam;
pub use weft_gpu::ring;
pub use weft_gpu::{
    Buffers, Carrier, Collective, CollectiveError, CombineBuffers, Device, DeviceFacts, DeviceMemory, DeviceSlice,
    DispatchBuffers, DispatchBytes, EXPORT_BYTES, FusedBuffers, FusedNorm, FusedNorms, Gauge, GpuError, Heap, Launch,
    Layout, Module, Moe, MoeError, MoeHandle, MoeSettings, MoeShape, PIECE_BYTES, RANKS_MAX, Received, Rounded,
    SIGNALS, Sent, Stream, StreamEvent, Team, TeamSettings, TeamView, Way, chosen_way, device_costs, device_count,
    predicted,
};

/// What one launch copies at most, so that a deadline and a cancel need not wait long for what is under way.
const LAUNCH_BYTES_MAX: u64 = 256 << 20;
/// Lists that are remembered, and how large a part has to be to be worth it.
const KEPT_MAX: usize = 64;
const KEPT_MIN_BYTES: u64 = 64 << 10;
/// Through host memory of our own, where the other side cannot be pinned.
const BOUNCE_BYTES: usize = 4 << 20;

/// Memory of a device that agents register.
#[derive(Debug)]
pub struct CudaMemory(Arc<DeviceMemory>);

/// Memory of devices that agents of this process have, by where it is: agents of one process reach it there, and keep it while they do.
static HERE: Mutex<BTreeMap<u64, Weak<DeviceMemory>>> = Mutex::new(BTreeMap::new());

/// Memory that an agent of this process has registered at an address.
pub(crate) fn memory_here(address: u64) -> Option<Arc<DeviceMemory>> {
    HERE.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&address)?
        .upgrade()
}

impl CudaMemory {
    pub fn new(memory: Arc<DeviceMemory>) -> CudaMemory {
        let mut here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
        here.retain(|_, known| known.strong_count() > 0);
        // Of several at one address the longest, since any of them keeps it.
        let known = here.get(&memory.address()).and_then(Weak::upgrade);
        if known.is_none_or(|known| known.len() <= memory.len()) {
            here.insert(memory.address(), Arc::downgrade(&memory));
        }
        drop(here);
        CudaMemory(memory)
    }
    pub fn device_memory(&self) -> &Arc<DeviceMemory> {
        &self.0
    }
}

impl Memory for CudaMemory {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// As its owner sees it, who has the device copy a few bytes and waits. No transport moves bytes this way. A device that has failed has nothing to show, and it is a panic
/// to ask it: who goes on without it calls [`read_bytes`] and [`write_bytes`].
impl HostBytes for CudaMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        self.0.read(offset, into).expect("the device copies");
    }
    fn write(&self, offset: u64, from: &[u8]) {
        self.0.write(offset, from).expect("the device copies");
    }
    fn digest(&self, offset: u64, len: u64, digest: &mut Digest) -> Result<(), Refusal> {
        let mut bytes = vec![0; usize::try_from(len).map_err(|_| Refusal::OutOfBounds)?];
        self.0.read(offset, &mut bytes).map_err(|_| Refusal::NoMemory)?;
        digest.update(&bytes);
        Ok(())
    }
}

/// Bytes that their owner can look at: of the host, or of a device, which copies them and is waited for. None of a file or an object.
pub fn bytes_of(memory: &dyn Memory) -> Option<&dyn HostBytes> {
    match memory.as_any().downcast_ref::<CudaMemory>() {
        Some(memory) => Some(memory),
        None => memory.host(),
    }
}

/// Copies bytes out of memory of the host or of a device, which is waited for. Refused where it is neither, and where the device has failed.
///
/// # Panics
/// Where they are not all within the memory.
pub fn read_bytes(memory: &dyn Memory, offset: u64, into: &mut [u8]) -> Result<(), Refusal> {
    match memory.as_any().downcast_ref() {
        Some(CudaMemory(memory)) => memory.read(offset, into).map_err(refusal),
        None => memory.host_bytes().map(|bytes| bytes.read(offset, into)),
    }
}

/// See [`read_bytes`].
///
/// # Panics
/// As there.
pub fn write_bytes(memory: &dyn Memory, offset: u64, from: &[u8]) -> Result<(), Refusal> {
    match memory.as_any().downcast_ref() {
        Some(CudaMemory(memory)) => memory.write(offset, from).map_err(refusal),
        None => memory.host_bytes().map(|bytes| bytes.write(offset, from)),
    }
}

/// What a caller's stream has done up to now, for [`Op::after`](weft_protocol::Op::after).
#[derive(Debug)]
pub struct AfterStream(StreamEvent);

impl AfterStream {
    pub fn new(event: StreamEvent) -> AfterStream {
        AfterStream(event)
    }
}

impl Ready for AfterStream {
    fn is_ready(&self) -> bool {
        self.0.has_come()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// One side of a move, as this process can reach it.
#[derive(Clone, Debug)]
pub(crate) enum End<'a> {
    Device {
        device: &'a Arc<Device>,
        address: u64,
        len: u64,
    },
    /// Host memory at an address of this process; where it is pinned, devices reach it. `memory`: what may have vanished, and says so.
    Host {
        address: usize,
        len: u64,
        pinned: Pin,
        memory: Option<&'a HostMemory>,
    },
    /// Host memory that only somebody else can copy.
    Elsewhere { len: u64 },
}

/// Whether devices reach host memory.
#[derive(Clone, Debug)]
pub(crate) enum Pin {
    Not,
    /// For as long as this is held.
    Ours {
        _pin: Arc<PinnedRange>,
    },
    /// By its owner.
    Theirs,
}

/// The device whose memory it is, if it is one's.
pub(crate) fn device_of(memory: &dyn Memory) -> Option<&Arc<Device>> {
    let CudaMemory(memory) = memory.as_any().downcast_ref()?;
    Some(memory.device())
}

impl End<'_> {
    fn len(&self) -> u64 {
        match self {
            End::Device { len, .. } | End::Host { len, .. } | End::Elsewhere { len } => *len,
        }
    }
}

/// A part of a move.
pub(crate) struct Job<'a> {
    pub direction: Direction,
    pub leg: &'a Arc<Leg>,
    pub range: Range<u64>,
    pub near: End<'a>,
    pub far: End<'a>,
    pub checksum: bool,
}

/// A piece of host memory and where it is in the bounce buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounced {
    /// Within its memory.
    pub offset: u64,
    pub buffer: *mut u8,
    pub len: usize,
}

/// Copies host memory that is not reached here, from it or to it.
pub(crate) type Elsewhere<'a> = dyn FnMut(Direction, &[Bounced]) -> Result<(), Refusal> + 'a;

/// What has become of a part.
#[derive(Debug)]
pub(crate) enum Begun {
    /// The device copies up to here.
    UnderWay { flight: Flight, end: u64 },
    /// It is done, up to here.
    Ended { sums: Sums, end: u64 },
    /// Too much is under way; try again when something has ended.
    NoRoom,
}

/// A copy that a device carries out.
#[derive(Debug)]
pub(crate) struct Flight {
    ordinal: u16,
    ticket: Ticket,
    direction: Direction,
    /// Pages stay pinned under it, whoever else lets go of them.
    _pins: [Pin; 2],
}

/// What keeps an end where a device reaches it.
fn pin_of(end: &End<'_>) -> Pin {
    match end {
        End::Host { pinned, .. } => pinned.clone(),
        _ => Pin::Not,
    }
}

/// The sums of what was moved, of both sides; they add up over the parts of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub near: u64,
    pub far: u64,
}

impl Sums {
    fn of(direction: Direction, copied: Copied) -> Sums {
        let (near, far) = match direction {
            Direction::Read => (copied.written_sum, copied.read_sum),
            Direction::Write => (copied.read_sum, copied.written_sum),
        };
        Sums { near, far }
    }

    pub(crate) fn add(self, other: Sums) -> Sums {
        Sums {
            near: self.near.wrapping_add(other.near),
            far: self.far.wrapping_add(other.far),
        }
    }
}

/// The devices that this transport copies by, and the host memory that they may touch.
pub(crate) struct Devices {
    /// How long a device's worker stays for the next copy, once several have followed each other as soon.
    stay: Duration,
    /// Lists of transfers that are posted again and again, the last used last. Laying one out takes longer than copying what is on it. They go before the
    /// copiers that made them.
    kept: Vec<Kept>,
    /// They wait for what is under way when they go, and that is before what it touches.
    copiers: BTreeMap<u16, Copier>,
    /// Devices that none could be made for. Trying takes as long as compiling the kernels.
    hopeless: BTreeSet<u16>,
    /// By address and length. Nothing where it could not be pinned.
    pins: HashMap<(usize, u64), Option<Arc<PinnedRange>>>,
    bounce: Option<Pinned>,
}

/// Which bytes of a leg, which way, by which device, and where both sides were.
type MadeOf = (Range<u64>, Direction, u16, u64, u64);

/// A list, by what it was made of.
#[derive(Debug)]
struct Kept {
    leg: Weak<Leg>,
    made_of: MadeOf,
    /// None the first time.
    list: Option<(KeptList, u64)>,
}

impl Kept {
    fn is(&self, leg: &Arc<Leg>, made_of: &MadeOf) -> bool {
        // Nothing else can be where a leg was that something remembers.
        std::ptr::eq(self.leg.as_ptr(), Arc::as_ptr(leg)) && self.made_of == *made_of
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Devices({:?}, {} pinned)", self.copiers, self.pins.len())
    }
}

impl Devices {
    pub(crate) fn new(stay: Duration) -> Devices {
        Devices {
            stay,
            kept: Vec::new(),
            copiers: BTreeMap::new(),
            hopeless: BTreeSet::new(),
            pins: HashMap::new(),
            bounce: None,
        }
    }

    /// Begins a part, as much of it as goes at a time. `elsewhere` copies host memory that is not reached here, to or from the bounce buffer.
    ///
    /// # Safety
    /// Both ends must be what they say until the part has ended, and nobody may take either back before.
    pub(crate) unsafe fn begin(&mut self, job: &Job<'_>, elsewhere: &mut Elsewhere<'_>) -> Result<Begun, Refusal> {
        let device = match (&job.near, &job.far) {
            (End::Device { device, .. }, _) | (_, End::Device { device, .. }) => (*device).clone(),
            _ => return Err(Refusal::Unsupported),
        };
        let reached = [reach(&device, &job.near), reach(&device, &job.far)];
        let copier = match self.copiers.entry(device.ordinal()) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(_) if self.hopeless.contains(&device.ordinal()) => {
                return Err(Refusal::Unsupported);
            }
            std::collections::btree_map::Entry::Vacant(entry) => match Copier::new(&device, self.stay) {
                Ok(copier) => entry.insert(copier),
                Err(error) => {
                    // There may be memory again some day.
                    if !matches!(error, GpuError::OutOfMemory { .. }) {
                        self.hopeless.insert(device.ordinal());
                    }
                    return Err(Refusal::Unsupported);
                }
            },
        };
        if !copier.has_room() {
            return Ok(Begun::NoRoom);
        }
        let [Some(near), Some(far)] = reached else {
            // SAFETY: the caller's promise.
            return unsafe { self.through_the_host(&device, job, elsewhere) };
        };
        let over_the_bus = !matches!((&job.near, &job.far), (End::Device { .. }, End::Device { .. }));
        let made_of = (job.range.clone(), job.direction, device.ordinal(), near, far);
        let pins = [pin_of(&job.near), pin_of(&job.far)];
        let known = self.kept.iter().position(|kept| kept.is(job.leg, &made_of));
        if let Some(at) = known
            && let Some((list, end)) = &self.kept[at].list
        {
            // SAFETY: the pieces were checked when the list was made, against the same ends, which are what they say by the caller's promise.
            let begun = unsafe { copier.begin_kept(job.checksum, over_the_bus, list) };
            let (ticket, end) = (begun.map_err(refusal)?, *end);
            let kept = self.kept.remove(at);
            self.kept.push(kept);
            let flight = Flight {
                ordinal: device.ordinal(),
                ticket,
                direction: job.direction,
                _pins: pins,
            };
            return Ok(Begun::UnderWay { flight, end });
        }
        let (mut end, mut outside) = (job.range.start, false);
        let fill = |list: &mut weft_gpu::PieceList<'_>| {
            for (at_near, at_far, len) in job.leg.pieces(job.range.clone()) {
                let inside = |at: u64, of: &End<'_>| at.checked_add(len).is_some_and(|end| end <= of.len());
                if !inside(at_near, &job.near) || !inside(at_far, &job.far) {
                    outside = true;
                    return;
                }
                if list.is_full() || list.bytes() > 0 && list.bytes() + len > LAUNCH_BYTES_MAX {
                    return;
                }
                let (to, from) = match job.direction {
                    Direction::Read => (near + at_near, far + at_far),
                    Direction::Write => (far + at_far, near + at_near),
                };
                list.push(Piece { to, from, len });
                end += len;
            }
        };
        // SAFETY: every piece was checked against both ends, which are what they say, by the caller's promise; host memory is pinned.
        let begun = unsafe { copier.begin_with(job.checksum, over_the_bus, known.is_some(), fill) };
        let (ticket, again) = begun.map_err(refusal)?;
        let flight = Flight {
            ordinal: device.ordinal(),
            ticket,
            direction: job.direction,
            _pins: pins,
        };
        if outside {
            // What came before it has been begun, and is waited for: nothing of a part that is refused is under way.
            let _ = self.wait(flight);
            return Err(Refusal::OutOfBounds);
        }
        if job.range.end - job.range.start >= KEPT_MIN_BYTES {
            self.keep(job.leg, made_of, again.map(|list| (list, end)), known);
        }
        Ok(Begun::UnderWay { flight, end })
    }

    /// Remembers a list; the second time, with what the device keeps of it.
    fn keep(&mut self, leg: &Arc<Leg>, made_of: MadeOf, list: Option<(KeptList, u64)>, known: Option<usize>) {
        if let Some(at) = known {
            self.kept.remove(at);
        }
        self.kept.retain(|kept| kept.leg.strong_count() > 0);
        if self.kept.len() >= KEPT_MAX {
            self.kept.remove(0);
        }
        self.kept.push(Kept {
            leg: Arc::downgrade(leg),
            made_of,
            list,
        });
    }

    /// Registered memory as an end of what a device copies; none where it is neither the host's nor a device's. Host memory is pinned the first time.
    pub(crate) fn end_of<'a>(&mut self, memory: &'a dyn Memory, for_device: &Arc<Device>) -> Option<End<'a>> {
        if let Some(CudaMemory(memory)) = memory.as_any().downcast_ref() {
            return Some(End::Device {
                device: memory.device(),
                address: memory.address(),
                len: memory.len(),
            });
        }
        let host: &HostMemory = memory.as_any().downcast_ref()?;
        let (address, len) = (host.as_ptr() as usize, host.len());
        // Pages that somebody else's bytes share are left alone: the driver refuses copies of memory that is half pinned, whoever asks for them.
        let page = page_bytes();
        let whole_pages = host.file().is_some() || address.is_multiple_of(page) && len.is_multiple_of(page as u64);
        let pin = self.pins.entry((address, len)).or_insert_with(|| match whole_pages {
            _ if host.may_vanish() => None,
            // SAFETY: the memory is registered, and `forget` is called before it goes; a flight that shares the pin keeps its leg, and with it the memory.
            true => unsafe { PinnedRange::shared(for_device, address, len as usize, true) }.ok(),
            false => PinnedRange::covering(address, len as usize),
        });
        let pinned = match pin {
            Some(pin) => Pin::Ours { _pin: pin.clone() },
            None if !host.may_vanish() && weft_gpu::is_pinned(address, len) => Pin::Theirs,
            None => Pin::Not,
        };
        Some(End::Host {
            address,
            len,
            pinned,
            memory: Some(host),
        })
    }

    /// Registered memory goes: no device reaches it any more.
    pub(crate) fn forget(&mut self, memory: &dyn Memory) {
        if let Some(host) = memory.as_any().downcast_ref::<HostMemory>() {
            self.pins.remove(&(host.as_ptr() as usize, host.len()));
        }
    }

    /// Copies a little through host memory of our own, and waits for it.
    ///
    /// # Safety
    /// As for [`begin`](Devices::begin).
    unsafe fn through_the_host(
        &mut self,
        device: &Arc<Device>,
        job: &Job<'_>,
        elsewhere: &mut Elsewhere<'_>,
    ) -> Result<Begun, Refusal> {
        let near_is_device = matches!(job.near, End::Device { .. });
        let (device_end, host_end) = if near_is_device {
            (&job.near, &job.far)
        } else {
            (&job.far, &job.near)
        };
        let (End::Device { address, .. }, true) = (device_end, !matches!(host_end, End::Device { .. })) else {
            // Two devices that do not reach each other.
            return Err(Refusal::Unsupported);
        };
        if self.bounce.is_none() {
            self.bounce = Some(Pinned::allocate(device, 2 * BOUNCE_BYTES).map_err(refusal)?);
        }
        let bounce = self.bounce.as_ref().map_or(std::ptr::null_mut(), Pinned::as_ptr);
        let to_device = (job.direction == Direction::Read) == near_is_device;
        let (mut pieces, mut bounced, mut filled, mut end) = (Vec::new(), Vec::new(), 0, job.range.start);
        for (at_near, at_far, len) in job.leg.pieces(job.range.clone()) {
            let inside = |at: u64, of: &End<'_>| at.checked_add(len).is_some_and(|end| end <= of.len());
            if !inside(at_near, &job.near) || !inside(at_far, &job.far) {
                return Err(Refusal::OutOfBounds);
            }
            let len = len.min((BOUNCE_BYTES - filled) as u64);
            if len == 0 || pieces.len() == PIECES_MAX {
                break;
            }
            let (at_device, at_host) = if near_is_device {
                (at_near, at_far)
            } else {
                (at_far, at_near)
            };
            // SAFETY: within the first half of the buffer.
            let buffer = unsafe { bounce.add(filled) };
            let (to, from) = match to_device {
                true => (address + at_device, buffer as u64),
                false => (buffer as u64, address + at_device),
            };
            pieces.push(Piece { to, from, len });
            bounced.push(Bounced {
                offset: at_host,
                buffer,
                len: len as usize,
            });
            filled += len as usize;
            end += len;
            if filled == BOUNCE_BYTES {
                break;
            }
        }
        let copier = self.copiers.get_mut(&device.ordinal()).ok_or(Refusal::Unsupported)?;
        let mut move_host = |direction: Direction, bounced: &[Bounced]| match host_end {
            End::Host {
                memory: Some(memory), ..
            } => bounced.iter().try_for_each(|piece| {
                // SAFETY: both were checked above.
                unsafe {
                    match direction {
                        Direction::Read => memory.take(piece.offset, piece.buffer, piece.len),
                        Direction::Write => memory.put(piece.offset, piece.buffer, piece.len),
                    }
                }
            }),
            End::Host { address, .. } => {
                for piece in bounced {
                    let there = (address + piece.offset as usize) as *mut u8;
                    // SAFETY: both were checked above; the memory may be written by others, and no reference to it is formed.
                    unsafe {
                        match direction {
                            Direction::Read => crate::copy::copy_cached(piece.buffer, there, piece.len),
                            Direction::Write => crate::copy::copy_cached(there, piece.buffer, piece.len),
                        }
                    }
                }
                Ok(())
            }
            _ => elsewhere(direction, bounced),
        };
        if to_device {
            move_host(Direction::Read, &bounced)?;
        }
        // SAFETY: the buffer is ours, the device's side was checked, and it is waited for.
        let copied = unsafe {
            let ticket = copier.begin_with(job.checksum, true, false, |list| {
                pieces.iter().for_each(|piece| {
                    list.push(*piece);
                });
            });
            ticket.and_then(|(ticket, _)| copier.wait(ticket)).map_err(refusal)?
        };
        if !to_device {
            move_host(Direction::Write, &bounced)?;
        }
        let mut sums = Sums::of(job.direction, copied);
        if job.checksum {
            // The second half holds what is found in the host's memory afterwards.
            let again: Vec<Bounced> = bounced
                .iter()
                .map(|piece| Bounced {
                    // SAFETY: within the second half of the buffer.
                    buffer: unsafe { piece.buffer.add(BOUNCE_BYTES) },
                    ..*piece
                })
                .collect();
            move_host(Direction::Read, &again)?;
            // SAFETY: both halves are ours, and nobody else writes them now.
            let same = unsafe {
                std::slice::from_raw_parts(bounce, filled)
                    == std::slice::from_raw_parts(bounce.add(BOUNCE_BYTES), filled)
            };
            if !same {
                sums.near = sums.far.wrapping_add(1);
            }
        }
        Ok(Begun::Ended { sums, end })
    }

    /// Whether a copy has ended, and with which sums.
    pub(crate) fn look(&mut self, flight: &Flight) -> Option<Result<Sums, Refusal>> {
        let Some(copier) = self.copiers.get_mut(&flight.ordinal) else {
            return Some(Err(Refusal::NoMemory));
        };
        let ended = copier.look(&flight.ticket)?;
        Some(ended.map(|copied| Sums::of(flight.direction, copied)).map_err(refusal))
    }

    /// Waits for a copy to end.
    pub(crate) fn wait(&mut self, flight: Flight) -> Result<Sums, Refusal> {
        loop {
            if let Some(ended) = self.look(&flight) {
                return ended;
            }
            std::hint::spin_loop();
        }
    }
}

/// The address by which a device reaches an end; none where it does not.
fn reach(device: &Device, end: &End<'_>) -> Option<u64> {
    match *end {
        End::Device {
            address, device: of, ..
        } => (of.ordinal() == device.ordinal()).then_some(address),
        End::Host { pinned: Pin::Not, .. } => None,
        End::Host { address, .. } => Some(address as u64),
        End::Elsewhere { .. } => None,
    }
}

fn refusal(error: GpuError) -> Refusal {
    match error {
        GpuError::NoDriver | GpuError::OldDriver { .. } | GpuError::NoDevice { .. } | GpuError::NotShareable => {
            Refusal::Unsupported
        }
        // The device has failed: what it held is not there any more.
        _ => Refusal::NoMemory,
    }
}
