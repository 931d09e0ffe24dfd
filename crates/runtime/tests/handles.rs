//! What handles promise: how long memory stays published, what sizes and owners a transfer takes, what closing an agent ends, and that
//! every wait can be interrupted.

use std::cell::Cell;
use std::io::Read;
use std::net::TcpListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use weft::{
    Access, Agent, AgentBuilder, Communicator, Datatype, Direction, Error, HostMemory, JoinOptions, LegError, Memory,
    Peer, Rank, Reduction, Spans,
};

/// Longer than anything here takes, and shorter than a wait that nobody ends.
const LONG: Duration = Duration::from_secs(20);
/// What waits are told that have to be ended by something else.
const FOR_EVER: Duration = Duration::from_secs(3600);

fn builder(name: &str) -> AgentBuilder {
    Agent::builder(name).secret("a secret for tests")
}

fn agent(name: &str) -> Agent {
    builder(name).start().unwrap()
}

/// Two agents, and the second as the first sees it.
fn pair(transport: &str) -> (Agent, Agent, Peer) {
    let [near, far] = ["near", "far"].map(|name| builder(name).set("transports", transport).start().unwrap());
    let peer = near.connect(&far.address()).unwrap();
    (near, far, peer)
}

/// Memory that says when it is given back.
fn tracked(bytes: &'static [u8]) -> (HostMemory, Arc<AtomicBool>) {
    struct Owner(
        #[expect(dead_code, reason = "held for what its end does")] Box<[u8]>,
        Arc<AtomicBool>,
    );
    impl Drop for Owner {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Release);
        }
    }
    let freed = Arc::new(AtomicBool::new(false));
    let mut owned: Box<[u8]> = bytes.into();
    let (start, len) = (owned.as_mut_ptr(), owned.len());
    // SAFETY: the owner keeps the bytes where they are until it is dropped, and nobody else touches them.
    let host = unsafe { HostMemory::from_raw(start, len, Box::new(Owner(owned, freed.clone()))) };
    (host, freed)
}

