//! The arena in every order of two ranks' steps.
//!
//! What runs here is the arena itself. Its words are stood in for by those of the model checker (`sync/modelled.rs`), which answers a load with any value that the
//! orderings permit; the payloads are real bytes, watched for whoever touches them when another may.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use weft_plan::{Rank, Time};
use weft_protocol::group::{
    Abort, Board, CallRecord, Cause, Exchange, Lane, MessageHead, Offered, Piece, Sink, Taken, Trouble, View,
};
use weft_protocol::{Epoch, Memory, RegionKey};

use super::segment::Segment;
use super::{Arena, ArenaOptions, Neighbourhood, Seen, layout};
use crate::memory::{AllocateOptions, HostMemory};
use crate::sync::{check, spawn};

const OPTIONS: ArenaOptions = ArenaOptions {
    channels: 1,
    slots: 1,
    slot_bytes: 64,
    eager_bytes_max: 8,
};
const LEN: u64 = 8;
/// Nobody's time is over in a model.
const REST: Duration = Duration::MAX;

/// A segment that both ends of a model see, with all its words made before there are two threads.
fn segment() -> Segment {
    let layout = layout(2, OPTIONS).unwrap();
    let segment = Segment::own(layout, Segment::allocate(layout).unwrap()).unwrap();
    segment.stand_in();
    segment
}

/// Memory of the ranks, found by the slot of its key.
#[derive(Clone, Debug)]
struct Everybody(Vec<Arc<HostMemory>>);

