//! `weft store`: what it says of a tier's directory, and what it changes; `weft bench store --tier`.

mod support;

use std::os::unix::fs::FileExt;
use std::path::Path;

use support::*;
use weft::Agent;
use weft::store::{Block, BlockShape, FileTier, HitRule, Part, Space, Store};

const BLOCK: u32 = 10_000;

fn space(tenant: &str) -> Space {
    let names = [
        "model",
        "revision",
        "tokenizer",
        "dtype",
        "quantisation",
        "scales",
        "layout",
        "lora",
        "positions",
    ];
    let fields = names.into_iter().map(|name| (name, "x"));
    Space::new(fields.chain([("block_tokens", "16"), ("tenant", tenant)])).unwrap()
}

/// A tier with three blocks of `a` and two of `b`.
fn filled(directory: &Path) -> (Agent, Store) {
    let agent = Agent::builder("tier")
        .set("transports", "shared_memory")
        .start()
        .unwrap();
    let shape = BlockShape::new(vec![Part::new("kv", BLOCK, HitRule::AllBlocks)]).unwrap();
    let store = Store::builder(&agent, &shape)
        .files(FileTier::new(directory, 1 << 20))
        .open()
        .unwrap();
    let memory = agent.register_vec(vec![7; BLOCK as usize]).unwrap();
    for (tenant, count) in [("a", 3u8), ("b", 2)] {
        let space = space(tenant);
        for number in 0..count {
            let block = Block::new(space.key(&[number]).unwrap(), 0);
            let outcomes = store.put(&space, &memory, &[block]).unwrap().wait().unwrap();
            assert!(outcomes[0].is_there());
        }
    }
    (agent, store)
}

#[test]
fn a_tier_is_told_listed_verified_and_purged() {
    let scratch = Scratch::new("tier");
    let directory = scratch.path("kv");
    let name = directory.to_str().unwrap();
    let (agent, store) = filled(&directory);
    let said = output(&["store", "stat", name, "--json"]);
    let stat: serde_json::Value = serde_json::from_str(&text(&said.stdout)).unwrap();
    assert_eq!(
        (
            stat["records"].as_u64(),
            stat["block_bytes"].as_u64(),
            stat["opened"].as_u64()
        ),
        (Some(5), Some(10_000), Some(1))
    );
    assert_eq!(stat["tenants"].as_array().unwrap().len(), 2);
    let refused = output(&["store", "purge", name, "--tenant", "a"]);
    assert!(
        !refused.status.success() && text(&refused.stderr).contains("in use"),
        "{}",
        text(&refused.stderr)
    );
    drop((store, agent));
    assert!(output(&["store", "verify", name]).status.success());
    let listed = output(&["store", "ls", name, "--tenant", "b", "--json"]);
    let listed: Vec<serde_json::Value> = text(&listed.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(listed.len(), 2);
    // The first block of `b` is in the fourth slot.
    let data = std::fs::OpenOptions::new()
        .write(true)
        .open(directory.join("ext-00000.data"))
        .unwrap();
    data.write_all_at(&[8], 3 * 12_288 + 5).unwrap();
    let verified = output(&["store", "verify", name]);
    assert!(
        !verified.status.success() && text(&verified.stdout).contains("4 blocks are right, 1 are not"),
        "{}",
        text(&verified.stdout)
    );
    let inspected = output(&["store", "inspect", name, listed[0]["block"].as_str().unwrap()]);
    let inspected: serde_json::Value = serde_json::from_str(&text(&inspected.stdout)).unwrap();
    assert_eq!(
        (inspected["slot"].as_u64(), inspected["right"].as_bool()),
        (Some(3), Some(false))
    );
    let purged = output(&["store", "purge", name, "--tenant", "a"]);
    assert!(
        text(&purged.stdout).contains("3 records of a are erased"),
        "{}",
        text(&purged.stdout)
    );
    let table = output(&["store", "stat", name]);
    assert!(text(&table.stdout).contains("erased 3"), "{}", text(&table.stdout));
    let none = output(&["store", "stat", scratch.path("none").to_str().unwrap()]);
    assert!(
        !none.status.success() && text(&none.stderr).contains("no tier of blocks"),
        "{}",
        text(&none.stderr)
    );
}

#[test]
fn tiers_are_measured_beside_a_plain_copy() {
    let scratch = Scratch::new("bench-tier");
    let directory = scratch.path("files");
    let arguments = [
        "bench",
        "store",
        "--tier",
        "dram,file",
        "--directory",
        directory.to_str().unwrap(),
        "--size",
        "4MiB",
        "--block",
        "4KiB,64KiB",
        "--batch",
        "1,8",
        "--seconds",
        "0",
        "--json",
    ];
    let said = output(&arguments);
    assert!(said.status.success(), "{}", text(&said.stderr));
    let cells: Vec<serde_json::Value> = text(&said.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(cells.len(), 16);
    assert!(
        cells
            .iter()
            .all(|cell| cell["gigabytes_per_sec"].as_f64().unwrap() > 0.0)
    );
    assert_eq!(
        std::fs::read_dir(&directory).unwrap().count(),
        0,
        "what it made is gone"
    );
    let refused = output(&["bench", "store", "--tier", "dram", "--block", "1GiB"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
}
