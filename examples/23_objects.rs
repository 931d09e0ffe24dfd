//! Blocks of a cache put into a bucket as one object, and some of them read back, in another order.
//!
//! ```sh
//! cargo xtask s3-server &          # prints the variables that lead to it; export them
//! cargo run --example 23_objects -- s3://blocks
//! ```

use std::time::Duration;

use weft::{Agent, ObjectOptions, Spans};

const BLOCK: u64 = 64 << 10;
const BLOCKS: u64 = 128;

fn main() -> Result<(), weft::Error> {
    let Some(url) = std::env::args().nth(1) else {
        println!("which bucket? s3://BUCKET; AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID say who serves it, and to whom");
        return Ok(());
    };
    let agent = Agent::builder("objects").start()?;
    let bucket = agent.bucket(&url)?;
    let cache = agent.register_vec((0..BLOCK * BLOCKS).map(|at| (at / BLOCK) as u8).collect())?;
    let object = agent.open_object(&bucket, "example/blocks", ObjectOptions::sized(BLOCK * BLOCKS))?;
    // The object is there when this has ended, and not before.
    let put = agent.copy(&cache, &object)?.commit().checksum(true).post()?.wait()?;
    println!("put {} bytes in {:?}", put.bytes, Duration::from(put.duration()));
    let wanted = [100, 7, 8, 9, 31];
    let back = agent.allocate((BLOCK * wanted.len() as u64) as usize)?;
    let get = agent.copy(&object, &back)?.spans(
        Spans::paged(0, BLOCK, wanted.iter().copied()),
        Spans::contiguous(0, BLOCK * wanted.len() as u64),
    );
    let got = get.post()?.wait()?;
    println!("got {} bytes in {:?}", got.bytes, Duration::from(got.duration()));
    let firsts: Vec<u8> = back.to_vec().chunks(BLOCK as usize).map(|block| block[0]).collect();
    assert_eq!(firsts, [100, 7, 8, 9, 31]);
    Ok(())
}
