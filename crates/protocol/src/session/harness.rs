//! What any bytes may do to a session: see [`crate::harness`].

use weft_plan::Time;

use super::wire::{self, Control};
use super::{Config, MAX_EVENTS, MAX_MESSAGE_BYTES, Secret, Session, Via, peek};
use crate::region::Epoch;
use crate::transport::Arrival;

/// Feeds pieces of `bytes` as messages to sessions in every state: new ones of both roles, half-way ones, open ones.
pub(crate) fn messages(bytes: &[u8]) {
    let mut sessions = half_way();
    sessions.extend(pair());
    let mut now = Time::from_ms(10);
    for (head, piece) in pieces(bytes) {
        let _ = peek(piece);
        now = now.saturating_add(Time::from_ms(u64::from(head)));
        for session in &mut sessions {
            session.on_message(Via(u32::from(head % 3)), piece, now);
            turn(session, now);
        }
    }
}

/// Lets an authenticated peer say pieces of `bytes`: as controls, as whole traffic, and as arrivals.
pub(crate) fn controls(bytes: &[u8]) {
    let [mut liar, mut victim] = pair();
    let mut now = Time::from_ms(10);
    for (head, piece) in pieces(bytes) {
        now = now.saturating_add(Time::from_us(u64::from(head)));
        match (head % 4, liar.open.as_mut()) {
            (0, Some(open)) => {
                let mut message = wire::begin_traffic(false, open.number, 1, &[], 0).buf;
                message.truncate(1);
                message.extend_from_slice(piece);
                open.keys.seal(0, &mut message);
                victim.on_message(Via(0), &message, now);
            }
            (1, _) => {
                let word = |at: usize| piece.get(at).copied().unwrap_or_default();
                let (tag, index) = (u64::from(word(0) % 4), u32::from(word(1)) * (1 + u32::from(word(2))));
                victim.on_arrival(Via(0), Arrival { tag, index }, now);
            }
            _ => {
                if let Ok(control) = Control::decode(piece) {
                    assert_eq!(Control::decode(&control.encode()), Ok(control));
                }
                liar.outbox.push(piece.to_vec(), None);
                while let Some((via, message)) = liar.next_message() {
                    victim.on_message(via, &message, now);
                }
            }
        }
        for message in turn(&mut victim, now) {
            liar.on_message(Via(0), &message, now);
        }
        turn(&mut liar, now);
    }
}

/// Does what an owner does, checks what must always hold, and returns what the session wants to send.
fn turn(session: &mut Session, now: Time) -> Vec<Vec<u8>> {
    session.on_timeout(now);
    // One event stands for a control, and one control makes few events.
    assert!(session.events.len() <= 2 * MAX_EVENTS);
    while session.next_event().is_some() {}
    let messages: Vec<Vec<u8>> = std::iter::from_fn(|| session.next_message())
        .map(|(_, bytes)| bytes)
        .collect();
    assert!(messages.iter().all(|bytes| bytes.len() <= MAX_MESSAGE_BYTES));
    assert!(session.next_timeout().is_none_or(|due| due > now));
    messages
}

/// A new session of each role, an acceptor that has welcomed, and an initiator that nobody has confirmed.
fn half_way() -> Vec<Session> {
    let [mut a, mut b] = strangers();
    let [mut c, mut d] = strangers();
    carry(&mut a, &mut b);
    carry(&mut c, &mut d);
    carry(&mut d, &mut c);
    let mut all = vec![b, c];
    all.extend(strangers());
    all
}

/// Two sessions that know each other.
fn pair() -> [Session; 2] {
    let [mut a, mut b] = strangers();
    for _ in 0..3 {
        carry(&mut a, &mut b);
        carry(&mut b, &mut a);
    }
    [a, b]
}

fn strangers() -> [Session; 2] {
    let config = |name, epoch| Config::new(name, Epoch(epoch), Secret::new(b"harness"));
    [
        Session::initiate(config("initiator", 1), [1; 32], Via(0), Time::ZERO),
        Session::accept(config("acceptor", 2), [2; 32], Via(0), Time::ZERO),
    ]
}

fn carry(from: &mut Session, to: &mut Session) {
    while let Some((via, message)) = from.next_message() {
        to.on_message(via, &message, Time::ZERO);
    }
}

/// Cuts `bytes` into pieces, each behind a byte that says what to do with it and two that give its length.
fn pieces(bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (head, tail) = rest.split_first_chunk::<3>()?;
        let len = usize::from(u16::from_le_bytes([head[1], head[2]])).min(tail.len());
        let (piece, tail) = tail.split_at(len);
        rest = tail;
        Some((head[0], piece))
    })
}

/// Where a search for trouble should begin: a conversation, cut as [`pieces`] wants it.
#[cfg(test)]
pub(crate) fn conversation() -> Vec<u8> {
    let [mut a, mut b] = strangers();
    let mut all = Vec::new();
    let mut keep = |message: &[u8]| {
        all.push(0);
        all.extend_from_slice(&(message.len() as u16).to_le_bytes());
        all.extend_from_slice(message);
    };
    for session in [&mut a, &mut b] {
        let _ = session.notify(b"after", Some((1, 2)), Time::ZERO);
        session.revoke(3, Time::ZERO);
        session.add_path(Via(1), Time::ZERO);
    }
    for _ in 0..4 {
        while let Some((via, message)) = a.next_message() {
            keep(&message);
            b.on_message(via, &message, Time::ZERO);
        }
        while let Some((via, message)) = b.next_message() {
            keep(&message);
            a.on_message(via, &message, Time::ZERO);
        }
    }
    all
}
