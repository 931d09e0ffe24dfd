//! One transfer: what of it is cut, open, done, or to be done again.

use std::collections::BTreeMap;

use weft_plan::{Place, Time};

use super::cut::{PartLimits, cut};
use super::error::{LegRange, TransferError};
use super::lane::{Between, Next};
use super::{Carried, LaneId, Request, Summary};
use crate::error::Failure;
use crate::leg::Direction;

/// Bytes of one leg that travel together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub leg: u32,
    pub start: u64,
    pub end: u64,
    /// Its number within the transfer, by which the far end counts it.
    pub index: u32,
    pub attempts: u8,
    pub mismatches: u8,
}

impl Part {
    pub fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// A lost write that is not repeated yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hanging {
    pub lane: LaneId,
    pub transport: &'static str,
    pub part: Part,
    /// The far end may still act on it. Otherwise it waits only for word of the transfer's notification.
    pub may_land: bool,
}

/// What the peer may have been told of a tagged write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// Nothing: [`TransferEvent::Cut`](super::TransferEvent::Cut) is still to come.
    Held,
    /// That it is notified when all parts are there. Each of them was posted once.
    Told,
    /// The same, and then that it is not. Which of the two it acted on is not known.
    Recalled,
    /// Its application has been notified, so every part has landed and none may land again.
    Delivered,
}

/// What parts to make: the lane's limits, and the lane's share, so that all lanes of the class finish together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure {
    pub limits: PartLimits,
    /// Of the class's speed; one where there is no other lane.
    pub share: f64,
    pub min_part: u64,
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub request: Request,
    pub started: Time,
    pub bytes_total: u64,
    pub bytes_done: u64,
    pub parts: u32,
    pub retries: u32,
    /// Operations handed out and not completed.
    pub open: u32,
    /// Whether it stands in its peer's queue.
    pub queued: bool,
    /// The deadline has passed: what hangs on a lost lane hangs no more.
    pub overdue: bool,
    /// Why it will end, once nothing of it is open, and over which transport that came.
    pub failure: Option<(Failure, &'static str)>,
    pub setback: Option<Failure>,
    pub notice: Notice,
    /// A part that may have landed was carried again: the notification waits until nothing is under way.
    pub repeated: bool,
    pub carried: Carried,
    /// Parts to be carried again, or, in a transfer that fails, parts that would have been.
    pub redo: Vec<Part>,
    /// Lost writes that it is too early to repeat, or to give up.
    pub hanging: Vec<Hanging>,
    /// Transports that cannot reach this memory.
    pub avoid: Vec<&'static str>,
    /// None where nothing is to be committed.
    commits: Option<Box<Commits>>,
    /// Where the next part begins.
    leg: usize,
    at: u64,
    uncut: u64,
}

/// Far regions that are to be committed, and how far that has come.
#[derive(Debug, Default)]
struct Commits {
    regions: Vec<FarRegion>,
    /// Which of them each leg goes to.
    of_leg: Vec<usize>,
    posted: usize,
    done: usize,
    attempts: u8,
}

/// A far region that a transfer writes to: one of the legs that go there, and how many parts do.
#[derive(Clone, Copy, Debug)]
struct FarRegion {
    leg: usize,
    parts: u32,
}

impl Transfer {
    pub fn new(mut request: Request, bytes_total: u64, now: Time) -> Transfer {
        // Only writes arrive at the far end.
        if request.direction == Direction::Read {
            request.tag = None;
        }
        let mut transfer = Transfer {
            request,
            started: now,
            bytes_total,
            bytes_done: 0,
            parts: 0,
            retries: 0,
            open: 0,
            queued: false,
            overdue: false,
            failure: None,
            setback: None,
            notice: Notice::Held,
            repeated: false,
            carried: Carried::default(),
            redo: Vec::new(),
            hanging: Vec::new(),
            avoid: Vec::new(),
            commits: None,
            leg: 0,
            at: 0,
            uncut: bytes_total,
        };
        transfer.skip_finished_legs();
        if transfer.request.commit && transfer.request.tag.is_some() {
            transfer.commits = Some(Box::new(Commits::of(&transfer.request)));
        }
        transfer
    }

    pub fn has_parts_to_post(&self) -> bool {
        self.failure.is_none() && (self.uncut > 0 || !self.redo.is_empty() || self.commit_due().is_some())
    }

