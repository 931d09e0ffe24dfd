//! Teams behind a proxy, between real processes: threads in the place of kernels, over the same ring and the same words.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use weft::proxy::{BadRequest, Caller, ProxyOptions, ProxyTeam, TeamFailure};
use weft::{Agent, Error, Peer};

const ROLE: &str = "PROXY_TEST_ROLE";
const LONG: Duration = Duration::from_secs(20);
const DATA: u64 = 1 << 20;

fn agent(transports: &str) -> Agent {
    let name = format!("proxy-{}-{transports}", std::process::id());
    let agent = Agent::builder(&name).secret("of the tests of proxies");
    let agent = agent.set("transports", transports).listen("127.0.0.1:0");
    agent.start().expect("an agent")
}

/// What the second process is to do, over what, and how many ranks each process has.
#[derive(Clone, Copy, Debug)]
struct Role<'a> {
    what: &'a str,
    transports: &'a str,
    each: usize,
    deadline: Duration,
}

impl Role<'_> {
    fn options(&self, first: bool, peer: &Peer) -> ProxyOptions {
        let (here, there) = (vec![None; self.each], vec![Some(peer.clone()); self.each]);
        let peers = if first { [here, there] } else { [there, here] };
        ProxyOptions {
            data_bytes: DATA,
            deadline: self.deadline,
            ..ProxyOptions::new("test", peers.concat())
        }
    }
}

struct Second {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Second {
    fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).expect("its output"), 0, "it has ended");
            // The test runner of the second process has its own to say.
            if let Some(told) = line.split("> ").nth(1) {
                return told.trim().to_owned();
            }
        }
    }
    /// Lets it go on, or end.
    fn nod(&mut self) {
        writeln!(self.stdin).expect("it listens");
    }
    fn end(mut self) {
        self.nod();
        assert!(self.process.wait().expect("its end").success());
    }
}

/// Starts the second process, and makes the team of both.
fn start(role: Role<'_>) -> (Agent, ProxyTeam, Second) {
    let told = format!(
        "{} {} {} {}",
        role.what,
        role.transports,
        role.each,
        role.deadline.as_millis()
    );
    let mut process = Command::new(std::env::current_exe().expect("the test binary"))
        .args(["--exact", "second_process", "--nocapture", "--test-threads=1"])
        .env(ROLE, told)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the second process starts");
    let (stdin, stdout) = (
        process.stdin.take().expect("its input"),
        process.stdout.take().expect("its output"),
    );
    let stdout = BufReader::new(stdout);
    let mut second = Second { process, stdin, stdout };
    let agent = agent(role.transports);
    let peer = agent.connect(&second.line()).expect("a session");
    let team = ProxyTeam::join(&agent, role.options(true, &peer)).expect("a team");
    (agent, team, second)
}

