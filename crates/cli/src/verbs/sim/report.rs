//! What a scenario's answers put into a report.

use std::collections::BTreeMap;

use weft_model::device::{DeviceModel, DeviceOptions};
use weft_model::fabric::{Fabric, Topology};
use weft_model::system::System;
use weft_plan::{Bytes, Collective, Rank};
use weft_sim::scenario::{Answer, Fidelity, Scenario, Workload};
use weft_sim::serving::{Percentiles, ServingScenario};

use crate::complaint::{Complain, Complaint, Exit};
use crate::report::comparison::{Comparison, Measured, Pair};
use crate::report::{Answered, Drawing, Figures, Report, Timeline, short};

/// So many sizes are asked of a fidelity that takes its time.
const ASKED_MAX: usize = 256;

/// Everything that a scenario's answers tell, and what was measured beside it.
pub fn scenario(scenario: &Scenario, answers: &[Answer], measured: Option<&[Measured]>) -> Result<Report, Complaint> {
    let refused = || format!("The scenario {} cannot be drawn.", scenario.name);
    let topology = scenario.topology().or_complain(Exit::Failed, refused)?;
    let trains = matches!(scenario.workload, Workload::Training(_));
    let mut drawing = (!trains).then(|| match scenario.cluster.as_ref().map(|cluster| &cluster.fabric) {
        Some(Fabric::Torus { sides, .. }) => Drawing::torus(&topology, sides),
        _ => Drawing::new(&topology),
    });
    if let Some(drawing) = &mut drawing {
        for answer in answers.iter().filter(|answer| !answer.carried.is_empty()) {
            let name = answer.fidelity.to_string();
            drawing.look(&name, &topology, &answer.carried, answer.time, &answer.hot);
        }
        if drawing.views.is_empty() {
            drawing.look("analytical", &topology, &[], weft_plan::Picos::ZERO, &[]);
        }
    }
    let comparison = match measured {
        Some(rows) => Some(Predictor::new(scenario).compare(rows)?),
        None => None,
    };
    Ok(Report {
        kind: "simulated scenario".to_owned(),
        title: short(&scenario.name),
        summary: short(&scenario.summary),
        facts: facts(scenario, answers, &topology),
        answers: answers.iter().map(answered).collect(),
        topology: drawing,
        timelines: answers.iter().filter_map(Timeline::of).collect(),
        comparison,
        tables: figures(answers),
        foot: format!(
            "Weft {}. The same scenario and seed give the same file, byte by byte.",
            env!("CARGO_PKG_VERSION")
        ),
    })
}

/// What clients of a serving scenario saw, and the links under it.
pub fn serving(
    scenario: &ServingScenario,
    report: &weft_sim::serving::Report,
    rows: &[(&str, &Percentiles)],
) -> Report {
    let topology = scenario.topology().ok().flatten();
    let drawing = topology.map(|topology| {
        let mut drawing = Drawing::new(&topology);
        drawing.look("flow", &topology, &report.carried, report.time, &report.hot);
        drawing
    });
    let fact = |name: &str, value: String| (name.to_owned(), short(&value));
    let cells = |(name, values): &(&str, &Percentiles)| {
        let numbers = values.figures().map(|value| format!("{value:.3}"));
        std::iter::once((*name).to_owned()).chain(numbers).collect()
    };
    let median = |(name, values): &(&str, &Percentiles)| Answered {
        name: format!("{name}, median"),
        time_ps: (values.p50 * 1e9) as u64,
        note: format!("{:.2} ms at the 99th percentile", values.p99),
        parts: Vec::new(),
    };
    Report {
        kind: "simulated serving".to_owned(),
        title: short(&scenario.name),
        summary: short(&scenario.summary),
        facts: vec![
            fact("system", scenario.system.clone()),
            fact("model", scenario.model.clone()),
            fact("engine", scenario.engine.clone()),
            fact("quantisation", scenario.quantisation.clone()),
            fact("requests", report.requests.to_string()),
            fact("output", format!("{:.0} tokens/s", report.output_per_second)),
            fact("sequences at once", format!("{} a worker", report.batch_max)),
            fact("prompts found in caches", format!("{:.0} %", report.found * 100.0)),
            fact("simulated", format!("{:.1}", report.time)),
            fact("events, flows", format!("{}, {}", report.events, report.flows)),
            fact("seed", scenario.seed.to_string()),
        ],
        answers: rows.iter().map(median).collect(),
        topology: drawing,
        tables: vec![Figures {
            title: "What clients saw, in milliseconds".to_owned(),
            columns: ["what", "mean", "50 %", "90 %", "99 %", "most"]
                .map(str::to_owned)
                .to_vec(),
            rows: rows.iter().map(cells).collect(),
        }],
        foot: format!(
            "Weft {}. The same scenario and seed give the same file, byte by byte.",
            env!("CARGO_PKG_VERSION")
        ),
        ..Report::default()
    }
}

