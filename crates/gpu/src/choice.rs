//! Which kernel a call takes, and how many blocks.

use weft_plan::Datatype;

use crate::collective::{Collective, CollectiveError, Folding};
use crate::kernels::{Float, Kernel, Reduced, THREADS, Width};
use crate::layout::Layout;

/// How the bytes of a call go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// By packets, in one hop: everything to everybody who needs it.
    OneShot,
    /// By packets, in two hops: all-reduce alone. Every rank reduces a part, and sends that to all.
    TwoShot,
    /// Every rank reads and writes the buffers of the others, between two meetings.
    Bulk,
}

/// All-reduce in one hop sends everything to every other rank, twice as long as it is. Up to so many bytes of all ranks together that is quicker than a second hop.
const ONE_SHOT_BYTES_MAX: u64 = 512 << 10;
/// Up to so many bytes of a rank's part a second hop of packets is quicker than two meetings.
const TWO_SHOT_PART_BYTES_MAX: u64 = 32 << 10;
/// The same for collectives of one hop: bytes that one rank sends another.
const MOVE_BYTES_MAX: u64 = 32 << 10;
/// What a packet carries, and what a vector has.
const EIGHT: u64 = 8;
const VECTOR: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub way: Way,
    pub kernel: Kernel,
    pub blocks: u32,
}

/// The same on every rank, since it depends on nothing else. `way`: what the caller asks for.
pub(crate) fn choose(
    collective: &Collective,
    ranks: usize,
    way: Option<Way>,
    blocks_max: u32,
) -> Result<Choice, CollectiveError> {
    let (input, output) = collective.bytes(ranks)?;
    let all = ranks as u64;
    // What one rank sends another in a hop.
    let (one_hop, two_hops) = match collective {
        Collective::AllReduce { .. } => (input, Some(part(input, all, EIGHT))),
        Collective::ReduceScatter { .. } => (output, None),
        Collective::AllGather { .. } | Collective::Broadcast { .. } => (input, None),
        Collective::AllToAll { .. } => (input / all, None),
    };
    let way = way.unwrap_or(match two_hops {
        Some(_) if one_hop * all <= ONE_SHOT_BYTES_MAX => Way::OneShot,
        Some(part) if part <= TWO_SHOT_PART_BYTES_MAX => Way::TwoShot,
        None if one_hop <= MOVE_BYTES_MAX => Way::OneShot,
        _ => Way::Bulk,
    });
    let fits = match way {
        Way::OneShot => one_hop <= Layout::ONE_HOP_BYTES_MAX,
        Way::TwoShot => two_hops.is_some_and(|part| part <= Layout::TWO_HOP_BYTES_MAX),
        Way::Bulk => true,
    };
    if !fits {
        return Err(CollectiveError::NotThisWay);
    }
    // What the threads of a rank share among them.
    let units = match (way, collective) {
        (Way::OneShot, _) => one_hop.div_ceil(EIGHT),
        (Way::TwoShot, _) => two_hops.unwrap_or(0).div_ceil(EIGHT),
        (Way::Bulk, Collective::AllReduce { .. } | Collective::Broadcast { .. }) => part(input, all, VECTOR) / VECTOR,
        (Way::Bulk, _) => one_hop.div_ceil(VECTOR),
    };
    let blocks = units.div_ceil(u64::from(THREADS)).clamp(1, u64::from(blocks_max)) as u32;
    let kernel = match (way, collective) {
        (
            Way::Bulk,
            Collective::AllReduce {
                datatype, reduction, ..
            }
            | Collective::ReduceScatter {
                datatype, reduction, ..
            },
        ) => bulk(*datatype, Folding::new(*datatype, *reduction, ranks), ranks)?,
        (Way::Bulk, _) => Kernel::MoveBulk,
        (Way::TwoShot, _) | (_, Collective::ReduceScatter { .. }) => Kernel::TwoShot,
        (_, Collective::AllReduce { .. }) => Kernel::OneShot,
        _ => Kernel::MovePackets,
    };
    Ok(Choice { way, kernel, blocks })
}

/// A rank's part of what is cut into as many as there are ranks, at multiples of `unit`.
fn part(bytes: u64, ranks: u64, unit: u64) -> u64 {
    bytes.div_ceil(unit).div_ceil(ranks) * unit
}

