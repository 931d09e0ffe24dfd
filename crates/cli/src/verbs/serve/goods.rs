//! What is served, and what is done with it when somebody asks.

use std::io;
use std::path::Path;
use std::sync::Mutex;

use crate::courier::{self, CourierError, Have, Line, Listed, Refusal, Word};
use crate::resume;
use crate::tree::{self, Kind, Links, Stamp, Tree, TreeError};

/// What is served.
#[derive(Debug)]
pub enum Goods {
    File {
        name: String,
        /// Where it lies.
        tree: Tree,
    },
    Directory {
        tree: Tree,
        writable: bool,
    },
    /// Taken by the first who asks.
    Stdin(Mutex<bool>),
}

/// How a request ended well: with so many bytes moved, where it moves any.
type Served = Result<Option<u64>, CourierError>;

impl Goods {
    pub fn stdin() -> Goods {
        Goods::Stdin(Mutex::new(false))
    }

    pub fn file(directory: &Path, name: String) -> io::Result<Goods> {
        let tree = Tree::open(directory, Links::Inside)?;
        Ok(Goods::File { name, tree })
    }

    pub fn directory(path: &Path, writable: bool) -> io::Result<Goods> {
        let tree = Tree::open(path, Links::Inside)?;
        Ok(Goods::Directory { tree, writable })
    }

    pub fn is_directory(&self) -> bool {
        matches!(self, Goods::Directory { .. })
    }

    /// A name that can be asked for.
    pub fn example(&self) -> &str {
        match self {
            Goods::File { name, .. } => name,
            Goods::Directory { .. } => "NAME",
            Goods::Stdin(_) => "stdin",
        }
    }

