//! Blocks come from the members that have them: from the cheapest first, and where that one has it no more, is silent or has something else, from the next.

use std::collections::BTreeMap;

use weft_plan::Time;

use super::super::BlockId;
use super::super::shelf::format::bound_sum;
use super::shard::{Replica, Replicas, mix};
use super::wire::{LASTS_MAX, Lent, READ_MAX};
use super::{Act, Directory, Event, Message};
use crate::transfer::PeerId;

/// Copies that were wrong and are not asked for again for so long: by then their holder has looked at them.
const BAD_MAX: usize = 4096;
const BAD_FOR: Time = Time::from_secs(5);

/// Names a fetch under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(pub u64);

/// Names what one member is asked to keep while it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoanId(pub u64);

/// A block to fetch: where to in the caller's memory, and how much room there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub id: BlockId,
    pub offset: u64,
    pub room: u32,
}

/// What has landed: which block of the fetch, where, and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub nth: usize,
    pub offset: u64,
    pub length: u32,
}

/// A block that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    pub from: PeerId,
    /// In which tier its holder had it.
    pub tier: u8,
    pub parts: u8,
    pub length: u32,
}

/// Why a block has not come: the last reason of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Missed {
    #[error("no other member is known to have it")]
    Nowhere,
    #[error("its holder has it no more")]
    Refused,
    #[error("it did not come in time")]
    Late,
    #[error("what came was not what was put")]
    Wrong,
    #[error("the transfer of it failed")]
    Failed,
}

/// Blocks that are wanted together.
#[derive(Debug)]
pub(super) struct Fetch {
    pieces: Vec<Sought>,
    pub(super) deadline: Time,
    left: usize,
}

#[derive(Debug)]
struct Sought {
    wanted: Wanted,
    /// Best last.
    candidates: Vec<Replica>,
    why: Missed,
    over: bool,
}

/// What one member is asked to keep, and what has become of it.
#[derive(Debug)]
pub(super) struct Loan {
    fetch: FetchId,
    peer: PeerId,
    nths: Vec<usize>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Asked {
        until: Time,
    },
    /// With what was lent, by the block of the fetch.
    Moving(BTreeMap<usize, Lent>),
    Landed(BTreeMap<usize, Lent>),
}

impl Loan {
    pub(super) fn until(&self) -> Option<Time> {
        match self.stage {
            Stage::Asked { until } => Some(until),
            _ => None,
        }
    }
}

impl Directory {
    /// Fetches blocks that are not here. Every block [ends](Event::Fetched) once: by the deadline, or as soon after it as nobody writes to its memory.
    pub fn fetch(&mut self, wanted: &[Wanted], deadline: Time, now: Time) -> FetchId {
        let fetch = FetchId(self.number());
        let sought = |wanted: &Wanted| Sought {
            wanted: *wanted,
            candidates: Vec::new(),
            why: Missed::Nowhere,
            over: false,
        };
        let known = Fetch {
            pieces: wanted.iter().map(sought).collect(),
            deadline,
            left: wanted.len(),
        };
        if wanted.is_empty() {
            return fetch;
        }
        self.fetches.insert(fetch.0, known);
        let ids = wanted.iter().map(|wanted| wanted.id).collect();
        let question = self.question(ids, Some(fetch), now);
        self.finish_question(question, now);
        fetch
    }

    /// Whether some block of it has not ended.
    pub fn is_fetching(&self, fetch: FetchId) -> bool {
        self.fetches.contains_key(&fetch.0)
    }

    /// It is known who has the blocks of a fetch.
    pub(super) fn on_placed(&mut self, fetch: FetchId, found: Vec<Replicas>, now: Time) {
        let mut nths = Vec::new();
        for (nth, replicas) in found.iter().enumerate() {
            let Some(known) = self.fetches.get(&fetch.0) else {
                return;
            };
            let id = known.pieces[nth].wanted.id;
            let mut candidates: Vec<(_, Replica)> = Vec::new();
            for one in replicas.as_slice() {
                let member = self.lives.get(&one.member).and_then(|peer| self.members.get(peer));
                let Some(member) = member.filter(|member| !member.silent) else {
                    continue;
                };
                if self
                    .bad
                    .get(&(member.seat.digest, id))
                    .is_some_and(|until| now < *until)
                {
                    continue;
                }
                // Memory before files, near before far; of equals every reader has another first.
                let tier = one.tiers.trailing_zeros();
                let spread = mix(member.seat.digest ^ self.own.digest ^ id.other_hash());
                candidates.push(((tier, member.distance, spread), *one));
            }
            candidates.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
            if let Some(known) = self.fetches.get_mut(&fetch.0) {
                let candidates = candidates.into_iter().map(|(_, one)| one);
                known.pieces[nth].candidates = candidates.collect();
                nths.push(nth);
            }
        }
        self.read_next(fetch, nths, now);
    }

