//! What ranks agree on before tokens go to experts, and what follows from it: how many rows a rank has room for, how long every buffer is, how many blocks a launch has.

use thiserror::Error;

use crate::collective::{CollectiveError, DeviceSlice};
use crate::layout::RANKS_MAX;

/// Elements of a row at most.
const HIDDEN_MAX: u32 = 16_384;
/// Experts of a token at most.
pub const TOP_K_MAX: u32 = 16;
/// Experts of all ranks together at most.
pub const EXPERTS_MAX: u32 = 1024;
/// Tokens of a rank at most where every source has slots of its own.
pub const SLOT_TOKENS_MAX: u32 = 256;
/// Elements that share a scale where rows are rounded to fp8.
pub const SCALED_ELEMENTS: u32 = 128;
/// A place is a rank and a row in one word.
pub(crate) const ROW_BITS: u32 = 28;
const TOKENS_MAX: u32 = 1 << 20;
const VECTOR_ELEMENTS: u32 = 8;
const LINE: u64 = 16;
const WORD: u64 = 4;

/// Why tokens were not sent, or not summed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MoeError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error("{experts} experts do not spread evenly over {ranks} ranks, or are none, or more than {EXPERTS_MAX}")]
    UnevenExperts { experts: u32, ranks: usize },
    #[error("{top_k} experts of a token: 1 to {TOP_K_MAX} are possible, and no more than there are")]
    BadTopK { top_k: u32 },
    #[error("{tokens} tokens where at most {most} are possible")]
    TooManyTokens { tokens: u32, most: u32 },
    #[error("{rows} rows on one rank are too many, or none")]
    BadCapacity { rows: u64 },
    #[error("a handle of another kind of dispatch")]
    OtherHandle,
    /// Found on the device. Of the call nothing was sent: counts are zero, and combine gives zeros.
    #[error("rank {rank} was to receive {needed} rows and has room for {capacity}")]
    OverCapacity { rank: usize, needed: u64, capacity: u64 },
}

impl From<crate::device::GpuError> for MoeError {
    fn from(error: crate::device::GpuError) -> MoeError {
        MoeError::Collective(error.into())
    }
}

/// How a rank finds what it has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// For few tokens. Row `(expert * ranks + source) * tokens_max + nth` is the nth token of a source for one of this rank's experts; a token that several experts of a rank have is there for each of them. Counts
    /// are by expert and source. Combine multiplies with the gate's weights.
    Slots,
    /// For many. A token is there once, whichever of this rank's experts have it; rows lie one after the other, by source and token. Beside them lie which of this rank's experts each row is for, and their weights, as
    /// the gate gave them, `-1` and `0` where an expert is elsewhere. Counts are by expert, then by source. What the experts give for a row is summed with its weights by whoever runs them, and combine adds the ranks' sums.
    Compact {
        /// Rows that a rank has room for. `ranks * tokens_max` is always enough.
        capacity: u32,
    },
}

/// What rows are sent as. They are bf16 before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    Bf16,
    /// fp8 e4m3 with an f32 scale for each 128 elements of a row: their largest magnitude over 448.
    Fp8,
}

/// What all ranks agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeSettings {
    /// Elements of a row: a multiple of 8, of 128 where they are sent as fp8, at most 16,384.
    pub hidden: u32,
    /// Of all ranks together: rank r has those from `r * experts / ranks` on.
    pub experts: u32,
    /// Experts of a token. Whatever is no number of an expert stands for none; one that a token has twice is sent once, and counts with both weights.
    pub top_k: u32,
    /// Of a rank, in one call, at most.
    pub tokens_max: u32,
    pub received: Received,
    pub sent: Sent,
}

/// How many bytes each buffer has to hold; nothing where it is not used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchBytes {
    pub rows: u64,
    pub scales: u64,
    /// Of `i32`.
    pub counts: u64,
    pub row_experts: u64,
    pub row_weights: u64,
    /// What combine reads: a row of bf16 for each that was received.
    pub results: u64,
}

/// Settings that were found to be possible, for so many ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeShape {
    settings: MoeSettings,
    ranks: usize,
}