    /// Whether nobody can be given anything any more.
    pub fn is_used_up(&self) -> bool {
        match self {
            Goods::Stdin(taken) => *taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner()),
            _ => false,
        }
    }

    /// Sends what has a name.
    pub fn give(&self, line: &Line, name: &str, have: Option<Have>) -> Served {
        let stream = line.stream;
        let finish = |chunks| {
            line.say(&Word::End { stream, chunks })?;
            match line.hear()? {
                Word::Done { .. } => Ok(()),
                _ => Err(CourierError::Protocol("not the end")),
            }
        };
        let tree = match self.tree_of(name)? {
            Ok(tree) => tree,
            Err(taken) => {
                let mut taken = taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if std::mem::replace(&mut *taken, true) {
                    return Err(CourierError::Refused(Refusal::NoSuchName));
                }
                drop(taken);
                let (bytes, from) = (None, 0);
                line.say(&Word::Begin { stream, bytes, from })?;
                let (total, chunks) = courier::give(line, &mut io::stdin())?;
                finish(chunks)?;
                return Ok(Some(total));
            }
        };
        let (mut file, bytes) = tree.open_file(name).map_err(refused)?;
        let stamp = Stamp::of(&file).map_err(CourierError::Reading)?;
        let from = resume::common(&mut file, bytes, have)?;
        let bytes = Some(bytes);
        line.say(&Word::Begin { stream, bytes, from })?;
        let (total, chunks) = courier::give(line, &mut file)?;
        // Half of one and half of another is neither.
        if Stamp::of(&file).map_err(CourierError::Reading)? != stamp {
            return Err(CourierError::Refused(Refusal::Changed));
        }
        finish(chunks)?;
        Ok(Some(total))
    }

    /// Says whether what has a name is the same as what the other end has.
    pub fn compare(&self, line: &Line, name: &str, have: Have) -> Served {
        let differs = CourierError::Refused(Refusal::Differs);
        let Ok(tree) = self.tree_of(name)? else {
            return Err(differs);
        };
        let (mut file, bytes) = tree.open_file(name).map_err(refused)?;
        let stamp = Stamp::of(&file).map_err(CourierError::Reading)?;
        let checksum = match bytes == have.bytes {
            true => tree::checksum(&mut file, bytes).map_err(CourierError::Reading)?,
            false => None,
        };
        if checksum != Some(have.checksum) || Stamp::of(&file).map_err(CourierError::Reading)? != stamp {
            return Err(differs);
        }
        line.say(&Word::Done { stream: line.stream })?;
        Ok(None)
    }

    /// Takes what is put under a name.
    pub fn take(&self, line: &Line, name: &str, resume: bool) -> Served {
        let tree = self.writable()?;
        match tree.look(name) {
            Ok(Kind::File { bytes }) if resume => return is_there(line, tree, name, bytes),
            Ok(_) => return Err(refused(TreeError::Exists)),
            Err(TreeError::Absent) => {}
            Err(error) => return Err(refused(error)),
        }
        let mut new = match resume {
            true => tree.resumed_file(name),
            false => tree.new_file(name),
        }
        .map_err(refused)?;
        let have = resume::held(&mut new)?;
        let stream = line.stream;
        line.say(&Word::Take { stream, have })?;
        let (bytes, from) = line.hear_beginning()?;
        resume::go_on_from(&mut new, from, have)?;
        let total = courier::take(line, &mut new)?;
        if bytes.is_some_and(|bytes| from.checked_add(total) != Some(bytes)) {
            new.discard();
            return Err(CourierError::Refused(Refusal::Changed));
        }
        new.keep(false).map_err(refused)?;
        line.say(&Word::Done { stream })?;
        Ok(Some(total))
    }

    /// Makes a directory.
    pub fn make(&self, line: &Line, name: &str) -> Served {
        self.writable()?.make_directories(name).map_err(refused)?;
        line.say(&Word::Done { stream: line.stream })?;
        Ok(None)
    }

    /// Tells what is in a directory.
    pub fn list(&self, line: &Line, name: &str, deep: bool) -> Served {
        let (entries, left_out) = match self {
            Goods::Stdin(_) => return Err(CourierError::Refused(Refusal::NotDirectory)),
            Goods::File { name: known, tree } => match name.is_empty() {
                true => (vec![listed(known.clone(), tree.look(known).map_err(refused)?)], 0),
                false => return Err(CourierError::Refused(Refusal::NotDirectory)),
            },
            Goods::Directory { tree, .. } => {
                let (entries, left_out) = tree.entries(name, deep).map_err(refused)?;
                let entries = entries.into_iter().map(|entry| listed(entry.path, entry.kind));
                (entries.collect(), left_out)
            }
        };
        let stream = line.stream;
        let mut pages = courier::pages(entries).into_iter().peekable();
        while let Some(entries) = pages.next() {
            let more = pages.peek().is_some();
            line.say(&Word::Entries {
                stream,
                entries,
                more,
                left_out,
            })?;
            match more.then(|| line.hear()).transpose()? {
                None | Some(Word::Next { .. }) => {}
                Some(_) => return Err(CourierError::Protocol("not the next entries")),
            }
        }
        Ok(None)
    }

    /// Where something of this name would be; or, for a stream, whether it is taken.
    fn tree_of(&self, name: &str) -> Result<Result<&Tree, &Mutex<bool>>, CourierError> {
        match self {
            Goods::Stdin(taken) => Ok(Err(taken)),
            Goods::File { .. } if name.is_empty() => Err(refused(TreeError::IsDirectory)),
            Goods::File { name: known, .. } if known != name => Err(refused(TreeError::Absent)),
            Goods::File { tree, .. } | Goods::Directory { tree, .. } => Ok(Ok(tree)),
        }
    }

    fn writable(&self) -> Result<&Tree, CourierError> {
        match self {
            Goods::Directory { tree, writable: true } => Ok(tree),
            _ => Err(CourierError::Refused(Refusal::NotWritable)),
        }
    }
}

/// Somebody goes on with an upload that was whole already: it is, if it is the same.
fn is_there(line: &Line, tree: &Tree, name: &str, bytes: u64) -> Served {
    let (mut file, _) = tree.open_file(name).map_err(refused)?;
    let checksum = tree::checksum(&mut file, bytes).map_err(CourierError::Reading)?;
    let checksum = checksum.ok_or(CourierError::Refused(Refusal::Changed))?;
    let stream = line.stream;
    let have = Some(Have { bytes, checksum });
    line.say(&Word::Take { stream, have })?;
    let (whole, from) = line.hear_beginning()?;
    if from != bytes || whole != Some(bytes) {
        return Err(CourierError::Refused(Refusal::Exists));
    }
    match line.hear()? {
        Word::End { chunks: 0, .. } => line.say(&Word::Done { stream })?,
        _ => return Err(CourierError::Refused(Refusal::Exists)),
    }
    Ok(Some(0))
}

fn listed(path: String, kind: Kind) -> Listed {
    let bytes = match kind {
        Kind::File { bytes } => Some(bytes),
        Kind::Directory => None,
    };
    Listed { path, bytes }
}

fn refused(error: TreeError) -> CourierError {
    CourierError::Refused(error.into())
}
