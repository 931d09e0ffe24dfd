//! The text of a recording: one line an entry, words separated by one space, the time in nanoseconds first.
//!
//! ```text
//! 0 open x6c6f6f703a62 = path 0
//! 0 signal 0 opened
//! 5000 post 0 = accepted 1 op 7 1000000 read 3 9 0 4096 true untagged
//! 9000 signal 0 completed 7 told 6699 6699 -
//! 9000 post 0 = accepted 1 op 8 1000000 add 9 64 1
//! 9500 signal 0 completed 8 found 41
//! ```

use std::fmt;
use std::str::{FromStr, SplitWhitespace};

use thiserror::Error;
use weft_plan::Time;

use super::{Entry, PostedBody, PostedOp, Recording};
use crate::atomic::AtomicAct;
use crate::error::{Failure, Loss, Refusal};
use crate::leg::Direction;
use crate::transport::{Arrival, Done, OpId, PathId, PeerAddress, Signal};

/// A line that is not part of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("line {line} of the recording is malformed")]
pub struct ParseError {
    pub line: usize,
}

impl fmt::Display for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (time, entry) in &self.entries {
            writeln!(f, "{} {entry}", time.as_ns())?;
        }
        Ok(())
    }
}

impl FromStr for Recording {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Recording, ParseError> {
        let mut entries = Vec::new();
        for (i, line) in text.lines().enumerate() {
            entries.push(parse_line(line).ok_or(ParseError { line: i + 1 })?);
        }
        Ok(Recording { entries })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entry::Open { peer, outcome } => {
                write!(f, "open {} = ", hex(peer.0.as_bytes()))?;
                match outcome {
                    Ok(path) => write!(f, "path {}", path.0),
                    Err(loss) => write!(f, "lost {}", loss_word(*loss)),
                }
            }
            Entry::Vouch { path } => write!(f, "vouch {}", path.0),
            Entry::Close { path } => write!(f, "close {}", path.0),
            Entry::Post { path, ops, outcome } => {
                write!(f, "post {} = ", path.0)?;
                match outcome {
                    Ok(accepted) => write!(f, "accepted {accepted}")?,
                    Err(loss) => write!(f, "lost {}", loss_word(*loss))?,
                }
                ops.iter().try_for_each(|op| write!(f, " {op}"))
            }
            Entry::Cancel { path, op } => write!(f, "cancel {} {}", path.0, op.0),
            Entry::Signal(signal) => {
                write!(f, "signal {} ", signal.path().0)?;
                match signal {
                    Signal::Opened { .. } => write!(f, "opened"),
                    Signal::Accepted { .. } => write!(f, "accepted"),
                    Signal::Lost { loss, fenced, .. } => write!(f, "lost {} {fenced}", loss_word(*loss)),
                    Signal::Completed { op, outcome, .. } => {
                        write!(f, "completed {} {}", op.0, outcome_words(outcome))
                    }
                    Signal::Message { payload, .. } => write!(f, "message {}", hex(payload)),
                    Signal::Arrived { arrival, .. } => write!(f, "arrived {} {}", arrival.tag, arrival.index),
                }
            }
        }
    }
}

impl fmt::Display for PostedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {} {} ", self.id.0, self.deadline.as_ns())?;
        match &self.body {
            PostedBody::Message(payload) => write!(f, "message {}", hex(payload)),
            PostedBody::Atomic { far_slot, offset, act } => match act {
                AtomicAct::FetchAdd(value) => write!(f, "add {far_slot} {offset} {value}"),
                AtomicAct::CompareSwap { expected, new } => write!(f, "swap {far_slot} {offset} {expected} {new}"),
            },
            PostedBody::Commit { far_slot, tag, parts } => write!(f, "commit {far_slot} {tag} {parts}"),
            PostedBody::Move {
                direction,
                near_slot,
                far_slot,
                start,
                end,
                checksum,
                arrival,
            } => {
                let verb = match direction {
                    Direction::Read => "read",
                    Direction::Write => "write",
                };
                write!(f, "{verb} {near_slot} {far_slot} {start} {end} {checksum} ")?;
                match arrival {
                    Some(arrival) => write!(f, "tagged {} {}", arrival.tag, arrival.index),
                    None => write!(f, "untagged"),
                }
            }
        }
    }
}

