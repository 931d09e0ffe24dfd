//! What has been written of an object and is not the object yet: whole parts go to the server as they come about, the rest waits in memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use object_store::multipart::PartId;
use tokio::task::AbortHandle;
use weft_protocol::Failure;

/// Memory for what is not the object yet, of all objects of an agent together.
#[derive(Clone, Debug)]
pub(super) struct Staging {
    used: Arc<AtomicU64>,
    limit: u64,
}

impl Staging {
    pub(super) fn of(limit: u64) -> Staging {
        Staging {
            used: Arc::default(),
            limit,
        }
    }

    fn take(&self, bytes: u64) -> Option<Room> {
        let fits = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.is_ok().then(|| Room {
            of: Arc::clone(&self.used),
            bytes,
        })
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Room {
    of: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Where a part is on its way to the server.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// Here alone.
    Held,
    Sending,
    /// The server has it, under this name.
    Sent(PartId),
}

#[derive(Debug)]
pub(super) struct Part {
    bytes: Arc<Vec<u8>>,
    written: Ranges,
    len: u64,
    pub stage: Stage,
    /// Of the bytes: a part that is written again while it is being sent has to be sent again.
    pub generation: u64,
    room: Option<Room>,
    /// What sends it.
    task: Option<AbortHandle>,
}

impl Part {
    pub(super) fn is_whole(&self) -> bool {
        self.written.is(0..self.len)
    }
    pub(super) fn bytes(&self) -> Arc<Vec<u8>> {
        Arc::clone(&self.bytes)
    }
}

/// A part that cannot be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPart {
    /// There is no memory for it.
    NoRoom,
}

/// What has been written of an object since it was opened, or committed.
#[derive(Debug)]
pub(super) struct Draft {
    len: u64,
    part_bytes: u64,
    parts: BTreeMap<u64, Part>,
    given: u64,
    /// What the last part that could not be sent failed with.
    pub failed: Option<Failure>,
}

impl Draft {
    pub(super) fn of(len: u64, part_bytes: u64) -> Draft {
        Draft {
            len,
            part_bytes,
            parts: BTreeMap::new(),
            given: 0,
            failed: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
    /// Whether it goes to the server in more than one part.
    pub(super) fn is_in_parts(&self) -> bool {
        self.len > self.part_bytes
    }
    pub(super) fn part_count(&self) -> u64 {
        self.len.div_ceil(self.part_bytes)
    }
    pub(super) fn part(&mut self, nth: u64) -> Option<&mut Part> {
        self.parts.get_mut(&nth)
    }
    /// Everything is written that the object is made of.
    pub(super) fn is_whole(&self) -> bool {
        self.parts.len() as u64 == self.part_count() && self.parts.values().all(Part::is_whole)
    }
    /// Parts that are whole and that the server is not being sent.
    pub(super) fn held(&self) -> Vec<u64> {
        let held = |(_, part): &(&u64, &Part)| matches!(part.stage, Stage::Held) && part.is_whole();
        self.parts.iter().filter(held).map(|(nth, _)| *nth).collect()
    }
    /// The names of all parts, once the server has them.
    pub(super) fn sent(&self) -> Option<Vec<PartId>> {
        let all = self.parts.values().map(|part| match &part.stage {
            Stage::Sent(id) => Some(id.clone()),
            _ => None,
        });
        let all: Option<Vec<PartId>> = all.collect();
        all.filter(|all| all.len() as u64 == self.part_count())
    }
    pub(super) fn clear(&mut self) {
        self.parts.clear();
        self.failed = None;
    }

    /// Writes into one part, as much as it has room for, by `fill`, which is given the place; says how much, and whether the part is whole now.
    pub(super) fn write<E>(
        &mut self,
        at: u64,
        len: u64,
        staging: &Staging,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Result<(u64, Option<u64>), NoPart>, E> {
        let nth = at / self.part_bytes;
        let begin = nth * self.part_bytes;
        let part_len = self.part_bytes.min(self.len - begin);
        let len = len.min(begin + part_len - at);
        let part = match self.parts.entry(nth) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                let Some(room) = staging.take(part_len) else {
                    return Ok(Err(NoPart::NoRoom));
                };
                place.insert(Part {
                    bytes: Arc::new(vec![0; part_len as usize]),
                    written: Ranges::default(),
                    len: part_len,
                    stage: Stage::Held,
                    generation: 0,
                    room: Some(room),
                    task: None,
                })
            }
        };
        if part.room.is_none() {
            // The server has what was written, and nobody else: all of the part is to be written again.
            let Some(room) = staging.take(part_len) else {
                return Ok(Err(NoPart::NoRoom));
            };
            part.bytes = Arc::new(vec![0; part_len as usize]);
            part.written = Ranges::default();
            part.room = Some(room);
        }
        self.given += 1;
        part.generation = self.given;
        part.stage = Stage::Held;
        // What is being sent is not what is to be there.
        if let Some(task) = part.task.take() {
            task.abort();
        }
        let from = at - begin;
        fill(&mut Arc::make_mut(&mut part.bytes)[from as usize..(from + len) as usize])?;
        part.written.add(from..from + len);
        Ok(Ok((len, part.is_whole().then_some(nth))))
    }

    pub(super) fn on_sending(&mut self, nth: u64, generation: u64, task: AbortHandle) {
        if let Some(part) = self.parts.get_mut(&nth)
            && part.generation == generation
        {
            part.task = Some(task);
        }
    }

    /// An object that goes as one is not to come there any more.
    pub(super) fn stop_whole(&mut self) {
        if self.is_in_parts() {
            return;
        }
        for part in self.parts.values_mut() {
            if let (Stage::Sending, Some(task)) = (&part.stage, part.task.take()) {
                task.abort();
                part.stage = Stage::Held;
            }
        }
    }

    /// The server has this part; of an object in parts nobody else needs to have it.
    pub(super) fn on_sent(&mut self, nth: u64, generation: u64, id: PartId) {
        let in_parts = self.is_in_parts();
        if let Some(part) = self.parts.get_mut(&nth)
            && part.generation == generation
        {
            part.stage = Stage::Sent(id);
            if in_parts {
                part.bytes = Arc::default();
                part.room = None;
            }
        }
    }

    pub(super) fn on_unsent(&mut self, nth: u64, generation: u64, failure: Failure) {
        if let Some(part) = self.parts.get_mut(&nth)
            && part.generation == generation
        {
            part.stage = Stage::Held;
            // What was stopped may be sent again.
            if failure != Failure::Cancelled {
                self.failed = Some(failure);
            }
        }
    }

    /// What of these bytes of the object is not here; none where some of it is with the server and cannot be read yet.
    pub(super) fn missing(&self, range: Range<u64>) -> Option<Vec<Range<u64>>> {
        let mut missing = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let nth = at / self.part_bytes;
            let begin = nth * self.part_bytes;
            let end = range.end.min(begin + self.part_bytes);
            match self.parts.get(&nth) {
                None => missing.push(at..end),
                Some(part) if part.room.is_none() => return None,
                Some(part) => {
                    let gaps = part.written.gaps(at - begin..end - begin);
                    missing.extend(gaps.map(|gap| gap.start + begin..gap.end + begin));
                }
            }
            at = end;
        }
        Some(missing)
    }

