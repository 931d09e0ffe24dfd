//! What the ranks of a group tell each other beside their messages, whether or not they are in a call.
//!
//! Such words travel as parcels of their own, and whichever thread turns the agent hears them: a rank that hangs in its application
//! still answers what it had called.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use weft_fabric::Live;
use weft_plan::{Rank, Time};
use weft_protocol::agent::Core;
use weft_protocol::group::{Abort, Agreement, AgreementMessage, CallRecord, Decision, Recent, Status, Waiting};
use weft_protocol::transfer::PeerId;
use weft_protocol::wire::{Reader, Writer};

const ASK: u8 = 0;
const ANSWER: u8 = 1;
const ABORT: u8 = 2;
const LETTER: u8 = 3;
const AGREE: u8 = 4;
/// Letters that nobody has opened. A member of a group writes a few while it is formed.
const LETTERS_MAX: usize = 1 << 16;

/// The board of one group on one rank.
#[derive(Debug)]
pub(crate) struct Board {
    /// The group of its parcels. Those of messages are the next number.
    pub(crate) group: u64,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    /// By rank, as they become known; this rank has none.
    peers: Vec<Option<PeerId>>,
    own: Option<Status>,
    known: Vec<Option<Status>>,
    /// By rank: how often it has answered.
    answers: Vec<u64>,
    abort: Option<Abort>,
    letters: VecDeque<(PeerId, Vec<u8>)>,
    /// Once this rank wants to know who is left.
    agreement: Option<Agreement>,
    /// What is to be said about that, and has found no room yet.
    unsent: VecDeque<(PeerId, Vec<u8>)>,
    /// By rank: what others have last said about that before.
    early: Vec<Option<AgreementMessage>>,
}

impl Notes {
    /// Whether a rank other than this one is still to come.
    fn is_forming(&self) -> bool {
        self.peers.iter().filter(|peer| peer.is_none()).count() > 1
    }
}

impl Board {
    pub(crate) fn new(group: u64, ranks: u32) -> Arc<Board> {
        let notes = Notes {
            peers: vec![None; ranks as usize],
            known: vec![None; ranks as usize],
            answers: vec![0; ranks as usize],
            early: vec![None; ranks as usize],
            ..Notes::default()
        };
        Arc::new(Board {
            group,
            notes: Mutex::new(notes),
        })
    }

    /// Hears everything that has come. Called with the world's mutex held.
    pub(crate) fn hear(&self, core: &mut Core<dyn Live>, now: Time) {
        let mut any = false;
        while let Some(parcel) = core.next_parcel(self.group) {
            any = true;
            let from = parcel.from;
            let answer = self.hear_one(from, parcel.payload());
            if let Some(answer) = answer {
                // A peer that is gone needs no answer, and one with a full window asks again.
                let _ = core.send_parcel(from, self.group, &[&answer], now);
            }
        }
        if any {
            self.send_agreement(core, now);
        }
    }

    /// Begins to find out who is left, or goes on with it.
    pub(crate) fn agree(&self, own: Rank, lost: &[Rank], ended: u64) {
        let mut notes = self.lock();
        let ranks = notes.peers.len() as u32;
        match &mut notes.agreement {
            Some(agreement) => lost.iter().for_each(|rank| agreement.on_lost(*rank)),
            none => *none = Some(Agreement::new(own, ranks, lost, ended)),
        }
        let Notes { agreement, early, .. } = &mut *notes;
        if let Some(agreement) = agreement {
            for (from, message) in early.iter_mut().enumerate() {
                if let Some(message) = message.take() {
                    agreement.on_message(Rank(from as u32), message);
                }
            }
        }
    }

    /// Changes something about the agreement, once it has begun.
    pub(crate) fn with_agreement(&self, change: impl FnOnce(&mut Agreement)) {
        if let Some(agreement) = &mut self.lock().agreement {
            change(agreement);
        }
    }

    /// What the present round of the agreement has led to, once everybody has been told that is to be.
    pub(crate) fn decision(&self) -> Option<Decision> {
        let notes = self.lock();
        let decision = notes.agreement.as_ref()?.decision().cloned();
        decision.filter(|_| notes.unsent.is_empty())
    }

