//! The door: who comes in, how fast, and how many may be inside before anybody knows them.
//!
//! Connecting costs a stranger nothing, and this end some microseconds and a descriptor. So callers are let in at a pace, a few at a time, and
//! only so many connections may be here that no session vouches for. When there are too many, the host that has the most of them
//! loses its oldest: a crowd pushes out itself.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use weft_plan::Time;
use weft_protocol::PathId;

use super::connection::Connection;
use super::socket::{self, Socket};
use crate::crowd;

/// Callers let in before the paths have their turn.
const CALLERS_PER_TURN: u64 = 16;
/// Callers that may come at once after a pause.
const BURST: u64 = 512;
/// Time for one caller, in the long run: a fifth of it is what one costs.
const INTERVAL: Time = Time::from_us(250);
/// The same where each may ask for the arithmetic of a TLS handshake.
const INTERVAL_TLS: Time = Time::from_ms(4);
/// How long the listener rests when there are no descriptors left.
const NO_DESCRIPTOR_REST: Time = Time::from_ms(100);
/// Connections that nobody vouches for, at most; fewer where a process may have few descriptors.
const GUESTS_MAX: usize = 256;

#[derive(Debug)]
pub(super) struct Door {
    listener: Socket,
    pace: Pace,
    /// Set while the listener is not listened to.
    rests_until: Option<Time>,
    /// Connections that have not said which path they belong to, by serial number.
    strangers: BTreeMap<u64, Stranger>,
    /// All connections that nobody vouches for, the strangers among them, oldest first.
    guests: BTreeMap<u64, Guest>,
    guests_max: usize,
    next: u64,
}

/// An accepted connection that has not said which path it belongs to.
#[derive(Debug)]
pub(super) struct Stranger {
    pub(super) connection: Connection,
    pub(super) serial: u64,
    until: Time,
}

#[derive(Debug)]
struct Guest {
    from: IpAddr,
    /// Known once it has said so.
    path: Option<PathId>,
}

/// Who knocks.
#[derive(Debug)]
pub(super) enum Knock {
    Caller(Socket, IpAddr),
    /// Nobody for now, or nobody who is let in now.
    Nobody,
    /// So many that the rest must wait for the next turn.
    Enough,
}

impl Door {
    pub(super) fn new(listener: Socket, encrypts: bool) -> Door {
        let share = socket::descriptors_max().map_or(GUESTS_MAX, |max| max / 4);
        Door {
            listener,
            pace: Pace::new(if encrypts { INTERVAL_TLS } else { INTERVAL }),
            rests_until: None,
            strangers: BTreeMap::new(),
            guests: BTreeMap::new(),
            guests_max: share.clamp(8, GUESTS_MAX),
            next: 0,
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The next caller; `taken` have been let in this turn. Where the answer is nobody and [`Door::rests_until`] is set, the listener is not to be
    /// watched until then, because it would only wake us for nothing.
    pub(super) fn knock(&mut self, taken: u64, now: Time) -> Knock {
        if taken >= CALLERS_PER_TURN {
            return Knock::Enough;
        }
        if let Err(until) = self.pace.admit(now) {
            self.rests_until = Some(until);
            return Knock::Nobody;
        }
        loop {
            match socket::accept(&self.listener) {
                Ok((socket, from)) => return Knock::Caller(socket, from),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.pace.take_back();
                    return Knock::Nobody;
                }
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
                    ) =>
                {
                    self.rests_until = Some(now.saturating_add(NO_DESCRIPTOR_REST));
                    return Knock::Nobody;
                }
                // The connection failed before it was accepted; the next one may be fine.
                Err(_) => {}
            }
        }
    }

    pub(super) fn rests_until(&self) -> Option<Time> {
        self.rests_until
    }

    /// Whether the listener has rested long enough.
    pub(super) fn wakes(&mut self, now: Time) -> bool {
        self.rests_until.take_if(|until| *until <= now).is_some()
    }

