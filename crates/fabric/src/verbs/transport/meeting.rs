//! How paths begin, out of letters and errands, and how the last letters of a rail go out.

use weft_plan::Time;
use weft_protocol::{Loss, PathId};
use weft_sys::verbs as sys;

use super::super::INFLIGHT_OPS_MAX;
use super::super::address::Doorstep;
use super::super::buffers::{Buffers, Landing};
use super::super::introduction::{Letter, QueueEnd};
use super::super::message::PACKET_BYTES;
use super::super::number::{self, Completed};
use super::super::options::VerbsError;
use super::super::path::{Parts, Path, STAGED_MAX};
use super::super::queue::QueuePair;
use super::super::setup::{Errand, Outcome, Reach};
use super::{Verbs, random, system};

/// Paths that peers have begun to open; one more pushes the oldest of them out.
const HALF_OPEN_MAX: usize = 64;
/// Errands under way beyond which no further introduction is taken.
const ERRANDS_MAX: usize = 16;
/// How soon a datagram queue pair that has failed again is started again.
const REVIVE_EVERY: Time = Time::from_ms(100);
/// How long the end of a rail waits for its last words to go out.
const GOODBYE_MAX: Time = Time::from_ms(20);

impl Verbs {
    pub(super) fn on_letter(&mut self, letter: Letter, from: Doorstep, now: Time) {
        match letter {
            Letter::Introduction { token, end, .. } => self.on_introduction(token, from, &end, now),
            Letter::Answer { token, end } => {
                if let Some(id) = self.by_token(token, true) {
                    self.with_path(id, now, |path, world| path.on_answer(&end, world));
                }
            }
            Letter::NoRoom { token } => {
                if let Some(id) = self.by_token(token, true) {
                    self.with_path(id, now, |path, world| path.on_no_room(world));
                }
            }
            Letter::Goodbye { token } => {
                let ends = [self.by_token(token, true), self.by_token(token, false)];
                for id in ends.into_iter().flatten() {
                    self.with_path(id, now, |path, world| path.on_goodbye(world));
                }
            }
        }
    }

    fn by_token(&self, token: u128, opened_here: bool) -> Option<PathId> {
        let found = self
            .paths
            .iter()
            .find(|path| path.token == token && path.opened_here == opened_here);
        found.map(|path| path.id)
    }

    fn on_introduction(&mut self, token: u128, from: Doorstep, end: &QueueEnd, now: Time) {
        if let Some(id) = self.by_token(token, false) {
            self.with_path(id, now, |path, world| path.answer(world));
            return;
        }
        // Who cannot be reached must not keep those waiting that can.
        if self.introductions_left == 0 || self.setup.under_way() >= ERRANDS_MAX {
            return;
        }
        self.introductions_left -= 1;
        let half_open = || self.paths.iter().filter(|path| path.is_half_open());
        if half_open().count() >= HALF_OPEN_MAX
            && let Some(oldest) = half_open().next().map(|path| path.id)
        {
            self.with_path(oldest, now, |path, world| path.lose(Loss::Unreachable, world));
        }
        match self.parts(token, from.clone()) {
            Ok(parts) => {
                let number = (parts.pair.number(), parts.id);
                let (_, world, _) = self.split(now);
                let path = Path::accepting(parts, end, &world);
                self.insert(path, number, now);
            }
            Err(_) => self.setup.send(Errand::Reach(Reach {
                path: None,
                peer: from,
                traffic_class: self.options.traffic_class,
                service_level: self.options.service_level,
                route: true,
                connect: None,
                letter: Some(Letter::NoRoom { token }),
            })),
        }
    }

    /// Goes on with what has been set up, or taken down. True if anything was.
    pub(super) fn hear_of_errands(&mut self, now: Time) -> bool {
        let mut any = false;
        while let Some(outcome) = self.setup.next() {
            any = true;
            match outcome {
                Outcome::Reached(mut reached) => {
                    if let (Some((letter, to)), Some(route)) = (reached.letter.take(), &reached.route) {
                        self.datagrams.send(&letter, &to, route);
                    }
                    if let Some(id) = reached.path {
                        self.with_path(id, now, |path, world| path.on_reached(reached, world));
                    }
                }
                Outcome::Destroyed { path } => {
                    self.with_path(path, now, |path, world| path.on_destroyed(world));
                }
            }
        }
        any
    }

