//! What every transport must do, as a suite that any of them can be held to.
//!
//! A transport's author writes a [`Harness`] that makes two ends and memory, and lets time pass; the suite does the rest, through
//! nothing but [`Transport`]. Each case panics at the first promise that is broken.
//!
//! ```
//! use std::sync::Arc;
//! use weft_plan::Time;
//! use weft_protocol::conformance::{Ends, Harness, Side};
//! use weft_protocol::{Epoch, Loopback, Memory, VecMemory};
//!
//! struct OverLoopback(Time);
//!
//! impl Harness for OverLoopback {
//!     fn ends(&mut self) -> Ends {
//!         let network = Loopback::new();
//!         Ends {
//!             initiator: Box::new(network.endpoint("initiator", Epoch(7))),
//!             initiator_epoch: Epoch(7),
//!             target: Box::new(network.endpoint("target", Epoch(9))),
//!             target_epoch: Epoch(9),
//!         }
//!     }
//!     fn memory(&mut self, _: Side, len: u64) -> Arc<dyn Memory> {
//!         Arc::new(VecMemory::zeroed(len as usize))
//!     }
//!     fn now(&mut self) -> Time {
//!         self.0
//!     }
//!     fn idle(&mut self) {
//!         self.0 = self.0.saturating_add(Time::from_ms(1));
//!     }
//! }
//!
//! weft_protocol::conformance::run(&mut OverLoopback(Time::ZERO));
//! ```
//!
//! In a test file, `weft_protocol::conformance_tests!(OverLoopback(Time::ZERO));` makes one `#[test]` of each case.

mod atomics;
mod bench;
mod commits;
mod endings;
mod messages;
mod moves;
mod refusals;
mod troubles;

use std::sync::Arc;

use weft_plan::{Place, Time};

use crate::memory::{HostBytes, Memory};
use crate::region::Epoch;
use crate::transport::Transport;

pub use atomics::*;
pub use commits::*;
pub use endings::*;
pub use messages::*;
pub use moves::*;
pub use refusals::*;
pub use troubles::*;

/// What the suite needs to know of a transport's world.
pub trait Harness {
    /// Two fresh ends that can reach each other, by the address in the target's capabilities. Called once in each case.
    fn ends(&mut self) -> Ends;
    /// Memory of a kind that the transport can move. A transport that knows several kinds is tested once with each.
    fn memory(&mut self, side: Side, len: u64) -> Arc<dyn Memory>;
    /// Where that memory is.
    fn place(&self, side: Side) -> Place {
        let _ = side;
        Place::DRAM
    }
    /// The same memory as its owner sees it, who need not go through the transport: how the suite knows what is in a device or a file.
    fn look<'m>(&self, memory: &'m dyn Memory) -> &'m dyn HostBytes {
        memory.bytes()
    }
    /// What of it would be found after a crash; none where that makes no difference, as for memory.
    fn lasting(&self, memory: &dyn Memory) -> Option<Vec<u8>> {
        let _ = memory;
        None
    }
    /// Whether it sums bytes in a way of its own, because it sums both ends itself; otherwise by [`Digest`](crate::memory::Digest).
    fn has_own_sum(&self) -> bool {
        false
    }
    /// A fresh end that moves bytes among its own places, and its life; none where the transport is for peers.
    fn alone(&mut self) -> Option<(Box<dyn Transport>, Epoch)> {
        None
    }
    /// Whether the transport has no peers at all. Then the one end of [`alone`](Harness::alone) is both ends of a case, and the cases are those of
    /// [`CASES_ALONE`].
    fn has_no_peers(&self) -> bool {
        false
    }
    /// What the target's memory suffers from that is made from now on; with none, nothing that was made suffers any more. False where the harness
    /// cannot bring that about.
    fn trouble(&mut self, trouble: Option<Trouble>) -> bool {
        let _ = trouble;
        false
    }
    /// The clock that both ends are given.
    fn now(&mut self) -> Time;
    /// Lets a little time pass, a millisecond or less, because neither end had anything to do.
    fn idle(&mut self);
    /// How long the suite waits for something that should come soon.
    fn patience(&self) -> Time {
        Time::from_secs(20)
    }
}

