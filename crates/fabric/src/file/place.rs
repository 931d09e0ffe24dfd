//! A file, or a block device, as memory that an agent registers.
//!
//! A place has two descriptors of one file: one past the page cache (`O_DIRECT`), for all that is aligned, and one through it, for the edges that are not.
//! What goes past the cache begins and ends at whole pages, so the two never share one.

use std::any::Any;
use std::ffi::{CString, OsStr};
use std::fmt;
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;
use weft_protocol::memory::Digest;
use weft_protocol::{HostBytes, Memory, Refusal};

use crate::fork::NotInherited;

/// The smallest page that there is.
pub(super) const PAGE: u64 = 4096;

/// What goes past the page cache begins and ends at multiples of this at least, so that it shares no page with what goes through it. Where pages have 64 KiB, that is what one is.
fn page_bytes() -> u64 {
    // SAFETY: a plain call, without arguments of memory.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(PAGE).max(PAGE)
}

/// How to open a file as a place. The default is a file that is there, as long as it is, for reading and writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileOptions {
    /// How many bytes of it, from its beginning. A file that is shorter, or is not there, is made that long; without it, all that there is.
    pub size: Option<u64>,
    /// Whether it may be written. A file that may not is never made, nor made longer.
    pub write: bool,
    pub direct: Direct,
    /// Leave holes where nothing has been written, instead of asking the file system for room first. Then it may turn out to be full in the middle.
    pub sparse: bool,
    /// Write to a new file beside it, of `size` bytes, which takes the name when it is committed. Until then whoever opens the name finds what
    /// was there before; what is never committed is removed.
    pub replace: bool,
    /// All bytes go through memory of the transport's own. It costs a copy; a read then ends at its deadline even if the device is stuck.
    pub staged: bool,
}

impl Default for FileOptions {
    fn default() -> FileOptions {
        FileOptions {
            size: None,
            write: true,
            direct: Direct::Auto,
            sparse: false,
            replace: false,
            staged: false,
        }
    }
}

impl FileOptions {
    /// A file of this many bytes, which is made if it is not there.
    pub fn sized(bytes: u64) -> FileOptions {
        FileOptions {
            size: Some(bytes),
            ..FileOptions::default()
        }
    }
    pub fn write(self, write: bool) -> FileOptions {
        FileOptions { write, ..self }
    }
    pub fn direct(self, direct: Direct) -> FileOptions {
        FileOptions { direct, ..self }
    }
    pub fn sparse(self, sparse: bool) -> FileOptions {
        FileOptions { sparse, ..self }
    }
    pub fn replace(self, replace: bool) -> FileOptions {
        FileOptions { replace, ..self }
    }
    pub fn staged(self, staged: bool) -> FileOptions {
        FileOptions { staged, ..self }
    }
}

/// Whether to go past the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Where the file system can.
    #[default]
    Auto,
    /// A file of a file system that cannot is refused.
    On,
    Off,
}

/// Why a file is reached through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum NoDirect {
    #[error("it was asked for")]
    Asked,
    #[error("its file system knows no O_DIRECT")]
    FileSystem,
    #[error("it cannot be opened with O_DIRECT: system error {0}")]
    Refused(i32),
}

/// Why a file is no place: fix the call, or make room.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileError {
    #[error("{} cannot be opened: {source}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("{} is {what}: only regular files and block devices are places", path.display())]
    NotAFile { path: PathBuf, what: &'static str },
    #[error("{} is empty: say how many bytes it should have", path.display())]
    Empty { path: PathBuf },
    #[error("{} has {has} bytes, and cannot have {asked}: {why}", path.display())]
    TooShort {
        path: PathBuf,
        has: u64,
        asked: u64,
        why: &'static str,
    },
    #[error("there is no room for {bytes} bytes of {}: {source}", path.display())]
    NoRoom {
        path: PathBuf,
        bytes: u64,
        source: io::Error,
    },
    #[error("{} is not reached past the page cache: {reason}", path.display())]
    NoDirect { path: PathBuf, reason: NoDirect },
    #[error("to replace {} it must be writable, a regular file, and its new size known", path.display())]
    CannotReplace { path: PathBuf },
}

/// A file as a place.
pub struct FileMemory {
    path: PathBuf,
    len: u64,
    buffered: NotInherited<File>,
    past: Option<PastCache>,
    no_direct: Option<NoDirect>,
    /// What the file was found to refuse, whatever it says of itself.
    past_refused: AtomicBool,
    only_direct: bool,
    /// What was written may be lost, whatever the system says of later attempts to make it last.
    spoiled: AtomicBool,
    writable: bool,
    staged: bool,
    of_fuse: bool,
    naming: Option<Naming>,
}

