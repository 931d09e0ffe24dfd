//! `weft demo`: a KV cache handed over between two processes, and what is said when one of them dies.

use std::time::{Duration, Instant};

use clap::Args;
use console::{Style, style};
use rustix::process::Signal;
use weft::{Direction, Error};
use weft_plan::{Bandwidth, Bytes, KvLayout, KvShape, LinkCost, Spans, Time};

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{self, Overrides};
use crate::pair::{Cast, Pair, Plan, Samples, Way, differs, once};
use crate::pattern::{Pattern, shuffled};
use crate::predict::{Spread, memcpy_limit, probe};
use crate::table::{Align, Table};

/// A cache of a small model: 256 MiB at each end.
const SHAPE: KvShape = KvShape {
    layers: 32,
    parts: 2,
    blocks: 256,
    block_bytes: 16 << 10,
};
/// How many blocks the hand-over takes.
const BLOCKS: usize = 96;
const WAYS: [Way; 2] = [Way::SharedMemory, Way::Tcp];
const MEMCPY_BUDGET: Duration = Duration::from_millis(400);
const PROBE_BUDGET: Duration = Duration::from_millis(100);
const MEASURE_BUDGET: Duration = Duration::from_millis(600);
/// The deadlines of the transfers whose peer is killed, and frozen.
const KILLED_DEADLINE: Duration = Duration::from_secs(10);
const FROZEN_DEADLINE: Duration = Duration::from_millis(500);
/// How long a buffer is watched after its transfer has ended.
const WATCH: Duration = Duration::from_millis(200);
/// A transfer is tried this often before we say that it was never caught on its way.
const ATTEMPTS: usize = 200;
const FAR_SEED: u64 = 0x5eed;
const REUSE_SEED: u64 = 0x0def;

/// Hand a KV cache from one process to another, kill one of them, and show what happens
///
/// Starts a second process on this machine and needs nothing else. Takes well under a minute.
#[derive(Debug, Args)]
pub struct Demo {}

/// What the hand-over over one transport showed.
struct Measured {
    way: Way,
    cost: LinkCost,
    median: Duration,
    whole: Duration,
}

impl Demo {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        let overrides = &overrides.without_log()?;
        let layout =
            KvLayout::layers_outermost(SHAPE).or_complain(Exit::Failed, || "The cache has no layout.".into())?;
        let memcpy = memcpy_limit(MEMCPY_BUDGET);
        heading("A paged KV cache, from the process \"prefill\" to the process \"decode\"")?;
        outln!(
            "  cache      {} layers × K and V × {} blocks × {} = {}, in each process",
            SHAPE.layers,
            SHAPE.blocks,
            Bytes(SHAPE.block_bytes),
            Bytes(layout.end())
        );
        let spans = Hand::over(&layout)?;
        outln!(
            "  hand-over  {BLOCKS} blocks at random places = {} spans, {}; checksum on",
            spans.near.count(),
            Bytes(spans.near.bytes())
        );
        outln!("  machine    {memcpy:.1}, one thread's memcpy, measured now");
        outln!();

        let mut results = Vec::new();
        for way in WAYS {
            results.push(hand_over(way, &layout, &spans, overrides)?);
        }
        out!("{}", comparison(&results, &spans, memcpy).render());
        outln!(
            "  Both hand-overs were verified: checksums at both ends, and every byte compared with what prefill holds."
        );
        outln!(
            "  Predicted: latency + spans × cost per span + bytes ÷ bandwidth, from probes of other sizes, made before."
        );

        heading("prefill is killed (SIGKILL) while decode pulls the whole cache")?;
        for result in &results {
            killed(result, &layout, overrides)?;
        }
        heading("prefill is frozen (SIGSTOP) while decode pulls the whole cache")?;
        for result in &results {
            frozen(result, &layout, overrides)?;
        }
        outln!();
        outln!("  `weft bench transfer` measures more sizes, `weft doctor` says what this machine has.");
        Ok(())
    }
}

/// The spans at both ends.
struct Hand {
    near: Spans,
    far: Spans,
}

