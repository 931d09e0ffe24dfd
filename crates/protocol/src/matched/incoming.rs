//! The receiving end of a channel.

use std::collections::BTreeMap;

use super::wire::{Message, Receive};
use super::{ChannelError, EARLY_BYTES_MAX, EARLY_MAX, GROUP_MAX, RECEIVES_MAX, Tags};

/// One receive of a group, as it is posted: how much it has room for, and where, in words of whoever carries it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landing {
    pub tag: i32,
    pub len: u64,
    pub region: u32,
    pub offset: u64,
}

/// Whether an eager message has met its receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meets {
    /// This receive of this group: its bytes belong there, now.
    Now { group: u64, nth: usize },
    /// None is posted: the bytes are to be [kept](Incoming::keep).
    Later,
}

/// What has come of a group: its receives are all there, each so long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complete {
    pub group: u64,
    pub lens: Box<[u64]>,
}

/// Pairs receives with the messages that come.
#[derive(Debug, Default)]
pub struct Incoming {
    receives: Tags,
    /// Receives that nothing has met yet, by tag and count: under which number they were told.
    open: BTreeMap<(i32, u64), u32>,
    awaited: BTreeMap<u32, Awaited>,
    groups: BTreeMap<u64, Group>,
    /// What came before its receive.
    early: BTreeMap<(i32, u64), Vec<u8>>,
    early_bytes: u64,
    complete: Vec<Complete>,
    /// Numbers that are awaited no more.
    over: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Awaited {
    group: u64,
    nth: usize,
    key: (i32, u64),
    room: u64,
    /// How long the message is, once it is on its way.
    len: Option<u64>,
    arrived: bool,
}

#[derive(Debug)]
struct Group {
    left: usize,
    lens: Box<[u64]>,
}

/// What a group of receives brought when it was posted.
#[derive(Debug, Default)]
pub struct Posted {
    /// To be told to the sender.
    pub receives: Vec<Receive>,
    /// Messages that were there before, and which receive of the group each is for.
    pub here: Vec<(usize, Vec<u8>)>,
}

impl Incoming {
    /// Posts receives as one group. `number` gives out numbers that no receive from this peer has.
    pub fn receive(
        &mut self,
        group: u64,
        landings: &[Landing],
        mut number: impl FnMut() -> u32,
    ) -> Result<Posted, ChannelError> {
        if landings.len() > GROUP_MAX {
            return Err(ChannelError::TooMany {
                what: "receives in a group",
                max: GROUP_MAX,
            });
        }
        if self.awaited.len() + landings.len() > RECEIVES_MAX {
            return Err(ChannelError::TooMany {
                what: "receives",
                max: RECEIVES_MAX,
            });
        }
        let lens = vec![0; landings.len()].into();
        let left = landings.len();
        self.groups.insert(group, Group { left, lens });
        let mut posted = Posted::default();
        for (nth, landing) in landings.iter().enumerate() {
            let key = (landing.tag, self.receives.next(landing.tag)?);
            let number = number();
            posted.receives.push(Receive {
                tag: landing.tag,
                len: landing.len,
                region: landing.region,
                offset: landing.offset,
                number,
            });
            if let Some(bytes) = self.early.remove(&key) {
                let len = bytes.len() as u64;
                self.early_bytes -= len;
                if len > landing.len {
                    return Err(ChannelError::TooLong {
                        sent: len,
                        room: landing.len,
                    });
                }
                posted.here.push((nth, bytes));
                self.over.push(number);
                self.settle(group, nth, len);
                continue;
            }
            self.open.insert(key, number);
            self.awaited.insert(
                number,
                Awaited {
                    group,
                    nth,
                    key,
                    room: landing.len,
                    len: None,
                    arrived: false,
                },
            );
        }
        if landings.is_empty() {
            self.finish(group);
        }
        Ok(posted)
    }

