//! Which bytes of a region take part in a transfer.
//!
//! A paged KV cache is `[layers][K/V][blocks][…]`: a request touches thousands of blocks, many of them at a regular stride.
//! [`Spans`] keeps a regular stride as one [`Run`] all the way to the wire, and everything else as one run a span.
//!
//! ```
//! use weft_plan::{Span, Spans};
//! let mut spans = Spans::new();
//! for block in [0u64, 2, 4, 6, 7] {
//!     spans.push(Span { offset: block * 4096, len: 4096 });
//! }
//! assert_eq!(spans.bytes(), 5 * 4096);
//! assert_eq!(spans.runs().len(), 2); // 0, 2 and 4 at a stride, then 6 and 7 as one piece
//! ```

use std::ops::Range;

/// `len` bytes from `offset` on, within a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    pub offset: u64,
    pub len: u64,
}

/// `count` pieces of `len` bytes each, the first at `offset`, their starts `stride` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    pub offset: u64,
    pub len: u64,
    pub stride: u64,
    pub count: u64,
}

impl Run {
    pub const fn bytes(&self) -> u64 {
        self.len * self.count
    }
    /// One past the last byte the run touches.
    pub const fn end(&self) -> u64 {
        if self.count == 0 {
            self.offset
        } else {
            self.offset + (self.count - 1) * self.stride + self.len
        }
    }
    /// The end as computed from numbers that nobody has checked yet; `None` where it does not fit.
    pub fn checked_end(&self) -> Option<u64> {
        self.len.checked_mul(self.count)?;
        if self.count == 0 {
            return Some(self.offset);
        }
        (self.count - 1)
            .checked_mul(self.stride)?
            .checked_add(self.offset)?
            .checked_add(self.len)
    }
    /// Where the next piece must begin for the run to go on; a run of one piece takes any stride that does not overlap.
    fn next_offset_after(&self, wanted: u64) -> Option<u64> {
        // Strides that overlap themselves are legal for reading but would be a race for writing: keep them apart.
        if self.count == 1 {
            let stride = wanted.checked_sub(self.offset)?;
            return (stride > self.len).then_some(wanted);
        }
        if self.stride < self.len {
            return None;
        }
        self.stride.checked_mul(self.count)?.checked_add(self.offset)
    }
}

/// An ordered list of spans, stored as runs. The order is that of the bytes in the transfer.
#[derive(Clone, Debug, Default)]
pub struct Spans {
    runs: Runs,
    bytes: u64,
}

/// The runs of a list. One alone is kept in place: most small transfers have no more, and lists on the heap would be most of what they allocate.
#[derive(Clone, Debug)]
enum Runs {
    One(Run),
    Listed {
        runs: Vec<Run>,
        /// `starts[i]` is how many bytes come before `runs[i]`, so that a position is found by binary search.
        starts: Vec<u64>,
    },
}

impl Default for Runs {
    fn default() -> Runs {
        let (runs, starts) = (Vec::new(), Vec::new());
        Runs::Listed { runs, starts }
    }
}

impl Runs {
    fn all(&self) -> &[Run] {
        match self {
            Runs::One(run) => std::slice::from_ref(run),
            Runs::Listed { runs, .. } => runs,
        }
    }
    fn last_mut(&mut self) -> Option<&mut Run> {
        match self {
            Runs::One(run) => Some(run),
            Runs::Listed { runs, .. } => runs.last_mut(),
        }
    }
    fn start(&self, run: usize) -> Option<u64> {
        match self {
            Runs::One(_) => (run == 0).then_some(0),
            Runs::Listed { starts, .. } => starts.get(run).copied(),
        }
    }
    fn push(&mut self, run: Run, start: u64) {
        match self {
            Runs::One(first) => {
                *self = Runs::Listed {
                    runs: vec![*first, run],
                    starts: vec![0, start],
                }
            }
            Runs::Listed { runs, .. } if runs.is_empty() => *self = Runs::One(run),
            Runs::Listed { runs, starts } => {
                runs.push(run);
                starts.push(start);
            }
        }
    }
    fn pop(&mut self) {
        match self {
            Runs::One(_) => *self = Runs::default(),
            Runs::Listed { runs, starts } => {
                runs.pop();
                starts.pop();
            }
        }
    }
}

