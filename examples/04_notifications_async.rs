//! Transfers and notifications as futures. Any executor will do; this one is the smallest.

use std::time::Duration;

use weft::{Access, Agent, Error};

fn main() -> Result<(), Error> {
    pollster::block_on(run())
}

async fn run() -> Result<(), Error> {
    let server = Agent::builder("server").start()?;
    let inbox = server.allocate(1 << 20)?;
    server.publish("inbox", &inbox, Access::WRITE)?;

    let client = Agent::builder("client").start()?;
    let letter = client.allocate(1 << 20)?;
    letter.write(0, b"dear server");
    let peer = client.connect(&server.address())?;
    let remote = peer.region("inbox", Duration::from_secs(1))?;

    peer.write(&letter, &remote).notify(b"you have mail").post()?.await?;
    let notification = server.notified().await;
    assert_eq!(notification.payload, b"you have mail");

    // Whoever was told can answer: the session works both ways.
    notification.from.notify(b"thanks")?;
    let answer = client.notified().await;
    println!(
        "{} answered: {}",
        answer.from.name(),
        String::from_utf8_lossy(&answer.payload)
    );
    Ok(())
}
