//! An open RDMA device, and the protection domains on it.
//!
//! Each value owns what the library made for it and keeps alive what it was made from, so that things end in the order that the
//! library asks for, whoever drops first.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;
use weft_sys::verbs as sys;

use super::library::Library;
use crate::fork::NotInherited;

/// Why a device cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    #[error("the RDMA devices cannot be listed")]
    List(#[source] io::Error),
    #[error("there is no RDMA device `{name}` that the library has a driver for")]
    NoSuchDevice { name: String },
    #[error("{call} failed on `{device}`")]
    Refused {
        device: String,
        call: &'static str,
        #[source]
        source: io::Error,
    },
}

/// An open device.
pub struct Device {
    context: NonNull<sys::ibv_context>,
    library: Library,
    name: String,
    iwarp: bool,
    attributes: sys::ibv_device_attr,
    odp: sys::ibv_odp_caps,
    /// A child that kept them would keep the device's queues alive, and its peers from being told that this process has died.
    descriptors: Option<[NotInherited<OfLibrary>; 2]>,
}

/// A descriptor that the library closes.
struct OfLibrary(RawFd);

impl AsRawFd for OfLibrary {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

// SAFETY: the library guards a context with locks of its own.
unsafe impl Send for Device {}
// SAFETY: those locks order the calls of several threads on one context.
unsafe impl Sync for Device {}

/// Something that happened to a device, out of the order of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceEvent {
    /// The device is gone, or as good as gone: nothing on it completes any more.
    DeviceFatal,
    PortActive {
        port: u8,
    },
    PortDown {
        port: u8,
    },
    /// An address of the port, a partition or its subnet manager changed.
    PortChanged {
        port: u8,
        event: sys::ibv_event_type,
    },
    /// A queue pair failed on its own, or was refused by its peer.
    QueuePair {
        number: u32,
        event: sys::ibv_event_type,
    },
    /// A completion queue lost completions, or a shared receive queue failed or ran low.
    Queue {
        event: sys::ibv_event_type,
    },
}

