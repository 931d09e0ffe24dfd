//! Executions of collectives between simulated agents: the network loses, repeats, delays and reorders, by seed, and every rank ends with
//! what a loop over all inputs says.

#[path = "../../protocol/tests/collectives/mod.rs"]
mod collectives;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use collectives::{Case, filled, programs, reference};
use weft_plan::collective::{Buffer, Layout};
use weft_plan::schedule::{Program, verify};
use weft_plan::{Datatype, Rank, Reduction, Time};
use weft_protocol::agent::{Event, Target};
use weft_protocol::group::{
    Abort, At, Board, CallRecord, Combiner, Compiled, Exchange, Execution, Function, Kernels, Lane, Lent, MessageHead,
    OfferId, Offered, Piece, Reference, Scope, Sink, Source, Status, Taken, Task, Trouble, Turn, View, Waiting,
};
use weft_protocol::transfer::PeerId;
use weft_protocol::{Epoch, Progress, Seeded, VecMemory};
use weft_sim::{Birth, Fabric, Faults, SimAgent, World};

const GROUP: u64 = 8;
const SEEDS: u64 = 200;

/// Messages as parcels of a simulated agent, each of them whole.
#[derive(Debug)]
struct Parcels {
    agent: SimAgent,
    /// By rank.
    peers: Vec<Option<PeerId>>,
    incoming: BTreeMap<Lane, VecDeque<(MessageHead, Vec<u8>)>>,
    buffers: Vec<View>,
    lent: Lent<View>,
}

impl Parcels {
    fn view(&self, piece: Piece) -> At<'_> {
        let view = match piece.is_lent() {
            true => self.lent.of(piece.buffer).expect("a buffer that is lent"),
            false => &self.buffers[piece.buffer as usize],
        };
        At {
            memory: &*view.memory,
            offset: view.offset + piece.offset,
        }
    }

    fn take_in(&mut self) {
        while let Some(parcel) = self.agent.core.next_parcel(GROUP) {
            let rank = self.peers.iter().position(|peer| *peer == Some(parcel.from));
            let payload = parcel.payload();
            let word = |at: usize| u64::from_le_bytes(payload[at..at + 8].try_into().expect("eight bytes"));
            let lane = Lane {
                peer: Rank(rank.expect("a rank") as u32),
                channel: word(32) as u16,
            };
            let head = MessageHead {
                call: word(0),
                signature: word(8),
                index: word(16) as u32,
                len: word(24),
            };
            let messages = self.incoming.entry(lane).or_default();
            messages.push_back((head, payload[40..].to_vec()));
        }
    }
}

impl Board for Parcels {
    fn publish(&mut self, _: Waiting) {}
    fn status(&mut self, _: Rank) -> Option<Status> {
        None
    }
    fn pulse(&mut self, _: Rank) -> u64 {
        0
    }
    fn abort(&mut self, abort: &Abort) {
        panic!("{abort}");
    }
}

impl Exchange for Parcels {
    fn channels(&self) -> u16 {
        u16::MAX - 1
    }

    fn begin(&mut self, _: &CallRecord, buffers: &mut Vec<View>) -> Result<(), Trouble> {
        self.buffers = std::mem::take(buffers);
        Ok(())
    }

    fn buffer(&self, place: u32) -> &View {
        &self.buffers[place as usize]
    }

    fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        let mut bytes = Vec::new();
        let words = [
            head.call,
            head.signature,
            head.index.into(),
            head.len,
            lane.channel.into(),
        ];
        words
            .iter()
            .for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        let start = bytes.len();
        bytes.resize(start + from.len as usize, 0);
        let at = self.view(from);
        if from.len > 0 {
            at.memory.bytes().read(at.offset, &mut bytes[start..]);
        }
        let (peer, now) = (self.peers[lane.peer.0 as usize].expect("a peer"), self.agent.now());
        match self.agent.core.send_parcel(peer, GROUP, &[&bytes], now) {
            Ok(true) => Ok(Offered::Settled),
            Ok(false) => Ok(Offered::Full),
            Err(error) => panic!("{error}"),
        }
    }

    fn settled(&mut self, _: Lane, _: OfferId) -> bool {
        true
    }

    fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        let Some((found, bytes)) = self.incoming.get_mut(&lane).and_then(VecDeque::pop_front) else {
            return Ok(Taken::Nothing);
        };
        assert_eq!(found, *head, "a message of another call");
        let len = bytes.len() as u64;
        let came = VecMemory::new(bytes);
        let from = At {
            memory: &came,
            offset: 0,
        };
        match sink {
            Sink::Copy(into) => Reference.copy(from, self.view(*into), len),
            Sink::Combine { with, into, how } => Reference.combine(how, self.view(*with), from, self.view(*into), len),
        }
        Ok(Taken::All)
    }

    fn poll(&mut self, _: Time) -> Result<Progress, Trouble> {
        Ok(Progress::Idle)
    }

    fn end(&mut self) -> Progress {
        self.buffers.clear();
        Progress::Idle
    }

    fn lend(&mut self, _: Rank, view: &View) -> Result<u32, Trouble> {
        Ok(self.lent.insert(view.clone()))
    }

    fn take_back(&mut self, _: Rank, buffer: u32) -> Progress {
        self.lent.remove(buffer);
        Progress::Idle
    }
}

