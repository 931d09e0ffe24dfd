//! The round trip of a notification.

use std::time::{Duration, Instant};

use weft_plan::Time;

use super::{Transfer, print_json};
use crate::complaint::{Complaint, Exit};
use crate::ends::{self, Overrides, PATIENCE};
use crate::pair::{Cast, Pair, Samples};
use crate::table::{Align, Table};

const NOTIFICATION_BYTES: usize = 32;

impl Transfer {
    pub(super) fn notifications(&self, overrides: &Overrides) -> Result<(), Complaint> {
        let mut table = Table::new(&[
            ("transport", Align::Left),
            ("round trip p50", Align::Right),
            ("p99", Align::Right),
            ("samples", Align::Right),
        ]);
        let mut seen = Vec::new();
        for way in &self.transport {
            // Notifications know no kind of memory.
            if seen.contains(&way.transport()) {
                continue;
            }
            seen.push(way.transport());
            let cast = Cast {
                here: "bench",
                there: "partner",
                region_bytes: 4096,
                echo: true,
                at: self.connect(),
            };
            let pair = Pair::start(*way, cast, overrides)?;
            let samples = round_trips(&pair, Duration::from_secs_f64(self.seconds))?;
            let (p50, p99) = (samples.median(), samples.quantile(0.99));
            if self.json {
                print_json(&serde_json::json!({
                    "transport": way.transport(),
                    "notification_bytes": NOTIFICATION_BYTES,
                    "p50_us": p50.as_secs_f64() * 1e6,
                    "p99_us": p99.as_secs_f64() * 1e6,
                    "iterations": samples.count(),
                }))?;
            }
            table.row(vec![
                way.transport().to_string(),
                format!("{:.1}", Time::from(p50)),
                format!("{:.1}", Time::from(p99)),
                samples.count().to_string(),
            ]);
        }
        if !self.json {
            out!("{}", table.render());
        }
        Ok(())
    }
}

fn round_trips(pair: &Pair, budget: Duration) -> Result<Samples, Complaint> {
    let start = Instant::now();
    let mut times = Vec::new();
    let payload = [0x5a; NOTIFICATION_BYTES];
    while times.len() < 100 || start.elapsed() < budget {
        let one = Instant::now();
        pair.peer
            .notify(&payload)
            .map_err(|error| ends::explain(&error, "A notification could not be sent."))?;
        let back = pair.agent.next_notification(PATIENCE);
        times.push(one.elapsed());
        if back.is_none_or(|back| back.payload != payload) {
            return Err(Complaint::new(
                Exit::Differs,
                "A notification did not come back as it was sent.",
            ));
        }
    }
    Ok(Samples::of(times))
}
