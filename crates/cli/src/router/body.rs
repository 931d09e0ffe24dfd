//! Bodies of requests: read within a time and within memory that is accounted for, and made into what instances may be given.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use memmap2::{Advice, MmapMut, MmapOptions};
use thiserror::Error;
use tokio::time::timeout;

use super::guests::{Charge, Guest};
use super::json::{self, Field, JsonError, Keys};
use super::multipart::{self, MultipartError};

/// Of each body so much is not accounted for: most prompts are shorter, and are heard whatever others send.
const FREE_BYTES: usize = 64 << 10;
/// So much more is accounted for at a time.
const STEP_BYTES: usize = 256 << 10;
/// A longer body is looked at by a thread that nobody else waits for.
const QUICK_BYTES: usize = 256 << 10;
/// What a connection is given at a time, so that it holds no whole body a second time.
const FRAME_BYTES: usize = 64 << 10;

/// What a body may be.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits {
    pub bytes: usize,
    /// From the end of the head to the last byte.
    pub time: Duration,
}

/// Why a request is not passed on.
#[derive(Debug, Error)]
pub enum Unacceptable {
    #[error("the body is longer than {0} bytes")]
    TooLong(usize),
    #[error("the body did not come in time")]
    Slow,
    #[error("the body broke off")]
    BrokeOff,
    #[error("there are too many bodies under way")]
    Crowded,
    #[error("a body is JSON, or a form of several parts")]
    Type,
    #[error("a body comes as it is, and not compressed")]
    Encoded,
    #[error("the body {0}")]
    Json(#[from] JsonError),
    #[error("the body {0}")]
    Multipart(#[from] MultipartError),
}

impl Unacceptable {
    pub fn status(&self) -> StatusCode {
        match self {
            Unacceptable::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Unacceptable::Slow => StatusCode::REQUEST_TIMEOUT,
            Unacceptable::Crowded => StatusCode::SERVICE_UNAVAILABLE,
            Unacceptable::Type | Unacceptable::Encoded => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Unacceptable::BrokeOff | Unacceptable::Json(_) | Unacceptable::Multipart(_) => StatusCode::BAD_REQUEST,
        }
    }
}

/// What a client has sent, as an instance may be given it.
#[derive(Clone, Debug)]
pub enum Content {
    Nothing,
    Json(Document),
    Form { content_type: HeaderValue, pieces: Pieces },
}

/// An object in JSON, and where its fields are.
#[derive(Clone, Debug)]
pub struct Document {
    pub text: Bytes,
    pub fields: Vec<Field>,
}

/// Bytes one after the other. To give them to several instances copies none of them.
#[derive(Clone, Debug, Default)]
pub struct Pieces(pub Vec<Bytes>);

/// Reads a body, and makes of it what may be passed on.
pub async fn read(headers: &HeaderMap, body: Body, guest: &Guest, limits: BodyLimits) -> Result<Content, Unacceptable> {
    if body.is_end_stream() {
        return Ok(Content::Nothing);
    }
    let boundary = boundary_of_form(headers)?;
    let memory = timeout(limits.time, gather(body, guest, limits.bytes)).await;
    let memory = memory.unwrap_or(Err(Unacceptable::Slow))?;
    match memory.len {
        0 => Ok(Content::Nothing),
        1..=QUICK_BYTES => accept(memory, boundary),
        // A thread that is gone has accepted nothing.
        _ => tokio::task::spawn_blocking(move || accept(memory, boundary))
            .await
            .unwrap_or(Err(Unacceptable::BrokeOff)),
    }
}

fn accept(mut memory: Memory, boundary: Option<String>) -> Result<Content, Unacceptable> {
    if let Some(boundary) = boundary {
        let (content_type, pieces) = multipart::rewrite(&Bytes::from_owner(memory), &boundary)?;
        let pieces = Pieces(pieces);
        return Ok(Content::Form { content_type, pieces });
    }
    let (len, fields) = json::rewrite(memory.as_mut(), Keys::LeaveOut)?;
    memory.len = len;
    let text = Bytes::from_owner(memory);
    Ok(Content::Json(Document { text, fields }))
}

/// What separates the parts of a form; `None` where the body is to be JSON.
fn boundary_of_form(headers: &HeaderMap) -> Result<Option<String>, Unacceptable> {
    let mut encodings = headers.get_all(CONTENT_ENCODING).into_iter();
    if !encodings.all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(Unacceptable::Encoded);
    }
    let mut types = headers.get_all(CONTENT_TYPE).into_iter();
    let (Some(named), None) = (types.next(), types.next()) else {
        return match headers.contains_key(CONTENT_TYPE) {
            // Who reads it may take either.
            true => Err(Unacceptable::Type),
            false => Ok(None),
        };
    };
    let named = named.to_str().map_err(|_| Unacceptable::Type)?;
    let kind = named.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match kind.as_str() {
        "application/json" => Ok(None),
        "multipart/form-data" => Ok(Some(multipart::boundary(named)?)),
        _ => Err(Unacceptable::Type),
    }
}

async fn gather(mut body: Body, guest: &Guest, bytes_max: usize) -> Result<Memory, Unacceptable> {
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(Unacceptable::TooLong(bytes_max));
    }
    let mut memory = Memory::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Unacceptable::BrokeOff)?;
        if let Ok(bytes) = frame.into_data() {
            memory.append(&bytes, guest, bytes_max).await?;
        }
    }
    Ok(memory)
}

