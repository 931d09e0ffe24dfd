//! Announcements: what a transfer tells the peer once its bytes are in place.
//!
//! That of a write is sent as soon as its parts are under way, and waits for them at the peer. If one of them is lost after that,
//! the announcement is taken back before the part is carried again, because a peer that has been told believes the memory its own.

use weft_plan::Time;

use super::Core;
use crate::session::{NotificationId, SessionError};
use crate::transfer::{PeerId, SubmitError, TransferId};
use crate::transport::Transport;

/// Announcements to one peer that wait for their transfers or for room, and writes that are told by their arrival. Together with those
/// that wait at the peer for their data they are so few that the peer can keep them apart.
pub(super) const ANNOUNCEMENTS_MAX: usize = 4096;

#[derive(Debug)]
pub(super) struct Announcement {
    peer: PeerId,
    payload: Vec<u8>,
    /// The tag that the peer counts the parts under; none where it is told when the transfer has ended.
    tag: Option<u64>,
    stage: Stage,
    /// Into how many parts it may be cut, where the peer counts them for its application.
    parts: usize,
    /// The transfer has succeeded.
    ended: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its time has not come.
    Waiting,
    /// There is nothing to send: the peer is told by the arrival of the data. It only counts.
    ByArrival,
    /// To be sent, to wait at the peer for that many parts (second) of a tag (first).
    Due(Option<(u64, u32)>),
    Sent(NotificationId),
    /// Taken back, perhaps too late.
    Recalled(Option<NotificationId>),
    Delivered,
}

impl<T: ?Sized + Transport> Core<T> {
    pub(super) fn may_announce(&self, peer: PeerId) -> Result<(), SubmitError> {
        match self.peers.at(peer.0) {
            Some(state) if state.announced >= ANNOUNCEMENTS_MAX => Err(SubmitError::TooManyAnnounced),
            _ => Ok(()),
        }
    }

    pub(super) fn add_announcement(&mut self, id: TransferId, peer: PeerId, payload: &[u8], tag: Option<u64>) {
        if let Some(state) = self.peers.at_mut(peer.0) {
            state.announced += 1;
        }
        let announcement = Announcement {
            peer,
            payload: payload.to_vec(),
            tag,
            stage: Stage::Waiting,
            parts: 0,
            ended: false,
        };
        self.announcements.insert(id, announcement);
    }

    /// A write that is told by its arrival: the peer counts its parts as it does those of announced ones.
    pub(super) fn add_told(&mut self, id: TransferId, peer: PeerId, parts: usize) {
        self.add_announcement(id, peer, &[], None);
        if let Some(announcement) = self.announcements.get_mut(&id) {
            (announcement.stage, announcement.parts) = (Stage::ByArrival, parts);
        }
        if let Some(state) = self.peers.at_mut(peer.0) {
            state.told_parts += parts;
        }
    }

    /// Sends what a transfer announces; where the peer has too much unread already, it is sent later.
    pub(super) fn announce(&mut self, id: TransferId, after: Option<(u64, u32)>, now: Time) {
        let Some(announcement) = self.announcements.get_mut(&id) else {
            return;
        };
        let peer = announcement.peer;
        announcement.stage = Stage::Due(after);
        match self.peers.at_mut(peer.0) {
            Some(state) => state.unsent.push_back(id),
            None => self.drop_announcement(id),
        }
        self.announce_unsent(peer, now);
    }

    /// Sends what is due, in its order, until there is no more room.
    pub(super) fn announce_unsent(&mut self, peer: PeerId, now: Time) {
        while let Some(&id) = self.peers.at(peer.0).and_then(|p| p.unsent.front()) {
            if !self.send_announcement(id, now) {
                return;
            }
            if let Some(state) = self.peers.at_mut(peer.0) {
                state.unsent.pop_front();
            }
        }
    }

    /// Tells whether it is done with, rather than in want of room.
    fn send_announcement(&mut self, id: TransferId, now: Time) -> bool {
        let Some(announcement) = self.announcements.get_mut(&id) else {
            return true;
        };
        let Stage::Due(after) = announcement.stage else {
            return true;
        };
        let peer = announcement.peer;
        let Some(state) = self.peers.at_mut(peer.0) else {
            return true;
        };
        let Some(session) = &mut state.session else {
            self.drop_announcement(id);
            return true;
        };
        match session.notify(&announcement.payload, after, now) {
            Ok(notification) if !announcement.ended => {
                announcement.stage = Stage::Sent(notification);
                state.awaited.insert(notification, id);
            }
            Ok(_) => self.drop_announcement(id),
            Err(SessionError::QueueFull | SessionError::TooManyHeld) => return false,
            // The session is over, and says so itself.
            Err(_) => self.drop_announcement(id),
        }
        self.touch(peer);
        true
    }

    /// A part has been lost after the announcement: it is made again when the transfer has ended, unless it turns out to be too
    /// late for that.
    pub(super) fn recall_announcement(&mut self, id: TransferId, tag: u64, now: Time) {
        let Some(announcement) = self.announcements.get_mut(&id) else {
            return;
        };
        announcement.stage = match announcement.stage {
            Stage::Sent(notification) => Stage::Recalled(Some(notification)),
            Stage::Delivered => return,
            _ => Stage::Recalled(None),
        };
        let peer = announcement.peer;
        if let Ok(session) = self.established(peer) {
            session.recall(tag, now);
            self.touch(peer);
        }
    }

    pub(super) fn on_announcement_delivered(&mut self, peer: PeerId, notification: NotificationId, now: Time) {
        let Some(id) = self.peers.at_mut(peer.0).and_then(|p| p.awaited.remove(&notification)) else {
            return;
        };
        if let Some(announcement) = self.announcements.get_mut(&id) {
            announcement.stage = Stage::Delivered;
        }
        self.engine.on_all_arrived(id, now);
    }

    pub(super) fn end_announcement(&mut self, id: TransferId, ok: bool, now: Time) {
        let Some(announcement) = self.announcements.get_mut(&id) else {
            return;
        };
        announcement.ended = true;
        let (peer, tag, stage) = (announcement.peer, announcement.tag, announcement.stage);
        let recalled = matches!(stage, Stage::Recalled(_));
        if let Some(tag) = tag.filter(|_| recalled || !ok)
            && let Ok(session) = self.established(peer)
        {
            // Also where nothing was announced, so that the parts that did arrive are not counted for ever.
            session.revoke(tag, now);
            self.touch(peer);
        }
        match stage {
            // Nobody counts the parts of these: the end of the transfer is what the peer waits for.
            Stage::Waiting | Stage::Recalled(_) if ok => self.announce(id, None, now),
            // It waits for room, and goes out then.
            Stage::Due(_) if ok => {}
            _ => self.drop_announcement(id),
        }
    }

    /// Drops what a peer that is forgotten was still to be told.
    pub(super) fn drop_unsent(&mut self, unsent: impl IntoIterator<Item = TransferId>) {
        for id in unsent {
            if self.announcements.get(&id).is_some_and(|a| a.ended) {
                self.drop_announcement(id);
            }
        }
    }

    fn drop_announcement(&mut self, id: TransferId) {
        let Some(announcement) = self.announcements.remove(&id) else {
            return;
        };
        let Some(state) = self.peers.at_mut(announcement.peer.0) else {
            return;
        };
        state.announced -= 1;
        state.told_parts -= announcement.parts;
        if let Stage::Sent(notification) | Stage::Recalled(Some(notification)) = announcement.stage {
            state.awaited.remove(&notification);
        }
    }
}
