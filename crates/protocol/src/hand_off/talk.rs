//! Words between two stations, in their order.
//!
//! A session outlives the stations at its ends: one may be closed and another opened, with another cache, and what was said in between nobody has
//! heard. So every station has lives, a word says in which life of its sender it is said and to which life of its hearer, and words are counted by
//! these two. Whoever hears a life that it did not know begins anew with it, and greets who does not know its own.
//!
//! ```text
//! word  from  to  number  words  code        (a greeting has no words, and its number does not count)
//! ```
//!
//! Parcels carry no code, so the words do.

use std::collections::VecDeque;

use crate::memory::Digest;
use crate::wire::Writer;

/// What waits for a peer to confirm other words. One that confirms nothing is not talked to any more.
const UNSAID_BYTES_MAX: usize = 8 << 20;
/// What a word costs beside its bytes.
const WORD_BYTES: usize = 64;
/// So many words in a row that make no sense are answered: who speaks another language would answer the answers.
const GARBLED_MAX: u8 = 8;

/// A station, and how often it has begun anew with one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life(u64);

impl Life {
    const TURNS: u64 = 0xffff;

    /// `secret`: of something that no other station has.
    pub(crate) fn of(secret: u128) -> Life {
        // Never nobody's.
        Life(code(&secret.to_le_bytes()) & !Life::TURNS | 1)
    }
    /// The same in all its turns, and part of the names of what it publishes: whoever knows another station finds nothing of this one.
    pub(crate) fn station(self) -> u64 {
        self.0 >> 16
    }
    fn next(self) -> Life {
        Life(self.0 & !Life::TURNS | ((self.0 & Life::TURNS) % Life::TURNS + 1))
    }
}

/// What was said, if it came whole.
#[derive(Debug)]
pub(crate) struct Word<'a> {
    pub(crate) from: Life,
    to: u64,
    number: u64,
    words: &'a [u8],
}

impl Word<'_> {
    pub(crate) fn open(sealed: &[u8]) -> Option<Word<'_>> {
        let (said, sum) = sealed.split_last_chunk::<8>()?;
        let (from, rest) = said.split_first_chunk::<8>()?;
        let (to, rest) = rest.split_first_chunk::<8>()?;
        let (number, words) = rest.split_first_chunk::<8>()?;
        let word = Word {
            from: Life(u64::from_le_bytes(*from)),
            to: u64::from_le_bytes(*to),
            number: u64::from_le_bytes(*number),
            words,
        };
        (u64::from_le_bytes(*sum) == code(said) && word.from.0 != 0).then_some(word)
    }
}

/// What a word is to whoever hears it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard<'a> {
    Words(&'a [u8]),
    /// It is a greeting, or was said to a life that is over.
    Nothing,
    /// Others before it are missing.
    Missing,
}

/// All that is said between this station and one peer.
#[derive(Debug)]
pub(crate) struct Talk {
    pub(crate) name: String,
    own: Life,
    pub(crate) their: Option<Life>,
    said: u64,
    heard: u64,
    garbled: u8,
    unsaid: VecDeque<Vec<u8>>,
    unsaid_bytes: usize,
}

impl Talk {
    /// With nobody yet, who is greeted.
    pub(crate) fn new(name: &str, own: Life) -> Talk {
        let mut talk = Talk {
            name: name.to_owned(),
            own,
            their: None,
            said: 0,
            heard: 0,
            garbled: 0,
            unsaid: VecDeque::new(),
            unsaid_bytes: 0,
        };
        talk.greet();
        talk
    }

    fn greet(&mut self) {
        self.seal(u64::MAX, &[]);
    }

    fn seal(&mut self, number: u64, words: &[u8]) {
        let mut w = Writer::new();
        w.u64_fixed(self.own.0)
            .u64_fixed(self.their.map_or(0, |life| life.0))
            .u64_fixed(number);
        w.buf.extend_from_slice(words);
        let code = code(&w.buf);
        w.u64_fixed(code);
        self.unsaid_bytes += w.buf.len() + WORD_BYTES;
        self.unsaid.push_back(w.buf);
    }

    /// Says words, in their turn, to whoever is there; nothing where that is not known. `false`: too much is unsaid already.
    pub(crate) fn say(&mut self, words: &[u8]) -> bool {
        if self.their.is_none() {
            // It is told what it has to know when it has greeted.
            return true;
        }
        if self.unsaid_bytes + words.len() > UNSAID_BYTES_MAX {
            return false;
        }
        self.seal(self.said, words);
        self.said += 1;
        true
    }

    pub(crate) fn next_unsaid(&self) -> Option<&[u8]> {
        self.unsaid.front().map(Vec::as_slice)
    }
    pub(crate) fn on_said(&mut self) {
        if let Some(words) = self.unsaid.pop_front() {
            self.unsaid_bytes -= words.len() + WORD_BYTES;
        }
    }
    pub(crate) fn forget_unsaid(&mut self) {
        self.unsaid.clear();
        self.unsaid_bytes = 0;
    }