fn facts(scenario: &Scenario, answers: &[Answer], topology: &Topology) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut fact = |name: &str, value: String| facts.push((name.to_owned(), short(&value)));
    match &scenario.system {
        Some(system) => {
            fact("system", system.name.clone());
            let shared = match system.oversubscription {
                1 => String::new(),
                by => format!(", {by}:1"),
            };
            fact("fabric", format!("rail-optimised Clos, {} tiers{shared}", system.tiers));
        }
        None => {
            let cluster = scenario.cluster.as_ref();
            fact(
                "fabric",
                cluster.map_or(String::new(), |cluster| fabric(&cluster.fabric)),
            );
        }
    }
    fact("GPUs", with_commas(topology.ranks()));
    if topology.node_ranks() > 1 {
        fact("GPUs a node", topology.node_ranks().to_string());
    }
    if let Some(first) = answers.first() {
        fact("what", first.what.clone());
        if let Workload::Collective { collective, .. } = &scenario.workload {
            fact("collective", collective.clone());
        }
        if let Some(trained) = &first.trained {
            let step = &trained.step;
            fact(
                "batch",
                format!("{} × {} tokens", trained.batch.sequences, trained.batch.tokens),
            );
            fact("utilisation (MFU)", format!("{:.1} %", step.utilization * 100.0));
            fact("a GPU", format!("{:.0} TFLOP/s", step.tflops_per_gpu));
            fact(
                "tokens",
                format!("{:.0} a second and GPU", step.tokens_per_second_per_gpu),
            );
            let memory = &step.memory;
            let fits = if memory.fits() { "" } else { ", too much" };
            let (total, capacity) = (memory.total() / 1e9, memory.capacity / 1e9);
            fact("memory", format!("{total:.0} of {capacity:.0} GB{fits}"));
        } else {
            fact("size", format!("{:.1}", first.bytes));
            fact("routing", format!("{:?}", scenario.routing).to_lowercase());
        }
    }
    if !scenario.faults.is_empty() {
        fact("faults", scenario.faults.len().to_string());
    }
    fact("seed", scenario.seed.to_string());
    facts
}

fn fabric(fabric: &Fabric) -> String {
    match fabric {
        Fabric::SingleSwitch { ports, .. } => format!("one switch, {ports} ports"),
        Fabric::Direct { ports, .. } => format!("direct, {ports} ports"),
        Fabric::RailClos { tiers, .. } => format!("rail-optimised Clos, {tiers} tiers"),
        Fabric::FatTree {
            tiers,
            oversubscription,
            ..
        } => format!("fat tree, {tiers} tiers, {oversubscription}:1"),
        Fabric::Torus { sides, .. } => {
            let sides: Vec<String> = sides.iter().map(u32::to_string).collect();
            format!("torus {}", sides.join(" × "))
        }
        Fabric::Dragonfly { groups, .. } => format!("dragonfly, {groups} groups"),
        Fabric::DragonflyPlus { groups, .. } => format!("dragonfly+, {groups} groups"),
        _ => "other".to_owned(),
    }
}

fn answered(answer: &Answer) -> Answered {
    let parts = answer.trained.as_ref().map_or_else(Vec::new, |trained| {
        let step = &trained.step;
        let mut parts: Vec<(String, f64)> = step
            .parts
            .iter()
            .map(|(part, seconds)| (part.to_string(), (seconds / step.seconds * 1e4).round() * 1e-4))
            .collect();
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        parts
    });
    Answered {
        name: answer.fidelity.to_string(),
        time_ps: answer.time.as_ps(),
        note: String::new(),
        parts,
    }
}