fn bulk(datatype: Datatype, folding: Folding, ranks: usize) -> Result<Kernel, CollectiveError> {
    let width = match ranks {
        ..=2 => Width::Two,
        3..=4 => Width::Four,
        _ => Width::Eight,
    };
    let sum = folding.is_plain_sum();
    Ok(match datatype {
        Datatype::F32 if sum => Kernel::Sum(Float::F32, width),
        Datatype::F16 if sum => Kernel::Sum(Float::F16, width),
        Datatype::Bf16 if sum => Kernel::Sum(Float::Bf16, width),
        Datatype::F32 => Kernel::Other(Reduced::F32),
        Datatype::F16 => Kernel::Other(Reduced::F16),
        Datatype::Bf16 => Kernel::Other(Reduced::Bf16),
        Datatype::I32 => Kernel::Other(Reduced::I32),
        _ => return Err(CollectiveError::NotReduced { datatype }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_plan::Reduction;

    fn all_reduce(bytes: u64) -> Collective {
        Collective::AllReduce {
            count: bytes / 2,
            datatype: Datatype::Bf16,
            reduction: Reduction::Sum,
        }
    }

    #[test]
    fn larger_calls_take_heavier_ways() {
        for ranks in 2..=8 {
            let mut before = Way::OneShot;
            for shift in 4..30 {
                let choice = choose(&all_reduce(1 << shift), ranks, None, 49).unwrap();
                let weight = |way| match way {
                    Way::OneShot => 0,
                    Way::TwoShot => 1,
                    Way::Bulk => 2,
                };
                assert!(weight(choice.way) >= weight(before), "{ranks} ranks, {shift}");
                assert!((1..=49).contains(&choice.blocks));
                before = choice.way;
            }
            assert_eq!(before, Way::Bulk);
            let small = choose(&all_reduce(16), ranks, None, 49).unwrap();
            assert_eq!((small.kernel, small.blocks), (Kernel::OneShot, 1));
        }
    }

    #[test]
    fn every_chosen_way_has_room_for_its_packets() {
        for ranks in 2..=8usize {
            for bytes in (0..27).map(|shift| 1u64 << shift).chain([262_144 + 2, 1_048_576 - 2]) {
                for collective in [
                    all_reduce(bytes),
                    Collective::ReduceScatter {
                        count: bytes / 2,
                        datatype: Datatype::F16,
                        reduction: Reduction::Avg,
                    },
                    Collective::AllGather { bytes },
                    Collective::AllToAll { bytes },
                    Collective::Broadcast { bytes, root: 1 },
                ] {
                    let choice = choose(&collective, ranks, None, 49);
                    assert!(choice.is_ok(), "{collective:?} {ranks} {choice:?}");
                }
            }
        }
    }

    #[test]
    fn a_way_that_does_not_fit_is_refused() {
        let refused = |collective, ways: &[Way]| {
            for way in ways {
                let choice = choose(&collective, 4, Some(*way), 49);
                assert_eq!(choice, Err(CollectiveError::NotThisWay), "{collective:?} {way:?}");
            }
        };
        refused(all_reduce(1 << 20), &[Way::OneShot, Way::TwoShot]);
        refused(Collective::AllGather { bytes: 16 }, &[Way::TwoShot]);
        refused(Collective::AllToAll { bytes: 1 << 20 }, &[Way::OneShot]);
        assert!(choose(&all_reduce(512 << 10), 4, Some(Way::TwoShot), 49).is_ok());
    }

    #[test]
    fn kernels_follow_elements_folds_and_ranks() {
        let chosen = |datatype, reduction, ranks| {
            let collective = Collective::ReduceScatter {
                count: 1 << 24,
                datatype,
                reduction,
            };
            choose(&collective, ranks, None, 49).unwrap().kernel
        };
        use Reduction::{Avg, Max, Sum};
        assert_eq!(chosen(Datatype::Bf16, Sum, 2), Kernel::Sum(Float::Bf16, Width::Two));
        assert_eq!(chosen(Datatype::F16, Avg, 4), Kernel::Sum(Float::F16, Width::Four));
        assert_eq!(chosen(Datatype::F32, Avg, 3), Kernel::Other(Reduced::F32));
        assert_eq!(chosen(Datatype::F32, Sum, 3), Kernel::Sum(Float::F32, Width::Four));
        assert_eq!(chosen(Datatype::F32, Max, 8), Kernel::Other(Reduced::F32));
        assert_eq!(chosen(Datatype::I32, Sum, 8), Kernel::Other(Reduced::I32));
    }
}
