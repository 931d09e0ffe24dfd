//! A device of this machine, and why there may be none.

use std::ffi::CStr;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute_enum as Attribute, CUresult, CUstreamCaptureMode_enum as CaptureMode,
};
use thiserror::Error;

/// The oldest driver that takes the kernels as they are shipped, as `cuDriverGetVersion` tells it.
const DRIVER_MIN: i32 = 13000;

/// Why the device did not do it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GpuError {
    #[error("there is no CUDA driver on this machine: libcuda.so.1 cannot be loaded")]
    NoDriver,
    #[error("the CUDA driver is for CUDA {}.{} and at least {}.{} is needed", found / 1000, found % 1000 / 10, DRIVER_MIN / 1000, DRIVER_MIN % 1000 / 10)]
    OldDriver { found: i32 },
    #[error("there is no GPU {ordinal}: this process sees {count}")]
    NoDevice { ordinal: u16, count: i32 },
    #[error("the device has no {bytes} bytes left")]
    OutOfMemory { bytes: u64 },
    #[error("{address:#x} is no memory of GPU {ordinal}, or less than {bytes} bytes of it")]
    NotDeviceMemory { ordinal: u16, address: u64, bytes: u64 },
    #[error("memory of this kind cannot be shared with other processes")]
    NotShareable,
    #[error("a peer has described its memory wrongly")]
    BadExport,
    #[error("this process is a child of the one that opened the device")]
    Forked,
    #[error("the text or the name of a kernel has a zero in it")]
    BadKernels,
    #[error("{call} failed: {name}")]
    Call { call: &'static str, name: String },
}

/// The outcome of a call of the driver, as a result.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), GpuError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver is loaded, since it has just answered; it points `name` to a static string, or leaves it.
    let named = unsafe { sys::cuGetErrorName(result, &mut name) };
    let name = match named == CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: the driver's own string, which ends with a zero.
        true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
        false => format!("{result:?}"),
    };
    Err(GpuError::Call { call, name })
}

/// Loads the driver, once in a process.
fn driver() -> Result<(), GpuError> {
    static LOADED: OnceLock<(u32, Result<(), GpuError>)> = OnceLock::new();
    let here = std::process::id();
    of_process(LOADED.get_or_init(|| (here, load())), here)
}

fn load() -> Result<(), GpuError> {
    // SAFETY: loading the vendor's library runs its constructors, as any CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::NoDriver);
    }
    let mut found = 0;
    // SAFETY: the library is there; both functions are as old as it.
    unsafe {
        check("cuInit", sys::cuInit(0))?;
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut found))?;
    }
    match found < DRIVER_MIN {
        true => Err(GpuError::OldDriver { found }),
        false => Ok(()),
    }
}

/// What was found by a process, as another one may take it: the driver that a parent has loaded has no life in its forked child, and calls there may never return.
fn of_process((process, found): &(u32, Result<(), GpuError>), here: u32) -> Result<(), GpuError> {
    match found {
        Ok(()) if *process != here => Err(GpuError::Forked),
        found => found.clone(),
    }
}

/// Whether there may be devices, without loading anything.
pub fn is_likely() -> bool {
    std::path::Path::new("/dev/nvidiactl").exists()
}

/// How many devices this process sees.
pub fn device_count() -> Result<u16, GpuError> {
    driver()?;
    let mut count = 0;
    // SAFETY: the driver is initialised.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(u16::try_from(count).unwrap_or(0))
}

/// A device, with its primary context: the one that frameworks use too.
pub struct Device {
    ordinal: u16,
    handle: CUdevice,
    context: CUcontext,
    name: String,
    identity: [u8; 16],
    multiprocessors: u32,
    process: u32,
}

// SAFETY: a context belongs to the process; every call makes it current in the thread that calls.
unsafe impl Send for Device {}
// SAFETY: as above, and the driver's functions may be called by any number of threads.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.ordinal, self.name)
    }
}

impl Device {
    /// Opens a device; whoever has it open already shares it.
    pub fn open(ordinal: u16) -> Result<Arc<Device>, GpuError> {
        static OPEN: Mutex<Vec<(u16, Weak<Device>)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = open.iter().find(|(known, _)| *known == ordinal);
        if let Some(device) = known.and_then(|(_, device)| device.upgrade()) {
            drop(device.enter()?);
            return Ok(device);
        }
        let count = device_count()?;
        if ordinal >= count {
            let count = count.into();
            return Err(GpuError::NoDevice { ordinal, count });
        }
        let device = Arc::new(Device::new(ordinal)?);
        open.retain(|(known, _)| *known != ordinal);
        open.push((ordinal, Arc::downgrade(&device)));
        Ok(device)
    }

