//! What becomes of the bytes of a message.

use std::ops::Range;

use weft_protocol::group::{Combiner, MessageHead, Piece, Sink, Trouble};

use super::Arena;
use crate::copy;
use crate::reduce::{Cache, Reducer};

impl Arena {
    /// Puts bytes of a message, from byte `start` of it on, where the sink wants them.
    pub(super) fn apply(&mut self, sink: &Sink<'_>, start: u64, from: *const u8, len: u64, whole: u64) {
        let part = |piece: Piece| Piece {
            offset: piece.offset + start,
            len,
            ..piece
        };
        match sink {
            Sink::Copy(piece) => {
                let to = self.at(part(*piece));
                // SAFETY: `at` has checked the target; the source is `len` bytes of a slot or a mapping, which is none of our buffers.
                unsafe {
                    if whole >= copy::STREAM_MIN_BYTES as u64 {
                        copy::copy_streaming(to, from, len as usize);
                    } else {
                        copy::copy_cached(to, from, len as usize);
                    }
                }
            }
            Sink::Combine { with, into, how } => {
                let target = *into;
                let (with, into) = (self.at(part(*with)), self.at(part(*into)));
                match how {
                    Combiner::Builtin { datatype, reduction } => {
                        let known = self
                            .reducer
                            .filter(|r| r.datatype() == *datatype && r.reduction() == *reduction);
                        let reducer = known.unwrap_or_else(|| Reducer::new(*datatype, *reduction));
                        self.reducer = Some(reducer);
                        let (size, read) = (datatype.size(), self.was_read(target));
                        let combine = |bytes: Range<usize>, cache: Cache| {
                            let at = bytes.start;
                            // SAFETY: as above; `with` and `into` are equal or do not overlap, as a sink promises.
                            unsafe {
                                reducer.combine(into.add(at), with.add(at), from.add(at), bytes.len() / size, cache)
                            }
                        };
                        match whole >= copy::STREAM_MIN_BYTES as u64 {
                            true => combine(0..len as usize, Cache::Bypass),
                            false if read => self.results.write(len as usize, |bytes, past_cache| {
                                combine(bytes, if past_cache { Cache::Bypass } else { Cache::Keep })
                            }),
                            false => combine(0..len as usize, Cache::Keep),
                        }
                    }
                    Combiner::Custom { function, .. } => {
                        // The function wants slices, and these bytes may change at any moment.
                        let (mut ours, mut theirs) = (vec![0; len as usize], vec![0; len as usize]);
                        // SAFETY: `len` bytes each, the sources checked as above, the targets just allocated.
                        unsafe {
                            ours.as_mut_ptr().copy_from_nonoverlapping(with, ours.len());
                            theirs.as_mut_ptr().copy_from_nonoverlapping(from, theirs.len());
                        }
                        function.combine(&mut ours, &theirs);
                        // SAFETY: `at` has checked the target.
                        unsafe { into.copy_from_nonoverlapping(ours.as_ptr(), ours.len()) }
                    }
                }
            }
        }
    }

    /// Takes what a slot holds of a message. How many bytes that was.
    pub(super) fn take_here(
        &mut self,
        place: usize,
        index: usize,
        len: u64,
        head: &MessageHead,
        sink: &Sink<'_>,
    ) -> Result<u64, Trouble> {
        let rank = self.ranks[place];
        let incoming = &mut self.incoming[index];
        let (number, taken) = (incoming.next, incoming.taken);
        let due = (head.len - taken).min(self.layout.slot_bytes as u64);
        let Some(neighbour) = self.neighbours[place].as_ref().filter(|_| len == due) else {
            return Err(Trouble::Garbage { rank });
        };
        let lane = self.layout.lane(self.own_place, index % self.layout.channels);
        let from = neighbour.segment.payload(lane, number);
        let elements = match sink {
            Sink::Combine { how, .. } => how.size().max(1) as u64,
            Sink::Copy(_) => 1,
        };
        if len == head.len || (self.layout.slot_bytes as u64).is_multiple_of(elements) {
            self.apply(sink, taken, from.as_ptr(), len, head.len);
            return Ok(len);
        }
        // Elements that do not end with a slot are put together first.
        let mut gathered = std::mem::take(&mut incoming.gathered);
        let before = gathered.len();
        gathered.resize(before + len as usize, 0);
        // SAFETY: the slot holds `len` bytes, as checked above, and the vector has just grown by as many.
        unsafe {
            gathered
                .as_mut_ptr()
                .add(before)
                .copy_from_nonoverlapping(from.as_ptr(), len as usize)
        };
        if gathered.len() as u64 == head.len {
            self.apply(sink, 0, gathered.as_ptr(), head.len, head.len);
            gathered.clear();
        }
        self.incoming[index].gathered = gathered;
        Ok(len)
    }
}
