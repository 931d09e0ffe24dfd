//! What must hold for any bytes at all, one function a decoder.
//!
//! Each takes bytes that nobody has vouched for and panics if something is wrong. The targets under `fuzz/` call them with inputs
//! that a fuzzer finds; the suite calls them with inputs from fixed seeds, so that every run checks the same and no run is long.
//!
//! ```
//! weft_protocol::harness::session_messages(b"anything");
//! ```

use weft_plan::{Rank, Time};

use crate::group::{Abort, AgreementMessage, CallRecord, Note, Notes, Quorum};
use crate::hand_off;
use crate::matched::wire::Message;
use crate::session::{Seal, Secret, harness as session};
use crate::transfer::PeerId;
use crate::wire::{Reader, Writer};

/// The runs that a span list may have here.
const MAX_RUNS: usize = 1024;

/// A span list is refused, or stays within its limit and means the same when it is written again.
pub fn spans(bytes: &[u8]) {
    if let Ok(spans) = Reader::new(bytes).spans(MAX_RUNS) {
        assert!(spans.runs().len() <= MAX_RUNS);
        let mut w = Writer::new();
        w.spans(&spans);
        let mut r = Reader::new(&w.buf);
        assert_eq!(r.spans(MAX_RUNS).as_ref(), Ok(&spans));
        assert_eq!(r.end(), Ok(()));
    }
}

/// What stores say to each other about where blocks are.
pub fn directory_words(bytes: &[u8]) {
    crate::block::directory::harness::messages(bytes);
}

/// Messages from anybody, to sessions in every state.
pub fn session_messages(bytes: &[u8]) {
    session::messages(bytes);
}

/// Whatever an authenticated peer may say.
pub fn session_controls(bytes: &[u8]) {
    session::controls(bytes);
}

/// Sealed words are not believed, or are the very bytes that sealing gives.
pub fn seals(bytes: &[u8]) {
    let seal = Seal::new(&Secret::new(b"harness"), "harness");
    if let Ok(words) = seal.open(bytes, b"about", Time::ZERO) {
        let expires = bytes[1..].first_chunk::<8>().copied().map(u64::from_le_bytes);
        let again = expires.map(|expires| seal.close(words, b"about", Time::from_ns(expires)));
        assert_eq!(again, Some(Ok(bytes.to_vec())));
    }
}

/// What ranks of a group tell each other beside their messages: refused, or the same when it is written again; and whatever it says can
/// be shown to a person.
pub fn group_messages(bytes: &[u8]) {
    if let Ok(message) = AgreementMessage::from_bytes(bytes) {
        assert_eq!(AgreementMessage::from_bytes(&message.to_bytes()), Ok(message));
    }
    if let Some(bytes) = bytes.first_chunk::<{ CallRecord::BYTES }>() {
        let record = CallRecord::from_bytes(bytes);
        assert_eq!(CallRecord::from_bytes(&record.to_bytes()), record);
        assert!(!record.to_string().chars().any(char::is_control));
    }
    if let Some(Ok(abort)) = bytes.first_chunk::<{ Abort::BYTES }>().map(Abort::from_bytes) {
        assert_eq!(Abort::from_bytes(&abort.to_bytes()), Ok(abort));
        assert!(!abort.to_string().chars().any(char::is_control));
    }
}

