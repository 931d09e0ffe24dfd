//! What the ranks of a group tell each other beside their messages, whether or not they are in a call.
//!
//! Such words travel as parcels of their own, and whoever turns the agent lets its notes [hear](Notes::hear) them: a rank that hangs in its
//! application still answers what it had called.

use std::collections::{BTreeMap, VecDeque};

use weft_plan::{Rank, Time};

use super::agree::{Agreement, AgreementMessage, Decision, Quorum};
use super::history::Recent;
use super::record::{Abort, CallRecord, Status, Waiting};
use crate::agent::Core;
use crate::transfer::{PeerId, TransferId};
use crate::transport::Transport;
use crate::wire::{DecodeError, Reader, Writer};

const ASK: u8 = 0;
const ANSWER: u8 = 1;
const ABORT: u8 = 2;
const LETTER: u8 = 3;
const AGREE: u8 = 4;
const WITHDRAW: u8 = 5;
const WITHDRAWN: u8 = 6;
/// Letters that nobody has opened. A member of a group writes a few while it is formed.
const LETTERS_MAX: usize = 1 << 16;

/// One thing that a rank tells another.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Note {
    /// What have you called?
    Ask,
    /// This.
    Answer(Box<Status>),
    /// The call has failed.
    Abort(Box<Abort>),
    /// Something for the rank itself to read: a kind, and what it says.
    Letter { kind: u8, content: Vec<u8> },
    /// About who is left.
    Agree(AgreementMessage),
    /// What I have offered and you have not taken is mine again.
    Withdraw,
    /// That has been heard.
    Withdrawn,
}

/// What one rank of a group knows of the others, and has told them.
#[derive(Debug)]
pub struct Notes {
    group: u64,
    /// By rank, as they become known; this rank has none.
    peers: Vec<Option<PeerId>>,
    own: Option<Status>,
    known: Vec<Option<Status>>,
    /// By rank: how often it has answered.
    answers: Vec<u64>,
    abort: Option<Abort>,
    letters: Vec<(PeerId, u8, Vec<u8>)>,
    /// Once this rank wants to know who is left.
    agreement: Option<Agreement>,
    /// What is to be said about that, and has found no room yet.
    unsent: VecDeque<(PeerId, Vec<u8>)>,
    /// By rank: what others have last said about that before.
    early: Vec<Option<AgreementMessage>>,
    /// By rank: it has taken back what it had offered.
    withdrew: Vec<bool>,
    /// By rank: it has heard that this one has.
    heard: Vec<bool>,
    /// Messages that are being read, and whether they have come once that is over.
    reads: BTreeMap<TransferId, Option<bool>>,
}

impl Notes {
    /// Of a group whose notes are parcels of this number. Those of its messages are the next number.
    pub fn new(group: u64, ranks: u32) -> Notes {
        let ranks = ranks as usize;
        Notes {
            group,
            peers: vec![None; ranks],
            own: None,
            known: vec![None; ranks],
            answers: vec![0; ranks],
            abort: None,
            letters: Vec::new(),
            agreement: None,
            unsent: VecDeque::new(),
            early: vec![None; ranks],
            withdrew: vec![false; ranks],
            heard: vec![false; ranks],
            reads: BTreeMap::new(),
        }
    }

    pub fn group(&self) -> u64 {
        self.group
    }

