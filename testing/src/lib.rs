//! What tests need beyond a plain machine.
//!
//! A test that needs something asks here, and nothing is left out in silence: what is missing is written down in the file that
//! `WEFT_LEFT_OUT` names, from which `cargo xtask test` prints its table; and where `WEFT_REQUIRE` names what is missing, as in
//! `WEFT_REQUIRE=root,etcd`, the test fails. The Python tests do the same in `crates/python/tests/needs.py`.
//!
//! ```
//! fn a_test() {
//!     if !weft_testing::has(weft_testing::Need::Etcd) {
//!         return;
//!     }
//!     // … starts a real etcd …
//! }
//! # a_test();
//! ```
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The file that what was left out is written to, one line each.
pub const LEFT_OUT: &str = "WEFT_LEFT_OUT";
/// What must be there, by the names of [`Need`], with commas between them.
pub const REQUIRE: &str = "WEFT_REQUIRE";

/// Something that not every machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The rights to become another user and to make network namespaces, and the `ip` command.
    Root,
    /// The device by which a program can be a file system, and the right to mount it.
    Fuse,
    /// The etcd server.
    Etcd,
    /// The browser.
    Chromium,
    /// An RDMA card, and leave to pull its cables. `cargo xtask rdma-test` has both, in virtual machines.
    Rdma,
    /// An NVIDIA GPU with its driver. `cargo xtask gpu-test` makes a bundle that is carried to a machine with one.
    Gpu,
    /// A compiler of C++. That of C is needed to build Rust programs at all.
    Cpp,
    /// The library that a C compiler links for `-fsanitize=address`.
    AddressSanitizer,
    Valgrind,
    PkgConfig,
    Cmake,
    /// A server of S3 that many run. `cargo xtask s3-server` builds and keeps it.
    Garage,
}

impl Need {
    pub const ALL: [Need; 12] = [
        Need::Root,
        Need::Fuse,
        Need::Etcd,
        Need::Chromium,
        Need::Rdma,
        Need::Gpu,
        Need::Cpp,
        Need::AddressSanitizer,
        Need::Valgrind,
        Need::PkgConfig,
        Need::Cmake,
        Need::Garage,
    ];

    /// As it stands in `WEFT_REQUIRE`.
    pub fn name(self) -> &'static str {
        match self {
            Need::Root => "root",
            Need::Fuse => "fuse",
            Need::Etcd => "etcd",
            Need::Chromium => "chromium",
            Need::Rdma => "rdma",
            Need::Gpu => "gpu",
            Need::Cpp => "c++",
            Need::AddressSanitizer => "address-sanitizer",
            Need::Valgrind => "valgrind",
            Need::PkgConfig => "pkg-config",
            Need::Cmake => "cmake",
            Need::Garage => "garage",
        }
    }

    /// Why it is not there; nothing where it is.
    pub fn missing(self) -> Option<&'static str> {
        match self {
            Need::Root if user() != Some(0) => Some("not run by root"),
            Need::Root if !works("ip", &["-V"]) => Some("no ip command (Debian: iproute2)"),
            Need::Root => (!can_make_namespaces()).then_some("root may not make network namespaces here"),
            Need::Fuse if user() != Some(0) => Some("not run by root"),
            Need::Fuse => (!Path::new("/dev/fuse").exists()).then_some("no /dev/fuse"),
            Need::Etcd => (!works("etcd", &["--version"])).then_some("no etcd (Debian: etcd-server)"),
            Need::Chromium => chromium().is_none().then_some("no Chromium (Debian: chromium)"),
            // A card alone is not enough: these tests take its ports down.
            Need::Rdma => Some("cargo xtask rdma-test runs them, in virtual machines"),
            Need::Gpu => (!Path::new("/dev/nvidia0").exists()).then_some("no NVIDIA GPU"),
            Need::Cpp => (!works("c++", &["--version"])).then_some("no C++ compiler (Debian: g++)"),
            Need::AddressSanitizer => (!can_sanitize()).then_some("cc does not link with -fsanitize=address"),
            Need::Valgrind => (!works("valgrind", &["--version"])).then_some("no valgrind (Debian: valgrind)"),
            Need::PkgConfig => (!works("pkg-config", &["--version"])).then_some("no pkg-config (Debian: pkg-config)"),
            Need::Cmake => (!works("cmake", &["--version"])).then_some("no CMake (Debian: cmake)"),
            Need::Garage => garage()
                .is_none()
                .then_some("no Garage (cargo xtask s3-server builds it)"),
        }
    }
}

