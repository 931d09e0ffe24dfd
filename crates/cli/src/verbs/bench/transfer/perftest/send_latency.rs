//! `ib_send_lat`: notifications to and fro.

use std::time::Instant;

use super::figures::Latency;
use super::{LATENCY_BYTES, Mode, Transfer, WARM_UPS};
use crate::complaint::{Complaint, Exit};
use crate::ends::{self, Overrides, PATIENCE};
use crate::pair::{Cast, Pair, Way};

/// What a notification carries at most.
const NOTIFICATION_BYTES_MAX: u64 = 48 << 10;

impl Transfer {
    pub(super) fn send_latency(&self, way: Way, overrides: &Overrides) -> Result<(), Complaint> {
        let mut sizes = self.sizes(LATENCY_BYTES, 1)?;
        sizes.retain(|size| *size <= NOTIFICATION_BYTES_MAX);
        if sizes.is_empty() {
            let sentence = format!(
                "A notification carries at most {}.",
                weft_plan::Bytes(NOTIFICATION_BYTES_MAX)
            );
            return Err(Complaint::new(Exit::Usage, sentence));
        }
        let cast = Cast {
            here: "bench",
            there: "partner",
            region_bytes: 4096,
            echo: true,
            at: self.connect(),
        };
        let pair = Pair::start(way, cast, overrides)?;
        let paths = pair.peer.paths(way.transport());
        self.headline::<Latency>(Mode::SendLat, way, paths, ", half of each round trip")?;
        for bytes in sizes {
            let payload = vec![0x5a; bytes as usize];
            for _ in 0..WARM_UPS {
                round_trip(&pair, &payload)?;
            }
            let (effort, mut times) = (self.effort(), Vec::new());
            while effort.goes_on(times.len() as u64) {
                let start = Instant::now();
                round_trip(&pair, &payload)?;
                times.push(start.elapsed());
            }
            self.report(&Latency {
                mode: Mode::SendLat,
                transport: way.to_string(),
                paths,
                bytes,
                ..Latency::of(&times, 0.5)
            })?;
        }
        Ok(())
    }
}

fn round_trip(pair: &Pair, payload: &[u8]) -> Result<(), Complaint> {
    pair.peer
        .notify(payload)
        .map_err(|error| ends::explain(&error, "A notification could not be sent."))?;
    match pair.agent.next_notification(PATIENCE) {
        Some(back) if back.payload == payload => Ok(()),
        _ => Err(Complaint::new(
            Exit::Differs,
            "A notification did not come back as it was sent.",
        )),
    }
}
