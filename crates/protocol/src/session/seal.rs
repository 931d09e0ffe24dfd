//! Words that strangers carry, and that agents who share a secret still believe.
//!
//! Some of what one agent tells another goes neither over a path nor through a session: a prefill side hands its words to a router, and the
//! router hands them on. A [`Seal`] lets the far end know that somebody with the secret has written them, that nothing was changed, that
//! they are not too old, and that they were written about the very thing that they are presented for.
//!
//! Its key comes from the secret and a label. Words sealed under one label mean nothing under another, and the key tells
//! nothing about those of sessions.
//!
//! ```
//! use weft_plan::Time;
//! use weft_protocol::session::{Seal, SealError, Secret};
//!
//! let seal = Seal::new(&Secret::new(b"known to both"), "where prompts are");
//! let sealed = seal.close(b"in block 7", b"prompt 1", Time::from_secs(60))?;
//! assert_eq!(seal.open(&sealed, b"prompt 1", Time::from_secs(59)), Ok(&b"in block 7"[..]));
//! assert_eq!(seal.open(&sealed, b"prompt 2", Time::from_secs(59)), Err(SealError::AboutAnother));
//! assert_eq!(seal.open(&sealed, b"prompt 1", Time::from_secs(60)), Err(SealError::Expired));
//! # Ok::<(), SealError>(())
//! ```

use sha2::{Digest, Sha256};
use thiserror::Error;
use weft_plan::Time;

use super::config::Secret;
use super::keys::{hmac, same_proof};

/// The most bytes that can be sealed, and so the most that have to be looked at before they are believed.
pub const MAX_SEALED_BYTES: usize = 4 << 20;

const VERSION: u8 = 1;
/// Version, expiry, and the digest of what it is about.
const HEAD_BYTES: usize = 1 + 8 + 32;
const CODE_BYTES: usize = 32;

/// Closes and opens words under one label.
#[derive(Clone)]
pub struct Seal {
    key: [u8; 32],
}

/// Why words are not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SealError {
    #[error("sealed words have at most {MAX_SEALED_BYTES} bytes, and no fewer than their seal")]
    Length,
    /// Nobody with this secret has written them under this label, or they were changed.
    #[error("the seal is not one of those who know the secret")]
    Forged,
    #[error("the seal is of version {0}, which is not known here")]
    Version(u8),
    #[error("the seal has expired")]
    Expired,
    #[error("the seal was put on words about something else")]
    AboutAnother,
}

impl Seal {
    pub fn new(secret: &Secret, label: &str) -> Seal {
        Seal {
            // Sessions begin with other words, so that no label leads to a key of theirs.
            key: hmac(secret.bytes(), &[b"weft seal", label.as_bytes()]),
        }
    }

    /// Seals words. Whoever opens them says in the same bytes what they are `about`; `expires` is an instant of a clock that both ends read, such as
    /// the wall's.
    pub fn close(&self, words: &[u8], about: &[u8], expires: Time) -> Result<Vec<u8>, SealError> {
        if words.len() > MAX_SEALED_BYTES - HEAD_BYTES - CODE_BYTES {
            return Err(SealError::Length);
        }
        let mut sealed = Vec::with_capacity(HEAD_BYTES + words.len() + CODE_BYTES);
        sealed.push(VERSION);
        sealed.extend_from_slice(&expires.as_ns().to_le_bytes());
        sealed.extend_from_slice(&Sha256::digest(about));
        sealed.extend_from_slice(words);
        let code = hmac(&self.key, &[&sealed]);
        sealed.extend_from_slice(&code);
        Ok(sealed)
    }

