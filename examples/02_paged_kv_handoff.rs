//! A prefill engine pushes the KV blocks of one request into a decode engine's cache, and says when they are there.
//!
//! The two engines keep their caches in different orders: `[layers][K/V][blocks]` here, all layers of a block together there. A
//! layout names the same bytes in the same sequence on both sides.

use std::time::Duration;

use weft::{Access, Agent};
use weft_plan::{KvLayout, KvShape};

const SHAPE: KvShape = KvShape {
    layers: 8,
    parts: 2,
    blocks: 64,
    block_bytes: 16 << 10,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let decode = Agent::builder("decode").start()?;
    let decode_layout = KvLayout::blocks_outermost(SHAPE)?;
    let decode_cache = decode.allocate(decode_layout.end() as usize)?;
    decode.publish("kv", &decode_cache, Access::WRITE)?;

    let prefill = Agent::builder("prefill").start()?;
    let prefill_layout = KvLayout::layers_outermost(SHAPE)?;
    let prefill_cache = prefill.allocate(prefill_layout.end() as usize)?;
    prefill_cache.write(0, &vec![7; prefill_layout.end() as usize]);

    // The request's tokens lie in these blocks of prefill's cache, and decode has set those aside for them.
    let (ours, theirs) = ([3, 1, 40, 41], [10, 11, 12, 63]);
    let peer = prefill.connect(&decode.address())?;
    let remote = peer.region("kv", Duration::from_secs(1))?;
    let summary = peer
        .write(&prefill_cache, &remote)
        .spans(prefill_layout.spans(ours)?, decode_layout.spans(theirs)?)
        .deadline(Duration::from_secs(5))
        .notify(b"request 17 is complete")
        .post()?
        .wait()?;
    println!("pushed {} bytes in {} parts", summary.bytes, summary.parts);

    // The notification is handed over after the bytes are in place, so decode can start at once.
    let notification = decode
        .next_notification(Duration::from_secs(5))
        .ok_or("no notification came")?;
    println!(
        "{} says: {}",
        notification.from.name(),
        String::from_utf8_lossy(&notification.payload)
    );
    let mut byte = [0];
    decode_cache.read(63 * decode_layout.bytes_per_block(), &mut byte);
    assert_eq!(byte, [7]);
    Ok(())
}
