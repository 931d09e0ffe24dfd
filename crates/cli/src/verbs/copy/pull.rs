//! From a server to here.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use weft::Access;

use super::{Copy, shown};
use crate::client::{Client, Url, complain, complain_of};
use crate::complaint::{Complain, Complaint, Exit};
use crate::courier::{CourierError, Have, Line, Refusal, Word};
use crate::ends::Overrides;
use crate::resume;
use crate::tree::{self, Kind, Links, Tree, TreeError, join};

/// Where the bytes of one file go.
#[derive(Clone, Copy)]
struct Destination<'a> {
    tree: &'a Tree,
    name: &'a str,
}

impl Copy {
    pub(super) fn pull(&self, url: &Url, overrides: &Overrides) -> Result<(), Complaint> {
        let client = Client::dial(url, Some(Access::WRITE), overrides)?;
        let to = Path::new(&self.to);
        if self.to == "-" || tree::is_special(to) {
            return self.pull_stream(&client, url);
        }
        let path = match to.is_dir() && !url.name.is_empty() {
            true => to.join(url.file_name()),
            false => to.to_owned(),
        };
        if !url.name.is_empty() {
            let (parent, name) = place(&path)?;
            let tree = open_tree(&parent)?;
            let name = name.as_str();
            match self.pull_file(&client, &url.name, Destination { tree: &tree, name }, None) {
                Err(CourierError::Refused(Refusal::IsDirectory)) => {}
                pulled => return pulled.map_err(|error| complain(&error, url)),
            }
        }
        self.pull_tree(&client, url, &path)
    }

    /// To standard output, a pipe or a device: whoever reads it has what has come.
    fn pull_stream(&self, client: &Client, url: &Url) -> Result<(), Complaint> {
        let mut sink: Box<dyn Write> = match self.to.as_str() {
            "-" => Box::new(io::stdout()),
            path => {
                let opened = File::options().write(true).open(path);
                Box::new(opened.or_complain(Exit::Failed, || format!("{path} cannot be written."))?)
            }
        };
        let mut pulled = || {
            let line = client.line();
            let (bytes, _) = ask(&line, &url.name, None)?;
            let bar = self.bar(bytes, &url.name);
            let copied = client.window()?.receive(&line, &mut sink, &|more| bar.inc(more))?;
            check_length(bytes, 0, copied)?;
            line.say(&Word::Done { stream: line.stream })?;
            bar.finish();
            Ok(())
        };
        pulled().map_err(|error| complain(&error, url))
    }

    /// All that is in a directory.
    fn pull_tree(&self, client: &Client, url: &Url, path: &Path) -> Result<(), Complaint> {
        let listed = client.list(&url.name, true);
        let (entries, left_out) = listed.map_err(|error| complain(&error, url))?;
        fs::create_dir_all(path).or_complain(Exit::Failed, || format!("{} cannot be made.", path.display()))?;
        let tree = open_tree(path)?;
        let bytes = entries.iter().filter_map(|entry| entry.bytes);
        let bar = self.bar(Some(bytes.fold(0, u64::saturating_add)), &url.name);
        for (nth, entry) in entries.iter().enumerate() {
            let far = join(&url.name, &entry.path);
            bar.set_message(format!("{}/{} {}", nth + 1, entries.len(), shown(&entry.path)));
            let name = entry.path.as_str();
            let done = match entry.bytes {
                None => tree.make_directories(name).map_err(unwritten),
                Some(_) => self.pull_file(client, &far, Destination { tree: &tree, name }, Some(&bar)),
            };
            done.map_err(|error| complain_of(&error, &shown(&far)))?;
        }
        bar.finish();
        self.tell_left_out(left_out);
        Ok(())
    }

