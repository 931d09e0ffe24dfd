//! NCCL's interfaces, as its headers of the versions named lay them out.
//!
//! Two versions of the net are served: v11 is what NCCL 2.28 and 2.29 ask for, v12 what 2.30 and later do. Their tables have the same slots; the structs of
//! properties differ. The profiler and the tuner are served as v5, which all of them take. Sizes and offsets are asserted, because nothing else would tell that a layout is not what NCCL has.

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
pub const SUBSYSTEM_PROFILE: c_ulong = 0x4000;

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

/// `ncclProfilerEventDescr_v5_t`: what begins, in what, and a union by its type.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct EventDescription {
    pub kind: u64,
    pub parent: *mut c_void,
    pub rank: c_int,
    pub of: EventOf,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub union EventOf {
    pub coll: CollectiveEvent,
    pub p2p: PointToPointEvent,
    pub proxy_op: ProxyOpEvent,
    pub kernel: KernelEvent,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CollectiveEvent {
    pub sequence: u64,
    pub function: *const c_char,
    pub send: *const c_void,
    pub receive: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: *const c_char,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: *const c_char,
    pub protocol: *const c_char,
    pub group: *mut c_void,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PointToPointEvent {
    pub function: *const c_char,
    pub buffer: *mut c_void,
    pub datatype: *const c_char,
    pub count: usize,
    pub peer: c_int,
    pub channels: u8,
    pub group: *mut c_void,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ProxyOpEvent {
    pub process: c_int,
    pub channel: u8,
    pub peer: c_int,
    pub steps: c_int,
    pub chunk: c_int,
    pub is_send: c_int,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelEvent {
    pub channel: u8,
    pub timer: u64,
}

/// `ncclProfilerEventStateArgs_v5_t`, all of whose members are one word.
#[derive(Clone, Copy)]
#[repr(C)]
pub union EventStateArgs {
    pub timer: u64,
    pub size: usize,
    pub data: *mut c_void,
}

/// `ncclProfiler_v5_t`.
#[derive(Debug)]
#[repr(C)]
pub struct Profiler {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        Option<Logger>,
    ) -> NcclResult,
    pub start_event: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut EventDescription) -> NcclResult,
    pub stop_event: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub record_event_state: unsafe extern "C" fn(*mut c_void, c_int, *mut EventStateArgs) -> NcclResult,
    pub finalize: unsafe extern "C" fn(*mut c_void) -> NcclResult,
}

// SAFETY: as for the table of the net.
unsafe impl Sync for Profiler {}

/// `ncclTuner_v5_t`.
#[derive(Debug)]
#[repr(C)]
pub struct Tuner {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        usize,
        usize,
        Option<Logger>,
        *mut c_void,
        *mut c_void,
    ) -> NcclResult,
    pub get_coll_info: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        usize,
        c_int,
        *mut *mut f32,
        c_int,
        c_int,
        c_int,
        *mut c_int,
    ) -> NcclResult,
    pub finalize: unsafe extern "C" fn(*mut c_void) -> NcclResult,
}

// SAFETY: as for the table of the net.
unsafe impl Sync for Tuner {}

const _: () = {
    assert!(offset_of!(EventDescription, of) == 24);
    assert!(offset_of!(CollectiveEvent, datatype) == 48);
    assert!(offset_of!(CollectiveEvent, algorithm) == 64);
    assert!(size_of::<CollectiveEvent>() == 88);
    assert!(size_of::<EventDescription>() == 112);
    assert!(offset_of!(ProxyOpEvent, peer) == 8);
    assert!(offset_of!(KernelEvent, timer) == 8);
    assert!(size_of::<EventStateArgs>() == 8);
    assert!(size_of::<Profiler>() == 6 * 8);
    assert!(size_of::<Tuner>() == 4 * 8);
};

impl std::fmt::Debug for EventDescription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventDescription")
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for EventOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventOf")
    }
}

impl std::fmt::Debug for EventStateArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventStateArgs")
    }
}