fn read(reader: &Agent, peer: &Peer, name: &str, bytes: usize) -> Result<Vec<u8>, Error> {
    let local = reader.allocate(bytes)?;
    peer.read(&local, &peer.region(name, LONG)?).post()?.wait()?;
    Ok(local.to_vec())
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_published_outlives_its_handle_until_it_is_withdrawn() {
    for transport in ["shared_memory", "tcp"] {
        let (near, far, peer) = pair(transport);
        let (host, freed) = tracked(b"kept by the agent");
        far.publish("kv", &far.register(host).unwrap(), Access::READ).unwrap();
        assert_eq!(read(&near, &peer, "kv", 17).unwrap(), b"kept by the agent");
        assert!(!freed.load(Ordering::Acquire));
        far.withdraw("kv").unwrap();
        eventually("withdrawn memory is given back", || freed.load(Ordering::Acquire));
        eventually("the name is gone", || peer.region_names().is_empty());
        // The name is free again, and memory that somebody holds is there after it has been withdrawn.
        let held = far.register_vec(vec![7; 4]).unwrap();
        far.publish("kv", &held, Access::READ).unwrap();
        assert_eq!(read(&near, &peer, "kv", 4).unwrap(), [7; 4]);
        far.withdraw("kv").unwrap();
        assert_eq!(held.to_vec(), [7; 4]);
    }
}

#[test]
fn what_is_published_is_given_back_when_it_is_released_or_its_agent_closes() {
    let (_near, far, peer) = pair("tcp");
    let (host, freed) = tracked(b"released");
    let memory = far.register(host).unwrap();
    far.publish("one name", &memory, Access::READ).unwrap();
    far.publish("another", &memory, Access::READ).unwrap();
    memory.release(LONG).unwrap();
    drop(memory);
    eventually("released memory is given back", || freed.load(Ordering::Acquire));
    let (host, freed) = tracked(b"closed");
    far.publish("kv", &far.register(host).unwrap(), Access::READ).unwrap();
    peer.region("kv", LONG).unwrap();
    far.close();
    assert!(freed.load(Ordering::Acquire));
    let (host, freed) = tracked(b"dropped");
    let alone = agent("alone");
    alone
        .publish("kv", &alone.register(host).unwrap(), Access::READ)
        .unwrap();
    drop(alone);
    assert!(freed.load(Ordering::Acquire));
}

#[test]
fn sizes_that_differ_are_an_error_unless_spans_say_otherwise() {
    let (near, far, peer) = pair("tcp");
    far.publish("kv", &far.register_vec(vec![3; 64]).unwrap(), Access::READ_WRITE)
        .unwrap();
    let remote = peer.region("kv", LONG).unwrap();
    for len in [63, 65, 1] {
        let local = near.allocate(len).unwrap();
        let legs = || peer.transfer(Direction::Read).whole_leg(&local, &remote);
        for described in [peer.read(&local, &remote), peer.write(&local, &remote), legs()] {
            let error = described.post().unwrap_err();
            let expected = LegError::UnequalSizes {
                local: len as u64,
                remote: 64,
            };
            assert!(matches!(&error, Error::Leg(found) if *found == expected), "{error}");
            let text = error.to_string();
            assert!(text.contains(&format!("{len} bytes")) && text.contains("64"), "{text}");
        }
        let some = Spans::contiguous(0, len.min(64) as u64);
        let read = peer.read(&local, &remote).spans(some.clone(), some);
        assert_eq!(read.post().unwrap().wait().unwrap().bytes, len.min(64) as u64);
    }
}

#[test]
fn memory_of_another_agent_is_told_as_that() {
    let (near, far, peer) = pair("tcp");
    let other = agent("a third one");
    let (memory, own) = (other.allocate(64).unwrap(), far.allocate(64).unwrap());
    far.publish("kv", &own, Access::READ_WRITE).unwrap();
    let remote = peer.region("kv", LONG).unwrap();
    let expect = |error: Error, user: &str| {
        let names = matches!(&error, Error::OtherAgent { registered_with, used_with }
            if registered_with == "a third one" && used_with == user);
        assert!(names, "{error:?}");
    };
    expect(peer.read(&memory, &remote).post().unwrap_err(), "near");
    expect(peer.write(&memory, &remote).post().unwrap_err(), "near");
    expect(far.publish("theirs", &memory, Access::READ).unwrap_err(), "far");
    let groups = ranks(1, "tcp");
    let mine: Memory = groups[0].agent().allocate(64).unwrap();
    let called = groups[0]
        .all_reduce(&memory, &mine, Datatype::F32, Reduction::Sum)
        .run();
    let user = groups[0].agent().name().to_owned();
    expect(called.unwrap_err(), &user);
    drop(near);
}

/// The ranks of a group, all in this process, each with an agent of its own.
fn ranks(size: u32, transports: &str) -> Vec<Communicator> {
    let job = new_job();
    std::thread::scope(|scope| {
        let join = |rank: u32| {
            let job = &job;
            move || {
                let agent = rank_of(job, rank).set("transports", transports).start().unwrap();
                Communicator::join(&agent, JoinOptions::new("all", Rank(rank), size)).unwrap()
            }
        };
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(join(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn new_job() -> String {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    format!("handles-{}", JOBS.fetch_add(1, Ordering::Relaxed))
}

fn rank_of(job: &str, rank: u32) -> AgentBuilder {
    builder(&format!("{job}-{rank}"))
        .set("rendezvous", "process")
        .set("rendezvous_job", job)
}

#[test]
fn closing_an_agent_ends_its_communicators_and_the_other_ranks_are_told() {
    for transports in ["shared_memory,tcp", "tcp"] {
        let groups = ranks(3, transports);
        std::thread::scope(|scope| {
            // The others are in a call that takes an hour, if nobody tells them.
            let others: Vec<_> = groups[1..]
                .iter()
                .map(|group| scope.spawn(|| group.barrier().deadline(FOR_EVER).run()))
                .collect();
            std::thread::sleep(Duration::from_millis(50));
            let begun = Instant::now();
            groups[0].agent().close();
            for other in others {
                let Err(Error::Collective(failed)) = other.join().unwrap() else {
                    panic!("a rank is missing");
                };
                assert_eq!(failed.blamed(), Rank(0), "{failed}");
            }
            assert!(begun.elapsed() < LONG);
        });
        assert!(matches!(groups[0].barrier().run(), Err(Error::Stopped)));
        assert!(matches!(
            groups[0].barrier().start().unwrap().wait(),
            Err(Error::Stopped)
        ));
        assert!(matches!(groups[0].agent().allocate(1), Err(Error::Stopped)));
        groups[0].agent().close();
    }
}

#[test]
fn closing_an_agent_ends_the_call_that_it_is_in() {
    for transports in ["shared_memory,tcp", "tcp"] {
        let groups = ranks(2, transports);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| groups[0].barrier().deadline(FOR_EVER).run());
            let memory = groups[0].agent().allocate(8).unwrap();
            let started = groups[0].receive(&memory, Rank(1), Datatype::U8).deadline(FOR_EVER);
            let started = started.start().unwrap();
            std::thread::sleep(Duration::from_millis(50));
            groups[0].agent().close();
            assert!(matches!(waiting.join().unwrap(), Err(Error::Stopped)));
            assert!(matches!(started.wait(), Err(Error::Stopped)));
        });
        assert_eq!(told(&groups[1]), Rank(0));
    }
}

/// Whom a rank blames that calls on, where another one has given up.
fn told(group: &Communicator) -> Rank {
    // What the other had sent before it gave up may be enough for one call.
    let calls = (0..2).map(|_| group.barrier().deadline(FOR_EVER).run());
    let failed = calls.filter_map(Result::err).next().expect("a rank is missing");
    let Error::Collective(failed) = failed else {
        panic!("{failed}");
    };
    failed.blamed()
}

#[test]
fn an_orderly_close_is_not_a_loss() {
    let directory = tempfile::tempdir().unwrap();
    let watched = |name: &str| {
        let trace = directory.path().join(name);
        builder(name)
            .set("metrics_listen", "127.0.0.1:0")
            .set("trace_file", trace.display())
            .start()
            .unwrap()
    };
    for near_closes in [true, false] {
        let (near, far) = (watched("near"), watched("far"));
        let peer = near.connect(&far.address()).unwrap();
        peer.wait_for_transport("tcp", LONG).unwrap();
        match near_closes {
            true => peer.disconnect(),
            false => far.close(),
        }
        let trace = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        let expect_closed = |agent: &Agent| {
            eventually("the session is closed", || {
                agent.metrics().contains("weft_sessions_closed_total 1\n")
            });
            let metrics = agent.metrics();
            assert!(metrics.contains("weft_sessions_lost_total 0\n"), "{metrics}");
            assert!(!metrics.contains("weft_paths_lost_total{"), "{metrics}");
            assert!(!trace(agent.name()).contains("lost"), "{}", trace(agent.name()));
        };
        // The end that is told of it sees the paths go one by one.
        let told = match near_closes {
            true => &far,
            false => &near,
        };
        eventually("the paths are closed", || {
            let trace = trace(told.name());
            trace.matches("path closed").count() == trace.matches("path opened").count()
        });
        expect_closed(told);
        if near_closes {
            expect_closed(&near);
        }
    }
}

/// Does something whose wait is interrupted after a moment, and tells how that ended.
fn interrupted<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let begun = Instant::now();
    let asked = Rc::new(Cell::new(0));
    let counted = asked.clone();
    let is_wanted = Rc::new(move || {
        counted.set(counted.get() + 1);
        counted.get() >= 3
    });
    let outcome = weft::interruptible(is_wanted, work);
    assert!(begun.elapsed() < LONG);
    assert_eq!(asked.get(), 3, "nobody asks again after the answer");
    outcome
}

#[test]
fn every_wait_can_be_interrupted() {
    let (near, far, peer) = pair("shared_memory,tcp");
    let is_interrupted = |outcome: Result<(), Error>, what: &str| {
        assert!(matches!(outcome, Err(Error::Interrupted)), "{what}: {outcome:?}");
    };
    is_interrupted(
        interrupted(|| peer.region("nobody publishes this", FOR_EVER).map(drop)),
        "a region",
    );
    is_interrupted(
        interrupted(|| peer.wait_for_transport("pigeons", FOR_EVER)),
        "a transport",
    );
    // Somebody who listens and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    is_interrupted(
        interrupted(|| near.connect_within(&address, FOR_EVER).map(drop)),
        "a session",
    );
    // The attempt is given up, and its connections with it.
    silent.set_nonblocking(true).unwrap();
    while let Ok((mut stream, _)) = silent.accept() {
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).expect("the end of the connection");
    }
    let memory = far.allocate(64).unwrap();
    far.publish("lent", &memory, Access::READ).unwrap();
    let borrowed = peer.borrow(&peer.region("lent", LONG).unwrap(), FOR_EVER).unwrap();
    is_interrupted(interrupted(|| memory.release(FOR_EVER)), "the release of memory");
    drop(borrowed);
}

