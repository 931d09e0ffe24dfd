//! `weft/device.cuh` as its users use it: kernels of their own (`kernels/api.cu`) that call all of it, at every scope, between ranks of one process on one device.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft_gpu::{CollectiveError, Device, DeviceMemory, Launch, Module, Stream, Team, TeamSettings, TeamView};
use weft_testing::{Need, has};

const KERNELS: &str = include_str!("kernels/api.ptx");
const BUFFERS: u64 = 3;

/// As `Case` in `kernels/api.cu`.
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

/// What a rank's kernel tells: `Report` there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Report {
    wrong: u64,
    first: u64,
    sum: u64,
    took_ns: u64,
}

const REPORT_BYTES: usize = size_of::<Report>();

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scope {
    Thread,
    Warp,
    Block,
}

impl Scope {
    const ALL: [Scope; 3] = [Scope::Thread, Scope::Warp, Scope::Block];

    fn suffix(self) -> &'static str {
        match self {
            Scope::Thread => "thread",
            Scope::Warp => "warp",
            Scope::Block => "block",
        }
    }
    /// Blocks, threads of each, and groups in all.
    fn shape(self) -> (u32, u32, u32) {
        match self {
            Scope::Thread => (2, 24, 48),
            Scope::Warp => (2, 96, 6),
            Scope::Block => (3, 160, 3),
        }
    }
}

struct Bench {
    device: Arc<Device>,
    module: Module,
}

fn bench() -> Option<&'static Bench> {
    static KEPT: OnceLock<Bench> = OnceLock::new();
    let open = || {
        // Streams that share one of the driver's queues wait for each other, and here kernels of one stream wait for those of others.
        // SAFETY: before the driver is loaded, and nothing else here changes the environment.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
        let device = Device::open(0).expect("a device");
        let module = Module::load(&device, KERNELS).expect("kernels");
        Bench { device, module }
    };
    has(Need::Gpu).then(|| KEPT.get_or_init(open))
}

/// How many times each case is repeated, less where a sanitizer makes each a thousand times slower.
fn rounds() -> u32 {
    let told = std::env::var("DEVICE_TEST_ROUNDS").ok();
    told.and_then(|rounds| rounds.parse().ok()).unwrap_or(1000)
}

fn ranks() -> Vec<usize> {
    match rounds() < 100 {
        true => vec![2, 3],
        false => (2..=8).collect(),
    }
}

struct Ranks {
    team: Arc<Team>,
    streams: Vec<Stream>,
    reports: DeviceMemory,
}

impl Ranks {
    fn new(bench: &Bench, ranks: usize, data_bytes: u64, deadline: Duration) -> Ranks {
        let settings = TeamSettings {
            deadline,
            data_bytes,
            ..TeamSettings::default()
        };
        let reports = DeviceMemory::allocate(&bench.device, (ranks * REPORT_BYTES) as u64).expect("memory");
        reports.write(0, &vec![0; ranks * REPORT_BYTES]).expect("zeroed");
        Ranks {
            team: Team::in_process(&bench.device, ranks, settings).expect("a team"),
            streams: (0..ranks)
                .map(|_| Stream::new(&bench.device).expect("a stream"))
                .collect(),
            reports,
        }
    }

    /// All ranks in one launch, or each in one of its own on its own stream.
    fn run(&self, bench: &Bench, what: &str, scope: Scope, mut case: Case, together: bool) -> Vec<Report> {
        let (blocks, threads, groups) = scope.shape();
        let ranks = self.team.ranks();
        case.report = self.reports.address();
        case.groups = case.groups.min(groups);
        let name = match what {
            "wait_in_vain" => what.to_owned(),
            _ => format!("{what}_{}", scope.suffix()),
        };
        let launches = if together { 1 } else { ranks };
        for (rank, stream) in self.streams.iter().enumerate().take(launches) {
            let mut view: TeamView = self.team.view(rank).expect("a view");
            let how = Launch {
                grid: (blocks, if together { ranks as u32 } else { 1 }),
                threads,
                stream: stream.handle(),
            };
            let mut parameters: [*mut c_void; 2] = [(&raw mut view).cast(), (&raw mut case).cast()];
            // SAFETY: a team and a case, as the kernels have them; all memory lives until the streams have been waited for.
            unsafe { bench.module.launch(&name, how, &mut parameters) }.expect(&name);
        }
        for stream in &self.streams[..launches] {
            stream.synchronize().expect(&name);
        }
        let mut bytes = vec![0; ranks * REPORT_BYTES];
        self.reports.read(0, &mut bytes).expect("read");
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
        let report = |rank: usize| Report {
            wrong: word(rank * REPORT_BYTES),
            first: word(rank * REPORT_BYTES + 8),
            sum: word(rank * REPORT_BYTES + 16),
            took_ns: word(rank * REPORT_BYTES + 24),
        };
        (0..ranks).map(report).collect()
    }
}

fn case(bytes: u32, to_shift: u32, from_shift: u32) -> Case {
    Case {
        rounds: rounds(),
        bytes,
        to_shift,
        from_shift,
        stride: (bytes + 32).next_multiple_of(128),
        groups: u32::MAX,
        report: 0,
        apart: 0,
    }
}

