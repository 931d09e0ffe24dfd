use proptest::prelude::*;

use super::*;

const HEAP: u64 = 256;
const SLOTS: u64 = 32;

fn shape() -> Shape {
    Shape {
        ranks: 4,
        here: 0..2,
        heap_bytes: HEAP,
        inline_bytes: 16,
        stage_bytes: 64,
        slots: SLOTS,
        deadline: Time::from_ms(10),
    }
}

fn put(peer: u32, to: u64, bytes: u64) -> Request {
    Request {
        act: Request::PUT,
        peer,
        to,
        bytes,
        local: Request::STAGE,
        ..Request::default()
    }
}

fn signal(peer: u32, word: u64, value: u64) -> Request {
    Request {
        act: Request::SIGNAL,
        peer,
        word,
        value,
        ..Request::default()
    }
}

fn offer(proxy: &mut Proxy, requests: &[Request]) {
    for request in requests {
        proxy.offer(proxy.next_ticket(), request, Time::ZERO).unwrap();
    }
}

fn begun(proxy: &mut Proxy) -> Vec<u64> {
    std::iter::from_fn(|| proxy.begin()).map(|job| job.ticket).collect()
}

#[test]
fn a_signal_waits_for_what_was_put_to_anybody() {
    let mut proxy = Proxy::new(shape());
    offer(&mut proxy, &[put(2, 0, 8), put(3, 0, 8), signal(3, 128, 1)]);
    assert_eq!(begun(&mut proxy), [0, 1]);
    proxy.ended(1, Ok(0));
    assert!(begun(&mut proxy).is_empty());
    assert_eq!((proxy.completed(), proxy.take_finished()), (0, Some((1, 0))));
    proxy.ended(0, Ok(0));
    assert_eq!(begun(&mut proxy), [2]);
    proxy.ended(2, Ok(0));
    assert_eq!(proxy.completed(), 3);
}

#[test]
fn the_word_of_a_put_waits_for_its_peer_alone() {
    let mut proxy = Proxy::new(shape());
    let told = Request {
        act: Request::PUT_SIGNAL,
        word: 128,
        value: 7,
        ..put(3, 0, 8)
    };
    offer(&mut proxy, &[put(2, 0, 8), put(3, 64, 8), told]);
    assert_eq!(begun(&mut proxy), [0, 1, 2]);
    proxy.ended(2, Ok(0));
    // Its bytes are there; another put to the same peer is not.
    assert!(begun(&mut proxy).is_empty());
    assert_eq!(proxy.take_finished(), None);
    proxy.ended(1, Ok(0));
    let job = proxy.begin().unwrap();
    assert_eq!((job.ticket, job.work), (2, Work::Set { word: 128, value: 7 }));
    proxy.ended(2, Ok(0));
    assert_eq!(proxy.completed(), 0);
    proxy.ended(0, Ok(0));
    assert_eq!(proxy.completed(), 3);
}

#[test]
fn the_same_bytes_are_written_one_after_the_other() {
    let mut proxy = Proxy::new(shape());
    offer(&mut proxy, &[put(2, 0, 8), put(2, 7, 8), put(2, 8, 8), put(3, 0, 8)]);
    assert_eq!(begun(&mut proxy), [0, 3]);
    proxy.ended(0, Ok(0));
    assert_eq!(begun(&mut proxy), [1]);
    proxy.ended(1, Ok(0));
    assert_eq!(begun(&mut proxy), [2]);
}

#[test]
fn what_is_wrong_ends_the_team_and_says_why() {
    let good = put(2, 0, 8);
    let wrong = [
        (Request { act: 9, ..good }, BadRequest::UnknownAct { act: 9 }),
        (Request { rank: 2, ..good }, BadRequest::NotHere { rank: 2 }),
        (Request { peer: 4, ..good }, BadRequest::UnknownPeer { peer: 4 }),
        (Request { local: 3, ..good }, BadRequest::UnknownPlace { local: 3 }),
        (put(2, 0, 65), BadRequest::TooLong { bytes: 65 }),
        (
            put(2, u64::MAX, 8),
            BadRequest::OutOfBounds {
                at: u64::MAX,
                bytes: 8,
                heap_bytes: HEAP,
            },
        ),
        (signal(2, 4, 0), BadRequest::Misaligned { at: 4 }),
        (
            signal(2, HEAP, 0),
            BadRequest::OutOfBounds {
                at: HEAP,
                bytes: 8,
                heap_bytes: HEAP,
            },
        ),
        (
            Request {
                act: Request::GET,
                local: Request::INLINE,
                ..good
            },
            BadRequest::UnknownPlace { local: 0 },
        ),
    ];
    for (request, why) in wrong {
        let mut proxy = Proxy::new(shape());
        let refused = Err(Failure::Refused(why));
        assert_eq!(proxy.offer(0, &request, Time::ZERO), refused);
        assert_eq!(proxy.offer(0, &good, Time::ZERO), refused, "it stays so");
        assert_eq!(proxy.begin(), None);
    }
    let mut proxy = Proxy::new(shape());
    let refused = proxy.offer(1, &good, Time::ZERO);
    let (expected, found) = (0, 1);
    assert_eq!(
        refused,
        Err(Failure::Refused(BadRequest::OutOfTurn { expected, found }))
    );
    let mut proxy = Proxy::new(shape());
    offer(&mut proxy, &[good; SLOTS as usize]);
    let refused = proxy.offer(SLOTS, &good, Time::ZERO);
    assert_eq!(refused, Err(Failure::Refused(BadRequest::TooMany)));
}

