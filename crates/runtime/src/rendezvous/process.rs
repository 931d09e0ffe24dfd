//! Agents of one process: a table that ends with it.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weft_fabric::fork::PerProcess;

use super::entry::Entry;
use super::{Held, RendezvousError};

type Key = (String, String);

/// What a process knows of its agents. A forked child begins with none.
#[derive(Default)]
struct Names {
    by_key: Mutex<BTreeMap<Key, Entry>>,
    taken: Condvar,
}

static NAMES: PerProcess<Names> = PerProcess::new();

/// The names of one job in this process.
#[derive(Debug)]
pub(super) struct InProcess {
    job: String,
}

#[derive(Debug)]
pub(super) struct ProcessHold {
    key: Key,
}

impl Held for ProcessHold {}

impl InProcess {
    pub(super) fn new(job: &str) -> InProcess {
        InProcess { job: job.to_owned() }
    }

    pub(super) fn register(&self, entry: &Entry) -> Result<ProcessHold, RendezvousError> {
        let key = self.key(&entry.name);
        let mut names = lock();
        if let Some(other) = names.get(&key) {
            return Err(RendezvousError::NameTaken {
                name: entry.name.clone(),
                holder: other.address.clone(),
            });
        }
        names.insert(key.clone(), entry.clone());
        names_here().taken.notify_all();
        Ok(ProcessHold { key })
    }

    pub(super) fn lookup(&self, name: &str, timeout: Duration) -> Option<Entry> {
        let key = self.key(name);
        let end = Instant::now().checked_add(timeout);
        let mut names = lock();
        loop {
            if let Some(entry) = names.get(&key) {
                return Some(entry.clone());
            }
            names = match end {
                None => names_here().taken.wait(names).unwrap_or_else(PoisonError::into_inner),
                Some(end) => {
                    let left = end
                        .checked_duration_since(Instant::now())
                        .filter(|left| !left.is_zero())?;
                    names_here()
                        .taken
                        .wait_timeout(names, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }

    pub(super) fn list(&self) -> Vec<Entry> {
        lock()
            .iter()
            .filter(|((job, _), _)| *job == self.job)
            .map(|(_, entry)| entry.clone())
            .collect()
    }

    fn key(&self, name: &str) -> Key {
        (self.job.clone(), name.to_owned())
    }
}

impl Drop for ProcessHold {
    fn drop(&mut self) {
        lock().remove(&self.key);
    }
}

fn lock() -> MutexGuard<'static, BTreeMap<Key, Entry>> {
    names_here().by_key.lock().unwrap_or_else(PoisonError::into_inner)
}

fn names_here() -> &'static Names {
    NAMES.get_or_make(Names::default)
}
