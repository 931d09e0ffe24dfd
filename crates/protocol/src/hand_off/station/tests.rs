//! Stations over loopback, turned by hand.

use std::sync::Mutex;

use weft_plan::pages::Pages;
use weft_plan::spans::paired;

use super::*;
use crate::agent::{Reach, Settings as AgentSettings, Slot};
use crate::hand_off::{Cache, Event as Told, HandedOff, Layer, Lease, Origin, Prompt, Reason, Settings, Wanted};
use crate::loopback::{Loopback, LoopbackEndpoint};
use crate::memory::VecMemory;
use crate::region::Epoch;
use crate::seeded::Seeded;
use crate::session::{Config, Secret};

const LASTS: Time = Time::from_secs(60);
const TOKENS: u64 = 40;

#[derive(Default)]
struct Heap(Arc<Mutex<Vec<Arc<VecMemory>>>>);

impl Room for Heap {
    fn make(&mut self, bytes: u64) -> Option<(Arc<dyn Memory>, Place)> {
        let memory = Arc::new(VecMemory::zeroed(bytes as usize));
        self.0.lock().unwrap().push(memory.clone());
        Some((memory, Place::DRAM))
    }
}

fn cache(block_tokens: u64) -> Cache {
    let layer = |nth: u32| Layer {
        name: format!("layer.{nth}"),
        region: nth,
        granule: 1,
        pages: Pages::heads_first(32, block_tokens, 0..2, 16).unwrap(),
    };
    Cache::new(Vec::new(), 0, 1, vec![layer(0), layer(1)]).unwrap()
}

struct Worker {
    core: Core<LoopbackEndpoint>,
    station: Option<Station>,
    told: Vec<Told>,
    lost: usize,
    peers: Vec<(PeerId, String)>,
}

struct Pair {
    workers: [Worker; 2],
    now: Time,
}

impl Pair {
    fn new() -> Pair {
        let network = Loopback::new();
        let worker = |name: &str, epoch: u64| {
            let slot = Slot {
                reach: Reach::Anywhere,
                preference: 0,
                paths: 1,
                transport: Box::new(network.endpoint(name, Epoch(epoch))),
            };
            let mut chance = Seeded::new(epoch);
            let random = Box::new(move || {
                let mut bytes = [0; 32];
                chance.fill(&mut bytes);
                bytes
            });
            let config = Config::new(name, Epoch(epoch), Secret::new(b"secret"));
            Worker {
                core: Core::new(AgentSettings::new(config), vec![slot], random),
                station: None,
                told: Vec::new(),
                lost: 0,
                peers: Vec::new(),
            }
        };
        let mut pair = Pair {
            workers: [worker("holder", 1), worker("reader", 2)],
            now: Time::from_secs(1),
        };
        pair.open(0, 16);
        pair.open(1, 16);
        pair
    }

    fn open(&mut self, at: usize, block_tokens: u64) {
        let (worker, cache) = (&mut self.workers[at], cache(block_tokens));
        let regions = cache.layers().iter().map(|layer| {
            let memory = Arc::new(VecMemory::zeroed(layer.pages.end() as usize));
            worker.core.register(memory, Place::DRAM).unwrap()
        });
        let regions = regions.collect();
        let machine = HandOffs::new(cache, Settings::default(), self.now.as_ns());
        let room = Box::new(Heap::default());
        let peers = worker.peers.clone();
        worker.station = Some(Station::open(&mut worker.core, machine, regions, room, peers, self.now).unwrap());
    }

    fn close(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        let mut station = worker.station.take().unwrap();
        assert_eq!(station.close(&mut worker.core, self.now), []);
    }

