//! What a conversion means, element by element.

use crate::Datatype;
use crate::datatype::quantized::encode_block;
use crate::datatype::{E4m3, Element, bf16, f16};

use super::{Conversion, Nest, NestKind, SCALE_BYTES, Scale, Stretch};

/// The memories of both ends, and of their scales where these lie in memory.
#[derive(Debug)]
pub struct EndBytes<'a> {
    /// What is read.
    pub from: &'a [u8],
    /// Its scales.
    pub from_scales: &'a [u8],
    /// What is written.
    pub to: &'a mut [u8],
    /// Its scales.
    pub to_scales: &'a mut [u8],
}

impl Conversion {
    /// Carries it out.
    ///
    /// # Panics
    /// Where a memory is shorter than [`ends`](Conversion::ends) says.
    pub fn apply(&self, mut ends: EndBytes<'_>) {
        for at in &self.stretches {
            let nest = &self.nests[at.nest as usize];
            nest.each_run(|run| nest.convert_run(at, &run, &mut ends));
        }
    }
}

/// How far a run is from the beginning of its stretch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunAt {
    /// Of what is read.
    pub from: u64,
    /// Of what is written.
    pub to: u64,
    /// Of the scale of what is read.
    pub from_scale: u64,
    /// Of the scale of what is written.
    pub to_scale: u64,
}

impl Nest {
    /// The runs of a stretch, in their order. Part of whoever calls it, so that what is done to a run is compiled for the caller's instructions.
    #[inline(always)]
    pub fn each_run(&self, mut visit: impl FnMut(RunAt)) {
        let [outer, middle, inner] = &self.loops;
        for a in 0..outer.count {
            for b in 0..middle.count {
                for c in 0..inner.count {
                    let at = |of: fn(&super::Loop) -> u64| a * of(outer) + b * of(middle) + c * of(inner);
                    visit(RunAt {
                        from: at(|each| each.from),
                        to: at(|each| each.to),
                        from_scale: at(|each| each.from_scale),
                        to_scale: at(|each| each.to_scale),
                    });
                }
            }
        }
    }

    fn convert_run(&self, at: &Stretch, run: &RunAt, ends: &mut EndBytes<'_>) {
        let piece = |begin: u64, len: u64| begin as usize..(begin + len) as usize;
        let (read, written) = self.kind.sizes();
        let (from, to, from_scale, to_scale) = match self.kind {
            NestKind::Move => {
                let source = &ends.from[piece(at.from + run.from, self.run)];
                return ends.to[piece(at.to + run.to, self.run)].copy_from_slice(source);
            }
            NestKind::MoveScales => {
                let source = &ends.from_scales[piece(at.from_scales + run.from, self.run)];
                return ends.to_scales[piece(at.to_scales + run.to, self.run)].copy_from_slice(source);
            }
            NestKind::Cast {
                from,
                to,
                from_scale,
                to_scale,
            } => (from, to, from_scale, to_scale),
        };
        let factor = match from_scale {
            Scale::One => None,
            Scale::Fixed(factor) => Some(factor.value()),
            Scale::Beside => {
                let bytes = &ends.from_scales[piece(at.from_scales + run.from_scale, SCALE_BYTES)];
                Some(f32::from_ne_bytes(bytes.try_into().expect("bytes of a scale")))
            }
        };
        let source = &ends.from[piece(at.from + run.from, self.run * read)];
        let number = |bytes: &[u8]| {
            let wide = widen(from, bytes);
            factor.map_or(wide, |factor| wide * factor)
        };
        let numbers: Vec<f32> = source.chunks(read as usize).map(number).collect();
        let target = &mut ends.to[piece(at.to + run.to, self.run * written)];
        let inverse = match to_scale {
            Scale::One => None,
            Scale::Fixed(factor) => Some(1.0 / factor.value()),
            Scale::Beside => {
                let scale = encode_block::<E4m3>(&numbers, target);
                let place = piece(at.to_scales + run.to_scale, SCALE_BYTES);
                return ends.to_scales[place].copy_from_slice(&scale.to_ne_bytes());
            }
        };
        for (number, bytes) in numbers.into_iter().zip(target.chunks_mut(written as usize)) {
            narrow(to, inverse.map_or(number, |inverse| number * inverse), bytes);
        }
    }
}

fn widen(datatype: Datatype, bytes: &[u8]) -> f32 {
    match datatype {
        Datatype::F16 => f16::read(bytes).widen(),
        Datatype::Bf16 => bf16::read(bytes).widen(),
        Datatype::Fp8E4m3 => E4m3::read(bytes).widen(),
        // No other is cast.
        _ => f32::read(bytes),
    }
}

/// Of NaN there is one in results.
fn narrow(datatype: Datatype, number: f32, bytes: &mut [u8]) {
    match datatype {
        Datatype::F16 if number.is_nan() => f16::from_bits(0x7e00).write(bytes),
        Datatype::F16 => f16::narrow(number).write(bytes),
        Datatype::Bf16 => bf16::narrow(number).write(bytes),
        Datatype::Fp8E4m3 => E4m3::narrow(number).write(bytes),
        _ if number.is_nan() => f32::from_bits(0x7fc0_0000).write(bytes),
        _ => number.write(bytes),
    }
}
