use weft_model::fabric::{Cluster, Fabric, Routing, Topology, Wire};
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_model::workload::serving::{Deployment, Engine, Pool, Quantisation, ServingLoad, Worker};
use weft_plan::{Bytes, Picos, Rank};

use super::*;

fn llama() -> Model {
    Model::named("llama-3.1-70b").unwrap()
}

fn h200() -> System {
    System::named("dgx-h200").unwrap()
}

fn apart(prefill: u32, decode: u32) -> Deployment {
    let pool = |count| Pool {
        worker: Worker::tensor(8),
        count,
    };
    Deployment {
        engine: Engine::Vllm,
        quantisation: Quantisation::fp8(&llama()),
        prefill: Some(pool(prefill)),
        decode: pool(decode),
    }
}

/// Nodes of eight GPUs and eight cards, under leaves that lead to a narrower core.
fn tree(nodes: u32, oversubscription: u32) -> Topology {
    let wire = |bandwidth: &str, latency: &str| Wire {
        bandwidth: bandwidth.parse().unwrap(),
        latency: latency.parse().unwrap(),
    };
    Cluster {
        node_ranks: 8,
        node_ports: 8,
        scale_up: Some(wire("450 GB/s", "250 ns")),
        fabric: Fabric::FatTree {
            hosts: 8 * nodes,
            tiers: 2,
            radix: 16,
            oversubscription,
            wire: wire("400 Gb/s", "500 ns"),
        },
    }
    .build()
    .unwrap()
}

fn requests(count: u32, rate: f64, seed: u64) -> Vec<Request> {
    let arrivals = Arrivals {
        count,
        rate,
        input: 4096,
        output: 128,
        ..Arrivals::default()
    };
    arrivals.requests(seed).unwrap()
}

fn network(topology: &Topology) -> ServingOptions<'_> {
    ServingOptions {
        network: Some(ServingNetwork {
            topology,
            options: FlowOptions {
                routing: Routing::Ecmp,
                ..FlowOptions::default()
            },
            others: Vec::new(),
        }),
        prefix_tokens: 0,
    }
}

#[test]
fn the_same_seed_gives_the_same_report() {
    let topology = tree(8, 3);
    let run = || {
        run(
            &h200(),
            &llama(),
            &apart(4, 4),
            &requests(300, 30.0, 3),
            &network(&topology),
        )
        .unwrap()
    };
    assert_eq!(run(), run());
}

#[test]
fn one_request_alone_takes_what_the_passes_take() {
    let request = Request {
        arrives: Picos::ZERO,
        input: 4096,
        output: 101,
        prefix: None,
    };
    let deployment = apart(1, 1);
    let report = run(&h200(), &llama(), &deployment, &[request], &ServingOptions::default()).unwrap();
    let load = ServingLoad::closed(1, 4096, 101);
    let expected = deployment.estimate(&h200(), &llama(), &load).unwrap();
    let near = |ms: f64, time: Picos| (ms * 1e-3 / time.as_secs_f64() - 1.0).abs() < 0.02;
    assert!(
        near(report.per_token.mean, expected.per_token),
        "{report:?} {expected:?}"
    );
    assert!(near(report.hand_off.mean, expected.hand_off), "{report:?} {expected:?}");
}

#[test]
fn hand_offs_slow_each_other_down_on_a_narrow_core_and_other_traffic_slows_them_more() {
    let (wide, narrow) = (tree(8, 1), tree(8, 3));
    let requests = requests(400, 60.0, 1);
    let at = |options: &ServingOptions<'_>| run(&h200(), &llama(), &apart(4, 4), &requests, options).unwrap();
    let (free, shared) = (at(&network(&wide)), at(&network(&narrow)));
    assert!(
        shared.hand_off.p90 > free.hand_off.p90,
        "{:?} {:?}",
        shared.hand_off,
        free.hand_off
    );
    let mut crowded = network(&narrow);
    let others = &mut crowded.network.as_mut().unwrap().others;
    for gpu in 0..32 {
        others.push(Transfer {
            from: Rank(gpu),
            to: Rank(32 + gpu),
            bytes: Bytes(1 << 40),
            start: Picos::ZERO,
        });
    }
    assert!(at(&crowded).hand_off.mean > 1.2 * shared.hand_off.mean);
}

