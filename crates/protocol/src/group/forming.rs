//! How the ranks of a group meet: each says who it is to all, and hears it from all.

use std::fmt;

use thiserror::Error;
use weft_plan::{Rank, Time};

use super::notes::{Note, Notes};
use super::record::{Abort, CallRecord, Cause};
use crate::agent::Core;
use crate::memory::Digest;
use crate::transfer::PeerId;
use crate::transport::Transport;
use crate::wire::{DecodeError, Reader, Writer};

/// The kind of letter that a hello is. Others are for those that form a group to use.
pub const HELLO: u8 = 0;
/// Of each of the texts in a hello.
const TEXT_BYTES_MAX: usize = 256;

/// What a rank says of itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub rank: Rank,
    pub size: u32,
    /// It shares memory with ranks on its host.
    pub arena: bool,
    pub channels: u16,
    /// A digest of the platform that it chooses by.
    pub platform: u64,
    pub host: String,
    /// The name of its platform.
    pub platform_name: String,
    /// The names of its transports, best first, with commas between them.
    pub transports: String,
}

/// Why no group comes about.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FormingError {
    #[error("rank {} has {theirs} channels, this one {ours}", rank.0)]
    Channels { rank: Rank, theirs: u16, ours: u16 },
    #[error("rank {} goes by the platform {theirs}, and this one by {ours}", rank.0)]
    Platforms { rank: Rank, theirs: String, ours: String },
    #[error("{0}")]
    Withdrawn(Box<Abort>),
    #[error("rank {} is lost", rank.0)]
    Lost { rank: Rank },
}

/// One rank that meets the others. Whose sessions are theirs is [known](Notes::knows) of some, and the others come by themselves.
#[derive(Debug)]
pub struct Forming {
    own: Hello,
    hellos: Vec<Option<Hello>>,
    greeted: Vec<bool>,
}

impl Forming {
    pub fn new(own: Hello) -> Forming {
        let (size, place) = (own.size as usize, own.rank.0 as usize);
        let mut forming = Forming {
            hellos: vec![None; size],
            greeted: vec![false; size],
            own,
        };
        forming.hellos[place] = Some(forming.own.clone());
        forming.greeted[place] = true;
        forming
    }

    /// Says hello to those that have become known, and hears it. `Some`: everybody has said it and has been told it.
    pub fn poll<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        notes: &mut Notes,
        now: Time,
    ) -> Result<Option<Vec<Hello>>, FormingError> {
        for (peer, hello) in notes.take_letters(HELLO) {
            let hello = Hello::from_bytes(&hello).ok();
            let Some(hello) = hello.filter(|hello| hello.rank.0 < self.own.size && hello.size == self.own.size) else {
                continue;
            };
            let place = hello.rank.0 as usize;
            let known = notes.peers()[place];
            // Nobody takes the place of a rank that has been found, or of this one.
            if hello.rank == self.own.rank || known.is_some_and(|known| known != peer) {
                continue;
            }
            notes.knows(hello.rank, peer);
            self.hellos[place].get_or_insert(hello);
        }
        let (group, peers) = (notes.group(), notes.peers().to_vec());
        for (other, peer) in peers.iter().enumerate() {
            if let Some(peer) = peer.filter(|_| !self.greeted[other]) {
                let content = self.own.to_bytes();
                let hello = Note::Letter { kind: HELLO, content }.to_bytes();
                // Who is gone is found below.
                self.greeted[other] = core.send_parcel(peer, group, &[&hello], now) == Ok(true);
            }
        }
        if self.greeted.iter().all(|greeted| *greeted)
            && let Some(hellos) = self.hellos.iter().cloned().collect::<Option<Vec<Hello>>>()
        {
            return self.check(hellos).map(Some);
        }
        if let Some(abort) = notes.abort() {
            return Err(FormingError::Withdrawn(Box::new(abort)));
        }
        // Whoever is gone may have said why before.
        let is_gone = |peer: &Option<PeerId>| peer.is_some_and(|peer| !core.is_connected(peer));
        match peers.iter().position(is_gone) {
            Some(rank) => Err(FormingError::Lost {
                rank: Rank(rank as u32),
            }),
            None => Ok(None),
        }
    }

    /// Those that have not said hello.
    pub fn missing(&self) -> impl Iterator<Item = Rank> {
        let silent = self.hellos.iter().enumerate().filter(|(_, hello)| hello.is_none());
        silent.map(|(rank, _)| Rank(rank as u32))
    }

    /// Tells everybody that this rank does not take part after all.
    pub fn withdraw<T: ?Sized + Transport>(own: Rank, core: &mut Core<T>, notes: &Notes, now: Time) {
        let abort = Abort {
            by: own,
            blamed: own,
            cause: Cause::Withdrew,
            step: 0,
            called: CallRecord::new(0, 0, "forming the group"),
            instead: None,
        };
        notes.say(core, &Note::Abort(Box::new(abort)), now);
    }

    fn check(&self, hellos: Vec<Hello>) -> Result<Vec<Hello>, FormingError> {
        let own = &self.own;
        if let Some(other) = hellos.iter().find(|hello| hello.channels != own.channels) {
            return Err(FormingError::Channels {
                rank: other.rank,
                theirs: other.channels,
                ours: own.channels,
            });
        }
        match hellos.iter().find(|hello| hello.platform != own.platform) {
            Some(other) => Err(FormingError::Platforms {
                rank: other.rank,
                theirs: PlatformOf(other).to_string(),
                ours: PlatformOf(own).to_string(),
            }),
            None => Ok(hellos),
        }
    }
}