#[test]
fn second_process() {
    let Ok(told) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = told.split(' ').collect();
    let role = Role {
        what: words[0],
        transports: words[1],
        each: words[2].parse().expect("a number"),
        deadline: Duration::from_millis(words[3].parse().expect("a number")),
    };
    let agent = agent(role.transports);
    let say = |what: &str| {
        println!("> {what}");
        std::io::stdout().flush().expect("somebody reads");
    };
    let nod = || std::io::stdin().read_line(&mut String::new()).expect("a line");
    say(&agent.address());
    let began = Instant::now();
    let peer = loop {
        match agent.peers().pop() {
            Some(peer) => break peer,
            None => assert!(began.elapsed() < LONG, "nobody comes"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let team = ProxyTeam::join(&agent, role.options(false, &peer)).expect("a team");
    match role.what {
        "work" => {
            work(&team);
            say("done");
        }
        "crowd" => {
            crowd(&team);
            say("done");
        }
        "die" => {
            say("ready");
            nod();
            std::process::abort();
        }
        "listen" => {
            let mut caller = team.caller(role.each).expect("a caller");
            let ended = caller.wait(word(&team, 5), 1, 0);
            say(&ended.map_or_else(|error| error.to_string(), |()| "came".to_owned()));
        }
        other => panic!("{other}"),
    }
    nod();
}

fn word(team: &ProxyTeam, nth: u64) -> u64 {
    team.signal_at(nth).expect("a word")
}

fn pattern(rank: usize, round: u64, len: usize) -> Vec<u8> {
    let of = |at: usize| (at as u64 * 31 + rank as u64 * 7919 + round * 104_729) >> 3;
    (0..len).map(|at| of(at) as u8).collect()
}

/// What every rank does, each by a thread: bytes go round, everybody gets from everybody, counts, and meets.
fn work(team: &ProxyTeam) {
    std::thread::scope(|scope| {
        for rank in team.here() {
            scope.spawn(move || work_of(team, rank));
        }
    });
    team.check().expect("whole");
}

fn work_of(team: &ProxyTeam, rank: usize) {
    let mut caller = team.caller(rank).expect("a caller");
    let heap = team.heap(rank).expect("a heap").clone();
    let ranks = team.ranks();
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let (came, taken, count) = (word(team, 0), word(team, 1), word(team, 2));
    let data = team.data_at();
    // Inline, beside the ring, in several parts; places and lengths are odd.
    let lengths = [0, 1, 8, 191, 192, 193, 4097, 16 << 10, (16 << 10) + 1, 100_003];
    for round in 1..=40u64 {
        let len = lengths[round as usize % lengths.len()];
        let to = data + round % 2 * 200_000 + round % 7;
        if round > 2 {
            caller.wait(taken, round - 2, next).expect("taken");
        }
        let bytes = pattern(rank, round, len);
        match round % 3 {
            0 => {
                caller.put(next, to, &bytes).expect("put");
                caller.signal(next, came, round).expect("signalled");
            }
            1 => {
                let own = data + 600_000 + round % 2 * 200_000 + round % 5;
                heap.write(own, &bytes);
                caller.put_from_heap(next, to, own, len as u64).expect("put");
                caller.quiet().expect("quiet");
                caller.signal(next, came, round).expect("signalled");
            }
            _ => caller.put_signal(next, to, &bytes, came, round).expect("put"),
        }
        caller.wait(came, round, before).expect("came");
        let mut got = vec![0; len];
        heap.read(to, &mut got);
        assert!(got == pattern(before, round, len), "rank {rank}, round {round}");
        caller.signal(before, taken, round).expect("told");
    }
    caller.barrier(3).expect("all meet");
    heap.write(data, &pattern(rank, 99, 50_000));
    caller.barrier(3).expect("all meet");
    for peer in 0..ranks {
        let mut got = vec![0; 49_999];
        caller.get(peer, data + 1, &mut got).expect("got");
        assert!(got == pattern(peer, 99, 50_000)[1..], "rank {rank} from {peer}");
    }
    let mut sum = 0;
    for _ in 0..50 {
        for peer in 0..ranks {
            sum += caller.fetch_add(peer, count, 1).expect("added");
        }
    }
    caller
        .put(0, data + 500_000 + rank as u64 * 8, &u64::to_le_bytes(sum))
        .expect("put");
    caller.quiet().expect("quiet");
    caller.barrier(63).expect("all meet");
    assert_eq!(heap.read_word(count).expect("a word"), 50 * ranks as u64);
    if rank == 0 {
        let mut sums = vec![0; ranks * 8];
        heap.read(data + 500_000, &mut sums);
        let sums = sums
            .chunks(8)
            .map(|sum| u64::from_le_bytes(sum.try_into().expect("eight")));
        let all = 50 * ranks as u64;
        assert_eq!(
            sums.sum::<u64>(),
            ranks as u64 * (all * (all - 1) / 2),
            "each number once"
        );
    }
    caller.barrier(0).expect("all meet");
}

/// Many threads of one rank that fill the ring faster than it is emptied.
fn crowd(team: &ProxyTeam) {
    const THREADS: u64 = 6;
    const ROUNDS: u64 = 300;
    let rank = team.here().start;
    let peer = 1 - rank;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut caller = team.caller(rank).expect("a caller");
                let at = team.data_at() + thread * 4096;
                for round in 0..ROUNDS {
                    // Where each put goes, its number has to be found.
                    let bytes = (thread << 32 | round).to_le_bytes();
                    caller.put(peer, at + round * 8, &bytes).expect("put");
                    if round % 50 == 49 {
                        let mut got = [0; 8];
                        caller.get(peer, at + round * 8, &mut got).expect("got");
                        assert_eq!(got, bytes, "a get comes after the puts before it");
                    }
                }
                caller.fetch_add(peer, word(team, 0), 1).expect("told");
            });
        }
    });
    let mut caller = team.caller(rank).expect("a caller");
    caller.wait(word(team, 0), THREADS, peer).expect("all of them");
    let heap = team.heap(rank).expect("a heap");
    for thread in 0..THREADS {
        for round in 0..ROUNDS {
            let mut got = [0; 8];
            heap.read(team.data_at() + thread * 4096 + round * 8, &mut got);
            assert_eq!(u64::from_le_bytes(got), thread << 32 | round);
        }
    }
    caller.barrier(1).expect("all meet");
}

