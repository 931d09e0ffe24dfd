//! The ranks of a group as a team on GPUs: kernels that reach each other's memory, without the host in between.
//!
//! Ranks meet by calls of the group itself. Each makes a heap and says what others need to map it; then each maps those of the others; then each says whether it could. All of them see the same
//! words, so all of them come to the same answer: a team, or the reason why there is none.
//!
//! While a team lives somebody looks whether its ranks do. A rank that is gone ends the waits of kernels soon, and not only when their deadline is over.

mod symmetric;

use std::io::Write as _;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use thiserror::Error as ThisError;
use weft_fabric::cuda::{
    Carrier, CollectiveError, Device, DeviceMemory, EXPORT_BYTES, Heap, PIECE_BYTES, RANKS_MAX, Team, TeamSettings,
};
use weft_fabric::fork::OfProcess;
use weft_fabric::memory::HostMemory;
use weft_fabric::shared_memory::{DescriptorExchange, host_identity};
use weft_plan::cost::kernels::DeviceCosts;
use weft_plan::{Datatype, Rank};

use super::{Communicator, Inner, Part};
use crate::error::Error;

pub use symmetric::Symmetric;

/// Between two looks at the lives of peers.
const LOOK: Duration = Duration::from_millis(50);
/// A rank that has ended its last call leaves, while others may still be about to end theirs: so long nobody is disturbed.
const GRACE: Duration = Duration::from_millis(1000);
/// As long as kernels wait at most.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);
/// Groups that may be in a kernel on one device at the same time, each on a stream of its own.
const GROUPS_AT_ONCE: u32 = 2;

/// How to make a team.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTeamOptions {
    /// This rank's device.
    pub device: u16,
    /// How long a kernel waits for a peer, and how long forming takes at most.
    pub deadline: Duration,
    /// How many ranks of all groups share a device, as far as the caller knows: all their kernels have to find room on it.
    pub ranks_a_device: u32,
    /// Bytes of a call that go through the heap at once. The same on all ranks.
    pub piece_bytes: u64,
}

impl DeviceTeamOptions {
    pub fn new(device: u16, deadline: Duration) -> DeviceTeamOptions {
        DeviceTeamOptions {
            device,
            deadline,
            ranks_a_device: 1,
            piece_bytes: PIECE_BYTES,
        }
    }
}

/// Why the ranks of a group are no team. All of them are told the same.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[error("rank {}: {why}", rank.0)]
pub struct NoTeam {
    pub rank: Rank,
    pub why: String,
}

/// What became of a team.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCause {
    /// A rank is gone.
    Lost,
    /// A rank did not come in time.
    Late,
    /// A rank has given up, or the team was given up here.
    Withdrew,
    /// The call is wrong, or the device does not do what it should.
    Refused,
}

/// One rank of a team on GPUs.
#[derive(Debug)]
pub struct DeviceTeam {
    member: OfProcess<Member>,
}

