//! A process with agents forks: what its child may do, and what the parent, its peers and its groups notice of that.

mod support;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use support::{Child, LONG, Way, pattern};
use weft::observe::{Observer, ObserverOptions};
use weft::proxy::{ProxyOptions, ProxyTeam};
use weft::rendezvous::{Rendezvous, RendezvousError};
use weft::{
    Access, Agent, Borrowed, Communicator, Datatype, Error, Failure, HostMemory, JoinOptions, Loss, Memory, Peer,
    Pending, Rank, Reduction, Remote, Transfer,
};

const LEN: usize = 1 << 20;

#[test]
fn second_process() {
    support::second_process();
}

/// Runs `work` in a forked child and says how that ended. One that hangs is ended by an alarm.
fn in_child(work: impl FnOnce()) -> i32 {
    // SAFETY: the child runs what the test hands in and ends without returning. Of what its parent's other threads held it touches only
    // what this is about, and the heap, which the C library looks after.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: plain calls.
        unsafe {
            libc::alarm(60);
            let done = catch_unwind(AssertUnwindSafe(work));
            libc::_exit(if done.is_ok() { 0 } else { 1 });
        }
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: a child of ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

fn forked<T: std::fmt::Debug>(outcome: Result<T, Error>) {
    assert!(matches!(outcome, Err(Error::Forked(_))), "{outcome:?}");
}

fn read(peer: &Peer, local: &Memory, remote: &Remote) {
    local.write(0, &vec![0; LEN]);
    peer.read(local, remote).post().unwrap().wait().unwrap();
    assert!(local.to_vec() == pattern(1, LEN), "wrong bytes were read");
}

/// Everything that an application may hold.
struct Held {
    agent: Agent,
    peer: Peer,
    remote: Remote,
    local: Memory,
    transfer: Transfer,
    /// Another agent, which reads what the first publishes.
    other: Agent,
    back: Peer,
    published: Remote,
    landing: Memory,
    borrowed: Option<Borrowed>,
}

impl Held {
    fn new(way: Way, child: &Child) -> Held {
        // A later agent of the same name would take the place of an earlier one.
        let name = |what: &str| format!("{what}-{}", std::process::id());
        let agent = way.agent(&name("first"));
        let peer = agent.connect(&child.address).expect("the second process answers");
        let remote = peer.region("data", LONG).expect("it publishes its data");
        let local = way.memory(&agent, LEN);
        local.write(0, &pattern(1, LEN));
        agent.publish("own", &local, Access::READ_WRITE).unwrap();
        let transfer = peer.read(&local, &remote).post().unwrap();
        transfer.wait().unwrap();
        let other = way.agent(&name("other"));
        let back = other.connect(&agent.address()).unwrap();
        let published = back.region("own", LONG).unwrap();
        let landing = way.memory(&other, LEN);
        let borrowed = (way == Way::Mapped).then(|| back.borrow(&published, LONG).unwrap());
        Held {
            agent,
            peer,
            remote,
            local,
            transfer,
            other,
            back,
            published,
            landing,
            borrowed,
        }
    }

    /// As long as nobody has meddled with it.
    fn use_it(&self) {
        read(&self.peer, &self.local, &self.remote);
        read(&self.back, &self.landing, &self.published);
        self.back
            .write(&self.landing, &self.published)
            .post()
            .unwrap()
            .wait()
            .unwrap();
        self.peer
            .write(&self.local, &self.remote)
            .post()
            .unwrap()
            .wait()
            .unwrap();
        self.back.notify(b"still there").unwrap();
        assert_eq!(self.agent.next_notification(LONG).unwrap().payload, b"still there");
        if let Some(borrowed) = &self.borrowed {
            let mut byte = [0];
            borrowed.read(0, &mut byte).unwrap();
        }
        assert!(self.peer.is_connected() && self.back.is_connected());
    }
}

#[test]
fn a_child_that_ends_everything_leaves_its_parent_alone() {
    for way in Way::ALL {
        let child = Child::spawn(way, "far", LEN);
        let held = Cell::new(Some(Held::new(way, &child)));
        for round in 0..3 {
            let ended = in_child(|| {
                let held = held.take().unwrap();
                held.transfer.cancel();
                held.peer.disconnect();
                if round == 0 {
                    // The agents first, or last.
                    drop((held.agent, held.other));
                }
            });
            assert_eq!(ended, 0, "{way:?}");
            let parents = held.take().unwrap();
            parents.use_it();
            held.set(Some(parents));
        }
        let mut parents = held.take().unwrap();
        drop(parents.borrowed.take());
        // With everything that a child has dropped its copy of.
        parents.agent.withdraw("own").unwrap();
        parents.local.release(LONG).unwrap();
        parents.landing.release(LONG).unwrap();
    }
}

#[test]
fn every_call_in_a_child_is_a_typed_error() {
    for way in Way::ALL {
        let child = Child::spawn(way, "far", LEN);
        let held = Held::new(way, &child);
        let prepared = held.peer.read(&held.local, &held.remote).prepare().unwrap();
        let word = held.peer.fetch_add(&held.remote, 0, 0).post().unwrap();
        word.wait().unwrap();
        let turns = held.other.take_turns();
        let ended = in_child(|| {
            let soon = Duration::from_secs(1);
            let Held { agent, peer, .. } = &held;
            forked(agent.allocate(4096));
            forked(agent.register_vec(vec![0; 4096]));
            forked(agent.register(HostMemory::from_vec(vec![0; 64])));
            forked(agent.publish("again", &held.local, Access::READ));
            forked(agent.withdraw("own"));
            forked(agent.connect(&child.address));
            forked(agent.connect_named("far", soon));
            assert!(agent.peers().is_empty() && agent.counters().is_empty() && agent.metrics().is_empty());
            assert!(agent.next_notification(LONG).is_none() && agent.try_notification().is_none());
            assert_eq!(agent.rails(way.transport()), 0);
            assert!(agent.name().starts_with("first") && !agent.address().is_empty());
            let mut context = Context::from_waker(Waker::noop());
            assert!(
                std::pin::pin!(agent.notified())
                    .as_mut()
                    .poll(&mut context)
                    .is_pending()
            );
            agent.take_turns().turn();
            turns.turn();

            forked(peer.check_process());
            assert!(!peer.is_connected() && peer.transports().is_empty() && peer.region_names().is_empty());
            assert_eq!(peer.paths(way.transport()), 0);
            forked(peer.region("data", soon));
            forked(peer.wait_for_transport(way.transport(), soon));
            forked(peer.notify(b"hello"));
            forked(peer.read(&held.local, &held.remote).post());
            forked(peer.write(&held.local, &held.remote).post());
            forked(prepared.post());
            forked(peer.borrow(&held.remote, LONG));
            forked(peer.fetch_add(&held.remote, 0, 1).wait());
            forked(peer.compare_swap(&held.remote, 0, 1, 2).post());

            let mut transfer = held.transfer.clone();
            assert!(transfer.is_ended() && word.is_ended());
            forked(transfer.wait());
            forked(transfer.poll().unwrap());
            forked(transfer.wait_for(soon).unwrap());
            let Poll::Ready(awaited) = std::pin::Pin::new(&mut transfer).poll(&mut context) else {
                panic!("what cannot end has ended");
            };
            forked(awaited);
            forked(word.wait());
            word.cancel();
            assert!(word.wait().unwrap_err().may_have_happened());

            forked(held.local.release(soon));
            forked(held.local.fetch_add(0, 1));
            forked(held.local.compare_swap(0, 1, 2));
            forked(held.local.read_word(0));
            if let Some(borrowed) = &held.borrowed {
                assert_eq!(borrowed.remaining(), None);
                forked(borrowed.read(0, &mut [0]));
            }
        });
        assert_eq!(ended, 0, "{way:?}");
        drop(turns);
        held.use_it();
    }
}

#[test]
fn a_child_shares_what_weft_allocated_and_has_a_copy_of_what_it_did_not() {
    let agent = Way::Mapped.agent("first");
    let allocated = agent.allocate(LEN).unwrap();
    let foreign = agent.register_vec(pattern(1, LEN)).unwrap();
    allocated.write(0, &pattern(1, LEN));
    let ended = in_child(|| {
        for memory in [&allocated, &foreign] {
            assert!(memory.to_vec() == pattern(1, LEN));
            memory.write(0, &[77]);
        }
        drop((allocated.clone(), foreign.clone()));
    });
    assert_eq!(ended, 0);
    assert_eq!((allocated.to_vec()[0], foreign.to_vec()[0]), (77, pattern(1, 1)[0]));
}

#[test]
fn a_child_has_neither_the_sockets_of_an_agent_nor_the_words_that_its_peers_read() {
    let child = Child::spawn(Way::Bounce, "far", LEN);
    let sockets = || {
        let entries = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let mut sockets: Vec<_> = links
            .filter(|link| link.to_string_lossy().starts_with("socket:"))
            .collect();
        sockets.sort();
        sockets
    };
    let words = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        ["weft-ledger", "weft-hazard", "weft-bounce"].map(|name| maps.contains(name))
    };
    let before = sockets();
    let held = Held::new(Way::Bounce, &child);
    let tcp = Way::Tcp.agent("tcp");
    let local = tcp.connect(&Way::Tcp.agent("far").address());
    assert!(sockets().len() > before.len());
    assert_eq!(words(), [true; 3]);
    let ended = in_child(|| {
        // Other tests of this process may have had sockets before, too: none of theirs is here either.
        let new: Vec<_> = sockets()
            .into_iter()
            .filter(|socket| !before.contains(socket))
            .collect();
        assert_eq!(new, Vec::<std::path::PathBuf>::new());
        assert_eq!(words(), [false; 3]);
    });
    assert_eq!(ended, 0);
    held.use_it();
    drop(local);
}

