//! How a group comes about: its ranks find each other, say where they are, and set up what they share.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::arena::{Arena, ArenaOptions, Neighbourhood, Seen};
use weft_plan::algorithms::Grid;
use weft_plan::{Rank, Time};
use weft_protocol::agent::Target;
use weft_protocol::group::Trouble;
use weft_protocol::memory::Digest;
use weft_protocol::region::RegionKey;
use weft_protocol::transfer::PeerId;
use weft_protocol::wire::{Reader, Writer};
use weft_protocol::{Epoch, Loss};

use super::Communicator;
use super::board::{Board, letter};
use super::exchange::GroupExchange;
use super::far::Far;
use super::state::State;
use crate::agent::{Agent, parse_addresses};
use crate::driver::{PeerState, Shared};
use crate::error::Error;
use crate::memory::{Memory, after};
use crate::rendezvous::Registration;

const HELLO: u8 = 0;
const SEGMENT: u8 = 1;
const HOST_BYTES_MAX: usize = 256;
/// How long to wait at a time for something that no event announces.
const LOOK_AGAIN: Time = Time::from_ms(5);

/// Which group to join, and as whom.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The group's name. All its ranks give the same, and no other group of the job has it.
    pub name: String,
    pub rank: Rank,
    pub size: u32,
    /// How long to wait for all ranks to come.
    pub timeout: Duration,
    /// By when a call ends, where it does not say.
    pub deadline: Duration,
    /// Use shared memory between ranks on one host.
    pub arena: bool,
    /// How many channels there are between two ranks: so many calls can run at once.
    pub channels: u16,
}

impl JoinOptions {
    pub fn new(name: &str, rank: Rank, size: u32) -> JoinOptions {
        JoinOptions {
            name: name.to_owned(),
            rank,
            size,
            timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(300),
            arena: true,
            channels: 4,
        }
    }
}

/// Where the agent of a rank is reached, and which life of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub address: String,
    pub epoch: Epoch,
}

/// A group in the making.
#[derive(Debug)]
pub(super) struct Formation {
    pub(super) agent: Agent,
    pub(super) board: Arc<Board>,
    pub(super) options: JoinOptions,
    pub(super) until: Time,
}

/// What a rank says of itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hello {
    rank: Rank,
    size: u32,
    host: String,
    arena: bool,
    channels: u16,
}

impl Communicator {
    /// Joins a group. The agent needs a rendezvous, where its ranks find each other.
    pub fn join(agent: &Agent, options: JoinOptions) -> Result<Communicator, Error> {
        let formation = Formation::of_name(agent, options)?;
        let registration = formation.find_lower_ranks()?;
        let group = formation.form();
        // From now on nobody looks for this rank any more.
        drop(registration);
        group
    }

    /// Joins a group whose ranks have found each other already: `members` says where each of them is, in order. Only those below this
    /// rank are looked at.
    pub fn meet(agent: &Agent, options: JoinOptions, members: &[Member]) -> Result<Communicator, Error> {
        let formation = Formation::of_name(agent, options)?;
        for lower in 0..formation.options.rank.0 {
            let Some(member) = members.get(lower as usize) else {
                let (rank, ranks) = (Rank(lower), members.len() as u32);
                return Err(super::CallError::NoSuchRank { rank, ranks }.into());
            };
            formation.find(Rank(lower), member)?;
        }
        formation.form()
    }
}

impl Formation {
    fn of_name(agent: &Agent, options: JoinOptions) -> Result<Formation, Error> {
        let JoinOptions { name, rank, size, .. } = &options;
        if rank.0 >= *size {
            let (rank, ranks) = (*rank, *size);
            return Err(super::CallError::NoSuchRank { rank, ranks }.into());
        }
        let id = group_id(&[name.as_bytes(), &size.to_le_bytes()]);
        Ok(Formation::new(agent, id, options))
    }

    pub(super) fn new(agent: &Agent, id: u64, options: JoinOptions) -> Formation {
        let board = Board::new(id, options.size);
        agent.shared().act(|world, now| {
            world.boards.push(board.clone());
            // Others may have been quicker, and have said hello already.
            board.hear(&mut world.core, now);
        });
        Formation {
            agent: agent.clone(),
            board,
            until: after(agent.shared(), options.timeout),
            options,
        }
    }

