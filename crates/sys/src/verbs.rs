//! libibverbs, the user-space interface to RDMA devices.
//!
//! [`Libibverbs`] is the table of its exported functions. What the header defines as inline functions ([`ibv_post_send`] and the
//! like) goes through the pointers in `ibv_context`, and is written out here in the same way. Names and layouts are those of
//! `infiniband/verbs.h`; `layout.rs` holds them to what a C compiler says.
//!
//! Values that come from the device, such as a completion's status, are integers with named constants and never Rust enums: a later
//! library may use values that this header did not know.

mod inline;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod layout;
mod objects;
mod table;
mod types;

pub use inline::*;
pub use objects::*;
pub use table::*;
pub use types::*;
