//! Both sides of one worker: whom it knows, what falls due, and who is to be told.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use weft_plan::Time;

use super::cache::Cache;
use super::holder::{Held, Ring, Spoken};
use super::reader::Want;
use super::{
    Act, CallError, Event, Message, Move, MoveError, MoveId, MoveLeg, Moved, NAME_BYTES_MAX, Names, Reason, Settings,
    Slots,
};
use crate::agent::ConnectError;
use crate::leg::Direction;
use crate::transfer::PeerId;

/// How long a partner that could not be reached is left alone.
const RETRY_AFTER: Time = Time::from_ms(500);
/// Prompts that may be wanted here at a time, and words that may be read at a time.
pub(super) const WANTS_MAX: usize = 1 << 14;
pub const WORDS: u32 = 1 << 12;
/// That somebody is done is said to at most so many hand-offs of one address.
const OWED_MAX: usize = 1 << 14;

/// A worker that hands off. See the [module](super).
#[derive(Debug)]
pub struct HandOffs {
    pub(super) settings: Settings,
    pub(super) cache: Arc<Cache>,
    /// What every word of the table holds at first.
    pub(super) first_word: u64,
    acts: VecDeque<Act>,
    pub(super) events: VecDeque<Event>,
    timers: BTreeSet<(Time, Due)>,
    pub(super) sessions: BTreeMap<PeerId, Session>,
    partners: BTreeMap<String, Partner>,
    pub(super) moves: BTreeMap<MoveId, Purpose>,
    next_move: u64,
    // As holder.
    pub(super) held: BTreeMap<String, Held>,
    pub(super) over: Ring,
    pub(super) spoken: Spoken,
    pub(super) slots: Slots,
    // As reader.
    pub(super) wants: BTreeMap<String, Want>,
    pub(super) used: Names,
    pub(super) landings: BTreeMap<u64, String>,
    pub(super) releasing: BTreeMap<u64, u64>,
    pub(super) taken: u64,
    pub(super) queue: VecDeque<String>,
    pub(super) next_landing: u64,
    pub(super) free_words: Vec<u32>,
}

/// What a move is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Push {
        hand_off: String,
        peer: PeerId,
    },
    Fetch {
        hand_off: String,
        peer: PeerId,
    },
    /// Into this word.
    Look {
        hand_off: String,
        peer: PeerId,
        word: u32,
    },
}

/// What falls due.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    Held(String),
    Want(String),
    Partner(String),
}

/// A peer, for as long as one session with it lasts.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) name: String,
    asked: bool,
    /// It was told what this worker holds. Once is enough, however often it asks: a description is long.
    told: bool,
    pub(super) cache: Option<Arc<Cache>>,
    /// For each of its layers: the one of the same name here.
    pub(super) same: Arc<[Option<u32>]>,
    /// Hand-offs that it has made room for.
    pub(super) made_room: BTreeSet<String>,
}

impl Session {
    fn new(name: &str) -> Session {
        Session {
            name: name.to_owned(),
            asked: false,
            told: false,
            cache: None,
            same: Arc::default(),
            made_room: BTreeSet::new(),
        }
    }
}

/// Who listens at an address.
#[derive(Debug, Default)]
struct Partner {
    link: Link,
    /// Hand-offs that nobody here reads any more, of which it has not said that it heard it.
    owed: BTreeMap<String, Owed>,
}

/// A word that is said until it was heard.
#[derive(Debug)]
struct Owed {
    readers: u32,
    /// Until when it matters, and when it is said next.
    until: Time,
    again_at: Time,
}

impl Owed {
    /// Several times before it does not matter any more.
    fn next(&self, now: Time) -> Time {
        let left = self.until.saturating_sub(now).as_ns();
        now.saturating_add(Time::from_ns(left / 4).max(Time::from_ms(100)))
    }
}

#[derive(Debug, Default)]
enum Link {
    #[default]
    None,
    Asked,
    Connecting(PeerId),
    Up(PeerId),
    /// It could not be reached, and is left alone until then.
    Resting(Time),
}

