//! A store with its bytes: what is put comes back, or is a miss; whatever happens to its files, its process and its neighbours.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::future::Future;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use weft::store::{
    Block, BlockId, BlockShape, Durability, FileTier, GetOutcome, HitRule, Parent, Part, PutRefused, Space, Store,
    StoreError, Wanted, WhyNot, Worth, WriteTo, inspect::Directory,
};
use weft::{Agent, Error, Memory};
use weft_protocol::Seeded;
use weft_protocol::block::shelf::format::{GeometryError, HeaderError, PAGE_BYTES};

const BLOCK: u32 = 20_000;
const STRIDE: u64 = 20_480;
const EXTENT: u64 = 64 * STRIDE;

fn agent() -> Agent {
    let builder = Agent::builder("store").set("transports", "shared_memory");
    builder.start().expect("an agent")
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn shape() -> BlockShape {
    BlockShape::new(vec![Part::new("kv", BLOCK, HitRule::AllBlocks)]).expect("a shape")
}

fn fields(tenant: &str) -> [(&str, &str); 11] {
    [
        ("model", "m"),
        ("revision", "r"),
        ("tokenizer", "t"),
        ("dtype", "bf16"),
        ("quantisation", "none"),
        ("scales", "none"),
        ("layout", "nhd"),
        ("block_tokens", "16"),
        ("lora", "none"),
        ("positions", "rope"),
        ("tenant", tenant),
    ]
}

fn space(tenant: &str) -> Space {
    Space::new(fields(tenant)).expect("a space")
}

fn tier(folder: &Path, extents: u64) -> FileTier {
    FileTier::new(folder, extents * EXTENT)
        .extent_bytes(EXTENT)
        .scrub_bytes_per_second(0)
}

fn in_files(agent: &Agent, folder: &Path) -> Store {
    Store::builder(agent, &shape())
        .files(tier(folder, 2))
        .open()
        .expect("a store")
}

fn key(space: &Space, number: u64) -> BlockId {
    space.key(&number.to_le_bytes()).expect("a key")
}

fn payload(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    Seeded::new(number).fill(&mut bytes);
    bytes
}

/// Memory with these blocks side by side.
fn filled(agent: &Agent, numbers: &[u64]) -> Memory {
    let memory = agent.allocate(numbers.len() * BLOCK as usize).expect("memory");
    for (nth, number) in numbers.iter().enumerate() {
        memory.write(nth as u64 * u64::from(BLOCK), &payload(*number));
    }
    memory
}

fn blocks(space: &Space, numbers: &[u64]) -> Vec<Block> {
    let block = |(nth, number): (usize, &u64)| Block::new(key(space, *number), nth as u64 * u64::from(BLOCK));
    numbers.iter().enumerate().map(block).collect()
}

const ANY: usize = usize::MAX;

/// Puts blocks that follow nothing, and says which of them are in this tier, or in any.
fn put(store: &Store, agent: &Agent, space: &Space, numbers: &[u64], tier: usize) -> Vec<bool> {
    let memory = filled(agent, numbers);
    let alone: Vec<Block> = blocks(space, numbers).into_iter().map(Block::first).collect();
    let answer = store.put(space, &memory, &alone).expect("accepted");
    let outcomes = answer.wait().expect("an answer");
    let there = |outcome: &weft::store::PutOutcome| match tier {
        ANY => outcome.is_there(),
        tier => outcome.is_in(tier),
    };
    outcomes.iter().map(there).collect()
}

/// Which of these blocks are there. What is there is right, or this panics.
fn found(store: &Store, agent: &Agent, space: &Space, numbers: &[u64]) -> Vec<bool> {
    let memory = agent.allocate(numbers.len().max(1) * BLOCK as usize).expect("memory");
    let at = |(nth, number): (usize, &u64)| Wanted {
        id: key(space, *number),
        offset: nth as u64 * u64::from(BLOCK),
    };
    let wanted: Vec<Wanted> = numbers.iter().enumerate().map(at).collect();
    let outcomes = store
        .get(&memory, &wanted)
        .expect("accepted")
        .wait()
        .expect("an answer");
    let check = |(nth, outcome): (usize, &GetOutcome)| {
        let mut bytes = vec![0; BLOCK as usize];
        memory.read(nth as u64 * u64::from(BLOCK), &mut bytes);
        assert!(
            !outcome.is_hit() || bytes == payload(numbers[nth]),
            "wrong bytes of block {}",
            numbers[nth]
        );
        outcome.is_hit()
    };
    outcomes.iter().enumerate().map(check).collect()
}

fn all(count: usize) -> Vec<bool> {
    vec![true; count]
}

#[test]
fn what_is_put_comes_back_also_after_a_restart() {
    for (durability, io) in [(Durability::Process, "auto"), (Durability::Power, "threads")] {
        let agent = Agent::builder("store")
            .set("transports", "shared_memory")
            .set("file.io", io)
            .start();
        let (agent, folder, space) = (agent.expect("an agent"), folder(), space("a"));
        let open = || {
            let tier = tier(folder.path(), 2).durability(durability);
            Store::builder(&agent, &shape()).files(tier).open().expect("a store")
        };
        let store = open();
        let numbers: Vec<u64> = (0..40).collect();
        assert_eq!(put(&store, &agent, &space, &numbers, 0), all(40));
        let again = store
            .put(&space, &filled(&agent, &[7]), &blocks(&space, &[7]))
            .expect("accepted");
        let again = again.wait().expect("an answer");
        assert!(again[0].is_in(0) && !again[0].new);
        assert_eq!(found(&store, &agent, &space, &numbers), all(40));
        assert_eq!(store.evict(&[key(&space, 3)]).expect("evicted"), 1);
        assert_eq!(found(&store, &agent, &space, &[2, 3, 4]), [true, false, true]);
        let stat = store.stat().expect("numbers");
        assert!(stat.tiers[0].tally.balances());
        assert_eq!(
            (
                stat.tiers[0].tally.stored,
                stat.tiers[0].tally.already_there,
                stat.tiers[0].blocks
            ),
            (40, 1, 39)
        );
        drop(store);
        let store = open();
        let there = found(&store, &agent, &space, &numbers);
        assert!(
            there.iter().enumerate().all(|(number, there)| *there || number == 3),
            "{there:?}"
        );
        assert_eq!(store.stat().expect("numbers").tiers[0].counts.wrong, 0);
    }
}

#[test]
fn memory_answers_first_and_files_keep_what_leaves_it() {
    for write in [WriteTo::Through, WriteTo::Back] {
        let (agent, folder, space) = (agent(), folder(), space("a"));
        let builder = Store::builder(&agent, &shape()).memory(32 * STRIDE).promote(false);
        let store = builder
            .files(tier(folder.path(), 4).write(write))
            .open()
            .expect("a store");
        let numbers: Vec<u64> = (0..100).collect();
        for few in numbers.chunks(4) {
            assert_eq!(
                put(
                    &store,
                    &agent,
                    &space,
                    few,
                    if write == WriteTo::Through { 1 } else { ANY }
                ),
                all(4),
                "{write:?}"
            );
        }
        // What is on its way down is nowhere for a moment.
        let wanted: Vec<bool> = all(100);
        let mut there = found(&store, &agent, &space, &numbers);
        for _ in 0..100 {
            if there == wanted {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
            there = found(&store, &agent, &space, &numbers);
        }
        assert_eq!(there, wanted, "{write:?}");
        let stat = store.stat().expect("numbers");
        assert!(stat.tiers[0].hits > 0 && stat.tiers[1].hits > 0, "{stat:?}");
        assert!(stat.tiers.iter().all(|tier| tier.tally.balances()));
        let down = numbers
            .iter()
            .find(|number| store.tiers_of(&key(&space, **number)).expect("tiers") == 0b10);
        let down = *down.expect("a block that is in files only");
        assert_eq!(store.prefetch(&[key(&space, down)]).expect("begun"), 1);
        for _ in 0..500 {
            if store.tiers_of(&key(&space, down)).expect("tiers") & 1 == 1 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(store.tiers_of(&key(&space, down)).expect("tiers") & 1, 1, "it came up");
        assert_eq!(found(&store, &agent, &space, &[down]), [true]);
    }
}

#[test]
fn a_prefix_is_matched_held_and_promoted() {
    let (agent, folder, space) = (agent(), folder(), space("a"));
    let chain = space.chain(&(0..16 * 12).collect::<Vec<u32>>());
    let numbers: Vec<u64> = (0..12).collect();
    let memory = filled(&agent, &numbers);
    let block = |(nth, id): (usize, &BlockId)| Block::new(*id, nth as u64 * u64::from(BLOCK));
    let described: Vec<Block> = chain.iter().enumerate().map(block).collect();
    {
        let store = in_files(&agent, folder.path());
        let outcomes = store
            .put(&space, &memory, &described)
            .expect("accepted")
            .wait()
            .expect("an answer");
        assert!(outcomes.iter().all(|outcome| outcome.is_there()));
    }
    let builder = Store::builder(&agent, &shape()).memory(64 * STRIDE);
    let store = builder.files(tier(folder.path(), 2)).open().expect("a store");
    assert_eq!(store.match_prefix(&chain).expect("matched"), 12);
    let held = store.hold(&chain[..8]).expect("held");
    assert_eq!(held.count(), 8);
    assert_eq!(
        store.evict(&chain).expect("evicted"),
        4,
        "held blocks stay, and what they follow"
    );
    assert_eq!(store.match_prefix(&chain).expect("matched"), 8);
    drop(held);
    let wanted: Vec<Wanted> = chain[..8]
        .iter()
        .enumerate()
        .map(|(nth, id)| Wanted {
            id: *id,
            offset: nth as u64 * u64::from(BLOCK),
        })
        .collect();
    let into = agent.allocate(8 * BLOCK as usize).expect("memory");
    let tiers = || {
        let outcomes = store.get(&into, &wanted).expect("accepted").wait().expect("an answer");
        let tier = |outcome: &GetOutcome| match outcome {
            GetOutcome::Hit { tier, .. } => *tier,
            _ => panic!("a miss"),
        };
        outcomes.iter().map(tier).collect::<BTreeSet<usize>>()
    };
    assert_eq!(tiers(), BTreeSet::from([1]), "from files at first");
    assert_eq!(tiers(), BTreeSet::from([0]), "then from memory");
    assert_eq!(store.evict(&chain).expect("evicted"), 12);
    assert_eq!(store.match_prefix(&chain).expect("matched"), 0);
}

#[test]
fn answers_can_be_awaited() {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Unpark>) {
            self.0.unpark();
        }
    }
    let (agent, folder, space) = (agent(), folder(), space("a"));
    let store = in_files(&agent, folder.path());
    let memory = filled(&agent, &[1, 2]);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut answer = pin!(store.put(&space, &memory, &blocks(&space, &[1, 2])).expect("accepted"));
    let outcomes = loop {
        match answer.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(outcomes) => break outcomes.expect("an answer"),
            Poll::Pending => std::thread::park_timeout(Duration::from_secs(20)),
        }
    };
    assert!(outcomes.iter().all(|outcome| outcome.new));
}