#[test]
fn lateness_loss_and_breakage_end_the_team_once() {
    let mut proxy = Proxy::new(shape());
    offer(&mut proxy, &[put(2, 0, 8), put(3, 0, 8)]);
    assert_eq!(proxy.wake_at(), Some(Time::from_ms(10)));
    proxy.expire(Time::from_ms(9));
    assert_eq!(proxy.failure(), None);
    assert_eq!(begun(&mut proxy), [0, 1]);
    proxy.expire(Time::from_ms(10));
    assert_eq!(proxy.failure(), Some(Failure::TimedOut { peer: 2 }));
    assert_eq!(
        proxy.fail(Failure::Lost { peer: 3 }),
        Failure::TimedOut { peer: 2 },
        "the first reason stays"
    );
    proxy.ended(0, Ok(0));
    proxy.ended(9, Ok(0));
    assert_eq!(proxy.begin(), None);
}

#[test]
fn words_of_failure_say_what_kernels_say() {
    for failure in [
        Failure::TimedOut { peer: 3 },
        Failure::Aborted,
        Failure::GaveUp { peer: 7 },
        Failure::Lost { peer: 1 },
        Failure::Broken { peer: 2 },
    ] {
        assert_eq!(Failure::of_word(failure.word(5)), Some(failure));
    }
    assert_eq!(Failure::of_word(0), None);
    assert_eq!(Failure::of_word(u64::MAX), Some(Failure::GaveUp { peer: 255 }));
    let refused = Failure::Refused(BadRequest::TooMany).word(4);
    assert_eq!(refused, 5 | 4 << 8 | 4 << 16);
}

fn request() -> impl Strategy<Value = Request> {
    let numbers = (1u32..=5, 0u32..2, 0u32..4, 1u32..=2, 0u64..24, 0u64..24, 0u64..=32);
    (numbers, 0u64..8, any::<u64>()).prop_map(|((act, rank, peer, local, to, from, bytes), word, value)| Request {
        act,
        rank,
        peer,
        local,
        to: to * 5,
        from: from * 5,
        bytes,
        word: 192 + word * 8,
        value,
    })
}

/// What is under way, and whether it has been carried out over there already.
type Flying = Vec<(Job, bool)>;

/// Carries jobs out at any moment between their begin and their end, and looks at what is there when a word is set or added to, or bytes are read.
struct World {
    asked: Vec<Request>,
    /// By ticket: whether its bytes, and its word, are there.
    bytes_there: Vec<bool>,
    word_there: Vec<bool>,
}

impl World {
    fn writes(request: &Request) -> bool {
        [Request::PUT, Request::PUT_SIGNAL].contains(&request.act)
    }
    fn sets(request: &Request) -> bool {
        [Request::PUT_SIGNAL, Request::SIGNAL, Request::FETCH_ADD].contains(&request.act)
    }

    fn carry_out(&mut self, job: &Job) {
        let ticket = job.ticket as usize;
        let own = self.asked[ticket];
        for (earlier, request) in self.asked[..ticket].iter().enumerate() {
            let same = request.peer == own.peer;
            let bytes = !World::writes(request) || self.bytes_there[earlier];
            let word = !World::sets(request) || self.word_there[earlier];
            match job.work {
                Work::Write { to, bytes: len, .. } => {
                    let overlaps = World::writes(request) && request.to < to + len && to < request.to + request.bytes;
                    assert!(!(same && overlaps) || bytes, "{earlier} is overtaken by {job:?}");
                }
                Work::Read { .. } => assert!(!same || bytes && word, "{job:?} reads too early"),
                Work::Set { .. } | Work::Add { .. } => {
                    assert!(!same || bytes && word, "{job:?} tells too early");
                    let wide = own.act != Request::PUT_SIGNAL;
                    assert!(!wide || bytes, "{job:?} tells too early of what another has");
                }
            }
        }
        match job.work {
            Work::Write { .. } => self.bytes_there[ticket] = true,
            Work::Set { .. } | Work::Add { .. } => {
                assert!(
                    !World::writes(&own) || self.bytes_there[ticket],
                    "its own bytes come first"
                );
                self.word_there[ticket] = true;
            }
            Work::Read { .. } => {}
        }
    }
}

