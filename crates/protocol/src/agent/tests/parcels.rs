//! Parcels arrive once and in order, whatever becomes of the paths.

use super::*;
use crate::transport::{PathId, Transport as _};

fn taken(core: &mut Core<LoopbackEndpoint>, group: u64) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| core.next_parcel(group))
        .map(|parcel| parcel.payload().to_vec())
        .collect()
}

#[test]
fn parcels_arrive_once_and_in_order_and_apart_by_group() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    for number in 0u32..500 {
        let group = u64::from(number % 2);
        assert_eq!(
            pair.near
                .send_parcel(peer, group, &[b"no ", &number.to_le_bytes()], pair.now),
            Ok(true)
        );
    }
    let mut came = [Vec::new(), Vec::new()];
    for _ in 0..200 {
        pair.turn();
        for group in [0, 1] {
            came[group as usize].extend(taken(&mut pair.far, group));
        }
    }
    for (group, came) in came.iter().enumerate() {
        let sent = (0u32..500).filter(|number| *number as usize % 2 == group);
        let sent: Vec<Vec<u8>> = sent
            .map(|number| [b"no ".as_slice(), &number.to_le_bytes()].concat())
            .collect();
        assert_eq!(*came, sent);
    }
    assert!(pair.far.have_parcels_come());
    assert!(!pair.far.have_parcels_come());
}

#[test]
fn what_a_lost_path_has_taken_with_it_goes_again_on_another() {
    for lost_after in 0..40 {
        let mut pair = Pair::new();
        let peer = pair.connect();
        let mut came = Vec::new();
        for number in 0u8..100 {
            assert_eq!(pair.near.send_parcel(peer, 7, &[&[number]], pair.now), Ok(true));
            if number % 3 == 0 {
                pair.turn();
                came.extend(taken(&mut pair.far, 7));
            }
            if number == lost_after {
                // The far end of the first path goes away, with what it has not read.
                let paths = (0..4).map(PathId);
                paths.take(1).for_each(|path| pair.far.slots[0].transport.close(path));
            }
        }
        for _ in 0..200 {
            pair.turn();
            came.extend(taken(&mut pair.far, 7));
        }
        assert_eq!(came.concat(), (0..100).collect::<Vec<u8>>(), "lost after {lost_after}");
    }
}

#[test]
fn too_much_that_nobody_confirms_is_not_taken() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let full = vec![0; crate::agent::MAX_PARCEL_BYTES];
    let accepted = (0..1000).take_while(|_| pair.near.send_parcel(peer, 1, &[&full], pair.now) == Ok(true));
    assert_eq!(accepted.count(), (8 << 20) / crate::session::MAX_MESSAGE_BYTES);
    pair.until("room", |pair| {
        pair.near.peers.at(peer.0).is_some_and(|peer| peer.parcels.is_empty())
    });
}

#[test]
fn a_receipt_for_what_was_never_sent_costs_the_path() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let via = pair.near.paths.iter().next().map(|(via, _)| via).expect("a path");
    pair.near.on_parcel(via, vec![5, 9, 0, 0, 0, 0, 0, 0, 0], pair.now);
    pair.until("the loss", |pair| {
        pair.heard.iter().any(|e| matches!(e, Event::PathDown { .. }))
    });
    pair.near.on_parcel(via, vec![4, 1], pair.now);
    assert!(pair.near.identity(peer).is_some());
}
