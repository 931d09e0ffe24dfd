//! What every call from C goes through on its way in and out.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use weft::fork::Origin;

use crate::arguments::{Out, at};
use crate::failure::Failed;
use crate::status::Status;

/// What a handle that has been given back holds in place of its mark, for as long as its memory is nobody else's.
const GIVEN_BACK: u64 = 0x6465_6164_7765_6674;

/// Something that C has a handle of.
pub trait Object {
    /// What it is called in texts.
    const NAME: &'static str;
    /// What tells its handles from others.
    const MARK: u64;
}

/// What an opaque pointer points to.
#[derive(Debug)]
#[repr(C)]
pub struct Handle<T> {
    mark: AtomicU64,
    origin: Origin,
    /// A call with it has panicked: what it left behind is not to be trusted.
    broken: AtomicBool,
    value: T,
}

impl<T: Object> Handle<T> {
    fn new(value: T) -> Box<Handle<T>> {
        Box::new(Handle {
            mark: AtomicU64::new(T::MARK),
            origin: Origin::here(),
            broken: AtomicBool::new(false),
            value,
        })
    }

    /// The handle behind a pointer, unless it cannot be one.
    ///
    /// # Safety
    /// If it is not null and aligned it points to a handle of some kind, which nobody gives back meanwhile.
    unsafe fn behind<'a>(handle: *const Handle<T>) -> Result<&'a Handle<T>, Failed> {
        let handle = at(handle.cast_mut(), T::NAME)?;
        // SAFETY: all handles begin with their mark, whatever they are of.
        let mark = unsafe { handle.cast::<AtomicU64>().as_ref() };
        match mark.load(Ordering::Relaxed) {
            // SAFETY: the mark says that it is such a handle, and the caller that it stays.
            mark if mark == T::MARK => Ok(unsafe { handle.as_ref() }),
            GIVEN_BACK => Err(Failed::invalid(format!("the {} has been given back", T::NAME))),
            _ => Err(Failed::invalid(format!("this is not the handle of a {}", T::NAME))),
        }
    }

    /// What it is of, in the process that made it, unless a call with it has panicked.
    fn value(&self) -> Result<&T, Failed> {
        self.origin.check()?;
        if self.broken.load(Ordering::Relaxed) {
            let text = format!(
                "an earlier call with this {} has panicked, and it is of no further use",
                T::NAME
            );
            return Err(Failed::new(Status::Panic, text));
        }
        Ok(&self.value)
    }
}

/// Runs the body of a function. A panic ends here.
pub fn guarded<S: Into<Status>>(body: impl FnOnce() -> Result<S, Failed>) -> Status {
    let ended = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(&*panic)));
    match ended {
        Ok(status) => status.into(),
        Err(failed) => failed.remember(),
    }
}

/// Runs the body of a function that is about an object. After a panic the object is of no further use.
///
/// # Safety
/// As [`other`].
pub unsafe fn on<T: Object, S: Into<Status>>(
    handle: *const Handle<T>,
    body: impl FnOnce(&T) -> Result<S, Failed>,
) -> Status {
    guarded(|| {
        // SAFETY: as the caller says.
        let handle = unsafe { Handle::behind(handle) }?;
        let value = handle.value()?;
        catch_unwind(AssertUnwindSafe(|| body(value))).unwrap_or_else(|panic| {
            handle.broken.store(true, Ordering::Relaxed);
            Err(panicked(&*panic))
        })
    })
}

/// Another object that a call is about.
///
/// # Safety
/// If the pointer is not null and aligned it points to a handle, which nobody gives back before the call has returned.
pub unsafe fn other<'a, T: Object>(handle: *const Handle<T>) -> Result<&'a T, Failed> {
    // SAFETY: as the caller says.
    unsafe { Handle::behind(handle) }?.value()
}

/// Something of an object that is asked for without a status, in any process; `otherwise` where the handle cannot be one.
///
/// # Safety
/// As [`other`].
pub unsafe fn ask<T: Object, A>(handle: *const Handle<T>, otherwise: A, body: impl FnOnce(&T) -> A) -> A {
    let mut answer = otherwise;
    guarded(|| {
        // SAFETY: as the caller says.
        let handle = unsafe { Handle::behind(handle) }?;
        answer = body(&handle.value);
        Ok(())
    });
    answer
}

