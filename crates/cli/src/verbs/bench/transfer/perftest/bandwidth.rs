//! `ib_write_bw` and `ib_read_bw`: messages of one size, a number of them under way at a time.

use std::collections::VecDeque;
use std::time::Instant;

use weft::{Prepared, Transfer as Posted};

use super::counters::Reading;
use super::figures::{Stream, Times};
use super::{BANDWIDTH_BYTES, Effort, Mode, OpChoice, Transfer, WARM_UPS};
use crate::complaint::Complaint;
use crate::ends::{self, Overrides};
use crate::pair::{Cast, Pair, Plan, Way, differs, once};
use crate::partner::Blocks;
use crate::pattern::Pattern;
use crate::verbs::bench::transfer::{FAR_SEED, NEAR_SEED};

/// Scattered blocks lie in a region that has room for so many times as many.
const SPREAD: u64 = 4;

impl Transfer {
    pub(super) fn bandwidth(&self, mode: Mode, op: OpChoice, way: Way, overrides: &Overrides) -> Result<(), Complaint> {
        let messages = self.messages()?;
        let region_bytes = messages.iter().map(|m| m.bytes * m.slots).max().unwrap_or(0).max(4096);
        let cast = Cast {
            here: "bench",
            there: "partner",
            region_bytes,
            echo: false,
            at: self.connect(),
        };
        let mut pair = Pair::start(way, cast, overrides)?;
        let paths = pair.peer.paths(way.transport());
        let depth = self.perftest.depth;
        let about = match self.perftest.blocks {
            Some(blocks) => format!(", {depth} under way, messages of {blocks} scattered blocks"),
            None => format!(", {depth} under way"),
        };
        self.headline::<Stream>(mode, way, paths, &about)?;
        for message in messages {
            let prepared = verified(&mut pair, op, way, message)?;
            let before = Reading::take(&mut pair)?;
            let warm_up = Effort {
                iterations: Some(WARM_UPS),
                ..self.effort()
            };
            stream(&prepared, depth, &warm_up)?;
            let times = stream(&prepared, depth, &self.effort())?;
            let iterations = times.done.len() as u64;
            let blocks = (iterations + WARM_UPS) * message.count;
            let counted = Reading::take(&mut pair)?.since(&before, blocks);
            let (peak, average) = times.rates();
            let (bytes, mib) = (message.total() as f64, f64::from(1 << 20));
            self.report(&Stream {
                mode,
                transport: way.to_string(),
                paths,
                bytes: message.total(),
                blocks: message.count,
                block_bytes: message.bytes,
                iterations,
                depth,
                bw_peak_mib_per_sec: peak * bytes / mib,
                bw_average_mib_per_sec: average * bytes / mib,
                bw_average_gbit_per_sec: average * bytes * 8.0 / 1e9,
                msg_rate_mpps: average / 1e6,
                blocks_per_sec: average * message.count as f64,
                verified: true,
                per_1024_blocks: counted,
            })?;
        }
        Ok(())
    }

    /// What each message consists of: one piece, or scattered blocks.
    fn messages(&self) -> Result<Vec<Blocks>, Complaint> {
        let scattered = |bytes: u64, count: u64| Blocks {
            bytes,
            count,
            slots: count * SPREAD,
            seed: bytes ^ count,
        };
        let whole = |bytes: u64| Blocks {
            bytes,
            count: 1,
            slots: 1,
            seed: bytes,
        };
        match self.perftest.blocks {
            Some(blocks) => {
                let sizes = self.block.iter().map(|size| size.0);
                Ok(sizes.map(|bytes| scattered(bytes, blocks)).collect())
            }
            None => Ok(self.sizes(BANDWIDTH_BYTES, 1)?.into_iter().map(whole).collect()),
        }
    }
}

/// Prepares a message, sends it once and has it compared byte by byte.
fn verified(pair: &mut Pair, op: OpChoice, way: Way, message: Blocks) -> Result<Prepared, Complaint> {
    pair.partner.fill(FAR_SEED)?;
    ends::fill(&pair.local, Pattern(NEAR_SEED));
    let prepared = pair.prepare(Plan::new(op.direction(), message.near(), message.far()))?;
    once(&prepared)?;
    let difference = match op {
        OpChoice::Read => ends::first_difference(&pair.local, &message.near(), Pattern(FAR_SEED), &message.far()),
        OpChoice::Write => pair.partner.check(NEAR_SEED, message)?,
    };
    match difference {
        Some(offset) => Err(differs(
            &format!("a {} of {} × {} over {way}", op.name(), message.bytes, message.count),
            offset,
        )),
        None => Ok(prepared),
    }
}

/// Keeps messages under way until it is enough.
fn stream(prepared: &Prepared, depth: u64, effort: &Effort) -> Result<Times, Complaint> {
    let failed = |error: weft::Error| ends::explain(&error, "A transfer between two healthy processes failed.");
    let start = Instant::now();
    let mut open: VecDeque<Posted> = VecDeque::new();
    let mut times = Times::default();
    loop {
        while (open.len() as u64) < depth && effort.goes_on(times.posted.len() as u64) {
            times.posted.push(start.elapsed());
            open.push_back(prepared.post().map_err(failed)?);
        }
        let Some(first) = open.pop_front() else {
            return Ok(times);
        };
        first.wait().map_err(failed)?;
        times.done.push(start.elapsed());
        while open.front().is_some_and(Posted::is_ended) {
            if let Some(ended) = open.pop_front() {
                ended.wait().map_err(failed)?;
                times.done.push(start.elapsed());
            }
        }
    }
}
