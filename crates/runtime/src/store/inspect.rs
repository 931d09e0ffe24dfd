//! A look at a tier's directory without a store: what its records say, and whether the payloads are what they say.
//!
//! Reading takes no lock, so that a tier in use can be looked at; what it says of blocks that are being written is of that moment.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use weft_protocol::block::checksum;
use weft_protocol::block::shelf::format::{
    ExtentKind, HEADER_FILE, Header, PAGE_BYTES, RECORD_BYTES, extent_files, extent_kind,
};

pub use weft_protocol::block::shelf::format::{Found, Record, TenantKey};

use super::StoreError;
use super::tier::{lock, read_at_most, read_header};
use crate::error::Error;

/// A tier's directory.
#[derive(Clone, Debug)]
pub struct Directory {
    path: PathBuf,
    header: Header,
}

/// A slot with something in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub extent: u32,
    pub slot: u32,
    pub found: Found,
}

/// What the records of a tier come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Records of blocks; one block may have an older one beside it.
    pub records: u64,
    pub bytes: u64,
    pub torn: u64,
    pub erased: u64,
    /// Extents that are another's.
    pub strange: Vec<u32>,
    /// Extents that nothing was written to.
    pub fresh: u32,
    pub tenants: std::collections::BTreeMap<TenantKey, u64>,
}

impl Directory {
    pub fn open(path: impl AsRef<Path>) -> Result<Directory, Error> {
        let path = path.as_ref().to_owned();
        let name = path.join(HEADER_FILE);
        let file = File::open(&name).map_err(StoreError::io("opening", &name))?;
        let header = read_header(&file, &path)?.ok_or_else(|| StoreError::Header {
            path: path.clone(),
            source: weft_protocol::block::shelf::format::HeaderError::NotWhole,
        })?;
        Ok(Directory { path, header })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Every slot with something in it, extent by extent.
    pub fn entries(&self, mut each: impl FnMut(Entry)) -> Result<Summary, Error> {
        let mut summary = Summary::default();
        for extent in 0..self.header.geometry.extents {
            let (kind, index) = self.index(extent)?;
            match kind {
                ExtentKind::Own => {}
                ExtentKind::Strange => {
                    summary.strange.push(extent);
                    continue;
                }
                _ => {
                    summary.fresh += 1;
                    continue;
                }
            }
            let records = index[PAGE_BYTES..].as_chunks::<RECORD_BYTES>().0;
            for (bytes, slot) in records.iter().zip(0..self.header.geometry.slots) {
                let found = Record::decode(bytes, &self.header.geometry);
                match &found {
                    Found::Nothing => continue,
                    Found::Torn => summary.torn += 1,
                    Found::Erased => summary.erased += 1,
                    Found::Block(record) => {
                        summary.records += 1;
                        summary.bytes += u64::from(record.length);
                        *summary.tenants.entry(record.tenant).or_default() += 1;
                    }
                }
                each(Entry { extent, slot, found });
            }
        }
        Ok(summary)
    }

    /// Whether a block's payload is what its record says.
    pub fn verify(&self, entry: &Entry) -> Result<bool, Error> {
        let Found::Block(record) = entry.found else {
            return Ok(false);
        };
        let (data, _) = extent_files(entry.extent);
        let name = self.path.join(data);
        let file = File::open(&name).map_err(StoreError::io("opening", &name))?;
        let mut bytes = vec![0; record.length as usize];
        let offset = u64::from(entry.slot) * self.header.geometry.stride();
        match file.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(record.is_of(checksum(&bytes))),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(StoreError::io("reading", &name)(error).into()),
        }
    }

    /// Erases every record of a tenant, for good, in a tier that no store has open; says how many there were.
    pub fn purge(&self, tenant: &str) -> Result<u64, Error> {
        let _lock = lock(&self.path, false)?;
        let tenant = TenantKey::of(tenant);
        let mut erased = 0;
        for extent in 0..self.header.geometry.extents {
            let (kind, mut index) = self.index(extent)?;
            if kind != ExtentKind::Own {
                continue;
            }
            let before = erased;
            for bytes in index[PAGE_BYTES..].as_chunks_mut::<RECORD_BYTES>().0 {
                if let Found::Block(record) = Record::decode(bytes, &self.header.geometry)
                    && record.tenant == tenant
                {
                    *bytes = Record::erased();
                    erased += 1;
                }
            }
            if erased > before {
                let name = self.path.join(extent_files(extent).1);
                let file = OpenOptions::new().write(true).open(&name);
                let written = file.and_then(|file| {
                    file.write_all_at(&index[PAGE_BYTES..], PAGE_BYTES as u64)?;
                    file.sync_all()
                });
                written.map_err(StoreError::io("writing", &name))?;
            }
        }
        Ok(erased)
    }

    fn index(&self, extent: u32) -> Result<(ExtentKind, Vec<u8>), StoreError> {
        let name = self.path.join(extent_files(extent).1);
        let index = read_at_most(&name, self.header.geometry.index_bytes())?;
        Ok((
            extent_kind(&index, &self.header.tier, extent, &self.header.geometry),
            index,
        ))
    }
}