    /// Hears everything that has come.
    pub fn hear<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) {
        let mut any = false;
        while let Some(parcel) = core.next_parcel(self.group) {
            any = true;
            let from = parcel.from;
            // What is no note is not heard.
            let answer = Note::from_bytes(parcel.payload())
                .ok()
                .and_then(|note| self.on_note(from, note));
            if let Some(answer) = answer {
                // A peer that is gone needs no answer, and one with a full window asks again.
                let _ = core.send_parcel(from, self.group, &[&answer.to_bytes()], now);
            }
        }
        if any {
            self.send_agreement(core, now);
        }
    }

    /// Takes in what a peer says, and says what to answer.
    pub fn on_note(&mut self, from: PeerId, note: Note) -> Option<Note> {
        let rank = self.peers.iter().position(|peer| *peer == Some(from));
        match note {
            // Whoever has been told why the call failed says that: what it does since then would look as if it had ended well.
            Note::Ask => {
                let told = self.abort.map(|abort| Note::Abort(Box::new(abort)));
                return told.or(self.own.map(|own| Note::Answer(Box::new(own))));
            }
            Note::Answer(status) => {
                let rank = rank?;
                self.known[rank] = Some(*status);
                self.answers[rank] += 1;
            }
            // Of strangers there are only letters, while the ranks get to know each other.
            Note::Abort(abort) => {
                rank?;
                self.abort.get_or_insert(*abort);
            }
            Note::Agree(message) => {
                let from = Rank(rank? as u32);
                match &mut self.agreement {
                    Some(agreement) => agreement.on_message(from, message),
                    None => self.early[from.0 as usize] = Some(message),
                }
            }
            Note::Withdraw => {
                self.withdrew[rank?] = true;
                return Some(Note::Withdrawn);
            }
            Note::Withdrawn => self.heard[rank?] = true,
            Note::Letter { kind, content } => {
                if self.letters.len() < LETTERS_MAX && (rank.is_some() || self.is_forming()) {
                    self.letters.push((from, kind, content));
                }
            }
        }
        None
    }

    /// Whether a rank other than this one is still to come.
    fn is_forming(&self) -> bool {
        self.peers.iter().filter(|peer| peer.is_none()).count() > 1
    }

    /// Says something to every rank, as far as there is room for it.
    pub fn say<T: ?Sized + Transport>(&self, core: &mut Core<T>, note: &Note, now: Time) {
        let words = note.to_bytes();
        for peer in self.peers.iter().flatten() {
            // Whoever is gone needs not be told.
            let _ = core.send_parcel(*peer, self.group, &[&words], now);
        }
    }

    /// Begins to find out who is left, or goes on with it.
    pub fn agree(&mut self, own: Rank, lost: &[Rank], ended: u64, quorum: Quorum) {
        let ranks = self.peers.len() as u32;
        match &mut self.agreement {
            Some(agreement) => {
                lost.iter().for_each(|rank| agreement.on_lost(*rank));
                agreement.require(quorum);
            }
            none => *none = Some(Agreement::new(own, ranks, lost, ended, quorum)),
        }
        if let Some(agreement) = &mut self.agreement {
            for (from, message) in self.early.iter_mut().enumerate() {
                if let Some(message) = message.take() {
                    agreement.on_message(Rank(from as u32), message);
                }
            }
        }
    }

    /// The agreement on who is left, once it has begun.
    pub fn agreement(&mut self) -> Option<&mut Agreement> {
        self.agreement.as_mut()
    }

    /// What the present round of the agreement has led to, once everybody has been told that is to be.
    pub fn decision(&self) -> Option<&Decision> {
        let decision = self.agreement.as_ref()?.decision();
        decision.filter(|_| self.unsent.is_empty())
    }

    /// Says what there is to say about who is left.
    pub fn send_agreement<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) {
        let Some(agreement) = &mut self.agreement else { return };
        while let Some((to, message)) = agreement.next_message() {
            if let Some(peer) = self.peers[to.0 as usize] {
                self.unsent.push_back((peer, Note::Agree(message).to_bytes()));
            }
        }
        // Whoever is gone needs not be told; what finds no room stays, and what follows it to the same rank stays behind it.
        let (mut full, group) = (Vec::new(), self.group);
        self.unsent.retain(|(peer, words)| {
            let sent = !full.contains(peer) && core.send_parcel(*peer, group, &[words], now) != Ok(false);
            if !sent {
                full.push(*peer);
            }
            !sent
        });
    }

    /// Whose session a rank's is.
    pub fn knows(&mut self, rank: Rank, peer: PeerId) {
        self.peers[rank.0 as usize] = Some(peer);
    }
    pub fn peers(&self) -> &[Option<PeerId>] {
        &self.peers
    }
    /// The letters of one kind that have come. Others stay.
    pub fn take_letters(&mut self, kind: u8) -> Vec<(PeerId, Vec<u8>)> {
        let of_kind = self.letters.extract_if(.., |(_, of, _)| *of == kind);
        of_kind.map(|(from, _, content)| (from, content)).collect()
    }
    pub fn has_letters(&self, kind: u8) -> bool {
        self.letters.iter().any(|(_, of, _)| *of == kind)
    }
    /// This rank begins a call.
    pub fn begin(&mut self, call: &CallRecord) {
        // Changed where it is: it is long, and every call begins here.
        let fresh = Waiting { step: 0, peer: None };
        match &mut self.own {
            Some(own) => (own.call, own.ended, own.waiting) = (*call, false, fresh),
            None => {
                self.own = Some(Status {
                    call: *call,
                    ended: false,
                    waiting: fresh,
                    recent: Recent::NONE,
                });
            }
        }
        if let Some(own) = &mut self.own {
            own.recent.begin(call);
        }
    }
    pub fn set_waiting(&mut self, waiting: Waiting) {
        if let Some(own) = &mut self.own {
            own.waiting = waiting;
        }
    }
    pub fn set_ended(&mut self) {
        if let Some(own) = &mut self.own {
            own.ended = true;
        }
    }
    pub fn status(&self, of: Rank) -> Option<Status> {
        *self.known.get(of.0 as usize)?
    }
    /// A number that changes whenever a rank has answered.
    pub fn pulse(&self, of: Rank) -> u64 {
        self.answers.get(of.0 as usize).copied().unwrap_or(0)
    }
    pub fn forget_answers(&mut self) {
        self.known.fill(None);
    }
    /// Whether a rank has taken back what it had offered. The group is over then.
    pub fn has_withdrawn(&self, rank: Rank) -> bool {
        self.withdrew.get(rank.0 as usize).copied().unwrap_or(false)
    }
    /// Whether a rank has heard that this one has.
    pub fn is_heard(&self, rank: Rank) -> bool {
        self.heard.get(rank.0 as usize).copied().unwrap_or(false)
    }
    /// Wants to know how a transfer ends. To be said before the agent is turned.
    pub fn expect(&mut self, read: TransferId) {
        self.reads.insert(read, None);
    }
    /// A transfer of the agent has ended, well or not. Whether it was one of this group's.
    pub fn on_ended(&mut self, id: TransferId, well: bool) -> bool {
        let read = self.reads.get_mut(&id);
        read.is_some_and(|read| {
            *read = Some(well);
            true
        })
    }
    /// Whether a transfer that was [expected](Notes::expect) has ended.
    pub fn has_ended(&self, read: TransferId) -> bool {
        self.reads.get(&read).copied().flatten().is_some()
    }
    /// How a transfer has ended, once it has. It is forgotten then.
    pub fn take_ended(&mut self, read: TransferId) -> Option<bool> {
        let well = self.reads.get(&read).copied().flatten()?;
        self.reads.remove(&read);
        Some(well)
    }
    pub fn abort(&self) -> Option<Abort> {
        self.abort
    }
    pub fn set_abort(&mut self, abort: &Abort) {
        self.abort.get_or_insert(*abort);
    }
}