#[test]
fn parts_that_are_there_come_back_and_no_others() {
    let parts = vec![
        Part::new("attention", 9000, HitRule::AllBlocks),
        Part::new("state", 3000, HitRule::TrailingBlocks(1)),
    ];
    let hybrid = BlockShape::new(parts).expect("a shape");
    let (agent, folder, space) = (agent(), folder(), space("a"));
    let tier = FileTier::new(folder.path(), 1 << 20).extent_bytes(1 << 20);
    let store = Store::builder(&agent, &hybrid)
        .memory(1 << 20)
        .files(tier)
        .open()
        .expect("a store");
    let chain: Vec<BlockId> = (0..3).map(|number| key(&space, number)).collect();
    let memory = agent.register_vec(payload(9)[..12_000].repeat(3)).expect("memory");
    let described: Vec<Block> = (0..3)
        .map(|nth| Block::new(chain[nth], 12_000 * nth as u64).parts(if nth == 1 { 0b11 } else { 0b01 }))
        .collect();
    let outcomes = store
        .put(&space, &memory, &described)
        .expect("accepted")
        .wait()
        .expect("an answer");
    assert!(outcomes.iter().all(|outcome| outcome.tiers == 0b11));
    assert_eq!(
        store.match_prefix(&chain).expect("matched"),
        2,
        "the state is there after the second only"
    );
    let into = agent.allocate(36_000).expect("memory");
    let wanted: Vec<Wanted> = (0..3)
        .map(|nth| Wanted {
            id: chain[nth],
            offset: 12_000 * nth as u64,
        })
        .collect();
    let outcomes = store.get(&into, &wanted).expect("accepted").wait().expect("an answer");
    let told: Vec<(u8, u32)> = outcomes
        .iter()
        .map(|outcome| match outcome {
            GetOutcome::Hit { parts, bytes, .. } => (*parts, *bytes),
            _ => (0, 0),
        })
        .collect();
    assert_eq!(told, [(0b01, 9000), (0b11, 12_000), (0b01, 9000)]);
    assert!(into.to_vec()[12_000..24_000] == memory.to_vec()[12_000..24_000]);
    let refused = store.put(&space, &memory, &[Block::new(chain[0], 0).parts(0b100)]);
    assert!(
        matches!(refused, Err(Error::Store(error)) if matches!(*error, StoreError::NoSuchPart { parts: 0b100, known: 2 }))
    );
}

