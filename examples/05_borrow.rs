//! Reading a peer's memory with no copy at all: the region is mapped read-only for as long as a lease lasts.
//!
//! It needs memory that Weft allocated, and both agents on one machine. Elsewhere the error says so, and `read` does the job.

use std::time::Duration;

use weft::{Access, Agent};

fn main() -> Result<(), weft::Error> {
    let owner = Agent::builder("owner").start()?;
    let weights = owner.allocate(64 << 20)?;
    weights.write(1000, b"forty-two");
    owner.publish("weights", &weights, Access::READ)?;

    let reader = Agent::builder("reader").start()?;
    let peer = reader.connect(&owner.address())?;
    let remote = peer.region("weights", Duration::from_secs(1))?;
    let borrowed = peer.borrow(&remote, Duration::from_secs(60))?;

    let mut text = [0; 9];
    borrowed.read(1000, &mut text)?;
    println!(
        "borrowed {} bytes, and there it says {}",
        borrowed.len(),
        String::from_utf8_lossy(&text)
    );
    assert_eq!(&text, b"forty-two");
    // Dropping it gives the lease back; until then the owner's `release` waits, and after the lease's end it need not.
    drop(borrowed);
    Ok(())
}
