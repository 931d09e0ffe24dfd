//! Peers that cannot be talked to: another version, another secret, oneself, a namesake, the wrong one.

use super::*;

/// Both ends' causes, which must come without waiting for a silence to end.
fn causes(initiator: Config, acceptor: Config) -> [SessionLoss; 2] {
    let mut world = World::between(initiator, acceptor, 1, Weather::FINE);
    world.run_for(Time::from_ms(50));
    [INITIATOR, ACCEPTOR].map(|end| world.loss(end).expect("refused at once").clone())
}

fn with(name: &str, epoch: u64, change: impl FnOnce(&mut Config)) -> Config {
    let mut config = config(name, epoch);
    change(&mut config);
    config
}

#[test]
fn a_wrong_secret_is_told_to_both() {
    let other = with("decode", 2, |c| c.secret = Secret::new(b"something else"));
    assert_eq!(
        causes(config("prefill", 1), other),
        [SessionLoss::WrongSecret, SessionLoss::WrongSecret]
    );
}

#[test]
fn a_wrong_secret_is_told_even_if_the_refusal_is_lost() {
    let other = with("decode", 2, |c| c.secret = Secret::new(b"something else"));
    for seed in 0..50 {
        let weather = Weather {
            loss: 0.4,
            ..Weather::FINE
        };
        let mut world = World::between(config("prefill", 1), other.clone(), seed, weather);
        world.run_for(Time::from_secs(6));
        for end in 0..2 {
            let cause = world.loss(end).unwrap();
            assert!(
                matches!(cause, SessionLoss::WrongSecret | SessionLoss::Silent),
                "{cause:?}"
            );
            assert!(world.ends[end].id().is_none());
        }
    }
}

#[test]
fn a_peer_of_another_version_is_refused_and_both_versions_are_named() {
    let (old, new) = (Versions { min: 1, max: 3 }, Versions { min: 4, max: 9 });
    let ours_old = SessionLoss::OtherVersion { ours: old, theirs: new };
    let ours_new = SessionLoss::OtherVersion { ours: new, theirs: old };
    let (a, b) = (with("a", 1, |c| c.versions = old), with("b", 2, |c| c.versions = new));
    assert_eq!(causes(a.clone(), b.clone()), [ours_old.clone(), ours_new.clone()]);
    assert_eq!(causes(b, a), [ours_new, ours_old.clone()]);
    assert_eq!(
        ours_old.to_string(),
        "the peer speaks protocol version 4 to 9, this agent 1 to 3"
    );
}

#[test]
fn the_highest_version_in_common_is_used() {
    let a = with("a", 1, |c| c.versions = Versions { min: 1, max: 7 });
    let b = with("b", 2, |c| c.versions = Versions { min: 2, max: 5 });
    let mut world = World::between(a, b, 1, Weather::FINE);
    world.run_for(Time::from_ms(10));
    for end in &world.ends {
        assert_eq!(end.identity().unwrap().version, 5);
    }
}

#[test]
fn a_hello_of_a_version_to_come_may_look_different() {
    let mut hello = b"WEFT\x01\x07\x09".to_vec();
    hello.extend_from_slice(&[5; 32]);
    hello.extend_from_slice(b"whatever they think of");
    assert_eq!(peek(&hello), Ok(Peek::Hello));
    let mut end = Session::accept(config("decode", 2), [2; 32], Via(0), Time::ZERO);
    end.on_message(Via(0), &hello, Time::ZERO);
    let theirs = Versions { min: 7, max: 9 };
    let ours = Versions::CURRENT;
    let cause = SessionLoss::OtherVersion { ours, theirs };
    assert_eq!(end.next_event(), Some(SessionEvent::Lost { cause }));
    let (_, refusal) = end.next_message().unwrap();
    assert_eq!(&refusal[..5], b"WEFT\x04");
    assert_eq!(&refusal[5..21], &[5; 16]);
}

#[test]
fn an_agent_cannot_connect_to_itself() {
    assert_eq!(
        causes(config("me", 1), config("me", 1)),
        [SessionLoss::OneSelf, SessionLoss::OneSelf]
    );
}

#[test]
fn two_agents_of_one_name_are_told_so() {
    let taken = SessionLoss::NameTaken { name: "me".into() };
    assert_eq!(causes(config("me", 1), config("me", 2)), [taken.clone(), taken]);
}

