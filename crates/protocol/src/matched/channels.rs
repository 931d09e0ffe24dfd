//! The channels of one agent: carries out what their ends want, by parcels, transfers and regions of a [`Core`].
//!
//! The runtime turns it with the agent: whoever turns the core hands it the core's events and then a [turn](Channels::turn).

mod words;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use weft_plan::{Spans, Time};

use super::incoming::{Incoming, Landing, Meets};
use super::outgoing::{Outgoing, Wanted};
use super::wire::{Message, Receive};
use super::{ChannelError, RECEIVES_MAX, Tells, Ticket};
use crate::agent::{Core, Event, Parcel, Target};
use crate::leg::{Direction, Leg};
use crate::region::{Access, Region, RegionKey, RemoteRegion};
use crate::session::{region_from_bytes, region_to_bytes};
use crate::transfer::{PeerId, Request, TransferId};
use crate::transport::{PeerAddress, Transport};

/// Which parcels are about channels.
pub const PARCELS: u64 = u64::from_le_bytes(*b"matched\0");
/// Numbers of arrivals that are of channels; all others are the application's.
const OF_CHANNELS: u32 = 1 << 31;
/// What may wait for a peer: more than all requests of a job's channels, of which each is short enough to go eagerly.
const UNSAID_BYTES_MAX: usize = 64 << 20;
/// What a word costs beside its bytes.
const WORD_BYTES: usize = 64;
/// Parcels that are looked at in one turn.
const PARCELS_PER_TURN: usize = 256;
/// How often what a peer could not be told is tried again.
const AGAIN_AFTER: Time = Time::from_us(50);
/// Regions that a sender is told of on one channel.
const REGIONS_MAX: usize = 1 << 16;
/// Channels that come in and that nobody has asked for yet.
const UNACCEPTED_MAX: usize = 1 << 16;

/// How channels carry messages.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The longest message that goes without waiting for its receive.
    pub eager_max: u64,
    /// How long a write may take once it has begun, and how long opening a channel may.
    pub deadline: Time,
    /// Whether the bytes of long messages are compared at both ends.
    pub checksum: bool,
}

/// A channel, by its number here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelId(pub u64);

/// Bytes of a memory that is registered here.
#[derive(Clone, Debug)]
pub struct Place {
    pub region: Region,
    pub offset: u64,
    pub len: u64,
    pub tag: i32,
}

/// All channels of an agent.
#[derive(Debug)]
pub struct Channels {
    settings: Settings,
    channels: BTreeMap<u64, Channel>,
    next: u64,
    next_number: u32,
    /// Sessions that were asked for, by address.
    dialled: BTreeMap<String, PeerId>,
    listeners: BTreeMap<u128, Listener>,
    transfers: BTreeMap<TransferId, (u64, u64)>,
    /// Which channel awaits a number from which peer.
    arriving: BTreeMap<(PeerId, u32), u64>,
    /// What a peer could not be told yet.
    unsaid: BTreeMap<PeerId, Unsaid>,
    come: VecDeque<Parcel>,
    more_parcels: bool,
    again_at: Time,
}

#[derive(Debug, Default)]
struct Listener {
    /// Who has come with the token.
    channel: Option<u64>,
    taken: bool,
}

#[derive(Debug)]
struct Channel {
    peer: PeerId,
    /// Its number at the other end, once it is known there.
    far: Option<u64>,
    /// Until when it must be.
    open_by: Time,
    token: u128,
    end: End,
    failed: Option<ChannelError>,
}

#[derive(Debug)]
enum End {
    Sends(Box<Sends>),
    Receives(Box<Receives>),
}

#[derive(Debug)]
struct Sends {
    machine: Outgoing,
    sends: BTreeMap<u64, (Place, Arc<Ticket>)>,
    next: u64,
    regions: BTreeMap<u32, RemoteRegion>,
    transfers: BTreeMap<u64, TransferId>,
}

/// What waits for room on the way to a peer.
#[derive(Debug, Default)]
struct Unsaid {
    words: VecDeque<Vec<u8>>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Receives {
    machine: Incoming,
    groups: BTreeMap<u64, (Vec<Place>, Arc<Ticket>)>,
    next: u64,
    /// Under which numbers the sender knows regions.
    regions: BTreeMap<(u64, u32), u32>,
    next_region: u32,
}

impl Channels {
    pub fn new(settings: Settings) -> Channels {
        Channels {
            settings,
            channels: BTreeMap::new(),
            next: 0,
            next_number: 0,
            dialled: BTreeMap::new(),
            listeners: BTreeMap::new(),
            transfers: BTreeMap::new(),
            arriving: BTreeMap::new(),
            unsaid: BTreeMap::new(),
            come: VecDeque::new(),
            more_parcels: false,
            again_at: Time::ZERO,
        }
    }

