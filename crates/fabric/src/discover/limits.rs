//! What bounds a process here: pages, locked memory, open files, and whose memory it may touch.

use weft_plan::Bytes;

use super::tree::Tree;
use super::{Absent, Feature, Reason};

/// What bounds a process on this machine. `None` where the kernel does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes that may be pinned: registration for RDMA and zero-copy sends count against it.
    pub locked_memory: Option<Bound>,
    pub open_files: Option<Bound>,
    /// By size.
    pub huge_pages: Vec<HugePages>,
    pub transparent_huge_pages: Option<TransparentHugePages>,
    /// `None` also where the kernel has no Yama, which is as good as [`PtraceScope::Classic`].
    pub ptrace_scope: Option<PtraceScope>,
}

/// A soft limit of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Unlimited,
    At(u64),
}

/// The pool of huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    pub size: Bytes,
    pub total: u64,
    pub free: u64,
}

/// For which memory the kernel makes huge pages by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransparentHugePages {
    Always,
    /// Where the program asks for them.
    Madvise,
    Never,
}

/// Which processes may touch the memory of another of the same user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PtraceScope {
    /// All.
    Classic,
    /// Its ancestors, and those that it names.
    Restricted,
    /// Those with CAP_SYS_PTRACE.
    AdminOnly,
    /// None.
    Nobody,
}

/// Enough to register a cache of a few GiB; what most distributions give is 8 MiB.
const LOCKED_WANTED: Bytes = Bytes(4 << 30);
/// A few sockets for each of a thousand peers, and room for the application.
const FILES_WANTED: u64 = 8192;

const LOCKED_FIX: &str =
    "ulimit -l unlimited, or LimitMEMLOCK=infinity for a service; needed for RDMA and zero-copy sends only";
const FILES_FIX: &str = "ulimit -n 65536, or LimitNOFILE=65536 for a service; each peer takes a few descriptors";
const HUGE_FIX: &str = "sysctl vm.nr_hugepages=N reserves them; large regions then take fewer page table entries";
const TRANSPARENT_FIX: &str = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
const PTRACE_FIX: &str =
    "sysctl kernel.yama.ptrace_scope=0, or use memory that Weft allocates; foreign memory goes through a bounce ring";

pub(super) fn read(sys: &Tree, proc: &Tree, absent: &mut Vec<Absent>) -> Limits {
    let table = proc.read("self/limits");
    let bound = |row: &str| match &table {
        Ok(text) => soft_limit(text, row).ok_or(Reason::Malformed {
            path: proc.path("self/limits"),
        }),
        Err(why) => Err(why.clone()),
    };
    let locked_memory = bound("Max locked memory");
    let why = match &locked_memory {
        Ok(Bound::At(have)) if *have < LOCKED_WANTED.0 => Some(Reason::TooLittle {
            have: Bytes(*have),
            wanted: LOCKED_WANTED,
        }),
        Ok(_) => None,
        Err(why) => Some(why.clone()),
    };
    absent.extend(why.map(|why| Absent {
        what: Feature::LockedMemory,
        why,
        fix: LOCKED_FIX,
    }));
    let open_files = bound("Max open files");
    let why = match &open_files {
        Ok(Bound::At(have)) if *have < FILES_WANTED => Some(Reason::TooFew {
            have: *have,
            wanted: FILES_WANTED,
        }),
        Ok(_) => None,
        Err(why) => Some(why.clone()),
    };
    absent.extend(why.map(|why| Absent {
        what: Feature::OpenFiles,
        why,
        fix: FILES_FIX,
    }));
    Limits {
        locked_memory: locked_memory.ok(),
        open_files: open_files.ok(),
        huge_pages: huge_pages(sys, absent),
        transparent_huge_pages: transparent_huge_pages(sys, absent),
        ptrace_scope: ptrace_scope(proc, absent),
    }
}

/// From the table `Max open files  20000  20000  files`.
fn soft_limit(table: &str, row: &str) -> Option<Bound> {
    let rest = table.lines().find_map(|line| line.strip_prefix(row))?;
    match rest.split_whitespace().next()? {
        "unlimited" => Some(Bound::Unlimited),
        number => number.parse().ok().map(Bound::At),
    }
}

fn huge_pages(sys: &Tree, absent: &mut Vec<Absent>) -> Vec<HugePages> {
    const FOLDER: &str = "kernel/mm/hugepages";
    let pool = |name: &str| {
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        Some(HugePages {
            size: Bytes(kib).checked_mul(1024)?,
            total: sys.value(&format!("{FOLDER}/{name}/nr_hugepages")).ok()?,
            free: sys.value(&format!("{FOLDER}/{name}/free_hugepages")).ok()?,
        })
    };
    let (mut pools, why) = match sys.list_some(FOLDER) {
        Ok(names) => (
            names.iter().filter_map(|name| pool(name)).collect(),
            Reason::NoneReserved,
        ),
        Err(why) => (Vec::new(), why),
    };
    pools.sort_by_key(|pool: &HugePages| pool.size);
    if pools.iter().all(|pool| pool.total == 0) {
        absent.push(Absent {
            what: Feature::HugePages,
            why,
            fix: HUGE_FIX,
        });
    }
    pools
}

fn transparent_huge_pages(sys: &Tree, absent: &mut Vec<Absent>) -> Option<TransparentHugePages> {
    const FILE: &str = "kernel/mm/transparent_hugepage/enabled";
    let read = sys.read(FILE);
    // The choice in force stands in brackets: `always [madvise] never`.
    let chosen = read.as_ref().ok().and_then(|text| {
        let word = text.split_once('[')?.1.split_once(']')?.0;
        Some(match word {
            "always" => TransparentHugePages::Always,
            "madvise" => TransparentHugePages::Madvise,
            "never" => TransparentHugePages::Never,
            _ => return None,
        })
    });
    let why = match (chosen, read) {
        (Some(TransparentHugePages::Always | TransparentHugePages::Madvise), _) => return chosen,
        (Some(TransparentHugePages::Never), _) => Reason::Disabled {
            value: "never".to_owned(),
        },
        (None, Ok(_)) => Reason::Malformed { path: sys.path(FILE) },
        (None, Err(why)) => why,
    };
    absent.push(Absent {
        what: Feature::TransparentHugePages,
        why,
        fix: TRANSPARENT_FIX,
    });
    chosen
}

fn ptrace_scope(proc: &Tree, absent: &mut Vec<Absent>) -> Option<PtraceScope> {
    const FILE: &str = "sys/kernel/yama/ptrace_scope";
    let (scope, why) = match proc.read(FILE) {
        Err(Reason::NotThere { .. }) => return None,
        Err(why) => (None, why),
        Ok(value) => {
            let scope = match value.as_str() {
                "0" => return Some(PtraceScope::Classic),
                "1" => Some(PtraceScope::Restricted),
                "2" => Some(PtraceScope::AdminOnly),
                "3" => Some(PtraceScope::Nobody),
                _ => None,
            };
            let why = match scope {
                Some(_) => Reason::Disabled { value },
                None => Reason::Malformed { path: proc.path(FILE) },
            };
            (scope, why)
        }
    };
    absent.push(Absent {
        what: Feature::ForeignMemory,
        why,
        fix: PTRACE_FIX,
    });
    scope
}
