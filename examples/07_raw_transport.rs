//! Below the agent: a transport by itself, turned by hand. Write one like this, and everything above it works over it.
//!
//! The loopback transport is the reference; see docs/adding-a-transport.md for what a real one owes.

use std::sync::Arc;

use weft_plan::{Place, Spans, Time};
use weft_protocol::{
    Access, Body, Direction, Epoch, Leg, Loopback, Move, Op, OpId, PeerAddress, Region, RegionKey, RemoteRegion,
    Signal, Transport, VecMemory,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let network = Loopback::new();
    let mut here = network.endpoint("here", Epoch(1));
    let mut there = network.endpoint("there", Epoch(2));

    // Both sides register memory. The key is what the far side must be told; a session would carry it.
    let theirs = region(Epoch(2), VecMemory::new((0..=255).collect()), Access::READ);
    let grant = there.register(&theirs)?;
    let ours = region(Epoch(1), VecMemory::zeroed(256), Access::NONE);
    here.register(&ours)?;
    let remote = RemoteRegion {
        key: theirs.key,
        len: 256,
        place: Place::DRAM,
        access: Access::READ,
        grants: [("loopback".to_string(), grant)].into(),
    };

    // Time is passed in: here it stands still.
    let now = Time::ZERO;
    let address: PeerAddress = there.capabilities().address.clone();
    let path = here.open(&address, now)?;
    let leg = Leg::new(
        ours.clone(),
        Spans::contiguous(0, 64),
        remote,
        Spans::contiguous(100, 64),
    )?;
    let op = Op::new(
        OpId(1),
        Time::from_secs(1),
        Body::Move(Move::new(Direction::Read, Arc::new(leg), 0..64).checksum(true)),
    );

    let mut waiting = Some(op);
    let mut signals = Vec::new();
    loop {
        here.poll(now, &mut signals);
        there.poll(now, &mut signals);
        for signal in signals.drain(..) {
            match signal {
                // A session would prove first who has called. Until its owner vouches for a path, a transport serves nothing on it.
                Signal::Accepted { path } => there.vouch(path),
                Signal::Opened { .. } => {
                    // Fewer accepted than posted would be back-pressure: post again after a completion.
                    if let Some(op) = waiting.take() {
                        assert_eq!(here.post(path, &[op], now)?, 1);
                    }
                }
                Signal::Completed { op, outcome, .. } => {
                    let mut first = [0];
                    ours.memory.bytes().read(0, &mut first);
                    println!("{op:?} has ended: {outcome:?}; the first byte is {}", first[0]);
                    assert_eq!(first, [100]);
                    return Ok(());
                }
                other => println!("{other:?}"),
            }
        }
    }
}

fn region(epoch: Epoch, memory: VecMemory, access: Access) -> Region {
    // A real agent draws the secret from the system's randomness.
    Region {
        key: RegionKey {
            epoch,
            slot: 0,
            secret: 42,
        },
        memory: Arc::new(memory),
        place: Place::DRAM,
        access,
    }
}
