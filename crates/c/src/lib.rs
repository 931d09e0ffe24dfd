//! The C API: handles of the runtime as opaque pointers, and its errors as numbers with text. `include/weft.h` is what people read; a test
//! holds this room against it, name by name, type by type and offset by offset.
//!
//! Every function does the same three things, in [`boundary`]: it lets no panic out, it refuses handles and arguments that cannot be right, and
//! it leaves what went wrong with the calling thread.

mod agent;
mod arguments;
mod boundary;
mod communicator;
mod event;
mod failure;
#[cfg(test)]
mod header;
mod memory;
mod notification;
mod peer;
mod spans;
mod status;
mod transfer;

use std::ffi::{CStr, c_char};

/// The upper half is what must be alike, the lower half counts what was added.
const ABI_VERSION: u32 = 0x0001_0000;

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no zero inside"),
};

#[unsafe(no_mangle)]
extern "C" fn weft_abi_version() -> u32 {
    ABI_VERSION
}

#[unsafe(no_mangle)]
extern "C" fn weft_version() -> *const c_char {
    VERSION.as_ptr()
}

/// Whether a program that was compiled for `version` can use this library.
fn check_version(version: u32) -> Result<(), failure::Failed> {
    if version >> 16 == ABI_VERSION >> 16 && version <= ABI_VERSION {
        return Ok(());
    }
    Err(failure::Failed::new(
        status::Status::Version,
        format!(
            "the program was compiled for version {version:#x} of the C API, and this library has {ABI_VERSION:#x}"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_newer_or_of_another_kind_is_refused() {
        assert!(check_version(ABI_VERSION).is_ok());
        for refused in [0, 1, ABI_VERSION + 1, ABI_VERSION + 0x1_0000, ABI_VERSION - 1] {
            assert!(check_version(refused).is_err(), "{refused:#x}");
        }
    }
}
