//! Sends and receives: calls of messages between two ranks, which wait for no other call.

use std::sync::Arc;

use weft_plan::collective::Collective;
use weft_plan::{Rank, Time};
use weft_protocol::Progress;
use weft_protocol::group::{
    Board as _, CallRecord, Exchange as _, Message, MessageId, Messages, Trouble, Waiting, Way,
};

use super::exchange::GroupExchange;
use super::inbox::Queued;
use super::state::Ended;
use crate::ending::Ending;

/// The calls of one rank that are messages.
#[derive(Debug)]
pub(super) struct Conversations {
    rank: Rank,
    messages: Messages,
    /// The oldest first.
    open: Vec<Conversation>,
    /// The others have been told what this rank waits for.
    announced: bool,
}

/// One call: a message, or several that were grouped.
#[derive(Debug)]
struct Conversation {
    queued: Queued,
    record: CallRecord,
    left: Vec<MessageId>,
}

impl Conversations {
    pub(super) fn new(rank: Rank, ranks: u32) -> Conversations {
        Conversations {
            rank,
            messages: Messages::new(ranks),
            open: Vec::new(),
            announced: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Begins the messages of a call.
    pub(super) fn begin(&mut self, queued: Queued, exchange: &mut GroupExchange) -> Result<(), Trouble> {
        let record = queued.call.message_record(self.rank);
        let left = Vec::new();
        self.open.push(Conversation { queued, record, left });
        let Some(Conversation { queued, left, .. }) = self.open.last_mut() else {
            return Ok(());
        };
        for one in queued.call.all() {
            let (Collective::SendReceive { from, to }, Some([input, output])) =
                (one.spec.problem.collective, &one.parts)
            else {
                continue;
            };
            let (way, peer, part) = match from == self.rank {
                true => (Way::Send, to, input),
                false => (Way::Receive, from, output),
            };
            let message = Message {
                way,
                peer,
                signature: one.spec.message_signature(),
                memory: &part.clone().into_view(),
            };
            left.push(self.messages.post(&message, exchange)?);
        }
        Ok(())
    }

    /// Takes all messages further, and notes whose calls have ended. `alone`: there is no other call under way.
    pub(super) fn turn(
        &mut self,
        exchange: &mut GroupExchange,
        ended: &mut Vec<Ended>,
        alone: bool,
    ) -> Result<Progress, Trouble> {
        let progress = self.messages.turn(exchange)?;
        while let Some(id) = self.messages.next_ended() {
            let place = self.open.iter().position(|it| it.left.contains(&id));
            let Some(place) = place else { continue };
            self.open[place].left.retain(|left| *left != id);
            if self.open[place].left.is_empty() {
                ended.push((self.open.remove(place).queued.outcome, Ok(())));
            }
        }
        if self.open.is_empty() && std::mem::take(&mut self.announced) && alone {
            let _ = exchange.end();
        }
        Ok(progress)
    }

    /// Lets the others know what this rank waits for, while it is in no call that they know of.
    pub(super) fn announce(&mut self, exchange: &mut GroupExchange) -> Result<(), Trouble> {
        if let Some(record) = self.record() {
            self.announced = true;
            exchange.begin(&record, &mut Vec::new())?;
            exchange.publish(self.waiting());
        }
        Ok(())
    }

    /// The next deadline.
    pub(super) fn deadline(&self) -> Option<Time> {
        self.open.iter().map(|it| it.queued.deadline).min()
    }

    /// What the call that is due next has called.
    pub(super) fn record(&self) -> Option<CallRecord> {
        let next = self.open.iter().min_by_key(|it| it.queued.deadline);
        next.map(|it| it.record)
    }

    pub(super) fn waiting(&self) -> Waiting {
        let next = self.open.iter().min_by_key(|it| it.queued.deadline);
        Waiting {
            step: 0,
            peer: next.and_then(|it| self.messages.peer_of(it.left.first().copied()?)),
        }
    }

    pub(super) fn awaits(&self, rank: Rank) -> bool {
        self.messages.awaits(rank)
    }

    pub(super) fn abandon(&mut self, exchange: &mut GroupExchange) -> Progress {
        self.messages.abandon(exchange)
    }

    /// The outcomes of all that were open, after they have been abandoned.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Arc<Ending<()>>> + '_ {
        self.open.drain(..).map(|it| it.queued.outcome)
    }
}