/// Memory of one body. What is large goes back to the system at once when the body is done with.
#[derive(Debug, Default)]
struct Memory {
    store: Store,
    len: usize,
    charged: usize,
    charge: Option<Charge>,
}

#[derive(Debug)]
enum Store {
    Small(Vec<u8>),
    /// Of the largest size that a body may have. Only what is written to takes memory.
    Mapped(MmapMut),
}

impl Default for Store {
    fn default() -> Store {
        Store::Small(Vec::new())
    }
}

impl Memory {
    async fn append(&mut self, bytes: &[u8], guest: &Guest, bytes_max: usize) -> Result<(), Unacceptable> {
        let end = self.len + bytes.len();
        if end > bytes_max {
            return Err(Unacceptable::TooLong(bytes_max));
        }
        if end > FREE_BYTES + self.charged {
            let more = (end - FREE_BYTES - self.charged).next_multiple_of(STEP_BYTES);
            let charge = guest.charge(more).await.map_err(|_| Unacceptable::Crowded)?;
            self.charged += more;
            match &mut self.charge {
                Some(charged) => charged.join(charge),
                none => *none = Some(charge),
            }
        }
        if let Store::Small(small) = &mut self.store {
            if end <= FREE_BYTES {
                small.extend_from_slice(bytes);
                self.len = end;
                return Ok(());
            }
            let mut map = mapped(bytes_max).map_err(|_| Unacceptable::Crowded)?;
            map[..small.len()].copy_from_slice(small);
            self.store = Store::Mapped(map);
        }
        if let Store::Mapped(map) = &mut self.store {
            map[self.len..end].copy_from_slice(bytes);
        }
        self.len = end;
        Ok(())
    }
}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        match &self.store {
            Store::Small(small) => &small[..self.len],
            Store::Mapped(map) => &map[..self.len],
        }
    }
}

impl AsMut<[u8]> for Memory {
    fn as_mut(&mut self) -> &mut [u8] {
        match &mut self.store {
            Store::Small(small) => &mut small[..self.len],
            Store::Mapped(map) => &mut map[..self.len],
        }
    }
}

fn mapped(bytes: usize) -> std::io::Result<MmapMut> {
    let map = MmapOptions::new().len(bytes).no_reserve_swap().map_anon()?;
    // A huge page would take two megabytes for the first byte. Where the kernel has none it refuses the advice.
    let _ = map.advise(Advice::NoHugePage);
    Ok(map)
}

impl Content {
    /// The type that an instance is told, which is that of what it is given.
    pub fn content_type(&self) -> Option<HeaderValue> {
        match self {
            Content::Nothing => None,
            Content::Json(_) => Some(HeaderValue::from_static("application/json")),
            Content::Form { content_type, .. } => Some(content_type.clone()),
        }
    }

    pub fn into_pieces(self) -> Pieces {
        match self {
            Content::Nothing => Pieces::default(),
            Content::Json(document) => Pieces(vec![document.text]),
            Content::Form { pieces, .. } => pieces,
        }
    }
}

