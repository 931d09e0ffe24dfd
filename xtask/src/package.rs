//! `cargo xtask package`: a Debian package of the command and the C library, and a look at it on a bare Debian.
//!
//! What is packed is a directory that is laid out first, as it will lie below `/`; `dpkg-deb` makes the archive of it. The package is for the C library of the machine
//! that builds it, and for later ones: which that is stands in the symbols that were linked, and is read from there.

#[cfg(test)]
mod container;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use thiserror::Error;

use crate::bare_test::{self, Bare};
use crate::command::{self, Needed, cargo, install_missing, output, root};
use crate::suite::Suite;

#[derive(clap::Args)]
pub struct Arguments {
    /// Where the package goes.
    #[arg(long, value_name = "DIR", default_value = "dist")]
    out: PathBuf,
    /// The profile that cargo builds by.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Take the command and the library from here, and build none.
    #[arg(long, value_name = "DIR", conflicts_with = "profile")]
    built: Option<PathBuf>,
    /// Who answers for the package, as Debian wants it said.
    #[arg(long, value_name = "NAME <MAIL>", default_value = "Nobody yet <root@localhost>")]
    maintainer: String,
    /// Do not install it on a bare Debian.
    #[arg(long)]
    only_build: bool,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error(transparent)]
    Command(#[from] command::Error),
    #[error(transparent)]
    Bare(#[from] bare_test::Error),
    #[error("{} has no {what}", path.display())]
    Lacking { path: PathBuf, what: &'static str },
}

const NEEDED: &[Needed] = &[
    (&["dpkg-deb", "--version"], "dpkg"),
    (&["strip", "--version"], "binutils"),
    (&["gzip", "--version"], "gzip"),
];

/// What each shell calls the file that completes `weft`, below the root.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/weft"),
    ("zsh", "usr/share/zsh/vendor-completions/_weft"),
    ("fish", "usr/share/fish/vendor_completions.d/weft.fish"),
];

/// On a bare Debian, one after the other, in the directory with the package. What a user would do first; and what is wrong only where nothing else is installed.
const TRIED: &[&str] = &[
    "dpkg --install weft_*.deb",
    // Every file is what was packed.
    "test -z \"$(dpkg --verify weft)\"",
    "! ldd /usr/bin/weft /usr/lib/libweft.so | grep 'not found'",
    "weft --version",
    "weft doctor",
    "weft demo",
    // A completion by bash itself.
    "bash -c '. /usr/share/bash-completion/completions/weft; COMP_WORDS=(weft doct) COMP_CWORD=1; _weft weft doct weft; [ \"${COMPREPLY[*]}\" = doctor ]'",
    "zcat /usr/share/man/man1/weft.1.gz | grep -q '^.TH weft 1' && test -s /usr/share/man/man1/weft-doctor.1.gz",
    "cc /usr/share/doc/weft/examples/transfer.c -o /root/transfer -lweft && /root/transfer",
    "dpkg --purge weft",
    "test -z \"$(find /usr /etc /var/lib/dpkg/info -name '*weft*')\"",
];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    install_missing(NEEDED)?;
    let built = match &arguments.built {
        Some(built) => built.clone(),
        None => build(&arguments.profile)?,
    };
    let place = root().join("target/package");
    let tree = place.join("tree");
    if tree.exists() {
        fs::remove_dir_all(&tree).map_err(|source| at(&tree, source))?;
    }
    lay_out(&tree, &built)?;
    let version = version()?;
    let architecture = output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    describe(&tree, &version, architecture, &arguments.maintainer)?;
    make_modes_plain(&tree)?;
    let name = format!("weft_{version}_{architecture}.deb");
    let package = root().join(&arguments.out).join(&name);
    make_directory(package.parent().unwrap_or(Path::new("/")))?;
    let mut pack = Command::new("dpkg-deb");
    if let Some(seconds) = committed_at() {
        // The same tree gives the same archive.
        pack.env("SOURCE_DATE_EPOCH", seconds);
    }
    command::run(
        pack.args(["--root-owner-group", "-Zxz", "--build"])
            .arg(&tree)
            .arg(&package),
    )?;
    let packed = package.metadata().map_or(0, |metadata| metadata.len());
    println!(
        "{}: {:.1} MB packed, {:.1} MB installed",
        arguments.out.join(&name).display(),
        packed as f64 / 1e6,
        size(&tree) as f64 / 1e6
    );
    match arguments.only_build {
        true => Ok(ExitCode::SUCCESS),
        false => try_it(&package, &name),
    }
}

