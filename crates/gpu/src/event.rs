//! A moment in what a caller's stream does.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUevent, CUevent_flags_enum as Flags, CUresult, CUstream, CUstreamCaptureStatus as CaptureStatus,
};

use crate::device::{Device, GpuError, check};

/// Everything that had been put on a stream when the value was made.
pub struct StreamEvent {
    device: Arc<Device>,
    event: CUevent,
}

// SAFETY: events have no thread affinity.
unsafe impl Send for StreamEvent {}
// SAFETY: the driver's functions may be called by any number of threads.
unsafe impl Sync for StreamEvent {}

impl fmt::Debug for StreamEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamEvent(gpu:{})", self.device.ordinal())
    }
}

impl StreamEvent {
    /// Marks what is on a stream now, by the stream's handle: that of a framework, or 0 for the default one.
    ///
    /// # Safety
    /// The handle must be that of a stream of this device.
    pub unsafe fn record(device: &Arc<Device>, stream: u64) -> Result<StreamEvent, GpuError> {
        let _entered = device.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the device is entered.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, Flags::CU_EVENT_DISABLE_TIMING as u32)
        })?;
        let made = StreamEvent {
            device: device.clone(),
            event,
        };
        // SAFETY: the caller's promise.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(event, stream as CUstream)
        })?;
        Ok(made)
    }

    /// Whether the device has come to it. A device that has failed counts as well, since nothing will come after that.
    pub fn has_come(&self) -> bool {
        let Ok(_entered) = self.device.enter() else {
            return false;
        };
        // SAFETY: the event lives as long as the value.
        let found = unsafe { sys::cuEventQuery(self.event) };
        !matches!(
            found,
            CUresult::CUDA_ERROR_NOT_READY
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                | CUresult::CUDA_ERROR_CAPTURED_EVENT
        )
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made in `record`; the driver keeps it for as long as anything waits for it.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// A moment that is set again and again, on one stream after the other.
pub(crate) struct Mark {
    device: Arc<Device>,
    event: CUevent,
}

// SAFETY: events have no thread affinity.
unsafe impl Send for Mark {}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mark(gpu:{})", self.device.ordinal())
    }
}

impl Mark {
    pub fn new(device: &Arc<Device>) -> Result<Mark, GpuError> {
        let _entered = device.enter()?;
        let mut event = std::ptr::null_mut();
        let flags = Flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the device is entered.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Mark {
            device: device.clone(),
            event,
        })
    }

    /// Where the stream is now.
    ///
    /// # Safety
    /// The stream must be one of this device's.
    pub unsafe fn set(&self, stream: u64) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        // SAFETY: the caller's promise.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.event, stream as CUstream)
        })
    }

    /// What comes on the stream from now on comes after the moment.
    ///
    /// # Safety
    /// As for [`set`](Mark::set).
    pub unsafe fn comes_before(&self, stream: u64) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        // SAFETY: the caller's promise.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream as CUstream, self.event, 0)
        })
    }

    /// Which capture of a graph the stream is part of; 0 for none.
    ///
    /// # Safety
    /// As for [`set`](Mark::set).
    pub unsafe fn capture_of(&self, stream: u64) -> Result<u64, GpuError> {
        let _entered = self.device.enter()?;
        let (mut status, mut id) = (CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        let nothing = std::ptr::null_mut();
        // SAFETY: the caller's promise; what is not asked for has no place to be written to.
        check("cuStreamGetCaptureInfo", unsafe {
            sys::cuStreamGetCaptureInfo_v2(
                stream as CUstream,
                &mut status,
                &mut id,
                nothing,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        })?;
        Ok(match status {
            CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => 0,
            _ => id,
        })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made in `new`; the driver keeps it for as long as anything waits for it.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
