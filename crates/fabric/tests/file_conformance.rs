//! The public suite over files: by io_uring and by threads, past the page cache and through it, staged, in regular files; and with every
//! trouble that a device can have, on a file system of the test's own.

#[path = "fuse/mod.rs"]
mod fuse;

use std::sync::Arc;
use std::time::Duration;

use fuse::Fuse;
use weft_fabric::file::{Direct, FileHere, FileHereOptions, FileMemory, FileOptions, Means, Support};
use weft_fabric::{Clock, HostMemory};
use weft_plan::{Place, Time};
use weft_protocol::conformance::{CASES_ALONE, Ends, Harness, Side, Trouble};
use weft_protocol::{
    Access, Body, Commit, Epoch, Failure, HostBytes, Memory, Op, OpId, Refusal, Region, RegionKey, RemoteRegion,
    Signal, Transport,
};
use weft_testing::{Need, has};

/// What is tested.
#[derive(Clone, Copy)]
struct Variant {
    means: Means,
    direct: Direct,
    staged: bool,
    /// Host memory begins in the middle of a page.
    crooked: bool,
    /// The file is the near side.
    file_is_near: bool,
}

const PLAIN: Variant = Variant {
    means: Means::Auto,
    direct: Direct::Auto,
    staged: false,
    crooked: false,
    file_is_near: false,
};

struct OverFiles {
    clock: Clock,
    variant: Variant,
    folder: tempfile::TempDir,
    fuse: Option<Fuse>,
    made: u32,
}

impl OverFiles {
    fn new(variant: Variant) -> OverFiles {
        OverFiles {
            clock: Clock::start(),
            variant,
            // Beside the build, which is on a disk, unlike many a /tmp.
            folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder"),
            fuse: None,
            made: 0,
        }
    }

    /// On a file system of the test's own.
    fn troubled(variant: Variant) -> OverFiles {
        let fuse = Fuse::mount().expect("/dev/fuse, and the right to mount");
        OverFiles {
            fuse: Some(fuse),
            ..OverFiles::new(variant)
        }
    }

    fn is_file(&self, side: Side) -> bool {
        (side == Side::Initiator) == self.variant.file_is_near
    }
}

