//! The contract, line by line, over every way that bytes can go, between real processes.
//!
//! The numbers are those of docs/contract.md.

mod support;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use support::{Child, LONG, Way, pattern};
use weft::{Access, Agent, Error, Failure, Loss, Peer, Refusal, Remote, Spans};

const BIG: usize = 64 << 20;

#[test]
fn second_process() {
    support::second_process();
}

fn connect(agent: &Agent, child: &Child) -> (Peer, Remote) {
    let peer = agent.connect(&child.address).expect("the second process answers");
    let remote = peer.region("data", LONG).expect("it publishes its data");
    (peer, remote)
}

fn failure(error: &Error) -> Failure {
    error
        .failure()
        .unwrap_or_else(|| panic!("not the end of a transfer: {error}"))
}

// ---- the plain case, so that the others mean something

#[test]
fn bytes_go_both_ways() {
    for way in Way::ALL {
        let len = 3 << 20;
        let mut child = Child::spawn(way, "target", len);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, len);
        for checksum in [false, true] {
            local.write(0, &vec![0; len]);
            let summary = peer
                .read(&local, &remote)
                .checksum(checksum)
                .post()
                .unwrap()
                .wait()
                .unwrap();
            assert_eq!(summary.bytes, len as u64, "{way:?}");
            assert_eq!(summary.transport(), way.transport());
            assert!(local.to_vec() == pattern(1, len), "{way:?}: wrong bytes were read");
        }
        for (seed, checksum) in [(2, false), (3, true)] {
            local.write(0, &pattern(seed, len));
            peer.write(&local, &remote)
                .checksum(checksum)
                .post()
                .unwrap()
                .wait()
                .unwrap();
            assert_eq!(
                child.ask(&format!("matches {seed}")),
                "true",
                "{way:?}: wrong bytes were written"
            );
        }
    }
}

#[test]
fn scattered_blocks_go_both_ways() {
    for way in Way::ALL {
        let (block, blocks) = (4096u64, 1024u64);
        let len = (block * blocks) as usize;
        let mut child = Child::spawn(way, "target", len);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, len);
        // Two permutations without a common stride.
        let near: Vec<u64> = (0..blocks).map(|i| (i * 389 + 7) % blocks).collect();
        let far: Vec<u64> = (0..blocks).map(|i| (i * 173 + 91) % blocks).collect();
        let spans = |order: &[u64]| Spans::paged(0, block, order.iter().copied());
        let prepared = peer
            .read(&local, &remote)
            .spans(spans(&near), spans(&far))
            .prepare()
            .unwrap();
        let source = pattern(1, len);
        for _ in 0..3 {
            local.write(0, &vec![0; len]);
            prepared.post().unwrap().wait().unwrap();
            let got = local.to_vec();
            for (n, f) in near.iter().zip(&far) {
                let (n, f) = ((n * block) as usize, (f * block) as usize);
                assert!(got[n..n + 4096] == source[f..f + 4096], "{way:?}: a block is wrong");
            }
        }
        peer.write(&local, &remote)
            .spans(spans(&near), spans(&far))
            .post()
            .unwrap()
            .wait()
            .unwrap();
        assert_eq!(child.ask("matches 1"), "true", "{way:?}");
    }
}

// ---- 1: every request ends by its deadline, whatever the peer does

#[test]
fn contract_1_a_frozen_peer_does_not_hold_a_request_past_its_deadline() {
    for way in Way::ALL {
        let child = Child::spawn(way, "frozen", BIG);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, BIG);
        // So that mappings are in place and only the transfer itself is at stake.
        peer.read(&local, &remote).post().unwrap().wait().unwrap();
        child.freeze();
        for write in [false, true] {
            let builder = if write {
                peer.write(&local, &remote)
            } else {
                peer.read(&local, &remote)
            };
            let started = Instant::now();
            let outcome = builder.deadline(Duration::from_millis(300)).post().unwrap().wait();
            match way {
                // The peer's threads are not needed for these.
                Way::Mapped | Way::Foreign | Way::Verbs => drop(outcome.unwrap()),
                Way::Bounce | Way::Tcp => assert_eq!(failure(&outcome.unwrap_err()), Failure::Expired, "{way:?}"),
            }
            assert!(started.elapsed() < LONG, "{way:?} took {:?}", started.elapsed());
        }
        child.thaw();
    }
}