impl Hand {
    /// Some blocks, from random places to other random places.
    fn over(layout: &KvLayout) -> Result<Hand, Complaint> {
        Hand::of(layout, BLOCKS)
    }

    fn of(layout: &KvLayout, count: usize) -> Result<Hand, Complaint> {
        let spans = |seed| {
            let blocks = shuffled(SHAPE.blocks, seed).into_iter().take(count);
            layout
                .spans(blocks)
                .or_complain(Exit::Failed, || "The blocks are not in the cache.".into())
        };
        Ok(Hand {
            near: spans(1)?,
            far: spans(2)?,
        })
    }

    fn plan(&self) -> Plan {
        Plan::new(Direction::Read, self.near.clone(), self.far.clone())
    }
}

fn cast(layout: &KvLayout) -> Cast<'static> {
    Cast {
        here: "decode",
        there: "prefill",
        region_bytes: layout.end(),
        echo: false,
        at: None,
    }
}

/// Predicts, moves, verifies, measures.
fn hand_over(way: Way, layout: &KvLayout, hand: &Hand, overrides: &Overrides) -> Result<Measured, Complaint> {
    let mut pair = Pair::start(way, cast(layout), overrides)?;
    pair.partner.fill(FAR_SEED)?;
    let cost = probe(&pair, Direction::Read, Spread::Wide, PROBE_BUDGET)?;
    // What the probes brought must not pass for what the hand-over brings.
    ends::fill(&pair.local, Pattern(REUSE_SEED));
    once(&pair.prepare(hand.plan().checksum(true))?)?;
    if let Some(offset) = ends::first_difference(&pair.local, &hand.near, Pattern(FAR_SEED), &hand.far) {
        return Err(differs(&format!("the cache that came over {way}"), offset));
    }
    let median = Samples::take(&pair.prepare(hand.plan())?, MEASURE_BUDGET)?.median();
    let all = Hand::of(layout, SHAPE.blocks as usize)?;
    let whole = Samples::take(&pair.prepare(all.plan())?, Duration::ZERO)?.median();
    Ok(Measured {
        way,
        cost,
        median,
        whole,
    })
}

fn comparison(results: &[Measured], hand: &Hand, memcpy: Bandwidth) -> Table {
    let mut table = Table::new(&[
        ("transport", Align::Left),
        ("measured", Align::Right),
        ("predicted", Align::Right),
        ("measured ÷ predicted", Align::Right),
        ("GB/s", Align::Right),
        ("of memcpy", Align::Right),
    ]);
    for result in results {
        let measured = result.median.as_secs_f64();
        let predicted = result.cost.time(Bytes(hand.near.bytes()), hand.near.count());
        let rate = hand.near.bytes() as f64 / measured;
        table.row(vec![
            result.way.to_string(),
            format!("{:.2}", Time::from(result.median)),
            format!("{predicted:.2}"),
            format!("{:.2}", measured / predicted.as_secs_f64()),
            format!("{:.2}", rate / 1e9),
            format!("{:.0} %", rate / memcpy.bytes_per_sec() as f64 * 100.0),
        ]);
    }
    table
}

fn killed(result: &Measured, layout: &KvLayout, overrides: &Overrides) -> Result<(), Complaint> {
    let (pair, caught) = catch(result, Signal::KILL, KILLED_DEADLINE, layout, overrides)?;
    let Some(error) = caught.error else {
        let sentence = format!("Nobody noticed over {} that prefill was killed.", result.way);
        return Err(Complaint::new(Exit::Failed, sentence));
    };
    let told = Time::from(caught.ended.saturating_duration_since(caught.signalled));
    outln!("  {} decode was told {told:.1} after the kill:", tag(result.way));
    say(&error, layout)?;
    watch_reused_buffer(&pair)
}

