//! Reductions of bytes, one element after the other: the meaning that faster ones are held to.

use half::{bf16, f16};
use thiserror::Error;

use super::{Datatype, E4m3, E5m2, Element, Number, Reduction};

/// Buffers that cannot be reduced element by element: fix the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UnevenBuffers {
    #[error("{bytes} bytes are not whole elements of {datatype}")]
    Broken { bytes: usize, datatype: Datatype },
    #[error("a buffer of {found} bytes among buffers of {expected}")]
    Different { found: usize, expected: usize },
    #[error("no buffer to reduce")]
    None,
}

impl Datatype {
    /// `into[i] = sources[0][i] ⊕ sources[1][i] ⊕ …`, from left to right; of one source, a copy. An average is not divided here: see
    /// [`Datatype::average`].
    pub fn fold(self, reduction: Reduction, into: &mut [u8], sources: &[&[u8]]) -> Result<(), UnevenBuffers> {
        self.visit(Fold {
            datatype: self,
            into,
            sources,
            reduction,
            divisor: None,
        })
    }

    /// As [`Datatype::fold`] with a sum, divided by the number of contributions that went into it.
    ///
    /// # Panics
    /// Where the divisor is 0.
    pub fn average(self, divisor: u64, into: &mut [u8], sources: &[&[u8]]) -> Result<(), UnevenBuffers> {
        assert!(divisor > 0, "an average of nothing");
        let reduction = Reduction::Avg;
        self.visit(Fold {
            datatype: self,
            into,
            sources,
            reduction,
            divisor: Some(divisor),
        })
    }

    /// `a[i] = a[i] ⊕ b[i]`.
    pub fn combine(self, reduction: Reduction, a: &mut [u8], b: &[u8]) -> Result<(), UnevenBuffers> {
        let first = a.to_vec();
        self.fold(reduction, a, &[&first, b])
    }

    fn visit(self, fold: Fold<'_, '_>) -> Result<(), UnevenBuffers> {
        match self {
            Datatype::F64 => fold.run::<f64>(),
            Datatype::F32 => fold.run::<f32>(),
            Datatype::F16 => fold.run::<f16>(),
            Datatype::Bf16 => fold.run::<bf16>(),
            Datatype::Fp8E4m3 => fold.run::<E4m3>(),
            Datatype::Fp8E5m2 => fold.run::<E5m2>(),
            Datatype::I8 => fold.run::<i8>(),
            Datatype::I16 => fold.run::<i16>(),
            Datatype::I32 => fold.run::<i32>(),
            Datatype::I64 => fold.run::<i64>(),
            Datatype::U8 => fold.run::<u8>(),
            Datatype::U16 => fold.run::<u16>(),
            Datatype::U32 => fold.run::<u32>(),
            Datatype::U64 => fold.run::<u64>(),
        }
    }
}

struct Fold<'a, 'b> {
    datatype: Datatype,
    into: &'a mut [u8],
    sources: &'b [&'b [u8]],
    reduction: Reduction,
    divisor: Option<u64>,
}

