//! A process with the net's table in it, and the pipes to another.

use std::ffi::{CStr, c_int, c_void};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_net_weft::abi::{
    CollectiveEvent, EventDescription, EventOf, EventStateArgs, HANDLE_BYTES, KernelEvent, NcclResult, Net, Profiler,
    PropertiesV11, ProxyOpEvent,
};
use weft_protocol::Seeded;

const ROLE: &str = "NCCL_TEST_ROLE";
const SECRET: &str = "nineteen bytes or so";
const PATIENCE: Duration = Duration::from_secs(240);

/// Over what the two processes reach each other.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    SharedMemory,
    Tcp,
}

/// The library, as NCCL loads it.
pub struct Library(*mut c_void);

pub fn library() -> Library {
    let test = std::env::current_exe().expect("this binary");
    let path = test.with_file_name("libnccl_net_weft.so");
    let path = std::ffi::CString::new(path.to_str().expect("a path")).expect("a path");
    // SAFETY: the library has nothing that runs when it is loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "{path:?} is loaded");
    Library(handle)
}

impl Library {
    pub fn net<P>(&self, symbol: &CStr) -> &'static Net<P> {
        // SAFETY: the library stays loaded until the process ends, and the symbol is a table of this layout.
        unsafe {
            let table = libc::dlsym(self.0, symbol.as_ptr());
            assert!(!table.is_null(), "{symbol:?} is exported");
            &*table.cast()
        }
    }
}

/// Lines to and from the other process.
pub struct Pipe<'a> {
    out: &'a mut dyn Write,
    lines: &'a mut dyn BufRead,
}

impl Pipe<'_> {
    fn say(&mut self, line: &str) {
        writeln!(self.out, "@{line}").expect("the other process listens");
        self.out.flush().expect("the other process listens");
    }
    /// The test's own harness talks too: what is for us begins with a mark.
    fn hear(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).expect("a line") == 0 {
                return None;
            }
            if let Some((_, said)) = line.trim_end().split_once('@') {
                return Some(said.to_owned());
            }
        }
    }
}

/// The second process.
pub struct Far {
    process: Child,
    out: std::process::ChildStdin,
    lines: BufReader<std::process::ChildStdout>,
    _alone: MutexGuard<'static, ()>,
}

impl Far {
    pub fn start(way: Way) -> Far {
        Far::with_secret(way, SECRET)
    }

    pub fn with_secret(way: Way, secret: &str) -> Far {
        // Where tests share a process they take turns: it has one agent, and one environment.
        static TURNS: Mutex<()> = Mutex::new(());
        let alone = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        set_own(way);
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "second_process", "--nocapture", "--test-threads=1"])
            .envs(variables(way, secret))
            .env(ROLE, "second")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the second process");
        let out = process.stdin.take().expect("its input");
        let lines = BufReader::new(process.stdout.take().expect("its output"));
        Far {
            process,
            out,
            lines,
            _alone: alone,
        }
    }

    pub fn pipe(&mut self) -> Pipe<'_> {
        Pipe {
            out: &mut self.out,
            lines: &mut self.lines,
        }
    }
    pub fn say(&mut self, line: &str) {
        self.pipe().say(line);
    }
    pub fn hear(&mut self) -> String {
        self.pipe().hear().expect("a word of the second process")
    }
    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of ours that was not waited for.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }
    pub fn end(mut self) {
        self.say("end");
        assert!(self.process.wait().expect("its end").success());
    }
    pub fn kill(mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn variables(way: Way, secret: &str) -> Vec<(&'static str, String)> {
    let transports = match way {
        Way::SharedMemory => "shared_memory,tcp",
        Way::Tcp => "tcp",
    };
    vec![
        ("WEFT_TRANSPORTS", transports.to_owned()),
        ("WEFT_SECRET", secret.to_owned()),
        ("WEFT_LISTEN", "127.0.0.1:0".to_owned()),
        ("WEFT_HEARTBEAT", "200ms".to_owned()),
        ("WEFT_SILENCE_MAX", "2s".to_owned()),
        ("WEFT_DEADLINE", "5s".to_owned()),
    ]
}

/// The same for this process, which the agent asks when it starts.
fn set_own(way: Way) {
    for (name, value) in variables(way, SECRET) {
        // SAFETY: tests take turns here, and no agent of theirs runs yet.
        unsafe { std::env::set_var(name, value) };
    }
}

pub fn be_second() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let (mut out, mut lines) = (std::io::stdout(), BufReader::new(std::io::stdin()));
    let mut pipe = Pipe {
        out: &mut out,
        lines: &mut lines,
    };
    let mut comms = None;
    let first = pipe.hear();
    if first.as_deref() == Some("connect only") {
        Comms::refused(&mut pipe);
        std::thread::sleep(PATIENCE);
        return;
    }
    if let Some(handle) = first {
        comms = Some(Comms::connect_to(&mut pipe, &handle));
    }
    while let Some(said) = pipe.hear() {
        let words: Vec<&str> = said.split(' ').collect();
        match words[..] {
            ["exchange", messages, seed] => {
                let comms: &mut Comms = comms.as_mut().expect("channels");
                comms.exchange(messages.parse().expect("a number"), seed.parse().expect("a number"), 1);
                pipe.say("exchanged");
            }
            ["end"] => break,
            _ => panic!("{said:?}"),
        }
    }
    if let Some(comms) = comms {
        comms.close();
    }
}