#[test]
fn a_dead_owner_is_told_at_once_though_a_child_of_it_lives() {
    for way in Way::ALL {
        let mut owner = Child::spawn(way, "doomed", LEN);
        // Silence would tell in the end, but not here.
        let agent = way.builder("initiator").set("silence_max", "10min").start().unwrap();
        let peer = agent.connect(&owner.address).unwrap();
        let remote = peer.region("data", LONG).unwrap();
        let local = way.memory(&agent, LEN);
        read(&peer, &local, &remote);
        let orphan: i32 = owner.ask("fork").parse().unwrap();
        let post = || peer.read(&local, &remote).deadline(Duration::from_secs(300)).post();
        let started = Instant::now();
        owner.kill();
        let error = loop {
            assert!(started.elapsed() < LONG, "{way:?}: nobody was told");
            match post().and_then(|transfer| transfer.wait_for(LONG).expect("an end")) {
                Ok(_) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => break error,
            }
        };
        let lost = |failure| {
            matches!(
                failure,
                Failure::PathLost {
                    loss: Loss::ClosedByPeer,
                    ..
                }
            )
        };
        let told = matches!(error, Error::PeerLost { .. }) || error.failure().is_some_and(lost);
        assert!(told, "{way:?}: {error}");
        while peer.is_connected() {
            assert!(started.elapsed() < LONG, "{way:?}: the session outlived its peer");
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: what the owner has forked, which ends by itself otherwise.
        unsafe {
            assert_eq!(libc::kill(orphan, 0), 0, "{way:?}: the child was to live");
            libc::kill(orphan, libc::SIGKILL);
        }
    }
}

#[test]
fn a_child_makes_agents_of_its_own() {
    for way in Way::ALL {
        let child = Child::spawn(way, "far", LEN);
        let held = Held::new(way, &child);
        let ended = in_child(|| {
            let own = Held::new(way, &child);
            own.use_it();
            forked(held.peer.notify(b"not mine"));
            // Its own child, in turn.
            let grandchild = in_child(|| {
                forked(own.peer.notify(b"not mine"));
                Held::new(way, &child).use_it();
            });
            assert_eq!(grandchild, 0);
            own.use_it();
        });
        assert_eq!(ended, 0, "{way:?}");
        held.use_it();
    }
}

#[test]
fn locks_that_were_held_at_the_fork_hang_no_child() {
    for way in Way::ALL {
        let child = Child::spawn(way, "far", LEN);
        let held = Held::new(way, &child);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Threads that are always in the middle of something.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    read(&held.peer, &held.local, &held.remote);
                }
            });
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let memory = held.other.allocate(4096).unwrap();
                    held.other.publish("now and then", &memory, Access::READ).unwrap();
                    held.other.withdraw("now and then").unwrap();
                }
            });
            let mut ends = Vec::new();
            for _ in 0..50 {
                ends.push(in_child(|| {
                    forked(held.peer.notify(b"hello"));
                    forked(held.transfer.wait());
                    forked(held.other.allocate(4096));
                    drop((held.local.clone(), held.landing.clone(), held.agent.clone()));
                    // Whatever lock an agent needs, its own is free.
                    let own = way.agent("own");
                    own.allocate(4096).unwrap();
                }));
            }
            stop.store(true, Ordering::Relaxed);
            assert!(ends.iter().all(|end| *end == 0), "{way:?}: {ends:?}");
        });
        held.use_it();
    }
}