fn frozen(result: &Measured, layout: &KvLayout, overrides: &Overrides) -> Result<(), Complaint> {
    // Long enough to be met by a healthy peer, also on a slow machine.
    let deadline = FROZEN_DEADLINE.max(result.whole * 4);
    let (pair, caught) = catch(result, Signal::STOP, deadline, layout, overrides)?;
    let way = tag(result.way);
    match caught.error {
        None => outln!("  {way} nothing happened: decode does the copying, so a frozen peer is no obstacle."),
        Some(error) => {
            let (deadline, took) = (Time::from(deadline), Time::from(caught.ended - caught.posted));
            outln!("  {way} with a deadline of {deadline:.0}, it ended after {took:.0}:");
            say(&error, layout)?;
        }
    }
    pair.partner.signal(Signal::CONT)?;
    watch_reused_buffer(&pair)
}

/// What became of a transfer during which its peer got a signal.
struct Caught {
    posted: Instant,
    signalled: Instant,
    ended: Instant,
    error: Option<Error>,
}

/// Starts two new ends, pulls the whole cache, and sends a signal to the other end when a third of it has probably come. Where the
/// transfer was faster than that, it is posted again.
fn catch(
    result: &Measured,
    signal: Signal,
    deadline: Duration,
    layout: &KvLayout,
    overrides: &Overrides,
) -> Result<(Pair, Caught), Complaint> {
    let mut pair = Pair::start(result.way, cast(layout), overrides)?;
    pair.partner.fill(FAR_SEED)?;
    let all = Hand::of(layout, SHAPE.blocks as usize)?;
    // The first transfer meets pages that have never been touched.
    once(&pair.prepare(all.plan())?)?;
    let prepared = pair.prepare(all.plan().deadline(deadline))?;
    let caught = std::thread::scope(|scope| {
        let signaller = scope.spawn(|| {
            std::thread::sleep(result.whole / 3);
            let now = Instant::now();
            pair.partner.signal(signal).map(|()| now)
        });
        let (mut posted, mut ended, mut error);
        let mut attempts = 0;
        loop {
            let frozen_before = signal == Signal::STOP && signaller.is_finished();
            posted = Instant::now();
            error = prepared.post().and_then(|transfer| transfer.wait()).err();
            ended = Instant::now();
            attempts += 1;
            // A whole transfer with a frozen peer is an answer as well.
            if error.is_some() || frozen_before || attempts == ATTEMPTS {
                break;
            }
        }
        match signaller.join() {
            Ok(signalled) => Ok(Caught {
                posted,
                signalled: signalled?,
                ended,
                error,
            }),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    Ok((pair, caught))
}

/// The error as the caller gets it, and what its fields say.
fn say(error: &Error, layout: &KvLayout) -> Result<(), Complaint> {
    outln!("      {}", Style::new().yellow().apply_to(error));
    let Error::Transfer(failed) = error else { return Ok(()) };
    let failure = &failed.error;
    let per_layer = layout.end() / u64::from(SHAPE.layers);
    outln!(
        "      done {:.1} (ranges: {}); not done {:.1} (ranges: {}{})",
        Bytes(failure.bytes_done),
        failure.done.len(),
        Bytes(failure.bytes_total - failure.bytes_done),
        failure.undone.len(),
        match failure.undone.first() {
            Some((_, range)) => format!(", the first in layer {}", range.start / per_layer),
            None => String::new(),
        }
    );
    Ok(())
}

/// The transfer has ended, so the buffer is ours: fill it with something else and see whether that stays.
fn watch_reused_buffer(pair: &Pair) -> Result<(), Complaint> {
    ends::fill(&pair.local, Pattern(REUSE_SEED));
    std::thread::sleep(WATCH);
    let all = Spans::contiguous(0, pair.local.len());
    match ends::first_difference(&pair.local, &all, Pattern(REUSE_SEED), &all) {
        None => {
            outln!(
                "      decode reused the buffer at once; {} ms later not a byte of it had changed",
                WATCH.as_millis()
            );
            Ok(())
        }
        Some(offset) => Err(differs("a buffer that was reused after its transfer had ended", offset)),
    }
}

fn heading(text: &str) -> Result<(), Complaint> {
    outln!();
    outln!("{}", style(text).bold());
    outln!();
    Ok(())
}

fn tag(way: Way) -> String {
    style(format!("{way}:")).cyan().to_string()
}
