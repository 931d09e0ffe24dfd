//! The profiler: what NCCL does, in Weft's trace and metrics, with the bus bandwidth of every kind of call and the ranks that others waited for.
//!
//! It moves no byte, and works beside any net. NCCL tells of events as they begin, change and end, from its own threads; what they hold is looked at once and counted.
//! How long a collective took is told by the GPU's clock, from the first channel's kernel that began to the last that ended. Who was waited for is told by the steps of
//! the net: a receive that waits names the rank that sends, a send that waits the rank that receives.
//!
//! Events come after those that they belong to have ended, so the places of collectives are a ring that is never given back; a summary is told when the communicator ends.

mod summary;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use weft::Time;
use weft::observe::{Event, Observer, ObserverOptions};

use crate::abi::{
    EventDescription, EventStateArgs, LOG_INFO, Logger, NcclResult, Profiler, SUBSYSTEM_INIT, SUBSYSTEM_PROFILE,
};
use crate::boundary::{Failed, guarded, log, log_to, warn};
use crate::options::Options;
use summary::{Called, Summary};

const COLLECTIVE: u64 = 1 << 1;
const POINT_TO_POINT: u64 = 1 << 2;
const PROXY_OP: u64 = 1 << 3;
const PROXY_STEP: u64 = 1 << 4;
const KERNEL: u64 = 1 << 6;
/// What is listened to.
const WANTED: c_int = (COLLECTIVE | POINT_TO_POINT | PROXY_OP | PROXY_STEP | KERNEL) as c_int;

/// States of a step, as NCCL numbers them.
const SEND_GPU_WAIT: c_int = 8;
const SEND_WAIT: c_int = 9;
const RECV_WAIT: c_int = 10;
const RECV_FLUSH_WAIT: c_int = 11;
const RECV_GPU_WAIT: c_int = 12;
const SEND_PEER_WAIT: c_int = 20;
const KERNEL_STOP: c_int = 22;

/// Collectives of one communicator whose events may still come.
const PLACES: usize = 256;
/// After so many more have begun, a collective whose kernels have ended is counted.
const SETTLED_AFTER: usize = 8;

/// What NCCL looks for, from 2.28 on.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclProfiler_v5: Profiler = Profiler {
    name: c"Weft".as_ptr(),
    init,
    start_event,
    stop_event,
    record_event_state,
    finalize,
};

/// One communicator, as this rank sees it.
#[derive(Debug)]
struct Context {
    rank: c_int,
    ranks: u32,
    name: String,
    begun: Instant,
    observer: Observer,
    /// Where summaries are written to, beside NCCL's log.
    directory: Option<std::path::PathBuf>,
    places: Box<[Place]>,
    next: AtomicUsize,
    /// Nanoseconds for which a peer was waited for: to send, and to receive.
    waited: Box<[(AtomicU64, AtomicU64)]>,
    /// And for which this rank's own GPU was.
    own: AtomicU64,
    summary: Mutex<Summary>,
}