impl Fold<'_, '_> {
    fn run<E: Element>(self) -> Result<(), UnevenBuffers> {
        let (size, expected) = (self.datatype.size(), self.into.len());
        if !expected.is_multiple_of(size) {
            return Err(UnevenBuffers::Broken {
                bytes: expected,
                datatype: self.datatype,
            });
        }
        if let Some(odd) = self.sources.iter().find(|source| source.len() != expected) {
            return Err(UnevenBuffers::Different {
                found: odd.len(),
                expected,
            });
        }
        let (first, rest) = self.sources.split_first().ok_or(UnevenBuffers::None)?;
        if rest.is_empty() && self.divisor.is_none() {
            self.into.copy_from_slice(first);
            return Ok(());
        }
        let apply = match self.reduction {
            Reduction::Sum | Reduction::Avg => E::Wide::sum,
            Reduction::Prod => E::Wide::product,
            Reduction::Min => E::Wide::lesser,
            Reduction::Max => E::Wide::greater,
        };
        for at in (0..expected).step_by(size) {
            let mut wide = E::read(&first[at..]).widen();
            for source in rest {
                wide = apply(wide, E::read(&source[at..]).widen());
            }
            if let Some(divisor) = self.divisor {
                wide = wide.divided(divisor);
            }
            E::narrow(wide).write(&mut self.into[at..]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fold<T: Element, const N: usize>(datatype: Datatype, reduction: Reduction, a: [T; N], b: [T; N]) -> Vec<u8> {
        let bytes = |elements: [T; N]| {
            let mut bytes = vec![0; N * datatype.size()];
            for (element, at) in elements.into_iter().zip(bytes.chunks_mut(datatype.size())) {
                element.write(at);
            }
            bytes
        };
        let (mut a, b) = (bytes(a), bytes(b));
        datatype.combine(reduction, &mut a, &b).unwrap();
        a
    }

    fn floats(bytes: &[u8]) -> Vec<u32> {
        bytes.chunks(4).map(|b| f32::read(b).to_bits()).collect()
    }

    #[test]
    fn nan_wins_and_has_one_form_and_zeros_are_ordered() {
        let odd = f32::from_bits(0xffa0_1234);
        let a = [odd, 1.0, 0.0, -0.0, f32::INFINITY, 3.0];
        let b = [1.0, odd, -0.0, 0.0, f32::NEG_INFINITY, 2.0];
        let nan = 0x7fc0_0000;
        let bits = |x: f32| x.to_bits();
        assert_eq!(
            floats(&fold(Datatype::F32, Reduction::Min, a, b)),
            [nan, nan, bits(-0.0), bits(-0.0), bits(f32::NEG_INFINITY), bits(2.0)]
        );
        assert_eq!(
            floats(&fold(Datatype::F32, Reduction::Max, a, b)),
            [nan, nan, bits(0.0), bits(0.0), bits(f32::INFINITY), bits(3.0)]
        );
        assert_eq!(
            floats(&fold(Datatype::F32, Reduction::Sum, a, b)),
            [nan, nan, bits(0.0), bits(0.0), nan, bits(5.0)]
        );
    }

    #[test]
    fn narrow_floats_round_once_and_e4m3_saturates() {
        // 1 + 2⁻⁸ + 2⁻⁸ in bf16: each step alone would be a tie and fall back to 1.
        let (one, small) = (
            bf16::from_f32(1.0).to_ne_bytes(),
            bf16::from_f32(2f32.powi(-8)).to_ne_bytes(),
        );
        let mut into = [0; 2];
        Datatype::Bf16
            .fold(Reduction::Sum, &mut into, &[&one, &small, &small])
            .unwrap();
        assert_eq!(bf16::from_ne_bytes(into).to_f32(), 1.0 + 2f32.powi(-7));
        assert_eq!(
            fold(Datatype::Fp8E4m3, Reduction::Sum, [E4m3(0x7e)], [E4m3(0x7e)]),
            [0x7e]
        );
        assert_eq!(
            fold(Datatype::Fp8E5m2, Reduction::Sum, [E5m2(0xfb)], [E5m2(0xfb)]),
            [0xfc]
        );
        let most = f16::MAX.to_ne_bytes();
        Datatype::F16.average(2, &mut into, &[&most, &most]).unwrap();
        assert_eq!(into, most);
    }

    #[test]
    fn integers_wrap_around_and_average_towards_zero() {
        assert_eq!(fold(Datatype::I8, Reduction::Sum, [127i8, -128], [1, -1]), [0x80, 0x7f]);
        assert_eq!(fold(Datatype::U8, Reduction::Prod, [16u8], [17]), [16]);
        let mut into = [0];
        Datatype::I8.average(2, &mut into, &[&[-3i8 as u8], &[0]]).unwrap();
        assert_eq!(into, [-1i8 as u8]);
    }

    #[test]
    fn uneven_buffers_are_refused() {
        let mut into = [0; 6];
        let fold = |into: &mut [u8], sources: &[&[u8]]| Datatype::F32.fold(Reduction::Sum, into, sources);
        assert!(matches!(
            fold(&mut into, &[&[0; 6]]),
            Err(UnevenBuffers::Broken { bytes: 6, .. })
        ));
        assert!(matches!(
            fold(&mut into[..4], &[&[0; 4], &[0; 8]]),
            Err(UnevenBuffers::Different { found: 8, .. })
        ));
        assert!(matches!(fold(&mut into[..4], &[]), Err(UnevenBuffers::None)));
    }
}
