//! What went wrong in the last call of a thread that failed.
//!
//! It stays with the thread and not with an object, because most calls fail before there is an object, and because a caller in C that must
//! free an error on every way out will forget it on one.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::ptr;

use crate::arguments::{OutStruct, Plain};
use crate::boundary::guarded;
use crate::status::Status;

/// Why a call failed, with all that is known of it.
#[derive(Debug)]
pub struct Failed {
    pub status: Status,
    text: CString,
    peer: Option<CString>,
    transport: Option<CString>,
    os_error: i32,
    bytes_done: u64,
    bytes_total: u64,
    done: Vec<Range>,
    may_have_happened: bool,
    rank: Option<u32>,
}

/// `weft_range`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Range {
    pub leg: u64,
    pub begin: u64,
    pub end: u64,
}

/// `weft_error`.
#[derive(Debug)]
#[repr(C)]
pub struct ErrorDetails {
    pub size: usize,
    pub status: i32,
    pub os_error: i32,
    pub text: *const c_char,
    pub peer: *const c_char,
    pub transport: *const c_char,
    pub bytes_done: u64,
    pub bytes_total: u64,
    pub done: *const Range,
    pub done_count: usize,
    pub may_have_happened: i32,
    pub rank: i32,
}

// SAFETY: numbers and raw pointers, for all of which zero is a value.
unsafe impl Plain for ErrorDetails {
    const FIRST_SIZE: usize = 80;
}

thread_local! {
    static LAST: RefCell<Option<Failed>> = const { RefCell::new(None) };
}

impl Failed {
    pub fn new(status: Status, text: impl Into<String>) -> Failed {
        Failed {
            status,
            text: c_string(text),
            peer: None,
            transport: None,
            os_error: 0,
            bytes_done: 0,
            bytes_total: 0,
            done: Vec::new(),
            may_have_happened: false,
            rank: None,
        }
    }

    pub fn invalid(text: impl Into<String>) -> Failed {
        Failed::new(Status::InvalidArgument, text)
    }

    /// Leaves it with the calling thread. While a thread ends there is nobody left to ask.
    pub fn remember(self) -> Status {
        let status = self.status;
        let _ = LAST.try_with(|last| *last.borrow_mut() = Some(self));
        status
    }
}

impl From<weft::Error> for Failed {
    fn from(error: weft::Error) -> Failed {
        let mut failed = Failed::new(Status::of(&error), error.to_string());
        failed.os_error = error.os_error().unwrap_or(0);
        failed.may_have_happened = error.may_have_happened();
        match &error {
            weft::Error::Transfer(transfer) => {
                failed.peer = Some(c_string(transfer.peer.as_str()));
                failed.transport = Some(c_string(transfer.error.transport));
                failed.bytes_done = transfer.error.bytes_done;
                failed.bytes_total = transfer.error.bytes_total;
                let done = transfer.error.done.iter().map(|(leg, bytes)| Range {
                    leg: *leg as u64,
                    begin: bytes.start,
                    end: bytes.end,
                });
                failed.done = done.collect();
            }
            weft::Error::Atomic(atomic) => {
                failed.peer = Some(c_string(atomic.peer.as_str()));
                failed.transport = Some(c_string(atomic.error.transport));
            }
            weft::Error::PeerLost { peer, .. } => failed.peer = Some(c_string(peer.as_str())),
            weft::Error::Collective(collective) => failed.rank = Some(collective.blamed().0),
            _ => {}
        }
        failed
    }
}

impl From<weft::fork::Forked> for Failed {
    fn from(forked: weft::fork::Forked) -> Failed {
        Failed::new(Status::Forked, forked.to_string())
    }
}

/// A zero inside would cut the text off, and nothing that anybody named should be able to.
pub fn c_string(text: impl Into<String>) -> CString {
    CString::new(text.into().replace('\0', " ")).unwrap_or_default()
}

#[unsafe(no_mangle)]
pub extern "C" fn weft_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().as_ref().map(|failed| failed.text.as_ptr()));
    text.ok().flatten().unwrap_or(c"".as_ptr())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_last_error_details(details: *mut ErrorDetails) -> Status {
    guarded(|| {
        // SAFETY: as the header says, it points to a structure of the size that it names.
        let out = unsafe { OutStruct::new(details, "details") }?;
        let told = LAST.try_with(|last| last.borrow().as_ref().map(ErrorDetails::of));
        let Some(told) = told.ok().flatten() else {
            return Ok(Status::None);
        };
        out.put(told);
        Ok(Status::Ok)
    })
}

impl ErrorDetails {
    fn of(failed: &Failed) -> ErrorDetails {
        let text = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        ErrorDetails {
            size: size_of::<ErrorDetails>(),
            status: failed.status as i32,
            os_error: failed.os_error,
            text: failed.text.as_ptr(),
            peer: text(&failed.peer),
            transport: text(&failed.transport),
            bytes_done: failed.bytes_done,
            bytes_total: failed.bytes_total,
            done: if failed.done.is_empty() {
                ptr::null()
            } else {
                failed.done.as_ptr()
            },
            done_count: failed.done.len(),
            may_have_happened: failed.may_have_happened.into(),
            rank: failed.rank.and_then(|rank| i32::try_from(rank).ok()).unwrap_or(-1),
        }
    }
}
