//! `weft_agent`, and what it is told by other means: metadata.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use weft::settings::{Settings, Sources};
use weft::{Agent, Epoch, Member};

use crate::arguments::{Out, list, text, text_if_any};
use crate::boundary::{Handle, Object, ask, free, guarded, handle_out, on};
use crate::check_version;
use crate::event::Events;
use crate::failure::{Failed, c_string};
use crate::status::Status;

/// An agent, with the texts that C is shown of it.
#[derive(Debug)]
pub struct AgentObject {
    pub agent: Agent,
    pub events: Arc<Events>,
    /// The runtime does not tell a wait that found nothing from one that was ended.
    closed: AtomicBool,
    name: CString,
    address: CString,
    metadata: Vec<u8>,
}

impl Object for AgentObject {
    const NAME: &'static str = "agent";
    const MARK: u64 = 0x7765_6674_6167_656e;
}

pub type AgentHandle = Handle<AgentObject>;

impl AgentObject {
    fn new(agent: Agent) -> AgentObject {
        AgentObject {
            events: Arc::default(),
            closed: AtomicBool::new(false),
            name: c_string(agent.name()),
            address: c_string(agent.address()),
            metadata: Metadata::of(&agent).encode(),
            agent,
        }
    }

    pub fn check_open(&self) -> Result<(), Failed> {
        match self.closed.load(Ordering::Acquire) {
            true => Err(weft::Error::Stopped.into()),
            false => Ok(()),
        }
    }
}

/// What a peer is told of an agent by other means: who it is, which life of it, and where.
#[derive(Debug, PartialEq, Eq)]
pub struct Metadata {
    pub name: String,
    pub member: Member,
}

impl Metadata {
    /// What it begins with, the last byte being the version.
    const MAGIC: &[u8] = b"weft-agent\x01";

    fn of(agent: &Agent) -> Metadata {
        Metadata {
            name: agent.name().to_owned(),
            member: Member {
                address: agent.address(),
                epoch: agent.epoch(),
            },
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = [Metadata::MAGIC, &self.member.epoch.0.to_le_bytes()].concat();
        for text in [&self.name, &self.member.address] {
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes
    }

    /// From bytes that anybody may have written.
    pub fn decode(bytes: &[u8]) -> Result<Metadata, Failed> {
        let decoded = || {
            let rest = bytes.strip_prefix(Metadata::MAGIC)?;
            let (epoch, rest) = rest.split_first_chunk()?;
            let (name, rest) = short_text(rest)?;
            let (address, rest) = short_text(rest)?;
            let epoch = Epoch(u64::from_le_bytes(*epoch));
            rest.is_empty().then_some(Metadata {
                name,
                member: Member { address, epoch },
            })
        };
        decoded().ok_or_else(|| Failed::invalid("these bytes are no agent's metadata, or those of another version"))
    }
}

/// A text with its length before it, and what follows.
fn short_text(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (text, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_start(
    abi_version: u32,
    name: *const c_char,
    settings: *const *const c_char,
    setting_count: usize,
    agent: *mut *mut AgentHandle,
) -> Status {
    guarded(|| {
        // SAFETY: as the header says: texts that end, as many as are counted, and a place for a handle.
        let (out, name, settings) = unsafe {
            (
                handle_out(agent, "agent")?,
                text_if_any(name, "name")?,
                list(settings, setting_count, "settings")?,
            )
        };
        check_version(abi_version)?;
        let mut sources = Sources::of_process().map_err(weft::Error::from)?;
        if let Some(name) = name {
            sources = sources.set("name", name);
        }
        for setting in settings {
            // SAFETY: likewise.
            let setting = unsafe { text(*setting, "a setting") }?;
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| Failed::invalid(format!("{setting:?} is not of the form key=value")))?;
            sources = sources.set(key.trim(), value.trim());
        }
        let settings = Settings::from_sources(&sources).map_err(weft::Error::from)?;
        out.hand_out(AgentObject::new(Agent::start(settings)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_name(agent: *const AgentHandle) -> *const c_char {
    // SAFETY: as the header says.
    unsafe { ask(agent, std::ptr::null(), |agent| agent.name.as_ptr()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_address(agent: *const AgentHandle) -> *const c_char {
    // SAFETY: as the header says.
    unsafe { ask(agent, std::ptr::null(), |agent| agent.address.as_ptr()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_metadata(
    agent: *const AgentHandle,
    bytes: *mut *const c_void,
    length: *mut usize,
) -> Status {
    // SAFETY: as the header says: a handle, and two places.
    unsafe {
        on(agent, |agent| {
            let (bytes, length) = (Out::new(bytes, "bytes")?, Out::new(length, "length")?);
            bytes.put(agent.metadata.as_ptr().cast());
            length.put(agent.metadata.len());
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_event_fd(agent: *mut AgentHandle, fd: *mut c_int) -> Status {
    // SAFETY: as the header says: a handle, and a place.
    unsafe {
        on(agent, |agent| {
            let out = Out::new(fd, "fd")?;
            let descriptor = agent.events.descriptor();
            out.put(descriptor.map_err(|source| weft::Error::System {
                step: "making an event descriptor",
                source: Arc::new(source),
            })?);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_close(agent: *mut AgentHandle) -> Status {
    // SAFETY: as the header says.
    unsafe {
        on(agent, |agent| {
            agent.closed.store(true, Ordering::Release);
            agent.agent.close();
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_free(agent: *mut AgentHandle) {
    // SAFETY: as the header says.
    unsafe { free(agent) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_come_back_and_nothing_else_does() {
        let metadata = Metadata {
            name: "prefill".to_owned(),
            member: Member {
                address: "tcp:127.0.0.1:7000,shared_memory:1".to_owned(),
                epoch: Epoch(0x1234_5678_9abc),
            },
        };
        let bytes = metadata.encode();
        assert_eq!(Metadata::decode(&bytes).unwrap(), metadata);
        for end in 0..bytes.len() {
            assert!(Metadata::decode(&bytes[..end]).is_err(), "the first {end} bytes");
        }
        assert!(Metadata::decode(&[&bytes[..], b"x"].concat()).is_err());
        for at in 0..bytes.len() {
            let mut spoiled = bytes.clone();
            spoiled[at] ^= 0x80;
            // Whatever comes of it, it is no panic, and not the same.
            assert!(Metadata::decode(&spoiled).ok() != Some(Metadata::decode(&bytes).unwrap()));
        }
    }
}