/// A reduction as a function of the caller's own.
#[derive(Debug)]
struct Own(Datatype, Reduction);

impl Function for Own {
    fn combine(&self, into: &mut [u8], from: &[u8]) {
        self.0.combine(self.1, into, from).expect("whole elements");
    }
}

struct Player {
    exchange: Parcels,
    execution: Execution,
    memory: [Arc<VecMemory>; 3],
    /// The earliest turn that is arranged.
    wake: Option<Time>,
    ended: bool,
}

struct Scene {
    world: World,
    players: Vec<Player>,
}

impl Scene {
    /// Agents of so many ranks, each with a session to every other.
    fn new(ranks: u32, seed: u64) -> Scene {
        let mut chance = Seeded::new(seed);
        let mut rate = |max: f64| chance.below(1000) as f64 / 1000.0 * max;
        let faults = Faults {
            loss: rate(0.05),
            duplication: rate(0.05),
            delay: rate(0.05),
            unacknowledged: rate(0.05),
            short_post: rate(0.2),
            ..Faults::NONE
        };
        let world = World::new(seed, faults);
        let start = |rank: u32| {
            let name = format!("{rank}");
            let birth = Birth {
                node: world.add_node(&name, &name),
                host: name.clone(),
                secret: weft_protocol::session::Secret::new(b"simulated"),
                name,
                epoch: Epoch(u64::from(rank) + 1),
                rails: vec![Fabric::NETWORK],
                paths: 2,
                heartbeat: Time::from_ms(100),
                silence_max: Time::from_secs(20),
                clock: Time::ZERO,
                device: false,
            };
            Player {
                exchange: Parcels {
                    agent: SimAgent::start(&world, &birth),
                    peers: vec![None; ranks as usize],
                    incoming: BTreeMap::new(),
                    buffers: Vec::new(),
                    lent: Lent::default(),
                },
                execution: Execution::default(),
                memory: [0; 3].map(|_| Arc::new(VecMemory::zeroed(0))),
                wake: None,
                ended: false,
            }
        };
        let mut scene = Scene {
            players: (0..ranks).map(start).collect(),
            world: world.clone(),
        };
        for from in 0..ranks as usize {
            for to in 0..from {
                let address = scene.players[to].exchange.agent.core.addresses()[0].clone();
                let agent = &mut scene.players[from].exchange.agent;
                let now = agent.now();
                let target = Target::at(address, now.saturating_add(Time::from_secs(20)));
                agent
                    .core
                    .connect(target, now)
                    .expect("few peers and a known transport");
            }
        }
        let met = |player: &Player| player.exchange.peers.iter().flatten().count() as u32 == ranks - 1;
        scene.run(|scene| scene.players.iter().all(met));
        scene
    }

    /// Lets things happen until what is wanted has.
    fn run(&mut self, wanted: impl Fn(&Scene) -> bool) {
        (0..self.players.len()).for_each(|index| self.turn(index));
        for _ in 0..2_000_000 {
            if wanted(self) {
                return;
            }
            let step = self.world.step().expect("something that will happen");
            if let Some(index) = step.tick {
                self.players[index as usize].wake = None;
                self.turn(index as usize);
            }
            step.ready.into_iter().for_each(|node| self.turn(node.0 as usize));
        }
        for (rank, player) in self.players.iter().enumerate() {
            eprintln!(
                "rank {rank} ended {} waits for {:?}, {:?} arranged, wants {:?}",
                player.ended,
                player.execution.waiting(),
                player.wake,
                player.exchange.agent.next_timeout()
            );
        }
        panic!("the world goes in circles at {:?}", self.world.now());
    }

