//! The beginning of a session: versions, names, and the proof on both sides that the secret is known.
//!
//! ```text
//! initiator                                         acceptor
//!     hello    versions, nonce, who I am      ──►
//!     ◄──      versions, nonce, who I am, proof     welcome
//!     proof                                   ──►
//! ```
//! Each end proves the secret over both messages, so neither proof can be had from somebody else's session. The initiator repeats
//! its part until it hears the next one; the acceptor answers whatever is repeated.

use weft_plan::Time;

use super::config::{Config, Versions};
use super::event::{Identity, SessionEvent, SessionLoss, Via};
use super::keys::{Proof, Role, Transcript, same_proof};
use super::stream::Replay;
use super::wire::{self, Greeting, GreetingRefusal, Message};
use super::{Open, Session, State};
use crate::wire::Reader;

/// The first pause before a greeting is repeated; it doubles each time.
const REPEAT_PAUSE: Time = Time::from_ms(100);
/// A peer's patience never makes this end send signs of life more often.
const HEARTBEAT_MIN: Time = Time::from_ms(10);

#[derive(Debug)]
pub(super) struct Handshake {
    role: Role,
    via: Via,
    greeting: Greeting,
    /// This end's last message, without which the other end cannot go on.
    last: Vec<u8>,
    repeat_at: Option<Time>,
    pause: Time,
    sent_at: Time,
    repeated: bool,
    give_up_at: Time,
    /// The acceptor's: what was said, and the proof it waits for.
    expected: Option<Expected>,
}

#[derive(Debug)]
struct Expected {
    hello: Vec<u8>,
    echo: u128,
    proof: Proof,
    open: Option<Box<Open>>,
}

impl Handshake {
    pub(super) fn new(config: &Config, role: Role, random: [u8; 32], via: Via, now: Time) -> Handshake {
        Handshake {
            role,
            via,
            greeting: Greeting {
                versions: config.versions,
                name: config.name.clone(),
                epoch: config.epoch,
                host: config.host.clone(),
                addresses: config.addresses.clone(),
                silence_max: config.silence_max,
                nonce: random,
            },
            last: Vec::new(),
            repeat_at: None,
            pause: REPEAT_PAUSE,
            sent_at: now,
            repeated: false,
            give_up_at: now.saturating_add(config.silence_max),
            expected: None,
        }
    }

    /// Whether the handshake cannot be finished without this path.
    pub(super) fn depends_on(&self, via: Via) -> bool {
        // The initiator takes its session for open when it sends its proof, but needs the path until the peer has it.
        let unfinished = self.repeat_at.is_some() || self.role == Role::Acceptor && !self.is_proved();
        unfinished && via == self.via
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        Some(self.repeat_at.map_or(self.give_up_at, |at| at.min(self.give_up_at)))
    }

    /// When the proof is to be repeated, after the session is open.
    pub(super) fn next_repeat(&self) -> Option<Time> {
        self.repeat_at
    }

    fn is_proved(&self) -> bool {
        self.expected.as_ref().is_some_and(|expected| expected.open.is_none())
    }

    fn say(&mut self, message: Vec<u8>, now: Time) -> (Via, Vec<u8>) {
        self.last = message;
        self.sent_at = now;
        self.repeated = false;
        self.pause = REPEAT_PAUSE;
        (self.via, self.last.clone())
    }
}

impl Session {
    pub(super) fn begin(&mut self, now: Time) {
        if let Err(unfit) = self.config.check() {
            self.end(SessionLoss::Unfit(unfit));
            return;
        }
        if self.handshake.role == Role::Initiator {
            let hello = self.handshake.greeting.encode_hello();
            let message = self.handshake.say(hello, now);
            self.handshake.repeat_at = Some(now.saturating_add(REPEAT_PAUSE));
            self.made.push_back(message);
        }
    }

    pub(super) fn on_handshake_timeout(&mut self, now: Time) {
        if self.handshake.give_up_at <= now {
            self.end(SessionLoss::Silent);
        } else {
            self.repeat_greeting(now);
        }
    }

    /// Repeats what the peer has not answered, if it is time.
    pub(super) fn repeat_greeting(&mut self, now: Time) {
        let handshake = &mut self.handshake;
        if handshake.repeat_at.is_some_and(|at| at <= now) {
            handshake.pause = handshake.pause.saturating_mul(2);
            handshake.repeat_at = Some(now.saturating_add(handshake.pause));
            handshake.repeated = true;
            self.made.push_back((handshake.via, handshake.last.clone()));
        }
    }

