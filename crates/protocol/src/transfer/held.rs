//! Transfers that come after something which their caller is doing, where nobody but who turns the core can wait for it.

use weft_plan::Time;

use super::TransferId;

/// How long after one look at what a transfer comes after the next one follows: at first, and at the most. Each in vain doubles it.
const ASK_EVERY: Time = Time::from_us(2);
pub(crate) const ASK_EVERY_MAX: Time = Time::from_us(250);

/// Transfers that come after something which has not come about.
#[derive(Debug)]
pub(crate) struct Held {
    transfers: Vec<TransferId>,
    /// When to ask again, and how long after that.
    ask_at: Time,
    ask_every: Time,
}

impl Default for Held {
    fn default() -> Held {
        Held {
            transfers: Vec::new(),
            ask_at: Time::MAX,
            ask_every: ASK_EVERY,
        }
    }
}

impl Held {
    pub(crate) fn add(&mut self, id: TransferId, now: Time) {
        self.transfers.push(id);
        self.ask_every = ASK_EVERY;
        self.ask_at = self.ask_at.min(now.saturating_add(ASK_EVERY));
    }

    /// When to ask again.
    pub(crate) fn next_timeout(&self) -> Option<Time> {
        Some(self.ask_at).filter(|at| *at < Time::MAX)
    }

    /// Asks of each whether it has to wait still, if it is time to ask, and gives those back that have not.
    pub(crate) fn ask(&mut self, now: Time, mut waits: impl FnMut(TransferId) -> bool) -> Vec<TransferId> {
        if self.ask_at > now {
            return Vec::new();
        }
        let due: Vec<_> = self.transfers.extract_if(.., |id| !waits(*id)).collect();
        self.ask_every = match due.is_empty() {
            false => ASK_EVERY,
            true => self.ask_every.saturating_add(self.ask_every).min(ASK_EVERY_MAX),
        };
        self.ask_at = match self.transfers.is_empty() {
            true => Time::MAX,
            false => now.saturating_add(self.ask_every),
        };
        due
    }
}
