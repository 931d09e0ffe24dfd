//! Ends under test, with what every case needs around them.

use std::collections::VecDeque;

use weft_plan::{Rank, Time};

use super::Harness;
use crate::group::{CallRecord, Exchange, Lane, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View};
use crate::seeded::Seeded;
use crate::transport::Progress;

/// Sizes around those at which exchanges do something else: slots, eager messages, parcels, long messages, pieces of those.
pub(super) const SIZES: [u64; 15] = [
    1, 8, 63, 64, 65, 256, 257, 4_096, 4_097, 32_768, 32_769, 65_536, 131_071, 131_072, 1_300_003,
];
/// Calls of a case. The group may have had others before.
pub(super) const CALL: u64 = 1 << 20;
pub(super) const SIGNATURE: u64 = 0x5151_7e57;

pub(super) struct Bench<'h> {
    pub(super) harness: &'h mut dyn Harness,
    pub(super) ends: Vec<Box<dyn Exchange>>,
    pub(super) random: Seeded,
    give_up: Time,
}

/// The messages of one lane: where those are that are to be sent, and where they go.
#[derive(Debug)]
pub(super) struct Flow<'a> {
    pub from: usize,
    pub to: usize,
    pub channel: u16,
    pub call: u64,
    /// By message: its place at the sender, and what becomes of it at the receiver.
    pub messages: Vec<(Piece, Sink<'a>)>,
    pub offered: usize,
    pub taken: usize,
    /// Messages whose pieces are the sender's again.
    pub free: Vec<usize>,
    open: VecDeque<(usize, OfferId)>,
}