    fn turn(&mut self) {
        self.now = self.now.saturating_add(Time::from_ms(1));
        for worker in &mut self.workers {
            worker.core.pump(self.now);
            while let Some(event) = worker.core.next_event() {
                match &event {
                    Event::Connected { peer, identity, .. } => worker.peers.push((*peer, identity.name.clone())),
                    Event::PeerLost { .. } => worker.lost += 1,
                    _ => {}
                }
                if let Some(station) = &mut worker.station {
                    station.on_event(&mut worker.core, &event, self.now);
                }
            }
            let Some(station) = &mut worker.station else { continue };
            station.turn(&mut worker.core, self.now);
            while let Some(event) = station.machine.next_event() {
                if let Told::Settle {
                    landing,
                    layers,
                    copies,
                    ..
                } = &event
                {
                    for copy in copies {
                        let (from, to) = (
                            station.landing(*landing).unwrap(),
                            station.region(copy.near_region).unwrap(),
                        );
                        for (near, far, len) in paired(&copy.near, &copy.far, 0..copy.near.bytes()) {
                            let mut bytes = vec![0; len as usize];
                            from.memory.bytes().read(far, &mut bytes);
                            to.memory.bytes().write(near, &bytes);
                        }
                    }
                    station.machine.settled(*landing, layers, self.now);
                }
                worker.told.push(event);
            }
        }
    }

    fn turns(&mut self, times: usize) {
        (0..times).for_each(|_| self.turn());
    }

    fn machine(&mut self, at: usize) -> &mut HandOffs {
        &mut self.workers[at].station.as_mut().unwrap().machine
    }

    fn address(&self) -> String {
        self.workers[0].core.addresses()[0].0.clone()
    }

    fn want(&mut self, name: &str, pushed: bool) {
        let (now, addresses) = (self.now, vec![self.address()]);
        if pushed {
            self.machine(1).want_pushed(name, addresses, 1, now).unwrap();
            return;
        }
        let lease = self.machine(0).offer(name, None, LASTS, now).unwrap();
        let origin = Origin {
            hand_off: name.to_owned(),
            addresses,
            blocks: vec![3, 9, 4, 1, 2],
            tokens: TOKENS,
            lease,
        };
        self.machine(1).want(origin, 1, now).unwrap();
    }

    fn fetch(&mut self, name: &str) {
        let (now, blocks) = (self.now, vec![7, 5, 6, 8, 10]);
        let (tokens, prompt_tokens, digest) = (0..TOKENS, TOKENS, [7; 32]);
        let wanted = Wanted {
            blocks,
            tokens,
            prompt_tokens,
            digest,
        };
        self.machine(1).fetch(name, wanted, now).unwrap();
    }

    fn compute(&mut self, name: &str) {
        let (now, tokens, digest) = (self.now, TOKENS, [7; 32]);
        let blocks = vec![3, 9, 4, 1, 2];
        let prompt = Prompt { blocks, tokens, digest };
        self.machine(0).compute(name, prompt, now).unwrap();
        self.machine(0).computed(name, None, TOKENS, now);
    }

    fn ended(&mut self, name: &str) -> Result<HandedOff, Reason> {
        for _ in 0..5000 {
            let mut told = self.workers[1].told.iter();
            let found = told.find_map(|event| match event {
                Told::Ended { hand_off, outcome } if hand_off == name => Some(outcome.clone()),
                _ => None,
            });
            if let Some(outcome) = found {
                return outcome;
            }
            self.turn();
        }
        panic!("{name} does not end");
    }

    /// One prompt is fetched, and one is pushed.
    fn hand_off(&mut self, name: &str) {
        let bytes = 2 * 2 * TOKENS * 2 * 16;
        let (fetched, pushed) = (format!("{name}, fetched"), format!("{name}, pushed"));
        self.want(&fetched, false);
        self.fetch(&fetched);
        self.want(&pushed, true);
        self.fetch(&pushed);
        self.compute(&pushed);
        assert_eq!(self.ended(&fetched).unwrap().bytes, bytes);
        assert_eq!(self.ended(&pushed).unwrap().bytes, bytes);
        assert_eq!([self.workers[0].lost, self.workers[1].lost], [0, 0]);
    }
}

#[test]
fn a_station_that_is_opened_again_goes_on_over_the_same_sessions() {
    let mut pair = Pair::new();
    pair.hand_off("first");
    for (at, block_tokens) in [(0, 8), (1, 8), (0, 16), (1, 32)] {
        // One waits for the other to push, and is told that this will never be.
        let name = format!("over {at} {block_tokens}");
        pair.want(&name, true);
        pair.fetch(&name);
        pair.turns(5);
        pair.close(at);
        if at == 0 {
            // Nobody hears this.
            pair.want(&format!("unheard {block_tokens}"), true);
        }
        pair.turns(5);
        pair.open(at, block_tokens);
        pair.turns(5);
        if at == 0 {
            let peer = "holder".to_owned();
            assert_eq!(pair.ended(&name), Err(Reason::BegunAnew { peer }));
        }
        pair.hand_off(&format!("{at} {block_tokens}"));
    }
    let sessions = pair.workers[0].peers.len();
    pair.turns(1000);
    assert_eq!((pair.workers[0].peers.len(), pair.workers[0].lost), (sessions, 0));
}