    /// Asks the next holder of each of these, or gives up where there is none.
    fn read_next(&mut self, fetch: FetchId, nths: Vec<usize>, now: Time) {
        let mut to_read: BTreeMap<PeerId, Vec<usize>> = BTreeMap::new();
        for nth in nths {
            let Some(known) = self.fetches.get_mut(&fetch.0) else {
                return;
            };
            let (late, sought) = (known.deadline <= now, &mut known.pieces[nth]);
            if sought.over {
                continue;
            }
            let mut next = None;
            while !late && next.is_none() {
                let Some(one) = sought.candidates.pop() else { break };
                let peer = self.lives.get(&one.member);
                let speaks = |peer: &&PeerId| self.members.get(peer).is_some_and(|member| !member.silent);
                next = peer.filter(speaks).copied();
            }
            match next {
                Some(peer) => to_read.entry(peer).or_default().push(nth),
                None => {
                    let why = if late { Missed::Late } else { sought.why };
                    self.end_block(fetch, nth, Err(why));
                }
            }
        }
        for (peer, nths) in to_read {
            for nths in nths.chunks(READ_MAX) {
                let loan = self.number();
                let Some(known) = self.fetches.get(&fetch.0) else {
                    return;
                };
                let ids = nths.iter().map(|nth| known.pieces[*nth].wanted.id).collect();
                let until = now.saturating_add(self.settings.answer_within).min(known.deadline);
                // As long as the reader may take for all of it.
                let lasts = self.settings.answer_within.saturating_add(self.settings.read_within);
                let read = Loan {
                    fetch,
                    peer,
                    nths: nths.to_vec(),
                    stage: Stage::Asked { until },
                };
                self.loans.insert(loan, read);
                let lasts = lasts.min(LASTS_MAX);
                self.say(peer, Message::Read { loan, lasts, ids });
            }
        }
    }

    pub(super) fn on_lent(&mut self, peer: PeerId, loan: u64, blocks: &[Option<Lent>], now: Time) {
        let read = self.loans.get_mut(&loan);
        let expected = |read: &&mut Loan| {
            read.peer == peer && read.nths.len() == blocks.len() && matches!(read.stage, Stage::Asked { .. })
        };
        let Some(read) = read.filter(expected) else {
            // Nobody waits for it any more.
            if !self.loans.contains_key(&loan) && blocks.iter().any(Option::is_some) {
                self.say(peer, Message::Done { loan });
            }
            return;
        };
        let fetch = read.fetch;
        let Some(known) = self.fetches.get_mut(&fetch.0) else {
            self.loans.remove(&loan);
            return self.say(peer, Message::Done { loan });
        };
        let (mut lent_to, mut moves, mut refused) = (BTreeMap::new(), Vec::new(), Vec::new());
        for (nth, block) in read.nths.iter().zip(blocks) {
            let sought = &mut known.pieces[*nth];
            match block.filter(|lent| lent.parts != 0 && (1..=sought.wanted.room).contains(&lent.length)) {
                Some(lent) => {
                    moves.push((sought.wanted.offset, lent));
                    lent_to.insert(*nth, lent);
                }
                None => {
                    sought.why = Missed::Refused;
                    refused.push((*nth, sought.wanted.id));
                }
            }
        }
        let deadline = now.saturating_add(self.settings.read_within).min(known.deadline);
        self.counts.refused += refused.len() as u64;
        match moves.is_empty() {
            true => {
                self.loans.remove(&loan);
                if blocks.iter().any(Option::is_some) {
                    self.say(peer, Message::Done { loan });
                }
            }
            false => {
                read.stage = Stage::Moving(lent_to);
                let (loan, blocks) = (LoanId(loan), moves);
                self.acts.push_back(Act::Move {
                    loan,
                    fetch,
                    peer,
                    blocks,
                    deadline,
                });
            }
        }
        for (_, id) in &refused {
            self.forget_answer(id);
        }
        self.read_next(fetch, refused.into_iter().map(|(nth, _)| nth).collect(), now);
    }

    /// A [move](Act::Move) has ended; nobody writes to the memory any more.
    pub fn on_moved(&mut self, loan: LoanId, ended: Result<(), bool>, now: Time) {
        let Some(read) = self.loans.get_mut(&loan.0) else {
            return;
        };
        let Stage::Moving(lent) = &mut read.stage else {
            return;
        };
        let (fetch, peer, lent) = (read.fetch, read.peer, std::mem::take(lent));
        let Some(known) = self.fetches.get_mut(&fetch.0) else {
            return;
        };
        match ended {
            Ok(()) => {
                let piece = |(nth, lent): (&usize, &Lent)| Piece {
                    nth: *nth,
                    offset: known.pieces[*nth].wanted.offset,
                    length: lent.length,
                };
                let blocks = lent.iter().map(piece).collect();
                read.stage = Stage::Landed(lent);
                self.events.push_back(Event::Landed { loan, fetch, blocks });
            }
            Err(late) => {
                let nths: Vec<usize> = lent.into_keys().collect();
                for nth in &nths {
                    known.pieces[*nth].why = if late { Missed::Late } else { Missed::Failed };
                }
                self.loans.remove(&loan.0);
                self.say(peer, Message::Done { loan: loan.0 });
                if late {
                    self.counts.late += nths.len() as u64;
                }
                self.read_next(fetch, nths, now);
            }
        }
    }

