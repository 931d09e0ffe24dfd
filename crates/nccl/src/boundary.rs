//! What every call of NCCL goes through on its way in and out: no panic gets out, and what went wrong is said in NCCL's own log.

use std::any::Any;
use std::ffi::{CString, c_int, c_ulong};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use weft::matched::ChannelError;

use crate::abi::{LOG_INFO, LOG_WARN, Logger, NcclResult, SUBSYSTEM_INIT, SUBSYSTEM_NET};

/// Why a call failed, as NCCL and its log are told.
#[derive(Debug)]
pub struct Failed {
    pub result: NcclResult,
    pub text: String,
}

impl Failed {
    pub fn new(result: NcclResult, text: impl Into<String>) -> Failed {
        let text = text.into();
        Failed { result, text }
    }
    pub fn argument(text: impl Into<String>) -> Failed {
        Failed::new(NcclResult::INVALID_ARGUMENT, text)
    }
}

impl From<ChannelError> for Failed {
    fn from(error: ChannelError) -> Failed {
        let result = match &error {
            error if error.is_usage() => NcclResult::INVALID_USAGE,
            ChannelError::NotTaken(_) => NcclResult::SYSTEM_ERROR,
            _ => NcclResult::REMOTE_ERROR,
        };
        Failed::new(result, error.to_string())
    }
}

impl From<weft::Error> for Failed {
    fn from(error: weft::Error) -> Failed {
        Failed::new(NcclResult::SYSTEM_ERROR, error.to_string())
    }
}

static LOGGER: Mutex<Option<Logger>> = Mutex::new(None);

/// Where to say things from now on.
pub fn log_to(logger: Option<Logger>) {
    if logger.is_some() {
        *LOGGER.lock().unwrap_or_else(PoisonError::into_inner) = logger;
    }
}

/// Says something in NCCL's log, which shows it as `NCCL_DEBUG` has it.
pub fn log(level: c_int, subsystem: c_ulong, text: &str) {
    let logger = *LOGGER.lock().unwrap_or_else(PoisonError::into_inner);
    let (Some(logger), Ok(text)) = (logger, CString::new(text.replace('\0', " "))) else {
        return;
    };
    // SAFETY: NCCL gave us its logger, whose arguments these are; the format takes one string, and all strings end with a zero.
    unsafe { logger(level, subsystem, c"weft".as_ptr(), 0, c"%s".as_ptr(), text.as_ptr()) };
}

pub fn inform(text: &str) {
    log(LOG_INFO, SUBSYSTEM_INIT | SUBSYSTEM_NET, text);
}

pub fn warn(text: &str) {
    log(LOG_WARN, SUBSYSTEM_NET, text);
}

/// Runs the body of a call. A panic ends here.
pub fn guarded(what: &str, body: impl FnOnce() -> Result<(), Failed>) -> NcclResult {
    let ended = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(&*panic)));
    match ended {
        Ok(()) => NcclResult::SUCCESS,
        Err(Failed { result, text }) => {
            // Nor may one out of the telling.
            let told = || warn(&format!("weft: {what}: {text}"));
            let _ = catch_unwind(AssertUnwindSafe(told));
            result
        }
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Failed {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    let text = text.unwrap_or_else(|| "no reason was given".to_owned());
    Failed::new(
        NcclResult::INTERNAL_ERROR,
        format!("Weft panicked, which is a mistake in it: {text}"),
    )
}
