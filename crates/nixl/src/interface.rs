//! Whether an installed NIXL calls what this back end has, in the order in which this back end has it.
//!
//! NIXL's back ends are C++ classes, and NIXL calls their virtual functions by number. A function that a release inserts moves all later ones, and the version
//! number of the interface has not changed when that happened. NIXL's own plug-ins have the order in them, with names and types, for the linker: a
//! table for each class, filled in by relocations. This reads one, without running anything.

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSymbol, RelocationTarget, SymbolIndex};
use thiserror::Error;

use crate::abi::ORDER;

/// Why a NIXL is not one that this back end can serve.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Unlike {
    #[error("it is no shared object of this kind of machine: {0}")]
    NotElf(String),
    #[error("it has no class that is a NIXL back end")]
    NoEngine,
    #[error("function {number} of a back end is {found} there, and {expected} here")]
    Order {
        number: usize,
        found: String,
        expected: String,
    },
    #[error("a back end has {found} functions there, and {expected} here")]
    Count { found: usize, expected: usize },
}

/// Compares the interface with that of one of NIXL's own plug-ins, given as the bytes of its file.
pub fn compare(plugin: &[u8]) -> Result<(), Unlike> {
    compare_with(plugin, ORDER)
}

/// What every table begins with: where the object begins, and its type.
const HEAD: usize = 2;
/// Both destructors.
const DESTRUCTORS: usize = 2;
const SLOT: u64 = size_of::<usize>() as u64;
/// The class that all back ends come from, as the linker writes it.
const BASE: &str = "17nixlBackendEngine";

fn compare_with(plugin: &[u8], order: &[&str]) -> Result<(), Unlike> {
    let file: ElfFile64<'_, Endianness> =
        ElfFile64::parse(plugin).map_err(|error| Unlike::NotElf(error.to_string()))?;
    // The base class may have been left out by a linker; the number of its functions is known only where it is there.
    let base = table(&file, |name| name == BASE);
    if let Some(base) = base {
        let found = (base.size / SLOT) as usize - HEAD - DESTRUCTORS;
        if found != order.len() {
            // Which one it is says more, where that can be found out.
            first_difference(&file, order)?;
            return Err(Unlike::Count {
                found,
                expected: order.len(),
            });
        }
    }
    first_difference(&file, order)
}

fn first_difference(file: &ElfFile64<'_, Endianness>, order: &[&str]) -> Result<(), Unlike> {
    let engine = table(file, |name| {
        name != BASE && name.ends_with("Engine") && name.contains("nixl")
    });
    let engine = engine.ok_or(Unlike::NoEngine)?;
    let names = functions(file, &engine);
    for (number, expected) in order.iter().enumerate() {
        let found = names.get(HEAD + DESTRUCTORS + number).map_or("", String::as_str);
        if after_class(found) != *expected {
            return Err(Unlike::Order {
                number,
                found: if found.is_empty() {
                    "none".to_owned()
                } else {
                    found.to_owned()
                },
                expected: (*expected).to_owned(),
            });
        }
    }
    Ok(())
}

struct ClassTable {
    address: u64,
    size: u64,
}

/// The table of the first class whose name fits.
fn table(file: &ElfFile64<'_, Endianness>, fits: impl Fn(&str) -> bool) -> Option<ClassTable> {
    let mut symbols = file.dynamic_symbols();
    let symbol = symbols.find(|symbol| {
        let class = symbol.name().ok().and_then(|name| name.strip_prefix("_ZTV"));
        symbol.size() >= (HEAD as u64) * SLOT && class.is_some_and(&fits)
    })?;
    Some(ClassTable {
        address: symbol.address(),
        size: symbol.size(),
    })
}