proptest! {
    #[test]
    fn nothing_is_told_before_it_is_there_and_everything_ends_once(
        requests in proptest::collection::vec(request(), 1..60),
        chances in proptest::collection::vec(any::<u16>(), 400),
    ) {
        let mut proxy = Proxy::new(shape());
        let (mut flying, mut ended) = (Flying::new(), vec![false; requests.len()]);
        let mut world = World { asked: Vec::new(), bytes_there: vec![false; requests.len()], word_there: vec![false; requests.len()] };
        let mut chances = chances.into_iter().cycle();
        let mut completed = 0;
        let mut idle = 0;
        while completed < requests.len() as u64 {
            let chance = chances.next().unwrap();
            let next = proxy.next_ticket();
            let room = next - proxy.completed() < SLOTS && (next as usize) < requests.len();
            match chance % 4 {
                0 if room => {
                    let request = requests[next as usize];
                    world.asked.push(request);
                    proxy.offer(next, &request, Time::ZERO).unwrap();
                }
                1 => if let Some(job) = proxy.begin() {
                    flying.push((job, false));
                },
                2 if !flying.is_empty() => {
                    let nth = chance as usize / 4 % flying.len();
                    if !std::mem::replace(&mut flying[nth].1, true) {
                        world.carry_out(&flying[nth].0.clone());
                    }
                }
                3 if !flying.is_empty() => {
                    let (job, there) = flying.swap_remove(chance as usize / 4 % flying.len());
                    if !there {
                        world.carry_out(&job);
                    }
                    proxy.ended(job.ticket, Ok(job.ticket + 100));
                }
                _ => {}
            }
            while let Some((ticket, value)) = proxy.take_finished() {
                prop_assert!(!std::mem::replace(&mut ended[ticket as usize], true), "twice");
                prop_assert_eq!(value, ticket + 100);
            }
            let now = proxy.completed();
            prop_assert!(now >= completed);
            prop_assert!(ended[..now as usize].iter().all(|ended| *ended));
            prop_assert!((now as usize) >= ended.len() || !ended[now as usize]);
            // Whatever happens, something can always go on.
            idle = if now > completed { 0 } else { idle + 1 };
            prop_assert!(idle < 100_000, "{proxy}");
            completed = now;
        }
        prop_assert!(flying.is_empty());
    }

    #[test]
    fn whatever_a_ring_holds_stays_within_the_heaps(words in proptest::collection::vec(any::<[u64; 5]>(), 1..20), small in any::<[u8; 4]>(), tame in any::<u64>()) {
        let mut proxy = Proxy::new(shape());
        for (nth, word) in words.iter().enumerate() {
            let limit = |value: u64| if tame >> nth & 1 == 1 { value % (HEAP + 9) } else { value };
            let of = |nth: usize| u32::from(small[nth]) % 7;
            let request = Request { act: of(0), rank: of(1), peer: of(2), local: of(3), to: limit(word[0]), from: limit(word[1]), bytes: limit(word[2]), word: limit(word[3]), value: word[4] };
            let taken = proxy.offer(nth as u64, &request, Time::ZERO);
            prop_assert_eq!(taken.err(), proxy.failure());
            while let Some(job) = proxy.begin() {
                prop_assert!(job.peer < 4);
                match job.work {
                    Work::Write { from, to, bytes } => {
                        prop_assert!(to.checked_add(bytes).unwrap() <= HEAP);
                        match from {
                            Local::Inline => prop_assert!(bytes <= 16),
                            Local::Stage => prop_assert!(bytes <= 64),
                            Local::Heap { rank, at } => prop_assert!(rank < 2 && at.checked_add(bytes).unwrap() <= HEAP),
                        }
                    }
                    Work::Read { into, from, bytes } => {
                        prop_assert!(from.checked_add(bytes).unwrap() <= HEAP);
                        prop_assert!(!matches!(into, Local::Inline));
                    }
                    Work::Set { word, .. } | Work::Add { word, .. } => prop_assert!(word % 8 == 0 && word + 8 <= HEAP),
                }
                proxy.ended(job.ticket, Ok(0));
            }
        }
    }
}
