//! Numbers, span lists, keys and refusals as bytes: the one codec under every message and frame.
//!
//! Integers are LEB128 varints, so that a paged span list costs a few bytes a block. A [`Reader`] trusts nothing: every length is
//! checked against what is there, and every span list against a limit, before anything is allocated.

use thiserror::Error;
use weft_plan::{Run, Spans};

use crate::atomic::AtomicAct;
use crate::error::Refusal;
use crate::region::{Access, Epoch, RegionKey};

/// Bytes that are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    #[error("the message ends too early")]
    Truncated,
    #[error("a number does not fit")]
    Overflow,
    #[error("a list is longer than allowed")]
    TooLong,
    #[error("a value is not one of those allowed")]
    Invalid,
    #[error("bytes are left over at the end")]
    Trailing,
}

/// Appends values to a buffer.
#[derive(Debug, Default)]
pub struct Writer {
    pub buf: Vec<u8>,
}

impl Writer {
    pub fn new() -> Writer {
        Writer::default()
    }
    pub fn u8(&mut self, v: u8) -> &mut Writer {
        self.buf.push(v);
        self
    }
    pub fn u64_fixed(&mut self, v: u64) -> &mut Writer {
        self.buf.extend_from_slice(&v.to_le_bytes());
        self
    }
    pub fn u128_fixed(&mut self, v: u128) -> &mut Writer {
        self.buf.extend_from_slice(&v.to_le_bytes());
        self
    }
    pub fn varint(&mut self, mut v: u64) -> &mut Writer {
        while v >= 0x80 {
            self.buf.push(v as u8 | 0x80);
            v >>= 7;
        }
        self.buf.push(v as u8);
        self
    }
    pub fn bytes(&mut self, v: &[u8]) -> &mut Writer {
        self.varint(v.len() as u64);
        self.buf.extend_from_slice(v);
        self
    }
    pub fn str(&mut self, v: &str) -> &mut Writer {
        self.bytes(v.as_bytes())
    }
    pub fn key(&mut self, key: &RegionKey) -> &mut Writer {
        self.u64_fixed(key.epoch.0)
            .varint(u64::from(key.slot))
            .u128_fixed(key.secret)
    }
    pub fn access(&mut self, access: Access) -> &mut Writer {
        self.u8(u8::from(access.read) | u8::from(access.write) << 1)
    }
    pub fn refusal(&mut self, refusal: Refusal) -> &mut Writer {
        self.u8(refusal.code())
    }
    pub fn act(&mut self, act: AtomicAct) -> &mut Writer {
        match act {
            AtomicAct::FetchAdd(value) => self.u8(0).u64_fixed(value),
            AtomicAct::CompareSwap { expected, new } => self.u8(1).u64_fixed(expected).u64_fixed(new),
        }
    }
    /// What a word held, or why it was left alone.
    pub fn found(&mut self, found: Result<u64, Refusal>) -> &mut Writer {
        match found {
            Ok(before) => self.u8(1).u64_fixed(before),
            Err(refusal) => self.u8(0).refusal(refusal),
        }
    }

    /// A span list: the number of runs, then each run with what repeats from the run before left out.
    pub fn spans(&mut self, spans: &Spans) -> &mut Writer {
        self.varint(spans.runs().len() as u64);
        let mut len_before = 0;
        for run in spans.runs() {
            let same_len = run.len == len_before;
            let single = run.count == 1;
            // Two flags ride in the low bits of the offset where they fit, else the offset follows whole.
            let flags = u8::from(same_len) | u8::from(single) << 1;
            match run.offset.checked_mul(8) {
                Some(shifted) => self.varint(shifted | u64::from(flags)),
                None => self.varint(u64::from(flags) | 4).varint(run.offset),
            };
            if !same_len {
                self.varint(run.len);
            }
            if !single {
                self.varint(run.stride).varint(run.count);
            }
            len_before = run.len;
        }
        self
    }
}

