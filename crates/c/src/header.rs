//! Holds this room against `include/weft.h`: every function with its types and the names of its parameters, every structure with its offsets, every
//! constant with its number.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::mem::offset_of;
use std::process::Command;

use weft::{Datatype, Reduction};

use crate::communicator::{CallOptions, JoinOptionsOfC};
use crate::failure::{ErrorDetails, Range};
use crate::memory::MemoryOptions;
use crate::spans::{LegOfTransfer, SpanOfBytes};
use crate::transfer::{SummaryOfTransfer, TransferOptions};
use crate::{memory, status, transfer};

const HEADER: &str = include_str!("../include/weft.h");
const SOURCES: &[&str] = &[
    include_str!("agent.rs"),
    include_str!("communicator.rs"),
    include_str!("failure.rs"),
    include_str!("lib.rs"),
    include_str!("memory.rs"),
    include_str!("notification.rs"),
    include_str!("peer.rs"),
    include_str!("status.rs"),
    include_str!("transfer.rs"),
];

/// What the types of this room are called in C.
const NAMES: &[(&str, &str)] = &[
    ("AccessNumber", "weft_access"),
    ("AgentHandle", "weft_agent"),
    ("CallHandle", "weft_call"),
    ("CallOptions", "weft_call_options"),
    ("CommunicatorHandle", "weft_communicator"),
    ("DatatypeNumber", "weft_datatype"),
    ("DirectionNumber", "weft_direction"),
    ("ErrorDetails", "weft_error"),
    ("JoinOptionsOfC", "weft_join_options"),
    ("LegOfTransfer", "weft_leg"),
    ("MemoryHandle", "weft_memory"),
    ("MemoryOptions", "weft_memory_options"),
    ("NotificationHandle", "weft_notification"),
    ("PeerHandle", "weft_peer"),
    ("PreparedHandle", "weft_prepared"),
    ("ReductionNumber", "weft_reduction"),
    ("RegionHandle", "weft_region"),
    ("Status", "weft_status"),
    ("StatusNumber", "weft_status"),
    ("SummaryOfTransfer", "weft_summary"),
    ("TransferHandle", "weft_transfer"),
    ("TransferOptions", "weft_transfer_options"),
    ("c_char", "char"),
    ("c_int", "int"),
    ("c_void", "void"),
    ("u32", "uint32_t"),
    ("u64", "uint64_t"),
    ("usize", "size_t"),
];

/// By name: what it returns and takes, as C would write it, without needless spaces.
type Functions = BTreeMap<String, String>;

/// The header without its comments.
fn declarations() -> String {
    let mut rest = HEADER;
    let mut text = String::new();
    while let Some((before, comment)) = rest.split_once("/*") {
        text.push_str(before);
        rest = comment.split_once("*/").expect("comments end").1;
    }
    text + rest
}

fn without_needless_spaces(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words
        .join(" ")
        .replace(" *", "*")
        .replace("* ", "*")
        .replace("( ", "(")
        .replace(" )", ")")
}

fn functions_of_header() -> Functions {
    let text = declarations();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let text = lines.collect::<Vec<_>>().join("\n");
    let statements = text.split([';', '{', '}']).map(without_needless_spaces);
    let functions = statements.filter_map(|statement| {
        let (head, parameters) = statement.strip_suffix(')')?.split_once('(')?;
        let at = head.rfind([' ', '*'])? + 1;
        let returned = head[..at].trim_end();
        Some((head[at..].to_owned(), format!("{returned}({parameters})")))
    });
    functions.collect()
}

fn c_type(rust: &str) -> String {
    let pointer = |to: &str, constant: bool| {
        let to = c_type(to);
        match (constant, to.ends_with('*')) {
            (false, _) => format!("{to}*"),
            (true, true) => format!("{to}const*"),
            (true, false) => format!("const {to}*"),
        }
    };
    if let Some(to) = rust.strip_prefix("*mut ") {
        return pointer(to, false);
    }
    if let Some(to) = rust.strip_prefix("*const ") {
        return pointer(to, true);
    }
    let known = NAMES.iter().find(|(name, _)| *name == rust);
    known.unwrap_or_else(|| panic!("{rust} has no name in C")).1.to_owned()
}

fn functions_of_sources() -> Functions {
    let mut functions = Functions::new();
    for source in SOURCES {
        for found in source.split("extern \"C\" fn ").skip(1) {
            let (name, rest) = found.split_once('(').expect("a function has parameters");
            let (parameters, rest) = rest.split_once(')').expect("parameters end");
            let returned = rest.split_once('{').expect("a body").0.trim();
            let returned = returned
                .strip_prefix("->")
                .map_or("void".to_owned(), |rust| c_type(rust.trim()));
            let parameters = parameters
                .split(',')
                .map(str::trim)
                .filter(|parameter| !parameter.is_empty());
            let parameters = parameters.map(|parameter| {
                let (name, rust) = parameter.split_once(": ").expect("a name and a type");
                let kind = c_type(rust);
                let space = if kind.ends_with('*') { "" } else { " " };
                format!("{kind}{space}{name}")
            });
            let parameters: Vec<String> = parameters.collect();
            let parameters = match parameters.is_empty() {
                true => "void".to_owned(),
                false => parameters.join(", "),
            };
            functions.insert(name.to_owned(), format!("{returned}({parameters})"));
        }
    }
    functions
}

#[test]
fn functions_are_those_of_the_header() {
    let (ours, theirs) = (functions_of_sources(), functions_of_header());
    assert!(ours.len() > 60, "only {} functions were found", ours.len());
    let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    for name in names {
        assert_eq!(ours.get(name), theirs.get(name), "{name}: here, and in the header");
    }
}

