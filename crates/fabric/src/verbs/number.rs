//! How completions are told apart: 64 bits that the device hands back with each.

use weft_protocol::PathId;

const KIND_BITS: u32 = 62;
const REQUEST: u64 = 0;
const RECEIVE: u64 = 1;
const DATAGRAM: u64 = 2;
const DATAGRAM_SENT: u64 = 3;

/// What has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completed {
    /// A request of a path, and all of that path's before it.
    Request(PathId),
    /// A receive buffer of the pool.
    Receive(u32),
    /// A datagram has come into this buffer, in this life of the queue pair.
    Datagram(usize, u8),
    /// A datagram has gone out from this one.
    DatagramSent(usize, u8),
}

/// Paths are numbered below this, so that the kind has room.
pub(super) const PATHS_MAX: u32 = 1 << 30;

pub(super) fn request(path: PathId, sequence: u64) -> u64 {
    REQUEST << KIND_BITS | u64::from(path.0) << 32 | u64::from(sequence as u32)
}

/// The low bits of a request's place among all of its path.
pub(super) fn sequence(number: u64) -> u32 {
    number as u32
}

pub(super) fn receive(buffer: u32) -> u64 {
    RECEIVE << KIND_BITS | u64::from(buffer)
}

pub(super) fn datagram(place: usize, life: u8) -> u64 {
    DATAGRAM << KIND_BITS | u64::from(life) << 32 | place as u64
}

pub(super) fn datagram_sent(place: usize, life: u8) -> u64 {
    DATAGRAM_SENT << KIND_BITS | u64::from(life) << 32 | place as u64
}

pub(super) fn completed(number: u64) -> Completed {
    match number >> KIND_BITS {
        REQUEST => Completed::Request(PathId((number >> 32) as u32)),
        RECEIVE => Completed::Receive(number as u32),
        DATAGRAM => Completed::Datagram(number as u32 as usize, (number >> 32) as u8),
        _ => Completed::DatagramSent(number as u32 as usize, (number >> 32) as u8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_say_what_they_stand_for() {
        let last = PathId(PATHS_MAX - 1);
        assert_eq!(completed(request(last, u64::MAX)), Completed::Request(last));
        assert_eq!(sequence(request(last, 5 | 7 << 32)), 5);
        assert_eq!(completed(receive(u32::MAX)), Completed::Receive(u32::MAX));
        assert_eq!(completed(datagram(63, 255)), Completed::Datagram(63, 255));
        assert_eq!(completed(datagram_sent(31, 1)), Completed::DatagramSent(31, 1));
    }
}
