//! A host without descriptors left. In a process of its own, because the limit is the process's.

use std::os::fd::AsRawFd;
use std::time::Duration;

use weft_fabric::tcp::{Tcp, TcpOptions};
use weft_fabric::{Clock, Live};
use weft_protocol::{Epoch, Signal, Transport};

#[test]
fn a_listener_without_descriptors_rests_and_comes_back() {
    let clock = Clock::start();
    let options = TcpOptions {
        connections: 1,
        ..TcpOptions::default()
    };
    let mut target = Tcp::start(options.clone(), Epoch(1), clock).unwrap();
    let mut opener = Tcp::start(options, Epoch(2), clock).unwrap();
    let mut signals = Vec::new();
    let address = target.capabilities().address.clone();
    opener.open(&address, clock.now()).unwrap();

    let limit = forbid_descriptors();
    for _ in 0..50 {
        opener.poll(clock.now(), &mut signals);
        target.poll(clock.now(), &mut signals);
    }
    assert!(signals.is_empty(), "{signals:?}");
    assert!(!is_readable(&target), "the listener wakes its transport for nothing");
    assert!(target.next_timeout().is_some(), "the listener would rest for ever");

    restore(limit);
    let give_up = clock.now().saturating_add(weft_plan::Time::from_secs(20));
    while !signals.iter().any(|s| matches!(s, Signal::Accepted { .. })) {
        opener.poll(clock.now(), &mut signals);
        target.poll(clock.now(), &mut signals);
        assert!(clock.now() < give_up, "never accepted; heard {signals:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_readable(tcp: &Tcp) -> bool {
    let mut poll = libc::pollfd {
        fd: tcp.wake_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry is given and one is there.
    unsafe { libc::poll(&mut poll, 1, 0) > 0 }
}

/// Forbids any further descriptor, and returns the limit that was.
fn forbid_descriptors() -> libc::rlimit {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is ours.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    let none = libc::rlimit {
        rlim_cur: 0,
        rlim_max: limit.rlim_max,
    };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
    limit
}

fn restore(limit: libc::rlimit) {
    // SAFETY: the structure is ours.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}
