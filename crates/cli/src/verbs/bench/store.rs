//! `weft bench store`: what KV stores of some capacities would hit under a trace, policy by policy.

mod tier;

use std::io::Read;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use console::style;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_model::workload::model::Model;
use weft_model::workload::serving::{Engine, Quantisation, Recompute, Worker};
use weft_plan::Picos;
use weft_sim::store::{Comparison, Request, Row, Sessions, block_tokens, compare, distinct, trace};

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::Overrides;
use crate::system::SystemChoice;
use crate::table::{Align, Table};

/// A trace is read whole; nobody's is longer.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// Replay a trace, or made-up sessions: hit rates of all policies beside LRU and the offline optimum; or measure tiers
///
/// A request's hits are its leading blocks that are there; then all its blocks are touched once, from the last to the first, and missing ones are
/// inserted. Traces are lines of `timestamp_ms,input_tokens,output_tokens,block_ids` under a line with these words, or JSON lines with `timestamp`,
/// `input_length`, `output_length` and `hash_ids`. Without a trace, sessions are made from a seed. What hits save is prefill on the model's GPUs,
/// by the same prediction as `weft plan-serving`.
#[derive(Debug, Args)]
pub struct Store {
    /// The trace; `-` reads it from the standard input
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Which sessions to make where there is no trace
    #[arg(long, value_name = "KIND", default_value = "mixed", conflicts_with = "trace")]
    sessions: Kinds,
    /// How many of them; by default as many as their kind has
    #[arg(long, value_name = "N", conflicts_with = "trace")]
    count: Option<u32>,
    /// The seed that they are made from
    #[arg(long, default_value_t = 1, conflicts_with = "trace")]
    seed: u64,
    /// Capacities, in per cent of the distinct blocks
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "1,5,10,25")]
    capacity: Vec<f64>,
    /// Tell the policies of each request whether its session will come back
    #[arg(long)]
    hints: bool,
    /// The model whose prefill is spared, by its name (`weft list models`)
    #[arg(long, value_name = "NAME", default_value = "llama-3.1-8b")]
    model: String,
    #[command(flatten)]
    system: SystemChoice,
    /// How many GPUs serve a prompt
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    gpus: u32,
    /// Tokens of a block; by default what the lengths of the prompts say
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    block_tokens: Option<u32>,
    #[command(flatten)]
    tiers: tier::Tiers,
    /// Print JSON, one object a line, instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kinds {
    /// Some of each
    Mixed,
    /// Chats with long pauses
    Chats,
    /// Questions about documents
    Documents,
    /// Agents that come back within seconds
    Agents,
}

/// A trace that cannot be replayed.
#[derive(Debug, Error)]
enum Unread {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("it has more than {TRACE_BYTES_MAX} bytes")]
    TooLong,
    #[error("it is not text; a compressed trace is read as in `zcat FILE | weft bench store --trace -`")]
    NotText,
    #[error(transparent)]
    Line(#[from] trace::TraceError),
    #[error("line {line}: {error}")]
    Json { line: usize, error: serde_json::Error },
    #[error("there is no request in it")]
    Empty,
}

#[derive(Deserialize)]
struct JsonLine {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl Store {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        if self.tiers.is_wanted() {
            return self.tiers.run(overrides, self.json);
        }
        let recompute = self.recompute()?;
        if let Some(wrong) = self
            .capacity
            .iter()
            .find(|percent| !(**percent > 0.0 && **percent <= 1000.0))
        {
            let sentence = format!("{wrong} % of the distinct blocks is no capacity.");
            return Err(Complaint::new(Exit::Usage, sentence).try_this("--capacity 1,5,10,25"));
        }
        let (name, requests) = self.requests()?;
        let block_tokens = self.block_tokens.unwrap_or_else(|| block_tokens(&requests));
        let shares: Vec<f64> = self.capacity.iter().map(|percent| percent / 100.0).collect();
        let rows = compare(&Comparison {
            requests: &requests,
            shares: &shares,
            hints: self.hints,
            recompute: &recompute,
            block_tokens,
        });
        if self.json {
            for row in &rows {
                super::print_json(&Line::new(&name, row))?;
            }
            return Ok(());
        }
        let reads: usize = requests.iter().map(|request| request.blocks.len()).sum();
        let title = format!(
            "{name}: {} requests, {reads} blocks read, {} distinct, {block_tokens} tokens each",
            requests.len(),
            distinct(&requests)
        );
        outln!("{}", style(title).bold());
        out!("{}", table(&rows).render());
        outln!(
            "  written and prefill saved: {} on {} × {}",
            self.model,
            self.gpus,
            self.system.name
        );
        Ok(())
    }

