//! NIXL's side of the boundary: what a plug-in hands over, and what it is handed. Written down here, so that nothing of NIXL is needed to build it.
//!
//! It is the interface of NIXL 1.0 to 1.5. Its version number has stayed 1 while functions were inserted before, so the number alone says nothing:
//! [`interface`](crate::interface) compares the order with that of an installed NIXL.

use std::ffi::{c_char, c_void};

use crate::stdcxx::{CxxMap, CxxString, CxxVector, Pair};

/// `NIXL_PLUGIN_API_VERSION`.
pub const API_VERSION: i32 = 1;

/// `nixl_status_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    InProgress = 1,
    Success = 0,
    NotPosted = -1,
    InvalidParam = -2,
    Backend = -3,
    NotFound = -4,
    Mismatch = -5,
    NotAllowed = -6,
    RepostActive = -7,
    Unknown = -8,
    NotSupported = -9,
    RemoteDisconnect = -10,
    Canceled = -11,
}

/// A `nixl_mem_t`, as it comes: any number.
pub type MemNumber = i32;
pub const DRAM: MemNumber = 0;
pub const VRAM: MemNumber = 1;

/// A `nixl_xfer_op_t`, likewise.
pub type OpNumber = i32;
pub const READ: OpNumber = 0;
pub const WRITE: OpNumber = 1;

/// `nixlBasicDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Descriptor {
    pub address: usize,
    pub len: usize,
    pub device: u64,
}

/// `nixlBlobDesc`.
#[derive(Debug)]
#[repr(C)]
pub struct BlobDescriptor {
    pub bytes: Descriptor,
    pub blob: CxxString,
}

/// `nixlMetaDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MetaDescriptor {
    pub bytes: Descriptor,
    pub metadata: *mut MetadataHead,
}

/// `nixlDescList<nixlMetaDesc>`: only ever read.
#[derive(Debug)]
#[repr(C)]
pub struct MetaDescriptors {
    functions: *const c_void,
    pub place: MemNumber,
    pub list: CxxVector<MetaDescriptor>,
}

/// What every `nixlBackendMD` begins with.
#[derive(Debug)]
#[repr(C)]
pub struct MetadataHead {
    pub functions: *const Destructors,
    pub is_private: bool,
}

/// What every `nixlBackendReqH` begins with.
#[derive(Debug)]
#[repr(C)]
pub struct RequestHead {
    pub functions: *const Destructors,
}

/// The functions of an object that has none but destructors: one that leaves its memory alone, and one that gives it back.
#[derive(Debug)]
#[repr(C)]
pub struct Destructors {
    pub complete: unsafe extern "C" fn(*mut c_void),
    pub deleting: unsafe extern "C" fn(*mut c_void),
}

/// `nixlBackendOptionalArgs`.
#[derive(Debug)]
#[repr(C)]
pub struct OptionalArguments {
    pub notification: CxxString,
    pub has_notification: bool,
    pub custom: CxxString,
}

/// `nixlBackendInitParams`.
#[derive(Debug)]
#[repr(C)]
pub struct InitParams {
    pub local_agent: CxxString,
    pub kind: CxxString,
    pub parameters: *const CxxMap,
    pub progress_thread: bool,
    pub progress_delay_us: u64,
    pub sync_mode: i32,
    pub telemetry: bool,
}

/// What `nixlBackendEngine` begins with, which NIXL reads without asking.
#[derive(Debug)]
#[repr(C)]
pub struct EngineHead {
    pub functions: *const Functions,
    pub kind: CxxString,
    pub parameters: CxxMap,
    pub telemetry: CxxVector<[u64; 2]>,
    /// A `std::mutex`, which is all zeros while nobody holds it.
    pub telemetry_lock: [u64; 5],
    pub failed: bool,
    pub local_agent: CxxString,
    pub telemetry_wanted: bool,
}

/// `nixlBackendPlugin`.
#[derive(Debug)]
#[repr(C)]
pub struct Plugin {
    pub api_version: i32,
    pub create_engine: unsafe extern "C" fn(*const InitParams) -> *mut EngineHead,
    pub destroy_engine: unsafe extern "C" fn(*mut EngineHead),
    pub name: extern "C" fn() -> *const c_char,
    pub version: extern "C" fn() -> *const c_char,
    /// C++ functions that return such a value are handed a place for it.
    pub options: unsafe extern "C" fn(*mut CxxMap) -> *mut CxxMap,
    pub memories: extern "C" fn() -> CxxVector<MemNumber>,
}

/// The virtual functions of an engine after its two destructors, in their order: NIXL calls them by it. Their names are what the linker has for
/// them after the name of the class, which is their types, too.
macro_rules! functions {
    ($($field:ident: $type:ty = $mangled:literal;)*) => {
        #[derive(Debug)]
        #[repr(C)]
        pub struct Functions {
            pub destructors: Destructors,
            $(pub $field: $type,)*
        }

        /// See [`Functions`].
        pub const ORDER: &[&str] = &[$($mangled),*];
    };
}

