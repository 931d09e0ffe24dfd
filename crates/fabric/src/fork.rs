//! What belongs to this process, and is not its forked child's.
//!
//! A fork copies everything but the threads. The child then has sockets that keep a dead parent's connections open, locks that nobody
//! gives back because their holders are not there, handles of threads that do not exist, and mappings through which it would change what
//! its parent tells its peers. So whatever an agent is made of belongs to the process that made it: a child cannot reach it
//! ([`OfProcess`]), does not end it, and has no descriptor of it ([`NotInherited`]). It can make an agent of its own.
//!
//! Which process this is costs one load from memory: a page that the kernel empties in every child holds a number that the process has
//! given itself.
//!
//! ```
//! use weft_fabric::fork::OfProcess;
//! let held = OfProcess::new(std::sync::Mutex::new(7));
//! assert_eq!(*held.get()?.lock().unwrap(), 7);
//! # Ok::<(), weft_fabric::fork::Forked>(())
//! ```

mod descriptors;
mod life;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use thiserror::Error;

pub use descriptors::NotInherited;
pub use life::Origin;

/// What was asked for was made before a fork, by the parent of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("this was made before a fork, and belongs to the process that made it")]
pub struct Forked;

/// Something that only the process which made it can reach. In a forked child it is not even dropped.
pub struct OfProcess<T> {
    origin: Origin,
    value: ManuallyDrop<T>,
}

impl<T> OfProcess<T> {
    pub fn new(value: T) -> OfProcess<T> {
        OfProcess {
            origin: Origin::here(),
            value: ManuallyDrop::new(value),
        }
    }

    pub fn get(&self) -> Result<&T, Forked> {
        self.origin.check().map(|()| &*self.value)
    }

    pub fn get_mut(&mut self) -> Result<&mut T, Forked> {
        self.origin.check().map(|()| &mut *self.value)
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.origin.is_here() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

impl<T> OfProcess<Arc<T>> {
    /// Whether both are the same thing of the same process. That can be asked everywhere.
    pub fn is_same(&self, other: &OfProcess<Arc<T>>) -> bool {
        self.origin == other.origin && Arc::ptr_eq(&self.value, &other.value)
    }
}

/// The same thing, of the same process, wherever it is cloned.
impl<T> Clone for OfProcess<Arc<T>> {
    fn clone(&self) -> OfProcess<Arc<T>> {
        OfProcess {
            origin: self.origin,
            value: self.value.clone(),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for OfProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Ok(value) => value.fmt(f),
            Err(Forked) => f.write_str("(of another process)"),
        }
    }
}

/// Something that a process has once, made when it is first asked for. A forked child makes its own, and leaves its parent's alone.
pub struct PerProcess<T: 'static> {
    made: AtomicPtr<Made<T>>,
}

struct Made<T> {
    origin: Origin,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    #[expect(clippy::new_without_default, reason = "it is for statics")]
    pub const fn new() -> PerProcess<T> {
        PerProcess {
            made: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Where several threads come first at once, some of what they make is dropped again.
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        let known = self.made.load(Ordering::Acquire);
        // SAFETY: null, or what was leaked below and is never freed.
        if let Some(made) = unsafe { known.as_ref() }
            && made.origin.is_here()
        {
            return &made.value;
        }
        let origin = Origin::here();
        let new = Box::into_raw(Box::new(Made { origin, value: make() }));
        // No lock: a child that was forked while somebody held one would wait for ever.
        match self
            .made
            .compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire)
        {
            // SAFETY: just leaked, and never freed from here on.
            Ok(_) => unsafe { &(*new).value },
            Err(first) => {
                // SAFETY: nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: another thread of this process has leaked it.
                unsafe { &(*first).value }
            }
        }
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PerProcess")
    }
}
