//! Teams behind a proxy whose requests come from kernels: those of `weft-gpu`'s tests of `weft/device.cuh`, unchanged, over shared memory and TCP.

use std::ffi::c_void;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft::proxy::{BadRequest, ProxyOptions, ProxyTeam, TeamFailure};
use weft::{Agent, Device, DeviceMemory, Error, Launch, Module, Peer, Stream, TeamView};
use weft_testing::{Need, has};

const KERNELS: &str = include_str!("../../gpu/tests/kernels/api.ptx");
const ROLE: &str = "PROXY_GPU_TEST_ROLE";
const LONG: Duration = Duration::from_secs(30);
const BUFFERS: u64 = 3;
const REPORT_BYTES: usize = 32;

/// As `Case` in `api.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Case {
    rounds: u32,
    bytes: u32,
    to_shift: u32,
    from_shift: u32,
    stride: u32,
    groups: u32,
    report: u64,
    apart: u64,
}

struct Bench {
    device: Arc<Device>,
    module: Module,
}

fn bench() -> Option<&'static Bench> {
    static KEPT: OnceLock<Bench> = OnceLock::new();
    let open = || {
        // SAFETY: before the driver is loaded, and nothing else here changes the environment.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
        let device = Device::open(0).expect("a device");
        let module = Module::load(&device, KERNELS).expect("kernels");
        Bench { device, module }
    };
    has(Need::Gpu).then(|| KEPT.get_or_init(open))
}

/// Fewer where a sanitizer makes each a thousand times slower.
fn rounds(usual: u32) -> u32 {
    let told = std::env::var("PROXY_TEST_ROUNDS").ok();
    told.and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}

fn agent(transports: &str, name: &str) -> Agent {
    let name = format!("{name}-{}-{transports}", std::process::id());
    let agent = Agent::builder(&name).secret("of the tests of proxies");
    let agent = agent.set("transports", transports).listen("127.0.0.1:0");
    agent.start().expect("an agent")
}

/// Two agents of this process, each with so many ranks, so that kernels of both are on the device at the same time without anybody's help.
struct Both {
    _agents: [Agent; 2],
    teams: [ProxyTeam; 2],
    streams: [Stream; 2],
    reports: DeviceMemory,
    each: usize,
}

fn options(device: &Arc<Device>, peers: Vec<Option<Peer>>, data_bytes: u64) -> ProxyOptions {
    ProxyOptions {
        data_bytes,
        deadline: LONG,
        device: Some(device.clone()),
        ..ProxyOptions::new("kernels", peers)
    }
}

impl Both {
    fn new(bench: &Bench, transports: &str, each: usize, data_bytes: u64) -> Both {
        let agents = [agent(transports, "first"), agent(transports, "second")];
        let there = agents[0].connect(&agents[1].address()).expect("a session");
        let began = Instant::now();
        let back = loop {
            match agents[1].peers().pop() {
                Some(peer) => break peer,
                None => assert!(began.elapsed() < LONG, "nobody comes"),
            }
        };
        let (here, far) = (vec![None; each], |peer: &Peer| vec![Some(peer.clone()); each]);
        let of = [[here.clone(), far(&there)].concat(), [far(&back), here].concat()];
        let [first, second] = of.map(|peers| options(&bench.device, peers, data_bytes));
        let (first, second) = std::thread::scope(|scope| {
            let second = scope.spawn(|| ProxyTeam::join(&agents[1], second));
            let first = ProxyTeam::join(&agents[0], first);
            (
                first.expect("a team"),
                second.join().expect("a thread").expect("a team"),
            )
        });
        let bytes = 2 * each * REPORT_BYTES;
        let reports = DeviceMemory::allocate(&bench.device, bytes as u64).expect("memory");
        reports.write(0, &vec![0; bytes]).expect("zeroed");
        Both {
            _agents: agents,
            teams: [first, second],
            streams: [(); 2].map(|()| Stream::new(&bench.device).expect("a stream")),
            reports,
            each,
        }
    }

