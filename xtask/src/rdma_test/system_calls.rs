//! System calls of a whole machine, by name, counted by its kernel.
//!
//! Unlike a tracer that stops a program at each of them, this takes no time that would change what is measured. It counts everybody's;
//! in a virtual machine there is nobody else.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{Error, run};

const TRACING: &str = "/sys/kernel/tracing";
const EVENT: &str = "events/raw_syscalls/sys_enter";
const BY_NAME: &str = "hist:keys=id.syscall";

/// How often each was called while `work` was done.
pub fn count(work: impl FnOnce() -> Result<(), Error>) -> Result<BTreeMap<String, u64>, Error> {
    let event = Path::new(TRACING).join(EVENT);
    if !event.exists() {
        run(Command::new("mount").args(["-t", "tracefs", "tracefs", TRACING]))?;
    }
    write(event.join("trigger"), BY_NAME)?;
    let done = work();
    let histogram = event.join("hist");
    let counted = fs::read_to_string(&histogram).map_err(|source| Error::File {
        path: histogram,
        source,
    });
    write(event.join("trigger"), &format!("!{BY_NAME}"))?;
    done?;
    Ok(calls(&counted?))
}

fn write(path: PathBuf, text: &str) -> Result<(), Error> {
    fs::write(&path, text).map_err(|source| Error::File { path, source })
}

/// The lines `{ id: sys_write    [  1] } hitcount:    12` of a histogram.
fn calls(histogram: &str) -> BTreeMap<String, u64> {
    let lines = histogram.lines().filter_map(|line| {
        let (name, count) = line.strip_prefix("{ id: ")?.split_once('[')?;
        let count = count.split_once("hitcount:")?.1.trim().parse().ok()?;
        Some((name.trim().trim_start_matches("sys_").to_owned(), count))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_in_a_histogram() {
        let histogram = "# event histogram\n#\n\n{ id: sys_write                     [  1] } hitcount:         12\n\
                         { id: sys_rt_sigaction              [ 13] } hitcount:         29\n\nTotals:\n    Hits: 41\n";
        let found = calls(histogram);
        assert_eq!((found["write"], found["rt_sigaction"], found.len()), (12, 29, 2));
        assert!(calls("").is_empty());
    }
}
