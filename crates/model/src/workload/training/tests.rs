use proptest::prelude::*;

use super::*;

fn job(name: &str, gpus: u32, parallel: Parallel, batch: TrainingBatch) -> TrainingJob {
    TrainingJob {
        parallel,
        batch,
        ..TrainingJob::new(Model::named(name).unwrap(), gpus, Recipe::Bf16)
    }
}

fn h100() -> System {
    System::named("dgx-h100").unwrap()
}

#[test]
fn parts_add_up() {
    let batch = TrainingBatch {
        sequences: 512,
        micro: 1,
        tokens: 4096,
    };
    let parallel = Parallel {
        tensor: 2,
        pipeline: 8,
        expert: 16,
        ..Parallel::default()
    };
    let step = job("deepseek-v3", 256, parallel, batch).step(&h100()).unwrap();
    let sum: f64 = step.parts.iter().map(|(_, time)| time).sum();
    assert!((sum / step.seconds - 1.0).abs() < 1e-12);
    assert!(step.parts.iter().all(|(_, time)| *time > 0.0));
    assert!(step.bottleneck().is_some());
}

#[test]
fn what_cannot_be_is_refused() {
    let batch = TrainingBatch {
        sequences: 64,
        micro: 1,
        tokens: 4096,
    };
    let with = |parallel| job("mixtral-8x7b", 64, parallel, batch).step(&h100());
    let parallel = Parallel::default();
    assert!(matches!(
        with(Parallel { tensor: 3, ..parallel }),
        Err(TrainingError::Gpus { .. })
    ));
    assert!(matches!(
        with(Parallel { context: 0, ..parallel }),
        Err(TrainingError::Zero { .. })
    ));
    assert!(matches!(
        with(Parallel {
            pipeline: 64,
            ..parallel
        }),
        Err(TrainingError::TooManyStages { .. })
    ));
    assert!(matches!(
        with(Parallel { expert: 16, ..parallel }),
        Err(TrainingError::Indivisible { .. })
    ));
    let mut fp8 = job("mixtral-8x7b", 64, parallel, batch);
    fp8.recipe = Recipe::Fp8;
    assert!(matches!(
        fp8.step(&System::named("dgx-a100").unwrap()),
        Err(TrainingError::Roofline(_))
    ));
}

#[test]
fn recomputing_takes_time_and_saves_memory() {
    let batch = TrainingBatch {
        sequences: 64,
        micro: 1,
        tokens: 8192,
    };
    let parallel = Parallel {
        tensor: 8,
        ..Parallel::default()
    };
    let with = |recompute| {
        let job = TrainingJob {
            recompute,
            ..job("llama-3.1-8b", 64, parallel, batch)
        };
        job.step(&h100()).unwrap()
    };
    let (kept, again) = (with(Recomputation::Selective), with(Recomputation::Full));
    assert!(again.seconds > 1.2 * kept.seconds && again.seconds < 1.4 * kept.seconds);
    assert!(again.memory.total() < kept.memory.total());
    assert_eq!(with(Recomputation::AsNeeded), kept);
}

#[test]
fn a_trillion_parameters_on_many_gpus_are_no_more_work() {
    let parallel = Parallel {
        tensor: 8,
        pipeline: 16,
        expert: 64,
        ..Parallel::default()
    };
    let batch = TrainingBatch {
        sequences: 1 << 20,
        micro: 1,
        tokens: 8192,
    };
    let step = job("kimi-k2", 131_072, parallel, batch).step(&h100()).unwrap();
    assert!(step.seconds.is_finite() && step.utilization < 1.0);
}

proptest! {
    #[test]
    fn a_step_is_positive_and_below_the_peak(
        which in 0usize..200, tensor in 0u32..4, pipeline in 0u32..4, micro in 0u32..3, recipe in 0usize..5,
    ) {
        let models = Model::catalogue();
        let mut job = TrainingJob::new(models[which % models.len()].clone(), 512, Recipe::ALL[recipe]);
        job.parallel.tensor = 1 << tensor;
        job.parallel.pipeline = 1 << pipeline;
        job.batch = TrainingBatch { sequences: 2048, micro: 1 << micro, tokens: 4096 };
        if let Ok(step) = job.step(&System::named("gb200").unwrap()) {
            prop_assert!(step.seconds > 0.0 && step.seconds.is_finite());
            prop_assert!(step.utilization > 0.0 && step.utilization < 1.0);
            prop_assert!((0.0..=1.0).contains(&step.recomputed));
        }
    }

    #[test]
    fn more_replicas_of_the_same_work_take_no_less_time(replicas in 0u32..8) {
        let step = |n: u32| {
            let mut job = TrainingJob::new(Model::named("llama-3.1-70b").unwrap(), 64 << n, Recipe::Bf16);
            job.parallel.tensor = 8;
            job.parallel.pipeline = 4;
            job.batch = TrainingBatch { sequences: 128 << n, micro: 1, tokens: 8192 };
            job.recompute = Recomputation::Selective;
            job.step(&h100()).unwrap().seconds
        };
        prop_assert!(step(replicas + 1) > 0.99 * step(replicas));
    }
}
