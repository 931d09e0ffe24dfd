//! Clients come in here: so many at a time, over TCP or TLS, and each within the time that it has for what it does.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::guests::{Guest, Guests};

/// A head is no longer, nor is what a connection reads ahead.
const BUFFER_BYTES: usize = 32 << 10;
/// When the system has no descriptor left, a little later it may.
const PAUSE: Duration = Duration::from_millis(20);

/// How long clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// To greet, and for each head; a connection on which nothing is asked for as long is closed.
    pub head: Duration,
    /// To take the next bytes of an answer.
    pub take: Duration,
}

/// Answers requests of one guest.
pub trait Host: Clone + Send + Sync + 'static {
    fn answer(&self, request: Request<Incoming>, guest: Arc<Guest>) -> impl Future<Output = Response> + Send;
}

/// Lets clients in until it is told to stop, and then waits for those whose answers are under way.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    guests: Arc<Guests>,
    manners: Manners,
    host: impl Host,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Ok((stream, _)) = accepted else {
            // The client has gone already, or there are no descriptors.
            guests.make_room();
            sleep(PAUSE).await;
            continue;
        };
        let guest = tokio::select! {
            guest = guests.enter() => Arc::new(guest),
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let (tls, host, stop) = (tls.clone(), host.clone(), stop.clone());
        tokio::spawn(async move {
            let attended = attend(stream, tls, &guest, manners, host, stop);
            tokio::select! {
                () = attended => {}
                () = guest.asked_to_leave() => {}
            }
        });
    }
    drop(listener);
    guests.empty().await;
}

async fn attend(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    guest: &Arc<Guest>,
    manners: Manners,
    host: impl Host,
    stop: watch::Receiver<bool>,
) {
    // An answer is often a word at a time. Where that cannot be set it comes a little later.
    let _ = stream.set_nodelay(true);
    let stream = Patient::new(stream, manners.take);
    match tls {
        None => speak(stream, guest, manners, host, stop).await,
        Some(tls) => {
            // Who cannot greet has nothing that an answer could go to.
            if let Ok(Ok(stream)) = timeout(manners.head, tls.accept(stream)).await {
                speak(stream, guest, manners, host, stop).await;
            }
        }
    }
}

async fn speak(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    guest: &Arc<Guest>,
    manners: Manners,
    host: impl Host,
    mut stop: watch::Receiver<bool>,
) {
    let service = hyper::service::service_fn(|request| {
        let (host, guest) = (host.clone(), Arc::clone(guest));
        async move {
            let response = host.answer(request, Arc::clone(&guest)).await;
            Ok::<_, Infallible>(response.map(|body| Body::new(Served { body, guest })))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(manners.head)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        // However it ends, the client is gone.
        _ = connection.as_mut() => return,
        _ = stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// The body of an answer. When it has gone its client waits again.
struct Served {
    body: Body,
    guest: Arc<Guest>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.guest.waits();
    }
}

impl HttpBody for Served {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream whose far end has so long to take what is written to it.
struct Patient<S> {
    stream: S,
    patience: Duration,
    /// Since a write has waited.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    fn new(stream: S, patience: Duration) -> Patient<S> {
        Patient {
            stream,
            patience,
            waiting: None,
        }
    }

    fn watched<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(patience)));
        match waiting.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watched(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watched(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
