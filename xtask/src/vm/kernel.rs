//! Debian's own kernel with its modules, fetched through apt and unpacked under `target`, never installed.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Error, file_error};
use crate::command::{self, output, run};

/// Packages whose dependency is the newest kernel of the series that the tests are known to run on. The first is that of a Debian
/// which had an older kernel at first, the second that of the Debian which came with it.
const PACKAGES: [&str; 2] = ["linux-image-6.12-amd64", "linux-image-amd64"];

/// A kernel that was fetched and unpacked.
#[derive(Debug)]
pub struct Kernel {
    directory: PathBuf,
    version: String,
}

impl Kernel {
    /// The kernel in `cache`, fetched when there is none yet.
    pub fn fetch(cache: &Path) -> Result<Kernel, Error> {
        let directory = cache.join("kernel");
        if let Ok(version) = fs::read_to_string(directory.join("version")) {
            return Ok(Kernel { directory, version });
        }
        // Unpacked beside its final place and moved there as a whole, so that an interrupted run leaves nothing half done.
        let unpacked = cache.join(format!("kernel.{}", std::process::id()));
        let _ = fs::remove_dir_all(&unpacked);
        fs::create_dir_all(&unpacked).map_err(file_error(&unpacked))?;
        let version = unpack(&unpacked)?;
        let _ = fs::remove_dir_all(&directory);
        fs::rename(&unpacked, &directory).map_err(file_error(&directory))?;
        Ok(Kernel { directory, version })
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    /// The kernel proper, as ELF: qemu boots that directly, and no decompressor has to run in emulation.
    pub fn image(&self) -> PathBuf {
        self.directory.join("vmlinux")
    }

    /// The files of these modules and of those that they need, each after what it needs. What is built in needs no file.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<PathBuf>, Error> {
        let modules = modules_of(&self.directory, &self.version);
        let read = |name: &str| {
            let path = modules.join(name);
            fs::read_to_string(&path).map_err(file_error(&path))
        };
        let order = load_order(names, &read("modules.dep")?, &read("modules.builtin")?);
        order
            .map(|files| files.iter().map(|file| modules.join(file)).collect())
            .map_err(|module| Error::NoModule {
                module,
                version: self.version.clone(),
            })
    }

    pub fn has_module(&self, name: &str) -> bool {
        self.modules(&[name]).is_ok()
    }
}

fn modules_of(directory: &Path, version: &str) -> PathBuf {
    directory.join("lib/modules").join(version)
}

/// Downloads the package and keeps of it what a virtual machine needs. Returns the version.
fn unpack(directory: &Path) -> Result<String, Error> {
    let package = newest_package()?;
    eprintln!("fetching {package}");
    // Apt's own user may have no access to this directory; only what the archive signed is taken either way.
    run(Command::new("apt-get")
        .args(["download", "-qq", "-o", "APT::Sandbox::User=root"])
        .arg(&package)
        .current_dir(directory))?;
    let archive = only_entry(directory)?;
    let content = directory.join("content");
    run(Command::new("dpkg-deb").arg("--extract").arg(&archive).arg(&content))?;
    fs::remove_file(&archive).map_err(file_error(&archive))?;
    // Newer packages have everything under /usr.
    let merged = content.join("usr/lib/modules");
    let modules = if merged.is_dir() {
        merged
    } else {
        content.join("lib/modules")
    };
    fs::create_dir_all(directory.join("lib")).map_err(file_error(directory))?;
    let place = directory.join("lib/modules");
    fs::rename(&modules, &place).map_err(file_error(&modules))?;
    let version = only_entry(&place)?;
    let version = version.file_name().unwrap_or_default().to_string_lossy().into_owned();
    run(Command::new("/sbin/depmod").arg("-b").arg(directory).arg(&version))?;

    let compressed = content.join(format!("boot/vmlinuz-{version}"));
    let compressed = fs::read(&compressed).map_err(file_error(&compressed))?;
    let image = directory.join("vmlinux");
    fs::write(&image, decompress_kernel(&compressed)?).map_err(file_error(&image))?;
    fs::remove_dir_all(&content).map_err(file_error(&content))?;
    let stamp = directory.join("version");
    fs::write(&stamp, &version).map_err(file_error(&stamp))?;
    Ok(version)
}

fn newest_package() -> Result<String, Error> {
    let known = || {
        PACKAGES.iter().find_map(|package| {
            let said = output(
                Command::new("apt-cache")
                    .args(["depends", package])
                    .stderr(Stdio::null()),
            )
            .ok()?;
            image_package(&said)
        })
    };
    if let Some(package) = known() {
        return Ok(package);
    }
    // A fresh machine knows no packages at all.
    run(Command::new("apt-get").args(["update", "-qq"]))?;
    known().ok_or(Error::NoKernelPackage)
}

