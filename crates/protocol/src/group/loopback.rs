//! The reference exchange: all ranks of a group in one process, joined by a mutex.
//!
//! It is the shortest honest reading of what [`Exchange`] promises. By its seed, messages come late, in pieces, copied or left in their
//! sender's memory, and there is room for few of them: whatever an exchange may do to an execution happens here sooner or later, and
//! the same way every time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use weft_plan::{Rank, Time};

use super::combine::fold;
use super::exchange::{Board, Exchange, Lane, Lent, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View};
use super::history::Recent;
use super::record::{Abort, CallRecord, Status, Waiting};
use crate::error::Loss;
use crate::seeded::Seeded;
use crate::transport::Progress;

/// How the exchange behaves.
#[derive(Clone, Copy, Debug)]
pub struct LoopbackOptions {
    pub seed: u64,
    pub channels: u16,
    /// Messages that one lane holds.
    pub room: usize,
    /// Messages up to this many bytes may be copied, if chance will have it.
    pub eager_max: u64,
    /// For so many looks a message may not be there yet.
    pub delay_max: u64,
}

impl Default for LoopbackOptions {
    fn default() -> LoopbackOptions {
        LoopbackOptions {
            seed: 0,
            channels: 16,
            room: 4,
            eager_max: 256,
            delay_max: 0,
        }
    }
}

/// A group inside this process. Clones are the same group.
#[derive(Clone, Debug)]
pub struct LoopbackGroup {
    world: Arc<Mutex<World>>,
}

/// One rank's end of it.
#[derive(Debug)]
pub struct LoopbackExchange {
    world: Arc<Mutex<World>>,
    rank: Rank,
    buffers: Vec<View>,
    lent: Lent<View>,
}

#[derive(Debug)]
struct World {
    options: LoopbackOptions,
    chance: Seeded,
    /// By sender, receiver and channel.
    lanes: BTreeMap<(Rank, Rank, u16), Messages>,
    statuses: Vec<Option<Status>>,
    pulses: Vec<u64>,
    dead: Vec<bool>,
    abort: Option<Abort>,
}

#[derive(Debug, Default)]
struct Messages {
    waiting: VecDeque<Message>,
    /// How many have been offered and taken, ever.
    offered: u64,
    taken: u64,
}

#[derive(Debug)]
struct Message {
    head: MessageHead,
    bytes: Bytes,
    /// Looks until it is there.
    delay: u64,
    /// How much of it has been taken.
    taken: u64,
}

#[derive(Debug)]
enum Bytes {
    Copied(Vec<u8>),
    /// Where its sender has them, and under which number.
    There(View, u32),
}

impl LoopbackGroup {
    pub fn new(ranks: u32, options: LoopbackOptions) -> LoopbackGroup {
        LoopbackGroup {
            world: Arc::new(Mutex::new(World {
                options,
                chance: Seeded::new(options.seed),
                lanes: BTreeMap::new(),
                statuses: vec![None; ranks as usize],
                pulses: vec![0; ranks as usize],
                dead: vec![false; ranks as usize],
                abort: None,
            })),
        }
    }

    /// The end of one rank.
    pub fn exchange(&self, rank: Rank) -> LoopbackExchange {
        LoopbackExchange {
            world: Arc::clone(&self.world),
            rank,
            buffers: Vec::new(),
            lent: Lent::default(),
        }
    }

    /// Ends a rank, as if its process had died. What it had copied on its way still arrives.
    pub fn kill(&self, rank: Rank) {
        let mut world = lock(&self.world);
        world.dead[rank.0 as usize] = true;
        for ((from, ..), messages) in &mut world.lanes {
            if *from == rank {
                messages
                    .waiting
                    .retain(|message| matches!(message.bytes, Bytes::Copied(_)));
            }
        }
    }
}

impl Board for LoopbackExchange {
    fn publish(&mut self, waiting: Waiting) {
        let (mut world, rank) = (lock(&self.world), self.rank.0 as usize);
        world.pulses[rank] += 1;
        if let Some(status) = &mut world.statuses[rank] {
            status.waiting = waiting;
        }
    }
    fn pulse(&mut self, of: Rank) -> u64 {
        lock(&self.world).pulses[of.0 as usize]
    }
    fn status(&mut self, of: Rank) -> Option<Status> {
        lock(&self.world).statuses[of.0 as usize]
    }
    fn abort(&mut self, abort: &Abort) {
        lock(&self.world).abort.get_or_insert(*abort);
    }
}

impl Exchange for LoopbackExchange {
    fn channels(&self) -> u16 {
        lock(&self.world).options.channels
    }

    fn begin(&mut self, call: &CallRecord, buffers: &mut Vec<View>) -> Result<(), Trouble> {
        self.buffers = std::mem::take(buffers);
        let status = &mut lock(&self.world).statuses[self.rank.0 as usize];
        let mut recent = status.map_or(Recent::NONE, |status| status.recent);
        recent.begin(call);
        *status = Some(Status {
            call: *call,
            ended: false,
            waiting: Waiting { step: 0, peer: None },
            recent,
        });
        Ok(())
    }

    fn buffer(&self, place: u32) -> &View {
        &self.buffers[place as usize]
    }

    fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        let view = self.view(from);
        let mut world = lock(&self.world);
        let World {
            options, chance, lanes, ..
        } = &mut *world;
        let messages = lanes.entry((self.rank, lane.peer, lane.channel)).or_default();
        if messages.waiting.len() >= options.room {
            return Ok(Offered::Full);
        }
        let copied = from.len <= options.eager_max && chance.chance(0.5);
        let offer = OfferId(messages.offered);
        messages.offered += 1;
        messages.waiting.push_back(Message {
            head: *head,
            delay: chance.below(options.delay_max + 1),
            taken: 0,
            bytes: match copied {
                true => Bytes::Copied(read(&view, 0, from.len)),
                false => Bytes::There(view, from.buffer),
            },
        });
        Ok(match copied {
            true => Offered::Settled,
            false => Offered::Open(offer),
        })
    }

    fn settled(&mut self, lane: Lane, offer: OfferId) -> bool {
        let world = lock(&self.world);
        let messages = world.lanes.get(&(self.rank, lane.peer, lane.channel));
        messages.is_some_and(|messages| offer.0 < messages.taken)
    }

    fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        let mut world = lock(&self.world);
        let World { chance, lanes, .. } = &mut *world;
        let Some(messages) = lanes.get_mut(&(lane.peer, self.rank, lane.channel)) else {
            return Ok(Taken::Nothing);
        };
        let Some(message) = messages.waiting.front_mut() else {
            return Ok(Taken::Nothing);
        };
        if message.delay > 0 {
            message.delay -= 1;
            return Ok(Taken::Nothing);
        }
        if message.head != *head {
            return Err(Trouble::WrongMessage {
                peer: lane.peer,
                expected: *head,
                found: message.head,
            });
        }
        // All of what is left, or some whole elements of it.
        let left = head.len - message.taken;
        let grain = match sink {
            Sink::Copy(_) => 1,
            Sink::Combine { how, .. } => how.size() as u64,
        };
        let len = match chance.chance(0.5) {
            true => left,
            false => chance.below(left / grain + 1) * grain,
        };
        let at = message.taken;
        let bytes = match &message.bytes {
            Bytes::Copied(bytes) => bytes[at as usize..(at + len) as usize].to_vec(),
            Bytes::There(view, _) => read(view, at, len),
        };
        match sink {
            Sink::Copy(into) => write(&self.view(*into), at, &bytes),
            Sink::Combine { with, into, how } => {
                let mut sum = read(&self.view(*with), at, len);
                fold(how, &mut sum, &bytes);
                write(&self.view(*into), at, &sum);
            }
        }
        message.taken += len;
        if message.taken < head.len {
            return Ok(Taken::Part);
        }
        messages.waiting.pop_front();
        messages.taken += 1;
        Ok(Taken::All)
    }

    fn poll(&mut self, _: Time) -> Result<Progress, Trouble> {
        let world = lock(&self.world);
        if let Some(abort) = &world.abort {
            return Err(Trouble::Aborted(Box::new(*abort)));
        }
        match world.dead.iter().position(|&dead| dead) {
            Some(rank) => Err(Trouble::Lost {
                rank: Rank(rank as u32),
                loss: Loss::ClosedByPeer,
            }),
            None => Ok(Progress::Idle),
        }
    }

    fn end(&mut self) -> Progress {
        self.buffers.clear();
        let mut world = lock(&self.world);
        if let Some(status) = &mut world.statuses[self.rank.0 as usize] {
            status.ended = true;
        }
        world.give_up(self.rank, |buffer| buffer & Lent::FIRST == 0);
        Progress::Idle
    }

    fn lend(&mut self, _: Rank, view: &View) -> Result<u32, Trouble> {
        Ok(self.lent.insert(view.clone()))
    }

    fn take_back(&mut self, _: Rank, buffer: u32) -> Progress {
        self.lent.remove(buffer);
        lock(&self.world).give_up(self.rank, |it| it == buffer);
        Progress::Idle
    }
}

impl World {
    /// What was given up is not read any more.
    fn give_up(&mut self, by: Rank, given_up: impl Fn(u32) -> bool) {
        let own = self.lanes.iter_mut().filter(|((from, ..), _)| *from == by);
        for (_, messages) in own {
            messages.waiting.retain(|message| match message.bytes {
                Bytes::Copied(_) => true,
                Bytes::There(_, buffer) => !given_up(buffer),
            });
        }
    }
}

impl LoopbackExchange {
    fn view(&self, piece: Piece) -> View {
        let buffer = match piece.is_lent() {
            true => self.lent.of(piece.buffer).expect("a buffer that is lent"),
            false => &self.buffers[piece.buffer as usize],
        };
        assert!(piece.offset + piece.len <= buffer.len, "a piece outside its buffer");
        View {
            memory: Arc::clone(&buffer.memory),
            offset: buffer.offset + piece.offset,
            len: piece.len,
            key: buffer.key,
        }
    }
}

fn read(view: &View, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    if len > 0 {
        view.memory.bytes().read(view.offset + offset, &mut bytes);
    }
    bytes
}

fn write(view: &View, offset: u64, bytes: &[u8]) {
    if !bytes.is_empty() {
        view.memory.bytes().write(view.offset + offset, bytes);
    }
}

fn lock(world: &Mutex<World>) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