    /// Makes this rank known, and connects to all ranks below it; those above come by themselves.
    fn find_lower_ranks(&self) -> Result<Registration, Error> {
        let JoinOptions { name, rank, .. } = &self.options;
        let rendezvous = self.agent.rendezvous()?;
        let entry_of = |rank: u32| format!("{name}.{rank}");
        let registration = rendezvous.register(&entry_of(rank.0), &self.agent.address(), self.agent.epoch())?;
        for lower in 0..rank.0 {
            let entry = rendezvous.lookup(&entry_of(lower), self.left())?;
            let (address, epoch) = (entry.address, entry.epoch);
            self.find(Rank(lower), &Member { address, epoch })?;
        }
        Ok(registration)
    }

    /// Makes sure that there is a session with a rank.
    fn find(&self, rank: Rank, member: &Member) -> Result<(), Error> {
        let peer = match self.known(member.epoch) {
            Some(peer) => peer,
            None => self.agent.connect_peer(Target {
                addresses: parse_addresses(&member.address)?,
                deadline: self.until,
                name: None,
                epoch: Some(member.epoch),
            })?,
        };
        self.board.knows(rank, peer);
        Ok(())
    }

    /// Lets all ranks meet, and makes this one's end of the group.
    pub(super) fn form(self) -> Result<Communicator, Error> {
        let JoinOptions {
            rank, size, channels, ..
        } = self.options;
        let hellos = self.meet()?;
        let own = &hellos[rank.0 as usize];
        let near: Vec<bool> = hellos
            .iter()
            .map(|hello| own.arena && hello.arena && hello.host == own.host)
            .collect();
        let count = near.iter().filter(|near| **near).count();
        let arena = match count {
            0 | 1 => None,
            _ => Some(self.arena(&near, channels)?),
        };
        let used = (0..size)
            .map(|other| other != rank.0 && (arena.is_none() || !near[other as usize]))
            .collect();
        let hosts: Vec<&str> = hellos.iter().map(|hello| hello.host.as_str()).collect();
        let far = Far::new(&self.agent, self.board.clone(), used, channels);
        let exchange = GroupExchange::new(rank, near, arena, far, channels);
        let here = hosts.iter().filter(|host| **host == own.host).count();
        let state = State::new(self.agent.clone(), exchange, size, grid(&hosts), here)?;
        let group = Communicator::new(self.agent.clone(), state, self.board.clone(), self.options.clone())?;
        group.barrier().deadline(self.left()).run()?;
        Ok(group)
    }

    /// Says hello to every rank, and hears it from every rank.
    fn meet(&self) -> Result<Vec<Hello>, Error> {
        let JoinOptions {
            rank,
            size,
            arena,
            channels,
            ..
        } = self.options;
        let own = Hello {
            rank,
            size,
            host: self.agent.host(),
            arena: arena && self.agent.has_shared_memory(),
            channels,
        };
        let mut hellos: Vec<Option<Hello>> = vec![None; size as usize];
        hellos[rank.0 as usize] = Some(own.clone());
        let mut greeted = vec![false; size as usize];
        greeted[rank.0 as usize] = true;
        loop {
            for (peer, hello) in self.letters(HELLO) {
                let Some(hello) = Hello::read(&hello).filter(|hello| hello.rank.0 < size && hello.size == size) else {
                    continue;
                };
                let place = hello.rank.0 as usize;
                let known = self.board.peers()[place];
                // Nobody takes the place of a rank that has been found, or of this one.
                if hello.rank == rank || known.is_some_and(|known| known != peer) {
                    continue;
                }
                self.board.knows(hello.rank, peer);
                hellos[place].get_or_insert(hello);
            }
            for (other, peer) in self.board.peers().into_iter().enumerate() {
                if let Some(peer) = peer.filter(|_| !greeted[other]) {
                    self.send(peer, HELLO, &own.to_bytes())?;
                    greeted[other] = true;
                }
            }
            if greeted.iter().all(|greeted| *greeted) && hellos.iter().all(Option::is_some) {
                let hellos: Vec<Hello> = hellos.into_iter().flatten().collect();
                return match hellos.iter().find(|hello| hello.channels != channels) {
                    Some(other) => Err(Error::Formation(format!(
                        "rank {} has {} channels, this one {channels}",
                        other.rank.0, other.channels
                    ))),
                    None => Ok(hellos),
                };
            }
            let missing = || hellos.iter().enumerate().filter(|(_, hello)| hello.is_none());
            self.wait(|| {
                let ranks: Vec<String> = missing().map(|(rank, _)| rank.to_string()).collect();
                format!("rank {} of group {:?}", ranks.join(", "), self.options.name)
            })?;
        }
    }

