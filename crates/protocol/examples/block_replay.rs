//! Hit rates of all policies over traces, at capacities of 1, 5, 10 and 25 % of their distinct blocks, beside the offline optimum.
//!
//! usage: `cargo run --release -p weft-protocol --example block_replay -- TRACE.csv…`
#![expect(clippy::disallowed_methods, reason = "it reads files")]

use weft_protocol::block::policy::Kind;
use weft_protocol::block::replay::{distinct, optimum, replay};
use weft_protocol::block::trace;

const SHARES: [f64; 4] = [0.01, 0.05, 0.10, 0.25];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut sums: Vec<(String, f64, f64, usize)> = Vec::new();
    for path in std::env::args().skip(1) {
        let requests = trace::parse(&std::fs::read_to_string(&path)?)?;
        let blocks = distinct(&requests);
        let bits = trace::comes_back(&requests);
        let at = |share: f64| ((blocks as f64 * share) as usize).max(1);
        println!("{path}: {} requests, {blocks} distinct blocks", requests.len());
        let mut rows: Vec<(String, Vec<f64>)> = Vec::new();
        for (hint, name) in [(None, ""), (Some(&bits[..]), " with hint")] {
            for kind in Kind::ALL {
                let rate = |share: &f64| 100.0 * replay(&requests, at(*share), kind, hint).hit_rate();
                rows.push((format!("{kind}{name}"), SHARES.iter().map(rate).collect()));
            }
        }
        let best = |share: &f64| 100.0 * optimum(&requests, at(*share)).hit_rate();
        rows.push(("optimum".to_string(), SHARES.iter().map(best).collect()));
        let lru = rows[0].1.clone();
        for (name, rates) in rows {
            println!(
                "  {name:20} {}",
                rates
                    .iter()
                    .map(|rate| format!("{rate:6.2}"))
                    .collect::<Vec<_>>()
                    .join(" ")
            );
            let worst = rates
                .iter()
                .zip(&lru)
                .map(|(rate, lru)| rate - lru)
                .fold(f64::MAX, f64::min);
            let sum = rates.iter().sum::<f64>();
            match sums.iter_mut().find(|row| row.0 == name) {
                Some(row) => (row.1, row.2, row.3) = (row.1 + sum, row.2.min(worst), row.3 + rates.len()),
                None => sums.push((name, sum, worst, rates.len())),
            }
        }
    }
    println!("mean over all cells, and the worst cell beside LRU:");
    for (name, sum, worst, cells) in sums {
        println!("  {name:20} {:6.2} {worst:+6.2}", sum / cells as f64);
    }
    Ok(())
}
