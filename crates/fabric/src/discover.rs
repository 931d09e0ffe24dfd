//! What this machine has, read from `/sys` and `/proc`, and why it lacks what it lacks.
//!
//! Nothing here fails: a machine without RDMA devices is an ordinary machine. What is missing becomes an [`Absent`] with its
//! reason and its remedy, and what is there becomes a [`Machine`] of the platform file. Both trees are parameters, so that a
//! test describes a machine by writing a few files; what stands in them is bounded and never trusted.
//!
//! ```
//! let found = weft_fabric::discover::machine();
//! println!("{} cores, {} interfaces", found.machine.core_count(), found.machine.nics.len());
//! for absent in &found.absent {
//!     println!("{absent}");
//! }
//! ```

mod addresses;
mod cores;
mod flow_control;
mod gpus;
mod limits;
mod nics;
mod rdma;
mod roce;
mod tree;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use thiserror::Error;
use weft_plan::{Bytes, Machine};

pub use limits::{Bound, HugePages, Limits, PtraceScope, TransparentHugePages};
pub use rdma::{Gid, GidKind, LinkLayer, PortState, RdmaDevice, RdmaKind, RdmaPort, Reach};
pub use roce::{Priorities, RoceHints};
use tree::Tree;

/// A machine, what bounds a process on it, and what it lacks.
#[derive(Clone, Debug)]
pub struct Discovery {
    pub machine: Machine,
    pub limits: Limits,
    pub rdma: Vec<RdmaDevice>,
    /// For each RDMA port on Ethernet that is up.
    pub roce: Vec<RoceHints>,
    /// The kernel module that lets RDMA devices reach the memory of NVIDIA's GPUs by its address.
    pub nvidia_peermem: bool,
    pub absent: Vec<Absent>,
}

/// Where to look.
#[derive(Clone, Debug)]
pub struct Source {
    pub sys: PathBuf,
    pub proc: PathBuf,
    /// The addresses of the interfaces, by the interface's name, which the kernel tells by a call only.
    pub addresses: Vec<(String, IpAddr)>,
    /// Asks for the paused priorities of an interface, likewise.
    pub flow_control: fn(&str) -> Option<u8>,
}

/// Something that this machine does not have, or not enough of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    pub what: Feature,
    pub why: Reason,
    /// What a person can do about it.
    pub fix: &'static str,
}

/// What a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    Cores,
    Numa,
    NetworkInterfaces,
    Gpus,
    Rdma,
    /// libibverbs and the drivers in it.
    RdmaLibrary,
    /// Large packets on an RDMA port.
    RdmaMtu,
    /// A network that does not drop RoCE's packets.
    LosslessEthernet,
    /// RDMA from and to the memory of a GPU.
    GpuDirect,
    HugePages,
    TransparentHugePages,
    LockedMemory,
    OpenFiles,
    /// Reading and writing another process's ordinary memory.
    ForeignMemory,
}

/// Why it is not there.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Reason {
    #[error("{} does not exist", .path.display())]
    NotThere { path: PathBuf },
    #[error("{} lists none", .path.display())]
    NoneThere { path: PathBuf },
    #[error("{} cannot be read: {kind}", .path.display())]
    Unreadable { path: PathBuf, kind: io::ErrorKind },
    #[error("{} does not say what it should", .path.display())]
    Malformed { path: PathBuf },
    #[error("the device {device} has no driver")]
    NoDriver { device: String },
    #[error("{device} is not active")]
    Down { device: String },
    #[error("{port} has no RoCE v2 address")]
    NoRoceV2 { port: String },
    #[error("{port} has no RoCE v2 address that is routed, only one for its own link")]
    LinkOnly { port: String },
    #[error("{device} speaks iWARP")]
    Iwarp { device: String },
    #[error("{port} has neither congestion control nor flow control on any priority")]
    Unprotected { port: String },
    #[error("{port} carries at most {have} a packet, where {wanted} are possible")]
    SmallPackets { port: String, have: Bytes, wanted: Bytes },
    #[error("{file} cannot be loaded")]
    NoLibrary { file: &'static str },
    #[error("{file} has no {symbol}")]
    OldLibrary { file: &'static str, symbol: &'static str },
    #[error("the library has no driver for {device}")]
    NoUserDriver { device: String },
    #[error("{device} cannot be opened: {kind}")]
    CannotOpen { device: String, kind: io::ErrorKind },
    #[error("none are reserved")]
    NoneReserved,
    #[error("{have} is less than {wanted}")]
    TooFew { have: u64, wanted: u64 },
    #[error("{have} is less than {wanted}")]
    TooLittle { have: Bytes, wanted: Bytes },
    #[error("set to `{value}`")]
    Disabled { value: String },
}

