//! Memory that was mapped from a file which then becomes shorter: whoever touches it is killed, and so nobody may.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use weft::{Access, Agent, Error, Failure, HostMemory, Memory, Peer, Refusal, Remote};

const LEN: usize = 3 << 20;
/// What is left of a file.
const LEFT: u64 = 300_000;
const LONG: Duration = Duration::from_secs(20);

/// How the two ends reach each other; the kind of memory that the far end has is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Mapped,
    Foreign,
    Bounce,
    Tcp,
}

const WAYS: [Way; 4] = [Way::Mapped, Way::Foreign, Way::Bounce, Way::Tcp];

impl Way {
    fn agent(self, name: &str) -> Agent {
        let transport = if self == Way::Tcp { "tcp" } else { "shared_memory" };
        let foreign = if self == Way::Bounce { "bounce" } else { "process_vm" };
        let builder = Agent::builder(name)
            .secret("a secret for tests")
            .set("transports", transport);
        builder.set("shared_memory.foreign", foreign).start().unwrap()
    }

    fn memory(self, agent: &Agent) -> Memory {
        match self {
            Way::Mapped => agent.allocate(LEN).unwrap(),
            _ => agent.register_vec(vec![0; LEN]).unwrap(),
        }
    }
}

/// A mapping of a file, unmapped when dropped.
struct Mapped {
    start: *mut u8,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapped {}
// SAFETY: it offers no access at all.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: what was mapped, and nobody uses any more.
        unsafe { libc::munmap(self.start.cast(), LEN) };
    }
}

/// Memory of a file of this length, registered.
fn of_file(agent: &Agent) -> (Memory, File) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN as u64).unwrap();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), LEN, prot, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(start, libc::MAP_FAILED);
    let start = start.cast::<u8>();
    // SAFETY: the mapping is valid until its owner is dropped, as far as the file is there, which is what this is about.
    let host = unsafe { HostMemory::from_raw(start, LEN, Box::new(Mapped { start })) };
    (agent.register(host).unwrap(), file)
}

/// Two agents, and memory of each that is sound.
struct Pair {
    way: Way,
    far: Agent,
    near: Agent,
    peer: Peer,
    sound: Memory,
    remote: Remote,
    _published: Memory,
}

impl Pair {
    fn new(way: Way) -> Pair {
        let (far, near) = (way.agent("far"), way.agent("near"));
        let published = way.memory(&far);
        far.publish("sound", &published, Access::READ_WRITE).unwrap();
        let peer = near.connect(&far.address()).unwrap();
        let remote = peer.region("sound", LONG).unwrap();
        let sound = way.memory(&near);
        let pair = Pair {
            way,
            far,
            near,
            peer,
            sound,
            remote,
            _published: published,
        };
        pair.goes_on();
        pair
    }

    fn transfer(&self, write: bool, local: &Memory, remote: &Remote, checksum: bool) -> Result<(), Error> {
        let described = match write {
            true => self.peer.write(local, remote),
            false => self.peer.read(local, remote),
        };
        described.checksum(checksum).post()?.wait().map(drop)
    }

    /// Other memory, the session and the path are as they were.
    fn goes_on(&self) {
        for write in [false, true] {
            self.transfer(write, &self.sound, &self.remote, true).unwrap();
        }
        assert_eq!(
            self.peer
                .paths(if self.way == Way::Tcp { "tcp" } else { "shared_memory" }),
            1
        );
    }
}

fn refusal(outcome: Result<(), Error>) -> Option<Refusal> {
    match outcome.unwrap_err().failure() {
        Some(Failure::Refused(refusal)) => Some(refusal),
        _ => None,
    }
}

fn each_case(mut case: impl FnMut(&Pair, bool, bool)) {
    for way in WAYS {
        let pair = Pair::new(way);
        for write in [false, true] {
            for checksum in [false, true] {
                case(&pair, write, checksum);
                pair.goes_on();
            }
        }
    }
}