/// What a handle that NCCL has points to.
#[derive(Debug)]
enum Handle {
    Call(&'static Place),
    Kernel { place: &'static Place, stop: u64 },
    Op { peer: c_int },
    Step(Step),
}

#[derive(Debug)]
struct Step {
    context: &'static Context,
    peer: c_int,
    state: c_int,
    since: Instant,
}

/// A place of the ring. The handle of what is in it is the same each time.
#[derive(Debug)]
struct Place {
    handle: OnceLock<Held>,
    call: Mutex<Option<Call>>,
}

/// The handle of a place, which is never given back.
#[derive(Clone, Copy, Debug)]
struct Held(*mut c_void);

// SAFETY: the pointer is that of a handle that lives for ever and does not change.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

#[derive(Debug)]
struct Call {
    function: &'static str,
    way: Arc<str>,
    bytes: u64,
    kernels: u32,
    /// On the GPU's clock.
    first: u64,
    last: u64,
    /// On ours, when the last kernel was told to have ended.
    ended: Instant,
}

/// One for all communicators of a process.
fn observer(options: &Options) -> Observer {
    static SHARED: OnceLock<Observer> = OnceLock::new();
    let start = || {
        let process = std::process::id();
        let trace_file = options
            .trace
            .as_ref()
            .map(|directory| directory.join(format!("nccl-{process}.json")));
        let started = Observer::start(ObserverOptions {
            agent: format!("nccl of process {process}"),
            metrics: options.metrics.is_some(),
            metrics_listen: options.metrics,
            trace_file,
        });
        started.unwrap_or_else(|error| {
            warn(&format!("weft: nothing is traced or measured: {error}"));
            Observer::off()
        })
    };
    SHARED.get_or_init(start).clone()
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    comm: u64,
    wanted: *mut c_int,
    name: *const c_char,
    _nodes: c_int,
    ranks: c_int,
    rank: c_int,
    logger: Option<Logger>,
) -> NcclResult {
    log_to(logger);
    guarded("starting the profiler", || {
        if context.is_null() || wanted.is_null() {
            return Err(Failed::argument("there is nowhere to put the answer"));
        }
        let options = Options::of_process()?;
        // SAFETY: NCCL gives a string that ends with a zero, or none.
        let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
        let ranks = u32::try_from(ranks).unwrap_or(1).max(1);
        let named = std::env::var_os("NCCL_PROFILER_PLUGIN").is_some();
        let asked = named || options.trace.is_some() || options.metrics.is_some();
        // NCCL looks for a profiler in the library of the net too; unless somebody has asked for this one, it listens to nothing.
        if !asked {
            // SAFETY: NCCL gives the places for both; without a context nothing is asked for, and nothing is kept.
            unsafe {
                wanted.write(0);
                context.write(std::ptr::null_mut());
            }
            return Ok(());
        }
        let place = || Place {
            handle: OnceLock::new(),
            call: Mutex::new(None),
        };
        let made: &'static Context = Box::leak(Box::new(Context {
            rank,
            ranks,
            name: name
                .filter(|name| !name.is_empty())
                .unwrap_or_else(|| format!("{comm:x}")),
            begun: Instant::now(),
            observer: observer(&options),
            directory: options.trace,
            places: (0..PLACES).map(|_| place()).collect(),
            next: AtomicUsize::new(0),
            waited: (0..ranks).map(|_| Default::default()).collect(),
            own: AtomicU64::new(0),
            summary: Mutex::default(),
        }));
        for place in &made.places {
            let handle: *mut Handle = Box::leak(Box::new(Handle::Call(place)));
            let _ = place.handle.set(Held(handle.cast()));
        }
        // SAFETY: NCCL gives the places for both.
        unsafe {
            wanted.write(WANTED);
            context.write(std::ptr::from_ref(made).cast_mut().cast());
        }
        Ok(())
    })
}

unsafe extern "C" fn start_event(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *mut EventDescription,
) -> NcclResult {
    guarded("an event", || {
        if handle.is_null() {
            return Err(Failed::argument("there is nowhere to put the event"));
        }
        // SAFETY: NCCL gives the place for the handle; the context is what `init` made and lives for ever; the event is there during the call.
        let (context, event) = unsafe {
            handle.write(std::ptr::null_mut());
            (context.cast::<Context>().as_ref(), event.as_ref())
        };
        let (Some(context), Some(event)) = (context, event) else {
            return Ok(());
        };
        // SAFETY: the type says which of the union's members is there, whose strings end with zeros.
        let begun = unsafe { begin(context, event) };
        if let Some(begun) = begun {
            // SAFETY: as above.
            unsafe { handle.write(begun) };
        }
        Ok(())
    })
}

