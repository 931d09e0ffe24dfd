//! libibverbs, found at run time and kept for the life of the process.

use std::ffi::CStr;
use std::sync::OnceLock;

use weft_sys::verbs::{self as sys, LoadError};

/// The loaded library. Whoever has one can call it.
///
/// It is never unloaded: its drivers register themselves with it, and some keep threads.
#[derive(Debug, Clone, Copy)]
pub struct Library(&'static sys::Libibverbs);

static LOADED: OnceLock<sys::Libibverbs> = OnceLock::new();

impl Library {
    /// Loads the library, or says why there is none. A failure is not remembered, so that installing it needs no restart.
    pub fn load() -> Result<Self, LoadError> {
        if let Some(loaded) = LOADED.get() {
            return Ok(Self(loaded));
        }
        let table = sys::Libibverbs::load()?;
        Ok(Self(LOADED.get_or_init(|| {
            // SAFETY: takes no argument. It must come before the first registration; where the kernel copies pinned pages for a
            // child by itself, it does nothing. A refusal leaves a `fork` as dangerous as it was, which is no reason not to run.
            unsafe { (table.ibv_fork_init)() };
            table
        })))
    }

    /// The functions.
    pub fn raw(&self) -> &'static sys::Libibverbs {
        self.0
    }

    /// A completion's status in words.
    pub fn describe_status(&self, status: sys::ibv_wc_status) -> &'static str {
        // SAFETY: the function takes any number and returns a string of the library's own, which stays loaded.
        let text = unsafe { (self.0.ibv_wc_status_str)(status) };
        // SAFETY: the status has words that stay loaded with the library, and end with a zero.
        unsafe { words(text) }
    }

    /// An asynchronous event's type in words.
    pub fn describe_event(&self, event: sys::ibv_event_type) -> &'static str {
        // SAFETY: the function takes any number and returns a string of the library's own, which stays loaded.
        let text = unsafe { (self.0.ibv_event_type_str)(event) };
        // SAFETY: the event has words that stay loaded with the library, and end with a zero.
        unsafe { words(text) }
    }
}

/// # Safety
/// `text` is null, or a string that lives as long as the process.
unsafe fn words(text: *const std::ffi::c_char) -> &'static str {
    if text.is_null() {
        return "unknown";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_speaks_or_says_why_it_is_absent() {
        match Library::load() {
            Ok(library) => {
                assert_eq!(library.describe_status(sys::IBV_WC_SUCCESS), "success");
                assert!(!library.describe_event(sys::IBV_EVENT_PORT_ERR).is_empty());
            }
            Err(error) => assert!(error.to_string().contains(sys::LIBRARY_FILE), "{error}"),
        }
    }
}
