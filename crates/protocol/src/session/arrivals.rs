//! Counts the parts that have arrived, so that a notification is handed on after its data and no order is needed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::config::MAX_HELD;
use super::event::{Misbehaviour, NotificationId};

/// Tags with this bit are those of writes whose parts the session's owner counts. Whether a part counts at all is for the session to say, for it knows
/// whose paths are.
pub const TOLD_BIT: u64 = 1 << 63;

/// Tags of which something has arrived, at most. Above that the oldest without a notification is dropped: what is left there
/// is a part that was sent twice and arrived again long after its transfer.
const MAX_TAGS: usize = 4 * MAX_HELD;
/// Finished tags that are remembered, so that a part which arrives twice does not begin its tag anew.
const MAX_FINISHED: usize = MAX_HELD;
/// Ranges of part indices, over all tags. Parts arrive nearly in order, so a transfer has few.
const MAX_RANGES: usize = 1 << 16;
/// Payload bytes that may wait at one end.
const MAX_HELD_BYTES: usize = 64 << 20;

/// What has arrived, and the notifications that wait for more.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    tags: BTreeMap<u64, Tag>,
    /// Tags by age.
    born: BTreeMap<u64, u64>,
    births: u64,
    finished: BTreeSet<u64>,
    finished_by_age: VecDeque<u64>,
    ranges: usize,
    held: usize,
    held_bytes: usize,
}

#[derive(Debug, Default)]
struct Tag {
    birth: u64,
    arrived: Ranges,
    waiting: Vec<Held>,
}

#[derive(Debug)]
struct Held {
    id: NotificationId,
    parts: u32,
    payload: Vec<u8>,
}

/// A notification whose data is in place.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ready {
    pub(super) id: NotificationId,
    pub(super) payload: Vec<u8>,
}

impl Arrivals {
    /// Part `index` of `tag` is in place. Returns the notifications that waited for it.
    pub(super) fn arrive(&mut self, tag: u64, index: u32) -> Result<Vec<Ready>, Misbehaviour> {
        if self.finished.contains(&tag) {
            return Ok(Vec::new());
        }
        let entry = self.tag(tag);
        let before = entry.arrived.len();
        entry.arrived.insert(index);
        let after = entry.arrived.len();
        self.ranges = self.ranges - before + after;
        if self.ranges > MAX_RANGES {
            return Err(Misbehaviour::Flood);
        }
        Ok(self.release(tag))
    }

    /// A notification that waits for the parts `0..parts` of `tag`. Returned at once if they are all here.
    pub(super) fn hold(
        &mut self,
        tag: u64,
        parts: u32,
        id: NotificationId,
        payload: &[u8],
    ) -> Result<Vec<Ready>, Misbehaviour> {
        self.held += 1;
        self.held_bytes += payload.len();
        if self.held > MAX_HELD || self.held_bytes > MAX_HELD_BYTES {
            return Err(Misbehaviour::Flood);
        }
        let payload = payload.to_vec();
        self.tag(tag).waiting.push(Held { id, parts, payload });
        Ok(self.release(tag))
    }

    /// The transfer behind `tag` has failed: neither its parts nor its notifications matter any more.
    pub(super) fn revoke(&mut self, tag: u64) {
        self.forget(tag);
        self.finish(tag);
    }

    /// Notifications that wait for their data.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    fn tag(&mut self, tag: u64) -> &mut Tag {
        if !self.tags.contains_key(&tag) {
            if self.tags.len() >= MAX_TAGS {
                self.forget_oldest();
            }
            self.births += 1;
            self.born.insert(self.births, tag);
        }
        let birth = self.births;
        self.tags.entry(tag).or_insert_with(|| Tag {
            birth,
            ..Tag::default()
        })
    }

    fn release(&mut self, tag: u64) -> Vec<Ready> {
        let Some(entry) = self.tags.get_mut(&tag) else {
            return Vec::new();
        };
        let arrived = &entry.arrived;
        let ready: Vec<Ready> = entry
            .waiting
            .extract_if(.., |held| arrived.cover(held.parts))
            .map(|held| Ready {
                id: held.id,
                payload: held.payload,
            })
            .collect();
        let idle = entry.waiting.is_empty();
        self.held -= ready.len();
        self.held_bytes -= ready.iter().map(|r| r.payload.len()).sum::<usize>();
        if !ready.is_empty() && idle {
            self.forget(tag);
            self.finish(tag);
        }
        ready
    }

    fn forget(&mut self, tag: u64) {
        if let Some(entry) = self.tags.remove(&tag) {
            self.born.remove(&entry.birth);
            self.ranges -= entry.arrived.len();
            self.held -= entry.waiting.len();
            self.held_bytes -= entry.waiting.iter().map(|held| held.payload.len()).sum::<usize>();
        }
    }

    fn forget_oldest(&mut self) {
        let tags = &self.tags;
        let oldest = self.born.values().find(|tag| tags[tag].waiting.is_empty()).copied();
        if let Some(tag) = oldest {
            self.forget(tag);
        }
    }

    fn finish(&mut self, tag: u64) {
        if self.finished.insert(tag) {
            self.finished_by_age.push_back(tag);
        }
        if self.finished_by_age.len() > MAX_FINISHED
            && let Some(oldest) = self.finished_by_age.pop_front()
        {
            self.finished.remove(&oldest);
        }
    }
}

