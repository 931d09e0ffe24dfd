//! Memory of a device: allocated so that other processes can map it, or borrowed from whoever owns it.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdeviceptr, CUipcMemHandle, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags as Granularity, CUmemAllocationHandleType as HandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
    CUpointer_attribute as PointerAttribute, CUresult,
};

use crate::device::{Device, GpuError, check};

/// What a process needs to reach memory of another, beside the descriptor where there is one.
#[derive(Debug)]
pub struct Export {
    /// What [`DeviceMemory::import`] reads.
    pub bytes: [u8; EXPORT_BYTES],
    pub file: Option<OwnedFd>,
}

/// How long the description of exported memory is.
pub const EXPORT_BYTES: usize = 112;

/// With a descriptor of the allocation.
const BY_FILE: u8 = 1;
/// With a handle that the driver understands.
const BY_HANDLE: u8 = 2;

/// Memory of a device, with a stable address for as long as the value lives.
pub struct DeviceMemory {
    device: Arc<Device>,
    address: CUdeviceptr,
    len: u64,
    backing: Backing,
}

enum Backing {
    /// Mapped here by us: allocated here, or by another process.
    Mapped {
        base: CUdeviceptr,
        reserved: usize,
        handle: CUmemGenericAllocationHandle,
    },
    /// Of another process, opened at the base of its allocation.
    Opened { base: CUdeviceptr },
    /// Somebody else's, alive as long as its owner is.
    Foreign { _owner: Box<dyn Any + Send + Sync> },
}

// SAFETY: an address on a device has no thread affinity, and every call enters the device first.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above; nothing here forms references to the memory.
unsafe impl Sync for DeviceMemory {}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "DeviceMemory(gpu:{}, {:#x}, {})",
            self.device.ordinal(),
            self.address,
            self.len
        )
    }
}

