//! What a communicator has done, in a few lines: how fast each kind of call was, and who was waited for.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

/// What calls are counted together by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Called {
    pub function: &'static str,
    pub way: Arc<str>,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    calls: u64,
    bus_bytes: u64,
    nanoseconds: u64,
    longest: u64,
}

/// Sizes of which each is counted by itself; more of them are counted as one.
const ROWS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub struct Summary {
    rows: BTreeMap<Called, Counted>,
    left_out: u64,
}

/// Beside the calls, what the summary is of.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub rank: i32,
    pub ranks: u32,
    pub name: &'a str,
    /// By peer: nanoseconds for which its messages, and its readiness to receive, were waited for.
    pub waited: &'a [(u64, u64)],
    pub own: u64,
}

impl Summary {
    pub fn add(&mut self, called: Called, bus_bytes: u64, nanoseconds: u64) {
        if self.rows.len() >= ROWS_MAX && !self.rows.contains_key(&called) {
            self.left_out += 1;
            return;
        }
        let row = self.rows.entry(called).or_default();
        row.calls += 1;
        row.bus_bytes += bus_bytes;
        row.nanoseconds += nanoseconds;
        row.longest = row.longest.max(nanoseconds);
    }

    pub fn tell(&self, seen: &Seen<'_>) -> String {
        let Seen { rank, ranks, name, .. } = *seen;
        let mut text = format!("weft: communicator {name}, rank {rank} of {ranks}\n");
        for (called, row) in &self.rows {
            let Called { function, way, bytes } = called;
            let mean = row.nanoseconds as f64 / row.calls as f64 / 1e3;
            let bus = row.bus_bytes as f64 / (row.nanoseconds as f64).max(1.0);
            let longest = row.longest as f64 / 1e3;
            let calls = row.calls;
            // Writing into a string cannot fail.
            let _ = writeln!(
                text,
                "weft:   {function} {bytes} B by {way}: {calls} times, {mean:.1} us on average, {longest:.1} at most, {bus:.2} GB/s on the bus"
            );
        }
        if self.left_out > 0 {
            let _ = writeln!(text, "weft:   and {} calls of other sizes", self.left_out);
        }
        self.tell_waits(seen, &mut text);
        text
    }

    /// Who was waited for, the longest first.
    fn tell_waits(&self, seen: &Seen<'_>, text: &mut String) {
        let mut peers: Vec<(usize, u64, u64)> = seen
            .waited
            .iter()
            .enumerate()
            .map(|(peer, (send, receive))| (peer, *send, *receive))
            .filter(|(_, send, receive)| send + receive > 0)
            .collect();
        peers.sort_by_key(|(_, send, receive)| std::cmp::Reverse(send + receive));
        let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
        for (peer, send, receive) in peers.iter().take(4) {
            let _ = writeln!(
                text,
                "weft:   steps waited {:.3} s for what rank {peer} sends, {:.3} s for it to receive",
                seconds(*send),
                seconds(*receive)
            );
        }
        let _ = writeln!(text, "weft:   and {:.3} s for this rank's own GPU", seconds(seen.own));
        let total: u64 = peers.iter().map(|(_, send, _)| send).sum();
        if let [(slowest, send, _), _, ..] = peers[..]
            && send * 2 > total
        {
            let _ = writeln!(
                text,
                "weft:   rank {slowest} is waited for more than all others together"
            );
        }
    }
}

/// The names of NCCL's functions that are told apart.
pub fn function(name: &str) -> &'static str {
    const KNOWN: [&str; 12] = [
        "AllReduce",
        "AllGather",
        "ReduceScatter",
        "Broadcast",
        "Reduce",
        "Send",
        "Recv",
        "AlltoAll",
        "Gather",
        "Scatter",
        "SendRecv",
        "AllToAll",
    ];
    KNOWN.into_iter().find(|known| *known == name).unwrap_or("Other")
}

/// What crosses the slowest link of the best algorithm there is, by which calls of all sizes and numbers of ranks are compared. `bytes`: of one rank's
/// part where ranks have parts, as NCCL counts.
pub fn bus_bytes(function: &str, bytes: u64, ranks: u32) -> u64 {
    let (bytes, ranks) = (u128::from(bytes), u128::from(ranks.max(1)));
    let carried = match function {
        "AllReduce" => 2 * bytes * (ranks - 1) / ranks,
        "AllGather" | "ReduceScatter" => bytes * (ranks - 1),
        "AlltoAll" | "AllToAll" => bytes * (ranks - 1) / ranks,
        _ => bytes,
    };
    u64::try_from(carried).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bus_carries_what_the_best_algorithm_would() {
        assert_eq!(bus_bytes("AllReduce", 1000, 4), 1500);
        assert_eq!(bus_bytes("AllReduce", 1000, 1), 0);
        assert_eq!(bus_bytes("AllGather", 1000, 4), 3000);
        assert_eq!(bus_bytes("Broadcast", 1000, 4), 1000);
        assert_eq!(bus_bytes("ReduceScatter", u64::MAX, 3), u64::MAX);
    }

    #[test]
    fn a_summary_names_whom_others_wait_for() {
        let mut summary = Summary::default();
        let called = Called {
            function: "AllReduce",
            way: "ring/simple".into(),
            bytes: 1 << 20,
        };
        summary.add(called.clone(), 1 << 20, 1_000_000);
        summary.add(called, 1 << 20, 3_000_000);
        let text = summary.tell(&Seen {
            rank: 0,
            ranks: 3,
            name: "c",
            waited: &[(0, 0), (9_000_000_000, 0), (1_000_000_000, 5)],
            own: 7,
        });
        assert!(
            text.contains(
                "AllReduce 1048576 B by ring/simple: 2 times, 2000.0 us on average, 3000.0 at most, 0.52 GB/s"
            ),
            "{text}"
        );
        assert!(text.contains("rank 1 is waited for more than all others"), "{text}");
    }

    #[test]
    fn functions_are_of_a_fixed_set() {
        assert_eq!((function("AllReduce"), function("Made up")), ("AllReduce", "Other"));
    }
}
