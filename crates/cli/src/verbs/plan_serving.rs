//! `weft plan-serving`: how to divide GPUs to serve a model.

use clap::Args;
use console::style;
use serde_json::json;
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_model::workload::serving::{
    Deployment, Engine, Limit, Pool, Quantisation, ServingCandidate, ServingEstimate, ServingSearch, Targets, Worker,
    search,
};
use weft_plan::Picos;
use weft_sim::serving::{Arrivals, Report, ServingOptions, run};

use crate::complaint::{Complain, Complaint, Exit};
use crate::out::print_whole;
use crate::system::SystemChoice;
use crate::table::{Align, Table};

/// Search the best ways to serve a model on a system of GPUs within targets
///
/// Tries prefill and decode together and apart, and every way to divide the model that engines offer, and shows those that answer the most
/// tokens a second and GPU while the first token and each further one come in time.
#[derive(Debug, Args)]
pub struct PlanServing {
    /// The model, by its name (`weft list models`)
    model: String,
    #[command(flatten)]
    system: SystemChoice,
    /// How many GPUs there are
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65536))]
    gpus: u32,
    /// The engine: vllm, sglang or trtllm
    #[arg(long, default_value = "vllm")]
    engine: String,
    /// How weights are stored: bf16, fp8 or nvfp4
    #[arg(long, value_name = "HOW", default_value = "fp8")]
    quantisation: String,
    /// Tokens of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    input: u32,
    /// Tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    output: u32,
    /// Tokens of a prompt that are found in a cache
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    cached: u32,
    /// The first token comes within this time
    #[arg(long, value_name = "TIME", default_value = "2 s")]
    first_token: Picos,
    /// Each further token comes within this time
    #[arg(long, value_name = "TIME", default_value = "50 ms")]
    per_token: Picos,
    /// How many answers to show
    #[arg(long, default_value_t = 5)]
    keep: usize,
    /// Simulate the best answer too, with so many requests by chance at four fifths of its rate
    #[arg(long, value_name = "REQUESTS")]
    simulate: Option<u32>,
    /// Of the requests that are simulated
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

impl PlanServing {
    pub fn run(self) -> Result<(), Complaint> {
        let system = self.system.read()?;
        let model = Model::named(&self.model)
            .or_complain(Exit::Usage, || format!("{} is no model that is known.", self.model))?;
        let engine: Engine = self
            .engine
            .parse()
            .or_complain(Exit::Usage, || "The engine is not known.".to_owned())?;
        let quantisation = Quantisation::named(&model, &self.quantisation, &self.quantisation)
            .or_complain(Exit::Usage, || "That is no way to store weights.".to_owned())?;
        let wanted = ServingSearch {
            gpus: self.gpus,
            engine,
            quantisation,
            input: self.input,
            output: self.output,
            cached: self.cached.min(self.input),
            targets: Targets {
                first_token: self.first_token,
                per_token: self.per_token,
            },
            keep: self.keep.clamp(1, 1000),
        };
        let found = search(&system, &model, &wanted)
            .or_complain(Exit::Failed, || format!("{} cannot be served there.", model.name))?;
        let Some(best) = found.first() else {
            let sentence = format!("Nothing keeps {} and {}.", self.first_token, self.per_token);
            return Err(Complaint::new(Exit::Failed, sentence).try_this("more GPUs, fewer tokens, or later targets"));
        };
        let simulated = match self.simulate {
            None => None,
            Some(count) => Some(self.simulated(&system, &model, best, count)?),
        };
        let text = match self.json {
            true => as_json(&found, simulated.as_ref()),
            false => as_table(&self, &system, &model, &found, simulated.as_ref()),
        };
        print_whole(text.as_bytes())
    }

    fn simulated(
        &self,
        system: &System,
        model: &Model,
        best: &ServingCandidate,
        count: u32,
    ) -> Result<Report, Complaint> {
        let failed = || "The best answer cannot be simulated.".to_owned();
        let arrivals = Arrivals {
            count,
            rate: 0.8 * best.estimate.output_per_second / f64::from(self.output),
            input: self.input,
            output: self.output,
            shortest: 1.0,
            ..Arrivals::default()
        };
        let requests = arrivals.requests(self.seed).or_complain(Exit::Usage, failed)?;
        run(system, model, &best.deployment, &requests, &ServingOptions::default()).or_complain(Exit::Failed, failed)
    }
}

