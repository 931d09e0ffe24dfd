//! The smallest HTTP server that Prometheus can scrape.
//!
//! It answers one request per connection, one connection at a time, with bounds on the request and on the time it may take.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_fabric::fork::NotInherited;

use super::ObserveError;
use super::metrics::{Metrics, render};

const REQUEST_BYTES_MAX: usize = 8192;
const REQUEST_TIME_MAX: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
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
        let address = listener.local_addr().map_err(refused)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopping);
        let serve = move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                match stream {
                    // A client that fails has only itself to blame; the next one is served.
                    Ok(stream) => drop(answer(stream, &metrics, &dropped)),
                    // Out of descriptors, most likely: wait for some to come free instead of spinning.
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("weft-metrics".to_owned())
            .spawn(serve)
            .map_err(ObserveError::Thread)?;
        Ok(Server {
            address,
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
        // A connection ends the wait for one. Where it fails, the thread is left to end with the process.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(if address.is_ipv4() {
                [127, 0, 0, 1].into()
            } else {
                std::net::Ipv6Addr::LOCALHOST.into()
            });
        }
        if TcpStream::connect_timeout(&address, REQUEST_TIME_MAX).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn answer(mut stream: TcpStream, metrics: &Mutex<Metrics>, dropped: &AtomicU64) -> std::io::Result<()> {
    let end = Instant::now() + REQUEST_TIME_MAX;
    stream.set_write_timeout(Some(REQUEST_TIME_MAX))?;
    let mut request = Vec::new();
    let mut chunk = [0; 1024];
    while !request.windows(4).any(|four| four == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > REQUEST_BYTES_MAX {
            return respond(&mut stream, "400 Bad Request", "the request is too long or too slow\n");
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk)? {
            0 => return Ok(()),
            n => request.extend_from_slice(&chunk[..n]),
        }
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => {
            respond(&mut stream, "200 OK", &render(metrics, dropped.load(Ordering::Relaxed)))
        }
        (Some(b"GET"), _) => respond(&mut stream, "404 Not Found", "metrics are at /metrics\n"),
        _ => respond(&mut stream, "405 Method Not Allowed", "only GET is answered\n"),
    }
}

fn respond(stream: &mut TcpStream, status: &str, body: &str) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}
