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

/// Arithmetic on a register of floats, by the instructions of one instruction set. What differs more than by name is the type's own: `with_nan`,
/// `least` and `greatest`.
#[cfg(target_arch = "x86_64")]
macro_rules! lanes {
    ($lanes:ident, $float:ty: $set:ident, $add:ident, $mul:ident, $div:ident, $compare:ident) => {
        impl $lanes {
            #[inline(always)]
            unsafe fn one_nan(self) -> Self {
                self.with_nan($compare::<_CMP_UNORD_Q>(self.0, self.0))
            }
        }

        impl Arithmetic for $lanes {
            #[inline(always)]
            unsafe fn sum(self, other: Self) -> Self {
                $lanes($add(self.0, other.0)).one_nan()
            }
            #[inline(always)]
            unsafe fn product(self, other: Self) -> Self {
                $lanes($mul(self.0, other.0)).one_nan()
            }
            #[inline(always)]
            unsafe fn lesser(self, other: Self) -> Self {
                $lanes(self.least(other)).with_nan($compare::<_CMP_UNORD_Q>(self.0, other.0))
            }
            #[inline(always)]
            unsafe fn greater(self, other: Self) -> Self {
                $lanes(self.greatest(other)).with_nan($compare::<_CMP_UNORD_Q>(self.0, other.0))
            }
            #[inline(always)]
            unsafe fn divided(self, by: &Divisor) -> Self {
                $lanes(match by.reciprocal {
                    Some(reciprocal) => $mul(self.0, $set(reciprocal as $float)),
                    None => $div(self.0, $set(by.by as $float)),
                })
                .one_nan()
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use lanes;

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

// Each method hands its caller's promise on, lane by lane.
#[allow(unsafe_op_in_unsafe_fn)]
impl<T: Arithmetic, const N: usize> Arithmetic for [T; N] {
    #[inline(always)]
    unsafe fn sum(mut self, other: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].sum(other[i]);
        }
        self
    }
    #[inline(always)]
    unsafe fn product(mut self, other: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].product(other[i]);
        }
        self
    }
    #[inline(always)]
    unsafe fn lesser(mut self, other: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].lesser(other[i]);
        }
        self
    }
    #[inline(always)]
    unsafe fn greater(mut self, other: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].greater(other[i]);
        }
        self
    }
    #[inline(always)]
    unsafe fn divided(mut self, by: &Divisor) -> Self {
        for lane in &mut self {
            *lane = lane.divided(by);
        }
        self
    }
}
