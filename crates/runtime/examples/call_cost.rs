//! What a call of a collective costs in itself: a group of one rank, whose calls move one kibibyte on their own rank.
//!
//! `cargo run --release -p weft --example call_cost`

use std::time::Instant;

use weft::{Agent, Communicator, Datatype, Error, JoinOptions, Rank, Reduction};

const ROUNDS: u32 = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let calls: u32 = std::env::args().nth(1).map_or(Ok(20_000), |calls| calls.parse())?;
    let agent = Agent::builder("alone").set("rendezvous", "process").start()?;
    let group = Communicator::join(&agent, JoinOptions::new("alone", Rank(0), 1))?;
    let (input, output) = (agent.allocate(1024)?, agent.allocate(1024)?);
    let all_reduce = || group.all_reduce(&input, &output, Datatype::F32, Reduction::Sum).run();
    let all_gather = || group.all_gather(&input, &output, Datatype::F32).run();
    println!("all-reduce  {:4.0} ns", cost_ns(calls, all_reduce)?);
    println!("all-gather  {:4.0} ns", cost_ns(calls, all_gather)?);
    println!("barrier     {:4.0} ns", cost_ns(calls, || group.barrier().run())?);
    Ok(())
}

/// Of a call, in the best of several rounds, since the machine has other things to do.
fn cost_ns(calls: u32, call: impl Fn() -> Result<(), Error>) -> Result<f64, Error> {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(calls));
    }
    Ok(best)
}
