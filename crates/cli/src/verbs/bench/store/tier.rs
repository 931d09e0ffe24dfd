//! `weft bench store --tier`: how fast blocks are put and got, beside a plain copy of as many bytes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use console::style;
use serde::Serialize;
use weft::store::{Block, BlockId, BlockShape, FileTier, HitRule, Part, Space, Store, Wanted};
use weft::{Agent, Memory};
use weft_plan::Bytes;

use super::super::print_json;
use crate::complaint::{Complaint, Exit};
use crate::ends::{Overrides, explain, fill};
use crate::pair::Samples;
use crate::pattern::{Pattern, shuffled};
use crate::table::{Align, Table};

/// A cell is measured in so many calls at least.
const CALLS_MIN: usize = 8;

#[derive(Debug, Args)]
pub struct Tiers {
    /// Measure tiers instead of replaying: how fast blocks are put and got
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "trace")]
    tier: Vec<Kind>,
    /// Of a tier of files: where its directory is made, and removed afterwards
    #[arg(long, value_name = "DIRECTORY", default_value = ".", requires = "tier")]
    directory: PathBuf,
    /// How much a tier holds
    #[arg(long, value_name = "SIZE", default_value = "512MiB", requires = "tier")]
    size: Bytes,
    /// Block sizes
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["4KiB", "64KiB", "1MiB"], requires = "tier")]
    block: Vec<Bytes>,
    /// Blocks of one call
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["1", "64"], requires = "tier")]
    batch: Vec<u64>,
    /// How long to measure each cell
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, requires = "tier")]
    seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// Memory that Weft allocates
    Dram,
    /// Files
    File,
}

/// One measured row.
#[derive(Debug, Serialize)]
struct Cell {
    tier: Kind,
    op: &'static str,
    block_bytes: u64,
    batch: u64,
    calls: usize,
    p50_us: f64,
    p99_us: f64,
    gigabytes_per_sec: f64,
    /// A plain copy of as many bytes, in the same run.
    memcpy_gigabytes_per_sec: f64,
}

impl Tiers {
    pub fn is_wanted(&self) -> bool {
        !self.tier.is_empty()
    }

    pub fn run(&self, overrides: &Overrides, json: bool) -> Result<(), Complaint> {
        if !(0.0..=3600.0).contains(&self.seconds) {
            return Err(Complaint::new(
                Exit::Usage,
                format!("{} seconds cannot be measured.", self.seconds),
            ));
        }
        let agent = overrides.without_log()?.start("bench")?;
        let mut cells = Vec::new();
        for &tier in &self.tier {
            for &Bytes(block) in &self.block {
                for &batch in &self.batch {
                    let whole = block
                        .checked_mul(batch)
                        .filter(|whole| *whole > 0 && *whole <= self.size.0 / 4);
                    if whole.is_none() || u32::try_from(block).is_err() {
                        let sentence = format!(
                            "{batch} blocks of {} are more than a quarter of {}, or nothing.",
                            Bytes(block),
                            self.size
                        );
                        return Err(Complaint::new(Exit::Usage, sentence).try_this("--size, --block, --batch"));
                    }
                    for cell in self.measure(&agent, tier, block, batch)? {
                        if json {
                            print_json(&cell)?;
                        }
                        cells.push(cell);
                    }
                }
            }
        }
        if !json {
            print(&cells)?;
        }
        Ok(())
    }

    fn measure(&self, agent: &Agent, kind: Kind, block: u64, batch: u64) -> Result<[Cell; 2], Complaint> {
        let failed = |error: weft::Error| explain(&error, "The store to measure with failed.");
        let shape = BlockShape::new(vec![Part::new("kv", block as u32, HitRule::AllBlocks)]).expect("one part");
        let directory = self.directory.join(format!("weft-bench-store-{}", std::process::id()));
        let builder = Store::builder(agent, &shape).promote(false);
        let builder = match kind {
            Kind::Dram => builder.memory(self.size.0),
            Kind::File => builder.files(FileTier::new(&directory, self.size.0).scrub_bytes_per_second(0)),
        };
        let store = builder.open().map_err(failed)?;
        let bytes = (block * batch) as usize;
        let memory = agent.allocate(bytes).map_err(failed)?;
        fill(&memory, Pattern(block ^ batch));
        let bed = Bed {
            store: &store,
            memory: &memory,
            space: space(),
            block,
            batch,
            seconds: self.seconds,
        };
        let measured = bed.measure();
        drop(store);
        if kind == Kind::File {
            // What is in the way of this is worth no complaint of its own.
            let _ = std::fs::remove_dir_all(&directory);
        }
        let memcpy = memcpy(bytes, self.seconds.min(0.3));
        let [put, get] = measured?;
        let cell = |op, (times, rate): (Samples, f64)| Cell {
            tier: kind,
            op,
            block_bytes: block,
            batch,
            calls: times.count(),
            p50_us: times.median().as_secs_f64() * 1e6,
            p99_us: times.quantile(0.99).as_secs_f64() * 1e6,
            gigabytes_per_sec: rate,
            memcpy_gigabytes_per_sec: memcpy,
        };
        Ok([cell("put", put), cell("get", get)])
    }
}

