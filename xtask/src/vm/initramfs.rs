//! The file system that a guest starts from: busybox, the modules, and the first process.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::archive::Archive;
use super::kernel::{Kernel, filter};
use super::{Error, file_error};

/// A busybox that needs no libraries; the package of that name in Debian has it here.
pub const BUSYBOX: &str = "/bin/busybox";
const INIT: &str = include_str!("init.sh");

/// What every guest needs: its disks, its console and its network cards, and RDMA over them. The checksums are those of overlayfs and
/// of Soft-RoCE, which the kernel would look for by name in a directory that is not there yet.
const MODULES: [&str; 12] = [
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_net",
    "dummy",
    "crc32_generic",
    "crc32c_generic",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
];

/// The initramfs for a kernel with `further` modules, as bytes. Making it takes less time than knowing whether an older one still holds.
pub fn make(kernel: &Kernel, further: &[String]) -> Result<Vec<u8>, Error> {
    let wanted: Vec<&str> = MODULES.into_iter().chain(further.iter().map(String::as_str)).collect();
    let mut archive = Archive::default();
    for directory in ["bin", "proc", "sys", "dev", "modules", "job", "host", "scratch", "root"] {
        archive.directory(directory);
    }
    archive.file("init", INIT.as_bytes());
    archive.file("bin/busybox", &read(Path::new(BUSYBOX))?);
    let mut order = String::new();
    for file in kernel.modules(&wanted)? {
        let module = read(&file)?;
        let (name, module) = match file.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => (file.file_stem(), filter(Command::new("xz").arg("-dc"), &module)?),
            Some("zst") => (file.file_stem(), filter(Command::new("zstd").arg("-qdc"), &module)?),
            _ => (file.file_name(), module),
        };
        let name = name.unwrap_or_default().to_string_lossy();
        archive.file(&format!("modules/{name}"), &module);
        order += &format!("{name}\n");
    }
    archive.file("modules/order", order.as_bytes());
    Ok(archive.finish())
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(file_error(path))
}
