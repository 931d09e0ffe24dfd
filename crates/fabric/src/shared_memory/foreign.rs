//! Copies between this process and the memory of another, by the kernel.

use std::io;
use std::mem::MaybeUninit;

use weft_protocol::Direction;

/// A contiguous piece of a copy: an address here, one over there, and how many bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub near: usize,
    pub far: usize,
    pub len: usize,
}

/// The kernel takes no more pieces in one call.
pub(super) const MAX_PIECES: usize = 1024;

/// Moves all pieces, none of them empty, or says with an error number why not. Some bytes may have been moved before the error.
///
/// # Safety
/// The near side of every piece must be valid for the access that `direction` means.
pub(super) unsafe fn move_pieces(pid: libc::pid_t, direction: Direction, pieces: &[Piece]) -> Result<(), i32> {
    let mut near: Side = Side::new();
    let mut far: Side = Side::new();
    let mut rest = pieces;
    // Bytes of the first piece that are done.
    let mut skip = 0;
    while !rest.is_empty() {
        near.clear();
        far.clear();
        let batch = rest.len().min(MAX_PIECES);
        let mut first = skip;
        for piece in &rest[..batch] {
            near.push(piece.near + first, piece.len - first);
            far.push(piece.far + first, piece.len - first);
            first = 0;
        }
        // SAFETY: the near side is valid by the caller's promise; the far side is checked by the kernel in its own process.
        let moved = unsafe {
            match direction {
                Direction::Read => libc::process_vm_readv(pid, near.as_ptr(), near.len(), far.as_ptr(), far.len(), 0),
                Direction::Write => libc::process_vm_writev(pid, near.as_ptr(), near.len(), far.as_ptr(), far.len(), 0),
            }
        };
        // Usually everything moves; a fault in the middle leaves a rest, whose next attempt tells the reason.
        skip += match usize::try_from(moved) {
            Ok(0) => return Err(libc::EFAULT),
            Ok(moved) => moved,
            Err(_) => match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => 0,
                error => return Err(error.unwrap_or(libc::EIO)),
            },
        };
        while let Some(piece) = rest.first().filter(|piece| piece.len <= skip) {
            skip -= piece.len;
            rest = &rest[1..];
        }
    }
    Ok(())
}

/// One side of a call: address ranges, adjacent ones merged.
struct Side {
    ranges: [MaybeUninit<libc::iovec>; MAX_PIECES],
    len: usize,
    end: usize,
}

impl Side {
    fn new() -> Side {
        Side {
            ranges: [const { MaybeUninit::uninit() }; MAX_PIECES],
            len: 0,
            end: 0,
        }
    }
    fn clear(&mut self) {
        self.len = 0;
    }
    fn push(&mut self, address: usize, len: usize) {
        if self.len > 0 && self.end == address {
            // SAFETY: the ranges before `len` have been written.
            unsafe { self.ranges[self.len - 1].assume_init_mut() }.iov_len += len;
        } else {
            self.ranges[self.len].write(libc::iovec {
                iov_base: address as *mut libc::c_void,
                iov_len: len,
            });
            self.len += 1;
        }
        self.end = address + len;
    }
    fn as_ptr(&self) -> *const libc::iovec {
        self.ranges.as_ptr().cast()
    }
    fn len(&self) -> libc::c_ulong {
        self.len as libc::c_ulong
    }
}
