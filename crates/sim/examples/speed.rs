//! How fast the simulator is: `speed ring 1024`, `speed ring 8192 3` (tiers), `speed hierarchical 131072`, `speed all-to-all 131072`,
//! `speed permutation 1024`, `speed closed-forms 1048576`, `speed schedule 1048576 all-reduce`, `speed training 9216`, `speed serving shared`, `speed rails`. Prints one line of JSON, with the CPU time and
//! the peak of the memory of the whole process. `cargo xtask compare simulator` runs all of them.

#![expect(clippy::disallowed_methods, reason = "it measures")]

use std::error::Error;

use weft_model::device::{DeviceModel, DeviceOptions};
use weft_model::fabric::{Cluster, Fabric, FabricError, Topology, Wire};
use weft_model::roofline::Recipe;
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_model::workload::training::{Parallel, TrainingBatch, TrainingJob};
use weft_plan::algorithms::Algorithm;
use weft_plan::collective::{Collective, Problem, Sizes};
use weft_plan::{Bandwidth, Bytes, Picos, Rank};
use weft_sim::flow::{self, FlowOptions};
use weft_sim::packet::{self, PacketOptions};
use weft_sim::scenario::Scenario;
use weft_sim::serving::ServingScenario;
use weft_sim::traffic::{Transfer, permutation};

type Outcome = Result<(), Box<dyn Error>>;

const GIB: Bytes = Bytes(1 << 30);

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let word = |nth: usize| arguments.get(nth).map_or("", String::as_str);
    let count: u32 = word(1).parse().unwrap_or(1024);
    let tiers: Option<u32> = word(2).parse().ok();
    let sizes = Sizes::Equal;
    match word(0) {
        "ring" => flows(count, tiers, Collective::AllReduce, Algorithm::Ring),
        "hierarchical" => flows(count, tiers, Collective::AllReduce, Algorithm::RailRing),
        "doubling" => flows(count, tiers, Collective::AllReduce, Algorithm::RailDoubling),
        "all-to-all" => flows(count, tiers, Collective::AllToAll { sizes }, Algorithm::RailRing),
        "direct" => flows(count, tiers, Collective::AllToAll { sizes }, Algorithm::Direct),
        "permutation" => packets(count),
        "closed-forms" => closed_forms(count),
        "schedule" => chosen_schedule(count, word(2)),
        "training" => training(count),
        "serving" => serving(word(1) == "shared"),
        "rails" => rails(),
        other => Err(format!("{other:?} is nothing to measure").into()),
    }
}

/// Nodes of eight on a rail-optimised Clos: where nothing is said of two tiers as far as these reach, then of three.
fn cluster(ranks: u32, tiers: Option<u32>) -> Result<Topology, FabricError> {
    let cluster = Cluster {
        node_ranks: 8,
        node_ports: 8,
        scale_up: Some(Wire {
            bandwidth: Bandwidth::from_gigabytes_per_sec(450.0),
            latency: Picos::from_ns(250),
        }),
        fabric: Fabric::RailClos {
            nodes: ranks / 8,
            rails: 8,
            tiers: tiers.unwrap_or(if ranks <= 8192 { 2 } else { 3 }),
            radix: 128,
            oversubscription: 1,
            wire: Wire {
                bandwidth: Bandwidth::from_gigabytes_per_sec(50.0),
                latency: Picos::from_ns(500),
            },
        },
    };
    cluster.build()
}

fn flows(ranks: u32, tiers: Option<u32>, collective: Collective, algorithm: Algorithm) -> Outcome {
    let topology = cluster(ranks, tiers)?;
    let problem = Problem::new(collective, ranks);
    let grid = topology.grid(ranks).ok_or("nodes that are not whole")?;
    let program = algorithm
        .program(&problem, grid)
        .ok_or("an algorithm for something else")?;
    let report = flow::run_program(&topology, &problem, &*program, GIB, &FlowOptions::default())?;
    println!(
        "{{\"what\":\"{collective} by {algorithm}\",\"ranks\":{ranks},\"simulated_us\":{:.3},\"messages\":{},\"flows\":{},\"classes\":{},{}}}",
        report.time.as_ps() as f64 * 1e-6,
        report.messages,
        report.flows,
        report.classes,
        costs(report.events)
    );
    Ok(())
}

fn packets(hosts: u32) -> Outcome {
    let cluster = Cluster {
        node_ranks: 1,
        node_ports: 1,
        scale_up: None,
        fabric: Fabric::FatTree {
            hosts,
            tiers: 3,
            radix: (f64::from(hosts) * 4.0).cbrt().round() as u32,
            oversubscription: 1,
            wire: Wire {
                bandwidth: Bandwidth::from_bytes_per_sec(12_500_000_000),
                latency: Picos::from_us(1),
            },
        },
    };
    let topology = cluster.build()?;
    let list: Vec<Transfer> = permutation(hosts, 1)
        .into_iter()
        .map(|(from, to)| Transfer {
            from,
            to,
            bytes: Bytes(2_000_000),
            start: Picos::ZERO,
        })
        .collect();
    let report = packet::run_transfers(&topology, &list, &PacketOptions::default())?;
    println!(
        "{{\"what\":\"permutation\",\"ranks\":{hosts},\"simulated_us\":{:.3},\"messages\":{},\"packets\":{},\"trimmed\":{},\"queue_bytes\":{},{}}}",
        report.time.as_ps() as f64 * 1e-6,
        report.messages,
        report.packets,
        report.trimmed,
        report.queue_max.0,
        costs(report.events)
    );
    Ok(())
}

