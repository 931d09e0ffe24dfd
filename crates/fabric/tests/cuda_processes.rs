//! Memory of a device between two processes, one of which is killed while its kernel copies.

mod peer;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use peer::second_process::SecondProcess;
use peer::{Near, whole_leg};
use weft_fabric::cuda::{CudaMemory, Device, DeviceMemory};
use weft_fabric::memory::AllocateOptions;
use weft_fabric::{Clock, HostMemory, SharedMemory, SharedMemoryOptions};
use weft_plan::Place;
use weft_protocol::{
    Access, Direction, Epoch, Memory, PeerAddress, Progress, Region, RegionKey, RemoteRegion, Signal, Transport,
};
use weft_testing::{Need, has};

const ROLE: &str = "WEFT_TEST_CUDA_WRITER";
/// Over the bus it takes milliseconds, most of which a kernel is under way.
const LEN: usize = 256 << 20;
const WRITTEN: u8 = 0x77;
const KEY: RegionKey = RegionKey {
    epoch: Epoch(42),
    slot: 0,
    secret: 77,
};
const ON_DEVICE: Place = Place::Gpu { ordinal: 0 };

/// Not a test: the process that writes until it is killed, when this binary is started as one.
#[test]
fn peer_process() {
    let Ok(owner) = std::env::var(ROLE) else { return };
    let mut near = Near::connected_to(SharedMemoryOptions::default(), &PeerAddress(owner));
    let host = HostMemory::allocate(LEN, AllocateOptions::default()).expect("there is memory");
    let local = near.local(host);
    local.memory.bytes().write(0, &vec![WRITTEN; LEN]);
    let far = RemoteRegion {
        key: KEY,
        len: LEN as u64,
        place: ON_DEVICE,
        access: Access::READ_WRITE,
        grants: Arc::from([]),
    };
    let leg = whole_leg(&local, &far);
    for nth in 0.. {
        let deadline = near.soon();
        let write = near.op(Direction::Write, &leg, 0..LEN as u64, deadline);
        near.carry_out(write).expect("written");
        if nth == 1 {
            println!("PEER writing");
            std::io::stdout().flush().expect("the test listens");
        }
    }
}

/// Memory that its owner has taken back is its owner's alone, though the process that wrote to it could not end what it had begun.
#[test]
fn a_writer_that_is_killed_under_its_kernel_touches_nothing_after_the_release() {
    if !has(Need::Gpu) {
        return;
    }
    let device = Device::open(0).expect("a device");
    for nth in 0..8 {
        let clock = Clock::start();
        let mut owner =
            SharedMemory::start(SharedMemoryOptions::default(), KEY.epoch, clock).expect("the transport starts");
        let memory = Arc::new(DeviceMemory::allocate(&device, LEN as u64).expect("memory"));
        let region = Region {
            key: KEY,
            memory: Arc::new(CudaMemory::new(memory.clone())) as Arc<dyn Memory>,
            place: ON_DEVICE,
            access: Access::READ_WRITE,
        };
        owner.register(&region).expect("registered");
        let mut writer = SecondProcess::start(ROLE, &owner.capabilities().address.0);
        let mut signals = Vec::new();
        let begun = std::thread::spawn(move || {
            assert_eq!(writer.reply(), "writing");
            writer
        });
        while !begun.is_finished() {
            owner.poll(clock.now(), &mut signals);
            std::thread::sleep(Duration::from_micros(50));
        }
        let mut writer = begun.join().expect("it writes");
        std::thread::sleep(Duration::from_micros(700 * nth));
        // It is not waited for: what is looked at is the time between the end of its socket and its own.
        let killing = std::thread::spawn(move || writer.kill());
        let is_lost = |signal: &Signal| matches!(signal, Signal::Lost { .. });
        while !signals.iter().any(is_lost) {
            owner.poll(clock.now(), &mut signals);
        }
        while owner.release(&KEY).expect("released once") == Progress::Busy {
            owner.poll(clock.now(), &mut signals);
        }
        let mine = vec![0x11; LEN];
        memory.write(0, &mine).expect("the owner writes");
        killing.join().expect("killed");
        std::thread::sleep(Duration::from_millis(100));
        let mut found = vec![0; LEN];
        memory.read(0, &mut found).expect("the owner reads");
        assert!(found == mine, "the {nth}th: written after it was taken back");
    }
}