impl Note {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Note::Ask => _ = w.u8(ASK),
            Note::Answer(status) => {
                w.u8(ANSWER);
                write_status(&mut w, status);
            }
            Note::Abort(abort) => w.u8(ABORT).buf.extend_from_slice(&abort.to_bytes()),
            Note::Letter { kind, content } => w.u8(LETTER).u8(*kind).buf.extend_from_slice(content),
            Note::Agree(message) => w.u8(AGREE).buf.extend_from_slice(&message.to_bytes()),
            Note::Withdraw => _ = w.u8(WITHDRAW),
            Note::Withdrawn => _ = w.u8(WITHDRAWN),
        }
        w.buf
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Note, DecodeError> {
        let mut r = Reader::new(bytes);
        let kind = r.u8()?;
        let rest = &bytes[1..];
        match kind {
            ASK => r.end().map(|()| Note::Ask),
            ANSWER => read_status(rest).map(|status| Note::Answer(Box::new(status))),
            ABORT => {
                let bytes = rest.try_into().map_err(|_| DecodeError::Invalid)?;
                let abort = Abort::from_bytes(bytes).map_err(|_| DecodeError::Invalid)?;
                Ok(Note::Abort(Box::new(abort)))
            }
            LETTER => Ok(Note::Letter {
                kind: r.u8()?,
                content: rest[1..].to_vec(),
            }),
            AGREE => AgreementMessage::from_bytes(rest).map(Note::Agree),
            WITHDRAW => r.end().map(|()| Note::Withdraw),
            WITHDRAWN => r.end().map(|()| Note::Withdrawn),
            _ => Err(DecodeError::Invalid),
        }
    }
}

fn write_status(w: &mut Writer, status: &Status) {
    w.buf.extend_from_slice(&status.call.to_bytes());
    w.u8(u8::from(status.ended));
    w.buf.extend_from_slice(&status.waiting.step.to_le_bytes());
    let peer = status.waiting.peer.map_or(u32::MAX, |rank| rank.0);
    w.buf.extend_from_slice(&peer.to_le_bytes());
    w.varint(status.recent.begun);
    for signature in &status.recent.signatures {
        w.buf.extend_from_slice(&signature.to_le_bytes());
    }
}

