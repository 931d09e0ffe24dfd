//! What Weft must reach, row by row.

use std::fmt;

use super::Run;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Side {
    Nixl,
    Mooncake,
    Weft,
}

impl Side {
    pub fn driver(self) -> &'static str {
        match self {
            Side::Nixl => "nixl_peer.py",
            Side::Mooncake => "mooncake_peer.py",
            Side::Weft => "weft_peer.py",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Nixl => "nixl",
            Side::Mooncake => "mooncake",
            Side::Weft => "weft",
        })
    }
}

pub struct Requirement {
    pub name: String,
    pub unit: Unit,
    pub ours: Run,
    pub theirs: Option<Run>,
    pub bound: Bound,
}

#[derive(Clone, Copy)]
pub enum Bound {
    /// The peer's time over ours.
    TimesFaster(f64),
    /// Ours, whatever the peer's.
    AtMost(f64),
    /// Nothing is required; it is good to know.
    Shown,
}

#[derive(Clone, Copy)]
pub enum Unit {
    Microseconds,
    Cores,
    Seconds,
    Megabytes,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::Microseconds => "us",
            Unit::Cores => "cores",
            Unit::Seconds => "s",
            Unit::Megabytes => "MB",
        }
    }

    pub fn show(self, figure: f64) -> String {
        match self {
            Unit::Microseconds if figure >= 10_000.0 => format!("{:.2} ms", figure / 1e3),
            Unit::Microseconds => format!("{figure:.1} µs"),
            Unit::Cores => format!("{figure:.4} cores"),
            Unit::Seconds => format!("{figure:.1} s"),
            Unit::Megabytes => format!("{figure:.1} MB"),
        }
    }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A transfer: transport, direction, block, batch; and how many times faster than NIXL it must be through memory that Weft
/// did not allocate, and through memory that it did.
type Row = (&'static str, &'static str, usize, usize, Option<f64>, Option<f64>);

const TRANSFERS: &[Row] = &[
    ("shared_memory", "READ", 4 * KIB, 1, Some(1.0 / 0.9), None),
    ("shared_memory", "READ", 4 * KIB, 64, Some(3.0), None),
    ("shared_memory", "READ", 4 * KIB, 1024, Some(2.0), None),
    ("shared_memory", "READ", 4 * KIB, 4096, Some(2.0), None),
    ("shared_memory", "READ", 64 * KIB, 1024, Some(1.1), Some(2.0)),
    ("shared_memory", "READ", MIB, 64, Some(1.1), Some(2.0)),
    ("shared_memory", "READ", 64 * MIB, 1, Some(1.1), Some(2.0)),
    ("tcp", "READ", 4 * KIB, 1, Some(1.0 / 0.8), None),
    ("tcp", "READ", 4 * KIB, 64, Some(3.0), None),
    ("tcp", "READ", 4 * KIB, 1024, Some(3.0), None),
    ("tcp", "READ", 64 * KIB, 64, Some(2.0), None),
    ("tcp", "READ", MIB, 64, Some(2.0), None),
    ("tcp", "READ", 64 * MIB, 1, Some(1.5), None),
    ("tcp", "WRITE", 64 * KIB, 64, Some(1.5), None),
    ("tcp", "WRITE", 64 * MIB, 1, Some(1.5), None),
];

/// Where Mooncake opens a connection per block.
const AGAINST_MOONCAKE: &[(usize, usize, f64)] = &[(4 * KIB, 64, 10.0), (4 * KIB, 1024, 10.0)];

pub fn requirements() -> Vec<Requirement> {
    let mut all = Vec::new();
    for &(transport, op, block, batch, foreign, mapped) in TRANSFERS {
        for (memory, times) in [("foreign", foreign), ("mapped", mapped)] {
            // Through TCP it makes no difference who allocated the memory.
            let bound = match times {
                Some(times) => Bound::TimesFaster(times),
                None if transport == "tcp" => continue,
                None => Bound::Shown,
            };
            let detail = if transport == "tcp" {
                String::new()
            } else {
                format!(", {memory} memory")
            };
            all.push(Requirement {
                name: format!("{transport} {op} {} × {batch}{detail}", size(block)),
                unit: Unit::Microseconds,
                ours: transfer(Side::Weft, transport, op, block, batch, memory),
                theirs: Some(transfer(Side::Nixl, transport, op, block, batch, "foreign")),
                bound,
            });
        }
    }
    for &(block, batch, times) in AGAINST_MOONCAKE {
        all.push(Requirement {
            name: format!("tcp READ {} × {batch}, beside Mooncake", size(block)),
            unit: Unit::Microseconds,
            ours: transfer(Side::Weft, "tcp", "READ", block, batch, "foreign"),
            theirs: Some(transfer(Side::Mooncake, "tcp", "READ", block, batch, "foreign")),
            bound: Bound::TimesFaster(times),
        });
    }
    let plain = |name: &str, what: &str, unit, bound| Requirement {
        name: name.to_owned(),
        unit,
        ours: (Side::Weft, vec![what.to_owned()]),
        theirs: Some((Side::Nixl, vec![what.to_owned()])),
        bound,
    };
    // NIXL's figure is that of two processes that spin; ours that of two that sleep when there is nothing to do.
    all.push(plain(
        "notification round trip, 32 B",
        "notification",
        Unit::Microseconds,
        Bound::TimesFaster(1.0),
    ));
    all.push(plain(
        "cold start, agent to first byte",
        "start",
        Unit::Microseconds,
        Bound::AtMost(50_000.0),
    ));
    all.push(plain("CPU of an idle agent", "idle", Unit::Cores, Bound::AtMost(0.001)));
    all.push(plain(
        "installed size",
        "installed-size",
        Unit::Megabytes,
        Bound::AtMost(30.0),
    ));
    all.push(plain(
        "install time",
        "install-time",
        Unit::Seconds,
        Bound::AtMost(15.0),
    ));
    all
}

fn transfer(side: Side, transport: &str, op: &str, block: usize, batch: usize, memory: &str) -> Run {
    let (block, batch) = (block.to_string(), batch.to_string());
    let words = [
        "transfer",
        "--transport",
        transport,
        "--op",
        op,
        "--block",
        &block,
        "--batch",
        &batch,
        "--memory",
        memory,
    ];
    (side, words.map(str::to_owned).to_vec())
}

fn size(bytes: usize) -> String {
    if bytes >= MIB {
        format!("{} MiB", bytes / MIB)
    } else {
        format!("{} KiB", bytes / KIB)
    }
}
