//! What an agent tells people about itself: typed events, fanned out to `tracing`, to Prometheus metrics and to a Perfetto trace.
//!
//! The progress thread hands an [`Event`] to an [`Observer`] and goes on; a thread of its own writes it down. The queue
//! between them is bounded, and what does not fit is dropped and counted, so that a slow disk or a full pipe never slows a
//! transfer. Without a sink there is no thread, and reporting costs one comparison.
//!
//! ```
//! use weft::observe::{Event, Observer, ObserverOptions};
//! use weft_plan::Time;
//!
//! let observer = Observer::start(ObserverOptions { metrics: true, ..ObserverOptions::new("prefill") })?;
//! observer.report(Time::ZERO, || Event::AgentStarted { address: "127.0.0.1:4000".into() });
//! observer.flush();
//! assert!(observer.metrics().contains("weft_agent_info"));
//! # Ok::<(), weft::observe::ObserveError>(())
//! ```

mod event;
mod log;
mod metrics;
mod serve;
mod trace;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use thiserror::Error;
use tracing::level_filters::LevelFilter;
use weft_fabric::fork::OfProcess;
use weft_plan::Time;

pub use event::{Event, Outcome};
pub use log::print_log;

use crate::agent::RailCounters;
use metrics::Metrics;
use serve::Server;
use trace::TraceFile;

/// Events that may wait to be written down.
const QUEUE_EVENTS_MAX: usize = 8192;
/// How long the writing thread rests between batches. While it rests, handing over an event wakes nobody.
const REST: Duration = Duration::from_millis(5);

/// Where events go.
#[derive(Clone, Debug)]
pub struct ObserverOptions {
    /// The agent's name.
    pub agent: String,
    /// Keep metrics, for [`Observer::metrics`].
    pub metrics: bool,
    /// Keep metrics and serve them over HTTP.
    pub metrics_listen: Option<SocketAddr>,
    pub trace_file: Option<PathBuf>,
}

impl ObserverOptions {
    pub fn new(agent: impl Into<String>) -> ObserverOptions {
        ObserverOptions {
            agent: agent.into(),
            metrics: false,
            metrics_listen: None,
            trace_file: None,
        }
    }
}

#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ObserveError {
    #[error("cannot serve metrics on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("cannot write the trace file {}: {source}", path.display())]
    TraceFile { path: PathBuf, source: std::io::Error },
    #[error("cannot start the observing thread: {0}")]
    Thread(std::io::Error),
    #[error("the log filter {filter:?} is not one: {reason}")]
    LogFilter { filter: String, reason: String },
}

/// Takes events from any thread. Copies share the sinks; the last one to go closes them.
#[derive(Clone, Debug)]
pub struct Observer {
    sinks: Option<Arc<OfProcess<Sinks>>>,
}

impl Observer {
    /// An observer that does nothing and costs nothing.
    pub fn off() -> Observer {
        Observer { sinks: None }
    }

    pub fn start(options: ObserverOptions) -> Result<Observer, ObserveError> {
        let metrics = (options.metrics || options.metrics_listen.is_some()).then(|| Metrics::new(&options.agent));
        let trace = options
            .trace_file
            .map(|path| TraceFile::create(path, &options.agent))
            .transpose()?;
        if metrics.is_none() && trace.is_none() && LevelFilter::current() == LevelFilter::OFF {
            return Ok(Observer::off());
        }
        let every_transfer = metrics.is_some() || trace.is_some();
        let metrics = metrics.map(|metrics| Arc::new(Mutex::new(metrics)));
        let dropped = Arc::new(AtomicU64::new(0));
        let server = match (options.metrics_listen, &metrics) {
            (Some(address), Some(metrics)) => Some(Server::start(address, Arc::clone(metrics), Arc::clone(&dropped))?),
            _ => None,
        };
        let (sender, receiver) = sync_channel(QUEUE_EVENTS_MAX);
        let writer = Writer {
            agent: options.agent,
            metrics: metrics.clone(),
            trace,
        };
        let thread = std::thread::Builder::new()
            .name("weft-observe".to_owned())
            .spawn(move || writer.run(&receiver))
            .map_err(ObserveError::Thread)?;
        let sinks = Sinks {
            sender,
            every_transfer,
            metrics,
            dropped,
            server,
            thread: Some(thread),
        };
        Ok(Observer {
            sinks: Some(Arc::new(OfProcess::new(sinks))),
        })
    }

    /// Where events go, in the process that began to observe. What a forked child does is not its parent's.
    fn sinks(&self) -> Option<&Sinks> {
        self.sinks.as_ref()?.get().ok()
    }

    /// Reports something that happens rarely: an agent, a session or a path came or went, a request was refused.
    pub fn report(&self, now: Time, event: impl FnOnce() -> Event) {
        if let Some(sinks) = self.sinks() {
            sinks.hand_over(Message::Event(now, event()));
        }
    }