impl Device {
    /// Opens a device by its name.
    pub fn open(library: Library, name: &str) -> Result<Arc<Device>, DeviceError> {
        let (context, iwarp) = open_context(library, name)?;
        let mut device = Device {
            context,
            library,
            name: name.to_owned(),
            iwarp,
            // SAFETY: plain integers, for which zero is a value.
            attributes: unsafe { MaybeUninit::zeroed().assume_init() },
            odp: sys::ibv_odp_caps::default(),
            descriptors: None,
        };
        // SAFETY: the context is open.
        let (commands, events) = unsafe { ((*device.raw()).cmd_fd, (*device.raw()).async_fd) };
        device.descriptors = Some([commands, events].map(|fd| NotInherited::new(OfLibrary(fd))));
        // SAFETY: the context is open and the answer has a place.
        let rc = unsafe { (library.raw().ibv_query_device)(context.as_ptr(), &mut device.attributes) };
        device.check("ibv_query_device", rc)?;
        device.odp = query_odp(context);
        set_nonblocking(device.async_fd()).map_err(|source| device.refused("fcntl", source))?;
        Ok(Arc::new(device))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn library(&self) -> Library {
        self.library
    }

    /// For calls of the library. Live as long as this value.
    pub fn raw(&self) -> *mut sys::ibv_context {
        self.context.as_ptr()
    }

    /// Its limits.
    pub fn attributes(&self) -> &sys::ibv_device_attr {
        &self.attributes
    }

    /// Whether it speaks iWARP, whose queue pairs are connected in another way.
    pub fn is_iwarp(&self) -> bool {
        self.iwarp
    }

    /// Whether memory can be registered for reliable connections without pinning it.
    pub fn has_on_demand_paging(&self) -> bool {
        const WANTED: u32 = sys::IBV_ODP_SUPPORT_SEND | sys::IBV_ODP_SUPPORT_WRITE | sys::IBV_ODP_SUPPORT_READ;
        self.odp.general_caps & sys::IBV_ODP_SUPPORT != 0 && self.odp.per_transport_caps.rc_odp_caps & WANTED == WANTED
    }

    /// What a port is and does at this moment.
    pub fn port(&self, number: u8) -> Result<sys::ibv_port_attr, DeviceError> {
        let mut attributes = sys::ibv_port_attr::default();
        // SAFETY: the context is open.
        let rc = unsafe { sys::ibv_query_port(self.library.raw(), self.raw(), number, &mut attributes) };
        self.check("ibv_query_port", rc)?;
        Ok(attributes)
    }

    /// Readable whenever [`Device::next_event`] has one.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context and is open as long as that is.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    /// The next event, if there is one. Never blocks.
    pub fn next_event(&self) -> Result<Option<DeviceEvent>, DeviceError> {
        let mut event = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: the context is open, and the event has a place.
        let rc = unsafe { (self.library.raw().ibv_get_async_event)(self.raw(), event.as_mut_ptr()) };
        if rc != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(self.refused("ibv_get_async_event", error)),
            };
        }
        // SAFETY: the call succeeded, and all of it was defined before.
        let mut event = unsafe { event.assume_init() };
        // SAFETY: an event that has just been taken, and is not acknowledged yet.
        let told = unsafe { describe(&event) };
        // SAFETY: each event is acknowledged once; what it points to may go away from here on.
        unsafe { (self.library.raw().ibv_ack_async_event)(&mut event) };
        Ok(Some(told))
    }

    pub(super) fn refused(&self, call: &'static str, source: io::Error) -> DeviceError {
        DeviceError::Refused {
            device: self.name.clone(),
            call,
            source,
        }
    }

    /// For calls that return an error number, or -1 and leave it in `errno`.
    pub(super) fn check(&self, call: &'static str, rc: i32) -> Result<(), DeviceError> {
        match rc {
            0 => Ok(()),
            1.. => Err(self.refused(call, io::Error::from_raw_os_error(rc))),
            _ => Err(self.refused(call, io::Error::last_os_error())),
        }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.async_fd()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        drop(self.descriptors.take());
        // SAFETY: everything that was made on the context holds this value, so nothing is left of it.
        unsafe { (self.library.raw().ibv_close_device)(self.raw()) };
    }
}

/// What bounds who may touch what: queue pairs reach only memory of their own domain.
pub struct ProtectionDomain {
    domain: NonNull<sys::ibv_pd>,
    device: Arc<Device>,
}

// SAFETY: the library guards a domain with locks of its own.
unsafe impl Send for ProtectionDomain {}
// SAFETY: those locks order the calls of several threads on one domain.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub fn new(device: &Arc<Device>) -> Result<Arc<ProtectionDomain>, DeviceError> {
        // SAFETY: the context is open.
        let domain = unsafe { (device.library.raw().ibv_alloc_pd)(device.raw()) };
        let domain = NonNull::new(domain).ok_or_else(|| device.refused("ibv_alloc_pd", io::Error::last_os_error()))?;
        Ok(Arc::new(ProtectionDomain {
            domain,
            device: Arc::clone(device),
        }))
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// For calls of the library. Live as long as this value.
    pub fn raw(&self) -> *mut sys::ibv_pd {
        self.domain.as_ptr()
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProtectionDomain({})", self.device.name)
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: everything that was made in the domain holds this value, so nothing is left of it.
        unsafe { (self.device.library.raw().ibv_dealloc_pd)(self.raw()) };
    }
}

/// The device list of the library, for as long as it is looked at.
struct DeviceList {
    library: Library,
    list: *mut *mut sys::ibv_device,
    len: usize,
}

impl DeviceList {
    fn of(library: Library) -> Result<DeviceList, DeviceError> {
        let mut count = 0;
        // SAFETY: the count has a place.
        let list = unsafe { (library.raw().ibv_get_device_list)(&mut count) };
        if list.is_null() {
            return Err(DeviceError::List(io::Error::last_os_error()));
        }
        let len = usize::try_from(count).unwrap_or(0);
        Ok(DeviceList { library, list, len })
    }