fn read_status(bytes: &[u8]) -> Result<Status, DecodeError> {
    fn fixed<const N: usize>(r: &mut Reader<'_>) -> Result<[u8; N], DecodeError> {
        r.take(N)?.try_into().map_err(|_| DecodeError::Invalid)
    }
    let mut r = Reader::new(bytes);
    let call = CallRecord::from_bytes(&fixed(&mut r)?);
    let ended = r.u8()? != 0;
    let (step, peer) = (u32::from_le_bytes(fixed(&mut r)?), u32::from_le_bytes(fixed(&mut r)?));
    let mut recent = Recent {
        begun: r.varint()?,
        ..Recent::NONE
    };
    for signature in &mut recent.signatures {
        *signature = u64::from_le_bytes(fixed(&mut r)?);
    }
    r.end()?;
    Ok(Status {
        call,
        ended,
        waiting: Waiting {
            step,
            peer: (peer != u32::MAX).then_some(Rank(peer)),
        },
        recent,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::Cause;

    fn letter(kind: u8, content: &[u8]) -> Note {
        let content = content.to_vec();
        Note::Letter { kind, content }
    }

    #[test]
    fn a_rank_is_asked_and_answers() {
        let (mut near, mut far) = (Notes::new(2, 2), Notes::new(2, 2));
        let (to_far, to_near) = (PeerId(4), PeerId(9));
        near.knows(Rank(1), to_far);
        far.knows(Rank(0), to_near);
        assert_eq!(
            far.on_note(to_near, Note::Ask),
            None,
            "nothing to say before the first call"
        );
        let waiting = Waiting {
            step: 1,
            peer: Some(Rank(0)),
        };
        far.begin(&CallRecord::new(2, 6, "barrier"));
        far.begin(&CallRecord::new(3, 7, "barrier"));
        far.set_waiting(waiting);
        let answer = far.on_note(to_near, Note::Ask).expect("an answer");
        let bytes = answer.to_bytes();
        assert_eq!(Note::from_bytes(&bytes), Ok(answer.clone()));
        assert!(
            Note::from_bytes(&bytes[..bytes.len() - 1]).is_err(),
            "half an answer is none"
        );
        near.on_note(to_far, answer.clone());
        let status = near.status(Rank(1)).expect("a status");
        assert_eq!(
            (status.call, status.waiting),
            (CallRecord::new(3, 7, "barrier"), waiting)
        );
        assert_eq!(
            [1, 2, 3, 4].map(|number| status.recent.signature(number)),
            [None, Some(6), Some(7), None]
        );
        far.set_ended();
        near.on_note(
            to_far,
            far.own.map(|own| Note::Answer(Box::new(own))).expect("a status"),
        );
        assert!(near.status(Rank(1)).is_some_and(|status| status.ended));
        // Strangers change nothing.
        near.on_note(PeerId(1), answer);
        assert!(near.status(Rank(1)).is_some_and(|status| status.ended));
        near.on_note(to_far, letter(1, b"hello"));
        assert!(near.has_letters(1) && !near.has_letters(0) && near.take_letters(0).is_empty());
        assert_eq!(near.take_letters(1), [(to_far, b"hello".to_vec())]);
        assert!(!near.has_letters(1));
    }

    #[test]
    fn strangers_are_heard_only_while_ranks_are_missing() {
        let abort = Abort {
            by: Rank(1),
            blamed: Rank(0),
            cause: Cause::Late,
            step: 0,
            called: CallRecord::new(0, 0, ""),
            instead: None,
        };
        let (mut notes, stranger) = (Notes::new(2, 2), PeerId(7));
        notes.on_note(stranger, letter(1, b"hello"));
        assert_eq!(notes.take_letters(1).len(), 1);
        notes.knows(Rank(1), PeerId(3));
        notes.on_note(stranger, letter(1, b"hello"));
        notes.on_note(stranger, Note::Abort(Box::new(abort)));
        assert!(!notes.has_letters(1) && notes.abort().is_none());
        notes.on_note(PeerId(3), Note::Abort(Box::new(abort)));
        assert_eq!(notes.abort(), Some(abort));
        assert_eq!(
            notes.on_note(PeerId(3), Note::Ask),
            Some(Note::Abort(Box::new(abort))),
            "what it was told, and not what it has done since"
        );
    }

    #[test]
    fn members_that_there_are_not_are_not_told_of_a_decision() {
        let mut notes = Notes::new(2, 3);
        notes.knows(Rank(1), PeerId(3));
        notes.agree(Rank(0), &[], 0, Quorum::Majority);
        let said = AgreementMessage::Decided(Decision {
            round: 0,
            by: Rank(1),
            members: vec![Rank(0), Rank(90)],
            content: false,
            ended: 0,
        });
        notes.on_note(PeerId(3), Note::Agree(said));
        assert_eq!(notes.decision(), None);
    }
}
