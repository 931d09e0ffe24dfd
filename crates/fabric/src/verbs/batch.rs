//! Work requests, built from legs and frames into lists that are posted with one doorbell each.
//!
//! The arrays are made once. Building a request writes into them and allocates nothing; the links between requests are always
//! there, and posting a list only cuts it behind its last one.

use std::ops::Range;

use weft_protocol::{AtomicAct, Direction, Leg};
use weft_sys::verbs as sys;

/// Requests of one list. A list is signalled at its end, so this also bounds how long a completion is put off.
pub(super) const REQUESTS_MAX: usize = 64;
/// A frame of at most this many bytes, its packet's head included, can be posted out of the request itself.
pub(super) const INLINE_PACKET_BYTES_MAX: usize = 64;

/// What the device takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Pieces of local memory that one write gathers.
    pub write_pieces: usize,
    /// Pieces of local memory that one read scatters to.
    pub read_pieces: usize,
    /// Bytes of one request.
    pub request_bytes: u64,
    /// Bytes that can be copied into a request.
    pub inline_bytes: u32,
}

/// Where the two sides of a move are, as the device calls them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sides {
    /// The first byte of the local region.
    pub local: u64,
    pub lkey: u32,
    /// The same byte as this process sees it, if it does: only then can it be copied into a request.
    pub visible: Option<*const u8>,
    /// The first byte of the remote region.
    pub remote: u64,
    pub rkey: u32,
    pub direction: Direction,
}

/// How much may still be handed to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub requests: usize,
    pub bytes: u64,
}

/// A list of work requests that is being built.
pub(super) struct Batch {
    requests: Box<[sys::ibv_send_wr]>,
    pieces: Box<[sys::ibv_sge]>,
    /// A place for the bytes of each request that holds a packet itself.
    packets: Box<[[u8; INLINE_PACKET_BYTES_MAX]]>,
    len: usize,
    pieces_len: usize,
    /// Of the moves in the list.
    bytes: u64,
    limits: Limits,
}

// SAFETY: the pointers in the requests lead into the value's own arrays, or to registered memory that has no thread affinity.
unsafe impl Send for Batch {}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch({} requests, {:?})", self.len, self.limits)
    }
}

impl Batch {
    pub(super) fn new(limits: Limits) -> Batch {
        let most = limits.write_pieces.max(limits.read_pieces).max(1);
        let mut batch = Batch {
            requests: vec![sys::ibv_send_wr::default(); REQUESTS_MAX].into(),
            pieces: vec![sys::ibv_sge::default(); REQUESTS_MAX * most].into(),
            packets: vec![[0; INLINE_PACKET_BYTES_MAX]; REQUESTS_MAX].into(),
            len: 0,
            pieces_len: 0,
            bytes: 0,
            limits,
        };
        let first = batch.requests.as_mut_ptr();
        for (i, request) in batch.requests.iter_mut().enumerate() {
            request.next = first.wrapping_add(i + 1);
        }
        batch
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }
    pub(super) fn len(&self) -> usize {
        self.len
    }
    /// Bytes that the list moves.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }
    pub(super) fn is_full(&self) -> bool {
        self.len == REQUESTS_MAX
    }

    /// Requests that hold their bytes themselves.
    pub(super) fn inline(&self) -> usize {
        let inline = |request: &&sys::ibv_send_wr| request.send_flags & sys::IBV_SEND_INLINE != 0;
        self.requests[..self.len].iter().filter(inline).count()
    }