/// Lists are equal that have the same runs, however those are kept.
impl PartialEq for Spans {
    fn eq(&self, other: &Spans) -> bool {
        self.runs() == other.runs()
    }
}

impl Eq for Spans {}

impl Spans {
    pub fn new() -> Spans {
        Spans::default()
    }

    pub fn contiguous(offset: u64, len: u64) -> Spans {
        let mut spans = Spans::new();
        spans.push(Span { offset, len });
        spans
    }

    pub fn strided(run: Run) -> Spans {
        let mut spans = Spans::new();
        spans.push_run(run);
        spans
    }

    /// Blocks of one size, by their index: the shape of a paged cache.
    ///
    /// # Panics
    /// Where a block ends past 2^64. [`KvLayout`](crate::KvLayout) checks indices that come from outside.
    pub fn paged(base: u64, block: u64, indices: impl IntoIterator<Item = u64>) -> Spans {
        let mut spans = Spans::new();
        for index in indices {
            let offset = index.checked_mul(block).and_then(|within| within.checked_add(base));
            spans.push(Span {
                offset: offset.expect("a block that begins past 2^64"),
                len: block,
            });
        }
        spans
    }

    /// Appends a span. It becomes part of the last piece where it touches it, or of the last run where it keeps its stride.
    ///
    /// # Panics
    /// Where the span ends past 2^64, or the list would hold more than 2^64 bytes.
    pub fn push(&mut self, span: Span) {
        if span.len == 0 {
            return;
        }
        let bytes = self
            .bytes
            .checked_add(span.len)
            .expect("a span list of more than 2^64 bytes");
        assert!(
            span.offset.checked_add(span.len).is_some(),
            "a span that ends past 2^64"
        );
        match self.runs.last_mut() {
            Some(last) if last.end() == span.offset => {
                // Touching pieces are worth more than a stride: the last piece leaves its run to grow.
                let piece = Span {
                    offset: span.offset - last.len,
                    len: last.len,
                };
                if last.count == 1 {
                    self.runs.pop();
                } else {
                    last.count -= 1;
                    if last.count == 1 {
                        last.stride = last.len;
                    }
                }
                self.append(piece.offset, piece.len + span.len, self.bytes - piece.len);
            }
            _ => self.append(span.offset, span.len, self.bytes),
        }
        self.bytes = bytes;
    }

    /// Appends one piece that touches no other, as the continuation of the last run or as a run of its own.
    fn append(&mut self, offset: u64, len: u64, start: u64) {
        if let Some(last) = self.runs.last_mut()
            && last.len == len
            && last.next_offset_after(offset) == Some(offset)
        {
            last.stride = if last.count == 1 {
                offset - last.offset
            } else {
                last.stride
            };
            last.count += 1;
            return;
        }
        let run = Run {
            offset,
            len,
            stride: len,
            count: 1,
        };
        self.runs.push(run, start);
    }

    /// Appends a run. One whose pieces touch becomes one piece; otherwise it stays as it is.
    ///
    /// # Panics
    /// Where the run ends past 2^64, or the list would hold more than 2^64 bytes; use [`Run::checked_end`] first on numbers
    /// from outside.
    pub fn push_run(&mut self, run: Run) {
        assert!(run.checked_end().is_some(), "a run that ends past 2^64");
        if run.count == 0 || run.len == 0 {
            return;
        }
        let bytes = self
            .bytes
            .checked_add(run.bytes())
            .expect("a span list of more than 2^64 bytes");
        let touching = run.count == 1 || run.stride == run.len;
        let kept = match touching {
            true => Run {
                offset: run.offset,
                len: run.bytes(),
                stride: run.bytes(),
                count: 1,
            },
            false => run,
        };
        self.runs.push(kept, self.bytes);
        self.bytes = bytes;
    }

    /// The one piece that the list consists of, where it is one.
    pub fn single(&self) -> Option<Span> {
        match *self.runs() {
            [
                Run {
                    offset, len, count: 1, ..
                },
            ] => Some(Span { offset, len }),
            _ => None,
        }
    }

    pub fn runs(&self) -> &[Run] {
        self.runs.all()
    }
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
    /// One past the last byte that any span touches.
    pub fn end(&self) -> u64 {
        self.runs().iter().map(Run::end).max().unwrap_or(0)
    }
    /// How many spans there are, after merging.
    pub fn count(&self) -> u64 {
        self.runs().iter().map(|r| r.count).sum()
    }

