//! Which kernel a call takes, and how many blocks.

use weft_plan::cost::kernels::{DeviceCosts, KernelCall};
use weft_plan::{Datatype, Picos};

pub use weft_plan::cost::kernels::Way;

use crate::collective::{Collective, CollectiveError, Folding};
use crate::kernels::{Float, Kernel, Reduced, THREADS, Width};
use crate::layout::Layout;

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
    costs: &DeviceCosts,
) -> Result<Choice, CollectiveError> {
    let (input, output) = collective.bytes(ranks)?;
    let all = ranks as u64;
    let (one_hop, two_hops) = hops(collective, all, (input, output));
    let has_room = |way| match way {
        Way::OneShot => one_hop <= Layout::ONE_HOP_BYTES_MAX,
        Way::TwoShot => two_hops.is_some_and(|part| part <= Layout::TWO_HOP_BYTES_MAX),
        Way::Bulk => true,
    };
    let way = way.unwrap_or_else(|| costs.fastest(&kernel_call(collective, ranks, (input, output)), all, has_room));
    if !has_room(way) {
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

/// What one rank sends another by packets, in one hop and in each of two.
fn hops(collective: &Collective, all: u64, (input, output): (u64, u64)) -> (u64, Option<u64>) {
    match collective {
        Collective::AllReduce { .. } => (input, Some(part(input, all, EIGHT))),
        Collective::ReduceScatter { .. } => (output, None),
        Collective::AllGather { .. } | Collective::Broadcast { .. } => (input, None),
        Collective::AllToAll { .. } => (input / all, None),
    }
}

/// A call as the cost model has it.
fn kernel_call(collective: &Collective, ranks: usize, (input, output): (u64, u64)) -> KernelCall {
    let all = ranks as u64;
    let (one_hop, two_hops) = hops(collective, all, (input, output));
    let readers = match collective {
        Collective::Broadcast { .. } => 1,
        _ => all,
    };
    KernelCall {
        one_hop,
        two_hops,
        read: input.saturating_mul(readers),
        written: output.saturating_mul(all),
    }
}

/// Which way a call takes that asks for none, between ranks that share a device.
pub fn chosen_way(collective: &Collective, ranks: usize, costs: &DeviceCosts) -> Result<Way, CollectiveError> {
    Ok(choose(collective, ranks, None, 1, costs)?.way)
}

/// How long the model says that a call takes each way, on a device that its ranks share.
pub fn predicted(
    collective: &Collective,
    ranks: usize,
    costs: &DeviceCosts,
) -> Result<[(Way, Option<Picos>); 3], CollectiveError> {
    let call = kernel_call(collective, ranks, collective.bytes(ranks)?);
    Ok(Way::ALL.map(|way| (way, costs.time(way, &call, ranks as u64))))
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
                let choice = choose(&all_reduce(1 << shift), ranks, None, 49, &DeviceCosts::default()).unwrap();
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
            let small = choose(&all_reduce(16), ranks, None, 49, &DeviceCosts::default()).unwrap();
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
                    let choice = choose(&collective, ranks, None, 49, &DeviceCosts::default());
                    assert!(choice.is_ok(), "{collective:?} {ranks} {choice:?}");
                }
            }
        }
    }

    #[test]
    fn a_way_that_does_not_fit_is_refused() {
        let refused = |collective, ways: &[Way]| {
            for way in ways {
                let choice = choose(&collective, 4, Some(*way), 49, &DeviceCosts::default());
                assert_eq!(choice, Err(CollectiveError::NotThisWay), "{collective:?} {way:?}");
            }
        };
        refused(all_reduce(1 << 20), &[Way::OneShot, Way::TwoShot]);
        refused(Collective::AllGather { bytes: 16 }, &[Way::TwoShot]);
        refused(Collective::AllToAll { bytes: 1 << 20 }, &[Way::OneShot]);
        assert!(
            choose(
                &all_reduce(512 << 10),
                4,
                Some(Way::TwoShot),
                49,
                &DeviceCosts::default()
            )
            .is_ok()
        );
    }

    #[test]
    fn kernels_follow_elements_folds_and_ranks() {
        let chosen = |datatype, reduction, ranks| {
            let collective = Collective::ReduceScatter {
                count: 1 << 24,
                datatype,
                reduction,
            };
            choose(&collective, ranks, None, 49, &DeviceCosts::default())
                .unwrap()
                .kernel
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
