//! Tiers with their bytes: a slab of memory, or the files of a directory that one owner has open.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Read as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use weft_fabric::file::{Direct, FileOptions};
use weft_fabric::fork::NotInherited;
use weft_plan::{Span, Spans};
use weft_protocol::block::Shape;
use weft_protocol::block::policy::Kind;
use weft_protocol::block::shelf::format::{
    ExtentKind, Geometry, HEADER_FILE, HEADER_FILE_BYTES, Header, HeaderError, PAGE_BYTES, extent_files, extent_header,
};
use weft_protocol::block::shelf::{Durability, Medium, PAGES_MAX, Pages, Shelf, ShelfOptions};

use super::StoreError;
use crate::agent::Agent;
use crate::error::Error;
use crate::memory::Memory;

/// Copies of pages under way at a time, over all extents.
const CHUNKS: usize = 16;
const CHUNK_BYTES: usize = PAGES_MAX * PAGE_BYTES;
pub(super) const EXTENT_BYTES: u64 = 1 << 30;

/// When a tier gets what is put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteTo {
    /// At once: a put is answered when it is here.
    #[default]
    Through,
    /// When it leaves the tier before.
    Back,
}

/// A tier of files: a directory of its own.
#[derive(Clone, Debug)]
pub struct FileTier {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) extent_bytes: u64,
    pub(super) durability: Durability,
    pub(super) write: WriteTo,
    pub(super) queue_bytes: u64,
    pub(super) scrub_bytes_per_second: u64,
    pub(super) direct: Direct,
}

impl FileTier {
    /// In this directory, which is made if it is not there, and of so many bytes at most.
    pub fn new(path: impl AsRef<Path>, bytes: u64) -> FileTier {
        let defaults = ShelfOptions::new(Medium::Memory);
        FileTier {
            path: path.as_ref().to_owned(),
            bytes,
            extent_bytes: EXTENT_BYTES.min(bytes.max(1)),
            durability: Durability::default(),
            write: WriteTo::default(),
            queue_bytes: defaults.queue_bytes,
            scrub_bytes_per_second: defaults.scrub_bytes_per_second,
            direct: Direct::Auto,
        }
    }
    /// How large its files are. It cannot be changed later.
    pub fn extent_bytes(self, extent_bytes: u64) -> FileTier {
        FileTier { extent_bytes, ..self }
    }
    pub fn durability(self, durability: Durability) -> FileTier {
        FileTier { durability, ..self }
    }
    pub fn write(self, write: WriteTo) -> FileTier {
        FileTier { write, ..self }
    }
    /// Bytes of puts under way at most; what does not fit is refused at once.
    pub fn queue_bytes(self, queue_bytes: u64) -> FileTier {
        FileTier { queue_bytes, ..self }
    }
    /// How fast what was found at the start is verified; 0 for not at all.
    pub fn scrub_bytes_per_second(self, scrub_bytes_per_second: u64) -> FileTier {
        FileTier {
            scrub_bytes_per_second,
            ..self
        }
    }
    /// Whether to go past the page cache.
    pub fn direct(self, direct: Direct) -> FileTier {
        FileTier { direct, ..self }
    }
}

#[derive(Debug)]
pub(super) struct Tier {
    pub(super) name: String,
    pub(super) shelf: Shelf,
    pub(super) bytes: Bytes,
    pub(super) write: WriteTo,
}

#[derive(Debug)]
pub(super) enum Bytes {
    Slab(Memory),
    Files(Files),
}

#[derive(Debug)]
pub(super) struct Files {
    /// Data and index of each extent; none where it is another's.
    extents: Vec<Option<(Memory, Memory)>>,
    /// What pages of records are written from.
    pages: Memory,
    chunks: Vec<usize>,
    /// Held while the tier is open.
    _lock: NotInherited<File>,
}