/// The two ends of a case.
#[derive(Debug)]
pub struct Ends {
    pub initiator: Box<dyn Transport>,
    pub initiator_epoch: Epoch,
    pub target: Box<dyn Transport>,
    pub target_epoch: Epoch,
}

/// Which end memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Initiator,
    Target,
}

/// A case: what it is called, and the case itself.
pub type Case = (&'static str, fn(&mut dyn Harness));

/// Runs every case, each with fresh ends.
///
/// # Panics
/// At the first promise that is broken, naming it.
pub fn run(harness: &mut dyn Harness) {
    for (_, case) in CASES {
        case(harness);
    }
}

/// Makes a `#[test]` of every case. The argument is an expression that makes a fresh [`Harness`](crate::conformance::Harness).
///
/// A transport that knows several kinds of memory, or several ways to open, uses the macro once in a module for each. An
/// attribute before the expression stands before every test: `#[ignore = "needs a device"]` where most machines have none.
#[macro_export]
macro_rules! conformance_tests {
    (@table $($case:ident)*) => {
        /// Every case by its name.
        pub const CASES: &[Case] = &[$((stringify!($case), $case)),*];
    };
    (@table_alone $($case:ident)*) => {
        /// The cases of a transport that has no peers.
        pub const CASES_ALONE: &[Case] = &[$((stringify!($case), $case)),*];
    };
    (@tests ($harness:expr) $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::$case(&mut $harness);
            }
        )*
    };
    (@tests_with $attribute:tt ($harness:expr) $($case:ident)*) => {
        $(
            #[test]
            # $attribute
            fn $case() {
                $crate::conformance::$case(&mut $harness);
            }
        )*
    };
    // The one list of cases.
    (@each $($then:tt)*) => {
        $crate::conformance_tests! {
            $($then)*
            read_contiguous
            write_contiguous
            read_strided
            write_strided
            read_paged
            write_paged
            mismatched_spans
            empty_moves
            single_bytes
            many_spans
            large_moves
            several_regions
            both_directions_at_once
            two_paths_at_once
            checksums_are_those_of_the_far_bytes
            messages_are_echoed
            largest_message_arrives_whole
            arrivals_follow_their_data
            strangers_wait_to_be_vouched_for
            unknown_key_is_refused
            wrong_secret_is_refused
            stale_epoch_is_refused
            released_region_is_refused
            release_under_traffic_is_a_fence
            released_near_side_is_refused
            out_of_bounds_is_refused
            unreadable_region_is_refused
            unwritable_region_is_refused
            refusal_leaves_the_path_usable
            past_deadline_touches_nothing
            frozen_target_cannot_delay_a_read
            frozen_target_cannot_delay_a_write
            cancelled_reads_are_fenced
            cancelled_writes_are_fenced
            full_queue_accepts_a_prefix
            close_completes_what_is_open
            close_by_the_peer_completes_what_is_open
            death_of_the_peer_completes_what_is_open
            unreachable_peer_is_lost
            atomics_return_what_was_there
            atomics_follow_a_model
            atomics_of_two_paths_and_the_owner_sum_exactly
            atomics_without_the_right_are_refused
            misaligned_atomics_are_refused
            atomics_past_their_deadline_touch_nothing
            frozen_target_cannot_delay_an_atomic
            cancelled_atomics_are_told_honestly
            atomics_on_a_closed_path_are_told_honestly
            atomics_of_a_dead_peer_are_told_honestly
            commits_make_writes_last
            commits_without_the_right_are_refused
            own_places_are_moved_between
            short_moves_are_completed
            full_place_is_told
            vanished_bytes_are_told
            read_only_place_is_told
            failing_device_is_told
            stuck_device_delays_nobody_else
            cancel_of_what_is_stuck_is_a_fence
        }
    };
    // Those of a transport that has no peers; NOT_ALONE says why of the others.
    (@each_alone $($then:tt)*) => {
        $crate::conformance_tests! {
            $($then)*
            read_contiguous
            write_contiguous
            read_strided
            write_strided
            read_paged
            write_paged
            mismatched_spans
            empty_moves
            single_bytes
            many_spans
            large_moves
            several_regions
            two_paths_at_once
            checksums_are_those_of_the_far_bytes
            arrivals_follow_their_data
            unknown_key_is_refused
            wrong_secret_is_refused
            stale_epoch_is_refused
            released_region_is_refused
            release_under_traffic_is_a_fence
            released_near_side_is_refused
            out_of_bounds_is_refused
            refusal_leaves_the_path_usable
            past_deadline_touches_nothing
            cancelled_reads_are_fenced
            cancelled_writes_are_fenced
            full_queue_accepts_a_prefix
            close_completes_what_is_open
            commits_make_writes_last
            own_places_are_moved_between
            short_moves_are_completed
            full_place_is_told
            vanished_bytes_are_told
            read_only_place_is_told
            failing_device_is_told
            stuck_device_delays_nobody_else
            cancel_of_what_is_stuck_is_a_fence
        }
    };
    (alone $harness:expr) => {
        $crate::conformance_tests!(@each_alone @tests ($harness));
    };
    (# $attribute:tt $harness:expr) => {
        $crate::conformance_tests!(@each @tests_with $attribute ($harness));
    };
    ($harness:expr) => {
        $crate::conformance_tests!(@each @tests ($harness));
    };
}

