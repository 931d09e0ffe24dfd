//! Objects as places of an agent, on real servers in processes of their own: spills and fetches as ordinary transfers, the way through every kind of place, and what
//! is told when the server goes away and comes back.
#![cfg(feature = "s3")]

use std::time::Duration;

use weft::{Access, Agent, Error, Failure, FileOptions, Memory, ObjectOptions, Place, Refusal, Run, Span, Spans};
use weft_testing_s3::{BUCKET, KEY, KEY_NAME, Kind, REGION, Server};

const LEN: usize = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
#[ignore = "a part of others: their server"]
fn s3_server() {
    weft_testing_s3::serve();
}

fn agent(server: &Server) -> Agent {
    let builder = Agent::builder("objects")
        .set("object.endpoint", server.endpoint())
        .set("object.region", REGION)
        .set("object.retries", "2");
    builder.start().expect("an agent")
}

/// Of the bucket of a server; settings have no credentials.
fn object(agent: &Agent, name: &str, options: ObjectOptions) -> Result<Memory, Error> {
    let with = weft::BucketOptions::default().credentials(KEY_NAME, KEY);
    agent.open_object_at(&format!("s3://{BUCKET}/{name}"), with, options)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) >> 3) as u8 ^ (i >> 12) as u8).collect()
}

fn copy(agent: &Agent, from: &Memory, to: &Memory, commit: bool) -> Result<(), Error> {
    let copy = agent.copy(from, to)?.checksum(true);
    let copy = if commit { copy.commit() } else { copy };
    copy.post()?.wait().map(drop)
}

fn refusal(ended: Result<(), Error>) -> Option<Failure> {
    ended.err().and_then(|error| error.failure())
}

#[test]
fn a_spill_to_a_bucket_comes_back_as_it_was() {
    for kind in Kind::all() {
        let server = Server::start(kind);
        let agent = agent(&server);
        let place = object(&agent, "spill", ObjectOptions::sized(LEN as u64)).expect("a place");
        assert_eq!((place.len(), place.place()), (LEN as u64, Place::Object));
        let (out, back) = (
            agent.allocate(LEN).expect("memory"),
            agent.allocate(LEN).expect("memory"),
        );
        out.write(0, &pattern(LEN));
        let early = object(&agent, "spill", ObjectOptions::default());
        assert!(matches!(early, Err(Error::Object(_))), "it is not there: {early:?}");
        copy(&agent, &out, &place, true).expect("written");
        let there = object(&agent, "spill", ObjectOptions::default()).expect("there");
        assert_eq!(there.len(), LEN as u64);
        copy(&agent, &there, &back, false).expect("read");
        assert!(back.to_vec() == pattern(LEN), "{kind:?}");
        // Blocks of it, in another order.
        let block = 64 << 10;
        let near = Spans::paged(0, block, (0..20).rev());
        let far = Spans::strided(Run {
            offset: 100,
            len: block,
            stride: 2 * block,
            count: 20,
        });
        let read = agent.copy(&there, &back).expect("a copy").spans(near, far.clone());
        read.post().expect("posted").wait().expect("read");
        let found = back.to_vec();
        for (nth, span) in far.pieces(0..far.bytes()).enumerate() {
            let from = (19 - nth) * block as usize;
            let range = span.offset as usize..(span.offset + span.len) as usize;
            assert!(found[range] == pattern(LEN)[from..from + block as usize], "block {nth}");
        }
    }
}

/// Memory, a file, an object, another agent's memory: each hop is an ordinary transfer, and those between places that are no memory go through the host's.
#[test]
fn bytes_go_from_memory_to_a_file_to_an_object_to_another_agent() {
    let server = Server::start(Kind::Files);
    let (agent, other) = (agent(&server), Agent::builder("other").start().expect("an agent"));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let memory = agent.register_vec(pattern(LEN)).expect("memory");
    let file = agent
        .open_file(folder.path().join("spill"), FileOptions::sized(LEN as u64))
        .expect("a file");
    let place = object(&agent, "spill", ObjectOptions::sized(LEN as u64)).expect("a place");
    copy(&agent, &memory, &file, false).expect("spilled");
    copy(&agent, &file, &place, false).expect("drafted");
    // A staged copy commits nothing; one from the host's memory does.
    let one = Spans::contiguous(0, 1);
    let last = agent
        .copy(&memory, &place)
        .expect("a copy")
        .spans(one.clone(), one)
        .commit();
    last.post().expect("posted").wait().expect("committed");
    let landing = other.allocate(LEN).expect("memory");
    other
        .publish("landing", &landing, Access::READ_WRITE)
        .expect("published");
    let peer = agent.connect(&other.address()).expect("connected");
    let remote = peer.region("landing", PATIENCE).expect("published");
    let there = object(&agent, "spill", ObjectOptions::default()).expect("there");
    peer.write(&there, &remote)
        .post()
        .expect("posted")
        .wait()
        .expect("fetched");
    assert!(landing.to_vec() == pattern(LEN));
    // And back from the object to a file.
    let back = agent
        .open_file(folder.path().join("back"), FileOptions::sized(LEN as u64))
        .expect("a file");
    copy(&agent, &there, &back, false).expect("copied");
    assert!(std::fs::read(folder.path().join("back")).expect("readable") == pattern(LEN));
}