    /// One file. A bar of the caller's shows it, or one of its own.
    fn pull_file(
        &self,
        client: &Client,
        name: &str,
        to: Destination<'_>,
        bar: Option<&ProgressBar>,
    ) -> Result<(), CourierError> {
        if self.resume && is_there(client, name, to)? {
            bar.into_iter().for_each(|bar| bar.inc(to.bytes()));
            return Ok(());
        }
        let line = client.line();
        let mut new = match self.resume {
            true => to.tree.resumed_file(to.name),
            false => to.tree.new_file(to.name),
        }
        .map_err(unwritten)?;
        let have = resume::held(&mut new)?;
        let (bytes, from) = ask(&line, name, have)?;
        resume::go_on_from(&mut new, from, have)?;
        let own = bar.is_none().then(|| self.bar(bytes, name));
        let progress = |more| bar.or(own.as_ref()).into_iter().for_each(|bar| bar.inc(more));
        progress(from);
        let received = client.window()?.receive(&line, &mut new, &progress);
        match received.and_then(|copied| check_length(bytes, from, copied)) {
            Ok(()) => new.keep(true).map_err(unwritten)?,
            // Half of one file and half of another is of no use to anybody.
            Err(error @ CourierError::Refused(Refusal::Changed)) => {
                new.discard();
                return Err(error);
            }
            Err(error) => return Err(error),
        }
        line.say(&Word::Done { stream: line.stream })?;
        own.into_iter().for_each(|bar| bar.finish());
        Ok(())
    }
}

/// Asks for a file, and returns how long it is and where it begins.
fn ask(line: &Line, name: &str, have: Option<Have>) -> Result<(Option<u64>, u64), CourierError> {
    let (stream, name) = (line.stream, name.to_owned());
    line.say(&Word::Get { stream, name, have })?;
    line.hear_beginning()
}

impl Destination<'_> {
    fn bytes(&self) -> u64 {
        match self.tree.look(self.name) {
            Ok(Kind::File { bytes }) => bytes,
            _ => 0,
        }
    }
}

/// Whether a file is here already, and is the one that the server has. One that is something else, or only begins like it, is copied anew, and
/// replaced when that is whole.
fn is_there(client: &Client, name: &str, to: Destination<'_>) -> Result<bool, CourierError> {
    let Ok(Kind::File { bytes }) = to.tree.look(to.name) else {
        return Ok(false);
    };
    let (mut file, _) = to.tree.open_file(to.name).map_err(unwritten)?;
    let Some(checksum) = tree::checksum(&mut file, bytes).map_err(CourierError::Reading)? else {
        return Ok(false);
    };
    let line = client.line();
    let (stream, name, have) = (line.stream, name.to_owned(), Have { bytes, checksum });
    line.say(&Word::Compare { stream, name, have })?;
    match line.hear() {
        Ok(Word::Done { .. }) => Ok(true),
        Err(CourierError::Refused(Refusal::Differs)) => Ok(false),
        Ok(_) => Err(CourierError::Protocol("no answer")),
        Err(error) => Err(error),
    }
}

fn check_length(bytes: Option<u64>, from: u64, copied: u64) -> Result<(), CourierError> {
    match bytes {
        Some(bytes) if from.checked_add(copied) != Some(bytes) => Err(CourierError::Refused(Refusal::Changed)),
        _ => Ok(()),
    }
}

/// The directory of a path, and the name there.
fn place(path: &Path) -> Result<(PathBuf, String), Complaint> {
    let named = path.file_name().and_then(|name| name.to_str());
    let Some(name) = named else {
        let sentence = format!("{} gives no name for a file.", path.display());
        return Err(Complaint::new(Exit::Usage, sentence).try_this("a file name"));
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_owned()))
}

fn open_tree(path: &Path) -> Result<Tree, Complaint> {
    // Links that are here already must not lead what comes from elsewhere to some other place.
    Tree::open(path, Links::Never).or_complain(Exit::Failed, || format!("{} cannot be written to.", path.display()))
}

fn unwritten(error: TreeError) -> CourierError {
    match error {
        TreeError::System(error) => CourierError::Writing(error),
        other => CourierError::Writing(io::Error::other(other)),
    }
}
