//! The sending end of a channel.

use std::collections::{BTreeMap, VecDeque};

use super::wire::{Message, Receive};
use super::{ChannelError, EAGER_MAX, EARLY_BYTES_MAX, EARLY_MAX, RECEIVES_MAX, Tags, Tells};
use crate::error::Failure;

/// Which send of which tag.
type Key = (i32, u64);

/// What the sender wants done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The bytes of a send go out as a word of their own. It is over with that.
    Eager {
        id: u64,
        tag: i32,
        nth: u64,
    },
    Say(Message),
    /// The bytes of a send are written to where a receive wants them; with `arrives` under its number. [`Outgoing::on_written`] follows.
    Write {
        id: u64,
        to: Receive,
        arrives: bool,
    },
    /// A send is over.
    Done {
        id: u64,
        len: u64,
    },
}

/// Pairs sends with the receives that it is told of.
#[derive(Debug)]
pub struct Outgoing {
    eager_max: u64,
    tells: Tells,
    sends: Tags,
    receives: Tags,
    /// Sends whose receives are not known, and that have not gone out.
    waiting: BTreeMap<Key, (u64, u64)>,
    /// Those that have gone out eagerly, with their lengths.
    early: BTreeMap<Key, u64>,
    early_bytes: u64,
    /// Receives without a send.
    told: BTreeMap<Key, Receive>,
    writing: BTreeMap<u64, Writing>,
    wanted: VecDeque<Wanted>,
}

#[derive(Clone, Copy, Debug)]
struct Writing {
    to: Receive,
    len: u64,
    arrives: bool,
    /// The receiver is asked whether it has got it.
    asking: bool,
}

impl Outgoing {
    pub fn new(eager_max: u64, tells: Tells) -> Outgoing {
        Outgoing {
            eager_max: eager_max.min(EAGER_MAX),
            tells,
            sends: Tags::default(),
            receives: Tags::default(),
            waiting: BTreeMap::new(),
            early: BTreeMap::new(),
            early_bytes: 0,
            told: BTreeMap::new(),
            writing: BTreeMap::new(),
            wanted: VecDeque::new(),
        }
    }

    /// Sends so many bytes under a tag. `id`: how the caller knows the send, one of which is never given twice.
    pub fn send(&mut self, id: u64, tag: i32, len: u64) -> Result<(), ChannelError> {
        let key = (tag, self.sends.next(tag)?);
        if let Some(to) = self.told.remove(&key) {
            return self.go(id, key, to, len);
        }
        let room = self.early.len() < EARLY_MAX && self.early_bytes + len <= EARLY_BYTES_MAX;
        if len <= self.eager_max && room {
            self.early.insert(key, len);
            self.early_bytes += len;
            self.wanted.push_back(Wanted::Eager { id, tag, nth: key.1 });
        } else {
            self.waiting.insert(key, (id, len));
        }
        Ok(())
    }

    /// The receiver tells of receives, in the order in which they were posted.
    pub fn on_told(&mut self, receives: &[Receive]) -> Result<(), ChannelError> {
        for to in receives {
            let key = (to.tag, self.receives.next(to.tag)?);
            if let Some(len) = self.early.remove(&key) {
                // It met it there.
                self.early_bytes -= len;
            } else if let Some((id, len)) = self.waiting.remove(&key) {
                self.go(id, key, *to, len)?;
            } else if self.told.len() < RECEIVES_MAX {
                self.told.insert(key, *to);
            } else {
                return Err(ChannelError::Misbehaved("it posts more receives than there may be"));
            }
        }
        Ok(())
    }

    fn go(&mut self, id: u64, (tag, nth): Key, to: Receive, len: u64) -> Result<(), ChannelError> {
        if len > to.len {
            return Err(ChannelError::TooLong {
                sent: len,
                room: to.len,
            });
        }
        if len <= self.eager_max {
            self.wanted.push_back(Wanted::Eager { id, tag, nth });
            return Ok(());
        }
        let arrives = self.tells == Tells::ByArrival;
        self.writing.insert(
            id,
            Writing {
                to,
                len,
                arrives,
                asking: false,
            },
        );
        if arrives {
            let number = to.number;
            self.wanted.push_back(Wanted::Say(Message::Coming { number, len }));
        }
        self.wanted.push_back(Wanted::Write { id, to, arrives });
        Ok(())
    }

    /// A write is over.
    pub fn on_written(&mut self, id: u64, outcome: Result<(), Failure>) -> Result<(), ChannelError> {
        let Some(writing) = self.writing.get_mut(&id) else {
            return Ok(());
        };
        let Writing { to, len, arrives, .. } = *writing;
        let number = to.number;
        match outcome {
            Ok(()) => {
                self.writing.remove(&id);
                if !arrives {
                    self.wanted.push_back(Wanted::Say(Message::Landed { number, len }));
                }
                self.wanted.push_back(Wanted::Done { id, len });
                Ok(())
            }
            // It may have come all the same, and whoever has it may use its memory for something else.
            Err(Failure::PathLost { .. }) if arrives => {
                writing.asking = true;
                self.wanted.push_back(Wanted::Say(Message::Lost { number }));
                Ok(())
            }
            Err(failure) => Err(ChannelError::NotCarried(failure)),
        }
    }

    /// The receiver has got what was lost here, or wants it under another number.
    pub fn on_answer(&mut self, number: u32, anew: Option<u32>) -> Result<(), ChannelError> {
        let asked = |(_, writing): &(&u64, &mut Writing)| writing.asking && writing.to.number == number;
        let Some((&id, writing)) = self.writing.iter_mut().find(asked) else {
            return Err(ChannelError::Misbehaved("it answers what nobody asked"));
        };
        match anew {
            None => {
                let len = writing.len;
                self.writing.remove(&id);
                self.wanted.push_back(Wanted::Done { id, len });
            }
            Some(number) => {
                writing.to.number = number;
                (writing.arrives, writing.asking) = (false, false);
                let to = writing.to;
                let arrives = false;
                self.wanted.push_back(Wanted::Write { id, to, arrives });
            }
        }
        Ok(())
    }

    pub fn next_wanted(&mut self) -> Option<Wanted> {
        self.wanted.pop_front()
    }

    /// Sends that are neither over nor gone out.
    pub fn under_way(&self) -> usize {
        self.waiting.len() + self.writing.len()
    }
}
