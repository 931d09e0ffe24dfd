//! The kernels of collectives, loaded once for all teams of a device.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUstream};

use crate::collective::CallView;
use crate::device::{Device, GpuError, check};
use crate::memory::DeviceMemory;
use crate::pinned::Pinned;
use crate::stream::Stream;
use crate::team::TeamView;

const TEXT: &str = include_str!("../kernels/collective.ptx");
/// Of every block, as the kernels have it.
pub(crate) const THREADS: u32 = 256;

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    OneShot,
    TwoShot,
    MovePackets,
    MoveBulk,
    /// Floats, summed, of at most 2, 4 or 8 ranks.
    Sum(Float, Width),
    /// Everything else that is reduced in bulk.
    Other(Reduced),
    RoundTrip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    Two,
    Four,
    Eight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduced {
    F32,
    F16,
    Bf16,
    I32,
}

impl Kernel {
    const ALL: [Kernel; 18] = {
        use Float::{Bf16, F16, F32};
        use Width::{Eight, Four, Two};
        [
            Kernel::OneShot,
            Kernel::TwoShot,
            Kernel::MovePackets,
            Kernel::MoveBulk,
            Kernel::Sum(F32, Two),
            Kernel::Sum(F32, Four),
            Kernel::Sum(F32, Eight),
            Kernel::Sum(F16, Two),
            Kernel::Sum(F16, Four),
            Kernel::Sum(F16, Eight),
            Kernel::Sum(Bf16, Two),
            Kernel::Sum(Bf16, Four),
            Kernel::Sum(Bf16, Eight),
            Kernel::Other(Reduced::F32),
            Kernel::Other(Reduced::F16),
            Kernel::Other(Reduced::Bf16),
            Kernel::Other(Reduced::I32),
            Kernel::RoundTrip,
        ]
    };

    fn name(self) -> String {
        let float = |float| match float {
            Float::F32 => "f32",
            Float::F16 => "f16",
            Float::Bf16 => "bf16",
        };
        match self {
            Kernel::OneShot => "weft_one_shot".to_owned(),
            Kernel::TwoShot => "weft_two_shot".to_owned(),
            Kernel::MovePackets => "weft_move_packets".to_owned(),
            Kernel::MoveBulk => "weft_move_bulk".to_owned(),
            Kernel::RoundTrip => "weft_round_trip".to_owned(),
            Kernel::Sum(of, width) => {
                let ranks = match width {
                    Width::Two => 2,
                    Width::Four => 4,
                    Width::Eight => 8,
                };
                format!("weft_bulk_{}_sum_{ranks}", float(of))
            }
            Kernel::Other(of) => {
                let name = match of {
                    Reduced::F32 => "f32",
                    Reduced::F16 => "f16",
                    Reduced::Bf16 => "bf16",
                    Reduced::I32 => "i32",
                };
                format!("weft_bulk_{name}_other")
            }
        }
    }
}

/// The kernels, on a device.
pub(crate) struct Kernels {
    device: Arc<Device>,
    module: CUmodule,
    functions: Vec<(Kernel, CUfunction)>,
    blocks_a_multiprocessor: u32,
}

// SAFETY: modules belong to a context, and every call enters the device first.
unsafe impl Send for Kernels {}
// SAFETY: the driver's functions may be called by any number of threads.
unsafe impl Sync for Kernels {}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels(gpu:{})", self.device.ordinal())
    }
}

impl Kernels {
    /// Loaded when they are first asked for, and kept while anybody has them: the driver compiles them then, which takes it seconds the first time.
    pub fn shared(device: &Arc<Device>) -> Result<Arc<Kernels>, GpuError> {
        static LOADED: Mutex<Vec<(u16, Weak<Kernels>)>> = Mutex::new(Vec::new());
        // Before the lock, which whoever forked may have held.
        device.check_process()?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = loaded.iter().find(|(ordinal, _)| *ordinal == device.ordinal());
        if let Some(kernels) = known.and_then(|(_, kernels)| kernels.upgrade()) {
            return Ok(kernels);
        }
        let kernels = Arc::new(Kernels::load(device)?);
        kernels.warm_up()?;
        loaded.retain(|(ordinal, _)| *ordinal != device.ordinal());
        loaded.push((device.ordinal(), Arc::downgrade(&kernels)));
        Ok(kernels)
    }