    /// Reports something that every transfer does. The event is built only if somebody wants it.
    pub fn trace(&self, now: Time, event: impl FnOnce() -> Event) {
        if let Some(sinks) = self.sinks()
            && (sinks.every_transfer || LevelFilter::current() >= LevelFilter::DEBUG)
        {
            sinks.hand_over(Message::Event(now, event()));
        }
    }

    /// Whether [`trace`](Observer::trace) would do anything.
    pub fn traces(&self) -> bool {
        self.sinks()
            .is_some_and(|s| s.every_transfer || LevelFilter::current() >= LevelFilter::DEBUG)
    }

    /// The metrics as Prometheus reads them; empty where none are kept.
    pub fn metrics(&self) -> String {
        let Some(sinks) = self.sinks() else {
            return String::new();
        };
        let dropped = sinks.dropped.load(Ordering::Relaxed);
        sinks
            .metrics
            .as_ref()
            .map(|metrics| metrics::render(metrics, dropped))
            .unwrap_or_default()
    }

    /// Says where to ask for what the transports count, which the metrics show beside what was reported.
    pub(crate) fn count_with(&self, source: impl Fn() -> Vec<RailCounters> + Send + 'static) {
        if let Some(metrics) = self.sinks().and_then(|sinks| sinks.metrics.as_ref()) {
            let mut metrics = metrics.lock().unwrap_or_else(PoisonError::into_inner);
            metrics.count_with(Box::new(source));
        }
    }

    /// The address that metrics are served on.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.sinks()?.server.as_ref().map(Server::address)
    }

    /// Events that did not fit into the queue.
    pub fn dropped(&self) -> u64 {
        self.sinks().map_or(0, |sinks| sinks.dropped.load(Ordering::Relaxed))
    }

    /// Waits until everything reported before is written down. Not for the data path.
    pub fn flush(&self) {
        if let Some(sinks) = self.sinks() {
            let (done, wait) = sync_channel(1);
            if sinks.sender.send(Message::Flush(done)).is_ok() {
                let _ = wait.recv();
            }
        }
    }
}