impl MoeShape {
    pub fn new(settings: MoeSettings, ranks: usize) -> Result<MoeShape, MoeError> {
        let MoeSettings {
            hidden,
            experts,
            top_k,
            tokens_max,
            received,
            sent,
        } = settings;
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(CollectiveError::TooManyRanks { ranks }.into());
        }
        if experts == 0 || experts > EXPERTS_MAX || experts % ranks as u32 != 0 {
            return Err(MoeError::UnevenExperts { experts, ranks });
        }
        if top_k == 0 || top_k > TOP_K_MAX || top_k > experts {
            return Err(MoeError::BadTopK { top_k });
        }
        let multiple = match sent {
            Sent::Bf16 => VECTOR_ELEMENTS,
            Sent::Fp8 => SCALED_ELEMENTS,
        };
        if hidden == 0 || hidden % multiple != 0 || hidden > HIDDEN_MAX {
            return Err(CollectiveError::BadRow {
                hidden: hidden.into(),
                multiple: multiple.into(),
                most: HIDDEN_MAX.into(),
            }
            .into());
        }
        let most = match received {
            Received::Slots => SLOT_TOKENS_MAX,
            Received::Compact { .. } => TOKENS_MAX,
        };
        if tokens_max == 0 || tokens_max > most {
            return Err(MoeError::TooManyTokens {
                tokens: tokens_max,
                most,
            });
        }
        let shape = MoeShape { settings, ranks };
        let rows = shape.rows();
        if rows == 0 || rows >= 1 << ROW_BITS {
            return Err(MoeError::BadCapacity { rows });
        }
        Ok(shape)
    }

    pub fn settings(&self) -> &MoeSettings {
        &self.settings
    }
    pub fn ranks(&self) -> usize {
        self.ranks
    }
    pub fn experts_a_rank(&self) -> u32 {
        self.settings.experts / self.ranks as u32
    }
    /// That one rank has room for.
    pub fn rows(&self) -> u64 {
        match self.settings.received {
            Received::Slots => {
                u64::from(self.experts_a_rank()) * self.ranks as u64 * u64::from(self.settings.tokens_max)
            }
            Received::Compact { capacity } => capacity.into(),
        }
    }
    /// Places of a token: for each of its experts, or each rank.
    pub fn width(&self) -> u32 {
        match self.settings.received {
            Received::Slots => self.settings.top_k,
            Received::Compact { .. } => self.ranks as u32,
        }
    }

    pub fn bytes(&self) -> DispatchBytes {
        let (rows, hidden) = (self.rows(), u64::from(self.settings.hidden));
        let experts = u64::from(self.experts_a_rank());
        let (element, scales) = match self.settings.sent {
            Sent::Bf16 => (2, 0),
            Sent::Fp8 => (1, hidden / u64::from(SCALED_ELEMENTS)),
        };
        let (counts, beside) = match self.settings.received {
            Received::Slots => (experts * self.ranks as u64, 0),
            Received::Compact { .. } => (experts + self.ranks as u64, u64::from(self.settings.top_k)),
        };
        DispatchBytes {
            rows: rows * hidden * element,
            scales: rows * scales * WORD,
            counts: counts * WORD,
            row_experts: rows * beside * WORD,
            row_weights: rows * beside * WORD,
            results: rows * hidden * 2,
        }
    }

    pub(crate) fn handle_bytes(&self) -> u64 {
        u64::from(self.settings.tokens_max) * u64::from(self.width()) * WORD
    }

    /// The same on every rank, however many tokens each of them has: block b of a rank deals with block b of the others.
    pub(crate) fn blocks(&self, most: u32) -> u32 {
        self.settings.tokens_max.clamp(1, most.max(1))
    }

    /// What kernels multiply with to find an expert's rank.
    pub(crate) fn owner_factor(&self) -> u64 {
        (1u64 << 32).div_ceil(self.experts_a_rank().into())
    }

    pub(crate) fn check_tokens(&self, tokens: u32) -> Result<(), MoeError> {
        let most = self.settings.tokens_max;
        match tokens <= most {
            true => Ok(()),
            false => Err(MoeError::TooManyTokens { tokens, most }),
        }
    }
}

/// A buffer, and what of it is used.
pub(crate) type Used = (DeviceSlice, u64);