/// Every function says who may call it, in the comment before it or before those that it stands with.
#[test]
fn every_function_says_who_may_call_it() {
    for part in HEADER.split("\n\n") {
        let declares = part
            .lines()
            .any(|line| line.starts_with(|first: char| first.is_ascii_lowercase()) && line.contains('('));
        assert!(!declares || part.contains("Threads: "), "who may call this?\n{part}");
    }
}

/// What C makes of the header, by expression.
fn ask_the_compiler(expressions: &BTreeMap<String, i64>) -> BTreeMap<String, i64> {
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (directory.path().join("ask.c"), directory.path().join("ask"));
    let mut text = String::from("#include <stdio.h>\n#include <weft.h>\nint main(void) {\n");
    for expression in expressions.keys() {
        writeln!(
            text,
            "printf(\"%s\\t%lld\\n\", \"{expression}\", (long long)({expression}));"
        )
        .unwrap();
    }
    std::fs::write(&source, text + "return 0; }\n").unwrap();
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let compiled = Command::new("cc")
        .args(["-I", include, "-o"])
        .arg(&program)
        .arg(&source)
        .status();
    assert!(
        compiled.is_ok_and(|status| status.success()),
        "the C compiler did not take it"
    );
    let said = Command::new(&program).output().unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    let pairs = said.lines().filter_map(|line| line.split_once('\t'));
    pairs
        .map(|(name, number)| (name.to_owned(), number.parse().unwrap()))
        .collect()
}

macro_rules! layout {
    ($into:ident, $($c:literal $rust:ident { $($field:ident),* })*) => {$(
        $into.insert(format!("sizeof({})", $c), size_of::<$rust>() as i64);
        $( $into.insert(format!("offsetof({}, {})", $c, stringify!($field)), offset_of!($rust, $field) as i64); )*
    )*};
}

#[test]
fn structures_and_numbers_are_those_of_the_header() {
    let mut ours: BTreeMap<String, i64> = BTreeMap::new();
    layout!(ours,
        "weft_call_options" CallOptions { size, deadline_ns, algorithm, deterministic, all_or_nothing }
        "weft_error" ErrorDetails { size, status, os_error, text, peer, transport, bytes_done, bytes_total, done, done_count, may_have_happened, rank }
        "weft_join_options" JoinOptionsOfC { size, name, rank, rank_count, timeout_ns, deadline_ns }
        "weft_leg" LegOfTransfer { size, local, remote, local_spans, local_count, remote_spans, remote_count }
        "weft_memory_options" MemoryOptions { size, place, device, numa_node }
        "weft_range" Range { leg, begin, end }
        "weft_span" SpanOfBytes { offset, length }
        "weft_summary" SummaryOfTransfer { size, bytes, duration_ns, parts, retries, transport }
        "weft_transfer_options" TransferOptions { size, deadline_ns, notification, notification_length, checksum }
    );
    let structures =
        declarations().matches("typedef struct ").count() - declarations().matches("typedef struct weft_").count();
    assert_eq!(structures, 0, "all structures have the prefix");
    let described = ours.keys().filter(|key| key.starts_with("sizeof")).count();
    let with_fields = declarations()
        .lines()
        .filter(|line| line.starts_with("typedef struct") && line.ends_with('{'))
        .count();
    assert_eq!(
        described, with_fields,
        "a structure of the header is not held against this room"
    );
    for (number, name) in status::ALL {
        ours.insert(name.to_str().unwrap().to_owned(), i64::from(*number));
    }
    for (number, datatype) in Datatype::ALL.iter().enumerate() {
        ours.insert(format!("WEFT_{}", datatype.name().to_uppercase()), number as i64);
    }
    for (number, reduction) in Reduction::ALL.iter().enumerate() {
        ours.insert(format!("WEFT_{}", reduction.to_string().to_uppercase()), number as i64);
    }
    for (number, direction) in transfer::DIRECTIONS.iter().enumerate() {
        ours.insert(format!("WEFT_{direction:?}").to_uppercase(), number as i64);
    }
    for (name, number) in [
        ("WEFT_ABI_VERSION", i64::from(crate::ABI_VERSION)),
        ("WEFT_PLACE_DRAM", i64::from(memory::DRAM)),
        ("WEFT_PLACE_GPU", i64::from(memory::GPU)),
        ("WEFT_ACCESS_READ", 1),
        ("WEFT_ACCESS_WRITE", 2),
        ("WEFT_ACCESS_READ_WRITE", 3),
        ("WEFT_AS_SET", 0),
        ("WEFT_ON", 1),
        ("WEFT_OFF", 2),
    ] {
        ours.insert(name.to_owned(), number);
    }
    // Whatever the header numbers is held against something here.
    let text = declarations();
    let words = text.split(|sign: char| !sign.is_ascii_alphanumeric() && sign != '_');
    for word in words.filter(|word| word.starts_with("WEFT_")) {
        let elsewhere = ["WEFT_H", "WEFT_FOREVER"].contains(&word);
        assert!(
            elsewhere || ours.contains_key(word),
            "{word} is in the header, and not here"
        );
    }
    assert_eq!(ask_the_compiler(&ours), ours);
}

#[test]
fn the_example_at_the_top_of_the_header_is_a_program() {
    let (_, comment) = HEADER.split_once("/*").unwrap();
    let (comment, _) = comment.split_once("*/").unwrap();
    let lines = comment.lines().filter_map(|line| line.strip_prefix(" *     "));
    let example = lines.collect::<Vec<_>>().join("\n");
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("example.c");
    std::fs::write(&source, example).unwrap();
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let strictly = [
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-fsyntax-only",
        "-I",
        include,
    ];
    let compiled = Command::new("cc").args(strictly).arg(&source).status();
    assert!(compiled.is_ok_and(|status| status.success()));
}
