//! The scenarios under `scenarios/`, embedded.

pub(super) const FILES: &[(&str, &str)] = &[
    ("ring", include_str!("../../../../scenarios/ring.toml")),
    ("rails", include_str!("../../../../scenarios/rails.toml")),
    ("all-to-all", include_str!("../../../../scenarios/all-to-all.toml")),
    ("permutation", include_str!("../../../../scenarios/permutation.toml")),
    ("incast", include_str!("../../../../scenarios/incast.toml")),
    ("training", include_str!("../../../../scenarios/training.toml")),
    ("degraded-nic", include_str!("../../../../scenarios/degraded-nic.toml")),
];
