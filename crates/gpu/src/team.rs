//! Ranks that reach each other's memory, and the heap through which their kernels talk.
//!
//! Every rank has a heap, all of them laid out alike. Ranks of one process are one [`Team`]; a rank whose peers are in other processes maps their heaps, by what
//! [`DeviceMemory::export`] tells. What kernels do with a team is in `include/weft/device.cuh`; collectives are in [`collective`](crate::collective).

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft_plan::cost::kernels::DeviceCosts;

use crate::collective::CollectiveError;
use crate::device::{Device, GpuError};
use crate::kernels::Kernels;
use crate::layout::{ABORTED, BLOCKS_MAX, Layout, PEER_GAVE_UP, RANKS_MAX, TIMED_OUT, WINDOWS};
use crate::memory::DeviceMemory;
use crate::pinned::Pinned;

/// What the ranks of a team agree on. They have to be the same for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TeamSettings {
    /// How long a kernel waits for a peer before it gives up. At most an hour.
    pub deadline: Duration,
    /// Bytes of every heap that are the application's.
    pub data_bytes: u64,
    /// Blocks of one rank's launch at most. Kernels wait for each other, so all blocks of all ranks of one device have to fit on it at the same time, beside everything else that is there
    /// and does not end: whoever uses two teams of one device at once gives each a part. By default what a device takes, divided by the ranks of the team.
    pub blocks_a_rank: Option<u32>,
    /// What calls take each way, by which the fastest is chosen.
    pub costs: DeviceCosts,
}

impl Default for TeamSettings {
    fn default() -> TeamSettings {
        TeamSettings {
            deadline: Duration::from_secs(30),
            data_bytes: 0,
            blocks_a_rank: None,
            costs: DeviceCosts::default(),
        }
    }
}

const DEADLINE_MAX: Duration = Duration::from_secs(3600);
/// As kernels have it: `HostControl`.
pub(crate) const HOST_CONTROL_BYTES: usize = 128;
pub(crate) const HOST_FAILED_AT: usize = 8;
/// The heap is the first window; number 0 stands for addresses that all ranks share.
const HEAP_WINDOW: u64 = 1;
const WINDOW_SHIFT: u32 = 56;

/// One rank's heap, before it has met the others.
#[derive(Debug)]
pub struct Heap {
    memory: DeviceMemory,
    /// Loaded with the heap, so that ranks that have told each other of their heaps can go on without waiting for the driver.
    kernels: Arc<Kernels>,
    layout: Layout,
    settings: TeamSettings,
}

impl Heap {
    pub fn allocate(device: &Arc<Device>, settings: TeamSettings) -> Result<Heap, CollectiveError> {
        if settings.deadline.is_zero() || settings.deadline > DEADLINE_MAX || settings.blocks_a_rank == Some(0) {
            return Err(CollectiveError::BadSettings);
        }
        let layout = Layout::new(settings.data_bytes)?;
        let kernels = Kernels::shared(device)?;
        let memory = DeviceMemory::allocate(device, layout.bytes)?;
        memory.zero(layout.zeroed_bytes())?;
        memory.write(Layout::CALLS_AT, &Layout::FIRST_CALL.to_le_bytes())?;
        Ok(Heap {
            memory,
            kernels,
            layout,
            settings,
        })
    }

    /// The same with so many blocks of this rank's launches at most, where that becomes known only after the ranks have met; it has to be the same for all of them.
    pub fn with_blocks_a_rank(mut self, blocks: u32) -> Heap {
        self.settings.blocks_a_rank = Some(blocks.max(1));
        self
    }

    /// How many blocks of all ranks together the device has on it at the same time.
    pub fn blocks_on_device(&self) -> u32 {
        self.memory.device().multiprocessors() * self.kernels.blocks_a_multiprocessor()
    }

    /// What the other ranks map.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }
}

/// What kernels are told of a team. The same fields as `Team` in `device.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TeamView {
    rank: u32,
    ranks: u32,
    far: u32,
    unused: u32,
    timeout_ns: u64,
    host: u64,
    heaps: [u64; RANKS_MAX],
    barriers_at: u64,
    ends_at: u64,
    records_at: u64,
    windows_at: u64,
    packets_at: u64,
    packets_a_rank: u64,
    signals_at: u64,
    data_at: u64,
    heap_bytes: u64,
    ring: u64,
    claims: u64,
}

const _: () = assert!(size_of::<TeamView>() == 184 && RANKS_MAX == 8);