/// Under load, with reads and commits under way: all of them end with what they were, nothing wrong is served, and it goes on by itself.
#[test]
fn a_server_that_is_killed_under_load_is_told_and_comes_back() {
    for kind in Kind::all() {
        let mut server = Server::start(kind);
        let agent = agent(&server);
        let memory = agent.register_vec(pattern(LEN)).expect("memory");
        let places: Vec<Memory> = (0..4)
            .map(|nth| object(&agent, &format!("object-{nth}"), ObjectOptions::sized(LEN as u64)).expect("a place"))
            .collect();
        for place in &places {
            copy(&agent, &memory, place, true).expect("written");
        }
        let backs: Vec<Memory> = places.iter().map(|_| agent.allocate(LEN).expect("memory")).collect();
        let mut told = 0;
        for round in 0..6 {
            let reads = places.iter().zip(&backs);
            let reads: Vec<_> = reads
                .map(|(place, back)| {
                    let read = agent.copy(place, back).expect("a copy").checksum(true);
                    read.post().expect("posted")
                })
                .collect();
            match round {
                1 => server.kill(),
                3 => server.restart(),
                _ => {}
            }
            for (read, back) in reads.iter().zip(&backs) {
                match read.wait() {
                    Ok(_) => assert!(back.to_vec() == pattern(LEN), "round {round}"),
                    Err(error) => {
                        let failure = error.failure();
                        assert!((1..4).contains(&round), "round {round}: {failure:?}");
                        assert!(
                            matches!(
                                failure,
                                Some(Failure::Refused(Refusal::NotReached | Refusal::DeviceFailed))
                            ),
                            "{failure:?}"
                        );
                        told += 1;
                    }
                }
                back.write(0, &vec![0; LEN]);
            }
        }
        assert!(told >= 4, "{kind:?}: while nobody is there everybody is told");
        copy(&agent, &memory, &places[0], true).expect("it goes on");
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let server = Server::start(Kind::Files);
    let agent = agent(&server);
    let sized = ObjectOptions::sized(1000);
    let refused = agent
        .open_object_at("blocks/name", Default::default(), sized)
        .expect_err("no address");
    assert!(refused.to_string().contains("s3://BUCKET"), "{refused}");
    let read_only = object(&agent, "object", sized.write(false)).expect("a place");
    let memory = agent.allocate(1000).expect("memory");
    assert_eq!(
        refusal(copy(&agent, &memory, &read_only, false)),
        Some(Refusal::NotWritable.into())
    );
    assert_eq!(
        refusal(copy(&agent, &read_only, &memory, false)),
        Some(Refusal::NoMemory.into()),
        "nobody has put it"
    );
    let with = weft::BucketOptions::default().credentials(KEY_NAME, "wrong");
    let denied = agent
        .open_object_at(&format!("s3://{BUCKET}/object"), with, sized)
        .expect("nobody is asked");
    assert_eq!(
        refusal(copy(&agent, &memory, &denied, true)),
        Some(Refusal::Denied.into())
    );
    let half = Spans::from_iter([Span { offset: 0, len: 500 }]);
    let writable = object(&agent, "half", sized).expect("a place");
    let part = agent
        .copy(&memory, &writable)
        .expect("a copy")
        .spans(half.clone(), half)
        .commit();
    let ended = part.post().expect("posted").wait().map(drop);
    assert_eq!(
        refusal(ended),
        Some(Refusal::Malformed.into()),
        "with gaps it is no object"
    );
    read_only.release(PATIENCE).expect("released");
}