/// Two ranks of one group, in this process.
fn pair(name: &str) -> [Communicator; 2] {
    let agents = [0, 1].map(|rank| {
        let builder = Way::Mapped.builder(&format!("{name}-{rank}"));
        builder.set("rendezvous", "process").start().unwrap()
    });
    std::thread::scope(|scope| {
        let joining = [0, 1].map(|rank| {
            let options = JoinOptions::new(name, Rank(rank), 2);
            let agent = &agents[rank as usize];
            scope.spawn(move || Communicator::join(agent, options).unwrap())
        });
        joining.map(|joining| joining.join().unwrap())
    })
}

fn sum_of_both(ranks: &[Communicator; 2]) {
    std::thread::scope(|scope| {
        for rank in ranks {
            scope.spawn(|| {
                let memory = rank.agent().allocate(64 << 10).unwrap();
                memory.write(0, &1f32.to_ne_bytes().repeat(16 << 10));
                rank.all_reduce(&memory, &memory, Datatype::F32, Reduction::Sum)
                    .run()
                    .unwrap();
                assert!(memory.to_vec() == 2f32.to_ne_bytes().repeat(16 << 10));
            });
        }
    });
}

#[test]
fn a_group_goes_on_though_a_child_drops_its_copy_of_it() {
    let ranks = pair("group");
    sum_of_both(&ranks);
    // A call that is under way at the fork.
    let waiting: Pending = ranks[0].barrier().start().unwrap();
    let held = Cell::new(Some((ranks, waiting)));
    let ended = in_child(|| {
        let (ranks, waiting) = held.take().unwrap();
        let memory = ranks[0].agent().clone();
        forked(memory.allocate(64));
        for rank in &ranks {
            forked(rank.barrier().run());
            forked(rank.barrier().start());
            forked(rank.barrier().ways());
            forked(rank.split(Some(0), 0));
            forked(rank.shrink(LONG));
            forked(rank.grow("larger", 3));
            forked(Communicator::join(rank.agent(), JoinOptions::new("new", Rank(0), 1)));
        }
        assert!(waiting.is_ended());
        forked(waiting.wait());
        forked(waiting.poll().unwrap());
        forked(waiting.wait_for(LONG).unwrap());
        drop(waiting);
        drop(ranks);
    });
    assert_eq!(ended, 0);
    let (ranks, waiting) = held.take().unwrap();
    ranks[1].barrier().run().unwrap();
    waiting.wait().unwrap();
    sum_of_both(&ranks);
}

