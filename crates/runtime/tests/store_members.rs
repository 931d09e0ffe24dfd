//! Stores of several processes that work together: what one has the others get, whoever is killed, frozen or out of reach.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use weft::Agent;
use weft::rendezvous::{Rendezvous, RendezvousOptions};
use weft::store::{Block, BlockId, BlockShape, FileTier, GetOutcome, HitRule, Part, Peers, Space, Store, Wanted};
use weft_protocol::Seeded;

const BLOCK: u32 = 20_000;
const STRIDE: u64 = 20_480;
const SECRET: &str = "a secret that the stores of this test share";
/// Only what hangs takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

fn shape() -> BlockShape {
    BlockShape::new(vec![Part::new("kv", BLOCK, HitRule::AllBlocks)]).expect("a shape")
}

fn space() -> Space {
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
    let fields = names.iter().map(|name| (*name, "one"));
    Space::new(fields.chain([("block_tokens", "16")])).expect("a space")
}

fn key(number: u64) -> BlockId {
    space().key(&number.to_le_bytes()).expect("a key")
}

fn payload(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    Seeded::new(number).fill(&mut bytes);
    bytes
}

fn options() -> RendezvousOptions {
    RendezvousOptions {
        job: "stores".to_owned(),
        lease: Duration::from_secs(2),
    }
}

fn place(at: &str) -> Rendezvous {
    match at.split_once(':').expect("a kind of place") {
        ("directory", path) => Rendezvous::by_directory(Path::new(path), options()),
        (_, urls) => Rendezvous::by_etcd(urls, options()),
    }
    .expect("a place")
}

fn agent(name: &str) -> Agent {
    let builder = Agent::builder(name).listen("127.0.0.1:0").secret(SECRET);
    builder.start().expect("an agent")
}

/// A store of a process of its own, that does what it is told.
#[test]
#[ignore = "a part of others: a process of theirs"]
fn member_child() {
    let Ok(name) = std::env::var("TEST_MEMBER_NAME") else {
        return;
    };
    let at = std::env::var("TEST_MEMBER_PLACE").expect("a place");
    let agent = agent(&name);
    let peers = Peers::met_at(place(&at)).answer_within(Duration::from_secs(2));
    let builder = Store::builder(&agent, &shape()).with_peers(peers);
    let builder = match std::env::var("TEST_MEMBER_FOLDER") {
        Ok(folder) => builder.files(FileTier::new(folder, 128 * STRIDE).extent_bytes(64 * STRIDE)),
        Err(_) => builder.memory(128 * STRIDE),
    };
    let store = builder.open().expect("a store");
    println!("\nready");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap_or("");
        let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
        let ids: Vec<BlockId> = numbers.iter().copied().map(key).collect();
        let said = match verb {
            "put" => {
                let memory = agent.allocate(numbers.len() * BLOCK as usize).expect("memory");
                let mut blocks = Vec::new();
                for (nth, number) in numbers.iter().enumerate() {
                    let offset = nth as u64 * u64::from(BLOCK);
                    memory.write(offset, &payload(*number));
                    blocks.push(Block::new(ids[nth], offset).first());
                }
                let put = store.put(&space(), &memory, &blocks).expect("accepted");
                let stored = put.wait().expect("an answer");
                stored.iter().filter(|outcome| outcome.is_there()).count().to_string()
            }
            "get" => {
                let memory = agent.allocate(numbers.len().max(1) * BLOCK as usize).expect("memory");
                let wanted = |(nth, id): (usize, &BlockId)| Wanted {
                    id: *id,
                    offset: nth as u64 * u64::from(BLOCK),
                };
                let wanted: Vec<Wanted> = ids.iter().enumerate().map(wanted).collect();
                let got = store
                    .get(&memory, &wanted)
                    .expect("accepted")
                    .wait()
                    .expect("an answer");
                let (mut here, mut elsewhere) = (0, 0);
                for (nth, outcome) in got.iter().enumerate() {
                    if outcome.is_hit() {
                        let mut bytes = vec![0; BLOCK as usize];
                        memory.read(nth as u64 * u64::from(BLOCK), &mut bytes);
                        assert!(bytes == payload(numbers[nth]), "wrong bytes of {}", numbers[nth]);
                    }
                    match outcome {
                        GetOutcome::Hit { .. } => here += 1,
                        GetOutcome::Elsewhere { .. } => elsewhere += 1,
                        GetOutcome::Miss => {}
                    }
                }
                format!("{here} {elsewhere}")
            }
            "find" => {
                let found = store.find(&ids).expect("asked").wait().expect("an answer");
                let mut names: Vec<String> = found
                    .iter()
                    .flat_map(|there| there.elsewhere.iter().map(|(name, _)| name.clone()))
                    .collect();
                names.sort();
                names.dedup();
                let there = found.iter().filter(|there| there.is_there()).count();
                format!("{there} {}", names.join(","))
            }
            "members" => {
                let stat = store.members().expect("a store").expect("among others");
                let names: Vec<&str> = stat.members.iter().map(|member| member.name.as_str()).collect();
                let trouble = stat.trouble.map_or("well", |_| "trouble");
                format!("{} {trouble} {}", names.len(), names.join(","))
            }
            "leave" => break,
            _ => "what?".to_owned(),
        };
        println!("\n= {said}");
    }
}