#[test]
fn a_word_that_makes_no_sense_costs_what_was_arranged_and_not_the_session() {
    let mut pair = Pair::new();
    pair.hand_off("before");
    let (now, peer) = (pair.now, pair.workers[0].peers[0].0);
    pair.want("waiting", true);
    pair.fetch("waiting");
    pair.turns(5);
    let nonsense = pair.workers[0].core.send_parcel(peer, PARCELS, &[b"nonsense"], now);
    assert_eq!(nonsense, Ok(true));
    let holder = "holder".to_owned();
    assert_eq!(pair.ended("waiting"), Err(Reason::BegunAnew { peer: holder }));
    pair.hand_off("after one");
    for _ in 0..100 {
        let now = pair.now;
        let said = pair.workers[0].core.send_parcel(peer, PARCELS, &[b"nonsense"], now);
        assert_eq!(said, Ok(true));
    }
    pair.turns(5);
    pair.hand_off("after many");
}

#[test]
fn a_station_that_is_not_opened_leaves_nothing_behind() {
    let mut pair = Pair::new();
    pair.close(0);
    let now = pair.now;
    let core = &mut pair.workers[0].core;
    let region = |core: &mut Core<LoopbackEndpoint>| {
        let memory = Arc::new(VecMemory::zeroed(1 << 20));
        core.register(memory, Place::DRAM).unwrap()
    };
    let regions = vec![region(core), region(core)];
    core.release(&regions[1].key, now).unwrap();
    let made = Heap::default();
    let room = Box::new(Heap(made.0.clone()));
    let first = regions[0].memory.clone();
    let machine = HandOffs::new(cache(16), Settings::default(), 0);
    let opened = Station::open(core, machine, regions, room, [], now);
    assert!(matches!(opened, Err(StationError::Region(_))), "{opened:?}");
    // Nobody knows the table and the words any more, and of the cache its owner and its registration.
    assert_eq!(made.0.lock().unwrap().len(), 2);
    for memory in &*made.0.lock().unwrap() {
        assert_eq!(Arc::strong_count(memory), 1);
    }
    let known = Arc::strong_count(&first);
    pair.open(0, 16);
    assert_eq!(Arc::strong_count(&first), known);
    pair.turns(5);
    pair.hand_off("after");
}

#[test]
fn a_word_of_the_table_never_moves_back() {
    let mut pair = Pair::new();
    let now = pair.now;
    let stamp = now.as_ns() + 1000;
    let lease = Lease {
        slot: 5,
        stamp,
        lasts: LASTS,
    };
    let word = |pair: &mut Pair| {
        pair.turn();
        let mut bytes = [0; 8];
        let table = &pair.workers[0].station.as_ref().unwrap().table;
        table.memory.bytes().read(8 * 5, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    pair.machine(0).offer("one", Some(lease), LASTS, now).unwrap();
    assert_eq!(word(&mut pair), stamp);
    pair.machine(0).stop("one", now).unwrap();
    assert_eq!(word(&mut pair), stamp + 1);
    let earlier = Lease {
        stamp: stamp - 500,
        ..lease
    };
    pair.machine(0).offer("two", Some(earlier), LASTS, now).unwrap();
    assert_eq!(word(&mut pair), stamp + 1);
}

#[test]
fn a_station_that_is_about_to_be_closed_begins_no_move() {
    let mut pair = Pair::new();
    pair.hand_off("before");
    pair.want("late", false);
    pair.fetch("late");
    let (now, reader) = (pair.now, &mut pair.workers[1]);
    let idle = |reader: &mut Worker| reader.station.as_mut().unwrap().end_moves(&mut reader.core, now);
    assert!(idle(reader));
    assert!(pair.ended("late").is_err());
    assert!(idle(&mut pair.workers[1]));
}