fn parse_line(line: &str) -> Option<(Time, Entry)> {
    let mut words = line.split_whitespace();
    let time = Time::from_ns(number(&mut words)?);
    let entry = match words.next()? {
        "open" => {
            let peer = PeerAddress(String::from_utf8(unhex(words.next()?)?).ok()?);
            literal(&mut words, "=")?;
            let outcome = match words.next()? {
                "path" => Ok(PathId(number(&mut words)?)),
                "lost" => Err(parse_loss(words.next()?)?),
                _ => return None,
            };
            Entry::Open { peer, outcome }
        }
        "vouch" => Entry::Vouch {
            path: PathId(number(&mut words)?),
        },
        "close" => Entry::Close {
            path: PathId(number(&mut words)?),
        },
        "post" => {
            let path = PathId(number(&mut words)?);
            literal(&mut words, "=")?;
            let outcome = match words.next()? {
                "accepted" => Ok(number(&mut words)?),
                "lost" => Err(parse_loss(words.next()?)?),
                _ => return None,
            };
            let mut ops = Vec::new();
            while let Some(word) = words.next() {
                if word != "op" {
                    return None;
                }
                ops.push(parse_op(&mut words)?);
            }
            Entry::Post { path, ops, outcome }
        }
        "cancel" => Entry::Cancel {
            path: PathId(number(&mut words)?),
            op: OpId(number(&mut words)?),
        },
        "signal" => Entry::Signal(parse_signal(&mut words)?),
        _ => return None,
    };
    words.next().is_none().then_some((time, entry))
}

fn parse_op(words: &mut SplitWhitespace<'_>) -> Option<PostedOp> {
    let id = OpId(number(words)?);
    let deadline = Time::from_ns(number(words)?);
    let body = match words.next()? {
        "message" => PostedBody::Message(unhex(words.next()?)?),
        "add" => PostedBody::Atomic {
            far_slot: number(words)?,
            offset: number(words)?,
            act: AtomicAct::FetchAdd(number(words)?),
        },
        "swap" => PostedBody::Atomic {
            far_slot: number(words)?,
            offset: number(words)?,
            act: AtomicAct::CompareSwap {
                expected: number(words)?,
                new: number(words)?,
            },
        },
        "commit" => PostedBody::Commit {
            far_slot: number(words)?,
            tag: number(words)?,
            parts: number(words)?,
        },
        "read" => parse_move(Direction::Read, words)?,
        "write" => parse_move(Direction::Write, words)?,
        _ => return None,
    };
    Some(PostedOp { id, deadline, body })
}

fn parse_move(direction: Direction, words: &mut SplitWhitespace<'_>) -> Option<PostedBody> {
    Some(PostedBody::Move {
        direction,
        near_slot: number(words)?,
        far_slot: number(words)?,
        start: number(words)?,
        end: number(words)?,
        checksum: number(words)?,
        arrival: match words.next()? {
            "tagged" => Some(Arrival {
                tag: number(words)?,
                index: number(words)?,
            }),
            "untagged" => None,
            _ => return None,
        },
    })
}

fn parse_signal(words: &mut SplitWhitespace<'_>) -> Option<Signal> {
    let path = PathId(number(words)?);
    Some(match words.next()? {
        "opened" => Signal::Opened { path },
        "accepted" => Signal::Accepted { path },
        "lost" => Signal::Lost {
            path,
            loss: parse_loss(words.next()?)?,
            fenced: number(words)?,
        },
        "completed" => Signal::Completed {
            path,
            op: OpId(number(words)?),
            outcome: parse_outcome(words)?,
        },
        "message" => Signal::Message {
            path,
            payload: unhex(words.next()?)?,
        },
        "arrived" => Signal::Arrived {
            path,
            arrival: Arrival {
                tag: number(words)?,
                index: number(words)?,
            },
        },
        _ => return None,
    })
}

fn outcome_words(outcome: &Result<Done, Failure>) -> String {
    match outcome {
        Ok(done) if *done == Done::default() => "done".to_string(),
        Ok(Done {
            far_sum,
            near_sum,
            before,
        }) => {
            let word = |told: &Option<u64>| told.map_or("-".to_string(), |number| number.to_string());
            format!("told {} {} {}", word(far_sum), word(near_sum), word(before))
        }
        Err(Failure::Cancelled) => "cancelled".to_string(),
        Err(Failure::Expired) => "expired".to_string(),
        Err(Failure::ChecksumMismatch) => "mismatch".to_string(),
        Err(Failure::Unanswered) => "unanswered".to_string(),
        Err(Failure::Refused(refusal)) => format!("refused {}", refusal_word(*refusal)),
        Err(Failure::PathLost { loss, fenced }) => format!("lost {} {fenced}", loss_word(*loss)),
    }
}