    /// Sets up what the ranks on this host share.
    fn arena(&self, near: &[bool], channels: u16) -> Result<Arena, Error> {
        let own = self.options.rank;
        let ranks: Vec<Rank> = (0..near.len() as u32)
            .map(Rank)
            .filter(|rank| near[rank.0 as usize])
            .collect();
        let options = ArenaOptions {
            channels,
            ..ArenaOptions::new(ranks.len())
        };
        let segment = Arena::segment(ranks.len(), options)?;
        let memory = self.agent.register_shared(segment.clone())?;
        let key = memory.lent()?;
        let peers = self.board.peers();
        for rank in ranks.iter().filter(|rank| **rank != own) {
            let peer = peers[rank.0 as usize].ok_or(Error::Stopped)?;
            self.send(peer, SEGMENT, &key_bytes(&key))?;
        }
        let mut neighbourhood = Near {
            shared: self.agent.shared().clone(),
            peers: peers.clone(),
            segment: Some(memory),
        };
        let mut keys: Vec<Option<RegionKey>> = vec![None; near.len()];
        let mut seen: Vec<Option<Arc<dyn Seen>>> = vec![None; near.len()];
        loop {
            for (peer, bytes) in self.letters(SEGMENT) {
                let rank = peers.iter().position(|known| *known == Some(peer));
                if let (Some(rank), Some(key)) = (rank, read_key(&bytes)) {
                    keys[rank] = Some(key);
                }
            }
            for rank in ranks.iter().filter(|rank| **rank != own) {
                let place = rank.0 as usize;
                if let (None, Some(key)) = (&seen[place], &keys[place]) {
                    seen[place] = neighbourhood
                        .map(*rank, key)
                        .map_err(|trouble| Error::Formation(trouble.to_string()))?;
                }
            }
            let missing = || {
                ranks
                    .iter()
                    .filter(|rank| **rank != own && seen[rank.0 as usize].is_none())
            };
            if missing().next().is_none() {
                break;
            }
            self.wait(|| {
                let ranks: Vec<String> = missing().map(|rank| rank.0.to_string()).collect();
                format!("the shared memory of rank {}", ranks.join(", "))
            })?;
        }
        let neighbours = ranks.iter().map(|rank| (*rank, seen[rank.0 as usize].take()));
        Ok(Arena::new(
            options,
            segment,
            neighbours.collect(),
            Box::new(neighbourhood),
        )?)
    }

    /// The letters of one kind that have come. Others stay.
    fn letters(&self, kind: u8) -> Vec<(PeerId, Vec<u8>)> {
        self.board.take_letters(kind)
    }

    fn send(&self, to: PeerId, kind: u8, content: &[u8]) -> Result<(), Error> {
        let words = letter(kind, content);
        let group = self.board.group;
        let shared = self.agent.shared();
        while !shared.act(|world, now| world.core.send_parcel(to, group, &[&words], now))? {
            let now = shared.clock.now();
            if now >= self.until {
                return Err(Error::TimedOut {
                    what: format!("room for a letter of group {:?}", self.options.name),
                });
            }
            shared.wait_until(self.until.min(now.saturating_add(LOOK_AGAIN)), |_| None::<()>);
        }
        Ok(())
    }

    /// Waits a little for a letter, unless the time is over or a rank is gone.
    fn wait(&self, what: impl Fn() -> String) -> Result<(), Error> {
        let shared = self.agent.shared();
        let now = shared.clock.now();
        if now >= self.until {
            return Err(Error::TimedOut { what: what() });
        }
        let peers = self.board.peers();
        let gone = |peer: &PeerId, world: &crate::driver::World| match world.peers.get(peer) {
            Some(PeerState::Gone(error)) => Some(error.clone()),
            _ => None,
        };
        let until = self.until.min(now.saturating_add(LOOK_AGAIN));
        let lost = shared.wait_until(until, |world| {
            let lost = peers.iter().flatten().find_map(|peer| gone(peer, world));
            match lost {
                Some(error) => Some(Some(error)),
                None => self.board.has_letters().then_some(None),
            }
        });
        match lost {
            Some(Some(error)) => Err(error),
            _ => Ok(()),
        }
    }

    fn left(&self) -> Duration {
        self.until.saturating_sub(self.agent.shared().clock.now()).into()
    }

    /// A peer of this life that there is a session with already.
    fn known(&self, epoch: Epoch) -> Option<PeerId> {
        let world = self.agent.shared().lock();
        let connected = world
            .peers
            .iter()
            .filter(|(_, state)| matches!(state, PeerState::Connected { .. }));
        let mut same = connected.filter(|(peer, _)| world.core.identity(**peer).is_some_and(|it| it.epoch == epoch));
        same.next().map(|(peer, _)| *peer)
    }
}

