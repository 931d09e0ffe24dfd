use proptest::prelude::*;
use weft_plan::Run;
use weft_protocol::Epoch;

use super::*;

fn any_key() -> impl Strategy<Value = RegionKey> {
    (any::<u64>(), any::<u32>(), any::<u128>()).prop_map(|(epoch, slot, secret)| RegionKey {
        epoch: Epoch(epoch),
        slot,
        secret,
    })
}

fn any_spans() -> impl Strategy<Value = Spans> {
    prop::collection::vec((0u64..1 << 40, 1u64..1 << 10, 0u64..1 << 20, 1u64..20), 0..300).prop_map(|runs| {
        let mut spans = Spans::new();
        for (offset, len, gap, count) in runs {
            let stride = if count == 1 { len } else { len + gap };
            spans.push_run(Run {
                offset,
                len,
                stride,
                count,
            });
        }
        spans
    })
}

fn any_refusal() -> impl Strategy<Value = Refusal> {
    prop::sample::select(&Refusal::ALL[..])
}

fn any_location() -> impl Strategy<Value = Location> {
    (0u64..1 << 63, 0u64..1 << 63, any::<u32>(), any::<(bool, bool, bool)>()).prop_map(
        |(iova, len, rkey, (read, write, atomics))| Location {
            iova,
            len,
            rkey,
            access: Access { read, write },
            atomics,
        },
    )
}

fn any_ask() -> impl Strategy<Value = AtomicAsk> {
    let any_act = prop_oneof![
        any::<u64>().prop_map(AtomicAct::FetchAdd),
        any::<(u64, u64)>().prop_map(|(expected, new)| AtomicAct::CompareSwap { expected, new }),
    ];
    (any::<(u64, u64, u64)>(), any_key(), any_act).prop_map(|((serial, deadline, offset), key, act)| AtomicAsk {
        serial,
        deadline: Time::from_ns(deadline),
        key,
        offset,
        act,
    })
}

fn any_frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..3 * PACKET_BYTES).prop_map(Frame::Message),
        any_key().prop_map(|key| Frame::Resolve { key }),
        (
            any_key(),
            prop_oneof![any_location().prop_map(Ok), any_refusal().prop_map(Err)]
        )
            .prop_map(|(key, answer)| Frame::Resolved { key, answer }),
        any::<u32>().prop_map(|slot| Frame::Revoke { slot }),
        any::<u32>().prop_map(|slot| Frame::Revoked { slot }),
        (0..TAG_SLOTS, any::<u64>()).prop_map(|(slot, tag)| Frame::Bind { slot, tag }),
        (any::<u64>(), any::<u32>()).prop_map(|(tag, index)| Frame::Arrived(Arrival { tag, index })),
        (any::<u64>(), any_key(), any_spans()).prop_map(|(serial, key, spans)| Frame::Sum { serial, key, spans }),
        (
            any::<u64>(),
            prop_oneof![any::<u64>().prop_map(Ok), any_refusal().prop_map(Err)]
        )
            .prop_map(|(serial, sum)| Frame::Summed { serial, sum }),
        Just(Frame::Probe),
        Just(Frame::Ready),
        Just(Frame::Bye),
        any_ask().prop_map(Frame::AtomicAsk),
        (
            any::<u64>(),
            prop_oneof![any::<u64>().prop_map(Ok), any_refusal().prop_map(Err)]
        )
            .prop_map(|(serial, found)| Frame::AtomicAnswer { serial, found }),
        any::<u64>().prop_map(|sent| Frame::ReadClock {
            sent: Time::from_ns(sent)
        }),
        any::<(u64, u64)>().prop_map(|(sent, read)| Frame::Clock {
            sent: Time::from_ns(sent),
            read: Time::from_ns(read),
        }),
    ]
}

const WHOLE: PacketSize = PacketSize(PACKET_BYTES);

