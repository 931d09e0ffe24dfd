//! Who may send how many packets: a sender never has more under way than its peer has receive buffers for, so that no device
//! ever has to wait for a buffer.
//!
//! A packet that carries a frame, and a write that carries an immediate, cost a credit each. A packet that only returns credits
//! costs none; there are never more than [`RESERVE`] of those that the peer has not looked at, because it takes half a window of
//! its own packets to cause one.

/// Receive buffers of a path beyond its window, for packets that only return credits.
pub(super) const RESERVE: u16 = 4;

/// The account of one end of a path.
#[derive(Debug)]
pub(super) struct Credits {
    /// Packets that this end may send.
    here: u16,
    here_max: u16,
    /// Packets that the peer may send.
    there: u16,
    there_max: u16,
    /// Buffers that are free again and that the peer has not been told of.
    owed: u16,
}

/// The peer has sent more than it may, or returned more than it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overdrawn;

impl Credits {
    /// `window` packets may come from the peer before it has heard of a free buffer.
    pub(super) fn new(window: u16) -> Credits {
        Credits {
            here: 0,
            here_max: 0,
            there: window,
            there_max: window,
            owed: 0,
        }
    }

    /// The peer has said how many packets it can receive.
    pub(super) fn open(&mut self, window: u16) {
        self.here = window;
        self.here_max = window;
    }

    pub(super) fn left(&self) -> u16 {
        self.here
    }

    pub(super) fn spend(&mut self) {
        debug_assert!(self.here > 0, "a packet without a credit");
        self.here -= 1;
    }

    /// A packet with a frame or an immediate has come, and its buffer is free again.
    pub(super) fn received(&mut self) -> Result<(), Overdrawn> {
        self.there = self.there.checked_sub(1).ok_or(Overdrawn)?;
        self.owed += 1;
        Ok(())
    }

    /// The peer has returned credits.
    pub(super) fn returned(&mut self, credits: u16) -> Result<(), Overdrawn> {
        let here = self.here.checked_add(credits).filter(|here| *here <= self.here_max);
        self.here = here.ok_or(Overdrawn)?;
        Ok(())
    }

    /// What a packet that is being made returns to the peer.
    pub(super) fn take_owed(&mut self) -> u16 {
        self.there += self.owed;
        debug_assert!(self.there <= self.there_max);
        std::mem::take(&mut self.owed)
    }

    /// Is it time for a packet of its own?
    pub(super) fn is_return_due(&self) -> bool {
        self.owed >= self.there_max.div_ceil(2)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// One end, with what is on its way to it: packets with a frame or without, and the credits that they return.
    struct End {
        credits: Credits,
        coming: VecDeque<(bool, u16)>,
    }

    fn send(ends: &mut [End; 2], from: usize, frame: bool) {
        if frame {
            ends[from].credits.spend();
        }
        let returned = ends[from].credits.take_owed();
        ends[1 - from].coming.push_back((frame, returned));
    }

    proptest! {
        /// Whatever the two do, buffers suffice; and whoever looks at its packets can always send again.
        #[test]
        fn buffers_never_run_out_and_nobody_waits_for_ever(window in 2u16..20, acts in prop::collection::vec((0usize..2, any::<bool>()), 0..400)) {
            let mut ends = [(); 2].map(|()| {
                let mut credits = Credits::new(window);
                credits.open(window);
                End { credits, coming: VecDeque::new() }
            });
            let receive = |ends: &mut [End; 2], at: usize| {
                if let Some((frame, returned)) = ends[at].coming.pop_front() {
                    ends[at].credits.returned(returned).expect("an honest peer");
                    if frame {
                        ends[at].credits.received().expect("an honest peer");
                    }
                    if ends[at].credits.is_return_due() {
                        send(ends, at, false);
                    }
                }
            };
            for (who, sends) in acts {
                if sends && ends[who].credits.left() > 0 {
                    send(&mut ends, who, true);
                } else {
                    receive(&mut ends, who);
                }
                for end in &ends {
                    prop_assert!(end.coming.len() <= usize::from(window + RESERVE), "{} packets wait", end.coming.len());
                }
            }
            while ends.iter().any(|end| !end.coming.is_empty()) {
                receive(&mut ends, 0);
                receive(&mut ends, 1);
            }
            for end in &ends {
                prop_assert!(end.credits.left() >= 1);
            }
        }
    }

    #[test]
    fn a_peer_that_overdraws_its_account_is_found_out() {
        let mut credits = Credits::new(2);
        credits.open(3);
        assert_eq!(credits.returned(1), Err(Overdrawn));
        assert_eq!(credits.returned(u16::MAX), Err(Overdrawn));
        credits.received().unwrap();
        credits.received().unwrap();
        assert_eq!(credits.received(), Err(Overdrawn));
        assert_eq!(credits.take_owed(), 2);
        credits.received().unwrap();
    }
}