/// # Safety
/// The event is what its type says.
unsafe fn begin(context: &'static Context, event: &EventDescription) -> Option<*mut c_void> {
    // SAFETY: as the caller says, here and below.
    unsafe {
        match event.kind {
            COLLECTIVE => {
                let told = event.of.coll;
                let bytes = told.count as u64 * size_of_type(told.datatype);
                let way = format!("{}/{}", text(told.algorithm), text(told.protocol)).to_lowercase();
                Some(context.enter(summary::function(&text(told.function)), way.into(), bytes))
            }
            POINT_TO_POINT => {
                let told = event.of.p2p;
                let bytes = told.count as u64 * size_of_type(told.datatype);
                Some(context.enter(summary::function(&text(told.function)), "p2p".into(), bytes))
            }
            // Of an op that is done for another process, the context is an address there.
            PROXY_OP if u32::try_from(event.of.proxy_op.process) != Ok(std::process::id()) => None,
            PROXY_OP => {
                let peer = event.of.proxy_op.peer;
                Some(hand_over(Handle::Op { peer }))
            }
            PROXY_STEP => {
                // An op lives as long as its steps.
                let Some(Handle::Op { peer }) = event.parent.cast::<Handle>().as_ref() else {
                    return None;
                };
                let step = Step {
                    context,
                    peer: *peer,
                    state: -1,
                    since: Instant::now(),
                };
                Some(hand_over(Handle::Step(step)))
            }
            KERNEL => {
                let Some(Handle::Call(place)) = event.parent.cast::<Handle>().as_ref() else {
                    return None;
                };
                let start = event.of.kernel.timer;
                if let Some(call) = hold(&place.call).as_mut() {
                    call.kernels += 1;
                    call.first = call.first.min(start);
                }
                Some(hand_over(Handle::Kernel { place, stop: 0 }))
            }
            _ => None,
        }
    }
}

fn hand_over(handle: Handle) -> *mut c_void {
    Box::into_raw(Box::new(handle)).cast()
}

unsafe extern "C" fn stop_event(handle: *mut c_void) -> NcclResult {
    guarded("the end of an event", || {
        let handle = handle.cast::<Handle>();
        // SAFETY: null, or what `start_event` gave out.
        if matches!(unsafe { handle.as_ref() }, None | Some(Handle::Call(_))) {
            // The kernels of a call come later than its end here.
            return Ok(());
        }
        // SAFETY: NCCL ends an event once, and all but calls were made for it alone.
        match *unsafe { Box::from_raw(handle) } {
            Handle::Step(mut step) => step.change(-1),
            Handle::Kernel { place, stop } => {
                if let Some(call) = hold(&place.call).as_mut() {
                    call.kernels = call.kernels.saturating_sub(1);
                    call.last = call.last.max(stop);
                    call.ended = Instant::now();
                }
            }
            Handle::Op { .. } | Handle::Call(_) => {}
        }
        Ok(())
    })
}

unsafe extern "C" fn record_event_state(handle: *mut c_void, state: c_int, args: *mut EventStateArgs) -> NcclResult {
    guarded("the state of an event", || {
        // SAFETY: null, or what `start_event` gave out; one thread at a time has an event.
        match unsafe { handle.cast::<Handle>().as_mut() } {
            Some(Handle::Step(step)) => step.change(state),
            Some(Handle::Kernel { stop, .. }) if state == KERNEL_STOP && !args.is_null() => {
                // SAFETY: the arguments of this state are the time.
                *stop = unsafe { (*args).timer };
            }
            _ => {}
        }
        Ok(())
    })
}

unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guarded("ending the profiler", || {
        // SAFETY: what `init` made, which lives for ever.
        if let Some(context) = unsafe { context.cast::<Context>().as_ref() } {
            context.end();
        }
        Ok(())
    })
}

impl Context {
    /// Begins a call in the next place of the ring.
    fn enter(&'static self, function: &'static str, way: Arc<str>, bytes: u64) -> *mut c_void {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= SETTLED_AFTER {
            self.settle(&self.places[(number - SETTLED_AFTER) % PLACES], false);
        }
        let place = &self.places[number % PLACES];
        self.settle(place, true);
        *hold(&place.call) = Some(Call {
            function,
            way,
            bytes,
            kernels: 0,
            first: u64::MAX,
            last: 0,
            ended: self.begun,
        });
        place.handle.get().map_or(std::ptr::null_mut(), |held| held.0)
    }