#[test]
fn a_child_asks_nothing_of_its_parents_proxy() {
    let agent = Agent::builder(&format!("team-{}", std::process::id())).start().unwrap();
    let options = ProxyOptions {
        data_bytes: 4096,
        ..ProxyOptions::new("forked", vec![None])
    };
    let team = ProxyTeam::join(&agent, options).unwrap();
    let mut caller = team.caller(0).unwrap();
    let (data, word) = (team.data_at(), team.signal_at(0).unwrap());
    assert_eq!(caller.fetch_add(0, word, 1).unwrap(), 0);
    let held = Cell::new(Some((team, caller)));
    for drops in [true, false] {
        let ended = in_child(|| {
            let (team, mut caller) = held.take().unwrap();
            forked(caller.put(0, data, &[1; 100]));
            forked(caller.fetch_add(0, word, 1));
            // Also of what has come about long ago.
            forked(caller.wait(word, 1, 0));
            forked(caller.quiet());
            forked(caller.barrier(0));
            forked(team.caller(0));
            forked(team.check());
            team.abort();
            if !drops {
                std::mem::forget((team, caller));
            }
        });
        assert_eq!(ended, 0);
        let (team, mut caller) = held.take().unwrap();
        assert_eq!(caller.fetch_add(0, word, 1).unwrap(), if drops { 1 } else { 2 });
        caller.put(0, data, &[7; 100]).unwrap();
        caller.quiet().unwrap();
        caller.barrier(0).unwrap();
        team.check().unwrap();
        held.set(Some((team, caller)));
    }
}