impl Harness for OverFiles {
    fn ends(&mut self) -> Ends {
        unreachable!("it has no peers")
    }
    fn has_no_peers(&self) -> bool {
        true
    }
    fn memory(&mut self, side: Side, len: u64) -> Arc<dyn Memory> {
        if !self.is_file(side) {
            let before = if self.variant.crooked { 100 } else { 0 };
            let whole = HostMemory::allocate(len as usize + before, Default::default()).expect("memory");
            // SAFETY: the memory is the owner of what is in it, and nobody holds a reference.
            return Arc::new(unsafe {
                HostMemory::from_raw(whole.as_ptr().add(before), len as usize, Box::new(whole))
            });
        }
        self.made += 1;
        let name = format!("file-{}", self.made);
        let path = match &self.fuse {
            Some(fuse) => fuse.path(&name),
            None => self.folder.path().join(name),
        };
        let options = FileOptions::sized(len)
            .direct(self.variant.direct)
            .staged(self.variant.staged);
        Arc::new(FileMemory::open(path, options).expect("a file"))
    }
    fn place(&self, side: Side) -> Place {
        if self.is_file(side) { Place::File } else { Place::DRAM }
    }
    fn look<'m>(&self, memory: &'m dyn Memory) -> &'m dyn HostBytes {
        match memory.as_any().downcast_ref::<FileMemory>() {
            Some(file) => file,
            None => memory.bytes(),
        }
    }
    fn lasting(&self, memory: &dyn Memory) -> Option<Vec<u8>> {
        let file: &FileMemory = memory.as_any().downcast_ref()?;
        std::fs::read(file.path()).ok()
    }
    fn alone(&mut self) -> Option<(Box<dyn Transport>, Epoch)> {
        let options = FileHereOptions::default().means(self.variant.means).depth(16);
        let here = FileHere::start(Epoch(5), options).expect("a transport");
        Some((Box::new(here), Epoch(5)))
    }
    fn trouble(&mut self, trouble: Option<Trouble>) -> bool {
        let Some(fuse) = &self.fuse else { return false };
        fuse.trouble(trouble);
        true
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

mod by_io_uring {
    use super::*;
    weft_protocol::conformance_tests!(alone OverFiles::new(PLAIN));
}

mod by_threads {
    use super::*;
    weft_protocol::conformance_tests!(alone OverFiles::new(Variant { means: Means::Thread, ..PLAIN }));
}

/// Every case in one test: these differ in little.
fn all(variant: Variant) {
    for (name, case) in CASES_ALONE {
        println!("{name}");
        case(&mut OverFiles::new(variant));
    }
}

#[test]
fn through_the_page_cache() {
    all(Variant {
        direct: Direct::Off,
        ..PLAIN
    });
}

#[test]
fn from_memory_that_is_not_aligned() {
    all(Variant { crooked: true, ..PLAIN });
}

#[test]
fn always_staged() {
    all(Variant { staged: true, ..PLAIN });
}

#[test]
fn with_the_file_as_the_near_side() {
    all(Variant {
        file_is_near: true,
        ..PLAIN
    });
}

fn troubled(variant: Variant) {
    if !has(Need::Fuse) {
        return;
    }
    for (name, case) in CASES_ALONE {
        println!("{name}");
        case(&mut OverFiles::troubled(variant));
    }
}

#[test]
fn a_troubled_device_beside_a_ring() {
    troubled(PLAIN);
}

#[test]
fn a_troubled_device_by_threads() {
    troubled(Variant {
        means: Means::Thread,
        ..PLAIN
    });
}

#[test]
fn a_troubled_device_staged() {
    troubled(Variant { staged: true, ..PLAIN });
}

#[test]
fn a_machine_says_what_it_has() {
    let support = Support::probe();
    println!("{support:?}");
    let explicit = FileHere::start(Epoch(1), FileHereOptions::default().means(Means::Ring));
    assert_eq!(explicit.is_ok(), support.no_ring.is_none());
}

/// What became of a commit of a file, by a transport of its own.
struct Commits {
    clock: Clock,
    here: FileHere,
    region: Arc<RemoteRegion>,
    asked: u64,
}

impl Commits {
    fn of(file: FileMemory) -> Commits {
        let mut here = FileHere::start(Epoch(5), FileHereOptions::default()).expect("a transport");
        let key = RegionKey {
            epoch: Epoch(5),
            slot: 1,
            secret: 5,
        };
        let (len, place, access) = (file.len(), Place::File, Access::NONE);
        let memory: Arc<dyn Memory> = Arc::new(file);
        let region = Region {
            key,
            memory,
            place,
            access,
        };
        here.register(&region).expect("registered");
        let region = RemoteRegion {
            key,
            len,
            place,
            access,
            grants: Arc::new([]),
        };
        Commits {
            clock: Clock::start(),
            here,
            region: Arc::new(region),
            asked: 0,
        }
    }

    fn commit(&mut self) -> Result<(), Failure> {
        let now = self.clock.now();
        let path = self.here.open(&self.here.capabilities().address.clone(), now);
        let path = path.expect("its own address");
        self.asked += 1;
        let (id, deadline) = (OpId(self.asked), now.saturating_add(Time::from_secs(60)));
        let commit = Body::Commit(Commit::new(Arc::clone(&self.region), 1, 0));
        let accepted = self.here.post(path, &[Op::new(id, deadline, commit)], now);
        assert_eq!(accepted, Ok(1));
        let mut signals = Vec::new();
        loop {
            self.here.poll(self.clock.now(), &mut signals);
            for signal in signals.drain(..) {
                if let Signal::Completed { op, outcome, .. } = signal {
                    assert_eq!(op, id);
                    return outcome.map(drop);
                }
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// The kernel tells of lost writes once, and calls the next attempt a success.
#[test]
fn what_could_not_be_made_to_last_once_is_never_said_to_last() {
    if !has(Need::Fuse) {
        return;
    }
    let failed = Err(Failure::Refused(Refusal::DeviceFailed));
    let fuse = Fuse::mount().expect("/dev/fuse, and the right to mount");
    fuse.trouble(Some(Trouble::Failing));
    let file = FileMemory::open(fuse.path("data"), FileOptions::sized(4096)).expect("a file");
    fuse.trouble(None);
    let mut sound = Commits::of(file);
    assert_eq!((sound.commit(), sound.commit()), (Ok(()), Ok(())));
    fuse.trouble(Some(Trouble::Failing));
    let file = FileMemory::open(fuse.path("lost"), FileOptions::sized(4096)).expect("a file");
    let mut lost = Commits::of(file);
    assert_eq!(lost.commit(), failed);
    fuse.trouble(None);
    assert_eq!((lost.commit(), lost.commit()), (failed, failed));
    // The same of a name: the file has it, and after a crash may have the old one.
    let options = FileOptions::sized(4096).replace(true);
    let file = FileMemory::open(fuse.path("named"), options).expect("a file");
    let mut named = Commits::of(file);
    fuse.directory_fails(true);
    assert_eq!(named.commit(), failed);
    fuse.directory_fails(false);
    assert_eq!((named.commit(), named.commit()), (failed, failed));
}