conformance_tests!(@each @table);
conformance_tests!(@each_alone @table_alone);

/// The cases that do not apply to a transport without peers, each with the reason.
pub const NOT_ALONE: &[(&str, &str)] = &[
    (
        "both_directions_at_once",
        "nobody accepts a path, so nobody moves from its other end",
    ),
    ("messages_are_echoed", "nobody is there to hear a message"),
    ("largest_message_arrives_whole", "nobody is there to hear a message"),
    ("strangers_wait_to_be_vouched_for", "nobody else can open a path"),
    (
        "unreadable_region_is_refused",
        "the owner may read its own regions whatever peers may",
    ),
    (
        "unwritable_region_is_refused",
        "the owner may write its own regions whatever peers may",
    ),
    (
        "commits_without_the_right_are_refused",
        "the owner may commit its own regions whatever peers may",
    ),
    (
        "frozen_target_cannot_delay_a_read",
        "nobody is there to freeze; stuck_device_delays_nobody_else is about a frozen device",
    ),
    (
        "frozen_target_cannot_delay_a_write",
        "nobody is there to freeze; stuck_device_delays_nobody_else is about a frozen device",
    ),
    (
        "close_by_the_peer_completes_what_is_open",
        "there is no peer to close a path",
    ),
    ("death_of_the_peer_completes_what_is_open", "there is no peer to die"),
    (
        "unreachable_peer_is_lost",
        "there is no peer that could be out of reach",
    ),
    (
        "atomics_return_what_was_there",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "atomics_follow_a_model",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "atomics_of_two_paths_and_the_owner_sum_exactly",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "atomics_without_the_right_are_refused",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "misaligned_atomics_are_refused",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "atomics_past_their_deadline_touch_nothing",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "frozen_target_cannot_delay_an_atomic",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "cancelled_atomics_are_told_honestly",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "atomics_on_a_closed_path_are_told_honestly",
        "a place that is no memory has no words that are operated on",
    ),
    (
        "atomics_of_a_dead_peer_are_told_honestly",
        "a place that is no memory has no words that are operated on",
    ),
];

#[cfg(test)]
mod tests {
    use weft_plan::PlaceKind;

    use super::*;
    use crate::loopback::{Loopback, LoopbackEndpoint, PlacedMemory};
    use crate::memory::VecMemory;
    use crate::transport::Carriage;

    /// The reference transport between memory of two kinds.
    struct OverLoopback {
        now: Time,
        near: Place,
        far: Place,
    }

    impl OverLoopback {
        const fn between(near: Place, far: Place) -> OverLoopback {
            OverLoopback {
                now: Time::ZERO,
                near,
                far,
            }
        }

        fn end(&self, network: &Loopback, name: &str, epoch: Epoch) -> LoopbackEndpoint {
            let cost = network.endpoint("costs as much", Epoch(0)).capabilities().carries[0].cost;
            let (near, far) = (self.near.kind(), self.far.kind());
            let mut kinds: Vec<(PlaceKind, PlaceKind)> = vec![(near, far), (far, near)];
            kinds.dedup();
            let carries = kinds
                .into_iter()
                .map(|(near, far)| Carriage::new(near, far, cost, 1 << 20));
            network.endpoint_carrying(name, epoch, carries.collect())
        }
    }