fn parse_outcome(words: &mut SplitWhitespace<'_>) -> Option<Result<Done, Failure>> {
    Some(match words.next()? {
        "done" => Ok(Done::default()),
        "told" => {
            let mut told = || match words.next()? {
                "-" => Some(None),
                word => word.parse().ok().map(Some),
            };
            Ok(Done {
                far_sum: told()?,
                near_sum: told()?,
                before: told()?,
            })
        }
        "cancelled" => Err(Failure::Cancelled),
        "expired" => Err(Failure::Expired),
        "mismatch" => Err(Failure::ChecksumMismatch),
        "unanswered" => Err(Failure::Unanswered),
        "refused" => {
            let word = words.next()?;
            let refusal = Refusal::ALL
                .into_iter()
                .find(|refusal| refusal_word(*refusal) == word)?;
            Err(Failure::Refused(refusal))
        }
        "lost" => Err(Failure::PathLost {
            loss: parse_loss(words.next()?)?,
            fenced: number(words)?,
        }),
        _ => return None,
    })
}

fn refusal_word(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::UnknownKey => "unknown_key",
        Refusal::StaleEpoch => "stale_epoch",
        Refusal::Released => "released",
        Refusal::OutOfBounds => "out_of_bounds",
        Refusal::NotReadable => "not_readable",
        Refusal::NotWritable => "not_writable",
        Refusal::Late => "late",
        Refusal::Malformed => "malformed",
        Refusal::Unsupported => "unsupported",
        Refusal::Misaligned => "misaligned",
        Refusal::NoMemory => "no_memory",
        Refusal::NoRoom => "no_room",
        Refusal::ReadOnly => "read_only",
        Refusal::DeviceFailed => "device_failed",
        Refusal::NotReached => "not_reached",
        Refusal::Throttled => "throttled",
        Refusal::Denied => "denied",
        Refusal::NoContainer => "no_container",
    }
}

fn loss_word(loss: Loss) -> String {
    match loss {
        Loss::Closed => "closed".to_string(),
        Loss::ClosedByPeer => "closed_by_peer".to_string(),
        Loss::Silent => "silent".to_string(),
        Loss::Garbage => "garbage".to_string(),
        Loss::Unreachable => "unreachable".to_string(),
        Loss::Refused => "refused".to_string(),
        Loss::System(code) => format!("system:{code}"),
    }
}

fn parse_loss(word: &str) -> Option<Loss> {
    Some(match word {
        "closed" => Loss::Closed,
        "closed_by_peer" => Loss::ClosedByPeer,
        "silent" => Loss::Silent,
        "garbage" => Loss::Garbage,
        "unreachable" => Loss::Unreachable,
        "refused" => Loss::Refused,
        other => Loss::System(other.strip_prefix("system:")?.parse().ok()?),
    })
}

fn number<N: FromStr>(words: &mut SplitWhitespace<'_>) -> Option<N> {
    words.next()?.parse().ok()
}

fn literal(words: &mut SplitWhitespace<'_>, wanted: &str) -> Option<()> {
    (words.next()? == wanted).then_some(())
}