    /// The peer has this end's last greeting.
    pub(super) fn finish_handshake(&mut self) {
        self.handshake.repeat_at = None;
    }

    /// One of the four messages of the handshake. `None` if it had no business here.
    pub(super) fn on_greeting(&mut self, via: Via, bytes: &[u8], message: Message<'_>, now: Time) -> Option<()> {
        if via != self.handshake.via {
            return None;
        }
        match (message, self.handshake.role, self.state) {
            (Message::Hello { versions, rest }, Role::Acceptor, State::Greeting) => {
                self.on_hello(bytes, versions, rest, now)
            }
            (Message::Welcome { versions, rest }, Role::Initiator, State::Greeting) => {
                self.on_welcome(bytes, versions, rest, now)
            }
            (Message::Proof { proof }, Role::Acceptor, State::Greeting | State::Open) => self.on_proof(&proof, now),
            (Message::Refusal { echo, reason }, _, State::Greeting | State::Open) => self.on_refusal(echo, reason),
            // The refusal may have been lost on its way. It says less than what provoked it, so this is no echo chamber.
            (Message::Hello { .. } | Message::Welcome { .. } | Message::Proof { .. }, _, State::Ended)
                if self.open.is_none() && !self.handshake.last.is_empty() =>
            {
                self.made.push_back((via, self.handshake.last.clone()));
                None
            }
            _ => None,
        }
    }

    fn on_hello(&mut self, bytes: &[u8], versions: Versions, rest: Reader<'_>, now: Time) -> Option<()> {
        if let Some(expected) = &self.handshake.expected {
            // Repeated because the welcome was lost; another hello on the same path is nobody's.
            let same = expected.hello == bytes;
            return same.then(|| {
                self.handshake.repeated = true;
                self.made.push_back((self.handshake.via, self.handshake.last.clone()));
            });
        }
        let Some(version) = self.config.versions.shared(versions) else {
            let echo = wire::echo_of(rest).ok()?;
            self.refuse_version(echo, versions, now);
            return Some(());
        };
        let theirs = Greeting::decode_hello(versions, rest).ok()?;
        if let Some((reason, cause)) = self.conflict(&theirs) {
            self.refuse(theirs.echo(), reason, cause, now);
            return Some(());
        }
        let mut welcome = self.handshake.greeting.encode_welcome();
        let transcript = Transcript::new(&self.config.secret, bytes, &welcome);
        welcome.extend_from_slice(&transcript.proof(Role::Acceptor));
        self.handshake.expected = Some(Expected {
            hello: bytes.to_vec(),
            echo: theirs.echo(),
            proof: transcript.proof(Role::Initiator),
            open: Some(Box::new(self.opened(&transcript, Role::Acceptor, theirs, version))),
        });
        let message = self.handshake.say(welcome, now);
        self.made.push_back(message);
        Some(())
    }

    fn on_welcome(&mut self, bytes: &[u8], versions: Versions, rest: Reader<'_>, now: Time) -> Option<()> {
        let Some(version) = self.config.versions.shared(versions) else {
            let echo = wire::echo_of(rest).ok()?;
            self.refuse_version(echo, versions, now);
            return Some(());
        };
        let (theirs, proof) = Greeting::decode_welcome(versions, rest).ok()?;
        let said = &bytes[..bytes.len() - proof.len()];
        let transcript = Transcript::new(&self.config.secret, &self.handshake.last, said);
        if !same_proof(&proof, &transcript.proof(Role::Acceptor)) {
            self.refuse(
                theirs.echo(),
                GreetingRefusal::WrongSecret,
                SessionLoss::WrongSecret,
                now,
            );
            return Some(());
        }
        if let Some((reason, cause)) = self.conflict(&theirs).or_else(|| self.disappointment(&theirs)) {
            self.refuse(theirs.echo(), reason, cause, now);
            return Some(());
        }
        self.measure_handshake(now);
        let open = self.opened(&transcript, Role::Initiator, theirs, version);
        let message = self
            .handshake
            .say(wire::encode_proof(&transcript.proof(Role::Initiator)), now);
        self.handshake.repeat_at = Some(now.saturating_add(REPEAT_PAUSE));
        self.made.push_back(message);
        self.establish(open, now);
        Some(())
    }

