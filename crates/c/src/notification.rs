//! `weft_notification`: what peers have told an agent, as values that are taken.

use std::ffi::c_void;
use std::sync::Arc;

use weft::Notification;

use crate::agent::AgentHandle;
use crate::arguments::{Out, duration};
use crate::boundary::{Handle, Object, free, handle_out, on};
use crate::event::Events;
use crate::peer::{PeerHandle, PeerObject};
use crate::status::Status;

#[derive(Debug)]
pub struct NotificationObject {
    notification: Notification,
    events: Arc<Events>,
}

impl Object for NotificationObject {
    const NAME: &'static str = "notification";
    const MARK: u64 = 0x7765_6674_6e6f_7469;
}

pub type NotificationHandle = Handle<NotificationObject>;

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_agent_notification(
    agent: *mut AgentHandle,
    timeout_ns: u64,
    notification: *mut *mut NotificationHandle,
) -> Status {
    // SAFETY: as the header says: a handle, and a place for one.
    unsafe {
        on(agent, |agent| {
            let out = handle_out(notification, "notification")?;
            agent.check_open()?;
            let found = match timeout_ns {
                0 => agent.agent.try_notification(),
                _ => agent.agent.next_notification(duration(timeout_ns)),
            };
            // Whoever is told that there is none is told by the descriptor when there may be one.
            let Some(found) = found.or_else(|| agent.events.look(agent.agent.notified())) else {
                agent.check_open()?;
                return Ok(Status::None);
            };
            out.hand_out(NotificationObject {
                notification: found,
                events: agent.events.clone(),
            });
            Ok(Status::Ok)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_notification_payload(
    notification: *const NotificationHandle,
    payload: *mut *const c_void,
    length: *mut usize,
) -> Status {
    // SAFETY: as the header says: a handle, and two places.
    unsafe {
        on(notification, |object| {
            let (payload, length) = (Out::new(payload, "payload")?, Out::new(length, "length")?);
            payload.put(object.notification.payload.as_ptr().cast());
            length.put(object.notification.payload.len());
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_notification_peer(
    notification: *const NotificationHandle,
    peer: *mut *mut PeerHandle,
) -> Status {
    // SAFETY: as the header says: a handle, and a place for one.
    unsafe {
        on(notification, |object| {
            let out = handle_out(peer, "peer")?;
            out.hand_out(PeerObject::new(object.notification.from.clone(), &object.events));
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_notification_free(notification: *mut NotificationHandle) {
    // SAFETY: as the header says.
    unsafe { free(notification) }
}
