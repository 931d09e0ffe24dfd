//! `weft bench file`: how fast blocks go between memory and a file, as a store that spills them would move them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use console::style;
use serde::Serialize;
use weft::{Agent, FileOptions, Memory, Run, Spans, Transfer};
use weft_fabric::file::{DirectorySupport, Support};
use weft_plan::Bytes;

use super::print_json;
use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{self, Overrides, explain};
use crate::pair::{Samples, differs};
use crate::pattern::{Pattern, shuffled};
use crate::table::{Align, Table};

const SEED: u64 = 0xf11e;
/// A cell is measured in so many turns at least.
const TURNS_MIN: usize = 8;

/// Measure blocks that go between memory and a file, past the page cache where the file system can
///
/// Each transfer moves --depth blocks, and --transfers of them are under way, so that the device always has something to do. The file is made in
/// --directory, is as long as --size, has no name there, and is gone afterwards. Before anything is measured all of it is written, read back and
/// compared byte by byte. For figures beside fio's in the same run: `cargo xtask compare file`.
#[derive(Debug, Args)]
pub struct File {
    /// Where the file is made
    #[arg(long, value_name = "DIRECTORY", default_value = ".")]
    directory: PathBuf,
    /// How long the file is: longer than what the device itself keeps in memory tells more
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    size: Bytes,
    /// Block sizes
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["64KiB", "1MiB"])]
    block: Vec<Bytes>,
    /// Which directions: a write spills, a read fetches
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["write", "read"])]
    op: Vec<Op>,
    /// In which order the blocks stand in the file
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["random", "sequential"])]
    order: Vec<Order>,
    /// Blocks in one transfer
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["1", "8", "32"])]
    depth: Vec<u64>,
    /// Transfers under way at a time
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    transfers: u64,
    /// Compare checksums of the bytes at both ends, as part of every transfer
    #[arg(long)]
    checksum: bool,
    /// How long to measure each cell
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Op {
    Write,
    Read,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    /// No block beside the one before it
    Random,
    /// Each behind the one before it, so that neighbours are joined
    Sequential,
}

/// One measured row.
#[derive(Debug, Serialize)]
struct Cell {
    op: Op,
    order: Order,
    block_bytes: u64,
    depth: u64,
    transfers: u64,
    checksum: bool,
    turns: usize,
    p50_us: f64,
    p99_us: f64,
    gigabytes_per_sec: f64,
    past_page_cache: bool,
}

/// What one size of blocks needs: the file in blocks, and memory for all that is under way.
struct Bed<'a> {
    agent: &'a Agent,
    file: &'a Memory,
    memory: &'a Memory,
    block: u64,
    depth: u64,
    checksum: bool,
}

impl Bed<'_> {
    /// One transfer: blocks of the file, by number, and the place in memory that is theirs.
    fn post(&self, op: Op, slot: u64, blocks: &[u64]) -> Result<Transfer, Complaint> {
        let near = Spans::strided(Run {
            offset: slot * self.depth * self.block,
            len: self.block,
            stride: self.block,
            count: blocks.len() as u64,
        });
        let far = Spans::paged(0, self.block, blocks.iter().copied());
        let (from, to, spans) = match op {
            Op::Write => (self.memory, self.file, (near, far)),
            Op::Read => (self.file, self.memory, (far, near)),
        };
        let failed = |error: weft::Error| explain(&error, "A transfer between memory and the file failed.");
        let copy = self.agent.copy(from, to).map_err(failed)?;
        let copy = copy.spans(spans.0, spans.1).checksum(self.checksum);
        copy.post().map_err(failed)
    }

    /// Moves blocks in this order, over and over, for as long, with several transfers under way.
    fn measure(&self, op: Op, order: &[u64], transfers: u64, budget: Duration) -> Result<(Samples, f64), Complaint> {
        let mut under_way: VecDeque<(u64, Instant, Transfer)> = VecDeque::new();
        let mut groups = order.chunks_exact(self.depth as usize).cycle();
        let (mut times, mut free) = (Vec::new(), (0..transfers).collect::<Vec<_>>());
        let start = Instant::now();
        loop {
            let wanted = times.len() < TURNS_MIN || start.elapsed() < budget;
            while wanted && let Some(slot) = free.pop() {
                let Some(blocks) = groups.next() else { break };
                under_way.push_back((slot, Instant::now(), self.post(op, slot, blocks)?));
            }
            let Some((slot, posted, transfer)) = under_way.pop_front() else {
                break;
            };
            transfer
                .wait()
                .map_err(|error| explain(&error, "A transfer between memory and the file failed."))?;
            times.push(posted.elapsed());
            free.push(slot);
        }
        let bytes = times.len() as u64 * self.depth * self.block;
        let rate = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
        Ok((Samples::of(times), rate))
    }
}