    /// Starts the queue pair for letters again after it has failed. Without it no path can be opened.
    pub(super) fn revive_datagrams(&mut self, now: Time) {
        self.revive_at = now.saturating_add(REVIVE_EVERY);
        let broken = Loss::System(libc::EIO);
        match self.datagrams.revive(self.rail.port) {
            Ok(()) => {
                self.counters.datagram_revivals += 1;
                self.down.take_if(|loss| *loss == broken);
            }
            Err(_) => {
                self.down.get_or_insert(broken);
            }
        }
    }

    pub(super) fn insert(&mut self, path: Path, (number, id): (u32, PathId), now: Time) {
        self.by_number.insert(number, id);
        self.last_number = None;
        self.paths.push(path);
        self.with_path(id, now, |_, _| ());
    }

    /// What a new path is made of.
    pub(super) fn parts(&mut self, token: u128, peer: Doorstep) -> Result<Parts, Loss> {
        if self.paths.len() >= self.paths_max || self.next_path >= number::PATHS_MAX {
            return Err(Loss::System(libc::ENOBUFS));
        }
        let short = |error: VerbsError| match error {
            VerbsError::System { source, .. } => system(&source),
            _ => Loss::System(libc::ENOMEM),
        };
        let staging = Buffers::new(STAGED_MAX, PACKET_BYTES, &mut self.registrations).map_err(short)?;
        let landing = self
            .device_atomics
            .then(|| Landing::new(INFLIGHT_OPS_MAX, &mut self.registrations))
            .transpose()
            .map_err(short)?;
        let pair = QueuePair::new(&self.domain, &self.completions, Some(&self.receives), self.queue_size)
            .and_then(|pair| pair.prepare(self.rail.port).map(|()| pair))
            .map_err(|error| system(&error))?;
        let psn = random().map_err(|error| system(&error))? as u32 & 0xff_ffff;
        self.pool
            .add_path(&self.receives, &mut self.registrations, number::receive)
            .map_err(short)?;
        let id = PathId(self.next_path);
        self.next_path += 1;
        Ok(Parts {
            id,
            token,
            peer,
            pair,
            staging,
            landing,
            psn,
        })
    }
}

impl Drop for Verbs {
    /// Tells the peers, as far as that is possible at once.
    fn drop(&mut self) {
        for mut path in std::mem::take(&mut self.paths) {
            let letter = Letter::Goodbye { token: path.token };
            path.destroy();
            if let Some(route) = &path.route {
                self.datagrams.send(&letter, &path.peer, route);
            }
        }
        let until = self.clock.now().saturating_add(GOODBYE_MAX);
        let mut taken = [sys::ibv_wc::default(); 16];
        while self.datagrams.is_sending() && self.clock.now() < until {
            let count = self.completions.poll(&mut taken);
            for completion in &taken[..count] {
                if let Completed::DatagramSent(place, life) = number::completed(completion.wr_id) {
                    self.datagrams.sent(place, life, completion);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use weft_protocol::{Epoch, Signal, Transport};

    use super::super::super::rail::{RailOptions, rails};
    use super::*;
    use crate::Clock;
    use crate::verbs::VerbsOptions;

    #[test]
    #[ignore = "needs an RDMA device"]
    fn a_datagram_queue_pair_that_has_failed_is_started_again_under_its_number() {
        let rail = rails(&RailOptions::default()).expect("an RDMA device").remove(0);
        let clock = Clock::start();
        let start = |epoch| {
            let started = Verbs::start(VerbsOptions::default(), rail.clone(), Epoch(epoch), clock);
            started.expect("the rail starts")
        };
        let (mut near, mut far) = (start(1), start(2));
        let address = far.capabilities().address.clone();
        for revivals in 1..=2 {
            near.datagrams.break_down();
            far.datagrams.break_down();
            let path = near.open(&address, clock.now()).expect("open starts");
            let mut said = Vec::new();
            while said.is_empty() {
                near.poll(clock.now(), &mut said);
                far.poll(clock.now(), &mut Vec::new());
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
            assert_eq!(said, [Signal::Opened { path }]);
            let counted = (near.counters().datagram_revivals, far.counters().datagram_revivals);
            assert_eq!(counted, (revivals, revivals));
        }
    }
}
