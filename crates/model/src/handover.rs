//! How long a KV cache takes from the memory of one machine's GPUs to that of another's, with nothing else on the links.

use weft_plan::units::{Bandwidth, Bytes, Picos};

/// What a hand-over takes before its first byte and after its last: metadata, registration look-ups, the notification.
/// Calibrated against the vLLM sweep with Mooncake (kv_transfer).
const START: f64 = 400e-6;
/// The share of the NICs' rate that many layers' blocks reach from engine to engine; same sweep.
const BLOCKS: f64 = 0.695;
/// The share that a benchmark of large blocks reaches: the mean of RoCE and EFA peaks of Mooncake (kv_transfer).
const PEAK: f64 = 0.89;
/// How many operations a second the initiators of one machine post (block sweep on p5en, kv_transfer).
const OPERATIONS: f64 = 1.48e6;

/// A hand-over of so many bytes over NICs that together have this rate, an engine's metadata included.
pub fn handover(bytes: Bytes, nics: Bandwidth) -> Picos {
    let rate = nics.bytes_per_sec().max(1) as f64 * BLOCKS;
    Picos::from_ps(((START + bytes.0 as f64 / rate) * 1e12) as u64)
}

/// The rate of a stream of blocks of one size, with enough of them under way.
pub fn handover_rate(block: Option<Bytes>, nics: Bandwidth) -> Bandwidth {
    let peak = nics.bytes_per_sec() as f64 * PEAK;
    let posted = block.map_or(f64::INFINITY, |block| block.0 as f64 * OPERATIONS);
    Bandwidth::from_bytes_per_sec(peak.min(posted) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_are_limited_by_operations_and_large_ones_by_the_nics() {
        let nics = Bandwidth::from_gigabytes_per_sec(400.0);
        let rate = |bytes| handover_rate(Some(Bytes(bytes)), nics).bytes_per_sec();
        assert!(rate(65_536) < rate(262_144));
        assert_eq!(rate(1 << 21), rate(1 << 24));
        assert!(handover(Bytes(1 << 30), nics) > handover(Bytes(1 << 20), nics));
    }
}