struct PlatformOf<'a>(&'a Hello);

impl fmt::Display for PlatformOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ({:016x})", self.0.platform_name, self.0.platform)
    }
}

impl Hello {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::new();
        for number in [self.rank.0, self.size, u32::from(self.channels)] {
            w.buf.extend_from_slice(&number.to_le_bytes());
        }
        w.u8(u8::from(self.arena));
        w.u64_fixed(self.platform);
        for text in [&self.host, &self.platform_name, &self.transports] {
            w.str(&text[..text.floor_char_boundary(TEXT_BYTES_MAX)]);
        }
        w.buf
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Hello, DecodeError> {
        let mut r = Reader::new(bytes);
        let mut number = || {
            let bytes = r.take(4)?.try_into().map_err(|_| DecodeError::Invalid)?;
            Ok(u32::from_le_bytes(bytes))
        };
        let (rank, size, channels) = (number()?, number()?, number()?);
        let arena = r.u8()? != 0;
        let platform = r.u64_fixed()?;
        let mut text = || r.str(TEXT_BYTES_MAX).map(str::to_owned);
        let (host, platform_name, transports) = (text()?, text()?, text()?);
        r.end()?;
        Ok(Hello {
            rank: Rank(rank),
            size,
            arena,
            channels: u16::try_from(channels).map_err(|_| DecodeError::Invalid)?,
            platform,
            host,
            platform_name,
            transports,
        })
    }
}

/// The number that the parcels of a group are told apart by.
pub fn group_id(of: &[&[u8]]) -> u64 {
    let mut digest = Digest::default();
    of.iter().for_each(|part| digest.update(part));
    // The next one is for messages, and nobody else's.
    digest.finish() & !1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_reads_back_and_garbage_does_not() {
        let said = Hello {
            rank: Rank(3),
            size: 8,
            arena: true,
            channels: 4,
            platform: 0xabc,
            host: "a-host".to_owned(),
            platform_name: "laptop".to_owned(),
            transports: "shared_memory,tcp".to_owned(),
        };
        let bytes = said.to_bytes();
        assert_eq!(Hello::from_bytes(&bytes).as_ref(), Ok(&said));
        assert!(Hello::from_bytes(&bytes[..bytes.len() - 1]).is_err());
        assert!(Hello::from_bytes(&[bytes, vec![0]].concat()).is_err());
        assert!(Hello::from_bytes(&[1, 2, 3]).is_err());
        assert!(Hello::from_bytes(&[255; 400]).is_err());
        let host = "é".repeat(300);
        let long = Hello { host, ..said };
        let read = Hello::from_bytes(&long.to_bytes()).expect("a hello that was cut");
        assert!(long.host.starts_with(&read.host) && read.host.len() == TEXT_BYTES_MAX);
    }
}
