//! Arithmetic that is checked, and operators that say which numbers did not fit.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};

use super::{Bandwidth, Bytes, Picos, Time};

// The four quantities add up alike; a trait would make the constants and const functions of each unreachable.
macro_rules! checked_arithmetic {
    ($quantity:ident) => {
        impl $quantity {
            pub const fn checked_add(self, other: $quantity) -> Option<$quantity> {
                match self.0.checked_add(other.0) {
                    Some(sum) => Some($quantity(sum)),
                    None => None,
                }
            }
            pub const fn checked_sub(self, other: $quantity) -> Option<$quantity> {
                match self.0.checked_sub(other.0) {
                    Some(difference) => Some($quantity(difference)),
                    None => None,
                }
            }
            pub const fn checked_mul(self, times: u64) -> Option<$quantity> {
                match self.0.checked_mul(times) {
                    Some(product) => Some($quantity(product)),
                    None => None,
                }
            }
        }

        impl Add for $quantity {
            type Output = $quantity;
            /// # Panics
            /// Where the sum does not fit.
            fn add(self, other: $quantity) -> $quantity {
                match self.checked_add(other) {
                    Some(sum) => sum,
                    None => panic!("{self} + {other} does not fit into 64 bits"),
                }
            }
        }

        impl Sub for $quantity {
            type Output = $quantity;
            /// # Panics
            /// Where the difference is negative.
            fn sub(self, other: $quantity) -> $quantity {
                match self.checked_sub(other) {
                    Some(difference) => difference,
                    None => panic!("{self} - {other} is negative"),
                }
            }
        }

        impl Mul<u64> for $quantity {
            type Output = $quantity;
            /// # Panics
            /// Where the product does not fit.
            fn mul(self, times: u64) -> $quantity {
                match self.checked_mul(times) {
                    Some(product) => product,
                    None => panic!("{self} × {times} does not fit into 64 bits"),
                }
            }
        }

        impl AddAssign for $quantity {
            fn add_assign(&mut self, other: $quantity) {
                *self = *self + other;
            }
        }

        impl SubAssign for $quantity {
            fn sub_assign(&mut self, other: $quantity) {
                *self = *self - other;
            }
        }

        impl Sum for $quantity {
            fn sum<I: Iterator<Item = $quantity>>(items: I) -> $quantity {
                items.fold($quantity::default(), Add::add)
            }
        }
    };
}

checked_arithmetic!(Bytes);
checked_arithmetic!(Time);
checked_arithmetic!(Picos);
checked_arithmetic!(Bandwidth);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_checked() {
        assert_eq!(Bytes(3) + Bytes(4), Bytes(7));
        assert_eq!(Bytes(3).checked_sub(Bytes(4)), None);
        assert_eq!(Picos::MAX.checked_add(Picos::from_ps(1)), None);
        assert_eq!([Bytes(1), Bytes(2)].into_iter().sum::<Bytes>(), Bytes(3));
        assert_eq!(Bandwidth::from_bytes_per_sec(5) * 3, Bandwidth::from_bytes_per_sec(15));
    }

    #[test]
    #[should_panic(expected = "1 KiB - 2 KiB is negative")]
    fn a_negative_difference_panics_with_its_numbers() {
        let _ = Bytes(1024) - Bytes(2048);
    }

    #[test]
    #[should_panic(expected = "does not fit into 64 bits")]
    fn an_overflow_panics_with_its_numbers() {
        let _ = Picos::MAX * 2;
    }
}
