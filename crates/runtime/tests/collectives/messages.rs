//! Sends and receives: which meet, which wait, and which are late.

use std::time::Duration;

use weft::{Cause, Datatype, Rank, Reduction};

use super::{WAYS, Way, failed, longs, ranks, read_longs};

#[test]
fn two_ranks_that_do_not_agree_on_a_message_find_out() {
    for way in [Way::Arena, Way::Tcp] {
        // The root expects nothing of a rank that sends something.
        ranks(2, way, |group| {
            let (own, all) = (longs(&group, &[1, 2]), longs(&group, &[0, 0]));
            let (root, long) = (group.rank().0 == 0, Datatype::U64);
            let call = match root {
                true => group.gatherv(&own, &all, Some(&[2, 0]), Rank(0), long),
                false => group.gatherv(&own, &all, None, Rank(0), long),
            };
            let error = failed(
                call.deadline(Duration::from_secs(20))
                    .run()
                    .and_then(|()| group.barrier().deadline(Duration::from_secs(20)).run()),
            );
            assert_eq!(error.cause(), Cause::WrongCall, "{way:?}: {error}");
        });
        // As many bytes of something else.
        ranks(2, way, |group| {
            let data = longs(&group, &[1, 2]);
            let call = match group.rank().0 {
                0 => group.send(&data, Rank(1), Datatype::U64),
                _ => group.receive(&data, Rank(0), Datatype::F64),
            };
            let outcome = call.deadline(Duration::from_secs(20)).run();
            if group.rank().0 == 1 {
                assert_eq!(failed(outcome).cause(), Cause::WrongCall, "{way:?}");
            }
        });
    }
}

#[test]
fn sends_and_receives_wait_for_no_other_call() {
    for way in WAYS {
        for count in [10, 5_000, 300_000] {
            ranks(2, way, |group| {
                let (own, other, long) = (u64::from(group.rank().0), Rank(1 - group.rank().0), Datatype::U64);
                let (out, back) = (longs(&group, &vec![own + 7; count]), longs(&group, &vec![0; count]));
                let again = longs(&group, &vec![0; count]);
                // Both send first, and both have something of all ranks under way that only one has begun.
                let send = group.send(&out, other, long).start().unwrap();
                let sum = longs(&group, &[own]);
                let reduce = || group.all_reduce(&sum, &sum, long, Reduction::Sum).start().unwrap();
                let early = (own == 0).then(reduce);
                group.receive(&back, other, long).run().unwrap();
                send.wait().unwrap();
                assert_eq!(read_longs(&back), vec![8 - own; count], "{way:?}");
                // The other way round, and from two threads at once.
                let receive = group.receive(&again, other, long).start().unwrap();
                std::thread::scope(|scope| {
                    scope.spawn(|| receive.wait().unwrap());
                    scope.spawn(|| group.send(&back, other, long).run().unwrap());
                });
                assert_eq!(read_longs(&again), vec![own + 7; count], "{way:?}");
                early.unwrap_or_else(reduce).wait().unwrap();
                assert_eq!(read_longs(&sum), [1]);
            });
        }
    }
}

#[test]
fn messages_to_one_rank_keep_their_order() {
    for way in WAYS {
        ranks(3, way, |group| {
            let long = Datatype::U64;
            let counts = [3usize, 40_000, 1, 700, 9_000];
            let others = (0..3).filter(|rank| *rank != group.rank().0).map(Rank);
            let (mut started, mut came) = (Vec::new(), Vec::new());
            for other in others {
                for (at, count) in counts.into_iter().enumerate() {
                    let out = longs(&group, &vec![at as u64; count]);
                    started.push(group.send(&out, other, long).start().unwrap());
                    let back = longs(&group, &vec![9; count]);
                    started.push(group.receive(&back, other, long).start().unwrap());
                    came.push((at, count, back));
                }
            }
            started.iter().for_each(|pending| pending.wait().unwrap());
            for (at, count, back) in came {
                assert_eq!(read_longs(&back), vec![at as u64; count], "{way:?}");
            }
        });
    }
}

#[test]
fn a_message_that_nobody_receives_is_late_because_of_its_receiver() {
    for way in WAYS {
        ranks(3, way, |group| {
            let data = longs(&group, &vec![1; 100_000]);
            if group.rank().0 == 0 {
                let send = group.send(&data, Rank(2), Datatype::U64);
                let error = failed(send.deadline(Duration::from_millis(200)).run());
                assert_eq!(
                    (error.blamed(), error.cause()),
                    (Rank(2), Cause::Late),
                    "{way:?}: {error}"
                );
                assert!(error.to_string().contains("send to rank 2"), "{error}");
            } else {
                // Whoever calls something finds out.
                let outcome = group.barrier().deadline(Duration::from_secs(20)).run();
                assert_eq!(failed(outcome).blamed(), Rank(2), "{way:?}");
            }
        });
    }
}