impl File {
    pub fn run(&self, overrides: &Overrides) -> Result<(), Complaint> {
        let most = self.look_at_arguments()?;
        let agent = overrides.without_log()?.start("bench")?;
        let options = FileOptions::sized(self.size.0).replace(true);
        let file = agent
            .open_file(self.directory.join("weft-bench"), options)
            .map_err(|error| {
                explain(&error, "The file to measure with could not be made.").try_this("--directory, --size")
            })?;
        let memory = agent
            .allocate(most as usize)
            .map_err(|error| explain(&error, "There is no memory for what is under way."))?;
        self.verify(&agent, &file, &memory)?;
        let direct = DirectorySupport::probe(&self.directory);
        let past_page_cache = direct.is_ok_and(|found| found.direct.is_ok());
        let mut cells = Vec::new();
        for &Bytes(block) in &self.block {
            for &op in &self.op {
                for &order in &self.order {
                    for &depth in &self.depth {
                        let bed = Bed {
                            agent: &agent,
                            file: &file,
                            memory: &memory,
                            block,
                            depth,
                            checksum: self.checksum,
                        };
                        let blocks = match order {
                            Order::Random => shuffled(self.size.0 / block, block ^ depth),
                            Order::Sequential => (0..self.size.0 / block).collect(),
                        };
                        let budget = Duration::from_secs_f64(self.seconds);
                        let (times, rate) = bed.measure(op, &blocks, self.transfers, budget)?;
                        let cell = Cell {
                            op,
                            order,
                            block_bytes: block,
                            depth,
                            transfers: self.transfers,
                            checksum: self.checksum,
                            turns: times.count(),
                            p50_us: times.median().as_secs_f64() * 1e6,
                            p99_us: times.quantile(0.99).as_secs_f64() * 1e6,
                            gigabytes_per_sec: rate,
                            past_page_cache,
                        };
                        if self.json {
                            print_json(&cell)?;
                        }
                        cells.push(cell);
                    }
                }
            }
        }
        if !self.json {
            self.print(&cells)?;
        }
        Ok(())
    }

    /// What is under way at most, in bytes.
    fn look_at_arguments(&self) -> Result<u64, Complaint> {
        let usage = |sentence: String| Complaint::new(Exit::Usage, sentence);
        if !(0.0..=3600.0).contains(&self.seconds) {
            return Err(usage(format!("{} seconds cannot be measured.", self.seconds)));
        }
        let mut most = 0;
        for &Bytes(block) in &self.block {
            for &depth in &self.depth {
                let one = block.checked_mul(depth);
                let all = one.and_then(|one| one.checked_mul(self.transfers));
                match (one, all) {
                    (Some(one), Some(all)) if block > 0 && block % 8 == 0 && depth > 0 && one <= self.size.0 => {
                        most = all.max(most);
                    }
                    _ => {
                        return Err(usage(format!(
                            "{depth} blocks of {} are no part of a file of {}: blocks are a positive multiple of 8 bytes, and all that one transfer moves is in the file.",
                            Bytes(block),
                            self.size
                        )));
                    }
                }
            }
        }
        Ok(most)
    }

    /// Writes the whole file, and reads it back: nothing is measured that is not right.
    fn verify(&self, agent: &Agent, file: &Memory, memory: &Memory) -> Result<(), Complaint> {
        let failed = |error: weft::Error| explain(&error, "The file could not be written and read back.");
        let whole = memory.len();
        let mut done = 0;
        while done < self.size.0 {
            let len = whole.min(self.size.0 - done);
            let (near, far) = (Spans::contiguous(0, len), Spans::contiguous(done, len));
            ends::fill(memory, Pattern(SEED ^ done));
            let out = agent.copy(memory, file).map_err(failed)?;
            let written = out.spans(near.clone(), far.clone()).checksum(true).post();
            written.and_then(|transfer| transfer.wait()).map_err(failed)?;
            ends::fill(memory, Pattern(!SEED));
            let back = agent.copy(file, memory).map_err(failed)?;
            let read = back.spans(far, near.clone()).checksum(true).post();
            read.and_then(|transfer| transfer.wait()).map_err(failed)?;
            if let Some(at) = ends::first_difference(memory, &near, Pattern(SEED ^ done), &near) {
                return Err(differs("the file", done + at));
            }
            done += len;
        }
        Ok(())
    }

    fn print(&self, cells: &[Cell]) -> Result<(), Complaint> {
        outln!(
            "{}",
            style(format!("A file of {} in {}", self.size, self.directory.display())).bold()
        );
        let mut table = Table::new(&[
            ("op", Align::Left),
            ("order", Align::Left),
            ("block", Align::Right),
            ("depth", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("GB/s", Align::Right),
        ]);
        for cell in cells {
            let name = |value: Option<clap::builder::PossibleValue>| {
                value.map_or_else(String::new, |value| value.get_name().to_owned())
            };
            table.row(vec![
                name(cell.op.to_possible_value()),
                name(cell.order.to_possible_value()),
                Bytes(cell.block_bytes).to_string(),
                cell.depth.to_string(),
                format!("{:.0} µs", cell.p50_us),
                format!("{:.0} µs", cell.p99_us),
                format!("{:.2}", cell.gigabytes_per_sec),
            ]);
        }
        out!("{}", table.render());
        outln!();
        outln!(
            "  Times are of one transfer of so many blocks, from post to end; {} were under way at a time.",
            self.transfers
        );
        let means = match Support::probe().no_ring {
            None => "io_uring".to_owned(),
            Some(reason) => format!("plain calls on threads, since {reason}"),
        };
        let cache = match DirectorySupport::probe(&self.directory)
            .or_complain(Exit::Failed, || {
                format!("{} cannot be asked.", self.directory.display())
            })?
            .direct
        {
            Ok(alignment) => format!("past the page cache, aligned to {}", Bytes(alignment.offset)),
            Err(reason) => format!("through the page cache, since {reason}: these are no figures of a device"),
        };
        outln!("  By {means}; {cache}.");
        Ok(())
    }
}
