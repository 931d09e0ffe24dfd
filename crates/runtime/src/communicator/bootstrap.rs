//! How a group comes about: its ranks find each other, say where they are, and set up what they share.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::arena::{Arena, ArenaOptions, Neighbourhood, Seen};
use weft_fabric::fork::Forked;
use weft_plan::algorithms::Grid;
use weft_plan::cost::{CHANNELS, Placement};
use weft_plan::{Rank, Time};
use weft_protocol::agent::Target;
use weft_protocol::group::{Abort, CallRecord, Cause, Trouble};
use weft_protocol::memory::Digest;
use weft_protocol::region::RegionKey;
use weft_protocol::session::Identity;
use weft_protocol::transfer::PeerId;
use weft_protocol::transport::PeerAddress;
use weft_protocol::wire::{Reader, Writer};
use weft_protocol::{Epoch, Loss};

use super::Communicator;
use super::board::{Board, letter, tell_abort};
use super::choice::{Choice, Settled};
use super::exchange::GroupExchange;
use super::far::Far;
use super::state::State;
use crate::agent::{Agent, parse_addresses};
use crate::driver::{PeerState, Shared};
use crate::error::Error;
use crate::interrupt;
use crate::memory::{Memory, after};
use crate::rendezvous::{Registration, World};

const HELLO: u8 = 0;
const SEGMENT: u8 = 1;
/// Of each of the texts in a hello.
const TEXT_BYTES_MAX: usize = 256;
/// Beside the channels of calls there is one for messages between two ranks.
const MESSAGES: u16 = 1;
/// Every channel takes memory between any two ranks.
const CHANNELS_MAX: u16 = 1024;
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
    /// To join all processes that a launcher has started together.
    pub fn of_world(name: &str, world: &World) -> JoinOptions {
        JoinOptions::new(name, Rank(world.rank), world.size)
    }

    pub fn new(name: &str, rank: Rank, size: u32) -> JoinOptions {
        JoinOptions {
            name: name.to_owned(),
            rank,
            size,
            timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(300),
            arena: true,
            channels: CHANNELS,
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
    shared: Arc<Shared>,
    pub(super) board: Arc<Listening>,
    pub(super) options: JoinOptions,
    pub(super) until: Time,
    /// That of the group that this one is made of.
    parent: Option<Arc<Listening>>,
}

/// A board that the agent tells of what comes, until it is dropped.
#[derive(Debug)]
pub(super) struct Listening {
    agent: Agent,
    board: Arc<Board>,
}

impl std::ops::Deref for Listening {
    type Target = Arc<Board>;

    fn deref(&self) -> &Arc<Board> {
        &self.board
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.agent.forget_board(&self.board);
    }
}

/// What a rank says of itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hello {
    rank: Rank,
    size: u32,
    arena: bool,
    channels: u16,
    /// A digest of the platform that it chooses by.
    platform: u64,
    host: String,
    /// The name of its platform.
    platform_name: String,
    /// The names of its transports, best first, with commas between them.
    transports: String,
}