#[test]
fn contract_1_a_killed_peer_is_told_at_once_in_both_directions() {
    for way in Way::ALL {
        for write in [false, true] {
            let mut child = Child::spawn(way, "doomed", BIG);
            let agent = way.agent("initiator");
            let (peer, remote) = connect(&agent, &child);
            let local = way.memory(&agent, BIG);
            let post = || {
                let builder = if write {
                    peer.write(&local, &remote)
                } else {
                    peer.read(&local, &remote)
                };
                builder.deadline(Duration::from_secs(60)).post()
            };
            let mut under_way: VecDeque<_> = (0..64).map(|_| post().unwrap()).collect();
            under_way.pop_front().unwrap().wait().unwrap();
            let started = Instant::now();
            child.kill();
            let mut errors = Vec::new();
            while let Some(transfer) = under_way.pop_front() {
                match transfer.wait() {
                    // The kill takes as long to be felt as the kernel takes to end a process: until then there is always something under way.
                    Ok(_) => under_way.extend(post().ok()),
                    Err(error) => errors.push(error),
                }
                assert!(
                    started.elapsed() < LONG,
                    "{way:?}: the deadline was not needed to find out"
                );
            }
            let error = errors.last().expect("something was under way");
            // 5: the error says with whom, over what, how far, and why.
            let text = error.to_string();
            assert!(text.contains("doomed") && text.contains(way.transport()), "{text}");
            assert!(
                matches!(
                    failure(error),
                    Failure::PathLost {
                        loss: Loss::ClosedByPeer,
                        ..
                    }
                ),
                "{text}"
            );
            // The handle knows too, and says so instead of hanging.
            let give_up = Instant::now() + LONG;
            while peer.is_connected() {
                assert!(Instant::now() < give_up, "{way:?}: the session outlived its peer");
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(matches!(post(), Err(Error::PeerLost { .. })), "{way:?}");
        }
    }
}

// ---- 2: after the end, not one more byte

#[test]
fn contract_2_a_cancelled_transfer_leaves_its_memory_alone() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "target", BIG);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, BIG);
        for round in 0..8u32 {
            local.write(0, &vec![0; BIG]);
            let transfer = peer.read(&local, &remote).post().unwrap();
            std::thread::sleep(Duration::from_micros(u64::from(round) * 700));
            transfer.cancel();
            let _ = transfer.wait();
            let poison = vec![0xEE; BIG];
            local.write(0, &poison);
            std::thread::sleep(Duration::from_millis(60));
            assert!(
                local.to_vec() == poison,
                "{way:?}: a cancelled read wrote after its end"
            );
        }
        for round in 0..8u32 {
            child.ask("fill 0");
            local.write(0, &vec![1; BIG]);
            let transfer = peer.write(&local, &remote).post().unwrap();
            std::thread::sleep(Duration::from_micros(u64::from(round) * 700));
            transfer.cancel();
            let _ = transfer.wait();
            local.write(0, &vec![0xEE; BIG]);
            let landed = child.ask("count 1");
            std::thread::sleep(Duration::from_millis(60));
            assert_eq!(
                child.ask("count 238"),
                "0",
                "{way:?}: a cancelled write read its source after its end"
            );
            assert_eq!(
                child.ask("count 1"),
                landed,
                "{way:?}: a cancelled write went on at the target after its end"
            );
        }
    }
}

#[test]
fn contract_2_an_expired_transfer_leaves_its_memory_alone_when_the_peer_thaws() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "frozen", BIG);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, BIG);
        child.ask("fill 0");
        for write in [false, true] {
            for _ in 0..3 {
                local.write(0, &vec![1; BIG]);
                let builder = if write {
                    peer.write(&local, &remote)
                } else {
                    peer.read(&local, &remote)
                };
                let transfer = builder.deadline(Duration::from_millis(120)).post().unwrap();
                std::thread::sleep(Duration::from_millis(2));
                child.freeze();
                let ended = transfer.wait();
                let poison = vec![0xEE; BIG];
                local.write(0, &poison);
                child.thaw();
                std::thread::sleep(Duration::from_millis(100));
                assert!(local.to_vec() == poison, "{way:?}: written after the end ({ended:?})");
                assert_eq!(child.ask("count 238"), "0", "{way:?}: read after the end ({ended:?})");
            }
        }
    }
}

