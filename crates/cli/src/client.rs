//! A machine that runs `weft serve`, as the end sees it that asks: where it is, what is there, and how it is talked to.

use std::cell::Cell;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use weft::{Access, Agent, ConnectError, Error, Peer};

use crate::complaint::{Complain, Complaint, Exit};
use crate::courier::{CourierError, Inbox, Line, Listed, Refusal, Window, Word};
use crate::ends::{self, Overrides};
use crate::tree::{ENTRIES_MAX, plain};
use crate::verbs::random_word;

/// A name at a server; the empty one is all that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    pub host: String,
    pub name: String,
}

impl Url {
    /// `None` where the text is not one of ours at all.
    pub fn parse(text: &str) -> Option<Result<Url, Complaint>> {
        let rest = text.strip_prefix("weft://")?;
        let (host, name) = rest.split_once('/').unwrap_or((rest, ""));
        let name = name.trim_end_matches('/');
        let complain = |sentence: String| Complaint::new(Exit::Usage, sentence).try_this("weft://host:port/name");
        Some(if !host.contains(':') || host.starts_with(':') {
            Err(complain(format!("{text} names no host with a port.")))
        } else if !name.is_empty() && plain(name).is_err() {
            Err(complain(format!("{text} names nothing that a server could have.")))
        } else {
            Ok(Url {
                host: host.to_string(),
                name: name.to_string(),
            })
        })
    }

    /// The last part of the name.
    pub fn file_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or_default()
    }

    fn resolve(&self) -> Result<Vec<SocketAddr>, Complaint> {
        let unknown = || format!("The host {} is not known.", self.host);
        let found = self.host.to_socket_addrs().or_complain(Exit::Unreachable, unknown)?;
        let found: Vec<SocketAddr> = found.collect();
        match found.is_empty() {
            true => Err(Complaint::new(Exit::Unreachable, unknown())),
            false => Ok(found),
        }
    }
}

/// A server that has been reached.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    peer: Peer,
    window: Option<Window>,
    /// The number of the last stream.
    streams: Cell<u64>,
}

impl Client {
    /// `access`: what the server does with our window, where it is to move anything.
    pub fn dial(url: &Url, access: Option<Access>, overrides: &Overrides) -> Result<Client, Complaint> {
        let name = format!("copy-{:016x}", random_word()?);
        // It says everything by itself.
        let overrides = overrides.without_log()?;
        let patience = overrides.settings()?.deadline;
        let address = answering(url, patience)?;
        let agent = overrides.start(&name)?;
        let peer = agent.connect(&address.to_string()).map_err(|error| match error {
            Error::Connect(ConnectError::NoSession { .. }) => {
                ends::explain(&error, &format!("{} does not talk to us.", url.host))
            }
            error => ends::explain(&error, &format!("{} could not be reached.", url.host))
                .try_this("is `weft serve` running there? It prints the command to use here"),
        })?;
        let window = access.map(|access| Window::open(&agent, access)).transpose();
        let window = window.map_err(|error| complain(&error, url))?;
        Ok(Client {
            agent,
            peer,
            window,
            streams: Cell::new(0),
        })
    }

    /// A new stream to the server. The one before it is over.
    pub fn line(&self) -> Line {
        self.streams.set(self.streams.get() + 1);
        Line::new(self.agent.clone(), self.peer.clone(), self.streams.get(), Inbox::Agent)
    }

    pub fn window(&self) -> Result<&Window, CourierError> {
        self.window.as_ref().ok_or(CourierError::Protocol("there is no window"))
    }

    /// What is in a directory, or in all below it as well; and how many things there are that cannot be had.
    pub fn list(&self, name: &str, deep: bool) -> Result<(Vec<Listed>, u64), CourierError> {
        let line = self.line();
        let stream = line.stream;
        let name = name.to_owned();
        line.say(&Word::List { stream, name, deep })?;
        let mut all = Vec::new();
        loop {
            let Word::Entries {
                entries,
                more,
                left_out,
                ..
            } = line.hear()?
            else {
                return Err(CourierError::Protocol("no entries"));
            };
            // They become names of files here.
            if entries.iter().any(|entry| plain(&entry.path).is_err()) {
                return Err(CourierError::Protocol("an entry whose name leads out of the directory"));
            }
            all.extend(entries);
            if all.len() > ENTRIES_MAX {
                return Err(CourierError::Protocol("more entries than anybody can use"));
            }
            if !more {
                return Ok((all, left_out));
            }
            line.say(&Word::Next { stream })?;
        }
    }
}

/// An address of the server at which somebody listens. An agent would try again and again until its deadline: the peer may be about to
/// start. Whoever types a command wants to know at once.
fn answering(url: &Url, patience: Duration) -> Result<SocketAddr, Complaint> {
    let addresses = url.resolve()?;
    let mut last = None;
    for address in &addresses {
        match TcpStream::connect_timeout(address, patience) {
            Ok(_) => return Ok(*address),
            Err(error) => last = Some((address, error)),
        }
    }
    let (address, error) = last.expect("a host has an address");
    let sentence = match error.kind() {
        ErrorKind::ConnectionRefused => format!("Nobody listens at {address}: {} could not be reached.", url.host),
        _ => format!("{} could not be reached at {address}.", url.host),
    };
    Err(Complaint::new(Exit::Unreachable, sentence)
        .because(&error)
        .try_this("is `weft serve` running there? It prints the command to use here"))
}

pub fn complain(error: &CourierError, url: &Url) -> Complaint {
    complain_of(error, &format!("/{}", url.name))
}

/// A complaint about what was to be copied.
pub fn complain_of(error: &CourierError, name: &str) -> Complaint {
    let sentence = format!("{name} was not copied.");
    match error {
        CourierError::Refused(Refusal::Exists) => Complaint::new(Exit::Refused, sentence)
            .because(error)
            .try_this("another name; servers never replace a file"),
        CourierError::Refused(_) => Complaint::new(Exit::Refused, sentence).because(error),
        CourierError::Gone => Complaint::new(Exit::Unreachable, sentence).because(error),
        CourierError::Weft(error) => ends::explain(error, &sentence),
        CourierError::Writing(error) if error.kind() == ErrorKind::BrokenPipe => Complaint::quiet(Exit::NobodyReads),
        _ => Complaint::new(Exit::Failed, sentence).because(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_host_a_port_and_perhaps_a_name() {
        assert!(Url::parse("./model.bin").is_none());
        for (text, host, name) in [
            ("weft://[::1]:7000/dir/model.bin", "[::1]:7000", "dir/model.bin"),
            ("weft://host:7000", "host:7000", ""),
            ("weft://host:7000/", "host:7000", ""),
            ("weft://host:7000/dir/", "host:7000", "dir"),
        ] {
            let url = Url::parse(text).unwrap().unwrap();
            assert_eq!((url.host.as_str(), url.name.as_str()), (host, name), "{text}");
        }
        for bad in [
            "weft://host/name",
            "weft://host",
            "weft://:7000/x",
            "weft://host:7000/../x",
            "weft://host:7000/a//../b",
        ] {
            assert_eq!(Url::parse(bad).unwrap().unwrap_err().exit(), Exit::Usage, "{bad}");
        }
    }
}