/// Looks at this machine.
pub fn machine() -> Discovery {
    machine_at(&Source::this_machine())
}

/// Looks at the machine that these trees describe.
pub fn machine_at(source: &Source) -> Discovery {
    let sys = Tree::new(&source.sys);
    let proc = Tree::new(&source.proc);
    let mut absent = Vec::new();
    let numa = cores::numa_nodes(&sys, &mut absent);
    let gpus = gpus::find(&sys, &proc, &mut absent);
    let mut nics = nics::find(&sys, &source.addresses, &mut absent);
    let rdma = rdma::look(&sys, &mut nics, &mut absent);
    let roce = roce::find(&sys, &rdma, source.flow_control);
    roce::judge(&roce, &mut absent);
    let nvidia_peermem = rdma::peer_memory(&sys, &rdma, &gpus, &mut absent);
    let mut machine = Machine {
        name: host_name(&proc),
        memory: cores::total_memory(&proc),
        memcpy: None,
        reduction: None,
        arena: None,
        gpus,
        nics,
        numa,
    };
    // The trees may contradict one another, and a platform file may not.
    let known: Vec<u16> = machine.numa.iter().map(|node| node.id).collect();
    let places = machine.gpus.iter_mut().map(|gpu| &mut gpu.numa);
    for numa in places.chain(machine.nics.iter_mut().map(|nic| &mut nic.numa)) {
        *numa = numa.filter(|id| known.contains(id));
    }
    Discovery {
        machine,
        limits: limits::read(&sys, &proc, &mut absent),
        rdma,
        roce,
        nvidia_peermem,
        absent,
    }
}

/// The RDMA devices of this machine, as sysfs describes them.
pub fn rdma_devices() -> Result<Vec<RdmaDevice>, Reason> {
    rdma::find(&Tree::new(&PathBuf::from("/sys")))
}

impl Source {
    pub fn this_machine() -> Source {
        Source {
            sys: PathBuf::from("/sys"),
            proc: PathBuf::from("/proc"),
            addresses: addresses::of_interfaces(),
            flow_control: flow_control::paused_priorities,
        }
    }
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.what, self.why, self.fix)
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Feature::Cores => "cores",
            Feature::Numa => "NUMA nodes",
            Feature::NetworkInterfaces => "network interfaces",
            Feature::Gpus => "GPUs",
            Feature::Rdma => "RDMA",
            Feature::RdmaLibrary => "RDMA library",
            Feature::RdmaMtu => "RDMA packet size",
            Feature::LosslessEthernet => "lossless Ethernet",
            Feature::GpuDirect => "RDMA and GPU memory",
            Feature::HugePages => "huge pages",
            Feature::TransparentHugePages => "transparent huge pages",
            Feature::LockedMemory => "locked memory",
            Feature::OpenFiles => "open files",
            Feature::ForeignMemory => "foreign memory",
        })
    }
}

/// The name of the machine where it is one that a platform file can hold.
fn host_name(proc: &Tree) -> String {
    let fits = |name: &String| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.' || c == '_';
        !name.is_empty() && name.len() <= 253 && name.chars().all(allowed)
    };
    let name = proc.read("sys/kernel/hostname").ok().filter(fits);
    name.unwrap_or_else(|| "localhost".to_owned())
}

#[cfg(test)]
mod tests;