#[test]
fn the_wrong_peer_and_an_earlier_life_of_it_are_refused() {
    let looked_for = with("a", 1, |c| c.expected_name = Some("c".into()));
    let other = SessionLoss::OtherName {
        expected: "c".into(),
        found: "b".into(),
    };
    assert_eq!(causes(looked_for, config("b", 2)), [other, SessionLoss::Unwanted]);
    let looked_for = with("a", 1, |c| c.expected_epoch = Some(Epoch(3)));
    let stale = SessionLoss::StaleEpoch {
        expected: Epoch(3),
        found: Epoch(2),
    };
    assert_eq!(causes(looked_for, config("b", 2)), [stale, SessionLoss::Unwanted]);
}

#[test]
fn nobody_there_is_noticed() {
    let mut end = Session::initiate(config("prefill", 1), [1; 32], Via(0), Time::ZERO);
    let mut messages = 0;
    while let Some(due) = end.next_timeout() {
        end.on_timeout(due);
        messages += std::iter::from_fn(|| end.next_message()).count();
    }
    assert!(messages < 10, "{messages} hellos");
    let cause = SessionLoss::Silent;
    assert_eq!(end.next_event(), Some(SessionEvent::Lost { cause }));
}

#[test]
fn an_unfit_configuration_ends_at_once() {
    let mut end = Session::initiate(config("", 1), [1; 32], Via(0), Time::ZERO);
    let cause = SessionLoss::Unfit(ConfigError::Name);
    assert_eq!(end.next_event(), Some(SessionEvent::Lost { cause }));
    assert_eq!(end.next_message(), None);
    assert_eq!(end.notify(b"", None, Time::ZERO), Err(SessionError::Ended));
}

/// Everything that an end says, as long as it says anything.
fn said(end: &mut Session) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| end.next_message())
        .map(|(_, bytes)| bytes)
        .collect()
}

fn names(bytes: &[u8], word: &str) -> bool {
    bytes.windows(word.len()).any(|window| window == word.as_bytes())
}

#[test]
fn who_only_connects_is_told_nothing_and_gets_no_proof() {
    let mut end = Session::accept(config("decode", 2), [2; 32], Via(0), Time::ZERO);
    let hello = {
        let mut stranger = Session::initiate(config("x", 1), [1; 32], Via(0), Time::ZERO);
        said(&mut stranger).remove(0)
    };
    end.on_message(Via(0), &hello, Time::ZERO);
    let answers = said(&mut end);
    assert_eq!(answers.len(), 1);
    // A magic number, a kind, two versions and a nonce: nothing in it depends on the secret or on who this is.
    assert_eq!(answers[0].len(), 4 + 1 + 2 + 32);
    for (word, answer) in [("decode", &answers[0]), ("here", &answers[0]), ("tcp:", &answers[0])] {
        assert!(!names(answer, word), "a stranger was told {word:?}");
    }
    let other = Session::accept(
        with("decode", 2, |c| c.secret = Secret::new(b"something else")),
        [2; 32],
        Via(0),
        Time::ZERO,
    );
    let same = |mut end: Session| {
        end.on_message(Via(0), &hello, Time::ZERO);
        said(&mut end)
    };
    assert_eq!(same(other), answers, "the answer depends on the secret");
    // A guess is answered by a refusal, which does not either.
    let mut guess = b"WEFT\x03".to_vec();
    guess.extend_from_slice(&[7; 32]);
    end.on_message(Via(0), &guess, Time::ZERO);
    let refusal = said(&mut end);
    assert_eq!(refusal.len(), 1);
    assert_eq!(refusal[0], [b"WEFT\x04".as_slice(), &[1; 16], &[1]].concat());
}

#[test]
fn whoever_answers_in_the_place_of_a_peer_is_not_told_who_asked() {
    let secret = |word: &[u8]| with("decode", 2, |c| c.secret = Secret::new(word));
    let mut initiator = Session::initiate(config("prefill", 1), [1; 32], Via(0), Time::ZERO);
    let mut impostor = Session::accept(secret(b"something else"), [2; 32], Via(0), Time::ZERO);
    let mut heard = Vec::new();
    for _ in 0..4 {
        for message in said(&mut initiator) {
            impostor.on_message(Via(0), &message, Time::ZERO);
            heard.push(message);
        }
        for message in said(&mut impostor) {
            initiator.on_message(Via(0), &message, Time::ZERO);
        }
    }
    assert!(initiator.is_ended());
    assert!(heard.iter().all(|message| !names(message, "prefill")), "{heard:?}");
}