    /// Says what there is to say about who is left.
    pub(crate) fn send_agreement(&self, core: &mut Core<dyn Live>, now: Time) {
        let mut notes = self.lock();
        let Notes {
            agreement,
            peers,
            unsent,
            ..
        } = &mut *notes;
        let Some(agreement) = agreement else { return };
        while let Some((to, message)) = agreement.next_message() {
            if let Some(peer) = peers[to.0 as usize] {
                let mut words = vec![AGREE];
                words.extend_from_slice(&message.to_bytes());
                unsent.push_back((peer, words));
            }
        }
        // Whoever is gone needs not be told; what finds no room stays, and what follows it to the same rank stays behind it.
        let mut full = Vec::new();
        unsent.retain(|(peer, words)| {
            let sent = !full.contains(peer) && core.send_parcel(*peer, self.group, &[words], now) != Ok(false);
            if !sent {
                full.push(*peer);
            }
            !sent
        });
    }

    fn hear_one(&self, from: PeerId, payload: &[u8]) -> Option<Vec<u8>> {
        let mut notes = self.lock();
        let (&kind, rest) = payload.split_first()?;
        let rank = notes.peers.iter().position(|peer| *peer == Some(from));
        match kind {
            ASK => {
                let mut w = Writer::new();
                w.u8(ANSWER);
                write_status(&mut w, notes.own.as_ref()?);
                return Some(w.buf);
            }
            ANSWER => {
                let rank = rank?;
                notes.known[rank] = read_status(rest);
                notes.answers[rank] += 1;
            }
            // Of strangers there are only letters, while the ranks get to know each other.
            ABORT => {
                rank?;
                let abort = Abort::from_bytes(rest.try_into().ok()?).ok()?;
                notes.abort.get_or_insert(abort);
            }
            AGREE => {
                let message = AgreementMessage::from_bytes(rest).ok()?;
                let from = Rank(rank? as u32);
                let Notes { agreement, early, .. } = &mut *notes;
                match agreement {
                    Some(agreement) => agreement.on_message(from, message),
                    None => early[from.0 as usize] = Some(message),
                }
            }
            LETTER if notes.letters.len() < LETTERS_MAX && (rank.is_some() || notes.is_forming()) => {
                notes.letters.push_back((from, rest.to_vec()));
            }
            _ => {}
        }
        None
    }