#[test]
fn damage_to_files_is_a_miss_with_its_reason() {
    let (agent, space) = (agent(), space("a"));
    let numbers: Vec<u64> = (0..64).collect();
    let stored = |folder: &Path| {
        let store = in_files(&agent, folder);
        assert_eq!(put(&store, &agent, &space, &numbers, 0), all(64));
    };
    let file = |folder: &Path, name: &str| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(folder.join(name))
            .expect("a file")
    };
    let missed = |folder: &Path| {
        let store = in_files(&agent, folder);
        let there = found(&store, &agent, &space, &numbers);
        let again = found(&store, &agent, &space, &numbers);
        assert_eq!(there, again, "a miss stays one");
        let missed: Vec<u64> = numbers
            .iter()
            .copied()
            .filter(|number| !there[*number as usize])
            .collect();
        (missed, store.stat().expect("numbers").tiers.remove(0))
    };

    let here = folder();
    stored(here.path());
    file(here.path(), "ext-00000.data")
        .write_all_at(&[0x5a], 5 * STRIDE + 77)
        .expect("a byte");
    let (lost, stat) = missed(here.path());
    assert_eq!(lost, [5], "a byte has changed");
    assert_eq!(
        (stat.counts.wrong, stat.wrongs[0].id, stat.wrongs[0].offset),
        (1, key(&space, 5), 5 * STRIDE)
    );

    let here = folder();
    stored(here.path());
    file(here.path(), "ext-00000.data").set_len(60 * STRIDE).expect("cut");
    let (lost, stat) = missed(here.path());
    assert_eq!(lost, [60, 61, 62, 63], "the file was cut");
    assert_eq!(stat.counts.wrong, 4);

    let here = folder();
    stored(here.path());
    let data = file(here.path(), "ext-00000.data");
    let (mut one, mut other) = (vec![0; STRIDE as usize], vec![0; STRIDE as usize]);
    data.read_exact_at(&mut one, 10 * STRIDE).expect("a slot");
    data.read_exact_at(&mut other, 20 * STRIDE).expect("a slot");
    data.write_all_at(&one, 20 * STRIDE).expect("a slot");
    data.write_all_at(&other, 10 * STRIDE).expect("a slot");
    assert_eq!(missed(here.path()).0, [10, 20], "slots were swapped");

    let here = folder();
    stored(here.path());
    let index = file(here.path(), "ext-00000.index");
    let mut old = vec![0; PAGE_BYTES];
    index.read_exact_at(&mut old, PAGE_BYTES as u64).expect("a page");
    {
        // Slots of the first extent get other blocks.
        let store = in_files(&agent, here.path());
        let ids: Vec<BlockId> = numbers.iter().map(|number| key(&space, *number)).collect();
        assert_eq!(store.evict(&ids).expect("evicted"), 64);
        let others: Vec<u64> = (1000..1128).collect();
        for few in others.chunks(32) {
            put(&store, &agent, &space, few, 0);
        }
    }
    index.write_all_at(&old, PAGE_BYTES as u64).expect("a page");
    let (_, stat) = missed(here.path());
    assert!(stat.counts.wrong > 0, "an old page of records was put back: {stat:?}");

    let (here, other) = (folder(), folder());
    stored(here.path());
    stored(other.path());
    for name in ["ext-00000.data", "ext-00000.index"] {
        std::fs::copy(other.path().join(name), here.path().join(name)).expect("copied");
    }
    let (lost, stat) = missed(here.path());
    assert_eq!(
        (lost.len(), stat.counts.strange),
        (64, 1),
        "another tier's extent was put in place"
    );

    let here = folder();
    stored(here.path());
    file(here.path(), "ext-00000.index")
        .write_all_at(&[0xff; 100], PAGE_BYTES as u64 + 64 * 3 + 10)
        .expect("bytes");
    let (lost, stat) = missed(here.path());
    assert_eq!((lost, stat.counts.torn), (vec![3, 4], 2), "records were damaged");
}

