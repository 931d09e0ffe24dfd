//! The directory: which stores have a block, and how one of them gets it from another.
//!
//! Agents whose stores work together are **members**. Where blocks are is soft state in their memory: each block has a few members that are to know who has it,
//! placed by a hash over all members, and whoever has it **publishes** that to them in batches. Nobody else knows, nothing is written anywhere, and what a
//! member knows of another dies with the session between them. [`Directory`] is one member without I/O: blocks that came and went, words, ends of moves and `now`
//! go in; [`Act`]s, [`Event`]s and the next timeout come out. [`Members`] puts it on an agent's [`Core`](crate::agent::Core), the same for the real and
//! the simulated world.
//!
//! What it promises:
//! - **A stale entry costs a refused read, never wrong bytes.** The holder says where a block is, keeps it there for a while, and says what its bytes
//!   sum up to, bound to the block's id and to this life of its slot. The reader sums what has come after the last byte. So a reader that was too late, or a slot that was
//!   used again, is a mismatch; the next holder is tried.
//! - **Nobody is said to have a block longer than the asker's own session with it takes to notice that it is dead**, whatever others still say.
//! - **A member speaks for itself alone**: what it publishes is entered under its session, and what it says of others is believed only of members that live here.
//! - **Nothing is kept for ever**: a loan ends by a word, by its time, or with the session; a question and a fetch end by their deadlines.
//! - **A member that says nothing is asked nothing**: after one answer that did not come, others are asked in its place until it is heard again.
//! - **All of it is bounded**: entries of each member, words a turn, loans and questions under way.

mod finding;
pub(crate) mod harness;
mod lending;
mod members;
mod publishing;
mod reading;
mod shard;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{BTreeMap, HashMap, VecDeque};

use weft_plan::Time;

use super::{BlockId, Shape};
use crate::region::Epoch;
use crate::transfer::PeerId;
use finding::{Ask, Question};
use lending::Lending;
use publishing::Sweep;
use reading::{Fetch, Loan};
use shard::{Replicas, Salt, Seat, Sliced, mix};

pub use finding::{Found, Holder, QuestionId};
pub use lending::Token;
pub use members::{Members, MembersError, PARCELS};
pub use reading::{FetchId, Fetched, LoanId, Missed, Piece, Wanted};
pub use wire::{ENTRIES_MAX, IDS_MAX, LASTS_MAX, Lent, Message, Named, READ_MAX, REPLICAS_MAX, Said, VERSION};

/// How many doubted blocks wait to be looked at, at most.
const DOUBTS_MAX: usize = 64;

/// So many members are told of each block, so that one of them may be silent or die.
pub const COPIES: usize = 2;
/// So many stores work together.
pub const MEMBERS_MAX: usize = 1024;

/// How a member behaves.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// An answer that does not come for so long is not waited for any more.
    pub answer_within: Time,
    /// How long one read of a replica may take.
    pub read_within: Time,
    /// How long an answer about where blocks are is believed without asking again.
    pub fresh: Time,
    /// Blocks of one member that are kept track of here.
    pub entries: usize,
    /// Answers that are kept.
    pub answers: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            answer_within: Time::from_ms(250),
            read_within: Time::from_secs(5),
            fresh: Time::from_secs(2),
            entries: 1 << 22,
            answers: 1 << 16,
        }
    }
}

/// What has happened at a member, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Entries that were told to others, and that were heard of them.
    pub published: u64,
    pub heard: u64,
    /// Entries that there was no room for.
    pub left_out: u64,
    /// Blocks that others were asked about, and that an answer was still at hand for.
    pub asked: u64,
    pub remembered: u64,
    /// Blocks that were read from others, and that were lent to them.
    pub fetched: u64,
    pub lent: u64,
    /// Reads that the holder refused, that did not come in time, and whose bytes were not what was put.
    pub refused: u64,
    pub late: u64,
    pub wrong: u64,
    /// How often a member was found to be silent.
    pub silent: u64,
    /// Loans that ended because their reader said nothing.
    pub forgotten: u64,
    /// Words that made no sense.
    pub garbled: u64,
    /// Stores with other blocks, which are no members.
    pub strange: u64,
}