#[test]
fn an_initiator_whose_file_is_cut_short_is_told_so() {
    each_case(|pair, write, checksum| {
        let (local, file) = of_file(&pair.near);
        pair.transfer(write, &local, &pair.remote, checksum).unwrap();
        file.set_len(LEFT).unwrap();
        let outcome = pair.transfer(write, &local, &pair.remote, checksum);
        let Pair { way, .. } = pair;
        assert_eq!(refusal(outcome), Some(Refusal::NoMemory), "{way:?} {write} {checksum}");
        // What is left of the file can still be used.
        let part = weft::Spans::contiguous(0, LEFT);
        let described = match write {
            true => pair.peer.write(&local, &pair.remote),
            false => pair.peer.read(&local, &pair.remote),
        };
        described
            .spans(part.clone(), part)
            .checksum(checksum)
            .post()
            .unwrap()
            .wait()
            .unwrap();
    });
}

#[test]
fn a_target_whose_file_is_cut_short_refuses() {
    each_case(|pair, write, checksum| {
        let (published, file) = of_file(&pair.far);
        pair.far.publish("file", &published, Access::READ_WRITE).unwrap();
        let remote = pair.peer.region("file", LONG).unwrap();
        pair.transfer(write, &pair.sound, &remote, checksum).unwrap();
        file.set_len(LEFT).unwrap();
        let outcome = pair.transfer(write, &pair.sound, &remote, checksum);
        let expected = match pair.way {
            Way::Bounce | Way::Tcp => Refusal::NoMemory,
            // The kernel says only that nothing can be reached there.
            Way::Mapped | Way::Foreign => Refusal::Unsupported,
        };
        assert_eq!(refusal(outcome), Some(expected), "{:?} {write} {checksum}", pair.way);
        pair.far.withdraw("file").unwrap();
    });
}

#[test]
fn files_that_come_and_go_under_traffic_kill_nobody() {
    for way in WAYS {
        let pair = Pair::new(way);
        let (published, far_file) = of_file(&pair.far);
        pair.far.publish("file", &published, Access::READ_WRITE).unwrap();
        let remote = pair.peer.region("file", LONG).unwrap();
        let (local, near_file) = of_file(&pair.near);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for (file, len) in [
                        (&far_file, LEFT),
                        (&near_file, LEFT),
                        (&far_file, LEN as u64),
                        (&near_file, LEN as u64),
                    ] {
                        file.set_len(len).unwrap();
                        std::thread::sleep(Duration::from_micros(300));
                    }
                }
            });
            for round in 0..60 {
                // Whatever comes of each, it is an answer. A path may be lost where a page is back before it has been looked at.
                let _ = pair.transfer(round % 2 == 0, &local, &remote, round % 3 == 0);
            }
            stop.store(true, Ordering::Relaxed);
        });
        far_file.set_len(LEN as u64).unwrap();
        near_file.set_len(LEN as u64).unwrap();
        pair.peer
            .wait_for_transport(if way == Way::Tcp { "tcp" } else { "shared_memory" }, LONG)
            .unwrap();
        pair.transfer(false, &local, &remote, true).unwrap();
    }
}

#[test]
fn an_atomic_operation_on_a_word_that_is_gone_is_refused() {
    for way in [Way::Foreign, Way::Tcp] {
        let pair = Pair::new(way);
        let (published, file) = of_file(&pair.far);
        pair.far.publish("file", &published, Access::READ_WRITE).unwrap();
        let remote = pair.peer.region("file", LONG).unwrap();
        assert_eq!(pair.peer.fetch_add(&remote, LEN as u64 - 8, 5).wait().unwrap(), 0);
        file.set_len(LEFT).unwrap();
        let outcome = pair.peer.fetch_add(&remote, LEN as u64 - 8, 5).wait();
        assert_eq!(refusal(outcome.map(drop)), Some(Refusal::NoMemory), "{way:?}");
        assert!(matches!(
            published.fetch_add(LEN as u64 - 8, 5),
            Err(Error::Refused {
                refusal: Refusal::NoMemory,
                ..
            })
        ));
        pair.goes_on();
    }
}
