//! Hand-offs between real agents, with plain memory in the place of an engine's cache.

use std::time::Duration;

use weft::hand_off::{
    Cache, Desk, Event, HandOff, HandOffError, Layer, Lease, Options, Origin, Over, Prompt, Reason, Wanted,
};
use weft::pages::{Pages, Table, pair};
use weft::{Agent, Error, Memory, SealError};

const LONG: Duration = Duration::from_secs(60);
const LAYERS: usize = 3;
const HEADS: u64 = 4;
const UNIT: u64 = 32;
const BLOCKS: u64 = 32;
const TOKENS: u64 = 40;
const PATTERN: u64 = 251;

/// Caches in memory of a device, over shared memory.
const ON_DEVICE: &str = "gpu";

/// The ways that every case is tried by.
fn ways() -> Vec<&'static str> {
    let on_device = weft_testing::has(weft_testing::Need::Gpu).then_some(ON_DEVICE);
    ["shared_memory", "tcp"].into_iter().chain(on_device).collect()
}

/// One rank of an engine.
struct Worker {
    agent: Agent,
    hand_off: HandOff,
    memories: Vec<Memory>,
    pages: Pages,
}

impl Worker {
    fn start(name: &str, rank: u32, ranks: u32, block_tokens: u64, transport: &str, options: Options) -> Worker {
        let on_device = transport == ON_DEVICE;
        let agent = Agent::builder(name)
            .set("transports", if on_device { "shared_memory" } else { transport })
            .set("listen", "127.0.0.1:0")
            .secret("a secret of two engines")
            .start()
            .unwrap();
        Worker::open(agent, rank, ranks, block_tokens, on_device, options)
    }

    /// Closes what it hands off, and hands off another cache.
    fn reopen(self, block_tokens: u64, options: Options) -> Worker {
        let Worker { agent, hand_off, .. } = self;
        drop(hand_off);
        Worker::open(agent, 0, 1, block_tokens, false, options)
    }

    fn open(agent: Agent, rank: u32, ranks: u32, block_tokens: u64, on_device: bool, options: Options) -> Worker {
        let share = HEADS / u64::from(ranks);
        let heads = u64::from(rank) * share..(u64::from(rank) + 1) * share;
        let pages = Pages::heads_first(BLOCKS, block_tokens, heads, UNIT).unwrap();
        let layer = |nth: usize| Layer {
            name: format!("layer.{nth}"),
            region: nth as u32,
            granule: 1,
            pages: pages.clone(),
        };
        let meaning = vec![("model".to_owned(), "tiny".to_owned())];
        let cache = Cache::new(meaning, rank, ranks, (0..LAYERS).map(layer).collect()).unwrap();
        let memory = || match on_device {
            true => agent.allocate_device(0, pages.end()).unwrap(),
            false => agent.allocate(pages.end() as usize).unwrap(),
        };
        let memories: Vec<Memory> = (0..LAYERS).map(|_| memory()).collect();
        let hand_off = HandOff::open(&agent, cache, &memories, options).unwrap();
        Worker {
            agent,
            hand_off,
            memories,
            pages,
        }
    }

    /// Where each unit of a prompt lies here, with its number among all units of a layer.
    fn units(&self, blocks: &[u64], upto: u64) -> Vec<(u64, u64)> {
        let whole = Pages::heads_first(1, TOKENS, 0..HEADS, UNIT).unwrap();
        let heads = self.pages.shape().heads.clone();
        let near = Table {
            pages: &self.pages,
            blocks,
        };
        let far = Table {
            pages: &whole,
            blocks: &[0],
        };
        let (near, far) = pair(near, far, 0..upto, heads).unwrap();
        let pieces = weft_plan::spans::paired(&near, &far, 0..near.bytes());
        let units = pieces
            .flat_map(|(near, far, len)| (0..len / UNIT).map(move |unit| (near + unit * UNIT, far / UNIT + unit)));
        units.collect()
    }

    /// Writes what a layer of a prompt is.
    fn fill(&self, layer: usize, blocks: &[u64], upto: u64) {
        for (offset, unit) in self.units(blocks, upto) {
            let bytes = vec![((unit * 7 + layer as u64) % PATTERN + 1) as u8; UNIT as usize];
            self.memories[layer].write(offset, &bytes);
        }
    }

