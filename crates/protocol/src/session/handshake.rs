//! The beginning of a session: versions, the proof on both sides that the secret is known, and only then names.
//!
//! ```text
//! initiator                                         acceptor
//!     hello    versions, nonce                ──►
//!     ◄──      versions, nonce                      challenge
//!     proof                                   ──►
//!     ◄──      who I am, proof                      welcome
//!     introduction  who I am, code            ──►
//! ```
//! Whoever comes proves itself first, over both nonces: a stranger who only connects gets nothing that a guess at the secret could be tried
//! against, and is told nothing. The acceptor's proof covers what it says of itself; the initiator says who it is once it has
//! that proof. Both proofs are over both openings, so neither can be had from somebody else's session. The initiator repeats its part
//! until it hears the next one; the acceptor answers whatever is repeated.

use weft_plan::Time;

use super::config::{Config, Versions};
use super::event::{Identity, SessionEvent, SessionLoss, Via};
use super::keys::{Proof, Role, Transcript, same_proof};
use super::stream::Replay;
use super::wire::{self, GreetingRefusal, Introduction, Message, Nonce, Opening, Signed};
use super::{Open, Session, State};

/// The first pause before a greeting is repeated; it doubles each time.
const REPEAT_PAUSE: Time = Time::from_ms(100);
/// A peer's patience never makes this end send signs of life more often.
const HEARTBEAT_MIN: Time = Time::from_ms(10);

#[derive(Debug)]
pub(super) struct Handshake {
    role: Role,
    via: Via,
    nonce: Nonce,
    stage: Stage,
    /// This end's last message, without which the other end cannot go on.
    last: Vec<u8>,
    repeat_at: Option<Time>,
    pause: Time,
    sent_at: Time,
    repeated: bool,
    give_up_at: Time,
}

/// What this end waits for.
#[derive(Debug)]
enum Stage {
    /// The acceptor, for a hello.
    Hello,
    /// The initiator, for a challenge.
    Challenge,
    /// The acceptor, for the proof that answers its challenge to this hello.
    Proof { hello: Vec<u8>, met: Met },
    /// The initiator, for a welcome.
    Welcome { met: Met },
    /// The acceptor, for an introduction; the proof may come again.
    Introduction { met: Met },
    /// Nothing: both are known to each other. What the initiator introduced itself with may come again.
    Nothing { introduction: Proof },
}

/// Two openings that have met.
#[derive(Debug)]
struct Met {
    transcript: Transcript,
    version: u16,
    /// What a refusal of the other end must repeat.
    echo: u128,
}

impl Handshake {
    pub(super) fn new(config: &Config, role: Role, random: Nonce, via: Via, now: Time) -> Handshake {
        Handshake {
            role,
            via,
            nonce: random,
            stage: match role {
                Role::Initiator => Stage::Challenge,
                Role::Acceptor => Stage::Hello,
            },
            last: Vec::new(),
            repeat_at: None,
            pause: REPEAT_PAUSE,
            sent_at: now,
            repeated: false,
            give_up_at: now.saturating_add(config.silence_max),
        }
    }

    /// Whether the handshake cannot be finished without this path.
    pub(super) fn depends_on(&self, via: Via) -> bool {
        // The initiator takes its session for open when it introduces itself, but needs the path until the peer has heard that.
        let known = matches!(self.stage, Stage::Nothing { .. });
        let unfinished = self.repeat_at.is_some() || self.role == Role::Acceptor && !known;
        unfinished && via == self.via
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        Some(self.repeat_at.map_or(self.give_up_at, |at| at.min(self.give_up_at)))
    }

