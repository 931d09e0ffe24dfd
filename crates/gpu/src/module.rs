//! Kernels that whole applications may do without, loaded when somebody first wants them: each text of PTX once for a device.

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUstream};

use crate::device::{Device, GpuError, check};
use crate::kernels::function;
use crate::memory::DeviceMemory;
use crate::pinned::Pinned;
use crate::stream::Stream;
use crate::team::{Team, TeamView};

/// A text, and the kernels in it.
#[derive(Debug)]
pub(crate) struct Text {
    pub ptx: &'static str,
    pub kernels: &'static [&'static str],
}

/// How a kernel is launched: so many blocks for each of so many ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// The place of the kernel in its text.
    pub kernel: usize,
    pub blocks: u32,
    pub ranks: u32,
    pub threads: u32,
    pub shared_bytes: u32,
}

/// The kernels of a text, on a device.
pub(crate) struct Module {
    device: Arc<Device>,
    text: &'static Text,
    module: CUmodule,
    functions: Vec<CUfunction>,
}

// SAFETY: modules belong to a context, and every call enters the device first.
unsafe impl Send for Module {}
// SAFETY: the driver's functions may be called by any number of threads.
unsafe impl Sync for Module {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module(gpu:{}, {:?})", self.device.ordinal(), self.text.kernels)
    }
}

impl Module {
    /// Loaded when it is first asked for, and kept while anybody has it. `nothing` is what every kernel of the text takes after the team for a call of nothing: each is launched so, once, before
    /// it is given out, because the driver may wait for an idle device when it brings a kernel there, and a kernel that is there may be waiting for that one.
    pub fn shared<View: Copy>(
        device: &Arc<Device>,
        text: &'static Text,
        nothing: View,
    ) -> Result<Arc<Module>, GpuError> {
        static LOADED: Mutex<Vec<(u16, &'static Text, Weak<Module>)>> = Mutex::new(Vec::new());
        // Before the lock, which whoever forked may have held.
        device.check_process()?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |ordinal: u16, other: &'static Text| ordinal == device.ordinal() && std::ptr::eq(other, text);
        let known = loaded.iter().find(|(ordinal, other, _)| same(*ordinal, other));
        if let Some(module) = known.and_then(|(_, _, module)| module.upgrade()) {
            return Ok(module);
        }
        let module = Arc::new(Module::load(device, text)?);
        module.warm_up(nothing)?;
        loaded.retain(|(ordinal, other, _)| !same(*ordinal, other));
        loaded.push((device.ordinal(), text, Arc::downgrade(&module)));
        Ok(module)
    }

    fn load(device: &Arc<Device>, text: &'static Text) -> Result<Module, GpuError> {
        let _entered = device.enter()?;
        let ptx = CString::new(text.ptx).expect("the kernels are text");
        let mut module = Module {
            device: device.clone(),
            text,
            module: std::ptr::null_mut(),
            functions: Vec::with_capacity(text.kernels.len()),
        };
        // SAFETY: the text ends with a zero; the result goes to a field of its type.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module.module, ptx.as_ptr().cast())
        })?;
        for name in text.kernels {
            let name = CString::new(*name).expect("a name");
            // SAFETY: the module is loaded.
            module.functions.push(unsafe { function(module.module, &name) }?);
        }
        Ok(module)
    }

    fn warm_up<View: Copy>(&self, nothing: View) -> Result<(), GpuError> {
        let heap = DeviceMemory::allocate(&self.device, 4096)?;
        heap.zero(heap.len())?;
        let host = Pinned::allocate(&self.device, 128)?;
        let stream = Stream::new(&self.device)?;
        for kernel in 0..self.functions.len() {
            let launch = Launch {
                kernel,
                blocks: 1,
                ranks: 1,
                threads: 256,
                shared_bytes: 0,
            };
            let team = TeamView::alone(heap.address(), host.address());
            // SAFETY: a call of nothing; both memories live until the stream has been waited for.
            unsafe { self.launch(launch, stream.handle(), team, nothing) }?;
        }
        stream.synchronize()
    }

    /// Blocks of a kernel, of so many threads and so much shared memory, that a rank of a team launches at most: as large a share of the device as the team has for its collectives.
    pub fn blocks_max(&self, team: &Team, kernel: usize, threads: u32, shared_bytes: u32) -> Result<u32, GpuError> {
        let _entered = self.device.enter()?;
        let mut fit = 0;
        // SAFETY: a function of the module.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut fit,
                self.functions[kernel],
                threads as i32,
                shared_bytes as usize,
            )
        })?;
        Ok(share(
            team.blocks_max(),
            u32::try_from(fit).unwrap_or(0),
            team.kernels().blocks_a_multiprocessor(),
        ))
    }

    /// Puts a kernel on a stream.
    ///
    /// # Safety
    /// The view must be what the kernel takes after the team, what it touches must stay until it has ended, and the stream must be one of this device's.
    pub unsafe fn launch<View: Copy>(
        &self,
        launch: Launch,
        stream: u64,
        mut team: TeamView,
        mut view: View,
    ) -> Result<(), GpuError> {
        let mut parameters: [*mut c_void; 2] = [(&raw mut team).cast(), (&raw mut view).cast()];
        let _entered = self.device.enter()?;
        // SAFETY: the caller's promise.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.functions[launch.kernel],
                launch.blocks,
                launch.ranks,
                1,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                stream as CUstream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// Of kernels of which `fit` blocks fit on a multiprocessor, what a team may have that may have so many `blocks` of others of which `others` fit.
fn share(blocks: u32, fit: u32, others: u32) -> u32 {
    (blocks * fit / others.max(1)).clamp(1, crate::layout::BLOCKS_MAX as u32)
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        if !self.module.is_null() {
            // SAFETY: loaded in `load`; none of its kernels is on a stream any more once the device has done all that it has.
            unsafe {
                sys::cuCtxSynchronize();
                sys::cuModuleUnload(self.module);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_device_is_never_exceeded() {
        assert_eq!(share(49, 3, 3), 49);
        assert_eq!(share(49, 1, 3), 16);
        assert_eq!(share(1, 1, 3), 1);
        assert_eq!(share(198, 4, 3), 256);
        assert_eq!(share(49, 0, 3), 1);
    }
}
