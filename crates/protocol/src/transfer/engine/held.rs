//! Transfers that come after something which their caller is doing, where no transport waits for it.

use weft_plan::Time;

use super::Engine;
use crate::transfer::TransferId;

/// How long after one look at what a transfer comes after the next one follows: at first, and at the most. Each in vain doubles it.
const ASK_EVERY: Time = Time::from_us(2);
pub(super) const ASK_EVERY_MAX: Time = Time::from_us(250);

/// Transfers that come after something which has not come about.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) transfers: Vec<TransferId>,
    /// When to ask again, and how long after that.
    pub(super) ask_at: Time,
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
    pub(super) fn add(&mut self, id: TransferId, now: Time) {
        self.transfers.push(id);
        self.ask_every = ASK_EVERY;
        self.ask_at = self.ask_at.min(now.saturating_add(ASK_EVERY));
    }
}

impl Engine {
    /// Lets those go on whose time has come.
    pub(super) fn ask_held(&mut self, now: Time) {
        if self.held.ask_at > now {
            return;
        }
        let asked = std::mem::take(&mut self.held.transfers);
        let count = asked.len();
        for id in asked {
            let Some(transfer) = self.transfers.get_mut(id.0).filter(|t| t.failure.is_none()) else {
                continue;
            };
            if transfer.request.after.as_ref().is_some_and(|after| !after.is_ready()) {
                self.held.transfers.push(id);
            } else {
                transfer.request.after = None;
                self.make_ready(id);
            }
        }
        let held = &mut self.held;
        held.ask_every = match held.transfers.len() < count {
            true => ASK_EVERY,
            false => held.ask_every.saturating_add(held.ask_every).min(ASK_EVERY_MAX),
        };
        held.ask_at = match held.transfers.is_empty() {
            true => Time::MAX,
            false => now.saturating_add(held.ask_every),
        };
    }
}
