//! Device memory in transfers: between agents, through host memory where a transport carries no other, and among an agent's own places.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft::{Access, Agent, Device, DeviceMemory, Error, Failure, Flag, GpuError, Memory, Peer, Place, Spans};
use weft_testing::{Need, has};

const LEN: u64 = 5 << 20;

fn agent(name: &str, transports: &str) -> Agent {
    let name = format!("{name}-{}-{transports}", std::process::id());
    let agent = Agent::builder(&name)
        .secret("of the tests of devices")
        .set("transports", transports);
    agent.listen("127.0.0.1:0").start().expect("an agent")
}

fn pattern(seed: u64, len: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (at.wrapping_mul(0x9e37_79b9).wrapping_add(seed * 77) >> 5) as u8)
        .collect()
}

/// Host memory of both kinds, and a device's.
fn memories(agent: &Agent) -> [(&'static str, Memory); 3] {
    [
        ("device", agent.allocate_device(0, LEN).expect("memory of a device")),
        ("allocated", agent.allocate(LEN as usize).expect("memory")),
        ("foreign", agent.register_vec(vec![0; LEN as usize]).expect("memory")),
    ]
}

#[test]
fn every_pair_of_places_over_shared_memory() {
    if !has(Need::Gpu) {
        return;
    }
    let (owner, user) = (agent("owner", "shared_memory"), agent("user", "shared_memory"));
    let peer = user.connect(&owner.address()).expect("a session");
    let (theirs, ours) = (memories(&owner), memories(&user));
    // Blocks in an order of their own at both ends, and of a size that no vector fits.
    let blocks = |by: u64| Spans::paged(0, 5_000, (0..1_000).map(|nth| nth * by % 1_000));
    for (there, remote) in &theirs {
        owner.publish(there, remote, Access::READ_WRITE).expect("published");
        let region = peer.region(there, Duration::from_secs(5)).expect("a region");
        for (here, local) in &ours {
            for checksum in [false, true] {
                local.write(0, &pattern(1, LEN));
                remote.write(0, &pattern(2, LEN));
                let written = peer.write(local, &region).checksum(checksum).post().expect("posted");
                written
                    .wait()
                    .unwrap_or_else(|error| panic!("{here} to {there}: {error}"));
                assert!(remote.to_vec() == pattern(1, LEN), "{here} to {there}");
                remote.write(0, &pattern(3, LEN));
                let read = peer
                    .read(local, &region)
                    .spans(blocks(7), blocks(333))
                    .checksum(checksum)
                    .post();
                read.expect("posted")
                    .wait()
                    .unwrap_or_else(|error| panic!("{there} to {here}: {error}"));
                let (found, source) = (local.to_vec(), pattern(3, LEN));
                for nth in 0..1_000usize {
                    let (to, from) = (nth * 7 % 1_000 * 5_000, nth * 333 % 1_000 * 5_000);
                    assert!(
                        found[to..to + 5_000] == source[from..from + 5_000],
                        "{there} to {here}, block {nth}"
                    );
                }
            }
        }
    }
}

#[test]
fn through_host_memory_over_tcp() {
    if !has(Need::Gpu) {
        return;
    }
    let (owner, user) = (agent("owner", "tcp"), agent("user", "tcp"));
    let peer = user.connect(&owner.address()).expect("a session");
    let remote = owner.allocate(LEN as usize).expect("memory");
    owner.publish("there", &remote, Access::READ_WRITE).expect("published");
    let region = peer.region("there", Duration::from_secs(5)).expect("a region");
    let local = user.allocate_device(0, LEN).expect("memory of a device");
    local.write(0, &pattern(1, LEN));
    peer.write(&local, &region)
        .checksum(true)
        .post()
        .expect("posted")
        .wait()
        .expect("written");
    assert!(remote.to_vec() == pattern(1, LEN));
    remote.write(0, &pattern(2, LEN));
    peer.read(&local, &region)
        .checksum(true)
        .post()
        .expect("posted")
        .wait()
        .expect("read");
    assert!(local.to_vec() == pattern(2, LEN));
}

#[test]
fn among_an_agents_own_places() {
    if !has(Need::Gpu) {
        return;
    }
    let agent = agent("alone", "shared_memory");
    for (from, source) in memories(&agent) {
        for (to, target) in memories(&agent) {
            if source.place() == Place::DRAM && target.place() == Place::DRAM {
                continue;
            }
            source.write(0, &pattern(4, LEN));
            let copied = agent
                .copy(&source, &target)
                .expect("described")
                .checksum(true)
                .post()
                .expect("posted");
            copied.wait().unwrap_or_else(|error| panic!("{from} to {to}: {error}"));
            assert!(target.to_vec() == pattern(4, LEN), "{from} to {to}");
        }
    }
}

#[test]
fn a_copy_begins_when_its_time_has_come_and_ends_by_its_deadline() {
    if !has(Need::Gpu) {
        return;
    }
    let agent = agent("patient", "shared_memory");
    let (source, target) = (
        agent.allocate_device(0, LEN).expect("memory"),
        agent.allocate_device(0, LEN).expect("memory"),
    );
    source.write(0, &pattern(5, LEN));
    target.write(0, &pattern(6, LEN));
    let flag = Arc::new(Flag::default());
    let copy = agent
        .copy(&source, &target)
        .expect("described")
        .after(flag.clone())
        .post()
        .expect("posted");
    assert!(copy.wait_for(Duration::from_millis(50)).is_none() && target.to_vec() == pattern(6, LEN));
    flag.raise();
    copy.wait().expect("copied");
    assert!(target.to_vec() == pattern(5, LEN));
    let never = Arc::new(Flag::default());
    let late = agent
        .copy(&source, &target)
        .expect("described")
        .after(never)
        .deadline(Duration::from_millis(20))
        .post();
    let error = late.expect("posted").wait().expect_err("too late");
    assert!(
        matches!(&error, Error::Transfer(failed) if failed.cause() == Failure::Expired),
        "{error}"
    );
}

#[test]
fn what_cannot_be_is_told() {
    let agent = agent("mistaken", "shared_memory");
    if !has(Need::Gpu) {
        let missing = agent.allocate_device(0, 4096).expect_err("no device");
        assert!(matches!(missing, Error::Gpu(GpuError::NoDriver)), "{missing}");
        return;
    }
    let none = agent.allocate_device(77, 4096).expect_err("no such device");
    assert!(
        matches!(none, Error::Gpu(GpuError::NoDevice { ordinal: 77, .. })),
        "{none}"
    );
    let device = Device::open(0).expect("a device");
    // SAFETY: refused, for it is no memory of the device.
    let wrong = unsafe { DeviceMemory::foreign(&device, 0x1000, 4096, Box::new(())) };
    assert!(matches!(wrong, Err(GpuError::NotDeviceMemory { .. })), "{wrong:?}");
    let too_much = agent.allocate_device(0, 1 << 46).expect_err("more than any device has");
    assert!(matches!(too_much, Error::Gpu(_)), "{too_much}");
    let memory = agent.allocate_device(0, 4096).expect("memory");
    assert!(memory.fetch_add(0, 1).is_err(), "words of a device are not the host's");
    memory.release(Duration::from_secs(1)).expect("released");
}

/// Not a test but the peer that is killed in the one below; alone it does nothing.
#[test]
fn lends_memory_of_a_device() {
    let Ok(to) = std::env::var("LEND_TO") else {
        return;
    };
    let agent = agent("lender", "shared_memory");
    let memory = agent.allocate_device(0, 256 << 20).expect("memory");
    agent.publish("lent", &memory, Access::READ_WRITE).expect("published");
    let _peer = agent.connect(&to).expect("a session");
    std::thread::sleep(Duration::from_secs(60));
}

/// The peer that comes next.
fn come(user: &Agent) -> Peer {
    let give_up = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(peer) = user.peers().into_iter().find(Peer::is_connected) {
            return peer;
        }
        assert!(Instant::now() < give_up, "nobody comes");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Lender(Child);

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_peer_that_is_killed_ends_what_is_under_way_and_harms_nobody() {
    if !has(Need::Gpu) {
        return;
    }
    let user = agent("survivor", "shared_memory");
    for round in 0..5u64 {
        let program = std::env::current_exe().expect("this test");
        let mut command = Command::new(program);
        command
            .args(["--exact", "lends_memory_of_a_device"])
            .env("LEND_TO", user.address());
        let mut lender = Lender(
            command
                .arg("--nocapture")
                .stdout(Stdio::null())
                .spawn()
                .expect("a process"),
        );
        let peer = come(&user);
        let region = peer.region("lent", Duration::from_secs(10)).expect("a region");
        let local = user.allocate_device(0, 256 << 20).expect("memory");
        peer.write(&local, &region)
            .post()
            .expect("posted")
            .wait()
            .expect("written while it lives");
        let dies = Instant::now() + Duration::from_millis(3 + 7 * round);
        let (mut done, mut ended) = (0, None);
        let give_up = Instant::now() + Duration::from_secs(20);
        while ended.is_none() && Instant::now() < give_up {
            if Instant::now() >= dies {
                let _ = lender.0.kill();
            }
            let posted = match done % 2 {
                0 => peer.read(&local, &region).post(),
                _ => peer.write(&local, &region).post(),
            };
            ended = posted.and_then(|transfer| transfer.wait()).err();
            done += 1;
        }
        let ended = ended.expect("a dead peer is noticed");
        assert!(matches!(ended, Error::Transfer(_) | Error::PeerLost { .. }), "{ended}");
        // The device goes on for this process.
        let again = user.allocate_device(0, LEN).expect("memory");
        local.write(0, &pattern(round, LEN));
        let spans = Spans::contiguous(0, LEN);
        let copied = user
            .copy(&local, &again)
            .expect("described")
            .spans(spans.clone(), spans)
            .post();
        copied.expect("posted").wait().expect("copied");
        assert!(again.to_vec() == pattern(round, LEN));
    }
}