/// Where Garage is: where `WEFT_GARAGE` says, or where `cargo xtask s3-server` keeps it.
pub fn garage() -> Option<PathBuf> {
    let named = std::env::var_os("WEFT_GARAGE").map(PathBuf::from);
    let found = named.or_else(|| Some(garage_root()?.join("bin/garage")))?;
    found.is_file().then_some(found)
}

/// Where it is kept, and not built again.
pub fn garage_root() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?;
    Some(cache.join("weft/garage"))
}

/// Whether the test may go on. Where what it needs is missing this is written down, and where it was required the test fails.
#[track_caller]
pub fn has(need: Need) -> bool {
    let why = need.missing();
    if let Some(why) = why {
        leave_out(need, why);
    }
    why.is_none()
}

/// Writes down that the calling test, or part of one, did not run for want of something.
///
/// # Panics
/// Where that was required.
#[track_caller]
pub fn leave_out(need: Need, why: &str) {
    let place = Location::caller().file();
    let required = std::env::var(REQUIRE).unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == need.name()),
        "{} is required, and missing: {why}",
        need.name()
    );
    eprintln!("left out for want of {}: {why}", need.name());
    if let Some(path) = std::env::var_os(LEFT_OUT) {
        let line = format!("{}\t{place}\t{why}\n", need.name());
        // One write each, so that tests of several processes do not come into each other's lines.
        let written = OpenOptions::new().create(true).append(true).open(&path);
        let written = written.and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(written.is_ok(), "what is left out must be written down: {written:?}");
    }
}

/// The browser by the name that works.
pub fn chromium() -> Option<&'static str> {
    ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|program| works(program, &["--version"]))
}

/// Who runs this, by number; nothing where the system does not say.
pub fn user() -> Option<u32> {
    Path::new("/proc/self").metadata().map(|own| own.uid()).ok()
}

fn can_make_namespaces() -> bool {
    let name = format!("weft-probe-{}", std::process::id());
    works("ip", &["netns", "add", &name]) && works("ip", &["netns", "delete", &name])
}

/// Whether the C compiler has what it links for its sanitizer: a library, of which it knows the path.
fn can_sanitize() -> bool {
    let asked = Command::new("cc").arg("-print-file-name=libasan.so").output();
    asked.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).starts_with('/'))
}

/// Whether a program runs at all; its output is not wanted.
pub fn works(program: &str, arguments: &[&str]) -> bool {
    let quiet = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    quiet.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::*;

    /// Not a test but another process of the one below; alone it does nothing.
    #[test]
    fn leaves_something_out() {
        if std::env::var_os("LEAVE_SOMETHING_OUT").is_some() {
            leave_out(Need::Rdma, "a reason");
        }
    }

    fn leaving_out(required: &str, written: &Path) -> bool {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "tests::leaves_something_out"])
            .env("LEAVE_SOMETHING_OUT", "1")
            .env(REQUIRE, required)
            .env(LEFT_OUT, written);
        command.output().unwrap().status.success()
    }

    #[test]
    fn what_is_left_out_is_written_down_and_what_is_required_fails() {
        let directory = tempfile::tempdir().unwrap();
        let written = directory.path().join("left-out");
        assert!(leaving_out("", &written));
        assert!(leaving_out("root,etcd", &written));
        let lines = std::fs::read_to_string(&written).unwrap();
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines.starts_with("rdma\ttesting/src/lib.rs\ta reason\n"), "{lines}");
        assert!(!leaving_out("root, rdma", &written));
        assert!(!leaving_out("", &directory.path().join("no/such/directory")));
    }

    /// Where tests are ignored, one that is not says so: in the same file of a room's `tests`, or anywhere in its `src`, which is one program.
    /// What only measures is no test, and of what takes minutes the suite has a smaller part.
    #[test]
    fn nothing_is_ignored_in_silence() {
        let rooms = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates");
        let (mut ignoring, mut telling) = (BTreeSet::new(), BTreeSet::new());
        let mut directories = vec![PathBuf::from(rooms)];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let source = path.ancestors().find(|directory| directory.ends_with("src"));
                let program = source.unwrap_or(&path).to_owned();
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                let told = ["measures", "minutes: the suite has a part", "a part of others"];
                let ignores = |line: &str| {
                    line.trim_start().starts_with("#[ignore") && !told.iter().any(|why| line.contains(why))
                };
                if text.lines().any(ignores) {
                    ignoring.insert(program.clone());
                }
                if text.contains("Need::Rdma") {
                    telling.insert(program);
                }
            }
        }
        assert!(!ignoring.is_empty(), "nothing was looked at");
        let silent: Vec<_> = ignoring.difference(&telling).collect();
        assert!(silent.is_empty(), "{silent:?}");
    }
}