#[test]
fn a_prefix_that_is_found_is_not_read_again() {
    let arrivals = Arrivals {
        count: 300,
        rate: 20.0,
        input: 4096,
        output: 64,
        families: 4,
        shared: 0.7,
        ..Arrivals::default()
    };
    let requests = arrivals.requests(5).unwrap();
    let at = |prefix_tokens| {
        let options = ServingOptions {
            prefix_tokens,
            ..ServingOptions::default()
        };
        run(&h200(), &llama(), &apart(2, 2), &requests, &options).unwrap()
    };
    let (without, with) = (at(0), at(1 << 20));
    assert_eq!(without.found, 0.0);
    assert!(with.found > 0.6 && with.first_token.mean < 0.7 * without.first_token.mean);
}

#[test]
fn a_busy_worker_agrees_with_the_closed_form() {
    let (system, model) = (h200(), llama());
    let deployment = Deployment::aggregated(Engine::Vllm, Quantisation::fp8(&model), Worker::tensor(8), 1);
    let expected = deployment
        .estimate(&system, &model, &ServingLoad::closed(32, 1024, 512))
        .unwrap();
    // Arrivals at the rate that keeps that many requests under way.
    let rate = expected.output_per_second / 512.0;
    let arrivals = Arrivals {
        count: 600,
        rate,
        input: 1024,
        output: 512,
        shortest: 1.0,
        ..Arrivals::default()
    };
    let requests = arrivals.requests(11).unwrap();
    let report = run(&system, &model, &deployment, &requests, &ServingOptions::default()).unwrap();
    let apart = report.per_token.p50 * 1e-3 / expected.per_token.as_secs_f64();
    assert!((0.75..1.3).contains(&apart), "{apart}");
}

#[test]
fn a_request_that_fits_nowhere_is_named() {
    let request = Request {
        arrives: Picos::ZERO,
        input: 90_000_000,
        output: 1,
        prefix: None,
    };
    let result = run(&h200(), &llama(), &apart(1, 1), &[request], &ServingOptions::default());
    assert!(matches!(result, Err(SimulationError::TooLong { request: 0, .. })));
}

#[test]
fn mistakes_are_told_with_line_and_field() {
    let text = include_str!("../../../../scenarios/serving.toml");
    for (old, new, message) in [
        (
            "dgx-h200",
            "dgx-z200",
            "line 4, at `system`: there is no system `dgx-z200`",
        ),
        (
            "system = ",
            "platform = ",
            "line 4, column 1, at `platform`: a system of GPUs is chosen by `system`",
        ),
        ("llama-3.1-70b", "lama", "line 5, at `model`: no model is called"),
        ("\"vllm\"", "\"vlm\"", "line 6, at `engine`: no engine is called `vlm`"),
        ("\"fp8\"", "\"fp9\"", "line 7, at `quantisation`: no way to quantise"),
        ("rate = 20.0", "rate = -1.0", "line 10, at `arrivals`: "),
        (
            "radix = 20",
            "radix = 21",
            "line 23, at `network.cluster.fabric.radix`: 21 is not a multiple",
        ),
        ("hosts = 128", "host = 128", "line 21, column 1, at `host`"),
        (
            "hosts = 128",
            "hosts = 64",
            "line 15, at `network.cluster`: the deployment takes 128 GPUs, and the network has 64",
        ),
    ] {
        assert!(text.contains(old));
        let broken = text.replacen(old, new, 1);
        let outcome = ServingScenario::from_toml(&broken).and_then(|scenario| scenario.run());
        let said = outcome.unwrap_err().in_text(&broken).to_string();
        assert!(said.starts_with(message), "{said}");
    }
}
