//! A conversion as words that `kernels/convert.cu` reads: nests whose loops are divided out by multiplications, units of work, and stretches by address.

use thiserror::Error;
use weft_plan::Datatype;
use weft_plan::conversion::{Conversion, Loop, Nest, NestKind, SCALE_BYTES, Scale, Stretch};

pub(crate) const NESTS_MAX: usize = 16;
const LANES: u32 = 32;
/// What a warp takes at a time.
const CHUNK: u32 = 4 * LANES;
/// Units of one launch, and items of one stretch.
const UNITS_MAX: u64 = 1 << 31;

const BYTES: u32 = 0;
const CODE_F32: u32 = 1;
const CODE_F16: u32 = 2;
const CODE_BF16: u32 = 3;
const CODE_E4M3: u32 = 4;

/// By their codes.
const NAMES: [&str; 5] = ["bytes", "f32", "f16", "bf16", "fp8_e4m3"];

const FROM_FIXED: u32 = 1;
const FROM_BESIDE: u32 = 2;
const TO_FIXED: u32 = 4;
const TO_BESIDE: u32 = 8;
const LONG_RUN: u32 = 16;

/// What the greatest magnitude of a run is multiplied with to be its scale: as `plan` has it.
const SHRINK: f32 = 1.0 / 448.0 * (1.0 - 4.0 * f32::EPSILON / 2.0);

/// Where a conversion takes place, by addresses that the device reaches: of what is read, of its scales, of what is written, of its scales. What a conversion has no scales of may be zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConversionEnds {
    /// Of what is read.
    pub from: u64,
    /// Of its scales.
    pub from_scales: u64,
    /// Of what is written.
    pub to: u64,
    /// Of its scales.
    pub to_scales: u64,
}

/// A conversion that a device cannot carry out as it is.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProgramError {
    #[error("elements of {datatype} that do not lie at multiples of their size")]
    Misaligned { datatype: Datatype },
    #[error("scales that do not lie at multiples of {SCALE_BYTES} bytes")]
    MisalignedScales,
    #[error("an address past 2^64")]
    PastTheEnd,
    #[error("a stretch of more than 2^31 items")]
    TooLarge,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Divisor {
    by: u32,
    multiplier: u32,
    shift: u32,
}

impl Divisor {
    /// For what is below 2³¹: the multiplier is 2³¹⁺ˢ / d, rounded up, with s so many bits as d − 1 has. It is too large by less than d, and the quotient thereby by less than 1 / d.
    fn by(by: u32) -> Divisor {
        let bits = u32::BITS - (by - 1).leading_zeros();
        let multiplier = (1u64 << (31 + bits)).div_ceil(u64::from(by));
        // d is more than half of 2ˢ, or one.
        let multiplier = u32::try_from(multiplier).expect("less than 2 to the 32nd");
        let shift = 31 + bits;
        Divisor { by, multiplier, shift }
    }

    #[cfg(test)]
    fn quotient_of(&self, n: u32) -> u32 {
        ((u64::from(n) * u64::from(self.multiplier)) >> self.shift) as u32
    }
}

/// A nest, as the kernel has it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct NestWords {
    first_unit: u32,
    chunks: u32,
    first_stretch: u32,
    from: u32,
    to: u32,
    width: u32,
    flags: u32,
    run: u32,
    items_a_run: u32,
    items: u32,
    by_run: Divisor,
    by_inner: Divisor,
    by_middle: Divisor,
    factor: f32,
    inverse: f32,
    unused: u32,
    from_strides: [u64; 3],
    to_strides: [u64; 3],
    from_scale_strides: [u64; 3],
    to_scale_strides: [u64; 3],
}

const _: () = assert!(size_of::<NestWords>() == 184, "as convert.cu has it");

/// Where a walk through a nest begins, by address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct StretchWords {
    from: u64,
    to: u64,
    from_scales: u64,
    to_scales: u64,
}

/// What one launch is told.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ProgramWords {
    nests: u64,
    stretches: u64,
    count: u32,
    /// How many chunks of stretches there are.
    pub units: u32,
    shrink: f32,
    unused: u32,
}

/// Conversions that were laid out for a device: one launch for each pair of element types, or several where there are more than 16 nests of one.
#[derive(Clone, Debug, Default)]
pub struct DeviceProgram {
    pub(crate) launches: Vec<Launched>,
    bytes: u64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Launched {
    nests: Vec<NestWords>,
    stretches: Vec<StretchWords>,
    units: u32,
}

impl Launched {
    /// The name of the kernel that does it.
    pub fn kernel(&self) -> String {
        let name = |code: u32| NAMES[code as usize];
        match self.nests.first() {
            Some(nest) if nest.from != BYTES => format!("weft_{}_to_{}", name(nest.from), name(nest.to)),
            _ => "weft_move".to_owned(),
        }
    }