impl Communicator {
    /// Joins all processes that a launcher has started together (torchrun, MPI, Slurm), as the rank that its variables name, with an agent
    /// that is made for it. All of them give the same name.
    ///
    /// On one host the variables of the launcher are enough. Ranks on several hosts need the same secret too (`WEFT_SECRET`), and have to be
    /// told where rank 0 is (`MASTER_ADDR`, `MASTER_PORT`), unless the launcher does that, as torchrun and Slurm do.
    pub fn from_env(name: &str) -> Result<Communicator, Error> {
        let world = World::of_process()?;
        let agent = Agent::builder(&format!("{name}-{}", world.rank))
            .for_world(&world)
            .start()?;
        Communicator::join(&agent, JoinOptions::of_world(name, &world))
    }

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
        if options.channels == 0 || options.channels > CHANNELS_MAX {
            return Err(Error::Formation(format!(
                "{} channels, where 1 to {CHANNELS_MAX} can be",
                options.channels
            )));
        }
        if rank.0 >= *size {
            let (rank, ranks) = (*rank, *size);
            return Err(super::CallError::NoSuchRank { rank, ranks }.into());
        }
        let id = group_id(&[name.as_bytes(), &size.to_le_bytes()]);
        Ok(Formation::new(agent, id, options, None)?)
    }

    pub(super) fn new(
        agent: &Agent,
        id: u64,
        options: JoinOptions,
        parent: Option<Arc<Listening>>,
    ) -> Result<Formation, Forked> {
        let shared = agent.shared()?;
        let board = Board::new(id, options.size);
        shared.act(|world, now| {
            world.boards.push(board.clone());
            world.core.open_parcels(id);
            world.core.open_parcels(id + 1);
            // Others may have been quicker, and have said hello already.
            board.hear(&mut world.core, now);
        });
        Ok(Formation {
            agent: agent.clone(),
            shared: shared.clone(),
            board: Arc::new(Listening {
                agent: agent.clone(),
                board,
            }),
            until: after(shared, options.timeout),
            options,
            parent,
        })
    }

    /// Makes this rank known, and connects to all ranks below it; those above come by themselves.
    fn find_lower_ranks(&self) -> Result<Registration, Error> {
        let JoinOptions { name, rank, .. } = &self.options;
        let rendezvous = self.agent.rendezvous_for(name)?;
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
        let addresses = parse_addresses(&member.address)?;
        let peer = match self.known(&addresses, member.epoch) {
            Some(peer) => peer,
            None => self.agent.connect_peer(Target {
                addresses,
                deadline: self.until,
                name: None,
                epoch: Some(member.epoch),
            })?,
        };
        self.board.knows(rank, peer);
        Ok(())
    }

    /// Lets all ranks meet, and makes this one's end of the group. A rank that cannot says so to the others.
    pub(super) fn form(self) -> Result<Communicator, Error> {
        let formed = self.try_form();
        if formed.is_err() {
            let rank = self.options.rank;
            let told = tell_abort(&Abort {
                by: rank,
                blamed: rank,
                cause: Cause::Withdrew,
                step: 0,
                called: CallRecord::new(0, 0, "forming the group"),
                instead: None,
            });
            self.shared.act(|world, now| {
                for peer in self.board.peers().into_iter().flatten() {
                    // Whoever is gone needs not be told.
                    let _ = world.core.send_parcel(peer, self.board.group, &[&told], now);
                }
            });
        }
        formed
    }

    fn try_form(&self) -> Result<Communicator, Error> {
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
            _ => Some(self.arena(&near, channels + MESSAGES)?),
        };
        let used = (0..size)
            .map(|other| other != rank.0 && (arena.is_none() || !near[other as usize]))
            .collect();
        let far = Far::new(&self.agent, (**self.board).clone(), used, channels + MESSAGES)?;
        let exchange = GroupExchange::new(rank, near, arena, far, channels);
        let placement = Placement::over(self.agent.platform(), grid(&hellos), &across(&hellos))?;
        let here = hellos.iter().filter(|hello| hello.host == own.host).count();
        let settings = self.agent.settings();
        let settled = Settled {
            deterministic: settings.collective_deterministic,
            algorithms: settings.collective_algorithms.clone(),
        };
        let choice = Choice::new(Placement { channels, ..placement }, settled)?;
        let state = State::new(self.agent.clone(), exchange, size, choice, here)?;
        let boards = (self.board.clone(), self.parent.clone());
        let group = Communicator::new(self.agent.clone(), state, boards, self.options.clone())?;
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
        let platform = self.agent.platform();
        let transports = self.agent.transport_names()?;
        let mut digest = Digest::default();
        digest.update(platform.to_toml().as_bytes());
        let own = Hello {
            rank,
            size,
            arena: arena && transports.contains(&"shared_memory"),
            channels,
            platform: digest.finish(),
            host: self.agent.host()?,
            platform_name: platform.name.clone(),
            transports: transports.join(","),
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
                if let Some(other) = hellos.iter().find(|hello| hello.channels != channels) {
                    return Err(Error::Formation(format!(
                        "rank {} has {} channels, this one {channels}",
                        other.rank.0, other.channels
                    )));
                }
                return match hellos.iter().find(|hello| hello.platform != own.platform) {
                    Some(other) => Err(Error::DifferentPlatforms {
                        rank: other.rank,
                        theirs: other.platform_words(),
                        ours: own.platform_words(),
                    }),
                    None => Ok(hellos),
                };
            }
            let missing = || hellos.iter().enumerate().filter(|(_, hello)| hello.is_none());
            self.wait(HELLO, || {
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
            shared: self.shared.clone(),
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
            self.wait(SEGMENT, || {
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
        let shared = &self.shared;
        while !shared.act(|world, now| world.core.send_parcel(to, group, &[&words], now))? {
            let now = shared.clock.now();
            self.check_time(now, || format!("room for a letter of group {:?}", self.options.name))?;
            shared.wait_until(self.until.min(now.saturating_add(LOOK_AGAIN)), |_| None::<()>);
        }
        Ok(())
    }

    /// Waits a little for a letter of a kind, unless the time is over or a rank is gone.
    fn wait(&self, kind: u8, what: impl Fn() -> String) -> Result<(), Error> {
        let shared = &self.shared;
        let now = shared.clock.now();
        self.check_time(now, what)?;
        if let Some(abort) = self.board.abort() {
            return Err(Error::Formation(abort.to_string()));
        }
        let peers = self.board.peers();
        let gone = |peer: &PeerId, world: &crate::driver::World| match world.peers.get(peer) {
            Some(PeerState::Gone(error)) => Some(error.clone()),
            _ => None,
        };
        let until = self.until.min(now.saturating_add(LOOK_AGAIN));
        let lost = shared.wait_until(until, |world| {
            // Whoever is gone may have said why before.
            if self.board.has_letters(kind) {
                return Some(None);
            }
            let lost = peers.iter().flatten().find_map(|peer| gone(peer, world));
            lost.map(Some)
        });
        match lost {
            Some(Some(error)) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether to go on waiting.
    fn check_time(&self, now: Time, what: impl FnOnce() -> String) -> Result<(), Error> {
        let shared = self.agent.shared()?;
        if now >= self.until || shared.is_stopped() || interrupt::is_due() {
            return Err(shared.in_vain(what));
        }
        Ok(())
    }

    fn left(&self) -> Duration {
        self.until.saturating_sub(self.shared.clock.now()).into()
    }

    /// The agent of this life at one of these addresses, if there is a session with it already.
    fn known(&self, addresses: &[PeerAddress], epoch: Epoch) -> Option<PeerId> {
        let world = self.shared.lock();
        let connected = world
            .peers
            .iter()
            .filter(|(_, state)| matches!(state, PeerState::Connected { .. }));
        let mut same = connected.filter(|(peer, _)| {
            let identity = world.core.identity(**peer);
            identity.is_some_and(|identity| is_at(identity, addresses, epoch))
        });
        same.next().map(|(peer, _)| *peer)
    }
}

/// Whether this is the agent that is reached at one of these addresses, in that life of it. The life alone does not tell: it is the time
/// of a start, and two agents may start in the same instant.
fn is_at(identity: &Identity, addresses: &[PeerAddress], epoch: Epoch) -> bool {
    identity.epoch == epoch && identity.addresses.iter().any(|address| addresses.contains(address))
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
                Ok(mapping) => Ok(mapping.map(|mapping| {
                    mapping.keep_from_children();
                    mapping as Arc<dyn Seen>
                })),
                Err(weft_protocol::Failure::Refused(_)) => Err(Trouble::Garbage { rank }),
                Err(_) => Ok(None),
            }
        })
    }
}

