//! One store of a world: an agent, a shelf in memory, and its place among the others.

use std::collections::BTreeMap;
use std::sync::Arc;

use weft_plan::{Place, Time};
use weft_protocol::block::directory::{Directory, FetchId, Lent, Members, Settings, Token};
use weft_protocol::block::shelf::format::{Geometry, TenantKey};
use weft_protocol::block::shelf::{Medium, ReadId, Shelf, ShelfEvent, ShelfOptions, ShelfPut};
use weft_protocol::block::{BlockId, Shape, checksum};
use weft_protocol::seeded::Seeded;
use weft_protocol::transfer::PeerId;
use weft_protocol::{Epoch, HostBytes, Region, RegionKey, VecMemory};

use super::{BLOCK_BYTES, BLOCKS};
use crate::agent::SimAgent;
use crate::world::NodeId;

/// What was wanted together, and what has come of it.
pub(super) struct Wish {
    pub(super) blocks: Vec<u64>,
    pub(super) ended: Vec<bool>,
    pub(super) memory: Arc<VecMemory>,
    pub(super) region: Region,
    pub(super) deadline: Time,
    /// In calm: who has it, so that it has to come.
    pub(super) surely_from: Option<usize>,
    /// What its memory holds since it ended.
    pub(super) image: Option<Vec<u8>>,
}

pub(super) struct Store {
    pub(super) shelf: Shelf,
    pub(super) members: Members,
    slab: Arc<VecMemory>,
    shape: Shape,
    pub(super) tokens: BTreeMap<Token, ReadId>,
    next_token: u64,
    /// What somebody wants to read, and has not been lent.
    pub(super) asked: Vec<(u64, PeerId, u64, Vec<BlockId>)>,
    pub(super) wishes: BTreeMap<FetchId, Wish>,
}

pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) name: String,
    pub(super) agent: Option<SimAgent>,
    pub(super) store: Option<Store>,
    pub(super) epoch: Epoch,
    pub(super) frozen_until: Option<Time>,
    pub(super) wake: Option<Time>,
    /// Whom it has a session with.
    pub(super) peers: BTreeMap<PeerId, usize>,
    pub(super) epochs: BTreeMap<PeerId, Epoch>,
    pub(super) connecting: BTreeMap<usize, PeerId>,
    /// When its earlier lives ended.
    pub(super) deaths: BTreeMap<Epoch, Time>,
    pub(super) releasing: Vec<RegionKey>,
}

impl Node {
    pub(super) fn new(id: NodeId, name: String) -> Node {
        Node {
            id,
            name,
            agent: None,
            store: None,
            epoch: Epoch(0),
            frozen_until: None,
            wake: None,
            peers: BTreeMap::new(),
            epochs: BTreeMap::new(),
            connecting: BTreeMap::new(),
            deaths: BTreeMap::new(),
            releasing: Vec::new(),
        }
    }

    pub(super) fn begin(
        &mut self,
        mut agent: SimAgent,
        epoch: Epoch,
        shape: &Shape,
        settings: Settings,
        slots: u64,
        salt: u64,
    ) {
        let geometry = Geometry::new(BLOCK_BYTES, slots * 4096, slots * 4096).expect("a geometry");
        let options = ShelfOptions::new(Medium::Memory);
        let slab = Arc::new(VecMemory::zeroed(geometry.data_bytes() as usize));
        let region = agent.core.register(slab.clone(), Place::DRAM);
        let region = region.expect("the simulated fabrics take any memory");
        let machine = Directory::new(&self.name, epoch, shape, settings, salt);
        let now = agent.now();
        let members = Members::open(&mut agent.core, machine, vec![region], [], now);
        self.store = Some(Store {
            shelf: Shelf::in_memory(geometry, shape, options),
            members: members.expect("nothing else is published"),
            slab,
            shape: shape.clone(),
            tokens: BTreeMap::new(),
            next_token: 0,
            asked: Vec::new(),
            wishes: BTreeMap::new(),
        });
        (self.agent, self.wake, self.epoch) = (Some(agent), None, epoch);
        self.releasing.clear();
    }

    pub(super) fn die(&mut self, now: Time) {
        if self.agent.is_some() {
            self.deaths.insert(self.epoch, now);
        }
        (self.agent, self.store, self.frozen_until) = (None, None, None);
        self.peers.clear();
        self.epochs.clear();
        self.connecting.clear();
    }

