//! An atomic operation happens once or not at all, as a whole, and says which; or says that it does not know.
//!
//! A transport that has none of them refuses them, and is held to that only.

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_plan::{PlaceKind, Time};

use super::bench::Bench;
use super::refusals::release;
use super::{Harness, Side};
use crate::atomic::{Atomic, AtomicAct, WORD_BYTES};
use crate::error::{Failure, Refusal};
use crate::region::{Access, Epoch, Region, RemoteRegion};
use crate::transport::{Body, Done, Op};

const WORDS: u64 = 64;
const LEN: u64 = WORDS * WORD_BYTES;

/// Both acts, where they change the word and where they leave it alone; and nothing beside the word changes.
pub fn atomics_return_what_was_there(harness: &mut dyn Harness) {
    let Some(mut bench) = able(harness) else { return };
    let (far, remote) = words(&mut bench);
    let at = 3 * WORD_BYTES;
    set(&far, at, u64::MAX - 1);
    let mut wanted = bench.contents(&*far.memory);
    for (act, before, after) in [
        (AtomicAct::FetchAdd(5), u64::MAX - 1, 3),
        (AtomicAct::FetchAdd(0), 3, 3),
        (AtomicAct::CompareSwap { expected: 4, new: 9 }, 3, 3),
        (
            AtomicAct::CompareSwap {
                expected: 3,
                new: u64::MAX,
            },
            3,
            u64::MAX,
        ),
        (
            AtomicAct::CompareSwap {
                expected: u64::MAX,
                new: 0x0102_0304_0506_0708,
            },
            u64::MAX,
            0x0102_0304_0506_0708,
        ),
    ] {
        assert_eq!(carry(&mut bench, &remote, at, act), Ok(Done::found(before)), "{act:?}");
        wanted[at as usize..][..8].copy_from_slice(&u64::to_le_bytes(after));
        assert!(
            bench.contents(&*far.memory) == wanted,
            "{act:?} left something else behind"
        );
    }
    let last = LEN - WORD_BYTES;
    let before = get(&far, last);
    assert_eq!(
        carry(&mut bench, &remote, last, AtomicAct::FetchAdd(1)),
        Ok(Done::found(before))
    );
    assert_eq!(get(&far, last), before.wrapping_add(1));
}

/// One after the other, on several words, with moves of the model's own: the words are what a plain list would be.
pub fn atomics_follow_a_model(harness: &mut dyn Harness) {
    let Some(mut bench) = able(harness) else { return };
    let (far, remote) = words(&mut bench);
    let mut model: Vec<u64> = (0..WORDS).map(|word| get(&far, word * WORD_BYTES)).collect();
    for _ in 0..200 {
        let word = bench.random.below(WORDS) as usize;
        let expected = match bench.random.below(2) {
            0 => model[word],
            _ => bench.random.below(4),
        };
        let act = match bench.random.below(2) {
            0 => AtomicAct::FetchAdd(bench.random.next_u64()),
            _ => AtomicAct::CompareSwap {
                expected,
                new: bench.random.below(4),
            },
        };
        let found = carry(&mut bench, &remote, word as u64 * WORD_BYTES, act);
        assert_eq!(found, Ok(Done::found(model[word])), "{act:?} on word {word}");
        model[word] = act.after(model[word]).unwrap_or(model[word]);
    }
    for (word, value) in model.into_iter().enumerate() {
        assert_eq!(get(&far, word as u64 * WORD_BYTES), value, "word {word}");
    }
}

