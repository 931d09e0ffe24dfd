//! Two stores that work together: what one has the other reads from it, and asks nobody but it.

use std::time::{Duration, Instant};

use weft::rendezvous::{Rendezvous, RendezvousOptions};
use weft::store::{Block, BlockShape, GetOutcome, HitRule, Part, Peers, Space, Store, Wanted};
use weft::{Agent, Error};

const BLOCK: u32 = 256 << 10;
const BLOCKS: u64 = 8;

fn open(agent: &Agent, meeting: &std::path::Path) -> Result<Store, Error> {
    let shape = BlockShape::new(vec![Part::new("kv", BLOCK, HitRule::AllBlocks)]).expect("one part");
    // A directory that both reach; with etcd it would be `by_etcd`.
    let place = Rendezvous::by_directory(meeting, RendezvousOptions::default())?;
    Store::builder(agent, &shape)
        .memory(16 << 20)
        .with_peers(Peers::met_at(place))
        .open()
}

fn main() -> Result<(), Error> {
    let meeting = std::env::temp_dir().join(format!("weft-stores-{}", std::process::id()));
    let (prefill, decode) = (
        Agent::builder("prefill").listen("127.0.0.1:0").start()?,
        Agent::builder("decode").listen("127.0.0.1:0").start()?,
    );
    let (first, second) = (open(&prefill, &meeting)?, open(&decode, &meeting)?);
    let space = Space::new([
        ("model", "llama-3.1-8b"),
        ("revision", "0e9e39f"),
        ("tokenizer", "llama-3.1"),
        ("dtype", "bf16"),
        ("quantisation", "none"),
        ("scales", "none"),
        ("layout", "nhd"),
        ("block_tokens", "16"),
        ("lora", "none"),
        ("positions", "rope-500000"),
        ("tenant", "example"),
    ])?;
    let chain = space.chain(&(0..16 * BLOCKS as u32).collect::<Vec<u32>>());

    let computed = prefill.allocate((BLOCKS * u64::from(BLOCK)) as usize)?;
    computed.write(0, &vec![7; computed.len() as usize]);
    let place = |(nth, id)| Block::new(id, nth as u64 * u64::from(BLOCK));
    let blocks: Vec<Block> = chain.iter().copied().enumerate().map(place).collect();
    let put = first.put(&space, &computed, &blocks)?.wait()?;
    assert!(put.iter().all(|outcome| outcome.is_there()));

    // They meet by themselves, and are told of each other's blocks a moment later.
    let since = Instant::now();
    let found = loop {
        let found = second.find(&chain)?.wait()?;
        if second.hit(&found)? == chain.len() || since.elapsed() > Duration::from_secs(30) {
            break found;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    println!("{} blocks are at {:?}", second.hit(&found)?, found[0].elsewhere);

    let fetched = decode.allocate(computed.len() as usize)?;
    let place = |(nth, id)| Wanted {
        id,
        offset: nth as u64 * u64::from(BLOCK),
    };
    let wanted: Vec<Wanted> = chain.iter().copied().enumerate().map(place).collect();
    let got = second.get(&fetched, &wanted)?.wait()?;
    let from_there = |outcome: &&GetOutcome| matches!(outcome, GetOutcome::Elsewhere { .. });
    println!("{} came from there", got.iter().filter(from_there).count());
    assert!(fetched.to_vec() == computed.to_vec());
    drop((first, second));
    let _ = std::fs::remove_dir_all(meeting);
    Ok(())
}
