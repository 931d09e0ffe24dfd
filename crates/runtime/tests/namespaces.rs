//! Two hosts with a cable between them: two network namespaces joined by a veth pair, made and removed by the test itself.
//!
//! Needs root and `ip`; elsewhere it says so and passes nothing off as tested.

mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use support::{Child, LONG, Way, pattern};
use weft::{Agent, Failure, Loss};

#[test]
fn second_process() {
    support::second_process();
}

struct Hosts {
    near: String,
    far: String,
}

impl Hosts {
    const NEAR: &str = "10.211.7.1";
    const FAR: &str = "10.211.7.2";

    fn make() -> Option<Hosts> {
        if !weft_testing::has(weft_testing::Need::Root) {
            return None;
        }
        let id = std::process::id();
        let hosts = Hosts {
            near: format!("weft-near-{id}"),
            far: format!("weft-far-{id}"),
        };
        let (near, far) = (hosts.near.as_str(), hosts.far.as_str());
        run(&["netns", "add", near]);
        run(&["netns", "add", far]);
        run(&[
            "-n", near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", far,
        ]);
        for (host, address) in [(near, Hosts::NEAR), (far, Hosts::FAR)] {
            run(&["-n", host, "address", "add", &format!("{address}/24"), "dev", "cable"]);
            run(&["-n", host, "link", "set", "cable", "up"]);
            run(&["-n", host, "link", "set", "lo", "up"]);
        }
        Some(hosts)
    }

    /// Moves the calling thread, and every thread that it starts from now on, to the near host.
    fn enter_near(&self) {
        let file = File::open(format!("/run/netns/{}", self.near)).expect("the namespace is there");
        // SAFETY: the descriptor is open and names a network namespace.
        assert_eq!(unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
    }

    fn child(&self, name: &str, bytes: usize) -> Child {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.far])
            .arg(std::env::current_exe().expect("the test binary"));
        command.env("SECOND_PROCESS_LISTEN", format!("{}:0", Hosts::FAR));
        Child::start(&mut command, Way::Tcp, name, bytes)
    }

    fn cable(&self, state: &str) {
        run(&["-n", &self.far, "link", "set", "cable", state]);
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in [&self.near, &self.far] {
            let _ = Command::new("ip").args(["netns", "delete", host]).status();
        }
    }
}

fn run(arguments: &[&str]) {
    let done = Command::new("ip").args(arguments).output().expect("ip runs");
    assert!(
        done.status.success(),
        "ip {arguments:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

fn agent() -> Agent {
    Way::Tcp
        .builder("near")
        .listen(&format!("{}:0", Hosts::NEAR))
        .start()
        .unwrap()
}

#[test]
fn bytes_cross_the_cable_and_death_and_silence_are_told_apart() {
    let Some(hosts) = Hosts::make() else { return };
    hosts.enter_near();
    let len = 16 << 20;
    let mut child = hosts.child("far", len);
    let agent = agent();
    let peer = agent.connect(&child.address).unwrap();
    let remote = peer.region("data", LONG).unwrap();
    let local = agent.allocate(len).unwrap();
    peer.read(&local, &remote)
        .checksum(true)
        .post()
        .unwrap()
        .wait()
        .unwrap();
    assert!(local.to_vec() == pattern(1, len));
    local.write(0, &pattern(2, len));
    peer.write(&local, &remote)
        .checksum(true)
        .post()
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(child.ask("matches 2"), "true");

    // The cable is pulled: nothing says so, and the deadline ends the transfer all the same.
    hosts.cable("down");
    for write in [false, true] {
        let builder = if write {
            peer.write(&local, &remote)
        } else {
            peer.read(&local, &remote)
        };
        let error = builder
            .deadline(Duration::from_millis(400))
            .post()
            .unwrap()
            .wait()
            .unwrap_err();
        assert_eq!(error.failure(), Some(Failure::Expired), "{error}");
    }
    // It is put back within the peer's patience, and the same session goes on.
    hosts.cable("up");
    peer.read(&local, &remote)
        .deadline(LONG)
        .post()
        .unwrap()
        .wait()
        .unwrap();

    // One end is killed in the middle of many transfers.
    let under_way: Vec<_> = (0..32).map(|_| peer.read(&local, &remote).post().unwrap()).collect();
    under_way[0].wait().unwrap();
    child.kill();
    let error = under_way
        .iter()
        .filter_map(|t| t.wait().err())
        .next_back()
        .expect("the kill was felt");
    assert!(
        matches!(
            error.failure(),
            Some(Failure::PathLost {
                loss: Loss::ClosedByPeer,
                ..
            })
        ),
        "{error}"
    );
    println!("after the kill: {error}");
}
