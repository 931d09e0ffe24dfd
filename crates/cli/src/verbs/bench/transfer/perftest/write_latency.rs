//! `ib_write_lat`: writes to and fro, each seen by the other end in its memory.

use weft::Access;

use super::figures::Latency;
use super::{LATENCY_BYTES, Mode, Transfer, WARM_UPS};
use crate::complaint::Complaint;
use crate::ends::{self, Overrides};
use crate::pair::{Cast, Pair, Way};
use crate::partner::NEAR_REGION;
use crate::ping_pong::{PingPong, Serve, WORD_BYTES};
use crate::verbs::random_word;

impl Transfer {
    pub(super) fn write_latency(&self, way: Way, overrides: &Overrides) -> Result<(), Complaint> {
        let sizes = self.sizes(LATENCY_BYTES, WORD_BYTES)?;
        let largest = sizes.iter().max().copied().unwrap_or(0);
        let cast = Cast {
            here: "bench",
            there: "partner",
            region_bytes: (4 * largest.next_multiple_of(64)).max(4096),
            echo: false,
            at: self.connect(),
        };
        let mut pair = Pair::start(way, cast, overrides)?;
        pair.agent
            .publish(NEAR_REGION, &pair.local, Access::READ_WRITE)
            .map_err(|error| ends::explain(&error, "The region could not be published."))?;
        let paths = pair.peer.paths(way.transport());
        self.headline::<Latency>(Mode::WriteLat, way, paths, ", half of each round trip")?;
        for bytes in sizes {
            let serve = Serve {
                bytes,
                first: random_word()? >> 2,
            };
            pair.partner.start_ping_pong(serve)?;
            let near = PingPong::new(&pair.agent, &pair.peer, &pair.local, &pair.remote, serve)?;
            let mut effort = self.effort();
            let times = near.serve(|done| {
                let done = done as u64;
                if done == WARM_UPS {
                    effort = self.effort();
                }
                done > WARM_UPS && !effort.goes_on(done + 1 - WARM_UPS)
            });
            let times = times?;
            pair.partner.end_ping_pong()?;
            self.report(&Latency {
                mode: Mode::WriteLat,
                transport: way.to_string(),
                paths,
                bytes,
                ..Latency::of(&times[WARM_UPS as usize..], 0.5)
            })?;
        }
        Ok(())
    }
}
