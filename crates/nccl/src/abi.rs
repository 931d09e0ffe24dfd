//! NCCL's interfaces, as its headers of the versions named lay them out.
//!
//! Two versions of the net are served: v11 is what NCCL 2.28 and 2.29 ask for, v12 what 2.30 and later do. Their tables have the same slots; the structs of
//! properties differ. Sizes and offsets are asserted, because nothing else would tell that a layout is not what NCCL has.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::mem::{offset_of, size_of};

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct NcclResult(pub c_int);

impl NcclResult {
    pub const SUCCESS: NcclResult = NcclResult(0);
    pub const SYSTEM_ERROR: NcclResult = NcclResult(2);
    pub const INTERNAL_ERROR: NcclResult = NcclResult(3);
    pub const INVALID_ARGUMENT: NcclResult = NcclResult(4);
    pub const INVALID_USAGE: NcclResult = NcclResult(5);
    pub const REMOTE_ERROR: NcclResult = NcclResult(6);
}

/// `ncclDebugLogger_t`: level, subsystems, file, line, and what `printf` takes.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);
/// `ncclProfilerCallback_t`, which the net does not call.
pub type ProfilerCallback = unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> NcclResult;

pub const LOG_WARN: c_int = 2;
pub const LOG_INFO: c_int = 3;
pub const SUBSYSTEM_INIT: c_ulong = 0x1;
pub const SUBSYSTEM_NET: c_ulong = 0x10;
pub const SUBSYSTEM_TUNING: c_ulong = 0x40;

/// The bytes of a handle by which one rank connects to another.
pub const HANDLE_BYTES: usize = 128;
/// Host memory, as `ptrSupport` and `regMr` say it.
pub const PTR_HOST: c_int = 1;
/// Receives that NCCL groups at most.
pub const GROUPED_RECEIVES: usize = 8;

/// `ncclNetVDeviceProps`: v11 has 4 devices, v12 has 8.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct VDeviceProps<const DEVICES: usize> {
    pub ndevs: c_int,
    pub devs: [c_int; DEVICES],
}

/// What the properties of all versions begin with.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PropertiesHead {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}

/// `ncclNetProperties_v11_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PropertiesV11 {
    pub head: PropertiesHead,
    pub vdevice: VDeviceProps<4>,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
    pub max_multi_request_size: c_int,
}

/// `ncclNetProperties_v12_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PropertiesV12 {
    pub head: PropertiesHead,
    pub vdevice: VDeviceProps<8>,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
    pub max_multi_request_size: c_int,
    pub rail_id: i16,
    pub plane_id: i16,
}

/// `ncclNet_v11_t` and `ncclNet_v12_t`, by the struct of properties.
#[derive(Debug)]
#[repr(C)]
pub struct Net<P> {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_void,
        Option<Logger>,
        Option<ProfilerCallback>,
    ) -> NcclResult,
    pub devices: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    pub get_properties: unsafe extern "C" fn(c_int, *mut P) -> NcclResult,
    pub listen: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> NcclResult,
    pub connect:
        unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> NcclResult,
    pub accept: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut c_void) -> NcclResult,
    pub reg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> NcclResult,
    pub reg_mr_dma_buf: Option<
        unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, *mut *mut c_void) -> NcclResult,
    >,
    pub dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult,
    pub isend: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        usize,
        c_int,
        *mut c_void,
        *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub irecv: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut usize,
        *mut c_int,
        *mut *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub iflush: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut c_int,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult,
    pub close_send: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_recv: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_listen: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub get_device_mr: Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> NcclResult>,
    pub irecv_consumed: Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> NcclResult>,
    pub make_v_device: Option<unsafe extern "C" fn(*mut c_int, *mut c_void) -> NcclResult>,
    pub finalize: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub set_net_attr: Option<unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult>,
}

// SAFETY: a table holds functions and the address of a constant, and nobody changes it.
unsafe impl<P> Sync for Net<P> {}

const _: () = {
    assert!(size_of::<PropertiesHead>() == 64);
    assert!(offset_of!(PropertiesHead, latency) == 44);
    assert!(offset_of!(PropertiesV11, max_p2p_bytes) == 88);
    assert!(size_of::<PropertiesV11>() == 112);
    assert!(offset_of!(PropertiesV12, max_p2p_bytes) == 104);
    assert!(offset_of!(PropertiesV12, rail_id) == 124);
    assert!(size_of::<PropertiesV12>() == 128);
    assert!(size_of::<Net<PropertiesV11>>() == 22 * 8);
    assert!(offset_of!(Net<PropertiesV12>, test) == 13 * 8);
    assert!(offset_of!(Net<PropertiesV12>, set_net_attr) == 21 * 8);
};