/// A heading, and what stands under it.
type Column = (&'static str, fn(&Answer) -> u64);

/// All numbers of the answers; those that are nowhere are left out.
fn figures(answers: &[Answer]) -> Vec<Figures> {
    let columns: [Column; 9] = [
        ("ranks", |answer| answer.ranks.into()),
        ("bytes", |answer| answer.bytes.0),
        ("messages", |answer| answer.messages),
        ("followed", |answer| answer.classes.into()),
        ("events", |answer| answer.events),
        ("packets", |answer| answer.packets),
        ("trimmed", |answer| answer.trimmed),
        ("dropped", |answer| answer.dropped),
        ("pauses", |answer| answer.pauses),
    ];
    let used: Vec<_> = columns
        .into_iter()
        .filter(|(_, of)| answers.iter().any(|answer| of(answer) > 0))
        .collect();
    let mut names = vec!["fidelity", "what", "time_us"];
    names.extend(used.iter().map(|(name, _)| *name));
    let row = |answer: &Answer| {
        let mut row = vec![
            answer.fidelity.to_string(),
            answer.what.clone(),
            format!("{:.6}", answer.time.as_ps() as f64 * 1e-6),
        ];
        row.extend(used.iter().map(|(_, of)| of(answer).to_string()));
        row
    };
    let mut tables = vec![Figures {
        title: "Figures".to_owned(),
        columns: names.into_iter().map(str::to_owned).collect(),
        rows: answers.iter().map(row).collect(),
    }];
    for answer in answers {
        if let Some(trained) = &answer.trained {
            let row = |(part, seconds): &(weft_model::workload::training::StepPart, f64)| {
                let share = seconds / trained.step.seconds * 100.0;
                vec![part.to_string(), format!("{seconds:.6}"), format!("{share:.2}")]
            };
            tables.push(Figures {
                title: "Where the time goes".to_owned(),
                columns: ["part", "seconds", "%"].map(str::to_owned).to_vec(),
                rows: trained.step.parts.iter().map(row).collect(),
            });
        } else if !answer.hot.is_empty() {
            let row = |hot: &weft_sim::traffic::Hot| {
                vec![
                    hot.name.clone(),
                    hot.width.to_string(),
                    format!("{:.2}", hot.utilisation * 100.0),
                    hot.carried.0.to_string(),
                ]
            };
            tables.push(Figures {
                title: format!("Busiest links, {}", answer.fidelity),
                columns: ["link", "parallel", "busy %", "bytes"].map(str::to_owned).to_vec(),
                rows: answer.hot.iter().map(row).collect(),
            });
        }
    }
    tables
}

/// Collective, bytes, ranks, algorithm and settings: what tells predictions apart.
type Asked = (String, u64, u32, Option<String>, Option<String>);

/// Predicts measurements on the cluster of a scenario.
struct Predictor<'a> {
    scenario: &'a Scenario,
    system: Option<System>,
    fidelities: Vec<Fidelity>,
    known: BTreeMap<Asked, Vec<Option<f64>>>,
}