/// Gives a handle back. Null is nothing to give back.
///
/// # Safety
/// As [`other`], and nobody uses the handle any more.
pub unsafe fn free<T: Object>(handle: *mut Handle<T>) {
    if handle.is_null() {
        return;
    }
    guarded(|| {
        // SAFETY: as the caller says.
        let found = unsafe { Handle::behind(handle) }?;
        // Of two that give it back at the same time, one is refused.
        let mark = found.mark.swap(GIVEN_BACK, Ordering::AcqRel);
        if mark != T::MARK {
            return Err(Failed::invalid(format!("the {} has been given back", T::NAME)));
        }
        // SAFETY: it came from `hand_out`, and its mark says that it comes back for the first time.
        drop(unsafe { Box::from_raw(handle) });
        Ok(())
    });
}

impl<T: Object> Out<*mut Handle<T>> {
    /// Gives the caller a handle, which it has to give back.
    pub fn hand_out(self, value: T) {
        self.put(Box::into_raw(Handle::new(value)));
    }
}

/// Where a handle is to be put. It is null until there is one, so that a caller that gives it back anyway does no harm.
///
/// # Safety
/// If it is not null and aligned it points to a pointer of the caller's.
pub unsafe fn handle_out<T>(out: *mut *mut Handle<T>, name: &str) -> Result<Out<*mut Handle<T>>, Failed> {
    let place: NonNull<*mut Handle<T>> = at(out, name)?;
    // SAFETY: as the caller says.
    unsafe { place.write(std::ptr::null_mut()) };
    Ok(Out::of(place))
}

fn panicked(panic: &(dyn Any + Send)) -> Failed {
    let said = panic.downcast_ref::<&str>().copied();
    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Failed::new(
        Status::Panic,
        format!("Weft has panicked: {}", said.unwrap_or("it did not say why")),
    )
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::ptr::null_mut;

    use super::*;
    use crate::failure::weft_last_error;

    #[derive(Debug)]
    struct Number(u32);
    impl Object for Number {
        const NAME: &'static str = "number";
        const MARK: u64 = 1;
    }
    #[derive(Debug)]
    struct Word;
    impl Object for Word {
        const NAME: &'static str = "word";
        const MARK: u64 = 2;
    }

    fn number() -> *mut Handle<Number> {
        Box::into_raw(Handle::new(Number(7)))
    }

    fn last_error() -> String {
        // SAFETY: a text of this thread's, which stays until the next failure.
        unsafe { CStr::from_ptr(weft_last_error()) }
            .to_str()
            .unwrap()
            .to_owned()
    }

    #[test]
    fn a_panic_ends_at_the_boundary_and_its_object_with_it() {
        let number = number();
        let panics = |_: &Number| -> Result<(), Failed> { panic!("on purpose") };
        // SAFETY: a handle of this test's.
        unsafe {
            assert_eq!(
                on(number, |number| {
                    assert_eq!(number.0, 7);
                    Ok::<_, Failed>(())
                }),
                Status::Ok
            );
            assert_eq!(on(number, panics), Status::Panic);
            assert_eq!(last_error(), "Weft has panicked: on purpose");
            assert_eq!(on(number, |_| Ok::<_, Failed>(())), Status::Panic);
            assert!(
                last_error().contains("an earlier call with this number"),
                "{}",
                last_error()
            );
            assert!(other(number).is_err());
            free(number);
        }
        assert_eq!(
            guarded(|| -> Result<(), Failed> { panic!("{} more", 1) }),
            Status::Panic
        );
        assert_eq!(last_error(), "Weft has panicked: 1 more");
    }

    #[test]
    fn what_cannot_be_a_handle_is_refused() {
        let number = number();
        let uses = |handle: *const Handle<Number>| {
            // SAFETY: null, misaligned, or a handle of this test's.
            unsafe { on(handle, |_| Ok::<_, Failed>(())) }
        };
        assert_eq!(uses(null_mut()), Status::InvalidArgument);
        assert_eq!(last_error(), "number is null");
        assert_eq!(uses(number.wrapping_byte_add(1)), Status::InvalidArgument);
        assert_eq!(last_error(), "number is not aligned to 8 bytes");
        let word = Box::into_raw(Handle::new(Word));
        assert_eq!(uses(word.cast()), Status::InvalidArgument);
        assert_eq!(last_error(), "this is not the handle of a number");
        // SAFETY: handles of this test's, each given back once, and null.
        unsafe {
            free(number);
            free(word);
            free(null_mut::<Handle<Word>>());
        }
    }

    #[test]
    fn a_thread_has_errors_of_its_own() {
        assert_eq!(
            guarded(|| Err::<(), _>(Failed::invalid("mine"))),
            Status::InvalidArgument
        );
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
        assert_eq!(guarded(|| Ok(())), Status::Ok);
        assert_eq!(last_error(), "mine");
    }
}
