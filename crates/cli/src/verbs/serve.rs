//! `weft serve PATH`: lets other machines copy a file, a directory's files or a stream, and put files if allowed.

mod router;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::{Args, Subcommand};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use weft::{Agent, Peer};
use weft_plan::Bytes;

use crate::complaint::{Complain, Complaint, Exit};
use crate::courier::{self, CourierError, Inbox, Line, Refusal, Window, Word};
use crate::ends::Overrides;

const STREAMS_MAX: usize = 64;
const NAME_BYTES_MAX: usize = 4096;
const LISTEN: Duration = Duration::from_secs(1);

/// Let other machines copy a file, the files of a directory, or standard input
///
/// Prints the command to use at the other end. Where the address can be reached from other machines and no secret is set, one is
/// made up and is part of that command. With -, standard input is sent to the first who asks.
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
    /// Let others put new files into the directory. Existing files are never replaced
    #[arg(long)]
    writable: bool,
}

/// What else can be served; a file of such a name is served as `./router`.
#[derive(Debug, Subcommand)]
enum Service {
    Router(router::Router),
}

/// What is served.
#[derive(Debug)]
enum Goods {
    File {
        name: String,
        path: PathBuf,
    },
    Directory {
        root: PathBuf,
        writable: bool,
    },
    /// Taken by the first who asks.
    Stdin(Mutex<bool>),
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
            return Ok(Goods::Stdin(Mutex::new(false)));
        }
        let complain = || format!("{path} cannot be served.");
        let path = fs::canonicalize(path).or_complain(Exit::Failed, complain)?;
        if path.is_dir() {
            return Ok(Goods::Directory {
                root: path,
                writable: self.writable,
            });
        }
        if self.writable {
            return Err(Complaint::new(Exit::Usage, "--writable needs a directory to write to."));
        }
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or_else(|| Complaint::new(Exit::Usage, complain()))?;
        Ok(Goods::File {
            name: name.to_string(),
            path: path.clone(),
        })
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
        let name = match goods {
            Goods::File { name, .. } => name,
            Goods::Directory { .. } => "NAME",
            Goods::Stdin(_) => "stdin",
        };
        let secret = secret.map_or(String::new(), |secret| format!("WEFT_SECRET={secret} "));
        let port = self.listen.port();
        eprintln!("Serving {}. At the other end:", self.path());
        eprintln!("  {secret}weft copy weft://{host}:{port}/{name} .");
        if self.writable {
            eprintln!("  {secret}weft copy FILE weft://{host}:{port}/NAME");
        }
    }
}

/// Sorts words to the streams they belong to, and starts a thread for every new stream.
fn attend(agent: &Agent, goods: &Arc<Goods>) -> Result<(), Complaint> {
    let mut streams: HashMap<u64, (Sender<Word>, std::thread::JoinHandle<()>)> = HashMap::new();
    loop {
        streams.retain(|_, (_, thread)| !thread.is_finished());
        if streams.is_empty() && matches!(&**goods, Goods::Stdin(taken) if is_taken(taken)) {
            return Ok(());
        }
        let Some(notification) = agent.next_notification(LISTEN) else {
            continue;
        };
        // What is not a word comes from somebody who speaks something else.
        let Some(word) = Word::decode(&notification.payload) else {
            continue;
        };
        let stream = word.stream();
        match word {
            Word::Get { .. } | Word::Put { .. } if !streams.contains_key(&stream) => {
                if streams.len() >= STREAMS_MAX {
                    refuse(&notification.from, stream, Refusal::Busy);
                    continue;
                }
                let (words, inbox) = channel();
                let line = Line {
                    agent: agent.clone(),
                    peer: notification.from,
                    stream,
                    inbox: Inbox::Sorted(inbox),
                };
                let goods = Arc::clone(goods);
                let thread = std::thread::spawn(move || serve(&line, &goods, word));
                streams.insert(stream, (words, thread));
            }
            word => {
                if let Some((words, _)) = streams.get(&stream) {
                    // A stream that has just ended needs no more words.
                    let _ = words.send(word);
                }
            }
        }
    }
}

/// One stream from its first word to its end, which is reported on standard error.
fn serve(line: &Line, goods: &Goods, request: Word) {
    let (done, name, outcome) = match request {
        Word::Get { name, .. } => ("sent", name.clone(), give(line, goods, &name)),
        Word::Put { name, .. } => ("took", name.clone(), take(line, goods, &name)),
        _ => return,
    };
    let peer = line.peer.name();
    match outcome {
        Ok(bytes) => eprintln!("{done} {name:?}, {}, {peer}", Bytes(bytes)),
        Err(error) => {
            let why = match error {
                CourierError::Refused(ref why) => why.clone(),
                ref error => Refusal::File {
                    what: error.to_string(),
                },
            };
            eprintln!("not {done} {name:?}: {error}, {peer}");
            refuse(&line.peer, line.stream, why);
        }
    }
}