    fn devices(&self) -> impl Iterator<Item = *mut sys::ibv_device> {
        // SAFETY: the library made a list of this many pointers, and it is freed no earlier than this value is dropped.
        (0..self.len).map(|index| unsafe { *self.list.add(index) })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library and is freed once. Opened devices stay.
        unsafe { (self.library.raw().ibv_free_device_list)(self.list) };
    }
}

/// The context, and whether the device speaks iWARP.
fn open_context(library: Library, name: &str) -> Result<(NonNull<sys::ibv_context>, bool), DeviceError> {
    let list = DeviceList::of(library)?;
    let is_named = |device: &*mut sys::ibv_device| {
        // SAFETY: a device of the list, whose name is a C string in it.
        let found = unsafe { CStr::from_ptr((library.raw().ibv_get_device_name)(*device)) };
        found.to_bytes() == name.as_bytes()
    };
    let device = list
        .devices()
        .find(is_named)
        .ok_or_else(|| DeviceError::NoSuchDevice { name: name.to_owned() })?;
    // SAFETY: a device of the list.
    let context = unsafe { (library.raw().ibv_open_device)(device) };
    let context = NonNull::new(context).ok_or_else(|| DeviceError::Refused {
        device: name.to_owned(),
        call: "ibv_open_device",
        source: io::Error::last_os_error(),
    })?;
    // SAFETY: a device of the list.
    let iwarp = unsafe { (*device).transport_type } == sys::IBV_TRANSPORT_IWARP;
    Ok((context, iwarp))
}

/// What the device can page on demand: nothing, where it does not say.
fn query_odp(context: NonNull<sys::ibv_context>) -> sys::ibv_odp_caps {
    let mut attributes = MaybeUninit::<sys::ibv_device_attr_ex>::zeroed();
    // SAFETY: plain integers, for which zero is a value.
    let attributes = unsafe { attributes.assume_init_mut() };
    // SAFETY: the context is open.
    match unsafe { sys::ibv_query_device_ex(context.as_ptr(), attributes) } {
        Some(0) => attributes.odp_caps,
        _ => sys::ibv_odp_caps::default(),
    }
}

/// # Safety
/// The event was taken from the library and is not acknowledged yet.
unsafe fn describe(event: &sys::ibv_async_event) -> DeviceEvent {
    // SAFETY: for the types below that are about a port, this is the member that the library fills.
    let port = || u8::try_from(unsafe { event.element.port_num }).unwrap_or(0);
    match event.event_type {
        sys::IBV_EVENT_DEVICE_FATAL => DeviceEvent::DeviceFatal,
        sys::IBV_EVENT_PORT_ACTIVE => DeviceEvent::PortActive { port: port() },
        sys::IBV_EVENT_PORT_ERR => DeviceEvent::PortDown { port: port() },
        sys::IBV_EVENT_LID_CHANGE
        | sys::IBV_EVENT_PKEY_CHANGE
        | sys::IBV_EVENT_SM_CHANGE
        | sys::IBV_EVENT_CLIENT_REREGISTER
        | sys::IBV_EVENT_GID_CHANGE => DeviceEvent::PortChanged {
            port: port(),
            event: event.event_type,
        },
        sys::IBV_EVENT_QP_FATAL
        | sys::IBV_EVENT_QP_REQ_ERR
        | sys::IBV_EVENT_QP_ACCESS_ERR
        | sys::IBV_EVENT_COMM_EST
        | sys::IBV_EVENT_SQ_DRAINED
        | sys::IBV_EVENT_PATH_MIG
        | sys::IBV_EVENT_PATH_MIG_ERR
        | sys::IBV_EVENT_QP_LAST_WQE_REACHED => DeviceEvent::QueuePair {
            // SAFETY: for these types the library fills this member, and destroys no queue pair with an event outstanding.
            number: unsafe { (*event.element.qp).qp_num },
            event: event.event_type,
        },
        _ => DeviceEvent::Queue {
            event: event.event_type,
        },
    }
}

pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: a plain call on an open descriptor.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    // SAFETY: the descriptor is still open, and flags are all that is handed over.
    if flags < 0 || unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
