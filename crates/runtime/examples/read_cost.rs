//! What a read of 4 KiB from mapped memory costs in itself: two agents of one process over shared memory, whose reads are copies of a page.
//!
//! `cargo run --release -p weft --example read_cost [reads]`
//!
//! Its instructions do not depend on what else the machine does: `valgrind --tool=callgrind` counts them.

use std::time::{Duration, Instant};

use weft::{Access, Agent, Error, Spans};

const BLOCK: usize = 4096;
const ROUNDS: u32 = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let reads: u32 = std::env::args().nth(1).map_or(Ok(20_000), |reads| reads.parse())?;
    let agent = |name: &str| {
        Agent::builder(name)
            .set("rendezvous", "process")
            .set("transports", "shared_memory")
            .start()
    };
    let (owner, reader) = (agent("owner")?, agent("reader")?);
    let theirs = owner.allocate(1 << 20)?;
    owner.publish("memory", &theirs, Access::READ)?;
    let peer = reader.connect(&owner.address())?;
    let region = peer.region("memory", Duration::from_secs(5))?;
    let mine = reader.allocate(BLOCK)?;
    let spans = || {
        (
            Spans::contiguous(0, BLOCK as u64),
            Spans::contiguous(8192, BLOCK as u64),
        )
    };
    let unprepared = || {
        let (here, there) = spans();
        peer.read(&mine, &region).spans(here, there).post()?.wait().map(drop)
    };
    println!("read       {:4.0} ns", cost_ns(reads, unprepared)?);
    let (here, there) = spans();
    let prepared = peer.read(&mine, &region).spans(here, there).prepare()?;
    println!(
        "prepared   {:4.0} ns",
        cost_ns(reads, || prepared.post()?.wait().map(drop))?
    );
    Ok(())
}

/// Of a read, in the best of several rounds, since the machine has other things to do.
fn cost_ns(reads: u32, read: impl Fn() -> Result<(), Error>) -> Result<f64, Error> {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..reads {
            read()?;
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(reads));
    }
    Ok(best)
}
