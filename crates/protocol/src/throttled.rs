//! A transport made slower than it is: a token bucket in front of its door.

use weft_plan::{Bandwidth, Bytes, Time};

use crate::atomic::WORD_BYTES;
use crate::error::{Loss, Refusal};
use crate::region::{Region, RegionKey};
use crate::transport::{Body, Capabilities, Grant, Op, OpId, PathId, PeerAddress, Progress, Signal, Transport};

/// How fast, and how much at once after a pause.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    pub bandwidth: Bandwidth,
    pub burst: Bytes,
}

/// Accepts operations only as fast as its rate allows; the rest is back-pressure. All paths share the rate, as they would a NIC.
#[derive(Debug)]
pub struct Throttled<T> {
    inner: T,
    capabilities: Capabilities,
    rate: Rate,
    /// When everything accepted so far would be through at the given rate.
    busy_until: Time,
}

impl<T: Transport> Throttled<T> {
    pub fn new(inner: T, rate: Rate) -> Throttled<T> {
        let mut capabilities = inner.capabilities().clone();
        for carriage in &mut capabilities.carries {
            carriage.cost.bandwidth = carriage.cost.bandwidth.min(rate.bandwidth);
        }
        Throttled {
            inner,
            capabilities,
            rate,
            busy_until: Time::ZERO,
        }
    }

    /// Takes the tokens for an operation if there are any. The last one may overdraw, or nothing larger than a burst would ever pass.
    fn admit(&mut self, op: &Op, now: Time) -> bool {
        let ahead = self.busy_until.saturating_sub(now);
        if ahead > Time::ZERO && ahead >= Time::from(self.rate.bandwidth.time_for(self.rate.burst)) {
            return false;
        }
        let bytes = match &op.body {
            Body::Move(part) => part.range.end - part.range.start,
            Body::Message(bytes) => bytes.len() as u64,
            Body::Atomic(_) | Body::Commit(_) => WORD_BYTES,
        };
        self.busy_until = self
            .busy_until
            .max(now)
            .saturating_add(self.rate.bandwidth.time_for(Bytes(bytes)).into());
        true
    }
}

impl<T: Transport> Transport for Throttled<T> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        self.inner.register(region)
    }
    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        self.inner.release(key)
    }
    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss> {
        self.inner.open(peer, now)
    }
    fn vouch(&mut self, path: PathId) {
        self.inner.vouch(path);
    }
    fn close(&mut self, path: PathId) {
        self.inner.close(path);
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        let before = self.busy_until;
        let admitted = ops.iter().take_while(|op| self.admit(op, now)).count();
        let accepted = match self.inner.post(path, &ops[..admitted], now) {
            Ok(accepted) => accepted,
            Err(loss) => {
                self.busy_until = before;
                return Err(loss);
            }
        };
        if accepted < admitted {
            // Tokens are paid for what was accepted only.
            self.busy_until = before;
            for op in &ops[..accepted] {
                self.admit(op, now);
            }
        }
        Ok(accepted)
    }

    fn cancel(&mut self, path: PathId, op: OpId, now: Time) {
        self.inner.cancel(path, op, now);
    }
    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        self.inner.poll(now, signals)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::loopback::Loopback;
    use crate::region::Epoch;

    #[test]
    fn no_more_passes_than_the_rate_and_a_burst() {
        let network = Loopback::new();
        let rate = Rate {
            bandwidth: Bandwidth::from_bytes_per_sec(1_000_000),
            burst: Bytes(10_000),
        };
        let mut near = Throttled::new(network.endpoint("near", Epoch(1)), rate);
        let far = network.endpoint("far", Epoch(2));
        let path = near.open(&far.capabilities().address, Time::ZERO).expect("open starts");
        let mut passed = 0;
        for ms in 0..100 {
            let now = Time::from_ms(ms);
            for id in 0..20 {
                let op = Op::new(OpId(ms * 100 + id), Time::MAX, Body::Message(Arc::from([0u8; 500])));
                passed += 500 * near.post(path, &[op], now).expect("the path lives");
            }
            near.poll(now, &mut Vec::new());
            near.poll(now, &mut Vec::new());
        }
        assert!(
            (99_000..=110_500).contains(&passed),
            "{passed} bytes in 99 ms at 1 MB/s"
        );
    }
}
