//! Purges: what a tenant has is erased, on the medium too, and nothing of it is found after the next start either.

use super::format::{Found, TenantKey};
use super::{NOWHERE, PurgeId, Shelf, ShelfEvent, Trouble, Waiter};

#[derive(Clone, Copy, Debug)]
pub(super) struct Purging {
    erased: u64,
    /// Pages that are not written yet.
    pages: u64,
    failed: Option<Trouble>,
}

impl Shelf {
    /// Removes all that a tenant has here, but what is held; says how many blocks are left for that reason. It is [done](ShelfEvent::PurgeDone) when the
    /// medium has no record of what was removed, nor of what had left before.
    pub fn purge(&mut self, tenant: TenantKey) -> (PurgeId, usize) {
        self.given += 1;
        let purge = PurgeId(self.given);
        for pending in self.puts.values_mut().filter(|pending| pending.tenant == tenant) {
            pending.doomed = true;
        }
        let left = self
            .tenants
            .get(&tenant)
            .map_or(0, |account| self.books.purge(*account));
        // Its blocks go nowhere from here.
        let handed_down = std::mem::replace(&mut self.options.hand_down, false);
        self.settle();
        self.options.hand_down = handed_down;
        let mut purging = Purging {
            erased: 0,
            pages: 0,
            failed: None,
        };
        for slot in 0..self.geometry.slots_total() as u32 {
            let Found::Block(record) = self.record(slot) else {
                continue;
            };
            let found = self.books.index().find(&record.id);
            let kept = found.is_some_and(|there| self.places[there.at()] == slot && slot != NOWHERE);
            if record.tenant != tenant || kept {
                continue;
            }
            self.erase(slot);
            purging.erased += 1;
        }
        // Also records that were erased before, or failed, and may still be on the medium.
        for extent in &mut self.extents {
            let flying = extent.flying.iter_mut().flat_map(|pages| pages.values_mut().take(1));
            for waiters in extent.dirty.values_mut().chain(flying) {
                waiters.push(Waiter::Purge(purge));
                purging.pages += 1;
            }
        }
        self.purges.insert(purge, purging);
        self.end_purge(purge);
        (purge, left)
    }

    pub(super) fn on_purged_page(&mut self, purge: PurgeId, ended: Result<(), Trouble>) {
        if let Some(purging) = self.purges.get_mut(&purge) {
            purging.pages -= 1;
            purging.failed = purging.failed.or(ended.err());
            self.end_purge(purge);
        }
    }

    fn end_purge(&mut self, purge: PurgeId) {
        let done = self.purges.get(&purge).filter(|purging| purging.pages == 0).copied();
        if let Some(Purging { erased, failed, .. }) = done {
            self.purges.remove(&purge);
            let ended = failed.map_or(Ok(erased), Err);
            self.events.push_back(ShelfEvent::PurgeDone { purge, ended });
        }
    }
}