/// Takes values from bytes that somebody else wrote.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.rest.split_at_checked(n).ok_or(DecodeError::Truncated)?;
        self.rest = tail;
        Ok(head)
    }
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.take(1)?[0])
    }
    pub fn u64_fixed(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(
            self.take(8)?.try_into().expect("eight bytes were taken"),
        ))
    }
    pub fn u128_fixed(&mut self) -> Result<u128, DecodeError> {
        Ok(u128::from_le_bytes(
            self.take(16)?.try_into().expect("sixteen bytes were taken"),
        ))
    }
    pub fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut v = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(DecodeError::Overflow);
            }
            v |= bits << shift;
            if byte < 0x80 {
                return Ok(v);
            }
        }
        Err(DecodeError::Overflow)
    }
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        u32::try_from(self.varint()?).map_err(|_| DecodeError::Overflow)
    }
    pub fn bytes(&mut self, max: usize) -> Result<&'a [u8], DecodeError> {
        let len = usize::try_from(self.varint()?).map_err(|_| DecodeError::Overflow)?;
        if len > max {
            return Err(DecodeError::TooLong);
        }
        self.take(len)
    }
    pub fn str(&mut self, max: usize) -> Result<&'a str, DecodeError> {
        std::str::from_utf8(self.bytes(max)?).map_err(|_| DecodeError::Invalid)
    }
    pub fn key(&mut self) -> Result<RegionKey, DecodeError> {
        Ok(RegionKey {
            epoch: Epoch(self.u64_fixed()?),
            slot: self.u32()?,
            secret: self.u128_fixed()?,
        })
    }
    pub fn access(&mut self) -> Result<Access, DecodeError> {
        match self.u8()? {
            bits @ 0..=3 => Ok(Access {
                read: bits & 1 != 0,
                write: bits & 2 != 0,
            }),
            _ => Err(DecodeError::Invalid),
        }
    }
    pub fn refusal(&mut self) -> Result<Refusal, DecodeError> {
        self.u8().map(Refusal::from_code)
    }
    pub fn act(&mut self) -> Result<AtomicAct, DecodeError> {
        match self.u8()? {
            0 => Ok(AtomicAct::FetchAdd(self.u64_fixed()?)),
            1 => Ok(AtomicAct::CompareSwap {
                expected: self.u64_fixed()?,
                new: self.u64_fixed()?,
            }),
            _ => Err(DecodeError::Invalid),
        }
    }
    pub fn found(&mut self) -> Result<Result<u64, Refusal>, DecodeError> {
        match self.u8()? {
            0 => Ok(Err(self.refusal()?)),
            1 => Ok(Ok(self.u64_fixed()?)),
            _ => Err(DecodeError::Invalid),
        }
    }
    pub fn spans(&mut self, max_runs: usize) -> Result<Spans, DecodeError> {
        let runs = usize::try_from(self.varint()?).map_err(|_| DecodeError::Overflow)?;
        if runs > max_runs {
            return Err(DecodeError::TooLong);
        }
        // Every run takes a byte at least, so this also bounds what a short message can make us allocate.
        if runs > self.remaining() {
            return Err(DecodeError::Truncated);
        }
        let mut spans = Spans::new();
        let (mut len_before, mut bytes) = (0u64, 0u64);
        for _ in 0..runs {
            let head = self.varint()?;
            let offset = if head & 4 != 0 { self.varint()? } else { head >> 3 };
            let len = if head & 1 != 0 { len_before } else { self.varint()? };
            let (stride, count) = if head & 2 != 0 {
                (len, 1)
            } else {
                (self.varint()?, self.varint()?)
            };
            let run = Run {
                offset,
                len,
                stride,
                count,
            };
            if len == 0 || count == 0 {
                return Err(DecodeError::Invalid);
            }
            run.checked_end().ok_or(DecodeError::Overflow)?;
            bytes = len
                .checked_mul(count)
                .and_then(|b| b.checked_add(bytes))
                .ok_or(DecodeError::Overflow)?;
            spans.push_run(run);
            len_before = len;
        }
        Ok(spans)
    }
    /// Nothing may follow.
    pub fn end(self) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Trailing)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn span_lists_survive_the_wire(runs in prop::collection::vec((any::<u32>(), 1u64..1 << 40, 0u64..1 << 20, 1u64..1000, any::<bool>()), 0..50)) {
            let mut spans = Spans::new();
            for (offset, len, gap, count, far) in runs {
                let offset = if far { u64::from(offset) << 31 } else { u64::from(offset) };
                spans.push_run(Run { offset, len, stride: if count == 1 { len } else { len + gap }, count });
            }
            let mut w = Writer::new();
            w.spans(&spans);
            let mut r = Reader::new(&w.buf);
            prop_assert_eq!(r.spans(50).unwrap(), spans);
            r.end().unwrap();
        }

        #[test]
        fn keys_survive_the_wire(epoch: u64, slot: u32, secret: u128) {
            let key = RegionKey { epoch: Epoch(epoch), slot, secret };
            let mut w = Writer::new();
            w.key(&key);
            let mut r = Reader::new(&w.buf);
            prop_assert_eq!(r.key(), Ok(key));
            r.end().unwrap();
        }

        #[test]
        fn garbage_is_refused_not_believed(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut r = Reader::new(&bytes);
            if let Ok(spans) = r.spans(64) {
                prop_assert!(spans.runs().len() <= 64);
            }
        }
    }

    #[test]
    fn rights_survive_the_wire_and_others_are_refused() {
        for access in [Access::NONE, Access::READ, Access::WRITE, Access::READ_WRITE] {
            let mut w = Writer::new();
            w.access(access);
            assert_eq!(Reader::new(&w.buf).access(), Ok(access));
        }
        assert_eq!(Reader::new(&[4]).access(), Err(DecodeError::Invalid));
    }

    #[test]
    fn paged_spans_cost_few_bytes() {
        let spans = Spans::paged(0, 4096, [7, 3, 11, 900, 2, 17]);
        let mut w = Writer::new();
        w.spans(&spans);
        assert!(w.buf.len() <= 6 * 5 + 3, "{} bytes", w.buf.len());
    }
}
