//! How a long message is cut into parts that fit into parcels, and what stands before each.

use super::{HEAD_BYTES, KIND_CONSUMED, KIND_PART, KIND_THERE, PART_BYTES, PART_GRAIN};
use crate::group::exchange::MessageHead;

/// A part of a message as its parcel tells it.
pub(super) struct Part<'a> {
    pub(super) channel: u16,
    pub(super) consumed: u64,
    pub(super) head: Option<(MessageHead, u64)>,
    /// The bytes follow, and not where they are.
    pub(super) here: bool,
    pub(super) bytes: &'a [u8],
}

/// How long the parts of a message are: as few as there can be, and all about as long, so that of two the first is on its way while the second is
/// made.
pub(super) fn part_len(message: u64) -> u64 {
    message
        .div_ceil(message.div_ceil(PART_BYTES).max(1))
        .next_multiple_of(PART_GRAIN)
}

pub(super) fn write_head(buffer: &mut Vec<u8>, channel: u16, consumed: u64, part: Option<(&MessageHead, u64)>) {
    buffer.clear();
    buffer.push(if part.is_some() { KIND_PART } else { KIND_CONSUMED });
    buffer.extend_from_slice(&channel.to_le_bytes());
    buffer.extend_from_slice(&consumed.to_le_bytes());
    if let Some((head, offset)) = part {
        buffer.extend_from_slice(&head.call.to_le_bytes());
        buffer.extend_from_slice(&head.signature.to_le_bytes());
        buffer.extend_from_slice(&head.index.to_le_bytes());
        buffer.extend_from_slice(&head.len.to_le_bytes());
        buffer.extend_from_slice(&offset.to_le_bytes());
    }
}

pub(super) fn read_part(payload: &[u8]) -> Option<Part<'_>> {
    fn number<const N: usize>(payload: &[u8], at: usize) -> Option<[u8; N]> {
        payload.get(at..at + N)?.try_into().ok()
    }
    let word = |at: usize| Some(u64::from_le_bytes(number(payload, at)?));
    let channel = u16::from_le_bytes(number(payload, 1)?);
    let consumed = word(3)?;
    let kind = *payload.first()?;
    let (head, bytes) = match kind {
        KIND_PART | KIND_THERE => {
            let head = MessageHead {
                call: word(11)?,
                signature: word(19)?,
                index: u32::from_le_bytes(number(payload, 27)?),
                len: word(31)?,
            };
            (Some((head, word(39)?)), payload.get(HEAD_BYTES..)?)
        }
        KIND_CONSUMED => (None, &[][..]),
        _ => return None,
    };
    Some(Part {
        channel,
        consumed,
        head,
        here: kind == KIND_PART,
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::LONG_BYTES;

    #[test]
    fn parts_are_as_few_as_can_be_and_end_with_a_grain() {
        let sizes = [
            0,
            1,
            PART_GRAIN,
            PART_BYTES,
            2 * PART_BYTES,
            LONG_BYTES,
            10 * LONG_BYTES,
        ];
        for len in sizes
            .into_iter()
            .flat_map(|size| [size.saturating_sub(1), size, size + 1])
        {
            let part = part_len(len);
            assert!(part <= PART_BYTES, "{len}");
            assert!(part.is_multiple_of(PART_GRAIN), "{len}");
            let parts = if len == 0 { 0 } else { len.div_ceil(part) };
            assert_eq!(parts, len.div_ceil(PART_BYTES), "{len}");
        }
    }
}
