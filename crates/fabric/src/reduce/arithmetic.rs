//! Arithmetic on many elements at once, whatever holds them: a register of the processor, or an array of plain numbers.

use std::num::NonZeroU64;

use weft_plan::datatype::Number;

/// Lanes that are reduced each with its counterpart. The methods mean, in every lane, what they mean in [`Number`].
///
/// They are unsafe because the registers behind them exist only on processors with certain instructions, which whoever picks the kernel
/// has made sure of.
pub(super) trait Arithmetic: Copy {
    unsafe fn sum(self, other: Self) -> Self;
    unsafe fn product(self, other: Self) -> Self;
    unsafe fn lesser(self, other: Self) -> Self;
    unsafe fn greater(self, other: Self) -> Self;
    unsafe fn divided(self, by: &Divisor) -> Self;
}

/// What an average is divided by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Divisor {
    pub(super) by: u64,
    /// Its reciprocal, where that is exact: multiplying by it gives the same bits as dividing, sooner.
    pub(super) reciprocal: Option<f32>,
}

impl Divisor {
    pub(super) const ONE: Divisor = Divisor {
        by: 1,
        reciprocal: Some(1.0),
    };

    pub(super) fn new(by: NonZeroU64) -> Divisor {
        let by = by.get();
        Divisor {
            by,
            reciprocal: by.is_power_of_two().then(|| 1.0 / by as f32),
        }
    }
}

/// One element in an array of them, for the compiler to put into registers.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Lane<T>(pub(super) T);

impl<T: Number> Arithmetic for Lane<T> {
    #[inline(always)]
    unsafe fn sum(self, other: Self) -> Self {
        Lane(self.0.sum(other.0))
    }
    #[inline(always)]
    unsafe fn product(self, other: Self) -> Self {
        Lane(self.0.product(other.0))
    }
    #[inline(always)]
    unsafe fn lesser(self, other: Self) -> Self {
        Lane(self.0.lesser(other.0))
    }
    #[inline(always)]
    unsafe fn greater(self, other: Self) -> Self {
        Lane(self.0.greater(other.0))
    }
    #[inline(always)]
    unsafe fn divided(self, by: &Divisor) -> Self {
        Lane(self.0.divided(by.by))
    }
}

impl<T: Arithmetic, const N: usize> Arithmetic for [T; N] {
    #[inline(always)]
    unsafe fn sum(mut self, other: Self) -> Self {
        for i in 0..N {
            // SAFETY: the caller's promise, handed on; so in the methods below.
            self[i] = unsafe { self[i].sum(other[i]) };
        }
        self
    }
    #[inline(always)]
    unsafe fn product(mut self, other: Self) -> Self {
        for i in 0..N {
            // SAFETY: as in `sum`.
            self[i] = unsafe { self[i].product(other[i]) };
        }
        self
    }
    #[inline(always)]
    unsafe fn lesser(mut self, other: Self) -> Self {
        for i in 0..N {
            // SAFETY: as in `sum`.
            self[i] = unsafe { self[i].lesser(other[i]) };
        }
        self
    }
    #[inline(always)]
    unsafe fn greater(mut self, other: Self) -> Self {
        for i in 0..N {
            // SAFETY: as in `sum`.
            self[i] = unsafe { self[i].greater(other[i]) };
        }
        self
    }
    #[inline(always)]
    unsafe fn divided(mut self, by: &Divisor) -> Self {
        for lane in &mut self {
            // SAFETY: as in `sum`.
            *lane = unsafe { lane.divided(by) };
        }
        self
    }
}