const WAYS: [&str; 2] = ["shared_memory", "tcp"];

#[test]
fn bytes_signals_counts_and_barriers_go_between_processes() {
    for transports in WAYS {
        for each in [1, 2] {
            let role = Role {
                what: "work",
                transports,
                each,
                deadline: LONG,
            };
            let (_agent, team, mut second) = start(role);
            work(&team);
            assert_eq!(second.line(), "done", "{role:?}");
            drop(team);
            second.end();
        }
    }
}

#[test]
fn a_full_ring_is_waited_for_and_nothing_is_overwritten() {
    for transports in WAYS {
        let role = Role {
            what: "crowd",
            transports,
            each: 1,
            deadline: LONG,
        };
        let (_agent, team, mut second) = start(role);
        crowd(&team);
        assert_eq!(second.line(), "done", "{role:?}");
        drop(team);
        second.end();
    }
}

fn failure(error: Error) -> TeamFailure {
    match error {
        Error::Team(failed) => failed.failure,
        other => panic!("{other}"),
    }
}

/// Until a call fails, as it must.
fn fails(mut call: impl FnMut() -> Result<(), Error>) -> TeamFailure {
    let began = Instant::now();
    loop {
        match call() {
            Err(error) => return failure(error),
            Ok(()) => assert!(began.elapsed() < LONG, "nothing fails"),
        }
    }
}

#[test]
fn a_peer_that_dies_ends_the_wait_long_before_the_deadline() {
    for transports in WAYS {
        for putting in [false, true] {
            let role = Role {
                what: "die",
                transports,
                each: 1,
                deadline: Duration::from_secs(600),
            };
            let (_agent, team, mut second) = start(role);
            assert_eq!(second.line(), "ready");
            let mut caller = team.caller(0).expect("a caller");
            caller.put(1, team.data_at(), &[7; 1000]).expect("put");
            second.nod();
            let began = Instant::now();
            let (at, bytes) = (team.data_at(), vec![1; 50_000]);
            let told = match putting {
                false => failure(caller.wait(word(&team, 3), 1, 1).expect_err("nobody comes")),
                true => fails(|| caller.put(1, at, &bytes)),
            };
            assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
            // Which of the two is seen first is chance.
            assert!(
                matches!(told, TeamFailure::Lost { peer: 1 } | TeamFailure::Broken { peer: 1 }),
                "{transports}, {putting}: {told:?}"
            );
            let checked = team.check().expect_err("it stays so");
            assert!(checked.to_string().contains("rank 1"), "{checked}");
            assert!(caller.signal(1, word(&team, 0), 1).is_err());
            let _ = second.process.wait();
        }
    }
}

/// The second process waits in vain; what happens here ends its wait.
fn listened(deadline: Duration, transports: &str, here: impl FnOnce(&ProxyTeam, &mut Caller)) -> String {
    let role = Role {
        what: "listen",
        transports,
        each: 1,
        deadline,
    };
    let (_agent, team, mut second) = start(role);
    let mut caller = team.caller(0).expect("a caller");
    let began = Instant::now();
    here(&team, &mut caller);
    let told = second.line();
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    second.end();
    told
}

