//! How a group comes about: its ranks find each other, say where they are, and set up what they share.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::arena::{Arena, ArenaOptions, Neighbourhood, Seen};
use weft_fabric::fork::Forked;
use weft_plan::algorithms::Grid;
use weft_plan::cost::{CHANNELS, Placement};
use weft_plan::{Rank, Time};
use weft_protocol::agent::Target;
use weft_protocol::group::{Far, Forming, FormingError, Hello, Note, Trouble, group_id};
use weft_protocol::memory::Digest;
use weft_protocol::region::RegionKey;
use weft_protocol::session::Identity;
use weft_protocol::transfer::PeerId;
use weft_protocol::transport::PeerAddress;
use weft_protocol::{Epoch, Loss};

use super::Communicator;
use super::board::Board;
use super::choice::{Choice, Settled};
use super::exchange::GroupExchange;
use super::seat::AgentSeat;
use super::state::State;
use crate::agent::{Agent, parse_addresses};
use crate::driver::{PeerState, Shared};
use crate::error::Error;
use crate::interrupt;
use crate::memory::{Memory, after};
use crate::rendezvous::{Registration, World};

/// The kind of letter that says under which key a rank's part of the arena is lent.
const SEGMENT: u8 = 1;
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
            board.lock().hear(&mut world.core, now);
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
        self.board.lock().knows(rank, peer);
        Ok(())
    }

    /// Lets all ranks meet, and makes this one's end of the group. A rank that cannot says so to the others.
    pub(super) fn form(self) -> Result<Communicator, Error> {
        let formed = self.try_form();
        if formed.is_err() {
            self.shared
                .act(|world, now| Forming::withdraw(self.options.rank, &mut world.core, &self.board.lock(), now));
        }
        formed
    }

    fn try_form(&self) -> Result<Communicator, Error> {
        let JoinOptions {
            rank, size, channels, ..
        } = self.options;
        let hellos = self.meet()?;
        let own = &hellos[rank.0 as usize];
        let exchange = self.exchange(&hellos)?;
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

    /// This rank's end of the exchange between ranks that have said hello.
    fn exchange(&self, hellos: &[Hello]) -> Result<GroupExchange, Error> {
        let JoinOptions {
            rank, size, channels, ..
        } = self.options;
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
        let used: Vec<bool> = (0..size)
            .map(|other| other != rank.0 && (arena.is_none() || !near[other as usize]))
            .collect();
        let seat = AgentSeat::new(&self.agent, (**self.board).clone())?;
        let far = Far::new(seat, &used, channels);
        Ok(GroupExchange::new(rank, near, arena, far, channels))
    }

    /// An exchange without the communicator that would use it. It lives as long as the formation does; others find this rank as long as the
    /// registration does.
    #[cfg(test)]
    pub(super) fn only_exchange(
        agent: &Agent,
        options: JoinOptions,
    ) -> Result<(Formation, Registration, GroupExchange), Error> {
        let formation = Formation::of_name(agent, options)?;
        let registration = formation.find_lower_ranks()?;
        let exchange = formation.exchange(&formation.meet()?)?;
        Ok((formation, registration, exchange))
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
        let mut forming = Forming::new(own);
        let shared = &self.shared;
        loop {
            let met = shared.act(|world, now| forming.poll(&mut world.core, &mut self.board.lock(), now));
            match met {
                Ok(Some(hellos)) => return Ok(hellos),
                Ok(None) => {}
                Err(error) => return Err(self.unformed(error)),
            }
            let missing = || {
                let ranks: Vec<String> = forming.missing().map(|rank| rank.0.to_string()).collect();
                format!("rank {} of group {:?}", ranks.join(", "), self.options.name)
            };
            self.check_time(shared.clock.now(), missing)?;
            self.pause(weft_protocol::group::HELLO);
        }
    }

    fn unformed(&self, error: FormingError) -> Error {
        match error {
            FormingError::Platforms { rank, theirs, ours } => Error::DifferentPlatforms { rank, theirs, ours },
            FormingError::Lost { rank } => self.gone(rank).unwrap_or(Error::Formation(error.to_string())),
            other => Error::Formation(other.to_string()),
        }
    }

    /// Why a rank is gone, if it is.
    fn gone(&self, rank: Rank) -> Option<Error> {
        let peer = self.board.lock().peers()[rank.0 as usize]?;
        match self.shared.lock().peers.get(&peer) {
            Some(PeerState::Gone(error)) => Some(error.clone()),
            _ => None,
        }
    }

    /// Waits a little for a letter of a kind.
    fn pause(&self, kind: u8) {
        let until = self.until.min(self.shared.clock.now().saturating_add(LOOK_AGAIN));
        self.shared
            .wait_until(until, |_| self.board.lock().has_letters(kind).then_some(()));
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
        let peers = self.peers();
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
        self.board.lock().take_letters(kind)
    }

    fn peers(&self) -> Vec<Option<PeerId>> {
        self.board.lock().peers().to_vec()
    }

    fn send(&self, to: PeerId, kind: u8, content: &[u8]) -> Result<(), Error> {
        let content = content.to_vec();
        let words = Note::Letter { kind, content }.to_bytes();
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
        self.check_time(self.shared.clock.now(), what)?;
        if let Some(abort) = self.board.lock().abort() {
            return Err(Error::Formation(abort.to_string()));
        }
        self.pause(kind);
        // Whoever is gone may have said why before.
        if self.board.lock().has_letters(kind) {
            return Ok(());
        }
        let gone = (0..self.options.size).find_map(|rank| self.gone(Rank(rank)));
        gone.map_or(Ok(()), Err)
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
                Ok(mapping) => Ok(mapping.inspect(|mapping| mapping.keep_from_children())),
                Err(weft_protocol::Failure::Refused(_)) => Err(Trouble::Garbage { rank }),
                Err(_) => Ok(None),
            }
        })
    }
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
