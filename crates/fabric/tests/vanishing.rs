//! Memory of files: it moves like any other, and what has become of a file that was cut short is told instead of dying of it.

mod certificates;

use std::any::Any;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use certificates::certificates;
use weft_fabric::memory::AllocateOptions;
use weft_fabric::shared_memory::Foreign;
use weft_fabric::tcp::{Tcp, TcpOptions};
use weft_fabric::{Clock, HostMemory, Live, SharedMemory, SharedMemoryOptions};
use weft_plan::{Place, Spans, Time};
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{
    Access, Body, Direction, Epoch, Failure, Leg, Memory, Move, Op, OpId, Refusal, Region, RegionKey, RemoteRegion,
    Signal,
};

/// A mapping of a file, unmapped when dropped.
struct Mapped {
    start: *mut u8,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapped {}
// SAFETY: it offers no access at all.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: what was mapped, and nobody uses any more.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Memory that is the first `len` bytes of a file.
fn of_file(len: usize) -> (HostMemory, File) {
    let file = tempfile::tempfile().unwrap();
    let mapped = len.max(1);
    file.set_len(mapped as u64).unwrap();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            mapped,
            prot,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    let start = start.cast::<u8>();
    let owner: Box<dyn Any + Send + Sync> = Box::new(Mapped { start, len: mapped });
    // SAFETY: the mapping is valid until its owner is dropped, as far as the file is there, which is what this is about.
    (unsafe { HostMemory::from_raw(start, len, owner) }, file)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The target's memory is Weft's own.
    Mapped,
    Foreign,
    Bounce,
    Tcp,
    Tls,
}

struct OfFiles {
    clock: Clock,
    way: Way,
    tls: Option<weft_fabric::tcp::TlsOptions>,
}

impl OfFiles {
    fn new(way: Way) -> OfFiles {
        OfFiles {
            clock: Clock::start(),
            way,
            tls: (way == Way::Tls).then(|| certificates("weft.test")),
        }
    }

    fn end(&self, epoch: Epoch) -> Box<dyn Live> {
        let foreign = match self.way {
            Way::Bounce => Foreign::Bounce,
            _ => Foreign::ProcessVm,
        };
        let shared_memory = SharedMemoryOptions {
            foreign,
            ..SharedMemoryOptions::default()
        };
        let tcp = TcpOptions {
            tls: self.tls.clone(),
            ..TcpOptions::default()
        };
        match self.way {
            Way::Tcp | Way::Tls => Box::new(Tcp::start(tcp, epoch, self.clock).unwrap()),
            _ => Box::new(SharedMemory::start(shared_memory, epoch, self.clock).unwrap()),
        }
    }
}

impl Harness for OfFiles {
    fn ends(&mut self) -> Ends {
        Ends {
            initiator: self.end(Epoch(7)),
            initiator_epoch: Epoch(7),
            target: self.end(Epoch(9)),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, side: Side, len: u64) -> Arc<dyn Memory> {
        match (self.way, side) {
            (Way::Mapped, Side::Target) => {
                Arc::new(HostMemory::allocate(len as usize, AllocateOptions::default()).unwrap())
            }
            _ => Arc::new(of_file(len as usize).0),
        }
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

mod mapped {
    weft_protocol::conformance_tests!(super::OfFiles::new(super::Way::Mapped));
}

mod foreign {
    weft_protocol::conformance_tests!(super::OfFiles::new(super::Way::Foreign));
}

mod bounced {
    weft_protocol::conformance_tests!(super::OfFiles::new(super::Way::Bounce));
}

mod tcp {
    weft_protocol::conformance_tests!(super::OfFiles::new(super::Way::Tcp));
}

mod tls {
    weft_protocol::conformance_tests!(super::OfFiles::new(super::Way::Tls));
}

const LEN: usize = 2 << 20;
/// What is left of a file.
const LEFT: u64 = 100_000;

fn region(epoch: Epoch, slot: u32, memory: HostMemory) -> Region {
    Region {
        key: RegionKey { epoch, slot, secret: 3 },
        memory: Arc::new(memory),
        place: Place::DRAM,
        access: Access::READ_WRITE,
    }
}

/// Encryption has the bytes pass through this process, where a system call would not tell.
#[test]
fn a_file_that_is_cut_short_is_told_over_tls_at_either_end() {
    let world = OfFiles::new(Way::Tls);
    let (mut near, mut far) = (world.end(Epoch(7)), world.end(Epoch(9)));
    let address = far.capabilities().address.clone();
    let path = near.open(&address, world.clock.now()).unwrap();
    near.vouch(path);
    let (mut slot, mut number) = (0, 0);
    let mut carry_out =
        |near: &mut dyn Live, far: &mut dyn Live, here: &Region, there: &Region, direction, checksum| {
            let spans = Spans::contiguous(0, LEN as u64);
            let remote = RemoteRegion {
                key: there.key,
                len: LEN as u64,
                place: Place::DRAM,
                access: there.access,
                grants: Arc::from([]),
            };
            let leg = Arc::new(Leg::new(here.clone(), spans.clone(), remote, spans).unwrap());
            number += 1;
            let give_up = world.clock.now().saturating_add(Time::from_secs(30));
            let op = Op::new(
                OpId(number),
                give_up,
                Body::Move(Move::new(direction, leg, 0..LEN as u64).checksum(checksum)),
            );
            let (mut posted, mut signals, mut there) = (false, Vec::new(), Vec::new());
            loop {
                posted = posted || near.post(path, std::slice::from_ref(&op), world.clock.now()).unwrap() == 1;
                near.poll(world.clock.now(), &mut signals);
                far.poll(world.clock.now(), &mut there);
                for signal in there.drain(..) {
                    if let Signal::Accepted { path } = signal {
                        far.vouch(path);
                    }
                }
                assert!(world.clock.now() < give_up, "neither done nor failed: {signals:?}");
                for signal in signals.drain(..) {
                    match signal {
                        Signal::Completed { op, outcome, .. } if op == OpId(number) => return outcome.map(drop),
                        Signal::Lost { loss, .. } => panic!("the path was lost: {loss}"),
                        _ => {}
                    }
                }
            }
        };
    for direction in [Direction::Read, Direction::Write] {
        for (near_vanishes, checksum) in [(false, false), (false, true), (true, false), (true, true)] {
            slot += 1;
            let (memory, file) = of_file(LEN);
            let sound = HostMemory::from_vec(vec![1; LEN]);
            let (here, there) = if near_vanishes {
                (memory, sound)
            } else {
                (sound, memory)
            };
            let (here, there) = (region(Epoch(7), slot, here), region(Epoch(9), slot, there));
            near.register(&here).unwrap();
            far.register(&there).unwrap();
            let mut run = || carry_out(&mut *near, &mut *far, &here, &there, direction, checksum);
            assert_eq!(run(), Ok(()));
            file.set_len(LEFT).unwrap();
            let outcome = run();
            let case = format!("{direction:?}, near: {near_vanishes}, checksum: {checksum}");
            // The near checksum is not a transport's to compute.
            assert_eq!(outcome, Err(Failure::Refused(Refusal::NoMemory)), "{case}");
            file.set_len(LEN as u64).unwrap();
            assert_eq!(run(), Ok(()), "{case}: the path goes on");
        }
    }
}