/// The same as parcels, of which each is a piece here: from whom, how long, and its bytes. Whatever others have said, a rank's notes stay sound: who is left
/// are ranks of the group, and nobody is told who is none.
pub fn group_notes(mut bytes: &[u8]) {
    let mut notes = Notes::new(6, 4);
    (1..3).for_each(|rank| notes.knows(Rank(rank), PeerId(rank)));
    while let Some(([from, len], rest)) = bytes.split_first_chunk() {
        let (said, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        bytes = rest;
        if let Ok(note) = Note::from_bytes(said) {
            assert_eq!(Note::from_bytes(&note.to_bytes()).as_ref(), Ok(&note));
            notes.on_note(PeerId(u32::from(from & 3)), note);
        }
        if from & 4 != 0 {
            notes.agree(Rank(0), &[], 5, Quorum::Majority);
        }
        let agreement = notes.agreement();
        let told = agreement.map(|agreement| std::iter::from_fn(|| agreement.next_message()).collect::<Vec<_>>());
        assert!(told.into_iter().flatten().all(|(to, _)| to.0 < 4));
        if let Some(decision) = notes.decision() {
            assert!(decision.members.iter().all(|rank| rank.0 < 4));
        }
    }
}

/// What workers tell each other of hand-offs: refused, or the same when it is written again; and no machine goes wrong by hearing it, whatever it has
/// under way.
pub fn hand_offs(bytes: &[u8]) {
    hand_off::harness::messages(bytes);
}

/// What the two ends of a channel say: refused, or the same when it is said again, with the same bytes after it.
pub fn channel_words(bytes: &[u8]) {
    if let Ok((to, message, rest)) = Message::decode(bytes) {
        let again = [&message.encode(to), rest].concat();
        assert_eq!(Message::decode(&again).ok(), Some((to, message, rest)));
    }
}

/// Whatever a peer with the right secret may say as a parcel.
pub fn parcels(bytes: &[u8]) {
    crate::agent::harness::parcels(bytes);
}

/// Files of a tier that anybody may have written: whatever its header and its records say, nothing is believed that is not whole, no more is found than
/// there are slots, and nothing is read that its checksum does not vouch for.
pub fn tier_files(bytes: &[u8]) {
    use crate::block::shelf::format::{Geometry, Header, PAGE_BYTES, RECORD_BYTES, TenantKey, extent_header};
    use crate::block::shelf::{Durability, Medium, Shelf, ShelfOptions, Verdict};
    use crate::block::{BlockId, HitRule, Part, Shape};
    let _ = Header::decode(bytes);
    let shape = Shape::new(vec![Part::new("kv", 5000, HitRule::AllBlocks)]).expect("a shape");
    let geometry = Geometry::new(5000, 70 * 8192, 2 * 70 * 8192).expect("a geometry");
    let header = Header::first([3; 16], geometry, &shape);
    let options = ShelfOptions {
        tenants: 4,
        ..ShelfOptions::new(Medium::Files(Durability::Process))
    };
    let mut shelf = Shelf::in_files(header, &shape, options);
    let mut ids = Vec::new();
    for (extent, records) in bytes.chunks(bytes.len() / 2 + 1).enumerate() {
        let mut index = extent_header(&[3; 16], extent as u32, &geometry);
        for record in records.chunks(RECORD_BYTES - 4) {
            let mut whole = [0; RECORD_BYTES];
            whole[..record.len()].copy_from_slice(record);
            // And much of it should be a block of this tier: of an earlier opening, of a length that it has, and sealed.
            if record[0] % 4 != 3 {
                (whole[29], whole[30], whole[31]) = (0, 0, 0);
                (whole[49], whole[50], whole[51], whole[52]) = (whole[49] % 16, 0, 0, 1);
            }
            // Most of what is found here should get past the checksum.
            if record[0] % 8 != 7 {
                let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &whole[..RECORD_BYTES - 4]) as u32;
                whole[RECORD_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
            }
            ids.push(BlockId::from_bytes(whole[..16].try_into().expect("sixteen bytes")));
            index.extend_from_slice(&whole);
        }
        index.resize(index.len().max(PAGE_BYTES), 0);
        shelf.recover(extent as u32, &index);
    }
    shelf.start();
    let slots = geometry.slots_total();
    assert!(shelf.blocks() <= slots && shelf.counts().recovered as usize == shelf.blocks());
    assert!(shelf.tenants().count() <= 4);
    let tenants: Vec<TenantKey> = shelf.tenants().map(|(tenant, ..)| tenant).collect();
    for id in &ids {
        if let Some(read) = shelf.read(id, Time::ZERO) {
            assert!(read.offset + u64::from(read.length) <= geometry.data_bytes() && read.extent < geometry.extents);
            // Nobody can know a checksum of bytes that were never written: bytes that are wrong are a miss from then on.
            let verdict = shelf.end_read(read.read, Ok(0x5eed), Time::ZERO);
            assert!(verdict == Verdict::Right || shelf.read(id, Time::ZERO).is_none());
        }
    }
    for tenant in tenants {
        assert_eq!(shelf.purge(tenant).1, 0);
    }
    assert_eq!(shelf.blocks(), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::Cause;
    use crate::seeded::Seeded;

    /// Inputs from fixed seeds: noise, noise that begins like `sample`, and `sample` with a few bytes changed.
    fn search(sample: &[u8], check: fn(&[u8])) {
        check(sample);
        for seed in 0..400 {
            let mut chance = Seeded::new(seed);
            let mut noise = vec![0; chance.below(300) as usize];
            chance.fill(&mut noise);
            check(&noise);
            let begun = chance.below(sample.len() as u64 + 1) as usize;
            check(&[&sample[..begun], &noise].concat());
            let mut changed = sample.to_vec();
            for _ in 0..=chance.below(4) {
                if !changed.is_empty() {
                    let at = chance.below(changed.len() as u64) as usize;
                    changed[at] ^= 1 << chance.below(8);
                }
            }
            check(&changed);
        }
    }

    #[test]
    fn any_span_list() {
        let mut w = Writer::new();
        w.spans(&weft_plan::Spans::paged(0, 4096, [1, 2, 9, 4, 70, 3, 3, 3]));
        search(&w.buf, spans);
    }

    #[test]
    fn any_word_of_a_hand_off() {
        hand_off::harness::samples()
            .iter()
            .for_each(|sample| search(sample, hand_offs));
    }

    #[test]
    fn any_word_of_a_channel() {
        use crate::matched::wire::Receive;
        let receive = Receive {
            tag: -3,
            len: 70_000,
            region: 2,
            offset: 4096,
            number: u32::MAX,
        };
        let said = [
            Message::Open {
                token: 7,
                from: 1 << 40,
            },
            Message::Region {
                number: 1,
                region: vec![1; 40],
            },
            Message::Posted(vec![receive; 3]),
            Message::Eager { tag: 5, nth: 200 },
            Message::Answer {
                number: 1,
                anew: Some(u32::MAX),
            },
            Message::Closed,
        ];
        said.iter()
            .for_each(|message| search(&message.encode(300), channel_words));
    }

    #[test]
    fn any_sealed_words() {
        let seal = Seal::new(&Secret::new(b"harness"), "harness");
        let sample = seal.close(b"words", b"about", Time::from_secs(1)).unwrap();
        assert!(seal.open(&sample, b"about", Time::ZERO).is_ok());
        search(&sample, seals);
    }

    #[test]
    fn any_files_of_a_tier() {
        let mut chance = Seeded::new(5);
        let mut sample = vec![0; 60 * 60];
        chance.fill(&mut sample);
        // Chains, and one that is its own parent.
        for nth in 1..20 {
            sample.copy_within(60 * (nth - 1)..60 * (nth - 1) + 8, 60 * nth + 16);
        }
        sample.copy_within(60 * 20..60 * 20 + 8, 60 * 20 + 16);
        search(&sample, tier_files);
        let shape = crate::block::Shape::new(vec![crate::block::Part::new(
            "kv",
            5000,
            crate::block::HitRule::AllBlocks,
        )]);
        let geometry = crate::block::shelf::format::Geometry::new(5000, 1 << 20, 1 << 20).unwrap();
        let header = crate::block::shelf::format::Header::first([1; 16], geometry, &shape.unwrap());
        search(&header.encode(), tier_files);
    }

    #[test]
    fn any_group_messages() {
        let abort = Abort {
            by: Rank(1),
            blamed: Rank(2),
            cause: Cause::WrongCall,
            step: 3,
            called: CallRecord::new(7, 9, "all-reduce sum of 4 f32 by ring"),
            instead: Some(CallRecord::new(7, 8, "barrier \u{1b}[2J")),
        };
        search(&abort.to_bytes(), group_messages);
        // Small numbers are kinds, counts and ranks.
        for kind in 0..4 {
            search(&[kind, 1, 3, 0, 2, 5, 1, 4, 1], group_messages);
        }
    }

    #[test]
    fn any_group_notes() {
        let note = |from: u8, note: &[u8]| [&[from, note.len() as u8][..], note].concat();
        let status = [&[1][..], &[0; CallRecord::BYTES + 9], &[1], &[0; 8 * 32]].concat();
        let sample = [
            note(1, &[0]),
            note(1, &status),
            note(3, &[3, 0, 7, 7]),
            note(2, &[4, 0, 0, 0, 0, 1, 3, 1, 3]),
            note(5, &[4, 0, 0, 0, 0, 0, 0]),
            note(2, &[5]),
            note(6, &[4, 2, 0, 1, 0, 2, 0, 1]),
        ];
        search(&sample.concat(), group_notes);
    }

    #[test]
    fn any_parcels() {
        // A parcel, one of whose head the end is missing, and a receipt, each as a piece: what to do, length, bytes.
        let parcel = |number: u8| {
            let mut piece = vec![0xc1, 30, 4];
            piece.extend(
                [number, 0, 0, 0, 0, 0, 0, 0]
                    .iter()
                    .chain(&[0; 8])
                    .chain(&[1, 0, 0, 0, 0, 0, 0, 0]),
            );
            piece.extend(b"hello");
            piece
        };
        let sample = [
            parcel(0),
            parcel(1),
            vec![0x81, 5, 1, 2, 3, 4, 5],
            vec![0xc0, 9, 5, 1, 0, 0, 0, 0, 0, 0, 0],
            vec![0x42, 0],
            vec![0xc0, 20, 4],
            vec![0; 19],
            parcel(7),
        ];
        search(&sample.concat(), parcels);
    }

    #[test]
    fn any_session_messages() {
        search(&session::conversation(), session_messages);
    }

    #[test]
    fn any_session_controls() {
        // Each kind of control with small numbers after it, as pieces: what to do, length, bytes.
        let kinds = (0u8..16).flat_map(|kind| [2, 12, 0, kind, 2, 3, 1, 4, 1, 5, 1, 0, 0, 0, 0]);
        search(&kinds.collect::<Vec<u8>>(), session_controls);
        // Small numbers everywhere reach deeper than noise does.
        for seed in 0..400 {
            let mut chance = Seeded::new(seed);
            let mut bytes = Vec::new();
            for _ in 0..40 {
                let len = chance.below(12) as u8;
                bytes.extend_from_slice(&[chance.below(4) as u8, len, 0]);
                bytes.extend((0..len).map(|_| chance.below(16) as u8));
            }
            session_controls(&bytes);
        }
    }
}