    /// The run that holds byte `position` of the list.
    pub fn run_at(&self, position: u64) -> usize {
        match &self.runs {
            Runs::One(_) => 0,
            Runs::Listed { starts, .. } => starts.partition_point(|&s| s <= position).saturating_sub(1),
        }
    }
    /// One past the last byte of the list that `run` holds.
    pub fn run_end(&self, run: usize) -> u64 {
        self.runs.start(run + 1).unwrap_or(self.bytes)
    }

    /// The spans that hold bytes `range` of the list, in order, cut at its ends.
    pub fn pieces(&self, range: Range<u64>) -> Pieces<'_> {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "range outside the span list"
        );
        let run = self.run_at(range.start);
        let within = range.start - self.runs.start(run).unwrap_or(0);
        let (index, skip) = match self.runs().get(run) {
            Some(r) => (within / r.len, within % r.len),
            None => (0, 0),
        };
        Pieces {
            runs: self.runs(),
            run,
            index,
            skip,
            left: range.end - range.start,
        }
    }

    /// The same bytes `range` as a list of its own, keeping strides as strides.
    pub fn slice(&self, range: Range<u64>) -> Spans {
        let mut out = Spans::new();
        let mut cursor = self.pieces(range.clone());
        let mut left = range.end - range.start;
        while left > 0 {
            let run = self.runs()[cursor.run];
            let whole = if cursor.skip == 0 {
                ((run.count - cursor.index) * run.len).min(left) / run.len
            } else {
                0
            };
            if whole > 1 {
                out.push_run(Run {
                    offset: run.offset + cursor.index * run.stride,
                    count: whole,
                    ..run
                });
                cursor.advance(whole);
                left -= whole * run.len;
                cursor.left = left;
            } else {
                let piece = cursor.next().expect("bytes are left");
                left -= piece.len;
                out.push(piece);
            }
        }
        out
    }
}

impl FromIterator<Span> for Spans {
    fn from_iter<I: IntoIterator<Item = Span>>(iter: I) -> Spans {
        let mut spans = Spans::new();
        iter.into_iter().for_each(|s| spans.push(s));
        spans
    }
}

/// Iterator over the spans of a byte range. See [`Spans::pieces`].
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    runs: &'a [Run],
    run: usize,
    index: u64,
    skip: u64,
    left: u64,
}