    fn recompute(&self) -> Result<Recompute, Complaint> {
        let system = self.system.read()?;
        let model = Model::named(&self.model)
            .or_complain(Exit::Usage, || format!("{} is no model that is known.", self.model))?;
        Recompute::new(
            &system,
            &model,
            Worker::tensor(self.gpus),
            Quantisation::bf16(),
            Engine::Vllm,
        )
        .or_complain(Exit::Usage, || format!("{} cannot be served so.", self.model))
    }

    fn requests(&self) -> Result<(String, Vec<Request>), Complaint> {
        let Some(path) = &self.trace else {
            let sessions = match self.sessions {
                Kinds::Mixed => Sessions::mixed(self.seed),
                Kinds::Chats => Sessions::chats(self.seed),
                Kinds::Documents => Sessions::documents(self.seed),
                Kinds::Agents => Sessions::agents(self.seed),
            };
            let sessions = Sessions {
                count: self.count.unwrap_or(sessions.count),
                ..sessions
            };
            let requests = sessions
                .requests()
                .or_complain(Exit::Usage, || "Such sessions cannot be made.".to_string())?;
            let kind = self
                .sessions
                .to_possible_value()
                .map_or_else(String::new, |kind| kind.get_name().to_string());
            return Ok((format!("{kind} sessions of seed {}", self.seed), requests));
        };
        let name = path.display().to_string();
        let requests = read(path).or_complain(Exit::Usage, || format!("The trace {name} cannot be replayed."))?;
        Ok((name, requests))
    }
}

fn read(path: &std::path::Path) -> Result<Vec<Request>, Unread> {
    let mut bytes = Vec::new();
    let limit = TRACE_BYTES_MAX + 1;
    match path.to_str() {
        Some("-") => std::io::stdin().lock().take(limit).read_to_end(&mut bytes)?,
        _ => std::fs::File::open(path)?.take(limit).read_to_end(&mut bytes)?,
    };
    if bytes.len() as u64 > TRACE_BYTES_MAX {
        return Err(Unread::TooLong);
    }
    let text = String::from_utf8(bytes).map_err(|_| Unread::NotText)?;
    let requests = if text.trim_start().starts_with('{') {
        json_lines(&text)?
    } else {
        trace::parse(&text)?
    };
    if requests.is_empty() {
        return Err(Unread::Empty);
    }
    Ok(requests)
}

fn json_lines(text: &str) -> Result<Vec<Request>, Unread> {
    let mut requests = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line_number = at + 1;
        let line: JsonLine = serde_json::from_str(line).map_err(|error| Unread::Json {
            line: line_number,
            error,
        })?;
        let request = Request {
            at_ms: line.timestamp,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            blocks: line.hash_ids,
        };
        trace::check(&request).map_err(|fault| trace::TraceError {
            line: line_number,
            fault,
        })?;
        requests.push(request);
    }
    Ok(requests)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        ("capacity", Align::Right),
        ("blocks", Align::Right),
        ("policy", Align::Left),
        ("hit rate", Align::Right),
        ("beside LRU", Align::Right),
        ("written", Align::Right),
        ("prefill saved", Align::Right),
    ]);
    for few in rows.chunk_by(|a, b| a.share == b.share) {
        let lru = few[0].hit_rate;
        for (nth, row) in few.iter().enumerate() {
            let once = |text: String| if nth == 0 { text } else { String::new() };
            table.row(vec![
                once(format!("{} %", 100.0 * row.share)),
                once(row.capacity.to_string()),
                policy(row).to_string(),
                format!("{:.2} %", 100.0 * row.hit_rate),
                if nth == 0 {
                    String::new()
                } else {
                    format!("{:+.2}", 100.0 * (row.hit_rate - lru))
                },
                format!("{:.1}", row.written),
                seconds(row.saved),
            ]);
        }
    }
    table
}

fn policy(row: &Row) -> &'static str {
    row.policy.map_or("optimum", |kind| kind.name())
}

fn seconds(time: Picos) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[derive(Serialize)]
struct Line<'a> {
    trace: &'a str,
    share: f64,
    capacity: usize,
    policy: &'static str,
    hit_rate: f64,
    written_bytes: u64,
    prefill_saved_s: f64,
}

impl<'a> Line<'a> {
    fn new(trace: &'a str, row: &Row) -> Line<'a> {
        Line {
            trace,
            share: row.share,
            capacity: row.capacity,
            policy: policy(row),
            hit_rate: row.hit_rate,
            written_bytes: row.written.0,
            prefill_saved_s: row.saved.as_secs_f64(),
        }
    }
}