struct Member {
    process: Child,
    orders: ChildStdin,
    said: Receiver<String>,
    name: String,
}

impl Member {
    fn start(name: &str, at: &str, folder: Option<&Path>) -> Member {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command
            .args(["--ignored", "--exact", "member_child", "--nocapture"])
            .env("TEST_MEMBER_NAME", name)
            .env("TEST_MEMBER_PLACE", at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(folder) = folder {
            command.env("TEST_MEMBER_FOLDER", folder);
        }
        let mut process = command.spawn().expect("a child");
        let lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let (tell, said) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let orders = process.stdin.take().expect("a pipe");
        let name = name.to_owned();
        let member = Member {
            process,
            orders,
            said,
            name,
        };
        member.hear("ready");
        member
    }

    fn hear(&self, start: &str) -> String {
        loop {
            let line = self.said.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("{} says nothing", self.name));
            if let Some(rest) = line.strip_prefix(start) {
                return rest.trim().to_owned();
            }
        }
    }

    fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").expect("it lives");
        self.hear("=")
    }

    /// Asks until the answer begins so.
    fn comes_to(&mut self, order: &str, wanted: &str) -> String {
        let start = Instant::now();
        loop {
            let said = self.order(order);
            if said.starts_with(wanted) {
                return said;
            }
            assert!(
                start.elapsed() < PATIENCE,
                "{}: {order} says {said}, not {wanted}",
                self.name
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, signal: &str) {
        let pid = self.process.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status().expect("kill");
        assert!(sent.success());
    }

    fn kill(mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("it ended");
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn numbers(range: std::ops::Range<u64>) -> String {
    range.map(|number| number.to_string()).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_one_store_has_the_others_get_also_when_it_is_killed_or_frozen() {
    let meeting = tempfile::tempdir().expect("a folder");
    let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let at = format!("directory:{}", meeting.path().display());
    let mut a = Member::start("a", &at, None);
    let mut b = Member::start("b", &at, Some(files.path()));
    let mut c = Member::start("c", &at, None);
    for member in [&mut a, &mut b, &mut c] {
        member.comes_to("members", "2 ");
    }
    let blocks = numbers(0..20);
    assert_eq!(a.order(&format!("put {blocks}")), "20");
    c.comes_to(&format!("find {blocks}"), "20 a");
    assert_eq!(c.comes_to(&format!("get {blocks}"), "0 20"), "0 20");
    // What is nowhere is a miss.
    assert_eq!(c.order("get 900 901"), "0 0");
    // Another one has them in files; the first is killed.
    assert_eq!(b.order(&format!("put {blocks}")), "20");
    c.comes_to(&format!("find {blocks}"), "20 a,b");
    a.kill();
    c.comes_to(&format!("find {blocks}"), "20 b");
    c.comes_to(&format!("get {blocks}"), "0 20");
    // A frozen one is missed, and nobody waits for it for ever.
    b.signal("-STOP");
    assert_eq!(c.order("put 500"), "1");
    let frozen = c.order(&format!("get {blocks}"));
    assert!(frozen.starts_with("0 "), "{frozen}");
    assert_eq!(c.order("get 500"), "1 0");
    b.signal("-CONT");
    c.comes_to(&format!("get {blocks}"), "0 20");
    b.comes_to("get 500", "0 1");
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

struct Etcd(Child);

impl Etcd {
    fn start(url: &str, peers: &str, data: &Path) -> Etcd {
        let child = Command::new("etcd")
            .args(["--listen-client-urls", url, "--advertise-client-urls", url])
            .args(["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers])
            .args(["--initial-cluster", &format!("default={peers}"), "--data-dir"])
            .arg(data)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd starts");
        let start = Instant::now();
        while Rendezvous::by_etcd(url, options()).is_err() {
            assert!(start.elapsed() < PATIENCE, "etcd did not start");
            std::thread::sleep(Duration::from_millis(50));
        }
        Etcd(child)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn while_etcd_is_away_stores_go_on_and_say_so() {
    if !weft_testing::has(weft_testing::Need::Etcd) {
        return;
    }
    let data = tempfile::tempdir().expect("a folder");
    let url = format!("http://127.0.0.1:{}", free_port());
    let ports = format!("http://127.0.0.1:{}", free_port());
    let server = Etcd::start(&url, &ports, data.path());
    let at = format!("etcd:{url}");
    let mut a = Member::start("a", &at, None);
    let mut b = Member::start("b", &at, None);
    a.comes_to("members", "1 well");
    b.comes_to("members", "1 well");
    assert_eq!(a.order("put 1 2 3"), "3");
    b.comes_to("find 1 2 3", "3 a");
    drop(server);
    a.comes_to("members", "1 trouble");
    b.comes_to("members", "1 trouble");
    assert_eq!(a.order("put 4 5"), "2");
    b.comes_to("find 1 2 3 4 5", "5 a");
    b.comes_to("get 1 2 3 4 5", "0 5");
    let _server = Etcd::start(&url, &ports, data.path());
    a.comes_to("members", "1 well");
    let mut c = Member::start("c", &at, None);
    c.comes_to("members", "2 well");
    c.comes_to("get 1 2 3 4 5", "0 5");
}

/// `cargo test --release -p weft --test store_members -- --ignored how_fast --nocapture`: questions about 128 blocks beside a notification there and back, over
/// TCP in one process, by turns; and how many blocks a second another store is told of.
#[test]
#[ignore = "measures"]
fn how_fast_others_are_asked_and_told() {
    const ROUNDS: u64 = 200;
    let agents: Vec<Agent> = ["a", "b", "c"]
        .iter()
        .map(|name| {
            let builder = Agent::builder(name).listen("127.0.0.1:0").secret(SECRET);
            builder.set("transports", "tcp").start().expect("an agent")
        })
        .collect();
    let small = BlockShape::new(vec![Part::new("kv", 64, HitRule::AllBlocks)]).expect("a shape");
    let first = agents[0].address();
    let second = agents[1].address();
    let peers = [
        Peers::whoever_comes(),
        Peers::at([first.clone()]),
        Peers::at([first, second]),
    ];
    let stores: Vec<Store> = agents
        .iter()
        .zip(peers)
        .map(|(agent, peers)| {
            let builder = Store::builder(agent, &small).memory(1 << 29).with_peers(peers);
            builder.open().expect("a store")
        })
        .collect();
    let wait = |what: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < PATIENCE, "it does not come about");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let joined = |store: &Store| {
        store
            .members()
            .expect("a store")
            .is_some_and(|stat| stat.members.len() == 2)
    };
    wait(&|| stores.iter().all(joined));
    let ids: Vec<BlockId> = (0..128 * ROUNDS).map(key).collect();
    let memory = agents[0].allocate(64).expect("memory");
    let started = Instant::now();
    for chunk in ids.chunks(1024) {
        let blocks: Vec<Block> = chunk.iter().map(|id| Block::new(*id, 0).first()).collect();
        let put = stores[0].put(&space(), &memory, &blocks).expect("accepted");
        assert!(put.wait().expect("an answer").iter().all(|outcome| outcome.is_there()));
    }
    // Each block is told to two of the three, of which one may be the holder itself.
    let told = |store: &Store| store.members().expect("a store").map_or(0, |stat| stat.entries);
    wait(&|| told(&stores[1]) + told(&stores[2]) >= ids.len());
    let took = started.elapsed();
    println!(
        "put and told of {} blocks in {took:?}, {:.0} a second",
        ids.len(),
        ids.len() as f64 / took.as_secs_f64()
    );
    let peer = agents[2]
        .peers()
        .into_iter()
        .find(|peer| peer.name() == "a")
        .expect("a peer");
    let echo = std::thread::spawn({
        let agent = agents[0].clone();
        move || {
            for _ in 0..ROUNDS {
                let heard = agent.next_notification(PATIENCE).expect("a notification");
                heard.from.notify(&heard.payload).expect("sent");
            }
        }
    });
    let (mut asked, mut notified) = (Vec::new(), Vec::new());
    for chunk in ids.chunks(128) {
        let start = Instant::now();
        let found = stores[2].find(chunk).expect("asked").wait().expect("an answer");
        asked.push(start.elapsed());
        assert!(found.iter().all(|there| there.is_there()));
        let start = Instant::now();
        peer.notify(b"there and back").expect("sent");
        agents[2].next_notification(PATIENCE).expect("an echo");
        notified.push(start.elapsed());
    }
    echo.join().expect("an echo");
    asked.sort();
    notified.sort();
    let (asked, notified) = (asked[asked.len() / 2], notified[notified.len() / 2]);
    println!(
        "128 blocks found in {asked:?}, a notification there and back in {notified:?}: {:.2} times as long (medians)",
        asked.as_secs_f64() / notified.as_secs_f64()
    );
}