    /// What has to lie in memory that the device reads: the nests, and after them the stretches.
    pub fn list(&self) -> Vec<u8> {
        let bytes = self.nests.len() * size_of::<NestWords>() + self.stretches.len() * size_of::<StretchWords>();
        let mut list = Vec::with_capacity(bytes);
        self.nests.iter().for_each(|nest| nest.write(&mut list));
        for at in &self.stretches {
            let addresses = [at.from, at.to, at.from_scales, at.to_scales];
            list.extend(addresses.into_iter().flat_map(u64::to_ne_bytes));
        }
        list
    }

    /// What the kernel is told where the list lies there.
    pub fn words(&self, list: u64) -> ProgramWords {
        ProgramWords {
            nests: list,
            stretches: list + (self.nests.len() * size_of::<NestWords>()) as u64,
            count: self.nests.len() as u32,
            units: self.units,
            shrink: SHRINK,
            unused: 0,
        }
    }
}

impl NestWords {
    fn write(&self, list: &mut Vec<u8>) {
        let divisor = |of: Divisor| [of.by, of.multiplier, of.shift];
        let first = [
            self.first_unit,
            self.chunks,
            self.first_stretch,
            self.from,
            self.to,
            self.width,
            self.flags,
            self.run,
            self.items_a_run,
            self.items,
        ];
        let divisors = [self.by_run, self.by_inner, self.by_middle]
            .into_iter()
            .flat_map(divisor);
        let last = [self.factor.to_bits(), self.inverse.to_bits(), self.unused];
        list.extend(first.into_iter().chain(divisors).chain(last).flat_map(u32::to_ne_bytes));
        let strides = [
            self.from_strides,
            self.to_strides,
            self.from_scale_strides,
            self.to_scale_strides,
        ];
        list.extend(strides.into_iter().flatten().flat_map(u64::to_ne_bytes));
    }
}

/// Stretches of one nest.
struct Gathered<'a> {
    nest: &'a Nest,
    stretches: Vec<StretchWords>,
    /// The bits that any address of either end has.
    from_bits: u64,
    to_bits: u64,
}

impl DeviceProgram {
    /// Lays conversions out, each between places of its own: the layers of a cache, say. They must not write the same bytes.
    pub fn new(conversions: &[(&Conversion, ConversionEnds)]) -> Result<DeviceProgram, ProgramError> {
        let mut all: Vec<Gathered> = Vec::new();
        for (conversion, ends) in conversions {
            let places: Vec<usize> = conversion
                .nests()
                .iter()
                .map(|nest| match all.iter().position(|known| known.nest == nest) {
                    Some(place) => place,
                    None => {
                        all.push(Gathered {
                            nest,
                            stretches: Vec::new(),
                            from_bits: 0,
                            to_bits: 0,
                        });
                        all.len() - 1
                    }
                })
                .collect();
            for at in conversion.stretches() {
                let gathered = &mut all[places[at.nest as usize]];
                let place = place(gathered.nest, at, ends).ok_or(ProgramError::PastTheEnd)?;
                gathered.from_bits |= place.from;
                gathered.to_bits |= place.to;
                gathered.stretches.push(place);
            }
        }
        let mut program = DeviceProgram::default();
        for gathered in all {
            program.bytes += gathered.nest.bytes_written() * gathered.stretches.len() as u64;
            let words = gathered.words()?;
            // A launch counts its units by 31 bits.
            let most = (UNITS_MAX / u64::from(words.chunks)).max(1) as usize;
            for some in gathered.stretches.chunks(most) {
                program.push(words, some);
            }
        }
        Ok(program)
    }

    /// Bytes that it writes, scales not counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// How many launches carry it out.
    pub fn launches(&self) -> usize {
        self.launches.len()
    }

    fn push(&mut self, mut nest: NestWords, stretches: &[StretchWords]) {
        let units = u64::from(nest.chunks) * stretches.len() as u64;
        let fits = |launched: &&mut Launched| {
            let alike = launched
                .nests
                .iter()
                .all(|known| (known.from, known.to) == (nest.from, nest.to));
            alike && launched.nests.len() < NESTS_MAX && u64::from(launched.units) + units <= UNITS_MAX
        };
        if self.launches.iter_mut().find(fits).is_none() {
            self.launches.push(Launched::default());
        }
        let launched = self.launches.iter_mut().find(fits).expect("one with room");
        (nest.first_unit, nest.first_stretch) = (launched.units, launched.stretches.len() as u32);
        launched.nests.push(nest);
        launched.units += units as u32;
        launched.stretches.extend_from_slice(stretches);
    }
}

/// Where a stretch begins; nothing where it would end past the last address.
fn place(nest: &Nest, at: &Stretch, ends: &ConversionEnds) -> Option<StretchWords> {
    let last = |of: fn(&Loop) -> u64| nest.loops.iter().map(|each| (each.count - 1) * of(each)).sum::<u64>();
    let (read, written) = nest.kind.sizes();
    let begin = |base: u64, offset: u64, further: u64| {
        let begin = base.checked_add(offset)?;
        begin.checked_add(further)?;
        Some(begin)
    };
    let (from, to) = (
        last(|each| each.from) + nest.run * read,
        last(|each| each.to) + nest.run * written,
    );
    Some(match nest.kind {
        NestKind::MoveScales => StretchWords {
            from: begin(ends.from_scales, at.from_scales, from)?,
            to: begin(ends.to_scales, at.to_scales, to)?,
            ..StretchWords::default()
        },
        _ => StretchWords {
            from: begin(ends.from, at.from, from)?,
            to: begin(ends.to, at.to, to)?,
            from_scales: begin(
                ends.from_scales,
                at.from_scales,
                last(|each| each.from_scale) + SCALE_BYTES,
            )?,
            to_scales: begin(ends.to_scales, at.to_scales, last(|each| each.to_scale) + SCALE_BYTES)?,
        },
    })
}