#[test]
fn files_of_a_parent_are_not_its_childs() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for io in ["auto", "threads"] {
        let name = format!("files-{io}-{}", std::process::id());
        let agent = Agent::builder(&name).set("file.io", io).start().unwrap();
        let path = folder.path().join(io);
        let new = weft::FileOptions::sized(LEN as u64).replace(true);
        let file = agent.open_file(&path, new).unwrap();
        let memory = agent.register_vec(pattern(3, LEN)).unwrap();
        let spill = || agent.copy(&memory, &file).unwrap().post();
        spill().unwrap().wait().unwrap();
        for _ in 0..2 {
            // One that is under way while its process forks is the parent's.
            let under_way = spill().unwrap();
            let ended = in_child(|| {
                forked(agent.copy(&memory, &file).and_then(|copy| copy.post()));
                forked(agent.open_file(folder.path().join("other"), weft::FileOptions::sized(1)));
                let own = Agent::builder(&format!("{name}-child"))
                    .set("file.io", io)
                    .start()
                    .unwrap();
                let of_own = folder.path().join(format!("{io}-child"));
                let of_own = own.open_file(of_own, weft::FileOptions::sized(LEN as u64)).unwrap();
                let from = own.register_vec(pattern(4, LEN)).unwrap();
                own.copy(&from, &of_own).unwrap().post().unwrap().wait().unwrap();
                own.close();
                // What is dropped here takes nothing away: not the file that has no name yet either.
                drop((file.clone(), agent.clone()));
                agent.close();
            });
            assert_eq!(ended, 0);
            under_way.wait().unwrap();
            assert!(std::fs::read(folder.path().join(format!("{io}-child"))).unwrap() == pattern(4, LEN));
        }
        assert!(!path.exists());
        agent
            .copy(&memory, &file)
            .unwrap()
            .commit()
            .post()
            .unwrap()
            .wait()
            .unwrap();
        assert!(std::fs::read(&path).unwrap() == pattern(3, LEN));
    }
}

