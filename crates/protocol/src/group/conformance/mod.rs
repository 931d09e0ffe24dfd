//! What every exchange must do, as a suite that any of them can be held to.
//!
//! An exchange's author writes a [`Harness`] that makes the ends of a group and memory, and lets time pass; the suite does the rest, through
//! nothing but [`Exchange`]. Each case panics at the first promise that is broken.
//!
//! ```
//! use std::sync::Arc;
//! use weft_plan::{Rank, Time};
//! use weft_protocol::VecMemory;
//! use weft_protocol::group::conformance::Harness;
//! use weft_protocol::group::{Exchange, LoopbackGroup, LoopbackOptions, View};
//!
//! struct OverLoopback(Time);
//!
//! impl Harness for OverLoopback {
//!     fn ends(&mut self, ranks: u32) -> Vec<Box<dyn Exchange>> {
//!         let group = LoopbackGroup::new(ranks, LoopbackOptions::default());
//!         (0..ranks).map(|rank| Box::new(group.exchange(Rank(rank))) as Box<dyn Exchange>).collect()
//!     }
//!     fn memory(&mut self, _: Rank, len: u64) -> View {
//!         View::whole(Arc::new(VecMemory::zeroed(len as usize)))
//!     }
//!     fn now(&mut self) -> Time {
//!         self.0
//!     }
//!     fn idle(&mut self) {
//!         self.0 = self.0.saturating_add(Time::from_ms(1));
//!     }
//! }
//!
//! weft_protocol::group::conformance::run(&mut OverLoopback(Time::ZERO));
//! ```
//!
//! In a test file, `weft_protocol::exchange_conformance_tests!(OverLoopback(Time::ZERO));` makes one `#[test]` of each case.

mod bench;
mod boards;
mod buffers;
mod lanes;
mod messages;

use weft_plan::{Rank, Time};

use super::exchange::{Exchange, View};

pub use boards::*;
pub use buffers::*;
pub use lanes::*;
pub use messages::*;

/// What the suite needs to know of an exchange's world.
pub trait Harness {
    /// The ends of a fresh group, by rank. Called once in each case. There are at least two channels for calls.
    fn ends(&mut self, ranks: u32) -> Vec<Box<dyn Exchange>>;
    /// So many zeros in memory of a rank's, of a kind that the exchange can use; at least one byte. An exchange that treats kinds of memory differently is tested once
    /// with each.
    fn memory(&mut self, rank: Rank, len: u64) -> View;
    /// The clock that the ends are given.
    fn now(&mut self) -> Time;
    /// Lets a little time pass, a millisecond or less.
    fn idle(&mut self);
    /// How long the suite waits for something that should come soon.
    fn patience(&self) -> Time {
        Time::from_secs(20)
    }
}

/// A case: what it is called, and the case itself.
pub type Case = (&'static str, fn(&mut dyn Harness));

/// Runs every case, each with a fresh group.
///
/// # Panics
/// At the first promise that is broken, naming it.
pub fn run(harness: &mut dyn Harness) {
    for (_, case) in CASES {
        case(harness);
    }
}

/// Makes a `#[test]` of every case. The argument is an expression that makes a fresh [`Harness`](crate::group::conformance::Harness).
#[macro_export]
macro_rules! exchange_conformance_tests {
    (@table $($case:ident)*) => {
        /// Every case by its name.
        pub const CASES: &[Case] = &[$((stringify!($case), $case)),*];
    };
    (@tests ($harness:expr) $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                $crate::group::conformance::$case(&mut $harness);
            }
        )*
    };
    // The one list of cases.
    (@each $($then:tt)*) => {
        $crate::exchange_conformance_tests! {
            $($then)*
            messages_of_all_sizes_arrive_whole
            empty_messages_are_messages
            a_message_is_taken_once
            what_comes_is_combined_with_what_is_there
            elements_of_a_callers_own_are_never_cut
            a_sink_writes_its_target_and_nothing_else
            what_is_sent_is_not_written
            messages_of_another_kind_are_refused_untouched
            a_lane_keeps_its_order
            lanes_do_not_wait_for_each_other
            full_means_that_nothing_happened
            all_lanes_at_once
            a_piece_is_free_once_its_offer_has_settled
            what_was_taken_settles
            buffers_are_taken_and_given_back
            calls_follow_each_other
            a_rank_may_be_a_call_ahead
            messages_go_beside_a_call
            lent_memory_is_given_back
            what_is_given_up_is_not_taken_for_the_message
            an_abort_reaches_everybody
            the_first_abort_is_believed
            a_status_becomes_known
            a_rank_in_a_call_has_a_pulse
        }
    };
    ($harness:expr) => {
        $crate::exchange_conformance_tests!(@each @tests ($harness));
    };
}

exchange_conformance_tests!(@each @table);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::group::{LoopbackGroup, LoopbackOptions};
    use crate::memory::VecMemory;

    struct OverLoopback(LoopbackOptions, Time);

    impl Harness for OverLoopback {
        fn ends(&mut self, ranks: u32) -> Vec<Box<dyn Exchange>> {
            let group = LoopbackGroup::new(ranks, self.0);
            let end = |rank| Box::new(group.exchange(Rank(rank))) as Box<dyn Exchange>;
            (0..ranks).map(end).collect()
        }
        fn memory(&mut self, _: Rank, len: u64) -> View {
            View::whole(Arc::new(VecMemory::zeroed(len as usize)))
        }
        fn now(&mut self) -> Time {
            self.1
        }
        fn idle(&mut self) {
            self.1 = self.1.saturating_add(Time::from_us(200));
        }
    }

    fn over(seed: u64, room: usize, eager_max: u64, delay_max: u64) -> OverLoopback {
        let options = LoopbackOptions {
            seed,
            room,
            eager_max,
            delay_max,
            ..LoopbackOptions::default()
        };
        OverLoopback(options, Time::ZERO)
    }

    mod copied {
        exchange_conformance_tests!(super::over(1, 8, u64::MAX, 0));
    }

    mod left_there {
        exchange_conformance_tests!(super::over(2, 4, 0, 0));
    }

    mod late_and_with_room_for_one {
        exchange_conformance_tests!(super::over(3, 1, 256, 5));
    }
}