struct PastCache {
    file: NotInherited<File>,
    align: Alignment,
}

/// What moves past the page cache must be multiples of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Addresses in memory, and lengths there.
    pub memory: u64,
    /// Where in the file a move begins and ends.
    pub offset: u64,
}

impl Alignment {
    /// What a file system asks for, and whole pages of the page cache.
    fn within(memory: u64, offset: u64, page_bytes: u64) -> Alignment {
        let offset = offset.max(page_bytes);
        Alignment { memory, offset }
    }
}

/// A new file that is to take a name.
#[derive(Debug)]
pub(super) struct Naming {
    pub directory: NotInherited<File>,
    pub temporary: CString,
    pub name: CString,
    /// The temporary file is there, and this one's own.
    made: AtomicBool,
    taken: AtomicBool,
    /// The directory has the new name on the disk.
    lasting: AtomicBool,
}

impl Naming {
    pub fn is_lasting(&self) -> bool {
        self.lasting.load(Ordering::Acquire)
    }
    pub fn on_lasting(&self) {
        self.lasting.store(true, Ordering::Release);
    }
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Acquire)
    }
    pub fn on_taken(&self) {
        self.taken.store(true, Ordering::Release);
    }
}

impl Drop for Naming {
    fn drop(&mut self) {
        if self.made.load(Ordering::Acquire) && !self.is_taken() {
            // SAFETY: a name that ends in zero, and a descriptor that is open; in a forked child it is no directory, and nothing happens.
            unsafe { libc::unlinkat(self.directory.as_raw_fd(), self.temporary.as_ptr(), 0) };
        }
    }
}

