//! A tier on a disk that tears, forgets, flips, fills up, fails and hangs, and a process that dies at any point, under the very machine that a store
//! turns.
//!
//! What is checked: no wrong byte is believed; no block that was acknowledged is lost, by what its durability promises, unless it was evicted, purged or
//! damaged; what was purged is not found again; the books balance after every step; and when nothing goes wrong any more, a put is stored.

mod disk;

use std::collections::{BTreeMap, BTreeSet};

use weft_plan::Time;
use weft_protocol::Seeded;
use weft_protocol::block::shelf::format::{
    ExtentKind, Geometry, HEADER_FILE_BYTES, Header, PAGE_BYTES, TenantKey, extent_header,
};
use weft_protocol::block::shelf::{
    Durability, Medium, Pages, PurgeId, PutId, Read, Shelf, ShelfEvent, ShelfOptions, ShelfPut, Trouble, Verdict,
};
use weft_protocol::block::{BlockId, HitRule, Hold, Open, Part, Sealed, Shape, checksum};

use disk::{Disk, Name};

const PARTS: [u32; 2] = [3000, 600];
const STEPS: u64 = 350;
const DEADLINE: Time = Time::from_ms(50);

/// What the disk is like at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    Full,
    ReadOnly,
    Failing,
    Stuck,
}

/// What the kernel has.
#[derive(Debug)]
enum Flight {
    Payload {
        put: PutId,
        name: Name,
        offset: usize,
        bytes: Vec<u8>,
        sealed: Sealed,
        commit: bool,
    },
    Pages(Pages),
    Read {
        read: Read,
        scrub: bool,
    },
}

/// A put that has not ended: of which block, and where it is written.
#[derive(Clone, Copy, Debug)]
struct Placed {
    number: u64,
    extent: u32,
    offset: u64,
}

/// What a purge that is done has promised.
#[derive(Debug)]
struct Promise {
    numbers: BTreeSet<u64>,
}

/// What is known of what should be there.
#[derive(Debug, Default)]
struct Ledger {
    /// Acknowledged, and neither evicted, purged nor damaged since.
    kept: BTreeSet<u64>,
    /// Where each block was written last.
    place: BTreeMap<u64, (u32, u64)>,
    /// Purged for good, and not put again since.
    gone: BTreeSet<u64>,
    ever: BTreeSet<u64>,
}

pub(super) struct ShelfPlay {
    rng: Seeded,
    disk: Disk,
    shape: Shape,
    geometry: Geometry,
    durability: Durability,
    options: ShelfOptions,
    shelf: Shelf,
    now: Time,
    mood: Mood,
    flights: BTreeMap<(Time, u64), Flight>,
    placed: BTreeMap<PutId, Placed>,
    purges: BTreeMap<PurgeId, Promise>,
    holds: Vec<Hold>,
    ledger: Ledger,
    /// Pages as they once were.
    old_pages: Vec<(u32, u32, Vec<u8>)>,
    /// One of them has been put back since the start.
    put_back: bool,
    given: u64,
    ends: BTreeMap<String, u64>,
    hash: u64,
    steps: u64,
}

impl ShelfPlay {
    pub(super) fn new(seed: u64) -> ShelfPlay {
        let mut rng = Seeded::new(seed ^ 0x7368_656c_6600);
        let shape = Shape::new(vec![
            Part::new("kv", PARTS[0], HitRule::AllBlocks),
            Part::new("state", PARTS[1], HitRule::TrailingBlocks(1)),
        ])
        .expect("a shape");
        let slots = 3 + rng.below(80);
        let geometry = Geometry::new(PARTS.iter().sum(), slots * 4096, slots * 4096 * (1 + rng.below(3)));
        let geometry = geometry.expect("a geometry");
        let durability = match rng.below(2) {
            0 => Durability::Process,
            _ => Durability::Power,
        };
        let options = ShelfOptions {
            hand_down: rng.below(3) == 0,
            scrub_bytes_per_second: [0, 1 << 20, 100 << 20][rng.below(3) as usize],
            queue_bytes: [20_000, 1 << 20][rng.below(2) as usize],
            ..ShelfOptions::new(Medium::Files(durability))
        };
        let mut disk = Disk::default();
        disk.make(Name::Header, HEADER_FILE_BYTES);
        let header = Header::first([9; 16], geometry, &shape);
        disk.write(Name::Header, header.offset() as usize, &header.encode());
        disk.sync(Name::Header);
        for extent in 0..geometry.extents {
            disk.make(Name::Data(extent), geometry.data_bytes() as usize);
            disk.make(Name::Index(extent), geometry.index_bytes() as usize);
        }
        let shelf = Shelf::in_files(header, &shape, options.clone());
        let mut play = ShelfPlay {
            rng,
            disk,
            shape,
            geometry,
            durability,
            options,
            shelf,
            now: Time::ZERO,
            mood: Mood::Well,
            flights: BTreeMap::new(),
            placed: BTreeMap::new(),
            purges: BTreeMap::new(),
            holds: Vec::new(),
            ledger: Ledger::default(),
            old_pages: Vec::new(),
            put_back: false,
            given: 0,
            ends: BTreeMap::new(),
            hash: seed,
            steps: 0,
        };
        play.take_up();
        play
    }