#[test]
fn what_is_wrong_is_refused_and_both_ends_hear_of_it() {
    for transports in WAYS {
        let told = listened(Duration::from_secs(600), transports, |team, caller| {
            caller.put(1, u64::MAX - 3, &[1; 16]).expect("it is only written down");
            let failure = fails(|| caller.quiet());
            assert!(
                matches!(failure, TeamFailure::Refused(BadRequest::OutOfBounds { .. })),
                "{failure:?}"
            );
            assert!(team.check().is_err());
        });
        assert!(told.contains("rank 0 has given up"), "{told}");
    }
    let told = listened(Duration::from_secs(600), "shared_memory", |_, caller| {
        caller.signal(17, 0, 1).expect("it is only written down");
        let failure = fails(|| caller.quiet());
        assert!(
            matches!(failure, TeamFailure::Refused(BadRequest::UnknownPeer { peer: 17 })),
            "{failure:?}"
        );
    });
    assert!(told.contains("rank 0 has given up"), "{told}");
}

#[test]
fn a_wait_in_vain_ends_at_the_deadline_and_an_abort_ends_it_at_once() {
    let told = listened(Duration::from_millis(300), "shared_memory", |_, caller| {
        let failure = fails(|| caller.wait(8 * 1024, 1, 1));
        assert!(
            matches!(failure, TeamFailure::TimedOut { .. } | TeamFailure::GaveUp { .. }),
            "{failure:?}"
        );
    });
    assert!(told.contains("in time") || told.contains("given up"), "{told}");
    let told = listened(Duration::from_secs(600), "tcp", |team, caller| {
        team.abort();
        assert_eq!(fails(|| caller.wait(8 * 1024, 1, 1)), TeamFailure::Aborted);
    });
    assert!(told.contains("rank 0 has given up"), "{told}");
}

#[test]
fn teams_that_make_no_sense_are_refused() {
    let agent = agent("shared_memory");
    let refused = |options: ProxyOptions| match ProxyTeam::join(&agent, options) {
        Err(Error::Formation(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(refused(ProxyOptions::new("none", Vec::new())).contains("0 ranks"));
    assert!(refused(ProxyOptions::new("many", vec![None; 9])).contains("9 ranks"));
    let hasty = ProxyOptions {
        deadline: Duration::ZERO,
        ..ProxyOptions::new("hasty", vec![None])
    };
    assert!(refused(hasty).contains("deadline"));
    let alone = ProxyTeam::join(&agent, ProxyOptions::new("alone", vec![None])).expect("one rank is a team");
    assert!(alone.view(0).is_err(), "there is no device");
    assert!(alone.caller(1).is_err() && alone.heap(1).is_err());
    assert_eq!(alone.signal_at(512), None);
    let mut caller = alone.caller(0).expect("a caller");
    assert_eq!(caller.fetch_add(0, word(&alone, 0), 5).expect("added"), 0);
    assert_eq!(caller.fetch_add(0, word(&alone, 0), 5).expect("added"), 5);
    caller.barrier(0).expect("it meets itself");
    assert!(caller.barrier(64).is_err());
    drop(alone);
    for (nth, behind_end) in [(0, 0i64), (1, -4), (2, i64::MAX), (3, -12)] {
        let options = ProxyOptions::new(&format!("wrong {nth}"), vec![None]);
        let team = ProxyTeam::join(&agent, options).expect("a team");
        let end = team.heap(0).expect("its heap").len() as u64;
        let mut caller = team.caller(0).expect("a caller");
        let told = failure(
            caller
                .wait(end.wrapping_add_signed(behind_end), 0, 0)
                .expect_err("no word"),
        );
        let is_said = match behind_end {
            -12 => matches!(told, TeamFailure::Refused(BadRequest::Misaligned { .. })),
            _ => matches!(told, TeamFailure::Refused(BadRequest::OutOfBounds { .. })),
        };
        assert!(is_said, "{behind_end}: {told:?}");
        // As after any other call that cannot be.
        assert!(caller.signal(0, word(&team, 0), 1).is_err() && team.check().is_err());
    }
}
