//! Two loopback agents joined by several paths, and the turn of an engine over them.

use std::sync::Arc;

use weft_plan::{Place, Spans, Time};
use weft_protocol::transfer::{Engine, Lane, LaneId, Limits, PeerId, TransferEvent};
use weft_protocol::{
    Access, Epoch, Leg, Loopback, LoopbackEndpoint, Memory, PathId, Progress, Region, RegionKey, RemoteRegion, Seeded,
    Signal, Transport, VecMemory,
};

pub struct World<T> {
    pub engine: Engine,
    pub now: Time,
    pub here: T,
    pub there: LoopbackEndpoint,
    pub arrivals: Vec<weft_protocol::Arrival>,
    /// The lane with number `i` is this path.
    pub paths: Vec<PathId>,
    random: Seeded,
    next_slot: u32,
}

impl<T: Transport> World<T> {
    pub fn new(lanes: u32, wrap: impl FnOnce(LoopbackEndpoint) -> T) -> World<T> {
        let network = Loopback::new();
        let there = network.endpoint("there", Epoch(2));
        let mut here = wrap(network.endpoint("here", Epoch(1)));
        let mut engine = Engine::new(Limits {
            max_attempts: 50,
            ..Limits::default()
        });
        let mut paths = Vec::new();
        for i in 0..lanes {
            paths.push(
                here.open(&there.capabilities().address, Time::ZERO)
                    .expect("open starts"),
            );
            engine.add_lane(Lane::of(here.capabilities(), LaneId(i), PeerId(0)));
        }
        World {
            engine,
            now: Time::ZERO,
            here,
            there,
            arrivals: Vec::new(),
            paths,
            random: Seeded::new(1),
            next_slot: 0,
        }
    }

    /// A leg over shuffled pages of fresh regions.
    pub fn leg(&mut self, pages: u64) -> (Arc<Leg>, Region) {
        let len = pages * 4096;
        let near = self.region(Epoch(1), len);
        let far = self.region(Epoch(2), len);
        self.here.register(&near).expect("loopback takes any memory");
        let grant = self.there.register(&far).expect("loopback takes any memory");
        let remote = RemoteRegion {
            key: far.key,
            len,
            place: Place::DRAM,
            access: far.access,
            grants: Arc::from([("loopback".to_string(), grant)]),
        };
        let spans = Spans::paged(0, 4096, self.random.shuffled(pages));
        let leg = Leg::new(near, spans.clone(), remote, spans).expect("a leg within its regions");
        (Arc::new(leg), far)
    }

    fn region(&mut self, epoch: Epoch, len: u64) -> Region {
        let mut bytes = vec![0; len as usize];
        self.random.fill(&mut bytes);
        self.next_slot += 1;
        Region {
            key: RegionKey {
                epoch,
                slot: self.next_slot,
                secret: 5,
            },
            memory: Arc::new(VecMemory::new(bytes)),
            place: Place::DRAM,
            access: Access::READ_WRITE,
        }
    }

    /// One turn of everything; time passes only where nothing else happens.
    pub fn turn(&mut self, events: &mut Vec<TransferEvent>) {
        self.engine.on_timeout(self.now);
        while let Some(post) = self.engine.next_post() {
            let path = self.paths[post.lane.0 as usize];
            match self.here.post(path, std::slice::from_ref(&post.op), self.now) {
                Ok(1) => {}
                _ => self.engine.unaccepted(post),
            }
        }
        while let Some((lane, op)) = self.engine.next_cancel() {
            self.here.cancel(self.paths[lane.0 as usize], op, self.now);
        }
        let mut signals = Vec::new();
        let progress = self.here.poll(self.now, &mut signals);
        for signal in signals {
            self.absorb(signal);
        }
        let mut there = Vec::new();
        self.there.poll(self.now, &mut there);
        for signal in &there {
            if let Signal::Accepted { path } = signal {
                self.there.vouch(*path);
            }
        }
        self.arrivals
            .extend(there.into_iter().filter_map(|signal| match signal {
                Signal::Arrived { arrival, .. } => Some(arrival),
                _ => None,
            }));
        while let Some(event) = self.engine.next_event() {
            events.push(event);
        }
        if progress == Progress::Idle {
            self.now = self.now.saturating_add(Time::from_us(20));
        }
    }

    fn absorb(&mut self, signal: Signal) {
        let path = signal.path();
        let lane = self.paths.iter().position(|p| *p == path).map(|i| LaneId(i as u32));
        let Some(lane) = lane else { return };
        match signal {
            Signal::Completed { op, outcome, .. } => self.engine.on_completion(lane, op, outcome, self.now),
            Signal::Lost { loss, fenced, .. } => self.engine.on_lane_lost(lane, loss, fenced, self.now),
            _ => {}
        }
    }

    /// Turns until `ends` transfers have ended, and gives all events.
    pub fn until_ended(&mut self, ends: usize) -> Vec<TransferEvent> {
        let mut events = Vec::new();
        while events
            .iter()
            .filter(|e| matches!(e, TransferEvent::Ended { .. }))
            .count()
            < ends
        {
            self.turn(&mut events);
            assert!(self.now < Time::from_secs(60), "transfers that do not end");
        }
        events
    }
}

pub fn same(a: &Region, b: &Region) -> bool {
    let bytes = |memory: &dyn Memory| {
        let mut bytes = vec![0; memory.len() as usize];
        memory.bytes().read(0, &mut bytes);
        bytes
    };
    bytes(&*a.memory) == bytes(&*b.memory)
}