// ---- 3: released memory and earlier lives are refused

#[test]
fn contract_3_released_memory_is_refused() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "target", 1 << 20);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, 1 << 20);
        peer.read(&local, &remote).post().unwrap().wait().unwrap();
        child.ask("withdraw");
        for write in [false, true] {
            let builder = if write {
                peer.write(&local, &remote)
            } else {
                peer.read(&local, &remote)
            };
            let error = builder.post().unwrap().wait().unwrap_err();
            assert_eq!(failure(&error), Failure::Refused(Refusal::Released), "{way:?}: {error}");
        }
        assert_eq!(child.ask("release"), "true");
    }
}

#[test]
fn contract_3_keys_of_an_earlier_life_are_refused() {
    for way in Way::ALL {
        let mut first = Child::spawn(way, "phoenix", 1 << 20);
        let agent = way.agent("initiator");
        let (_, stale) = connect(&agent, &first);
        first.kill();
        let second = Child::spawn(way, "phoenix", 1 << 20);
        let (peer, fresh) = connect(&agent, &second);
        let local = way.memory(&agent, 1 << 20);
        let error = peer.read(&local, &stale).post().unwrap().wait().unwrap_err();
        assert_eq!(
            failure(&error),
            Failure::Refused(Refusal::StaleEpoch),
            "{way:?}: {error}"
        );
        peer.read(&local, &fresh).post().unwrap().wait().unwrap();
    }
}

#[test]
fn contract_3_only_what_was_granted_is_possible() {
    for way in Way::ALL {
        let mut child = Child::spawn(way, "target", 1 << 20);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, 1 << 20);
        child.ask("publish-read-only");
        let read_only = peer.region("read-only", LONG).unwrap();
        peer.read(&local, &read_only).post().unwrap().wait().unwrap();
        let error = peer.write(&local, &read_only).post().unwrap().wait().unwrap_err();
        assert_eq!(
            failure(&error),
            Failure::Refused(Refusal::NotWritable),
            "{way:?}: {error}"
        );
        // A span outside its region is found before anything is sent.
        let far = Spans::contiguous((1 << 20) - 10, 20);
        assert!(matches!(
            peer.read(&local, &remote).spans(Spans::contiguous(0, 20), far).post(),
            Err(Error::Leg(_))
        ));
    }
}

// ---- 4: a notification comes after its data, once, whether or not the sender looks

#[test]
fn contract_4_a_notification_comes_after_its_data() {
    for way in Way::ALL {
        let len = 1 << 20;
        let mut child = Child::spawn(way, "target", len);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, len);
        let rounds = 30;
        child.tell(&format!("expect {rounds}"));
        for round in 0..rounds {
            local.write(0, &vec![round as u8; len]);
            let transfer = peer
                .write(&local, &remote)
                .notify(round.to_string().as_bytes())
                .post()
                .unwrap();
            // Every other time the sender does not look at its transfer at all until the answer is there.
            if round % 2 == 0 {
                transfer.wait().unwrap();
            }
            assert_eq!(
                agent.next_notification(LONG).expect("an answer").payload,
                b"next",
                "{way:?}"
            );
        }
        assert_eq!(child.answer(), "all good", "{way:?}");
    }
}

// ---- 5: an error says with whom, over what, how far, and why

