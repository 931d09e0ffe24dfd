//! What runs on the device: its memory, its kernels, and what they are asked to do.
//!
//! The driver is loaded when it is first asked for, so that one binary starts everywhere; where there is none, [`Device::open`] says what is missing.
//! Kernels are compiled beforehand and shipped as PTX (`kernels/*.ptx`, made by `cargo xtask kernels`): nobody needs a compiler.
//!
//! ```no_run
//! use weft_gpu::{Copier, Device, DeviceMemory, Piece, STAY};
//! let device = Device::open(0)?;
//! let (from, to) = (DeviceMemory::allocate(&device, 1 << 20)?, DeviceMemory::allocate(&device, 1 << 20)?);
//! let mut copier = Copier::new(&device, STAY)?;
//! let piece = Piece { to: to.address(), from: from.address(), len: 1 << 20 };
//! // SAFETY: both memories live until the copy has ended, and it lies within them.
//! let ticket = unsafe { copier.begin(&[piece], false) }?;
//! copier.wait(ticket)?;
//! # Ok::<(), weft_gpu::GpuError>(())
//! ```

mod application;
mod carrier;
mod choice;
pub mod collective;
mod converter;
mod copier;
mod device;
mod event;
mod facts;
pub mod fused;
mod gauge;
mod kernels;
mod layout;
mod memory;
mod module;
pub mod moe;
mod moe_shape;
mod pinned;
mod program;
pub mod ring;
mod stream;
pub mod team;
mod worker;

pub use application::{Launch, Module};
pub use carrier::{Carrier, PIECE_BYTES};
pub use choice::{Way, chosen_way, predicted};
pub use collective::{Buffers, Collective, CollectiveError, Collectives, DeviceSlice};
pub use converter::{ConvertError, Converter, PreparedConversion};
pub use copier::{Copied, Copier, KeptList, PIECES_MAX, Piece, PieceList, SLOTS, Ticket};
pub use device::{Device, GpuError, device_count, is_likely};
pub use event::StreamEvent;
pub use facts::DeviceFacts;
pub use fused::{FusedBuffers, FusedNorm, FusedNorms, Rounded};
pub use gauge::{Gauge, device_costs};
pub use layout::{Layout, RANKS_MAX, SIGNALS};
pub use memory::{DeviceMemory, EXPORT_BYTES, Export};
pub use moe::{CombineBuffers, DispatchBuffers, Moe, MoeHandle};
pub use moe_shape::{DispatchBytes, MoeError, MoeSettings, MoeShape, Received, Sent};
pub use pinned::{Pinned, PinnedRange, is_pinned};
pub use program::{ConversionEnds, DeviceProgram, ProgramError};
pub use stream::{Graph, Moment, Stream};
pub use team::{Heap, Team, TeamSettings, TeamView};
pub use worker::STAY;