    // Opening.

    /// Lets whoever shows this token, and comes first, open a channel to here.
    pub fn listen(&mut self, token: u128) {
        self.listeners.insert(token, Listener::default());
    }

    /// Nobody is to come any more. A channel that was opened and not accepted is closed.
    pub fn unlisten<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, token: u128, now: Time) {
        let listener = self.listeners.remove(&token);
        if let Some(Listener {
            channel: Some(id),
            taken: false,
        }) = listener
        {
            self.close(core, ChannelId(id), now);
        }
    }

    /// Who has come to a listener.
    pub fn accept(&mut self, token: u128) -> Option<ChannelId> {
        let listener = self.listeners.get_mut(&token)?;
        let channel = listener.channel.filter(|_| !listener.taken)?;
        listener.taken = true;
        Some(ChannelId(channel))
    }

    /// Opens a channel to whoever listens with a token at an agent of these addresses. [`is_open`](Channels::is_open) tells when it is.
    pub fn connect<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        addresses: Vec<PeerAddress>,
        token: u128,
        now: Time,
    ) -> Result<ChannelId, ChannelError> {
        let deadline = now.saturating_add(self.settings.deadline);
        let name = addresses.iter().map(|a| a.0.as_str()).collect::<Vec<_>>().join(",");
        let known = self.dialled.get(&name).copied();
        let peer = match known.filter(|peer| self.is_usable(core, *peer)) {
            Some(peer) => peer,
            None => {
                let target = Target {
                    addresses,
                    deadline,
                    name: None,
                    epoch: None,
                };
                let peer = core.connect(target, now).map_err(ChannelError::NoSession)?;
                self.dialled.insert(name, peer);
                peer
            }
        };
        let id = self.enter(Channel {
            peer,
            far: None,
            open_by: deadline,
            token,
            end: End::Sends(Box::new(Sends {
                // How it tells is settled when the paths are known.
                machine: Outgoing::new(self.settings.eager_max, Tells::Afterwards),
                sends: BTreeMap::new(),
                next: 0,
                regions: BTreeMap::new(),
                transfers: BTreeMap::new(),
            })),
            failed: None,
        });
        if core.is_connected(peer) {
            self.ask(core, id, now);
        }
        Ok(ChannelId(id))
    }

    /// Whether a session that was asked for lives, or may come about.
    fn is_usable<T: ?Sized + Transport>(&self, core: &Core<T>, peer: PeerId) -> bool {
        let waits = |channel: &Channel| channel.peer == peer && channel.failed.is_none();
        core.is_connected(peer) || core.ending(peer).is_none() && self.channels.values().any(waits)
    }

    fn enter(&mut self, channel: Channel) -> u64 {
        self.next += 1;
        self.channels.insert(self.next, channel);
        self.next
    }

    /// Asks a peer that is connected to open a channel.
    fn ask<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, id: u64, now: Time) {
        let Some(channel) = self.channels.get_mut(&id) else {
            return;
        };
        // Where the initiator copies by itself, a write has ended when it is posted.
        let copies = core.transports(channel.peer).contains(&"shared_memory");
        let tells = match copies || self.settings.checksum {
            true => Tells::Afterwards,
            false => Tells::ByArrival,
        };
        if let End::Sends(sends) = &mut channel.end {
            sends.machine = Outgoing::new(self.settings.eager_max, tells);
        }
        let (peer, token) = (channel.peer, channel.token);
        self.say(core, peer, &Message::Open { token, from: id }, 0, now);
    }

    /// Whether a channel is open; an error if it never will be, or has failed.
    pub fn is_open(&mut self, id: ChannelId, now: Time) -> Result<bool, ChannelError> {
        let channel = self.channels.get_mut(&id.0).ok_or(ChannelError::Unknown)?;
        if let Some(error) = &channel.failed {
            return Err(error.clone());
        }
        if channel.far.is_none() && now >= channel.open_by {
            return Err(ChannelError::NotCarried(crate::error::Failure::Expired));
        }
        Ok(channel.far.is_some())
    }

    /// The peer that a channel leads to.
    pub fn peer(&self, id: ChannelId) -> Option<PeerId> {
        self.channels.get(&id.0).map(|channel| channel.peer)
    }

    // Messages.

    /// Sends bytes. The ticket ends when they may be used again: with an error at the latest when the channel fails.
    pub fn send<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        id: ChannelId,
        place: Place,
        now: Time,
    ) -> Result<Arc<Ticket>, ChannelError> {
        within(&place)?;
        let channel = self.usable(id)?;
        let End::Sends(sends) = &mut channel.end else {
            return Err(ChannelError::Unknown);
        };
        if sends.sends.len() >= RECEIVES_MAX {
            return Err(ChannelError::TooMany {
                what: "sends",
                max: RECEIVES_MAX,
            });
        }
        let (send, tag, len) = (sends.next, place.tag, place.len);
        sends.next += 1;
        let ticket = Arc::new(Ticket::default());
        sends.sends.insert(send, (place, ticket.clone()));
        if let Err(error) = sends.machine.send(send, tag, len) {
            self.fail(core, id.0, error, true, now);
        }
        self.carry_out(core, id.0, now);
        Ok(ticket)
    }

    /// Receives messages into these places, as one group.
    pub fn receive<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        id: ChannelId,
        places: Vec<Place>,
        now: Time,
    ) -> Result<Arc<Ticket>, ChannelError> {
        places.iter().try_for_each(within)?;
        // Looked at before anything is changed.
        self.usable(id)?;
        let mut landings = Vec::with_capacity(places.len());
        for place in &places {
            let region = self.told_region(core, id.0, &place.region, now)?;
            landings.push(Landing {
                tag: place.tag,
                len: place.len,
                region,
                offset: place.offset,
            });
        }
        let Some(channel) = self.channels.get_mut(&id.0) else {
            return Err(ChannelError::Unknown);
        };
        let peer = channel.peer;
        let End::Receives(receives) = &mut channel.end else {
            return Err(ChannelError::Unknown);
        };
        let group = receives.next;
        receives.next += 1;
        let ticket = Arc::new(Ticket::default());
        let (arriving, next) = (&mut self.arriving, &mut self.next_number);
        let posted = receives
            .machine
            .receive(group, &landings, || new_number(arriving, next, peer, id.0));
        receives.groups.insert(group, (places, ticket.clone()));
        match posted {
            Ok(posted) => {
                for (nth, bytes) in &posted.here {
                    let place = &receives.groups[&group].0[*nth];
                    place.region.memory.bytes().write(place.offset, bytes);
                }
                self.tell(core, id.0, Message::Posted(posted.receives), now);
            }
            Err(error) => self.fail(core, id.0, error, true, now),
        }
        self.settle(id.0);
        Ok(ticket)
    }

    /// The number that the sender knows a region by; tells it, the first time.
    fn told_region<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        id: u64,
        region: &Region,
        now: Time,
    ) -> Result<u32, ChannelError> {
        let access = match self.settings.checksum {
            true => Access::READ_WRITE,
            false => Access::WRITE,
        };
        let channel = self.channels.get_mut(&id).ok_or(ChannelError::Unknown)?;
        let End::Receives(receives) = &mut channel.end else {
            return Err(ChannelError::Unknown);
        };
        let key = (region.key.epoch.0, region.key.slot);
        if let Some(number) = receives.regions.get(&key) {
            return Ok(*number);
        }
        if receives.regions.len() >= REGIONS_MAX {
            return Err(ChannelError::TooMany {
                what: "regions",
                max: REGIONS_MAX,
            });
        }
        let lent = core.lend(&region.key, access);
        let lent = lent.map_err(|refusal| ChannelError::NotTaken(refusal.to_string()))?;
        let (_, remote) = core.registered(&lent).ok_or(ChannelError::Unknown)?;
        let number = receives.next_region;
        receives.next_region += 1;
        receives.regions.insert(key, number);
        let region = region_to_bytes(&remote);
        self.tell(core, id, Message::Region { number, region }, now);
        Ok(number)
    }

    /// A memory will be registered no more: its senders forget it. Channels that still have something to receive into it, or to send from it, end: nobody may
    /// touch it afterwards.
    pub fn forget<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, key: &RegionKey, now: Time) {
        let is_in_it = |place: &Place| place.region.key == *key;
        let uses = |channel: &Channel| match &channel.end {
            End::Sends(sends) => sends.sends.values().any(|(place, _)| is_in_it(place)),
            End::Receives(receives) => receives.groups.values().any(|(places, _)| places.iter().any(is_in_it)),
        };
        let using = self.channels.iter().filter(|(_, channel)| uses(channel));
        for id in using.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.fail(core, id, ChannelError::ClosedHere, true, now);
        }
        let key = (key.epoch.0, key.slot);
        let mut told = Vec::new();
        for (id, channel) in &mut self.channels {
            if let End::Receives(receives) = &mut channel.end
                && let Some(number) = receives.regions.remove(&key)
            {
                told.push((*id, number));
            }
        }
        for (id, number) in told {
            self.tell(core, id, Message::Forget { number }, now);
        }
    }

    /// Closes a channel: what is under way on it ends with an error, and what is written for it is cancelled. `true`: nothing of this side touches
    /// its memory any more; otherwise [`is_out`](Channels::is_out) tells when.
    pub fn close<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, id: ChannelId, now: Time) -> bool {
        self.fail(core, id.0, ChannelError::ClosedHere, true, now);
        self.is_out(id)
    }

    /// Whether nothing of this side touches the memory of a channel that has failed or was closed. It is forgotten then.
    pub fn is_out(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get(&id.0) else {
            return true;
        };
        let busy = matches!(&channel.end, End::Sends(sends) if !sends.transfers.is_empty());
        if channel.failed.is_some() && !busy {
            self.channels.remove(&id.0);
            return true;
        }
        false
    }

    fn usable(&mut self, id: ChannelId) -> Result<&mut Channel, ChannelError> {
        let channel = self.channels.get_mut(&id.0).ok_or(ChannelError::Unknown)?;
        match &channel.failed {
            Some(error) => Err(error.clone()),
            None => Ok(channel),
        }
    }

    // What happens.

    /// Hears what has happened at the agent. `true`: it was about a channel, and about nothing else.
    pub fn on_event<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, event: &Event, now: Time) -> bool {
        match event {
            Event::Connected { peer, .. } => {
                let ids = self.on_peer(*peer);
                let unasked = |id: &u64| {
                    matches!(
                        &self.channels[id],
                        Channel {
                            far: None,
                            end: End::Sends(_),
                            ..
                        }
                    )
                };
                for id in ids.into_iter().filter(unasked).collect::<Vec<_>>() {
                    self.ask(core, id, now);
                }
                false
            }
            Event::ConnectFailed { peer, error } => {
                for id in self.on_peer(*peer) {
                    self.fail(core, id, ChannelError::NoSession(error.clone()), false, now);
                }
                self.dialled.retain(|_, dialled| dialled != peer);
                false
            }
            Event::PeerLost { peer, cause, .. } => {
                // Its last words have come before its end.
                self.come.extend(std::iter::from_fn(|| core.next_parcel(PARCELS)));
                let (last, others): (VecDeque<Parcel>, VecDeque<Parcel>) = std::mem::take(&mut self.come)
                    .into_iter()
                    .partition(|parcel| parcel.from == *peer);
                self.come = others;
                last.into_iter().for_each(|parcel| self.hear(core, &parcel, now));
                for id in self.on_peer(*peer) {
                    self.fail(core, id, ChannelError::PeerLost(cause.clone()), false, now);
                }
                self.unsaid.remove(peer);
                self.dialled.retain(|_, dialled| dialled != peer);
                false
            }
            Event::Ended { id, outcome } => {
                let Some((channel, send)) = self.transfers.remove(id) else {
                    return false;
                };
                let outcome = match outcome {
                    Ok(_) => Ok(()),
                    Err(error) => Err(error.cause),
                };
                self.on_written(core, channel, send, outcome, now);
                true
            }
            Event::Arrived { number, .. } if number & OF_CHANNELS == 0 => false,
            Event::Arrived { peer, number, .. } => {
                // What comes for a channel that has ended is nobody else's.
                let Some(id) = self.arriving.get(&(*peer, *number)).copied() else {
                    return true;
                };
                if let Some(End::Receives(receives)) = self.channels.get_mut(&id).map(|channel| &mut channel.end) {
                    receives.machine.on_arrived(*number);
                }
                self.settle(id);
                true
            }
            _ => false,
        }
    }

    fn on_peer(&self, peer: PeerId) -> Vec<u64> {
        let of = self.channels.iter().filter(|(_, channel)| channel.peer == peer);
        of.map(|(id, _)| *id).collect()
    }

    /// Takes what has come, and says what is left to be said. `true`: something has happened.
    pub fn turn<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> bool {
        let mut any = false;
        for _ in 0..PARCELS_PER_TURN {
            let Some(parcel) = self.come.pop_front().or_else(|| core.next_parcel(PARCELS)) else {
                break;
            };
            self.hear(core, &parcel, now);
            any = true;
        }
        self.more_parcels = !self.come.is_empty() || core.has_parcels(PARCELS);
        if !self.unsaid.is_empty() && self.again_at <= now {
            self.again_at = now.saturating_add(AGAIN_AFTER);
            let peers: Vec<PeerId> = self.unsaid.keys().copied().collect();
            peers.into_iter().for_each(|peer| self.say_unsaid(core, peer, now));
        }
        any
    }

    /// When a turn is due.
    pub fn next_timeout(&self) -> Option<Time> {
        let unsaid = (!self.unsaid.is_empty()).then_some(self.again_at);
        let parcels = self.more_parcels.then_some(Time::ZERO);
        [unsaid, parcels].into_iter().flatten().min()
    }

    /// Does what the sending end of a channel wants.
    fn carry_out<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, id: u64, now: Time) {
        loop {
            let Some(channel) = self.channels.get_mut(&id).filter(|channel| channel.failed.is_none()) else {
                return;
            };
            let (peer, far) = (channel.peer, channel.far.unwrap_or_default());
            let End::Sends(sends) = &mut channel.end else { return };
            let Some(wanted) = sends.machine.next_wanted() else {
                return;
            };
            match wanted {
                Wanted::Say(message) => self.say(core, peer, &message, far, now),
                Wanted::Done { id, len } => {
                    if let Some((_, ticket)) = sends.sends.remove(&id) {
                        ticket.end(Ok([len].into()));
                    }
                }
                Wanted::Eager { id: send, tag, nth } => {
                    let Some((place, ticket)) = sends.sends.remove(&send) else {
                        continue;
                    };
                    self.say_eager(core, peer, &Message::Eager { tag, nth }.encode(far), &place, now);
                    ticket.end(Ok([place.len].into()));
                }
                Wanted::Write { id: send, to, arrives } => {
                    let deadline = now.saturating_add(self.settings.deadline);
                    let checksum = self.settings.checksum;
                    let request = sends.write(peer, send, &to, deadline);
                    let request = request.map(|request| match arrives {
                        true => request.arrives(Some(to.number)),
                        false => request.checksum(checksum),
                    });
                    let begun = request.and_then(|request| {
                        let submitted = core.submit(request, None, now);
                        submitted.map_err(|error| ChannelError::NotTaken(error.to_string()))
                    });
                    match begun {
                        Ok(transfer) => {
                            sends.transfers.insert(send, transfer);
                            self.transfers.insert(transfer, (id, send));
                        }
                        Err(error) => self.fail(core, id, error, true, now),
                    }
                }
            }
        }
    }

    /// Enters what is over at the receiving end of a channel.
    fn settle(&mut self, id: u64) {
        let Some(Channel {
            peer,
            end: End::Receives(receives),
            ..
        }) = self.channels.get_mut(&id)
        else {
            return;
        };
        while let Some(number) = receives.machine.next_over() {
            self.arriving.remove(&(*peer, number));
        }
        while let Some(complete) = receives.machine.next_complete() {
            if let Some((_, ticket)) = receives.groups.remove(&complete.group) {
                ticket.end(Ok(complete.lens));
            }
        }
    }

    /// A channel carries nothing more. Those who wait hear of it: of a write that is under way when it has ended.
    fn fail<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, id: u64, error: ChannelError, tell: bool, now: Time) {
        let Some(channel) = self.channels.get_mut(&id).filter(|channel| channel.failed.is_none()) else {
            return;
        };
        channel.failed = Some(error.clone());
        let (peer, far) = (channel.peer, channel.far);
        match &mut channel.end {
            End::Sends(sends) => {
                let under_way = &sends.transfers;
                for (_, (_, ticket)) in sends.sends.extract_if(.., |send, _| !under_way.contains_key(send)) {
                    ticket.end(Err(error.clone()));
                }
                under_way.values().for_each(|transfer| core.cancel(*transfer, now));
            }
            End::Receives(receives) => {
                for (_, ticket) in std::mem::take(&mut receives.groups).into_values() {
                    ticket.end(Err(error.clone()));
                }
                self.arriving.retain(|_, channel| *channel != id);
            }
        }
        if let Some(far) = far.filter(|_| tell) {
            self.say(core, peer, &Message::Closed, far, now);
        }
    }

    // Words.
}