    pub(crate) fn knows(&self, rank: Rank, peer: PeerId) {
        self.lock().peers[rank.0 as usize] = Some(peer);
    }
    pub(crate) fn peers(&self) -> Vec<Option<PeerId>> {
        self.lock().peers.clone()
    }
    /// The letters of one kind that have come, without their kind. Others stay.
    pub(crate) fn take_letters(&self, kind: u8) -> Vec<(PeerId, Vec<u8>)> {
        let mut notes = self.lock();
        let (taken, left) = std::mem::take(&mut notes.letters)
            .into_iter()
            .partition(|(_, letter)| letter.first() == Some(&kind));
        notes.letters = left;
        let taken: VecDeque<(PeerId, Vec<u8>)> = taken;
        taken
            .into_iter()
            .map(|(from, letter)| (from, letter[1..].to_vec()))
            .collect()
    }
    pub(crate) fn has_letters(&self, kind: u8) -> bool {
        let notes = self.lock();
        notes.letters.iter().any(|(_, letter)| letter.first() == Some(&kind))
    }
    /// This rank begins a call.
    pub(crate) fn begin(&self, call: &CallRecord) {
        let own = &mut self.lock().own;
        let mut recent = own.map_or(Recent::NONE, |own| own.recent);
        recent.begin(call);
        *own = Some(Status {
            call: *call,
            ended: false,
            waiting: Waiting { step: 0, peer: None },
            recent,
        });
    }
    pub(crate) fn set_waiting(&self, waiting: Waiting) {
        if let Some(own) = &mut self.lock().own {
            own.waiting = waiting;
        }
    }
    pub(crate) fn set_ended(&self) {
        if let Some(own) = &mut self.lock().own {
            own.ended = true;
        }
    }
    pub(crate) fn status(&self, of: Rank) -> Option<Status> {
        *self.lock().known.get(of.0 as usize)?
    }
    /// A number that changes whenever a rank has answered.
    pub(crate) fn pulse(&self, of: Rank) -> u64 {
        self.lock().answers.get(of.0 as usize).copied().unwrap_or(0)
    }
    pub(crate) fn forget_answers(&self) {
        self.lock().known.fill(None);
    }
    pub(crate) fn abort(&self) -> Option<Abort> {
        self.lock().abort
    }
    pub(crate) fn set_abort(&self, abort: &Abort) {
        self.lock().abort.get_or_insert(*abort);
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Asks a rank what it has called. The answer appears on the board.
pub(crate) fn ask() -> Vec<u8> {
    vec![ASK]
}

/// Tells a rank that the call has failed.
pub(crate) fn tell_abort(abort: &Abort) -> Vec<u8> {
    let mut told = vec![ABORT];
    told.extend_from_slice(&abort.to_bytes());
    told
}

/// Something for the rank itself to read.
pub(crate) fn letter(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut letter = vec![LETTER, kind];
    letter.extend_from_slice(content);
    letter
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

fn read_status(bytes: &[u8]) -> Option<Status> {
    let mut r = Reader::new(bytes);
    let call = CallRecord::from_bytes(r.take(CallRecord::BYTES).ok()?.try_into().ok()?);
    let ended = r.u8().ok()? != 0;
    let mut number = || Some(u32::from_le_bytes(r.take(4).ok()?.try_into().ok()?));
    let (step, peer) = (number()?, number()?);
    let mut recent = Recent {
        begun: r.varint().ok()?,
        ..Recent::NONE
    };
    for signature in &mut recent.signatures {
        *signature = u64::from_le_bytes(r.take(8).ok()?.try_into().ok()?);
    }
    r.end().ok()?;
    Some(Status {
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

    #[test]
    fn a_rank_is_asked_and_answers() {
        let (near, far) = (Board::new(2, 2), Board::new(2, 2));
        let (to_far, to_near) = (PeerId(4), PeerId(9));
        near.knows(Rank(1), to_far);
        far.knows(Rank(0), to_near);
        assert_eq!(
            far.hear_one(to_near, &ask()),
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
        let answer = far.hear_one(to_near, &ask()).expect("an answer");
        near.hear_one(to_far, &answer);
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
        near.hear_one(to_far, &far.hear_one(to_near, &ask()).expect("an answer"));
        assert!(near.status(Rank(1)).is_some_and(|status| status.ended));
        // Strangers and garbage change nothing.
        near.hear_one(PeerId(1), &answer);
        near.hear_one(to_far, &answer[..20]);
        near.hear_one(to_far, &[]);
        assert_eq!(near.status(Rank(1)), None, "half an answer is none");
        near.hear_one(to_far, &letter(1, b"hello"));
        assert!(near.has_letters(1) && !near.has_letters(0) && near.take_letters(0).is_empty());
        assert_eq!(near.take_letters(1), [(to_far, b"hello".to_vec())]);
    }

    #[test]
    fn strangers_are_heard_only_while_ranks_are_missing() {
        let abort = Abort {
            by: Rank(1),
            blamed: Rank(0),
            cause: weft_protocol::group::Cause::Late,
            step: 0,
            called: CallRecord::new(0, 0, ""),
            instead: None,
        };
        let (board, stranger) = (Board::new(2, 2), PeerId(7));
        board.hear_one(stranger, &letter(1, b"hello"));
        assert_eq!(board.take_letters(1).len(), 1);
        board.knows(Rank(1), PeerId(3));
        board.hear_one(stranger, &letter(1, b"hello"));
        board.hear_one(stranger, &tell_abort(&abort));
        assert!(!board.has_letters(1) && board.abort().is_none());
        board.hear_one(PeerId(3), &tell_abort(&abort));
        assert_eq!(board.abort(), Some(abort));
    }

    #[test]
    fn members_that_there_are_not_are_not_told_of_a_decision() {
        let board = Board::new(2, 3);
        board.knows(Rank(1), PeerId(3));
        board.agree(Rank(0), &[], 0);
        let said = AgreementMessage::Decided(Decision {
            round: 0,
            by: Rank(1),
            members: vec![Rank(0), Rank(90)],
            content: false,
            ended: 0,
        });
        board.hear_one(PeerId(3), &[&[AGREE], &said.to_bytes()[..]].concat());
        assert_eq!(board.decision(), None);
    }
}