struct Bed<'a> {
    store: &'a Store,
    memory: &'a Memory,
    space: Space,
    block: u64,
    batch: u64,
    seconds: f64,
}

impl Bed<'_> {
    fn id(&self, number: u64) -> BlockId {
        self.space.key(&number.to_le_bytes()).expect("a key of eight bytes")
    }

    /// Puts new blocks, then reads those that are there in an order by chance.
    fn measure(&self) -> Result<[(Samples, f64); 2], Complaint> {
        let failed = |error: weft::Error| explain(&error, "The store to measure with failed.");
        let mut next = 0;
        let put = self.timed(|| {
            let place = |nth| Block::new(self.id(next + nth), nth * self.block).first();
            let blocks: Vec<Block> = (0..self.batch).map(place).collect();
            next += self.batch;
            let outcomes = self
                .store
                .put(&self.space, self.memory, &blocks)
                .and_then(|answer| answer.wait());
            match outcomes.map_err(failed)?.iter().find(|outcome| !outcome.is_there()) {
                Some(outcome) => Err(lost(&format!("{:?}", outcome.why))),
                None => Ok(()),
            }
        })?;
        let mut there: Vec<u64> = Vec::new();
        for number in (0..next).rev() {
            if self.store.tiers_of(&self.id(number)).map_err(failed)? != 0 {
                there.push(number);
            }
        }
        let order = shuffled(there.len() as u64, self.block);
        let mut order = order.iter().cycle();
        let get = self.timed(|| {
            let place = |nth| Wanted {
                id: self.id(there[*order.next().expect("it goes around") as usize]),
                offset: nth * self.block,
            };
            let wanted: Vec<Wanted> = (0..self.batch).map(place).collect();
            let outcomes = self.store.get(self.memory, &wanted).and_then(|answer| answer.wait());
            match outcomes.map_err(failed)?.iter().all(|outcome| outcome.is_hit()) {
                true => Ok(()),
                false => Err(lost("a block that was put was a miss")),
            }
        })?;
        Ok([put, get])
    }

    fn timed(&self, mut call: impl FnMut() -> Result<(), Complaint>) -> Result<(Samples, f64), Complaint> {
        let (mut times, start) = (Vec::new(), Instant::now());
        while times.len() < CALLS_MIN || start.elapsed() < Duration::from_secs_f64(self.seconds) {
            let begun = Instant::now();
            call()?;
            times.push(begun.elapsed());
        }
        let bytes = times.len() as u64 * self.batch * self.block;
        let rate = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
        Ok((Samples::of(times), rate))
    }
}

fn lost(why: &str) -> Complaint {
    Complaint::new(Exit::Failed, format!("The store did not do its work: {why}."))
}

fn space() -> Space {
    let fields = [
        "model",
        "revision",
        "tokenizer",
        "dtype",
        "quantisation",
        "scales",
        "layout",
        "lora",
        "positions",
        "tenant",
    ];
    let fields = fields.into_iter().map(|field| (field, "bench"));
    Space::new(fields.chain([("block_tokens", "16")])).expect("all fields")
}

/// How fast one core copies as many bytes from one place to another.
fn memcpy(bytes: usize, seconds: f64) -> f64 {
    let (from, mut to) = (vec![7u8; bytes], vec![0u8; bytes]);
    let (mut copied, start) = (0u64, Instant::now());
    while start.elapsed() < Duration::from_secs_f64(seconds) {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        copied += bytes as u64;
    }
    copied as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn print(cells: &[Cell]) -> Result<(), Complaint> {
    outln!(
        "{}",
        style("Blocks put into a tier and got from it, checksums on").bold()
    );
    let mut table = Table::new(&[
        ("tier", Align::Left),
        ("op", Align::Left),
        ("block", Align::Right),
        ("batch", Align::Right),
        ("p50", Align::Right),
        ("p99", Align::Right),
        ("GB/s", Align::Right),
        ("memcpy", Align::Right),
    ]);
    for cell in cells {
        let name = cell.tier.to_possible_value();
        table.row(vec![
            name.map_or_else(String::new, |name| name.get_name().to_owned()),
            cell.op.to_owned(),
            Bytes(cell.block_bytes).to_string(),
            cell.batch.to_string(),
            format!("{:.1} µs", cell.p50_us),
            format!("{:.1} µs", cell.p99_us),
            format!("{:.2}", cell.gigabytes_per_sec),
            format!("{:.2}", cell.memcpy_gigabytes_per_sec),
        ]);
    }
    out!("{}", table.render());
    outln!();
    outln!(
        "  Times are of one call with so many blocks, to its answer; memcpy is a plain copy of as many bytes by one core, in GB/s."
    );
    Ok(())
}