impl<'a> Flow<'a> {
    pub(super) fn new(from: usize, to: usize, channel: u16, messages: Vec<(Piece, Sink<'a>)>) -> Flow<'a> {
        Flow {
            from,
            to,
            channel,
            call: CALL,
            messages,
            offered: 0,
            taken: 0,
            free: Vec::new(),
            open: VecDeque::new(),
        }
    }

    pub(super) fn of_call(self, call: u64) -> Flow<'a> {
        Flow { call, ..self }
    }

    pub(super) fn head(&self, index: usize) -> MessageHead {
        MessageHead {
            call: self.call,
            signature: SIGNATURE,
            index: if self.call == CallRecord::PAIRWISE {
                0
            } else {
                index as u32
            },
            len: self.messages[index].0.len,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let all = self.messages.len();
        self.taken == all && self.has_settled()
    }

    pub(super) fn has_settled(&self) -> bool {
        self.offered == self.messages.len() && self.open.is_empty()
    }

    fn there(&self) -> Lane {
        lane(self.to, self.channel)
    }

    fn here(&self) -> Lane {
        lane(self.from, self.channel)
    }

    /// Offers the next message, if there is one and there is room. Whether that was so.
    pub(super) fn offer(&mut self, ends: &mut [Box<dyn Exchange>]) -> bool {
        let Some((piece, _)) = self.messages.get(self.offered) else {
            return false;
        };
        let head = self.head(self.offered);
        match ends[self.from]
            .offer(self.there(), &head, *piece)
            .expect("a rightful offer")
        {
            Offered::Full => return false,
            Offered::Settled => self.free.push(self.offered),
            Offered::Open(offer) => self.open.push_back((self.offered, offer)),
        }
        self.offered += 1;
        true
    }

    /// Takes the next message as far as it is there.
    pub(super) fn take(&mut self, ends: &mut [Box<dyn Exchange>]) -> bool {
        let Some((_, sink)) = self.messages.get(self.taken) else {
            return false;
        };
        let head = self.head(self.taken);
        match ends[self.to]
            .take(self.here(), &head, sink)
            .expect("a rightful message")
        {
            Taken::Nothing => false,
            Taken::Part => true,
            Taken::All => {
                self.taken += 1;
                assert!(self.taken <= self.offered, "a message was taken that was never offered");
                true
            }
        }
    }

    /// Sees which offers have settled, the oldest first.
    pub(super) fn settle(&mut self, ends: &mut [Box<dyn Exchange>]) -> bool {
        let there = self.there();
        let oldest = self
            .open
            .pop_front_if(|(_, offer)| ends[self.from].settled(there, *offer));
        self.free.extend(oldest.map(|(index, _)| index));
        oldest.is_some()
    }

    /// Everything that can be done now, once.
    pub(super) fn turn(&mut self, ends: &mut [Box<dyn Exchange>]) -> bool {
        let moved = self.offer(ends);
        let moved = self.take(ends) || moved;
        self.settle(ends) || moved
    }
}

impl<'h> Bench<'h> {
    pub(super) fn new(harness: &'h mut dyn Harness, ranks: u32) -> Bench<'h> {
        let ends = harness.ends(ranks);
        assert_eq!(ends.len(), ranks as usize, "an end for each rank");
        assert!(ends.iter().all(|end| end.channels() >= 2), "two channels for calls");
        let give_up = harness.now().saturating_add(harness.patience());
        Bench {
            harness,
            ends,
            random: Seeded::new(0xe8c4),
            give_up,
        }
    }

    /// Memory of a rank, with bytes that nothing else has.
    pub(super) fn filled(&mut self, rank: usize, len: u64) -> View {
        let view = self.zeroed(rank, len);
        let mut bytes = vec![0; len as usize];
        self.random.fill(&mut bytes);
        write(&view, 0, &bytes);
        view
    }

    pub(super) fn zeroed(&mut self, rank: usize, len: u64) -> View {
        let view = self.harness.memory(Rank(rank as u32), len.max(1));
        View { len, ..view }
    }

    /// Begins a call at a rank with these buffers.
    pub(super) fn begin(&mut self, rank: usize, call: u64, buffers: &[View]) {
        let mut list = buffers.to_vec();
        let begun = self.ends[rank].begin(&record(call), &mut list);
        begun.expect("memory that can be used");
        assert!(list.is_empty(), "the buffers are the exchange's until the call ends");
    }

    pub(super) fn begin_all(&mut self, buffers: &[Vec<View>]) {
        for (rank, buffers) in buffers.iter().enumerate() {
            self.begin(rank, CALL, buffers);
        }
    }

    /// Lets go of a call's buffers, however long that takes.
    pub(super) fn end(&mut self, rank: usize) {
        self.until("a call to end", |ends| ends[rank].end() == Progress::Idle);
    }

    pub(super) fn end_all(&mut self) {
        (0..self.ends.len()).for_each(|rank| self.end(rank));
    }

    /// Runs messages until all have been taken and all offers have settled.
    pub(super) fn run(&mut self, flows: &mut [Flow<'_>]) {
        self.until("messages to pass", |ends| {
            // Several looks between two at the outside world, as executions have them.
            for _ in 0..64 {
                let mut moved = false;
                for flow in flows.iter_mut() {
                    moved |= flow.turn(ends);
                }
                if !moved {
                    break;
                }
            }
            flows.iter().all(Flow::is_over)
        });
    }

    /// Lets things happen until something is so.
    pub(super) fn until(&mut self, what: &str, mut met: impl FnMut(&mut [Box<dyn Exchange>]) -> bool) {
        self.give_up = self.harness.now().saturating_add(self.harness.patience());
        while !met(&mut self.ends) {
            self.step();
            assert!(self.harness.now() < self.give_up, "waited in vain for {what}");
        }
    }

    /// Polls every end once. None has anything to complain of.
    pub(super) fn step(&mut self) {
        let now = self.harness.now();
        let mut busy = false;
        for end in &mut self.ends {
            busy |= end.poll(now).expect("nobody is in trouble") == Progress::Busy;
        }
        if !busy {
            self.harness.idle();
        }
    }

    /// Lets everything happen that might still happen.
    pub(super) fn let_pass(&mut self) {
        for _ in 0..50 {
            self.step();
        }
    }

    /// Polls one end until it is in trouble, and says in which.
    pub(super) fn trouble(&mut self, rank: usize) -> Trouble {
        self.give_up = self.harness.now().saturating_add(self.harness.patience());
        loop {
            let now = self.harness.now();
            if let Err(trouble) = self.ends[rank].poll(now) {
                return trouble;
            }
            // The others must be turned too, for the one to hear of anything.
            for (other, end) in self.ends.iter_mut().enumerate() {
                if other != rank {
                    let _ = end.poll(now);
                }
            }
            self.harness.idle();
            assert!(now < self.give_up, "waited in vain for trouble");
        }
    }
}

pub(super) fn record(call: u64) -> CallRecord {
    CallRecord::new(call, SIGNATURE, "conformance")
}

pub(super) fn lane(peer: usize, channel: u16) -> Lane {
    Lane {
        peer: Rank(peer as u32),
        channel,
    }
}

pub(super) fn piece(buffer: u32, offset: u64, len: u64) -> Piece {
    Piece { buffer, offset, len }
}

pub(super) fn read(view: &View, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    if len > 0 {
        view.memory.bytes().read(view.offset + offset, &mut bytes);
    }
    bytes
}

pub(super) fn whole(view: &View) -> Vec<u8> {
    read(view, 0, view.len)
}

pub(super) fn write(view: &View, offset: u64, bytes: &[u8]) {
    if !bytes.is_empty() {
        view.memory.bytes().write(view.offset + offset, bytes);
    }
}