    /// When the introduction is to be repeated, after the session is open.
    pub(super) fn next_repeat(&self) -> Option<Time> {
        self.repeat_at
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
            let hello = wire::encode_hello(self.config.versions, &self.handshake.nonce);
            self.ask(hello, now);
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

    /// One of the messages of the handshake. `None` if it had no business here.
    pub(super) fn on_greeting(&mut self, via: Via, bytes: &[u8], message: Message<'_>, now: Time) -> Option<()> {
        if via != self.handshake.via {
            return None;
        }
        match (message, self.handshake.role, self.state) {
            (Message::Hello(opening), Role::Acceptor, State::Greeting) => self.on_hello(bytes, opening, now),
            (Message::Challenge(opening), Role::Initiator, State::Greeting) => self.on_challenge(bytes, opening, now),
            (Message::Proof { proof }, Role::Acceptor, State::Greeting) => self.on_proof(&proof, now),
            (Message::Welcome(signed), Role::Initiator, State::Greeting) => self.on_welcome(&signed, now),
            (Message::Introduction(signed), Role::Acceptor, State::Greeting | State::Open) => {
                self.on_introduction(&signed, now)
            }
            (Message::Refusal { echo, reason }, _, State::Greeting | State::Open) => self.on_refusal(echo, reason),
            // The refusal may have been lost on its way. It says less than what provoked it, so this is no echo chamber.
            (
                Message::Hello(_)
                | Message::Challenge(_)
                | Message::Proof { .. }
                | Message::Welcome(_)
                | Message::Introduction(_),
                _,
                State::Ended,
            ) if self.open.is_none() && !self.handshake.last.is_empty() => {
                self.made.push_back((via, self.handshake.last.clone()));
                None
            }
            _ => None,
        }
    }

    fn on_hello(&mut self, bytes: &[u8], opening: Opening<'_>, now: Time) -> Option<()> {
        match &self.handshake.stage {
            Stage::Hello => {}
            // Repeated because the challenge was lost; another hello on the same path is nobody's.
            Stage::Proof { hello, .. } if hello == bytes => return self.repeat_answer(),
            _ => return None,
        }
        let version = self.shared_version(&opening, now)?;
        let nonce = opening.nonce().ok()?;
        let challenge = wire::encode_challenge(self.config.versions, &self.handshake.nonce);
        self.handshake.stage = Stage::Proof {
            hello: bytes.to_vec(),
            met: Met {
                transcript: Transcript::new(&self.config.secret, bytes, &challenge),
                version,
                echo: wire::echo(&nonce),
            },
        };
        self.answer(challenge, now);
        Some(())
    }

    fn on_challenge(&mut self, bytes: &[u8], opening: Opening<'_>, now: Time) -> Option<()> {
        let Stage::Challenge = self.handshake.stage else {
            return None;
        };
        let version = self.shared_version(&opening, now)?;
        let nonce = opening.nonce().ok()?;
        let transcript = Transcript::new(&self.config.secret, &self.handshake.last, bytes);
        self.measure_handshake(now);
        self.ask(wire::encode_proof(&transcript.proof()), now);
        self.handshake.stage = Stage::Welcome {
            met: Met {
                transcript,
                version,
                echo: wire::echo(&nonce),
            },
        };
        Some(())
    }

    fn on_proof(&mut self, proof: &Proof, now: Time) -> Option<()> {
        let met = match &self.handshake.stage {
            Stage::Proof { met, .. } => met,
            // Repeated because the welcome was lost.
            Stage::Introduction { met } if same_proof(proof, &met.transcript.proof()) => return self.repeat_answer(),
            _ => return None,
        };
        if !same_proof(proof, &met.transcript.proof()) {
            let echo = met.echo;
            self.refuse(echo, GreetingRefusal::WrongSecret, SessionLoss::WrongSecret, now);
            return Some(());
        }
        let own = self.introduction().encode();
        let welcome = wire::encode_welcome(&own, &met.transcript.code(Role::Acceptor, &own));
        self.measure_handshake(now);
        let before = std::mem::replace(&mut self.handshake.stage, Stage::Hello);
        if let Stage::Proof { met, .. } = before {
            self.handshake.stage = Stage::Introduction { met };
        }
        self.answer(welcome, now);
        Some(())
    }

    fn on_welcome(&mut self, signed: &Signed<'_>, now: Time) -> Option<()> {
        let Stage::Welcome { met } = &self.handshake.stage else {
            return None;
        };
        let echo = met.echo;
        if !same_proof(&signed.code, &met.transcript.code(Role::Acceptor, signed.introduction)) {
            self.refuse(echo, GreetingRefusal::WrongSecret, SessionLoss::WrongSecret, now);
            return Some(());
        }
        let theirs = Introduction::decode(signed.introduction).ok()?;
        if let Some((reason, cause)) = self.conflict(&theirs).or_else(|| self.disappointment(&theirs)) {
            self.refuse(echo, reason, cause, now);
            return Some(());
        }
        let own = self.introduction().encode();
        let code = met.transcript.code(Role::Initiator, &own);
        let open = self.opened(met, Role::Initiator, theirs);
        self.measure_handshake(now);
        self.ask(wire::encode_introduction(&own, &code), now);
        self.handshake.stage = Stage::Nothing { introduction: code };
        self.establish(open, now);
        Some(())
    }

    fn on_introduction(&mut self, signed: &Signed<'_>, now: Time) -> Option<()> {
        let met = match &self.handshake.stage {
            Stage::Introduction { met } => met,
            Stage::Nothing { introduction } if same_proof(introduction, &signed.code) => {
                // Repeated because nothing was heard from this end since.
                self.acks.at_once = true;
                self.acks.via = Some(self.handshake.via);
                return Some(());
            }
            _ => return None,
        };
        let code = met.transcript.code(Role::Initiator, signed.introduction);
        // The initiator has proved itself: what is signed by somebody else did not come from it.
        if !same_proof(&signed.code, &code) {
            return None;
        }
        let theirs = Introduction::decode(signed.introduction).ok()?;
        if let Some((reason, cause)) = self.conflict(&theirs) {
            let echo = met.echo;
            self.refuse(echo, reason, cause, now);
            return Some(());
        }
        let open = self.opened(met, Role::Acceptor, theirs);
        self.measure_handshake(now);
        self.handshake.stage = Stage::Nothing { introduction: code };
        self.acks.at_once = true;
        self.acks.via = Some(self.handshake.via);
        self.establish(open, now);
        Some(())
    }

    fn on_refusal(&mut self, echo: u128, reason: GreetingRefusal) -> Option<()> {
        // An end that has heard authentic traffic is past all this, whatever somebody in between may say.
        let unfinished = self.handshake.depends_on(self.handshake.via);
        if !unfinished || echo != wire::echo(&self.handshake.nonce) {
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

    /// What this end says of itself.
    fn introduction(&self) -> Introduction {
        Introduction {
            name: self.config.name.clone(),
            epoch: self.config.epoch,
            host: self.config.host.clone(),
            addresses: self.config.addresses.clone(),
            silence_max: self.config.silence_max,
        }
    }

    /// The initiator's next message, repeated until it is answered.
    fn ask(&mut self, message: Vec<u8>, now: Time) {
        let message = self.handshake.say(message, now);
        self.handshake.repeat_at = Some(now.saturating_add(REPEAT_PAUSE));
        self.made.push_back(message);
    }

    /// The acceptor's next message, repeated when what it answers is.
    fn answer(&mut self, message: Vec<u8>, now: Time) {
        let message = self.handshake.say(message, now);
        self.made.push_back(message);
    }

    fn repeat_answer(&mut self) -> Option<()> {
        self.handshake.repeated = true;
        self.made.push_back((self.handshake.via, self.handshake.last.clone()));
        Some(())
    }

    /// The version that both ends speak. Where there is none, the other end is told, and the session is over.
    fn shared_version(&mut self, opening: &Opening<'_>, now: Time) -> Option<u16> {
        let (ours, theirs) = (self.config.versions, opening.versions);
        let shared = ours.shared(theirs);
        if shared.is_none() {
            let echo = opening.echo().ok()?;
            self.refuse_version(echo, theirs, now);
        }
        shared
    }

    /// What no two agents may have in common.
    fn conflict(&self, theirs: &Introduction) -> Option<(GreetingRefusal, SessionLoss)> {
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
    fn disappointment(&self, theirs: &Introduction) -> Option<(GreetingRefusal, SessionLoss)> {
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

    fn opened(&self, met: &Met, role: Role, theirs: Introduction) -> Open {
        let bearable = Time::from_ns(theirs.silence_max.as_ns() / 4).max(HEARTBEAT_MIN);
        Open {
            session: met.transcript.session(),
            keys: met.transcript.keys(role),
            replay: Replay::new(),
            number: 0,
            heartbeat: self.config.heartbeat.min(bearable),
            identity: Identity {
                name: theirs.name,
                epoch: theirs.epoch,
                host: theirs.host,
                addresses: theirs.addresses,
                version: met.version,
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