impl Pieces<'_> {
    fn advance(&mut self, count: u64) {
        self.index += count;
        if self.index == self.runs[self.run].count {
            self.run += 1;
            self.index = 0;
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = Span;
    fn next(&mut self) -> Option<Span> {
        if self.left == 0 {
            return None;
        }
        let run = &self.runs[self.run];
        let offset = run.offset + self.index * run.stride + self.skip;
        let len = (run.len - self.skip).min(self.left);
        self.left -= len;
        if self.skip + len == run.len {
            self.skip = 0;
            self.advance(1);
        } else {
            self.skip += len;
        }
        Some(Span { offset, len })
    }
}

/// Walks two span lists of equal length together and yields `(near offset, far offset, len)`, each piece contiguous on both sides.
pub fn paired<'a>(near: &'a Spans, far: &'a Spans, range: Range<u64>) -> impl Iterator<Item = (u64, u64, u64)> + 'a {
    let mut near = near.pieces(range.clone());
    let mut far = far.pieces(range);
    let mut n = Span { offset: 0, len: 0 };
    let mut f = Span { offset: 0, len: 0 };
    std::iter::from_fn(move || {
        if n.len == 0 {
            n = near.next()?;
        }
        if f.len == 0 {
            f = far.next()?;
        }
        let len = n.len.min(f.len);
        let item = (n.offset, f.offset, len);
        n = Span {
            offset: n.offset + len,
            len: n.len - len,
        };
        f = Span {
            offset: f.offset + len,
            len: f.len - len,
        };
        Some(item)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a test pushes: a span, or a run (which may overlap itself).
    fn any_runs() -> impl Strategy<Value = Vec<Run>> {
        let run = (0u64..64, 1u64..5, 0u64..7, prop_oneof![3 => Just(1u64), 1 => 1u64..6]);
        prop::collection::vec(run, 0..40).prop_map(|list| {
            list.into_iter()
                .map(|(offset, len, stride, count)| Run {
                    offset: offset * 8,
                    len: len * 8,
                    stride: stride * 8,
                    count,
                })
                .collect()
        })
    }

    fn bytes_of(pieces: impl Iterator<Item = Span>) -> Vec<u64> {
        pieces.flat_map(|s| s.offset..s.offset + s.len).collect()
    }

    fn naive(run: &Run) -> impl Iterator<Item = Span> + '_ {
        (0..run.count).map(|i| Span {
            offset: run.offset + i * run.stride,
            len: run.len,
        })
    }

    proptest! {
        #[test]
        fn pieces_are_the_bytes_that_were_pushed(list in any_runs(), a in 0u64..2000, b in 0u64..2000) {
            let mut spans = Spans::new();
            for run in &list {
                match run.count {
                    1 => spans.push(Span { offset: run.offset, len: run.len }),
                    _ => spans.push_run(*run),
                }
            }
            let all = bytes_of(list.iter().flat_map(naive));
            prop_assert_eq!(spans.bytes(), all.len() as u64);
            prop_assert_eq!(spans.end(), all.iter().map(|b| b + 1).max().unwrap_or(0));
            prop_assert_eq!(spans.count(), spans.pieces(0..spans.bytes()).count() as u64);
            let (a, b) = (a.min(b).min(spans.bytes()), a.max(b).min(spans.bytes()));
            prop_assert_eq!(bytes_of(spans.pieces(a..b)), &all[a as usize..b as usize]);
            let cut = spans.slice(a..b);
            prop_assert_eq!(bytes_of(cut.pieces(0..cut.bytes())), &all[a as usize..b as usize]);
        }

        #[test]
        fn pushing_leaves_no_two_pieces_that_touch(list in prop::collection::vec((0u64..40, 1u64..3), 0..60)) {
            let spans: Spans = list.iter().map(|&(offset, len)| Span { offset, len }).collect();
            let pieces: Vec<Span> = spans.pieces(0..spans.bytes()).collect();
            for pair in pieces.windows(2) {
                prop_assert!(pair[0].offset + pair[0].len != pair[1].offset, "{pair:?} touch");
            }
        }

        #[test]
        fn pairs_walk_both_lists_byte_by_byte(near in any_runs(), far in any_runs()) {
            let list = |runs: &[Run]| runs.iter().flat_map(naive).collect::<Spans>();
            let (near, far) = (list(&near), list(&far));
            let len = near.bytes().min(far.bytes());
            let (near_bytes, far_bytes) = (bytes_of(near.pieces(0..len)), bytes_of(far.pieces(0..len)));
            let walked: Vec<(u64, u64)> =
                paired(&near, &far, 0..len).flat_map(|(n, f, len)| (0..len).map(move |i| (n + i, f + i))).collect();
            prop_assert_eq!(walked, near_bytes.into_iter().zip(far_bytes).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_regular_stride_is_one_run_also_when_cut() {
        let spans = Spans::paged(0, 64, (0..1000).map(|i| i * 3));
        assert_eq!(spans.runs().len(), 1);
        assert_eq!(
            spans.slice(64..64 * 501).runs(),
            &[Run {
                offset: 192,
                len: 64,
                stride: 192,
                count: 500
            }]
        );
    }

    #[test]
    fn groups_of_touching_blocks_at_a_stride_are_one_run() {
        let spans = Spans::paged(
            0,
            1,
            (0..100).flat_map(|group| [10 * group, 10 * group + 1, 10 * group + 2]),
        );
        assert_eq!(
            spans.runs(),
            &[Run {
                offset: 0,
                len: 3,
                stride: 10,
                count: 100
            }]
        );
    }

    #[test]
    fn a_run_at_the_end_of_the_address_space_takes_no_more() {
        let half = 1 << 63;
        let mut spans = Spans::strided(Run {
            offset: 0,
            len: 8,
            stride: half,
            count: 2,
        });
        spans.push(Span { offset: 0, len: 8 });
        assert_eq!(spans.runs().len(), 2);
    }

    #[test]
    #[should_panic(expected = "begins past 2^64")]
    fn a_block_past_the_address_space_panics() {
        let _ = Spans::paged(0, 4096, [1 << 60]);
    }
}
