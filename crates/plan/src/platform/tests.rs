use super::*;
use crate::harness;
use crate::place::Place;
use crate::units::Picos;
use proptest::prelude::*;

const TWO_NODES: &str = r#"
name = "pair"

[[machines]]
name = "a"
[[machines.numa]]
id = 0
cores = "0-3,8"
[[machines.gpus]]
ordinal = 0
name = "H200"
numa = 0
memory = "141 GB"
[[machines.nics]]
name = "eth0"
kind = "ethernet"
up = true
bandwidth = "400 Gb/s"
mtu = 9000
addresses = ["10.0.0.1"]

[[machines]]
name = "b"
[[machines.nics]]
name = "eth0"
kind = "ethernet"
up = true

[[links]]
from = "a/gpu:0"
to = "a/dram:0"
cost = { latency = "2 µs", bandwidth = "55 GB/s" }

[[links]]
from = "a/nic:eth0"
to = "b/nic:eth0"
cost = { latency = "3 µs", per_span = "20 ns", bandwidth = "400 Gb/s" }
"#;

#[test]
fn a_file_is_read_and_written_back() {
    let platform = Platform::from_toml(TWO_NODES).unwrap();
    let a = platform.machine("a").unwrap();
    assert_eq!(a.core_count(), 5);
    assert_eq!(a.nics[0].bandwidth, Some(Bandwidth::from_bytes_per_sec(50_000_000_000)));
    assert_eq!(platform.links[0].to.part, Part::Place(Place::Dram { numa: Some(0) }));
    assert_eq!(platform.links[0].cost.per_span, Picos::ZERO);
    assert_eq!(Platform::from_toml(&platform.to_toml()), Ok(platform));
}

/// The message for `TWO_NODES` with one thing replaced.
fn complaint(old: &str, new: &str) -> String {
    assert!(TWO_NODES.contains(old));
    Platform::from_toml(&TWO_NODES.replacen(old, new, 1))
        .unwrap_err()
        .to_string()
}

#[test]
fn what_cannot_be_read_is_told_with_its_line_and_field() {
    assert_eq!(
        complaint("bandwidth = \"400 Gb/s\"", "bandwidth = \"400 Gx/s\""),
        "line 18, column 13, at `bandwidth`: `Gx/s` is not a unit here; known are B/s, KB/s, MB/s, GB/s, TB/s, KiB/s, MiB/s, \
         GiB/s, and in bits b/s, Kb/s, Mb/s, Gb/s, Tb/s"
    );
    let unknown = complaint("ordinal = 0", "ordinal = 0\ncolour = 'red'");
    assert!(
        unknown.starts_with("line 11, column 1, at `colour`: unknown field `colour`"),
        "{unknown}"
    );
    let syntax = complaint("id = 0", "id = = 0");
    assert!(syntax.starts_with("line 7, "), "{syntax}");
    let missing = complaint("kind = \"ethernet\"\n", "");
    assert!(missing.contains("missing field `kind`"), "{missing}");
    let part = complaint("a/gpu:0", "a/tpu:0");
    assert!(
        part.starts_with("line 30, column 8, at `from`: `tpu:0` is no part of a machine"),
        "{part}"
    );
    let cores = complaint("0-3,8", "3-0");
    assert!(cores.ends_with("at `cores`: `3-0` runs backwards"), "{cores}");
}

#[test]
fn what_does_not_hold_together_is_told_with_its_field() {
    for (old, new, message) in [
        ("name = \"pair\"", "name = ''", "name: is empty"),
        ("name = \"b\"", "name = \"a\"", "machines[1].name: `a` is there twice"),
        (
            "name = \"b\"",
            "name = \"b/c\"",
            "machines[1].name: `b/c` holds a `/`, `:`, space or control character",
        ),
        (
            "numa = 0",
            "numa = 3",
            "machines[0].gpus[0].numa: the machine has no NUMA node 3",
        ),
        ("a/gpu:0", "a/gpu:7", "links[0].from: there is no `a/gpu:7`"),
        ("b/nic:eth0", "a/nic:eth0", "links[1]: the link ends where it begins"),
        (
            "\"55 GB/s\"",
            "0",
            "links[0].cost.bandwidth: nothing moves at a bandwidth of zero",
        ),
    ] {
        assert_eq!(complaint(old, new), message);
    }
}

proptest! {
    #[test]
    fn core_lists_read_back(cores in prop::collection::vec(any::<u16>(), 0..50)) {
        let cores: Cores = cores.into_iter().flat_map(|c| [c, c.saturating_add(1)]).collect();
        prop_assert_eq!(cores.to_string().parse(), Ok(cores));
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic(text in ".{0,200}", list in "[0-9,+ -]{0,30}", cut in 0usize..900) {
        harness::platform(&text);
        let _ = list.parse::<Cores>();
        let _ = text.parse::<Endpoint>();
        if let Some(head) = TWO_NODES.get(..cut) {
            harness::platform(&format!("{head}{text}"));
        }
    }

    #[test]
    fn a_changed_file_is_refused_or_means_the_same_when_written_again(at in 0usize..900, change in "[ -~\n]{0,3}", cut in 0usize..4) {
        let end = TWO_NODES.len().min(at + cut);
        if let (Some(head), Some(tail)) = (TWO_NODES.get(..at), TWO_NODES.get(end..)) {
            harness::platform(&format!("{head}{change}{tail}"));
        }
    }
}
