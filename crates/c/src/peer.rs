//! `weft_peer` and `weft_region`: who is there, what it has published, and operations on its words.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Arc;

use weft::{AtomicBuilder, Peer, Remote};

use crate::agent::{AgentHandle, AgentObject, Metadata};
use crate::arguments::{Out, duration, duration_if_any, list, text};
use crate::boundary::{Handle, Object, ask, free, handle_out, on, other};
use crate::event::Events;
use crate::failure::{Failed, c_string};
use crate::status::Status;

#[derive(Debug)]
pub struct PeerObject {
    pub peer: Peer,
    pub events: Arc<Events>,
    name: CString,
}

impl Object for PeerObject {
    const NAME: &'static str = "peer";
    const MARK: u64 = 0x7765_6674_7065_6572;
}

pub type PeerHandle = Handle<PeerObject>;

#[derive(Debug)]
pub struct RegionObject {
    pub remote: Remote,
}

impl Object for RegionObject {
    const NAME: &'static str = "region";
    const MARK: u64 = 0x7765_6674_7265_6769;
}

pub type RegionHandle = Handle<RegionObject>;

impl PeerObject {
    pub fn new(peer: Peer, events: &Arc<Events>) -> PeerObject {
        PeerObject {
            name: c_string(peer.name()),
            events: events.clone(),
            peer,
        }
    }
}

/// Connects, in whichever way.
///
/// # Safety
/// A handle, and a place for one.
unsafe fn connect(
    agent: *const AgentHandle,
    peer: *mut *mut PeerHandle,
    connect: impl FnOnce(&AgentObject) -> Result<Peer, Failed>,
) -> Status {
    // SAFETY: as the caller says.
    unsafe {
        on(agent, |agent| {
            let out = handle_out(peer, "peer")?;
            out.hand_out(PeerObject::new(connect(agent)?, &agent.events));
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_connect(
    agent: *mut AgentHandle,
    address: *const c_char,
    timeout_ns: u64,
    peer: *mut *mut PeerHandle,
) -> Status {
    // SAFETY: as the header says: a handle, a text that ends, and a place for a handle.
    unsafe {
        connect(agent, peer, |agent| {
            let address = text(address, "address")?;
            Ok(agent.agent.connect_within(address, duration(timeout_ns))?)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_connect_metadata(
    agent: *mut AgentHandle,
    bytes: *const c_void,
    length: usize,
    timeout_ns: u64,
    peer: *mut *mut PeerHandle,
) -> Status {
    // SAFETY: as the header says: a handle, so many bytes, and a place for a handle.
    unsafe {
        connect(agent, peer, |agent| {
            let Metadata { name, member } = Metadata::decode(list(bytes.cast(), length, "bytes")?)?;
            Ok(agent.agent.connect_life(&name, &member, duration(timeout_ns))?)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_connect_named(
    agent: *mut AgentHandle,
    name: *const c_char,
    timeout_ns: u64,
    peer: *mut *mut PeerHandle,
) -> Status {
    // SAFETY: as the header says: a handle, a text that ends, and a place for a handle.
    unsafe {
        connect(agent, peer, |agent| {
            let name = text(name, "name")?;
            Ok(agent.agent.connect_named(name, duration(timeout_ns))?)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_peer_name(peer: *const PeerHandle) -> *const c_char {
    // SAFETY: as the header says.
    unsafe { ask(peer, std::ptr::null(), |peer| peer.name.as_ptr()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_peer_is_connected(peer: *const PeerHandle) -> c_int {
    // SAFETY: as the header says.
    unsafe { ask(peer, 0, |peer| peer.peer.is_connected().into()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_peer_region(
    peer: *mut PeerHandle,
    name: *const c_char,
    timeout_ns: u64,
    region: *mut *mut RegionHandle,
) -> Status {
    // SAFETY: as the header says: a handle, a text that ends, and a place for a handle.
    unsafe {
        on(peer, |peer| {
            let out = handle_out(region, "region")?;
            let remote = peer.peer.region(text(name, "name")?, duration(timeout_ns))?;
            out.hand_out(RegionObject { remote });
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_peer_notify(peer: *mut PeerHandle, payload: *const c_void, length: usize) -> Status {
    // SAFETY: as the header says: a handle, and so many bytes.
    unsafe {
        on(peer, |peer| {
            peer.peer.notify(list(payload.cast(), length, "payload")?)?;
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_peer_disconnect(peer: *mut PeerHandle) -> Status {
    // SAFETY: as the header says.
    unsafe {
        on(peer, |peer| {
            peer.peer.disconnect();
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_peer_free(peer: *mut PeerHandle) {
    // SAFETY: as the header says.
    unsafe { free(peer) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_region_length(region: *const RegionHandle) -> u64 {
    // SAFETY: as the header says.
    unsafe { ask(region, 0, |region| region.remote.len()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_region_free(region: *mut RegionHandle) {
    // SAFETY: as the header says.
    unsafe { free(region) }
}

/// Carries an operation on a word out, and tells what the word held.
///
/// # Safety
/// Two handles, and a place for a number.
unsafe fn operate(
    peer: *const PeerHandle,
    region: *const RegionHandle,
    deadline_ns: u64,
    before: *mut u64,
    describe: impl for<'a> FnOnce(&'a Peer, &Remote) -> AtomicBuilder<'a>,
) -> Status {
    // SAFETY: as the caller says.
    unsafe {
        on(peer, |peer| {
            let out = Out::new(before, "before")?;
            let operation = describe(&peer.peer, &other(region)?.remote);
            let held = match duration_if_any(deadline_ns) {
                Some(deadline) => operation.deadline(deadline).wait(),
                None => operation.wait(),
            };
            out.put(held?);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_fetch_add(
    peer: *mut PeerHandle,
    region: *const RegionHandle,
    offset: u64,
    value: u64,
    deadline_ns: u64,
    before: *mut u64,
) -> Status {
    // SAFETY: as the header says: two handles, and a place.
    unsafe {
        operate(peer, region, deadline_ns, before, |peer, remote| {
            peer.fetch_add(remote, offset, value)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_compare_swap(
    peer: *mut PeerHandle,
    region: *const RegionHandle,
    offset: u64,
    expected: u64,
    desired: u64,
    deadline_ns: u64,
    before: *mut u64,
) -> Status {
    // SAFETY: as the header says: two handles, and a place.
    unsafe {
        operate(peer, region, deadline_ns, before, |peer, remote| {
            peer.compare_swap(remote, offset, expected, desired)
        })
    }
}
