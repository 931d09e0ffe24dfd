//! Where things lie in the heap of a rank. Every rank's heap is laid out alike, so that a place in one is the same place in all.

use crate::collective::CollectiveError;

/// Ranks of a team at most.
pub const RANKS_MAX: usize = 8;
/// Blocks of one rank's launch at most: each has words of its own in the heap.
pub(crate) const BLOCKS_MAX: u64 = 256;
/// Barriers that kernels of the application can use at the same time.
pub(crate) const BARRIERS: u64 = 64;
/// Words that kernels of the application can signal with.
pub const SIGNALS: u64 = 512;
/// Memories that ranks of other processes can be told of, the heap itself among them.
pub(crate) const WINDOWS: u64 = 256;

const CONTROL_BYTES: u64 = 128;
const BARRIER_BYTES: u64 = 128;
const RECORD_BYTES: u64 = 32;
const WORD: u64 = 8;
/// Packets of one rank in one call: each pair is 16 bytes and carries 8.
const PACKETS_A_RANK: u64 = 512 << 10;
/// Where the parts begin, so that no two share a line.
const LINE: u64 = 128;
/// Everything that is there twice, for even and odd calls.
const PARITIES: u64 = 2;
/// Where the application's memory begins, so that it can be used as memory from the driver can.
const DATA_LINE: u64 = 4096;
const DATA_BYTES_MAX: u64 = 1 << 40;

/// What a word of failure in [`Layout::FAILED_AT`] says, in its lowest byte; the next byte is the rank that it is about.
pub(crate) const TIMED_OUT: u64 = 1;
pub(crate) const ABORTED: u64 = 2;
pub(crate) const PEER_GAVE_UP: u64 = 3;
/// These three come from a proxy alone, which knows more of them than a word says.
#[cfg(test)]
const PEER_LOST: u64 = 4;
#[cfg(test)]
const REFUSED: u64 = 5;
#[cfg(test)]
const BROKEN: u64 = 6;

/// Where the parts of a heap begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub barriers_at: u64,
    pub ends_at: u64,
    pub records_at: u64,
    pub windows_at: u64,
    pub signals_at: u64,
    pub packets_at: u64,
    pub data_at: u64,
    pub bytes: u64,
}

impl Layout {
    pub(crate) const CALLS_AT: u64 = 0;
    /// A word: the first failure that the rank has seen, or has been told of.
    pub const FAILED_AT: u64 = 8;
    /// The number that the first call has, as kernels count: times 65,536.
    pub(crate) const FIRST_CALL: u64 = 1 << 16;
    pub(crate) const PACKETS_A_RANK: u64 = PACKETS_A_RANK;
    /// What one rank can send another by packets in one hop, and in each of two.
    pub(crate) const ONE_HOP_BYTES_MAX: u64 = PACKETS_A_RANK / 2;
    pub(crate) const TWO_HOP_BYTES_MAX: u64 = PACKETS_A_RANK / 4;

    /// With so many bytes for the application.
    pub fn new(data_bytes: u64) -> Result<Layout, CollectiveError> {
        Layout::with_packets(data_bytes, PACKETS_A_RANK)
    }

    /// Of a heap in host memory, over which no collectives go.
    pub fn of_host(data_bytes: u64) -> Result<Layout, CollectiveError> {
        Layout::with_packets(data_bytes, 0)
    }

    fn with_packets(data_bytes: u64, packets_a_rank: u64) -> Result<Layout, CollectiveError> {
        if data_bytes > DATA_BYTES_MAX {
            return Err(CollectiveError::TooLong { bytes: data_bytes });
        }
        let mut end = CONTROL_BYTES;
        let mut take = |bytes: u64| {
            let at = end.next_multiple_of(LINE);
            end = at + bytes;
            at
        };
        let ranks = RANKS_MAX as u64;
        let barriers_at = take(BARRIERS * BARRIER_BYTES);
        let ends_at = take(BLOCKS_MAX * ranks * WORD);
        let records_at = take(PARITIES * BLOCKS_MAX * ranks * RECORD_BYTES);
        let windows_at = take(WINDOWS * ranks * WORD);
        let signals_at = take(SIGNALS * WORD);
        let packets_at = take(PARITIES * ranks * packets_a_rank);
        let data_at = end.next_multiple_of(DATA_LINE);
        Ok(Layout {
            barriers_at,
            ends_at,
            records_at,
            windows_at,
            signals_at,
            packets_at,
            data_at,
            bytes: data_at + data_bytes,
        })
    }

    /// What has to be zero before the first call: all but the application's.
    pub fn zeroed_bytes(&self) -> u64 {
        self.data_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_begin_with_lines() {
        let layout = Layout::new(1000).unwrap();
        let begins = [
            0,
            layout.barriers_at,
            layout.ends_at,
            layout.records_at,
            layout.windows_at,
            layout.signals_at,
            layout.packets_at,
            layout.data_at,
            layout.bytes,
        ];
        assert!(begins.is_sorted());
        assert!(begins[..8].iter().all(|begin| begin % LINE == 0), "{begins:?}");
        assert_eq!(layout.ends_at - layout.barriers_at, BARRIERS * BARRIER_BYTES);
        assert_eq!((layout.data_at - layout.packets_at) / PACKETS_A_RANK, 16);
        assert_eq!(layout.data_at % DATA_LINE, 0);
        assert_eq!(layout.bytes, layout.data_at + 1000);
        assert!(matches!(Layout::new(u64::MAX), Err(CollectiveError::TooLong { .. })));
    }

    /// The kernels have these numbers too.
    #[test]
    fn kernels_agree() {
        let header = include_str!("../include/weft/device.cuh");
        let meeting = include_str!("../kernels/meeting.cuh");
        for (text, line) in [
            (header, format!("RANKS_MAX = {RANKS_MAX};")),
            (header, format!("BARRIERS = {BARRIERS};")),
            (
                header,
                format!(
                    "enum Failure : u32 {{ TIMED_OUT = {TIMED_OUT}, ABORTED = {ABORTED}, PEER_GAVE_UP = {PEER_GAVE_UP}, PEER_LOST = {PEER_LOST}, REFUSED = {REFUSED}, BROKEN = {BROKEN} }};"
                ),
            ),
            (meeting, format!("BLOCKS_MAX = {BLOCKS_MAX};")),
            (meeting, format!("RECORD_BYTES = {RECORD_BYTES};")),
            (meeting, format!("CALL = {};", Layout::FIRST_CALL)),
        ] {
            assert!(text.contains(&line), "{line}");
        }
    }
}