    fn on_proof(&mut self, proof: &Proof, now: Time) -> Option<()> {
        let expected = self.handshake.expected.as_mut()?;
        let right = same_proof(proof, &expected.proof);
        let Some(open) = expected.open.take_if(|_| right) else {
            if right {
                // Repeated because nothing was heard from this end since.
                self.acks.at_once = true;
                self.acks.via = Some(self.handshake.via);
                return Some(());
            }
            // Once the right proof was here, a wrong one is somebody else's.
            expected.open.as_ref()?;
            let echo = expected.echo;
            self.refuse(echo, GreetingRefusal::WrongSecret, SessionLoss::WrongSecret, now);
            return Some(());
        };
        self.measure_handshake(now);
        self.acks.at_once = true;
        self.acks.via = Some(self.handshake.via);
        self.establish(*open, now);
        Some(())
    }

    fn on_refusal(&mut self, echo: u128, reason: GreetingRefusal) -> Option<()> {
        // An end that has heard authentic traffic is past all this, whatever somebody in between may say.
        let unfinished = self.handshake.depends_on(self.handshake.via);
        if !unfinished || echo != self.handshake.greeting.echo() {
            return None;
        }
        self.handshake.repeat_at = None;
        self.handshake.last.clear();
        self.end(match reason {
            GreetingRefusal::OtherVersion { theirs } => SessionLoss::OtherVersion {
                ours: self.config.versions,
                theirs,
            },
            GreetingRefusal::WrongSecret => SessionLoss::WrongSecret,
            GreetingRefusal::OneSelf => SessionLoss::OneSelf,
            GreetingRefusal::NameTaken => SessionLoss::NameTaken {
                name: self.config.name.clone(),
            },
            GreetingRefusal::Unwanted => SessionLoss::Unwanted,
        });
        Some(())
    }

    /// What no two agents may have in common.
    fn conflict(&self, theirs: &Greeting) -> Option<(GreetingRefusal, SessionLoss)> {
        if theirs.name != self.config.name {
            return None;
        }
        Some(if theirs.epoch == self.config.epoch {
            (GreetingRefusal::OneSelf, SessionLoss::OneSelf)
        } else {
            let name = theirs.name.clone();
            (GreetingRefusal::NameTaken, SessionLoss::NameTaken { name })
        })
    }

    /// Whether the peer is not the one that was looked for.
    fn disappointment(&self, theirs: &Greeting) -> Option<(GreetingRefusal, SessionLoss)> {
        if let Some(expected) = self.config.expected_name.as_ref().filter(|name| **name != theirs.name) {
            let cause = SessionLoss::OtherName {
                expected: expected.clone(),
                found: theirs.name.clone(),
            };
            return Some((GreetingRefusal::Unwanted, cause));
        }
        let expected = self.config.expected_epoch.filter(|epoch| *epoch != theirs.epoch)?;
        let cause = SessionLoss::StaleEpoch {
            expected,
            found: theirs.epoch,
        };
        Some((GreetingRefusal::Unwanted, cause))
    }

    fn refuse_version(&mut self, echo: u128, theirs: Versions, now: Time) {
        let ours = self.config.versions;
        let cause = SessionLoss::OtherVersion { ours, theirs };
        self.refuse(echo, GreetingRefusal::OtherVersion { theirs: ours }, cause, now);
    }

    fn refuse(&mut self, echo: u128, reason: GreetingRefusal, cause: SessionLoss, now: Time) {
        let message = self.handshake.say(wire::encode_refusal(echo, reason), now);
        self.handshake.repeat_at = None;
        self.made.push_back(message);
        self.end(cause);
    }

    fn measure_handshake(&mut self, now: Time) {
        // After a repeat nobody knows which of the two was answered.
        if !self.handshake.repeated {
            let sample = now.saturating_sub(self.handshake.sent_at);
            if let Some(path) = self.paths.find(self.handshake.via) {
                path.on_round_trip(sample);
            }
        }
    }

    fn opened(&self, transcript: &Transcript, role: Role, theirs: Greeting, version: u16) -> Open {
        let bearable = Time::from_ns(theirs.silence_max.as_ns() / 4).max(HEARTBEAT_MIN);
        Open {
            session: transcript.session(),
            keys: transcript.keys(role),
            replay: Replay::new(),
            number: 0,
            heartbeat: self.config.heartbeat.min(bearable),
            identity: Identity {
                name: theirs.name,
                epoch: theirs.epoch,
                host: theirs.host,
                addresses: theirs.addresses,
                version,
            },
        }
    }

    fn establish(&mut self, open: Open, now: Time) {
        self.events.push_back(SessionEvent::Established {
            session: open.session,
            identity: open.identity.clone(),
        });
        self.open = Some(open);
        self.state = State::Open;
        self.heard = now;
        self.sent = now;
        self.announce_paths(now);
        self.count_early();
    }
}