    /// Counts a call that is over, or that its place is wanted back from.
    fn settle(&self, place: &Place, by_force: bool) {
        let mut held = hold(&place.call);
        let over = held
            .as_ref()
            .is_some_and(|call| call.kernels == 0 && call.last > call.first);
        if !over && !by_force {
            return;
        }
        let Some(call) = held.take().filter(|_| over) else {
            return;
        };
        drop(held);
        let took = call.last - call.first;
        let bus_bytes = summary::bus_bytes(call.function, call.bytes, self.ranks);
        let ended = Time::from(call.ended.saturating_duration_since(self.begun));
        let (function, way, bytes) = (call.function, call.way.clone(), call.bytes);
        self.observer.trace(ended, || Event::CollectiveEnded {
            function,
            way,
            bytes,
            bus_bytes,
            started: ended.saturating_sub(Time::from_ns(took)),
            ended,
        });
        hold(&self.summary).add(
            Called {
                function,
                way: call.way,
                bytes,
            },
            bus_bytes,
            took,
        );
    }

    fn end(&self) {
        self.places.iter().for_each(|place| self.settle(place, true));
        self.observer.flush();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let waited: Vec<(u64, u64)> = self
            .waited
            .iter()
            .map(|(send, recv)| (load(send), load(recv)))
            .collect();
        let text = hold(&self.summary).tell(&summary::Seen {
            rank: self.rank,
            ranks: self.ranks,
            name: &self.name,
            waited: &waited,
            own: load(&self.own),
        });
        for line in text.lines() {
            log(LOG_INFO, SUBSYSTEM_INIT | SUBSYSTEM_PROFILE, line);
        }
        if let Some(directory) = &self.directory {
            let path = directory.join(format!("nccl-{}-rank{}.txt", self.name.replace('/', "_"), self.rank));
            if let Err(error) = std::fs::write(&path, text) {
                warn(&format!(
                    "weft: the summary is not written to {}: {error}",
                    path.display()
                ));
            }
        }
    }
}

impl Step {
    /// What it was in until now is counted.
    fn change(&mut self, state: c_int) {
        let now = Instant::now();
        let took = u64::try_from(now.duration_since(self.since).as_nanos()).unwrap_or(u64::MAX);
        let peer = usize::try_from(self.peer)
            .ok()
            .and_then(|peer| self.context.waited.get(peer));
        let counted = match (self.state, peer) {
            (SEND_PEER_WAIT | SEND_WAIT, Some((_, to_receive))) => Some(to_receive),
            (RECV_WAIT, Some((to_send, _))) => Some(to_send),
            (SEND_GPU_WAIT | RECV_GPU_WAIT | RECV_FLUSH_WAIT, _) => Some(&self.context.own),
            _ => None,
        };
        if let Some(counted) = counted {
            counted.fetch_add(took, Ordering::Relaxed);
        }
        (self.state, self.since) = (state, now);
    }
}

/// # Safety
/// The string ends with a zero, or is none.
unsafe fn text(string: *const c_char) -> String {
    match string.is_null() {
        true => "unknown".to_owned(),
        // SAFETY: as the caller says.
        false => unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned(),
    }
}

/// How long an element is, by the name that NCCL has for its type; 1 where it is not known.
///
/// # Safety
/// As for [`text`].
unsafe fn size_of_type(name: *const c_char) -> u64 {
    // SAFETY: as the caller says.
    match unsafe { text(name) }.as_str() {
        "ncclInt32" | "ncclUint32" | "ncclFloat32" => 4,
        "ncclInt64" | "ncclUint64" | "ncclFloat64" => 8,
        "ncclFloat16" | "ncclBfloat16" => 2,
        _ => 1,
    }
}

fn hold<T>(held: &Mutex<T>) -> MutexGuard<'_, T> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}