/// A member, as another one sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberStat {
    pub peer: PeerId,
    pub name: String,
    pub epoch: Epoch,
    /// Blocks that it has told this member of.
    pub entries: usize,
    /// What it has not been told yet.
    pub due: usize,
    pub silent: bool,
}

/// What the machine wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    Say {
        peer: PeerId,
        message: Message,
    },
    /// Read these into the fetch's memory: where to, and what.
    Move {
        loan: LoanId,
        fetch: FetchId,
        peer: PeerId,
        blocks: Vec<(u64, Lent)>,
        deadline: Time,
    },
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A question is answered, as well as it can be.
    Found {
        question: QuestionId,
        found: Vec<Found>,
    },
    /// Bytes are in the fetch's memory: to be [summed](Directory::summed).
    Landed {
        loan: LoanId,
        fetch: FetchId,
        blocks: Vec<Piece>,
    },
    /// A block of a fetch has come, or has not. Nobody writes to its memory for this fetch any more. Once a block.
    Fetched {
        fetch: FetchId,
        nth: usize,
        ended: Result<Fetched, Missed>,
    },
    /// Another member wants to read these: to be [lent](Directory::lend).
    Asked {
        peer: PeerId,
        loan: u64,
        ids: Vec<BlockId>,
    },
    /// Nobody reads what this stands for any more.
    Free {
        token: Token,
    },
    /// Another member read these here and got something else: to be looked at.
    Doubted {
        ids: Vec<BlockId>,
    },
    Joined {
        peer: PeerId,
        name: String,
    },
    Left {
        peer: PeerId,
        name: String,
    },
}

#[derive(Debug)]
struct Member {
    seat: Seat,
    name: String,
    epoch: Epoch,
    /// It has said what it keeps, and it is what is kept here.
    joined: bool,
    /// The smaller, the nearer.
    distance: u8,
    entries: usize,
    /// Blocks that it is to be told of.
    due: VecDeque<BlockId>,
    told_at: Time,
    /// More was due than is kept.
    missed: bool,
    silent: bool,
}

/// One member.
#[derive(Debug)]
pub struct Directory {
    settings: Settings,
    shape: u64,
    own: Seat,
    given: u64,
    members: BTreeMap<PeerId, Member>,
    /// By the number of their life here.
    lives: BTreeMap<u32, PeerId>,
    /// Those that have joined, with this one.
    seats: Vec<Seat>,
    /// What others have said that they have.
    entries: Sliced<Replicas>,
    /// Slices that something has to be swept out of.
    unswept: usize,
    /// Somebody has more entries than there is room for.
    crowded: bool,
    /// What is here.
    blocks: Sliced<(u8, u8)>,
    sweep: Option<Sweep>,
    answers: [HashMap<BlockId, (Replicas, Time), Salt>; 2],
    questions: BTreeMap<u64, Question>,
    asks: BTreeMap<u64, Ask>,
    fetches: BTreeMap<u64, Fetch>,
    loans: BTreeMap<u64, Loan>,
    /// Copies that were not what they summed up to.
    bad: BTreeMap<(u64, BlockId), Time>,
    lendings: BTreeMap<(PeerId, u64), Lending>,
    acts: VecDeque<Act>,
    events: VecDeque<Event>,
    /// Blocks in events that nobody has taken yet.
    doubted: usize,
    counts: Counts,
}