impl FileMemory {
    /// Opens a file. It may take as long as the file system likes; nobody else waits meanwhile.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<FileMemory, FileError> {
        let path = path.as_ref();
        let naming = options.replace.then(|| Naming::beside(path, &options)).transpose()?;
        let temporary = naming.as_ref().map(|naming| {
            let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let name = OsStr::from_bytes(naming.temporary.as_bytes());
            directory.unwrap_or(Path::new(".")).join(name)
        });
        let opened = temporary.as_deref().unwrap_or(path);
        // Whoever may not read what is replaced may not read what replaces it, not for a moment either.
        let replaced = naming.as_ref().and_then(|_| std::fs::metadata(path).ok());
        let mode = replaced.map(|replaced| replaced.mode() & 0o777);
        let failed = |source| FileError::Open {
            path: path.to_owned(),
            source,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(options.write)
            .create(options.write && options.size.is_some() && naming.is_none())
            .create_new(naming.is_some())
            .mode(mode.unwrap_or(0o666))
            // Whoever opens a pipe would wait for its other end.
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(opened)
            .map_err(|source| match source.kind() {
                // Nobody may write to one, so it is not even opened.
                io::ErrorKind::IsADirectory => FileError::NotAFile {
                    path: path.to_owned(),
                    what: "a directory",
                },
                _ => failed(source),
            })?;
        if let Some(naming) = &naming {
            naming.made.store(true, Ordering::Release);
        }
        if let Some(mode) = mode {
            // Some of it may have been masked.
            file.set_permissions(Permissions::from_mode(mode)).map_err(failed)?;
        }
        let kind = file.metadata().map_err(failed)?;
        let what = match kind.file_type() {
            kind if kind.is_file() || kind.is_block_device() => None,
            kind if kind.is_dir() => Some("a directory"),
            kind if kind.is_fifo() => Some("a pipe"),
            kind if kind.is_socket() => Some("a socket"),
            _ => Some("a character device"),
        };
        if let Some(what) = what {
            let path = path.to_owned();
            return Err(FileError::NotAFile { path, what });
        }
        // With that flag io_uring would call a file system that can only wait in the thread that submits, instead of in one of its own.
        // SAFETY: a plain call on a descriptor that is open.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, 0) } < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        let is_device = kind.file_type().is_block_device();
        let len = if is_device {
            // SAFETY: a plain call on a descriptor that is open.
            let end = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
            u64::try_from(end).map_err(|_| failed(io::Error::last_os_error()))?
        } else {
            kind.len()
        };
        let wanted = options.size.unwrap_or(len);
        if wanted == 0 {
            return Err(FileError::Empty { path: path.to_owned() });
        }
        let short = |why| FileError::TooShort {
            path: path.to_owned(),
            has: len,
            asked: wanted,
            why,
        };
        match wanted > len || !options.sparse && options.size.is_some() && options.write && !is_device {
            true if is_device => return Err(short("it is a device")),
            true if !options.write => return Err(short("it was not to be written")),
            true => make_room(&file, wanted, len, options.sparse).map_err(|source| FileError::NoRoom {
                path: path.to_owned(),
                bytes: wanted,
                source,
            })?,
            false => {}
        }
        let found = match options.direct {
            Direct::Off => Err(NoDirect::Asked),
            Direct::Auto | Direct::On => past_cache(&file, options.write, is_device),
        };
        let (past, no_direct) = match found {
            Ok(past) => (Some(past), None),
            Err(reason) if options.direct == Direct::On => {
                let path = path.to_owned();
                return Err(FileError::NoDirect { path, reason });
            }
            Err(reason) => (None, Some(reason)),
        };
        Ok(FileMemory {
            path: path.to_owned(),
            of_fuse: is_of_fuse(&file),
            len: wanted,
            buffered: NotInherited::new(file),
            past,
            no_direct,
            past_refused: AtomicBool::new(false),
            only_direct: options.direct == Direct::On,
            spoiled: AtomicBool::new(false),
            writable: options.write,
            staged: options.staged,
            naming,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What goes past the page cache must be aligned to; none where nothing goes past it.
    pub fn alignment(&self) -> Option<Alignment> {
        let past = self.past.as_ref()?;
        (!self.past_refused.load(Ordering::Relaxed)).then_some(past.align)
    }

    /// Why it is reached through the page cache, where it is.
    pub fn no_direct(&self) -> Option<NoDirect> {
        match self.past_refused.load(Ordering::Relaxed) {
            true => Some(NoDirect::Refused(libc::EINVAL)),
            false => self.no_direct,
        }
    }

    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether its file system is a program (FUSE). Such files are reached by threads: io_uring waits for the program in the thread that submits, and goes on at
    /// the wrong byte after a short write (both seen with Linux 6.18).
    pub fn is_of_fuse(&self) -> bool {
        self.of_fuse
    }

    pub(super) fn is_staged(&self) -> bool {
        self.staged
    }

    pub(super) fn naming(&self) -> Option<&Naming> {
        self.naming.as_ref()
    }

    /// Whether it must go past the page cache, or not at all.
    pub(super) fn is_only_direct(&self) -> bool {
        self.only_direct
    }

    /// What was written may be lost: the system tells that once, to whoever asked first, and says of the next attempt that all is well.
    pub(super) fn on_spoiled(&self) {
        self.spoiled.store(true, Ordering::Release);
    }

    pub(super) fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Acquire)
    }

    /// A move past the page cache was refused as misaligned, which its file system had said it was not.
    pub(super) fn on_past_refused(&self) {
        self.past_refused.store(true, Ordering::Relaxed);
    }

    /// The descriptors through the cache and past it.
    pub(super) fn descriptors(&self) -> [RawFd; 2] {
        let past = self.past.as_ref().map_or(-1, |past| past.file.as_raw_fd());
        [self.buffered.as_raw_fd(), past]
    }
}

impl fmt::Debug for FileMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "FileMemory({}, {} bytes, {:?})",
            self.path.display(),
            self.len,
            self.alignment()
        )
    }
}

impl Memory for FileMemory {
    fn len(&self) -> u64 {
        self.len
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The bytes as whoever opened the file sees them, by plain calls that wait. A file that fails is a panic here; transfers tell.
impl HostBytes for FileMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let read = self.buffered.read_exact_at(into, offset);
        read.expect("bytes of the file");
    }
    fn write(&self, offset: u64, from: &[u8]) {
        let written = self.buffered.write_all_at(from, offset);
        written.expect("room in the file");
    }
    fn digest(&self, offset: u64, len: u64, digest: &mut Digest) -> Result<(), Refusal> {
        let mut part = [0u8; 16 << 10];
        for start in (offset..offset + len).step_by(part.len()) {
            let bytes = (offset + len - start).min(part.len() as u64) as usize;
            let read = self.buffered.read_exact_at(&mut part[..bytes], start);
            read.map_err(|_| Refusal::NoMemory)?;
            digest.update(&part[..bytes]);
        }
        Ok(())
    }
}