    /// The device that another process means, whatever number it has there.
    pub fn by_identity(identity: &[u8]) -> Result<Arc<Device>, GpuError> {
        // Opening a device takes memory on it, so only the one that is meant is opened.
        let is_meant = |ordinal: &u16| {
            let (mut handle, mut found) = (0, sys::CUuuid { bytes: [0; 16] });
            // SAFETY: the driver is initialised, since it has counted; the results are of the types that it fills.
            let asked = unsafe {
                sys::cuDeviceGet(&mut handle, i32::from(*ordinal)) == CUresult::CUDA_SUCCESS
                    && sys::cuDeviceGetUuid_v2(&mut found, handle) == CUresult::CUDA_SUCCESS
            };
            asked && found.bytes.map(|byte| byte as u8) == *identity
        };
        match (0..device_count()?).find(is_meant) {
            Some(ordinal) => Device::open(ordinal),
            None => Err(GpuError::BadExport),
        }
    }

    /// The number of the device that memory at an address is of.
    pub fn of_address(address: u64) -> Result<u16, GpuError> {
        driver()?;
        crate::memory::ordinal_of(address).ok_or(GpuError::NotDeviceMemory {
            ordinal: 0,
            address,
            bytes: 0,
        })
    }

    fn new(ordinal: u16) -> Result<Device, GpuError> {
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        let (mut name, mut multiprocessors) = ([0; 128], 0);
        let mut identity = sys::CUuuid { bytes: [0; 16] };
        let wanted = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the driver is initialised and knows the ordinal; the results are as long as is said.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut handle, i32::from(ordinal)))?;
            check(
                "cuDeviceGetName",
                sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, handle),
            )?;
            check(
                "cuDeviceGetAttribute",
                sys::cuDeviceGetAttribute(&mut multiprocessors, wanted, handle),
            )?;
            check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&mut identity, handle))?;
            check(
                "cuDevicePrimaryCtxRetain",
                sys::cuDevicePrimaryCtxRetain(&mut context, handle),
            )?;
        }
        // SAFETY: the driver ends the name with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Ok(Device {
            ordinal,
            handle,
            context,
            name: name.to_string_lossy().into_owned(),
            identity: identity.bytes.map(|byte| byte as u8),
            multiprocessors: multiprocessors as u32,
            process: std::process::id(),
        })
    }

    pub fn ordinal(&self) -> u16 {
        self.ordinal
    }
    /// The same in every process.
    pub fn identity(&self) -> &[u8; 16] {
        &self.identity
    }
    pub fn name(&self) -> &str {
        &self.name
    }
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    pub(crate) fn handle(&self) -> CUdevice {
        self.handle
    }

    /// The driver has no life in a forked child, and calls there may never return.
    pub(crate) fn check_process(&self) -> Result<(), GpuError> {
        match std::process::id() == self.process {
            true => Ok(()),
            false => Err(GpuError::Forked),
        }
    }

    /// Makes the device the one that this thread's calls are about, for as long as the value lives.
    pub(crate) fn enter(&self) -> Result<Entered, GpuError> {
        self.check_process()?;
        let mut capture = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the context is retained for as long as the device is open. What is done here is nobody's graph: neither does it belong into one that another
        // thread captures, nor may it break that.
        unsafe {
            check("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(self.context))?;
            sys::cuThreadExchangeStreamCaptureMode(&mut capture);
        }
        Ok(Entered { capture })
    }
}

/// While it lives, this thread's calls are about a device. Afterwards they are about what they were about before.
#[must_use]
pub(crate) struct Entered {
    capture: CaptureMode,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut before = std::ptr::null_mut();
        // SAFETY: pushed by this thread, and popped by it: the value is not sent.
        unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut self.capture);
            sys::cuCtxPopCurrent_v2(&mut before);
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            // SAFETY: retained once, in `new`.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so() {
        match Device::open(0) {
            Err(GpuError::NoDriver) => {
                assert!(GpuError::NoDriver.to_string().contains("libcuda.so.1"));
                assert_eq!(device_count(), Err(GpuError::NoDriver));
            }
            Err(other) => assert!(
                matches!(
                    other,
                    GpuError::OldDriver { .. } | GpuError::NoDevice { .. } | GpuError::Call { .. }
                ),
                "{other}"
            ),
            Ok(device) => assert!(device.multiprocessors() > 0),
        }
    }

    #[test]
    fn a_driver_is_that_of_the_process_that_has_loaded_it() {
        assert_eq!(of_process(&(7, Ok(())), 7), Ok(()));
        assert_eq!(of_process(&(7, Ok(())), 8), Err(GpuError::Forked));
        let none = Err(GpuError::NoDriver);
        assert_eq!(of_process(&(7, none.clone()), 8), none);
    }

    #[test]
    fn old_drivers_are_named_by_the_version_that_people_know() {
        let words = GpuError::OldDriver { found: 12040 }.to_string();
        assert!(words.contains("CUDA 12.4 ") && words.contains("13.0"), "{words}");
    }
}