    /// Forgets what has been posted.
    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.pieces_len = 0;
        self.bytes = 0;
    }

    /// Adds a SEND of a short packet that `fill` writes.
    pub(super) fn send_inline(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) {
        let at = self.len;
        let len = fill(&mut self.packets[at]);
        let addr = self.packets[at].as_ptr() as u64;
        let request = self.begin(sys::IBV_WR_SEND);
        request.send_flags = sys::IBV_SEND_INLINE;
        self.piece(addr, len as u32, 0);
    }

    /// Adds a SEND of registered memory.
    pub(super) fn send(&mut self, addr: u64, len: u32, lkey: u32) {
        self.begin(sys::IBV_WR_SEND);
        self.piece(addr, len, lkey);
    }

    /// Adds a SEND of nothing.
    pub(super) fn send_nothing(&mut self) {
        self.begin(sys::IBV_WR_SEND);
    }

    /// Adds requests for bytes `range` of a leg, as many as there is room for, and returns how far they go.
    ///
    /// Pieces that are adjacent at the far end share a request, however scattered they are here.
    pub(super) fn move_bytes(&mut self, leg: &Leg, range: Range<u64>, sides: &Sides, room: Room) -> u64 {
        let start = range.start;
        match leg.single() {
            // The usual small move is one piece, which need not be looked for.
            Some((near, far)) => {
                let piece = (near + start, far + start, range.end - start);
                self.move_pieces([piece].into_iter(), start, sides, room)
            }
            None => self.move_pieces(leg.pieces(range), start, sides, room),
        }
    }

    fn move_pieces(
        &mut self,
        pieces_of_leg: impl Iterator<Item = (u64, u64, u64)>,
        start: u64,
        sides: &Sides,
        room: Room,
    ) -> u64 {
        let requests_max = (self.len + room.requests).min(REQUESTS_MAX);
        let pieces_max = match sides.direction {
            Direction::Read => self.limits.read_pieces,
            Direction::Write => self.limits.write_pieces,
        };
        let opcode = match sides.direction {
            Direction::Read => sys::IBV_WR_RDMA_READ,
            Direction::Write => sys::IBV_WR_RDMA_WRITE,
        };
        let mut reached = start;
        // The open request: where it ends at the far end, its bytes and its pieces. None is open at first.
        let (mut far_end, mut bytes, mut pieces) = (u64::MAX, 0u64, usize::MAX);
        let mut bytes_left = room.bytes;
        for (mut near, mut far, mut len) in pieces_of_leg {
            while len > 0 {
                let continues = far == far_end && bytes < self.limits.request_bytes && pieces < pieces_max;
                if !continues {
                    if self.len == requests_max || bytes_left == 0 {
                        self.inline_last(bytes, sides);
                        return reached;
                    }
                    self.inline_last(bytes, sides);
                    (bytes, pieces) = (0, 0);
                    let request = self.begin(opcode);
                    request.wr = sys::ibv_send_wr_target {
                        rdma: sys::ibv_wr_rdma {
                            remote_addr: sides.remote + far,
                            rkey: sides.rkey,
                        },
                    };
                }
                // What is left of the room cuts a request short only where one request is larger than all of it.
                let take = len.min(self.limits.request_bytes - bytes).min(bytes_left);
                if take == 0 {
                    self.inline_last(bytes, sides);
                    return reached;
                }
                self.piece(sides.local + near, take as u32, sides.lkey);
                pieces += 1;
                bytes += take;
                bytes_left -= take;
                self.bytes += take;
                reached += take;
                near += take;
                far += take;
                len -= take;
                far_end = far;
            }
        }
        self.inline_last(bytes, sides);
        reached
    }

    /// Adds a write of nothing, for an arrival without bytes.
    pub(super) fn move_nothing(&mut self, sides: &Sides) {
        let request = self.begin(sys::IBV_WR_RDMA_WRITE);
        request.wr = sys::ibv_send_wr_target {
            rdma: sys::ibv_wr_rdma {
                remote_addr: sides.remote,
                rkey: sides.rkey,
            },
        };
    }

    /// Adds an atomic operation on the far word at `remote`. What it held lands in the piece.
    pub(super) fn atomic(&mut self, remote: u64, rkey: u32, act: AtomicAct, landing: sys::ibv_sge) {
        let (opcode, compare_add, swap) = match act {
            AtomicAct::FetchAdd(value) => (sys::IBV_WR_ATOMIC_FETCH_AND_ADD, value, 0),
            AtomicAct::CompareSwap { expected, new } => (sys::IBV_WR_ATOMIC_CMP_AND_SWP, expected, new),
        };
        let request = self.begin(opcode);
        request.wr = sys::ibv_send_wr_target {
            atomic: sys::ibv_wr_atomic {
                remote_addr: remote,
                compare_add,
                swap,
                rkey,
            },
        };
        self.piece(landing.addr, landing.length, landing.lkey);
    }

    /// Makes the last request tell the far end, once its bytes are there.
    pub(super) fn tell(&mut self, immediate: u32) {
        let request = &mut self.requests[self.len - 1];
        debug_assert_eq!(request.opcode, sys::IBV_WR_RDMA_WRITE);
        request.opcode = sys::IBV_WR_RDMA_WRITE_WITH_IMM;
        request.imm_data = immediate.to_be();
    }

    /// Numbers the requests from `first` on, asks for a completion of the last one, and returns the head of the list.
    ///
    /// The list is whole until the batch is changed.
    pub(super) fn finish(&mut self, number: impl Fn(usize) -> u64) -> *mut sys::ibv_send_wr {
        let base = self.requests.as_mut_ptr();
        for (i, request) in self.requests[..self.len].iter_mut().enumerate() {
            request.wr_id = number(i);
            request.next = base.wrapping_add(i + 1);
        }
        if let Some(last) = self.len.checked_sub(1) {
            self.requests[last].send_flags |= sys::IBV_SEND_SIGNALED;
            self.requests[last].next = std::ptr::null_mut();
        }
        base
    }

    /// How many requests stand before the one at `pointer`, which the device did not take.
    pub(super) fn position(&self, pointer: *const sys::ibv_send_wr) -> usize {
        let found = self.requests[..self.len].iter().position(|r| std::ptr::eq(r, pointer));
        found.unwrap_or(0)
    }

    fn begin(&mut self, opcode: sys::ibv_wr_opcode) -> &mut sys::ibv_send_wr {
        let sg_list = self.pieces[self.pieces_len..].as_mut_ptr();
        let request = &mut self.requests[self.len];
        self.len += 1;
        request.opcode = opcode;
        request.send_flags = 0;
        request.sg_list = sg_list;
        request.num_sge = 0;
        request
    }

    /// Adds a piece to the last request.
    fn piece(&mut self, addr: u64, length: u32, lkey: u32) {
        self.pieces[self.pieces_len] = sys::ibv_sge { addr, length, lkey };
        self.pieces_len += 1;
        self.requests[self.len - 1].num_sge += 1;
    }

    /// Lets the last request carry its bytes itself where they are few, so that the device need not fetch them.
    fn inline_last(&mut self, bytes: u64, sides: &Sides) {
        let Some(visible) = sides.visible else { return };
        if bytes == 0 || bytes > u64::from(self.limits.inline_bytes) || sides.direction == Direction::Read {
            return;
        }
        let request = &mut self.requests[self.len - 1];
        request.send_flags |= sys::IBV_SEND_INLINE;
        let count = request.num_sge as usize;
        for piece in &mut self.pieces[self.pieces_len - count..self.pieces_len] {
            piece.addr = visible as u64 + (piece.addr - sides.local);
        }
    }
}