/// Builds the command and the library, and says where they are.
fn build(profile: &str) -> Result<PathBuf, Error> {
    let what = [
        "--locked",
        "--package",
        "weft-cli",
        "--package",
        "weft-c",
        "--profile",
        profile,
    ];
    command::run(cargo().arg("build").args(what))?;
    Ok(root().join("target").join(match profile {
        "dev" => "debug",
        other => other,
    }))
}

/// All files as they will lie.
fn lay_out(tree: &Path, built: &Path) -> Result<(), Error> {
    let weft = tree.join("usr/bin/weft");
    copy(&built.join("weft"), &weft)?;
    command::run(
        Command::new(root().join("crates/c/install.sh"))
            .arg(tree.join("usr"))
            .arg(built),
    )?;
    // Whoever links it in has the sources anyway, and it is larger than all the rest.
    let archive = tree.join("usr/lib/libweft.a");
    fs::remove_file(&archive).map_err(|source| at(&archive, source))?;
    for binary in [&weft, &tree.join("usr/lib/libweft.so")] {
        command::run(Command::new("strip").arg("--strip-unneeded").arg(binary))?;
    }
    let manual = tree.join("usr/share/man/man1");
    make_directory(&manual)?;
    command::run(Command::new(&weft).args(["man", "--into"]).arg(&manual))?;
    for (shell, path) in COMPLETIONS {
        let script = output(Command::new(&weft).args(["completions", shell]))?;
        write(&tree.join(path), &script)?;
    }
    let documents = tree.join("usr/share/doc/weft");
    write(&documents.join("copyright"), &copyright()?)?;
    copy(&root().join("CHANGELOG.md"), &documents.join("changelog"))?;
    for example in ["transfer.c", "transfer.cpp"] {
        copy(
            &root().join("examples/c").join(example),
            &documents.join("examples").join(example),
        )?;
    }
    let mut gzip = Command::new("gzip");
    gzip.args(["-9", "--no-name", "--recursive"])
        .arg(&manual)
        .arg(documents.join("changelog"));
    Ok(command::run(&mut gzip)?)
}

/// What dpkg is told of it.
fn describe(tree: &Path, version: &str, architecture: &str, maintainer: &str) -> Result<(), Error> {
    let binaries = [tree.join("usr/bin/weft"), tree.join("usr/lib/libweft.so")];
    let mut needed = Needs::default();
    for path in binaries {
        needed.add(&fs::read(&path).map_err(|source| at(&path, source))?);
    }
    let control = control(version, architecture, maintainer, &needed, size(tree).div_ceil(1024));
    let sums = output(
        Command::new("sh")
            .args(["-euc", "find usr -type f -print0 | sort -z | xargs -0 md5sum"])
            .current_dir(tree),
    )?;
    write(&tree.join("DEBIAN/control"), &control)?;
    write(&tree.join("DEBIAN/md5sums"), &sums)?;
    // The library is found by its name at once.
    write(&tree.join("DEBIAN/triggers"), "activate-noawait ldconfig\n")
}