fn refuse(peer: &Peer, stream: u64, why: Refusal) {
    // Whoever cannot be told has left.
    let _ = peer.notify(&courier::encode(&Word::Refuse { stream, why }));
}

fn give(line: &Line, goods: &Goods, name: &str) -> Result<u64, CourierError> {
    let (mut source, bytes) = open(goods, name)?;
    line.say(&Word::Begin {
        stream: line.stream,
        bytes,
    })?;
    courier::send(line, &mut source, &|_| {})
}

fn open(goods: &Goods, name: &str) -> Result<(Box<dyn Read>, Option<u64>), CourierError> {
    let path = match goods {
        Goods::Stdin(taken) => {
            let mut taken = taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if std::mem::replace(&mut *taken, true) {
                return Err(CourierError::Refused(Refusal::NoSuchName));
            }
            return Ok((Box::new(io::stdin()), None));
        }
        Goods::File { name: known, path } if known == name => path.clone(),
        Goods::File { .. } => return Err(CourierError::Refused(Refusal::NoSuchName)),
        Goods::Directory { root, .. } => within(root, name).map_err(CourierError::Refused)?,
    };
    let file = File::open(path).map_err(|_| CourierError::Refused(Refusal::NoSuchName))?;
    match file.metadata() {
        Ok(facts) if facts.is_file() => Ok((Box::new(file), Some(facts.len()))),
        _ => Err(CourierError::Refused(Refusal::NoSuchName)),
    }
}

fn take(line: &Line, goods: &Goods, name: &str) -> Result<u64, CourierError> {
    let Goods::Directory { root, writable: true } = goods else {
        return Err(CourierError::Refused(Refusal::NotWritable));
    };
    let refused = CourierError::Refused;
    let relative = plain(name).map_err(refused)?;
    let (Some(parent), Some(file_name)) = (relative.parent(), relative.file_name()) else {
        return Err(refused(Refusal::Outside));
    };
    let parent = match parent.to_str() {
        Some("") | None => root.clone(),
        Some(parent) => within(root, parent).map_err(refused)?,
    };
    let path = parent.join(file_name);
    if path.symlink_metadata().is_ok() {
        return Err(refused(Refusal::Exists));
    }
    let part_path = parent.join(format!(".weft-{:016x}.part", line.stream));
    let outcome = take_into(line, &part_path, &path);
    if outcome.is_err() {
        // It may not have been made; and half a file helps nobody.
        let _ = fs::remove_file(&part_path);
    }
    outcome
}

fn take_into(line: &Line, part_path: &Path, path: &Path) -> Result<u64, CourierError> {
    let mut part = File::create_new(part_path).map_err(CourierError::Writing)?;
    let window = Window::open(line)?;
    line.say(&Word::Take { stream: line.stream })?;
    let bytes = courier::receive(line, &window, &mut part, &|_| {})?;
    match renameat_with(CWD, part_path, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(rustix::io::Errno::EXIST) => return Err(CourierError::Refused(Refusal::Exists)),
        Err(error) => return Err(CourierError::Writing(error.into())),
    }
    line.say(&Word::Done { stream: line.stream })?;
    Ok(bytes)
}

fn is_taken(taken: &Mutex<bool>) -> bool {
    *taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A name as a path that cannot lead upwards or to a root.
fn plain(name: &str) -> Result<&Path, Refusal> {
    let path = Path::new(name);
    let plain = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.contains('\0')
        && path.components().all(|part| matches!(part, Component::Normal(_)));
    if plain { Ok(path) } else { Err(Refusal::Outside) }
}

/// Something that exists below the root, links followed.
fn within(root: &Path, name: &str) -> Result<PathBuf, Refusal> {
    let path = fs::canonicalize(root.join(plain(name)?)).map_err(|_| Refusal::NoSuchName)?;
    if path.starts_with(root) {
        Ok(path)
    } else {
        Err(Refusal::Outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_out_are_refused() {
        for bad in [
            "",
            "..",
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a\0b",
            "./a",
            &"x/".repeat(3000),
        ] {
            assert_eq!(plain(bad), Err(Refusal::Outside), "{bad:?}");
        }
        assert!(plain("dir/model.bin").is_ok());
    }

    #[test]
    fn links_that_lead_out_are_refused() {
        let root = std::env::temp_dir().join(format!("weft-serve-{}", std::process::id()));
        fs::create_dir_all(root.join("in")).unwrap();
        let root = fs::canonicalize(root).unwrap();
        fs::write(root.join("in/file"), b"x").unwrap();
        std::os::unix::fs::symlink("/etc", root.join("out")).unwrap();
        assert_eq!(within(&root, "in/file"), Ok(root.join("in/file")));
        assert_eq!(within(&root, "out/passwd"), Err(Refusal::Outside));
        assert_eq!(within(&root, "absent"), Err(Refusal::NoSuchName));
        fs::remove_dir_all(root).unwrap();
    }
}