    /// The listener could not be watched again: later, then.
    pub(super) fn rest_on(&mut self, now: Time) {
        self.rests_until = Some(now.saturating_add(NO_DESCRIPTOR_REST));
    }

    /// The number of the next connection that is let in.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn let_in(&mut self, serial: u64, connection: Connection, from: IpAddr, until: Time) {
        self.guests.insert(serial, Guest { from, path: None });
        let stranger = Stranger {
            connection,
            serial,
            until,
        };
        self.strangers.insert(serial, stranger);
    }

    /// Hands a stranger out to be listened to. It is put back, or sent away, or has a path.
    pub(super) fn call_up(&mut self, serial: u64) -> Option<Stranger> {
        self.strangers.remove(&serial)
    }

    /// It has not said all yet.
    pub(super) fn put_back(&mut self, stranger: Stranger) {
        self.strangers.insert(stranger.serial, stranger);
    }

    pub(super) fn send_away(&mut self, serial: u64) {
        self.strangers.remove(&serial);
        self.guests.remove(&serial);
    }

    /// A stranger has said which path it belongs to.
    pub(super) fn on_path(&mut self, serial: u64, path: PathId) {
        if let Some(guest) = self.guests.get_mut(&serial) {
            guest.path = Some(path);
        }
    }

    /// The connections of a path are known, or gone.
    pub(super) fn forget(&mut self, path: PathId) {
        self.guests.retain(|_, guest| guest.path != Some(path));
    }

    /// Where too many are inside whom nobody knows, one has to go: a stranger goes at once; of another, the path is returned.
    pub(super) fn thin_out(&mut self) -> Option<PathId> {
        if self.guests.len() <= self.guests_max {
            return None;
        }
        let nth = crowd::who_goes(self.guests.values().map(|guest| guest.from))?;
        let (&serial, guest) = self.guests.iter().nth(nth)?;
        let path = guest.path;
        if path.is_none() {
            self.send_away(serial);
        }
        path
    }

    /// Sends away whoever has said nothing for too long.
    pub(super) fn expire(&mut self, now: Time) {
        let guests = &mut self.guests;
        self.strangers.retain(|serial, stranger| {
            let stays = stranger.until > now;
            if !stays {
                guests.remove(serial);
            }
            stays
        });
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let strangers = self.strangers.values().map(|stranger| stranger.until);
        strangers.chain(self.rests_until)
    }
}

/// Lets a burst pass, and after that one in each interval.
#[derive(Debug)]
struct Pace {
    interval: Time,
    /// When everybody who has passed would have, at one in each interval.
    due: Time,
}

impl Pace {
    fn new(interval: Time) -> Pace {
        Pace {
            interval,
            due: Time::ZERO,
        }
    }

    /// Lets one pass, or tells when the next few may.
    fn admit(&mut self, now: Time) -> Result<(), Time> {
        let earliest = self.due.saturating_sub(self.interval.saturating_mul(BURST));
        if earliest > now {
            return Err(earliest.saturating_add(self.interval.saturating_mul(CALLERS_PER_TURN - 1)));
        }
        self.due = self.due.max(now).saturating_add(self.interval);
        Ok(())
    }

    /// Nobody was there to pass.
    fn take_back(&mut self) {
        self.due = self.due.saturating_sub(self.interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_an_interval() {
        let mut pace = Pace::new(INTERVAL);
        let now = Time::from_secs(1);
        let burst = (0..10_000).take_while(|_| pace.admit(now).is_ok()).count();
        assert_eq!(burst as u64, BURST + 1);
        let until = pace.admit(now).unwrap_err();
        assert!(until > now && until < now.saturating_add(Time::from_ms(10)));
        let later = (0..10_000).take_while(|_| pace.admit(until).is_ok()).count();
        assert_eq!(later as u64, CALLERS_PER_TURN);
        // In a second of trying, no more than in a second of the pace.
        let tried = (0..1_000_000).filter(|us| pace.admit(until.saturating_add(Time::from_us(*us))).is_ok());
        assert!(tried.count() <= 4_001);
    }
}
