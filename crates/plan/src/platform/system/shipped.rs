//! The files under `platforms/`, which the program carries with it.

/// By name.
pub(super) const FILES: &[(&str, &str)] = &[
    ("arc-pro-b60", include_str!("../../../../../platforms/arc-pro-b60.toml")),
    ("b300", include_str!("../../../../../platforms/b300.toml")),
    ("dgx-a100", include_str!("../../../../../platforms/dgx-a100.toml")),
    ("dgx-b200", include_str!("../../../../../platforms/dgx-b200.toml")),
    ("dgx-h100", include_str!("../../../../../platforms/dgx-h100.toml")),
    ("dgx-h200", include_str!("../../../../../platforms/dgx-h200.toml")),
    ("gb200-nvl72", include_str!("../../../../../platforms/gb200-nvl72.toml")),
    ("gb300-nvl72", include_str!("../../../../../platforms/gb300-nvl72.toml")),
    ("h200-roce", include_str!("../../../../../platforms/h200-roce.toml")),
    ("h800", include_str!("../../../../../platforms/h800.toml")),
    ("l40s", include_str!("../../../../../platforms/l40s.toml")),
    ("laptop", include_str!("../../../../../platforms/laptop.toml")),
    ("p5", include_str!("../../../../../platforms/p5.toml")),
    ("p5en", include_str!("../../../../../platforms/p5en.toml")),
    ("p6-b200", include_str!("../../../../../platforms/p6-b200.toml")),
    ("p6-b300", include_str!("../../../../../platforms/p6-b300.toml")),
    (
        "rtx-pro-6000",
        include_str!("../../../../../platforms/rtx-pro-6000.toml"),
    ),
];