/// A channel in each direction, and the memory for what goes over them.
pub struct Comms {
    net: &'static Net<PropertiesV11>,
    context: *mut c_void,
    send: *mut c_void,
    receive: *mut c_void,
    memory: Box<[u8]>,
    registration: *mut c_void,
    unregistered: bool,
}

/// The longest message, and how many slots of it there are in each direction: eight groups of eight to receive, 32 to send.
const LONGEST: usize = 192 << 10;
const GROUPS: usize = 8;
const SENDS: usize = 32;
const SLOTS: usize = GROUPS * 8 + SENDS;
const GUARD: u8 = 0xa5;

impl Comms {
    pub fn connect(pipe: &mut Pipe<'_>) -> Comms {
        Comms::with(pipe, None)
    }
    fn connect_to(pipe: &mut Pipe<'_>, handle: &str) -> Comms {
        Comms::with(pipe, Some(handle))
    }

    /// What comes of connecting where it must not succeed.
    pub fn refused(pipe: &mut Pipe<'_>) -> NcclResult {
        let (net, context) = init();
        let (mut handle, listener) = listen(net, context);
        pipe.say(&hex(&handle));
        handle = unhex(&pipe.hear().expect("a handle"));
        let begun = Instant::now();
        let mut send = std::ptr::null_mut();
        let result = loop {
            // SAFETY: context and handle are the net's own.
            let result = unsafe {
                (net.connect)(
                    context,
                    0,
                    handle.as_mut_ptr().cast(),
                    &raw mut send,
                    std::ptr::null_mut(),
                )
            };
            assert!(send.is_null() && begun.elapsed() < PATIENCE, "let in, or never told");
            if result != NcclResult::SUCCESS {
                break result;
            }
        };
        // SAFETY: what the net handed over is given back once.
        unsafe {
            (net.close_listen)(listener);
            (net.finalize)(context);
        }
        result
    }

