//! Bytes that both processes can compute from a seed, so that each can check what it got without trusting the other.

/// The byte pattern of one seed. Every aligned word of eight bytes depends on the seed and on its own position, so that a
/// block which lands in the wrong place, twice or not at all shows as a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern(pub u64);

impl Pattern {
    /// The bytes from `offset` on, which must be a multiple of eight.
    pub fn fill(self, offset: u64, into: &mut [u8]) {
        debug_assert_eq!(offset % 8, 0);
        for (index, word) in into.chunks_mut(8).enumerate() {
            let bytes = self.word(offset / 8 + index as u64).to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
    }

    /// Where `bytes`, which stand at `offset` of the pattern, first differ from it.
    pub fn first_difference(self, offset: u64, bytes: &[u8]) -> Option<u64> {
        debug_assert_eq!(offset % 8, 0);
        for (index, word) in bytes.chunks(8).enumerate() {
            let expected = self.word(offset / 8 + index as u64).to_le_bytes();
            if word != &expected[..word.len()] {
                let within = word.iter().zip(expected).take_while(|(a, b)| **a == *b).count();
                return Some(offset + index as u64 * 8 + within as u64);
            }
        }
        None
    }

    /// SplitMix64 of the position: cheap, and no two neighbours look alike.
    fn word(self, index: u64) -> u64 {
        let mut z = self.0 ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A permutation of `0..count` that the seed decides: the block order of a paged cache, in which nothing merges.
pub fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    let draw = Pattern(seed);
    for last in (1..order.len()).rev() {
        let other = draw.word(last as u64) % (last as u64 + 1);
        order.swap(last, other as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_found_at_its_byte() {
        let mut bytes = vec![0; 1001];
        Pattern(7).fill(64, &mut bytes);
        assert_eq!(Pattern(7).first_difference(64, &bytes), None);
        bytes[515] ^= 1;
        assert_eq!(Pattern(7).first_difference(64, &bytes), Some(64 + 515));
    }

    #[test]
    fn a_shuffle_holds_every_index_once() {
        let mut order = shuffled(1000, 42);
        assert_ne!(order[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }
}
