//! The files under `systems/`, which the program carries with it.

/// By name.
pub(super) const FILES: &[(&str, &str)] = &[
    ("arc-pro-b60", include_str!("../../../../systems/arc-pro-b60.toml")),
    ("b300", include_str!("../../../../systems/b300.toml")),
    ("dgx-a100", include_str!("../../../../systems/dgx-a100.toml")),
    ("dgx-b200", include_str!("../../../../systems/dgx-b200.toml")),
    ("dgx-h100", include_str!("../../../../systems/dgx-h100.toml")),
    ("dgx-h200", include_str!("../../../../systems/dgx-h200.toml")),
    ("gb200-nvl72", include_str!("../../../../systems/gb200-nvl72.toml")),
    ("gb300-nvl72", include_str!("../../../../systems/gb300-nvl72.toml")),
    ("h200-roce", include_str!("../../../../systems/h200-roce.toml")),
    ("h800", include_str!("../../../../systems/h800.toml")),
    ("l40s", include_str!("../../../../systems/l40s.toml")),
    ("laptop", include_str!("../../../../systems/laptop.toml")),
    ("p5", include_str!("../../../../systems/p5.toml")),
    ("p5en", include_str!("../../../../systems/p5en.toml")),
    ("p6-b200", include_str!("../../../../systems/p6-b200.toml")),
    ("p6-b300", include_str!("../../../../systems/p6-b300.toml")),
    ("rtx-pro-6000", include_str!("../../../../systems/rtx-pro-6000.toml")),
];
