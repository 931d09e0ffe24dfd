//! What can take long at the beginning and at the end of a path, because a peer may not be there.
//!
//! The kernel resolves the neighbour's address while it makes an address handle or connects a queue pair, and gives up only after a
//! second or more. It destroys a queue pair only when the last packet of it has left, and packets to a neighbour that does not
//! answer are kept for seconds. Threads of the rail's own wait for that; whoever drives the rail gets to know the result when it is
//! there.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use weft_protocol::PathId;

use super::address::Doorstep;
use super::device::ProtectionDomain;
use super::introduction::Letter;
use super::queue::{AddressHandle, Connecting, QueuePair};
use super::rail::Rail;

/// How many peers that do not answer can be waited for at a time before others have to wait as well.
const THREADS: usize = 4;

/// Something to do for a path.
#[derive(Debug)]
pub(super) enum Errand {
    Reach(Reach),
    /// To end a queue pair, unless somebody else still has a share of it.
    Destroy {
        path: PathId,
        pair: Arc<QueuePair>,
    },
}

/// To find the way to a peer.
#[derive(Debug)]
pub(super) struct Reach {
    /// Who wants it; nobody, where a letter is to be sent to somebody without a path.
    pub path: Option<PathId>,
    pub peer: Doorstep,
    pub traffic_class: u8,
    pub service_level: u8,
    /// Make a handle for letters to the peer.
    pub route: bool,
    pub connect: Option<(Arc<QueuePair>, Connecting)>,
    /// To be sent once there is a handle.
    pub letter: Option<Letter>,
}

/// What has come of it.
#[derive(Debug)]
pub(super) enum Outcome {
    Reached(Reached),
    /// No device touches anything any more through the queue pair of this path.
    Destroyed {
        path: PathId,
    },
}

/// What has come of looking for a peer.
#[derive(Debug)]
pub(super) struct Reached {
    pub path: Option<PathId>,
    pub route: Option<Arc<AddressHandle>>,
    pub letter: Option<(Letter, Doorstep)>,
    pub connected: Option<io::Result<()>>,
}

/// Runs errands.
#[derive(Debug)]
pub(super) struct Setup {
    errands: Sender<Errand>,
    outcomes: Receiver<Outcome>,
    under_way: usize,
    bell: Arc<OwnedFd>,
}

impl Setup {
    pub(super) fn start(domain: &Arc<ProtectionDomain>, rail: &Rail) -> io::Result<Setup> {
        let (errands, inbox) = mpsc::channel::<Errand>();
        let (outbox, outcomes) = mpsc::channel();
        let inbox = Arc::new(Mutex::new(inbox));
        // SAFETY: a system call without pointers; what it returns is checked before it is owned.
        let bell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if bell < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else knows.
        let bell = Arc::new(unsafe { OwnedFd::from_raw_fd(bell) });
        for _ in 0..THREADS {
            let (inbox, outbox, bell) = (Arc::clone(&inbox), outbox.clone(), Arc::clone(&bell));
            let (domain, rail) = (Arc::clone(domain), rail.clone());
            // Nobody waits for them: they end when the rail does, or as soon after as the kernel lets go of them.
            std::thread::Builder::new()
                .name("weft-verbs-setup".to_owned())
                .spawn(move || {
                    loop {
                        let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
                        let Ok(errand) = next else { return };
                        if outbox.send(errand.run(&domain, &rail)).is_err() {
                            return;
                        }
                        ring(&bell);
                    }
                })?;
        }
        Ok(Setup {
            errands,
            outcomes,
            under_way: 0,
            bell,
        })
    }

    /// Readable when something has come of an errand, until [`Setup::hush`].
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(super) fn send(&mut self, errand: Errand) {
        // There is a thread to receive it as long as this value lives.
        if self.errands.send(errand).is_ok() {
            self.under_way += 1;
        }
    }

    /// Errands of which nothing has come yet.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// The next outcome, if there is one.
    pub(super) fn next(&mut self) -> Option<Outcome> {
        if self.under_way == 0 {
            return None;
        }
        let outcome = self.outcomes.try_recv().ok()?;
        self.under_way -= 1;
        Some(outcome)
    }

    /// Takes back what the bell has told. Whoever does looks for outcomes afterwards.
    pub(super) fn hush(&self) {
        let mut count = [0u8; 8];
        // SAFETY: the buffer is ours, and as long as an event counter.
        unsafe { libc::read(self.bell.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

impl Errand {
    fn run(self, domain: &Arc<ProtectionDomain>, rail: &Rail) -> Outcome {
        match self {
            Errand::Reach(reach) => Outcome::Reached(reach.run(domain, rail)),
            Errand::Destroy { path, pair } => {
                drop(pair);
                Outcome::Destroyed { path }
            }
        }
    }
}

impl Reach {
    fn run(self, domain: &Arc<ProtectionDomain>, rail: &Rail) -> Reached {
        let route = self
            .route
            .then(|| AddressHandle::new(domain, rail, &self.peer, self.traffic_class, self.service_level).ok());
        let connected = self.connect.map(|(pair, how)| pair.connect(rail, &self.peer, &how));
        Reached {
            path: self.path,
            letter: self.letter.map(|letter| (letter, self.peer)),
            route: route.flatten().map(Arc::new),
            connected,
        }
    }
}

fn ring(bell: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes of ours. A counter that is full is readable already.
    unsafe { libc::write(bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}
