//! What a thread that turns the core leaves to the progress thread.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;

use weft_protocol::agent::{Reach, Settings, Slot};
use weft_protocol::region::Region;
use weft_protocol::session::{Config, Secret};
use weft_protocol::transport::{Capabilities, Op, OpId, PathId, PeerAddress, Signal, Transport};
use weft_protocol::{Epoch, Grant, Loss, Refusal};

use super::*;

/// How long the far end of whatever this is about takes.
const WAIT: Time = Time::from_ms(20);
/// Longer than any of this takes on a crowded machine.
const FOREVER: Time = Time::from_secs(60);

/// A transport whose descriptor stays silent: all it ever has to do is at an instant that it decides on while it is polled.
#[derive(Debug)]
struct Alarm {
    capabilities: Capabilities,
    silent: (UnixStream, UnixStream),
    state: Arc<AlarmState>,
    due: Option<Time>,
}

#[derive(Debug, Default)]
struct AlarmState {
    /// The next poll sets the alarm.
    set: AtomicBool,
    /// It was polled when the alarm was due.
    heard: AtomicBool,
}

impl Transport for Alarm {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn register(&mut self, _region: &Region) -> Result<Grant, Refusal> {
        Err(Refusal::Unsupported)
    }
    fn release(&mut self, _key: &RegionKey) -> Result<Progress, Refusal> {
        Err(Refusal::UnknownKey)
    }
    fn open(&mut self, _peer: &PeerAddress, _now: Time) -> Result<PathId, Loss> {
        Err(Loss::Unreachable)
    }
    fn vouch(&mut self, _path: PathId) {}
    fn close(&mut self, _path: PathId) {}
    fn post(&mut self, _path: PathId, _ops: &[Op], _now: Time) -> Result<usize, Loss> {
        Err(Loss::Closed)
    }
    fn cancel(&mut self, _path: PathId, _op: OpId, _now: Time) {}
    fn poll(&mut self, now: Time, _signals: &mut Vec<Signal>) -> Progress {
        if self.due.is_some_and(|due| due <= now) {
            self.due = None;
            self.state.heard.store(true, Ordering::Release);
        }
        if self.state.set.swap(false, Ordering::AcqRel) {
            self.due = Some(now.saturating_add(WAIT));
            return Progress::Busy;
        }
        Progress::Idle
    }
}

impl Live for Alarm {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.silent.0.as_fd()
    }
    fn next_timeout(&self) -> Option<Time> {
        self.due
    }
}

/// Runs `turn` once while the progress thread sleeps and the alarm is about to be set, and waits until the alarm is heard.
fn heard_after(turn: impl FnOnce(&Shared) + Send) {
    let state = Arc::new(AlarmState::default());
    let alarm = Alarm {
        capabilities: Capabilities::new("alarm", PeerAddress("alarm:".to_owned()), Vec::new()),
        silent: UnixStream::pair().unwrap(),
        state: state.clone(),
        due: None,
    };
    let slot: Slot<dyn Live> = Slot {
        reach: Reach::Anywhere,
        preference: 0,
        paths: 1,
        transport: Box::new(alarm),
    };
    let settings = Settings::new(Config::new("sleeper", Epoch(1), Secret::new(b"secret")));
    let core = Core::new(settings, vec![slot], Box::new(|| [7; 32]));
    let shared = Shared::new(World::new(core), Clock::start(), Time::ZERO, Observer::off()).unwrap();
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        let deadline = shared.clock.now().saturating_add(FOREVER);
        while !is_so() {
            assert!(shared.clock.now() < deadline, "never: {what}");
            thread::sleep(Duration::from_micros(100));
        }
    };
    thread::scope(|scope| {
        // Ends the others also where an assertion fails.
        let _stop = Stop(&shared);
        scope.spawn(|| shared.run());
        until("the progress thread sleeps", &|| shared.is_asleep());
        state.set.store(true, Ordering::Release);
        scope.spawn(|| turn(&shared));
        until("the alarm is heard", &|| state.heard.load(Ordering::Acquire));
    });
}

struct Stop<'a>(&'a Shared);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[test]
fn a_transports_timer_that_a_poller_has_set_wakes_the_progress_thread() {
    heard_after(Shared::turn);
}

#[test]
fn a_transports_timer_that_a_waiter_has_set_wakes_the_progress_thread_when_the_waiter_leaves() {
    heard_after(|shared| assert_eq!(shared.wait_until(Time::ZERO, |_| None::<()>), None));
}

#[test]
fn a_transports_timer_that_a_waiter_has_set_wakes_the_progress_thread_when_the_waiter_sleeps() {
    heard_after(|shared| assert_eq!(shared.wait_until(Time::MAX, |_| None::<()>), None));
}

#[test]
fn a_transports_timer_is_heard_by_whoever_has_taken_over_and_by_the_progress_thread_when_it_has_the_turns_back() {
    heard_after(|shared| {
        let turns = Turns::take(Some(shared));
        turns.turn();
        assert!(shared.is_taken_over());
        // A wait that nobody else turns for has to turn by itself until its end.
        let until = shared.clock.now().saturating_add(Time::from_ms(1));
        assert_eq!(shared.wait_until(until, |_| None::<()>), None);
    });
}