    impl Harness for OverLoopback {
        fn ends(&mut self) -> Ends {
            let network = Loopback::new();
            Ends {
                initiator: Box::new(self.end(&network, "initiator", Epoch(7))),
                initiator_epoch: Epoch(7),
                target: Box::new(self.end(&network, "target", Epoch(9))),
                target_epoch: Epoch(9),
            }
        }
        fn memory(&mut self, side: Side, len: u64) -> Arc<dyn Memory> {
            match self.place(side) {
                Place::Dram { .. } => Arc::new(VecMemory::zeroed(len as usize)),
                place => Arc::new(PlacedMemory::zeroed(place, len as usize)),
            }
        }
        fn place(&self, side: Side) -> Place {
            match side {
                Side::Initiator => self.near,
                Side::Target => self.far,
            }
        }
        fn look<'m>(&self, memory: &'m dyn Memory) -> &'m dyn HostBytes {
            match memory.as_any().downcast_ref::<PlacedMemory>() {
                Some(placed) => placed.look(),
                None => memory.bytes(),
            }
        }
        fn lasting(&self, memory: &dyn Memory) -> Option<Vec<u8>> {
            let placed = memory.as_any().downcast_ref::<PlacedMemory>()?;
            matches!(placed.place(), Place::File | Place::Object).then(|| placed.lasting())
        }
        fn alone(&mut self) -> Option<(Box<dyn Transport>, Epoch)> {
            let alone = self.end(&Loopback::new(), "alone", Epoch(5));
            Some((Box::new(alone), Epoch(5)))
        }
        fn now(&mut self) -> Time {
            self.now
        }
        fn idle(&mut self) {
            self.now = self.now.saturating_add(Time::from_us(200));
        }
    }

    #[test]
    fn every_case_applies_to_a_transport_without_peers_or_says_why_not() {
        for (name, _) in CASES {
            let applies = CASES_ALONE.iter().any(|(alone, _)| alone == name);
            let reason = NOT_ALONE.iter().any(|(not, why)| not == name && !why.is_empty());
            assert!(applies != reason, "{name}");
        }
        assert_eq!(CASES.len(), CASES_ALONE.len() + NOT_ALONE.len());
    }

    /// The reference as an end without peers.
    struct Alone(OverLoopback);

    impl Harness for Alone {
        fn ends(&mut self) -> Ends {
            unreachable!("it has no peers")
        }
        fn has_no_peers(&self) -> bool {
            true
        }
        fn memory(&mut self, side: Side, len: u64) -> Arc<dyn Memory> {
            self.0.memory(side, len)
        }
        fn place(&self, side: Side) -> Place {
            self.0.place(side)
        }
        fn look<'m>(&self, memory: &'m dyn Memory) -> &'m dyn HostBytes {
            self.0.look(memory)
        }
        fn lasting(&self, memory: &dyn Memory) -> Option<Vec<u8>> {
            self.0.lasting(memory)
        }
        fn alone(&mut self) -> Option<(Box<dyn Transport>, Epoch)> {
            self.0.alone()
        }
        fn now(&mut self) -> Time {
            self.0.now()
        }
        fn idle(&mut self) {
            self.0.idle();
        }
    }

    mod alone_with_a_file {
        use super::*;
        conformance_tests!(alone Alone(OverLoopback::between(Place::DRAM, Place::File)));
    }

    const GPU: Place = Place::Gpu { ordinal: 0 };

    conformance_tests!(OverLoopback::between(Place::DRAM, Place::DRAM));

    mod device {
        use super::*;
        conformance_tests!(OverLoopback::between(GPU, GPU));
    }
    mod host_and_device {
        use super::*;
        conformance_tests!(OverLoopback::between(Place::DRAM, GPU));
    }
    mod host_and_file {
        use super::*;
        conformance_tests!(OverLoopback::between(Place::DRAM, Place::File));
    }
    mod device_and_file {
        use super::*;
        conformance_tests!(OverLoopback::between(GPU, Place::File));
    }
    mod host_and_object {
        use super::*;
        conformance_tests!(OverLoopback::between(Place::DRAM, Place::Object));
    }
}
