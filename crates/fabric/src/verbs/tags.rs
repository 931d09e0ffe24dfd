//! Arrivals in 32 bits: a slot that an earlier frame on the same queue pair has bound to a tag, and the part's index.
//!
//! A tag has one slot that it can be bound to, and takes it from whichever tag had it before. That is safe because queue pairs
//! keep the order of what is sent: an arrival means the tag that was bound when it was sent.

use weft_protocol::Arrival;

use super::message::TAG_SLOTS;

const INDEX_BITS: u32 = 20;
const _: () = assert!(TAG_SLOTS as u64 == 1 << (32 - INDEX_BITS));

/// Which tag each slot is bound to, on one side of a path.
#[derive(Debug, Default)]
pub(super) struct Tags {
    /// Empty until the first tag is bound.
    bound: Vec<Option<u64>>,
}

/// How an arrival is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Telling {
    /// With this immediate.
    Immediate(u32),
    /// The same, after the slot has been bound.
    BindFirst { slot: u16, immediate: u32 },
    /// By a frame, because the index does not fit.
    Frame,
}

impl Tags {
    pub(super) fn telling(&self, arrival: Arrival) -> Telling {
        if arrival.index >> INDEX_BITS != 0 {
            return Telling::Frame;
        }
        let slot = slot_of(arrival.tag);
        let immediate = u32::from(slot) << INDEX_BITS | arrival.index;
        match self.bound.get(usize::from(slot)) {
            Some(Some(tag)) if *tag == arrival.tag => Telling::Immediate(immediate),
            _ => Telling::BindFirst { slot, immediate },
        }
    }

    pub(super) fn bind(&mut self, slot: u16, tag: u64) {
        if self.bound.is_empty() {
            self.bound.resize(TAG_SLOTS.into(), None);
        }
        if let Some(bound) = self.bound.get_mut(usize::from(slot)) {
            *bound = Some(tag);
        }
    }

    /// What an immediate means, if its slot has been bound.
    pub(super) fn arrival(&self, immediate: u32) -> Option<Arrival> {
        let tag = self.bound.get((immediate >> INDEX_BITS) as usize).copied().flatten()?;
        Some(Arrival {
            tag,
            index: immediate & ((1 << INDEX_BITS) - 1),
        })
    }
}

/// Tags are often counted up, so their low bits spread well; the others are folded in for those that are not.
fn slot_of(tag: u64) -> u16 {
    let folded = tag ^ tag >> 12 ^ tag >> 24 ^ tag >> 36 ^ tag >> 48 ^ tag >> 60;
    (folded % u64::from(TAG_SLOTS)) as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arrivals_mean_the_tag_that_was_bound_when_they_were_sent(list in prop::collection::vec((0u64..40, any::<bool>(), any::<u32>()), 0..300)) {
            let (mut near, mut far) = (Tags::default(), Tags::default());
            for (tag, collides, index) in list {
                // Tags a multiple of 2^12 ± folds apart share slots now and then; make some that surely do.
                let tag = if collides { tag << 12 ^ tag } else { tag };
                let arrival = Arrival { tag, index };
                let immediate = match near.telling(arrival) {
                    Telling::Frame => {
                        prop_assert!(index >= 1 << INDEX_BITS);
                        continue;
                    }
                    Telling::Immediate(immediate) => immediate,
                    Telling::BindFirst { slot, immediate } => {
                        near.bind(slot, tag);
                        far.bind(slot, tag);
                        immediate
                    }
                };
                prop_assert_eq!(far.arrival(immediate), Some(arrival));
                prop_assert_eq!(near.telling(arrival), Telling::Immediate(immediate));
            }
        }
    }

    #[test]
    fn an_immediate_that_nobody_bound_means_nothing() {
        let mut tags = Tags::default();
        assert_eq!(tags.arrival(7), None);
        tags.bind(3, 99);
        assert_eq!(tags.arrival(7), None);
        assert_eq!(tags.arrival(3 << INDEX_BITS | 7), Some(Arrival { tag: 99, index: 7 }));
    }
}