    fn with(pipe: &mut Pipe<'_>, handle: Option<&str>) -> Comms {
        let (net, context) = init();
        let (own, listener) = listen(net, context);
        pipe.say(&hex(&own));
        let mut handle = unhex(&handle.map_or_else(|| pipe.hear().expect("a handle"), str::to_owned));
        let (mut send, mut receive): (*mut c_void, *mut c_void) = (std::ptr::null_mut(), std::ptr::null_mut());
        let none = std::ptr::null_mut();
        let begun = Instant::now();
        while send.is_null() || receive.is_null() {
            // SAFETY: context, handle and listener are the net's own.
            unsafe {
                if send.is_null() {
                    let result = (net.connect)(context, 0, handle.as_mut_ptr().cast(), &raw mut send, none);
                    assert_eq!(result, NcclResult::SUCCESS);
                }
                if receive.is_null() {
                    assert_eq!((net.accept)(listener, &raw mut receive, none), NcclResult::SUCCESS);
                }
            }
            assert!(begun.elapsed() < PATIENCE, "no channel comes about");
        }
        // SAFETY: as above.
        unsafe { assert_eq!((net.close_listen)(listener), NcclResult::SUCCESS) };
        let mut memory = vec![0u8; SLOTS * (LONGEST + 64)].into_boxed_slice();
        let mut registration = std::ptr::null_mut();
        let (at, len) = (memory.as_mut_ptr().cast(), memory.len());
        // SAFETY: the memory stays where it is until it is deregistered. The second time it is known already.
        unsafe {
            let mut again = std::ptr::null_mut();
            assert_eq!(
                (net.reg_mr)(send, at, len, 1, &raw mut registration),
                NcclResult::SUCCESS
            );
            assert_eq!((net.reg_mr)(receive, at, len, 1, &raw mut again), NcclResult::SUCCESS);
            assert_eq!((net.dereg_mr)(receive, again), NcclResult::SUCCESS);
        }
        Comms {
            net,
            context,
            send,
            receive,
            memory,
            registration,
            unregistered: false,
        }
    }

    fn isend(&self, slot: usize, len: usize, tag: i32) -> *mut c_void {
        let mut request = std::ptr::null_mut();
        let at = self.memory[slot * (LONGEST + 64)..].as_ptr().cast_mut().cast();
        // SAFETY: the bytes lie in what was registered.
        let result = unsafe {
            let none = std::ptr::null_mut();
            (self.net.isend)(self.send, at, len, tag, self.registration, none, &raw mut request)
        };
        assert_eq!(result, NcclResult::SUCCESS);
        assert!(!request.is_null());
        request
    }

    fn irecv(&self, places: &[(usize, usize, i32)]) -> *mut c_void {
        let mut at: Vec<*mut c_void> = places
            .iter()
            .map(|(slot, ..)| self.memory[slot * (LONGEST + 64)..].as_ptr().cast_mut().cast())
            .collect();
        let mut sizes: Vec<usize> = places.iter().map(|(_, size, _)| *size).collect();
        let mut tags: Vec<c_int> = places.iter().map(|(.., tag)| *tag).collect();
        let mut registrations = vec![self.registration; places.len()];
        // What NCCL leaves there as a hint is overwritten.
        let mut request = std::ptr::without_provenance_mut(1);
        // SAFETY: the lists are as long as they are said to be, and the bytes lie in what was registered.
        let result = unsafe {
            (self.net.irecv)(
                self.receive,
                places.len() as c_int,
                at.as_mut_ptr(),
                sizes.as_mut_ptr(),
                tags.as_mut_ptr(),
                registrations.as_mut_ptr(),
                std::ptr::null_mut(),
                &raw mut request,
            )
        };
        assert_eq!(result, NcclResult::SUCCESS);
        request
    }

    pub fn receive_nothing(&self) -> *mut c_void {
        self.irecv(&[(0, 1000, 3), (1, 1000, 4)])
    }

    pub fn send_unwanted(&self, len: usize) -> *mut c_void {
        self.isend(2, len, 3)
    }

    pub fn test(&self, request: *mut c_void) -> (NcclResult, bool) {
        let mut done = 0;
        // SAFETY: the request is under way.
        let result = unsafe { (self.net.test)(request, &raw mut done, std::ptr::null_mut()) };
        (result, done != 0)
    }

    fn sizes_of(&self, request: *mut c_void, count: usize) -> Option<Vec<usize>> {
        let (mut done, mut sizes) = (0, vec![-1; count]);
        // SAFETY: the request is under way, and there is a place for each size.
        let result = unsafe { (self.net.test)(request, &raw mut done, sizes.as_mut_ptr()) };
        assert_eq!(result, NcclResult::SUCCESS);
        (done != 0).then(|| sizes.iter().map(|size| *size as usize).collect())
    }