type This = *mut EngineHead;
type Asks = unsafe extern "C" fn(This) -> bool;
type PreparesOrPosts = unsafe extern "C" fn(
    This,
    *const OpNumber,
    *const MetaDescriptors,
    *const MetaDescriptors,
    *const CxxString,
    *mut *mut RequestHead,
    *const OptionalArguments,
) -> Status;
type Views = unsafe extern "C" fn(This, *const c_void, *mut *mut c_void, *const OptionalArguments) -> Status;
type Names = unsafe extern "C" fn(This, *const CxxString) -> Status;

functions! {
    supports_remote: Asks = "K14supportsRemoteEv";
    supports_local: Asks = "K13supportsLocalEv";
    supports_notifications: Asks = "K13supportsNotifEv";
    memories: unsafe extern "C" fn(This) -> CxxVector<MemNumber> = "K16getSupportedMemsEv";
    register: unsafe extern "C" fn(This, *const BlobDescriptor, *const MemNumber, *mut *mut MetadataHead) -> Status =
        "11registerMemERK12nixlBlobDescRK10nixl_mem_tRP13nixlBackendMD";
    deregister: unsafe extern "C" fn(This, *mut MetadataHead) -> Status = "13deregisterMemEP13nixlBackendMD";
    connect: Names = "7connectERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    disconnect: Names = "10disconnectERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    unload: unsafe extern "C" fn(This, *mut MetadataHead) -> Status = "8unloadMDEP13nixlBackendMD";
    prepare: PreparesOrPosts =
        "K8prepXferERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERP15nixlBackendReqHPK23nixlBackendOptionalArgs";
    post: PreparesOrPosts =
        "K8postXferERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERP15nixlBackendReqHPK23nixlBackendOptionalArgs";
    check: unsafe extern "C" fn(This, *mut RequestHead) -> Status = "K9checkXferEP15nixlBackendReqH";
    release: unsafe extern "C" fn(This, *mut RequestHead) -> Status = "K11releaseReqHEP15nixlBackendReqH";
    view_remote: Views = "K11prepMemViewERK12nixlDescListI18nixlRemoteMetaDescERPvPK23nixlBackendOptionalArgs";
    view_local: Views = "K11prepMemViewERK12nixlDescListI12nixlMetaDescERPvPK23nixlBackendOptionalArgs";
    release_view: unsafe extern "C" fn(This, *mut c_void) = "K14releaseMemViewEPv";
    public_data: unsafe extern "C" fn(This, *const MetadataHead, *mut CxxString) -> Status =
        "K13getPublicDataEPK13nixlBackendMDRNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    connection: unsafe extern "C" fn(This, *mut CxxString) -> Status =
        "K11getConnInfoERNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    load_connection: unsafe extern "C" fn(This, *const CxxString, *const CxxString) -> Status =
        "18loadRemoteConnInfoERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES7_";
    load_remote: unsafe extern "C" fn(
        This,
        *const BlobDescriptor,
        *const MemNumber,
        *const CxxString,
        *mut *mut MetadataHead,
    ) -> Status =
        "12loadRemoteMDERK12nixlBlobDescRK10nixl_mem_tRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERP13nixlBackendMD";
    load_local: unsafe extern "C" fn(This, *mut MetadataHead, *mut *mut MetadataHead) -> Status =
        "11loadLocalMDEP13nixlBackendMDRS1_";
    notifications: unsafe extern "C" fn(This, *mut CxxVector<Pair>) -> Status =
        "9getNotifsERSt6vectorISt4pairINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES7_ESaIS8_EE";
    notify: unsafe extern "C" fn(This, *const CxxString, *const CxxString) -> Status =
        "K8genNotifERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES7_";
    query: unsafe extern "C" fn(This, *const c_void, *mut c_void) -> Status =
        "K8queryMemERK12nixlDescListI12nixlBlobDescERSt6vectorISt8optionalISt13unordered_mapINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESD_St4hashISD_ESt8equal_toISD_ESaISt4pairIKSD_SD_EEEESaISN_EE";
    estimate: unsafe extern "C" fn(
        This,
        *const OpNumber,
        *const MetaDescriptors,
        *const MetaDescriptors,
        *const CxxString,
        *const *mut RequestHead,
        *mut i64,
        *mut i64,
        *mut i32,
        *const c_void,
    ) -> Status =
        "K16estimateXferCostERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKP15nixlBackendReqHRNSt6chrono8durationIlSt5ratioILl1ELl1000000EEEESP_R11nixl_cost_tPK21nixlAgentOptionalArgs";
}

/// What lies before the functions: where the object begins, and its type, which nobody asks for.
#[derive(Debug)]
#[repr(C)]
pub struct Table<F> {
    pub offset_to_top: isize,
    pub type_info: *const c_void,
    pub functions: F,
}

// SAFETY: numbers and addresses of functions; the pointer is null.
unsafe impl<F: Sync> Sync for Table<F> {}

const _: () = assert!(size_of::<Functions>() == (2 + ORDER.len()) * size_of::<usize>());