    /// What it comes after has not come about.
    pub fn is_early(&self) -> bool {
        self.failure.is_none() && self.request.after.as_ref().is_some_and(|after| !after.is_ready())
    }

    /// The leg whose far region is to be committed now: after all parts have landed, one region after the other.
    pub fn commit_due(&self) -> Option<usize> {
        let commits = self.commits.as_ref()?;
        let landed = self.open == 0 && self.bytes_done == self.bytes_total;
        let due = commits.regions.get(commits.posted);
        due.map(|region| region.leg).filter(|_| landed)
    }

    /// How many parts went to the far region of a leg, which is to be committed.
    pub fn parts_to_commit(&self, leg: usize) -> u32 {
        let commits = self.commits.as_ref();
        let region = commits.and_then(|commits| Some(commits.regions[*commits.of_leg.get(leg)?]));
        region.map_or(0, |region| region.parts)
    }

    pub fn on_commit_posted(&mut self) {
        self.commits().posted += 1;
    }

    /// The commit that was posted was not taken.
    pub fn on_commit_unposted(&mut self) {
        self.commits().posted -= 1;
    }

    pub fn on_committed(&mut self) {
        self.commits().done += 1;
    }

    /// A commit was lost, and asking once more is harmless. Tells how often that has happened.
    pub fn on_commit_lost(&mut self) -> u8 {
        let commits = self.commits();
        commits.posted -= 1;
        commits.attempts += 1;
        commits.attempts
    }

    /// Only where something is to be committed.
    fn commits(&mut self) -> &mut Commits {
        self.commits.get_or_insert_default()
    }

    /// All bytes are in place, and lasting where that was asked for.
    pub fn has_succeeded(&self) -> bool {
        let committed = |commits: &Commits| commits.done == commits.regions.len();
        self.bytes_done == self.bytes_total && self.commits.as_deref().is_none_or(committed)
    }

    /// Its parts are counted, but no notification waits for them.
    pub fn is_unannounced(&self) -> bool {
        self.request.commit || self.request.arrives.is_some()
    }

    pub fn all_cut(&self) -> bool {
        self.uncut == 0
    }

    pub fn is_over(&self) -> bool {
        let may_land = || self.hanging.iter().any(|lost| lost.may_land);
        self.open == 0 && (self.has_succeeded() || (self.failure.is_some() && !may_land()))
    }

    /// Whether the peer's application is notified, or was, if all that seems lost has landed.
    pub fn may_be_delivered(&self) -> bool {
        matches!(self.notice, Notice::Told | Notice::Recalled)
    }

    /// Whether parts were lost and nobody knows yet if the peer's application has been notified.
    pub fn is_undecided(&self) -> bool {
        self.notice == Notice::Recalled && self.failure.is_none()
    }

    /// A part is where it belongs.
    pub fn on_part_done(&mut self, part: &Part, transport: &'static str) {
        self.bytes_done += part.len();
        self.carried.add(transport, part.len());
    }

    /// Gives up waiting for what can no longer land, and returns it.
    pub fn unhang(&mut self) -> Vec<Part> {
        let freed = self.hanging.extract_if(.., |lost| !lost.may_land);
        freed.map(|lost| lost.part).collect()
    }

    /// What [`next_part`](Transfer::next_part) will be of, where there is one.
    pub fn next(&self) -> Next {
        let (leg, bytes) = match self.redo.last() {
            Some(part) => (part.leg as usize, part.len()),
            None => (self.commit_due().unwrap_or(self.leg), self.uncut),
        };
        let Some(leg) = self.request.legs.get(leg) else {
            return Next::NOTHING;
        };
        let near = leg.local().place;
        let numa = match near {
            Place::Dram { numa } => numa,
            _ => None,
        };
        let between = Between {
            near: near.kind(),
            far: leg.remote().place.kind(),
        };
        let align = leg.align();
        Next {
            between,
            align,
            numa,
            bytes,
        }
    }

    /// What a part is of.
    pub fn kinds(&self, part: &Part) -> Next {
        let leg = &self.request.legs[part.leg as usize];
        let between = Between {
            near: leg.local().place.kind(),
            far: leg.remote().place.kind(),
        };
        Next {
            between,
            align: leg.align(),
            ..Next::NOTHING
        }
    }

    /// The next part to post: one that failed before, else a new one.
    pub fn next_part(&mut self, measure: Measure) -> Option<Part> {
        match self.redo.pop() {
            Some(part) => Some(self.fit(part, measure.limits)),
            None if self.uncut == 0 => None,
            None => Some(self.cut_part(measure)),
        }
    }