impl Naming {
    fn beside(path: &Path, options: &FileOptions) -> Result<Naming, FileError> {
        let refused = || FileError::CannotReplace { path: path.to_owned() };
        let name = path.file_name().ok_or_else(refused)?;
        if !options.write || options.size.is_none() || std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return Err(refused());
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = File::open(parent.unwrap_or(Path::new("."))).map_err(|source| FileError::Open {
            path: path.to_owned(),
            source,
        })?;
        // By chance, because numbers of processes are the same in every container.
        let number = getrandom::u64().map_err(|error| FileError::Open {
            path: path.to_owned(),
            source: io::Error::other(error),
        })?;
        let mut temporary = b".".to_vec();
        temporary.extend_from_slice(name.as_bytes());
        temporary.extend_from_slice(format!(".weft-{number:016x}").as_bytes());
        Ok(Naming {
            directory: NotInherited::new(directory),
            temporary: CString::new(temporary).map_err(|_| refused())?,
            name: CString::new(name.as_bytes()).map_err(|_| refused())?,
            made: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            lasting: AtomicBool::new(false),
        })
    }
}

/// Makes a file so long, with room for all of it, unless holes are wanted or its file system cannot promise room.
fn make_room(file: &File, wanted: u64, has: u64, sparse: bool) -> io::Result<()> {
    let bytes = libc::off_t::try_from(wanted).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    let allocated = file.metadata()?.blocks().saturating_mul(512);
    if !sparse && allocated < wanted {
        loop {
            // SAFETY: a plain call on a descriptor that is open.
            if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => break,
                _ => return Err(error),
            }
        }
    }
    match wanted > has {
        true => file.set_len(wanted),
        false => Ok(()),
    }
}

/// The same file past the page cache.
fn past_cache(file: &File, write: bool, is_device: bool) -> Result<PastCache, NoDirect> {
    let align = alignment_of(file, is_device)?;
    let refused = |error: io::Error| NoDirect::Refused(error.raw_os_error().unwrap_or(0));
    // By its descriptor: the name may be another file's by now.
    let past = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_CLOEXEC | libc::O_DIRECT)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(refused)?;
    Ok(PastCache {
        file: NotInherited::new(past),
        align,
    })
}

fn is_of_fuse(file: &File) -> bool {
    const FUSE_MAGIC: u64 = 0x6573_5546;
    // SAFETY: a structure of plain numbers, for which zero is a value.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a descriptor that is open, and a structure that is valid for writes.
    let told = unsafe { libc::fstatfs(file.as_raw_fd(), &mut found) };
    // Programs need not answer; what does not say what it is may be one.
    told != 0 || found.f_type as u64 == FUSE_MAGIC
}

fn alignment_of(file: &File, is_device: bool) -> Result<Alignment, NoDirect> {
    // SAFETY: a structure of plain numbers, for which zero is a value.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty name, a descriptor that is open, and a structure that is valid for writes.
    let told = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &mut found,
        )
    };
    if told == 0 && found.stx_mask & libc::STATX_DIOALIGN != 0 {
        let (memory, offset) = (
            u64::from(found.stx_dio_mem_align),
            u64::from(found.stx_dio_offset_align),
        );
        if memory == 0 || offset == 0 {
            return Err(NoDirect::FileSystem);
        }
        return Ok(Alignment::within(memory, offset, page_bytes()));
    }
    let memory = match is_device {
        true => logical_block(file).unwrap_or(PAGE),
        // Older kernels do not say. A page is enough for all that there are.
        false => PAGE,
    };
    Ok(Alignment::within(memory, memory, page_bytes()))
}

