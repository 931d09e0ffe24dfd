//! The measurements under `ground_truth/`, which the program carries with it.

const FILES: &[(&str, &str)] = &[
    ("aic_nccl", include_str!("../../../../ground_truth/aic_nccl.csv")),
    (
        "nccl_tests_public",
        include_str!("../../../../ground_truth/nccl_tests_public.csv"),
    ),
    (
        "aic_custom_allreduce",
        include_str!("../../../../ground_truth/aic_custom_allreduce.csv"),
    ),
    (
        "aic_nvl72_alltoall",
        include_str!("../../../../ground_truth/aic_nvl72_alltoall.csv"),
    ),
    (
        "aic_deepep_ll",
        include_str!("../../../../ground_truth/aic_deepep_ll.csv"),
    ),
    (
        "aic_deepep_normal",
        include_str!("../../../../ground_truth/aic_deepep_normal.csv"),
    ),
    (
        "deepep_readme",
        include_str!("../../../../ground_truth/deepep_readme.csv"),
    ),
    ("kv_transfer", include_str!("../../../../ground_truth/kv_transfer.csv")),
    (
        "training_steps",
        include_str!("../../../../ground_truth/training_steps.csv"),
    ),
    (
        "megatron_bridge_perf",
        include_str!("../../../../ground_truth/megatron_bridge_perf.csv"),
    ),
    (
        "aic_e2e_serving",
        include_str!("../../../../ground_truth/aic_e2e_serving.csv"),
    ),
];

/// The text of each table, by its name.
pub fn shipped() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.iter().copied()
}