    /// Hands over what of these bytes of the object is here, and where it belongs.
    pub(super) fn each<E>(
        &self,
        range: Range<u64>,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.parts.is_empty() {
            return Ok(());
        }
        for nth in range.start / self.part_bytes..=range.end.saturating_sub(1) / self.part_bytes {
            let Some(part) = self.parts.get(&nth).filter(|part| part.room.is_some()) else {
                continue;
            };
            let begin = nth * self.part_bytes;
            let within = range.start.max(begin) - begin..range.end.min(begin + part.len).max(begin) - begin;
            for there in part.written.within(within) {
                take(
                    begin + there.start,
                    &part.bytes[there.start as usize..there.end as usize],
                )?;
            }
        }
        Ok(())
    }
}

/// Ranges that do not touch each other, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn add(&mut self, new: Range<u64>) {
        if new.is_empty() {
            return;
        }
        let (mut start, mut end) = (new.start, new.end);
        if let Some((&before, &until)) = self.0.range(..=start).next_back()
            && until >= start
        {
            start = before;
            end = end.max(until);
        }
        while let Some((&next, &until)) = self.0.range(start..=end).next() {
            end = end.max(until);
            self.0.remove(&next);
        }
        self.0.insert(start, end);
    }

    fn is(&self, all: Range<u64>) -> bool {
        self.0.len() == 1 && self.0.get(&all.start) == Some(&all.end)
    }

    fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self
            .0
            .range(..=range.start)
            .next_back()
            .map_or(range.start, |(start, _)| *start);
        let cut = move |(start, end): (&u64, &u64)| (*start).max(range.start)..(*end).min(range.end);
        self.0
            .range(first..)
            .map(cut)
            .take_while({
                let mut seen = false;
                move |cut| {
                    // The first may end before the range begins.
                    let goes_on = !cut.is_empty() || !seen;
                    seen = true;
                    goes_on
                }
            })
            .filter(|cut| !cut.is_empty())
    }

    fn gaps(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let end = range.end;
        let mut at = range.start;
        let there = self.within(range).chain(std::iter::once(end..end));
        there.filter_map(move |there| {
            let gap = at..there.start;
            at = there.end;
            (!gap.is_empty()).then_some(gap)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_draft_has_what_was_written_and_knows_what_was_not(
            len in 1u64..60,
            part_bytes in 1u64..20,
            writes in proptest::collection::vec((0u64..60, 1u64..25, any::<u8>()), 0..20),
            look in (0u64..60, 0u64..60),
        ) {
            let mut draft = Draft::of(len, part_bytes);
            let staging = Staging::of(1 << 20);
            let mut model: Vec<Option<u8>> = vec![None; len as usize];
            for (at, bytes, value) in writes {
                let at = at % len;
                let (mut at, end) = (at, (at + bytes).min(len));
                model[at as usize..end as usize].fill(Some(value));
                while at < end {
                    let written = draft.write(at, end - at, &staging, |place| { place.fill(value); Ok::<(), Infallible>(()) });
                    let (moved, _) = written.expect("it cannot fail").expect("there is room");
                    prop_assert!(moved > 0);
                    at += moved;
                }
            }
            let range = look.0.min(look.1).min(len)..look.0.max(look.1).min(len);
            let mut found: Vec<Option<u8>> = vec![None; len as usize];
            draft.each(range.clone(), |at, bytes| {
                for (nth, byte) in bytes.iter().enumerate() {
                    found[at as usize + nth] = Some(*byte);
                }
                Ok::<(), Infallible>(())
            }).expect("it cannot fail");
            let missing = draft.missing(range.clone()).expect("nothing is gone");
            for at in 0..len {
                let inside = range.contains(&at);
                prop_assert_eq!(found[at as usize], if inside { model[at as usize] } else { None });
                let is_missing = missing.iter().any(|gap| gap.contains(&at));
                prop_assert_eq!(is_missing, inside && model[at as usize].is_none());
            }
            prop_assert_eq!(draft.is_whole(), model.iter().all(Option::is_some));
            drop(draft);
            prop_assert_eq!(staging.used(), 0);
        }
    }

    #[test]
    fn what_has_gone_to_the_server_is_written_again_as_a_whole() {
        let (mut draft, staging) = (Draft::of(8, 4), Staging::of(8));
        let fill = |draft: &mut Draft, at, len| {
            let written = draft.write(at, len, &staging, |place| {
                place.fill(7);
                Ok::<(), Infallible>(())
            });
            written.expect("it cannot fail")
        };
        assert_eq!(fill(&mut draft, 0, 4), Ok((4, Some(0))));
        let generation = draft.part(0).expect("written").generation;
        let id = || PartId {
            content_id: "one".to_owned(),
        };
        draft.on_sent(0, generation, id());
        assert_eq!(
            (staging.used(), draft.missing(0..8)),
            (0, None),
            "gone, and not to be read yet"
        );
        assert_eq!(fill(&mut draft, 1, 2), Ok((2, None)));
        assert!(draft.sent().is_none() && draft.held().is_empty());
        assert_eq!(fill(&mut draft, 0, 8), Ok((4, Some(0))));
        assert_eq!(fill(&mut draft, 4, 4), Ok((4, Some(1))));
        assert_eq!(fill(&mut draft, 4, 1), Ok((1, Some(1))), "it stays whole");
        assert_eq!((draft.held(), draft.is_whole()), (vec![0, 1], true));
        // The answer to what was sent before says nothing of what is there now.
        draft.on_sent(0, generation, id());
        assert_eq!(draft.held(), [0, 1]);
    }
}