/// Every increment counts, whoever makes it, and no two of them find the same.
pub fn atomics_of_two_paths_and_the_owner_sum_exactly(harness: &mut dyn Harness) {
    let Some(mut bench) = able(harness) else { return };
    let (far, remote) = words(&mut bench);
    set(&far, 0, 0);
    let (second, _) = bench.connect();
    let count = 300;
    let mut lists = Vec::new();
    for path in [bench.near, second] {
        let ops: Vec<Op> = (0..count)
            .map(|_| bench.op(atomic(&remote, 0, AtomicAct::FetchAdd(1))))
            .collect();
        lists.push((path, ops, 0));
    }
    let mut found = BTreeSet::new();
    let mut owned = 0;
    bench.until("atomic operations on two paths", |b| {
        for (path, ops, posted) in &mut lists {
            let end = ops.len().min(*posted + 7);
            *posted += b.post(Side::Initiator, *path, &ops[*posted..end]);
        }
        if owned < count {
            owned += 1;
            let ticket = b.look(&*far.memory).atomic(0, AtomicAct::FetchAdd(1));
            assert!(found.insert(ticket.expect("the owner may")), "a number twice");
        }
        let all = lists.iter().flat_map(|(_, ops, _)| ops);
        owned == count && all.into_iter().all(|op| b.initiator.is_completed(op.id))
    });
    for op in lists.iter().flat_map(|(_, ops, _)| ops) {
        let done = bench.initiator.outcome(op.id).expect("a rightful operation succeeds");
        assert!(found.insert(done.before.expect("what was there")), "a number twice");
    }
    assert_eq!(get(&far, 0), 3 * count, "increments were lost or doubled");
    assert_eq!(found.last(), Some(&(3 * count - 1)));
}

/// As strict as moves: key, epoch, release, bounds, and both rights.
pub fn atomics_without_the_right_are_refused(harness: &mut dyn Harness) {
    type Spoil = fn(&mut RemoteRegion);
    let spoilt: [(Refusal, Spoil); 3] = [
        (Refusal::UnknownKey, |remote| remote.key.slot += 1_000),
        (Refusal::UnknownKey, |remote| remote.key.secret ^= 1 << 77),
        (Refusal::StaleEpoch, |remote| {
            remote.key.epoch = Epoch(remote.key.epoch.0 ^ 1)
        }),
    ];
    let Some(mut bench) = able(harness) else { return };
    for (refusal, spoil) in spoilt {
        let (far, mut remote) = words(&mut bench);
        spoil(&mut remote);
        expect_refusal(&mut bench, &far, &remote, 8, refusal);
    }
    for (access, refusal) in [
        (Access::READ, Refusal::NotWritable),
        (Access::WRITE, Refusal::NotReadable),
        (Access::NONE, Refusal::NotReadable),
    ] {
        let (far, mut remote) = bench.region(Side::Target, LEN, access);
        // The initiator was told something else than the owner decided.
        remote.access = Access::READ_WRITE;
        expect_refusal(&mut bench, &far, &remote, 8, refusal);
    }
    let (far, mut remote) = words(&mut bench);
    remote.len = u64::MAX;
    for offset in [LEN, LEN + 8, 1 << 62, u64::MAX - 7] {
        expect_refusal(&mut bench, &far, &remote, offset, Refusal::OutOfBounds);
    }
    // A word that begins inside and ends outside.
    let (far, mut remote) = bench.region(Side::Target, LEN + 4, Access::READ_WRITE);
    remote.len = u64::MAX;
    expect_refusal(&mut bench, &far, &remote, LEN, Refusal::OutOfBounds);
    // Used before, so that nothing a transport has remembered of it lets it in.
    let (far, remote) = words(&mut bench);
    carry(&mut bench, &remote, 8, AtomicAct::FetchAdd(1)).expect("a rightful operation succeeds");
    release(&mut bench, Side::Target, &far);
    expect_refusal(&mut bench, &far, &remote, 8, Refusal::Released);
    bench.assert_usable();
}

pub fn misaligned_atomics_are_refused(harness: &mut dyn Harness) {
    let Some(mut bench) = able(harness) else { return };
    let (far, remote) = words(&mut bench);
    for offset in [1, 4, 7, 12, LEN - 9] {
        expect_refusal(&mut bench, &far, &remote, offset, Refusal::Misaligned);
    }
    bench.assert_usable();
}