impl Sends {
    fn hear(&mut self, message: Message) -> Result<(), ChannelError> {
        match message {
            Message::Region { number, region } => {
                if self.regions.len() >= REGIONS_MAX {
                    return Err(ChannelError::Misbehaved("it tells of too many regions"));
                }
                let region = region_from_bytes(&region);
                let region = region.map_err(|_| ChannelError::Misbehaved("it tells of a region that cannot be"))?;
                self.regions.insert(number, region);
                Ok(())
            }
            Message::Forget { number } => {
                self.regions.remove(&number);
                Ok(())
            }
            Message::Posted(receives) => self.machine.on_told(&receives),
            Message::Answer { number, anew } => self.machine.on_answer(number, anew),
            _ => Err(ChannelError::Misbehaved("it says to a sender what is for a receiver")),
        }
    }

    /// The write of a send to where its receive wants it.
    fn write(&self, peer: PeerId, send: u64, to: &Receive, deadline: Time) -> Result<Request, ChannelError> {
        let (place, _) = self.sends.get(&send).ok_or(ChannelError::Unknown)?;
        let remote = self.regions.get(&to.region);
        let remote = remote.ok_or(ChannelError::Misbehaved(
            "it wants bytes in a region that it has not told of",
        ))?;
        let near = Spans::contiguous(place.offset, place.len);
        let far = to
            .offset
            .checked_add(place.len)
            .map(|_| Spans::contiguous(to.offset, place.len));
        let far = far.ok_or(ChannelError::Misbehaved("it wants bytes outside of a region"))?;
        let leg = Leg::new(place.region.clone(), near, remote.clone(), far);
        let leg = leg.map_err(|_| ChannelError::Misbehaved("it wants bytes outside of a region"))?;
        Ok(Request::new(
            peer,
            Direction::Write,
            Arc::from([Arc::new(leg)]),
            deadline,
        ))
    }
}

