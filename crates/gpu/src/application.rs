//! Kernels of the application's own, loaded and launched: for those who have no framework that does it.

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUmodule, CUstream};

use crate::device::{Device, GpuError, check};
use crate::kernels::function;

/// Kernels as a compiler has made them: PTX, a cubin or a fat binary. The driver compiles PTX when it is loaded.
pub struct Module {
    device: Arc<Device>,
    module: CUmodule,
}

// SAFETY: modules belong to a context, and every call enters the device first.
unsafe impl Send for Module {}
// SAFETY: the driver's functions may be called by any number of threads.
unsafe impl Sync for Module {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module(gpu:{})", self.device.ordinal())
    }
}

/// How a kernel is launched: its grid, its blocks, and the stream that it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub grid: (u32, u32),
    pub threads: u32,
    pub stream: u64,
}

impl Module {
    /// Kernels as text. A zero within it is the end of the text to the driver, and refused here.
    pub fn load(device: &Arc<Device>, ptx: &str) -> Result<Module, GpuError> {
        let text = CString::new(ptx).map_err(|_| GpuError::BadKernels)?;
        let _entered = device.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends with a zero.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, text.as_ptr().cast())
        })?;
        Ok(Module {
            device: device.clone(),
            module,
        })
    }

    /// Puts a kernel on a stream.
    ///
    /// # Safety
    /// The parameters must be those of the kernel, in its order and of its types; what it touches must stay until it has ended; the module must live until then too, and the
    /// stream must be one of this device's.
    pub unsafe fn launch(&self, name: &str, how: Launch, parameters: &mut [*mut c_void]) -> Result<(), GpuError> {
        let name = CString::new(name).map_err(|_| GpuError::BadKernels)?;
        let _entered = self.device.enter()?;
        // SAFETY: the module is loaded; the rest is the caller's promise.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function(self.module, &name)?,
                how.grid.0,
                how.grid.1,
                1,
                how.threads,
                1,
                1,
                0,
                how.stream as CUstream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: loaded in `load`; whoever launched from it has waited, as was promised.
            unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}
