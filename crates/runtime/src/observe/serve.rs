//! The smallest HTTP server that Prometheus can scrape.
//!
//! It answers one request a connection, with bounds on the request, on the time it may take, and on how many clients there are at once.
//! One thread looks after all of them and waits for none: a client that says nothing keeps nobody else from being served.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_fabric::bell::Bell;
use weft_fabric::fork::NotInherited;

use super::ObserveError;
use super::metrics::{Metrics, render};

const REQUEST_BYTES_MAX: usize = 8192;
const REQUEST_TIME_MAX: Duration = Duration::from_secs(2);
/// One more pushes out the one that has been there for longest.
const CLIENTS_MAX: usize = 32;
/// So many are let in before those that are there are looked at again.
const ACCEPTED_A_TURN: usize = 32;
/// How long to wait for a client that takes its answer slowly, or for descriptors to come free.
const PAUSE: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    bell: Arc<Bell>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(
        address: SocketAddr,
        metrics: Arc<Mutex<Metrics>>,
        dropped: Arc<AtomicU64>,
    ) -> Result<Server, ObserveError> {
        let refused = |source| ObserveError::Listen { address, source };
        let listener = NotInherited::open(|| TcpListener::bind(address)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let bell = Arc::new(Bell::new([listener.as_fd()].into_iter()).map_err(refused)?);
        let stopping = Arc::new(AtomicBool::new(false));
        let mut desk = Desk {
            listener,
            bell: Arc::clone(&bell),
            clients: VecDeque::new(),
            page: move || render(&metrics, dropped.load(Ordering::Relaxed)),
        };
        let stop = Arc::clone(&stopping);
        let thread = std::thread::Builder::new()
            .name("weft-metrics".to_owned())
            .spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    desk.turn();
                }
            })
            .map_err(ObserveError::Thread)?;
        Ok(Server {
            address,
            bell,
            stopping,
            thread: Some(thread),
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Where clients come, and those that are there, the oldest first.
struct Desk<P> {
    listener: NotInherited<TcpListener>,
    bell: Arc<Bell>,
    clients: VecDeque<Client>,
    /// Makes the page that is asked for.
    page: P,
}

struct Client {
    stream: NotInherited<TcpStream>,
    /// By when it is done, or gone.
    until: Instant,
    state: State,
}

enum State {
    /// What has come of the request.
    Asking(Vec<u8>),
    /// What is left of the answer.
    Answered { answer: Vec<u8>, written: usize },
}

impl<P: Fn() -> String> Desk<P> {
    fn turn(&mut self) {
        let crowded = self.let_in().is_err();
        let now = Instant::now();
        self.clients.retain_mut(|client| client.turn(&self.page, now));
        // A client that takes its answer slowly is not announced, and one that has hung up meanwhile would be announced all the time.
        if crowded || self.clients.iter().any(Client::is_answered) {
            std::thread::sleep(PAUSE);
            return;
        }
        let next = self.clients.iter().map(|client| client.until).min();
        self.bell
            .sleep(next.map(|until| until.saturating_duration_since(Instant::now())));
    }

    /// Takes in those who have come. The error: there is no room in this process.
    fn let_in(&mut self) -> std::io::Result<()> {
        for _ in 0..ACCEPTED_A_TURN {
            let stream = match NotInherited::open(|| self.listener.accept().map(|(stream, _)| stream)) {
                Ok(stream) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // A client that is gone already.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            stream.set_nonblocking(true)?;
            self.bell.watch(stream.as_fd())?;
            if self.clients.len() >= CLIENTS_MAX {
                self.clients.pop_front();
            }
            self.clients.push_back(Client {
                stream,
                until: Instant::now() + REQUEST_TIME_MAX,
                state: State::Asking(Vec::new()),
            });
        }
        Ok(())
    }
}

impl Client {
    fn is_answered(&self) -> bool {
        matches!(self.state, State::Answered { .. })
    }

    /// Does what can be done at once. False: it is done, or gone.
    fn turn(&mut self, page: impl Fn() -> String, now: Instant) -> bool {
        if let State::Asking(request) = &mut self.state {
            let ended = match listen(&self.stream, request) {
                Ok(ended) => ended,
                Err(_) => return false,
            };
            let answer = match request.windows(4).any(|four| four == b"\r\n\r\n") {
                true => answer(request, page),
                false if ended => return false,
                false if now >= self.until || request.len() > REQUEST_BYTES_MAX => {
                    response("400 Bad Request", "the request is too long or too slow\n")
                }
                false => return true,
            };
            self.state = State::Answered { answer, written: 0 };
            // Whoever has asked in time has as much time again for the answer.
            self.until = now + REQUEST_TIME_MAX;
        }
        let State::Answered { answer, written } = &mut self.state else {
            return true;
        };
        while *written < answer.len() {
            match (&*self.stream).write(&answer[*written..]) {
                Ok(0) => return false,
                Ok(more) => *written += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return now < self.until,
                Err(_) => return false,
            }
        }
        false
    }
}

/// Takes in what has come of a request, and tells whether no more will come.
fn listen(mut stream: &TcpStream, request: &mut Vec<u8>) -> std::io::Result<bool> {
    let mut chunk = [0; 1024];
    while request.len() <= REQUEST_BYTES_MAX {
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(true),
            Ok(n) => request.extend_from_slice(&chunk[..n]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

fn answer(request: &[u8], page: impl Fn() -> String) -> Vec<u8> {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => response("200 OK", &page()),
        (Some(b"GET"), _) => response("404 Not Found", "metrics are at /metrics\n"),
        _ => response("405 Method Not Allowed", "only GET is answered\n"),
    }
}

fn response(status: &str, body: &str) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}
