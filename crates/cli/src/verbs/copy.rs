//! `weft copy SRC DST`: a file or stdin to or from a machine that runs `weft serve`.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use weft::{ConnectError, Error};

use crate::complaint::{Complain, Complaint, Exit};
use crate::courier::{self, CourierError, Inbox, Line, Window, Word};
use crate::ends::{self, Overrides};

/// Copy a file from or to a machine that runs `weft serve`
///
/// One of the two is weft://host:port/name; the other a path, or - for standard input or output. Every chunk is checked with a
/// checksum. The two ends need the same secret: set WEFT_SECRET as `weft serve` says.
#[derive(Debug, Args)]
pub struct Copy {
    /// From: a path, -, or weft://host:port/name
    #[arg(value_name = "SRC")]
    from: String,
    /// To: a path, -, or weft://host:port/name where the server was started with --writable
    #[arg(value_name = "DST")]
    to: String,
    /// Show no progress bar
    #[arg(long, short)]
    quiet: bool,
}

/// A name at a server.
#[derive(Debug, PartialEq, Eq)]
struct Url {
    host: String,
    name: String,
}

impl Url {
    /// `None` where the text is not one of ours at all.
    fn parse(text: &str) -> Option<Result<Url, Complaint>> {
        let rest = text.strip_prefix("weft://")?;
        let parsed = rest
            .split_once('/')
            .filter(|(host, name)| !name.is_empty() && host.contains(':'));
        Some(match parsed {
            Some((host, name)) => Ok(Url {
                host: host.to_string(),
                name: name.to_string(),
            }),
            None => Err(
                Complaint::new(Exit::Usage, format!("{text} names no file on a server."))
                    .try_this("weft://host:port/name"),
            ),
        })
    }

    fn resolve(&self) -> Result<SocketAddr, Complaint> {
        let unknown = || format!("The host {} is not known.", self.host);
        let mut found = self.host.to_socket_addrs().or_complain(Exit::Unreachable, unknown)?;
        found.next().ok_or_else(|| Complaint::new(Exit::Unreachable, unknown()))
    }
}

impl Copy {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        match (Url::parse(&self.from), Url::parse(&self.to)) {
            (Some(url), None) => self.pull(&url?, overrides),
            (None, Some(url)) => self.push(&url?, overrides),
            _ => Err(Complaint::new(
                Exit::Usage,
                "One of the two, and only one, must be weft://host:port/name.",
            )
            .try_this("cp, for copies on this machine")),
        }
    }

    fn pull(&self, url: &Url, overrides: &Overrides) -> Result<(), Complaint> {
        let line = dial(url, overrides)?;
        let failed = |error| complain(&error, url);
        let window = Window::open(&line).map_err(failed)?;
        line.say(&Word::Get {
            stream: line.stream,
            name: url.name.clone(),
        })
        .map_err(failed)?;
        let Word::Begin { bytes, .. } = line.hear().map_err(failed)? else {
            return Err(failed(CourierError::Protocol("no beginning")));
        };
        let mut sink = Destination::open(&self.to, &url.name)?;
        let bar = self.bar(bytes, &url.name);
        let copied = courier::receive(&line, &window, &mut sink, &|more| bar.inc(more)).map_err(failed)?;
        if bytes.is_some_and(|bytes| bytes != copied) {
            return Err(Complaint::new(
                Exit::Differs,
                format!(
                    "{} was {copied} bytes long instead of the announced ones; it changed meanwhile.",
                    url.name
                ),
            ));
        }
        sink.keep()?;
        line.say(&Word::Done { stream: line.stream }).map_err(failed)?;
        bar.finish();
        Ok(())
    }

    fn push(&self, url: &Url, overrides: &Overrides) -> Result<(), Complaint> {
        let (mut source, bytes) = open_source(&self.from)?;
        let line = dial(url, overrides)?;
        let failed = |error| complain(&error, url);
        line.say(&Word::Put {
            stream: line.stream,
            name: url.name.clone(),
            bytes,
        })
        .map_err(failed)?;
        let Word::Take { .. } = line.hear().map_err(failed)? else {
            return Err(failed(CourierError::Protocol("no window")));
        };
        let bar = self.bar(bytes, &url.name);
        courier::send(&line, &mut source, &|more| bar.inc(more)).map_err(failed)?;
        bar.finish();
        Ok(())
    }

    fn bar(&self, bytes: Option<u64>, name: &str) -> ProgressBar {
        if self.quiet {
            return ProgressBar::hidden();
        }
        let template = match bytes {
            Some(_) => "{msg}  {bar:30}  {binary_bytes} of {binary_total_bytes}  {binary_bytes_per_sec}  {eta}",
            None => "{msg}  {spinner}  {binary_bytes}  {binary_bytes_per_sec}",
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = match bytes {
            Some(bytes) => ProgressBar::new(bytes),
            None => ProgressBar::no_length(),
        };
        bar.with_style(style).with_message(name.to_string())
    }
}