    pub fn summary(&self, now: Time) -> Summary {
        Summary {
            bytes: self.bytes_total,
            parts: self.parts,
            retries: self.retries,
            started: self.started,
            ended: now,
            carried: self.carried,
        }
    }

    pub fn error(&self, cause: Failure, transport: &'static str) -> TransferError {
        let undone = self.undone();
        TransferError {
            peer: self.request.peer,
            cause,
            setback: self.setback.filter(|setback| *setback != cause),
            transport,
            bytes_done: self.bytes_done,
            bytes_total: self.bytes_total,
            done: self.all_but(&undone),
            undone,
        }
    }

    fn cut_part(&mut self, measure: Measure) -> Part {
        let mut limits = measure.limits;
        if measure.share < 1.0 {
            // The last bytes are cut ever finer, so that all lanes finish together.
            let share = ((self.uncut as f64 * measure.share) as u64).next_multiple_of(4096);
            limits.max_bytes = limits.max_bytes.min(share.max(measure.min_part));
        }
        let end = cut(&self.request.legs[self.leg], self.at, limits);
        let part = Part {
            leg: self.leg as u32,
            start: self.at,
            end,
            index: self.parts,
            attempts: 0,
            mismatches: 0,
        };
        self.parts += 1;
        if let Some(commits) = &mut self.commits
            && let Some(region) = commits.of_leg.get(self.leg)
        {
            commits.regions[*region].parts += 1;
        }
        self.uncut -= part.len();
        self.at = end;
        self.skip_finished_legs();
        part
    }

    /// A part that goes over another lane than it was cut for is cut again, unless the far end counts it as it is.
    fn fit(&mut self, part: Part, limits: PartLimits) -> Part {
        if self.request.tag.is_some() {
            return part;
        }
        let end = cut(&self.request.legs[part.leg as usize], part.start, limits).min(part.end);
        if end < part.end {
            self.redo.push(Part { start: end, ..part });
            self.parts += 1;
        }
        Part { end, ..part }
    }

    fn skip_finished_legs(&mut self) {
        while self
            .request
            .legs
            .get(self.leg)
            .is_some_and(|leg| self.at == leg.bytes())
        {
            self.leg += 1;
            self.at = 0;
        }
    }

    fn undone(&self) -> Vec<LegRange> {
        let lost = self.hanging.iter().map(|lost| &lost.part);
        let mut ranges: Vec<LegRange> = self
            .redo
            .iter()
            .chain(lost)
            .map(|part| (part.leg as usize, part.start..part.end))
            .collect();
        let mut at = self.at;
        for (i, leg) in self.request.legs.iter().enumerate().skip(self.leg) {
            if at < leg.bytes() {
                ranges.push((i, at..leg.bytes()));
            }
            at = 0;
        }
        ranges.sort_by_key(|(leg, range)| (*leg, range.start));
        let mut merged: Vec<LegRange> = Vec::with_capacity(ranges.len());
        for (leg, range) in ranges {
            match merged.last_mut() {
                Some((last, before)) if *last == leg && before.end == range.start => before.end = range.end,
                _ => merged.push((leg, range)),
            }
        }
        merged
    }

    fn all_but(&self, undone: &[LegRange]) -> Vec<LegRange> {
        let mut done = Vec::new();
        let mut undone = undone.iter().peekable();
        for (i, leg) in self.request.legs.iter().enumerate() {
            let mut at = 0;
            while let Some((_, range)) = undone.next_if(|(undone_leg, _)| *undone_leg == i) {
                if at < range.start {
                    done.push((i, at..range.start));
                }
                at = range.end;
            }
            if at < leg.bytes() {
                done.push((i, at..leg.bytes()));
            }
        }
        done
    }
}

impl Commits {
    /// What is to be committed after a request: each far region that it writes to.
    fn of(request: &Request) -> Commits {
        let mut commits = Commits::default();
        let mut known = BTreeMap::new();
        for (leg, far) in request.legs.iter().map(|leg| leg.remote().key).enumerate() {
            let region = *known.entry((far.epoch, far.slot)).or_insert_with(|| {
                commits.regions.push(FarRegion { leg, parts: 0 });
                commits.regions.len() - 1
            });
            commits.of_leg.push(region);
        }
        commits
    }
}
