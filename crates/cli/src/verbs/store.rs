//! `weft store`: what is in the directory of a tier of blocks.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use console::style;
use serde_json::json;
use weft::store::inspect::{Directory, Entry, Found, Record, Summary, TenantKey};
use weft_plan::Bytes;

use crate::complaint::{Complaint, Exit};
use crate::ends::explain;
use crate::table::{Align, Table};

/// Look at a tier of KV blocks in files: what it holds, and whether it is what was put
///
/// A tier is a directory that a store keeps blocks in. All but `purge` only read, and can look at one that is in use.
#[derive(Debug, Subcommand)]
pub enum Store {
    Stat(Stat),
    Ls(Ls),
    Verify(Verify),
    Inspect(Inspect),
    Purge(Purge),
}

/// Print how a tier is divided, how full it is, and whose blocks it has
#[derive(Debug, Args)]
pub struct Stat {
    /// The tier's directory
    directory: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// List blocks: id, extent, slot, bytes, parts and tenant
#[derive(Debug, Args)]
pub struct Ls {
    /// The tier's directory
    directory: PathBuf,
    /// Blocks of this tenant only
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// Read every payload and compare it with its record; the exit code says whether all are right
#[derive(Debug, Args)]
pub struct Verify {
    /// The tier's directory
    directory: PathBuf,
}

/// Print what one slot's record says
#[derive(Debug, Args)]
pub struct Inspect {
    /// The tier's directory
    directory: PathBuf,
    /// Which block, by the digits of its id
    id: String,
}

/// Erase every record of a tenant, in a tier that no store has open
#[derive(Debug, Args)]
pub struct Purge {
    /// The tier's directory
    directory: PathBuf,
    /// Whose blocks
    #[arg(long, value_name = "NAME")]
    tenant: String,
}

impl Store {
    pub fn run(self) -> Result<(), Complaint> {
        match self {
            Store::Stat(verb) => verb.run(),
            Store::Ls(verb) => verb.run(),
            Store::Verify(verb) => verb.run(),
            Store::Inspect(verb) => verb.run(),
            Store::Purge(verb) => verb.run(),
        }
    }
}

fn open(path: &Path) -> Result<Directory, Complaint> {
    let opened = Directory::open(path);
    opened.map_err(|error| {
        explain(
            &error,
            &format!("{} is no tier of blocks that can be read.", path.display()),
        )
    })
}

/// Every slot with something in it.
fn entries(directory: &Directory, each: impl FnMut(Entry)) -> Result<Summary, Complaint> {
    let listed = directory.entries(each);
    listed.map_err(|error| explain(&error, "The tier's records could not be read."))
}

impl Stat {
    fn run(&self) -> Result<(), Complaint> {
        let directory = open(&self.directory)?;
        let summary = entries(&directory, |_| {})?;
        let geometry = directory.header().geometry;
        let slots = geometry.slots_total();
        let tenants: Vec<(String, u64)> = summary
            .tenants
            .iter()
            .map(|(key, blocks)| (name_of(*key), *blocks))
            .collect();
        if self.json {
            let tenants: Vec<_> = tenants
                .iter()
                .map(|(key, blocks)| json!({"tenant": key, "records": blocks}))
                .collect();
            outln!(
                "{}",
                json!({"extents": geometry.extents, "slots": slots, "block_bytes": geometry.block_bytes, "opened": directory.header().epoch,
                    "records": summary.records, "bytes": summary.bytes, "torn": summary.torn, "erased": summary.erased,
                    "strange": summary.strange, "fresh": summary.fresh, "tenants": tenants})
            );
            return Ok(());
        }
        let block = Bytes(geometry.block_bytes.into());
        outln!(
            "{}",
            style(format!("A tier of {slots} slots in {}", self.directory.display())).bold()
        );
        outln!(
            "  extents   {} of {} slots, for blocks of up to {block}",
            geometry.extents,
            geometry.slots
        );
        outln!("  opened    {} times", directory.header().epoch);
        outln!("  records   {} of {} in all", summary.records, Bytes(summary.bytes));
        outln!("  not whole {}, erased {}", summary.torn, summary.erased);
        if !summary.strange.is_empty() {
            outln!(
                "  strange   extents {:?} are another's, and are left alone",
                summary.strange
            );
        }
        for (key, blocks) in tenants {
            outln!("  tenant    {key} has {blocks}");
        }
        Ok(())
    }
}

impl Ls {
    fn run(&self) -> Result<(), Complaint> {
        let directory = open(&self.directory)?;
        let wanted = self.tenant.as_deref().map(TenantKey::of);
        let mut found: Vec<(Entry, Record)> = Vec::new();
        entries(&directory, |entry| {
            if let Found::Block(record) = entry.found
                && wanted.is_none_or(|tenant| tenant == record.tenant)
            {
                found.push((entry, record));
            }
        })?;
        // In the order in which they were put.
        found.sort_by_key(|(_, record)| record.sequence);
        let mut table = Table::new(&[
            ("block", Align::Left),
            ("extent", Align::Right),
            ("slot", Align::Right),
            ("bytes", Align::Right),
            ("parts", Align::Right),
            ("tenant", Align::Left),
        ]);
        for (entry, record) in &found {
            if self.json {
                outln!("{}", told(entry, record));
                continue;
            }
            table.row(vec![
                record.id.to_string(),
                entry.extent.to_string(),
                entry.slot.to_string(),
                record.length.to_string(),
                format!("{:b}", record.parts),
                name_of(record.tenant),
            ]);
        }
        if !self.json {
            out!("{}", table.render());
        }
        Ok(())
    }
}

impl Verify {
    fn run(&self) -> Result<(), Complaint> {
        let directory = open(&self.directory)?;
        let mut found = Vec::new();
        let summary = entries(&directory, |entry| found.push(entry))?;
        let (mut right, mut wrong) = (0u64, 0u64);
        for entry in found {
            let Found::Block(record) = entry.found else { continue };
            let verified = directory.verify(&entry);
            match verified.map_err(|error| explain(&error, "A payload could not be read."))? {
                true => right += 1,
                false => {
                    wrong += 1;
                    outln!(
                        "{} in slot {} of extent {} is not what was put",
                        record.id,
                        entry.slot,
                        entry.extent
                    );
                }
            }
        }
        outln!(
            "{right} blocks are right, {wrong} are not; {} records are not whole",
            summary.torn
        );
        // What is not right would be a miss, and is one a kill may leave behind: no failure of the tier, but worth a look.
        match wrong {
            0 => Ok(()),
            _ => Err(Complaint::new(
                Exit::Failed,
                format!(
                    "{wrong} payloads are not what their records say; a store finds that when it reads them, and serves none."
                ),
            )),
        }
    }
}

impl Inspect {
    fn run(&self) -> Result<(), Complaint> {
        let directory = open(&self.directory)?;
        let mut found = Vec::new();
        entries(&directory, |entry| {
            if let Found::Block(record) = entry.found
                && record.id.to_string() == self.id.to_ascii_lowercase()
            {
                found.push((entry, record));
            }
        })?;
        if found.is_empty() {
            return Err(
                Complaint::new(Exit::Failed, format!("The tier has no block {}.", self.id)).try_this("weft store ls"),
            );
        }
        for (entry, record) in found {
            let right = directory
                .verify(&entry)
                .map_err(|error| explain(&error, "The payload could not be read."))?;
            let mut told = told(&entry, &record);
            told["right"] = right.into();
            outln!("{told}");
        }
        Ok(())
    }
}

impl Purge {
    fn run(&self) -> Result<(), Complaint> {
        let directory = open(&self.directory)?;
        let erased = directory.purge(&self.tenant);
        let erased = erased.map_err(|error| {
            explain(&error, "The tenant's records were not erased.").try_this("end the store that has the tier open")
        })?;
        outln!("{erased} records of {} are erased", self.tenant);
        Ok(())
    }
}

/// Tenants are known by eight bytes of a digest of their names.
fn name_of(tenant: TenantKey) -> String {
    format!("{:016x}", tenant.0)
}

fn told(entry: &Entry, record: &Record) -> serde_json::Value {
    json!({"block": record.id.to_string(), "extent": entry.extent, "slot": entry.slot, "bytes": record.length, "parts": record.parts,
        "tenant": name_of(record.tenant), "sequence": record.sequence})
}