impl DeviceMemory {
    /// Memory that other processes can map. What it holds at first is anything.
    pub fn allocate(device: &Arc<Device>, len: u64) -> Result<DeviceMemory, GpuError> {
        let _entered = device.enter()?;
        let prop = properties(device);
        let mut granularity = 0;
        let wanted = Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the properties are initialised.
        let asked = unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &prop, wanted) };
        check("cuMemGetAllocationGranularity", asked)?;
        let reserved = usize::try_from(len.max(1))
            .ok()
            .and_then(|len| len.checked_next_multiple_of(granularity.max(1)))
            .ok_or(GpuError::OutOfMemory { bytes: len })?;
        let mut handle = 0;
        // SAFETY: as above.
        match unsafe { sys::cuMemCreate(&mut handle, reserved, &prop, 0) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(GpuError::OutOfMemory { bytes: len }),
            other => check("cuMemCreate", other)?,
        }
        DeviceMemory::map(device, handle, reserved, len, true)
    }

    /// Maps an allocation, which is given back in any case.
    fn map(
        device: &Arc<Device>,
        handle: CUmemGenericAllocationHandle,
        reserved: usize,
        len: u64,
        writable: bool,
    ) -> Result<DeviceMemory, GpuError> {
        let mut address = 0;
        // SAFETY: the driver chooses the address.
        let found = unsafe { sys::cuMemAddressReserve(&mut address, reserved, 0, 0, 0) };
        if let Err(error) = check("cuMemAddressReserve", found) {
            // SAFETY: the handle is ours, and nothing is mapped by it.
            unsafe { sys::cuMemRelease(handle) };
            return Err(error);
        }
        // From here on dropping the value undoes what was done; what was not, fails there without harm.
        let memory = DeviceMemory {
            device: device.clone(),
            address,
            len,
            backing: Backing::Mapped {
                base: address,
                reserved,
                handle,
            },
        };
        let access = CUmemAccessDesc {
            location: location(device),
            flags: match writable {
                true => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                false => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            },
        };
        // SAFETY: the range was reserved above, and the handle is of an allocation that is at least as large, or the call fails.
        unsafe {
            check("cuMemMap", sys::cuMemMap(address, reserved, 0, handle, 0))?;
            check("cuMemSetAccess", sys::cuMemSetAccess(address, reserved, &access, 1))?;
        }
        Ok(memory)
    }

    /// Memory of somebody else's. The driver is asked whether it is one of this device's allocations, and large enough.
    ///
    /// # Safety
    /// The memory must stay allocated for as long as `owner` lives.
    pub unsafe fn foreign(
        device: &Arc<Device>,
        address: u64,
        len: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<DeviceMemory, GpuError> {
        let _entered = device.enter()?;
        let wrong = GpuError::NotDeviceMemory {
            ordinal: device.ordinal(),
            address,
            bytes: len,
        };
        let (base, size) = range_of(address).ok_or(wrong.clone())?;
        let inside = address.checked_add(len).is_some_and(|end| end <= base + size);
        if !inside || ordinal_of(address) != Some(device.ordinal()) {
            return Err(wrong);
        }
        Ok(DeviceMemory {
            device: device.clone(),
            address,
            len,
            backing: Backing::Foreign { _owner: owner },
        })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
    pub fn address(&self) -> u64 {
        self.address
    }
    pub fn len(&self) -> u64 {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes in from the host, or out to it, and waits: for their owner, who looks at a few.
    ///
    /// # Panics
    /// Where they are not all within the memory.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuError> {
        assert!(offset.checked_add(from.len() as u64).is_some_and(|end| end <= self.len));
        let _entered = self.device.enter()?;
        // SAFETY: both sides are as long as is said. The copy itself may return when the bytes have left the host and before they have arrived.
        unsafe {
            let copied = sys::cuMemcpyHtoD_v2(self.address + offset, from.as_ptr().cast(), from.len());
            check("cuMemcpyHtoD", copied)?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))
        }
    }

    /// See [`write`](DeviceMemory::write).
    ///
    /// # Panics
    /// As there.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), GpuError> {
        assert!(offset.checked_add(into.len() as u64).is_some_and(|end| end <= self.len));
        let _entered = self.device.enter()?;
        // SAFETY: both sides are as long as is said.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), self.address + offset, into.len())
        })
    }

    /// Makes the first bytes zero, and waits.
    pub(crate) fn zero(&self, bytes: u64) -> Result<(), GpuError> {
        assert!(bytes <= self.len);
        let _entered = self.device.enter()?;
        // SAFETY: within the memory.
        unsafe {
            check("cuMemsetD8", sys::cuMemsetD8_v2(self.address, 0, bytes as usize))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))
        }
    }

    /// How another process on this machine reaches it.
    pub fn export(&self) -> Result<Export, GpuError> {
        let _entered = self.device.enter()?;
        let (base, size) = range_of(self.address).ok_or(GpuError::NotShareable)?;
        let offset = self.address - base;
        let mut bytes = [0; EXPORT_BYTES];
        bytes[8..16].copy_from_slice(&offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&size.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes[96..112].copy_from_slice(self.device.identity());
        if let Some(file) = export_file(self.address) {
            bytes[0] = BY_FILE;
            return Ok(Export {
                bytes,
                file: Some(file),
            });
        }
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the base of an allocation of this process.
        let exported = unsafe { sys::cuIpcGetMemHandle(&mut handle, base) };
        check("cuIpcGetMemHandle", exported).map_err(|_| GpuError::NotShareable)?;
        bytes[0] = BY_HANDLE;
        for (to, from) in bytes[32..96].iter_mut().zip(handle.reserved) {
            *to = from as u8;
        }
        Ok(Export { bytes, file: None })
    }

    /// Which device a description is of.
    pub fn identity_in(bytes: &[u8; EXPORT_BYTES]) -> &[u8] {
        &bytes[96..112]
    }

    /// Memory of another process, by what that says of it, all of which may be wrong: what cannot be mapped as it was described is refused.
    pub fn import(
        bytes: &[u8; EXPORT_BYTES],
        file: Option<BorrowedFd<'_>>,
        writable: bool,
    ) -> Result<DeviceMemory, GpuError> {
        let device = Device::by_identity(DeviceMemory::identity_in(bytes))?;
        DeviceMemory::import_for(&device, bytes, file, writable)
    }

    /// The same for kernels of `device`, which may be another than the one whose memory it is, as long as it reaches that.
    pub fn import_for(
        device: &Arc<Device>,
        bytes: &[u8; EXPORT_BYTES],
        file: Option<BorrowedFd<'_>>,
        writable: bool,
    ) -> Result<DeviceMemory, GpuError> {
        let _entered = device.enter()?;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let (offset, size, len) = (word(8), word(16), word(24));
        let end = offset.checked_add(len).filter(|end| *end <= size);
        let end = end.ok_or(GpuError::BadExport)?;
        match (bytes[0], file) {
            (BY_FILE, Some(file)) => {
                let mut handle = 0;
                let number = file.as_raw_fd() as usize as *mut std::ffi::c_void;
                // SAFETY: the descriptor is open; whatever it is, the driver looks whether it is one of its own.
                let imported = unsafe {
                    sys::cuMemImportFromShareableHandle(
                        &mut handle,
                        number,
                        HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                    )
                };
                check("cuMemImportFromShareableHandle", imported).map_err(|_| GpuError::BadExport)?;
                let size = usize::try_from(size).map_err(|_| GpuError::BadExport)?;
                // The driver maps an allocation whole or not at all.
                let mut memory =
                    DeviceMemory::map(device, handle, size, len, writable).map_err(|_| GpuError::BadExport)?;
                memory.address += offset;
                Ok(memory)
            }
            (BY_HANDLE, None) => {
                let mut handle = CUipcMemHandle { reserved: [0; 64] };
                for (to, from) in handle.reserved.iter_mut().zip(&bytes[32..96]) {
                    *to = *from as _;
                }
                let mut base = 0;
                let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                // SAFETY: whatever the handle is, the driver looks whether it is one of its own.
                let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, lazily) };
                check("cuIpcOpenMemHandle", opened).map_err(|_| GpuError::BadExport)?;
                // Dropping it closes what was opened.
                let mut memory = DeviceMemory {
                    device: device.clone(),
                    address: base,
                    len,
                    backing: Backing::Opened { base },
                };
                // What it holds is what the driver says, not what the peer does.
                let fits = match range_of(base) {
                    Some((found, held)) => found == base && held >= end,
                    None => false,
                };
                memory.address = base.checked_add(offset).filter(|_| fits).ok_or(GpuError::BadExport)?;
                Ok(memory)
            }
            _ => Err(GpuError::BadExport),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // In a forked child nothing of the driver's is touched.
        let Ok(_entered) = self.device.enter() else { return };
        match &self.backing {
            // SAFETY: mapped and reserved in `map`, and nothing uses it any more, since the value is the only one to vouch for the address.
            Backing::Mapped { base, reserved, handle } => unsafe {
                sys::cuMemUnmap(*base, *reserved);
                sys::cuMemAddressFree(*base, *reserved);
                sys::cuMemRelease(*handle);
            },
            // SAFETY: opened once, in `import`.
            Backing::Opened { base } => unsafe {
                sys::cuIpcCloseMemHandle(*base);
            },
            Backing::Foreign { .. } => {}
        }
    }
}