/// How the arena of a group gets at the memory of its neighbours.
#[derive(Debug)]
struct Near {
    shared: Arc<Shared>,
    peers: Vec<Option<PeerId>>,
    /// Registered while the arena lives.
    #[expect(dead_code, reason = "held for what its end does")]
    segment: Option<Memory>,
}

impl Neighbourhood for Near {
    fn map(&mut self, rank: Rank, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Trouble> {
        let Some(peer) = self.peers.get(rank.0 as usize).copied().flatten() else {
            return Err(Trouble::Garbage { rank });
        };
        self.shared.act(|world, _| {
            if let Some(PeerState::Gone(_)) = world.peers.get(&peer) {
                let loss = Loss::ClosedByPeer;
                return Err(Trouble::Lost { rank, loss });
            }
            // A path that is being opened again will be there in a moment.
            let Some((transport, path)) = world.core.path_over(peer, "shared_memory") else {
                return Ok(None);
            };
            match transport.borrow(path, key) {
                Ok(mapping) => Ok(mapping.map(|mapping| mapping as Arc<dyn Seen>)),
                Err(weft_protocol::Failure::Refused(_)) => Err(Trouble::Garbage { rank }),
                Err(_) => Ok(None),
            }
        })
    }
}

impl Hello {
    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::new();
        for number in [self.rank.0, self.size, u32::from(self.channels)] {
            w.buf.extend_from_slice(&number.to_le_bytes());
        }
        w.u8(u8::from(self.arena));
        w.buf.extend_from_slice(self.host.as_bytes());
        w.buf
    }

    fn read(bytes: &[u8]) -> Option<Hello> {
        let mut r = Reader::new(bytes);
        let mut number = || Some(u32::from_le_bytes(r.take(4).ok()?.try_into().ok()?));
        let (rank, size, channels) = (number()?, number()?, number()?);
        let arena = r.u8().ok()? != 0;
        let host = r.take(r.remaining()).ok().filter(|host| host.len() <= HOST_BYTES_MAX)?;
        Some(Hello {
            rank: Rank(rank),
            size,
            host: std::str::from_utf8(host).ok()?.to_owned(),
            arena,
            channels: u16::try_from(channels).ok()?,
        })
    }
}

/// The number that the parcels of a group are told apart by.
pub(super) fn group_id(of: &[&[u8]]) -> u64 {
    let mut digest = Digest::default();
    of.iter().for_each(|part| digest.update(part));
    // The next one is for messages, and nobody else's.
    digest.finish() & !1
}

/// Nodes with equally many ranks each, if the ranks are counted node by node; else nothing is known.
fn grid(hosts: &[&str]) -> Grid {
    let flat = Grid::flat(hosts.len() as u32);
    let nodes: Vec<&[&str]> = hosts.chunk_by(|a, b| a == b).collect();
    let local = nodes.first().map_or(0, |node| node.len());
    let mut names: Vec<&str> = nodes.iter().map(|node| node[0]).collect();
    names.sort_unstable();
    names.dedup();
    match names.len() == nodes.len() && nodes.iter().all(|node| node.len() == local) {
        true => Grid {
            nodes: nodes.len() as u32,
            local: local as u32,
        },
        false => flat,
    }
}

fn key_bytes(key: &RegionKey) -> Vec<u8> {
    let mut bytes = key.epoch.0.to_le_bytes().to_vec();
    bytes.extend_from_slice(&key.slot.to_le_bytes());
    bytes.extend_from_slice(&key.secret.to_le_bytes());
    bytes
}

fn read_key(bytes: &[u8]) -> Option<RegionKey> {
    Some(RegionKey {
        epoch: Epoch(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)),
        slot: u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?),
        secret: u128::from_le_bytes(bytes.get(12..28)?.try_into().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_reads_back_and_garbage_does_not() {
        let hello = Hello {
            rank: Rank(3),
            size: 8,
            host: "a-host".to_owned(),
            arena: true,
            channels: 4,
        };
        assert_eq!(Hello::read(&hello.to_bytes()), Some(hello));
        assert_eq!(Hello::read(&[1, 2, 3]), None);
        assert_eq!(Hello::read(&[0; 400]), None);
    }

    #[test]
    fn regular_nodes_make_a_grid() {
        assert_eq!(grid(&["a", "a", "b", "b"]), Grid { nodes: 2, local: 2 });
        assert_eq!(grid(&["a", "a", "b"]), Grid::flat(3));
        assert_eq!(grid(&["a", "b", "a", "b"]), Grid::flat(4));
        assert_eq!(grid(&["a", "a"]), Grid::flat(2));
    }
}
