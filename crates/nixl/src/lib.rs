//! Weft as a back end of NIXL: what `libplugin_WEFT.so` is, under whatever name.
//!
//! NIXL loads back ends as C++ classes. This room speaks that language without a compiler for it (`stdcxx`, `abi`), so that the Python package, which
//! is one shared object, is the plug-in, too; why, is told in docs/decisions. `engine` and `request` are the back end; `boundary` is what NIXL calls;
//! `interface` finds out whether an installed NIXL is one that this fits.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

mod abi;
mod blobs;
#[cfg(target_arch = "x86_64")]
mod boundary;
mod engine;
pub mod harness;
pub mod interface;
mod parameters;
mod request;
pub mod stand_in;
mod stdcxx;
mod trouble;

pub use abi::Status;
pub use blobs::Segment;
pub use parameters::OFFERED;
pub use request::Stage;
pub use trouble::Trouble;

/// Whether there is a plug-in for this kind of machine. How C++ returns a map is written down for one of them.
pub const SUPPORTED: bool = cfg!(target_arch = "x86_64");

/// What NIXL asks a plug-in for. Null where there is nothing that it could use, and the log says why.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_init() -> *const std::ffi::c_void {
    let found = std::panic::catch_unwind(stdcxx::Library::of_process);
    match found {
        Ok(Ok(_)) => (&raw const boundary::PLUGIN).cast(),
        Ok(Err(missing)) => {
            trouble::log(trouble::Level::Error, &missing);
            std::ptr::null()
        }
        Err(_) => std::ptr::null(),
    }
}

/// What NIXL says when it is through with a plug-in. There is nothing to be undone: engines have been destroyed before.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_fini() {}