impl Gathered<'_> {
    fn words(&self) -> Result<NestWords, ProgramError> {
        let nest = self.nest;
        let strides = |of: fn(&Loop) -> u64| nest.loops.map(|each| of(&each));
        let bits = |of: fn(&Loop) -> u64| {
            nest.loops
                .iter()
                .filter(|each| each.count > 1)
                .fold(0, |all, each| all | of(each))
        };
        let (from_bits, to_bits) = (
            self.from_bits | bits(|each| each.from),
            self.to_bits | bits(|each| each.to),
        );
        let mut words = NestWords {
            run: nest.run as u32,
            factor: 1.0,
            inverse: 1.0,
            from_strides: strides(|each| each.from),
            to_strides: strides(|each| each.to),
            from_scale_strides: strides(|each| each.from_scale),
            to_scale_strides: strides(|each| each.to_scale),
            ..NestWords::default()
        };
        let mut slots = 0;
        match nest.kind {
            NestKind::Move | NestKind::MoveScales => {
                (words.from, words.to) = (BYTES, BYTES);
                let all = from_bits | to_bits | nest.run;
                words.width = [16, 4]
                    .into_iter()
                    .find(|width| all.is_multiple_of(*width))
                    .unwrap_or(1) as u32;
            }
            NestKind::Cast {
                from,
                to,
                from_scale,
                to_scale,
            } => {
                (words.from, words.to) = (code(from), code(to));
                for (bits, datatype) in [(from_bits, from), (to_bits, to)] {
                    if !bits.is_multiple_of(datatype.size() as u64) {
                        return Err(ProgramError::Misaligned { datatype });
                    }
                }
                // Sixteen bytes of the wider side, but no more than eight elements.
                let wide: u64 = if from.size().max(to.size()) == 4 { 4 } else { 8 };
                let aligned = |bits: u64, datatype: Datatype| bits.is_multiple_of(wide * datatype.size() as u64);
                let fits = nest.run.is_multiple_of(wide) && aligned(from_bits, from) && aligned(to_bits, to);
                words.width = if fits { wide as u32 } else { 1 };
                let has = |scale: Scale, fixed: u32, beside: u32| match scale {
                    Scale::One => 0,
                    Scale::Fixed(_) => fixed,
                    Scale::Beside => beside,
                };
                words.flags = has(from_scale, FROM_FIXED, FROM_BESIDE) | has(to_scale, TO_FIXED, TO_BESIDE);
                if let Scale::Fixed(factor) = from_scale {
                    words.factor = factor.value();
                }
                if let Scale::Fixed(factor) = to_scale {
                    words.inverse = 1.0 / factor.value();
                }
                let scale_bits = bits(|each| each.from_scale | each.to_scale);
                let unaligned = |at: &StretchWords| {
                    let of = |address: u64, beside: u32| if words.flags & beside != 0 { address } else { 0 };
                    !(of(at.from_scales, FROM_BESIDE) | of(at.to_scales, TO_BESIDE) | scale_bits)
                        .is_multiple_of(SCALE_BYTES)
                };
                if words.flags & (FROM_BESIDE | TO_BESIDE) != 0 && self.stretches.iter().any(unaligned) {
                    return Err(ProgramError::MisalignedScales);
                }
                slots = if words.flags & TO_BESIDE != 0 { 1 } else { 0 };
            }
        }
        words.items_a_run = words.run / words.width;
        let runs = nest.runs() as u32;
        // Lanes that choose a scale together are a power of two; a run that is longer than a warp has a unit of its own.
        let slots = match slots {
            0 => words.items_a_run,
            _ => words.items_a_run.next_power_of_two(),
        };
        let items = u64::from(runs) * u64::from(slots);
        if items >= 1 << 31 {
            return Err(ProgramError::TooLarge);
        }
        words.items = items as u32;
        (words.by_run, words.chunks) = (Divisor::by(slots), words.items.div_ceil(CHUNK));
        if words.flags & TO_BESIDE != 0 && slots > LANES {
            words.flags |= LONG_RUN;
            words.chunks = runs;
        }
        words.by_inner = Divisor::by(nest.loops[2].count as u32);
        words.by_middle = Divisor::by(nest.loops[1].count as u32);
        Ok(words)
    }
}

/// Others are moved, and never cast.
fn code(datatype: Datatype) -> u32 {
    match datatype {
        Datatype::F16 => CODE_F16,
        Datatype::Bf16 => CODE_BF16,
        Datatype::Fp8E4m3 => CODE_E4M3,
        _ => CODE_F32,
    }
}

#[cfg(test)]
mod tests;
