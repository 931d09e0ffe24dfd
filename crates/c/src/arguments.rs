//! What C hands in, looked at before it is believed.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::ptr::{NonNull, copy_nonoverlapping};
use std::time::Duration;

use crate::failure::Failed;

/// For ever is a month: nothing waits longer.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// A structure of the header's that begins with its own size, and may have been shorter, or longer, where the caller was compiled.
///
/// # Safety
/// It is `repr(C)`, begins with a `usize`, and all its bytes may be zero.
pub unsafe trait Plain: Sized {
    /// How long it was when it was first published: nobody has a shorter one.
    const FIRST_SIZE: usize;
}

/// A place of the caller's, for something that a call hands out.
#[derive(Debug)]
pub struct Out<T> {
    place: NonNull<T>,
}

impl<T> Out<T> {
    pub(crate) fn of(place: NonNull<T>) -> Out<T> {
        Out { place }
    }

    /// # Safety
    /// If it is not null and aligned it points to a `T` of the caller's, until the call returns.
    pub unsafe fn new(out: *mut T, name: &str) -> Result<Out<T>, Failed> {
        at(out, name).map(Out::of)
    }

    pub fn put(self, value: T) {
        // SAFETY: whoever made it has said that the place is the caller's and good for one `T`.
        unsafe { self.place.write(value) }
    }
}

/// A structure of the caller's, to be filled in as far as the caller knows it.
#[derive(Debug)]
pub struct OutStruct<T> {
    place: NonNull<T>,
    size: usize,
}

impl<T: Plain> OutStruct<T> {
    /// # Safety
    /// If it is not null and aligned it points to as many bytes of the caller's as its first field says.
    pub unsafe fn new(out: *mut T, name: &str) -> Result<OutStruct<T>, Failed> {
        let place = at(out, name)?;
        // SAFETY: as the caller says, it begins with its size.
        let size = unsafe { size_of_struct(place, name) }?;
        Ok(OutStruct { place, size })
    }

    pub fn put(self, value: T) {
        let rest = size_of::<usize>();
        let bytes = self.size.min(size_of::<T>()) - rest;
        // SAFETY: both have this many bytes behind their sizes, and the caller's size is left as it is.
        unsafe {
            let from = (&raw const value).cast::<u8>().add(rest);
            copy_nonoverlapping(from, self.place.as_ptr().cast::<u8>().add(rest), bytes);
        }
    }
}

/// A pointer that is neither null nor misaligned.
pub fn at<T>(pointer: *mut T, name: &str) -> Result<NonNull<T>, Failed> {
    let found = NonNull::new(pointer).ok_or_else(|| Failed::invalid(format!("{name} is null")))?;
    if !found.is_aligned() {
        return Err(Failed::invalid(format!(
            "{name} is not aligned to {} bytes",
            align_of::<T>()
        )));
    }
    Ok(found)
}

/// The size that a structure begins with.
///
/// # Safety
/// It begins with a size.
unsafe fn size_of_struct<T: Plain>(structure: NonNull<T>, name: &str) -> Result<usize, Failed> {
    const { assert!(T::FIRST_SIZE <= size_of::<T>(), "structures grow, and never shrink") };
    // SAFETY: as the caller says.
    let size = unsafe { structure.cast::<usize>().read() };
    if size < T::FIRST_SIZE || size > isize::MAX as usize {
        return Err(Failed::invalid(format!(
            "{name} has a size of {size}; set it to sizeof, which is at least {}",
            T::FIRST_SIZE
        )));
    }
    Ok(size)
}

/// A structure of the caller's, as far as both sides know it; what the caller does not know is zero. Fields that only a later version has must be
/// zero: what they ask for could not be done.
///
/// # Safety
/// If it is not null and aligned it points to as many bytes as its first field says.
pub unsafe fn structure<T: Plain>(given: *const T, name: &str) -> Result<T, Failed> {
    let given = at(given.cast_mut(), name)?;
    // SAFETY: as the caller says.
    let size = unsafe { size_of_struct(given, name) }?;
    let known = size.min(size_of::<T>());
    let mut taken = MaybeUninit::<T>::zeroed();
    // SAFETY: both have as many bytes, and all zeros are a `T`, as its kind promises; what is copied over them is one, too.
    unsafe {
        copy_nonoverlapping(given.as_ptr().cast::<u8>(), taken.as_mut_ptr().cast::<u8>(), known);
        let unknown = std::slice::from_raw_parts(given.as_ptr().cast::<u8>().add(known), size - known);
        if unknown.iter().any(|byte| *byte != 0) {
            return Err(Failed::invalid(format!(
                "{name} asks for something that this library does not know"
            )));
        }
        Ok(taken.assume_init())
    }
}