    /// What each rank tells: how many bytes were wrong, which first, and a sum.
    fn run(&self, bench: &Bench, kernel: &str, (blocks, threads): (u32, u32), mut case: Case) -> Vec<[u64; 4]> {
        case.report = self.reports.address();
        for (team, stream) in self.teams.iter().zip(&self.streams) {
            let how = Launch {
                grid: (blocks, self.each as u32),
                threads,
                stream: stream.handle(),
            };
            launch(bench, kernel, team.view(team.here().start).expect("a view"), how, case);
        }
        for stream in &self.streams {
            stream.synchronize().expect(kernel);
        }
        let mut bytes = vec![0; 2 * self.each * REPORT_BYTES];
        self.reports.read(0, &mut bytes).expect("read");
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
        let report = |rank: usize| [0, 8, 16, 24].map(|at| word(rank * REPORT_BYTES + at));
        (0..2 * self.each).map(report).collect()
    }

    fn check(&self, what: &str) {
        for team in &self.teams {
            team.check().unwrap_or_else(|error| panic!("{what}: {error}"));
        }
    }
}

fn launch(bench: &Bench, kernel: &str, mut view: TeamView, how: Launch, mut case: Case) {
    let mut parameters: [*mut c_void; 2] = [(&raw mut view).cast(), (&raw mut case).cast()];
    // SAFETY: a team and a case, as the kernels have them; all memory lives until the streams have been waited for.
    unsafe { bench.module.launch(kernel, how, &mut parameters) }.expect(kernel);
}

fn case(bytes: u32, (to_shift, from_shift): (u32, u32), groups: u32, rounds: u32) -> Case {
    Case {
        rounds,
        bytes,
        to_shift,
        from_shift,
        stride: (bytes + 32).next_multiple_of(128),
        groups,
        report: 0,
        apart: 0,
    }
}

/// Scopes with their blocks, threads and groups.
const SCOPES: [(&str, u32, u32, u32); 3] = [("thread", 1, 24, 24), ("warp", 2, 64, 4), ("block", 2, 128, 2)];
/// Inline, from the heap, in several parts where the bytes are in no heap; lengths and places are odd.
const LIES: [(u32, u32, u32); 4] = [(8, 0, 0), (191, 3, 7), (1021, 5, 12), (40_001, 1, 2)];

fn shapes(what: &str, apart: bool, each_shape: impl Fn(&[[u64; 4]], &str)) {
    let Some(bench) = bench() else { return };
    for (transports, each) in [("shared_memory", 1), ("shared_memory", 2), ("tcp", 1)] {
        for (scope, blocks, threads, groups) in SCOPES {
            for (bytes, to, from) in LIES {
                // A thread that copies alone takes its time.
                let bytes = if scope == "thread" { bytes.min(257) } else { bytes };
                let mut case = case(
                    bytes,
                    (to, from),
                    groups,
                    rounds(if transports == "tcp" { 50 } else { 300 }),
                );
                let data = u64::from(groups) * BUFFERS * u64::from(case.stride);
                let both = Both::new(bench, transports, each, data);
                let beside = 2 * each as u64 * u64::from(groups) * u64::from(case.stride);
                let memory = DeviceMemory::allocate(&bench.device, beside).expect("memory");
                case.apart = if apart { memory.address() } else { 0 };
                let told = format!("{what}_{scope}, {transports}, {each} ranks each, {case:?}");
                let reports = both.run(bench, &format!("{what}_{scope}"), (blocks, threads), case);
                both.check(&told);
                each_shape(&reports, &told);
            }
        }
    }
}

fn nothing_wrong(reports: &[[u64; 4]], told: &str) {
    for (rank, [wrong, first, ..]) in reports.iter().enumerate() {
        assert_eq!(*wrong, 0, "{told}: rank {rank}, the first {first:#x}");
    }
}

#[test]
fn what_is_put_through_the_proxy_and_signalled_is_there() {
    for apart in [false, true] {
        shapes("exchange", apart, nothing_wrong);
    }
}

#[test]
fn what_is_got_through_the_proxy_after_a_barrier_is_there() {
    for apart in [false, true] {
        shapes("collect", apart, nothing_wrong);
    }
}

#[test]
fn every_count_is_counted_once() {
    let Some(bench) = bench() else { return };
    for (transports, each) in [("shared_memory", 1), ("shared_memory", 2), ("tcp", 1)] {
        for (scope, blocks, threads, groups) in SCOPES {
            let case = case(1, (0, 0), groups, rounds(100));
            let both = Both::new(bench, transports, each, 0);
            let reports = both.run(bench, &format!("count_{scope}"), (blocks, threads), case);
            both.check(scope);
            let ranks = 2 * each as u64;
            let all = u64::from(case.rounds) * u64::from(groups) * ranks;
            let sum: u64 = reports.iter().map(|[_, _, sum, _]| sum).sum();
            assert_eq!(sum, ranks * (all * (all - 1) / 2), "{transports}, {each} each, {scope}");
        }
    }
}

