//! Two ends that write to each other in turn, each looking at its own memory for what the other has written: how `ib_write_lat`
//! measures the latency of a write, with no message and no completion on the way.

use std::sync::atomic::{Ordering, compiler_fence};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft::{Agent, Memory, Peer, Prepared, Remote, Spans, Transfer, Turns};

use crate::complaint::{Complaint, Exit};
use crate::ends;

/// The word that tells one ping from the next stands at the end of what is written.
pub const WORD_BYTES: u64 = 8;

/// In the last ping.
const LAST: u64 = 1 << 63;
/// Looks at the memory before the agent gets its turn, or is asked whether it needs one.
const LOOKS: u32 = 64;
/// How long an agent that has nothing under way goes without a turn.
const TURN: Duration = Duration::from_millis(1);
/// How long a ping may take before somebody who has no core is suspected to be what it waits for.
const CROWDED: Duration = Duration::from_millis(1);
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// One end. It writes from the first and the second quarter of its memory, in turn, into the second half of the other's.
#[derive(Debug)]
pub struct PingPong<'a> {
    agent: &'a Agent,
    memory: &'a Memory,
    serve: Serve,
    /// Two writes, so that one can be got ready while the other's end has not been heard of, and where their words stand.
    writes: [(Prepared, u64); 2],
    /// Where the other end's word comes to.
    seen: u64,
}

/// How a ping-pong goes, as both ends must know it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Serve {
    /// What each ping carries.
    pub bytes: u64,
    /// The number of the first ping, which no earlier run has left behind in the memory.
    pub first: u64,
}

impl<'a> PingPong<'a> {
    pub fn new(
        agent: &'a Agent,
        peer: &Peer,
        memory: &'a Memory,
        remote: &Remote,
        serve: Serve,
    ) -> Result<PingPong<'a>, Complaint> {
        let Serve { bytes, first } = serve;
        let (near_half, far_half) = (memory.len() / 2, remote.len() / 2);
        if bytes < WORD_BYTES || bytes > near_half.min(far_half) / 2 {
            let sentence =
                format!("A ping of {bytes} bytes does not fit: at least {WORD_BYTES}, at most a quarter of a region.");
            return Err(Complaint::new(Exit::Usage, sentence));
        }
        let write = |start: u64| -> Result<(Prepared, u64), Complaint> {
            let prepared = peer
                .write(memory, remote)
                .spans(Spans::contiguous(start, bytes), Spans::contiguous(far_half, bytes))
                .prepare()
                .map_err(|error| ends::explain(&error, "The ping could not be prepared."))?;
            Ok((prepared, start + bytes - WORD_BYTES))
        };
        Ok(PingPong {
            agent,
            memory,
            serve: Serve {
                bytes,
                first: first & !LAST,
            },
            writes: [write(0)?, write(near_half / 2)?],
            seen: near_half + bytes - WORD_BYTES,
        })
    }

    /// Sends pings and waits for each to come back, until `enough` says that the next one is the last. The times of the round trips.
    pub fn serve(&self, mut enough: impl FnMut(usize) -> bool) -> Result<Vec<Duration>, Complaint> {
        let turns = self.agent.take_turns();
        let mut times = Vec::new();
        let mut sent = Sent::default();
        loop {
            let last = enough(times.len());
            let word = (self.serve.first + times.len() as u64) | if last { LAST } else { 0 };
            let start = Instant::now();
            self.ping(word, &mut sent)?;
            self.look(&turns, &sent, |seen| seen == word)?;
            times.push(start.elapsed());
            if last {
                return sent.wait().map(|()| times);
            }
        }
    }

    /// Sends every ping back until the last. How many there were.
    pub fn answer(&self) -> Result<u64, Complaint> {
        let turns = self.agent.take_turns();
        let mut sent = Sent::default();
        let mut next = self.serve.first;
        loop {
            let word = self.look(&turns, &sent, |seen| seen & !LAST == next)?;
            self.ping(word, &mut sent)?;
            next += 1;
            if word & LAST != 0 {
                return sent.wait().map(|()| next - self.serve.first);
            }
        }
    }

    /// Writes a word. The write before the last has ended by then, or is waited for: its bytes are used again.
    fn ping(&self, word: u64, sent: &mut Sent) -> Result<(), Complaint> {
        let (write, at) = &self.writes[(word % 2) as usize];
        let [last, before] = std::mem::take(&mut sent.0);
        if let Some(open) = before.as_ref().filter(|before| !before.is_ended()) {
            open.wait().map_err(failed)?;
        }
        self.memory.write(*at, &word.to_le_bytes());
        sent.0 = [Some(write.post().map_err(failed)?), last];
        // How it ended is asked while this one is on its way.
        before.map_or(Ok(()), |before| before.wait().map(drop).map_err(failed))
    }

    /// Looks at the memory until what is wanted has come.
    fn look(&self, turns: &Turns<'_>, sent: &Sent, wanted: impl Fn(u64) -> bool) -> Result<u64, Complaint> {
        let start = Instant::now();
        let mut turned = Duration::ZERO;
        loop {
            for _ in 0..LOOKS {
                let mut word = [0; WORD_BYTES as usize];
                self.memory.read(self.seen, &mut word);
                let word = u64::from_le_bytes(word);
                // The next look is another one, whatever the compiler thinks of memory that nobody here writes.
                compiler_fence(Ordering::SeqCst);
                if wanted(word) {
                    return Ok(word);
                }
            }
            let waited = start.elapsed();
            // The end of the last write is taken in meanwhile. After that a turn would only keep from looking.
            if sent.is_open() || waited - turned > TURN {
                turns.turn();
                turned = waited;
            }
            // Not sooner: to a kernel that plays the network card a thread that yields is one that can wait.
            if waited > CROWDED {
                std::thread::yield_now();
            }
            if waited > SILENCE_MAX {
                return Err(Complaint::new(Exit::Unreachable, "The other end's ping did not come."));
            }
        }
    }
}

/// The last write and the one before it.
#[derive(Debug, Default)]
struct Sent([Option<Transfer>; 2]);

impl Sent {
    fn is_open(&self) -> bool {
        self.0.iter().flatten().any(|transfer| !transfer.is_ended())
    }

    fn wait(&self) -> Result<(), Complaint> {
        let mut open = self.0.iter().flatten();
        open.try_for_each(|transfer| transfer.wait().map(drop).map_err(failed))
    }
}

fn failed(error: weft::Error) -> Complaint {
    ends::explain(&error, "A write between two healthy ends failed.")
}