/// A leading `x` keeps an empty payload a word.
fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::from("x"), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(word: &str) -> Option<Vec<u8>> {
    let digits = word.strip_prefix('x')?;
    if !digits.bytes().all(|b| b.is_ascii_hexdigit()) || digits.len() % 2 != 0 {
        return None;
    }
    (0..digits.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&digits[i..i + 2], 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_loss() -> impl Strategy<Value = Loss> {
        prop_oneof![
            Just(Loss::Closed),
            Just(Loss::ClosedByPeer),
            Just(Loss::Silent),
            Just(Loss::Garbage),
            Just(Loss::Unreachable),
            Just(Loss::Refused),
            any::<i32>().prop_map(Loss::System),
        ]
    }

    fn any_outcome() -> impl Strategy<Value = Result<Done, Failure>> {
        prop_oneof![
            any::<[Option<u64>; 3]>().prop_map(|[far_sum, near_sum, before]| Ok(Done {
                far_sum,
                near_sum,
                before
            })),
            Just(Err(Failure::Unanswered)),
            Just(Err(Failure::Cancelled)),
            Just(Err(Failure::Expired)),
            Just(Err(Failure::ChecksumMismatch)),
            prop::sample::select(&Refusal::ALL[..]).prop_map(|refusal| Err(Failure::Refused(refusal))),
            (any_loss(), any::<bool>()).prop_map(|(loss, fenced)| Err(Failure::PathLost { loss, fenced })),
        ]
    }

    fn any_op() -> impl Strategy<Value = PostedOp> {
        let arrival = any::<Option<(u64, u32)>>().prop_map(|a| a.map(|(tag, index)| Arrival { tag, index }));
        let direction = prop_oneof![Just(Direction::Read), Just(Direction::Write)];
        let part = (direction, any::<[u32; 2]>(), any::<[u64; 2]>(), any::<bool>(), arrival);
        let act = prop_oneof![
            any::<u64>().prop_map(AtomicAct::FetchAdd),
            any::<[u64; 2]>().prop_map(|[expected, new]| AtomicAct::CompareSwap { expected, new }),
        ];
        let body = prop_oneof![
            any::<Vec<u8>>().prop_map(PostedBody::Message),
            (any::<u32>(), any::<u64>(), any::<u32>()).prop_map(|(far_slot, tag, parts)| PostedBody::Commit {
                far_slot,
                tag,
                parts
            }),
            (any::<u32>(), any::<u64>(), act).prop_map(|(far_slot, offset, act)| PostedBody::Atomic {
                far_slot,
                offset,
                act
            }),
            part.prop_map(
                |(direction, [near_slot, far_slot], [start, end], checksum, arrival)| PostedBody::Move {
                    direction,
                    near_slot,
                    far_slot,
                    start,
                    end,
                    checksum,
                    arrival,
                }
            ),
        ];
        (any::<u64>(), any::<u64>(), body).prop_map(|(id, deadline, body)| PostedOp {
            id: OpId(id),
            deadline: Time::from_ns(deadline),
            body,
        })
    }

    fn any_entry() -> impl Strategy<Value = Entry> {
        let path = || any::<u32>().prop_map(PathId);
        let opened = prop_oneof![path().prop_map(Ok), any_loss().prop_map(Err)];
        let posted = prop_oneof![any::<usize>().prop_map(Ok), any_loss().prop_map(Err)];
        prop_oneof![
            (any::<String>(), opened).prop_map(|(peer, outcome)| Entry::Open {
                peer: PeerAddress(peer),
                outcome
            }),
            path().prop_map(|path| Entry::Vouch { path }),
            path().prop_map(|path| Entry::Close { path }),
            (path(), prop::collection::vec(any_op(), 0..4), posted).prop_map(|(path, ops, outcome)| Entry::Post {
                path,
                ops,
                outcome
            }),
            (path(), any::<u64>()).prop_map(|(path, op)| Entry::Cancel { path, op: OpId(op) }),
            path().prop_map(|path| Entry::Signal(Signal::Opened { path })),
            path().prop_map(|path| Entry::Signal(Signal::Accepted { path })),
            (path(), any_loss(), any::<bool>()).prop_map(|(path, loss, fenced)| Entry::Signal(Signal::Lost {
                path,
                loss,
                fenced
            })),
            (path(), any::<u64>(), any_outcome()).prop_map(|(path, op, outcome)| {
                Entry::Signal(Signal::Completed {
                    path,
                    op: OpId(op),
                    outcome,
                })
            }),
            (path(), any::<Vec<u8>>()).prop_map(|(path, payload)| Entry::Signal(Signal::Message { path, payload })),
            (path(), any::<u64>(), any::<u32>()).prop_map(|(path, tag, index)| {
                let arrival = Arrival { tag, index };
                Entry::Signal(Signal::Arrived { path, arrival })
            }),
        ]
    }

    proptest! {
        #[test]
        fn text_and_recording_are_one(entries in prop::collection::vec((any::<u64>(), any_entry()), 0..12)) {
            let entries = entries.into_iter().map(|(ps, entry)| (Time::from_ns(ps), entry)).collect();
            let recording = Recording { entries };
            prop_assert_eq!(recording.to_string().parse::<Recording>(), Ok(recording));
        }

        #[test]
        fn garbage_is_an_error_with_its_line(text in "[0-9a-z=x ]{0,60}") {
            if let Err(error) = text.parse::<Recording>() {
                prop_assert_eq!(error, ParseError { line: 1 });
            }
        }
    }
}
