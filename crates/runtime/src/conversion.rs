//! Blocks of a paged cache that become blocks of another, here: other layouts, other element types. [`weft_plan::conversion`] says what becomes what.
//!
//! ```
//! use weft::conversion::{Elements, Narrowing, ConversionPlace, PagedEnd, convert};
//! use weft::pages::{Pages, Table};
//! use weft::{Agent, Datatype};
//! // Two blocks of 16 tokens, heads before tokens, bf16; and half a block of 64, tokens before heads, f32.
//! let agent = Agent::builder("turned").start()?;
//! let (near, far) = (Pages::heads_first(2, 16, 0..2, 8)?, Pages::tokens_first(1, 64, 0..2, 16)?);
//! let (from, to) = (agent.allocate(near.end() as usize)?, agent.allocate(far.end() as usize)?);
//! let (bf16, f32) = (Elements::of(Datatype::Bf16), Elements::of(Datatype::F32));
//! let conversion = convert(
//!     PagedEnd { table: Table { pages: &near, blocks: &[1, 0] }, elements: &bf16 },
//!     PagedEnd { table: Table { pages: &far, blocks: &[0] }, elements: &f32 },
//!     0..32,
//!     0..2,
//!     Narrowing::Refused,
//! )?;
//! weft::conversion::run(&conversion, ConversionPlace::of(&from), ConversionPlace::of(&to))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use weft_fabric::cuda::{self, ConversionPlaces};

use crate::error::Error;
use crate::memory::Memory;

pub use weft_plan::conversion::{
    Conversion, ConversionError, Elements, EndBytes, Factor, Loop, Narrowing, Nest, NestKind, PagedEnd, SCALE_BYTES,
    Scale, Scales, Stretch, convert,
};

/// Where one end of a conversion lies, and its scales where these lie in memory: in which memory, from which byte on.
#[derive(Clone, Copy, Debug)]
pub struct ConversionPlace<'a> {
    /// That holds the elements.
    pub memory: &'a Memory,
    /// From where on the layout counts.
    pub offset: u64,
    /// The same of the scales; none where they are in the same memory.
    pub scales: Option<(&'a Memory, u64)>,
}

impl<'a> ConversionPlace<'a> {
    /// From the beginning of a memory on; scales that lie in memory, in the same one.
    pub fn of(memory: &'a Memory) -> ConversionPlace<'a> {
        ConversionPlace {
            memory,
            offset: 0,
            scales: None,
        }
    }
}

/// Carries a conversion out, and waits until it is done: by the processor between memories of the host, by the device between memories of one. Others are refused, and so is
/// what would lie outside of a memory.
///
/// Nothing here asks whether transfers, or work on a device's streams, are under way in the same bytes: whoever converts has waited for them.
pub fn run(conversion: &Conversion, from: ConversionPlace<'_>, to: ConversionPlace<'_>) -> Result<(), Error> {
    fn scales<'a>(place: &ConversionPlace<'a>) -> (&'a Memory, u64) {
        place.scales.unwrap_or((place.memory, place.offset))
    }
    fn any((memory, offset): (&Memory, u64)) -> (&dyn weft_protocol::Memory, u64) {
        (&*memory.inner, offset)
    }
    let places = ConversionPlaces {
        from: any((from.memory, from.offset)),
        from_scales: any(scales(&from)),
        to: any((to.memory, to.offset)),
        to_scales: any(scales(&to)),
    };
    cuda::convert(conversion, places).map_err(|refusal| Error::Refused {
        what: format!(
            "a conversion of {} bytes",
            places.from.0.len().min(conversion.bytes_read())
        ),
        refusal,
    })
}