impl Neighbourhood for Everybody {
    fn map(&mut self, _: Rank, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Trouble> {
        Ok(Some(Arc::clone(&self.0[key.slot as usize]) as Arc<dyn Seen>))
    }
}

/// Two ranks in a call. Each has one buffer, with a one in every byte of the first rank's and a two in the other's.
fn pair(len: u64) -> [Arena; 2] {
    let memory = (0..2).map(|_| HostMemory::allocate(len as usize, AllocateOptions::default()).unwrap());
    let memory: Vec<_> = memory.map(Arc::new).collect();
    let segments = [(); 2].map(|()| Arena::segment(2, OPTIONS).unwrap());
    [0, 1].map(|own: usize| {
        let seen = |place: usize| (place != own).then(|| Arc::clone(&segments[place]) as Arc<dyn Seen>);
        let neighbours = (0..2).map(|place| (Rank(place as u32), seen(place))).collect();
        let mut arena = Arena::new(
            OPTIONS,
            Arc::clone(&segments[own]),
            neighbours,
            Box::new(Everybody(memory.clone())),
        )
        .unwrap();
        arena.own.stand_in();
        let key = RegionKey {
            epoch: Epoch(1),
            slot: own as u32,
            secret: 1,
        };
        let view = View {
            key: Some(key),
            ..View::whole(Arc::clone(&memory[own]) as Arc<dyn Memory>)
        };
        arena.begin(&call(0), &mut vec![view]).unwrap();
        write(&arena, own as u8 + 1);
        arena
    })
}

fn call(number: u64) -> CallRecord {
    CallRecord::new(number, number + 10, "")
}

fn head(index: u32, len: u64) -> MessageHead {
    MessageHead {
        call: 0,
        signature: 10,
        index,
        len,
    }
}

fn to(rank: u32) -> Lane {
    Lane {
        peer: Rank(rank),
        channel: 0,
    }
}

fn whole(len: u64) -> Piece {
    Piece {
        buffer: 0,
        offset: 0,
        len,
    }
}

fn write(arena: &Arena, byte: u8) {
    let view = &arena.views[0];
    view.memory.bytes().write(0, &vec![byte; view.len as usize]);
}

fn read(arena: &Arena) -> Vec<u8> {
    let view = &arena.views[0];
    let mut bytes = vec![0; view.len as usize];
    view.memory.bytes().read(0, &mut bytes);
    bytes
}

/// A slot is written again once its message has been taken, and not before; and a message is whole when its head is there.
#[test]
fn messages_pass_through_a_slot_that_is_used_again() {
    check(None, || {
        let [mut sender, mut receiver] = pair(LEN);
        let receiving = spawn(move || {
            for index in 0..2 {
                while receiver
                    .take(to(0), &head(index, LEN), &Sink::Copy(whole(LEN)))
                    .unwrap()
                    != Taken::All
                {
                    thread::yield_now();
                }
                assert_eq!(read(&receiver), [index as u8 + 7; LEN as usize]);
            }
        });
        for index in 0..2 {
            write(&sender, index as u8 + 7);
            while sender.offer(to(1), &head(index, LEN), whole(LEN)).unwrap() == Offered::Full {
                thread::yield_now();
            }
        }
        receiving.join().unwrap();
    });
}

/// Takes the message as whoever waits for one does: looks, and rests when it has looked in vain.
fn receive(receiver: &mut Arena, len: u64) {
    loop {
        receiver.poll(Time::ZERO).unwrap();
        if receiver.take(to(0), &head(0, len), &Sink::Copy(whole(len))).unwrap() == Taken::All {
            return;
        }
        receiver.rest(REST);
    }
}

/// A wake-up that is lost would be a deadlock.
#[test]
fn nobody_sleeps_through_a_message() {
    check(None, || {
        let [mut sender, mut receiver] = pair(LEN);
        let receiving = spawn(move || {
            receive(&mut receiver, LEN);
            assert_eq!(read(&receiver), [1; LEN as usize]);
        });
        assert_eq!(sender.offer(to(1), &head(0, LEN), whole(LEN)), Ok(Offered::Settled));
        receiving.join().unwrap();
    });
}

/// A longer message is read where it lies. Its sender rests until it has been, and then writes there again.
#[test]
fn a_message_that_is_left_in_its_senders_memory_is_read_before_it_settles() {
    const LEN: u64 = 16;
    check(Some(2), || {
        let [mut sender, mut receiver] = pair(LEN);
        let receiving = spawn(move || {
            receive(&mut receiver, LEN);
            assert_eq!(read(&receiver), [1; LEN as usize]);
        });
        let Ok(Offered::Open(offer)) = sender.offer(to(1), &head(0, LEN), whole(LEN)) else {
            panic!("so long a message is not copied");
        };
        loop {
            sender.poll(Time::ZERO).unwrap();
            if sender.settled(to(1), offer) {
                break;
            }
            sender.rest(REST);
        }
        write(&sender, 9);
        receiving.join().unwrap();
    });
}

/// Whoever rests in the arena hears what comes from elsewhere.
#[test]
fn nobody_sleeps_through_its_ear() {
    check(None, || {
        let [_other, mut sleeper] = pair(LEN);
        let ear = Arc::new(super::Ear::default());
        let come = loom::sync::Arc::new(AtomicU64::new(0));
        let (waker, comes) = (Arc::clone(&ear), loom::sync::Arc::clone(&come));
        let waking = spawn(move || {
            comes.store(1, Ordering::Relaxed);
            std::task::Wake::wake(waker);
        });
        loop {
            let heard = ear.heard();
            if come.load(Ordering::Relaxed) == 1 {
                break;
            }
            sleeper.poll(Time::ZERO).unwrap();
            sleeper.rest_hearing(&ear, heard, REST);
        }
        waking.join().unwrap();
    });
}

/// A status is one that was written, with the call, the signature, the detail and the calls before of one moment.
#[test]
fn a_status_is_never_of_two_moments() {
    check(Some(2), || {
        let segment = segment();
        segment.set_status(&call(1), 100, false);
        let (own, seen) = (segment.clone(), segment);
        let writing = spawn(move || own.set_status(&call(2), 200, false));
        if let Some((called, detail, recent)) = seen.status() {
            assert_eq!((called.signature, detail), (called.number + 10, called.number * 100));
            assert_eq!(recent.begun, called.number + 1);
            assert_eq!(recent.signature(called.number), Some(called.signature));
        }
        writing.join().unwrap();
        let status = seen.status().map(|(called, detail, _)| (called, detail));
        assert_eq!(status, Some((call(2), 200)));
    });
}

/// What was read from memory whose owner has left the call meanwhile is not used.
#[test]
fn what_is_read_after_its_owner_has_left_is_known_to_be_so() {
    check(None, || {
        let segment = segment();
        let memory = loom::sync::Arc::new(AtomicU64::new(1));
        let (own, written) = (segment.clone(), loom::sync::Arc::clone(&memory));
        let leaving = spawn(move || {
            own.withdraw();
            // The caller has its buffer back.
            written.store(2, Ordering::Relaxed);
        });
        let read = memory.load(Ordering::Relaxed);
        if !segment.is_withdrawn() {
            assert_eq!(read, 1);
        }
        leaving.join().unwrap();
    });
}

/// Whoever rests is woken by an abort, and has the whole of it.
#[test]
fn an_abort_is_heard_whole_and_wakes() {
    check(Some(3), || {
        let abort = Abort {
            by: Rank(0),
            blamed: Rank(1),
            cause: Cause::Late,
            step: 3,
            called: call(4),
            instead: None,
        };
        let [mut first, mut other] = pair(LEN);
        let telling = spawn(move || first.abort(&abort));
        let trouble = loop {
            match other.poll(Time::ZERO) {
                Ok(_) => other.rest(REST),
                Err(trouble) => break trouble,
            }
        };
        assert_eq!(trouble, Trouble::Aborted(Box::new(abort)));
        telling.join().unwrap();
    });
}