/// The real package that a meta package depends on, from what `apt-cache depends` says.
fn image_package(depends: &str) -> Option<String> {
    let names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names
        .filter(|name| {
            let version = name.strip_prefix("linux-image-").unwrap_or_default();
            version.starts_with(|first: char| first.is_ascii_digit())
        })
        .map(str::to_owned)
        .next()
}

fn only_entry(directory: &Path) -> Result<PathBuf, Error> {
    let entry = fs::read_dir(directory).map_err(file_error(directory))?.next();
    match entry {
        Some(entry) => Ok(entry.map_err(file_error(directory))?.path()),
        None => Err(Error::Empty(directory.to_owned())),
    }
}

/// The ELF file in a compressed kernel. The boot protocol's header says where it begins and how long it is, and its last four bytes how
/// long it will be when unpacked.
fn decompress_kernel(image: &[u8]) -> Result<Vec<u8>, Error> {
    let (payload, size) = payload(image).ok_or(Error::NotAKernel)?;
    let (program, arguments): (&str, &[&str]) = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("xz", &["--decompress", "--stdout", "--single-stream"]),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", &["--decompress", "--stdout", "--quiet"]),
        _ => return Err(Error::NotAKernel),
    };
    let kernel = filter(Command::new(program).args(arguments), payload)?;
    if kernel.starts_with(b"\x7fELF") && kernel.len() == size {
        Ok(kernel)
    } else {
        Err(Error::NotAKernel)
    }
}

/// The compressed part of a kernel image, and its size when unpacked.
fn payload(image: &[u8]) -> Option<(&[u8], usize)> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let setup_sectors = usize::from(*image.get(0x1f1)?);
    let begin = (setup_sectors + 1) * 512 + word(0x248)?;
    let end = begin.checked_add(word(0x24c)?)?.checked_sub(4)?;
    Some((image.get(begin..end)?, word(end)?))
}

/// What a program makes of its input.
pub fn filter(command: &mut Command, input: &[u8]) -> Result<Vec<u8>, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |source| {
        Error::Command(command::Error::NotStarted {
            program: program.clone(),
            source,
        })
    };
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut stdin = child.stdin.take().expect("a pipe was asked for");
    std::thread::scope(|scope| {
        // A program that has had enough closes its end; whether it was content is in its status.
        scope.spawn(move || drop(stdin.write_all(input)));
        let output = child.wait_with_output().map_err(failed)?;
        if output.status.success() {
            Ok(output.stdout)
        } else {
            Err(Error::Command(command::Error::Failed {
                line: program.clone(),
                code: output.status.code(),
            }))
        }
    })
}

/// Module files in the order in which they can be loaded, or the name of the module that does not exist.
///
/// Each line of `modules.dep` names a file and all that it needs, nearest first.
fn load_order(names: &[&str], dependencies: &str, built_in: &str) -> Result<Vec<String>, String> {
    let needs: HashMap<String, Vec<&str>> = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(file, needs)| {
            let files = needs.split_whitespace().rev().chain([file]);
            (module_name(file), files.collect())
        })
        .collect();
    let built_in: HashSet<String> = built_in.lines().map(module_name).collect();
    let mut order: Vec<String> = Vec::new();
    for name in names {
        match needs.get(&name.replace('-', "_")) {
            Some(files) => {
                for file in files {
                    if !order.iter().any(|known| known == file) {
                        order.push((*file).to_owned());
                    }
                }
            }
            None if built_in.contains(&name.replace('-', "_")) => {}
            None => return Err((*name).to_owned()),
        }
    }
    Ok(order)
}

/// The name of the module in a file. Dashes and underscores are one to the kernel.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_loaded_after_what_they_need_and_once() {
        let dependencies = "kernel/a.ko.xz: kernel/b.ko.xz kernel/net-c.ko.xz\nkernel/b.ko.xz: kernel/net-c.ko.xz\n\
                            kernel/net-c.ko.xz:\n";
        let order = load_order(&["b", "a", "net_c", "inside"], dependencies, "kernel/inside.ko\n");
        assert_eq!(
            order.unwrap(),
            ["kernel/net-c.ko.xz", "kernel/b.ko.xz", "kernel/a.ko.xz"]
        );
        assert_eq!(load_order(&["nowhere"], dependencies, ""), Err("nowhere".to_owned()));
    }

    #[test]
    fn the_image_package_is_found_among_the_dependencies() {
        let said = "linux-image-6.12-amd64\n  Depends: linux-base\n  Depends: linux-image-6.12.1+deb12-amd64\n";
        assert_eq!(image_package(said).as_deref(), Some("linux-image-6.12.1+deb12-amd64"));
        assert_eq!(image_package("N: Unable to locate package\n"), None);
    }

    #[test]
    fn a_file_that_is_no_kernel_is_told() {
        let mut image = vec![0; 0x300];
        assert!(payload(&image).is_none());
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x250].fill(0xff);
        assert!(payload(&image).is_none());
        assert!(payload(&image[..0x204]).is_none());
    }
}