    pub(super) fn totals(&self) -> (BTreeMap<String, u64>, u64, u64) {
        (self.ends.clone(), self.steps, self.hash)
    }

    pub(super) fn run(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            self.steps += 1;
            self.act()?;
            let by = Time::from_us(self.rng.below(1500));
            self.advance(by)?;
            self.check()?;
        }
        self.settle_down()
    }

    fn act(&mut self) -> Result<(), String> {
        match self.rng.below(100) {
            0..45 => self.put_chain(),
            45..70 => {
                let number = self.some_number();
                self.read(number)
            }
            70..75 => {
                let mut chain: Vec<BlockId> = (0..4).map(|_| self.some_number()).map(id).collect();
                chain.retain(|id| self.shelf.parts_of(id) != 0);
                self.holds.push(self.shelf.hold(&chain).0);
                self.shelf.request(&chain, Default::default());
            }
            75..80 => {
                if !self.holds.is_empty() {
                    let at = self.rng.below(self.holds.len() as u64) as usize;
                    self.shelf.release(self.holds.swap_remove(at));
                }
            }
            80..84 => {
                let number = self.some_number();
                self.shelf.evict(id(number));
            }
            84..86 => self.purge(),
            86..91 => {
                self.mood = match self.rng.below(8) {
                    0 => Mood::Full,
                    1 => Mood::ReadOnly,
                    2 => Mood::Failing,
                    3 => Mood::Stuck,
                    _ => Mood::Well,
                };
            }
            91..94 => self.damage(),
            94..96 => self.remember_page(),
            96 => self.replay_page(),
            _ => self.crash()?,
        }
        Ok(())
    }

    fn some_number(&mut self) -> u64 {
        self.rng.below(4 * self.geometry.slots_total() as u64)
    }

    fn put_chain(&mut self) {
        let first = self.some_number();
        for nth in 0..1 + self.rng.below(6) {
            let number = first + 2 * nth;
            let parent = (number >= 2).then(|| id(number - 2));
            let put = self
                .shelf
                .put(tenant(number), id(number), parent, parts(number), self.now);
            self.ledger.ever.insert(number);
            self.ledger.gone.remove(&number);
            for promise in self.purges.values_mut() {
                promise.numbers.remove(&number);
            }
            match put {
                Ok(ShelfPut::AlreadyThere) => self.count("already there"),
                Err(refused) => self.count(&format!("refused: {refused}")),
                Ok(ShelfPut::Write(write)) => {
                    let (extent, offset) = (write.extent, write.offset);
                    self.placed.insert(write.put, Placed { number, extent, offset });
                    let bytes = payload(number);
                    assert_eq!(bytes.len(), write.length as usize);
                    let flight = Flight::Payload {
                        put: write.put,
                        name: Name::Data(extent),
                        offset: offset as usize,
                        sealed: seal(write.open, number, &bytes),
                        bytes,
                        commit: write.commit,
                    };
                    self.fly(flight);
                }
            }
        }
    }

    fn read(&mut self, number: u64) {
        if let Some(read) = self.shelf.read(&id(number), self.now) {
            self.fly(Flight::Read { read, scrub: false });
        }
    }

    fn purge(&mut self) {
        for hold in self.holds.drain(..) {
            self.shelf.release(hold);
        }
        let whose = tenant(self.rng.below(2));
        let (purge, left) = self.shelf.purge(whose);
        assert_eq!(left, 0, "nothing was held");
        let mine = |number: &u64| tenant(*number) == whose;
        self.ledger.kept.retain(|number| !mine(number));
        // Records that somebody has put back are found at the next start, whatever is purged before it.
        let numbers = match self.put_back {
            true => BTreeSet::new(),
            false => self.ledger.ever.iter().copied().filter(mine).collect(),
        };
        self.purges.insert(purge, Promise { numbers });
    }

    /// A bit flips, in a payload or in a record: the block there need not be found any more.
    fn damage(&mut self) {
        let extent = self.rng.below(self.geometry.extents.into()) as u32;
        let slot = self.rng.below(self.geometry.slots.into());
        let bit = 1 << self.rng.below(8);
        let offset = slot * self.geometry.stride();
        match self.rng.below(2) {
            0 => {
                let at = offset + self.rng.below(3600);
                self.disk.damage(Name::Data(extent), at as usize, |byte| *byte ^= bit);
            }
            _ => {
                let at = PAGE_BYTES as u64 + slot * 64 + self.rng.below(64);
                self.disk.damage(Name::Index(extent), at as usize, |byte| *byte ^= bit);
                // The mark of a purge may have been hit.
                self.ledger.gone.clear();
                self.purges.values_mut().for_each(|promise| promise.numbers.clear());
            }
        }
        let hit = |number: &u64| self.ledger.place.get(number) == Some(&(extent, offset));
        let hit: Vec<u64> = self.ledger.kept.iter().copied().filter(hit).collect();
        for number in hit {
            self.ledger.kept.remove(&number);
        }
        // What is being written there may be hit as well.
        let written = |placed: &Placed| (placed.extent, placed.offset) == (extent, offset);
        if let Some(placed) = self.placed.values_mut().find(|placed| written(placed)) {
            placed.number = u64::MAX;
        }
    }

    fn remember_page(&mut self) {
        let extent = self.rng.below(self.geometry.extents.into()) as u32;
        let page = self.rng.below(self.geometry.pages().into()) as u32;
        let from = (1 + page as usize) * PAGE_BYTES;
        let bytes = self.disk.seen(Name::Index(extent))[from..from + PAGE_BYTES].to_vec();
        self.old_pages.push((extent, page, bytes));
    }

    /// Somebody puts an old page of records back.
    fn replay_page(&mut self) {
        let Some((extent, page, bytes)) = self.old_pages.pop() else {
            return;
        };
        self.disk
            .overwrite(Name::Index(extent), (1 + page as usize) * PAGE_BYTES, &bytes);
        self.put_back = true;
        let slots = page * 64..(page + 1) * 64;
        let stride = self.geometry.stride();
        let on_it = |place: &(u32, u64)| place.0 == extent && slots.contains(&((place.1 / stride) as u32));
        let place = &self.ledger.place;
        self.ledger.kept.retain(|number| !place.get(number).is_some_and(on_it));
        self.ledger.gone.clear();
        self.purges.values_mut().for_each(|promise| promise.numbers.clear());
        for placed in self
            .placed
            .values_mut()
            .filter(|placed| on_it(&(placed.extent, placed.offset)))
        {
            placed.number = u64::MAX;
        }
    }

    /// The process dies, and at times the power with it; then it starts again.
    fn crash(&mut self) -> Result<(), String> {
        let power = self.rng.below(2) == 0;
        self.count(if power { "power lost" } else { "killed" });
        for (_, flight) in std::mem::take(&mut self.flights) {
            match flight {
                Flight::Payload {
                    name, offset, bytes, ..
                } => {
                    self.disk.write_torn(name, offset, &bytes, &mut self.rng);
                }
                Flight::Pages(pages) => {
                    for (page, bytes) in pages.pages.iter().zip(pages.bytes.chunks(PAGE_BYTES)) {
                        let at = (1 + *page as usize) * PAGE_BYTES;
                        self.disk
                            .write_torn(Name::Index(pages.extent), at, bytes, &mut self.rng);
                    }
                }
                Flight::Read { .. } => {}
            }
        }
        if power {
            self.disk.lose_power(&mut self.rng);
            if self.durability == Durability::Process {
                self.ledger.kept.clear();
                self.ledger.gone.clear();
            }
        }
        self.placed.clear();
        self.purges.clear();
        self.holds.clear();
        self.mood = Mood::Well;
        self.put_back = false;
        self.start_again()?;
        for number in self.ledger.kept.clone() {
            let Some(read) = self.shelf.read(&id(number), self.now) else {
                return Err(format!("the acknowledged block {number} is not found after a restart"));
            };
            let (sum, right) = self.look(&read);
            let verdict = self.shelf.end_read(read.read, Ok(sum), self.now);
            if verdict != Verdict::Right || !right {
                return Err(format!(
                    "the acknowledged block {number} is {verdict:?} after a restart"
                ));
            }
        }
        for number in &self.ledger.gone {
            if self.shelf.parts_of(&id(*number)) != 0 {
                return Err(format!("the purged block {number} is found after a restart"));
            }
        }
        Ok(())
    }

    fn start_again(&mut self) -> Result<(), String> {
        let decode = |disk: &Disk| Header::decode(disk.seen(Name::Header)).map_err(|error| error.to_string());
        let mut header = decode(&self.disk)?
            .opened(self.geometry, &self.shape)
            .map_err(|error| error.to_string())?;
        if self.rng.below(4) == 0 {
            // It dies again while it writes its header.
            self.disk
                .write_torn(Name::Header, header.offset() as usize, &header.encode(), &mut self.rng);
            header = decode(&self.disk)?
                .opened(self.geometry, &self.shape)
                .map_err(|error| error.to_string())?;
        }
        self.disk
            .write(Name::Header, header.offset() as usize, &header.encode());
        self.disk.sync(Name::Header);
        self.shelf = Shelf::in_files(header, &self.shape, self.options.clone());
        self.take_up();
        Ok(())
    }

    fn take_up(&mut self) {
        for extent in 0..self.geometry.extents {
            if self.durability == Durability::Power {
                self.disk.sync(Name::Index(extent));
            }
            let kind = self.shelf.recover(extent, self.disk.seen(Name::Index(extent)));
            if kind == ExtentKind::Fresh {
                let mut index = vec![0; self.geometry.index_bytes() as usize];
                index[..PAGE_BYTES].copy_from_slice(&extent_header(&[9; 16], extent, &self.geometry));
                self.disk.write(Name::Index(extent), 0, &index);
                self.disk.sync(Name::Index(extent));
            }
            assert_ne!(kind, ExtentKind::Strange);
        }
        self.shelf.start();
    }

    fn fly(&mut self, flight: Flight) {
        self.given += 1;
        let takes = match self.mood {
            Mood::Stuck if self.rng.below(2) == 0 => DEADLINE,
            _ => Time::from_us(20 + self.rng.below(2000)),
        };
        self.flights
            .insert((self.now.saturating_add(takes), self.given), flight);
    }

    fn advance(&mut self, by: Time) -> Result<(), String> {
        let until = self.now.saturating_add(by);
        loop {
            self.pump()?;
            let Some(entry) = self.flights.first_entry().filter(|entry| entry.key().0 <= until) else {
                break;
            };
            self.now = entry.key().0.max(self.now);
            let flight = entry.remove();
            self.land(flight)?;
        }
        self.now = until;
        self.shelf.on_timeout(self.now);
        self.pump()
    }

    /// How a write that ends now ends: and whether its bytes are all there.
    fn fate(&mut self) -> Result<(), Trouble> {
        match self.mood {
            Mood::Well => Ok(()),
            Mood::Full => Err(Trouble::NoRoom),
            Mood::ReadOnly => Err(Trouble::ReadOnly),
            Mood::Failing => Err(Trouble::DeviceFailed),
            Mood::Stuck if self.rng.below(2) == 0 => Err(Trouble::Late),
            Mood::Stuck => Ok(()),
        }
    }

    fn land(&mut self, flight: Flight) -> Result<(), String> {
        let fate = self.fate();
        match flight {
            Flight::Payload {
                put,
                name,
                offset,
                bytes,
                sealed,
                commit,
            } => {
                match fate {
                    Ok(()) => self.disk.write(name, offset, &bytes),
                    Err(Trouble::ReadOnly) => {}
                    Err(_) => self.disk.write_torn(name, offset, &bytes, &mut self.rng),
                }
                if commit && fate.is_ok() {
                    self.disk.sync(name);
                }
                self.shelf.on_written(put, fate.map(|()| sealed), self.now);
            }
            Flight::Pages(Pages {
                extent,
                pages,
                bytes,
                commit,
            }) => {
                let name = Name::Index(extent);
                for (page, bytes) in pages.iter().zip(bytes.chunks(PAGE_BYTES)) {
                    let at = (1 + *page as usize) * PAGE_BYTES;
                    match fate {
                        Ok(()) => self.disk.write(name, at, bytes),
                        Err(Trouble::ReadOnly) => {}
                        Err(_) => self.disk.write_torn(name, at, bytes, &mut self.rng),
                    }
                }
                if commit && fate.is_ok() {
                    self.disk.sync(name);
                }
                self.shelf.on_pages(extent, fate, self.now);
            }
            Flight::Read { read, scrub } => {
                let fails = matches!(fate, Err(Trouble::DeviceFailed | Trouble::Late));
                let (sum, right) = self.look(&read);
                let ended = if fails { fate.map(|()| 0) } else { Ok(sum) };
                let verdict = match scrub {
                    true => self.shelf.end_scrub(&read, ended, self.now),
                    false => self.shelf.end_read(read.read, ended, self.now),
                };
                let number = number_of(&read.id);
                match verdict {
                    Verdict::Right if !right => return Err(format!("wrong bytes of block {number} were believed")),
                    Verdict::Right => self.count("read"),
                    // A copy that has left meanwhile may be wrong; the one that was acknowledged since may not.
                    Verdict::Wrong if self.ledger.kept.contains(&number) && self.is_its_place(&read, number) => {
                        return Err(format!("the acknowledged block {number} was found to be wrong"));
                    }
                    Verdict::Wrong => self.count("wrong"),
                    Verdict::Failed(trouble) => self.count(&format!("not read: {trouble}")),
                }
            }
        }
        Ok(())
    }

    fn is_its_place(&self, read: &Read, number: u64) -> bool {
        self.ledger.place.get(&number) == Some(&(read.extent, read.offset))
    }

    /// The checksum of what is there, and whether it is what was put.
    fn look(&self, read: &Read) -> (u64, bool) {
        let from = read.offset as usize;
        let bytes = &self.disk.seen(Name::Data(read.extent))[from..from + read.length as usize];
        let number = number_of(&read.id);
        (checksum(bytes), bytes == payload(number) && read.parts == parts(number))
    }

    fn pump(&mut self) -> Result<(), String> {
        while let Some(pages) = self.shelf.next_pages(self.now) {
            self.fly(Flight::Pages(pages));
        }
        if let Some(read) = self.shelf.scrub(self.now) {
            self.fly(Flight::Read { read, scrub: true });
        }
        while let Some(event) = self.shelf.next_event() {
            match event {
                ShelfEvent::PutDone { put, id, ended } => {
                    let placed = self.placed.remove(&put).ok_or("a put ended twice")?;
                    if self.shelf.parts_of(&id) == 0 && ended.is_ok() {
                        return Err("a block was acknowledged and is not found".to_owned());
                    }
                    match ended {
                        Ok(()) if placed.number == u64::MAX => self.count("stored, and damaged on the way"),
                        Ok(()) => {
                            self.ledger.place.insert(placed.number, (placed.extent, placed.offset));
                            self.ledger.kept.insert(placed.number);
                            self.count("stored");
                        }
                        Err(why) => self.count(&format!("failed: {why}")),
                    }
                }
                ShelfEvent::Removed { id, read, .. } => {
                    self.ledger.kept.remove(&number_of(&id));
                    self.count("removed");
                    if let Some(read) = read {
                        self.fly(Flight::Read { read, scrub: false });
                    }
                }
                ShelfEvent::PurgeDone { purge, ended } => {
                    let promise = self.purges.remove(&purge).ok_or("a purge ended twice")?;
                    match ended {
                        Ok(_) => {
                            self.ledger.gone.extend(promise.numbers);
                            self.count("purged");
                        }
                        Err(_) => self.count("not purged"),
                    }
                }
                other => return Err(format!("an event that is not known: {other:?}")),
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), String> {
        let slots = self.geometry.slots_total();
        for (_, tally, blocks) in self.shelf.tenants() {
            if !tally.balances() {
                return Err(format!("the books do not balance: {tally:?}"));
            }
            if blocks > slots {
                return Err(format!("{blocks} blocks in {slots} slots"));
            }
        }
        for number in &self.ledger.kept {
            if self.shelf.parts_of(&id(*number)) == 0 {
                return Err(format!("the acknowledged block {number} is not found"));
            }
        }
        for number in &self.ledger.gone {
            if self.shelf.parts_of(&id(*number)) != 0 {
                return Err(format!("the purged block {number} is found"));
            }
        }
        Ok(())
    }

    /// Nothing goes wrong any more: everything ends, and a put is stored.
    fn settle_down(&mut self) -> Result<(), String> {
        self.mood = Mood::Well;
        for hold in self.holds.drain(..) {
            self.shelf.release(hold);
        }
        // The first lets probes become due, the second lets them through, and the third what waited for them.
        for _ in 0..3 {
            self.advance(Time::from_secs(61))?;
        }
        while !self.flights.is_empty() {
            self.advance(Time::from_ms(10))?;
        }
        if !self.flights.is_empty() || !self.placed.is_empty() || !self.purges.is_empty() || self.shelf.queued() != 0 {
            return Err("something did not end".to_owned());
        }
        let number = 1_000_000;
        for _ in 0..3 {
            let put = self
                .shelf
                .put(tenant(number), id(number), None, parts(number), self.now);
            if let Ok(ShelfPut::Write(write)) = put {
                let bytes = payload(number);
                let (extent, offset) = (write.extent, write.offset);
                self.placed.insert(write.put, Placed { number, extent, offset });
                self.fly(Flight::Payload {
                    put: write.put,
                    name: Name::Data(extent),
                    offset: offset as usize,
                    sealed: seal(write.open, number, &bytes),
                    bytes,
                    commit: write.commit,
                });
            }
            self.advance(Time::from_secs(61))?;
        }
        if !self.ledger.kept.contains(&number) {
            return Err(format!("nothing can be put any more: {:?}", self.shelf.condition()));
        }
        self.crash()
    }

    fn count(&mut self, end: &str) {
        for byte in end.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        *self.ends.entry(end.to_owned()).or_default() += 1;
    }
}

fn id(number: u64) -> BlockId {
    let mut bytes = [0; 16];
    Seeded::new(number).fill(&mut bytes);
    bytes[8..].copy_from_slice(&(number + 1).to_be_bytes());
    BlockId::from_bytes(bytes)
}

fn number_of(id: &BlockId) -> u64 {
    u64::from_be_bytes(id.as_bytes()[8..].try_into().expect("eight bytes")) - 1
}

fn tenant(number: u64) -> TenantKey {
    TenantKey(number % 2)
}

fn parts(number: u64) -> u8 {
    if number.is_multiple_of(3) { 0b11 } else { 0b01 }
}

fn payload(number: u64) -> Vec<u8> {
    let there = PARTS
        .iter()
        .enumerate()
        .filter(|(nth, _)| parts(number) >> nth & 1 == 1);
    let mut bytes = vec![0; there.map(|(_, bytes)| *bytes as usize).sum()];
    Seeded::new(number ^ 0xb10c).fill(&mut bytes);
    bytes
}

fn seal(mut open: Open, number: u64, bytes: &[u8]) -> Sealed {
    let mut at = 0;
    for (nth, length) in PARTS
        .iter()
        .enumerate()
        .filter(|(nth, _)| parts(number) >> nth & 1 == 1)
    {
        let piece = &bytes[at..at + *length as usize];
        open.fill(nth, 0, *length, checksum(piece))
            .expect("a part of the block");
        at += piece.len();
    }
    open.seal().expect("all parts")
}