impl Pieces {
    pub fn into_body(self) -> Body {
        match self.0.is_empty() {
            true => Body::empty(),
            false => Body::new(Sent(self.0.into())),
        }
    }
}

/// Pieces on their way to an instance.
struct Sent(VecDeque<Bytes>);

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        while let Some(first) = self.0.front_mut() {
            let next = first.split_to(first.len().min(FRAME_BYTES));
            if first.is_empty() {
                self.0.pop_front();
            }
            if !next.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(next))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.0.iter().all(|piece| piece.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|piece| piece.len() as u64).sum())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::guests::Guests;
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    async fn read_as(pairs: &[(&'static str, &'static str)], body: impl Into<Body>) -> Result<Content, Unacceptable> {
        let guests = Arc::new(Guests::new(4, 4 << 20));
        let limits = BodyLimits {
            bytes: 1 << 20,
            time: Duration::from_secs(5),
        };
        read(&headers(pairs), body.into(), &guests.enter().await, limits).await
    }

    #[tokio::test]
    async fn types_and_encodings_that_nobody_checks_are_refused() {
        for (pairs, status) in [
            (&[("content-type", "text/plain")][..], 415),
            (&[("content-type", "application/x-www-form-urlencoded")], 415),
            (
                &[
                    ("content-type", "application/json"),
                    ("content-type", "multipart/form-data; boundary=b"),
                ],
                415,
            ),
            (
                &[("content-type", "application/json"), ("content-encoding", "gzip")],
                415,
            ),
            (&[("content-encoding", "identity"), ("content-encoding", "br")], 415),
            (&[("content-type", "multipart/form-data")], 400),
            (&[("content-type", "multipart/form-data; boundary=b")], 400),
        ] {
            let refused = read_as(pairs, "{}").await.unwrap_err();
            assert_eq!(refused.status().as_u16(), status, "{pairs:?}");
        }
        for pairs in [
            &[][..],
            &[("content-type", "application/json")],
            &[("content-type", "Application/JSON; charset=utf-16")],
            &[("content-encoding", "identity")],
        ] {
            let content = read_as(pairs, "{ }").await.unwrap();
            assert_eq!(content.content_type().unwrap(), "application/json");
            assert_eq!(content.into_pieces().0, ["{}"]);
        }
        assert!(matches!(
            read_as(&[("content-type", "text/plain")], "").await,
            Ok(Content::Nothing)
        ));
    }

    #[tokio::test]
    async fn bodies_of_all_sizes_arrive_whole_and_give_their_bytes_back() {
        let guests = Arc::new(Guests::new(4, 2 << 20));
        let guest = guests.enter().await;
        let limits = BodyLimits {
            bytes: 1 << 20,
            time: Duration::from_secs(5),
        };
        for len in [1, FREE_BYTES - 20, FREE_BYTES + 1, QUICK_BYTES + 7, (1 << 20) - 20] {
            let text = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(len));
            let content = read(&HeaderMap::new(), Body::from(text.clone()), &guest, limits)
                .await
                .unwrap();
            assert_eq!(guests.crowd().bytes > 0, text.len() > FREE_BYTES);
            let sent = content.into_pieces().into_body().collect().await.unwrap().to_bytes();
            assert!(sent == text, "{len}");
            assert_eq!(guests.crowd().bytes, 0, "{len}");
        }
        let long = Body::from("x".repeat((1 << 20) + 1));
        let refused = read(&HeaderMap::new(), long, &guest, limits).await.unwrap_err();
        assert!(matches!(refused, Unacceptable::TooLong(_)));
        // One that does not say how long it is.
        let frames = (0..64).map(|_| Ok::<_, std::convert::Infallible>(Frame::data(Bytes::from(vec![b' '; 32 << 10]))));
        let stream = Frames(frames);
        let refused = read(&HeaderMap::new(), Body::new(stream), &guest, limits)
            .await
            .unwrap_err();
        assert!(matches!(refused, Unacceptable::TooLong(_)));
        assert_eq!(guests.crowd().bytes, 0);
    }

    struct Frames<I>(I);

    impl<I: Iterator<Item = Result<Frame<Bytes>, std::convert::Infallible>> + Unpin> HttpBody for Frames<I> {
        type Data = Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            Poll::Ready(self.0.next())
        }
    }
}