/// Every collective in closed form between GPUs, the choice of algorithm and protocol included; what counts is the slowest.
fn closed_forms(ranks: u32) -> Outcome {
    let system = System::named("dgx-h100")?;
    let (mut done, mut slowest) = (0, 0.0f64);
    let (mut name, mut time) = ("", Picos::ZERO);
    for named in Collective::NAMES {
        let Some(collective) = Collective::named(named, Rank(0), Rank(1)) else {
            continue;
        };
        let before = cpu_seconds();
        // What no library does between GPUs has no closed form there.
        let Ok(estimate) = DeviceModel::of(&system, ranks)?.predict(collective, GIB, &DeviceOptions::default()) else {
            continue;
        };
        done += 1;
        let took = cpu_seconds() - before;
        if took >= slowest {
            (slowest, name, time) = (took, named, estimate.time);
        }
    }
    println!(
        "{{\"what\":\"closed forms, the slowest: {name}\",\"ranks\":{ranks},\"simulated_us\":{:.3},\"collectives\":{done},\"slowest_seconds\":{slowest:.6},{}}}",
        time.as_ps() as f64 * 1e-6,
        costs(0)
    );
    Ok(())
}

/// A collective in the closed form of its schedule, the fastest of all: `weft sim run` with the analytical fidelity.
fn chosen_schedule(ranks: u32, collective: &str) -> Outcome {
    let text = format!(
        "name = 'closed form'\nfidelities = ['analytical']\n\
         [system]\nname = 'dgx-h100'\nnodes = {}\ntiers = 3\nradix = 256\n\
         [workload.collective]\ncollective = '{collective}'\nbytes = '1 GiB'\n",
        ranks / 8
    );
    let answers = Scenario::from_toml(&text)?.run()?;
    let answer = answers.first().ok_or("no answer")?;
    println!(
        "{{\"what\":\"{collective} by {}\",\"ranks\":{ranks},\"simulated_us\":{:.3},{}}}",
        answer.what,
        answer.time.as_ps() as f64 * 1e-6,
        costs(0)
    );
    Ok(())
}

/// A step of a model with experts: DeepSeek-V3, and from a hundred thousand GPUs on Kimi K2 with its trillion parameters.
fn training(gpus: u32) -> Outcome {
    let name = if gpus < 100_000 { "deepseek-v3" } else { "kimi-k2" };
    let model = Model::named(name)?;
    let (parameters, layers) = (model.parameters(), model.layers());
    let job = TrainingJob {
        parallel: Parallel {
            pipeline: 16,
            expert: 64,
            ..Parallel::default()
        },
        batch: TrainingBatch {
            sequences: 4 * gpus,
            micro: 1,
            tokens: 4096,
        },
        ..TrainingJob::new(model, gpus, Recipe::Bf16)
    };
    let step = job.step(&System::named("dgx-h100")?)?;
    println!(
        "{{\"what\":\"{name}, {layers} layers\",\"ranks\":{gpus},\"simulated_us\":{:.3},\"parameters\":{parameters:.0},\"fits\":{},{}}}",
        step.seconds * 1e6,
        step.memory.fits(),
        costs(0)
    );
    Ok(())
}

/// The shipped scenario of 20,000 requests, with its links or with hand-offs that do not meet.
fn serving(shared: bool) -> Outcome {
    let mut scenario = ServingScenario::from_toml(include_str!("../../../scenarios/serving.toml"))?;
    if !shared {
        scenario.network = None;
    }
    let report = scenario.run()?;
    println!(
        "{{\"what\":\"{}\",\"requests\":{},\"simulated_us\":{:.3},\"flows\":{},{}}}",
        scenario.name,
        report.requests,
        report.time.as_ps() as f64 * 1e-6,
        report.flows,
        costs(report.events)
    );
    Ok(())
}

/// The shipped scenario `rails`, all of it: `weft sim run rails`.
fn rails() -> Outcome {
    let scenario = Scenario::from_toml(include_str!("../../../scenarios/rails.toml"))?;
    let answers = scenario.run()?;
    let answer = answers.last().ok_or("no answer")?;
    println!(
        "{{\"what\":\"{}\",\"ranks\":{},\"simulated_us\":{:.3},\"classes\":{},{}}}",
        scenario.name,
        answer.ranks,
        answer.time.as_ps() as f64 * 1e-6,
        answer.classes,
        costs(answer.events)
    );
    Ok(())
}

/// What the run has cost: seconds of the CPU, events, bytes of memory at the peak.
fn costs(events: u64) -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak: u64 = peak
        .and_then(|peak| peak.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0);
    format!(
        "\"cpu_seconds\":{:.4},\"events\":{events},\"peak_bytes\":{}",
        cpu_seconds(),
        peak * 1024
    )
}

/// Seconds that this process has been on a CPU: all of it is one thread.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanoseconds = stat.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
    nanoseconds.unwrap_or(f64::NAN) * 1e-9
}
