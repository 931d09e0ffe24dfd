//! Which requests of the kernel a part of a move becomes. Pure: no file is touched here.
//!
//! Pieces that follow each other in the file are joined, whatever their order in the transfer. What is aligned goes past the page cache, the edges that are
//! not go through it; memory that is not aligned is staged.

use super::place::Alignment;

/// What one request of the kernel moves at most. Larger ones are cut by the block layer anyway.
pub(super) const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Pieces of memory of one request at most: the kernel's own limit.
pub(super) const REQUEST_PIECES_MAX: usize = 1024;
/// A run shorter than this that is not aligned is not cut in three.
const CUT_BYTES_MIN: u64 = 4 * super::place::PAGE;

/// A part of a move, as requests.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub requests: Vec<Request>,
    /// The memory of all requests: where, and how many bytes.
    pieces: Vec<(u64, u64)>,
    found: Vec<Piece>,
}

/// One request: bytes that follow each other in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Request {
    pub offset: u64,
    pub len: u64,
    /// Past the page cache.
    pub past: bool,
    /// Through memory of the transport's own.
    pub staged: bool,
    first_piece: u32,
    pieces: u32,
}

/// A piece of a part: contiguous in the file and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub file: u64,
    pub memory: u64,
    pub len: u64,
}

/// What requests must keep to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// None where all goes through the page cache.
    pub align: Option<Alignment>,
    /// Where the memory begins.
    pub address: u64,
    /// Everything is staged.
    pub staged: bool,
}

impl Layout {
    /// Lays a part out anew.
    pub fn lay(&mut self, pieces: impl Iterator<Item = Piece>, rules: Rules) {
        self.requests.clear();
        self.pieces.clear();
        let mut found = std::mem::take(&mut self.found);
        found.clear();
        found.extend(pieces.filter(|piece| piece.len > 0));
        if !found.is_sorted_by_key(|piece| piece.file) {
            found.sort_by_key(|piece| piece.file);
        }
        let mut rest = &found[..];
        while let Some(first) = rest.first() {
            let mut end = first.file;
            let follows = |piece: &&Piece| {
                let next = piece.file == end;
                if next {
                    end += piece.len;
                }
                next
            };
            let count = rest.iter().take_while(follows).count();
            let (run, later) = rest.split_at(count);
            self.lay_run(run, first.file, end, rules);
            rest = later;
        }
        self.found = found;
    }

    /// The memory of a request.
    pub fn memory(&self, request: &Request) -> &[(u64, u64)] {
        &self.pieces[request.first_piece as usize..][..request.pieces as usize]
    }

    /// A run that is contiguous in the file.
    fn lay_run(&mut self, run: &[Piece], start: u64, end: u64, rules: Rules) {
        let mut cursor = Cursor { run, at: 0, into: 0 };
        let Some(align) = rules.align else {
            return self.lay_stretch(&mut cursor, start, end, false, rules);
        };
        let first = start.next_multiple_of(align.offset);
        let last = end - end % align.offset;
        let aligned = first == start && last == end;
        if first >= last || !aligned && end - start < CUT_BYTES_MIN {
            return self.lay_stretch(&mut cursor, start, end, false, rules);
        }
        self.lay_stretch(&mut cursor, start, first, false, rules);
        self.lay_stretch(&mut cursor, first, last, true, rules);
        self.lay_stretch(&mut cursor, last, end, false, rules);
    }

    fn lay_stretch(&mut self, cursor: &mut Cursor<'_>, mut from: u64, to: u64, past: bool, rules: Rules) {
        let memory_align = rules.align.map_or(1, |align| align.memory);
        while from < to {
            let most = (to - from).min(REQUEST_BYTES_MAX);
            let first_piece = self.pieces.len();
            let (mut len, mut aligned) = (0, true);
            while len < most {
                // Past the cache it is bytes that count, because requests must end where they may.
                if !past && !rules.staged && self.pieces.len() - first_piece == REQUEST_PIECES_MAX {
                    break;
                }
                let (memory, bytes) = cursor.take(most - len);
                aligned &= (rules.address + memory).is_multiple_of(memory_align) && bytes.is_multiple_of(memory_align);
                match self.pieces[first_piece..].last_mut() {
                    Some((start, known)) if *start + *known == memory => *known += bytes,
                    _ => self.pieces.push((memory, bytes)),
                }
                len += bytes;
            }
            let pieces = self.pieces.len() - first_piece;
            let staged = rules.staged || past && (!aligned || pieces > REQUEST_PIECES_MAX);
            self.requests.push(Request {
                offset: from,
                len,
                past,
                staged,
                first_piece: first_piece as u32,
                pieces: pieces as u32,
            });
            from += len;
        }
    }
}

/// Goes through the memory of a run.
struct Cursor<'a> {
    run: &'a [Piece],
    at: usize,
    into: u64,
}