impl Hello {
    fn platform_words(&self) -> String {
        format!("`{}` ({:016x})", self.platform_name, self.platform)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::new();
        for number in [self.rank.0, self.size, u32::from(self.channels)] {
            w.buf.extend_from_slice(&number.to_le_bytes());
        }
        w.u8(u8::from(self.arena));
        w.buf.extend_from_slice(&self.platform.to_le_bytes());
        for text in [&self.host, &self.platform_name, &self.transports] {
            let text = &text[..text.floor_char_boundary(TEXT_BYTES_MAX)];
            w.buf.extend_from_slice(&(text.len() as u16).to_le_bytes());
            w.buf.extend_from_slice(text.as_bytes());
        }
        w.buf
    }

    fn read(bytes: &[u8]) -> Option<Hello> {
        let mut r = Reader::new(bytes);
        let mut number = || Some(u32::from_le_bytes(r.take(4).ok()?.try_into().ok()?));
        let (rank, size, channels) = (number()?, number()?, number()?);
        let arena = r.u8().ok()? != 0;
        let platform = u64::from_le_bytes(r.take(8).ok()?.try_into().ok()?);
        let mut text = || {
            let len = u16::from_le_bytes(r.take(2).ok()?.try_into().ok()?);
            let len = Some(usize::from(len)).filter(|len| *len <= TEXT_BYTES_MAX)?;
            Some(std::str::from_utf8(r.take(len).ok()?).ok()?.to_owned())
        };
        let (host, platform_name, transports) = (text()?, text()?, text()?);
        let hello = Hello {
            rank: Rank(rank),
            size,
            arena,
            channels: u16::try_from(channels).ok()?,
            platform,
            host,
            platform_name,
            transports,
        };
        Some(hello).filter(|_| r.remaining() == 0)
    }
}

/// The number that the parcels of a group are told apart by.
pub(super) fn group_id(of: &[&[u8]]) -> u64 {
    let mut digest = Digest::default();
    of.iter().for_each(|part| digest.update(part));
    // The next one is for messages, and nobody else's.
    digest.finish() & !1
}