#[test]
fn groups_that_form_or_work_can_be_interrupted() {
    let job = new_job();
    let alone = rank_of(&job, 1).start().unwrap();
    let options = |rank| JoinOptions {
        timeout: FOR_EVER,
        ..JoinOptions::new("all", Rank(rank), 2)
    };
    // The second waits for the name of the first, the first for the word of the second.
    for rank in [1, 0] {
        let joined = interrupted(|| Communicator::join(&alone, options(rank)).map(drop));
        assert!(matches!(joined, Err(Error::Interrupted)), "rank {rank}: {joined:?}");
    }
    for transports in ["shared_memory,tcp", "tcp"] {
        let groups = ranks(2, transports);
        let called = interrupted(|| groups[0].barrier().deadline(FOR_EVER).run());
        assert!(matches!(called, Err(Error::Interrupted)), "{called:?}");
        // The call was given up, and the other rank learns of it when it comes.
        assert_eq!(told(&groups[1]), Rank(0));
        assert!(matches!(groups[0].barrier().run(), Err(Error::Collective(_))));
        let rest = interrupted(|| groups[0].shrink(FOR_EVER).map(drop));
        assert!(matches!(rest, Err(Error::Interrupted)), "{rest:?}");
    }
}

#[test]
fn a_wait_for_a_call_that_was_started_is_interrupted_and_the_call_goes_on() {
    let groups = ranks(2, "shared_memory,tcp");
    let started = groups[0].barrier().deadline(FOR_EVER).start().unwrap();
    assert!(matches!(interrupted(|| started.wait()), Err(Error::Interrupted)));
    groups[1].barrier().deadline(LONG).run().unwrap();
    started.wait().unwrap();
}
