//! What ranks tell each other about their calls, in bytes of fixed size: a status area in shared memory holds them as they are, and a
//! message carries them.

use std::fmt;

use thiserror::Error;
use weft_plan::Rank;

use super::history::Recent;

/// What a rank has called, for the others to compare and to show.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallRecord {
    /// Which call of the group, counted from zero on every rank.
    pub number: u64,
    /// A digest of everything that must be alike on all ranks, in this call and in all before it.
    pub signature: u64,
    /// What was called, in words, padded with zeros. It is shown and never interpreted.
    pub words: [u8; CallRecord::WORDS],
}

/// Where a rank is in its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Waiting {
    pub step: u32,
    /// `None`: for nobody, it is busy with its own memory.
    pub peer: Option<Rank>,
}

/// What a rank has published of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status {
    /// The call that it began last.
    pub call: CallRecord,
    /// Whether that call has ended there.
    pub ended: bool,
    pub waiting: Waiting,
    /// Its last calls, that one included.
    pub recent: Recent,
}

/// Why a call failed, as the rank that noticed first says it to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Abort {
    /// Who noticed.
    pub by: Rank,
    /// Who is to blame.
    pub blamed: Rank,
    pub cause: Cause,
    /// The step that the rank that noticed was in.
    pub step: u32,
    /// What the rank that noticed had called.
    pub called: CallRecord,
    /// What the one that is to blame had called last, as far as it was known.
    pub instead: Option<CallRecord>,
}

impl Abort {
    /// Whether it is about a call of this number, or about one before it, and not about one that others have made since.
    pub fn is_of(&self, number: u64) -> bool {
        self.called.number <= number
    }
}

/// What a rank is blamed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// It died, or nothing reaches it any more.
    Lost,
    /// It called something else.
    WrongCall,
    /// It did not come along by the deadline.
    Late,
    /// It ended its own call early, because its caller wanted so.
    Withdrew,
    /// It could not use a buffer, panicked in a function of its caller's, or broke the protocol.
    Broken,
}

/// Bytes that are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("bytes that are no record of a call")]
pub struct Garbled;

impl CallRecord {
    /// The number of all messages between two ranks of which the others know nothing.
    pub const PAIRWISE: u64 = u64::MAX;
    pub const WORDS: usize = 112;
    /// What a rank has called that has called nothing.
    pub const NONE: CallRecord = CallRecord {
        number: 0,
        signature: 0,
        words: [0; CallRecord::WORDS],
    };
    pub const BYTES: usize = 16 + CallRecord::WORDS;

    /// `words` beyond what fits is cut off.
    pub fn new(number: u64, signature: u64, words: &str) -> CallRecord {
        let mut end = words.len().min(CallRecord::WORDS);
        while !words.is_char_boundary(end) {
            end -= 1;
        }
        let mut padded = [0; CallRecord::WORDS];
        padded[..end].copy_from_slice(&words.as_bytes()[..end]);
        CallRecord {
            number,
            signature,
            words: padded,
        }
    }

    pub fn to_bytes(&self) -> [u8; CallRecord::BYTES] {
        let mut bytes = [0; CallRecord::BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.signature.to_le_bytes());
        bytes[16..].copy_from_slice(&self.words);
        bytes
    }

    /// Any bytes are a record; what of its words cannot be shown is left out when it is.
    pub fn from_bytes(bytes: &[u8; CallRecord::BYTES]) -> CallRecord {
        let mut words = [0; CallRecord::WORDS];
        words.copy_from_slice(&bytes[16..]);
        CallRecord {
            number: word(&bytes[..8]),
            signature: word(&bytes[8..16]),
            words,
        }
    }
}

impl fmt::Display for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.words.iter().position(|&b| b == 0).unwrap_or(self.words.len());
        // They may come from another process: nothing of them may move a terminal's cursor.
        let shown = String::from_utf8_lossy(&self.words[..end]).replace(char::is_control, "");
        match self.number {
            CallRecord::PAIRWISE => f.write_str(&shown),
            number => write!(f, "{shown} (call {number})"),
        }
    }
}

impl fmt::Debug for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} {:016x}", self.signature)
    }
}

impl Cause {
    const ALL: [Cause; 5] = [
        Cause::Lost,
        Cause::WrongCall,
        Cause::Late,
        Cause::Withdrew,
        Cause::Broken,
    ];
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::Lost => "is lost",
            Cause::WrongCall => "called something else",
            Cause::Late => "did not come along by the deadline",
            Cause::Withdrew => "gave up its call",
            Cause::Broken => "broke the protocol, panicked or could not use a buffer",
        })
    }
}