pub fn atomics_past_their_deadline_touch_nothing(harness: &mut dyn Harness) {
    let Some(mut bench) = able(harness) else { return };
    let (far, remote) = words(&mut bench);
    // Once in time, so that the region is known on the path.
    carry(&mut bench, &remote, 0, AtomicAct::FetchAdd(1)).expect("a rightful operation succeeds");
    bench.harness.idle();
    let before = bench.contents(&*far.memory);
    let deadline = bench.harness.now();
    let op = bench.op_by(atomic(&remote, 0, AtomicAct::FetchAdd(1)), deadline);
    let path = bench.near;
    let outcome = bench.carry_out(Side::Initiator, path, &[op])[0];
    assert!(
        matches!(outcome, Err(Failure::Expired | Failure::Refused(Refusal::Late))),
        "{outcome:?} after the deadline"
    );
    bench.settle();
    assert!(
        bench.contents(&*far.memory) == before,
        "far memory was touched after the deadline"
    );
    bench.assert_usable();
}

/// While the target is frozen every operation ends by its deadline. Once that has passed, the thawed target carries out nothing
/// more, not even what was sent in time.
pub fn frozen_target_cannot_delay_an_atomic(harness: &mut dyn Harness) {
    let Some(mut bench) = able(harness) else { return };
    let (far, remote) = words(&mut bench);
    carry(&mut bench, &remote, 0, AtomicAct::FetchAdd(0)).expect("a rightful operation succeeds");
    set(&far, 0, 0);
    bench.frozen = true;
    let deadline = bench.harness.now().saturating_add(Time::from_ms(50));
    let ops: Vec<Op> = (0..20)
        .map(|_| bench.op_by(atomic(&remote, 0, AtomicAct::FetchAdd(1)), deadline))
        .collect();
    let path = bench.near;
    let posted = bench.post(Side::Initiator, path, &ops);
    bench.until_all_completed(Side::Initiator);
    let mut told = Told::default();
    for op in &ops[..posted] {
        let outcome = bench.initiator.outcome(op.id);
        assert!(
            matches!(
                outcome,
                Ok(_) | Err(Failure::Expired | Failure::Unanswered | Failure::Refused(Refusal::Late))
            ),
            "{outcome:?} from a frozen target"
        );
        told.hear(outcome);
    }
    let at_the_end = get(&far, 0);
    told.assert_true(at_the_end);
    bench.frozen = false;
    bench.settle();
    assert_eq!(get(&far, 0), at_the_end, "carried out after the deadline");
    bench.assert_usable();
}

pub fn cancelled_atomics_are_told_honestly(harness: &mut dyn Harness) {
    let Some(mut bench) = able(harness) else { return };
    let (far, remote) = words(&mut bench);
    set(&far, 0, 0);
    let path = bench.near;
    let mut told = Told::default();
    for turns in 0..20 {
        let ops: Vec<Op> = (0..5)
            .map(|_| bench.op(atomic(&remote, 0, AtomicAct::FetchAdd(1))))
            .collect();
        let posted = bench.post(Side::Initiator, path, &ops);
        for _ in 0..turns % 4 {
            bench.step();
        }
        let now = bench.harness.now();
        for op in &ops[..posted] {
            bench.initiator.transport().cancel(path, op.id, now);
        }
        bench.until_all_completed(Side::Initiator);
        for op in &ops[..posted] {
            let outcome = bench.initiator.outcome(op.id);
            assert!(
                matches!(outcome, Ok(_) | Err(Failure::Cancelled | Failure::Unanswered)),
                "{outcome:?} after a cancel"
            );
            told.hear(outcome);
        }
    }
    bench.settle();
    told.assert_true(get(&far, 0));
    bench.assert_usable();
}

pub fn atomics_on_a_closed_path_are_told_honestly(harness: &mut dyn Harness) {
    ended_path(harness, |bench| {
        let path = bench.near;
        bench.initiator.transport().close(path);
    });
}

pub fn atomics_of_a_dead_peer_are_told_honestly(harness: &mut dyn Harness) {
    ended_path(harness, |bench| bench.target.transport = None);
}