/// Nodes with equally many ranks each, if the ranks are counted node by node; else every rank is far from every other. A node is a host
/// whose ranks have an arena.
fn grid(hellos: &[Hello]) -> Grid {
    let together = |a: &Hello, b: &Hello| a.arena && b.arena && a.host == b.host;
    let nodes: Vec<&[Hello]> = hellos.chunk_by(together).collect();
    let local = nodes.first().map_or(0, |node| node.len());
    let mut names: Vec<&str> = nodes
        .iter()
        .filter(|node| node[0].arena)
        .map(|node| node[0].host.as_str())
        .collect();
    let shared = names.len();
    names.sort_unstable();
    names.dedup();
    match names.len() == shared && nodes.iter().all(|node| node.len() == local) {
        true => Grid {
            nodes: nodes.len() as u32,
            local: local as u32,
        },
        false => Grid {
            nodes: hellos.len() as u32,
            local: 1,
        },
    }
}

/// The transports by which ranks of different nodes reach each other, the one that is used first.
fn across(hellos: &[Hello]) -> Vec<&str> {
    let one_host = hellos.iter().all(|hello| hello.host == hellos[0].host);
    let has = |hello: &Hello, name: &str| hello.transports.split(',').any(|known| known == name);
    let names = hellos.first().map_or("", |first| first.transports.as_str()).split(',');
    names
        .filter(|name| hellos.iter().all(|hello| has(hello, name)))
        .filter(|name| one_host || *name != "shared_memory")
        .collect()
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

    fn hello(rank: u32, host: &str, arena: bool, transports: &str) -> Hello {
        Hello {
            rank: Rank(rank),
            size: 8,
            arena,
            channels: 4,
            platform: 0xabc,
            host: host.to_owned(),
            platform_name: "laptop".to_owned(),
            transports: transports.to_owned(),
        }
    }

    #[test]
    fn a_hello_reads_back_and_garbage_does_not() {
        let said = hello(3, "a-host", true, "shared_memory,tcp");
        let bytes = said.to_bytes();
        assert_eq!(Hello::read(&bytes), Some(said));
        assert_eq!(Hello::read(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Hello::read(&[bytes, vec![0]].concat()), None);
        assert_eq!(Hello::read(&[1, 2, 3]), None);
        assert_eq!(Hello::read(&[255; 400]), None);
        let long = hello(0, &"é".repeat(300), true, "tcp");
        let read = Hello::read(&long.to_bytes()).unwrap();
        assert!(long.host.starts_with(&read.host) && read.host.len() == TEXT_BYTES_MAX);
    }

    #[test]
    fn two_agents_of_one_instant_are_told_apart() {
        let of = |port: u16| PeerAddress(format!("tcp:127.0.0.1:{port}"));
        let first = Identity {
            name: "first".to_owned(),
            epoch: Epoch(7),
            host: "here".to_owned(),
            addresses: vec![PeerAddress("shared_memory:@first/here".to_owned()), of(1)],
            version: 1,
        };
        assert!(is_at(&first, &[of(1)], Epoch(7)));
        assert!(!is_at(&first, &[of(2)], Epoch(7)));
        assert!(!is_at(&first, &[of(1)], Epoch(8)));
    }

    #[test]
    fn regular_nodes_make_a_grid() {
        let of = |hosts: &str| {
            let hosts = hosts.chars().zip(0..);
            // Capital letters: hosts whose ranks have an arena.
            let all: Vec<Hello> = hosts
                .map(|(host, rank)| hello(rank, &host.to_ascii_lowercase().to_string(), host.is_uppercase(), "tcp"))
                .collect();
            let grid = grid(&all);
            (grid.nodes, grid.local)
        };
        assert_eq!(of("AABB"), (2, 2));
        assert_eq!(of("AA"), (1, 2));
        assert_eq!(of("AAB"), (3, 1));
        assert_eq!(of("ABAB"), (4, 1));
        assert_eq!(of("aa"), (2, 1));
        assert_eq!(of("aabb"), (4, 1));
        assert_eq!(of("AAb"), (3, 1));
    }

    #[test]
    fn what_all_have_is_used_in_the_order_of_the_first() {
        let all = "shared_memory,verbs,tcp";
        assert_eq!(
            across(&[hello(0, "a", true, all), hello(1, "b", true, all)]),
            ["verbs", "tcp"]
        );
        assert_eq!(across(&[hello(0, "a", true, all), hello(1, "b", true, "tcp")]), ["tcp"]);
        assert_eq!(
            across(&[hello(0, "a", false, all), hello(1, "a", true, all)])[0],
            "shared_memory"
        );
    }
}