impl TeamView {
    /// One rank, with a heap of which only the beginning is there: enough for a call of nothing.
    pub(crate) fn alone(heap: u64, host: u64) -> TeamView {
        let mut heaps = [0; RANKS_MAX];
        heaps[0] = heap;
        TeamView {
            rank: 0,
            ranks: 1,
            far: 0,
            unused: 0,
            timeout_ns: 0,
            host,
            heaps,
            barriers_at: 0,
            ends_at: 0,
            records_at: 0,
            windows_at: 0,
            packets_at: 0,
            packets_a_rank: 0,
            signals_at: 0,
            data_at: 0,
            heap_bytes: 0,
            ring: 0,
            claims: 0,
        }
    }

    /// Of a team with a proxy: ranks whose heap is at zero are behind it.
    pub(crate) fn proxied(part: ProxiedPart<'_>) -> TeamView {
        let ProxiedPart { layout, .. } = part;
        TeamView {
            rank: part.rank,
            ranks: part.ranks,
            far: 1,
            timeout_ns: part.deadline.as_nanos() as u64,
            host: part.host,
            heaps: part.heaps,
            barriers_at: layout.barriers_at,
            ends_at: layout.ends_at,
            records_at: layout.records_at,
            windows_at: layout.windows_at,
            packets_at: layout.packets_at,
            signals_at: layout.signals_at,
            data_at: layout.data_at,
            heap_bytes: layout.bytes,
            ring: part.ring,
            claims: part.claims,
            ..TeamView::alone(0, 0)
        }
    }

    /// The same, for another of the ranks that are here.
    pub(crate) fn of_rank(self, nth: usize) -> TeamView {
        TeamView {
            rank: self.rank + nth as u32,
            host: self.host + (nth * HOST_CONTROL_BYTES) as u64,
            ..self
        }
    }
}

/// What [`TeamView::proxied`] is made of.
pub(crate) struct ProxiedPart<'a> {
    pub rank: u32,
    pub ranks: u32,
    pub deadline: Duration,
    pub layout: &'a Layout,
    pub host: u64,
    pub heaps: [u64; RANKS_MAX],
    pub ring: u64,
    pub claims: u64,
}

/// The ranks of this process, and the heaps of all.
pub struct Team {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    view: TeamView,
    /// How many ranks are here, from `view.rank` on.
    here: usize,
    layout: Layout,
    heaps: Vec<DeviceMemory>,
    host: Pinned,
    blocks_max: u32,
    costs: DeviceCosts,
    windows: Mutex<Vec<Window>>,
}

/// Memory that ranks of other processes know by its number.
struct Window {
    own: DeviceMemory,
    _theirs: Vec<DeviceMemory>,
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = self.view.rank..self.view.rank + self.here as u32;
        write!(
            f,
            "Team(gpu:{}, {here:?} of {})",
            self.device.ordinal(),
            self.view.ranks
        )
    }
}

