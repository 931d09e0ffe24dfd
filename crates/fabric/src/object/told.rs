//! What a server says, by what the caller does next.

use std::error::Error as _;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};
use weft_protocol::{Failure, Refusal};

/// A server's words are kept for whoever reads them; no more than this.
const WORDS_MAX: usize = 400;

/// A failure, and what was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub failure: Failure,
    pub words: String,
}

/// What an error means. The client tells some by their kind; of the others the code in the server's answer says it.
pub(super) fn told(error: &Error) -> Told {
    let text = error.to_string();
    let mut words: String = text.chars().take(WORDS_MAX).collect();
    words.retain(|char| !char.is_control());
    let failure = by_code(&text).unwrap_or_else(|| by_kind(error));
    Told { failure, words }
}

/// By the code that S3 and what speaks it put into the body of an answer.
fn by_code(text: &str) -> Option<Failure> {
    const CODES: &[(&str, Failure)] = &[
        ("NoSuchBucket", Failure::Refused(Refusal::NoContainer)),
        ("SlowDown", Failure::Refused(Refusal::Throttled)),
        ("TooManyRequests", Failure::Refused(Refusal::Throttled)),
        ("RequestLimitExceeded", Failure::Refused(Refusal::Throttled)),
        ("429 Too Many Requests", Failure::Refused(Refusal::Throttled)),
        ("ExpiredToken", Failure::Refused(Refusal::Denied)),
        ("InvalidAccessKeyId", Failure::Refused(Refusal::Denied)),
        ("NotSignedUp", Failure::Refused(Refusal::Denied)),
        ("SignatureDoesNotMatch", Failure::Refused(Refusal::Denied)),
        ("QuotaExceeded", Failure::Refused(Refusal::NoRoom)),
        ("InsufficientStorage", Failure::Refused(Refusal::NoRoom)),
        ("507 Insufficient Storage", Failure::Refused(Refusal::NoRoom)),
        ("InvalidRange", Failure::Refused(Refusal::NoMemory)),
        ("416 Range Not Satisfiable", Failure::Refused(Refusal::NoMemory)),
        ("BadDigest", Failure::ChecksumMismatch),
        ("InvalidDigest", Failure::ChecksumMismatch),
        ("ChecksumMismatch", Failure::ChecksumMismatch),
        ("MethodNotAllowed", Failure::Refused(Refusal::ReadOnly)),
    ];
    // The text has the object's name as well, which may be anything: a code counts where a server says codes.
    let says = |code: &str| match code.contains(' ') {
        true => text.contains(code),
        false => text.contains(&format!("<Code>{code}</Code>")),
    };
    let found = CODES.iter().find(|(code, _)| says(code));
    found.map(|(_, failure)| *failure)
}

fn by_kind(error: &Error) -> Failure {
    let refusal = match error {
        // What was there when it was begun is not there any more.
        Error::NotFound { .. } | Error::Precondition { .. } => Refusal::NoMemory,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Refusal::Denied,
        Error::Generic { .. } => match http_kind(error) {
            Some(
                HttpErrorKind::Connect | HttpErrorKind::Timeout | HttpErrorKind::Interrupted | HttpErrorKind::Request,
            ) => Refusal::NotReached,
            _ => Refusal::DeviceFailed,
        },
        _ => Refusal::DeviceFailed,
    };
    refusal.into()
}

fn http_kind(error: &Error) -> Option<HttpErrorKind> {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(http) = cause.downcast_ref::<HttpError>() {
            return Some(http.kind());
        }
        source = cause.source();
    }
    None
}