/// The same where null stands for all zeros.
///
/// # Safety
/// As [`structure`].
pub unsafe fn structure_or_default<T: Plain>(given: *const T, name: &str) -> Result<T, Failed> {
    if given.is_null() {
        // SAFETY: all zeros are a `T`, as its kind promises.
        return Ok(unsafe { MaybeUninit::<T>::zeroed().assume_init() });
    }
    // SAFETY: as the caller says.
    unsafe { structure(given, name) }
}

/// A list of the caller's. Null is an empty one.
///
/// # Safety
/// If it is not null and aligned it points to `count` of them, which stay as they are until the call returns.
pub unsafe fn list<'a, T>(first: *const T, count: usize, name: &str) -> Result<&'a [T], Failed> {
    if count == 0 {
        return Ok(&[]);
    }
    let first = at(first.cast_mut(), name)?;
    let bytes = count.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failed::invalid(format!("{name} has {count} entries")));
    }
    // SAFETY: not null, aligned, not too long, and the caller says that so many are there.
    Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), count) })
}

/// A text of the caller's.
///
/// # Safety
/// If it is not null it ends with a zero, and stays as it is until the call returns.
pub unsafe fn text<'a>(given: *const c_char, name: &str) -> Result<&'a str, Failed> {
    let given = at(given.cast_mut(), name)?;
    // SAFETY: as the caller says.
    let given = unsafe { CStr::from_ptr(given.as_ptr()) };
    given
        .to_str()
        .map_err(|_| Failed::invalid(format!("{name} is not UTF-8")))
}

/// The same where null stands for none.
///
/// # Safety
/// As [`text`].
pub unsafe fn text_if_any<'a>(given: *const c_char, name: &str) -> Result<Option<&'a str>, Failed> {
    if given.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller says.
    unsafe { text(given, name) }.map(Some)
}

/// How long to wait.
pub fn duration(nanoseconds: u64) -> Duration {
    Duration::from_nanos(nanoseconds).min(LONGEST)
}

/// The same where 0 leaves it to the settings.
pub fn duration_if_any(nanoseconds: u64) -> Option<Duration> {
    (nanoseconds != 0).then(|| duration(nanoseconds))
}

/// One of an enumeration's, by its number.
pub fn one_of<T: Copy>(known: &[T], number: i32, name: &str) -> Result<T, Failed> {
    let found = usize::try_from(number).ok().and_then(|number| known.get(number));
    found
        .copied()
        .ok_or_else(|| Failed::invalid(format!("there is no {name} {number}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(C)]
    struct Grown {
        size: usize,
        first: u64,
        added: u64,
    }
    // SAFETY: numbers.
    unsafe impl Plain for Grown {
        const FIRST_SIZE: usize = 16;
    }

    #[test]
    fn a_structure_may_be_older_or_newer_than_the_library() {
        let older: [u64; 3] = [16, 5, 99];
        let newer: [u64; 4] = [32, 5, 6, 0];
        let asking: [u64; 4] = [32, 5, 6, 1];
        let short: [u64; 3] = [8, 0, 0];
        let read = |words: &[u64]| {
            // SAFETY: as many bytes as their first word says, or more.
            unsafe { structure::<Grown>(words.as_ptr().cast(), "options") }
        };
        let grown = |first, added, size| Grown { size, first, added };
        assert_eq!(read(&older).unwrap(), grown(5, 0, 16));
        assert_eq!(read(&newer).unwrap(), grown(5, 6, 32));
        assert!(read(&asking).is_err() && read(&short).is_err());
    }

    #[test]
    fn a_structure_is_filled_in_as_far_as_the_caller_knows_it() {
        for (size, expected) in [(16, [16, 1, 77, 77]), (24, [24, 1, 2, 77]), (32, [32, 1, 2, 77])] {
            let mut words: [u64; 4] = [size, 77, 77, 77];
            // SAFETY: as many bytes as their first word says, or more.
            let out = unsafe { OutStruct::<Grown>::new(words.as_mut_ptr().cast(), "summary") }.unwrap();
            out.put(Grown {
                size: 0,
                first: 1,
                added: 2,
            });
            assert_eq!(words, expected);
        }
    }

    #[test]
    fn lists_and_texts_that_cannot_be_are_refused() {
        let numbers = [1u64, 2];
        // SAFETY: null, misaligned, too many to be true, or what is there.
        unsafe {
            assert_eq!(list(numbers.as_ptr(), 2, "numbers").unwrap(), numbers);
            assert!(list::<u64>(std::ptr::null(), 0, "numbers").unwrap().is_empty());
            assert!(list::<u64>(std::ptr::null(), 1, "numbers").is_err());
            assert!(list(numbers.as_ptr().wrapping_byte_add(1), 1, "numbers").is_err());
            assert!(list(numbers.as_ptr(), usize::MAX / 8, "numbers").is_err());
            assert!(text(std::ptr::null(), "name").is_err());
            assert!(text(c"\xff".as_ptr(), "name").is_err());
            assert_eq!(text(c"kv".as_ptr(), "name").unwrap(), "kv");
        }
        assert_eq!(duration(u64::MAX), LONGEST);
    }
}
