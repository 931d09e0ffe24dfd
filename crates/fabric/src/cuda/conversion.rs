//! Conversions between any memories that this process can get at: by the processor, or by the device that has both ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use weft_gpu::{ConversionEnds, ConvertError, Converter};
use weft_plan::conversion::Conversion;
use weft_protocol::{Memory, Refusal};

use super::{CudaMemory, refusal};
use crate::conversion::{ConversionMemories, convert_memories};
use crate::memory::HostMemory;

/// The memories of a conversion, each with the offset that it counts from.
#[derive(Clone, Copy, Debug)]
pub struct ConversionPlaces<'a> {
    pub from: (&'a dyn Memory, u64),
    pub from_scales: (&'a dyn Memory, u64),
    pub to: (&'a dyn Memory, u64),
    pub to_scales: (&'a dyn Memory, u64),
}

/// What converts, by device. Made when a device is first asked for, which takes the driver a second or two; a process has few devices.
static CONVERTERS: Mutex<BTreeMap<u16, Arc<Converter>>> = Mutex::new(BTreeMap::new());

/// Converts, and waits until it is done. Refused where a memory is too short, and where the ends are neither all the host's nor all of one device.
///
/// What is read and what is written may lie in one memory, but not overlap.
pub fn convert(conversion: &Conversion, places: ConversionPlaces<'_>) -> Result<(), Refusal> {
    let [from, from_scales, to, to_scales] = conversion.ends();
    let all = [
        (places.from, from),
        (places.from_scales, from_scales),
        (places.to, to),
        (places.to_scales, to_scales),
    ];
    for ((memory, offset), len) in all {
        let end = offset.checked_add(len).ok_or(Refusal::OutOfBounds)?;
        if len > 0 && end > memory.len() {
            return Err(Refusal::OutOfBounds);
        }
    }
    if conversion.is_empty() {
        return Ok(());
    }
    match places.from.0.as_any().downcast_ref::<CudaMemory>() {
        Some(_) => on_device(conversion, all),
        None => {
            // What is not touched may be anything: the elements stand in for scales that nobody looks at.
            let of = |at: usize| {
                let ((memory, offset), len) = all[at];
                let (memory, offset) = if len == 0 {
                    (all[at / 2 * 2].0.0, 0)
                } else {
                    (memory, offset)
                };
                host(memory).map(|memory| (memory, offset)).ok_or(Refusal::Unsupported)
            };
            let memories = ConversionMemories {
                from: of(0)?,
                from_scales: of(1)?,
                to: of(2)?,
                to_scales: of(3)?,
            };
            convert_memories(conversion, memories)
        }
    }
}

fn host(memory: &dyn Memory) -> Option<&HostMemory> {
    memory.as_any().downcast_ref()
}

fn on_device(conversion: &Conversion, all: [((&dyn Memory, u64), u64); 4]) -> Result<(), Refusal> {
    let mut device = None;
    let mut addresses = [0; 4];
    for (address, ((memory, offset), len)) in addresses.iter_mut().zip(all) {
        if len == 0 {
            continue;
        }
        let CudaMemory(memory) = memory.as_any().downcast_ref().ok_or(Refusal::Unsupported)?;
        let known = device.get_or_insert(memory.device());
        if known.ordinal() != memory.device().ordinal() {
            return Err(Refusal::Unsupported);
        }
        *address = memory.address() + offset;
    }
    let device = device.ok_or(Refusal::Unsupported)?;
    let converter = {
        let mut converters = CONVERTERS.lock().unwrap_or_else(PoisonError::into_inner);
        match converters.get(&device.ordinal()) {
            Some(known) => known.clone(),
            None => {
                let made = Arc::new(Converter::new(device).map_err(refusal)?);
                converters.insert(device.ordinal(), made.clone());
                made
            }
        }
    };
    let [from, from_scales, to, to_scales] = addresses;
    let ends = ConversionEnds {
        from,
        from_scales,
        to,
        to_scales,
    };
    // SAFETY: all that the conversion touches lies within memories of the device, as `convert` has checked, and these live as long as this call, which waits.
    let converted = unsafe { converter.convert(&[(conversion, ends)]) };
    converted.map_err(|error| match error {
        ConvertError::Gpu(error) => refusal(error),
        _ => Refusal::Malformed,
    })
}
