//! A descriptor from every process of a group to every other, once: how ranks whose kernels are to reach each other's memory come to it.
//!
//! Nobody waits for anybody before it has connected, and no message is longer than a socket takes at once, so all of them can do the same at the same time, by one thread each.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::socket::{Received, Socket};
use crate::fork::NotInherited;

/// What rides with a descriptor, which cannot ride alone.
const HERE_IT_IS: &[u8] = b"weft: a descriptor";
/// How often a name that listens, but has no room, is tried again.
const AGAIN: Duration = Duration::from_millis(1);

/// One process of the group, before it has given and taken.
#[derive(Debug)]
pub struct DescriptorExchange {
    listener: NotInherited<OwnedFd>,
    name: String,
}

impl DescriptorExchange {
    pub fn open() -> io::Result<DescriptorExchange> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-give-{}-{:x}-{count}", std::process::id(), since.as_nanos() as u64);
        let listener = Socket::listen(&name)?;
        Ok(DescriptorExchange { listener, name })
    }

    /// What the others have to know.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives `own` to as many processes as there are `peers`, all of this user or root, and takes theirs, in that order.
    pub fn exchange(&self, own: BorrowedFd<'_>, peers: &[String], timeout: Duration) -> io::Result<Vec<OwnedFd>> {
        let until = Instant::now() + timeout;
        let asked = peers.iter().map(|peer| connect(peer, until));
        let asked = asked.collect::<io::Result<Vec<Socket>>>()?;
        let mut taken: Vec<Option<OwnedFd>> = peers.iter().map(|_| None).collect();
        let mut given = Vec::new();
        while given.len() < peers.len() || taken.iter().any(Option::is_none) {
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if given.len() < peers.len()
                && let Some(socket) = self.accept()?
                && socket.is_of_own_user()
            {
                // A fresh socket has room for one datagram.
                socket.send(HERE_IT_IS, &[], &[own])?;
                given.push(socket);
            }
            for (socket, taken) in asked.iter().zip(&mut taken).filter(|(_, taken)| taken.is_none()) {
                *taken = take(socket)?;
            }
            wait(self.listener.as_raw_fd(), &asked, until)?;
        }
        Ok(taken.into_iter().flatten().collect())
    }

    fn accept(&self) -> io::Result<Option<Socket>> {
        match Socket::accept(self.listener.as_fd()) {
            Ok(socket) => Ok(Some(socket)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(error),
            },
        }
    }
}

fn connect(name: &str, until: Instant) -> io::Result<Socket> {
    loop {
        match Socket::connect(name) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                std::thread::sleep(AGAIN)
            }
            other => return other,
        }
    }
}

fn take(socket: &Socket) -> io::Result<Option<OwnedFd>> {
    if !socket.is_of_own_user() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut words = [0; 64];
    match socket.receive(&mut words)? {
        Received::Nothing => Ok(None),
        Received::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
        Received::Datagram {
            len, files: [file, _], ..
        } => match file {
            Some(file) if &words[..len] == HERE_IT_IS => Ok(Some(file)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        },
    }
}

/// Sleeps until somebody comes, or something.
fn wait(listener: std::os::fd::RawFd, asked: &[Socket], until: Instant) -> io::Result<()> {
    let all = std::iter::once(listener).chain(asked.iter().map(AsRawFd::as_raw_fd));
    let mut polled: Vec<libc::pollfd> = all
        .map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    // Sockets that have given theirs may be at their end, and would wake us for ever; so no sleep is long, and none is needed for long.
    let left = until.saturating_duration_since(Instant::now()).min(AGAIN * 10);
    // SAFETY: as many entries as are said.
    let rc = unsafe {
        libc::poll(
            polled.as_mut_ptr(),
            polled.len() as libc::nfds_t,
            left.as_millis() as i32,
        )
    };
    if rc < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    const LONG: Duration = Duration::from_secs(20);

    fn file_with(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn text_of(file: OwnedFd) -> String {
        // All who have a descriptor share where it stands in the file.
        let mut bytes = [0; 16];
        let len = File::from(file).read_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes[..len].to_vec()).unwrap()
    }

    #[test]
    fn everybody_has_what_everybody_gave() {
        const RANKS: usize = 8;
        let open: Vec<_> = (0..RANKS).map(|_| DescriptorExchange::open().unwrap()).collect();
        let names: Vec<String> = open.iter().map(|one| one.name().to_owned()).collect();
        std::thread::scope(|scope| {
            for (rank, own) in open.iter().enumerate() {
                let mut others: Vec<usize> = (0..RANKS).collect();
                others.remove(rank);
                let peers: Vec<String> = others.iter().map(|other| names[*other].clone()).collect();
                scope.spawn(move || {
                    let file = file_with(&format!("of {rank}"));
                    let taken = own.exchange(file.as_fd(), &peers, LONG).unwrap();
                    assert_eq!(taken.len(), RANKS - 1);
                    for (other, file) in others.into_iter().zip(taken) {
                        assert_eq!(text_of(file), format!("of {other}"));
                    }
                });
            }
        });
        let pair = [DescriptorExchange::open().unwrap(), DescriptorExchange::open().unwrap()];
        let [a, b] = &pair;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let taken = a
                    .exchange(file_with("a").as_fd(), &[b.name().to_owned()], LONG)
                    .unwrap();
                assert_eq!(taken.into_iter().map(text_of).collect::<Vec<_>>(), ["b"]);
            });
            let taken = b
                .exchange(file_with("b").as_fd(), &[a.name().to_owned()], LONG)
                .unwrap();
            assert_eq!(taken.into_iter().map(text_of).collect::<Vec<_>>(), ["a"]);
        });
    }

    #[test]
    fn nobody_waits_for_ever() {
        let (a, b) = (DescriptorExchange::open().unwrap(), DescriptorExchange::open().unwrap());
        let file = file_with("a");
        let short = Duration::from_millis(50);
        let late = a.exchange(file.as_fd(), &[b.name().to_owned()], short).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let nobody = a
            .exchange(file.as_fd(), &["weft-nobody-is-here".to_owned()], short)
            .unwrap_err();
        assert_eq!(nobody.kind(), io::ErrorKind::ConnectionRefused);
    }
}