    pub(super) fn epoch_of(&self, peer: PeerId) -> Option<Epoch> {
        self.epochs.get(&peer).copied()
    }

    pub(super) fn members(&self) -> usize {
        self.store
            .as_ref()
            .map_or(0, |store| store.members.machine.members().count())
    }

    pub(super) fn held(&self) -> Vec<u64> {
        (0..BLOCKS).filter(|block| self.has(*block)).collect()
    }

    /// Damaged copies are found out and go.
    pub(super) fn look_at_all(&mut self) {
        let held: Vec<BlockId> = self.held().into_iter().map(id).collect();
        if let (Some(agent), Some(store)) = (&self.agent, &mut self.store) {
            store.look_at(&held, agent.now());
        }
    }

    pub(super) fn has(&self, block: u64) -> bool {
        self.store
            .as_ref()
            .is_some_and(|store| store.shelf.parts_of(&id(block)) != 0)
    }
}

impl Store {
    /// Puts a block, which may push others out.
    pub(super) fn put(&mut self, block: u64, now: Time) -> &'static str {
        let put = self.shelf.put(TenantKey::of("one"), id(block), None, u8::MAX >> 7, now);
        let write = match put {
            Ok(ShelfPut::Write(write)) => write,
            Ok(ShelfPut::AlreadyThere) => return "already there",
            Err(_) => return "refused",
        };
        let bytes = content(block);
        self.slab.write(write.offset, &bytes);
        let mut open = write.open;
        open.fill(0, 0, BLOCK_BYTES, checksum(&bytes)).expect("all of it");
        let sealed = open.seal().expect("all of it has come");
        self.shelf.on_written(write.put, Ok(sealed), now);
        self.tell();
        "stored"
    }

    /// Tells the others of what has come and gone.
    pub(super) fn tell(&mut self) {
        while let Some(event) = self.shelf.next_event() {
            match event {
                ShelfEvent::PutDone { id, .. } | ShelfEvent::Removed { id, .. } => {
                    let parts = self.shelf.parts_of(&id);
                    self.members.machine.set(id, u8::from(parts != 0), parts);
                }
                _ => {}
            }
        }
    }

    /// Looks for what somebody wants to read, and keeps it where it is.
    pub(super) fn lend(&mut self, peer: PeerId, loan: u64, ids: &[BlockId], now: Time) -> usize {
        let mut blocks = Vec::new();
        for id in ids {
            blocks.push(self.shelf.read(id, now).map(|read| {
                let (sequence, sum) = self.shelf.sum_of(read.read).expect("it is being read");
                self.next_token += 1;
                let token = Token(self.next_token);
                self.tokens.insert(token, read.read);
                let lent = Lent {
                    region: 0,
                    tier: 0,
                    parts: read.parts,
                    length: read.length,
                    offset: read.offset,
                    sequence,
                    sum,
                };
                (lent, token)
            }));
        }
        let lent = blocks.iter().flatten().count();
        self.members.machine.lend(peer, loan, blocks, now);
        lent
    }

    /// Looks at blocks that somebody else had other bytes of.
    pub(super) fn look_at(&mut self, ids: &[BlockId], now: Time) {
        for id in ids {
            if let Some(read) = self.shelf.read(id, now) {
                let mut bytes = vec![0; read.length as usize];
                self.slab.read(read.offset, &mut bytes);
                let _ = self.shelf.end_read(read.read, Ok(checksum(&bytes)), now);
            }
            let parts = self.shelf.parts_of(id);
            self.members.machine.set(*id, u8::from(parts != 0), parts);
        }
    }

    /// A bit of memory is another one than was written.
    pub(super) fn damage(&mut self, chance: &mut Seeded) {
        let at = chance.below(self.slab.snapshot().len() as u64);
        let mut byte = [0];
        self.slab.read(at, &mut byte);
        self.slab.write(at, &[byte[0] ^ 1 << chance.below(8)]);
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }
}

pub(super) fn id(block: u64) -> BlockId {
    let mut bytes = [0; 16];
    Seeded::new(block ^ 0x626c_6f63_6b00).fill(&mut bytes);
    BlockId::from_bytes(bytes)
}

pub(super) fn content(block: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    Seeded::new(block ^ 0x0063_6f6e_7465_6e74).fill(&mut bytes);
    bytes
}
