//! Which ops of an actor go together, and which of them are over.

use std::collections::VecDeque;

/// Ops of an actor that nothing tells apart.
#[derive(Clone, Debug)]
pub(super) enum Batch {
    One(u32),
    Many(Vec<u32>),
    /// So many of those that go together.
    Crowd {
        leader: u32,
        count: u32,
    },
}

impl Batch {
    pub(super) const NONE: Batch = Batch::Many(Vec::new());

    pub(super) fn len(&self) -> u32 {
        match self {
            Batch::Crowd { count, .. } => *count,
            _ => self.singles().len() as u32,
        }
    }
    /// Those that go for themselves.
    pub(super) fn singles(&self) -> &[u32] {
        match self {
            Batch::One(op) => std::slice::from_ref(op),
            Batch::Many(ops) => ops,
            Batch::Crowd { .. } => &[],
        }
    }
    pub(super) fn first(&self) -> Option<u32> {
        match self {
            Batch::Crowd { leader, .. } => Some(*leader),
            _ => self.singles().first().copied(),
        }
    }
    pub(super) fn push(&mut self, op: u32) {
        match self {
            Batch::One(first) => *self = Batch::Many(vec![*first, op]),
            Batch::Many(ops) => ops.push(op),
            Batch::Crowd { count, .. } => *count += 1,
        }
    }
    /// The first so many of them; the others stay.
    pub(super) fn split(&mut self, count: u32) -> Batch {
        match self {
            Batch::Many(ops) if (count as usize) < ops.len() => {
                let rest = ops.split_off(count as usize);
                Batch::Many(std::mem::replace(ops, rest))
            }
            Batch::Crowd { leader, count: all } if count < *all => {
                *all -= count;
                Batch::Crowd { leader: *leader, count }
            }
            whole => std::mem::replace(whole, Batch::NONE),
        }
    }
}

/// Some of an actor's ops, nearly all of those before the first that is missing.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// A bit for each op, from 64 × `base` on; all before are there.
    words: VecDeque<u64>,
    base: u32,
}

impl Done {
    pub(super) fn insert(&mut self, op: u32) {
        let Some(word) = (op / 64).checked_sub(self.base) else {
            return;
        };
        while self.words.len() <= word as usize {
            self.words.push_back(0);
        }
        self.words[word as usize] |= 1 << (op % 64);
        while self.words.front() == Some(&u64::MAX) {
            self.words.pop_front();
            self.base += 1;
        }
    }

    pub(super) fn contains(&self, op: u32) -> bool {
        match (op / 64).checked_sub(self.base) {
            Some(word) => self
                .words
                .get(word as usize)
                .is_some_and(|bits| bits >> (op % 64) & 1 == 1),
            None => true,
        }
    }
}
