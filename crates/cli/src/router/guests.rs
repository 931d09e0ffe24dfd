//! Clients that are connected, and the bytes of their requests: how many of both there may be, and who has to leave for whom.
//!
//! A client that has sent its whole request is waited for. One that has not, because it is idle, slow or silent, is only suffered: when
//! there is no room for the next one, the one that has said nothing for the longest time has to go. Bytes of bodies are bounded over all
//! clients together. When they are used up, the body that has not grown for the longest time makes room, if it has stood still for a moment.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::timeout;

/// A body that has grown within this time is not pushed out for another.
const STILL: Duration = Duration::from_secs(1);
/// So long a body waits for one that was pushed out to be gone.
const ROOM: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Guests {
    state: Mutex<State>,
    /// Somebody has left, or bytes were given back.
    changed: Notify,
    guests_max: usize,
    bytes_max: usize,
}

#[derive(Debug, Default)]
struct State {
    guests: HashMap<u64, Known>,
    /// Who may have to leave, by when they last said something.
    waiting: BTreeMap<u64, u64>,
    /// Whose body is coming, by when it last grew.
    growing: BTreeMap<u64, (u64, Instant)>,
    bytes: usize,
    /// How many have been asked to leave and are not gone yet.
    leaving: usize,
    /// Grows with everything that happens, and so tells what was before what.
    tick: u64,
    pushed_out: u64,
}

#[derive(Debug)]
struct Known {
    leave: Arc<Notify>,
    /// Its places in the two orders.
    waiting: Option<u64>,
    growing: Option<u64>,
    leaves: bool,
}

/// One client that is connected. It is gone when this is dropped.
#[derive(Debug)]
pub struct Guest {
    number: u64,
    leave: Arc<Notify>,
    guests: Arc<Guests>,
}

/// Bytes of a body that are accounted for, until this is dropped.
#[derive(Debug)]
pub struct Charge {
    bytes: usize,
    guests: Arc<Guests>,
}

/// There is no room for more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What is under way, for those who look after the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crowd {
    pub guests: usize,
    pub bytes: usize,
    pub pushed_out: u64,
}

impl Guests {
    pub fn new(guests_max: usize, bytes_max: usize) -> Guests {
        Guests {
            state: Mutex::default(),
            changed: Notify::new(),
            guests_max: guests_max.max(1),
            bytes_max,
        }
    }

    /// Lets a client in, once there is room. Where nobody can be asked to leave, because all wait for their answers, it waits for one of them.
    pub async fn enter(self: &Arc<Guests>) -> Guest {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on nothing that happens is missed.
            changed.as_mut().enable();
            {
                let mut state = self.lock();
                if state.guests.len() < self.guests_max {
                    return self.admit(&mut state);
                }
                state.push_out_oldest();
            }
            changed.await;
        }
    }

    /// Asks whoever has been silent for the longest time to leave, because something else than room has run out.
    pub fn make_room(&self) {
        self.lock().push_out_oldest();
    }

    pub fn crowd(&self) -> Crowd {
        let state = self.lock();
        Crowd {
            guests: state.guests.len(),
            bytes: state.bytes,
            pushed_out: state.pushed_out,
        }
    }

    /// Returns when nobody is left.
    pub async fn empty(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.lock().guests.is_empty() {
                return;
            }
            changed.await;
        }
    }

    fn admit(self: &Arc<Guests>, state: &mut State) -> Guest {
        let number = state.next_tick();
        let leave = Arc::new(Notify::new());
        let known = Known {
            leave: Arc::clone(&leave),
            waiting: Some(number),
            growing: None,
            leaves: false,
        };
        state.guests.insert(number, known);
        state.waiting.insert(number, number);
        Guest {
            number,
            leave,
            guests: Arc::clone(self),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Guest {
    /// Resolves when it has to leave.
    pub async fn asked_to_leave(&self) {
        self.leave.notified().await;
    }

    /// Its request is here: it is waited for from now on.
    pub fn is_served(&self) {
        let mut state = self.guests.lock();
        state.forget_places(self.number);
    }

    /// Nothing is done for it until it says something more.
    pub fn waits(&self) {
        let mut state = self.guests.lock();
        state.forget_places(self.number);
        let tick = state.next_tick();
        if let Some(known) = state.guests.get_mut(&self.number) {
            known.waiting = Some(tick);
            state.waiting.insert(tick, self.number);
        }
    }

    /// Accounts for more bytes of its body.
    pub async fn charge(&self, bytes: usize) -> Result<Charge, Full> {
        let wanted = async {
            loop {
                let changed = self.guests.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                {
                    let mut state = self.guests.lock();
                    if state.bytes + bytes <= self.guests.bytes_max {
                        state.bytes += bytes;
                        state.grows(self.number);
                        return Ok(Charge {
                            bytes,
                            guests: Arc::clone(&self.guests),
                        });
                    }
                    if !state.push_out_stalest(self.number) {
                        return Err(Full);
                    }
                }
                changed.await;
            }
        };
        timeout(ROOM, wanted).await.unwrap_or(Err(Full))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut state = self.guests.lock();
        state.forget_places(self.number);
        if state.guests.remove(&self.number).is_some_and(|known| known.leaves) {
            state.leaving -= 1;
        }
        drop(state);
        self.guests.changed.notify_waiters();
    }
}

impl Charge {
    /// One charge for both.
    pub fn join(&mut self, mut other: Charge) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.guests.lock().bytes -= self.bytes;
            self.guests.changed.notify_waiters();
        }
    }
}