/// The names of what the slots of a table are filled with; empty where a slot has none.
fn functions(file: &ElfFile64<'_, Endianness>, table: &ClassTable) -> Vec<String> {
    let mut names = vec![String::new(); (table.size / SLOT) as usize];
    let end = table.address.saturating_add(table.size);
    for (address, relocation) in file.dynamic_relocations().into_iter().flatten() {
        if !(table.address..end).contains(&address) {
            continue;
        }
        let name = match relocation.target() {
            RelocationTarget::Symbol(index) => by_index(file, index),
            // A function of the file itself may be named by where it is.
            _ => file
                .dynamic_symbols()
                .find(|symbol| symbol.address() == relocation.addend() as u64)
                .and_then(|symbol| Some(symbol.name().ok()?.to_owned())),
        };
        if let Some(slot) = names.get_mut(((address - table.address) / SLOT) as usize) {
            *slot = name.unwrap_or_default();
        }
    }
    names
}

fn by_index(file: &ElfFile64<'_, Endianness>, index: SymbolIndex) -> Option<String> {
    let table = file.dynamic_symbol_table()?;
    let symbol = object::ObjectSymbolTable::symbol_by_index(&table, index).ok()?;
    Some(symbol.name().ok()?.to_owned())
}

/// What follows the name of the class in that of one of its functions, with a `K` before it for those that change nothing: `_ZNK13nixlUcxEngine9checkXferE…` is
/// `K9checkXferE…`.
fn after_class(name: &str) -> String {
    let stripped = || {
        let (constant, rest) = match name.strip_prefix("_ZNK") {
            Some(rest) => ("K", rest),
            None => ("", name.strip_prefix("_ZN")?),
        };
        let digits = rest.len() - rest.trim_start_matches(|digit: char| digit.is_ascii_digit()).len();
        let len: usize = rest.get(..digits)?.parse().ok()?;
        Some(format!("{constant}{}", rest.get(digits.checked_add(len)?..)?))
    };
    stripped().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use weft_testing::{Need, has};

    use super::*;

    #[test]
    fn the_class_is_taken_off() {
        assert_eq!(
            after_class("_ZNK13nixlUcxEngine9checkXferEP15nixlBackendReqH"),
            "K9checkXferEP15nixlBackendReqH"
        );
        assert_eq!(
            after_class("_ZN13nixlUcxEngine8unloadMDEP13nixlBackendMD"),
            "8unloadMDEP13nixlBackendMD"
        );
        for odd in ["", "_ZN", "_ZN99x", "_ZNK9999999999999999999999x", "main"] {
            assert_eq!(after_class(odd), "", "{odd}");
        }
    }

    #[test]
    fn what_is_no_plugin_is_said_to_be_none() {
        assert!(matches!(compare(b"not an object"), Err(Unlike::NotElf(_))));
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(compare(&own), Err(Unlike::NoEngine));
    }

    /// A plug-in with a back end of the interface, compiled from the declarations that `tests/program.cpp` uses.
    fn compiled(flags: &[&str]) -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("libplugin_OTHER.so");
        let mut compiler = Command::new("c++");
        compiler
            .args(["-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&out)
            .args(flags);
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/other.cpp");
        assert!(compiler.arg(source).status().unwrap().success());
        std::fs::read(out).unwrap()
    }

    #[test]
    fn an_interface_like_this_one_is_found_to_be_so() {
        if has(Need::Cpp) {
            assert_eq!(compare(&compiled(&[])), Ok(()));
        }
    }

    #[test]
    fn a_function_that_was_inserted_or_added_or_has_other_types_is_found() {
        if !has(Need::Cpp) {
            return;
        }
        match compare(&compiled(&["-DINSERTED"])) {
            Err(Unlike::Order {
                number,
                found,
                expected,
            }) => {
                assert_eq!((number, expected.as_str()), (11, "K9checkXferEP15nixlBackendReqH"));
                assert!(found.contains("pauseXfer"), "{found}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(
            compare(&compiled(&["-DAPPENDED"])),
            Err(Unlike::Count {
                found: ORDER.len() + 1,
                expected: ORDER.len()
            })
        );
        assert!(matches!(
            compare(&compiled(&["-DRETYPED"])),
            Err(Unlike::Order { number: 12, .. })
        ));
    }
}
