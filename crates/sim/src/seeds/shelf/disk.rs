//! A disk that forgets: what was not made to last may be lost by the sector, in any order, and what was under way is half there.

use std::collections::BTreeMap;

use weft_protocol::Seeded;

const SECTOR: usize = 512;

/// Which file of the tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Name {
    Header,
    Data(u32),
    Index(u32),
}

#[derive(Clone, Debug, Default)]
struct File {
    /// What reads see.
    seen: Vec<u8>,
    /// What is there after the power has failed, whatever else is.
    lasting: Vec<u8>,
    /// What was written since it was last made to last.
    loose: Vec<(usize, Vec<u8>)>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Disk(BTreeMap<Name, File>);

impl Disk {
    pub(super) fn make(&mut self, name: Name, bytes: usize) {
        self.0.entry(name).or_default().seen.resize(bytes, 0);
        self.0.entry(name).or_default().lasting.resize(bytes, 0);
    }

    pub(super) fn seen(&self, name: Name) -> &[u8] {
        self.0.get(&name).map_or(&[], |file| &file.seen)
    }

    pub(super) fn write(&mut self, name: Name, offset: usize, bytes: &[u8]) {
        let file = self.0.get_mut(&name).expect("a file");
        file.seen[offset..offset + bytes.len()].copy_from_slice(bytes);
        file.loose.push((offset, bytes.to_vec()));
    }

    /// Some sectors of it get there: the process or the device ended in the middle.
    pub(super) fn write_torn(&mut self, name: Name, offset: usize, bytes: &[u8], rng: &mut Seeded) {
        for (at, sector) in sectors(offset, bytes) {
            if rng.below(2) == 0 {
                self.write(name, at, sector);
            }
        }
    }

    pub(super) fn sync(&mut self, name: Name) {
        let file = self.0.get_mut(&name).expect("a file");
        file.lasting.clone_from(&file.seen);
        file.loose.clear();
    }

    /// The power fails: of what is loose some sectors are there and some are not, in any order.
    pub(super) fn lose_power(&mut self, rng: &mut Seeded) {
        for file in self.0.values_mut() {
            let loose = std::mem::take(&mut file.loose);
            for nth in rng.shuffled(loose.len() as u64) {
                let (offset, bytes) = &loose[nth as usize];
                for (at, sector) in sectors(*offset, bytes) {
                    if rng.below(2) == 0 {
                        file.lasting[at..at + sector.len()].copy_from_slice(sector);
                    }
                }
            }
            file.seen.clone_from(&file.lasting);
        }
    }

    /// Changes what is there behind everybody's back, for good.
    pub(super) fn damage(&mut self, name: Name, offset: usize, change: impl FnOnce(&mut u8)) {
        let file = self.0.get_mut(&name).expect("a file");
        change(&mut file.seen[offset]);
        file.lasting[offset] = file.seen[offset];
    }

    pub(super) fn overwrite(&mut self, name: Name, offset: usize, bytes: &[u8]) {
        let file = self.0.get_mut(&name).expect("a file");
        file.seen[offset..offset + bytes.len()].copy_from_slice(bytes);
        file.lasting[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// Bytes by the sectors of the disk that they are in.
fn sectors(offset: usize, bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let length = (SECTOR - (offset + at) % SECTOR).min(bytes.len() - at);
        let piece = (length > 0).then(|| (offset + at, &bytes[at..at + length]));
        at += length;
        piece
    })
}