    /// A short message has come. Where it meets a receive that is over with it, once its bytes are copied.
    pub fn on_eager(&mut self, tag: i32, nth: u64, len: u64) -> Result<Meets, ChannelError> {
        if nth >= self.receives.count(tag) {
            let known = self.early.contains_key(&(tag, nth));
            if known || self.early.len() >= EARLY_MAX || self.early_bytes + len > EARLY_BYTES_MAX {
                return Err(ChannelError::Misbehaved("it sends more ahead than there is room for"));
            }
            return Ok(Meets::Later);
        }
        let number = self.open.get(&(tag, nth)).copied();
        let met = number.and_then(|number| self.awaited.get(&number));
        let Some(Awaited { group, nth, room, .. }) = met.copied() else {
            return Err(ChannelError::Misbehaved("it sends what has come before"));
        };
        if len > room {
            return Err(ChannelError::TooLong { sent: len, room });
        }
        Ok(Meets::Now { group, nth })
    }

    /// The bytes of a message that has met its receive are in place.
    pub fn on_copied(&mut self, tag: i32, nth: u64, len: u64) {
        if let Some(number) = self.open.get(&(tag, nth)) {
            self.end(*number, len);
        }
    }

    /// Keeps a message that came before its receive.
    pub fn keep(&mut self, tag: i32, nth: u64, bytes: Vec<u8>) {
        self.early_bytes += bytes.len() as u64;
        self.early.insert((tag, nth), bytes);
    }

    /// A long message is on its way, so long.
    pub fn on_coming(&mut self, number: u32, len: u64) -> Result<(), ChannelError> {
        let awaited = self.fits(number, len)?;
        awaited.len = Some(len);
        if awaited.arrived {
            self.end(number, len);
        }
        Ok(())
    }

    /// A write has arrived. Others than those that are awaited may be of an earlier attempt.
    pub fn on_arrived(&mut self, number: u32) {
        let Some(awaited) = self.awaited.get_mut(&number) else {
            return;
        };
        awaited.arrived = true;
        if let Some(len) = awaited.len {
            self.end(number, len);
        }
    }

    /// A long message is in place.
    pub fn on_landed(&mut self, number: u32, len: u64) -> Result<(), ChannelError> {
        self.fits(number, len)?;
        self.end(number, len);
        Ok(())
    }

    /// The sender does not know whether a message has come. What is not all here goes again, under another number. Says the answer.
    pub fn on_lost(&mut self, number: u32, new: impl FnOnce() -> u32) -> Message {
        let anew = self.awaited.remove(&number).map(|awaited| {
            let new = new();
            self.over.push(number);
            self.open.insert(awaited.key, new);
            let fresh = Awaited {
                len: None,
                arrived: false,
                ..awaited
            };
            self.awaited.insert(new, fresh);
            new
        });
        Message::Answer { number, anew }
    }

    /// A number that is awaited no more.
    pub fn next_over(&mut self) -> Option<u32> {
        self.over.pop()
    }

    /// A group that is over.
    pub fn next_complete(&mut self) -> Option<Complete> {
        self.complete.pop()
    }

    /// Receives that nothing has come for.
    pub fn under_way(&self) -> usize {
        self.awaited.len()
    }

    fn fits(&mut self, number: u32, len: u64) -> Result<&mut Awaited, ChannelError> {
        let awaited = self.awaited.get_mut(&number);
        let awaited = awaited.ok_or(ChannelError::Misbehaved("it writes where nobody waits"))?;
        if len > awaited.room {
            return Err(ChannelError::Misbehaved("it writes more than there is room for"));
        }
        Ok(awaited)
    }

    fn end(&mut self, number: u32, len: u64) {
        if let Some(awaited) = self.awaited.remove(&number) {
            self.open.remove(&awaited.key);
            self.over.push(number);
            self.settle(awaited.group, awaited.nth, len);
        }
    }

    fn settle(&mut self, group: u64, nth: usize, len: u64) {
        let Some(state) = self.groups.get_mut(&group) else {
            return;
        };
        state.lens[nth] = len;
        state.left -= 1;
        if state.left == 0 {
            self.finish(group);
        }
    }

    fn finish(&mut self, group: u64) {
        if let Some(Group { lens, .. }) = self.groups.remove(&group) {
            self.complete.push(Complete { group, lens });
        }
    }
}
