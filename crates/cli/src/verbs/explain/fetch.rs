//! `weft explain fetch`: whether the KV of a prompt is fetched from a tier or computed again, and where the two are even.

use clap::{Args, ValueEnum};
use console::style;
use serde_json::json;
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_model::workload::serving::{Engine, Quantisation, Recompute, Worker};
use weft_plan::fetch::{FetchCost, FetchError, Prefill};
use weft_plan::{Bandwidth, Bytes, Picos};

use crate::complaint::{Complain, Complaint, Exit};
use crate::system::SystemChoice;

type Answer = Result<weft_plan::fetch::Fetch, FetchError>;

/// The longest prompt that the break-even is looked for at.
const LONGEST: u32 = 1 << 20;

/// Say whether the KV of a prompt is better fetched from a tier or computed again, and where the two are even
///
/// What computing takes is predicted as `weft plan-serving` does it, for one prompt alone on its GPUs. What fetching takes is the tier's latency and
/// its bandwidth; those of `nvme` and `object` are assumptions, one disk and one stream of an object store, to be replaced by what was measured.
#[derive(Debug, Args)]
pub struct Fetch {
    /// The model, by its name (`weft list models`)
    #[arg(long, value_name = "NAME")]
    model: String,
    /// Tokens of the prompt
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    tokens: u32,
    /// How many of them are in the tier; by default all
    #[arg(long, value_name = "TOKENS")]
    there: Option<u32>,
    /// Where they are
    #[arg(long)]
    tier: Tier,
    /// The tier's bandwidth, in the place of what is assumed
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<Bandwidth>,
    /// The tier's latency, in the place of what is assumed
    #[arg(long, value_name = "TIME")]
    latency: Option<Picos>,
    #[command(flatten)]
    system: SystemChoice,
    /// How many GPUs serve the prompt
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    gpus: u32,
    /// How weights and cache are stored: bf16, fp8 or nvfp4
    #[arg(long, value_name = "HOW", default_value = "bf16")]
    quantisation: String,
    /// Tokens of a block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    block_tokens: u32,
    /// Print JSON instead of sentences
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tier {
    /// Memory of the host, over the links of the GPUs
    Dram,
    /// A disk: 5 GB/s after 100 µs
    Nvme,
    /// An object store: 1 GB/s after 20 ms
    Object,
}

impl Tier {
    fn assumed(self, system: &System, gpus: u32) -> (Picos, Bandwidth) {
        match self {
            Tier::Dram => {
                let link = system.node.host_link.bytes_per_sec();
                (
                    Picos::from_us(20),
                    Bandwidth::from_bytes_per_sec(link.saturating_mul(gpus.into())),
                )
            }
            Tier::Nvme => (Picos::from_us(100), Bandwidth::from_gigabytes_per_sec(5.0)),
            Tier::Object => (Picos::from_ms(20), Bandwidth::from_gigabytes_per_sec(1.0)),
        }
    }
}

impl Fetch {
    pub fn run(self) -> Result<(), Complaint> {
        let system = self.system.read()?;
        let model = Model::named(&self.model)
            .or_complain(Exit::Usage, || format!("{} is no model that is known.", self.model))?;
        let quantisation = Quantisation::named(&model, &self.quantisation, &self.quantisation)
            .or_complain(Exit::Usage, || "That is no way to store weights.".to_owned())?;
        let worker = Worker::tensor(self.gpus);
        let recompute = Recompute::new(&system, &model, worker, quantisation, Engine::Vllm)
            .or_complain(Exit::Usage, || format!("{} cannot be served so.", self.model))?;
        let (latency, bandwidth) = self.tier.assumed(&system, self.gpus);
        let tier = FetchCost::of(self.latency.unwrap_or(latency), self.bandwidth.unwrap_or(bandwidth));
        let there = self.there.unwrap_or(self.tokens);
        let answer = recompute.fetch(&tier, self.tokens, there, self.block_tokens);
        if let Err(error @ FetchError::OutOfRange { .. }) = answer {
            return Err(Complaint::new(Exit::Usage, "That cannot be asked.").because(&error));
        }
        match self.json {
            true => self.print_json(&recompute, &tier, answer),
            false => self.print(&system, &recompute, &tier, answer),
        }
    }

    fn print(&self, system: &System, recompute: &Recompute, tier: &FetchCost, answer: Answer) -> Result<(), Complaint> {
        let title = format!(
            "KV of {} tokens of {}: {} bytes, on {} × {}",
            self.tokens,
            self.model,
            grouped(recompute.bytes(self.tokens)),
            self.gpus,
            system.gpu.name
        );
        outln!("{}", style(title).bold());
        outln!(
            "  tier        {:.1} after {:.1}",
            tier.link.bandwidth,
            tier.time(Bytes(0))
        );
        match answer {
            Ok(fetch) => {
                let total = fetch.fetch.saturating_add(fetch.rest);
                outln!(
                    "  fetch       {} tokens in {:.1}, then compute the rest in {:.1}: {total:.1}",
                    fetch.tokens,
                    fetch.fetch,
                    fetch.rest
                );
                outln!(
                    "  compute     all of it in {:.1}, {:.2} × as long",
                    fetch.compute,
                    fetch.compute.as_secs_f64() / total.as_secs_f64()
                );
            }
            Err(refused) => outln!("  refused     {refused}"),
        }
        match recompute.break_even(tier, self.tokens) {
            Some(even) => outln!("  break-even  a prompt of this length at {even:.2}"),
            None => outln!("  break-even  at no bandwidth: the tier's latency alone takes longer"),
        }
        match recompute.shortest(tier, self.block_tokens, LONGEST) {
            Some(tokens) => outln!("              at this bandwidth a prompt of {tokens} tokens"),
            None => outln!("              at this bandwidth no prompt of up to {LONGEST} tokens"),
        }
        Ok(())
    }

    fn print_json(&self, recompute: &Recompute, tier: &FetchCost, answer: Answer) -> Result<(), Complaint> {
        let (tokens, fetch, compute) = match answer {
            Ok(fetch) => (fetch.tokens, fetch.fetch, fetch.compute.saturating_sub(fetch.rest)),
            Err(FetchError::Slower { fetch, compute, .. }) => (0, fetch, compute),
            Err(_) => (0, Picos::ZERO, Picos::ZERO),
        };
        let even = recompute.break_even(tier, self.tokens);
        let line = json!({
            "model": self.model,
            "prompt_tokens": self.tokens,
            "bytes": recompute.bytes(self.tokens).0,
            "fetched_tokens": tokens,
            "refused": tokens == 0,
            "fetch_s": fetch.as_secs_f64(),
            "compute_instead_s": compute.as_secs_f64(),
            "break_even_bytes_per_s": even.map(|even| even.bytes_per_sec()),
            "break_even_tokens": recompute.shortest(tier, self.block_tokens, LONGEST),
        });
        outln!("{line}");
        Ok(())
    }
}

fn grouped(bytes: Bytes) -> String {
    let digits = bytes.0.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).expect("digits are text"))
        .collect();
    groups.join(",")
}