impl HandOffs {
    /// `stamp`: see [`Slots::new`].
    pub fn new(cache: Cache, settings: Settings, stamp: u64) -> HandOffs {
        HandOffs {
            settings,
            cache: Arc::new(cache),
            first_word: stamp & !1,
            acts: VecDeque::new(),
            events: VecDeque::new(),
            timers: BTreeSet::new(),
            sessions: BTreeMap::new(),
            partners: BTreeMap::new(),
            moves: BTreeMap::new(),
            next_move: 0,
            held: BTreeMap::new(),
            over: Ring::default(),
            spoken: Spoken::default(),
            slots: Slots::new(stamp),
            wants: BTreeMap::new(),
            used: Names::default(),
            landings: BTreeMap::new(),
            releasing: BTreeMap::new(),
            taken: 0,
            queue: VecDeque::new(),
            next_landing: 0,
            free_words: (0..WORDS).rev().collect(),
        }
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }
    pub fn next_act(&mut self) -> Option<Act> {
        self.acts.pop_front()
    }
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
    /// The next event of a kind, where somebody else takes the others.
    pub fn next_event_of(&mut self, kind: impl Fn(&Event) -> bool) -> Option<Event> {
        let at = self.events.iter().position(kind)?;
        self.events.remove(at)
    }
    /// When [`on_time`](HandOffs::on_time) has to be called.
    pub fn next_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }
    /// Whether somebody is known to be there.
    pub(super) fn knows(&self, peer: PeerId) -> bool {
        self.sessions.contains_key(&peer)
    }
    /// Prompts that are held here; those of which only readers have spoken not counted.
    pub fn held(&self) -> usize {
        self.held.values().filter(|held| held.is_ours()).count()
    }
    /// Prompts that are wanted here.
    pub fn wanted(&self) -> usize {
        self.wants.len()
    }
    /// Writes from the blocks of a prompt that are under way.
    pub fn writes_of(&self, name: &str) -> usize {
        let of = |purpose: &&Purpose| matches!(purpose, Purpose::Push { hand_off, .. } if hand_off == name);
        self.moves.values().filter(of).count()
    }
    /// Bytes of landing places, those included that somebody may still write to.
    pub fn landing_bytes(&self) -> u64 {
        self.taken
    }

    // What falls due.

    pub fn on_time(&mut self, now: Time) {
        while let Some((at, _)) = self.timers.first()
            && *at <= now
            && let Some((_, due)) = self.timers.pop_first()
        {
            match due {
                Due::Held(name) => self.on_held_due(&name, now),
                Due::Want(name) => self.on_want_due(&name, now),
                Due::Partner(address) => self.on_partner_due(&address, now),
            }
        }
    }

    /// What has become untimely is found out when it is due.
    pub(super) fn arm(&mut self, at: Time, due: Due) {
        self.timers.insert((at, due));
    }

    // Whom it knows.

    /// Somebody who hands off is there, whoever began the session.
    pub fn on_connected(&mut self, peer: PeerId, name: &str, now: Time) {
        self.sessions.insert(peer, Session::new(name));
        for partner in self.partners.values_mut() {
            if matches!(partner.link, Link::Connecting(p) if p == peer) {
                partner.link = Link::Up(peer);
            }
        }
        self.on_up(peer, now);
    }

    /// Whoever is there has begun anew: what was arranged with it before is over, and it may hold something else. The session is the same.
    pub fn on_begun_anew(&mut self, peer: PeerId, now: Time) {
        let Some(session) = self.sessions.get_mut(&peer) else {
            return;
        };
        let name = session.name.clone();
        let before = std::mem::replace(session, Session::new(&name));
        self.holder_lost(peer, before.made_room);
        self.reader_lost(peer, &Reason::BegunAnew { peer: name }, now);
        self.on_up(peer, now);
    }

    /// Says what a partner has to know at first.
    fn on_up(&mut self, peer: PeerId, now: Time) {
        let here = |partner: &Partner| matches!(partner.link, Link::Up(up) if up == peer);
        let (mut addresses, mut owed) = (Vec::new(), Vec::new());
        for (address, partner) in self.partners.iter().filter(|(_, partner)| here(partner)) {
            addresses.push(address.clone());
            owed.extend(partner.owed.iter().map(|(name, owed)| (name.clone(), owed.readers)));
        }
        for (hand_off, readers) in owed {
            self.say(peer, Message::Done { hand_off, readers });
        }
        for address in addresses {
            self.on_partner_up(&address, peer, now);
        }
    }

    /// What [`Act::Connect`] has led to so far.
    pub fn on_connecting(&mut self, address: &str, begun: Result<PeerId, ConnectError>, now: Time) {
        match begun {
            Ok(peer) => {
                if let Some(partner) = self.partners.get_mut(address) {
                    partner.link = Link::Connecting(peer);
                }
            }
            Err(error) => self.on_unreachable(address, error, now),
        }
    }

    pub fn on_connect_failed(&mut self, peer: PeerId, error: ConnectError, now: Time) {
        let address = self
            .partners
            .iter()
            .find(|(_, partner)| matches!(partner.link, Link::Connecting(p) if p == peer));
        if let Some(address) = address.map(|(address, _)| address.clone()) {
            self.on_unreachable(&address, error, now);
        }
    }

    /// The session is over. Its moves end by themselves.
    pub fn on_lost(&mut self, peer: PeerId, now: Time) {
        let mut addresses = Vec::new();
        for (address, partner) in &mut self.partners {
            if matches!(partner.link, Link::Up(p) | Link::Connecting(p) if p == peer) {
                partner.link = Link::None;
                addresses.push(address.clone());
            }
        }
        // Nobody who hands off may ever have been there.
        if let Some(session) = self.sessions.remove(&peer) {
            self.holder_lost(peer, session.made_room);
            self.reader_lost(peer, &Reason::Lost { peer: session.name }, now);
        }
        for address in addresses {
            self.on_partner_due(&address, now);
        }
    }

    fn on_unreachable(&mut self, address: &str, error: ConnectError, now: Time) {
        let again = now.saturating_add(RETRY_AFTER);
        if let Some(partner) = self.partners.get_mut(address) {
            partner.link = Link::Resting(again);
            self.arm(again, Due::Partner(address.to_owned()));
        }
        self.reader_unreachable(address, &error, now);
    }

    /// Looks after a partner: whoever still has something to say to it needs a session.
    fn on_partner_due(&mut self, address: &str, now: Time) {
        let waited_for = self.wants.values().any(|want| want.waits_at(address));
        let Some(partner) = self.partners.get_mut(address) else {
            return;
        };
        partner.owed.retain(|_, owed| owed.until > now);
        if matches!(partner.link, Link::Resting(until) if until <= now) {
            partner.link = Link::None;
        }
        if partner.owed.is_empty() && !waited_for {
            if matches!(partner.link, Link::None) {
                self.partners.remove(address);
            }
            return;
        }
        let (up, mut again) = (self.reach(address, now), Vec::new());
        let Some(partner) = self.partners.get_mut(address) else {
            return;
        };
        for (hand_off, owed) in partner.owed.iter_mut().filter(|(_, owed)| owed.again_at <= now) {
            owed.again_at = owed.next(now);
            again.push((hand_off.clone(), owed.readers));
        }
        let next = partner.owed.values().map(|owed| owed.again_at).min();
        for (hand_off, readers) in again {
            if let Some(peer) = up {
                self.say(peer, Message::Done { hand_off, readers });
            }
        }
        if let Some(next) = next {
            self.arm(next, Due::Partner(address.to_owned()));
        }
    }

    /// The session with whoever listens at an address; one is begun where there is none.
    pub(super) fn reach(&mut self, address: &str, now: Time) -> Option<PeerId> {
        let partner = self.partners.entry(address.to_owned()).or_default();
        match partner.link {
            Link::Up(peer) => return Some(peer),
            Link::None => {
                partner.link = Link::Asked;
                let deadline = now.saturating_add(self.settings.deadline);
                self.acts.push_back(Act::Connect {
                    address: address.to_owned(),
                    deadline,
                });
            }
            Link::Asked | Link::Connecting(_) | Link::Resting(_) => {}
        }
        None
    }

    /// Says that nobody here reads a hand-off any more, until it is heard or does not matter any more.
    pub(super) fn owe(&mut self, address: &str, hand_off: &str, readers: u32, until: Time, now: Time) {
        let partner = self.partners.entry(address.to_owned()).or_default();
        if partner.owed.len() >= OWED_MAX {
            // The lease will tell it.
            return;
        }
        let mut owed = Owed {
            readers,
            until,
            again_at: now,
        };
        owed.again_at = owed.next(now);
        let again = owed.again_at;
        partner.owed.insert(hand_off.to_owned(), owed);
        self.arm(again, Due::Partner(address.to_owned()));
        if let Some(peer) = self.reach(address, now) {
            self.say(
                peer,
                Message::Done {
                    hand_off: hand_off.to_owned(),
                    readers,
                },
            );
        }
    }

    /// What a peer holds; it is asked where that is not known.
    pub(super) fn cache_of(&mut self, peer: PeerId) -> Option<Arc<Cache>> {
        let session = self.sessions.get_mut(&peer)?;
        if session.cache.is_none() && !std::mem::replace(&mut session.asked, true) {
            self.say(peer, Message::Describe);
        }
        self.sessions.get(&peer)?.cache.clone()
    }

    pub(super) fn name_of(&self, peer: PeerId) -> String {
        self.sessions
            .get(&peer)
            .map_or_else(String::new, |session| session.name.clone())
    }

    // What peers say.

    /// Takes what a peer has said. What makes no sense, or comes too late, changes nothing.
    pub fn on_message(&mut self, peer: PeerId, bytes: &[u8], now: Time) {
        let Ok(message) = Message::decode(bytes) else { return };
        let Some(session) = self.sessions.get_mut(&peer) else {
            return;
        };
        match message {
            Message::Describe => {
                if !std::mem::replace(&mut session.told, true) {
                    let own = Cache::clone(&self.cache);
                    self.say(peer, Message::Cache(own));
                }
            }
            Message::Cache(cache) => {
                // What it holds does not change as long as the session lasts.
                if session.asked && session.cache.is_none() {
                    session.same = same_layers(&self.cache, &cache);
                    session.cache = Some(Arc::new(cache));
                    self.holder_described(peer, now);
                    self.reader_described(now);
                }
            }
            Message::Renew { hand_off } => self.on_renew(&hand_off, now),
            Message::Done { hand_off, readers } => {
                self.on_done(&hand_off, peer, readers, now);
                self.say(peer, Message::Heard { hand_off });
            }
            Message::Heard { hand_off } => {
                let there = self
                    .partners
                    .values_mut()
                    .filter(|p| matches!(p.link, Link::Up(up) if up == peer));
                for partner in there {
                    partner.owed.remove(&hand_off);
                }
            }
            Message::Reserve(reserve) => self.on_reserve(reserve, peer, now),
            Message::Landed {
                landing,
                layers,
                upto,
                bytes,
                way,
            } => {
                self.on_landed(landing, peer, &layers, upto, bytes, &way, now);
            }
            Message::Failed { landing, why } => self.on_failed(landing, peer, why, now),
        }
    }

    pub(super) fn say(&mut self, peer: PeerId, message: Message) {
        self.acts.push_back(Act::Say { peer, message });
    }
    pub(super) fn act(&mut self, act: Act) {
        self.acts.push_back(act);
    }

    pub(super) fn start_move(
        &mut self,
        purpose: Purpose,
        direction: Direction,
        legs: Vec<MoveLeg>,
        deadline: Time,
    ) -> MoveId {
        let id = MoveId(self.next_move);
        self.next_move += 1;
        let (Purpose::Push { peer, .. } | Purpose::Fetch { peer, .. } | Purpose::Look { peer, .. }) = purpose;
        // A word decides whether the bytes are believed, and is always compared.
        let checksum = self.settings.checksum || matches!(purpose, Purpose::Look { .. });
        self.moves.insert(id, purpose);
        self.acts.push_back(Act::Move(Move {
            id,
            peer,
            direction,
            legs,
            deadline,
            checksum,
        }));
        id
    }

    /// A move has ended, and nothing of it is under way any more.
    pub fn on_moved(&mut self, id: MoveId, outcome: Result<Moved, MoveError>, now: Time) {
        match self.moves.remove(&id) {
            Some(Purpose::Push { hand_off, peer }) => self.on_pushed(&hand_off, peer, id, outcome),
            Some(Purpose::Fetch { hand_off, peer }) => self.on_fetched(&hand_off, peer, id, outcome, now),
            Some(Purpose::Look { hand_off, peer, word }) => {
                self.free_words.push(word);
                self.on_looked(&hand_off, peer, id, outcome, now);
            }
            None => {}
        }
    }
}

/// For each layer of another cache: the one of the same name here.
fn same_layers(own: &Cache, theirs: &Cache) -> Arc<[Option<u32>]> {
    let names = (0..).zip(own.layers()).map(|(nth, layer)| (layer.name.as_str(), nth));
    let by_name: BTreeMap<&str, u32> = names.collect();
    let theirs = theirs.layers().iter();
    theirs.map(|layer| by_name.get(layer.name.as_str()).copied()).collect()
}

pub(super) fn check_name(name: &str) -> Result<(), CallError> {
    match name.is_empty() || name.len() > NAME_BYTES_MAX {
        true => Err(CallError::Invalid),
        false => Ok(()),
    }
}