impl Cursor<'_> {
    /// The next bytes that are contiguous in memory, so many at most.
    fn take(&mut self, most: u64) -> (u64, u64) {
        let piece = self.run[self.at];
        let bytes = most.min(piece.len - self.into);
        let memory = piece.memory + self.into;
        self.into += bytes;
        if self.into == piece.len {
            (self.at, self.into) = (self.at + 1, 0);
        }
        (memory, bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALIGN: Alignment = Alignment {
        memory: 512,
        offset: 4096,
    };

    fn lay(pieces: &[Piece], rules: Rules) -> Layout {
        let mut layout = Layout::default();
        layout.lay(pieces.iter().copied(), rules);
        layout
    }

    fn rules(align: Option<Alignment>) -> Rules {
        Rules {
            align,
            address: 1 << 20,
            staged: false,
        }
    }

    #[test]
    fn pieces_that_follow_each_other_in_the_file_are_one_request() {
        let block = 64 << 10;
        let at = |file: u64, memory: u64| Piece {
            file: file * block,
            memory: memory * block,
            len: block,
        };
        let layout = lay(&[at(3, 0), at(1, 1), at(0, 2), at(2, 3), at(9, 4)], rules(Some(ALIGN)));
        let found: Vec<_> = layout
            .requests
            .iter()
            .map(|r| (r.offset, r.len, r.past, r.staged))
            .collect();
        assert_eq!(found, [(0, 4 * block, true, false), (9 * block, block, true, false)]);
        let memory = layout.memory(&layout.requests[0]);
        assert_eq!(memory, [2, 1, 3, 0].map(|m| (m * block, block)));
    }

    #[test]
    fn edges_go_through_the_cache_and_crooked_memory_is_staged() {
        let piece = |file, memory, len| [Piece { file, memory, len }];
        let ways = |pieces: &[Piece]| -> Vec<(u64, u64, bool, bool)> {
            let layout = lay(pieces, rules(Some(ALIGN)));
            layout
                .requests
                .iter()
                .map(|r| (r.offset, r.len, r.past, r.staged))
                .collect()
        };
        assert_eq!(
            ways(&piece(100, 100, 40_000)),
            [
                (100, 3996, false, false),
                (4096, 32768, true, false),
                (36864, 3236, false, false)
            ]
        );
        assert_eq!(ways(&piece(4096, 100, 8192)), [(4096, 8192, true, true)]);
        assert_eq!(ways(&piece(4096, 512, 8192)), [(4096, 8192, true, false)]);
        assert_eq!(ways(&piece(4000, 0, 5000)), [(4000, 5000, false, false)]);
        assert_eq!(ways(&piece(0, 0, 10)), [(0, 10, false, false)]);
    }

    proptest! {
        /// Every byte of every piece is in one request, at its place, and every request keeps the rules.
        #[test]
        fn every_byte_is_moved_once(
            blocks in prop::collection::vec((0u64..64, 1u64..70_000), 1..60),
            unit in prop::sample::select(vec![1u64, 512, 4096, 65536]),
            align in prop::sample::select(vec![None, Some(ALIGN)]),
            staged: bool,
        ) {
            let mut pieces = Vec::new();
            let (mut file, mut memory) = (0, 0);
            for (gap, len) in blocks {
                let len = len.next_multiple_of(unit);
                file += if gap < 32 { 0 } else { gap * unit };
                pieces.push(Piece { file, memory, len });
                file += len;
                memory += len + gap % 3 * unit;
            }
            pieces.reverse();
            let rules = Rules { staged, ..rules(align) };
            let layout = lay(&pieces, rules);
            let mut bytes = 0;
            for request in &layout.requests {
                let memory = layout.memory(request);
                prop_assert!(request.len > 0 && request.len <= REQUEST_BYTES_MAX);
                prop_assert_eq!(memory.iter().map(|(_, len)| len).sum::<u64>(), request.len);
                prop_assert!(request.staged || memory.len() <= REQUEST_PIECES_MAX);
                prop_assert!(!staged || request.staged);
                if request.past {
                    let align = rules.align.expect("past the cache");
                    prop_assert!(request.offset.is_multiple_of(align.offset) && request.len.is_multiple_of(align.offset));
                    let fits = |(at, len): &(u64, u64)| (rules.address + at).is_multiple_of(512) && len.is_multiple_of(512);
                    prop_assert!(request.staged || memory.iter().all(fits));
                }
                let mut at = request.offset;
                for (start, len) in memory {
                    let inside = |p: &&Piece| p.file <= at && at < p.file + p.len;
                    let piece = pieces.iter().find(inside).expect("a byte of a piece");
                    prop_assert_eq!(piece.memory + (at - piece.file), *start);
                    at += len;
                }
                bytes += request.len;
            }
            prop_assert_eq!(bytes, pieces.iter().map(|p| p.len).sum::<u64>());
        }
    }
}
