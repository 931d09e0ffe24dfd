//! Commands with another directory as their root.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Error, make_directory};
use crate::command::{output, root};

/// A directory that is furnished to be a root.
pub struct Inside {
    path: PathBuf,
    /// Where the Rust toolchain is on this machine.
    rust: PathBuf,
}

/// Where things are inside.
const PROJECT: &str = "root/weft";
const RUST: &str = "opt/rust";

/// Mounts what a system has, and becomes the command. All of it happens in namespaces of its own.
const ENTER: &str = r#"
root=$1 rust=$2 line=$3
shift 3
# The root has to be a mount of its own: namespaces that tests make begin with changing how it is shared.
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
for node in null zero full random urandom tty fuse; do
    [ -e "/dev/$node" ] || continue
    : >"$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mount --bind "$rust" "$root/opt/rust"
mount -o remount,bind,ro "$root/opt/rust"
exec chroot "$root" env -i "$@" sh -c "cd /root/weft && $line"
"#;

/// Variables without which the network cannot be used on this machine, by how their names begin.
const OF_THE_NETWORK: &[&str] = &[
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "pip_",
    "cargo_http_",
    "cargo_net_",
    "cargo_registries_",
    "cargo_source_",
    "ssl_cert_",
    "requests_ca_bundle",
];

/// Files of the same purpose, where they are on this machine and there. A `~` is the home of whoever runs this, and of root.
const FILES: &[&str] = &[
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pip.conf",
    "~/.config/pip/pip.conf",
    "~/.pip/pip.conf",
    "~/.cargo/config.toml",
];

impl Inside {
    /// Puts what a command needs into a directory with a system in it.
    pub fn furnish(path: &Path) -> Result<Inside, Error> {
        let rust = output(Command::new("rustc").args(["--print", "sysroot"]).current_dir(root()))?;
        let inside = Inside {
            path: path.to_owned(),
            rust: rust.trim().into(),
        };
        make_directory(&path.join(RUST))?;
        let home = std::env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from);
        for file in FILES {
            let (here, there) = match file.strip_prefix("~/") {
                Some(of_home) => (home.join(of_home), path.join("root").join(of_home)),
                None => (PathBuf::from(file), path.join(&file[1..])),
            };
            // What is not here is not needed there.
            let Ok(bytes) = fs::read(&here) else { continue };
            make_directory(there.parent().unwrap_or(path))?;
            // A link there may lead out of the directory.
            let _ = fs::remove_file(&there);
            fs::write(&there, bytes).map_err(|source| Error::File { path: there, source })?;
        }
        Ok(inside)
    }

    /// Where the project is, seen from here.
    pub fn project(&self) -> PathBuf {
        self.path.join(PROJECT)
    }

    /// A line of shell, run in the project.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new("unshare");
        // What is started there ends with the command, and that with us.
        command
            .args([
                "--mount",
                "--pid",
                "--ipc",
                "--uts",
                "--fork",
                "--kill-child",
                "sh",
                "-eu",
                "-c",
                ENTER,
                "bare",
            ])
            .arg(&self.path)
            .arg(&self.rust)
            .arg(line)
            .args(self.environment());
        command
    }

    fn environment(&self) -> Vec<OsString> {
        let mut all: Vec<OsString> = [
            "PATH=/opt/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME=/root",
            "LANG=C.UTF-8",
            "DEBIAN_FRONTEND=noninteractive",
        ]
        .map(OsString::from)
        .into();
        for (name, value) in std::env::vars_os() {
            let lower = name.to_string_lossy().to_lowercase();
            if OF_THE_NETWORK.iter().any(|beginning| lower.starts_with(beginning)) {
                let mut variable = name;
                variable.push("=");
                variable.push(value);
                all.push(variable);
            }
        }
        all
    }
}
