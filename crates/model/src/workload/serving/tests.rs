use super::*;
use crate::system::System;
use crate::workload::model::Model;
use proptest::prelude::*;
use weft_plan::units::Picos;

fn llama() -> Model {
    Model::named("llama-3.1-70b").unwrap()
}

fn h200() -> System {
    System::named("dgx-h200").unwrap()
}

#[test]
fn a_model_that_does_not_fit_is_an_error_that_says_by_how_much() {
    let quantisation = Quantisation::bf16();
    let result = room(
        &System::named("dgx-h100").unwrap(),
        &llama(),
        Worker::tensor(1),
        quantisation,
    );
    assert!(matches!(result, Err(ServingError::DoesNotFit { needed_gb, .. }) if needed_gb > 130.0));
}

#[test]
fn weights_of_a_dense_model_are_divided_and_counted_once() {
    let room = room(&h200(), &llama(), Worker::tensor(8), Quantisation::bf16()).unwrap();
    let whole = llama().parameters() * 2.0;
    assert!((room.weights.0 as f64 * 8.0 / whole - 1.0).abs() < 0.01);
    // 80 layers, one of the eight heads of keys and one of values on each GPU, 128 elements of 2 bytes.
    assert_eq!(room.token_bytes, 80.0 * 2.0 * 128.0 * 2.0);
}

#[test]
fn decoding_one_sequence_takes_as_long_as_reading_the_weights_and_somewhat_more() {
    let (system, model) = (h200(), llama());
    let pass = Pass::new(
        &system,
        &model,
        Worker::tensor(1),
        Quantisation::fp8(&model),
        Engine::Vllm,
    )
    .unwrap();
    let seconds = pass.step_seconds(&PassBatch::sequences(1.0, 100.0));
    let reading = model.parameters() / system.gpu.memory_bandwidth.bytes_per_sec() as f64;
    assert!(
        seconds > reading && seconds < 1.7 * reading,
        "{seconds} against {reading}"
    );
}

#[test]
fn experts_that_nobody_chose_are_not_read() {
    let (system, model) = (h200(), Model::named("deepseek-v3").unwrap());
    let pass = Pass::new(
        &system,
        &model,
        Worker::tensor(8),
        Quantisation::fp8(&model),
        Engine::Sglang,
    )
    .unwrap();
    let one = pass.gpu_seconds(&PassBatch::sequences(1.0, 1000.0));
    let many = pass.gpu_seconds(&PassBatch::sequences(256.0, 1000.0));
    assert!(many > 3.0 * one);
}

#[test]
fn uneven_divisions_are_refused() {
    let model = Model::named("deepseek-v3").unwrap();
    let worker = Worker {
        expert: 4,
        expert_tensor: 1,
        ..Worker::tensor(8)
    };
    let result = Pass::new(&h200(), &model, worker, Quantisation::fp8(&model), Engine::Vllm);
    assert!(matches!(
        result,
        Err(ServingError::Uneven {
            attention: 8,
            experts: 4
        })
    ));
}

#[test]
fn too_few_prefill_workers_starve_the_others() {
    let (system, model) = (h200(), llama());
    let pool = |ways, count| Pool {
        worker: Worker::tensor(ways),
        count,
    };
    let deployment = Deployment {
        engine: Engine::Vllm,
        quantisation: Quantisation::fp8(&model),
        prefill: Some(pool(1, 1)),
        decode: pool(8, 4),
    };
    let load = ServingLoad::closed(512, 8192, 256);
    let starved = deployment.estimate(&system, &model, &load).unwrap();
    assert_eq!(starved.limit, Limit::Prefill);
    let fed = Deployment {
        prefill: Some(pool(8, 32)),
        ..deployment
    };
    let fed = fed.estimate(&system, &model, &load).unwrap();
    assert_eq!(fed.limit, Limit::Load);
    assert!(fed.first_token < starved.first_token && fed.output_per_second > starved.output_per_second);
    // What one worker reads a second is what all of them answer.
    let most = 1.0 / starved.prompt.as_secs_f64();
    assert!(starved.output_per_second / 256.0 <= most * 1.05);
}

#[test]
fn a_search_keeps_its_targets_and_puts_the_best_first() {
    let (system, model) = (h200(), llama());
    let wanted = ServingSearch {
        gpus: 16,
        engine: Engine::Vllm,
        quantisation: Quantisation::fp8(&model),
        input: 2048,
        output: 256,
        cached: 0,
        targets: Targets {
            first_token: Picos::from_ms(2000),
            per_token: Picos::from_ms(30),
        },
        keep: 5,
    };
    let found = search(&system, &model, &wanted).unwrap();
    assert!(!found.is_empty());
    assert!(found.is_sorted_by(|a, b| a.output_per_gpu >= b.output_per_gpu));
    for candidate in &found {
        assert!(candidate.estimate.first_token <= wanted.targets.first_token);
        assert!(candidate.estimate.per_token <= wanted.targets.per_token);
        assert!(candidate.deployment.gpus() <= 16);
    }
}

proptest! {
    #[test]
    fn any_load_is_an_answer_or_an_error(
        concurrency in 0u32..=u32::MAX, input in 0u32..=u32::MAX, output in 0u32..=u32::MAX, ways in 0u32..40, data in 0u32..40,
    ) {
        let model = Model::named("deepseek-v3").unwrap();
        let worker = Worker { tensor: ways, data, expert_tensor: ways, expert: data, pipeline: 1 };
        let deployment = Deployment::aggregated(Engine::TensorRtLlm, Quantisation::fp4(&model), worker, 1);
        let system = System::named("gb200").unwrap();
        if let Ok(estimate) = deployment.estimate(&system, &model, &ServingLoad::benchmark(concurrency, input, output)) {
            prop_assert!(estimate.per_token > Picos::ZERO && estimate.output_per_second.is_finite());
        }
    }

    #[test]
    fn more_requests_never_make_tokens_faster(fewer in 1u32..300, more in 1u32..300) {
        let (system, model) = (h200(), llama());
        let deployment = Deployment::aggregated(Engine::Vllm, Quantisation::fp8(&model), Worker::tensor(4), 1);
        let at = |n| deployment.estimate(&system, &model, &ServingLoad::benchmark(n, 1024, 1024)).unwrap();
        prop_assert!(at(fewer).per_token <= at(fewer + more).per_token);
    }
}
