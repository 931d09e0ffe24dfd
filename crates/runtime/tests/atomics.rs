//! Atomic operations on a peer's words, over every way that they can go, between real processes.

mod support;

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use support::{Child, LONG, Way};
use weft::{Access, Agent, Error, Failure, Memory, Peer, Refusal, Remote};

const BYTES: usize = 4096;

#[test]
fn second_process() {
    support::second_process();
}

fn connect(agent: &Agent, child: &mut Child) -> (Peer, Remote) {
    assert_eq!(child.ask("fill 0"), "filled");
    let peer = agent.connect(&child.address).expect("the second process answers");
    let remote = peer.region("data", LONG).expect("it publishes its data");
    (peer, remote)
}

/// The smallest executor.
fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn both_operations_over_every_way() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "target", BYTES);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &mut child);
        let last = BYTES as u64 - 8;
        for i in 0..100 {
            assert_eq!(peer.fetch_add(&remote, last, 3).wait().unwrap(), 3 * i, "{way:?}");
        }
        assert_eq!(peer.compare_swap(&remote, last, 299, 1).wait().unwrap(), 300, "{way:?}");
        assert_eq!(
            peer.compare_swap(&remote, last, 300, u64::MAX).wait().unwrap(),
            300,
            "{way:?}"
        );
        assert_eq!(child.ask("count 255"), "8", "{way:?}: a word, and nothing beside it");
        let posted = peer.fetch_add(&remote, last, 1).post().unwrap();
        assert_eq!(block_on(posted).unwrap(), u64::MAX, "{way:?}");
        assert_eq!(child.ask("count 0"), BYTES.to_string(), "{way:?}: it wraps around");
    }
}

#[test]
fn refusals_are_typed_and_certain() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "target", BYTES);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &mut child);
        child.ask("publish-read-only");
        let read_only = peer.region("read-only", LONG).unwrap();
        for (remote, offset, refusal) in [
            (&read_only, 0, Refusal::NotWritable),
            (&remote, BYTES as u64, Refusal::OutOfBounds),
            (&remote, u64::MAX - 7, Refusal::OutOfBounds),
            (&remote, 4, Refusal::Misaligned),
        ] {
            let error = peer.fetch_add(remote, offset, 1).wait().unwrap_err();
            assert_eq!(error.failure(), Some(Failure::Refused(refusal)), "{way:?}: {error}");
            assert!(!error.may_have_happened());
        }
        assert_eq!(child.ask("release"), "true");
        let error = peer.fetch_add(&remote, 0, 1).wait().unwrap_err();
        assert_eq!(
            error.failure(),
            Some(Failure::Refused(Refusal::Released)),
            "{way:?}: {error}"
        );
    }
}

/// A frozen peer is not needed where the memory is mapped. Elsewhere the operation ends at its deadline, does not claim to know
/// what became of it, and does not happen after.
#[test]
fn a_frozen_peer_delays_nothing_past_its_deadline() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "target", BYTES);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &mut child);
        assert_eq!(peer.fetch_add(&remote, 0, 1).wait().unwrap(), 0);
        child.freeze();
        let outcome = peer
            .fetch_add(&remote, 0, 1)
            .deadline(Duration::from_millis(300))
            .wait();
        child.thaw();
        match (way, outcome) {
            (Way::Mapped, outcome) => assert_eq!(outcome.unwrap(), 1),
            (_, Ok(found)) => panic!("{way:?}: a frozen peer answered {found}"),
            (_, Err(error)) => {
                assert_eq!(error.failure(), Some(Failure::Unanswered), "{way:?}: {error}");
                assert!(error.may_have_happened());
            }
        }
        let expected = if way == Way::Mapped { 2 } else { 1 };
        let found = peer.fetch_add(&remote, 0, 0).wait().unwrap();
        assert_eq!(found, expected, "{way:?}: carried out after the deadline");
    }
}