#[derive(Debug)]
struct Member {
    carrier: Carrier,
    group: Weak<Inner>,
    watched: Arc<Watched>,
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watched {
    lost: OnceLock<Rank>,
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Communicator {
    /// Makes the ranks of this group a team. Every rank calls it, for a device of its own or one that it shares.
    pub fn device_team(&self, options: DeviceTeamOptions) -> Result<Result<DeviceTeam, NoTeam>, Error> {
        let (rank, ranks) = (self.rank().0 as usize, self.size() as usize);
        if ranks > RANKS_MAX {
            let why = format!("a team has at most {RANKS_MAX} ranks, and this group has {ranks}");
            return Ok(Err(NoTeam { rank: Rank(0), why }));
        }
        let own = prepare(&options, self.device_costs());
        let (card, own) = match own {
            Ok((card, heap, door)) => (card, Some((heap, door))),
            Err(why) => (Card::refusal(&why), None),
        };
        let cards = self.tell_all(&card.to_bytes(), options.deadline)?;
        let cards: Vec<Card> = cards.iter().map(Card::from_bytes).collect();
        if let Some(none) = first_refusal(&cards) {
            return Ok(Err(none));
        }
        let joined = match own {
            Some((heap, door)) => map(&options, rank, heap, &door, &cards).map(|carrier| (carrier, door)),
            None => Err("nothing to join with".to_owned()),
        };
        let told = match &joined {
            Ok(_) => Card::default(),
            Err(why) => Card::refusal(why),
        };
        // Nobody uses anything before all have mapped it, and nobody closes its door before that either.
        let told = self.tell_all(&told.to_bytes(), options.deadline)?;
        let told: Vec<Card> = told.iter().map(Card::from_bytes).collect();
        if let Some(none) = first_refusal(&told) {
            return Ok(Err(none));
        }
        match joined {
            Ok((carrier, _door)) => Ok(Ok(DeviceTeam::new(self, carrier))),
            Err(why) => Ok(Err(NoTeam { rank: self.rank(), why })),
        }
    }

    /// What kernels take, as the platform file says, which is the same on all ranks: of the first of its GPUs of which it is known, so that ranks on different ones choose alike.
    fn device_costs(&self) -> DeviceCosts {
        let machines = self.inner.agent.platform().machines.iter();
        let mut known = machines.flat_map(|machine| &machine.gpus).filter_map(|gpu| gpu.costs);
        known.next().unwrap_or_default()
    }

    /// What every rank says, in their order.
    fn tell_all(&self, own: &[u8; CARD_BYTES], deadline: Duration) -> Result<Vec<[u8; CARD_BYTES]>, Error> {
        let all = Arc::new(HostMemory::from_vec(vec![0; CARD_BYTES * self.size() as usize]));
        let output = Part {
            len: (CARD_BYTES * self.size() as usize) as u64,
            held: super::Held::Foreign(all.clone()),
            offset: 0,
        };
        let input = HostMemory::from_vec(own.to_vec());
        self.all_gather(input, output, Datatype::U8).deadline(deadline).run()?;
        Ok(all.snapshot().as_chunks().0.to_vec())
    }

    fn gone(inner: &Inner) -> Option<Rank> {
        let peers = inner.member().ok()?.board.lock().peers().to_vec();
        let shared = inner.agent.shared().ok()?;
        let world = shared.lock();
        let lost = |id: &Option<_>| id.is_some_and(|id| world.core.identity(id).is_none());
        let rank = (0..).zip(&peers).find(|(rank, id)| *rank != inner.rank.0 && lost(id));
        rank.map(|(rank, _)| Rank(rank))
    }
}

/// A heap of this rank's, the door at which others are given its descriptor, and what they are told.
fn prepare(options: &DeviceTeamOptions, costs: DeviceCosts) -> Result<(Card, Heap, DescriptorExchange), String> {
    let device = Device::open(options.device).map_err(|error| error.to_string())?;
    let settings = TeamSettings {
        deadline: options.deadline.min(DEADLINE_MAX),
        data_bytes: Carrier::heap_bytes(options.piece_bytes),
        blocks_a_rank: None,
        costs,
    };
    let heap = Heap::allocate(&device, settings).map_err(|error| error.to_string())?;
    let export = heap.memory().export().map_err(|error| error.to_string())?;
    let door = DescriptorExchange::open().map_err(|error| format!("no socket: {error}"))?;
    let card = Card {
        refusal: None,
        blocks: heap.blocks_on_device(),
        multiprocessors: heap.memory().device().multiprocessors(),
        ranks_a_device: options.ranks_a_device,
        piece_bytes: options.piece_bytes,
        purpose: 0,
        export: export.bytes,
        door: door.name().to_owned(),
        host: host_identity().to_owned(),
    };
    Ok((card, heap, door))
}

/// Maps the heaps of all others.
fn map(
    options: &DeviceTeamOptions,
    rank: usize,
    heap: Heap,
    door: &DescriptorExchange,
    cards: &[Card],
) -> Result<Carrier, String> {
    let others = || cards.iter().enumerate().filter(|(other, _)| *other != rank);
    if let Some((other, _)) = others().find(|(_, card)| card.host != host_identity()) {
        return Err(format!("rank {other} is on another host"));
    }
    if let Some((other, card)) = others().find(|(_, card)| card.piece_bytes != options.piece_bytes) {
        return Err(format!("rank {other} has pieces of {} bytes", card.piece_bytes));
    }
    let heaps = import_others(heap.memory(), rank, door, cards, options.deadline)?;
    let team = Team::join(rank, heap.with_blocks_a_rank(blocks(cards)), heaps).map_err(|error| error.to_string())?;
    Carrier::new(&team, rank, options.piece_bytes).map_err(|error| error.to_string())
}

/// Maps what all others have of what this rank has here, in the order of their ranks.
fn import_others(
    own: &DeviceMemory,
    rank: usize,
    door: &DescriptorExchange,
    cards: &[Card],
    deadline: Duration,
) -> Result<Vec<DeviceMemory>, String> {
    let others = || cards.iter().enumerate().filter(|(other, _)| *other != rank);
    let export = own.export().map_err(|error| error.to_string())?;
    let file = export.file.ok_or("the memory has no descriptor")?;
    let doors: Vec<String> = others().map(|(_, card)| card.door.clone()).collect();
    let files = door.exchange(std::os::fd::AsFd::as_fd(&file), &doors, deadline);
    let files = files.map_err(|error| format!("the memories of others were not handed over: {error}"))?;
    let mut memories = Vec::with_capacity(files.len());
    for ((other, card), file) in others().zip(&files) {
        let file = std::os::fd::AsFd::as_fd(file);
        let imported = DeviceMemory::import_for(own.device(), &card.export, Some(file), true);
        memories.push(imported.map_err(|error| format!("the memory of rank {other} cannot be mapped: {error}"))?);
    }
    Ok(memories)
}

/// Blocks of one rank's launch: so few that all ranks that share a device have room on it, with kernels of several groups at once. The same on all ranks.
fn blocks(cards: &[Card]) -> u32 {
    let of_device = |card: &Card| {
        let identity = DeviceMemory::identity_in(&card.export);
        let same = |other: &&Card| DeviceMemory::identity_in(&other.export) == identity;
        cards.iter().filter(same).count() as u32
    };
    let each = cards.iter().map(|card| {
        let together = of_device(card);
        // Ranks that have a device each are taken to have it alone. Where several processes share one, a multiprocessor that has blocks of one takes none of another's while they last: ranks that
        // come early and have more blocks in all than there are multiprocessors leave no room for whoever comes late.
        match together.max(card.ranks_a_device) {
            ranks if together > 1 => card.multiprocessors / (ranks * GROUPS_AT_ONCE),
            _ => card.blocks / GROUPS_AT_ONCE,
        }
    });
    each.min().unwrap_or(1).max(1)
}

fn first_refusal(cards: &[Card]) -> Option<NoTeam> {
    let mut refusals = (0..).zip(cards);
    refusals.find_map(|(rank, card)| {
        let why = card.refusal.clone()?;
        Some(NoTeam { rank: Rank(rank), why })
    })
}

impl DeviceTeam {
    fn new(group: &Communicator, carrier: Carrier) -> DeviceTeam {
        let watched = Arc::new(Watched {
            lost: OnceLock::new(),
            is_over: Mutex::new(false),
            over: Condvar::new(),
        });
        let weak = Arc::downgrade(&group.inner);
        let watcher = (group.size() > 1).then(|| {
            let (watched, group, team) = (watched.clone(), weak.clone(), carrier.team().clone());
            let name = "weft-team".to_owned();
            let run = move || watch(&watched, &group, &team);
            std::thread::Builder::new().name(name).spawn(run).ok()
        });
        DeviceTeam {
            member: OfProcess::new(Member {
                carrier,
                group: weak,
                watched,
                watcher: watcher.flatten(),
            }),
        }
    }

    /// What calls go through.
    pub fn carrier(&self) -> Result<&Carrier, Error> {
        Ok(&self.member.get()?.carrier)
    }

    /// Ends all waits of kernels, here and soon at the other ranks. In a forked child it does nothing.
    pub fn abort(&self) {
        if let Ok(member) = self.member.get() {
            member.carrier.team().abort();
        }
    }

    /// Whether the team is still whole. What is on a stream may still fail.
    pub fn check(&self) -> Result<(), Error> {
        let carrier = self.carrier()?;
        let checked = carrier.team().check(carrier.rank());
        checked.map_err(|error| self.explain(error))
    }

    /// Who is to blame for what a call was refused for.
    pub fn explain(&self, error: CollectiveError) -> Error {
        let member = match self.member.get() {
            Ok(member) => member,
            Err(forked) => return forked.into(),
        };
        let team_failed = matches!(
            error,
            CollectiveError::PeerTimedOut { .. } | CollectiveError::PeerGaveUp { .. } | CollectiveError::Aborted
        );
        let look = || member.group.upgrade().and_then(|group| Communicator::gone(&group));
        let lost = team_failed
            .then(|| member.watched.lost.get().copied().or_else(look))
            .flatten();
        let why = error.to_string();
        let (rank, cause, why) = match (lost, error) {
            (Some(rank), _) => (Some(rank), DeviceCause::Lost, format!("rank {} was lost", rank.0)),
            (None, CollectiveError::PeerTimedOut { rank }) => (Some(Rank(rank as u32)), DeviceCause::Late, why),
            (None, CollectiveError::PeerGaveUp { rank }) => (Some(Rank(rank as u32)), DeviceCause::Withdrew, why),
            (None, CollectiveError::Aborted) => (None, DeviceCause::Withdrew, why),
            (None, CollectiveError::Gpu(gpu)) => return Error::Gpu(gpu),
            (None, _) => (None, DeviceCause::Refused, why),
        };
        Error::Device { rank, cause, why }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // While somebody still watches: a kernel that waits for a rank which has died would otherwise do so until its deadline.
        self.carrier.team().wait_for_device();
        *self.watched.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.watched.over.notify_all();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Ends the waits of kernels when a rank is gone.
fn watch(watched: &Watched, group: &Weak<Inner>, team: &Team) {
    let mut seen = Duration::ZERO;
    let mut is_over = watched.is_over.lock().unwrap_or_else(PoisonError::into_inner);
    while !*is_over {
        let waited = watched.over.wait_timeout(is_over, LOOK);
        is_over = waited.unwrap_or_else(PoisonError::into_inner).0;
        let Some(group) = group.upgrade() else { return };
        match Communicator::gone(&group) {
            Some(rank) => {
                seen += LOOK;
                if seen > GRACE {
                    let _ = watched.lost.set(rank);
                    team.abort();
                    return;
                }
            }
            None => seen = Duration::ZERO,
        }
    }
}

const CARD_BYTES: usize = 512;
const MAGIC: &[u8; 8] = b"weftgpu2";
const NAME_BYTES: usize = 64;
const AT_EXPORT: usize = 40;
const AT_DOOR: usize = AT_EXPORT + EXPORT_BYTES;
const AT_HOST: usize = AT_DOOR + NAME_BYTES;
const AT_REFUSAL: usize = AT_HOST + NAME_BYTES;

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Card {
    refusal: Option<String>,
    blocks: u32,
    multiprocessors: u32,
    ranks_a_device: u32,
    /// Of the heap's pieces; or of what is to be shared.
    piece_bytes: u64,
    /// What shared memory is for, which has to be the same on all ranks.
    purpose: u64,
    export: [u8; EXPORT_BYTES],
    door: String,
    host: String,
}

impl Default for Card {
    fn default() -> Card {
        Card {
            refusal: None,
            blocks: 0,
            multiprocessors: 0,
            ranks_a_device: 0,
            piece_bytes: 0,
            purpose: 0,
            export: [0; EXPORT_BYTES],
            door: String::new(),
            host: String::new(),
        }
    }
}

impl Card {
    fn refusal(why: &str) -> Card {
        Card {
            refusal: Some(why.to_owned()),
            ..Card::default()
        }
    }

    fn to_bytes(&self) -> [u8; CARD_BYTES] {
        let mut bytes = [0; CARD_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8] = self.refusal.is_some().into();
        bytes[12..16].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.ranks_a_device.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.multiprocessors.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.piece_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.purpose.to_le_bytes());
        bytes[AT_EXPORT..AT_DOOR].copy_from_slice(&self.export);
        // What is too long is cut; texts end with a zero.
        let mut put = |from: usize, to: usize, text: &str| {
            let room = &mut bytes[from..to - 1];
            let _ = (&mut room[..]).write_all(text.as_bytes());
        };
        put(AT_DOOR, AT_HOST, &self.door);
        put(AT_HOST, AT_REFUSAL, &self.host);
        put(AT_REFUSAL, CARD_BYTES, self.refusal.as_deref().unwrap_or_default());
        bytes
    }

    fn from_bytes(bytes: &[u8; CARD_BYTES]) -> Card {
        if &bytes[..8] != MAGIC {
            return Card::refusal("it speaks another version");
        }
        let text = |from: usize, to: usize| {
            let bytes = bytes[from..to].split(|byte| *byte == 0).next();
            String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
        };
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        Card {
            refusal: (bytes[8] != 0).then(|| text(AT_REFUSAL, CARD_BYTES)),
            blocks: word(12),
            multiprocessors: word(20),
            ranks_a_device: word(16),
            piece_bytes: u64::from_le_bytes(bytes[24..32].try_into().unwrap_or_default()),
            purpose: u64::from_le_bytes(bytes[32..40].try_into().unwrap_or_default()),
            export: bytes[AT_EXPORT..AT_DOOR].try_into().unwrap_or([0; EXPORT_BYTES]),
            door: text(AT_DOOR, AT_HOST),
            host: text(AT_HOST, AT_REFUSAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(device: u8, ranks_a_device: u32) -> Card {
        let mut export = [0; EXPORT_BYTES];
        export[EXPORT_BYTES - 1] = device;
        Card {
            refusal: None,
            blocks: 396,
            multiprocessors: 132,
            ranks_a_device,
            piece_bytes: 32 << 20,
            purpose: u64::MAX - 1,
            export,
            door: "weft-give-1-2-3".to_owned(),
            host: "here".to_owned(),
        }
    }

    #[test]
    fn cards_are_read_as_they_were_written_and_others_are_refusals() {
        for card in [
            card(3, 8),
            Card::default(),
            Card::refusal("no driver"),
            Card::refusal(""),
        ] {
            assert_eq!(Card::from_bytes(&card.to_bytes()), card);
        }
        let long = Card::refusal(&"x".repeat(1000));
        let cut = Card::from_bytes(&long.to_bytes()).refusal.unwrap();
        assert!(cut.len() > 100 && cut.len() < CARD_BYTES);
        assert!(Card::from_bytes(&[0; CARD_BYTES]).refusal.is_some());
        assert!(Card::from_bytes(&[0xff; CARD_BYTES]).refusal.is_some());
        // Whatever comes, it is read.
        let mut any = card(1, 1).to_bytes();
        any[AT_DOOR..].fill(0xff);
        assert!(!Card::from_bytes(&any).door.is_empty());
    }

    #[test]
    fn all_ranks_of_a_device_have_room_on_it_twice() {
        let together = |ranks: usize, known: u32| blocks(&vec![card(1, known); ranks]);
        assert_eq!(together(2, 1), 33);
        assert_eq!(together(8, 8), 8);
        // Two of four ranks that share the card.
        assert_eq!(together(2, 4), 16);
        let apart: Vec<Card> = (0..8).map(|device| card(device, 8)).collect();
        assert_eq!(blocks(&apart), 198);
        assert_eq!(blocks(&[Card::default(), Card::default()]), 1);
    }

    #[test]
    fn the_first_refusal_is_everybodys_reason() {
        let cards = [card(1, 1), Card::refusal("too old"), Card::refusal("no driver")];
        let none = first_refusal(&cards).unwrap();
        assert_eq!(none.to_string(), "rank 1: too old");
        assert_eq!(first_refusal(&cards[..1]), None);
    }
}