    fn check(&self, blocks: &[u64]) {
        for layer in 0..LAYERS {
            for (offset, unit) in self.units(blocks, TOKENS) {
                let mut found = vec![0; UNIT as usize];
                self.memories[layer].read(offset, &mut found);
                let wanted = ((unit * 7 + layer as u64) % PATTERN + 1) as u8;
                assert!(found.iter().all(|byte| *byte == wanted), "layer {layer}, unit {unit}");
            }
        }
    }

    fn next(&self) -> Event {
        self.hand_off.next_event(LONG).unwrap().expect("an event comes")
    }
}

fn wanted(blocks: &[u64]) -> Wanted {
    Wanted {
        blocks: blocks.to_vec(),
        tokens: 0..TOKENS,
        prompt_tokens: TOKENS,
        digest: [7; 32],
    }
}

fn prompt(blocks: &[u64]) -> Prompt {
    Prompt {
        blocks: blocks.to_vec(),
        tokens: TOKENS,
        digest: [7; 32],
    }
}

fn handed_off(event: Event) -> u64 {
    match event {
        Event::Ended { outcome: Ok(done), .. } => done.bytes,
        other => panic!("{other:?}"),
    }
}

fn free(event: Event) -> Over {
    match event {
        Event::Free { why, .. } => why,
        other => panic!("{other:?}"),
    }
}

/// Where the leases of a worker's engine are given out.
fn desk(worker: &Worker) -> Desk {
    Desk::new(worker.agent.settings()).unwrap()
}

fn origin(holder: &Worker, lease: Lease) -> Origin {
    Origin {
        hand_off: "one".to_owned(),
        addresses: vec![holder.agent.address()],
        blocks: vec![3, 9, 4],
        tokens: TOKENS,
        lease,
    }
}

fn refused(error: Error) -> HandOffError {
    match error {
        Error::HandOff(error) => *error,
        other => panic!("{other}"),
    }
}

const ALL_BYTES: u64 = LAYERS as u64 * 2 * HEADS * TOKENS * UNIT;

#[test]
fn what_is_offered_is_fetched() {
    for transport in ways() {
        let holder = Worker::start("holder", 0, 1, 16, transport, Options::default());
        let reader = Worker::start("reader", 0, 1, 8, transport, Options::default());
        let (there, here) = ([3, 9, 4], [8, 1, 30, 2, 7]);
        (0..LAYERS).for_each(|layer| holder.fill(layer, &there, TOKENS));
        let ticket = holder.hand_off.offer("one", &there, TOKENS, b"prompt").unwrap();
        let name = reader.hand_off.want(&ticket, b"prompt", 1).unwrap();
        reader.hand_off.fetch(&name, wanted(&here)).unwrap();
        assert_eq!(handed_off(reader.next()), ALL_BYTES, "{transport}");
        reader.check(&here);
        assert_eq!(free(holder.next()), Over::Served);
        assert_eq!(holder.hand_off.under_way().unwrap(), (0, 0, 0));
    }
}

#[test]
fn layers_are_pushed_from_two_ranks_to_one_while_they_are_computed() {
    let holders = [0, 1].map(|rank| {
        Worker::start(
            &format!("holder-{rank}"),
            rank,
            2,
            16,
            "shared_memory",
            Options::default(),
        )
    });
    let reader = Worker::start("reader", 0, 1, 8, "shared_memory", Options::default());
    let (there, here) = ([3, 9, 4], [8, 1, 30, 2, 7]);
    let addresses: Vec<String> = holders.iter().map(|holder| holder.agent.address()).collect();
    reader.hand_off.want_pushed("one", &addresses, 1).unwrap();
    reader.hand_off.fetch("one", wanted(&here)).unwrap();
    for holder in &holders {
        holder.hand_off.compute("one", prompt(&there)).unwrap();
    }
    // The first attempt is preempted, and its blocks are used for something else.
    for holder in &holders {
        holder.fill(0, &there, 16);
        holder.hand_off.computed("one", Some(0), 16).unwrap();
        holder.hand_off.preempt("one", LONG).unwrap();
        holder.memories[0].write(0, &vec![255; holder.memories[0].len() as usize]);
        holder.hand_off.compute("one", prompt(&there)).unwrap();
    }
    let lease = desk(&holders[0]).lease(LONG).unwrap();
    for upto in [16, TOKENS] {
        for layer in 0..LAYERS {
            for holder in &holders {
                holder.fill(layer, &there, upto);
                holder.hand_off.computed("one", Some(layer), upto).unwrap();
            }
        }
    }
    holders
        .iter()
        .for_each(|holder| holder.hand_off.offer_leased("one", lease).unwrap());
    assert!(handed_off(reader.next()) >= ALL_BYTES);
    reader.check(&here);
    for holder in &holders {
        assert_eq!(free(holder.next()), Over::Served);
    }
    assert_eq!(reader.hand_off.under_way().unwrap().1, 0);
}

