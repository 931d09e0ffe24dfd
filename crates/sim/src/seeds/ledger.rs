//! What must be true of memory: every byte that an agent of the simulated world owns, with what it must hold.
//!
//! The ledger holds its own image of every buffer. While a transfer may write to some bytes they are on loan to it; the moment it
//! has ended they are compared, sealed with fresh random bytes, and watched for the rest of the run. So a byte that lands late,
//! twice or in the wrong place is found, whoever wrote it.

use std::sync::Arc;

use weft_plan::Spans;
use weft_protocol::seeded::Seeded;
use weft_protocol::{HostBytes, Memory, VecMemory};

/// Memory and what it must hold.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) memory: Arc<VecMemory>,
    image: Vec<u8>,
    /// The cells, of equal size, that are on loan to a transfer.
    loans: Vec<bool>,
}

/// Bytes that are not what they must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Damage {
    pub(super) offset: usize,
    pub(super) found: u8,
    pub(super) wanted: u8,
}

impl Watched {
    pub(super) fn new(len: usize, cells: usize, chance: &mut Seeded) -> Watched {
        let mut image = vec![0; len];
        chance.fill(&mut image);
        Watched {
            memory: Arc::new(VecMemory::new(image.clone())),
            image,
            loans: vec![false; cells],
        }
    }

    pub(super) fn cell_bytes(&self) -> usize {
        self.image.len() / self.loans.len()
    }

    /// Lends a free cell, if there is one.
    pub(super) fn lend(&mut self) -> Option<usize> {
        let cell = self.loans.iter().position(|loan| !loan)?;
        self.loans[cell] = true;
        Some(cell)
    }

    /// What the image holds at these spans, in their order.
    pub(super) fn expected(&self, spans: &Spans) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(spans.bytes() as usize);
        for piece in spans.pieces(0..spans.bytes()) {
            bytes.extend_from_slice(&self.image[piece.offset as usize..(piece.offset + piece.len) as usize]);
        }
        bytes
    }

    /// Takes a cell back: outside the spans it must be as it was. Then it is sealed.
    pub(super) fn take_back(&mut self, cell: usize, spans: &Spans, chance: &mut Seeded) -> Result<(), Damage> {
        let (start, size) = (cell * self.cell_bytes(), self.cell_bytes());
        let mut found = vec![0; size];
        self.memory.read(start as u64, &mut found);
        let mut lent = vec![false; size];
        for piece in spans.pieces(0..spans.bytes()) {
            let from = piece.offset as usize - start;
            lent[from..from + piece.len as usize].fill(true);
        }
        let damaged = (0..size).find(|&i| !lent[i] && found[i] != self.image[start + i]);
        let damage = damaged.map(|i| Damage {
            offset: start + i,
            found: found[i],
            wanted: self.image[start + i],
        });
        chance.fill(&mut self.image[start..start + size]);
        self.memory.write(start as u64, &self.image[start..start + size]);
        self.loans[cell] = false;
        damage.map_or(Ok(()), Err)
    }

    /// Everything that is not on loan must be as it was.
    pub(super) fn check(&self) -> Result<(), Damage> {
        let found = self.memory.snapshot();
        let size = self.cell_bytes();
        for (cell, _) in self.loans.iter().enumerate().filter(|(_, loan)| !**loan) {
            let range = cell * size..(cell + 1) * size;
            if found[range.clone()] != self.image[range.clone()] {
                let offset = range
                    .clone()
                    .find(|&i| found[i] != self.image[i])
                    .unwrap_or(range.start);
                return Err(Damage {
                    offset,
                    found: found[offset],
                    wanted: self.image[offset],
                });
            }
        }
        Ok(())
    }

    /// Nobody may be inside any more: loans are over, and all of it is sealed.
    pub(super) fn seal_all(&mut self, chance: &mut Seeded) {
        chance.fill(&mut self.image);
        self.memory.write(0, &self.image);
        self.loans.fill(false);
    }

    /// Nobody will write here again: what it holds now it must hold for ever.
    pub(super) fn freeze(&mut self) {
        self.image = self.memory.snapshot();
        self.loans.fill(false);
    }
}

/// What memory holds at these spans, in their order.
pub(super) fn gather(memory: &dyn Memory, spans: &Spans) -> Vec<u8> {
    let mut bytes = vec![0; spans.bytes() as usize];
    let mut at = 0;
    for piece in spans.pieces(0..spans.bytes()) {
        memory
            .bytes()
            .read(piece.offset, &mut bytes[at..at + piece.len as usize]);
        at += piece.len as usize;
    }
    bytes
}