impl Directory {
    /// `salt`: random bits that nobody else knows.
    pub fn new(name: &str, epoch: Epoch, shape: &Shape, settings: Settings, salt: u64) -> Directory {
        let own = Seat {
            digest: digest(name, epoch),
            member: 0,
        };
        Directory {
            settings,
            shape: shape_digest(shape),
            own,
            given: 0,
            members: BTreeMap::new(),
            lives: BTreeMap::new(),
            seats: vec![own],
            entries: Sliced::new(salt),
            unswept: 0,
            crowded: false,
            blocks: Sliced::new(mix(salt)),
            sweep: None,
            answers: [
                HashMap::with_hasher(Salt::of(salt)),
                HashMap::with_hasher(Salt::of(salt)),
            ],
            questions: BTreeMap::new(),
            asks: BTreeMap::new(),
            fetches: BTreeMap::new(),
            loans: BTreeMap::new(),
            bad: BTreeMap::new(),
            lendings: BTreeMap::new(),
            acts: VecDeque::new(),
            events: VecDeque::new(),
            doubted: 0,
            counts: Counts::default(),
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }
    pub fn counts(&self) -> Counts {
        self.counts
    }
    /// Blocks that it has told others of, or is about to.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
    /// Entries that are kept for others.
    pub fn entries(&self) -> usize {
        self.members.values().map(|member| member.entries).sum()
    }
    /// Loans that others have of what is here.
    pub fn lent(&self) -> usize {
        self.lendings.len()
    }
    /// Questions and fetches that have not ended.
    pub fn under_way(&self) -> usize {
        self.questions.len() + self.fetches.len()
    }
    pub fn members(&self) -> impl Iterator<Item = MemberStat> + '_ {
        let joined = self.members.iter().filter(|(_, member)| member.joined);
        joined.map(|(peer, member)| MemberStat {
            peer: *peer,
            name: member.name.clone(),
            epoch: member.epoch,
            entries: member.entries,
            due: member.due.len(),
            silent: member.silent,
        })
    }
    pub fn next_act(&mut self) -> Option<Act> {
        self.acts.pop_front()
    }
    pub fn next_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if let Some(Event::Doubted { ids }) = &event {
            self.doubted -= ids.len();
        }
        event
    }
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Somebody is there who may keep blocks too. `distance`: the smaller, the nearer.
    pub fn on_met(&mut self, peer: PeerId, name: &str, epoch: Epoch, distance: u8, now: Time) {
        self.on_lost(peer, now);
        if self.members.len() >= MEMBERS_MAX {
            return;
        }
        self.given += 1;
        // Numbers of lives are for one run of one agent: it does not meet four thousand million others.
        let seat = Seat {
            digest: digest(name, epoch),
            member: self.given as u32,
        };
        let member = Member {
            seat,
            name: name.to_owned(),
            epoch,
            joined: false,
            distance,
            entries: 0,
            due: VecDeque::new(),
            told_at: now,
            missed: false,
            silent: false,
        };
        self.members.insert(peer, member);
        let shape = self.shape;
        self.say(peer, Message::Hello { shape });
    }

    /// How far it is to a member has changed.
    pub fn set_distance(&mut self, peer: PeerId, distance: u8) {
        if let Some(member) = self.members.get_mut(&peer) {
            member.distance = distance;
        }
    }

    /// Nothing is known of a peer any more, and nothing it was to do is waited for.
    pub fn on_lost(&mut self, peer: PeerId, now: Time) {
        let Some(gone) = self.members.remove(&peer) else {
            return;
        };
        self.lives.remove(&gone.seat.member);
        if gone.joined {
            let before = self.seats.clone();
            self.seats.retain(|seat| seat.member != gone.seat.member);
            self.begin_sweep(before);
            self.unswept = shard::SLICES;
            self.events.push_back(Event::Left { peer, name: gone.name });
        }
        self.forget_loans_of(peer);
        self.on_asked_gone(peer, now);
        self.on_lender_gone(peer, now);
    }

    /// Hears a peer's words.
    pub fn on_message(&mut self, peer: PeerId, words: &[u8], now: Time) {
        let Some(member) = self.members.get_mut(&peer) else {
            return;
        };
        member.silent = false;
        let joined = member.joined;
        let Ok(message) = Message::decode(words) else {
            self.counts.garbled += 1;
            return;
        };
        match message {
            Message::Hello { shape } => self.on_hello(peer, shape),
            // Whoever keeps other blocks, or has not said what it keeps, is no member.
            _ if !joined => self.counts.garbled += 1,
            Message::Publish { entries } => self.on_published(peer, &entries),
            Message::Ask { ask, ids } => self.on_ask(peer, ask, &ids),
            Message::Answer { ask, holders, found } => self.on_answer(peer, ask, &holders, &found, now),
            Message::Read { loan, lasts, ids } => self.on_read(peer, loan, lasts, ids),
            Message::Lent { loan, blocks } => self.on_lent(peer, loan, &blocks, now),
            Message::Done { loan } => self.on_done(peer, loan),
            Message::Doubt { ids } => self.on_doubted(ids),
        }
    }

    /// To look at a block takes reading it, so that nobody may have many looked at: what is too much is doubted again by whoever reads it next.
    fn on_doubted(&mut self, mut ids: Vec<BlockId>) {
        ids.truncate(DOUBTS_MAX.saturating_sub(self.doubted));
        self.doubted += ids.len();
        if !ids.is_empty() {
            self.events.push_back(Event::Doubted { ids });
        }
    }

    fn on_hello(&mut self, peer: PeerId, shape: u64) {
        let own = self.own.digest;
        let Some(member) = self.members.get_mut(&peer) else {
            return;
        };
        // Whoever has this agent's own name and epoch would be told what it has itself.
        if shape != self.shape || member.seat.digest == own {
            self.counts.strange += u64::from(!member.joined);
            return;
        }
        if std::mem::replace(&mut member.joined, true) {
            return;
        }
        let (seat, name) = (member.seat, member.name.clone());
        self.lives.insert(seat.member, peer);
        let before = self.seats.clone();
        self.seats.push(seat);
        self.begin_sweep(before);
        self.unswept = shard::SLICES;
        self.events.push_back(Event::Joined { peer, name });
    }

    /// When something is due without anybody asking.
    pub fn next_timeout(&self) -> Option<Time> {
        let asks = self.asks.values().map(|ask| ask.until);
        let loans = self.loans.values().filter_map(Loan::until);
        let fetches = self.fetches.values().map(|fetch| fetch.deadline);
        let lendings = self.lendings.values().filter_map(|lending| lending.until);
        let due = asks.chain(loans).chain(fetches).chain(lendings);
        let due = due.filter(|due| *due < Time::MAX).min();
        let sweeping = self.may_sweep() || self.unswept > 0;
        if sweeping { Some(Time::ZERO) } else { due }
    }

    pub fn on_time(&mut self, now: Time) {
        self.sweep_entries();
        self.sweep_blocks(now);
        self.end_lendings(now);
        self.end_asks(now);
        self.end_loans(now);
    }

    fn say(&mut self, peer: PeerId, message: Message) {
        self.acts.push_back(Act::Say { peer, message });
    }

    fn number(&mut self) -> u64 {
        self.given += 1;
        self.given
    }

    /// It has not answered: until it says something, others are asked.
    fn on_silent(&mut self, peer: PeerId) {
        if let Some(member) = self.members.get_mut(&peer)
            && !std::mem::replace(&mut member.silent, true)
        {
            self.counts.silent += 1;
        }
    }
}

/// One agent in one life of it, the same for everybody.
fn digest(name: &str, epoch: Epoch) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("weft store member, version 1");
    hasher.update(&epoch.0.to_le_bytes()).update(name.as_bytes());
    first_half(hasher.finalize().as_bytes())
}

/// Equal for stores whose blocks can serve each other.
fn shape_digest(shape: &Shape) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("weft store shape, version 1");
    for part in shape.parts() {
        hasher.update(&(part.name.len() as u64).to_le_bytes());
        hasher.update(part.name.as_bytes()).update(&part.bytes.to_le_bytes());
    }
    first_half(hasher.finalize().as_bytes())
}

fn first_half(digest: &[u8; 32]) -> u64 {
    u64::from_le_bytes(digest[..8].try_into().expect("eight bytes"))
}