fn data_bytes(case: &Case, scope: Scope) -> u64 {
    u64::from(scope.shape().2) * BUFFERS * u64::from(case.stride)
}

/// Odd lengths, and addresses that are askew to each other.
const LIES: [(u32, u32, u32); 5] = [(8, 0, 0), (1, 3, 7), (33, 1, 1), (1021, 5, 12), (4096, 16, 32)];

/// Runs a kind of kernels in all shapes, and looks at what each rank tells.
fn all_shapes(what: &str, check: impl Fn(&Report) -> Result<(), String>) {
    let Some(bench) = bench() else { return };
    for ranks in ranks() {
        for scope in Scope::ALL {
            for (nth, (bytes, to, from)) in LIES.into_iter().enumerate() {
                // A thread that copies alone takes its time.
                let bytes = if scope == Scope::Thread { bytes.min(257) } else { bytes };
                let case = case(bytes, to, from);
                let seats = Ranks::new(bench, ranks, data_bytes(&case, scope), Duration::from_secs(30));
                let together = (nth + ranks) % 2 == 0;
                let reports = seats.run(bench, what, scope, case, together);
                for (rank, report) in reports.iter().enumerate() {
                    let told = format!("{what}: rank {rank} of {ranks}, {scope:?}, {case:?}, together {together}");
                    seats.team.check(rank).expect(&told);
                    check(report).unwrap_or_else(|error| panic!("{told}: {error}"));
                }
            }
        }
    }
}

fn nothing_wrong(report: &Report) -> Result<(), String> {
    match report.wrong {
        0 => Ok(()),
        wrong => Err(format!("{wrong} bytes, the first {:#x}", report.first)),
    }
}

#[test]
fn what_is_put_and_signalled_is_there() {
    all_shapes("exchange", nothing_wrong);
}

#[test]
fn what_is_got_after_a_barrier_is_there() {
    all_shapes("collect", nothing_wrong);
}

#[test]
fn every_count_is_counted_once() {
    let Some(bench) = bench() else { return };
    for ranks in ranks() {
        for scope in Scope::ALL {
            let case = case(1, 0, 0);
            let seats = Ranks::new(bench, ranks, 0, Duration::from_secs(30));
            let reports = seats.run(bench, "count", scope, case, true);
            let all = u64::from(case.rounds) * u64::from(scope.shape().2) * ranks as u64;
            let sum: u64 = reports.iter().map(|report| report.sum).sum();
            (0..ranks).for_each(|rank| seats.team.check(rank).expect("whole"));
            // Each word has been every number below `all` for exactly one of those who added.
            assert_eq!(sum, ranks as u64 * (all * (all - 1) / 2), "{ranks} ranks, {scope:?}");
        }
    }
}

#[test]
fn a_wait_in_vain_ends_and_says_for_whom() {
    let Some(bench) = bench() else { return };
    let seats = Ranks::new(bench, 2, 0, Duration::from_millis(200));
    let began = Instant::now();
    let reports = seats.run(bench, "wait_in_vain", Scope::Block, case(1, 0, 0), true);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(reports.iter().all(|report| report.sum == 1), "{reports:?}");
    let told = [seats.team.check(0), seats.team.check(1)];
    let known = |told: &Result<(), CollectiveError>| {
        matches!(
            told,
            Err(CollectiveError::PeerTimedOut { .. } | CollectiveError::PeerGaveUp { .. })
        )
    };
    assert!(told.iter().all(known), "{told:?}");
    assert!(
        told.iter()
            .any(|told| matches!(told, Err(CollectiveError::PeerTimedOut { .. }))),
        "{told:?}"
    );
}

/// Not a test of speed: it prints what `docs/device-api.md` tells, and fails only where the bytes do not go.
#[test]
fn how_long_a_signal_takes_is_told() {
    let Some(bench) = bench() else { return };
    for bytes in [8, 256, 4096] {
        for scope in Scope::ALL {
            let case = Case {
                rounds: rounds().max(10) * 10,
                ..case(bytes, 0, 0)
            };
            let seats = Ranks::new(bench, 2, data_bytes(&case, scope), Duration::from_secs(30));
            let reports = seats.run(bench, "ping_pong", scope, case, true);
            seats.team.check(0).expect("whole");
            assert!(reports[0].took_ns > 0);
            println!(
                "put_signal -> wait, {bytes} bytes, {}: {:.2} us one way",
                scope.suffix(),
                reports[0].took_ns as f64 / f64::from(case.rounds) / 2e3
            );
        }
    }
}

#[test]
fn text_that_is_no_kernel_is_refused() {
    let Some(bench) = bench() else { return };
    assert!(Module::load(&bench.device, "\0").is_err());
    assert!(Module::load(&bench.device, "this is no kernel").is_err());
    let how = Launch {
        grid: (1, 1),
        threads: 1,
        stream: 0,
    };
    // SAFETY: there is no such kernel, so nothing is launched.
    assert!(unsafe { bench.module.launch("nobody", how, &mut []) }.is_err());
}
