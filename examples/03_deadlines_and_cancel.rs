//! How transfers end: by success, by their deadline, by cancel. After each of them the buffers are free at once.

use std::time::Duration;

use weft::{Access, Agent, Error, Failure};

const BYTES: usize = 256 << 20;

fn main() -> Result<(), Error> {
    let owner = Agent::builder("owner").start()?;
    let source = owner.allocate(BYTES)?;
    owner.publish("data", &source, Access::READ)?;
    let reader = Agent::builder("reader").start()?;
    let target = reader.allocate(BYTES)?;
    let peer = reader.connect(&owner.address())?;
    let remote = peer.region("data", Duration::from_secs(1))?;

    // Prepared once, posted many times; the deadline counts from each post.
    let hasty = peer
        .read(&target, &remote)
        .deadline(Duration::from_millis(1))
        .prepare()?;
    match hasty.post()?.wait() {
        Ok(summary) => println!("a fast machine: all {} bytes within a millisecond", summary.bytes),
        Err(Error::Transfer(failed)) if failed.cause() == Failure::Expired => {
            println!("{failed}");
            // Which bytes are there and which are not, as ranges of the transfer.
            println!("  done: {:?}", failed.error.done.first());
            println!("  not done: {:?}", failed.error.undone.first());
        }
        Err(other) => return Err(other),
    }

    let unwanted = peer.read(&target, &remote).post()?;
    unwanted.cancel();
    // Cancel is a request; the end of the transfer is the fence.
    match unwanted.wait() {
        Ok(_) => println!("it was done before it could be cancelled"),
        Err(error) => println!("{error}"),
    }
    target.write(0, &[1; 4096]);
    println!("the buffer is ours again, and stays as we left it");
    Ok(())
}