    /// The words, if they are to be believed. Nothing of them is looked at before the code is known to be right.
    pub fn open<'a>(&self, sealed: &'a [u8], about: &[u8], now: Time) -> Result<&'a [u8], SealError> {
        if sealed.len() > MAX_SEALED_BYTES {
            return Err(SealError::Length);
        }
        let (said, code) = sealed.split_last_chunk::<CODE_BYTES>().ok_or(SealError::Length)?;
        let (head, words) = said.split_first_chunk::<HEAD_BYTES>().ok_or(SealError::Length)?;
        if !same_proof(&hmac(&self.key, &[said]), code) {
            return Err(SealError::Forged);
        }
        let (version, rest) = (head[0], &head[1..]);
        if version != VERSION {
            return Err(SealError::Version(version));
        }
        let (expires, digest) = rest.split_first_chunk::<8>().ok_or(SealError::Length)?;
        if digest != &Sha256::digest(about)[..] {
            return Err(SealError::AboutAnother);
        }
        if now >= Time::from_ns(u64::from_le_bytes(*expires)) {
            return Err(SealError::Expired);
        }
        Ok(words)
    }
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal(…)")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LATER: Time = Time::from_secs(100);

    fn seal() -> Seal {
        Seal::new(&Secret::new(b"between us"), "origin")
    }

    #[test]
    fn every_changed_bit_is_found() {
        let sealed = seal().close(b"block 7, stamp 9", b"prompt", LATER).unwrap();
        assert_eq!(
            seal().open(&sealed, b"prompt", Time::ZERO),
            Ok(&b"block 7, stamp 9"[..])
        );
        for bit in 0..8 * sealed.len() {
            let mut changed = sealed.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                seal().open(&changed, b"prompt", Time::ZERO),
                Err(SealError::Forged),
                "{bit}"
            );
        }
        for len in 0..sealed.len() {
            assert!(seal().open(&sealed[..len], b"prompt", Time::ZERO).is_err(), "{len}");
        }
    }

    #[test]
    fn another_secret_label_or_session_key_opens_nothing() {
        let sealed = seal().close(b"words", b"prompt", LATER).unwrap();
        let other = Seal::new(&Secret::new(b"between others"), "origin");
        assert_eq!(other.open(&sealed, b"prompt", Time::ZERO), Err(SealError::Forged));
        let label = Seal::new(&Secret::new(b"between us"), "offer");
        assert_eq!(label.open(&sealed, b"prompt", Time::ZERO), Err(SealError::Forged));
        // The secret itself is no key, nor is what sessions are derived from.
        assert_ne!(seal().key, hmac(b"between us", &[b"origin"]));
        assert_ne!(seal().key, hmac(b"between us", &[b"weft session", b"origin"]));
    }

    #[test]
    fn the_right_words_at_the_wrong_time_or_for_another_thing() {
        let sealed = seal().close(b"words", b"prompt", LATER).unwrap();
        let just_before = Time::from_ns(LATER.as_ns() - 1);
        assert_eq!(seal().open(&sealed, b"prompt", just_before), Ok(&b"words"[..]));
        assert_eq!(seal().open(&sealed, b"prompt", LATER), Err(SealError::Expired));
        assert_eq!(
            seal().open(&sealed, b"another", Time::ZERO),
            Err(SealError::AboutAnother)
        );
    }

    #[test]
    fn what_is_too_long_is_neither_sealed_nor_opened() {
        let long = vec![0; MAX_SEALED_BYTES];
        assert_eq!(seal().close(&long, b"", LATER), Err(SealError::Length));
        assert_eq!(
            seal().open(&[&long[..], &[0]].concat(), b"", Time::ZERO),
            Err(SealError::Length)
        );
        let most = &long[..MAX_SEALED_BYTES - HEAD_BYTES - CODE_BYTES];
        let sealed = seal().close(most, b"", LATER).unwrap();
        assert_eq!(seal().open(&sealed, b"", Time::ZERO), Ok(most));
    }

    proptest! {
        #[test]
        fn noise_is_never_believed(noise in proptest::collection::vec(any::<u8>(), 0..300), about in any::<[u8; 8]>()) {
            prop_assert!(seal().open(&noise, &about, Time::ZERO).is_err());
        }

        #[test]
        fn what_was_sealed_opens_and_only_so(
            words in proptest::collection::vec(any::<u8>(), 0..200), about in proptest::collection::vec(any::<u8>(), 0..40),
            expires in 1u64..=u64::MAX,
        ) {
            let sealed = seal().close(&words, &about, Time::from_ns(expires)).unwrap();
            prop_assert_eq!(seal().open(&sealed, &about, Time::from_ns(expires - 1)), Ok(&words[..]));
            prop_assert_eq!(seal().open(&sealed, &about, Time::from_ns(expires)), Err(SealError::Expired));
        }
    }
}