#[test]
fn contract_5_an_error_tells_what_is_done_and_what_is_not() {
    for way in [Way::Bounce, Way::Tcp] {
        let child = Child::spawn(way, "frozen", BIG);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        let local = way.memory(&agent, BIG);
        let transfer = peer
            .read(&local, &remote)
            .deadline(Duration::from_millis(400))
            .post()
            .unwrap();
        std::thread::sleep(Duration::from_millis(3));
        child.freeze();
        let Err(Error::Transfer(failed)) = transfer.wait() else {
            // The whole of it went through before the freeze: nothing to tell.
            continue;
        };
        let error = &failed.error;
        assert_eq!((failed.peer.as_str(), error.transport), ("frozen", way.transport()));
        assert_eq!((error.cause, error.bytes_total), (Failure::Expired, BIG as u64));
        let bytes = |parts: &[(usize, std::ops::Range<u64>)]| parts.iter().map(|(_, r)| r.end - r.start).sum::<u64>();
        assert_eq!(bytes(&error.done), error.bytes_done, "{way:?}");
        assert_eq!(bytes(&error.done) + bytes(&error.undone), BIG as u64, "{way:?}");
        let (got, truth) = (local.to_vec(), pattern(1, BIG));
        for (_, range) in &error.done {
            let range = range.start as usize..range.end as usize;
            assert!(
                got[range.clone()] == truth[range],
                "{way:?}: what is called done is not there"
            );
        }
        child.thaw();
    }
}

// ---- 6: a checksum finds what the wire has changed

#[test]
fn contract_6_a_flipped_byte_on_the_wire_is_an_error_never_data() {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};

    let len = 4 << 20;
    let child = Child::spawn(Way::Tcp, "target", len);
    let target = child
        .address
        .split("tcp:")
        .nth(1)
        .unwrap()
        .split(',')
        .next()
        .unwrap()
        .to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let through = listener.local_addr().unwrap().to_string();
    // Counts down over the bytes that come back; at zero, one bit changes. Negative: leave everything alone.
    let flip_at = Arc::new(AtomicI64::new(-1));
    let flips = flip_at.clone();
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = TcpStream::connect(&target).unwrap();
            let carry = |mut from: TcpStream, mut to: TcpStream, flip: Option<Arc<AtomicI64>>| {
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 1 << 16];
                    while let Ok(n @ 1..) = from.read(&mut buffer) {
                        if let Some(flip) = &flip {
                            let before = flip.load(Ordering::SeqCst);
                            if before >= 0 && n > 32 << 10 {
                                if before < n as i64 {
                                    buffer[before as usize] ^= 0x10;
                                    flip.store(-1, Ordering::SeqCst);
                                } else {
                                    flip.store(before - n as i64, Ordering::SeqCst);
                                }
                            }
                        }
                        if to.write_all(&buffer[..n]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            };
            carry(near.try_clone().unwrap(), far.try_clone().unwrap(), None);
            carry(far, near, Some(flips.clone()));
        }
    });
    let agent = Way::Tcp.builder("initiator").set("tcp.connections", 1).start().unwrap();
    let peer = agent.connect(&through).unwrap();
    let remote = peer.region("data", LONG).unwrap();
    let local = agent.allocate(len).unwrap();
    let truth = pattern(1, len);
    let mut caught = 0;
    for place in [20_000, 70_000, 1_000_000, 3_000_000] {
        local.write(0, &vec![0; len]);
        flip_at.store(place, Ordering::SeqCst);
        match peer
            .read(&local, &remote)
            .checksum(true)
            .deadline(Duration::from_secs(5))
            .post()
            .unwrap()
            .wait()
        {
            Ok(summary) => {
                assert!(local.to_vec() == truth, "a flipped byte was taken for data");
                // Found and fetched again.
                caught += u32::from(summary.retries > 0);
            }
            Err(error) => assert!(
                matches!(
                    failure(&error),
                    Failure::ChecksumMismatch | Failure::PathLost { .. } | Failure::Expired
                ),
                "{error}"
            ),
        }
        assert_eq!(flip_at.load(Ordering::SeqCst), -1, "the byte was flipped");
        if !peer.is_connected() {
            break;
        }
    }
    assert!(caught > 0, "no flip was found by the checksum");
}

// ---- 7: settings

#[test]
fn contract_7_unknown_settings_are_rejected_with_the_nearest_name() {
    let error = Agent::builder("x").set("tcp.conections", 2).start().unwrap_err();
    assert!(error.to_string().contains("tcp.connections"), "{error}");
}

// ---- 8: many threads, and one bad peer slows no other

