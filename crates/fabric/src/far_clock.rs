//! What time it is for the peer, at the latest.
//!
//! A target must stop touching memory before the initiator, at its deadline, tells its caller that the memory is free. The
//! two clocks have different origins, so the target asks: it sends its time, the initiator answers with its own. When the
//! initiator read its clock, ours was past what we sent; so ours plus the difference is never behind the initiator's.

use weft_plan::Time;

/// An upper bound on a peer's clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FarClock {
    known: Option<Bound>,
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    /// Theirs minus ours, at the most, in nanoseconds.
    ahead: i128,
    /// When it was learnt, on our clock.
    at: Time,
}

/// Two quartz clocks part by no more than this share of the time since they were compared.
const DRIFT_PPM: i128 = 200;
/// A bound older than this is worth a new exchange.
const FRESH: Time = Time::from_secs(1);

impl FarClock {
    /// We sent `sent`, the peer answered with its reading, and the answer is here `now`.
    pub(crate) fn learn(&mut self, sent: Time, read: Time, now: Time) {
        let fresh = Bound {
            ahead: i128::from(read.as_ns()) - i128::from(sent.as_ns()),
            at: sent,
        };
        let better = self.known.is_none_or(|old| ahead(&fresh, now) <= ahead(&old, now));
        // A bound from a slow exchange is looser, but an old one loosens with time: the tighter of the two wins.
        if better {
            self.known = Some(fresh);
        }
    }

    /// Has there been an exchange?
    pub(crate) fn is_known(&self) -> bool {
        self.known.is_some()
    }

    pub(crate) fn is_stale(&self, now: Time) -> bool {
        self.known.is_none_or(|bound| now.saturating_sub(bound.at) > FRESH)
    }

    /// May the peer's clock have reached `deadline`? Without an exchange nobody knows, so it may.
    pub(crate) fn may_have_reached(&self, deadline: Time, now: Time) -> bool {
        let Some(bound) = &self.known else { return true };
        i128::from(now.as_ns()) + ahead(bound, now) >= i128::from(deadline.as_ns())
    }
}

fn ahead(bound: &Bound, now: Time) -> i128 {
    // Two more: the division rounds down, and so does every reading of a clock.
    bound.ahead + i128::from(now.saturating_sub(bound.at).as_ns()) * DRIFT_PPM / 1_000_000 + 2
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the offset, the delays and a drift within the allowance, the target never believes a deadline to be ahead
        /// that has passed for the initiator.
        #[test]
        fn the_bound_is_never_behind(
            offset in -1_000_000_000_000_000i128..1_000_000_000_000_000,
            drift_ppm in -199i128..=199,
            exchanges in prop::collection::vec((0u64..10_000_000_000_000, 0u64..50_000_000_000, 0u64..50_000_000_000), 1..10),
            later in 0u64..100_000_000_000_000,
        ) {
            let origin = 2_000_000_000_000_000u64;
            let theirs = |ours: u64| {
                let since = i128::from(ours - origin);
                u64::try_from(i128::from(ours) + offset + since * drift_ppm / 1_000_000).unwrap()
            };
            let mut clock = FarClock::default();
            let mut t = origin;
            for (pause, there, back) in exchanges {
                t += pause;
                let sent = t;
                let read = theirs(t + there);
                t += there + back;
                clock.learn(Time::from_ns(sent), Time::from_ns(read), Time::from_ns(t));
            }
            t += later;
            prop_assert!(clock.may_have_reached(Time::from_ns(theirs(t)), Time::from_ns(t)));
        }
    }

    #[test]
    fn a_quick_exchange_gives_a_tight_bound() {
        let mut clock = FarClock::default();
        assert!(clock.may_have_reached(Time::MAX, Time::ZERO));
        clock.learn(Time::from_ms(10), Time::from_ms(510), Time::from_ms(10));
        assert!(!clock.may_have_reached(Time::from_ms(601), Time::from_ms(100)));
        assert!(clock.may_have_reached(Time::from_ms(600), Time::from_ms(100)));
        assert!(!clock.is_stale(Time::from_ms(900)));
        assert!(clock.is_stale(Time::from_ms(1100)));
    }
}