fn location(device: &Device) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: i32::from(device.ordinal()),
    }
}

fn properties(device: &Device) -> CUmemAllocationProp {
    // SAFETY: plain numbers and pointers, for all of which zero is "nothing asked for".
    let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = location(device);
    prop
}

/// The allocation that an address lies in.
fn range_of(address: u64) -> Option<(u64, u64)> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: the driver looks the number up.
    let found = unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, address) };
    (found == CUresult::CUDA_SUCCESS).then_some((base, size as u64))
}

pub(crate) fn ordinal_of(address: u64) -> Option<u16> {
    let mut ordinal: i32 = -1;
    let wanted = PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the result of this attribute is an int.
    let found = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), wanted, address) };
    (found == CUresult::CUDA_SUCCESS).then(|| u16::try_from(ordinal).ok())?
}

/// The descriptor of an allocation that was made to have one.
fn export_file(address: u64) -> Option<OwnedFd> {
    let mut handle = 0;
    // SAFETY: refused where the address is not mapped by such a handle.
    let retained = unsafe { sys::cuMemRetainAllocationHandle(&mut handle, address as *mut std::ffi::c_void) };
    if retained != CUresult::CUDA_SUCCESS {
        return None;
    }
    let mut file: RawFd = -1;
    let kind = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: the result of this kind is an int; the handle was retained above.
    let exported = unsafe {
        let exported = sys::cuMemExportToShareableHandle((&raw mut file).cast(), handle, kind, 0);
        sys::cuMemRelease(handle);
        exported
    };
    // SAFETY: a descriptor that the driver has just made for us.
    (exported == CUresult::CUDA_SUCCESS && file >= 0).then(|| unsafe { OwnedFd::from_raw_fd(file) })
}
