//! Order, arrivals and places through the handles: what a transfer waits for, what the peer's application hears, and where memory is.

use std::sync::Arc;
use std::time::Duration;

use weft::{Access, Agent, Error, Flag, Memory, Peer, PeerError, Place};

/// Longer than anything here takes, and shorter than a wait that nobody ends.
const LONG: Duration = Duration::from_secs(20);
const LEN: usize = 9 << 20;

/// Two agents, the second as the first sees it, and memory of the second that the first may write.
fn pair(transport: &str) -> (Agent, Agent, Peer, Memory) {
    let [near, far] = ["near", "far"].map(|name| {
        let builder = Agent::builder(name).secret("a secret for tests");
        builder.set("transports", transport).start().unwrap()
    });
    let peer = near.connect(&far.address()).unwrap();
    let there = far.allocate(LEN).unwrap();
    far.publish("kv", &there, Access::READ_WRITE).unwrap();
    (near, far, peer, there)
}

#[test]
fn a_write_is_told_when_all_of_it_is_there_and_waits_for_its_time() {
    for transport in ["shared_memory", "tcp"] {
        let (near, far, peer, there) = pair(transport);
        let local = near.allocate(LEN).unwrap();
        let remote = peer.region("kv", LONG).unwrap();
        for number in 1..=20 {
            let flag = Arc::new(Flag::default());
            let write = peer.write(&local, &remote).arrives(number).after(flag.clone());
            let transfer = write.commit().post().unwrap();
            // Until it may begin, what is to be written is still being made.
            std::thread::sleep(Duration::from_micros(300));
            assert!(far.try_arrival().is_none(), "{transport}: nothing has begun");
            local.write(0, &vec![number as u8; LEN]);
            flag.raise();
            let arrival = far.arrival(LONG).expect("it arrives");
            assert_eq!((arrival.number, arrival.from.name()), (number, "near"), "{transport}");
            assert!(there.to_vec().iter().all(|byte| *byte == number as u8), "{transport}");
            transfer.wait().unwrap();
        }
        assert!(far.try_notification().is_none() && far.try_arrival().is_none());
    }
}

#[test]
fn memory_is_registered_with_its_place_and_what_nothing_carries_is_an_error_at_once() {
    let (near, _far, peer, _there) = pair("tcp");
    let on_node = near.allocate_on(LEN, Some(0)).unwrap();
    assert_eq!(on_node.place(), Place::Dram { numa: Some(0) });
    let remote = peer.region("kv", LONG).unwrap();
    peer.write(&on_node, &remote).post().unwrap().wait().unwrap();
    // Said to be a device's: no transport here carries that.
    let host = weft::HostMemory::from_vec(vec![0; LEN]);
    let device = near.register_at(Arc::new(host), Place::Gpu { ordinal: 0 }).unwrap();
    let refused = peer.write(&device, &remote).post();
    assert!(
        matches!(refused, Err(Error::Peer(PeerError::NoRoute(_)))),
        "{refused:?}"
    );
}