impl Tier {
    pub(super) fn in_memory(agent: &Agent, shape: &Shape, bytes: u64, options: ShelfOptions) -> Result<Tier, Error> {
        let geometry = Geometry::new(block_bytes(shape)?, bytes, bytes).map_err(StoreError::from)?;
        let slab = usize::try_from(geometry.data_bytes()).unwrap_or(usize::MAX);
        Ok(Tier {
            name: "memory".to_owned(),
            shelf: Shelf::in_memory(geometry, shape, options),
            bytes: Bytes::Slab(agent.allocate(slab)?),
            write: WriteTo::Through,
        })
    }

    pub(super) fn in_files(
        agent: &Agent,
        shape: &Shape,
        tier: &FileTier,
        policy: Kind,
        shares: &super::builder::Shares,
    ) -> Result<Tier, Error> {
        let path = &tier.path;
        let geometry = Geometry::new(block_bytes(shape)?, tier.extent_bytes, tier.bytes).map_err(StoreError::from)?;
        std::fs::create_dir_all(path).map_err(StoreError::io("making", path))?;
        let lock = lock(path, true)?;
        let header = next_header(&lock, path, geometry, shape)?;
        let options = ShelfOptions {
            policy,
            queue_bytes: tier.queue_bytes,
            scrub_bytes_per_second: tier.scrub_bytes_per_second,
            shares: shares.of(geometry.slots_total()),
            ..ShelfOptions::new(Medium::Files(tier.durability))
        };
        let mut shelf = Shelf::in_files(header, shape, options);
        drop_beyond(path, geometry.extents)?;
        let mut extents = Vec::with_capacity(geometry.extents as usize);
        for extent in 0..geometry.extents {
            let (data, index) = extent_files(extent);
            let (data, index) = (path.join(data), path.join(index));
            if tier.durability == Durability::Power {
                make_last(&index)?;
            }
            let found = read_at_most(&index, geometry.index_bytes())?;
            match shelf.recover(extent, &found) {
                ExtentKind::Strange => {
                    extents.push(None);
                    continue;
                }
                ExtentKind::Fresh => {
                    let mut bytes = vec![0; geometry.index_bytes() as usize];
                    bytes[..PAGE_BYTES].copy_from_slice(&extent_header(&header.tier, extent, &geometry));
                    let written = std::fs::write(&index, &bytes).and_then(|()| File::open(&index)?.sync_all());
                    written.map_err(StoreError::io("writing", &index))?;
                }
                _ => {}
            }
            drop(found);
            let sized = |bytes| FileOptions::sized(bytes).direct(tier.direct);
            let data = agent.open_file(data, sized(geometry.data_bytes()))?;
            let index = agent.open_file(index, sized(geometry.index_bytes()))?;
            extents.push(Some((data, index)));
        }
        // The names of the files have to last as well.
        let synced = File::open(path).and_then(|directory| directory.sync_all());
        synced.map_err(StoreError::io("synchronising", path))?;
        shelf.start();
        Ok(Tier {
            name: path.display().to_string(),
            shelf,
            bytes: Bytes::Files(Files {
                extents,
                pages: agent.allocate(CHUNKS * CHUNK_BYTES)?,
                chunks: (0..CHUNKS).collect(),
                _lock: NotInherited::new(lock),
            }),
            write: tier.write,
        })
    }

    /// The memory or file that an extent's payloads are in.
    pub(super) fn data(&self, extent: u32) -> &Memory {
        match &self.bytes {
            Bytes::Slab(slab) => slab,
            Bytes::Files(files) => {
                let (data, _) = files.extents[extent as usize]
                    .as_ref()
                    .expect("slots of strange extents are not used");
                data
            }
        }
    }

    pub(super) fn slab(&self) -> Option<&Memory> {
        match &self.bytes {
            Bytes::Slab(slab) => Some(slab),
            Bytes::Files(_) => None,
        }
    }
}

impl Files {
    pub(super) fn has_chunk(&self) -> bool {
        !self.chunks.is_empty()
    }