fn logical_block(file: &File) -> Option<u64> {
    const BLKSSZGET: libc::c_ulong = 0x1268;
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes one int, which is live.
    let told = unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET as _, &raw mut bytes) };
    (told == 0 && bytes > 0).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().expect("a directory")
    }

    #[test]
    fn only_files_and_devices_are_places() {
        let here = directory();
        let what = |path: &Path| FileMemory::open(path, FileOptions::default().write(false));
        for write in [false, true] {
            assert!(matches!(
                FileMemory::open(here.path(), FileOptions::default().write(write)),
                Err(FileError::NotAFile {
                    what: "a directory",
                    ..
                })
            ));
        }
        assert!(matches!(
            what(Path::new("/dev/null")),
            Err(FileError::NotAFile {
                what: "a character device",
                ..
            })
        ));
        let pipe = here.path().join("pipe");
        let name = CString::new(pipe.as_os_str().as_bytes()).expect("a name");
        // SAFETY: a name that ends in zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(matches!(what(&pipe), Err(FileError::NotAFile { what: "a pipe", .. })));
        assert!(matches!(what(&here.path().join("none")), Err(FileError::Open { .. })));
    }

    #[test]
    fn sizes_are_made_or_refused() {
        let here = directory();
        let path = here.path().join("file");
        std::fs::write(&path, b"").expect("a file");
        let open = |options| FileMemory::open(&path, options);
        assert!(matches!(open(FileOptions::default()), Err(FileError::Empty { .. })));
        assert!(matches!(
            open(FileOptions::sized(10).write(false)),
            Err(FileError::TooShort { has: 0, asked: 10, .. })
        ));
        assert_eq!(open(FileOptions::sized(10_000)).expect("made").len(), 10_000);
        assert_eq!(std::fs::metadata(&path).expect("there").len(), 10_000);
        // A part of it, and all of it.
        assert_eq!(open(FileOptions::sized(5_000)).expect("a part").len(), 5_000);
        assert_eq!(std::fs::metadata(&path).expect("there").len(), 10_000);
        assert_eq!(open(FileOptions::default()).expect("all").len(), 10_000);
        assert!(matches!(
            open(FileOptions::sized(u64::MAX)),
            Err(FileError::NoRoom { .. })
        ));
    }

    #[test]
    fn no_page_is_reached_both_ways() {
        for (memory, offset, page, wanted) in [
            (512, 512, 4096, 4096),
            (4, 512, 64 << 10, 64 << 10),
            (512, 16 << 10, 4096, 16 << 10),
        ] {
            let align = Alignment::within(memory, offset, page);
            assert_eq!((align.memory, align.offset), (memory, wanted));
        }
        assert!(page_bytes().is_power_of_two() && page_bytes() >= PAGE);
    }

    #[test]
    fn what_replaces_a_file_can_be_read_by_whom_that_could_be() {
        let here = directory();
        let path = here.path().join("file");
        let mode_of_new = || {
            let new = FileMemory::open(&path, FileOptions::sized(10).replace(true)).expect("a new one");
            new.buffered.metadata().expect("open").mode() & 0o777
        };
        let usual = mode_of_new();
        for mode in [0o600, 0o640, 0o666] {
            std::fs::write(&path, b"old").expect("a file");
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("its owner");
            assert_eq!(mode_of_new(), mode, "{mode:o}");
        }
        std::fs::remove_file(&path).expect("there");
        assert_eq!(mode_of_new(), usual);
    }

    #[test]
    fn the_name_of_a_new_file_cannot_be_guessed_and_is_never_another_files() {
        let here = directory();
        let path = here.path().join("file");
        let open = || FileMemory::open(&path, FileOptions::sized(10).replace(true)).expect("a new one");
        let names = |files: &[FileMemory]| -> Vec<Vec<u8>> {
            let name = |file: &FileMemory| file.naming().expect("to be named").temporary.as_bytes().to_vec();
            files.iter().map(name).collect()
        };
        // Of one process and one moment: nothing of them is counted.
        let files = [open(), open(), open()];
        let names = names(&files);
        let digits = |name: &Vec<u8>| {
            let digits = name.strip_prefix(b".file.weft-").expect("beside the file");
            u64::from_str_radix(str::from_utf8(digits).expect("text"), 16).expect("digits")
        };
        let numbers: Vec<u64> = names.iter().map(digits).collect();
        for (one, other) in [(0, 1), (1, 2), (0, 2)] {
            let alike = 64 - (numbers[one] ^ numbers[other]).count_ones();
            assert!((8..=56).contains(&alike), "{numbers:x?}");
        }
        // What somebody else has made under such a name is not removed for it.
        let naming = Naming::beside(&path, &FileOptions::sized(10).replace(true)).expect("a name");
        let theirs = here.path().join(OsStr::from_bytes(naming.temporary.as_bytes()));
        std::fs::write(&theirs, b"theirs").expect("a file");
        drop(naming);
        assert_eq!(std::fs::read(&theirs).expect("there"), b"theirs");
    }

    #[test]
    fn what_is_never_committed_takes_no_name_and_leaves_nothing() {
        let here = directory();
        let path = here.path().join("file");
        std::fs::write(&path, b"old").expect("a file");
        let new = FileMemory::open(&path, FileOptions::sized(100).replace(true)).expect("a new one");
        new.write(0, b"new");
        assert_eq!(std::fs::read(&path).expect("there"), b"old");
        drop(new);
        assert_eq!(std::fs::read(&path).expect("there"), b"old");
        assert_eq!(std::fs::read_dir(here.path()).expect("readable").count(), 1);
        assert!(matches!(
            FileMemory::open(&path, FileOptions::default().replace(true)),
            Err(FileError::CannotReplace { .. })
        ));
    }
}