#[test]
fn contract_8_the_agent_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Agent>();
    shared::<Peer>();
    shared::<weft::Transfer>();
    shared::<weft::Memory>();
    for way in Way::ALL {
        let len = 1 << 20;
        let child = Child::spawn(way, "target", len);
        let agent = way.agent("initiator");
        let (peer, remote) = connect(&agent, &child);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let local = way.memory(&agent, len);
                    for _ in 0..20 {
                        peer.read(&local, &remote).post().unwrap().wait().unwrap();
                    }
                    assert!(local.to_vec() == pattern(1, len));
                });
            }
        });
    }
}

#[test]
fn contract_8_a_frozen_and_a_dead_peer_slow_no_other() {
    for way in Way::ALL {
        let len = 4 << 20;
        let agent = way.agent("initiator");
        let (frozen, mut dead, healthy) = (
            Child::spawn(way, "frozen", len),
            Child::spawn(way, "dead", len),
            Child::spawn(way, "healthy", len),
        );
        let local = way.memory(&agent, len);
        let (frozen_peer, frozen_remote) = connect(&agent, &frozen);
        let (dead_peer, dead_remote) = connect(&agent, &dead);
        let (peer, remote) = connect(&agent, &healthy);
        frozen.freeze();
        dead.kill();
        let _stuck: Vec<_> = (0..32)
            .flat_map(|_| {
                [
                    frozen_peer.write(&local, &frozen_remote).post(),
                    dead_peer.write(&local, &dead_remote).post(),
                ]
            })
            .collect();
        let mine = way.memory(&agent, len);
        for _ in 0..20 {
            peer.read(&mine, &remote)
                .deadline(Duration::from_secs(10))
                .post()
                .unwrap()
                .wait()
                .unwrap();
        }
        assert!(mine.to_vec() == pattern(1, len), "{way:?}");
        frozen.thaw();
    }
}

// ---- bad input

#[test]
fn a_wrong_secret_is_refused_on_both_sides() {
    for way in [Way::Mapped, Way::Tcp] {
        let mut child = Child::spawn(way, "target", 4096);
        let stranger = way.builder("stranger").secret("another secret").start().unwrap();
        let started = Instant::now();
        let error = stranger
            .connect_within(&child.address, Duration::from_secs(10))
            .unwrap_err();
        assert!(matches!(error, Error::Connect(_)), "{error}");
        assert!(
            started.elapsed() < Duration::from_secs(9),
            "{way:?}: told before the deadline"
        );
        assert_eq!(child.ask("peers"), "0");
    }
}

#[test]
fn nobody_there_is_a_typed_error() {
    let agent = Way::Tcp.agent("initiator");
    let error = agent
        .connect_within("127.0.0.1:1", Duration::from_millis(500))
        .unwrap_err();
    assert!(matches!(error, Error::Connect(_)), "{error}");
    let error = agent
        .connect_within("shared_memory:@nobody", Duration::from_millis(500))
        .unwrap_err();
    assert!(matches!(error, Error::Connect(_)), "{error}");
}

#[test]
fn access_that_was_not_published_is_not_there() {
    let agent = Way::Tcp.agent("owner");
    let memory = agent.allocate(4096).unwrap();
    agent.publish("kept", &memory, Access::READ).unwrap();
    assert!(matches!(
        agent.publish("kept", &memory, Access::READ),
        Err(Error::Region(_))
    ));
    assert!(matches!(agent.withdraw("never"), Err(Error::Region(_))));
}

// ---- an idle agent

#[test]
fn an_idle_agent_uses_no_cpu() {
    let mut child = Child::spawn(Way::Mapped, "idle", 4096);
    let agent = Agent::builder("initiator")
        .secret("a secret for tests")
        .start()
        .unwrap();
    let (_peer, _remote) = connect(&agent, &child);
    // The other tests of this binary share the process, so the second process is the one measured.
    let before = child.cpu_ticks();
    std::thread::sleep(Duration::from_secs(3));
    let ticks = child.cpu_ticks() - before;
    assert!(ticks <= 1, "an idle agent used {ticks} ticks of 10 ms in 3 s");
    assert_eq!(child.ask("peers"), "1");
}
