//! Two agents over RDMA: all rails at once, rails that are taken away in mid-transfer and given back, and TCP behind them.
//!
//! The rails are network interfaces `rail0` and `rail1`, each under an RDMA device, as `cargo xtask rdma-test` makes them in a virtual
//! machine, which also has a command `cable RAIL up|down`. The second agent is a process of the same machine; with `FAR_CONTROL` set to an
//! address to listen on, it is one that another machine starts.

mod support;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use support::{Child, LONG, Way, pattern};
use weft::{Agent, Failure, Loss, Memory, Peer, Remote, Spans, Transfer};

/// A transfer that takes long enough, in emulation, for something to happen in its middle.
const LEN: usize = 8 << 20;
/// How long transfers may take that wait for a rail to be given up.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn second_process() {
    support::second_process();
}

#[test]
fn tests_that_need_a_device() {
    weft_testing::has(weft_testing::Need::Rdma);
}

/// Which end of the cable is pulled. The other one is told nothing, and has to find out.
#[derive(Clone, Copy, Debug)]
enum End {
    Near,
    Far,
}

/// One network interface with an RDMA device on it.
#[derive(Clone, Copy, Debug)]
struct Rail(u32);

const RAILS: [Rail; 2] = [Rail(0), Rail(1)];

impl Rail {
    /// Packets that this end has sent and received over it.
    fn packets(self) -> u64 {
        let counters = PathBuf::from(format!("/sys/class/infiniband/rxe{}/ports/1/hw_counters", self.0));
        let count = |name: &str| -> u64 {
            let text = std::fs::read_to_string(counters.join(name)).expect("the device counts its packets");
            text.trim().parse().expect("a number")
        };
        count("sent_pkts") + count("rcvd_pkts")
    }
}

/// Two connected agents, and memory at both.
struct Pair {
    _agent: Agent,
    child: Child,
    peer: Peer,
    remote: Remote,
    local: Memory,
}

impl Pair {
    fn connect(name: &str) -> Pair {
        let two_machines = LISTENER.is_some();
        let child = match &*LISTENER {
            Some(listener) => Child::accept(listener, Way::Verbs, name, LEN),
            None => Child::spawn(Way::Verbs, name, LEN),
        };
        let mut builder = Way::Verbs.builder("near");
        if two_machines {
            let address = std::env::var("NEAR_LISTEN").expect("an address of the near machine");
            builder = builder.listen(&address);
        }
        let agent = builder.start().expect("an agent starts");
        let peer = agent.connect(&child.address).expect("the second process answers");
        let remote = peer.region("data", LONG).expect("it publishes its data");
        let local = agent.allocate(LEN).expect("memory");
        let pair = Pair {
            _agent: agent,
            child,
            peer,
            remote,
            local,
        };
        pair.wait_for_rails(&RAILS);
        pair
    }

    fn post(&self, write: bool) -> Transfer {
        let builder = if write {
            self.peer.write(&self.local, &self.remote)
        } else {
            self.peer.read(&self.local, &self.remote)
        };
        builder.deadline(PATIENCE).checksum(true).post().unwrap()
    }

