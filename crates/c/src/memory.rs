//! `weft_memory`: what an agent has registered, and under which names peers reach it.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use weft::{Access, Device, DeviceMemory, HostMemory, Memory, Place};

use crate::agent::AgentHandle;
use crate::arguments::{Plain, duration, structure_or_default, text};
use crate::boundary::{Handle, Object, ask, free, handle_out, on, other};
use crate::failure::Failed;
use crate::status::Status;

#[derive(Debug)]
pub struct MemoryObject {
    pub memory: Memory,
}

impl Object for MemoryObject {
    const NAME: &'static str = "memory";
    const MARK: u64 = 0x7765_6674_6d65_6d6f;
}

pub type MemoryHandle = Handle<MemoryObject>;

/// `weft_memory_options`.
#[derive(Debug)]
#[repr(C)]
pub struct MemoryOptions {
    pub size: usize,
    pub place: PlaceNumber,
    pub device: u32,
    pub numa_node: u32,
}

// SAFETY: numbers.
unsafe impl Plain for MemoryOptions {
    const FIRST_SIZE: usize = 24;
}

/// A `weft_place`, as C hands it in: any number.
pub type PlaceNumber = i32;
/// A `weft_access`, likewise.
pub type AccessNumber = i32;

pub const DRAM: PlaceNumber = 0;
pub const GPU: PlaceNumber = 1;

/// Which place is meant.
enum Where {
    Dram { numa: Option<u32> },
    Gpu { ordinal: u16 },
}

impl Where {
    fn of(options: &MemoryOptions) -> Result<Where, Failed> {
        match options.place {
            DRAM => Ok(Where::Dram {
                numa: options.numa_node.checked_sub(1),
            }),
            GPU => match u16::try_from(options.device) {
                Ok(ordinal) => Ok(Where::Gpu { ordinal }),
                Err(_) => Err(Failed::invalid(format!("there is no device {}", options.device))),
            },
            place => Err(Failed::invalid(format!("there is no place {place}"))),
        }
    }
}

/// Memory that C has, which must not wrap around.
///
/// # Safety
/// The bytes stay there for as long as the memory is in use.
pub unsafe fn host_memory(address: *mut c_void, length: usize) -> Result<HostMemory, Failed> {
    if address.is_null() && length > 0 {
        return Err(Failed::invalid("the address is null"));
    }
    if isize::try_from(length).is_err() || (address as usize).checked_add(length).is_none() {
        return Err(Failed::invalid(format!("{length} bytes at {address:p} cannot be")));
    }
    // SAFETY: as the caller says; it is C's to keep them, so there is no owner.
    Ok(unsafe { HostMemory::from_raw(address.cast(), length, Box::new(())) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_memory_register(
    agent: *mut AgentHandle,
    address: *mut c_void,
    length: usize,
    options: *const MemoryOptions,
    memory: *mut *mut MemoryHandle,
) -> Status {
    // SAFETY: as the header says: a handle, a structure or null, a place for a handle, and bytes that stay.
    unsafe {
        on(agent, |agent| {
            let out = handle_out(memory, "memory")?;
            let options = structure_or_default(options, "options")?;
            let memory = match Where::of(&options)? {
                // Each a registration of its own: one that is given back must not end another one of the same bytes.
                Where::Dram { .. } => {
                    let host = host_memory(address, length)?;
                    agent.agent.register_at(Arc::new(host), Place::Dram { numa: None })?
                }
                Where::Gpu { ordinal } => {
                    let device = Device::open(ordinal).map_err(weft::Error::from)?;
                    let foreign = DeviceMemory::foreign(&device, address as u64, length as u64, Box::new(()));
                    agent.agent.register_device(foreign.map_err(weft::Error::from)?)?
                }
            };
            out.hand_out(MemoryObject { memory });
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_memory_allocate(
    agent: *mut AgentHandle,
    length: usize,
    options: *const MemoryOptions,
    memory: *mut *mut MemoryHandle,
) -> Status {
    // SAFETY: as the header says: a handle, a structure or null, and a place for a handle.
    unsafe {
        on(agent, |agent| {
            let out = handle_out(memory, "memory")?;
            let options = structure_or_default(options, "options")?;
            let memory = match Where::of(&options)? {
                Where::Dram { numa } => agent.agent.allocate_on(length, numa)?,
                Where::Gpu { ordinal } => agent.agent.allocate_device(ordinal, length as u64)?,
            };
            out.hand_out(MemoryObject { memory });
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_memory_address(memory: *const MemoryHandle) -> *mut c_void {
    let address = |object: &MemoryObject| match object.memory.device_address() {
        Some(address) => address as *mut c_void,
        None => object.memory.as_ptr().cast(),
    };
    // SAFETY: as the header says.
    unsafe { ask(memory, null_mut(), address) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_memory_length(memory: *const MemoryHandle) -> u64 {
    // SAFETY: as the header says.
    unsafe { ask(memory, 0, |object| object.memory.len()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_memory_deregister(memory: *mut MemoryHandle, timeout_ns: u64) -> Status {
    // SAFETY: as the header says.
    let released = unsafe {
        on(memory, |object| {
            object.memory.release(duration(timeout_ns))?;
            Ok(())
        })
    };
    if released == Status::Ok {
        // SAFETY: as the header says, nobody uses it any more.
        unsafe { free(memory) };
    }
    released
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_memory_free(memory: *mut MemoryHandle) {
    // SAFETY: as the header says.
    unsafe { free(memory) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_publish(
    agent: *mut AgentHandle,
    name: *const c_char,
    memory: *mut MemoryHandle,
    access: AccessNumber,
) -> Status {
    // SAFETY: as the header says: two handles, and a text that ends.
    unsafe {
        on(agent, |agent| {
            let name = text(name, "name")?;
            let memory = other(memory)?;
            let access = match access {
                1 => Access::READ,
                2 => Access::WRITE,
                3 => Access::READ_WRITE,
                _ => return Err(Failed::invalid(format!("there is no access {access}"))),
            };
            agent.agent.publish(name, &memory.memory, access)?;
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_withdraw(agent: *mut AgentHandle, name: *const c_char) -> Status {
    // SAFETY: as the header says: a handle, and a text that ends.
    unsafe {
        on(agent, |agent| {
            agent.agent.withdraw(text(name, "name")?)?;
            Ok(())
        })
    }
}