    /// Sends so many messages and receives as many, many of each under way. Both sides know from the seed what the other sends.
    pub fn exchange(&mut self, messages: u64, seed: u64, side: u64) {
        let mut sends = Plan::new(messages, seed * 2 + side);
        let mut receives = Plan::new(messages, seed * 2 + (1 - side));
        let mut receiving: Vec<Option<(*mut c_void, Vec<Planned>)>> = (0..GROUPS).map(|_| None).collect();
        let mut sending: Vec<Option<*mut c_void>> = vec![None; SENDS];
        let mut next_sends: Vec<Planned> = Vec::new();
        let begun = Instant::now();
        loop {
            let mut idle = true;
            for (at, under_way) in receiving.iter_mut().enumerate() {
                if under_way.is_none()
                    && let Some(group) = receives.next_group()
                {
                    let places: Vec<_> = (0..group.len())
                        .map(|nth| (at * 8 + nth, group[nth].room, group[nth].tag))
                        .collect();
                    for (slot, ..) in &places {
                        let guard = slot * (LONGEST + 64);
                        self.memory[guard..guard + LONGEST + 64].fill(GUARD);
                    }
                    *under_way = Some((self.irecv(&places), group));
                }
                if let Some((request, group)) = under_way.take() {
                    match self.sizes_of(request, group.len()) {
                        None => *under_way = Some((request, group)),
                        Some(sizes) => group.iter().zip(sizes).enumerate().for_each(|(nth, (planned, size))| {
                            assert_eq!(size, planned.len);
                            let start = (at * 8 + nth) * (LONGEST + 64);
                            let bytes = &self.memory[start..start + LONGEST + 64];
                            assert!(planned.is_in(bytes), "message {planned:?} has other bytes");
                            assert!(
                                bytes[planned.len..].iter().all(|byte| *byte == GUARD),
                                "bytes after it were written"
                            );
                        }),
                    }
                    idle = false;
                }
            }
            for (at, under_way) in sending.iter_mut().enumerate() {
                if under_way.is_none() {
                    if next_sends.is_empty() {
                        next_sends = sends.next_group().unwrap_or_default();
                        sends.shuffle(&mut next_sends);
                    }
                    if let Some(planned) = next_sends.pop() {
                        let slot = GROUPS * 8 + at;
                        planned.put_in(&mut self.memory[slot * (LONGEST + 64)..]);
                        *under_way = Some(self.isend(slot, planned.len, planned.tag));
                    }
                }
                if let Some(request) = *under_way {
                    idle = false;
                    let (result, done) = self.test(request);
                    assert_eq!(result, NcclResult::SUCCESS);
                    if done {
                        *under_way = None;
                    }
                }
            }
            if idle {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not end");
        }
    }

    pub fn close(mut self) {
        let Comms { net, .. } = self;
        // SAFETY: what the net handed over is given back, once each, in the order in which NCCL does it.
        unsafe {
            assert_eq!((net.dereg_mr)(self.send, self.registration), NcclResult::SUCCESS);
            assert_eq!((net.close_send)(self.send), NcclResult::SUCCESS);
            assert_eq!((net.close_recv)(self.receive), NcclResult::SUCCESS);
            assert_eq!((net.finalize)(self.context), NcclResult::SUCCESS);
        }
        self.unregistered = true;
    }
}

impl Drop for Comms {
    fn drop(&mut self) {
        if !self.unregistered {
            // A test has failed: its memory is still known to the net, which goes on until the process ends.
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}

fn init() -> (&'static Net<PropertiesV11>, *mut c_void) {
    let net = library().net::<PropertiesV11>(c"ncclNetPlugin_v11");
    let mut context = std::ptr::null_mut();
    // SAFETY: the context is put where it is said.
    let result = unsafe { (net.init)(&raw mut context, 1, std::ptr::null_mut(), None, None) };
    assert_eq!(result, NcclResult::SUCCESS);
    (net, context)
}

fn listen(net: &'static Net<PropertiesV11>, context: *mut c_void) -> ([u8; HANDLE_BYTES], *mut c_void) {
    #[repr(align(8))]
    struct Aligned([u8; HANDLE_BYTES]);
    let mut handle = Aligned([0; HANDLE_BYTES]);
    let mut listener = std::ptr::null_mut();
    // SAFETY: a handle has its 128 bytes.
    let result = unsafe { (net.listen)(context, 0, handle.0.as_mut_ptr().cast(), &raw mut listener) };
    assert_eq!(result, NcclResult::SUCCESS);
    (handle.0, listener)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> [u8; HANDLE_BYTES] {
    let mut bytes = [0; HANDLE_BYTES];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex");
    }
    bytes
}

/// One message, as both sides know it.
#[derive(Clone, Debug)]
struct Planned {
    number: u64,
    len: usize,
    room: usize,
    tag: i32,
}

impl Planned {
    fn word(&self, at: usize) -> [u8; 8] {
        (self.number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64).to_le_bytes()
    }
    fn put_in(&self, bytes: &mut [u8]) {
        for (at, piece) in bytes[..self.len].chunks_mut(8).enumerate() {
            piece.copy_from_slice(&self.word(at)[..piece.len()]);
        }
    }
    fn is_in(&self, bytes: &[u8]) -> bool {
        let mut pieces = bytes[..self.len].chunks(8).enumerate();
        pieces.all(|(at, piece)| *piece == self.word(at)[..piece.len()])
    }
}

/// What one side sends.
struct Plan {
    chance: Seeded,
    order: Seeded,
    next: u64,
    end: u64,
}

impl Plan {
    fn new(messages: u64, seed: u64) -> Plan {
        Plan {
            chance: Seeded::new(seed),
            order: Seeded::new(!seed),
            next: 0,
            end: messages,
        }
    }

    /// One to eight messages of as many tags, some of them the same.
    fn next_group(&mut self) -> Option<Vec<Planned>> {
        let count = (1 + self.chance.below(8)).min(self.end - self.next);
        let group: Vec<Planned> = (0..count)
            .map(|nth| {
                self.next += 1;
                let most = match self.chance.below(100) {
                    0..70 => 2 << 10,
                    70..95 => 24 << 10,
                    _ => LONGEST as u64,
                };
                let len = self.chance.below(most + 1) as usize;
                let room = (len + self.chance.below(4096) as usize).min(LONGEST);
                let tag = nth as i32;
                Planned {
                    number: self.next,
                    len,
                    room,
                    tag,
                }
            })
            .collect();
        (!group.is_empty()).then_some(group)
    }

    /// Messages of one group go in any order: their tags differ.
    fn shuffle(&mut self, group: &mut [Planned]) {
        for at in (1..group.len()).rev() {
            group.swap(at, self.order.below(at as u64 + 1) as usize);
        }
    }
}

pub fn fresh_directory() -> std::path::PathBuf {
    let directory = std::env::temp_dir().join(format!("nccl-weft-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).expect("a directory");
    directory
}

/// Tells the profiler of twenty all-reduces among three ranks as NCCL would, and returns its summary.
pub fn profile(directory: &std::path::Path) -> String {
    // SAFETY: no other test reads the environment for the profiler, and the net refuses no variable of this name.
    unsafe { std::env::set_var("NCCL_WEFT_TRACE", directory) };
    // SAFETY: the library stays loaded, and the symbol is a table of this layout.
    let profiler: &Profiler = unsafe {
        let table = libc::dlsym(library().0, c"ncclProfiler_v5".as_ptr());
        assert!(!table.is_null(), "the profiler is exported");
        &*table.cast()
    };
    let (mut context, mut wanted) = (std::ptr::null_mut(), 0);
    // SAFETY: every pointer is to what the table says, and every event is ended once.
    unsafe {
        let name = c"some communicator".as_ptr();
        let made = (profiler.init)(&raw mut context, 5, &raw mut wanted, name, 3, 3, 1, None);
        assert_eq!(made, NcclResult::SUCCESS);
        assert_eq!(wanted & 2, 2, "collectives are wanted");
        for call in 0..20u64 {
            let coll = event(2, std::ptr::null_mut(), EventOf { coll: all_reduce(call) });
            let coll = start(profiler, context, coll);
            // What NCCL calls the end of a collective comes before its kernels.
            (profiler.stop_event)(coll);
            let begin = 1_000_000 * (call + 1);
            let kernels = [(0, begin, begin + 30_000), (1, begin + 20_000, begin + 60_000)];
            let begun = kernels.map(|(channel, timer, stop)| {
                let of = EventOf {
                    kernel: KernelEvent { channel, timer },
                };
                (start(profiler, context, event(64, coll, of)), stop)
            });
            let peer = if call % 4 == 0 { 0 } else { 2 };
            wait_for(profiler, context, coll, peer);
            for (kernel, stop) in begun {
                let mut args = EventStateArgs { timer: stop };
                (profiler.record_event_state)(kernel, 22, &raw mut args);
                (profiler.stop_event)(kernel);
            }
        }
        // What NCCL never began it may still end.
        assert_eq!((profiler.stop_event)(std::ptr::null_mut()), NcclResult::SUCCESS);
        assert_eq!((profiler.finalize)(context), NcclResult::SUCCESS);
    }
    std::fs::read_to_string(directory.join("nccl-some communicator-rank1.txt")).expect("a summary")
}

fn event(kind: u64, parent: *mut c_void, of: EventOf) -> EventDescription {
    let rank = 1;
    EventDescription { kind, parent, rank, of }
}

fn all_reduce(sequence: u64) -> CollectiveEvent {
    CollectiveEvent {
        sequence,
        function: c"AllReduce".as_ptr(),
        send: std::ptr::null(),
        receive: std::ptr::null_mut(),
        count: 1 << 20,
        root: 0,
        datatype: c"ncclFloat32".as_ptr(),
        channels: 2,
        warps: 4,
        algorithm: c"RING".as_ptr(),
        protocol: c"SIMPLE".as_ptr(),
        group: std::ptr::null_mut(),
    }
}

/// # Safety
/// The event is what its type says.
unsafe fn start(profiler: &Profiler, context: *mut c_void, mut event: EventDescription) -> *mut c_void {
    let mut handle = std::ptr::null_mut();
    // SAFETY: as the caller says.
    let result = unsafe { (profiler.start_event)(context, &raw mut handle, &raw mut event) };
    assert_eq!(result, NcclResult::SUCCESS);
    assert!(!handle.is_null());
    handle
}

/// One receive from a peer that takes a millisecond to come.
///
/// # Safety
/// The context and the call are the profiler's.
unsafe fn wait_for(profiler: &Profiler, context: *mut c_void, call: *mut c_void, peer: c_int) {
    let op = ProxyOpEvent {
        process: std::process::id() as c_int,
        channel: 0,
        peer,
        steps: 1,
        chunk: 1 << 20,
        is_send: 0,
    };
    // SAFETY: as the caller says; no state has arguments here.
    unsafe {
        let op = start(profiler, context, event(8, call, EventOf { proxy_op: op }));
        let step = start(
            profiler,
            context,
            event(
                16,
                op,
                EventOf {
                    proxy_op: ProxyOpEvent {
                        process: 0,
                        channel: 0,
                        peer: 0,
                        steps: 0,
                        chunk: 0,
                        is_send: 0,
                    },
                },
            ),
        );
        (profiler.record_event_state)(step, 10, std::ptr::null_mut());
        std::thread::sleep(Duration::from_millis(1));
        (profiler.record_event_state)(step, 12, std::ptr::null_mut());
        (profiler.stop_event)(step);
        (profiler.stop_event)(op);
    }
}