impl Receives {
    /// Says what is to be answered.
    fn hear(
        &mut self,
        message: Message,
        bytes: &[u8],
        number: impl FnOnce() -> u32,
    ) -> Result<Option<Message>, ChannelError> {
        match message {
            Message::Eager { tag, nth } => {
                let len = bytes.len() as u64;
                match self.machine.on_eager(tag, nth, len)? {
                    Meets::Now { group, nth: at } => {
                        if let Some((places, _)) = self.groups.get(&group) {
                            let place = &places[at];
                            place.region.memory.bytes().write(place.offset, bytes);
                        }
                        self.machine.on_copied(tag, nth, len);
                    }
                    Meets::Later => self.machine.keep(tag, nth, bytes.to_vec()),
                }
                Ok(None)
            }
            Message::Coming { number, len } => self.machine.on_coming(number, len).map(|()| None),
            Message::Landed { number, len } => self.machine.on_landed(number, len).map(|()| None),
            Message::Lost { number: lost } => Ok(Some(self.machine.on_lost(lost, number))),
            _ => Err(ChannelError::Misbehaved("it says to a receiver what is for a sender")),
        }
    }
}

fn within(place: &Place) -> Result<(), ChannelError> {
    let len = place.region.memory.len();
    match place.offset.checked_add(place.len) {
        Some(end) if end <= len => Ok(()),
        end => Err(ChannelError::OutOfBounds {
            offset: place.offset,
            end: end.unwrap_or(u64::MAX),
            len,
        }),
    }
}

/// A number that nothing from this peer is awaited under.
fn new_number(arriving: &mut BTreeMap<(PeerId, u32), u64>, next: &mut u32, peer: PeerId, channel: u64) -> u32 {
    loop {
        let number = *next | OF_CHANNELS;
        *next = next.wrapping_add(1);
        if let std::collections::btree_map::Entry::Vacant(free) = arriving.entry((peer, number)) {
            free.insert(channel);
            return number;
        }
    }
}