    /// Whoever says this has not been heard before: all before it is forgotten, and it is greeted if it does not know who is here.
    pub(crate) fn meet(&mut self, word: &Word) {
        self.forget_unsaid();
        (self.their, self.said, self.heard) = (Some(word.from), 0, 0);
        if word.to != self.own.0 {
            self.greet();
        }
    }

    /// Hears a word of whoever is known to be there.
    pub(crate) fn hear<'a>(&mut self, word: &Word<'a>) -> Heard<'a> {
        if word.to != self.own.0 {
            return Heard::Nothing;
        }
        if word.words.is_empty() {
            self.garbled = 0;
            return Heard::Nothing;
        }
        if word.number != self.heard {
            return Heard::Missing;
        }
        self.heard += 1;
        self.garbled = 0;
        Heard::Words(word.words)
    }

    /// Words are missing, or came changed, or are not heard at the far end: begins anew, and says so. `false`: it has done that often enough.
    pub(crate) fn begin_anew(&mut self) -> bool {
        if self.garbled >= GARBLED_MAX {
            return false;
        }
        self.garbled += 1;
        self.forget_unsaid();
        (self.own, self.their) = (self.own.next(), None);
        (self.said, self.heard) = (0, 0);
        self.greet();
        true
    }
}

fn code(words: &[u8]) -> u64 {
    let mut digest = Digest::default();
    digest.update(words);
    digest.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hear<'a>(hearer: &mut Talk, sealed: &'a [u8]) -> Heard<'a> {
        let word = Word::open(sealed).unwrap();
        if hearer.their != Some(word.from) {
            hearer.meet(&word);
        }
        hearer.hear(&word)
    }

    fn next(talk: &mut Talk) -> Vec<u8> {
        let words = talk.next_unsaid().unwrap().to_vec();
        talk.on_said();
        words
    }

    /// Two that have greeted each other.
    fn pair() -> (Talk, Talk) {
        let (mut one, mut two) = (Talk::new("one", Life::of(1)), Talk::new("two", Life::of(2)));
        assert_eq!(hear(&mut two, &next(&mut one)), Heard::Nothing);
        // Its first greeting was to nobody.
        assert_eq!(hear(&mut one, &next(&mut two)), Heard::Nothing);
        assert_eq!((one.their, two.their), (Some(two.own), Some(one.own)));
        one.forget_unsaid();
        (one, two)
    }

    #[test]
    fn words_to_a_life_that_is_over_are_not_heard_and_those_to_the_next_are() {
        let (mut one, mut two) = pair();
        assert!(one.say(b"first"));
        assert_eq!(hear(&mut two, &next(&mut one)), Heard::Words(b"first"));
        assert!(one.say(b"to nobody") && one.say(b"late"));
        let (_, late) = (next(&mut one), next(&mut one));
        let mut three = Talk::new("two", Life::of(3));
        assert_eq!(hear(&mut three, &late), Heard::Nothing);
        assert_eq!(hear(&mut one, &next(&mut three)), Heard::Nothing);
        assert!(one.say(b"to the new one"));
        let said: Vec<Vec<u8>> = std::iter::from_fn(|| one.next_unsaid().is_some().then(|| next(&mut one))).collect();
        let heard: Vec<_> = said.iter().map(|words| hear(&mut three, words)).collect();
        assert_eq!(heard, [Heard::Words(b"to the new one")]);
    }

    #[test]
    fn what_is_missing_is_found_out_and_what_is_changed_is_not_opened() {
        let (mut one, mut two) = pair();
        assert!(one.say(b"lost") && one.say(b"second"));
        next(&mut one);
        let mut second = next(&mut one);
        assert_eq!(hear(&mut two, &second), Heard::Missing);
        second[30] ^= 1;
        assert!(Word::open(&second).is_none());
        for _ in 0..GARBLED_MAX {
            assert!(two.begin_anew());
        }
        assert!(!two.begin_anew());
        // They find each other again.
        assert_eq!(hear(&mut one, &next(&mut two)), Heard::Nothing);
        assert_eq!(hear(&mut two, &next(&mut one)), Heard::Nothing);
        assert!(one.say(b"again") && two.begin_anew());
    }

    #[test]
    fn what_is_unsaid_is_bounded_in_bytes() {
        let (mut one, _) = pair();
        let words = vec![7; 48 << 10];
        let said = (0..1 << 16).take_while(|_| one.say(&words)).count();
        assert!((100..200).contains(&said), "{said}");
        let (mut one, _) = pair();
        let said = (0..1 << 20).take_while(|_| one.say(b"?")).count();
        let bytes: usize = one.unsaid.iter().map(Vec::len).sum();
        assert!(
            said < 1 << 17 && bytes < UNSAID_BYTES_MAX,
            "{said} words of {bytes} bytes"
        );
    }
}
