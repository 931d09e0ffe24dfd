//! From here to a server.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use weft::Access;

use super::{Copy, shown};
use crate::client::{Client, Url, complain, complain_of};
use crate::complaint::{Complain, Complaint, Exit};
use crate::courier::{CourierError, Refusal, Word};
use crate::ends::Overrides;
use crate::resume;
use crate::tree::{ENTRIES_MAX, Stamp, join};

/// Something below a directory here: its way from there, where it is, and how long a file is.
struct Found {
    name: String,
    path: PathBuf,
    bytes: Option<u64>,
}

impl Copy {
    pub(super) fn push(&self, url: &Url, overrides: &Overrides) -> Result<(), Complaint> {
        let from = Path::new(&self.from);
        let facts = match self.from.as_str() {
            "-" => None,
            path => Some(fs::metadata(path).or_complain(Exit::Failed, || format!("{path} cannot be read."))?),
        };
        let name = match url.name.as_str() {
            // It keeps its own.
            "" => own_name(from)?,
            name => name.to_owned(),
        };
        if facts.as_ref().is_some_and(|facts| facts.is_dir()) {
            let (found, left_out) = walk(from)?;
            let client = Client::dial(url, Some(Access::READ), overrides)?;
            self.push_tree(&client, &name, &found)?;
            self.tell_left_out(left_out);
            return Ok(());
        }
        let mut source: Source = match facts {
            None => Source::Stream(Box::new(io::stdin())),
            Some(facts) => {
                let file = File::open(from).or_complain(Exit::Failed, || format!("{} cannot be read.", self.from))?;
                match facts.is_file() {
                    true => {
                        Source::file(file).or_complain(Exit::Failed, || format!("{} cannot be read.", self.from))?
                    }
                    // A pipe, a device: its end is when it ends.
                    false => Source::Stream(Box::new(file)),
                }
            }
        };
        let client = Client::dial(url, Some(Access::READ), overrides)?;
        let bar = self.bar(source.bytes(), &name);
        let pushed = self.push_file(&client, &name, &mut source, &bar);
        pushed.map_err(|error| complain(&error, url))?;
        bar.finish();
        Ok(())
    }

    /// All that is in a directory.
    fn push_tree(&self, client: &Client, name: &str, found: &[Found]) -> Result<(), Complaint> {
        let bytes = found.iter().filter_map(|entry| entry.bytes);
        let bar = self.bar(Some(bytes.fold(0, u64::saturating_add)), name);
        make(client, name).map_err(|error| complain_of(&error, name))?;
        for (nth, entry) in found.iter().enumerate() {
            let far = join(name, &entry.name);
            bar.set_message(format!("{}/{} {}", nth + 1, found.len(), shown(&entry.name)));
            let done = match entry.bytes {
                None => make(client, &far),
                Some(_) => {
                    let source = File::open(&entry.path).and_then(Source::file);
                    let source = source.map_err(CourierError::Reading);
                    source.and_then(|mut source| self.push_file(client, &far, &mut source, &bar))
                }
            };
            done.map_err(|error| complain_of(&error, &shown(&far)))?;
        }
        bar.finish();
        Ok(())
    }

    fn push_file(
        &self,
        client: &Client,
        name: &str,
        source: &mut Source,
        bar: &ProgressBar,
    ) -> Result<(), CourierError> {
        let line = client.line();
        let stream = line.stream;
        let resume = self.resume && source.bytes().is_some();
        let name = name.to_owned();
        line.say(&Word::Put { stream, name, resume })?;
        let Word::Take { have, .. } = line.hear()? else {
            return Err(CourierError::Protocol("nobody takes it"));
        };
        let bytes = source.bytes();
        let from = match source {
            Source::File(file, stamp) => resume::common(file, stamp.bytes, have)?,
            Source::Stream(_) => 0,
        };
        line.say(&Word::Begin { stream, bytes, from })?;
        bar.inc(from);
        let again = source.again();
        let check = |sent| match again {
            Some((file, stamp)) => {
                let same = Stamp::of(&file).map_err(CourierError::Reading)? == stamp && from + sent == stamp.bytes;
                same.then_some(()).ok_or(CourierError::Refused(Refusal::Changed))
            }
            None => Ok(()),
        };
        client
            .window()?
            .send(&line, source.as_read(), &|more| bar.inc(more), check)
    }
}

/// Where the bytes come from.
enum Source {
    File(File, Stamp),
    Stream(Box<dyn Read>),
}

impl Source {
    fn file(file: File) -> io::Result<Source> {
        let stamp = Stamp::of(&file)?;
        Ok(Source::File(file, stamp))
    }

    fn bytes(&self) -> Option<u64> {
        match self {
            Source::File(_, stamp) => Some(stamp.bytes),
            Source::Stream(_) => None,
        }
    }

    /// A second handle of a file, to see whether it has changed.
    fn again(&self) -> Option<(File, Stamp)> {
        match self {
            Source::File(file, stamp) => Some((file.try_clone().ok()?, *stamp)),
            Source::Stream(_) => None,
        }
    }

    fn as_read(&mut self) -> &mut dyn Read {
        match self {
            Source::File(file, _) => file,
            Source::Stream(stream) => &mut **stream,
        }
    }
}

fn make(client: &Client, name: &str) -> Result<(), CourierError> {
    let line = client.line();
    let (stream, name) = (line.stream, name.to_owned());
    line.say(&Word::Make { stream, name })?;
    match line.hear()? {
        Word::Done { .. } => Ok(()),
        _ => Err(CourierError::Protocol("no directory")),
    }
}

/// Everything below a directory of the caller's own. Links to files are followed, wherever they lead; those to directories may lead round in
/// a circle, and are left out.
fn walk(root: &Path) -> Result<(Vec<Found>, u64), Complaint> {
    let mut found = Vec::new();
    let mut left_out = 0;
    let mut waiting = vec![(String::new(), root.to_owned())];
    while let Some((above, directory)) = waiting.pop() {
        let unreadable = || format!("{} cannot be read.", directory.display());
        let mut entries = Vec::new();
        for entry in fs::read_dir(&directory).or_complain(Exit::Failed, unreadable)? {
            entries.push(entry.or_complain(Exit::Failed, unreadable)?);
        }
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let (Ok(kind), Ok(facts), Some(name)) = (
                entry.file_type(),
                fs::metadata(&path),
                entry.file_name().to_str().map(str::to_owned),
            ) else {
                left_out += 1;
                continue;
            };
            let name = join(&above, &name);
            if facts.is_dir() && !kind.is_symlink() {
                waiting.push((name.clone(), path.clone()));
                let bytes = None;
                found.push(Found { name, path, bytes });
            } else if facts.is_file() {
                let bytes = Some(facts.len());
                found.push(Found { name, path, bytes });
            } else {
                left_out += 1;
            }
            if found.len() > ENTRIES_MAX {
                let sentence = format!("{} has more than {ENTRIES_MAX} entries.", root.display());
                return Err(Complaint::new(Exit::Failed, sentence));
            }
        }
    }
    Ok((found, left_out))
}

/// The name of what is copied, where the server is to call it the same.
fn own_name(path: &Path) -> Result<String, Complaint> {
    let whole = fs::canonicalize(path).ok();
    let name = whole
        .as_deref()
        .and_then(Path::file_name)
        .and_then(|name| name.to_str());
    name.map(str::to_owned).ok_or_else(|| {
        let sentence = format!("{} gives no name for a file at the server.", path.display());
        Complaint::new(Exit::Usage, sentence).try_this("weft://host:port/name")
    })
}