#[test]
fn two_readers_have_a_share_each_and_the_ticket_is_written_by_somebody_else() {
    let holder = Worker::start("holder", 0, 1, 16, "shared_memory", Options::default());
    let readers = [0, 1].map(|rank| {
        Worker::start(
            &format!("reader-{rank}"),
            rank,
            2,
            16,
            "shared_memory",
            Options::default(),
        )
    });
    let (there, here) = ([3, 9, 4], [8, 1, 30]);
    (0..LAYERS).for_each(|layer| holder.fill(layer, &there, TOKENS));
    let desk = desk(&holder);
    let lease = desk.lease(LONG).unwrap();
    holder.hand_off.offer_leased("one", lease).unwrap();
    let ticket = desk.write(&origin(&holder, lease), b"prompt").unwrap();
    for reader in &readers {
        reader.hand_off.want(&ticket, b"prompt", 2).unwrap();
        reader.hand_off.fetch("one", wanted(&here)).unwrap();
    }
    for reader in &readers {
        assert_eq!(handed_off(reader.next()), ALL_BYTES / 2);
        reader.check(&here);
    }
    assert_eq!(free(holder.next()), Over::Served);
}

#[test]
fn the_last_words_of_a_reader_that_goes_at_once_are_heard() {
    for transport in ways() {
        let holder = Worker::start("holder", 0, 1, 16, transport, Options::default());
        for round in 0..5 {
            let name = format!("hand-off {round}");
            let ticket = holder.hand_off.offer(&name, &[3, 9, 4], TOKENS, b"prompt").unwrap();
            let reader = Worker::start("reader", 0, 1, 16, transport, Options::default());
            reader.hand_off.want(&ticket, b"prompt", 1).unwrap();
            reader.hand_off.fetch(&name, wanted(&[8, 1, 30])).unwrap();
            assert_eq!(handed_off(reader.next()), ALL_BYTES);
            drop(reader);
            assert_eq!(free(holder.next()), Over::Served, "{transport}");
        }
    }
}

#[test]
fn tickets_are_believed_once_and_for_their_prompt_alone() {
    let holder = Worker::start("holder", 0, 1, 16, "shared_memory", Options::default());
    let reader = Worker::start("reader", 0, 1, 16, "shared_memory", Options::default());
    let ticket = holder.hand_off.offer("one", &[3, 9, 4], TOKENS, b"prompt").unwrap();
    let another = reader.hand_off.want(&ticket, b"another", 1).unwrap_err();
    assert_eq!(refused(another), HandOffError::Ticket(SealError::AboutAnother));
    let mut forged = ticket.clone();
    forged[60] ^= 1;
    let forged = reader.hand_off.want(&forged, b"prompt", 1).unwrap_err();
    assert_eq!(refused(forged), HandOffError::Ticket(SealError::Forged));
    reader.hand_off.want(&ticket, b"prompt", 1).unwrap();
    let twice = reader.hand_off.want(&ticket, b"prompt", 1).unwrap_err();
    assert_eq!(refused(twice), HandOffError::Call(weft::hand_off::CallError::Used));
    reader.hand_off.leave("one").unwrap();
    let left = Event::Ended {
        name: "one".to_owned(),
        outcome: Err(Reason::Aborted),
    };
    assert_eq!(reader.next(), left);
    assert_eq!(free(holder.next()), Over::Served);
}

