//! How this machine reaches files, and what a directory offers: lines for people, and the same for programs.

use std::path::{Path, PathBuf};

use serde::Serialize;
use weft_fabric::file::{DirectorySupport, Support};
use weft_plan::Bytes;

/// Less room than this is said to be little.
const LITTLE_ROOM: u64 = 1 << 30;

/// What is printed, and what `--json` has. Where there is a reason, that is what there is not.
#[derive(Debug, Serialize)]
pub struct FilesReport {
    no_io_uring: Option<String>,
    locked_memory_bytes_max: Option<u64>,
    directory: PathBuf,
    /// Why nothing is known of the directory.
    unknown: Option<String>,
    alignment_bytes: Option<u64>,
    no_direct: Option<String>,
    free_bytes: Option<u64>,
    total_bytes: Option<u64>,
    unwritable: Option<String>,
}

impl FilesReport {
    /// Tries both, by a ring and by a little file that never has a name.
    pub fn probe(directory: &Path) -> FilesReport {
        let support = Support::probe();
        let mut report = FilesReport {
            no_io_uring: support.no_ring.map(|reason| reason.to_string()),
            locked_memory_bytes_max: support.lock_limit,
            directory: directory.to_owned(),
            unknown: None,
            alignment_bytes: None,
            no_direct: None,
            free_bytes: None,
            total_bytes: None,
            unwritable: None,
        };
        match DirectorySupport::probe(directory) {
            Err(error) => report.unknown = Some(error.to_string()),
            Ok(found) => {
                report.free_bytes = Some(found.free_bytes);
                report.total_bytes = Some(found.total_bytes);
                report.unwritable = found.unwritable.map(|error| error.to_string());
                match found.direct {
                    Ok(alignment) => report.alignment_bytes = Some(alignment.offset),
                    // Of a directory in which no file could be made nothing is known.
                    Err(reason) if report.unwritable.is_none() => report.no_direct = Some(reason.to_string()),
                    Err(_) => {}
                }
            }
        }
        report
    }

    /// Lines, each indented by two.
    pub fn text(&self) -> String {
        let mut lines = vec![match &self.no_io_uring {
            None => "by io_uring".to_owned(),
            Some(reason) => format!("by plain calls on threads, since io_uring is not there: {reason}"),
        }];
        if let Some(limit) = self.locked_memory_bytes_max {
            lines.push(format!(
                "{} of memory may be locked, which is as much as is registered with the kernel beforehand; `ulimit -l` raises it",
                Bytes(limit)
            ));
        }
        let place = self.directory.display();
        if let Some(why) = &self.unknown {
            lines.push(format!("{place}: nothing is known of it: {why}"));
        }
        if let Some(alignment) = self.alignment_bytes {
            lines.push(format!("{place}: past the page cache, aligned to {}", Bytes(alignment)));
        }
        if let Some(why) = &self.no_direct {
            lines.push(format!("{place}: through the page cache, since {why}"));
        }
        if let (Some(free), Some(total)) = (self.free_bytes, self.total_bytes) {
            let little = if free < LITTLE_ROOM { ", which is little" } else { "" };
            lines.push(format!(
                "{place}: {:.1} of {:.1} free{little}",
                Bytes(free),
                Bytes(total)
            ));
        }
        if let Some(why) = &self.unwritable {
            lines.push(format!("{place}: nothing can be written there: {why}"));
        }
        lines.iter().map(|line| format!("  {line}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_not_there_is_said_to_be_unknown() {
        let report = FilesReport::probe(Path::new("/nowhere/at/all"));
        assert!(report.text().contains("nothing is known of it"), "{}", report.text());
        assert!(report.free_bytes.is_none() && report.unwritable.is_none());
    }

    #[test]
    fn a_directory_is_tried_and_left_as_it_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let report = FilesReport::probe(folder.path());
        assert_eq!(report.unwritable, None);
        // One or the other, never both and never neither.
        assert_ne!(report.alignment_bytes.is_some(), report.no_direct.is_some());
        assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 0);
    }
}
