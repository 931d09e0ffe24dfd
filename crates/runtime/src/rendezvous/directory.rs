//! Agents that share a directory: one file per name.
//!
//! A file appears whole, by being linked into place, and its holder writes it again at intervals. Whether a holder lives is
//! seen from its process where that is on the same host, and elsewhere from the age of the file, told by the clock of the
//! file system itself, since the clocks of hosts differ.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use weft_fabric::fork::NotInherited;

use super::entry::{ENTRIES_MAX, ENTRY_BYTES_MAX, Entry, escaped};
use super::{Held, RendezvousError, RendezvousOptions};

const SUFFIX: &str = ".entry";
const LOOK_AGAIN_FIRST: Duration = Duration::from_millis(5);
const LOOK_AGAIN_MAX: Duration = Duration::from_millis(100);

/// The names of one job in a directory.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    lease: Duration,
}

#[derive(Debug)]
pub(super) struct DirectoryHold {
    directory: PathBuf,
    path: PathBuf,
    inode: u64,
    stop: Option<Sender<()>>,
    heart: Option<JoinHandle<()>>,
}

impl Held for DirectoryHold {}

impl Directory {
    pub(super) fn open(path: &Path, options: RendezvousOptions) -> Result<Directory, RendezvousError> {
        let path = path.join(escaped(&options.job));
        let directory = Directory {
            path,
            lease: options.lease,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory.path)
            .map_err(directory.failed())?;
        Ok(directory)
    }

    pub(super) fn register(&self, entry: &Entry) -> Result<DirectoryHold, RendezvousError> {
        let path = self.entry_path(&entry.name);
        let failed = self.failed();
        let lock = lock(&self.path).map_err(&failed)?;
        if let Some((other, live)) = self.read(&path)?
            && live
        {
            return Err(RendezvousError::NameTaken {
                name: entry.name.clone(),
                holder: other.address,
            });
        }
        let bytes = entry.to_bytes();
        let file = self.place(&path, &bytes).map_err(&failed)?;
        let inode = file.metadata().map_err(&failed)?.ino();
        drop(lock);
        let (stop, stopped) = channel::<()>();
        let interval = self.lease / 3;
        let beat = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
                // The same bytes again: readers see no difference, and the file system notes the time. A failure is left
                // to the next beat; if it lasts, the entry grows old, which is the truth.
                let _ = file.write_all_at(&bytes, 0);
            }
        };
        // From here the hold takes the file away again, also when the thread cannot be had.
        let mut hold = DirectoryHold {
            directory: self.path.clone(),
            path,
            inode,
            stop: Some(stop),
            heart: None,
        };
        let heart = std::thread::Builder::new().name("weft-entry".to_owned()).spawn(beat);
        hold.heart = Some(heart.map_err(RendezvousError::Thread)?);
        Ok(hold)
    }

    pub(super) fn lookup(&self, name: &str, timeout: Duration) -> Result<Option<Entry>, RendezvousError> {
        let path = self.entry_path(name);
        let start = Instant::now();
        let mut pause = LOOK_AGAIN_FIRST;
        loop {
            if let Some((entry, true)) = self.read(&path)? {
                return Ok(Some(entry));
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            // A network file system tells nobody of a change, so we look again.
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LOOK_AGAIN_MAX);
        }
    }

    pub(super) fn list(&self) -> Result<Vec<Entry>, RendezvousError> {
        let mut entries = Vec::new();
        for file in fs::read_dir(&self.path).map_err(self.failed())? {
            let path = file.map_err(self.failed())?.path();
            if !path.to_str().is_some_and(|path| path.ends_with(SUFFIX)) {
                continue;
            }
            // One file that somebody else put there must not hide the others.
            if let Ok(Some((entry, true))) = self.read(&path) {
                entries.push(entry);
            }
            if entries.len() > ENTRIES_MAX {
                return Err(RendezvousError::TooMany {
                    place: self.path.display().to_string(),
                    max: ENTRIES_MAX,
                });
            }
        }
        Ok(entries)
    }

    /// The entry in a file and whether its holder lives; nothing where there is no file.
    fn read(&self, path: &Path) -> Result<Option<(Entry, bool)>, RendezvousError> {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(self.failed())?,
        };
        let metadata = file.metadata().map_err(self.failed())?;
        let bad = || RendezvousError::BadEntry {
            place: path.display().to_string(),
        };
        if !metadata.is_file() {
            return Err(bad());
        }
        let mut bytes = Vec::new();
        file.take(ENTRY_BYTES_MAX as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(self.failed())?;
        let entry = Entry::from_bytes(&bytes)
            .filter(|entry| self.entry_path(&entry.name) == path)
            .ok_or_else(bad)?;
        let live = match entry.holder_lives() {
            Some(live) => live,
            None => {
                let age = self.now()?.duration_since(metadata.modified().map_err(self.failed())?);
                age.unwrap_or_default() <= self.lease
            }
        };
        Ok(Some((entry, live)))
    }

    /// Puts a whole file in the place of whatever was there.
    fn place(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        let (mut file, own) = self.own_file()?;
        let placed = file.write_all(bytes).and_then(|()| fs::rename(&own, path));
        if placed.is_err() {
            let _ = fs::remove_file(&own);
        }
        placed.map(|()| file)
    }

    /// The time as the file system that holds the directory tells it.
    fn now(&self) -> Result<SystemTime, RendezvousError> {
        let (mut file, own) = self.own_file().map_err(self.failed())?;
        let time = file
            .write_all(b".")
            .and_then(|()| file.metadata())
            .and_then(|metadata| metadata.modified());
        let _ = fs::remove_file(&own);
        time.map_err(self.failed())
    }

    fn own_file(&self) -> io::Result<(File, PathBuf)> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let path = self.path.join(format!("{:032x}.new", u128::from_ne_bytes(random)));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        Ok((file, path))
    }

    fn entry_path(&self, name: &str) -> PathBuf {
        self.path.join(escaped(name) + SUFFIX)
    }

    fn failed(&self) -> impl Fn(io::Error) -> RendezvousError + '_ {
        |source| RendezvousError::Directory {
            path: self.path.clone(),
            source,
        }
    }
}

impl Drop for DirectoryHold {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(heart) = self.heart.take() {
            let _ = heart.join();
        }
        // If we were taken for dead, somebody else's file may be there now.
        if let Ok(_lock) = lock(&self.directory)
            && fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Held by whoever changes who has a name, so that of two that find a dead holder only one takes its place.
fn lock(directory: &Path) -> io::Result<NotInherited<File>> {
    // A child that kept the file would keep the lock.
    let file = NotInherited::open(|| {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(directory.join(".lock"))
    })?;
    file.lock()?;
    Ok(file)
}