/// What is wrong with buffers, if anything is: `written` lie apart from each other and from everything else.
pub(crate) fn check_buffers(read: &[Used], written: &[Used]) -> Result<(), CollectiveError> {
    for &(slice, needed) in read.iter().chain(written).filter(|(_, needed)| *needed > 0) {
        if slice.bytes < needed {
            return Err(CollectiveError::BufferTooSmall {
                needed,
                found: slice.bytes,
            });
        }
        if slice.address % LINE != 0 || slice.address.checked_add(slice.bytes).is_none() {
            return Err(CollectiveError::Misaligned {
                address: slice.address,
                bytes: LINE,
            });
        }
    }
    for (nth, (own, bytes)) in written.iter().enumerate() {
        let others = read.iter().chain(&written[..nth]);
        let mut used = others.filter(|(_, others)| *others > 0 && *bytes > 0);
        if used.any(|(other, others)| own.address < other.address + others && other.address < own.address + bytes) {
            return Err(CollectiveError::Overlap);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: MoeSettings = MoeSettings {
        hidden: 7168,
        experts: 256,
        top_k: 8,
        tokens_max: 128,
        received: Received::Slots,
        sent: Sent::Bf16,
    };

    #[test]
    fn lengths_follow_the_layout() {
        let slots = MoeShape::new(SETTINGS, 8).unwrap();
        assert_eq!((slots.rows(), slots.width()), (32 * 8 * 128, 8));
        let bytes = slots.bytes();
        assert_eq!(bytes.rows, 32 * 8 * 128 * 7168 * 2);
        assert_eq!((bytes.scales, bytes.counts, bytes.row_experts), (0, 32 * 8 * 4, 0));
        let compact = MoeSettings {
            tokens_max: 4096,
            received: Received::Compact { capacity: 1000 },
            sent: Sent::Fp8,
            ..SETTINGS
        };
        let compact = MoeShape::new(compact, 4).unwrap();
        let bytes = compact.bytes();
        assert_eq!((bytes.rows, bytes.scales), (1000 * 7168, 1000 * 56 * 4));
        assert_eq!((bytes.counts, bytes.row_weights), ((64 + 4) * 4, 1000 * 8 * 4));
        assert_eq!((bytes.results, compact.handle_bytes()), (1000 * 7168 * 2, 4096 * 4 * 4));
    }

    #[test]
    fn impossible_settings_are_told_apart() {
        let new = |change: &dyn Fn(&mut MoeSettings), ranks| {
            let mut settings = SETTINGS;
            change(&mut settings);
            MoeShape::new(settings, ranks).map(|_| ())
        };
        assert_eq!(new(&|_| (), 8), Ok(()));
        assert!(matches!(new(&|_| (), 7), Err(MoeError::UnevenExperts { ranks: 7, .. })));
        assert!(matches!(
            new(&|of| of.experts = 0, 8),
            Err(MoeError::UnevenExperts { .. })
        ));
        assert!(matches!(
            new(&|of| of.experts = 2048, 8),
            Err(MoeError::UnevenExperts { .. })
        ));
        assert_eq!(new(&|of| of.top_k = 17, 8), Err(MoeError::BadTopK { top_k: 17 }));
        assert_eq!(new(&|of| of.top_k = 0, 8), Err(MoeError::BadTopK { top_k: 0 }));
        let bad_row = |hidden, sent| {
            let made = new(
                &|of| {
                    of.hidden = hidden;
                    of.sent = sent;
                },
                8,
            );
            matches!(made, Err(MoeError::Collective(CollectiveError::BadRow { .. })))
        };
        assert!(bad_row(12, Sent::Bf16) && bad_row(0, Sent::Bf16) && bad_row(16_392, Sent::Bf16));
        assert!(!bad_row(136, Sent::Bf16) && bad_row(136, Sent::Fp8) && !bad_row(256, Sent::Fp8));
        assert!(matches!(
            new(&|of| of.tokens_max = 257, 8),
            Err(MoeError::TooManyTokens { most: 256, .. })
        ));
        let none = new(&|of| of.received = Received::Compact { capacity: 0 }, 8);
        assert_eq!(none, Err(MoeError::BadCapacity { rows: 0 }));
        let many = new(&|of| of.received = Received::Compact { capacity: 1 << 28 }, 8);
        assert_eq!(many, Err(MoeError::BadCapacity { rows: 1 << 28 }));
        assert!(matches!(
            new(&|_| (), 9),
            Err(MoeError::Collective(CollectiveError::TooManyRanks { ranks: 9 }))
        ));
    }

    /// Every expert's rank, as kernels find it, is what division says.
    #[test]
    fn owners_are_those_of_division() {
        for ranks in 1..=8 {
            for each in 1..=EXPERTS_MAX / ranks {
                let settings = MoeSettings {
                    experts: each * ranks,
                    top_k: 1,
                    ..SETTINGS
                };
                let Ok(shape) = MoeShape::new(settings, ranks as usize) else {
                    continue;
                };
                for expert in 0..settings.experts {
                    let owner = (u64::from(expert) * shape.owner_factor()) >> 32;
                    assert_eq!(owner, u64::from(expert / each), "expert {expert}, {each} a rank");
                }
            }
        }
    }

    #[test]
    fn blocks_depend_on_what_all_ranks_agree_on() {
        let shape = MoeShape::new(SETTINGS, 8).unwrap();
        assert_eq!((shape.blocks(49), shape.blocks(256), shape.blocks(0)), (49, 128, 1));
    }

    #[test]
    fn wrong_buffers_are_told_apart() {
        let used = |address, bytes, needed| (DeviceSlice { address, bytes }, needed);
        let right = used(0x1000, 64, 64);
        assert_eq!(check_buffers(&[right, right], &[used(0x2000, 64, 64)]), Ok(()));
        assert_eq!(
            check_buffers(&[right], &[used(0x1030, 64, 64)]),
            Err(CollectiveError::Overlap)
        );
        assert_eq!(check_buffers(&[right], &[used(0x1030, 64, 0)]), Ok(()));
        assert_eq!(
            check_buffers(&[], &[used(0x1000, 64, 64), used(0x1000, 64, 64)]),
            Err(CollectiveError::Overlap)
        );
        assert_eq!(
            check_buffers(&[used(0x1008, 64, 64)], &[]),
            Err(CollectiveError::Misaligned {
                address: 0x1008,
                bytes: 16
            })
        );
        assert_eq!(
            check_buffers(&[used(0x1000, 63, 64)], &[]),
            Err(CollectiveError::BufferTooSmall { needed: 64, found: 63 })
        );
        assert!(check_buffers(&[used(u64::MAX - 15, 64, 64)], &[]).is_err());
    }
}
