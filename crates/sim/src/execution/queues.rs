//! What waits at each way for its counterpart: sends for receives, and receives for sends.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use super::batch::Batch;
use super::{Execution, Queue, Waiting, Way};

impl Execution<'_, '_> {
    /// The receives that have waited longest on a way, if any do.
    pub(super) fn next_receives(&mut self, way: Way) -> Option<(Batch, bool)> {
        match self.next(way, |first| matches!(first, Waiting::Receives { .. }))? {
            Waiting::Receives { ops, reduces } => Some((ops, reduces)),
            Waiting::Sends(_) | Waiting::Gone { .. } => None,
        }
    }

    pub(super) fn next_sends(&mut self, way: Way) -> Option<Waiting> {
        self.next(way, |first| !matches!(first, Waiting::Receives { .. }))
    }

    pub(super) fn next(&mut self, way: Way, wanted: impl Fn(&Waiting) -> bool) -> Option<Waiting> {
        let Entry::Occupied(mut entry) = self.queues.entry(way) else {
            return None;
        };
        let queue = entry.get_mut();
        if !wanted(&queue.first) {
            return None;
        }
        Some(match queue.more.pop_front() {
            Some(next) => std::mem::replace(&mut queue.first, next),
            None => entry.remove().first,
        })
    }

    pub(super) fn wait(&mut self, way: Way, waiting: Waiting) {
        match self.queues.entry(way) {
            Entry::Vacant(entry) => {
                entry.insert(Queue {
                    first: waiting,
                    more: VecDeque::new(),
                });
            }
            Entry::Occupied(mut entry) => entry.get_mut().more.push_back(waiting),
        }
    }

    /// What is left of those that had waited longest goes on waiting.
    pub(super) fn wait_first(&mut self, way: Way, ops: Batch, waiting: impl FnOnce(Batch) -> Waiting) {
        if ops.len() > 0 {
            self.put_first(way, waiting(ops));
        }
    }

    pub(super) fn put_first(&mut self, way: Way, waiting: Waiting) {
        match self.queues.entry(way) {
            Entry::Vacant(entry) => {
                entry.insert(Queue {
                    first: waiting,
                    more: VecDeque::new(),
                });
            }
            Entry::Occupied(mut entry) => {
                let queue = entry.get_mut();
                let second = std::mem::replace(&mut queue.first, waiting);
                queue.more.push_front(second);
            }
        }
    }
}