#[test]
fn a_killed_peer_is_told_in_time() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "target", BYTES);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &mut child);
        assert_eq!(peer.fetch_add(&remote, 0, 1).wait().unwrap(), 0);
        child.freeze();
        let pending = (way != Way::Mapped).then(|| peer.fetch_add(&remote, 0, 1).post().unwrap());
        child.kill();
        if let Some(pending) = pending {
            let error = pending.wait().unwrap_err();
            assert!(error.may_have_happened(), "{way:?}: it was sent: {error}");
            assert!(
                matches!(error.failure(), Some(Failure::PathLost { .. })),
                "{way:?}: {error}"
            );
        }
        let late = peer.fetch_add(&remote, 0, 1).deadline(Duration::from_secs(2)).wait();
        let error = late.unwrap_err();
        let known = matches!(error, Error::Atomic(_) | Error::PeerLost { .. });
        assert!(known, "{way:?}: {error}");
    }
}

/// One word, incremented over mapped memory, by asking the owner over the socket and over TCP, by the owner's own calls, and by
/// an increment made out of compare and swap: no two of them find the same, and none is lost.
#[test]
fn all_ways_to_a_word_are_one() {
    const EACH: u64 = 2000;
    for way in [Way::Mapped, Way::Foreign] {
        let secret = |name: &str, transports: &str| {
            let builder = Agent::builder(name).secret("a secret for tests");
            builder.set("transports", transports).start().expect("an agent starts")
        };
        let owner = secret("owner", "shared_memory, tcp");
        let memory = way.memory(&owner, BYTES);
        owner.publish("word", &memory, Access::READ_WRITE).unwrap();
        let workers: Vec<(Agent, Peer, Remote)> =
            [("near", "shared_memory"), ("far", "tcp"), ("swapper", "shared_memory")]
                .into_iter()
                .map(|(name, transport)| {
                    let agent = secret(name, transport);
                    let peer = agent.connect(&owner.address()).expect("the owner answers");
                    assert_eq!(peer.transports(), [transport]);
                    let remote = peer.region("word", LONG).unwrap();
                    (agent, peer, remote)
                })
                .collect();
        let go = AtomicBool::new(false);
        let found: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (agent, peer, remote) in &workers {
                let (go, name) = (&go, agent.name());
                threads.push(scope.spawn(move || {
                    while !go.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    (0..EACH).map(|_| take(peer, remote, name == "swapper")).collect()
                }));
            }
            let (go, memory): (&AtomicBool, &Memory) = (&go, &memory);
            threads.push(scope.spawn(move || {
                go.store(true, Ordering::Release);
                (0..EACH).map(|_| memory.fetch_add(0, 1).unwrap()).collect()
            }));
            threads.into_iter().map(|t| t.join().expect("a worker")).collect()
        });
        let all = EACH * found.len() as u64;
        assert_eq!(
            memory.read_word(0).unwrap(),
            all,
            "{way:?}: increments were lost or doubled"
        );
        let distinct: BTreeSet<u64> = found.into_iter().flatten().collect();
        assert_eq!(distinct.len() as u64, all, "{way:?}: a number was handed out twice");
    }
}

fn take(peer: &Peer, remote: &Remote, by_swapping: bool) -> u64 {
    if !by_swapping {
        return peer.fetch_add(remote, 0, 1).wait().expect("a ticket");
    }
    let mut guess = 0;
    loop {
        match peer
            .compare_swap(remote, 0, guess, guess + 1)
            .wait()
            .expect("an answer")
        {
            found if found == guess => return found,
            found => guess = found,
        }
    }
}

#[test]
fn the_owner_is_told_what_is_wrong() {
    let agent = Way::Mapped.agent("owner");
    let memory = agent.allocate(BYTES).unwrap();
    assert_eq!(memory.fetch_add(8, 5).unwrap(), 0);
    assert_eq!(memory.compare_swap(8, 5, 6).unwrap(), 5);
    assert_eq!(memory.read_word(8).unwrap(), 6);
    for (offset, wanted) in [(3, Refusal::Misaligned), (BYTES as u64, Refusal::OutOfBounds)] {
        let error = memory.fetch_add(offset, 1).unwrap_err();
        assert!(
            matches!(error, Error::Refused { refusal, .. } if refusal == wanted),
            "{error}"
        );
    }
}
