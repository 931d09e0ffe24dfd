//! Priority flow control of an interface, which the kernel tells over netlink only (data centre bridging, IEEE 802.1Qaz).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const RTM_GETDCB: u16 = 78;
const DCB_CMD_IEEE_GET: u8 = 21;
const DCB_ATTR_IFNAME: u16 = 1;
const DCB_ATTR_IEEE: u16 = 13;
const DCB_ATTR_IEEE_PFC: u16 = 2;
/// The flags in the two highest bits of an attribute's type.
const NLA_TYPE_MASK: u16 = 0x3fff;
const HEADER_BYTES: usize = 16;
/// `struct dcbmsg`: family, command, padding.
const DCB_HEADER_BYTES: usize = 4;
/// An answer has a few tables of eight entries; the kernel puts it in one message of at most a page.
const ANSWER_BYTES: usize = 8192;

/// A bit for each of the eight priorities that is paused in the place of being dropped. `None` where the driver does not say.
pub(super) fn paused_priorities(interface: &str) -> Option<u8> {
    ask(interface).ok().and_then(|answer| parse(&answer))
}

fn ask(interface: &str) -> io::Result<Vec<u8>> {
    // SAFETY: a plain call that returns a descriptor or an error.
    let fd = unsafe {
        libc::socket(
            libc::AF_NETLINK,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            libc::NETLINK_ROUTE,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let question = question(interface);
    // SAFETY: the bytes outlive the call. Without an address, a netlink message goes to the kernel, which answers before the call
    // returns.
    let sent = unsafe { libc::send(socket.as_raw_fd(), question.as_ptr().cast(), question.len(), 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut answer = vec![0; ANSWER_BYTES];
    // SAFETY: the buffer is as long as the call is told.
    let got = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            answer.as_mut_ptr().cast(),
            answer.len(),
            libc::MSG_DONTWAIT,
        )
    };
    answer.truncate(usize::try_from(got).map_err(|_| io::Error::last_os_error())?);
    Ok(answer)
}

fn question(interface: &str) -> Vec<u8> {
    let attribute_bytes = 4 + interface.len() + 1;
    let len = (HEADER_BYTES + DCB_HEADER_BYTES + attribute_bytes).next_multiple_of(4);
    let mut bytes = Vec::with_capacity(len);
    bytes.extend((len as u32).to_ne_bytes());
    bytes.extend(RTM_GETDCB.to_ne_bytes());
    bytes.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // A sequence number and a port: one question, one answer.
    bytes.extend([0; 8]);
    bytes.extend([libc::AF_UNSPEC as u8, DCB_CMD_IEEE_GET, 0, 0]);
    bytes.extend((attribute_bytes as u16).to_ne_bytes());
    bytes.extend(DCB_ATTR_IFNAME.to_ne_bytes());
    bytes.extend(interface.as_bytes());
    bytes.resize(len, 0);
    bytes
}

fn parse(answer: &[u8]) -> Option<u8> {
    let len = u32::from_ne_bytes(answer.get(..size_of::<u32>())?.try_into().ok()?);
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    if kind != RTM_GETDCB {
        return None;
    }
    let attributes = answer.get(HEADER_BYTES + DCB_HEADER_BYTES..usize::try_from(len).ok()?)?;
    let ieee = attribute(attributes, DCB_ATTR_IEEE)?;
    // `struct ieee_pfc`: how many priorities it could pause, then which ones it does.
    attribute(ieee, DCB_ATTR_IEEE_PFC)?.get(1).copied()
}

/// The payload of the first attribute of this type.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?);
        // Shorter than its own header, it would never end.
        let payload = bytes.get(4..len)?;
        if kind & NLA_TYPE_MASK == wanted {
            return Some(payload);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn attribute_of(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = ((payload.len() + 4) as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn answer(pfc: &[u8]) -> Vec<u8> {
        let tables = [attribute_of(1, &[7; 13]), attribute_of(DCB_ATTR_IEEE_PFC, pfc)].concat();
        let body = [
            attribute_of(DCB_ATTR_IFNAME, b"eth0\0"),
            // The highest bit says that there are attributes inside.
            attribute_of(DCB_ATTR_IEEE | 0x8000, &tables),
        ]
        .concat();
        let mut bytes = ((HEADER_BYTES + DCB_HEADER_BYTES + body.len()) as u32)
            .to_ne_bytes()
            .to_vec();
        bytes.extend(RTM_GETDCB.to_ne_bytes());
        bytes.resize(HEADER_BYTES + DCB_HEADER_BYTES, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn the_paused_priorities_are_found_in_an_answer() {
        assert_eq!(parse(&answer(&[8, 0b1000, 0])), Some(0b1000));
        assert_eq!(parse(&answer(&[8])), None);
        let mut refused = answer(&[8, 1]);
        refused[4] = libc::NLMSG_ERROR as u8;
        assert_eq!(parse(&refused), None);
        assert_eq!(question("eth0").len(), 32);
    }

    #[test]
    fn an_interface_that_does_not_exist_says_nothing() {
        assert_eq!(paused_priorities("no-such-one"), None);
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(place in 0..80usize, byte in any::<u8>(), cut in 0..100usize, noise in prop::collection::vec(any::<u8>(), 0..100)) {
            parse(&noise);
            let mut bytes = answer(&[8, 3, 0]);
            if let Some(spoiled) = bytes.get_mut(place) {
                *spoiled = byte;
            }
            bytes.truncate(cut);
            parse(&bytes);
        }
    }
}