fn packets(mut parcel: Parcel, size: PacketSize) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    while !parcel.is_packed() {
        let mut buffer = [0xee; PACKET_BYTES];
        let expected = parcel.next_packet_bytes(size);
        let len = parcel.pack(packets.len() as u16, size, &mut buffer);
        assert_eq!(len, expected);
        assert!(len <= size.0);
        packets.push(buffer[..len].to_vec());
    }
    packets
}

proptest! {
    #[test]
    fn frames_survive_being_cut_and_put_together(frames in prop::collection::vec(any_frame(), 1..5), mtu in 1u8..=5) {
        let size = PacketSize::of_mtu(mtu);
        let mut assembly = Assembly::default();
        for frame in frames {
            let parcel = match &frame {
                Frame::Message(payload) => Parcel::message(payload.as_slice().into()),
                other => Parcel::frame(other),
            };
            let packets = packets(parcel, size);
            let mut found = None;
            for (i, packet) in packets.iter().enumerate() {
                prop_assert!(found.is_none(), "whole before its last packet");
                let packet = Packet::decode(packet, size).unwrap();
                prop_assert_eq!(usize::from(packet.credits), i);
                found = assembly.take(packet.piece.unwrap()).unwrap();
            }
            prop_assert_eq!(found, Some(frame));
        }
    }

    #[test]
    fn garbage_is_refused_not_believed(bytes in prop::collection::vec(any::<u8>(), 0..2 * PACKET_BYTES)) {
        check(&bytes);
    }

    #[test]
    fn a_frame_with_flipped_bytes_is_refused_or_another_frame(frame in any_frame(), at in any::<prop::sample::Index>(), flip in 1u8..) {
        let mut bytes = frame.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        check(&bytes);
    }
}

#[test]
fn credits_travel_alone_too() {
    let mut buffer = [0; PACKET_BYTES];
    let len = pack_credits(77, &mut buffer);
    let packet = Packet::decode(&buffer[..len], WHOLE).unwrap();
    assert_eq!((packet.credits, packet.piece), (77, None));
}

#[test]
fn pieces_out_of_turn_and_frames_without_end_are_refused() {
    let long = packets(Parcel::message(vec![7; 2 * PACKET_BYTES].into()), WHOLE);
    let piece = |i: usize| Packet::decode(&long[i], WHOLE).unwrap().piece.unwrap();
    let mut assembly = Assembly::default();
    assert_eq!(assembly.take(piece(1)), Err(DecodeError::Invalid), "the middle first");
    let mut assembly = Assembly::default();
    assembly.take(piece(0)).unwrap();
    assert_eq!(
        assembly.take(piece(0)),
        Err(DecodeError::Invalid),
        "the beginning twice"
    );
    let mut assembly = Assembly::default();
    assembly.take(piece(0)).unwrap();
    let endless = (0..).map(|_| assembly.take(piece(1))).find_map(Result::err);
    assert_eq!(endless, Some(DecodeError::TooLong));
}

#[test]
fn a_packet_is_as_large_as_its_path_carries_in_one_piece() {
    for (code, bytes) in [(1, 256), (3, 1024), (5, 4096)] {
        let size = PacketSize::of_mtu(code);
        assert_eq!(size, PacketSize(bytes));
        let packets = packets(Parcel::message(vec![3; 2 * PACKET_BYTES].into()), size);
        assert_eq!(packets.iter().map(Vec::len).max(), Some(bytes));
        // One that another path could carry is not taken.
        let longer = vec![0; bytes + 1];
        assert_eq!(Packet::decode(&longer, size), Err(DecodeError::Invalid));
    }
}

#[test]
fn the_longest_message_fits() {
    let longest = packets(Parcel::message(vec![3; MESSAGE_BYTES_MAX].into()), WHOLE);
    let mut assembly = Assembly::default();
    let last = longest.iter().map(|packet| {
        let piece = Packet::decode(packet, WHOLE).unwrap().piece.unwrap();
        assembly.take(piece).unwrap()
    });
    assert_eq!(last.last().flatten(), Some(Frame::Message(vec![3; MESSAGE_BYTES_MAX])));
}