fn as_table(
    asked: &PlanServing,
    system: &System,
    model: &Model,
    found: &[ServingCandidate],
    simulated: Option<&Report>,
) -> String {
    let title = format!(
        "{} on {} GPUs of {}, {} tokens in and {} out",
        model.name, asked.gpus, system.name, asked.input, asked.output
    );
    let mut table = Table::new(&[
        ("prefill", Align::Left),
        ("decode", Align::Left),
        ("at a time", Align::Right),
        ("first token", Align::Right),
        ("per token", Align::Right),
        ("tokens/s", Align::Right),
        ("per GPU", Align::Right),
        ("why not more", Align::Left),
    ]);
    for candidate in found {
        let ServingCandidate {
            deployment, estimate, ..
        } = candidate;
        table.row(vec![
            deployment.prefill.map_or("together".to_owned(), |pool| named(&pool)),
            named(&deployment.decode),
            candidate.concurrency.to_string(),
            format!("{:.1}", estimate.first_token),
            format!("{:.2}", estimate.per_token),
            format!("{:.0}", estimate.output_per_second),
            format!("{:.0}", candidate.output_per_gpu),
            reason(asked, estimate),
        ]);
    }
    let mut text = format!("{}\n{}", style(title).bold(), table.render());
    if let Some(report) = simulated {
        text.push_str(&format!(
            "\n  The first, simulated with {} requests: first token {:.0} ms (99 %: {:.0}), per token {:.1} ms (99 %: {:.1}), {:.0} tokens/s\n",
            report.requests,
            report.first_token.p50,
            report.first_token.p99,
            report.per_token.p50,
            report.per_token.p99,
            report.output_per_second,
        ));
    }
    text
}

/// `4 × tp8 ep8`.
fn named(pool: &Pool) -> String {
    let Worker {
        tensor,
        data,
        expert,
        pipeline,
        ..
    } = pool.worker;
    let mut text = format!("{} × tp{tensor}", pool.count);
    for (name, ways) in [("dp", data), ("ep", expert), ("pp", pipeline)] {
        if ways > 1 {
            text.push_str(&format!(" {name}{ways}"));
        }
    }
    text
}

/// What keeps a candidate from taking one request more.
fn reason(asked: &PlanServing, estimate: &ServingEstimate) -> String {
    let near = |seen: Picos, target: Picos| seen.as_secs_f64() > 0.97 * target.as_secs_f64();
    match estimate.limit {
        Limit::Memory => "no memory for more caches".to_owned(),
        Limit::Prefill => "prompts are not read faster".to_owned(),
        Limit::Load if near(estimate.per_token, asked.per_token) => format!(
            "a step takes {:.1} with {:.0} sequences a rank",
            estimate.step, estimate.batch
        ),
        Limit::Load if near(estimate.first_token, asked.first_token) => "prompts wait for each other".to_owned(),
        Limit::Load => format!("room for {:.0} sequences a rank", estimate.room),
    }
}

fn as_json(found: &[ServingCandidate], simulated: Option<&Report>) -> String {
    let pool = |pool: &Pool| {
        let Worker {
            tensor,
            data,
            expert_tensor,
            expert,
            pipeline,
        } = pool.worker;
        json!({
            "count": pool.count, "tensor": tensor, "data": data, "expert_tensor": expert_tensor, "expert": expert, "pipeline": pipeline,
        })
    };
    let line = |candidate: &ServingCandidate| {
        let Deployment { prefill, decode, .. } = &candidate.deployment;
        let estimate = &candidate.estimate;
        let ms = |time: Picos| time.as_secs_f64() * 1e3;
        json!({
            "prefill": prefill.as_ref().map(pool),
            "decode": pool(decode),
            "concurrency": candidate.concurrency,
            "first_token_ms": ms(estimate.first_token),
            "per_token_ms": ms(estimate.per_token),
            "hand_off_ms": ms(estimate.hand_off),
            "output_per_second": estimate.output_per_second,
            "output_per_second_and_gpu": candidate.output_per_gpu,
            "gpus": estimate.gpus,
        })
    };
    let mut whole = json!({ "found": found.iter().map(line).collect::<Vec<_>>() });
    if let Some(report) = simulated {
        whole["simulated"] = json!({
            "requests": report.requests,
            "first_token_ms": report.first_token,
            "per_token_ms": report.per_token,
            "output_per_second": report.output_per_second,
        });
    }
    format!("{whole}\n")
}
