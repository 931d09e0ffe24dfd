//! The smallest use: one agent publishes memory, another one reads it.
//!
//! Both live in this process to keep the example in one file; in use they are in two, and `connect` gets the address over
//! whatever channel you have, or looks it up by name through a rendezvous.

use std::time::Duration;

use weft::{Access, Agent};

fn main() -> Result<(), weft::Error> {
    let owner = Agent::builder("owner").start()?;
    let source = owner.allocate(1 << 20)?;
    source.write(0, b"hello from the owner");
    owner.publish("greeting", &source, Access::READ)?;

    let reader = Agent::builder("reader").start()?;
    let target = reader.allocate(1 << 20)?;
    let peer = reader.connect(&owner.address())?;
    let greeting = peer.region("greeting", Duration::from_secs(1))?;
    let summary = peer.read(&target, &greeting).checksum(true).post()?.wait()?;

    let mut text = [0; 20];
    target.read(0, &mut text);
    println!(
        "{} ({} bytes in {} parts)",
        String::from_utf8_lossy(&text),
        summary.bytes,
        summary.parts
    );
    assert_eq!(&text, b"hello from the owner");
    Ok(())
}