fn dial(url: &Url, overrides: &Overrides) -> Result<Line, Complaint> {
    let address = url.resolve()?;
    let stream = super::random_word()?;
    let agent = overrides.start(&format!("copy-{stream:016x}"))?;
    let peer = agent.connect(&address.to_string()).map_err(|error| match error {
        Error::Connect(ConnectError::NoSession { .. }) => {
            ends::explain(&error, &format!("{} does not talk to us.", url.host))
        }
        error => ends::explain(&error, &format!("{} could not be reached.", url.host))
            .try_this("is `weft serve` running there? It prints the command to use here"),
    })?;
    Ok(Line {
        agent,
        peer,
        stream,
        inbox: Inbox::Agent,
    })
}

fn complain(error: &CourierError, url: &Url) -> Complaint {
    let sentence = format!("{} was not copied.", url.name);
    match error {
        CourierError::Refused(_) => Complaint::new(Exit::Refused, sentence).because(error),
        CourierError::Gone => Complaint::new(Exit::Unreachable, sentence).because(error),
        CourierError::Weft(error) => ends::explain(error, &sentence),
        _ => Complaint::new(Exit::Failed, sentence).because(error),
    }
}

fn open_source(path: &str) -> Result<(Box<dyn Read>, Option<u64>), Complaint> {
    if path == "-" {
        return Ok((Box::new(io::stdin().lock()), None));
    }
    let unreadable = || format!("{path} cannot be read.");
    let file = File::open(path).or_complain(Exit::Failed, unreadable)?;
    let facts = file.metadata().or_complain(Exit::Failed, unreadable)?;
    if facts.is_dir() {
        return Err(Complaint::new(Exit::Usage, format!("{path} is a directory."))
            .try_this(format!("tar -c {path} | weft copy - weft://host:port/name.tar")));
    }
    let bytes = facts.is_file().then_some(facts.len());
    Ok((Box::new(file), bytes))
}

/// Where the bytes go: standard output, or a file that appears under its name only when it is whole.
enum Destination {
    Stdout(io::Stdout),
    File {
        part: File,
        part_path: PathBuf,
        path: PathBuf,
        kept: bool,
    },
}

impl Destination {
    fn open(to: &str, name: &str) -> Result<Destination, Complaint> {
        if to == "-" {
            return Ok(Destination::Stdout(io::stdout()));
        }
        let mut path = PathBuf::from(to);
        if path.is_dir() {
            let file = Path::new(name).file_name().ok_or_else(|| {
                Complaint::new(Exit::Usage, format!("{name} gives no name for a file in {to}.")).try_this("a file name")
            })?;
            path.push(file);
        }
        let mut part_path = path.clone().into_os_string();
        part_path.push(format!(".{:x}.part", std::process::id()));
        let part_path = PathBuf::from(part_path);
        let part = File::create_new(&part_path)
            .or_complain(Exit::Failed, || format!("{} cannot be written.", part_path.display()))?;
        Ok(Destination::File {
            part,
            part_path,
            path,
            kept: false,
        })
    }

    fn keep(&mut self) -> Result<(), Complaint> {
        let Destination::File {
            part_path, path, kept, ..
        } = self
        else {
            return Ok(());
        };
        fs::rename(&*part_path, &*path).or_complain(Exit::Failed, || {
            format!("{} could not be put in its place.", path.display())
        })?;
        *kept = true;
        Ok(())
    }
}

impl Write for Destination {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Destination::Stdout(out) => out.write(bytes),
            Destination::File { part, .. } => part.write(bytes),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Destination::Stdout(out) => out.flush(),
            Destination::File { part, .. } => part.flush(),
        }
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if let Destination::File {
            part_path, kept: false, ..
        } = self
        {
            // Half a file helps nobody; if it cannot be removed, there is nobody left to tell.
            let _ = fs::remove_file(part_path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_host_a_port_and_a_name() {
        assert!(Url::parse("./model.bin").is_none());
        let url = Url::parse("weft://[::1]:7000/dir/model.bin").unwrap().unwrap();
        assert_eq!((url.host.as_str(), url.name.as_str()), ("[::1]:7000", "dir/model.bin"));
        for bad in ["weft://host:7000", "weft://host:7000/", "weft://host/name"] {
            assert_eq!(Url::parse(bad).unwrap().unwrap_err().exit(), Exit::Usage, "{bad}");
        }
    }
}
