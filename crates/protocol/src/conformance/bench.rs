//! The two ends of a case, turned in one thread, and the promises that hold in every case.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use weft_plan::{Spans, Time};

use super::{Harness, Side};
use crate::error::{Failure, Loss};
use crate::leg::{Direction, Leg};
use crate::memory::{Digest, HostBytes, Memory};
use crate::region::{Access, Epoch, Region, RegionKey, RemoteRegion};
use crate::seeded::Seeded;
use crate::transfer::{PartLimits, cut};
use crate::transport::{Arrival, Body, Done, Move, Op, OpId, PathId, Progress, Signal, Transport};

/// Two ends joined by a path.
pub(super) struct Bench<'h> {
    pub harness: &'h mut dyn Harness,
    pub initiator: End,
    pub target: End,
    /// The first path, as the initiator and as the target number it.
    pub near: PathId,
    pub far: PathId,
    pub random: Seeded,
    /// A frozen target is not polled.
    pub frozen: bool,
    /// There is one end, which is both: its transport has no peers.
    alone: bool,
    next_slot: u32,
    next_op: u64,
}

/// One end and what it has said so far.
pub(super) struct End {
    /// `None` once it is dead.
    pub transport: Option<Box<dyn Transport>>,
    pub epoch: Epoch,
    pub opened: Vec<PathId>,
    pub accepted: Vec<PathId>,
    pub lost: BTreeMap<PathId, (Loss, bool)>,
    pub messages: Vec<(PathId, Vec<u8>)>,
    pub arrivals: Vec<Arrival>,
    outstanding: BTreeSet<(PathId, OpId)>,
    completed: BTreeMap<OpId, Result<Done, Failure>>,
}

/// How a leg is to be moved.
#[derive(Clone, Copy, Default)]
pub(super) struct How {
    pub checksum: bool,
    pub tag: Option<u64>,
}

impl<'h> Bench<'h> {
    /// Fresh ends and a path between them.
    pub fn new(harness: &'h mut dyn Harness) -> Bench<'h> {
        let mut bench = Bench::unconnected(harness);
        (bench.near, bench.far) = bench.connect();
        bench
    }

    pub fn unconnected(harness: &'h mut dyn Harness) -> Bench<'h> {
        let alone = harness.has_no_peers();
        let (initiator, target) = match alone {
            true => {
                let (transport, epoch) = harness.alone().expect("an end without a peer");
                (End::new(Some(transport), epoch), End::new(None, epoch))
            }
            false => {
                let ends = harness.ends();
                (
                    End::new(Some(ends.initiator), ends.initiator_epoch),
                    End::new(Some(ends.target), ends.target_epoch),
                )
            }
        };
        Bench {
            harness,
            initiator,
            target,
            alone,
            near: PathId(0),
            far: PathId(0),
            random: Seeded::new(0x5eed),
            frozen: false,
            next_slot: 0,
            next_op: 0,
        }
    }

    /// Opens one more path, and has both ends vouch for it.
    pub fn connect(&mut self) -> (PathId, PathId) {
        let (near, far) = self.meet();
        self.initiator.transport().vouch(near);
        self.end(Side::Target).transport().vouch(far);
        (near, far)
    }

    /// Opens one more path, whose ends do not know each other.
    pub fn meet(&mut self) -> (PathId, PathId) {
        let now = self.harness.now();
        let address = self.end(Side::Target).transport().capabilities().address.clone();
        let near = self.initiator.transport().open(&address, now).expect("open starts");
        if self.alone {
            self.until("a path to open", |b| b.initiator.opened.contains(&near));
            return (near, near);
        }
        let before = self.target.accepted.len();
        self.until("a path to open", |b| {
            b.initiator.opened.contains(&near) && b.target.accepted.len() > before
        });
        (near, self.target.accepted[before])
    }

    /// Memory that holds random bytes, registered at one side.
    pub fn region(&mut self, side: Side, len: u64, access: Access) -> (Region, RemoteRegion) {
        let memory = self.harness.memory(side, len);
        self.fill_random(&*memory);
        self.registered(side, memory, access)
    }

    /// Memory as the harness made it.
    pub fn region_untouched(&mut self, side: Side, len: u64) -> (Region, RemoteRegion) {
        let memory = self.harness.memory(side, len);
        self.registered(side, memory, Access::READ_WRITE)
    }

    fn registered(&mut self, side: Side, memory: Arc<dyn Memory>, access: Access) -> (Region, RemoteRegion) {
        let len = memory.len();
        let place = self.harness.place(side);
        let slot = self.next_slot;
        self.next_slot += 1;
        let secret = u128::from(self.random.next_u64()) << 64 | u128::from(self.random.next_u64());
        let end = self.end(side);
        let key = RegionKey {
            epoch: end.epoch,
            slot,
            secret,
        };
        let region = Region {
            key,
            memory,
            place,
            access,
        };
        let grant = end
            .transport()
            .register(&region)
            .expect("memory of the harness can be registered");
        let name = end.transport().capabilities().name.to_string();
        let remote = RemoteRegion {
            key,
            len,
            place,
            access,
            grants: Arc::from([(name, grant)]),
        };
        (region, remote)
    }

    pub fn local(&mut self, len: u64) -> Region {
        self.region(Side::Initiator, len, Access::NONE).0
    }

    /// A leg over the whole of two fresh regions, and the region at the target.
    pub fn whole_leg(&mut self, len: u64) -> (Arc<Leg>, Region) {
        let near = self.local(len);
        let (far, remote) = self.region(Side::Target, len, Access::READ_WRITE);
        let leg = leg(&near, Spans::contiguous(0, len), &remote, Spans::contiguous(0, len));
        (leg, far)
    }

    /// Whether there is nobody at the far end.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    pub fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::Target if !self.alone => &mut self.target,
            Side::Initiator | Side::Target => &mut self.initiator,
        }
    }

