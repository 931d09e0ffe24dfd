//! A directory and what is below it, for `serve` and `copy`. Names come from other machines: none of them leads out, by `..`, by a root or
//! by a link; and nothing but plain files is ever opened, because opening a pipe waits for somebody, and opening a device may do anything.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, RenameFlags, ResolveFlags, flock, fstat, linkat,
    mkdirat, open, openat, openat2, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use thiserror::Error;
use weft::Digest;

/// The longest name that is looked at.
pub const NAME_BYTES_MAX: usize = 4096;
/// What a copy that can be resumed leaves beside its destination until it is whole. Nobody else's file has such a name: it is neither
/// served, nor taken, nor listed.
pub const PART_SUFFIX: &str = ".weft-part";
/// One more entry of a directory, or of all that is walked through, is too many to be looked at.
pub const ENTRIES_MAX: usize = 1 << 20;
const CHUNK_BYTES: usize = 1 << 20;

/// What happens with links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Those that stay below the directory are followed.
    Inside,
    /// None is.
    Never,
}

/// A directory whose insides are reached by name.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
    links: Links,
}

/// What there is under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File { bytes: u64 },
    Directory,
}

/// Something below a directory, by its way from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub path: String,
    pub kind: Kind,
}

/// Why something below a directory cannot be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TreeError {
    #[error("the name leads out of the directory")]
    Outside,
    #[error("there is nothing of this name")]
    Absent,
    #[error("it is a directory")]
    IsDirectory,
    #[error("it is not a directory")]
    NotDirectory,
    #[error("it is {0}, and no file")]
    Special(&'static str),
    #[error("there is something of this name already")]
    Exists,
    #[error("another copy is under way to the same place")]
    Busy,
    #[error("there are more than {ENTRIES_MAX} entries")]
    TooMany,
    #[error(transparent)]
    System(#[from] io::Error),
}

impl From<Errno> for TreeError {
    fn from(error: Errno) -> TreeError {
        match error {
            Errno::NOENT => TreeError::Absent,
            // A link where none is followed, or one that leads out.
            Errno::XDEV | Errno::LOOP => TreeError::Outside,
            Errno::NOTDIR => TreeError::NotDirectory,
            Errno::EXIST => TreeError::Exists,
            other => TreeError::System(other.into()),
        }
    }
}

impl Tree {
    /// The directory itself may be anywhere: whoever names it is trusted.
    pub fn open(path: &Path, links: Links) -> io::Result<Tree> {
        let root = open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Tree { root, links })
    }

    /// What there is under a name. The empty name is the directory itself.
    pub fn look(&self, name: &str) -> Result<Kind, TreeError> {
        kind_of(self.resolve(name)?.as_fd())
    }

    /// A plain file, to be read.
    pub fn open_file(&self, name: &str) -> Result<(File, u64), TreeError> {
        let found = self.resolve(name)?;
        match kind_of(found.as_fd())? {
            Kind::Directory => Err(TreeError::IsDirectory),
            // What was looked at is what is opened, whatever has the name by now.
            Kind::File { bytes } => Ok((File::open(own_link(found.as_fd()))?, bytes)),
        }
    }

    /// Makes a directory, and those above it, where they are not there.
    pub fn make_directories(&self, name: &str) -> Result<(), TreeError> {
        let mut made = PathBuf::new();
        for part in plain(name)?.components() {
            let above = self.directory(&made)?;
            match mkdirat(&above, part.as_os_str(), Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            made.push(part);
        }
        self.directory(&made).map(drop)
    }

    /// A file that appears under its name when it is whole, and leaves nothing behind otherwise.
    pub fn new_file(&self, name: &str) -> Result<NewFile, TreeError> {
        let (parent, name) = self.place(name)?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (file, form) = match openat(&parent, ".", flags, Mode::from_raw_mode(0o666)) {
            Ok(file) => (file, Form::Unnamed),
            // Some file systems have no files without names.
            Err(_) => {
                let part = OsString::from(format!(".{:016x}{PART_SUFFIX}", getrandom::u64().unwrap_or_default()));
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                (
                    openat(&parent, &part, flags, Mode::from_raw_mode(0o666))?,
                    Form::Named(part),
                )
            }
        };
        Ok(NewFile {
            parent,
            name,
            file: file.into(),
            form,
        })
    }

    /// As [`new_file`](Tree::new_file), but what is not whole in the end stays, as `NAME.weft-part`, for the next one to go on with; what an
    /// earlier one has left is in it.
    pub fn resumed_file(&self, name: &str) -> Result<NewFile, TreeError> {
        let (parent, name) = self.place(name)?;
        let mut part = name.clone();
        part.push(PART_SUFFIX);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&parent, &part, flags, Mode::from_raw_mode(0o666))?;
        kind_of(file.as_fd())?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(TreeError::Busy),
            locked => locked?,
        }
        // Whoever had it before may have given it its name meanwhile: then it is no part any more.
        let (held, named) = (fstat(&file)?, statat(&parent, &part, AtFlags::SYMLINK_NOFOLLOW));
        if !named.is_ok_and(|named| (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)) {
            return Err(TreeError::Busy);
        }
        Ok(NewFile {
            parent,
            name,
            file: file.into(),
            form: Form::Resumable(part),
        })
    }

    /// Everything below a directory, or what it holds itself; and how many things were left out, because they are neither files nor
    /// directories, cannot be looked at, or have names that cannot be told.
    pub fn entries(&self, name: &str, deep: bool) -> Result<(Vec<Entry>, u64), TreeError> {
        let mut found = Vec::new();
        let mut left_out = 0;
        let mut waiting = vec![String::new()];
        while let Some(below) = waiting.pop() {
            let whole = join(name, &below);
            let directory = self.directory(Path::new(&whole))?;
            let readable = openat(
                &directory,
                ".",
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            );
            let listed = match readable {
                Ok(directory) => Dir::new(directory)?,
                Err(_) if !below.is_empty() => {
                    left_out += 1;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let first = found.len();
            for entry in listed {
                let entry = entry?;
                let Ok(file_name) = entry.file_name().to_str() else {
                    left_out += 1;
                    continue;
                };
                if matches!(file_name, "." | "..") || file_name.ends_with(PART_SUFFIX) {
                    continue;
                }
                let path = join(&below, file_name);
                // A link to a directory may lead round in a circle.
                let is_link = entry.file_type() == FileType::Symlink;
                match self.look(&join(name, &path)) {
                    Ok(Kind::Directory) if is_link => left_out += 1,
                    Ok(kind) => found.push(Entry { path, kind }),
                    Err(_) => left_out += 1,
                }
                if found.len() > ENTRIES_MAX {
                    return Err(TreeError::TooMany);
                }
            }
            found[first..].sort_by(|a, b| a.path.cmp(&b.path));
            if deep {
                let directories = found[first..].iter().filter(|entry| entry.kind == Kind::Directory);
                let directories: Vec<String> = directories.map(|entry| entry.path.clone()).collect();
                waiting.extend(directories.into_iter().rev());
            }
        }
        Ok((found, left_out))
    }

    /// Where a new file goes: the directory, and the name there.
    fn place(&self, name: &str) -> Result<(OwnedFd, OsString), TreeError> {
        let path = plain(name)?;
        let (Some(parent), Some(file_name)) = (path.parent(), path.file_name()) else {
            return Err(TreeError::Outside);
        };
        if name.ends_with(PART_SUFFIX) {
            return Err(TreeError::Outside);
        }
        Ok((self.directory(parent)?, file_name.to_os_string()))
    }

    fn directory(&self, path: &Path) -> Result<OwnedFd, TreeError> {
        // It has been checked as a part of the whole name, or is empty.
        let name = path.to_str().ok_or(TreeError::Outside)?;
        let found = self.resolve(name)?;
        match kind_of(found.as_fd())? {
            Kind::Directory => Ok(found),
            Kind::File { .. } => Err(TreeError::NotDirectory),
        }
    }

    /// Finds what has a name, without opening it.
    fn resolve(&self, name: &str) -> Result<OwnedFd, TreeError> {
        if name.is_empty() {
            return Ok(self.root.try_clone()?);
        }
        let path = plain(name)?;
        if name.ends_with(PART_SUFFIX) {
            return Err(TreeError::Absent);
        }
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        if self.links == Links::Inside {
            let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            match openat2(&self.root, path, flags, Mode::empty(), within) {
                // Kernels and sandboxes without it get by with no links at all.
                Err(Errno::NOSYS | Errno::PERM) => {}
                found => return Ok(found?),
            }
        }
        let mut found = self.root.try_clone()?;
        for part in path.components() {
            found = openat(&found, part.as_os_str(), flags | OFlags::NOFOLLOW, Mode::empty())?;
            if FileType::from_raw_mode(fstat(&found)?.st_mode) == FileType::Symlink {
                return Err(TreeError::Outside);
            }
        }
        Ok(found)
    }
}

/// A file on its way to its name.
#[derive(Debug)]
pub struct NewFile {
    parent: OwnedFd,
    name: OsString,
    file: File,
    form: Form,
}

#[derive(Debug)]
enum Form {
    /// It has no name before it is whole.
    Unnamed,
    /// It has another name, which goes with it.
    Named(OsString),
    /// It has another name, which stays.
    Resumable(OsString),
    Kept,
}

impl NewFile {
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives it its name. Without `replace`, nothing may have that yet.
    pub fn keep(mut self, replace: bool) -> Result<(), TreeError> {
        let how = if replace {
            RenameFlags::empty()
        } else {
            RenameFlags::NOREPLACE
        };
        match std::mem::replace(&mut self.form, Form::Kept) {
            Form::Unnamed => {
                let own = own_link(self.file.as_fd());
                let link = |name: &OsString| linkat(CWD, &own, &self.parent, name, AtFlags::SYMLINK_FOLLOW);
                match link(&self.name) {
                    Err(Errno::EXIST) if replace => {
                        let part =
                            OsString::from(format!(".{:016x}{PART_SUFFIX}", getrandom::u64().unwrap_or_default()));
                        link(&part)?;
                        self.form = Form::Named(part.clone());
                        renameat_with(&self.parent, &part, &self.parent, &self.name, how)?;
                    }
                    linked => linked?,
                }
            }
            Form::Named(part) => {
                self.form = Form::Named(part.clone());
                self.rename(&part, how)?;
            }
            Form::Resumable(part) => {
                self.form = Form::Resumable(part.clone());
                self.rename(&part, how)?;
            }
            Form::Kept => {}
        }
        self.form = Form::Kept;
        Ok(())
    }

    fn rename(&self, part: &OsString, how: RenameFlags) -> Result<(), TreeError> {
        match renameat_with(&self.parent, part, &self.parent, &self.name, how) {
            // Some file systems, such as NFS, cannot do so without replacing. A second name that is refused where there is one does the same.
            Err(Errno::INVAL | Errno::NOSYS) if how == RenameFlags::NOREPLACE => {
                linkat(&self.parent, part, &self.parent, &self.name, AtFlags::empty())?;
                Ok(unlinkat(&self.parent, part, AtFlags::empty())?)
            }
            renamed => Ok(renamed?),
        }
    }

    /// Leaves nothing behind, also of what could be resumed.
    pub fn discard(mut self) {
        if let Form::Resumable(part) = std::mem::replace(&mut self.form, Form::Kept) {
            self.form = Form::Named(part);
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let empty = || self.file.metadata().is_ok_and(|facts| facts.len() == 0);
        let unwanted = match &self.form {
            Form::Named(part) => Some(part),
            Form::Resumable(part) if empty() => Some(part),
            _ => None,
        };
        if let Some(part) = unwanted {
            // If it cannot be removed, there is nobody left to tell.
            let _ = unlinkat(&self.parent, part, AtFlags::empty());
        }
    }
}

/// What tells that a file has not been changed meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub bytes: u64,
    changed: Option<SystemTime>,
}

impl Stamp {
    pub fn of(file: &File) -> io::Result<Stamp> {
        let facts = file.metadata()?;
        Ok(Stamp {
            bytes: facts.len(),
            changed: facts.modified().ok(),
        })
    }
}

/// A name as a path that cannot lead upwards or to a root.
pub fn plain(name: &str) -> Result<&Path, TreeError> {
    let path = Path::new(name);
    let plain = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.contains('\0')
        && path.components().all(|part| matches!(part, Component::Normal(_)));
    if plain { Ok(path) } else { Err(TreeError::Outside) }
}

/// One name below another; either may be empty.
pub fn join(above: &str, below: &str) -> String {
    match (above.is_empty(), below.is_empty()) {
        (true, _) => below.to_owned(),
        (_, true) => above.to_owned(),
        _ => format!("{}/{below}", above.trim_end_matches('/')),
    }
}

/// The checksum of the first bytes of a file, which stands behind them afterwards. `None`: it has fewer.
pub fn checksum(file: &mut File, bytes: u64) -> io::Result<Option<u64>> {
    let mut digest = Digest::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut left = bytes;
    while left > 0 {
        let part = &mut chunk[..left.min(CHUNK_BYTES as u64) as usize];
        match file.read(part) {
            Ok(0) => return Ok(None),
            Ok(read) => {
                digest.update(&part[..read]);
                left -= read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Some(digest.finish()))
}

fn kind_of(found: BorrowedFd<'_>) -> Result<Kind, TreeError> {
    let facts = fstat(found)?;
    match FileType::from_raw_mode(facts.st_mode) {
        FileType::RegularFile => Ok(Kind::File {
            bytes: u64::try_from(facts.st_size).unwrap_or(0),
        }),
        FileType::Directory => Ok(Kind::Directory),
        FileType::Fifo => Err(TreeError::Special("a pipe")),
        FileType::Socket => Err(TreeError::Special("a socket")),
        FileType::CharacterDevice | FileType::BlockDevice => Err(TreeError::Special("a device")),
        FileType::Symlink => Err(TreeError::Outside),
        FileType::Unknown => Err(TreeError::Special("something unknown")),
    }
}

/// Another way to what is open.
fn own_link(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Removes what resumable copies have left below a directory, if nobody has touched it for so long.
pub fn sweep_parts(directory: &Path, older_than: Duration) {
    let mut waiting = vec![directory.to_owned()];
    let mut looked = 0;
    while let Some(directory) = waiting.pop() {
        let Ok(listed) = std::fs::read_dir(directory) else {
            continue;
        };
        for entry in listed.flatten() {
            looked += 1;
            if looked > ENTRIES_MAX {
                return;
            }
            // Of a link, these are its own.
            let Ok(facts) = entry.metadata() else { continue };
            let is_part = entry.file_name().as_encoded_bytes().ends_with(PART_SUFFIX.as_bytes());
            let age = facts.modified().ok().and_then(|changed| changed.elapsed().ok());
            if facts.is_dir() {
                waiting.push(entry.path());
            } else if is_part && facts.is_file() && age.is_some_and(|age| age >= older_than) {
                // What cannot be removed is in nobody's way.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Whether a path that a person has named is there and is no plain file: then it is written to as it is.
pub fn is_special(path: &Path) -> bool {
    let kind = statat(CWD, path, AtFlags::empty()).map(|facts| FileType::from_raw_mode(facts.st_mode));
    kind.is_ok_and(|kind| !matches!(kind, FileType::RegularFile | FileType::Directory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// A directory of its own for a test, gone afterwards.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("weft-tree-{name}-{}", std::process::id()));
            fs::create_dir_all(path.join("root/in")).unwrap();
            fs::write(path.join("outside"), b"outside").unwrap();
            fs::write(path.join("root/in/file"), b"inside").unwrap();
            Scratch(path)
        }
        fn tree(&self, links: Links) -> Tree {
            Tree::open(&self.0.join("root"), links).unwrap()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        let long = "x/".repeat(3000);
        for bad in [
            "",
            "..",
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a\0b",
            "./a",
            long.as_str(),
        ] {
            assert!(matches!(plain(bad), Err(TreeError::Outside)), "{bad:?}");
        }
        assert!(plain("dir/model.bin").is_ok());
    }

    #[test]
    fn links_that_lead_out_are_refused_and_others_only_where_none_is_wanted() {
        let scratch = Scratch::new("links");
        let root = scratch.0.join("root");
        symlink("/etc", root.join("away")).unwrap();
        symlink("../outside", root.join("up")).unwrap();
        symlink("in/file", root.join("beside")).unwrap();
        symlink("in", root.join("door")).unwrap();
        for links in [Links::Inside, Links::Never] {
            let tree = scratch.tree(links);
            for bad in ["away/passwd", "away", "up"] {
                assert!(
                    matches!(tree.open_file(bad), Err(TreeError::Outside)),
                    "{links:?} {bad}"
                );
                assert!(tree.new_file(&format!("{bad}/new")).is_err(), "{links:?} {bad}");
            }
            assert_eq!(tree.open_file("in/file").unwrap().1, 6);
            assert!(matches!(tree.look("absent"), Err(TreeError::Absent)));
        }
        assert_eq!(scratch.tree(Links::Inside).open_file("beside").unwrap().1, 6);
        assert_eq!(scratch.tree(Links::Inside).open_file("door/file").unwrap().1, 6);
        for bad in ["beside", "door/file"] {
            assert!(
                matches!(scratch.tree(Links::Never).look(bad), Err(TreeError::Outside)),
                "{bad}"
            );
        }
        assert!(matches!(
            scratch.tree(Links::Never).make_directories("door/new"),
            Err(TreeError::Outside)
        ));
        assert!(!root.join("in/new").exists());
    }

    #[test]
    fn what_is_no_file_is_never_opened() {
        let scratch = Scratch::new("special");
        let root = scratch.0.join("root");
        rustix::fs::mknodat(CWD, root.join("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
        let tree = scratch.tree(Links::Inside);
        // Opening a pipe to which nobody writes would wait for ever.
        assert!(matches!(tree.open_file("pipe"), Err(TreeError::Special("a pipe"))));
        assert!(matches!(tree.open_file("socket"), Err(TreeError::Special("a socket"))));
        assert!(matches!(tree.open_file("in"), Err(TreeError::IsDirectory)));
        let devices = Tree::open(Path::new("/dev"), Links::Inside).unwrap();
        assert!(matches!(devices.open_file("null"), Err(TreeError::Special("a device"))));
        let (found, left_out) = tree.entries("", true).unwrap();
        let names: Vec<&str> = found.iter().map(|entry| entry.path.as_str()).collect();
        assert_eq!((names, left_out), (vec!["in", "in/file"], 2));
    }

    #[test]
    fn a_file_is_there_when_it_is_whole_and_not_before() {
        let scratch = Scratch::new("new");
        let tree = scratch.tree(Links::Never);
        let names = || {
            let mut names: Vec<_> = fs::read_dir(scratch.0.join("root"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect();
            names.sort();
            names
        };
        let mut file = tree.new_file("model").unwrap();
        file.write_all(b"half").unwrap();
        assert!(!names().contains(&"model".into()));
        drop(file);
        assert_eq!(names(), ["in"]);
        for (text, replace) in [(b"first", false), (b"again", true)] {
            let mut file = tree.new_file("model").unwrap();
            file.write_all(text).unwrap();
            file.keep(replace).unwrap();
            assert_eq!(fs::read(scratch.0.join("root/model")).unwrap(), text);
        }
        let refused = tree.new_file("model").unwrap().keep(false);
        assert!(matches!(refused, Err(TreeError::Exists)), "{refused:?}");
        assert_eq!(names(), ["in", "model"]);
    }

    #[test]
    fn what_can_be_resumed_stays_and_has_one_writer() {
        let scratch = Scratch::new("resumed");
        let tree = scratch.tree(Links::Never);
        drop(tree.resumed_file("model").unwrap());
        assert!(
            !scratch.0.join("root/model.weft-part").exists(),
            "nothing is nothing to resume"
        );
        let mut file = tree.resumed_file("model").unwrap();
        file.write_all(b"half").unwrap();
        assert!(matches!(tree.resumed_file("model"), Err(TreeError::Busy)));
        drop(file);
        let mut file = tree.resumed_file("model").unwrap();
        assert_eq!(
            checksum(file.file(), 4).unwrap(),
            Some({
                let mut digest = Digest::default();
                digest.update(b"half");
                digest.finish()
            })
        );
        assert_eq!(checksum(file.file(), 1).unwrap(), None);
        file.write_all(b" and half").unwrap();
        file.keep(false).unwrap();
        assert_eq!(fs::read(scratch.0.join("root/model")).unwrap(), b"half and half");
        // Parts are nobody's business.
        fs::write(scratch.0.join("root/x.weft-part"), b"x").unwrap();
        assert!(matches!(tree.open_file("x.weft-part"), Err(TreeError::Absent)));
        assert!(tree.new_file("y.weft-part").is_err());
        assert_eq!(tree.entries("", false).unwrap().0.len(), 2);
        sweep_parts(&scratch.0.join("root"), Duration::ZERO);
        assert!(!scratch.0.join("root/x.weft-part").exists());
    }
}