#[derive(Debug)]
struct Sinks {
    sender: SyncSender<Message>,
    every_transfer: bool,
    metrics: Option<Arc<Mutex<Metrics>>>,
    dropped: Arc<AtomicU64>,
    server: Option<Server>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Message {
    Event(Time, Event),
    Flush(SyncSender<()>),
    Stop,
}

impl Sinks {
    fn hand_over(&self, message: Message) {
        if let Err(TrySendError::Full(_)) = self.sender.try_send(message) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Sinks {
    fn drop(&mut self) {
        let _ = self.sender.send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Writer {
    agent: String,
    metrics: Option<Arc<Mutex<Metrics>>>,
    trace: Option<TraceFile>,
}

impl Writer {
    fn run(mut self, receiver: &Receiver<Message>) {
        let mut waiting = Vec::new();
        while let Ok(first) = receiver.recv() {
            let mut stop = false;
            for message in std::iter::once(first).chain(receiver.try_iter()) {
                match message {
                    Message::Event(at, event) => self.write(at, &event),
                    Message::Flush(done) => waiting.push(done),
                    Message::Stop => stop = true,
                }
            }
            if let Some(trace) = &mut self.trace {
                trace.flush();
            }
            let flushed = !waiting.is_empty();
            for done in waiting.drain(..) {
                let _ = done.send(());
            }
            if stop {
                break;
            }
            if !flushed {
                std::thread::sleep(REST);
            }
        }
        if let Some(trace) = self.trace {
            trace.finish();
        }
    }

    fn write(&mut self, at: Time, event: &Event) {
        log::write(&self.agent, at, event);
        if let Some(metrics) = &self.metrics {
            metrics.lock().unwrap_or_else(PoisonError::into_inner).count(event);
        }
        if let Some(trace) = &mut self.trace {
            trace.write(at, event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use weft_protocol::Direction;

    fn ended(id: u64, outcome: Outcome) -> Event {
        Event::TransferEnded {
            id,
            peer: "decode".into(),
            transport: "tcp",
            direction: Direction::Read,
            bytes: 4096,
            started: Time::from_us(10),
            ended: Time::from_us(25),
            outcome,
        }
    }

    fn metrics_only() -> ObserverOptions {
        ObserverOptions {
            metrics: true,
            ..ObserverOptions::new("prefill")
        }
    }

    #[test]
    fn nothing_is_built_when_off() {
        let observer = Observer::off();
        observer.report(Time::ZERO, || unreachable!("nobody listens"));
        observer.trace(Time::ZERO, || unreachable!("nobody listens"));
        assert!(!observer.traces());
        assert_eq!(observer.metrics(), "");
    }

    #[test]
    fn metrics_count_what_happened() {
        let observer = Observer::start(metrics_only()).unwrap();
        observer.trace(Time::ZERO, || ended(1, Outcome::Done));
        observer.trace(Time::ZERO, || ended(2, Outcome::Done));
        observer.trace(Time::ZERO, || {
            ended(3, Outcome::Failed(weft_protocol::Failure::Expired))
        });
        observer.flush();
        let text = observer.metrics();
        let line = r#"weft_transfers_total{direction="read",transport="tcp",outcome="done"} 2"#;
        assert!(text.contains(line), "{text}");
        assert!(text.contains(r#"outcome="expired"} 1"#), "{text}");
        assert!(
            text.contains(r#"weft_transferred_bytes_total{direction="read",transport="tcp"} 12288"#),
            "{text}"
        );
    }

    #[test]
    fn metrics_show_what_the_transports_count() {
        let observer = Observer::start(metrics_only()).unwrap();
        let rail = |doorbells| RailCounters {
            transport: "verbs",
            address: "verbs:0".into(),
            counts: vec![("doorbells", doorbells)],
        };
        observer.count_with(move || vec![rail(3), rail(4)]);
        let line = r#"weft_transport_events_total{transport="verbs",event="doorbells"} 7"#;
        for _ in 0..2 {
            let text = observer.metrics();
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn metrics_are_served_and_other_requests_are_not() {
        let listen = ObserverOptions {
            metrics_listen: "127.0.0.1:0".parse().ok(),
            ..ObserverOptions::new("a")
        };
        let observer = Observer::start(listen).unwrap();
        let address = observer.metrics_address().unwrap();
        let ask = |request: &[u8]| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(request).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        };
        assert!(ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").contains("weft_events_dropped_total 0"));
        assert!(ask(b"GET /etc/passwd HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(ask(&[b'x'; 20_000]).is_empty() || ask(&[0xff; 20_000]).starts_with("HTTP/1.1 400"));
        assert!(
            ask(b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"),
            "still serving after garbage"
        );
    }

    #[test]
    fn clients_that_say_nothing_keep_nobody_from_being_served() {
        let listen = ObserverOptions {
            metrics_listen: "127.0.0.1:0".parse().ok(),
            ..ObserverOptions::new("a")
        };
        let observer = Observer::start(listen).unwrap();
        let address = observer.metrics_address().unwrap();
        // More than are served at once. Each of them alone may take two seconds, so that one after the other would take minutes.
        let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut answer = Vec::new();
        stream
            .read_to_end(&mut answer)
            .expect("an answer while others say nothing");
        assert!(answer.starts_with(b"HTTP/1.1 200"));
        // Those that were there for longest have been pushed out.
        let mut oldest = &silent[0];
        oldest.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        assert!(matches!(oldest.read(&mut [0]), Ok(0) | Err(_)));
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let observer = Observer::start(metrics_only()).unwrap();
        let metrics = observer.sinks().and_then(|sinks| sinks.metrics.clone()).unwrap();
        // The writer stands still while the metrics are locked, as it would on a full disk.
        let held = metrics.lock().unwrap();
        for id in 0..2 * QUEUE_EVENTS_MAX as u64 {
            observer.trace(Time::ZERO, || ended(id, Outcome::Done));
        }
        let dropped = observer.dropped();
        assert!(dropped > 0);
        drop(held);
        observer.flush();
        assert!(
            observer
                .metrics()
                .contains(&format!("weft_events_dropped_total {dropped}"))
        );
    }

    #[test]
    fn a_trace_is_json_while_it_grows_and_when_it_is_closed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.json");
        let options = ObserverOptions {
            trace_file: Some(path.clone()),
            ..ObserverOptions::new("a \"quoted\" \u{7}name")
        };
        let observer = Observer::start(options).unwrap();
        observer.report(Time::from_us(1), || Event::PathOpened {
            peer: "b\n".into(),
            transport: "tcp",
        });
        observer.trace(Time::from_us(25), || ended(7, Outcome::Done));
        observer.flush();
        // What a crash would leave behind: readers supply the bracket.
        let growing = std::fs::read_to_string(&path).unwrap() + "]";
        let events: Vec<serde_json::Value> = serde_json::from_str(&growing).unwrap();
        let begin = events.iter().find(|event| event["ph"] == "b").unwrap();
        assert_eq!(begin["ts"], 10.0);
        assert_eq!(begin["args"]["bytes"], 4096);
        drop(observer);
        let closed: Vec<serde_json::Value> = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(closed.len(), events.len());
    }

    #[test]
    fn what_cannot_be_opened_is_a_typed_error() {
        let options = ObserverOptions {
            trace_file: Some("/nonexistent/trace".into()),
            ..ObserverOptions::new("a")
        };
        assert!(matches!(Observer::start(options), Err(ObserveError::TraceFile { .. })));
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let options = ObserverOptions {
            metrics_listen: taken.local_addr().ok(),
            ..ObserverOptions::new("a")
        };
        assert!(matches!(Observer::start(options), Err(ObserveError::Listen { .. })));
    }
}