#[test]
fn a_desk_takes_tickets_and_offers_once_and_no_stamp_of_the_future() {
    let holder = Worker::start("holder", 0, 1, 16, "shared_memory", Options::default());
    let (ours, theirs) = (desk(&holder), desk(&holder));
    let said = origin(&holder, ours.lease(LONG).unwrap());
    let ticket = ours.write(&said, b"prompt").unwrap();
    assert_eq!(theirs.open(&ticket, b"prompt").unwrap(), said);
    let again = theirs.open(&ticket, b"prompt").unwrap_err();
    assert_eq!(refused(again), HandOffError::ComeBefore);

    let offer = ours.offer(&said.addresses, LONG).unwrap();
    assert_eq!(theirs.open_offer(&offer, "two", LONG).unwrap(), said.addresses);
    let again = theirs.open_offer(&offer, "two", LONG).unwrap_err();
    assert_eq!(refused(again), HandOffError::ComeBefore);
    // The same offer serves for as many prompts as come in its time; but it is no ticket, nor a ticket an offer.
    theirs.open_offer(&offer, "three", LONG).unwrap();
    let mixed = [
        theirs.open(&offer, b"").unwrap_err(),
        theirs.open_offer(&ticket, "four", LONG).unwrap_err(),
    ];
    for error in mixed {
        assert_eq!(refused(error), HandOffError::Ticket(SealError::Forged));
    }
    let old = ours.offer(&said.addresses, Duration::ZERO).unwrap();
    let old = theirs.open_offer(&old, "five", LONG).unwrap_err();
    assert_eq!(refused(old), HandOffError::Ticket(SealError::Expired));

    let stamp = said.lease.stamp + 2 * LONG.as_nanos() as u64;
    let ahead = origin(&holder, Lease { stamp, ..said.lease });
    let ahead = ours.write(&ahead, b"prompt").unwrap();
    let ahead = theirs.open(&ahead, b"prompt").unwrap_err();
    assert!(matches!(refused(ahead), HandOffError::Unreadable(_)));

    let second = ours.lease(LONG).unwrap();
    assert!(second.slot != said.lease.slot && second.stamp > said.lease.stamp);
    ours.give_back(second);
    assert_eq!(ours.lease(LONG).unwrap().slot, second.slot);
}

