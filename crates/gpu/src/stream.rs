//! Streams of our own, graphs captured from them, and the time between two moments of one: for those who have none from a framework.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{
    self, CUevent, CUevent_flags_enum as EventFlags, CUgraph, CUgraphExec, CUresult, CUstream,
    CUstream_flags_enum as StreamFlags, CUstreamCaptureMode_enum as CaptureMode,
};

use crate::device::{Device, GpuError, check};

/// A stream that waits for no other.
pub struct Stream {
    device: Arc<Device>,
    stream: CUstream,
}

// SAFETY: streams have no thread affinity, and every call enters the device first.
unsafe impl Send for Stream {}
// SAFETY: the driver's functions may be called by any number of threads.
unsafe impl Sync for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream(gpu:{}, {:#x})", self.device.ordinal(), self.handle())
    }
}

impl Stream {
    pub fn new(device: &Arc<Device>) -> Result<Stream, GpuError> {
        let _entered = device.enter()?;
        let mut stream = std::ptr::null_mut();
        let flags = StreamFlags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the device is entered.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Stream {
            device: device.clone(),
            stream,
        })
    }

    /// As the driver and frameworks know it.
    pub fn handle(&self) -> u64 {
        self.stream as u64
    }

    /// Waits until everything on it has ended.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream lives as long as the value.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// What comes on this stream from now on comes after what is on the other now.
    pub fn after(&self, other: &Stream) -> Result<(), GpuError> {
        let moment = Moment::new(&self.device, EventFlags::CU_EVENT_DISABLE_TIMING)?;
        moment.mark(other)?;
        let _entered = self.device.enter()?;
        // SAFETY: both live; the driver keeps what it needs of the event.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(self.stream, moment.event, 0)
        })
    }

    /// What `fill` puts on this stream, and on those that it makes come after it and joins with it again, as a graph; nothing of it runs yet.
    pub fn capture<E: From<GpuError>>(&self, fill: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let entered = self.device.enter()?;
        let mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(self.stream, mode)
        })?;
        let filled = fill();
        let mut graph = std::ptr::null_mut();
        // SAFETY: begun above; the graph, where there is one, is ours.
        let ended = check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(self.stream, &mut graph)
        });
        drop(entered);
        let mut captured = Graph {
            device: self.device.clone(),
            graph,
            ready: std::ptr::null_mut(),
        };
        filled?;
        ended?;
        let _entered = self.device.enter()?;
        // SAFETY: the graph lives as long as the value.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut captured.ready, captured.graph, 0)
        })?;
        Ok(captured)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made in `new`; what is still on it goes on.
            unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// Work that was captured, to be done again and again.
pub struct Graph {
    device: Arc<Device>,
    graph: CUgraph,
    ready: CUgraphExec,
}

// SAFETY: graphs have no thread affinity.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph(gpu:{})", self.device.ordinal())
    }
}

impl Graph {
    /// # Safety
    /// Whatever the captured work touches must still be there when it is done.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        // SAFETY: both live; the rest is the caller's promise.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.ready, stream.stream)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: made by the driver for us, or null; the driver keeps what is still being done.
        unsafe {
            if !self.ready.is_null() {
                sys::cuGraphExecDestroy(self.ready);
            }
            if !self.graph.is_null() {
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

/// A moment of a stream that can be looked back at.
pub struct Moment {
    device: Arc<Device>,
    event: CUevent,
}

// SAFETY: events have no thread affinity.
unsafe impl Send for Moment {}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Moment(gpu:{})", self.device.ordinal())
    }
}

impl Moment {
    /// Not marked yet.
    pub fn unmarked(device: &Arc<Device>) -> Result<Moment, GpuError> {
        Moment::new(device, EventFlags::CU_EVENT_DEFAULT)
    }

    fn new(device: &Arc<Device>, flags: EventFlags) -> Result<Moment, GpuError> {
        let _entered = device.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the device is entered.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
        Ok(Moment {
            device: device.clone(),
            event,
        })
    }

    /// Comes when what is on the stream now has ended.
    pub fn mark(&self, stream: &Stream) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        // SAFETY: both live.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.event, stream.stream)
        })
    }

    /// Whether it has come.
    pub fn has_come(&self) -> Result<bool, GpuError> {
        let _entered = self.device.enter()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("cuEventQuery", other).map(|()| true),
        }
    }

    /// How long it was from that one to this one, both of which have come.
    pub fn since(&self, before: &Moment) -> Result<Duration, GpuError> {
        let _entered = self.device.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both live.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&mut milliseconds, before.event, self.event)
        })?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made in `new`; the driver keeps it for as long as anything waits for it.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
