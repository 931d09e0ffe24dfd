//! KV blocks of a prompt in a store of memory and files: put by one opening, found again by the next.

use weft::store::{Block, BlockShape, FileTier, HitRule, Part, Space, Store, Wanted};
use weft::{Agent, Error, Memory};

const BLOCK: u32 = 256 << 10;
const BLOCKS: u64 = 8;

fn open(agent: &Agent, directory: &std::path::Path) -> Result<Store, Error> {
    let shape = BlockShape::new(vec![Part::new("kv", BLOCK, HitRule::AllBlocks)]).expect("one part");
    let files = FileTier::new(directory, 64 << 20).extent_bytes(32 << 20);
    Store::builder(agent, &shape).memory(16 << 20).files(files).open()
}

fn cache(agent: &Agent, value: u8) -> Result<Memory, Error> {
    let memory = agent.allocate((BLOCKS * u64::from(BLOCK)) as usize)?;
    memory.write(0, &vec![value; memory.len() as usize]);
    Ok(memory)
}

fn main() -> Result<(), Error> {
    let directory = std::env::temp_dir().join(format!("weft-store-{}", std::process::id()));
    let agent = Agent::builder("engine").start()?;
    // Everything that the bytes depend on besides the tokens. A field that is left out is an error.
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
    let tokens: Vec<u32> = (0..16 * BLOCKS as u32).collect();
    let chain = space.chain(&tokens);

    let computed = cache(&agent, 7)?;
    let store = open(&agent, &directory)?;
    assert_eq!(store.match_prefix(&chain)?, 0);
    let place = |(nth, id)| Block::new(id, nth as u64 * u64::from(BLOCK));
    let blocks: Vec<Block> = chain.iter().copied().enumerate().map(place).collect();
    let outcomes = store.put(&space, &computed, &blocks)?.wait()?;
    println!(
        "put {} blocks, in memory and in files",
        outcomes.iter().filter(|outcome| outcome.tiers == 0b11).count()
    );
    drop(store);

    // The next opening finds what the last one has acknowledged, however that one ended.
    let store = open(&agent, &directory)?;
    let there = store.match_prefix(&chain)?;
    let fetched = cache(&agent, 0)?;
    let place = |(nth, id)| Wanted {
        id,
        offset: nth as u64 * u64::from(BLOCK),
    };
    let wanted: Vec<Wanted> = chain[..there].iter().copied().enumerate().map(place).collect();
    let outcomes = store.get(&fetched, &wanted)?.wait()?;
    assert!(outcomes.iter().all(|outcome| outcome.is_hit()) && fetched.to_vec() == computed.to_vec());
    println!("found {there} blocks of {}, and they are what was put", chain.len());
    drop(store);
    let _ = std::fs::remove_dir_all(directory);
    Ok(())
}