#[test]
fn what_is_verified_at_leisure_finds_damage_before_anybody_asks() {
    let (agent, folder, space) = (agent(), folder(), space("a"));
    put(
        &in_files(&agent, folder.path()),
        &agent,
        &space,
        &(0..20).collect::<Vec<u64>>(),
        0,
    );
    let data = OpenOptions::new()
        .write(true)
        .open(folder.path().join("ext-00000.data"))
        .expect("a file");
    data.write_all_at(&[0x5a; 3], 7 * STRIDE + 1).expect("bytes");
    let tier = tier(folder.path(), 2).scrub_bytes_per_second(1 << 30);
    let store = Store::builder(&agent, &shape()).files(tier).open().expect("a store");
    for _ in 0..500 {
        if store.stat().expect("numbers").tiers[0].counts.scrubbed == 20 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let stat = store.stat().expect("numbers").tiers.remove(0);
    assert_eq!((stat.counts.scrubbed, stat.counts.wrong, stat.blocks), (20, 1, 19));
}

#[test]
fn what_cannot_be_is_refused_with_what_would_be_right() {
    let (agent, here, space) = (agent(), folder(), space("a"));
    let refusal = |builder: weft::store::StoreBuilder| match builder.open() {
        Err(Error::Store(error)) => *error,
        other => panic!("{other:?}"),
    };
    let builder = || Store::builder(&agent, &shape());
    assert!(matches!(refusal(builder()), StoreError::NoTier));
    let below = FileTier::new(here.path(), 10 * STRIDE).extent_bytes(EXTENT);
    assert!(matches!(
        refusal(builder().files(below)),
        StoreError::Geometry(GeometryError::BelowOneExtent { .. })
    ));
    let store = in_files(&agent, here.path());
    assert!(matches!(
        refusal(builder().files(tier(here.path(), 2))),
        StoreError::InUse { .. }
    ));
    let memory = agent.allocate(BLOCK as usize).expect("memory");
    let outside = store.put(&space, &memory, &[Block::new(key(&space, 1), 1)]);
    assert!(matches!(outside, Err(Error::Store(error)) if matches!(*error, StoreError::Outside { offset: 1, .. })));
    drop(store);
    let larger = BlockShape::new(vec![Part::new("kv", BLOCK + 5000, HitRule::AllBlocks)]).expect("a shape");
    let other = Store::builder(&agent, &larger).files(tier(here.path(), 2));
    assert!(matches!(
        refusal(other),
        StoreError::Header {
            source: HeaderError::OtherBlocks { has: BLOCK, .. },
            ..
        }
    ));
    // Both copies of the header are damaged.
    let header = OpenOptions::new()
        .read(true)
        .write(true)
        .open(here.path().join("weft.tier"))
        .expect("a file");
    header.write_all_at(&[0; 16], PAGE_BYTES as u64).expect("bytes");
    header.write_all_at(&[0; 16], 0).expect("bytes");
    assert!(matches!(
        refusal(builder().files(tier(here.path(), 2))),
        StoreError::Header {
            source: HeaderError::NotWhole,
            ..
        }
    ));
    let unknown = Space::new(fields("a").map(|(name, value)| (if name == "dtype" { "dtypes" } else { name }, value)));
    assert!(
        unknown
            .expect_err("refused")
            .to_string()
            .contains("the nearest is `dtype`")
    );
    assert!(space.key(&[7; 1025]).is_err());
}

#[test]
fn a_purge_is_complete_lasts_and_leaves_others_alone() {
    let (agent, folder, a, b) = (agent(), folder(), space("a"), space("b"));
    let numbers: Vec<u64> = (0..40).collect();
    let open = || {
        let builder = Store::builder(&agent, &shape()).memory(128 * STRIDE);
        builder.files(tier(folder.path(), 2)).open().expect("a store")
    };
    let store = open();
    assert_eq!(put(&store, &agent, &a, &numbers, 1), all(40));
    assert_eq!(put(&store, &agent, &b, &numbers, 1), all(40));
    store.evict(&[key(&a, 1)]).expect("evicted");
    let held = store.hold(&[key(&a, 2)]).expect("held");
    let purged = store.purge("a").expect("accepted").wait().expect("an answer");
    assert_eq!(
        (purged.left, purged.failed),
        (2, None),
        "the held block stays, in both tiers"
    );
    drop(held);
    let purged = store.purge("a").expect("accepted").wait().expect("an answer");
    assert_eq!((purged.left, purged.failed), (0, None));
    assert_eq!(found(&store, &agent, &a, &numbers), vec![false; 40]);
    assert_eq!(found(&store, &agent, &b, &numbers), all(40));
    drop(store);
    let left = Directory::open(folder.path())
        .expect("a tier")
        .entries(|_| {})
        .expect("records");
    assert_eq!(
        left.tenants.get(&a.tenant()),
        None,
        "also what had been evicted is gone from the disk"
    );
    assert_eq!(left.tenants.get(&b.tenant()), Some(&40));
    let store = open();
    assert_eq!(found(&store, &agent, &a, &numbers), vec![false; 40]);
    assert_eq!(found(&store, &agent, &b, &numbers), all(40));
    drop(store);
    let directory = Directory::open(folder.path()).expect("a tier");
    assert_eq!(directory.purge("b").expect("purged"), 40);
    assert_eq!(found(&open(), &agent, &b, &numbers), vec![false; 40]);
}

#[test]
fn a_flood_of_one_tenant_does_not_push_another_below_its_share() {
    let (agent, folder, quiet, loud) = (agent(), folder(), space("quiet"), space("loud"));
    let builder = Store::builder(&agent, &shape())
        .files(tier(folder.path(), 2))
        .share("quiet", 0.25);
    let store = builder.open().expect("a store");
    let numbers: Vec<u64> = (0..30).collect();
    assert_eq!(put(&store, &agent, &quiet, &numbers, 0), all(30));
    for few in (0..600).collect::<Vec<u64>>().chunks(24) {
        put(&store, &agent, &loud, few, 0);
    }
    assert_eq!(found(&store, &agent, &quiet, &numbers), all(30));
    let stat = store.stat().expect("numbers");
    assert!(
        stat.tiers[0].tally.removed > 400 && stat.tiers[0].tally.balances(),
        "{stat:?}"
    );
}

#[test]
fn what_does_not_fit_the_queue_is_refused_at_once_and_counted() {
    let (agent, folder, space) = (agent(), folder(), space("a"));
    let tier = tier(folder.path(), 2).queue_bytes(10 * u64::from(BLOCK));
    let store = Store::builder(&agent, &shape()).files(tier).open().expect("a store");
    let numbers: Vec<u64> = (0..25).collect();
    let memory = filled(&agent, &numbers);
    let described: Vec<Block> = blocks(&space, &numbers)
        .into_iter()
        .map(|block| Block {
            parent: Parent::None,
            ..block
        })
        .collect();
    let outcomes = store
        .put(&space, &memory, &described)
        .expect("accepted")
        .wait()
        .expect("an answer");
    let refused = outcomes
        .iter()
        .filter(|outcome| matches!(outcome.why, Some(WhyNot::Refused(PutRefused::QueueFull { .. }))));
    assert_eq!(refused.count(), 15);
    let tally = store.stat().expect("numbers").tiers[0].tally;
    assert_eq!(
        (tally.puts, tally.stored, tally.refused, tally.under_way),
        (25, 10, 15, 0)
    );
}

#[test]
fn a_read_that_loses_to_computing_is_refused_with_both_figures() {
    use weft_model::system::System;
    use weft_model::workload::model::Model;
    use weft_model::workload::serving::{Engine, Quantisation, Recompute, Worker};
    use weft_plan::fetch::{FetchCost, FetchError};
    use weft_plan::{Bandwidth, Picos};
    let (agent, folder, space) = (agent(), folder(), space("a"));
    let store = in_files(&agent, folder.path());
    let tokens: Vec<u32> = (0..16 * 64).collect();
    let chain = space.chain(&tokens);
    let (system, model) = (
        System::named("dgx-h200").expect("shipped"),
        Model::named("llama-3.1-8b").expect("shipped"),
    );
    let recompute =
        Recompute::new(&system, &model, Worker::tensor(1), Quantisation::bf16(), Engine::Vllm).expect("a worker");
    let cost = |gigabytes| FetchCost::of(Picos::from_us(100), Bandwidth::from_gigabytes_per_sec(gigabytes));
    let worth = |gigabytes| {
        store
            .match_worth(&space, &chain, 16 * 64, &recompute, &cost(gigabytes))
            .expect("asked")
    };
    assert_eq!(worth(50.0), Worth::Nothing);
    let memory = filled(&agent, &(0..64).collect::<Vec<u64>>());
    let block = |(nth, id): (usize, &BlockId)| Block::new(*id, nth as u64 * u64::from(BLOCK));
    let described: Vec<Block> = chain.iter().enumerate().map(block).collect();
    let _ = store
        .put(&space, &memory, &described)
        .expect("accepted")
        .wait()
        .expect("an answer");
    assert!(matches!(worth(50.0), Worth::Read { blocks, fetch } if blocks > 32 && fetch.fetch < fetch.compute));
    assert!(matches!(worth(0.05), Worth::Compute(FetchError::Slower { fetch, compute, .. }) if fetch > compute));
}

/// What is killed: puts blocks one batch after another and says which were acknowledged.
#[test]
#[ignore = "a part of others"]
fn killed_child() {
    let Ok(folder) = std::env::var("TEST_STORE_FOLDER") else {
        return;
    };
    let round: u64 = std::env::var("TEST_STORE_ROUND")
        .expect("a round")
        .parse()
        .expect("a number");
    let (agent, space) = (agent(), space("a"));
    let tier = tier(Path::new(&folder), 8);
    let store = Store::builder(&agent, &shape())
        .memory(16 * STRIDE)
        .files(tier)
        .open()
        .expect("a store");
    println!("\nopened");
    for batch in 0..60 {
        let numbers: Vec<u64> = (0..1 + batch % 5).map(|nth| round * 1000 + batch * 10 + nth).collect();
        for (number, stored) in numbers.iter().zip(put(&store, &agent, &space, &numbers, 1)) {
            if stored {
                println!("acknowledged {number}");
            }
        }
    }
}

fn kill_rounds(rounds: u64) {
    let (agent, space) = (agent(), space("a"));
    let mut chance = Seeded::new(rounds);
    let mut acknowledged = 0;
    let mut here = folder();
    let mut kept: Vec<u64> = Vec::new();
    for round in 0..rounds {
        // Before anything has to leave for want of room.
        if kept.len() > 250 {
            (here, kept) = (folder(), Vec::new());
        }
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .args(["--ignored", "--exact", "killed_child", "--nocapture"])
            .env("TEST_STORE_FOLDER", here.path())
            .env("TEST_STORE_ROUND", round.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let most = chance.below(60) as usize;
        let (mut told, mut killed) = (0, false);
        for line in lines.map_while(Result::ok) {
            if let Some(number) = line.strip_prefix("acknowledged ") {
                kept.push(number.parse().expect("a number"));
                told += 1;
            }
            // What is in the pipe by then was acknowledged as well, and is read on.
            if !killed && told >= most && !line.is_empty() {
                std::thread::sleep(Duration::from_micros(chance.below(3000)));
                child.kill().expect("killed");
                killed = true;
            }
        }
        child.wait().expect("it ended");
        acknowledged += told;
        let store = Store::builder(&agent, &shape())
            .files(tier(here.path(), 8))
            .open()
            .expect("a store");
        let there = found(&store, &agent, &space, &kept);
        let lost: Vec<u64> = kept
            .iter()
            .zip(&there)
            .filter(|(_, there)| !**there)
            .map(|(number, _)| *number)
            .collect();
        assert!(
            lost.is_empty(),
            "round {round}: {lost:?} of {} were acknowledged and are lost",
            kept.len()
        );
    }
    assert!(
        acknowledged as u64 > rounds,
        "{acknowledged} acknowledged in {rounds} rounds"
    );
    println!("{rounds} rounds, {acknowledged} blocks acknowledged, none lost, none wrong");
}

#[test]
fn what_was_acknowledged_survives_twenty_kills() {
    kill_rounds(20);
}

/// `cargo test -p weft --test store -- --ignored two_hundred --nocapture`
#[test]
#[ignore = "minutes: the suite has a part"]
fn what_was_acknowledged_survives_two_hundred_kills() {
    kill_rounds(200);
}
