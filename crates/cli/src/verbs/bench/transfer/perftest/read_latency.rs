//! `ib_read_lat`: one read after another, from post to done, by a thread that polls for it.

use std::time::{Duration, Instant};

use super::figures::Latency;
use super::{LATENCY_BYTES, Mode, Transfer, WARM_UPS};
use crate::complaint::Complaint;
use crate::ends::{self, Overrides};
use crate::pair::{Cast, Pair, Plan, Way, differs};
use crate::pattern::Pattern;
use crate::verbs::bench::transfer::FAR_SEED;
use weft::{Direction, Prepared, Spans, Turns};

/// How long a read may take before somebody who has no core is suspected to be what it waits for.
const CROWDED: Duration = Duration::from_millis(1);

impl Transfer {
    pub(super) fn read_latency(&self, way: Way, overrides: &Overrides) -> Result<(), Complaint> {
        let sizes = self.sizes(LATENCY_BYTES, 1)?;
        let cast = Cast {
            here: "bench",
            there: "partner",
            region_bytes: sizes.iter().max().copied().unwrap_or(0).max(4096),
            echo: false,
            at: self.connect(),
        };
        let mut pair = Pair::start(way, cast, overrides)?;
        pair.partner.fill(FAR_SEED)?;
        let paths = pair.peer.paths(way.transport());
        self.headline::<Latency>(Mode::ReadLat, way, paths, "")?;
        let turns = pair.agent.take_turns();
        for bytes in sizes {
            let all = Spans::contiguous(0, bytes);
            let prepared = pair.prepare(Plan::new(Direction::Read, all.clone(), all.clone()))?;
            for _ in 0..WARM_UPS {
                once(&prepared, &turns)?;
            }
            if let Some(offset) = ends::first_difference(&pair.local, &all, Pattern(FAR_SEED), &all) {
                return Err(differs(&format!("a read of {bytes} bytes over {way}"), offset));
            }
            let (effort, mut times) = (self.effort(), Vec::new());
            while effort.goes_on(times.len() as u64) {
                times.push(once(&prepared, &turns)?);
            }
            self.report(&Latency {
                mode: Mode::ReadLat,
                transport: way.to_string(),
                paths,
                bytes,
                ..Latency::of(&times, 1.0)
            })?;
        }
        Ok(())
    }
}

/// Posts a read and looks for its end without ever leaving the core to others while it is quick.
fn once(prepared: &Prepared, turns: &Turns<'_>) -> Result<Duration, Complaint> {
    let failed = |error: weft::Error| ends::explain(&error, "A read between two healthy ends failed.");
    let start = Instant::now();
    let read = prepared.post().map_err(failed)?;
    while !read.is_ended() {
        turns.turn();
        if start.elapsed() > CROWDED {
            std::thread::yield_now();
        }
    }
    let elapsed = start.elapsed();
    read.wait().map(|_| elapsed).map_err(failed)
}
