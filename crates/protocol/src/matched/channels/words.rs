//! What two ends of channels say to each other: what is heard, what is said, and what waits to be said.

use weft_plan::Time;

use super::{Channel, Channels, End, PARCELS, Place, UNACCEPTED_MAX, UNSAID_BYTES_MAX, WORD_BYTES, new_number};
use crate::agent::{Core, MAX_PARCEL_BYTES, Parcel};
use crate::matched::ChannelError;
use crate::matched::wire::Message;
use crate::transfer::PeerId;
use crate::transport::Transport;

impl Channels {
    pub(super) fn hear<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, parcel: &Parcel, now: Time) {
        let peer = parcel.from;
        // What cannot be read is for no channel in particular, and no peer of ours says it.
        let Ok((to, message, bytes)) = Message::decode(parcel.payload()) else {
            return core.disconnect(peer, now);
        };
        if let Message::Open { token, from } = message {
            return self.on_open(core, peer, token, from, now);
        }
        let channel = self.channels.get_mut(&to).filter(|channel| channel.peer == peer);
        // Words to a channel that is closed here may still be under way.
        let Some(channel) = channel.filter(|channel| channel.failed.is_none()) else {
            return;
        };
        let heard = match (&mut channel.end, message) {
            (_, Message::Closed) => Err(ChannelError::Closed),
            (End::Sends(_), Message::Refused) if channel.far.is_none() => Err(ChannelError::Refused),
            (End::Sends(_), Message::Opened { from }) if channel.far.is_none() => {
                channel.far = Some(from);
                Ok(())
            }
            (End::Sends(sends), message) => sends.hear(message),
            (End::Receives(receives), message) => {
                let (arriving, next) = (&mut self.arriving, &mut self.next_number);
                let answer = receives.hear(message, bytes, || new_number(arriving, next, peer, to));
                answer.map(|answer| {
                    if let Some(answer) = answer {
                        self.tell(core, to, answer, now);
                    }
                })
            }
        };
        if let Err(error) = heard {
            let tell = error != ChannelError::Closed && error != ChannelError::Refused;
            self.fail(core, to, error, tell, now);
        }
        self.carry_out(core, to, now);
        self.settle(to);
    }

    pub(super) fn on_open<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        peer: PeerId,
        token: u128,
        from: u64,
        now: Time,
    ) {
        let listener = self.listeners.get(&token);
        let is_free = listener.is_some_and(|listener| listener.channel.is_none());
        if !is_free || self.channels.len() >= UNACCEPTED_MAX {
            return self.say(core, peer, &Message::Refused, from, now);
        }
        let id = self.enter(Channel {
            peer,
            far: Some(from),
            open_by: now,
            token,
            end: End::Receives(Box::default()),
            failed: None,
        });
        if let Some(listener) = self.listeners.get_mut(&token) {
            listener.channel = Some(id);
        }
        self.tell(core, id, Message::Opened { from: id }, now);
    }

    /// A write of a channel is over, whatever has become of the channel.
    pub(super) fn on_written<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        id: u64,
        send: u64,
        outcome: Result<(), crate::error::Failure>,
        now: Time,
    ) {
        let Some(channel) = self.channels.get_mut(&id) else {
            return;
        };
        let End::Sends(sends) = &mut channel.end else { return };
        sends.transfers.remove(&send);
        if let Some(error) = &channel.failed {
            // The fence that its caller waits for.
            if let Some((_, ticket)) = sends.sends.remove(&send) {
                ticket.end(Err(error.clone()));
            }
            return;
        }
        if let Err(error) = sends.machine.on_written(send, outcome) {
            if let Some((_, ticket)) = sends.sends.remove(&send) {
                ticket.end(Err(error.clone()));
            }
            self.fail(core, id, error, true, now);
        }
        self.carry_out(core, id, now);
    }

    pub(super) fn tell<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, id: u64, message: Message, now: Time) {
        let Some(channel) = self.channels.get(&id) else { return };
        if let Some(far) = channel.far {
            self.say(core, channel.peer, &message, far, now);
        }
    }

    pub(super) fn say<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        peer: PeerId,
        message: &Message,
        far: u64,
        now: Time,
    ) {
        let words = message.encode(far);
        if self.unsaid.contains_key(&peer) || core.send_parcel(peer, PARCELS, &[&words], now) == Ok(false) {
            self.keep_unsaid(core, peer, words, now);
        }
    }

    /// Keeps what a peer has no room for. One that takes nothing in for so long is not talked to any more.
    pub(super) fn keep_unsaid<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        peer: PeerId,
        words: Vec<u8>,
        now: Time,
    ) {
        let unsaid = self.unsaid.entry(peer).or_default();
        unsaid.bytes += words.len() + WORD_BYTES;
        unsaid.words.push_back(words);
        if unsaid.bytes > UNSAID_BYTES_MAX {
            self.unsaid.remove(&peer);
            core.disconnect(peer, now);
        }
    }

    pub(super) fn say_eager<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        peer: PeerId,
        head: &[u8],
        place: &Place,
        now: Time,
    ) {
        let len = head.len() + place.len as usize;
        debug_assert!(len <= MAX_PARCEL_BYTES);
        let fill = |into: &mut [u8]| {
            let (first, rest) = into.split_at_mut(head.len());
            first.copy_from_slice(head);
            place.region.memory.bytes().read(place.offset, rest);
        };
        if !self.unsaid.contains_key(&peer) && core.send_parcel_with(peer, PARCELS, len, now, fill) != Ok(false) {
            return;
        }
        let mut words = vec![0; len];
        fill(&mut words);
        self.keep_unsaid(core, peer, words, now);
    }

    pub(super) fn say_unsaid<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, now: Time) {
        let Some(unsaid) = self.unsaid.get_mut(&peer) else {
            return;
        };
        while let Some(words) = unsaid.words.front() {
            if core.send_parcel(peer, PARCELS, &[words], now) == Ok(false) {
                return;
            }
            // Sent; or its peer is gone, of which all channels hear.
            unsaid.bytes -= words.len() + WORD_BYTES;
            unsaid.words.pop_front();
        }
        self.unsaid.remove(&peer);
    }
}
