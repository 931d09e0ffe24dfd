//! A gate between a client and a server, which lets everything through until it is told to do harm.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// What a gate does to those who go through it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Harm {
    #[default]
    None,
    /// Connections are closed at once, as if nobody were there.
    Closed,
    /// Nothing goes on until the harm ends.
    Held,
    /// Every answer is cut after so many bytes, headers included.
    Cut(usize),
    /// Every request is answered with this status and this code.
    Answer(u16, &'static str),
}

#[derive(Debug, Default)]
struct State {
    harm: Mutex<Harm>,
    changed: Condvar,
}

/// Where to connect instead of to the server.
#[derive(Debug)]
pub struct Gate {
    port: u16,
    state: Arc<State>,
}

impl Gate {
    /// Before the server at this port.
    pub fn before(server: u16) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let state = Arc::<State>::default();
        let known = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = Arc::clone(&known);
                std::thread::spawn(move || let_through(&state, client, server));
            }
        });
        Gate { port, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn harm(&self, harm: Harm) {
        *self.state.harm.lock().unwrap_or_else(PoisonError::into_inner) = harm;
        self.state.changed.notify_all();
    }
}

impl State {
    /// What is to be done now; waits while everything is held.
    fn now(&self) -> Harm {
        let harm = self.harm.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(harm, |harm| *harm == Harm::Held);
        waited.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn let_through(state: &Arc<State>, client: TcpStream, server: u16) {
    match state.now() {
        Harm::Closed => return,
        Harm::Answer(status, code) => return answer(client, status, code),
        _ => {}
    }
    let Ok(upstream) = TcpStream::connect(("127.0.0.1", server)) else {
        return;
    };
    let _ = (client.set_nodelay(true), upstream.set_nodelay(true));
    let (Ok(from_client), Ok(to_server)) = (client.try_clone(), upstream.try_clone()) else {
        return;
    };
    let there = Arc::clone(state);
    let forth = std::thread::spawn(move || pass(&there, from_client, to_server, false));
    pass(state, upstream, client, true);
    let _ = forth.join();
}

/// Bytes of one direction, until the harm says otherwise.
fn pass(state: &State, mut from: TcpStream, mut to: TcpStream, is_answer: bool) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    loop {
        let read = from.read(&mut buffer).unwrap_or(0);
        let mut len = read;
        match state.now() {
            Harm::Closed | Harm::Answer(..) => len = 0,
            Harm::Cut(most) if is_answer => len = len.min(most.saturating_sub(passed)),
            _ => {}
        }
        passed += len;
        let sent = to.write_all(&buffer[..len]).is_ok();
        if len == 0 || len < read || !sent {
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            return;
        }
    }
}

/// Takes one request in, and says no.
fn answer(mut client: TcpStream, status: u16, code: &str) {
    let _ = client.set_read_timeout(Some(Duration::from_secs(5)));
    let (mut head, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    let end = loop {
        let read = client.read(&mut buffer).unwrap_or(0);
        if read == 0 || head.len() > 1 << 20 {
            return;
        }
        head.extend_from_slice(&buffer[..read]);
        if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
    let length = text
        .lines()
        .find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    let mut left = usize::saturating_sub(length.unwrap_or(0), head.len() - end);
    while left > 0 {
        match client.read(&mut buffer) {
            Ok(read) if read > 0 => left = left.saturating_sub(read),
            _ => return,
        }
    }
    let body =
        format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>as the test wants it</Message></Error>");
    let _ = write!(
        client,
        "HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
}