    /// What [landed](Event::Landed), summed block by block; nothing, where it could not be.
    pub fn summed(&mut self, loan: LoanId, sums: &[Option<u64>], now: Time) {
        let Some(Loan {
            fetch,
            peer,
            stage: Stage::Landed(lent),
            ..
        }) = self.loans.remove(&loan.0)
        else {
            return;
        };
        self.say(peer, Message::Done { loan: loan.0 });
        let (mut again, mut wrong) = (Vec::new(), Vec::new());
        for ((nth, lent), sum) in lent
            .into_iter()
            .zip(sums.iter().copied().chain(std::iter::repeat(None)))
        {
            let Some(known) = self.fetches.get_mut(&fetch.0) else {
                return;
            };
            let sought = &mut known.pieces[nth];
            let id = sought.wanted.id;
            if sum.is_some_and(|sum| bound_sum(&id, lent.sequence, lent.length, sum) == lent.sum) {
                self.counts.fetched += 1;
                let Lent {
                    tier, parts, length, ..
                } = lent;
                let from = peer;
                self.end_block(
                    fetch,
                    nth,
                    Ok(Fetched {
                        from,
                        tier,
                        parts,
                        length,
                    }),
                );
                continue;
            }
            sought.why = Missed::Wrong;
            self.counts.wrong += 1;
            self.forget_answer(&id);
            wrong.push(id);
            again.push(nth);
            if let Some(member) = self.members.get(&peer) {
                self.bad.retain(|_, until| now < *until);
                if self.bad.len() >= BAD_MAX {
                    self.bad.pop_first();
                }
                self.bad.insert((member.seat.digest, id), now.saturating_add(BAD_FOR));
            }
        }
        if !wrong.is_empty() {
            self.say(peer, Message::Doubt { ids: wrong });
        }
        self.read_next(fetch, again, now);
    }

    fn end_block(&mut self, fetch: FetchId, nth: usize, ended: Result<Fetched, Missed>) {
        let Some(known) = self.fetches.get_mut(&fetch.0) else {
            return;
        };
        if std::mem::replace(&mut known.pieces[nth].over, true) {
            return;
        }
        known.left -= 1;
        if known.left == 0 {
            self.fetches.remove(&fetch.0);
        }
        self.events.push_back(Event::Fetched { fetch, nth, ended });
    }

    pub(super) fn end_loans(&mut self, now: Time) {
        let late = |_: &u64, loan: &mut Loan| loan.until().is_some_and(|until| until <= now);
        for (_, loan) in self.loans.extract_if(.., late).collect::<Vec<_>>() {
            self.counts.late += loan.nths.len() as u64;
            // Who had less time than an answer may take has not been silent.
            let whole = |known: &Fetch| loan.until().is_some_and(|until| until < known.deadline);
            if self.fetches.get(&loan.fetch.0).is_some_and(whole) {
                self.on_silent(loan.peer);
            }
            self.go_on(loan, Missed::Late, now);
        }
        let over = |(fetch, known): (&u64, &Fetch)| (known.deadline <= now).then_some(FetchId(*fetch));
        let over: Vec<FetchId> = self.fetches.iter().filter_map(over).collect();
        for fetch in over {
            self.end_fetch(fetch);
        }
    }

    /// Its deadline has come: what is not being written to its memory has not come.
    fn end_fetch(&mut self, fetch: FetchId) {
        let busy = |loan: &&Loan| loan.fetch == fetch && !matches!(loan.stage, Stage::Asked { .. });
        let busy: Vec<usize> = self
            .loans
            .values()
            .filter(busy)
            .flat_map(|loan| match &loan.stage {
                Stage::Moving(lent) | Stage::Landed(lent) => lent.keys().copied().collect::<Vec<_>>(),
                Stage::Asked { .. } => Vec::new(),
            })
            .collect();
        let Some(known) = self.fetches.get_mut(&fetch.0) else {
            return;
        };
        // Its moves have this deadline too, and end without another word.
        known.deadline = Time::MAX;
        let open = (0..known.pieces.len()).filter(|nth| !known.pieces[*nth].over && !busy.contains(nth));
        for nth in open.collect::<Vec<_>>() {
            self.end_block(fetch, nth, Err(Missed::Late));
        }
        if let Some(known) = self.fetches.get_mut(&fetch.0) {
            known.pieces.iter_mut().for_each(|sought| sought.candidates.clear());
        }
    }

    fn go_on(&mut self, loan: Loan, why: Missed, now: Time) {
        if let Some(known) = self.fetches.get_mut(&loan.fetch.0) {
            for nth in &loan.nths {
                known.pieces[*nth].why = why;
            }
        }
        self.read_next(loan.fetch, loan.nths, now);
    }

    /// A member that is gone lends nothing. What is being moved ends by itself.
    pub(super) fn on_lender_gone(&mut self, peer: PeerId, now: Time) {
        let gone = |_: &u64, loan: &mut Loan| loan.peer == peer && loan.until().is_some();
        for (_, loan) in self.loans.extract_if(.., gone).collect::<Vec<_>>() {
            self.go_on(loan, Missed::Failed, now);
        }
    }
}