#[test]
fn what_nobody_comes_for_is_free_after_its_lease_and_a_holder_that_goes_is_named() {
    let short = Options {
        lease: Duration::from_millis(200),
        ..Options::default()
    };
    let holder = Worker::start("holder", 0, 1, 16, "tcp", short);
    let reader = Worker::start("reader", 0, 1, 16, "tcp", Options::default());
    holder
        .hand_off
        .offer("forgotten", &[1, 2, 3], TOKENS, b"prompt")
        .unwrap();
    assert_eq!(free(holder.next()), Over::Expired);
    reader
        .hand_off
        .want_pushed("one", &[holder.agent.address()], 1)
        .unwrap();
    reader.hand_off.fetch("one", wanted(&[8, 1, 30])).unwrap();
    holder.hand_off.compute("one", prompt(&[1, 2, 3])).unwrap();
    holder.hand_off.computed("one", Some(0), 16).unwrap();
    // Something has landed, and then there is nobody any more.
    while reader.hand_off.under_way().unwrap().2 == 0 {
        assert_eq!(reader.hand_off.next_event(Duration::from_millis(5)).unwrap(), None);
    }
    holder.agent.close();
    match reader.next() {
        Event::Ended {
            outcome: Err(Reason::Lost { peer }),
            ..
        } => assert_eq!(peer, "holder"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(holder.hand_off.stop("one"), Err(Error::Stopped)));
}

#[test]
fn one_cache_is_handed_off_at_a_time() {
    let worker = Worker::start("worker", 0, 1, 16, "shared_memory", Options::default());
    let pages = worker.pages.clone();
    let layer = Layer {
        name: "layer".to_owned(),
        region: 0,
        granule: 1,
        pages,
    };
    let cache = Cache::new(Vec::new(), 0, 1, vec![layer]).unwrap();
    let (agent, memories) = (worker.agent.clone(), worker.memories.clone());
    let second = HandOff::open(&agent, cache.clone(), &memories, Options::default());
    assert!(matches!(second, Err(Error::HandOff(error)) if *error == HandOffError::Taken));
    let short = agent.allocate(64).unwrap();
    drop(worker);
    let too_short = HandOff::open(&agent, cache.clone(), &[short], Options::default());
    assert!(matches!(too_short, Err(Error::HandOff(error)) if matches!(*error, HandOffError::Station(_))));
    HandOff::open(&agent, cache, &memories, Options::default()).unwrap();
}

#[test]
fn another_cache_is_opened_over_the_same_sessions() {
    for transport in ["shared_memory", "tcp"] {
        let mut holder = Worker::start("holder", 0, 1, 16, transport, Options::default());
        let mut reader = Worker::start("reader", 0, 1, 8, transport, Options::default());
        let sessions = [
            reader.agent.connect(&holder.agent.address()).unwrap(),
            holder.agent.connect(&reader.agent.address()).unwrap(),
        ];
        let blocks = [8, 1, 30, 2, 7];
        for round in 0..4 {
            (0..LAYERS).for_each(|layer| holder.fill(layer, &blocks, TOKENS));
            let (never, pushed) = (format!("never {round}"), format!("pushed {round}"));
            // A ticket that comes sooner than the word that there is another cache costs a fetch, and no wrong byte.
            for attempt in 0.. {
                let fetched = format!("fetched {round} {attempt}");
                let ticket = holder.hand_off.offer(&fetched, &blocks, TOKENS, b"prompt").unwrap();
                reader.hand_off.want(&ticket, b"prompt", 1).unwrap();
                reader.hand_off.fetch(&fetched, wanted(&blocks)).unwrap();
                match reader.next() {
                    Event::Ended {
                        outcome: Err(Reason::Move { .. }),
                        ..
                    } if round > 0 && attempt < 100 => continue,
                    done => assert_eq!(handed_off(done), ALL_BYTES, "{transport}, {fetched}"),
                }
                reader.check(&blocks);
                break;
            }
            let addresses = [holder.agent.address()];
            reader.hand_off.want_pushed(&pushed, &addresses, 1).unwrap();
            reader.hand_off.fetch(&pushed, wanted(&blocks)).unwrap();
            holder.hand_off.compute(&pushed, prompt(&blocks)).unwrap();
            holder.hand_off.computed(&pushed, None, TOKENS).unwrap();
            holder.hand_off.offer(&pushed, &blocks, TOKENS, b"prompt").unwrap();
            assert_eq!(handed_off(reader.next()), ALL_BYTES, "{transport}, {pushed}");
            reader.check(&blocks);
            // One waits for what the other will never compute.
            reader.hand_off.want_pushed(&never, &addresses, 1).unwrap();
            match round % 2 {
                0 => holder = holder.reopen(8, Options::default()),
                _ => reader = reader.reopen(16, Options::default()),
            }
            if round % 2 == 0 {
                reader.hand_off.leave(&never).unwrap();
                assert!(matches!(reader.next(), Event::Ended { .. }));
            }
            assert!(sessions.iter().all(|peer| peer.is_connected()), "{transport}, {round}");
        }
    }
}

#[test]
fn a_lease_that_cannot_be_kept_is_refused() {
    let options = Options {
        lease: Duration::from_nanos(3),
        ..Options::default()
    };
    let worker = Worker::start("worker", 0, 1, 16, "shared_memory", options);
    let offered = worker.hand_off.offer("one", &[3, 9, 4], TOKENS, b"prompt").unwrap_err();
    assert_eq!(refused(offered), HandOffError::Call(weft::hand_off::CallError::Invalid));
    let wanted = worker.hand_off.want_pushed("two", &[worker.agent.address()], 1);
    assert_eq!(
        refused(wanted.unwrap_err()),
        HandOffError::Call(weft::hand_off::CallError::Invalid)
    );
}
