//! How a sender adapts its rate to marks of congestion: DCQCN (Zhu et al., SIGCOMM 2015), without the byte counter.

use weft_plan::Picos;

/// The constants of DCQCN and of the marking at switches. The defaults are those of the paper, marks scaled to 100 Gb/s.
#[derive(Clone, Debug, PartialEq)]
pub struct Dcqcn {
    /// Below this many bytes in a queue nothing is marked, above that everything; in between as likely as up to `mark_likely`.
    pub mark_from: u32,
    pub mark_all: u32,
    pub mark_likely: f64,
    /// A receiver tells a sender of marks at most this often.
    pub notice_every: Picos,
    /// After so long without a notice, the estimate of congestion sinks and the rate rises.
    pub rise_every: Picos,
    /// How quickly the estimate of congestion moves.
    pub gain: f64,
    /// What is added to the target rate, as a part of the link's.
    pub rise: f64,
}

impl Default for Dcqcn {
    fn default() -> Dcqcn {
        Dcqcn {
            mark_from: 100_000,
            mark_all: 400_000,
            mark_likely: 0.2,
            notice_every: Picos::from_us(50),
            rise_every: Picos::from_us(55),
            gain: 1.0 / 256.0,
            rise: 0.005,
        }
    }
}

/// The rate of a flow, as a part of its link's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pacer {
    rate: f64,
    target: f64,
    congestion: f64,
    /// Rises since the last notice.
    rises: u32,
    since: u64,
}

/// A rate never sinks below this part of the link's.
const SLOWEST: f64 = 0.001;
/// So many rises go half of the way to the target before the target rises itself.
const FAST_RISES: u32 = 5;

impl Pacer {
    pub(super) fn new(now: u64) -> Pacer {
        Pacer {
            rate: 1.0,
            target: 1.0,
            congestion: 1.0,
            rises: 0,
            since: now,
        }
    }

    /// The rate now, after all rises that have come due.
    pub(super) fn rate(&mut self, dcqcn: &Dcqcn, now: u64) -> f64 {
        let every = dcqcn.rise_every.as_ps().max(1);
        while now - self.since >= every {
            self.since += every;
            self.congestion *= 1.0 - dcqcn.gain;
            self.rises += 1;
            if self.rises > FAST_RISES {
                self.target = (self.target + dcqcn.rise).min(1.0);
            }
            self.rate = (self.rate + self.target) / 2.0;
            if self.rate > 0.9999 {
                (self.rate, self.since) = (1.0, now);
            }
        }
        self.rate
    }

    /// The receiver has seen marks.
    pub(super) fn notice(&mut self, dcqcn: &Dcqcn, now: u64) {
        self.rate(dcqcn, now);
        self.target = self.rate;
        self.rate = (self.rate * (1.0 - self.congestion / 2.0)).max(SLOWEST);
        self.congestion = (1.0 - dcqcn.gain) * self.congestion + dcqcn.gain;
        (self.rises, self.since) = (0, now);
    }
}
