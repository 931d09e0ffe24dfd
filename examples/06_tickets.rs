//! Several workers take tickets from a counter in somebody else's memory: none twice, none left out, and nobody in charge.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use weft::{Access, Agent, Error};

const WORKERS: u64 = 3;
const TICKETS: u64 = 100;

fn main() -> Result<(), Error> {
    let office = Agent::builder("office").start()?;
    let board = office.allocate(16)?;
    office.publish("board", &board, Access::READ_WRITE)?;
    let address = office.address();

    let workers: Vec<_> = (0..WORKERS)
        .map(|number| {
            let address = address.clone();
            thread::spawn(move || work(number, &address))
        })
        .collect();
    let mut tickets = BTreeSet::new();
    for worker in workers {
        tickets.extend(worker.join().expect("a worker does not panic")?);
    }

    assert_eq!(tickets, (0..WORKERS * TICKETS).collect());
    // The owner takes part by the same rules.
    assert_eq!(board.fetch_add(0, 1)?, WORKERS * TICKETS);
    let last = board.read_word(8)? - 1;
    assert!(last < WORKERS);
    println!(
        "{} tickets, none twice; one worker was the first to finish",
        tickets.len()
    );
    Ok(())
}

fn work(number: u64, address: &str) -> Result<Vec<u64>, Error> {
    let agent = Agent::builder(&format!("worker {number}")).start()?;
    let office = agent.connect(address)?;
    let board = office.region("board", Duration::from_secs(1))?;
    let mut tickets = Vec::new();
    for _ in 0..TICKETS {
        // An increment whose answer is lost is not repeated, because it may have happened: here that would cost a ticket.
        match office.fetch_add(&board, 0, 1).deadline(Duration::from_secs(5)).wait() {
            Ok(ticket) => tickets.push(ticket),
            Err(error) if error.may_have_happened() => eprintln!("a ticket may be lost: {error}"),
            Err(error) => return Err(error),
        }
    }
    // Whoever finds zero there has put its number in the second word; the others have left it alone.
    office.compare_swap(&board, 8, 0, number + 1).wait()?;
    Ok(tickets)
}
