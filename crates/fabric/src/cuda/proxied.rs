//! Host memory of a team with a proxy, as kernels of a device reach it.

use std::sync::Arc;
use std::time::Duration;

use weft_gpu::ring::{Proxied, ProxiedSettings, RingLayout};
use weft_gpu::{CollectiveError, Device, GpuError, Layout, TeamView};
use weft_protocol::Memory;

use crate::memory::HostMemory;

/// The ring and the heaps of the ranks of this process, pinned for a device; kept for as long as kernels may use them.
#[derive(Debug)]
pub struct ProxiedTeam {
    // Before the memory: it lets go of the pins.
    proxied: Proxied,
    _memory: Vec<Arc<HostMemory>>,
}

impl ProxiedTeam {
    /// `heaps`: of each rank that is here, from `first_rank` on.
    pub fn new(
        device: &Arc<Device>,
        (first_rank, ranks): (usize, usize),
        (deadline, data_bytes): (Duration, u64),
        heaps: &[Arc<HostMemory>],
        ring: &Arc<HostMemory>,
    ) -> Result<ProxiedTeam, CollectiveError> {
        let layout = Layout::of_host(data_bytes)?;
        let needed = heaps.iter().map(|heap| (heap, layout.bytes));
        for (memory, needed) in needed.chain([(ring, RingLayout::BYTES)]) {
            if memory.len() < needed {
                let found = memory.len();
                return Err(CollectiveError::BufferTooSmall { needed, found });
            }
        }
        let settings = ProxiedSettings {
            first_rank,
            ranks,
            deadline,
            data_bytes,
            heaps: heaps.iter().map(|heap| heap.as_ptr() as u64).collect(),
            ring: ring.as_ptr() as u64,
        };
        // SAFETY: long enough, as was just looked at; the memory is kept below, and `drop` waits for the device.
        let proxied = unsafe { Proxied::new(device, &settings) }?;
        let memory = heaps.iter().chain([ring]).cloned().collect();
        Ok(ProxiedTeam {
            proxied,
            _memory: memory,
        })
    }

    pub fn device(&self) -> &Arc<Device> {
        self.proxied.device()
    }
    /// What a kernel is passed for the nth rank that is here. It must have ended before the value is dropped.
    pub fn view(&self, nth: usize) -> Option<TeamView> {
        self.proxied.view(nth)
    }
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.proxied.synchronize()
    }
}

impl Drop for ProxiedTeam {
    fn drop(&mut self) {
        // Kernels that are still there end by their deadline at the latest. A device that has failed has none.
        let _ = self.proxied.synchronize();
    }
}