#[cfg(test)]
impl Batch {
    fn requests(&self) -> impl Iterator<Item = (&sys::ibv_send_wr, &[sys::ibv_sge])> {
        self.requests[..self.len].iter().map(|request| {
            // SAFETY: the pieces of a request stand one after the other in the batch's own array.
            let pieces = unsafe { std::slice::from_raw_parts(request.sg_list, request.num_sge as usize) };
            (request, pieces)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use weft_plan::{Place, Span, Spans};
    use weft_protocol::{Access, Epoch, Region, RegionKey, RemoteRegion, VecMemory};

    use super::*;

    const LEN: u64 = 1 << 16;
    const LOCAL: u64 = 0x1000_0000;
    const REMOTE: u64 = 0x2000_0000;
    const VISIBLE: u64 = 0x3000_0000;

    fn leg(near: Spans, far: Spans) -> Leg {
        let key = |slot| RegionKey {
            epoch: Epoch(1),
            slot,
            secret: 0,
        };
        let local = Region {
            key: key(0),
            memory: Arc::new(VecMemory::zeroed(LEN as usize)),
            place: Place::DRAM,
            access: Access::NONE,
        };
        let remote = RemoteRegion {
            key: key(1),
            len: LEN,
            place: Place::DRAM,
            access: Access::READ_WRITE,
            grants: Arc::from([]),
        };
        Leg::new(local, near, remote, far).unwrap()
    }

    fn sides(direction: Direction) -> Sides {
        Sides {
            local: LOCAL,
            lkey: 11,
            visible: Some(VISIBLE as *const u8),
            remote: REMOTE,
            rkey: 22,
            direction,
        }
    }

    /// `count` pieces, none of which overlaps another, of `total` bytes together.
    fn any_spans(total: u64) -> impl Strategy<Value = Spans> {
        prop::collection::vec((1u64..700, 0u64..3), 1..80).prop_map(move |list| {
            let mut spans = Spans::new();
            let (mut offset, mut left) = (0, total);
            for (len, gap) in list.into_iter().cycle() {
                let len = len.min(left);
                offset += gap * 8;
                spans.push(Span { offset, len });
                offset += len;
                left -= len;
                if left == 0 {
                    break;
                }
            }
            spans
        })
    }

    /// What a batch would move: `(local, remote, len)` byte runs, merged.
    fn moved(batch: &Batch, limits: &Limits) -> Vec<(u64, u64, u64)> {
        let mut list: Vec<(u64, u64, u64)> = Vec::new();
        for (request, pieces) in batch.requests() {
            // SAFETY: every request here is a read or a write.
            let mut remote = unsafe { request.wr.rdma.remote_addr } - REMOTE;
            let total: u64 = pieces.iter().map(|piece| u64::from(piece.length)).sum();
            assert!(total <= limits.request_bytes && total > 0);
            let inline = request.send_flags & sys::IBV_SEND_INLINE != 0;
            assert_eq!(
                inline,
                total <= u64::from(limits.inline_bytes) && request.opcode == sys::IBV_WR_RDMA_WRITE
            );
            let most = match request.opcode {
                sys::IBV_WR_RDMA_READ => limits.read_pieces,
                _ => limits.write_pieces,
            };
            assert!(pieces.len() <= most, "{} pieces", pieces.len());
            for piece in pieces {
                let local = piece.addr - if inline { VISIBLE } else { LOCAL };
                let len = u64::from(piece.length);
                match list.last_mut() {
                    Some(last) if last.0 + last.2 == local && last.1 + last.2 == remote => last.2 += len,
                    _ => list.push((local, remote, len)),
                }
                remote += len;
            }
        }
        list
    }

    fn merged(pieces: impl Iterator<Item = (u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
        let mut list: Vec<(u64, u64, u64)> = Vec::new();
        for (near, far, len) in pieces {
            match list.last_mut() {
                Some(last) if last.0 + last.2 == near && last.1 + last.2 == far => last.2 += len,
                _ => list.push((near, far, len)),
            }
        }
        list
    }

    proptest! {
        /// Batch by batch, with any room, a leg's bytes are moved once each and in their places.
        #[test]
        fn requests_move_a_leg_and_nothing_else(
            (near, far) in (1u64..9000).prop_flat_map(|total| (any_spans(total), any_spans(total))),
            read in any::<bool>(),
            write_pieces in 1usize..6, read_pieces in 1usize..4,
            request_bytes in prop_oneof![Just(64u64), Just(1000), Just(1 << 20)],
            inline_bytes in prop_oneof![Just(0u32), Just(32), Just(64)],
            rooms in prop::collection::vec((1usize..80, 1u64..5000), 1..20),
        ) {
            let limits = Limits { write_pieces, read_pieces, request_bytes, inline_bytes };
            let direction = if read { Direction::Read } else { Direction::Write };
            let leg = leg(near, far);
            let mut batch = Batch::new(limits);
            let mut all = Vec::new();
            let mut at = 0;
            for (requests, bytes) in rooms.into_iter().cycle() {
                if at == leg.bytes() {
                    break;
                }
                batch.clear();
                let reached = batch.move_bytes(&leg, at..leg.bytes(), &sides(direction), Room { requests, bytes });
                prop_assert!(reached > at, "no progress");
                prop_assert!(reached - at <= bytes);
                prop_assert_eq!(batch.bytes(), reached - at);
                prop_assert!(batch.len() <= requests && batch.len() <= REQUESTS_MAX);
                all.extend(moved(&batch, &limits));
                at = reached;
            }
            prop_assert_eq!(merged(all.into_iter()), merged(leg.pieces(0..leg.bytes())));
        }
    }

    fn limits() -> Limits {
        Limits {
            write_pieces: 4,
            read_pieces: 4,
            request_bytes: 1 << 20,
            inline_bytes: 64,
        }
    }

    #[test]
    fn pieces_that_are_adjacent_at_the_far_end_share_a_request() {
        let leg = leg(
            Spans::paged(0, 100, [9, 2, 7, 4, 1, 30, 12]),
            Spans::contiguous(500, 700),
        );
        let mut batch = Batch::new(limits());
        let room = Room {
            requests: 64,
            bytes: u64::MAX,
        };
        let all = batch.move_bytes(&leg, 0..700, &sides(Direction::Write), room);
        assert_eq!((all, batch.len()), (700, 2));
    }

    #[test]
    fn lists_are_signalled_once_and_numbered_through() {
        let mut batch = Batch::new(limits());
        let leg = leg(Spans::paged(0, 100, [9, 2, 7]), Spans::paged(0, 100, [1, 3, 5]));
        let room = Room {
            requests: 64,
            bytes: u64::MAX,
        };
        for _ in 0..2 {
            batch.clear();
            batch.send_inline(|packet| {
                packet[0] = 5;
                1
            });
            batch.move_bytes(&leg, 0..300, &sides(Direction::Write), room);
            batch.tell(0x0102_0304);
            let mut at = batch.finish(|i| 70 + i as u64).cast_const();
            let mut seen = Vec::new();
            while !at.is_null() {
                // SAFETY: the list leads through the batch's own array and ends in null.
                let request = unsafe { &*at };
                seen.push((
                    request.wr_id,
                    request.opcode,
                    request.send_flags & sys::IBV_SEND_SIGNALED != 0,
                ));
                at = request.next;
            }
            let expected = [
                (70, sys::IBV_WR_SEND, false),
                (71, sys::IBV_WR_RDMA_WRITE, false),
                (72, sys::IBV_WR_RDMA_WRITE, false),
                (73, sys::IBV_WR_RDMA_WRITE_WITH_IMM, true),
            ];
            assert_eq!(seen, expected);
            let last = batch.requests().last().unwrap().0;
            assert_eq!(
                last.imm_data.to_ne_bytes(),
                [1, 2, 3, 4],
                "immediates travel in network order"
            );
        }
    }
}