impl Abort {
    pub const BYTES: usize = 16 + 2 * CallRecord::BYTES;

    pub fn to_bytes(&self) -> [u8; Abort::BYTES] {
        let mut bytes = [0; Abort::BYTES];
        bytes[..4].copy_from_slice(&self.by.0.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.blamed.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.step.to_le_bytes());
        bytes[12] = Cause::ALL.iter().position(|&cause| cause == self.cause).unwrap_or(0) as u8;
        bytes[13] = u8::from(self.instead.is_some());
        bytes[16..16 + CallRecord::BYTES].copy_from_slice(&self.called.to_bytes());
        if let Some(instead) = &self.instead {
            bytes[16 + CallRecord::BYTES..].copy_from_slice(&instead.to_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: &[u8; Abort::BYTES]) -> Result<Abort, Garbled> {
        let record = |at: usize| {
            let mut record = [0; CallRecord::BYTES];
            record.copy_from_slice(&bytes[at..at + CallRecord::BYTES]);
            CallRecord::from_bytes(&record)
        };
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let instead = match bytes[13] {
            0 => None,
            1 => Some(record(16 + CallRecord::BYTES)),
            _ => return Err(Garbled),
        };
        Ok(Abort {
            by: Rank(number(0)),
            blamed: Rank(number(4)),
            step: number(8),
            cause: *Cause::ALL.get(usize::from(bytes[12])).ok_or(Garbled)?,
            called: record(16),
            instead,
        })
    }
}

impl fmt::Display for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Abort {
            by,
            blamed,
            cause,
            step,
            called,
            instead,
        } = self;
        let (by, blamed) = (by.0, blamed.0);
        match (instead, by == blamed) {
            // The odd one out has noticed it first: what is known besides is what the others had called.
            (Some(others), true) if *cause == Cause::WrongCall => write!(
                f,
                "rank {by} {cause} than the others: it was in step {step} of {called}, they in {others}"
            ),
            (_, true) => write!(f, "rank {by} {cause}; it was in step {step} of {called}"),
            (Some(instead), false) => write!(
                f,
                "rank {blamed} {cause}; rank {by} was in step {step} of {called}, rank {blamed} in {instead}"
            ),
            (None, false) => write!(f, "rank {blamed} {cause}; rank {by} was in step {step} of {called}"),
        }
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_abort_reads_back(numbers: [u32; 3], cause in 0usize..5, words in "\\PC{0,60}", instead: bool) {
            let called = CallRecord::new(7, u64::MAX - 3, &words);
            let abort = Abort {
                by: Rank(numbers[0]),
                blamed: Rank(numbers[1]),
                step: numbers[2],
                cause: Cause::ALL[cause],
                called,
                instead: instead.then_some(CallRecord::new(8, 1, "barrier")),
            };
            prop_assert_eq!(Abort::from_bytes(&abort.to_bytes()), Ok(abort));
        }

        #[test]
        fn any_bytes_are_refused_or_shown(bytes: Vec<u8>) {
            let mut abort = [0xff; Abort::BYTES];
            let len = bytes.len().min(Abort::BYTES);
            abort[..len].copy_from_slice(&bytes[..len]);
            if let Ok(abort) = Abort::from_bytes(&abort) {
                prop_assert!(!abort.to_string().chars().any(char::is_control));
            }
        }
    }

    #[test]
    fn a_failure_is_told_in_words() {
        let abort = Abort {
            by: Rank(0),
            blamed: Rank(3),
            cause: Cause::WrongCall,
            step: 2,
            called: CallRecord::new(4, 1, "all-reduce sum of 1024 f32"),
            instead: Some(CallRecord::new(4, 2, "all-reduce sum of 1000 f32")),
        };
        assert_eq!(
            abort.to_string(),
            "rank 3 called something else; rank 0 was in step 2 of all-reduce sum of 1024 f32 (call 4), \
             rank 3 in all-reduce sum of 1000 f32 (call 4)"
        );
        // The odd one out may notice it first: nobody is told of twice, with two calls.
        let own = Abort { by: Rank(3), ..abort };
        assert_eq!(
            own.to_string(),
            "rank 3 called something else than the others: it was in step 2 of all-reduce sum of 1024 f32 (call 4), \
             they in all-reduce sum of 1000 f32 (call 4)"
        );
        let withdrew = Abort {
            cause: Cause::Withdrew,
            ..own
        };
        assert_eq!(
            withdrew.to_string(),
            "rank 3 gave up its call; it was in step 2 of all-reduce sum of 1024 f32 (call 4)"
        );
    }
}
