//! Two ends that write to each other in turn, each looking at its own memory for what the other has written: how `ib_write_lat`
//! measures the latency of a write, with no message and no completion on the way.

use std::sync::atomic::{Ordering, compiler_fence};
use std::time::{Duration, Instant};

use weft::{Agent, Memory, Peer, Prepared, Remote, Spans};

use crate::complaint::{Complaint, Exit};
use crate::ends;

/// The word that tells one ping from the next stands at the end of what is written.
pub const WORD_BYTES: u64 = 8;

/// In the last ping.
const LAST: u64 = 1 << 63;
/// Looks at the memory between two turns of the agent. A network card writes without its help, other transports need it.
const LOOKS_PER_TURN: u32 = 64;
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// One end. It writes from the first half of its memory into the second half of the other's.
#[derive(Debug)]
pub struct PingPong<'a> {
    agent: &'a Agent,
    memory: &'a Memory,
    write: Prepared,
    /// Where the word stands that is sent, and that which is looked at.
    sent: u64,
    seen: u64,
    /// The number of the first ping, which no earlier run has left behind in the memory.
    first: u64,
}

/// Where a ping-pong begins and how much each ping carries, as both ends must know it.
#[derive(Clone, Copy, Debug)]
pub struct Serve {
    pub bytes: u64,
    pub first: u64,
}

impl<'a> PingPong<'a> {
    pub fn new(
        agent: &'a Agent,
        peer: &Peer,
        memory: &'a Memory,
        remote: &Remote,
        Serve { bytes, first }: Serve,
    ) -> Result<PingPong<'a>, Complaint> {
        let (near_half, far_half) = (memory.len() / 2, remote.len() / 2);
        if bytes < WORD_BYTES || bytes > near_half.min(far_half) {
            let sentence =
                format!("A ping of {bytes} bytes does not fit: at least {WORD_BYTES}, at most half a region.");
            return Err(Complaint::new(Exit::Usage, sentence));
        }
        let write = peer
            .write(memory, remote)
            .spans(Spans::contiguous(0, bytes), Spans::contiguous(far_half, bytes))
            .prepare()
            .map_err(|error| ends::explain(&error, "The ping could not be prepared."))?;
        let (sent, seen) = (bytes - WORD_BYTES, near_half + bytes - WORD_BYTES);
        Ok(PingPong {
            agent,
            memory,
            write,
            sent,
            seen,
            first: first & !LAST,
        })
    }

    /// Sends pings and waits for each to come back, until `enough` says that the next one is the last. The times of the round trips.
    pub fn serve(&self, mut enough: impl FnMut(usize) -> bool) -> Result<Vec<Duration>, Complaint> {
        let mut times = Vec::new();
        loop {
            let last = enough(times.len());
            let word = (self.first + times.len() as u64) | if last { LAST } else { 0 };
            let start = Instant::now();
            self.ping(word, |seen| seen == word)?;
            times.push(start.elapsed());
            if last {
                return Ok(times);
            }
        }
    }

    /// Sends every ping back until the last. How many there were.
    pub fn answer(&self) -> Result<u64, Complaint> {
        let mut word = self.look(|seen| seen & !LAST == self.first)?;
        let mut next = self.first + 1;
        while word & LAST == 0 {
            word = self.ping(word, |seen| seen & !LAST == next)?;
            next += 1;
        }
        self.ping(word, |_| true)?;
        Ok(next - self.first)
    }

    /// Writes a word and waits until what is looked for has come and the write is done, so that its bytes can be used again.
    fn ping(&self, word: u64, wanted: impl Fn(u64) -> bool) -> Result<u64, Complaint> {
        let failed = |error: weft::Error| ends::explain(&error, "A write between two healthy ends failed.");
        self.memory.write(self.sent, &word.to_le_bytes());
        let transfer = self.write.post().map_err(failed)?;
        let seen = self.look(wanted)?;
        transfer.wait().map_err(failed)?;
        Ok(seen)
    }

    fn look(&self, wanted: impl Fn(u64) -> bool) -> Result<u64, Complaint> {
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_TURN {
                let mut word = [0; WORD_BYTES as usize];
                self.memory.read(self.seen, &mut word);
                let word = u64::from_le_bytes(word);
                // The next look is another one, whatever the compiler thinks of memory that nobody here writes.
                compiler_fence(Ordering::SeqCst);
                if wanted(word) {
                    return Ok(word);
                }
            }
            // Nobody here sends notifications; asking for one turns the agent.
            let _ = self.agent.try_notification();
            weft_fabric::cpu::look_again();
            if start.elapsed() > SILENCE_MAX {
                return Err(Complaint::new(Exit::Unreachable, "The other end's ping did not come."));
            }
        }
    }
}
