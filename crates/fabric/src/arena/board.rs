//! What the ranks of an arena tell each other when a call does not go well.

use weft_plan::Rank;
use weft_protocol::group::{Abort, Board, Status, Trouble, Waiting};

use super::{Arena, NOWHERE};
use crate::sync::{self, Ordering, fence};

/// The detail of a status: whether the call has ended, the step, and for whom the rank waits.
pub(super) const ENDED: u64 = 1 << 63;
pub(super) const UNDER_WAY: u64 = NOBODY;
const NOBODY: u64 = (NOWHERE as u64 >> 1) << 32;

/// A trouble that has been found stays.
#[derive(Debug, Default)]
pub(super) struct Sticky(Option<Trouble>);

impl Arena {
    /// Whether a neighbour has told everybody that a call has failed. It costs a look at a word of each.
    pub fn check_told(&mut self) -> Result<(), Trouble> {
        if let Some(trouble) = &self.trouble.0 {
            return Err(trouble.clone());
        }
        let segments = self.neighbours.iter().flatten().map(|n| &n.segment);
        let told = segments.chain([&self.own]).filter(|s| s.has_abort());
        // Of several the first, and whoever looks finds the same one.
        let first = told.filter_map(|s| s.abort()).min_by_key(|(at, abort)| (*at, abort.by));
        let Some((_, abort)) = first else { return Ok(()) };
        let trouble = Trouble::Aborted(Box::new(abort));
        self.trouble.0 = Some(trouble.clone());
        Err(trouble)
    }
}

impl Board for Arena {
    fn publish(&mut self, waiting: Waiting) {
        let peer = waiting.peer.map_or(NOBODY, |rank| u64::from(rank.0) << 32 & NOBODY);
        self.own.set_status(&self.call, peer | u64::from(waiting.step), false);
    }

    fn status(&mut self, of: Rank) -> Option<Status> {
        let place = *self.places.get(of.0 as usize)?;
        let segment = match self.neighbours.get(place as usize)? {
            Some(neighbour) => &neighbour.segment,
            None => &self.own,
        };
        let (call, detail, recent) = segment.status()?;
        let peer = detail & NOBODY;
        Some(Status {
            call,
            ended: detail & ENDED != 0,
            waiting: Waiting {
                step: detail as u32,
                peer: (peer != NOBODY).then_some(Rank((peer >> 32) as u32)),
            },
            recent,
        })
    }

    fn pulse(&mut self, of: Rank) -> u64 {
        let place = self.places.get(of.0 as usize).map(|place| *place as usize);
        let neighbour = place.and_then(|place| self.neighbours.get(place)?.as_ref());
        neighbour.map_or(0, |neighbour| neighbour.segment.pulse())
    }

    fn abort(&mut self, abort: &Abort) {
        if self.own.has_told() {
            return;
        }
        self.own.set_abort(abort, sync::host_time_ns());
        self.own.tell_news();
        fence(Ordering::SeqCst);
        sync::wake(self.own.news());
    }
}