impl<'a> Predictor<'a> {
    fn new(scenario: &'a Scenario) -> Predictor<'a> {
        let named = scenario.system.as_ref().map(|choice| System::named(&choice.name));
        Predictor {
            scenario,
            system: named.and_then(Result::ok),
            // Packets would take longer than anybody waits, over a whole sweep.
            fidelities: [Fidelity::Analytical, Fidelity::Flow]
                .into_iter()
                .filter(|fidelity| scenario.fidelities.contains(fidelity))
                .collect(),
            known: BTreeMap::new(),
        }
    }

    fn compare(&mut self, rows: &[Measured]) -> Result<Comparison, Complaint> {
        if !matches!(self.scenario.workload, Workload::Collective { .. }) {
            return Err(Complaint::new(
                Exit::Usage,
                "Measurements of collectives belong beside a scenario of a collective.",
            ));
        }
        let mut series: Vec<String> = self.fidelities.iter().map(Fidelity::to_string).collect();
        if self.system.is_some() {
            series.push("GPU library model".to_owned());
        }
        let also = rows.iter().any(|row| row.predicted.is_some());
        if also {
            series.push("when measured".to_owned());
        }
        let ours: Vec<&Measured> = rows.iter().filter(|row| self.is_ours(row)).collect();
        let mut pairs = Vec::new();
        let mut unpredicted = 0;
        for row in &ours {
            let mut predicted = self.predict(row);
            if also {
                predicted.push(row.predicted);
            }
            if predicted.iter().all(Option::is_none) {
                unpredicted += 1;
                continue;
            }
            let label = match row.label.is_empty() {
                true => String::new(),
                false => format!(", {}", row.label),
            };
            pairs.push(Pair {
                group: short(&format!(
                    "{}, {} ranks{label}",
                    row.operation.replace('_', "-"),
                    row.ranks
                )),
                bytes: Some(row.bytes),
                measured: row.micros,
                predicted,
            });
        }
        let mut note = String::from(
            "Every row of the file on the cluster of this scenario, by its schedule and what its ranks cost.",
        );
        if self.system.is_some() {
            note.push_str(" The model of GPU libraries is the one that `weft validate` checks.");
        }
        if ours.len() < rows.len() {
            note.push_str(&format!(
                " {} rows of other systems are left out.",
                rows.len() - ours.len()
            ));
        }
        if unpredicted > 0 {
            note.push_str(&format!(" {unpredicted} rows cannot be run on it."));
        }
        Ok(Comparison::new(series, pairs, note))
    }

    /// Whether a row is about this system, as far as either says so.
    fn is_ours(&self, row: &Measured) -> bool {
        match (&self.system, &row.system) {
            (Some(ours), Some(theirs)) => System::named(theirs).is_ok_and(|theirs| theirs.name == ours.name),
            _ => true,
        }
    }

    fn predict(&mut self, row: &Measured) -> Vec<Option<f64>> {
        let key = (
            row.operation.clone(),
            row.bytes,
            row.ranks,
            row.algorithm.clone(),
            row.settings.clone(),
        );
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let collective = spelled(&row.operation);
        let asks = self.known.len() < ASKED_MAX;
        let mut predicted: Vec<Option<f64>> = self
            .fidelities
            .iter()
            .map(|&fidelity| match asks || fidelity == Fidelity::Analytical {
                true => self.simulated(row, &collective, fidelity),
                false => None,
            })
            .collect();
        if let Some(system) = &self.system {
            let time = Collective::named(&collective, Rank(0), Rank(1)).and_then(|collective| {
                let device = DeviceModel::of(system, row.ranks).ok()?;
                let options = DeviceOptions::parse(row.settings.as_deref().unwrap_or_default());
                let estimate = device.predict(collective, Bytes(row.bytes), &options);
                estimate.ok().map(|estimate| estimate.time.as_secs_f64() * 1e6)
            });
            predicted.push(time);
        }
        self.known.insert(key, predicted.clone());
        predicted
    }

    /// The scenario with this size, these ranks, and the algorithm that ran where it is known.
    fn simulated(&self, row: &Measured, collective: &str, fidelity: Fidelity) -> Option<f64> {
        let Workload::Collective {
            collective: own,
            algorithm: chosen,
            ..
        } = &self.scenario.workload
        else {
            return None;
        };
        let own_choice = if own == collective { chosen.clone() } else { None };
        let tries = [row.algorithm.clone().map(Some), own_choice.map(Some), Some(None)];
        tries.into_iter().flatten().find_map(|algorithm| {
            let workload = Workload::Collective {
                collective: collective.to_owned(),
                algorithm,
                bytes: Bytes(row.bytes),
                ranks: Some(row.ranks),
                root: 0,
            };
            let scenario = Scenario {
                workload,
                fidelities: vec![fidelity],
                ..self.scenario.clone()
            };
            let answers = scenario.run().ok()?;
            answers.first().map(|answer| answer.time.as_secs_f64() * 1e6)
        })
    }
}

/// As `weft explain` spells a collective.
fn spelled(operation: &str) -> String {
    let plain = operation.to_ascii_lowercase().replace(['_', ' '], "-");
    match plain.as_str() {
        "allreduce" => "all-reduce",
        "allgather" => "all-gather",
        "alltoall" => "all-to-all",
        "reducescatter" => "reduce-scatter",
        "sendrecv" | "send-recv" => "send-receive",
        other => other,
    }
    .to_owned()
}

fn with_commas(number: u32) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
