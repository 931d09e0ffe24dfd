//! A tree of small files that somebody else writes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::Reason;

/// Nothing we read is longer; a file that is longer is cut, and then is malformed or is not.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// No machine has more devices of a kind.
const MAX_ENTRIES: usize = 4096;

/// The root of `/sys`, of `/proc`, or of what a test puts in their place.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Tree {
        Tree {
            root: root.to_path_buf(),
        }
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The text of a file, without the white space around it.
    pub(super) fn read(&self, path: &str) -> Result<String, Reason> {
        let path = self.path(path);
        let mut bytes = Vec::new();
        let mut read = || -> io::Result<()> {
            // A pipe in the tree would make the open wait for ever.
            if !fs::metadata(&path)?.is_file() {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            File::open(&path)?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
            Ok(())
        };
        match read() {
            Ok(()) => Ok(String::from_utf8_lossy(&bytes).trim().to_owned()),
            Err(error) => Err(reason(path, &error)),
        }
    }

    /// A file that holds one value.
    pub(super) fn value<T: FromStr>(&self, path: &str) -> Result<T, Reason> {
        self.read(path)?
            .parse()
            .map_err(|_| Reason::Malformed { path: self.path(path) })
    }

    /// A number with its `0x`.
    pub(super) fn hex(&self, path: &str) -> Option<u64> {
        let text = self.read(path).ok()?;
        u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
    }

    /// The names in a folder, sorted. Names that are not UTF-8 are nobody's device.
    pub(super) fn list(&self, path: &str) -> Result<Vec<String>, Reason> {
        let path = self.path(path);
        let entries = fs::read_dir(&path).map_err(|error| reason(path, &error))?;
        let mut names: Vec<String> = entries
            .take(MAX_ENTRIES)
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// [`Tree::list`] where an empty folder is a reason too.
    pub(super) fn list_some(&self, path: &str) -> Result<Vec<String>, Reason> {
        let names = self.list(path)?;
        if names.is_empty() {
            return Err(Reason::NoneThere { path: self.path(path) });
        }
        Ok(names)
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The bus address of the nearest PCI device above what a link leads to.
    pub(super) fn pci_address(&self, link: &str) -> Option<String> {
        let target = fs::canonicalize(self.path(link)).ok()?;
        let mut names = target.components().rev().filter_map(|c| c.as_os_str().to_str());
        names.find(|name| is_pci_address(name)).map(str::to_owned)
    }

    /// The last name of what a link leads to.
    pub(super) fn link_name(&self, link: &str) -> Option<String> {
        let target = fs::read_link(self.path(link)).ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }

    /// The NUMA node of a device; the kernel writes -1 where it does not know.
    pub(super) fn numa_node(&self, device: &str) -> Option<u16> {
        self.value(&format!("{device}/numa_node")).ok()
    }
}

/// `0000:17:00.0`
pub(super) fn is_pci_address(name: &str) -> bool {
    let hex =
        |text: &str, len: usize| text.len() >= len && text.len() <= 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let mut parts = name.split(':');
    let (Some(domain), Some(bus), Some(rest), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let Some((device, function)) = rest.split_once('.') else {
        return false;
    };
    hex(domain, 4) && hex(bus, 2) && hex(device, 2) && hex(function, 1)
}

fn reason(path: PathBuf, error: &io::Error) -> Reason {
    match error.kind() {
        io::ErrorKind::NotFound => Reason::NotThere { path },
        kind => Reason::Unreadable { path, kind },
    }
}