    pub fn soon(&mut self) -> Time {
        self.harness.now().saturating_add(self.harness.patience())
    }

    pub fn op(&mut self, body: Body) -> Op {
        let deadline = self.soon();
        self.op_by(body, deadline)
    }

    pub fn op_by(&mut self, body: Body, deadline: Time) -> Op {
        self.next_op += 1;
        Op::new(OpId(self.next_op), deadline, body)
    }

    /// The parts of a leg as operations, within what the transport says it likes.
    pub fn parts(&mut self, side: Side, direction: Direction, leg: &Arc<Leg>, how: How) -> Vec<Op> {
        let capabilities = self.end(side).transport().capabilities().clone();
        let (near, far) = (leg.local().place.kind(), leg.remote().place.kind());
        let carriage = capabilities.carriage(near, far);
        let carriage = carriage.expect("the transport carries what its harness gives");
        let limits = PartLimits {
            max_bytes: carriage.max_op_bytes,
            max_runs: capabilities.max_op_runs,
            align: carriage.align,
        };
        let mut ops = Vec::new();
        let mut start = 0;
        loop {
            let end = cut(leg, start, limits);
            let index = ops.len() as u32;
            ops.push(
                self.op(Body::Move(
                    Move::new(direction, Arc::clone(leg), start..end)
                        .checksum(how.checksum)
                        .arrival(how.tag.map(|tag| Arrival { tag, index })),
                )),
            );
            start = end;
            if start == leg.bytes() {
                return ops;
            }
        }
    }

    /// Posts as far as the transport accepts, and tells how far that was.
    pub fn post(&mut self, side: Side, path: PathId, ops: &[Op]) -> usize {
        let now = self.harness.now();
        let end = self.end(side);
        let accepted = end.transport().post(path, ops, now).expect("the path lives");
        assert!(accepted <= ops.len(), "more operations were accepted than were posted");
        end.outstanding.extend(ops[..accepted].iter().map(|op| (path, op.id)));
        accepted
    }

    /// Posts everything, in as many turns as back-pressure asks for, and waits for the completions.
    pub fn carry_out(&mut self, side: Side, path: PathId, ops: &[Op]) -> Vec<Result<Done, Failure>> {
        let mut posted = self.post(side, path, ops);
        self.until("operations to be accepted and completed", |b| {
            if posted < ops.len() {
                posted += b.post(side, path, &ops[posted..]);
            }
            posted == ops.len() && b.end(side).outstanding.is_empty()
        });
        ops.iter().map(|op| self.end(side).outcome(op.id)).collect()
    }

    /// Moves a leg from the initiator and expects it to succeed.
    pub fn carry_leg(&mut self, direction: Direction, leg: &Arc<Leg>) {
        let ops = self.parts(Side::Initiator, direction, leg, How::default());
        let path = self.near;
        for outcome in self.carry_out(Side::Initiator, path, &ops) {
            outcome.expect("a rightful move succeeds");
        }
    }

    /// Polls both ends once. Tells whether anything happened or could at once.
    pub fn step(&mut self) -> bool {
        let now = self.harness.now();
        let mut lively = self.initiator.poll(now);
        if !self.frozen {
            lively |= self.target.poll(now);
        }
        lively
    }

