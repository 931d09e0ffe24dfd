//! What members and the name server say to each other once both have proved that they know the secret: a kind, a length, a body.

use std::io::{self, Read, Write};
use std::time::Duration;

use crate::rendezvous::entry::{ENTRY_BYTES_MAX, Entry};

/// The job and the longest name, or an entry, with room to spare.
const FRAME_BYTES_MAX: usize = ENTRY_BYTES_MAX + 1024;

const REGISTER: u8 = 1;
const LOOKUP: u8 = 2;
const LIST: u8 = 3;
pub(super) const BEAT: u8 = 4;
pub(super) const YES: u8 = 5;
pub(super) const TAKEN: u8 = 6;
pub(super) const ABSENT: u8 = 7;

/// What a member asks for. Names of different jobs do not meet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request<'a> {
    pub(super) job: &'a [u8],
    pub(super) wish: Wish<'a>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wish<'a> {
    Register(Entry),
    Lookup { name: &'a str, wait: Duration },
    List,
}

impl<'a> Request<'a> {
    /// Of a job's name, as much as fits; all members cut it in the same way.
    pub(super) fn new(job: &'a str, wish: Wish<'a>) -> Request<'a> {
        let job = job.as_bytes();
        let job = &job[..job.len().min(u8::MAX.into())];
        Request { job, wish }
    }

    /// Its kind and its body.
    pub(super) fn encode(&self) -> (u8, Vec<u8>) {
        let mut body = vec![self.job.len() as u8];
        body.extend_from_slice(self.job);
        match &self.wish {
            Wish::Register(entry) => {
                body.extend_from_slice(&entry.to_bytes());
                (REGISTER, body)
            }
            Wish::Lookup { name, wait } => {
                let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
                body.extend_from_slice(&wait_ms.to_le_bytes());
                body.extend_from_slice(name.as_bytes());
                (LOOKUP, body)
            }
            Wish::List => (LIST, body),
        }
    }

    /// The request in a frame, if it is one.
    pub(super) fn decode(kind: u8, body: &'a [u8]) -> Option<Request<'a>> {
        let (length, rest) = body.split_first()?;
        let (job, rest) = rest.split_at_checked((*length).into())?;
        let wish = match kind {
            REGISTER => Wish::Register(Entry::from_bytes(rest)?),
            LOOKUP => {
                let (wait, name) = rest.split_first_chunk::<8>()?;
                Wish::Lookup {
                    name: std::str::from_utf8(name).ok()?,
                    wait: Duration::from_millis(u64::from_le_bytes(*wait)),
                }
            }
            LIST => Wish::List,
            _ => return None,
        };
        Some(Request { job, wish })
    }
}

pub(super) fn write_frame(stream: &mut impl Write, kind: u8, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut frame = Vec::with_capacity(5 + body.len());
    frame.push(kind);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    stream.write_all(&frame)
}

pub(super) fn read_frame(stream: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((kind, body))
}

/// Frames are refused, or are the same when they are written again; and so are the requests and the entries in them.
pub(crate) fn check(bytes: &[u8]) {
    let mut rest = bytes;
    loop {
        let before = rest;
        let Ok((kind, body)) = read_frame(&mut rest) else {
            return;
        };
        let mut written = Vec::new();
        write_frame(&mut written, kind, &body).expect("memory takes everything");
        assert_eq!(written, before[..before.len() - rest.len()]);
        if let Some(request) = Request::decode(kind, &body) {
            let (kind, body) = request.encode();
            assert_eq!(Request::decode(kind, &body), Some(request));
        }
        if let Some(entry) = Entry::from_bytes(&body) {
            assert_eq!(Entry::from_bytes(&entry.to_bytes()), Some(entry));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use weft_protocol::Epoch;

    use super::*;

    fn conversation() -> Vec<u8> {
        let entry = Entry::of_process("a/b", "tcp:127.0.0.1:1", Epoch(9)).unwrap();
        let wait = Duration::from_millis(70);
        let mut bytes = Vec::new();
        for wish in [
            Wish::Register(entry.clone()),
            Wish::Lookup { name: "a/b", wait },
            Wish::List,
        ] {
            let (kind, body) = Request::new("job", wish).encode();
            write_frame(&mut bytes, kind, &body).unwrap();
        }
        write_frame(&mut bytes, TAKEN, &entry.to_bytes()).unwrap();
        write_frame(&mut bytes, BEAT, &[]).unwrap();
        bytes
    }

    #[test]
    fn a_request_survives_its_encoding() {
        let long = "x".repeat(300);
        let request = Request::new(&long, Wish::List);
        assert_eq!(request.job.len(), 255);
        let (kind, body) = request.encode();
        assert_eq!(Request::decode(kind, &body), Some(request));
        check(&conversation());
    }

    #[test]
    fn a_frame_that_says_it_is_too_long_is_refused_before_memory_is_taken() {
        let head = [&[LIST][..], &u32::MAX.to_le_bytes()].concat();
        let error = read_frame(&mut &head[..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn any_frames(bytes: Vec<u8>, kind in 0u8..9, changes: Vec<(prop::sample::Index, u8)>) {
            check(&bytes);
            let mut framed = Vec::new();
            write_frame(&mut framed, kind, &bytes).unwrap();
            check(&framed);
            let mut changed = conversation();
            for (at, byte) in changes.into_iter().take(8) {
                let at = at.index(changed.len());
                changed[at] = byte;
            }
            check(&changed);
        }
    }
}