fn failure(team: &ProxyTeam) -> TeamFailure {
    match team.check() {
        Err(Error::Team(failed)) => failed.failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_kernel_that_asks_for_something_impossible_ends_its_team_and_no_more() {
    let Some(bench) = bench() else { return };
    let both = Both::new(bench, "shared_memory", 1, 1 << 16);
    // More than there is of the heap, in parts of which the first few fit.
    let memory = DeviceMemory::allocate(&bench.device, 1 << 17).expect("memory");
    let case = Case {
        report: both.reports.address(),
        apart: memory.address(),
        stride: 128,
        ..case(1 << 17, (0, 0), 1, 1)
    };
    let how = Launch {
        grid: (1, 1),
        threads: 32,
        stream: both.streams[0].handle(),
    };
    let view = both.teams[0].view(0).expect("a view");
    launch(bench, "flood_warp", view, how, case);
    both.streams[0].synchronize().expect("the kernel ends");
    let told = failure(&both.teams[0]);
    assert!(
        matches!(told, TeamFailure::Refused(BadRequest::OutOfBounds { .. })),
        "{told:?}"
    );
    let began = Instant::now();
    while both.teams[1].check().is_ok() {
        assert!(began.elapsed() < LONG, "nobody tells it");
    }
    assert_eq!(failure(&both.teams[1]), TeamFailure::GaveUp { peer: 0 });
}

#[test]
fn second_process() {
    let Ok(transports) = std::env::var(ROLE) else { return };
    let agent = agent(&transports, "second");
    println!("> {}", agent.address());
    std::io::stdout().flush().expect("somebody reads");
    let began = Instant::now();
    let peer = loop {
        match agent.peers().pop() {
            Some(peer) => break peer,
            None => assert!(began.elapsed() < LONG, "nobody comes"),
        }
    };
    let _team = ProxyTeam::join(&agent, ProxyOptions::new("killed", vec![Some(peer), None])).expect("a team");
    println!("> ready");
    std::thread::sleep(LONG);
}

#[test]
fn a_peer_that_is_killed_ends_the_kernel_that_waits_for_it() {
    let Some(bench) = bench() else { return };
    for transports in ["shared_memory", "tcp"] {
        let mut process = Command::new(std::env::current_exe().expect("the test binary"))
            .args(["--exact", "second_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, transports)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the second process starts");
        let mut lines = BufReader::new(process.stdout.take().expect("its output")).lines();
        let mut line = || loop {
            let line = lines.next().expect("it goes on").expect("text");
            if let Some(told) = line.split("> ").nth(1) {
                break told.to_owned();
            }
        };
        let agent = agent(transports, "first");
        let peer = agent.connect(&line()).expect("a session");
        let options = ProxyOptions {
            device: Some(bench.device.clone()),
            deadline: Duration::from_secs(600),
            ..ProxyOptions::new("killed", vec![None, Some(peer)])
        };
        let team = ProxyTeam::join(&agent, options).expect("a team");
        assert_eq!(line(), "ready");
        let (stream, report) = (
            Stream::new(&bench.device).expect("a stream"),
            DeviceMemory::allocate(&bench.device, 64).expect("memory"),
        );
        let how = Launch {
            grid: (1, 1),
            threads: 64,
            stream: stream.handle(),
        };
        let case = Case {
            report: report.address(),
            ..case(8, (0, 0), 1, 1)
        };
        launch(bench, "wait_in_vain", team.view(0).expect("a view"), how, case);
        std::thread::sleep(Duration::from_millis(50));
        team.check().expect("it still waits");
        process.kill().expect("killed");
        let killed = Instant::now();
        stream.synchronize().expect("the kernel ends");
        let took = killed.elapsed();
        assert!(took < LONG, "{took:?}");
        assert_eq!(failure(&team), TeamFailure::Lost { peer: 1 });
        let mut told = [0; 8];
        report.read(16, &mut told).expect("read");
        assert_eq!(u64::from_le_bytes(told), 1, "both waits returned false");
        println!(
            "over {transports} the kernel's wait ended {took:?} after the kill: {}",
            team.check().unwrap_err()
        );
        let _ = process.wait();
    }
}
