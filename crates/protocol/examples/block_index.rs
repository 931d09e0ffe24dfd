//! How large and how fast the index of blocks is, on one core.
//!
//! usage: `cargo run --release -p weft-protocol --example block_index -- [BLOCKS]`; 10 million by default.
#![expect(clippy::disallowed_methods, reason = "it measures")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use weft_protocol::Seeded;
use weft_protocol::block::policy::{Adaptive, Policy, Touch};
use weft_protocol::block::{BlockId, Entry, Index, Links, Sealed, Slot};

/// Blocks of a chain.
const CHAIN: usize = 128;

fn main() {
    let asked = std::env::args().nth(1).and_then(|text| text.parse::<usize>().ok());
    let blocks = asked.unwrap_or(10_000_000).max(100 * CHAIN) / CHAIN * CHAIN;
    let mut index = Index::new(blocks);
    let mut seeded = Seeded::new(1);

    let start = Instant::now();
    let mut ids = vec![BlockId::from_bytes([0; 16]); CHAIN];
    let mut kept = Vec::new();
    for nth in 0..blocks / CHAIN {
        chain(&mut seeded, &mut ids);
        insert(&mut index, &ids, |_| ());
        if nth % (blocks / CHAIN / 100) == 0 {
            kept.push(ids.clone());
        }
    }
    let took = start.elapsed();
    let memory = (index.memory_bytes() + blocks * Links::BYTES_EACH) as f64 / blocks as f64;
    println!("{blocks} blocks, {memory:.1} bytes each, place in line included");
    println!("insert           {:8.2} M/s", blocks as f64 / took.as_secs_f64() / 1e6);

    let warm = (0..200)
        .map(|_| timed(|| index.prefix(black_box(&kept[0]))))
        .min()
        .unwrap_or_default();
    println!("prefix of {CHAIN}, warm {:8.2} µs", warm.as_secs_f64() * 1e6);
    let cold: Duration = kept[1..].iter().map(|ids| timed(|| index.prefix(black_box(ids)))).sum();
    println!(
        "prefix of {CHAIN}, cold {:8.2} µs",
        cold.as_secs_f64() * 1e6 / (kept.len() - 1) as f64
    );

    evictions(blocks, &mut seeded);
}

/// A full store: every request is a new chain of half the length after one that is there, and makes as many blocks leave.
fn evictions(blocks: usize, seeded: &mut Seeded) {
    let mut index = Index::new(blocks + CHAIN);
    let mut links = Links::new(blocks + CHAIN);
    let mut policy = Adaptive::new(blocks);
    let mut touches = Vec::new();
    let mut ids = vec![BlockId::from_bytes([0; 16]); CHAIN];
    let mut shared = ids.clone();
    chain(seeded, &mut shared);
    let (mut deciding, mut leaving, mut touching, mut evicted) = (Duration::ZERO, Duration::ZERO, Duration::ZERO, 0u32);
    let requests = 2 * blocks / CHAIN;
    for nth in 0..requests {
        chain(seeded, &mut ids);
        ids[..CHAIN / 2].copy_from_slice(&shared[..CHAIN / 2]);
        if nth % 3 == 0 {
            shared.copy_from_slice(&ids);
        }
        touches.clear();
        insert(&mut index, &ids, |slot| touches.push(slot));
        let told: Vec<Touch> = touches
            .iter()
            .rev()
            .map(|slot| Touch {
                id: index.id(*slot),
                slot: *slot,
                last: false,
                over: false,
                valued: false,
            })
            .collect();
        touching += timed(|| policy.request(&mut links, &told));
        if index.len() <= blocks {
            continue;
        }
        let wanted = index.len() - blocks;
        let mut victims: [Option<Slot>; CHAIN] = [None; CHAIN];
        // Deciding and removing take turns, because a parent may leave only after its child.
        for victim in &mut victims[..wanted] {
            deciding += timed(|| *victim = policy.victim(&mut links, &index));
            let slot = victim.expect("some leaf may leave");
            leaving += timed(|| index.remove(slot));
            evicted += 1;
        }
    }
    let clock = clock_cost();
    let each = |total: Duration, count: u32| total.as_secs_f64() * 1e9 / f64::from(count.max(1)) - clock;
    println!(
        "eviction: decide {:8.0} ns, remove {:.0} ns, of {evicted}",
        each(deciding, evicted),
        each(leaving, evicted)
    );
    let touched = (requests * CHAIN) as f64;
    println!(
        "touch            {:8.0} ns a block, shadows included",
        touching.as_secs_f64() * 1e9 / touched
    );
}

fn chain(seeded: &mut Seeded, ids: &mut [BlockId]) {
    for id in ids {
        let mut bytes = [0; 16];
        seeded.fill(&mut bytes);
        *id = BlockId::from_bytes(bytes);
    }
}

fn insert(index: &mut Index, ids: &[BlockId], mut at: impl FnMut(Slot)) {
    let mut parent = None;
    for id in ids {
        let sealed = Sealed::name_only(*id, 1 << 16);
        let (visible, _) = index.insert(&sealed, parent, Entry::default()).expect("there is room");
        parent = Some(visible.slot);
        at(visible.slot);
    }
}

fn timed<T>(act: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    black_box(act());
    start.elapsed()
}

/// What reading the clock twice takes, in nanoseconds.
fn clock_cost() -> f64 {
    let total: Duration = (0..100_000).map(|_| timed(|| ())).sum();
    total.as_secs_f64() * 1e9 / 100_000.0
}
