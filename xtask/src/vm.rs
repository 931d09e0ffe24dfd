//! Virtual machines for tests that need another kernel than this machine's: Debian's, with Soft-RoCE devices.
//!
//! A [`Machine`] says what to boot and [`Machine::run`] boots it under qemu, runs a command and returns how that ended. The guest's root is
//! this machine's own root file system, read-only with a scratch layer on top, so that everything installed and built here is there as
//! well; the project directory can be written to. Everything that is fetched or made lies under `target`.

mod archive;
mod clock;
mod initramfs;
mod kernel;
mod node;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::command::{self, Needed, install_missing, root};
use kernel::Kernel;
use node::{Node, Said};

#[derive(Debug, Error)]
pub enum Error {
    #[error(transparent)]
    Command(#[from] command::Error),
    #[error(
        "virtual machines run the programs of this machine, and only on x86-64 that has been made to work; this is {0}"
    )]
    Architecture(&'static str),
    #[error("no package of Debian's kernel 6.12 is known here; is this Debian 12 or later, with its security updates?")]
    NoKernelPackage,
    #[error("the kernel {version} has no module {module}")]
    NoModule { module: String, version: String },
    #[error("the package's vmlinuz is no kernel that we can unpack")]
    NotAKernel,
    #[error("{} is empty", .0.display())]
    Empty(PathBuf),
    #[error("at most two machines can be joined, and at least one has to be there; not {0}")]
    Nodes(usize),
    #[error("cannot use {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
}

/// What a virtual machine needs on this one.
const NEEDED: &[Needed] = &[
    (&["qemu-system-x86_64", "--version"], "qemu-system-x86"),
    // The shared one, of the package without "static", would find no libraries in an initramfs.
    (
        &["sh", "-c", "test -x /bin/busybox && ! ldd /bin/busybox"],
        "busybox-static",
    ),
    (&["/sbin/depmod", "--version"], "kmod"),
    (&["xz", "--version"], "xz-utils"),
    (&["zstd", "--version"], "zstd"),
    (&["setpriv", "--version"], "util-linux"),
    (&["ip", "-V"], "iproute2"),
    (&["rdma", "-V"], "iproute2"),
    (&["test", "-e", "/etc/libibverbs.d/rxe.driver"], "ibverbs-providers"),
    (&["sh", "-c", "command -v ibv_devinfo"], "ibverbs-utils"),
];

/// What to boot. Two nodes are two such machines, joined by one cable for each rail and one more that is not a rail.
///
/// In the guest: interfaces `rail0`… with 10.77.RAIL.NODE+1, an RDMA device `rxe0`… on each; with two nodes an interface `lan` with
/// 10.76.0.NODE+1; the variables `NODE`, `NODES`, `RAILS` and `PROJECT`, which is also the working directory.
#[derive(Clone, Debug)]
pub struct Machine {
    pub memory_mib: u32,
    pub cpus: u32,
    pub rails: u32,
    /// Kernel modules beyond those that every guest loads.
    pub modules: Vec<String>,
    /// For the whole run, boot included.
    pub timeout: Duration,
    /// Where the kernel's messages are kept: this path for the first node, the same with `.1` added for the second.
    pub console: Option<PathBuf>,
    /// Use the processor's own virtualisation, where that works, instead of emulating one.
    pub kvm: bool,
}

impl Default for Machine {
    fn default() -> Machine {
        Machine {
            memory_mib: 1024,
            cpus: 2,
            rails: 2,
            modules: Vec::new(),
            timeout: Duration::from_secs(180),
            console: None,
            kvm: false,
        }
    }
}

/// How one node's command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code.
    Exited(u8),
    /// It did not within the time, and was turned off; these are the last words of its kernel and of qemu.
    TimedOut { last_words: String },
    /// The machine went away without a word about it.
    Died { last_words: String },
}

impl Ended {
    pub fn passed(&self) -> bool {
        *self == Ended::Exited(0)
    }
}

/// What is needed to boot: the packages and the kernel.
#[derive(Debug)]
pub struct Host {
    kernel: Kernel,
}

impl Host {
    /// Installs and fetches what is missing.
    pub fn prepare() -> Result<Host, Error> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(Error::Architecture(std::env::consts::ARCH));
        }
        install_missing(NEEDED)?;
        let cache = cache();
        fs::create_dir_all(&cache).map_err(file_error(&cache))?;
        Ok(Host {
            kernel: Kernel::fetch(&cache)?,
        })
    }

    pub fn kernel_version(&self) -> &str {
        self.kernel.version()
    }

    pub fn has_module(&self, name: &str) -> bool {
        self.kernel.has_module(name)
    }
}

impl Machine {
    /// Boots one node for each command (bash), waits for all, and hands over every line that they print. All machines are gone when this
    /// returns, and also when this process is killed.
    pub fn run(
        &self,
        host: &Host,
        commands: &[&str],
        mut on_line: impl FnMut(usize, &str),
    ) -> Result<Vec<Ended>, Error> {
        if !(1..=2).contains(&commands.len()) {
            return Err(Error::Nodes(commands.len()));
        }
        let directory = RunDirectory::make()?;
        let initramfs = directory.path.join("initramfs");
        fs::write(&initramfs, initramfs::make(&host.kernel, &self.modules)?).map_err(file_error(&initramfs))?;
        let boot = node::Boot {
            machine: self,
            kernel: &host.kernel.image(),
            directory: &directory.path,
            nodes: commands.len(),
            counter_khz: clock::counter_khz(),
        };
        let (sender, said) = mpsc::channel();
        let mut nodes = commands
            .iter()
            .enumerate()
            .map(|(index, command)| Node::start(&boot, index, command, sender.clone()))
            .collect::<Result<Vec<Node>, Error>>()?;
        drop(sender);

        let deadline = Instant::now() + self.timeout;
        let mut ended: Vec<Option<Ended>> = vec![None; nodes.len()];
        while ended.iter().any(Option::is_none) {
            match said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Said::Line(node, line)) => on_line(node, &line),
                Ok(Said::End(node)) => ended[node] = Some(nodes[node].ended()?),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        if let Some(console) = &self.console {
            nodes.iter().try_for_each(|node| node.keep_console(console))?;
        }
        let ended = ended.into_iter().zip(&nodes).map(|(end, node)| {
            end.unwrap_or_else(|| Ended::TimedOut {
                last_words: node.last_words(),
            })
        });
        Ok(ended.collect())
    }
}

/// Where everything that is fetched or made lies.
pub fn cache() -> PathBuf {
    root().join("target/vm")
}

/// A directory for one run, removed with it.
#[derive(Debug)]
struct RunDirectory {
    path: PathBuf,
}

impl RunDirectory {
    fn make() -> Result<RunDirectory, Error> {
        let cache = cache();
        // What a killed run left behind.
        for entry in fs::read_dir(&cache).map_err(file_error(&cache))?.flatten() {
            let name = entry.file_name();
            let process = name.to_str().and_then(|name| name.strip_prefix("run."));
            if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let path = cache.join(format!("run.{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).map_err(file_error(&path))?;
        let path = path.canonicalize().map_err(file_error(&path))?;
        Ok(RunDirectory { path })
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File {
        path: path.clone(),
        source,
    }
}
