//! `weft serve PATH`: lets other machines copy a file, a directory's files or a stream, and put files if allowed.

mod goods;
mod router;

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use clap::{Args, Subcommand};
use weft::{Agent, Peer};
use weft_plan::Bytes;

use crate::complaint::{Complain, Complaint, Exit};
use crate::courier::{self, CourierError, Inbox, Line, Refusal, WORDS_MAX, Word};
use crate::ends::Overrides;
use goods::Goods;

const STREAMS_MAX: usize = 64;
/// So that one client alone does not keep all others out.
const STREAMS_PER_PEER_MAX: usize = 8;
const LISTEN: Duration = Duration::from_secs(1);
/// For how long uploads that came to no good end can be resumed.
const PARTS_KEPT: Duration = Duration::from_secs(24 * 3600);

/// Let other machines copy a file, the files of a directory, or standard input
///
/// Prints the command to use at the other end. Where the address can be reached from other machines and no secret is set, one is
/// made up and is part of that command. With -, standard input is sent to the first who asks. Plain files and directories are served,
/// and links that stay inside; pipes, devices and links that lead out are not.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Serve {
    #[command(subcommand)]
    service: Option<Service>,
    /// A file, a directory, or - for standard input
    #[arg(required = true)]
    path: Option<String>,
    /// The address to listen on
    #[arg(long, default_value = "127.0.0.1:7000")]
    listen: SocketAddr,
    /// Let others put new files and directories into the directory. Existing files are never replaced. What is left of uploads that can be
    /// resumed is kept for a day
    #[arg(long)]
    writable: bool,
}

/// What else can be served; a file of such a name is served as `./router`.
#[derive(Debug, Subcommand)]
enum Service {
    Router(router::Router),
}

impl Serve {
    pub fn run(mut self, overrides: &Overrides) -> Result<(), Complaint> {
        if let Some(Service::Router(router)) = self.service.take() {
            return router.run();
        }
        let goods = Arc::new(self.goods()?);
        // Who was served and who was not is said here, in fewer words than the log has.
        let overrides = overrides.without_log()?.with("listen", self.listen.to_string());
        let settings = overrides.settings()?;
        let private = settings.secret.is_some() || settings.secret_file.is_some();
        let made_up = if private || self.listen.ip().is_loopback() {
            None
        } else {
            Some(format!("{:016x}{:016x}", super::random_word()?, super::random_word()?))
        };
        let overrides = match &made_up {
            Some(secret) => overrides.with("secret", secret),
            None => overrides,
        };
        let agent = overrides.start(&format!("serve-{:016x}", super::random_word()?))?;
        self.announce(&goods, made_up.as_deref());
        attend(&agent, &goods)
    }

    fn goods(&self) -> Result<Goods, Complaint> {
        let path = self.path();
        if path == "-" {
            return Ok(Goods::stdin());
        }
        let complain = || format!("{path} cannot be served.");
        let path = fs::canonicalize(path).or_complain(Exit::Failed, complain)?;
        let facts = fs::metadata(&path).or_complain(Exit::Failed, complain)?;
        if facts.is_dir() {
            if self.writable {
                crate::tree::sweep_parts(&path, PARTS_KEPT);
            }
            return Goods::directory(&path, self.writable).or_complain(Exit::Failed, complain);
        }
        if self.writable {
            return Err(Complaint::new(Exit::Usage, "--writable needs a directory to write to."));
        }
        if !facts.is_file() {
            return Err(Complaint::new(Exit::Usage, complain()).try_this(format!("weft serve - < {}", path.display())));
        }
        let place = |path: &Path| -> Option<(PathBuf, String)> {
            let name = path.file_name()?.to_str()?.to_owned();
            Some((path.parent()?.to_owned(), name))
        };
        let (directory, name) = place(&path).ok_or_else(|| Complaint::new(Exit::Usage, complain()))?;
        Goods::file(&directory, name).or_complain(Exit::Failed, complain)
    }

    fn path(&self) -> &str {
        self.path
            .as_deref()
            .expect("clap asks for it where no service is named")
    }