    fn turn(&mut self, index: usize) {
        let player = &mut self.players[index];
        loop {
            let mut events = Vec::new();
            player.exchange.agent.turn(&mut events);
            for event in events {
                match event {
                    Event::Connected { peer, identity, .. } => {
                        let rank: usize = identity.name.parse().expect("the name of a rank");
                        player.exchange.peers[rank] = Some(peer);
                    }
                    Event::PeerLost { name, cause, .. } => panic!("{name} is lost to {index}: {cause}"),
                    Event::ConnectFailed { error, .. } => panic!("{error}"),
                    _ => {}
                }
            }
            player.exchange.take_in();
            if player.execution.record().is_none() {
                break;
            }
            let turn = player
                .execution
                .turn(&mut player.exchange, &Reference, 1)
                .expect("no trouble");
            player.ended |= turn == Turn::Ended;
            if turn == Turn::Waiting {
                break;
            }
        }
        if let Some(next) = player.exchange.agent.next_timeout() {
            let next = next.max(self.world.now().saturating_add(Time::from_ns(1)));
            if player.wake.is_none_or(|at| next < at) {
                player.wake = Some(next);
                self.world.at(next, index as u64);
            }
        }
    }

    /// All ranks run a case by a program, and have what they should.
    fn play(&mut self, case: &Case, program: &dyn Program, custom: bool, number: u64) {
        for (rank, player) in self.players.iter_mut().enumerate() {
            let rank = Rank(rank as u32);
            let source = Source {
                program,
                partition: &case.partition(program),
                size: case.datatype.size(),
                average: case.reduction == Reduction::Avg && case.problem.collective.reduces(),
                scope: Scope::Known,
            };
            let compiled = Compiled::new(&source, rank).unwrap();
            let layout = Layout::new(source.partition, program, rank);
            let bytes = |buffer| layout.elements(buffer) as usize * source.size;
            player.memory = [
                Arc::new(VecMemory::new(filled(case, rank, bytes(Buffer::Input)))),
                Arc::new(VecMemory::new(vec![0xaa; bytes(Buffer::Output)])),
                Arc::new(VecMemory::new(vec![0x55; compiled.scratch() as usize])),
            ];
            let (datatype, reduction) = (case.datatype, case.reduction);
            let how = match custom && reduction != Reduction::Avg {
                true => Combiner::Custom {
                    size: datatype.size(),
                    function: Arc::new(Own(datatype, reduction)),
                },
                false => Combiner::Builtin { datatype, reduction },
            };
            let task = Arc::new(Task {
                compiled,
                combiners: vec![how],
                ranks: case.problem.ranks,
                record: CallRecord::new(0, 1, case.problem.collective.name()),
            });
            let mut views = player.memory.clone().map(|memory| View::whole(memory)).to_vec();
            player.ended = false;
            let begun = player.execution.begin(&task, number, &mut views, &mut player.exchange);
            begun.unwrap();
        }
        self.run(|scene| scene.players.iter().all(|player| player.ended));
        for (rank, player) in self.players.iter().enumerate() {
            let rank = Rank(rank as u32);
            let output = player.memory[1].snapshot();
            assert_eq!(
                output,
                reference(case, rank),
                "rank {} of {case:?} by {program:?}",
                rank.0
            );
        }
    }
}

#[test]
fn an_execution_over_a_faulty_network_does_what_the_collective_means() {
    for seed in 0..SEEDS {
        let mut chance = Seeded::new(seed ^ 0xc011);
        let ranks = 2 + chance.below(8) as u32;
        let mut scene = Scene::new(ranks, seed);
        for number in 0..4 {
            let case = Case::random(ranks, chance.below(300), chance.next_u64());
            let case = Case {
                problem: weft_plan::collective::Problem {
                    in_place: false,
                    ..case.problem
                },
                ..case
            };
            let programs = programs(&case.problem);
            let (algorithm, program) = &programs[chance.below(programs.len() as u64) as usize];
            verify(&case.problem, &**program).unwrap_or_else(|fault| panic!("{algorithm:?}: {fault}"));
            eprintln!("seed {seed} {number} {algorithm:?} {case:?}");
            scene.play(&case, &**program, chance.chance(0.3), number);
        }
    }
}