fn control(version: &str, architecture: &str, maintainer: &str, needed: &Needs, kibibytes: u64) -> String {
    let depends = match needed.depends() {
        depends if depends.is_empty() => String::new(),
        depends => format!("Depends: {depends}\n"),
    };
    format!(
        "Package: weft\n\
         Version: {version}\n\
         Architecture: {architecture}\n\
         Maintainer: {maintainer}\n\
         Installed-Size: {kibibytes}\n\
         {depends}\
         Section: net\n\
         Priority: optional\n\
         Homepage: https://github.com/weft-ai/weft\n\
         Description: moves memory between processes and machines for distributed AI\n\
         \x20The command weft, which measures, explains, simulates and copies; and libweft,\n\
         \x20with its header: transfers with deadlines over shared memory, RDMA and TCP,\n\
         \x20and collectives.\n"
    )
}

/// What binaries need of a system: libraries outlive this machine by their versions.
#[derive(Default)]
struct Needs {
    /// The newest version of the C library of which a symbol is linked.
    libc: Option<(u32, u32)>,
    unwinder: bool,
}

impl Needs {
    /// Versions of symbols stand in a binary as text.
    fn add(&mut self, binary: &[u8]) {
        const VERSION: &[u8] = b"GLIBC_";
        let number = |bytes: &[u8]| {
            let digits = bytes.iter().take(3).take_while(|byte| byte.is_ascii_digit()).count();
            let text = std::str::from_utf8(&bytes[..digits]).unwrap_or_default();
            text.parse::<u32>().ok().map(|number| (number, digits))
        };
        for at in positions(binary, VERSION) {
            let after = &binary[at + VERSION.len()..];
            let Some((major, digits)) = number(after) else { continue };
            let Some(minor) = after[digits..].strip_prefix(b".").and_then(number) else {
                continue;
            };
            self.libc = self.libc.max(Some((major, minor.0)));
        }
        self.unwinder |= positions(binary, b"libgcc_s.so.1\0").next().is_some();
    }

    fn depends(&self) -> String {
        let libc = self.libc.map(|(major, minor)| format!("libc6 (>= {major}.{minor})"));
        let unwinder = self.unwinder.then(|| "libgcc-s1".to_owned());
        libc.into_iter().chain(unwinder).collect::<Vec<_>>().join(", ")
    }
}

fn positions<'a>(all: &'a [u8], wanted: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let begins = move |at: &usize| all[*at..].starts_with(wanted);
    // One byte first: binaries are large, and this is not optimised where it runs.
    let candidates = all.iter().enumerate().filter(move |(_, byte)| **byte == wanted[0]);
    candidates.map(|(at, _)| at).filter(begins)
}

/// In the form that Debian reads; the text of one licence is on every Debian.
fn copyright() -> Result<String, Error> {
    let path = root().join("LICENSE-MIT");
    let mit = fs::read_to_string(&path).map_err(|source| at(&path, source))?;
    let holder = mit.lines().find(|line| line.starts_with("Copyright"));
    let holder = holder.ok_or(Error::Lacking {
        path,
        what: "line that says whose it is",
    })?;
    let indented = |line: &str| match line.trim_end() {
        "" => " .\n".to_owned(),
        line => format!(" {line}\n"),
    };
    let mit: String = mit.lines().map(indented).collect();
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: Weft\n\
         Source: https://github.com/weft-ai/weft\n\n\
         Files: *\n\
         Copyright: {}\n\
         License: Apache-2.0 or MIT\n\n\
         License: Apache-2.0\n\
         \x20The whole text is in /usr/share/common-licenses/Apache-2.0.\n\n\
         License: MIT\n{mit}",
        holder.trim_start_matches("Copyright").trim_start_matches(" (c)").trim()
    ))
}

/// Installs it where there is nothing else, uses it and removes it.
fn try_it(package: &Path, name: &str) -> Result<ExitCode, Error> {
    let bare = Bare::make("package", false)?;
    copy(package, &bare.inside.project().join(name))?;
    let mut suite = Suite::default();
    for line in TRIED {
        let done = suite.step(*line, || command::run(&mut bare.inside.command(line)));
        if !done && line.contains("--install") {
            break;
        }
    }
    bare.remove()?;
    Ok(suite.report())
}

