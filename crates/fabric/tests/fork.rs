//! Forked children of this very process: what they keep, and what they do not.

use std::cell::Cell;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use weft_fabric::fork::{Forked, NotInherited, OfProcess, Origin, PerProcess};

/// How a child comes about.
#[derive(Clone, Copy, Debug)]
enum Making {
    /// By the C library, which calls handlers.
    Fork,
    /// By the kernel alone.
    Clone,
}

const MAKINGS: [Making; 2] = [Making::Fork, Making::Clone];

/// A child that runs `work` and says whether it was content.
struct Child(libc::pid_t);

impl Child {
    fn start(making: Making, work: impl FnOnce() -> bool) -> Child {
        // SAFETY: the child runs only what the test hands in, and ends without returning. An alarm ends one that hangs.
        let pid = unsafe {
            match making {
                Making::Fork => libc::fork(),
                Making::Clone => libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t,
            }
        };
        if pid == 0 {
            // SAFETY: as above.
            unsafe {
                libc::alarm(60);
                libc::_exit(if work() { 0 } else { 1 });
            }
        }
        assert!(pid > 0, "{}", io::Error::last_os_error());
        Child(pid)
    }

    fn end(self) -> i32 {
        let mut status = 0;
        // SAFETY: a child of ours that nobody else waits for.
        assert_eq!(unsafe { libc::waitpid(self.0, &mut status, 0) }, self.0);
        status
    }
}

/// Tells that it was dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_belongs_to_a_process_is_out_of_reach_of_its_children() {
    for making in MAKINGS {
        let dropped = Arc::new(AtomicBool::new(false));
        let held = Cell::new(Some(OfProcess::new(Dropped(dropped.clone()))));
        let child = Child::start(making, || {
            let held = held.take().unwrap();
            let refused = matches!(held.get(), Err(Forked));
            drop(held);
            refused && !dropped.load(Ordering::Relaxed)
        });
        assert_eq!(child.end(), 0, "{making:?}");
        assert!(held.take().unwrap().get().is_ok());
        assert!(dropped.load(Ordering::Relaxed), "in its own process it is dropped");
    }
}

#[test]
fn children_and_their_children_are_processes_of_their_own() {
    let parent = Origin::here();
    let child = Child::start(Making::Fork, || {
        let own = Origin::here();
        let known = !parent.is_here() && own.is_here() && own != parent;
        let grandchild = Child::start(Making::Clone, || {
            let third = Origin::here();
            !parent.is_here() && !own.is_here() && third.is_here()
        });
        known && grandchild.end() == 0
    });
    assert_eq!(child.end(), 0);
    assert!(parent.is_here());
}

#[test]
fn a_lock_that_was_held_at_the_fork_is_not_waited_for() {
    static NAMES: PerProcess<Mutex<Vec<&str>>> = PerProcess::new();
    let names = NAMES.get_or_make(Mutex::default);
    let mut held = names.lock().unwrap();
    held.push("of the parent");
    let child = Child::start(Making::Fork, || {
        let mut own = NAMES.get_or_make(Mutex::default).lock().unwrap();
        own.push("of the child");
        own.len() == 1
    });
    assert_eq!(child.end(), 0);
    drop(held);
    assert_eq!(*NAMES.get_or_make(Mutex::default).lock().unwrap(), ["of the parent"]);
}

#[test]
fn a_child_keeps_no_connection_of_its_parent() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let near = NotInherited::new(near);
    let number = near.as_raw_fd();
    // Each of the two processes takes it out of a copy of its own.
    let near = Cell::new(Some(near));
    let (mut told, tell) = UnixStream::pair().unwrap();
    let child = Child::start(Making::Fork, || {
        // The number is taken, so that nobody is given it while somebody remembers it; dropping it changes nothing.
        let taken = is_open(number) && !is_socket(number);
        drop(near.take());
        let still_taken = is_open(number);
        // It lives until the parent has seen that its connection is over.
        let mut byte = [0];
        taken && still_taken && (&tell).read(&mut byte).unwrap() == 1
    });
    drop(near.take());
    let mut byte = [0];
    assert_eq!(
        far.read(&mut byte).unwrap(),
        0,
        "the connection ends with the parent's end of it"
    );
    io::Write::write_all(&mut told, &[1]).unwrap();
    assert_eq!(child.end(), 0);
}

#[test]
fn forks_in_the_middle_of_opening_and_closing_leave_no_socket_to_a_child() {
    let stop = AtomicBool::new(false);
    let opened = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let socket: NotInherited<OwnedFd> = NotInherited::open(new_socket).unwrap();
                    assert!(is_socket(socket.as_raw_fd()));
                    opened.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..200 {
            let child = Child::start(Making::Fork, || (3..4096).all(|fd| !is_unnamed_datagram_socket(fd)));
            assert_eq!(child.end(), 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(opened.into_inner() > 0);
}

#[test]
fn a_child_that_no_handler_saw_lets_go_when_it_begins_on_its_own() {
    let socket = NotInherited::open(new_socket).unwrap();
    let number = socket.as_raw_fd();
    let child = Child::start(Making::Clone, || {
        let inherited = is_socket(number);
        Origin::here();
        inherited && !is_socket(number)
    });
    assert_eq!(child.end(), 0);
    assert!(is_socket(number));
}

/// A kind of socket that nobody else here has.
fn new_socket() -> io::Result<OwnedFd> {
    // SAFETY: no preconditions; a fresh descriptor that nobody else owns.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        match fd {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(std::os::fd::FromRawFd::from_raw_fd(fd)),
        }
    }
}

fn is_open(fd: i32) -> bool {
    // SAFETY: a plain call on a number.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

fn is_socket(fd: i32) -> bool {
    socket_kind(fd).is_some()
}

fn is_unnamed_datagram_socket(fd: i32) -> bool {
    socket_kind(fd) == Some(libc::SOCK_DGRAM)
}

fn socket_kind(fd: i32) -> Option<i32> {
    let mut kind = 0;
    let mut len = size_of_val(&kind) as libc::socklen_t;
    // SAFETY: the result has a place of the length given.
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_TYPE, (&raw mut kind).cast(), &mut len) };
    (rc == 0).then_some(kind)
}