    /// Transfers until all of `rails` carry data; an agent opens a lost one again by and by.
    fn wait_for_rails(&self, rails: &[Rail]) {
        let give_up = Instant::now() + PATIENCE;
        loop {
            let before = rails.iter().map(|rail| rail.packets()).collect::<Vec<_>>();
            self.post(false).wait().unwrap();
            // A session's own messages are a few packets; a share of the data is hundreds.
            let carried = rails
                .iter()
                .zip(&before)
                .all(|(rail, before)| rail.packets() - before > 200);
            if carried {
                return;
            }
            assert!(Instant::now() < give_up, "{rails:?} carry nothing");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn set(&mut self, rail: Rail, end: End, state: &str) {
        let rail = rail.0.to_string();
        match end {
            End::Near => {
                let done = Command::new("cable").args([&rail, state]).status();
                assert!(done.expect("cables are there").success());
            }
            End::Far => assert_eq!(self.child.ask(&format!("cable {rail} {state}")), "true"),
        }
    }

    /// Moves data all the while something happens in its middle. Every byte has to be right after it, also those that were under way.
    fn move_while(&mut self, write: bool, seed: u8, event: impl FnOnce(&mut Pair)) -> Vec<weft::Summary> {
        if write {
            self.local.write(0, &pattern(seed, LEN));
            assert_eq!(self.child.ask("fill 0"), "filled");
        } else {
            self.local.write(0, &vec![0; LEN]);
            assert_eq!(self.child.ask(&format!("pattern {seed}")), "filled");
        }
        let first = self.post(write);
        let before: u64 = RAILS.iter().map(|rail| rail.packets()).sum();
        let others: Vec<Transfer> = (0..3).map(|_| self.post(write)).collect();
        // Not before data moves.
        while RAILS.iter().map(|rail| rail.packets()).sum::<u64>() < before + 300 && !first.is_ended() {
            std::thread::yield_now();
        }
        event(self);
        let summaries = std::iter::once(&first)
            .chain(&others)
            .map(|transfer| transfer.wait().unwrap());
        let summaries: Vec<_> = summaries.collect();
        if write {
            assert_eq!(
                self.child.ask(&format!("matches {seed}")),
                "true",
                "wrong bytes were written"
            );
        } else {
            assert!(self.local.to_vec() == pattern(seed, LEN), "wrong bytes were read");
        }
        summaries
    }
}

impl Drop for Pair {
    /// A test that fails in the middle leaves the cables to the next one as it found them: an agent that starts takes the ports that are up.
    fn drop(&mut self) {
        for Rail(number) in RAILS {
            let _ = Command::new("cable").args([&number.to_string(), "up"]).status();
            self.child.tell_if_it_listens(&format!("cable {number} up"));
        }
    }
}

/// Where the other machine's process connects to, if there is one. All tests share it, because they come one after the other.
static LISTENER: LazyLock<Option<TcpListener>> = LazyLock::new(|| {
    let address = std::env::var("FAR_CONTROL").ok()?;
    Some(TcpListener::bind(address).expect("an address of this machine"))
});

#[test]
#[ignore = "needs an RDMA device"]
fn bytes_go_both_ways_over_all_rails() {
    let mut pair = Pair::connect("both-ways");
    for (write, seed) in [(false, 2), (true, 3)] {
        let before = RAILS.map(Rail::packets);
        let summaries = pair.move_while(write, seed, |_| ());
        for summary in &summaries {
            assert_eq!((summary.bytes, summary.transport()), (LEN as u64, "verbs"));
        }
        let carried = [0, 1].map(|rail: usize| RAILS[rail].packets() - before[rail]);
        assert!(carried.iter().all(|packets| *packets > 200), "{carried:?} packets");
        println!("write {write}: {carried:?} packets over the two rails");
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn scattered_blocks_go_both_ways() {
    let mut pair = Pair::connect("scattered");
    let (block, blocks) = (4096u64, (LEN / 4096) as u64);
    // Two permutations without a common stride.
    let near: Vec<u64> = (0..blocks).map(|i| (i * 389 + 7) % blocks).collect();
    let far: Vec<u64> = (0..blocks).map(|i| (i * 173 + 91) % blocks).collect();
    let spans = |order: &[u64]| Spans::paged(0, block, order.iter().copied());
    let read = pair
        .peer
        .read(&pair.local, &pair.remote)
        .spans(spans(&near), spans(&far));
    read.deadline(PATIENCE).post().unwrap().wait().unwrap();
    let (got, source) = (pair.local.to_vec(), pattern(1, LEN));
    for (n, f) in near.iter().zip(&far) {
        let (n, f) = ((n * block) as usize, (f * block) as usize);
        assert!(got[n..n + 4096] == source[f..f + 4096], "a block is wrong");
    }
    assert_eq!(pair.child.ask("fill 0"), "filled");
    let write = pair
        .peer
        .write(&pair.local, &pair.remote)
        .spans(spans(&near), spans(&far));
    write.deadline(PATIENCE).post().unwrap().wait().unwrap();
    assert_eq!(pair.child.ask("matches 1"), "true");
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_rail_is_taken_away_in_mid_transfer_and_given_back() {
    let mut pair = Pair::connect("one-rail");
    let cases = [
        (false, End::Near),
        (true, End::Near),
        (false, End::Far),
        (true, End::Far),
    ];
    for (number, (write, end)) in cases.into_iter().enumerate() {
        let summaries = pair.move_while(write, 10 + number as u8, |pair| pair.set(RAILS[1], end, "down"));
        let retries: u32 = summaries.iter().map(|summary| summary.retries).sum();
        // The other rail is still there, so nothing had to go by TCP for good.
        let after = pair.post(write).wait().unwrap();
        assert_eq!(after.transport(), "verbs");
        pair.set(RAILS[1], end, "up");
        pair.wait_for_rails(&RAILS);
        println!(
            "write {write}, pulled at the {end:?} end: {retries} parts sent again, all bytes right, and the rail is back"
        );
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn tcp_takes_over_when_no_rail_is_left_and_gives_back() {
    let mut pair = Pair::connect("no-rail");
    for (write, seed) in [(false, 20), (true, 21)] {
        pair.move_while(write, seed, |pair| {
            RAILS.into_iter().for_each(|rail| pair.set(rail, End::Near, "down"));
        });
        let without = pair.post(write).wait().unwrap();
        assert_eq!(without.transport(), "tcp");
        RAILS.into_iter().for_each(|rail| pair.set(rail, End::Near, "up"));
        pair.wait_for_rails(&RAILS);
        println!(
            "write {write}: without rails by {}, and back by verbs",
            without.transport()
        );
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_killed_peer_is_told() {
    if LISTENER.is_some() {
        return weft_testing::leave_out(weft_testing::Need::Rdma, "the peer is a process of another machine");
    }
    let mut pair = Pair::connect("doomed");
    let under_way: Vec<_> = (0..8).map(|number| pair.post(number % 2 == 0)).collect();
    pair.child.kill();
    let errors: Vec<_> = under_way.iter().filter_map(|transfer| transfer.wait().err()).collect();
    let error = errors.last().expect("64 MiB were not moved before the kill");
    let loss = match error.failure() {
        Some(Failure::PathLost { loss, .. }) => loss,
        _ => panic!("{error}"),
    };
    assert!(
        matches!(loss, Loss::ClosedByPeer | Loss::Silent | Loss::Unreachable),
        "{error}"
    );
    let give_up = Instant::now() + PATIENCE;
    while pair.peer.is_connected() {
        assert!(Instant::now() < give_up, "the session outlived its peer");
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("after the kill: {error}");
}