impl State {
    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    fn forget_places(&mut self, number: u64) {
        if let Some(known) = self.guests.get_mut(&number) {
            let (waiting, growing) = (known.waiting.take(), known.growing.take());
            waiting.map(|tick| self.waiting.remove(&tick));
            growing.map(|tick| self.growing.remove(&tick));
        }
    }

    /// A body has grown. Its client is as if it had only just come.
    fn grows(&mut self, number: u64) {
        self.forget_places(number);
        let tick = self.next_tick();
        if let Some(known) = self.guests.get_mut(&number) {
            (known.waiting, known.growing) = (Some(tick), Some(tick));
            self.waiting.insert(tick, number);
            self.growing.insert(tick, (number, Instant::now()));
        }
    }

    /// One at a time: the room of one is enough for another.
    fn push_out_oldest(&mut self) {
        if self.leaving == 0
            && let Some(number) = self.waiting.values().next().copied()
        {
            self.push_out(number);
        }
    }

    /// Whether there will be room, because somebody has been asked to leave.
    fn push_out_stalest(&mut self, asking: u64) -> bool {
        let stalest = self.growing.values().find(|(number, _)| *number != asking).copied();
        if let Some((number, grew)) = stalest
            && self.leaving == 0
            && grew.elapsed() >= STILL
        {
            self.push_out(number);
        }
        self.leaving > 0
    }

    fn push_out(&mut self, number: u64) {
        // Without its places it is not asked twice.
        self.forget_places(number);
        if let Some(known) = self.guests.get_mut(&number) {
            known.leaves = true;
            known.leave.notify_one();
            self.leaving += 1;
            self.pushed_out += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_asked(guest: &Guest) -> bool {
        use std::future::Future;
        let mut asked = std::pin::pin!(guest.asked_to_leave());
        let waker = std::task::Waker::noop();
        asked
            .as_mut()
            .poll(&mut std::task::Context::from_waker(waker))
            .is_ready()
    }

    #[tokio::test]
    async fn the_oldest_that_waits_makes_room() {
        let guests = Arc::new(Guests::new(3, 0));
        let (first, second, third) = (guests.enter().await, guests.enter().await, guests.enter().await);
        first.is_served();
        // It has said something since.
        second.waits();
        let all = Arc::clone(&guests);
        let fourth = tokio::spawn(async move { all.enter().await });
        tokio::task::yield_now().await;
        while !is_asked(&third) {
            tokio::task::yield_now().await;
        }
        assert!(!is_asked(&first) && !is_asked(&second));
        assert!(!fourth.is_finished());
        drop(third);
        let fourth = fourth.await.unwrap();
        assert_eq!(guests.crowd().guests, 3);
        // Of those who wait for their answers nobody has to leave.
        second.is_served();
        fourth.is_served();
        let all = Arc::clone(&guests);
        let fifth = tokio::spawn(async move { all.enter().await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!is_asked(&first) && !is_asked(&second) && !is_asked(&fourth) && !fifth.is_finished());
        drop(first);
        fifth.await.unwrap();
        assert_eq!(guests.crowd().pushed_out, 1);
    }

    #[tokio::test]
    async fn bytes_are_bounded_over_all_and_given_back() {
        let guests = Arc::new(Guests::new(9, 100));
        let (one, other) = (guests.enter().await, guests.enter().await);
        let mut charge = one.charge(60).await.unwrap();
        charge.join(one.charge(40).await.unwrap());
        // The other body has only just grown.
        assert_eq!(other.charge(1).await.unwrap_err(), Full);
        assert_eq!(guests.crowd().bytes, 100);
        drop(charge);
        assert_eq!(guests.crowd().bytes, 0);
        assert!(other.charge(100).await.is_ok());
    }

    #[tokio::test]
    async fn a_body_that_stands_still_makes_room_for_one_that_grows() {
        let guests = Arc::new(Guests::new(9, 100));
        let (still, other) = (guests.enter().await, guests.enter().await);
        let charge = still.charge(100).await.unwrap();
        tokio::time::sleep(STILL).await;
        let leaving = async {
            still.asked_to_leave().await;
            drop(charge);
        };
        let (charged, ()) = tokio::join!(other.charge(80), leaving);
        assert!(charged.is_ok());
        // One whose request is complete is not asked.
        let served = guests.enter().await;
        let _kept = served.charge(20).await.unwrap();
        served.is_served();
        drop(charged);
        let _charge = other.charge(80).await.unwrap();
        tokio::time::sleep(STILL).await;
        assert_eq!(guests.enter().await.charge(90).await.unwrap_err(), Full);
        assert!(!is_asked(&served));
    }
}