    /// Copies pages to where they stay until they are written: from which memory to which, and where; and the chunk to give back.
    pub(super) fn stage(&mut self, pages: &Pages) -> (usize, Memory, Spans, Memory, Spans) {
        let chunk = self.chunks.pop().expect("a chunk that is free");
        let from = (chunk * CHUNK_BYTES) as u64;
        self.pages.write(from, &pages.bytes);
        let mut far = Spans::new();
        for page in &pages.pages {
            far.push(Span {
                offset: (u64::from(*page) + 1) * PAGE_BYTES as u64,
                len: PAGE_BYTES as u64,
            });
        }
        let near = Spans::contiguous(from, pages.bytes.len() as u64);
        let (_, index) = self.extents[pages.extent as usize]
            .as_ref()
            .expect("strange extents are not written");
        (chunk, self.pages.clone(), near, index.clone(), far)
    }

    pub(super) fn give_back(&mut self, chunk: usize) {
        self.chunks.push(chunk);
    }
}

pub(super) fn block_bytes(shape: &Shape) -> Result<u32, StoreError> {
    let bytes: u64 = shape.parts().iter().map(|part| u64::from(part.bytes)).sum();
    u32::try_from(bytes).map_err(|_| StoreError::BlockTooLarge { bytes })
}

/// Opens a tier's header file and locks it for one owner. In a forked child the descriptor is closed, so that the lock is this process's.
pub(super) fn lock(path: &Path, create: bool) -> Result<File, StoreError> {
    let name = path.join(HEADER_FILE);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .open(&name)
        .map_err(StoreError::io("opening", &name))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(StoreError::io("locking", &name)(error)),
    }
}

pub(super) fn read_header(file: &File, path: &Path) -> Result<Option<Header>, StoreError> {
    let failed = || StoreError::io("reading", path.join(HEADER_FILE));
    let mut bytes = Vec::new();
    file.take(HEADER_FILE_BYTES as u64)
        .read_to_end(&mut bytes)
        .map_err(failed())?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let decoded = Header::decode(&bytes);
    let path = path.to_owned();
    decoded.map(Some).map_err(|source| StoreError::Header { path, source })
}

/// Writes the header of this opening, and makes it last before anything else is written.
fn next_header(file: &File, path: &Path, geometry: Geometry, shape: &Shape) -> Result<Header, StoreError> {
    let failed = || StoreError::io("writing", path.join(HEADER_FILE));
    let header = match read_header(file, path)? {
        Some(header) => {
            let opened = header.opened(geometry, shape);
            let path = path.to_owned();
            opened.map_err(|source: HeaderError| StoreError::Header { path, source })?
        }
        None => {
            let mut tier = [0; 16];
            getrandom::fill(&mut tier).expect("the operating system gives randomness");
            Header::first(tier, geometry, shape)
        }
    };
    let written = file
        .write_all_at(&header.encode(), header.offset())
        .and_then(|()| file.sync_all());
    written.map_err(failed())?;
    Ok(header)
}

/// Removes extents that a smaller budget has no room for.
fn drop_beyond(path: &Path, extents: u32) -> Result<(), StoreError> {
    let listed = std::fs::read_dir(path).map_err(StoreError::io("listing", path))?;
    for entry in listed {
        let entry = entry.map_err(StoreError::io("listing", path))?;
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("ext-")?.split_once('.')?.0.parse().ok());
        let beyond = number.is_some_and(|number: u32| {
            let (data, index) = extent_files(number);
            number >= extents && (name == *data || name == *index)
        });
        if beyond {
            std::fs::remove_file(entry.path()).map_err(StoreError::io("removing", entry.path()))?;
        }
    }
    Ok(())
}

/// What is seen of a file, if it is there, is on the disk afterwards.
fn make_last(path: &Path) -> Result<(), Error> {
    match File::open(path).and_then(|file| file.sync_data()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => Ok(done.map_err(StoreError::io("synchronising", path))?),
    }
}

/// A file's bytes, but no more than it should have; none where it is not there.
pub(super) fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(file) => {
            file.take(most)
                .read_to_end(&mut bytes)
                .map_err(StoreError::io("reading", path))?;
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(StoreError::io("opening", path)(error)),
    }
    Ok(bytes)
}