/// A set of indices as ranges: start to the index after the last.
#[derive(Debug, Default)]
struct Ranges(BTreeMap<u32, u64>);

impl Ranges {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn insert(&mut self, index: u32) {
        let mut end = u64::from(index) + 1;
        if let Ok(after) = u32::try_from(end)
            && let Some(joined) = self.0.remove(&after)
        {
            end = joined;
        }
        match self.0.range_mut(..=index).next_back() {
            Some((_, last)) if *last > u64::from(index) => {
                // Here already. The range after it cannot have begun right behind, so nothing was removed above.
            }
            Some((_, last)) if *last == u64::from(index) => *last = end,
            _ => {
                self.0.insert(index, end);
            }
        }
    }

    /// Whether all of `0..parts` are here.
    fn cover(&self, parts: u32) -> bool {
        parts == 0 || self.0.get(&0).is_some_and(|end| *end >= u64::from(parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(ready: Vec<Ready>) -> Vec<u64> {
        ready.into_iter().map(|r| r.id.0).collect()
    }

    #[test]
    fn a_notification_may_come_before_its_data_or_after_it() {
        let mut arrivals = Arrivals::default();
        assert_eq!(ids(arrivals.hold(7, 2, NotificationId(1), b"x").unwrap()), [0u64; 0]);
        assert_eq!(ids(arrivals.arrive(7, 1).unwrap()), [0u64; 0]);
        assert_eq!(ids(arrivals.arrive(7, 1).unwrap()), [0u64; 0]);
        assert_eq!(ids(arrivals.arrive(7, 0).unwrap()), [1]);
        assert_eq!(ids(arrivals.arrive(8, 0).unwrap()), [0u64; 0]);
        assert_eq!(ids(arrivals.hold(8, 1, NotificationId(2), b"y").unwrap()), [2]);
        assert_eq!(ids(arrivals.hold(9, 0, NotificationId(3), b"z").unwrap()), [3]);
        assert_eq!((arrivals.ranges, arrivals.held, arrivals.held_bytes), (0, 0, 0));
    }

    #[test]
    fn a_revoked_notification_stays_away() {
        let mut arrivals = Arrivals::default();
        arrivals.hold(7, 2, NotificationId(1), b"x").unwrap();
        arrivals.arrive(7, 0).unwrap();
        arrivals.revoke(7);
        assert_eq!(ids(arrivals.arrive(7, 1).unwrap()), [0u64; 0]);
        assert!(arrivals.tags.is_empty() && arrivals.born.is_empty());
        assert_eq!((arrivals.ranges, arrivals.held, arrivals.held_bytes), (0, 0, 0));
    }

    #[test]
    fn memory_is_bounded_whatever_arrives() {
        let mut arrivals = Arrivals::default();
        for tag in 0..3 * MAX_TAGS as u64 {
            arrivals.arrive(tag, 1).unwrap();
        }
        assert_eq!(arrivals.tags.len(), MAX_TAGS);
        let scattered = (0..=MAX_RANGES as u32).try_for_each(|i| arrivals.arrive(u64::MAX, 2 * i).map(drop));
        assert_eq!(scattered, Err(Misbehaviour::Flood));
        let mut arrivals = Arrivals::default();
        let held = (0..=MAX_HELD as u64).try_for_each(|i| arrivals.hold(i, 1, NotificationId(i), b"").map(drop));
        assert_eq!(held, Err(Misbehaviour::Flood));
    }

    proptest! {
        #[test]
        fn ranges_are_a_set(indices in prop::collection::vec(0u32..60, 0..80), parts in 0u32..60) {
            let mut ranges = Ranges::default();
            let mut model = BTreeSet::new();
            for index in indices {
                ranges.insert(index);
                model.insert(index);
                let members: Vec<u32> = ranges.0.iter().flat_map(|(start, end)| *start..*end as u32).collect();
                prop_assert_eq!(&members, &model.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(ranges.cover(parts), (0..parts).all(|i| model.contains(&i)));
            }
            let gaps = model.iter().filter(|i| !model.contains(&i.wrapping_sub(1))).count();
            prop_assert_eq!(ranges.len(), gaps);
        }
    }
}
