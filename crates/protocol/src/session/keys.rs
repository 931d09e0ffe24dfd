//! Who knows the secret, and which messages come from somebody who does.
//!
//! The handshake proves the secret with HMAC-SHA256 over the two openings, each of which holds a number never used before. What the ends then
//! say of themselves is signed by the same transcript, and from it come two keys, one a direction, so that a message reflected to its sender or
//! carried into another session does not verify. Messages are then authenticated with SipHash-2-4 in its 128-bit form: a pseudo-random
//! function made for short inputs, so that a notification stays cheap.

use std::hash::Hasher;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use siphasher::sip128::{Hasher128, SipHasher24};

use super::config::Secret;
use super::event::SessionId;

/// The bytes of the code that ends every message of an established session.
pub(super) const CODE_BYTES: usize = 16;

pub const PROOF_BYTES: usize = 32;
/// What shows that its sender knows the secret.
pub type Proof = [u8; PROOF_BYTES];

/// Who came, and who was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Initiator,
    Acceptor,
}

/// What both ends have said, boiled down with the secret.
///
/// Whoever came proves first; who was there answers with a signed introduction. Another protocol that proves the same secret has other
/// first bytes in its openings, so that no proof of one is of use in the other.
pub struct Transcript([u8; 32]);

impl Transcript {
    /// `hello` and `challenge` are the messages as they crossed the wire.
    pub fn new(secret: &Secret, hello: &[u8], challenge: &[u8]) -> Transcript {
        // Both are hashed first: the hashes have one length, so no two pairs of messages run together into the same bytes.
        let (hello, challenge) = (Sha256::digest(hello), Sha256::digest(challenge));
        Transcript(hmac(secret.bytes(), &[b"weft session", &hello, &challenge]))
    }

    /// What the initiator presents to show that it knows the secret. The acceptor's introduction is its proof.
    pub fn proof(&self) -> Proof {
        hmac(&self.0, &[b"proof of the initiator"])
    }

    /// What shows that an introduction is by `role`, who knows the secret.
    pub fn code(&self, role: Role, introduction: &[u8]) -> Proof {
        match role {
            Role::Initiator => hmac(&self.0, &[b"introduction of the initiator", introduction]),
            Role::Acceptor => hmac(&self.0, &[b"introduction of the acceptor", introduction]),
        }
    }

    pub(super) fn session(&self) -> SessionId {
        SessionId(u128::from_le_bytes(half(hmac(&self.0, &[b"session id"]))))
    }

    /// The keys as seen by `role`.
    pub(super) fn keys(&self, role: Role) -> Keys {
        let forth = SipHasher24::new_with_key(&half(hmac(&self.0, &[b"initiator to acceptor"])));
        let back = SipHasher24::new_with_key(&half(hmac(&self.0, &[b"acceptor to initiator"])));
        match role {
            Role::Initiator => Keys {
                send: forth,
                receive: back,
            },
            Role::Acceptor => Keys {
                send: back,
                receive: forth,
            },
        }
    }
}

/// The keys of an established session.
pub(super) struct Keys {
    send: SipHasher24,
    receive: SipHasher24,
}

impl std::fmt::Debug for Transcript {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Transcript(…)")
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(…)")
    }
}

impl Keys {
    /// Appends the code that binds `message` to this session, direction and path.
    pub(super) fn seal(&self, label: u64, message: &mut Vec<u8>) {
        let code = code(&self.send, label, message);
        message.extend_from_slice(&code.to_le_bytes());
    }

    /// The message without its code, if the code is right.
    pub(super) fn open<'a>(&self, label: u64, sealed: &'a [u8]) -> Option<&'a [u8]> {
        let (message, presented) = sealed.split_last_chunk::<CODE_BYTES>()?;
        let difference = u128::from_le_bytes(*presented) ^ code(&self.receive, label, message);
        // Compared as a whole, so that the time taken tells nothing about how much of a guess was right.
        (std::hint::black_box(difference) == 0).then_some(message)
    }
}

/// Compares proofs without an early exit.
pub fn same_proof(a: &Proof, b: &Proof) -> bool {
    let difference = a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(difference) == 0
}

fn code(key: &SipHasher24, label: u64, message: &[u8]) -> u128 {
    let mut hasher = *key;
    hasher.write(&label.to_le_bytes());
    hasher.write(message);
    hasher.finish128().as_u128()
}

pub(super) fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

fn half(whole: [u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| whole[i])
}