    pub fn until(&mut self, what: &str, mut met: impl FnMut(&mut Bench<'_>) -> bool) {
        let give_up = self.harness.now().saturating_add(self.harness.patience());
        while !met(self) {
            if !self.step() {
                self.harness.idle();
            }
            assert!(self.harness.now() < give_up, "waited in vain for {what}");
        }
    }

    pub fn until_all_completed(&mut self, side: Side) {
        self.until("every operation to complete", |b| b.end(side).outstanding.is_empty());
    }

    /// Lets everything happen that might still happen.
    pub fn settle(&mut self) {
        for _ in 0..30 {
            while self.step() {}
            self.harness.idle();
        }
    }

    /// Memory as its owner sees it.
    pub fn look<'m>(&self, memory: &'m dyn Memory) -> &'m dyn HostBytes {
        self.harness.look(memory)
    }

    /// What a span list holds, in its order.
    pub fn gather(&self, memory: &dyn Memory, spans: &Spans) -> Vec<u8> {
        let mut bytes = vec![0; spans.bytes() as usize];
        let mut at = 0;
        for span in spans.pieces(0..spans.bytes()) {
            let len = span.len as usize;
            self.look(memory).read(span.offset, &mut bytes[at..at + len]);
            at += len;
        }
        bytes
    }

    pub fn contents(&self, memory: &dyn Memory) -> Vec<u8> {
        let mut bytes = vec![0; memory.len() as usize];
        self.look(memory).read(0, &mut bytes);
        bytes
    }

    pub fn fill_random(&mut self, memory: &dyn Memory) {
        let mut bytes = vec![0; memory.len() as usize];
        self.random.fill(&mut bytes);
        self.look(memory).write(0, &bytes);
    }

    pub fn sum_of(&self, memory: &dyn Memory, spans: &Spans, range: std::ops::Range<u64>) -> u64 {
        let mut digest = Digest::default();
        for span in spans.pieces(range) {
            let summed = self.look(memory).digest(span.offset, span.len, &mut digest);
            summed.expect("the memory is there");
        }
        digest.finish()
    }

    /// A message each way shows that the path works; where nobody hears one, a move there and back.
    pub fn assert_usable(&mut self) {
        if self.alone {
            let (leg, far) = self.whole_leg(1000);
            for direction in [Direction::Write, Direction::Read] {
                self.carry_leg(direction, &leg);
                let same = self.contents(&*leg.local().memory) == self.contents(&*far.memory);
                assert!(same, "{direction:?} on a path that should be usable");
                self.fill_random(&*far.memory);
            }
            return;
        }
        for (side, path) in [(Side::Initiator, self.near), (Side::Target, self.far)] {
            let op = self.op(Body::Message(Arc::from(*b"still here")));
            let other = match side {
                Side::Initiator => Side::Target,
                Side::Target => Side::Initiator,
            };
            let before = self.end(other).messages.len();
            self.carry_out(side, path, &[op])[0].expect("a message can be sent");
            self.until("a message", |b| b.end(other).messages.len() > before);
        }
    }
}

impl End {
    fn new(transport: Option<Box<dyn Transport>>, epoch: Epoch) -> End {
        End {
            transport,
            epoch,
            opened: Vec::new(),
            accepted: Vec::new(),
            lost: BTreeMap::new(),
            messages: Vec::new(),
            arrivals: Vec::new(),
            outstanding: BTreeSet::new(),
            completed: BTreeMap::new(),
        }
    }

    pub fn transport(&mut self) -> &mut dyn Transport {
        &mut **self.transport.as_mut().expect("this end is alive")
    }

    pub fn outcome(&self, op: OpId) -> Result<Done, Failure> {
        self.completed[&op]
    }

    pub fn is_completed(&self, op: OpId) -> bool {
        self.completed.contains_key(&op)
    }

    fn poll(&mut self, now: Time) -> bool {
        let Some(transport) = &mut self.transport else {
            return false;
        };
        let mut signals = Vec::new();
        let progress = transport.poll(now, &mut signals);
        let lively = progress == Progress::Busy || !signals.is_empty();
        for signal in signals {
            self.absorb(signal);
        }
        lively
    }

    fn absorb(&mut self, signal: Signal) {
        let path = signal.path();
        assert!(!self.lost.contains_key(&path), "{signal:?} after its path was lost");
        match signal {
            Signal::Opened { path } => self.opened.push(path),
            Signal::Accepted { path } => self.accepted.push(path),
            Signal::Lost { path, loss, fenced } => {
                let open: Vec<_> = self.outstanding.iter().filter(|(p, _)| *p == path).collect();
                assert!(
                    open.is_empty(),
                    "{path:?} was lost before its operations {open:?} completed"
                );
                self.lost.insert(path, (loss, fenced));
            }
            Signal::Completed { path, op, outcome } => {
                assert!(
                    self.outstanding.remove(&(path, op)),
                    "{op:?} on {path:?} completed twice, or was never accepted"
                );
                self.completed.insert(op, outcome);
            }
            Signal::Message { path, payload } => {
                self.assert_introduced(path);
                self.messages.push((path, payload));
            }
            Signal::Arrived { path, arrival } => {
                self.assert_introduced(path);
                self.arrivals.push(arrival);
            }
        }
    }

    fn assert_introduced(&self, path: PathId) {
        assert!(
            self.opened.contains(&path) || self.accepted.contains(&path),
            "{path:?} was used before it was opened or accepted"
        );
    }
}

pub(super) fn leg(near: &Region, near_spans: Spans, far: &RemoteRegion, far_spans: Spans) -> Arc<Leg> {
    Arc::new(Leg::new(near.clone(), near_spans, far.clone(), far_spans).expect("a leg within its regions"))
}

/// What `memory` must hold after `bytes` were scattered over `spans` of it, `before` being what it held.
pub(super) fn scattered(mut before: Vec<u8>, spans: &Spans, bytes: &[u8]) -> Vec<u8> {
    let mut at = 0;
    for span in spans.pieces(0..spans.bytes()) {
        let (offset, len) = (span.offset as usize, span.len as usize);
        before[offset..offset + len].copy_from_slice(&bytes[at..at + len]);
        at += len;
    }
    before
}
