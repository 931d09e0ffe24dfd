//! Which calls a rank has made last, so that ranks which have parted can be told apart, and where they did.
//!
//! The signature of a call stands for that call and all before it. Two ranks whose signatures of one number are equal have made the same calls
//! up to there, so that whichever message passes between ranks that have parted, its head gives them away.

use std::collections::VecDeque;

use super::record::CallRecord;

/// The signatures of a rank's last calls, for the others to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Recent {
    /// How many calls it has begun.
    pub begun: u64,
    /// By number, modulo how many there are. Zero: not known.
    pub signatures: [u64; Recent::CALLS],
}

impl Recent {
    pub const CALLS: usize = 32;
    pub const NONE: Recent = Recent {
        begun: 0,
        signatures: [0; Recent::CALLS],
    };

    /// Where the signature of a call of this number is kept.
    pub fn place(number: u64) -> usize {
        (number % Recent::CALLS as u64) as usize
    }

    /// Messages between two ranks are no calls of the group, and leave it as it is.
    pub fn begin(&mut self, call: &CallRecord) {
        if call.number != CallRecord::PAIRWISE {
            self.set(call.number, call.signature);
        }
    }

    fn set(&mut self, number: u64, signature: u64) {
        self.begun = number + 1;
        self.signatures[Recent::place(number)] = signature;
    }

    /// The signature of the call of this number, unless that is long ago or still to come.
    pub fn signature(&self, number: u64) -> Option<u64> {
        let ago = self.begun.checked_sub(number)?;
        let known = (1..=Recent::CALLS as u64).contains(&ago);
        Some(self.signatures[Recent::place(number)]).filter(|signature| known && *signature != 0)
    }
}

/// What a rank knows of its own calls.
#[derive(Debug)]
pub struct History {
    recent: Recent,
    /// The signature of the last call: that of all calls so far.
    signature: u64,
    /// From which number on calls had which words, the latest last.
    words: VecDeque<(u64, [u8; CallRecord::WORDS])>,
}

impl Default for History {
    fn default() -> History {
        History {
            recent: Recent::NONE,
            signature: 0,
            words: VecDeque::new(),
        }
    }
}

impl History {
    /// One more call, described without regard to those before. Returns its signature. `renamed`: its words are not those of the last one.
    pub(super) fn begin(&mut self, number: u64, call: &CallRecord, renamed: bool) -> u64 {
        let mixed = (self.signature.rotate_left(23) ^ call.signature).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Zero and one stand for no call and for messages between two ranks.
        self.signature = (mixed ^ mixed >> 29).max(2);
        self.recent.set(number, self.signature);
        if renamed {
            if self.words.len() == Recent::CALLS {
                self.words.pop_front();
            }
            self.words.push_back((number, call.words));
        }
        self.signature
    }

    pub fn recent(&self) -> &Recent {
        &self.recent
    }

    /// The call of this number, unless that is long ago.
    pub fn call(&self, number: u64) -> Option<CallRecord> {
        let signature = self.recent.signature(number)?;
        let (_, words) = self.words.iter().rev().find(|(from, _)| *from <= number)?;
        Some(CallRecord {
            number,
            signature,
            words: *words,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(signature: u64, words: &str) -> CallRecord {
        CallRecord::new(0, signature, words)
    }

    #[test]
    fn ranks_that_have_parted_never_agree_again() {
        let (mut one, mut other) = (History::default(), History::default());
        let calls = [
            record(7, "barrier"),
            record(8, "broadcast from 0"),
            record(7, "barrier"),
        ];
        for (number, call) in calls.iter().enumerate() {
            one.begin(number as u64, call, true);
            let odd = record(9, "broadcast from 1");
            other.begin(number as u64, if number == 1 { &odd } else { call }, true);
        }
        let same = |number| one.recent.signature(number) == other.recent.signature(number);
        assert!(same(0) && !same(1) && !same(2));
        assert_eq!(
            other.call(1).map(|call| call.words),
            Some(record(9, "broadcast from 1").words)
        );
        // The order counts as well.
        let (mut ab, mut ba) = (History::default(), History::default());
        let (a, b) = (ab.begin(0, &calls[0], true), ba.begin(0, &calls[1], true));
        assert_ne!(a, b);
        assert_ne!(ab.begin(1, &calls[1], true), ba.begin(1, &calls[0], true));
    }

    #[test]
    fn what_is_long_ago_or_to_come_is_not_known() {
        let mut history = History::default();
        for number in 0..40 {
            history.begin(number, &record(7, "barrier"), number == 0);
        }
        let known = |number| history.call(number).is_some();
        assert!(!known(7) && known(8) && known(39) && !known(40));
        let mut recent = *history.recent();
        recent.begin(&CallRecord::new(CallRecord::PAIRWISE, 1, "send to rank 1"));
        assert_eq!(&recent, history.recent());
    }
}
