//! A file system in this process, by the kernel's own FUSE device: files whose requests are short, fail, or never end, as a test wants it.
//!
//! The kernel is the real one, and so is everything that waits in it; only the disk is this thread. Needs root, to mount.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use weft_protocol::conformance::Trouble;

/// The file system, until it is dropped.
pub struct Fuse {
    folder: Option<tempfile::TempDir>,
    shared: Arc<Shared>,
}

struct Shared {
    device: File,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<u64, Node>,
    /// What new files suffer from.
    trouble: Option<Trouble>,
    /// The directory cannot be made to last.
    directory_fails: bool,
    /// Requests that nobody answers.
    stuck: Vec<Request>,
}

struct Node {
    name: Vec<u8>,
    bytes: Vec<u8>,
    trouble: Option<Trouble>,
}

#[derive(Clone)]
struct Request {
    unique: u64,
    code: u32,
    node: u64,
    body: Vec<u8>,
}

const ROOT: u64 = 1;
const MOST: usize = 1 << 20;

mod code {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const UNLINK: u32 = 10;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
    pub const RENAME2: u32 = 45;
}

impl Fuse {
    pub fn mount() -> std::io::Result<Fuse> {
        let folder = tempfile::tempdir()?;
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
        let target = name_of(folder.path());
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,max_read={MOST}",
            device.as_raw_fd()
        );
        let options = CString::new(options).expect("no zero in it");
        // SAFETY: names that end in zero.
        let mounted = unsafe {
            libc::mount(
                c"weft-test".as_ptr(),
                target.as_ptr(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        if mounted < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let shared = Arc::new(Shared {
            device,
            state: Mutex::default(),
        });
        let serve = Arc::clone(&shared);
        std::thread::spawn(move || serve.serve());
        Ok(Fuse {
            folder: Some(folder),
            shared,
        })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.as_ref().expect("mounted").path().join(name)
    }

    /// What files suffer from that are made from now on; with none, nothing suffers any more, and what was stuck goes on.
    pub fn trouble(&self, trouble: Option<Trouble>) {
        let mut state = self.shared.lock();
        state.trouble = trouble;
        if trouble.is_none() {
            state.files.values_mut().for_each(|file| file.trouble = None);
            let stuck = std::mem::take(&mut state.stuck);
            drop(state);
            stuck.into_iter().for_each(|request| self.shared.answer(request));
        }
    }
}

impl Fuse {
    /// Whether the directory can be made to last.
    pub fn directory_fails(&self, fails: bool) {
        self.shared.lock().directory_fails = fails;
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.trouble(None);
        if let Some(folder) = &self.folder {
            let target = name_of(folder.path());
            // SAFETY: a name that ends in zero.
            unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn serve(&self) {
        let mut buffer = vec![0u8; MOST + (64 << 10)];
        // It ends with the mount.
        while let Ok(len) = (&self.device).read(&mut buffer) {
            if len < 40 {
                continue;
            }
            let word = |at: usize| u64::from_ne_bytes(buffer[at..at + 8].try_into().expect("eight bytes"));
            let request = Request {
                unique: word(8),
                code: u32::from_ne_bytes(buffer[4..8].try_into().expect("four bytes")),
                node: word(16),
                body: buffer[40..len].to_vec(),
            };
            self.answer(request);
        }
    }

    fn answer(&self, request: Request) {
        let unique = request.unique;
        let reply = match self.lock().handle(request) {
            Some(reply) => reply,
            None => return,
        };
        let (error, body) = match reply {
            Ok(body) => (0, body),
            Err(error) => (-error, Vec::new()),
        };
        let mut bytes = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(error.to_ne_bytes());
        bytes.extend(unique.to_ne_bytes());
        bytes.extend(body);
        // A request that was given up meanwhile needs no answer.
        let _ = (&self.device).write(&bytes);
    }
}

type Reply = Result<Vec<u8>, i32>;

impl State {
    /// None where there is nothing to answer, now or ever.
    fn handle(&mut self, request: Request) -> Option<Reply> {
        let number = |at: usize| u64::from_ne_bytes(request.body[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_ne_bytes(request.body[at..at + 4].try_into().expect("four bytes"));
        let name = |from: usize| -> Vec<u8> { request.body[from..].iter().copied().take_while(|b| *b != 0).collect() };
        let trouble = self.files.get(&request.node).and_then(|file| file.trouble);
        let moves = matches!(request.code, code::READ | code::WRITE | code::FSYNC);
        match trouble {
            Some(Trouble::Stuck) if moves => {
                self.stuck.push(request);
                return None;
            }
            Some(Trouble::Failing) if moves => return Some(Err(libc::EIO)),
            Some(Trouble::ReadOnly) if request.code == code::WRITE => return Some(Err(libc::EROFS)),
            _ => {}
        }
        Some(match request.code {
            code::INIT => Ok(init(half(8))),
            // A request that is to be given up is not: that is what makes it stuck.
            code::FORGET | code::BATCH_FORGET | code::INTERRUPT => return None,
            code::LOOKUP => {
                let wanted = name(0);
                let found = self.files.iter().find(|(_, file)| file.name == wanted);
                found.map(|(node, file)| entry(*node, file)).ok_or(libc::ENOENT)
            }
            code::GETATTR => Ok(attributes_reply(request.node, self.files.get(&request.node))),
            code::SETATTR => {
                const SIZE: u32 = 1 << 3;
                let (valid, size) = (half(0), number(16));
                match self.files.get_mut(&request.node) {
                    Some(file) => {
                        if valid & SIZE != 0 {
                            file.bytes.resize(size as usize, 0);
                        }
                        Ok(attributes_reply(request.node, Some(file)))
                    }
                    None => Err(libc::ENOENT),
                }
            }
            code::CREATE => {
                let node = self.files.keys().last().map_or(ROOT, |last| *last) + 1;
                let file = Node {
                    name: name(16),
                    bytes: Vec::new(),
                    trouble: self.trouble,
                };
                let mut reply = entry(node, &file);
                self.files.insert(node, file);
                reply.extend(opened());
                Ok(reply)
            }
            code::OPEN | code::OPENDIR => Ok(opened()),
            code::READ => {
                let (offset, len) = (number(8) as usize, half(16) as usize);
                let file = self.files.get(&request.node)?;
                let there = match file.trouble {
                    Some(Trouble::Shrunk) => file.bytes.len() / 2,
                    _ => file.bytes.len(),
                };
                let len = len.min(there.saturating_sub(offset));
                let len = if file.trouble == Some(Trouble::Short) {
                    short(len)
                } else {
                    len
                };
                Ok(file.bytes[offset.min(there)..][..len].to_vec())
            }
            code::WRITE => {
                let (offset, len) = (number(8) as usize, half(16) as usize);
                let file = self.files.get_mut(&request.node)?;
                let room = file.bytes.len() / 2;
                let len = match file.trouble {
                    Some(Trouble::Full) if offset >= room => return Some(Err(libc::ENOSPC)),
                    Some(Trouble::Full) => len.min(room - offset),
                    Some(Trouble::Short) => short(len),
                    _ => len,
                };
                if file.bytes.len() < offset + len {
                    file.bytes.resize(offset + len, 0);
                }
                file.bytes[offset..offset + len].copy_from_slice(&request.body[40..40 + len]);
                let mut reply = (len as u32).to_ne_bytes().to_vec();
                reply.extend([0; 4]);
                Ok(reply)
            }
            code::UNLINK => {
                let wanted = name(0);
                let found = self.files.values_mut().find(|file| file.name == wanted);
                // Whoever has it open keeps it.
                found
                    .map(|file| file.name.clear())
                    .map(|()| Vec::new())
                    .ok_or(libc::ENOENT)
            }
            code::RENAME2 => {
                let from = name(16);
                let to = name(16 + from.len() + 1);
                self.files
                    .values_mut()
                    .filter(|file| file.name == to)
                    .for_each(|file| file.name.clear());
                let found = self.files.values_mut().find(|file| file.name == from);
                found
                    .map(|file| file.name = to)
                    .map(|()| Vec::new())
                    .ok_or(libc::ENOENT)
            }
            code::FSYNCDIR if self.directory_fails => Err(libc::EIO),
            code::RELEASE | code::RELEASEDIR | code::FLUSH | code::FSYNC | code::FSYNCDIR => Ok(Vec::new()),
            _ => Err(libc::ENOSYS),
        })
    }
}

/// Less than was asked for, and never nothing.
fn short(len: usize) -> usize {
    if len > 5000 { len / 3 } else { len }
}

fn init(flags: u32) -> Vec<u8> {
    const BIG_WRITES: u32 = 1 << 5;
    const MAX_PAGES: u32 = 1 << 22;
    let mut reply = Vec::new();
    for number in [7u32, 31, MOST as u32, flags & (BIG_WRITES | MAX_PAGES)] {
        reply.extend(number.to_ne_bytes());
    }
    reply.extend(64u16.to_ne_bytes());
    reply.extend(48u16.to_ne_bytes());
    reply.extend((MOST as u32).to_ne_bytes());
    reply.extend(1u32.to_ne_bytes());
    reply.extend(((MOST / 4096) as u16).to_ne_bytes());
    reply.resize(64, 0);
    reply
}

fn opened() -> Vec<u8> {
    const DIRECT_IO: u32 = 1;
    let mut reply = vec![0; 8];
    reply.extend(DIRECT_IO.to_ne_bytes());
    reply.extend([0; 4]);
    reply
}

fn entry(node: u64, file: &Node) -> Vec<u8> {
    let mut reply = node.to_ne_bytes().to_vec();
    // Generation, and how long the kernel may believe it: not at all.
    reply.resize(40, 0);
    reply.extend(attributes(node, Some(file)));
    reply
}

fn attributes_reply(node: u64, file: Option<&Node>) -> Vec<u8> {
    let mut reply = vec![0; 16];
    reply.extend(attributes(node, file));
    reply
}

fn attributes(node: u64, file: Option<&Node>) -> Vec<u8> {
    let size = file.map_or(0, |file| file.bytes.len() as u64);
    let mode = if file.is_some() { 0o100_644u32 } else { 0o040_755 };
    let mut bytes = Vec::new();
    for number in [node, size, size.div_ceil(512), 0, 0, 0] {
        bytes.extend(number.to_ne_bytes());
    }
    // Three parts of seconds, mode, links, owner, group, device, block size, flags.
    for number in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        bytes.extend(number.to_ne_bytes());
    }
    bytes
}

fn name_of(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path without zeros")
}
