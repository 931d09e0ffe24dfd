//! What others read here stays where it is meanwhile, for as long as they said and no longer than they live.

use weft_plan::Time;

use super::super::BlockId;
use super::wire::Lent;
use super::{Directory, Event, Message};
use crate::transfer::PeerId;

/// Loans of one member at a time. What it wants beyond that it is refused.
const LOANS_MAX: usize = 64;

/// Whatever keeps a block where it is, as whoever lends it calls that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

/// What one loan keeps.
#[derive(Debug)]
pub(super) struct Lending {
    ids: Vec<BlockId>,
    tokens: Vec<Token>,
    lasts: Time,
    /// Nothing is lent yet, as long as there is none.
    pub(super) until: Option<Time>,
}

impl Directory {
    pub(super) fn on_read(&mut self, peer: PeerId, loan: u64, lasts: Time, ids: Vec<BlockId>) {
        let loans = self.lendings.range((peer, 0)..=(peer, u64::MAX)).count();
        if loans >= LOANS_MAX || self.lendings.contains_key(&(peer, loan)) || ids.is_empty() {
            let blocks = vec![None; ids.len()];
            return self.say(peer, Message::Lent { loan, blocks });
        }
        let lending = Lending {
            ids: ids.clone(),
            tokens: Vec::new(),
            lasts,
            until: None,
        };
        self.lendings.insert((peer, loan), lending);
        self.events.push_back(Event::Asked { peer, loan, ids });
    }

    /// Answers [`Event::Asked`], block by block: where it is and what keeps it there; nothing, where it is not. [`Event::Free`] gives each token back once.
    pub fn lend(&mut self, peer: PeerId, loan: u64, blocks: Vec<Option<(Lent, Token)>>, now: Time) {
        let tokens = blocks.iter().flatten().map(|(_, token)| *token);
        let Some(lending) = self.lendings.get_mut(&(peer, loan)) else {
            // Who wanted to read it is gone, or wants it no more.
            self.events.extend(tokens.map(|token| Event::Free { token }));
            return;
        };
        lending.tokens.extend(tokens);
        lending.until = Some(now.saturating_add(lending.lasts));
        let missing: Vec<BlockId> = lending
            .ids
            .iter()
            .zip(blocks.iter().map(Some).chain(std::iter::repeat(None)))
            .filter(|(_, block)| block.is_none_or(Option::is_none))
            .map(|(id, _)| *id)
            .collect();
        let wanted = lending.ids.len();
        self.counts.lent += lending.tokens.len() as u64;
        if lending.tokens.is_empty() {
            self.lendings.remove(&(peer, loan));
        }
        let mut blocks: Vec<Option<Lent>> = blocks.into_iter().map(|block| block.map(|(lent, _)| lent)).collect();
        blocks.resize(wanted, None);
        self.say(peer, Message::Lent { loan, blocks });
        // Somebody was told that these are here.
        for id in missing
            .into_iter()
            .filter(|id| self.here(id).is_none())
            .collect::<Vec<_>>()
        {
            self.tell_placed(id);
        }
    }

    pub(super) fn on_done(&mut self, peer: PeerId, loan: u64) {
        // Until the store has answered it counts as a loan, and ends soon after the answer.
        let waits = |lending: &&mut Lending| lending.until.is_none();
        if let Some(lending) = self.lendings.get_mut(&(peer, loan)).filter(waits) {
            lending.lasts = Time::ZERO;
            return;
        }
        if let Some(lending) = self.lendings.remove(&(peer, loan)) {
            self.free(lending);
        }
    }

    fn free(&mut self, lending: Lending) {
        let free = lending.tokens.into_iter().map(|token| Event::Free { token });
        self.events.extend(free);
    }

    pub(super) fn end_lendings(&mut self, now: Time) {
        let over = |_: &(PeerId, u64), lending: &mut Lending| lending.until.is_some_and(|until| until <= now);
        for (_, lending) in self.lendings.extract_if(.., over).collect::<Vec<_>>() {
            self.counts.forgotten += 1;
            self.free(lending);
        }
    }

    pub(super) fn forget_loans_of(&mut self, peer: PeerId) {
        let of = (peer, 0)..=(peer, u64::MAX);
        for (_, lending) in self.lendings.extract_if(of, |_, _| true).collect::<Vec<_>>() {
            self.free(lending);
        }
    }

    /// Everything that is lent is needed for something else: its readers will find that it does not sum up.
    pub fn recall(&mut self) {
        for (_, lending) in std::mem::take(&mut self.lendings) {
            self.free(lending);
        }
    }
}
