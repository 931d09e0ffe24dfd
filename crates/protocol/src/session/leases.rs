//! Leases: the right to use a peer's region for a while without asking again.
//!
//! The end that asks counts from the moment it asked, the end that grants from the moment it granted, and a little longer. So
//! whatever the message in between took, the user stops before the owner takes its memory back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use weft_plan::Time;

use super::config::MAX_LEASES;
use super::event::{LeaseId, Misbehaviour, SessionError, SessionEvent};
use super::keys::Role;
use super::wire::Control;
use crate::error::Refusal;
use crate::region::{Epoch, RegionKey};

/// The leases of one session, in both directions.
#[derive(Debug)]
pub(super) struct Leases {
    role: Role,
    next: u64,
    borrowed: BTreeMap<LeaseId, Borrowed>,
    lent: BTreeMap<LeaseId, Lent>,
    expiries: BTreeSet<(Time, LeaseId)>,
}

#[derive(Debug)]
struct Borrowed {
    /// When the answers that are still to come were asked for.
    asked: VecDeque<Time>,
    until: Option<Time>,
}

#[derive(Debug)]
struct Lent {
    region: RegionKey,
    until: Option<Time>,
}

impl Leases {
    pub(super) fn new(role: Role) -> Leases {
        Leases {
            role,
            next: 0,
            borrowed: BTreeMap::new(),
            lent: BTreeMap::new(),
            expiries: BTreeSet::new(),
        }
    }

    pub(super) fn ask(&mut self, now: Time) -> Result<LeaseId, SessionError> {
        if self.borrowed.len() >= MAX_LEASES {
            return Err(SessionError::TooManyLeases);
        }
        // The low bit tells whose lease it is, so the two ends' numbers never meet.
        let id = LeaseId(self.next << 1 | u64::from(self.role == Role::Acceptor));
        self.next += 1;
        self.borrowed.insert(
            id,
            Borrowed {
                asked: VecDeque::from([now]),
                until: None,
            },
        );
        Ok(id)
    }

    pub(super) fn renew(&mut self, id: LeaseId, now: Time) -> Result<(), SessionError> {
        let borrowed = self.borrowed.get_mut(&id).ok_or(SessionError::UnknownLease)?;
        borrowed.asked.push_back(now);
        Ok(())
    }

    /// False if there is nothing to give back.
    pub(super) fn give_back(&mut self, id: LeaseId) -> bool {
        let Some(borrowed) = self.borrowed.remove(&id) else {
            return false;
        };
        self.forget_expiry(borrowed.until, id);
        true
    }

    /// The peer asks for a lease. An answer, where it needs no deciding.
    pub(super) fn on_ask(
        &mut self,
        id: LeaseId,
        region: RegionKey,
        duration: Time,
        epoch: Epoch,
    ) -> Result<Result<SessionEvent, Control<'static>>, Misbehaviour> {
        if self.is_own(id) || self.lent.contains_key(&id) || self.lent.len() >= MAX_LEASES {
            return Err(Misbehaviour::Flood);
        }
        if region.epoch != epoch {
            let granted = Err(Refusal::StaleEpoch);
            return Ok(Err(Control::LeaseAnswer { id, granted }));
        }
        self.lent.insert(id, Lent { region, until: None });
        Ok(Ok(SessionEvent::LeaseAsked {
            id,
            region,
            duration,
            renewal: false,
        }))
    }

    /// The peer asks for more time.
    pub(super) fn on_renew(&mut self, id: LeaseId, duration: Time) -> Result<SessionEvent, Control<'static>> {
        match self.lent.get(&id) {
            Some(lent) => Ok(SessionEvent::LeaseAsked {
                id,
                region: lent.region,
                duration,
                renewal: true,
            }),
            // It has run out, or was given back, while the question was on its way.
            None => Err(Control::LeaseAnswer {
                id,
                granted: Err(Refusal::Late),
            }),
        }
    }

    /// This end's answer to the peer. False if the question is no longer open.
    pub(super) fn answer(&mut self, id: LeaseId, granted: Result<Time, Refusal>, now: Time) -> bool {
        let Some(lent) = self.lent.get_mut(&id) else {
            return false;
        };
        match granted {
            Ok(duration) => {
                let margin = Time::from_ns(duration.as_ns() / 1000).saturating_add(Time::from_ms(1));
                let until = now.saturating_add(duration).saturating_add(margin);
                // A renewal never shortens: the user may be counting on what it had.
                let until = lent.until.map_or(until, |before| before.max(until));
                let before = lent.until.replace(until);
                self.forget_expiry(before, id);
                self.expiries.insert((until, id));
            }
            Err(_) if lent.until.is_none() => {
                self.lent.remove(&id);
            }
            Err(_) => {}
        }
        true
    }

    /// The peer's answer to this end.
    pub(super) fn on_answer(&mut self, id: LeaseId, granted: Result<Time, Refusal>) -> Option<SessionEvent> {
        // A lease that was given back before the answer came is not there any more, and the answer does not matter.
        let borrowed = self.borrowed.get_mut(&id)?;
        let asked = borrowed.asked.pop_front()?;
        match granted {
            Ok(duration) => {
                let until = asked.saturating_add(duration);
                let until = borrowed.until.map_or(until, |before| before.max(until));
                let before = borrowed.until.replace(until);
                self.forget_expiry(before, id);
                self.expiries.insert((until, id));
                Some(SessionEvent::LeaseGranted { id, until })
            }
            Err(refusal) => {
                if borrowed.until.is_none() {
                    self.borrowed.remove(&id);
                }
                Some(SessionEvent::LeaseRefused { id, refusal })
            }
        }
    }

    pub(super) fn on_return(&mut self, id: LeaseId) -> Option<SessionEvent> {
        let lent = self.lent.remove(&id)?;
        self.forget_expiry(lent.until, id);
        Some(SessionEvent::LeaseReturned { id })
    }

    /// A lease that has run out.
    pub(super) fn expire(&mut self, now: Time) -> Option<SessionEvent> {
        let (until, id) = *self.expiries.first()?;
        if until > now {
            return None;
        }
        self.expiries.remove(&(until, id));
        self.borrowed.remove(&id);
        self.lent.remove(&id);
        Some(SessionEvent::LeaseExpired { id })
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.expiries.first().map(|(until, _)| *until)
    }

    /// Until when the peer may still be using something of this end's.
    pub(super) fn lent_until(&self) -> Option<Time> {
        self.lent.values().filter_map(|lent| lent.until).max()
    }

    fn is_own(&self, id: LeaseId) -> bool {
        (id.0 & 1 == 1) == (self.role == Role::Acceptor)
    }

    fn forget_expiry(&mut self, until: Option<Time>, id: LeaseId) {
        if let Some(until) = until {
            self.expiries.remove(&(until, id));
        }
    }
}
