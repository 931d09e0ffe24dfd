//! The public suite over memory of a device, in every combination with host memory, within a process; and the transport of an agent's own devices.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::cuda::{CudaHere, CudaMemory};
use weft_fabric::memory::AllocateOptions;
use weft_fabric::{Clock, HostMemory, SharedMemory, SharedMemoryOptions};
use weft_gpu::{Device, DeviceMemory};
use weft_plan::{Place, Time};
use weft_protocol::conformance::{CASES, Ends, Harness, Side};
use weft_protocol::{Epoch, HostBytes, Memory, Transport};
use weft_testing::{Need, has};

/// What kind of memory an end has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Device,
    /// Host memory that the other end maps.
    Mapped,
    /// Host memory that it does not.
    Foreign,
}

struct OverDevice {
    clock: Clock,
    kinds: [Kind; 2],
}

impl OverDevice {
    fn end(&self, epoch: Epoch) -> Box<SharedMemory> {
        let options = SharedMemoryOptions::default();
        Box::new(SharedMemory::start(options, epoch, self.clock).expect("the transport starts"))
    }
    fn kind(&self, side: Side) -> Kind {
        self.kinds[usize::from(side == Side::Target)]
    }
}

impl Harness for OverDevice {
    fn ends(&mut self) -> Ends {
        Ends {
            initiator: self.end(Epoch(7)),
            initiator_epoch: Epoch(7),
            target: self.end(Epoch(9)),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, side: Side, len: u64) -> Arc<dyn Memory> {
        match self.kind(side) {
            Kind::Device => {
                let device = Device::open(0).expect("a device");
                let memory = DeviceMemory::allocate(&device, len).expect("memory");
                Arc::new(CudaMemory::new(Arc::new(memory)))
            }
            Kind::Mapped => {
                Arc::new(HostMemory::allocate(len as usize, AllocateOptions::default()).expect("there is memory"))
            }
            Kind::Foreign => Arc::new(HostMemory::from_vec(vec![0; len as usize])),
        }
    }
    fn place(&self, side: Side) -> Place {
        match self.kind(side) {
            Kind::Device => Place::Gpu { ordinal: 0 },
            _ => Place::DRAM,
        }
    }
    fn look<'m>(&self, memory: &'m dyn Memory) -> &'m dyn HostBytes {
        match memory.as_any().downcast_ref::<CudaMemory>() {
            Some(memory) => memory,
            None => memory.bytes(),
        }
    }
    fn has_own_sum(&self) -> bool {
        true
    }
    fn alone(&mut self) -> Option<(Box<dyn Transport>, Epoch)> {
        let alone = CudaHere::start(Epoch(5), SharedMemoryOptions::default().gpu_stay).expect("a device");
        Some((Box::new(alone), Epoch(5)))
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn run(kinds: [Kind; 2]) {
    if !has(Need::Gpu) {
        return;
    }
    let clock = Clock::start();
    for (name, case) in CASES {
        println!("{kinds:?}: {name}");
        case(&mut OverDevice { clock, kinds });
    }
}

#[test]
fn device_to_device() {
    run([Kind::Device, Kind::Device]);
}

#[test]
fn device_to_mapped_host_memory() {
    run([Kind::Device, Kind::Mapped]);
}

#[test]
fn device_to_foreign_host_memory() {
    run([Kind::Device, Kind::Foreign]);
}

#[test]
fn mapped_host_memory_to_device() {
    run([Kind::Mapped, Kind::Device]);
}

#[test]
fn foreign_host_memory_to_device() {
    run([Kind::Foreign, Kind::Device]);
}
