//! What a device is and can do, as its driver says.

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};

use crate::device::{Device, GpuError, check};

/// What matters to Weft of it. What a driver does not know of counts as not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    pub name: String,
    /// As `cuDriverGetVersion` tells it: 13000 is CUDA 13.0.
    pub driver: i32,
    /// 9 and 0 for Hopper.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    pub cache_bytes: u64,
    /// Memory whose descriptors can be handed to other processes.
    pub shared_by_descriptor: bool,
    /// The handles by which memory of others' allocators is shared.
    pub shared_by_handle: bool,
    /// Network cards may read and write its memory, found by a descriptor of it.
    pub dma_buf: bool,
    pub direct_rdma: bool,
    /// Loads and stores that the switches between devices reduce and multiply.
    pub multimem: bool,
    /// Whether this process shares the device with others by MPS, and does not take turns.
    pub is_served_by_mps: bool,
}

impl Device {
    pub fn facts(&self) -> Result<DeviceFacts, GpuError> {
        let _entered = self.enter()?;
        let (mut driver, mut memory_bytes) = (0, 0);
        // SAFETY: the device is open; the results are of the types that the driver fills.
        unsafe {
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut driver))?;
            check(
                "cuDeviceTotalMem",
                sys::cuDeviceTotalMem_v2(&mut memory_bytes, self.handle()),
            )?;
        }
        let number = |attribute| {
            let mut found = 0;
            // SAFETY: as above.
            let asked = unsafe { sys::cuDeviceGetAttribute(&mut found, attribute, self.handle()) };
            check("cuDeviceGetAttribute", asked).map_or(0, |()| u32::try_from(found).unwrap_or(0))
        };
        let has = |attribute| number(attribute) != 0;
        use Attribute as A;
        let virtual_memory = has(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
        Ok(DeviceFacts {
            name: self.name().to_owned(),
            driver,
            capability: (
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            multiprocessors: self.multiprocessors(),
            memory_bytes: memory_bytes as u64,
            cache_bytes: number(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE).into(),
            shared_by_descriptor: virtual_memory
                && has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            shared_by_handle: has(A::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)
                || has(A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
            dma_buf: has(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
            direct_rdma: has(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
            multimem: has(A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED),
            is_served_by_mps: has(A::CU_DEVICE_ATTRIBUTE_MPS_ENABLED),
        })
    }
}
