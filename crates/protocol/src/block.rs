//! Blocks of KV caches: what they are called, when they may be seen, where they are, and which of them leave.
//!
//! Whoever stores KV blocks, in memory, in files or in objects, decides by what is here: a [`Namespace`] says what must be equal for one
//! request's cache to serve another, a [`BlockId`] names a block and everything before it, a block becomes visible only when every byte of it is
//! [sealed](Sealed), the [`Index`] finds the longest prefix that is there, and a [policy](policy::Policy) says which block goes when room is
//! needed. [`Books`] puts these together into one
//! machine: puts, requests, holds and hints in, decisions out. [`replay`] drives index and policies with a trace.
//!
//! ```
//! use weft_protocol::block::{Namespace, BlockId};
//! let fields = [("model", "llama-3.1-8b"), ("revision", "0e9e39f"), ("tokenizer", "llama-3.1"), ("dtype", "bf16"), ("quantisation", "none"),
//!     ("scales", "none"), ("layout", "nhd"), ("block_tokens", "16"), ("lora", "none"), ("positions", "rope-500000"), ("tenant", "a")];
//! let namespace = Namespace::from_fields(fields)?;
//! let first = BlockId::of_tokens(&namespace, None, &[1, 2, 3]);
//! let second = BlockId::of_tokens(&namespace, Some(first), &[4, 5, 6]);
//! assert_ne!(first, second);
//! # Ok::<(), weft_protocol::block::NameError>(())
//! ```

mod books;
pub mod directory;
pub mod engines;
mod index;
mod life;
mod line;
mod links;
mod name;
pub mod policy;
pub mod replay;
pub mod shelf;
mod table;
pub mod trace;

pub use books::{Books, Event, Hint, Hold, Limits, Priority, Put, PutError, Room, Tally, Tenant};
pub use index::{Entry, Full, Index, NotALeaf, Slot};
pub use life::{FillError, HitRule, Open, Part, Sealed, Shape, ShapeError, Unsealed, Visible, checksum};
pub use line::BlockLine;
pub use links::Links;
pub use name::{BlockId, Field, KEY_BYTES_MAX, NameError, Namespace};