fn ended_path(harness: &mut dyn Harness, end: impl Fn(&mut Bench<'_>)) {
    for turns in 0..4 {
        let Some(mut bench) = able(harness) else { return };
        let (far, remote) = words(&mut bench);
        set(&far, 0, 0);
        let ops: Vec<Op> = (0..30)
            .map(|_| bench.op(atomic(&remote, 0, AtomicAct::FetchAdd(1))))
            .collect();
        let path = bench.near;
        let posted = bench.post(Side::Initiator, path, &ops);
        for _ in 0..turns {
            bench.step();
        }
        end(&mut bench);
        bench.until("the loss of a path", |b| b.initiator.lost.contains_key(&path));
        bench.settle();
        let mut told = Told::default();
        for op in &ops[..posted] {
            let outcome = bench.initiator.outcome(op.id);
            assert!(
                matches!(outcome, Ok(_) | Err(Failure::PathLost { .. })),
                "{outcome:?} on a path that has ended"
            );
            told.hear(outcome);
        }
        told.assert_true(get(&far, 0));
    }
}

/// What the outcomes of increments say about the sum.
#[derive(Debug, Default)]
struct Told {
    certain: u64,
    unknown: u64,
}

impl Told {
    fn hear(&mut self, outcome: Result<Done, Failure>) {
        match outcome {
            Ok(_) => self.certain += 1,
            Err(failure) if failure.may_have_happened() => self.unknown += 1,
            Err(_) => {}
        }
    }

    fn assert_true(&self, sum: u64) {
        assert!(
            (self.certain..=self.certain + self.unknown).contains(&sum),
            "{self:?}, but the sum is {sum}"
        );
    }
}

/// A path over a transport that carries out atomic operations. One that does not must refuse them.
fn able(harness: &mut dyn Harness) -> Option<Bench<'_>> {
    let mut bench = Bench::new(harness);
    // Words of memory that is not host memory have no atomic operations that those of the owner's CPU could meet.
    let host = bench.harness.place(Side::Target).kind() == PlaceKind::Dram;
    if host && bench.initiator.transport().capabilities().atomics {
        return Some(bench);
    }
    let (far, remote) = words(&mut bench);
    expect_refusal(&mut bench, &far, &remote, 0, Refusal::Unsupported);
    None
}

fn words(bench: &mut Bench<'_>) -> (Region, RemoteRegion) {
    bench.region(Side::Target, LEN, Access::READ_WRITE)
}

fn atomic(remote: &RemoteRegion, offset: u64, act: AtomicAct) -> Body {
    Body::Atomic(Atomic {
        region: Arc::new(remote.clone()),
        offset,
        act,
    })
}

fn carry(bench: &mut Bench<'_>, remote: &RemoteRegion, offset: u64, act: AtomicAct) -> Result<Done, Failure> {
    let op = bench.op(atomic(remote, offset, act));
    let path = bench.near;
    bench.carry_out(Side::Initiator, path, &[op])[0]
}

fn expect_refusal(bench: &mut Bench<'_>, far: &Region, remote: &RemoteRegion, offset: u64, refusal: Refusal) {
    let before = bench.contents(&*far.memory);
    for act in [AtomicAct::FetchAdd(1), AtomicAct::CompareSwap { expected: 0, new: 1 }] {
        let outcome = carry(bench, remote, offset, act);
        assert_eq!(outcome, Err(Failure::Refused(refusal)), "{act:?} at {offset}");
    }
    assert!(
        bench.contents(&*far.memory) == before,
        "a refused operation changed memory"
    );
}

fn get(region: &Region, offset: u64) -> u64 {
    let mut word = [0; WORD_BYTES as usize];
    region.memory.bytes().read(offset, &mut word);
    u64::from_le_bytes(word)
}

fn set(region: &Region, offset: u64, value: u64) {
    region.memory.bytes().write(offset, &value.to_le_bytes());
}
