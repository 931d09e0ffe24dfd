//! Which rail of this side meets which of the peer's.
//!
//! Two hosts seldom name their network cards in the same order, and a card often reaches only those of its own network. Addresses begin
//! with what names the network, so two that have much of their beginning in common belong together. A transport that has
//! several rails therefore writes its addresses from the general to the particular.

use crate::transport::PeerAddress;

/// For each of `ours`, which of `theirs` it meets: the one with the longest common beginning, each of theirs once before any is
/// met twice, since a card that two share carries no more than it would alone. Equals are paired in their order.
///
/// `met` are pairs that are settled already, by their indices; each of ours that stands there is left as it is.
pub(super) fn pair_up(ours: &[&PeerAddress], theirs: &[&PeerAddress], met: &[(usize, usize)]) -> Vec<Option<usize>> {
    let mut pairs: Vec<Option<usize>> = vec![None; ours.len()];
    let mut meetings = vec![0usize; theirs.len()];
    for &(our, their) in met {
        pairs[our] = Some(their);
        meetings[their] += 1;
    }
    let unpaired = |pairs: &[Option<usize>]| (0..ours.len()).filter(|our| pairs[*our].is_none()).collect::<Vec<_>>();
    while !theirs.is_empty() && !unpaired(&pairs).is_empty() {
        let fewest = meetings.iter().copied().min().unwrap_or(0);
        let free = |their: &usize| meetings[*their] == fewest;
        // Distance in the order, counted upwards and round, so that the first meets the first and the second the second.
        let out_of_step = |our: usize, their: usize| (their + theirs.len() - our % theirs.len()) % theirs.len();
        let best = unpaired(&pairs)
            .into_iter()
            .flat_map(|our| (0..theirs.len()).filter(free).map(move |their| (our, their)))
            .min_by_key(|&(our, their)| {
                let common = common_beginning(ours[our], theirs[their]);
                (std::cmp::Reverse(common), out_of_step(our, their), our)
            });
        let Some((our, their)) = best else { break };
        pairs[our] = Some(their);
        meetings[their] += 1;
    }
    pairs
}

/// How many characters two addresses have in common from their start.
fn common_beginning(a: &PeerAddress, b: &PeerAddress) -> usize {
    a.0.bytes().zip(b.0.bytes()).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn addresses(texts: &[&str]) -> Vec<PeerAddress> {
        texts.iter().map(|text| PeerAddress(format!("verbs:{text}"))).collect()
    }

    fn paired(ours: &[&str], theirs: &[&str], met: &[(usize, usize)]) -> Vec<Option<usize>> {
        let (ours, theirs) = (addresses(ours), addresses(theirs));
        pair_up(
            &ours.iter().collect::<Vec<_>>(),
            &theirs.iter().collect::<Vec<_>>(),
            met,
        )
    }

    #[test]
    fn equal_networks_meet_whatever_their_order() {
        let (ours, theirs) = (
            ["0a000105", "0a000205", "0a000305"],
            ["0a000309", "0a000109", "0a000209"],
        );
        assert_eq!(paired(&ours, &theirs, &[]), [Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn equals_are_paired_in_their_order_and_shared_where_there_are_too_few() {
        assert_eq!(
            paired(&["a", "b", "c"], &["x", "y", "z"], &[]),
            [Some(0), Some(1), Some(2)]
        );
        assert_eq!(paired(&["a", "b", "c"], &["x", "y"], &[]), [Some(0), Some(1), Some(0)]);
        assert_eq!(paired(&["a"], &["x", "y"], &[]), [Some(0)]);
        assert_eq!(paired(&["a"], &[], &[]), [None]);
    }

    #[test]
    fn nobody_is_met_twice_while_another_is_alone() {
        // On one network the last digits mean nothing: both of ours look most like the first of theirs.
        assert_eq!(
            paired(&["0a000011", "0a000012"], &["0a000013", "0a000024"], &[]),
            [Some(0), Some(1)]
        );
    }

    #[test]
    fn what_is_settled_stays_and_counts() {
        assert_eq!(
            paired(&["0a01", "0a02"], &["0a01", "0a02"], &[(0, 1)]),
            [Some(1), Some(0)]
        );
    }

    proptest! {
        #[test]
        fn everyone_is_met_about_equally_often(
            ours in prop::collection::vec("[ab]{0,4}", 0..8),
            theirs in prop::collection::vec("[ab]{0,4}", 1..8),
        ) {
            let ours: Vec<&str> = ours.iter().map(String::as_str).collect();
            let theirs: Vec<&str> = theirs.iter().map(String::as_str).collect();
            let pairs = paired(&ours, &theirs, &[]);
            let mut meetings = vec![0; theirs.len()];
            for pair in pairs {
                meetings[pair.expect("there is somebody to meet")] += 1;
            }
            prop_assert!(meetings.iter().max().unwrap() - meetings.iter().min().unwrap() <= 1);
        }
    }
}