#[test]
fn names_and_observers_of_a_parent_are_not_its_childs() {
    let directory = tempfile::tempdir().unwrap();
    let names = [
        Rendezvous::in_process("job"),
        Rendezvous::by_directory(directory.path(), Default::default()).unwrap(),
    ];
    let registered = names
        .each_ref()
        .map(|names| names.register("name", "address", weft::Epoch(1)).unwrap());
    let options = ObserverOptions {
        metrics: true,
        metrics_listen: "127.0.0.1:0".parse().ok(),
        ..ObserverOptions::new("observed")
    };
    let observer = Observer::start(options).unwrap();
    let held = Cell::new(Some((registered, observer)));
    let ended = in_child(|| {
        let (registered, observer) = held.take().unwrap();
        for names in &names {
            let found = names.lookup("name", Duration::ZERO);
            assert!(matches!(found, Err(RendezvousError::Forked(_))), "{found:?}");
        }
        // Those of this process are its own.
        let own = Rendezvous::in_process("job");
        assert!(own.list().unwrap().is_empty());
        let _name = own.register("name", "address", weft::Epoch(2)).unwrap();
        observer.flush();
        assert!(observer.metrics().is_empty());
        drop((registered, observer));
    });
    assert_eq!(ended, 0);
    let (_registered, observer) = held.take().unwrap();
    for names in &names {
        assert_eq!(names.lookup("name", Duration::ZERO).unwrap().epoch, weft::Epoch(1));
    }
    assert!(observer.metrics().contains("weft_events_dropped_total"));
}

#[test]
fn an_agent_that_is_dropped_after_forks_ends_as_ever() {
    let held: Vec<Arc<Agent>> = (0..3)
        .map(|n| Arc::new(Way::Tcp.agent(&format!("agent-{n}"))))
        .collect();
    assert_eq!(in_child(|| drop(held.clone())), 0);
    drop(held);
}

#[test]
fn a_store_is_its_process_own() {
    use weft::store::{Block, BlockShape, FileTier, HitRule, Part, Space, Store, Wanted};
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let agent = Agent::builder("store")
        .set("transports", "shared_memory")
        .start()
        .unwrap();
    let shape = BlockShape::new(vec![Part::new("kv", 4096, HitRule::AllBlocks)]).unwrap();
    let open = || {
        let tier = FileTier::new(folder.path(), 1 << 20);
        Store::builder(&agent, &shape).memory(1 << 20).files(tier).open()
    };
    let store = open().unwrap();
    let names = [
        "model",
        "revision",
        "tokenizer",
        "dtype",
        "quantisation",
        "scales",
        "layout",
        "lora",
        "positions",
        "tenant",
    ];
    let fields = names
        .into_iter()
        .map(|name| (name, "x"))
        .chain([("block_tokens", "16")]);
    let space = Space::new(fields).unwrap();
    let id = space.key(b"block").unwrap();
    let memory = agent.register_vec(pattern(3, 4096)).unwrap();
    let answer = store.put(&space, &memory, &[Block::new(id, 0)]).unwrap();
    answer.wait().unwrap();
    let held = store.hold(&[id]).unwrap();
    let status = in_child(|| {
        forked(store.stat());
        forked(store.match_prefix(&[id]));
        forked(store.put(&space, &memory, &[Block::new(id, 0)]));
        forked(store.get(&memory, &[Wanted { id, offset: 0 }]));
        forked(store.hold(&[id]));
        forked(store.evict(&[id]));
        forked(store.purge("x"));
        forked(answer.wait());
        // What the child drops is its own copy.
        drop((held, store.clone()));
    });
    assert_eq!(status, 0);
    assert_eq!(store.match_prefix(&[id]).unwrap(), 1);
    drop(store);
    let store = open().expect("the lock was given back, though a child had a copy of it");
    assert_eq!(store.match_prefix(&[id]).unwrap(), 1);
}