    fn load(device: &Arc<Device>) -> Result<Kernels, GpuError> {
        let _entered = device.enter()?;
        let text = CString::new(TEXT).expect("the kernels are text");
        let mut kernels = Kernels {
            device: device.clone(),
            module: std::ptr::null_mut(),
            functions: Vec::with_capacity(Kernel::ALL.len()),
            blocks_a_multiprocessor: u32::MAX,
        };
        // SAFETY: the text ends with a zero; the result goes to a field of its type.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut kernels.module, text.as_ptr().cast())
        })?;
        for kernel in Kernel::ALL {
            let name = CString::new(kernel.name()).expect("a name");
            let mut fit = 0;
            // SAFETY: the module is loaded, and the function is of it.
            let found = unsafe {
                let found = function(kernels.module, &name)?;
                check(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                    sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut fit, found, THREADS as i32, 0),
                )?;
                found
            };
            kernels.functions.push((kernel, found));
            kernels.blocks_a_multiprocessor = kernels.blocks_a_multiprocessor.min(u32::try_from(fit).unwrap_or(0));
        }
        Ok(kernels)
    }

    /// Launches each once, for one rank and nothing to do. The driver may bring a kernel onto the device at its first launch, and wait for the device to be idle meanwhile; a kernel that is
    /// there already and waits for one that is being brought would never see it.
    fn warm_up(&self) -> Result<(), GpuError> {
        let heap = DeviceMemory::allocate(&self.device, 4096)?;
        heap.zero(heap.len())?;
        let host = Pinned::allocate(&self.device, 128)?;
        let stream = Stream::new(&self.device)?;
        let (mut team, mut call) = (TeamView::alone(heap.address(), host.address()), CallView::nothing());
        let (mut rounds, mut bare, mut took_ns) = (0u32, 0u32, heap.address() + 2048);
        for kernel in Kernel::ALL {
            let team = (&raw mut team).cast();
            let mut parameters: Vec<*mut c_void> = match kernel {
                Kernel::RoundTrip => vec![
                    team,
                    (&raw mut rounds).cast(),
                    (&raw mut bare).cast(),
                    (&raw mut took_ns).cast(),
                ],
                _ => vec![team, (&raw mut call).cast()],
            };
            let threads = if kernel == Kernel::RoundTrip { 1 } else { THREADS };
            // SAFETY: the parameters are those of the kernel; both memories live until the stream has been waited for.
            unsafe { self.launch(kernel, (1, 1), threads, stream.handle(), &mut parameters) }?;
        }
        stream.synchronize()
    }

    /// Blocks of any of the kernels that a multiprocessor takes at once.
    pub fn blocks_a_multiprocessor(&self) -> u32 {
        self.blocks_a_multiprocessor
    }

    /// Puts a kernel on a stream: so many blocks for each of so many ranks.
    ///
    /// # Safety
    /// The parameters must be those of the kernel, in its order and of its types, what it touches must stay until it has ended, and the stream must be one of this device's.
    pub unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: (u32, u32),
        threads: u32,
        stream: u64,
        parameters: &mut [*mut c_void],
    ) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        let found = self.functions.iter().find(|(known, _)| *known == kernel);
        let (_, function) = found.expect("all kernels are loaded");
        // SAFETY: the caller's promise.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                *function,
                grid.0,
                grid.1,
                1,
                threads,
                1,
                1,
                0,
                stream as CUstream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        if !self.module.is_null() {
            // SAFETY: loaded in `load`; whoever had kernels on a stream has waited for them before it let go of these.
            unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// # Safety
/// The module must be loaded.
pub(crate) unsafe fn function(module: CUmodule, name: &CStr) -> Result<CUfunction, GpuError> {
    let mut found = std::ptr::null_mut();
    // SAFETY: the caller's promise.
    check("cuModuleGetFunction", unsafe {
        sys::cuModuleGetFunction(&mut found, module, name.as_ptr())
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_the_text() {
        for kernel in Kernel::ALL {
            let line = format!(".entry {}(", kernel.name());
            assert!(TEXT.contains(&line), "{line}");
        }
        assert_eq!(TEXT.matches(".entry ").count(), Kernel::ALL.len());
        assert!(include_str!("../kernels/meeting.cuh").contains(&format!(" THREADS = {THREADS};")));
    }
}
