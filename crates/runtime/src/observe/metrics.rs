//! Events as Prometheus metrics.
//!
//! No label carries a peer's name: the number of series stays fixed however many peers come and go.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::event::{Event, word};
use crate::agent::RailCounters;

/// From 1 µs in steps of four: the sixteenth bucket ends at about 18 minutes.
const SECONDS_FIRST: f64 = 1e-6;
const SECONDS_STEP: f64 = 4.0;
const SECONDS_BUCKETS: u16 = 16;

#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
    transfers: Family<Ending, Counter>,
    bytes: Family<Way, Counter>,
    seconds: Family<Way, Histogram, fn() -> Histogram>,
    submitted: Counter,
    sessions: Gauge,
    sessions_closed: Counter,
    sessions_lost: Counter,
    paths_lost: Family<Carrier, Counter>,
    notifications: Family<Sense, Counter>,
    collectives: Family<Called, Histogram, fn() -> Histogram>,
    collective_bytes: Family<Called, Counter>,
    collective_bus_bytes: Family<Called, Counter>,
    dropped: Counter,
    counted: Family<Counted, Counter>,
    /// Asked at every scrape.
    source: Option<Source>,
}

/// Where to ask for what the transports count.
pub(super) struct Source(Box<dyn Fn() -> Vec<RailCounters> + Send>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Counted {
    transport: &'static str,
    event: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ending {
    direction: &'static str,
    transport: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Way {
    direction: &'static str,
    transport: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Carrier {
    transport: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Called {
    function: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sense {
    sense: &'static str,
}

impl Metrics {
    pub(super) fn new(agent: &str) -> Metrics {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("weft"),
            transfers: Family::default(),
            bytes: Family::default(),
            seconds: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(SECONDS_FIRST, SECONDS_STEP, SECONDS_BUCKETS))
            }),
            submitted: Counter::default(),
            sessions: Gauge::default(),
            sessions_closed: Counter::default(),
            sessions_lost: Counter::default(),
            paths_lost: Family::default(),
            notifications: Family::default(),
            collectives: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(SECONDS_FIRST, SECONDS_STEP, SECONDS_BUCKETS))
            }),
            collective_bytes: Family::default(),
            collective_bus_bytes: Family::default(),
            dropped: Counter::default(),
            counted: Family::default(),
            source: None,
        };
        let m = &metrics;
        let identity = vec![
            ("name", agent.to_owned()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        let mut registry = Registry::with_prefix("weft");
        registry.register("agent", "The agent", Info::new(identity));
        registry.register("transfers", "Transfers that ended", m.transfers.clone());
        registry.register("transferred_bytes", "Bytes that transfers moved", m.bytes.clone());
        registry.register("transfer_seconds", "From submission to the end", m.seconds.clone());
        registry.register("transfers_submitted", "Transfers submitted", m.submitted.clone());
        registry.register("sessions", "Live sessions with peers", m.sessions.clone());
        registry.register("sessions_closed", "Sessions closed in order", m.sessions_closed.clone());
        registry.register("sessions_lost", "Sessions lost", m.sessions_lost.clone());
        registry.register("paths_lost", "Paths lost", m.paths_lost.clone());
        registry.register("notifications", "Notifications", m.notifications.clone());
        let watched = "Collectives of a library that is watched, on this rank";
        registry.register("collective_seconds", watched, m.collectives.clone());
        registry.register("collective_bytes", "Bytes of them", m.collective_bytes.clone());
        let bus = "Bytes of them that crossed the slowest link";
        registry.register("collective_bus_bytes", bus, m.collective_bus_bytes.clone());
        registry.register("events_dropped", "Events that found the queue full", m.dropped.clone());
        let counted = "What transports count, all rails together";
        registry.register("transport_events", counted, m.counted.clone());
        metrics.registry = registry;
        metrics
    }

    pub(super) fn count_with(&mut self, source: Box<dyn Fn() -> Vec<RailCounters> + Send>) {
        self.source = Some(Source(source));
    }

    fn ask_source(&self) {
        let Some(Source(source)) = &self.source else { return };
        let mut totals: BTreeMap<(&'static str, &'static str), u64> = BTreeMap::new();
        for rail in source() {
            for (event, count) in rail.counts {
                *totals.entry((rail.transport, event)).or_default() += count;
            }
        }
        for ((transport, event), total) in totals {
            let counter = self.counted.get_or_create(&Counted { transport, event });
            counter.inc_by(total.saturating_sub(counter.get()));
        }
    }

    pub(super) fn count(&mut self, event: &Event) {
        match event {
            Event::SessionEstablished { .. } => {
                self.sessions.inc();
            }
            Event::SessionClosed { .. } => {
                self.sessions.dec();
                self.sessions_closed.inc();
            }
            Event::SessionLost { .. } => {
                self.sessions.dec();
                self.sessions_lost.inc();
            }
            Event::PathLost { transport, .. } => {
                self.paths_lost.get_or_create(&Carrier { transport }).inc();
            }
            Event::TransferSubmitted { .. } => {
                self.submitted.inc();
            }
            Event::TransferEnded {
                transport,
                direction,
                bytes,
                started,
                ended,
                outcome,
                ..
            } => {
                let way = Way {
                    direction: word(*direction),
                    transport,
                };
                let ending = Ending {
                    direction: word(*direction),
                    transport,
                    outcome: outcome.word(),
                };
                self.transfers.get_or_create(&ending).inc();
                self.bytes.get_or_create(&way).inc_by(*bytes);
                self.seconds
                    .get_or_create(&way)
                    .observe(ended.saturating_sub(*started).as_secs_f64());
            }
            Event::NotificationSent { .. } => {
                self.notifications.get_or_create(&Sense { sense: "sent" }).inc();
            }
            Event::NotificationReceived { .. } => {
                self.notifications.get_or_create(&Sense { sense: "received" }).inc();
            }
            Event::CollectiveEnded {
                function,
                bytes,
                bus_bytes,
                started,
                ended,
                ..
            } => {
                let called = Called { function };
                let took = ended.saturating_sub(*started).as_secs_f64();
                self.collectives.get_or_create(&called).observe(took);
                self.collective_bytes.get_or_create(&called).inc_by(*bytes);
                self.collective_bus_bytes.get_or_create(&called).inc_by(*bus_bytes);
            }
            Event::AgentStarted { .. } | Event::AgentStopped | Event::PathOpened { .. } | Event::PathClosed { .. } => {}
        }
    }
}

pub(super) fn render(metrics: &Mutex<Metrics>, dropped: u64) -> String {
    let metrics = metrics.lock().unwrap_or_else(PoisonError::into_inner);
    metrics.ask_source();
    metrics.dropped.inc_by(dropped.saturating_sub(metrics.dropped.get()));
    let mut text = String::new();
    // Writing into a string cannot fail.
    let _ = encode(&mut text, &metrics.registry);
    text
}
