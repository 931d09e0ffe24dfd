//! How paths end once the device has given everything back, and what the device says beside completions.

use std::os::fd::AsFd;

use weft_plan::Time;
use weft_protocol::{Loss, PathId};
use weft_sys::verbs as sys;

use super::super::device::DeviceEvent;
use super::super::live;
use super::{EVENTS_EVERY, Verbs};

impl Verbs {
    /// Ends the paths that the device has given everything back of.
    pub(super) fn reap(&mut self, now: Time) {
        let failing: Vec<PathId> = self
            .paths
            .iter()
            .filter(|path| path.is_failing())
            .map(|path| path.id)
            .collect();
        for id in failing {
            if let Some(number) = self.with_path(id, now, |path, world| path.reap(world)).flatten() {
                // The number may have been given to another one since the queue pair was destroyed.
                if self.by_number.get(&number) == Some(&id) {
                    self.by_number.remove(&number);
                }
                self.last_number = None;
                self.pool.remove_path();
            }
        }
        for over in self.paths.extract_if(.., |path| path.is_over()) {
            for buffers in over.into_buffers() {
                buffers.give_back(&mut self.registrations, now);
            }
        }
    }

    /// Hears what the device has to say beside completions.
    pub(in super::super) fn look_at_events(&mut self, now: Time) {
        if self.gone {
            return;
        }
        self.events_at = now.saturating_add(EVENTS_EVERY);
        loop {
            match self.rail.device.next_event() {
                Ok(None) => return,
                Ok(Some(event)) => self.on_event(event, now),
                Err(_) => {
                    // A device that has been taken away says nothing more, and would be asked again and again.
                    self.gone = true;
                    self.events_at = Time::MAX;
                    live::unwatch(&self.wake, self.rail.device.as_fd());
                    live::unwatch(&self.wake, self.completions.channel());
                    return self.lose_all(Loss::System(libc::ENODEV), now);
                }
            }
        }
    }

    fn on_event(&mut self, event: DeviceEvent, now: Time) {
        match event {
            DeviceEvent::DeviceFatal => self.lose_all(Loss::System(libc::ENODEV), now),
            DeviceEvent::PortDown { port } if port == self.rail.port => {
                self.lose_all(Loss::System(libc::ENETDOWN), now);
            }
            DeviceEvent::PortActive { port } if port == self.rail.port => {
                self.down.take_if(|loss| *loss == Loss::System(libc::ENETDOWN));
            }
            DeviceEvent::Queue {
                event: sys::IBV_EVENT_CQ_ERR | sys::IBV_EVENT_SRQ_ERR,
            } => self.lose_all(Loss::System(libc::EIO), now),
            DeviceEvent::QueuePair { number, event } if number == self.datagrams.number() => {
                if matches!(
                    event,
                    sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR
                ) {
                    self.datagrams.on_failed();
                }
            }
            DeviceEvent::QueuePair { number, event } => {
                let loss = match event {
                    sys::IBV_EVENT_QP_FATAL => Loss::System(libc::EIO),
                    // The peer has asked for what it has no right to.
                    sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => Loss::Garbage,
                    sys::IBV_EVENT_QP_LAST_WQE_REACHED => {
                        if let Some(id) = self.path_of(number) {
                            self.with_path(id, now, |path, world| path.on_received_all(world));
                        }
                        return;
                    }
                    _ => return,
                };
                if let Some(id) = self.path_of(number) {
                    self.with_path(id, now, |path, world| path.lose(loss, world));
                }
            }
            _ => {}
        }
    }

    /// The rail is gone, for a while or for good.
    fn lose_all(&mut self, loss: Loss, now: Time) {
        self.down = Some(loss);
        let ids: Vec<PathId> = self.paths.iter().map(|path| path.id).collect();
        for id in ids {
            self.with_path(id, now, |path, world| path.lose(loss, world));
        }
    }
}
