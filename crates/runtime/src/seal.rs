//! Words for other agents that go neither over a path nor through a session.

use std::time::{Duration, SystemTime};

use weft_plan::Time;
use weft_protocol::session::{self, SealError, Secret};

use crate::error::Error;
use crate::settings::Settings;

/// Closes words, and opens those that others with the same secret have closed under the same label.
///
/// It needs no agent, only the secret that agents of these settings share. Expiry goes by the wall clocks of both ends, which must not differ by more
/// than words last.
#[derive(Clone, Debug)]
pub struct Seal {
    inner: session::Seal,
}

impl Seal {
    pub fn new(label: &str, settings: &Settings) -> Result<Seal, Error> {
        let secret = Secret::new(&settings.shared_secret()?);
        Ok(Seal {
            inner: session::Seal::new(&secret, label),
        })
    }

    /// Seals words about something, which whoever opens them has to name, for a while.
    pub fn close(&self, words: &[u8], about: &[u8], lasts: Duration) -> Result<Vec<u8>, SealError> {
        let expires = now().as_ns().saturating_add(Time::from(lasts).as_ns());
        self.inner.close(words, about, Time::from_ns(expires))
    }

    /// The words, where they are to be believed.
    pub fn open<'a>(&self, sealed: &'a [u8], about: &[u8]) -> Result<&'a [u8], SealError> {
        self.inner.open(sealed, about, now())
    }
}

fn now() -> Time {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Time::from(since)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Sources;

    fn seal(secret: &str) -> Seal {
        let settings = Settings::from_sources(&Sources::default().set("secret", secret)).unwrap();
        Seal::new("test", &settings).unwrap()
    }

    #[test]
    fn those_who_share_a_secret_believe_each_other_for_a_while() {
        let minute = Duration::from_secs(60);
        let sealed = seal("a secret of two").close(b"words", b"about", minute).unwrap();
        assert_eq!(seal("a secret of two").open(&sealed, b"about"), Ok(&b"words"[..]));
        assert_eq!(seal("another secret").open(&sealed, b"about"), Err(SealError::Forged));
        let old = seal("a secret of two")
            .close(b"words", b"about", Duration::ZERO)
            .unwrap();
        assert_eq!(seal("a secret of two").open(&old, b"about"), Err(SealError::Expired));
    }
}