impl Team {
    /// Ranks that are all in this process, on one device.
    pub fn in_process(
        device: &Arc<Device>,
        ranks: usize,
        settings: TeamSettings,
    ) -> Result<Arc<Team>, CollectiveError> {
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(CollectiveError::TooManyRanks { ranks });
        }
        let heaps: Result<Vec<Heap>, _> = (0..ranks).map(|_| Heap::allocate(device, settings)).collect();
        Team::new(device, 0, ranks, heaps?, Vec::new())
    }

    /// One rank here, its peers in other processes: their heaps, imported, in the order of their ranks and without this one's.
    pub fn join(rank: usize, heap: Heap, peers: Vec<DeviceMemory>) -> Result<Arc<Team>, CollectiveError> {
        let ranks = peers.len() + 1;
        if ranks > RANKS_MAX {
            return Err(CollectiveError::TooManyRanks { ranks });
        }
        if rank >= ranks {
            return Err(CollectiveError::RankOutOfRange { rank, ranks });
        }
        if let Some(short) = peers.iter().find(|peer| peer.len() < heap.layout.bytes) {
            return Err(CollectiveError::BufferTooSmall {
                needed: heap.layout.bytes,
                found: short.len(),
            });
        }
        let device = heap.memory.device().clone();
        Team::new(&device, rank, ranks, vec![heap], peers)
    }

    fn new(
        device: &Arc<Device>,
        rank: usize,
        ranks: usize,
        own: Vec<Heap>,
        peers: Vec<DeviceMemory>,
    ) -> Result<Arc<Team>, CollectiveError> {
        let kernels = own[0].kernels.clone();
        let (here, layout, settings) = (own.len(), own[0].layout, own[0].settings);
        let host = Pinned::allocate(device, here * HOST_CONTROL_BYTES)?;
        let fit = own[0].blocks_on_device() / ranks as u32;
        let far = !peers.is_empty();
        let mut heaps = peers;
        let after = heaps.split_off(rank);
        heaps.extend(own.into_iter().map(|heap| heap.memory));
        heaps.extend(after);
        let mut addresses = [0; RANKS_MAX];
        for (address, heap) in addresses.iter_mut().zip(&heaps) {
            *address = heap.address();
        }
        let blocks_max = settings
            .blocks_a_rank
            .unwrap_or(fit)
            .clamp(1, fit.max(1))
            .min(BLOCKS_MAX as u32);
        let team = Team {
            device: device.clone(),
            kernels,
            view: TeamView {
                rank: rank as u32,
                ranks: ranks as u32,
                far: far.into(),
                unused: 0,
                timeout_ns: settings.deadline.as_nanos() as u64,
                host: host.address(),
                heaps: addresses,
                barriers_at: layout.barriers_at,
                ends_at: layout.ends_at,
                records_at: layout.records_at,
                windows_at: layout.windows_at,
                packets_at: layout.packets_at,
                packets_a_rank: Layout::PACKETS_A_RANK,
                signals_at: layout.signals_at,
                data_at: layout.data_at,
                heap_bytes: layout.bytes,
                ring: 0,
                claims: 0,
            },
            here,
            layout,
            heaps,
            host,
            blocks_max,
            costs: settings.costs,
            windows: Mutex::new(Vec::new()),
        };
        if far {
            team.tell_window(HEAP_WINDOW, &addresses)?;
        }
        Ok(Arc::new(team))
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
    pub fn ranks(&self) -> usize {
        self.view.ranks as usize
    }
    /// The ranks of this process.
    pub fn here(&self) -> std::ops::Range<usize> {
        let first = self.view.rank as usize;
        first..first + self.here
    }
    /// Blocks of one rank's launch at most.
    pub fn blocks_max(&self) -> u32 {
        self.blocks_max
    }
    /// What calls take, by which the way of each is chosen.
    pub fn costs(&self) -> &DeviceCosts {
        &self.costs
    }
    /// What a kernel of the application is passed for a rank of this process.
    pub fn view(&self, rank: usize) -> Result<TeamView, CollectiveError> {
        let nth = self.local(rank)?;
        Ok(self.view.of_rank(nth))
    }
    /// Bytes of every heap that are the application's.
    pub fn data_bytes(&self) -> u64 {
        self.layout.bytes - self.layout.data_at
    }
    /// Whether some ranks are in other processes, which reach nothing but heaps and what is registered.
    pub(crate) fn is_far(&self) -> bool {
        self.view.far != 0
    }
    /// Where the application's part of a rank's heap lies, as this process maps it.
    pub fn data(&self, rank: usize) -> Result<u64, CollectiveError> {
        let ranks = self.ranks();
        let heap = self.heaps.get(rank);
        let heap = heap.ok_or(CollectiveError::RankOutOfRange { rank, ranks })?;
        Ok(heap.address() + self.layout.data_at)
    }

    /// Makes memory reachable for collectives among processes: this rank's, and that of its peers, in the order of their ranks and without this one's. Every rank calls
    /// it for the same memories in the same order, before any uses them. Within one process everything is reachable as it is.
    pub fn register(&self, own: DeviceMemory, theirs: Vec<DeviceMemory>) -> Result<(), CollectiveError> {
        if self.view.far == 0 {
            return Ok(());
        }
        if theirs.len() + 1 != self.ranks() {
            return Err(CollectiveError::WrongBuffers {
                needed: self.ranks() - 1,
                found: theirs.len(),
            });
        }
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let number = HEAP_WINDOW + 1 + windows.len() as u64;
        if number >= WINDOWS {
            return Err(CollectiveError::TooManyWindows);
        }
        let mut addresses = [0; RANKS_MAX];
        let (before, after) = theirs.split_at(self.view.rank as usize);
        let all = before.iter().chain([&own]).chain(after);
        for (address, memory) in addresses.iter_mut().zip(all) {
            *address = memory.address();
        }
        self.tell_window(number, &addresses)?;
        windows.push(Window { own, _theirs: theirs });
        Ok(())
    }

    fn tell_window(&self, number: u64, addresses: &[u64; RANKS_MAX]) -> Result<(), GpuError> {
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_le_bytes()).collect();
        let own = &self.heaps[self.view.rank as usize];
        own.write(self.layout.windows_at + number * bytes.len() as u64, &bytes)
    }

    /// How other ranks find memory of a rank of this process; nothing where they cannot.
    pub(crate) fn reference(&self, address: u64, bytes: u64) -> Option<u64> {
        if self.view.far == 0 {
            return Some(address);
        }
        let inside = |memory: &DeviceMemory| {
            let at = address.checked_sub(memory.address())?;
            (at.checked_add(bytes)? <= memory.len()).then_some(at)
        };
        let windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let own = [&self.heaps[self.view.rank as usize]].into_iter();
        let mut all = own.chain(windows.iter().map(|window| &window.own)).zip(HEAP_WINDOW..);
        all.find_map(|(memory, number)| Some(inside(memory)? | number << WINDOW_SHIFT))
    }

    /// Which of the ranks of this process a rank is.
    pub(crate) fn local(&self, rank: usize) -> Result<usize, CollectiveError> {
        let ranks = self.ranks();
        let nth = rank.checked_sub(self.view.rank as usize);
        nth.filter(|nth| *nth < self.here)
            .ok_or(CollectiveError::RankOutOfRange { rank, ranks })
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    fn host_word(&self, nth: usize, at: usize) -> &AtomicU64 {
        // SAFETY: within the memory of this rank's control, aligned, and only ever used as a word that kernels write too.
        unsafe {
            &*self
                .host
                .as_ptr()
                .add(nth * HOST_CONTROL_BYTES + at)
                .cast::<AtomicU64>()
        }
    }

    /// Ends all waits of kernels of this process, soon, and those of their peers by that. Nothing can be asked of the team afterwards.
    pub fn abort(&self) {
        for nth in 0..self.here {
            self.host_word(nth, 0).store(1, Ordering::Release);
        }
    }

    /// Waits until the device has done all that this process has put on it. Kernels of the team end by their deadline, or by an [abort](Team::abort).
    pub fn wait_for_device(&self) {
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: it only waits.
        unsafe { cudarc::driver::sys::cuCtxSynchronize() };
    }

    /// Why a rank of this process has failed, if it has. What is on a stream may still fail: whoever wants to know of a call waits for its stream first.
    pub fn check(&self, rank: usize) -> Result<(), CollectiveError> {
        let nth = self.local(rank)?;
        match failure(self.host_word(nth, HOST_FAILED_AT).load(Ordering::Acquire)) {
            Some(error) => Err(error),
            None if self.host_word(nth, 0).load(Ordering::Acquire) != 0 => Err(CollectiveError::Aborted),
            None => Ok(()),
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // Kernels of the team may still be on streams, and the heaps stay until they have ended.
        self.wait_for_device();
    }
}

/// What a word of failure means.
fn failure(word: u64) -> Option<CollectiveError> {
    let rank = (word >> 8 & 0xff) as usize;
    match word & 0xff {
        0 => None,
        TIMED_OUT => Some(CollectiveError::PeerTimedOut { rank }),
        PEER_GAVE_UP => Some(CollectiveError::PeerGaveUp { rank }),
        ABORTED => Some(CollectiveError::Aborted),
        _ => Some(CollectiveError::Aborted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_failure_name_the_rank_and_the_reason() {
        assert_eq!(failure(0), None);
        assert_eq!(
            failure(TIMED_OUT | 5 << 8 | 2 << 16),
            Some(CollectiveError::PeerTimedOut { rank: 5 })
        );
        assert_eq!(
            failure(PEER_GAVE_UP | 3 << 8),
            Some(CollectiveError::PeerGaveUp { rank: 3 })
        );
        assert_eq!(failure(ABORTED), Some(CollectiveError::Aborted));
    }

    #[test]
    fn the_view_is_what_kernels_read() {
        let header = include_str!("../include/weft/device.cuh");
        let fields = header
            .split("struct Team {")
            .nth(1)
            .and_then(|rest| rest.split("};").next())
            .unwrap();
        let names: Vec<&str> = fields
            .lines()
            .filter_map(|line| line.trim().strip_suffix(';'))
            .filter_map(|line| line.split_whitespace().nth(1))
            .map(|name| name.trim_end_matches("[RANKS_MAX]"))
            .collect();
        let own = [
            "rank",
            "ranks",
            "far",
            "unused",
            "timeout_ns",
            "host",
            "heaps",
            "barriers_at",
            "ends_at",
            "records_at",
            "windows_at",
            "packets_at",
            "packets_a_rank",
            "signals_at",
            "data_at",
            "heap_bytes",
            "ring",
            "claims",
        ];
        assert_eq!(names, own);
    }
}