fn version() -> Result<String, Error> {
    let path = root().join("Cargo.toml");
    let manifest = fs::read_to_string(&path).map_err(|source| at(&path, source))?;
    let manifest: toml::Table = manifest.parse().unwrap_or_default();
    let package = manifest.get("workspace").and_then(|workspace| workspace.get("package"));
    let version = package.and_then(|package| package.get("version")?.as_str());
    version.map(str::to_owned).ok_or(Error::Lacking {
        path,
        what: "version of the workspace",
    })
}

/// When the last commit was made; nothing where this is no clone.
fn committed_at() -> Option<String> {
    let seconds = Command::new("git")
        .args(["log", "-1", "--format=%ct"])
        .current_dir(root())
        .output()
        .ok()?;
    let seconds = String::from_utf8(seconds.stdout).ok()?;
    let seconds = seconds.trim();
    seconds.parse::<u64>().is_ok().then(|| seconds.to_owned())
}

/// Whatever the builder's own habits are: everybody reads, nobody but root writes, programs run.
fn make_modes_plain(path: &Path) -> Result<(), Error> {
    let failed = |source| at(path, source);
    let metadata = path.symlink_metadata().map_err(failed)?;
    let runs = metadata.is_dir() || path.parent().is_some_and(|parent| parent.ends_with("usr/bin"));
    let mode = if runs { 0o755 } else { 0o644 };
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(failed)? {
            make_modes_plain(&entry.map_err(failed)?.path())?;
        }
    }
    Ok(())
}

fn size(path: &Path) -> u64 {
    match fs::read_dir(path) {
        Ok(inside) => inside.flatten().map(|entry| size(&entry.path())).sum(),
        Err(_) => path.symlink_metadata().map_or(0, |metadata| metadata.len()),
    }
}

fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    make_directory(to.parent().unwrap_or(Path::new("/")))?;
    fs::copy(from, to).map_err(|source| at(from, source))?;
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    make_directory(path.parent().unwrap_or(Path::new("/")))?;
    fs::write(path, text).map_err(|source| at(path, source))
}

fn make_directory(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(|source| at(path, source))
}

fn at(path: &Path, source: std::io::Error) -> Error {
    let path = path.to_owned();
    Error::Command(command::Error::File { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_what_is_needed() {
        let mut needed = Needs::default();
        assert_eq!(needed.depends(), "");
        needed.add(b"\0GLIBC_2.17\0GLIBC_2.34\0GLIBC_2.4\0GLIBC_PRIVATE\0GLIBC_2\0GLIBC_");
        assert_eq!(needed.depends(), "libc6 (>= 2.34)");
        needed.add(b"libgcc_s.so.1\0GLIBC_2.9\0");
        assert_eq!(needed.depends(), "libc6 (>= 2.34), libgcc-s1");
        // This program is linked like those.
        let mut own = Needs::default();
        own.add(&fs::read(std::env::current_exe().unwrap()).unwrap());
        assert!(own.libc >= Some((2, 17)), "{:?}", own.libc);
    }

    #[test]
    fn the_description_has_what_dpkg_asks_for() {
        let needed = Needs {
            libc: Some((2, 34)),
            unwinder: true,
        };
        let said = control("0.1.0", "amd64", "Nobody yet <root@localhost>", &needed, 7);
        for field in [
            "Package: weft",
            "Version: 0.1.0",
            "Architecture: amd64",
            "Installed-Size: 7",
        ] {
            assert!(said.lines().any(|line| line == field), "{field}");
        }
        assert!(said.contains("\nDepends: libc6 (>= 2.34), libgcc-s1\nSection:"));
        // Further lines of a field begin with a space, and the last line ends.
        assert!(said.ends_with(".\n") && said.lines().all(|line| line.starts_with(' ') || line.contains(": ")));
        let copyright = copyright().unwrap();
        assert!(copyright.contains("\nCopyright: ") && copyright.contains("\nLicense: MIT\n "));
        assert!(version().unwrap().split('.').count() == 3);
    }
}