    fn announce(&self, goods: &Goods, secret: Option<&str>) {
        let host = match self.listen.ip() {
            ip if ip.is_unspecified() => fs::read_to_string("/proc/sys/kernel/hostname")
                .map_or("HOST".to_string(), |name| name.trim().to_string()),
            IpAddr::V6(ip) => format!("[{ip}]"),
            ip => ip.to_string(),
        };
        let secret = secret.map_or(String::new(), |secret| format!("WEFT_SECRET={secret} "));
        let port = self.listen.port();
        let url = format!("weft://{host}:{port}");
        note!("Serving {}. At the other end:", self.path());
        note!("  {secret}weft copy {url}/{} .", goods.example());
        if goods.is_directory() {
            note!("  {secret}weft list {url}/");
        }
        if self.writable {
            note!("  {secret}weft copy FILE {url}/NAME");
        }
    }
}

/// A stream that is under way. It belongs to the session of the peer that opened it, which gave it its number: words of one peer never reach
/// a stream of another.
struct Stream {
    peer: Peer,
    number: u64,
    /// None: it is not heard any more, and ends.
    words: Option<SyncSender<Word>>,
    thread: JoinHandle<()>,
}

/// Sorts words to the streams they belong to, and starts a thread for every new stream.
fn attend(agent: &Agent, goods: &Arc<Goods>) -> Result<(), Complaint> {
    let mut streams: Vec<Stream> = Vec::new();
    loop {
        streams.retain(|stream| !stream.thread.is_finished());
        if streams.is_empty() && goods.is_used_up() {
            return Ok(());
        }
        let Some(notification) = agent.next_notification(LISTEN) else {
            continue;
        };
        // What is not a word comes from somebody who speaks something else.
        let Some(word) = Word::decode(&notification.payload) else {
            continue;
        };
        let (peer, number) = (notification.from, word.stream());
        let known = streams
            .iter()
            .position(|stream| stream.peer == peer && stream.number == number);
        match word {
            Word::Get { .. } | Word::Put { .. } | Word::Compare { .. } | Word::Make { .. } | Word::List { .. } => {
                let of_peer = streams.iter().filter(|stream| stream.peer == peer).count();
                let is_full = streams.len() >= STREAMS_MAX || of_peer >= STREAMS_PER_PEER_MAX;
                if known.is_some() || is_full {
                    refuse(&peer, number, Refusal::Busy);
                    continue;
                }
                let (words, inbox) = sync_channel(WORDS_MAX);
                let line = Line::new(agent.clone(), peer.clone(), number, Inbox::Sorted(inbox));
                let goods = Arc::clone(goods);
                let thread = std::thread::spawn(move || serve(&line, &goods, word));
                streams.push(Stream {
                    peer,
                    number,
                    words: Some(words),
                    thread,
                });
            }
            word => {
                // A stream that has just ended needs no more words; whoever says more than can be heard is not heard any more.
                if let Some(Stream { words, .. }) = known.map(|known| &mut streams[known])
                    && words.as_ref().is_some_and(|words| words.try_send(word).is_err())
                {
                    *words = None;
                }
            }
        }
    }
}

/// One stream from its first word to its end, which is reported on standard error.
fn serve(line: &Line, goods: &Goods, request: Word) {
    let (done, name, outcome) = match request {
        Word::Get { name, have, .. } => ("sent", name.clone(), goods.give(line, &name, have)),
        Word::Put { name, resume, .. } => ("took", name.clone(), goods.take(line, &name, resume)),
        Word::Compare { name, have, .. } => ("compared", name.clone(), goods.compare(line, &name, have)),
        Word::Make { name, .. } => ("made", name.clone(), goods.make(line, &name)),
        Word::List { name, deep, .. } => ("listed", name.clone(), goods.list(line, &name, deep)),
        _ => return,
    };
    let peer = line.peer.name();
    match outcome {
        Ok(Some(bytes)) => note!("{done} {name:?}, {}, {peer:?}", Bytes(bytes)),
        Ok(None) => note!("{done} {name:?}, {peer:?}"),
        Err(error) => {
            let why = match error {
                CourierError::Refused(ref why) => why.clone(),
                ref error => Refusal::File {
                    what: error.to_string(),
                },
            };
            note!("not {done} {name:?}: {error}, {peer:?}");
            refuse(&line.peer, line.stream, why);
        }
    }
}

fn refuse(peer: &Peer, stream: u64, why: Refusal) {
    // Whoever cannot be told has left.
    let _ = peer.notify(&courier::encode(&Word::Refuse { stream, why }));
}
