//! The exported functions, found by name when the library is loaded.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::objects::*;
use super::types::*;

/// The name under which every distribution installs the library; `.so` without a number comes with the development package only.
pub const LIBRARY_FILE: &str = "libibverbs.so.1";

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    #[error("{LIBRARY_FILE} cannot be loaded")]
    Absent(#[source] libloading::Error),
    #[error("{LIBRARY_FILE} is too old: it has no {symbol}")]
    TooOld { symbol: &'static str },
}

macro_rules! table {
    (
        required { $($(#[$required_doc:meta])* fn $required:ident($($required_type:ty),* $(,)?) $(-> $required_return:ty)?;)+ }
        optional { $($(#[$optional_doc:meta])* fn $optional:ident($($optional_type:ty),* $(,)?) $(-> $optional_return:ty)?;)+ }
    ) => {
        /// The exported functions of libibverbs. Those that older libraries lack are optional.
        #[derive(Debug)]
        pub struct Libibverbs {
            $($(#[$required_doc])* pub $required: unsafe extern "C" fn($($required_type),*) $(-> $required_return)?,)+
            $($(#[$optional_doc])* pub $optional: Option<unsafe extern "C" fn($($optional_type),*) $(-> $optional_return)?>,)+
            // The pointers above point into it.
            _library: Library,
        }

        impl Libibverbs {
            fn of(library: Library) -> Result<Self, LoadError> {
                Ok(Self {
                    $($required: {
                        // SAFETY: the symbol has this signature in every version of the library that has it.
                        let found = unsafe { library.get(concat!(stringify!($required), "\0").as_bytes()) };
                        *found.map_err(|_| LoadError::TooOld { symbol: stringify!($required) })?
                    },)+
                    $($optional: {
                        // SAFETY: as above.
                        let found = unsafe { library.get(concat!(stringify!($optional), "\0").as_bytes()) };
                        found.ok().map(|symbol| *symbol)
                    },)+
                    _library: library,
                })
            }
        }
    };
}

impl Libibverbs {
    /// Loads the library. It stays in memory for as long as the table does.
    pub fn load() -> Result<Self, LoadError> {
        // SAFETY: the library's initialisers are those of rdma-core, which every RDMA program runs at its start.
        let library = unsafe { Library::new(LIBRARY_FILE) }.map_err(LoadError::Absent)?;
        Self::of(library)
    }
}

table! {
    required {
        fn ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
        fn ibv_free_device_list(*mut *mut ibv_device);
        fn ibv_get_device_name(*mut ibv_device) -> *const c_char;
        fn ibv_get_device_guid(*mut ibv_device) -> u64;
        fn ibv_open_device(*mut ibv_device) -> *mut ibv_context;
        fn ibv_close_device(*mut ibv_context) -> c_int;
        fn ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
        fn ibv_ack_async_event(*mut ibv_async_event);
        fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        /// Fills only the beginning of the attributes, which is all that old programs know; the inline `ibv_query_port` fills them
        /// whole.
        fn ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        fn ibv_query_gid(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        fn ibv_query_pkey(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
        fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        fn ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
        fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
        fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
        fn ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
        fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        fn ibv_ack_cq_events(*mut ibv_cq, c_uint);
        fn ibv_create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        fn ibv_modify_srq(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
        fn ibv_query_srq(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
        fn ibv_destroy_srq(*mut ibv_srq) -> c_int;
        fn ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        fn ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        fn ibv_query_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        fn ibv_destroy_qp(*mut ibv_qp) -> c_int;
        fn ibv_create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
        fn ibv_init_ah_from_wc(*mut ibv_context, u8, *mut ibv_wc, *mut ibv_grh, *mut ibv_ah_attr) -> c_int;
        fn ibv_destroy_ah(*mut ibv_ah) -> c_int;
        fn ibv_fork_init() -> c_int;
        fn ibv_wc_status_str(ibv_wc_status) -> *const c_char;
        fn ibv_event_type_str(ibv_event_type) -> *const c_char;
        fn ibv_port_state_str(ibv_port_state) -> *const c_char;
    }
    optional {
        /// Memory at an address of the caller's choice, with the access flags that a device may ignore.
        fn ibv_reg_mr_iova2(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        /// What a dma-buf descriptor stands for: memory of a GPU, for one.
        fn ibv_reg_dmabuf_mr(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        fn _ibv_query_gid_ex(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
        /// Whether `fork` needs any preparation at all on this kernel.
        fn ibv_is_fork_initialized() -> c_uint;
    }
}

pub const IBV_FORK_DISABLED: c_uint = 0;
pub const IBV_FORK_ENABLED: c_uint = 1;
pub const IBV_FORK_UNNEEDED: c_uint = 2;
