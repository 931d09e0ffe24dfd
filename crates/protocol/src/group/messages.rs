//! Messages between two ranks, of which the others know nothing.
//!
//! They go beside the call under way, each direction between two ranks in an order of its own: a rank may begin to send before it
//! begins to receive, or the other way round, or in the middle of a collective, whatever its peer does first.

use std::collections::VecDeque;

use weft_plan::Rank;

use super::exchange::{Exchange, Lane, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View};
use super::record::CallRecord;
use crate::transport::Progress;

/// The messages of one rank that are under way.
#[derive(Debug)]
pub struct Messages {
    /// By rank.
    peers: Vec<Peer>,
    next: u64,
    /// Those that have not ended.
    left: usize,
    ended: VecDeque<MessageId>,
}

/// A message to be sent or received.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    pub way: Way,
    pub peer: Rank,
    /// What both ends must give alike, besides the length.
    pub signature: u64,
    pub memory: &'a View,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Send,
    Receive,
}

/// A message under way. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(u64);

#[derive(Debug, Default)]
struct Peer {
    /// Not offered yet, oldest first.
    to_send: VecDeque<Post>,
    offered: VecDeque<(Post, OfferId)>,
    to_receive: VecDeque<Post>,
    /// Over, but for memory that the exchange has not let go of.
    leaving: Vec<Post>,
}

#[derive(Clone, Copy, Debug)]
struct Post {
    id: MessageId,
    piece: Piece,
    signature: u64,
}

impl Messages {
    /// For a rank of a group of so many.
    pub fn new(ranks: u32) -> Messages {
        Messages {
            peers: (0..ranks).map(|_| Peer::default()).collect(),
            next: 0,
            left: 0,
            ended: VecDeque::new(),
        }
    }

    /// Begins a message. The peer must be another rank of the group.
    pub fn post<E: Exchange + ?Sized>(
        &mut self,
        message: &Message<'_>,
        exchange: &mut E,
    ) -> Result<MessageId, Trouble> {
        let id = MessageId(self.next);
        let piece = Piece {
            buffer: exchange.lend(message.peer, message.memory)?,
            offset: 0,
            len: message.memory.len,
        };
        self.next += 1;
        self.left += 1;
        let post = Post {
            id,
            piece,
            signature: message.signature,
        };
        let peer = &mut self.peers[message.peer.0 as usize];
        match message.way {
            Way::Send => peer.to_send.push_back(post),
            Way::Receive => peer.to_receive.push_back(post),
        }
        Ok(id)
    }

    pub fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// Takes every message as far as it goes now.
    pub fn turn<E: Exchange + ?Sized>(&mut self, exchange: &mut E) -> Result<Progress, Trouble> {
        let mut progress = Progress::Idle;
        if self.is_empty() {
            return Ok(progress);
        }
        let channel = exchange.channels();
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let lane = Lane {
                peer: Rank(rank as u32),
                channel,
            };
            if peer.turn(lane, exchange)? {
                progress = Progress::Busy;
            }
            peer.leaving
                .retain(|post| match exchange.take_back(lane.peer, post.piece.buffer) {
                    Progress::Busy => true,
                    Progress::Idle => {
                        self.left -= 1;
                        self.ended.push_back(post.id);
                        false
                    }
                });
        }
        Ok(progress)
    }

    /// A message that has ended well, once each.
    pub fn next_ended(&mut self) -> Option<MessageId> {
        self.ended.pop_front()
    }

    /// Whether a message that is under way is one to or from a rank.
    pub fn awaits(&self, rank: Rank) -> bool {
        self.peers.get(rank.0 as usize).is_some_and(|peer| !peer.is_idle())
    }

    /// Whom a message that is under way is to or from.
    pub fn peer_of(&self, id: MessageId) -> Option<Rank> {
        let mut posts = self.peers.iter().map(Peer::posts);
        let peer = posts.position(|mut posts| posts.any(|post| post.id == id));
        peer.map(|rank| Rank(rank as u32))
    }

    /// Gives all of them up. Call again until it answers [`Progress::Idle`]: then nothing touches their memory any more.
    pub fn abandon<E: Exchange + ?Sized>(&mut self, exchange: &mut E) -> Progress {
        for (rank, posts) in self.peers.iter_mut().enumerate() {
            let peer = Rank(rank as u32);
            let Peer {
                to_send,
                offered,
                to_receive,
                leaving,
            } = posts;
            leaving.extend(to_send.drain(..).chain(to_receive.drain(..)));
            leaving.extend(offered.drain(..).map(|(post, _)| post));
            leaving.retain(|post| exchange.take_back(peer, post.piece.buffer) == Progress::Busy);
        }
        self.left = self.peers.iter().map(|peer| peer.leaving.len()).sum();
        match self.is_empty() {
            true => Progress::Idle,
            false => Progress::Busy,
        }
    }
}

impl Peer {
    fn is_idle(&self) -> bool {
        self.posts().next().is_none()
    }

    fn posts(&self) -> impl Iterator<Item = &Post> {
        let offered = self.offered.iter().map(|(post, _)| post);
        offered.chain(&self.to_send).chain(&self.to_receive)
    }

    fn turn<E: Exchange + ?Sized>(&mut self, lane: Lane, exchange: &mut E) -> Result<bool, Trouble> {
        let mut moved = false;
        while let Some((post, _)) = self.offered.pop_front_if(|(_, offer)| exchange.settled(lane, *offer)) {
            self.leaving.push(post);
            moved = true;
        }
        while let Some(&post) = self.to_send.front() {
            match exchange.offer(lane, &post.head(), post.piece)? {
                Offered::Full => break,
                Offered::Settled => self.leaving.push(post),
                Offered::Open(offer) => self.offered.push_back((post, offer)),
            }
            self.to_send.pop_front();
            moved = true;
        }
        while let Some(&post) = self.to_receive.front() {
            match exchange.take(lane, &post.head(), &Sink::Copy(post.piece))? {
                Taken::Nothing => break,
                Taken::Part => {
                    moved = true;
                    break;
                }
                Taken::All => {}
            }
            self.to_receive.pop_front();
            self.leaving.push(post);
            moved = true;
        }
        Ok(moved)
    }
}

impl Post {
    fn head(&self) -> MessageHead {
        MessageHead {
            call: CallRecord::PAIRWISE,
            signature: self.signature,
            index: 0,
            len: self.piece.len,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::group::{LoopbackExchange, LoopbackGroup, LoopbackOptions};
    use crate::memory::{Memory as _, VecMemory};
    use crate::seeded::Seeded;

    fn view(bytes: Vec<u8>) -> (View, Arc<VecMemory>) {
        let memory = Arc::new(VecMemory::new(bytes));
        (View::whole(memory.clone()), memory)
    }

    fn begin(
        end: &mut (Messages, LoopbackExchange),
        way: Way,
        peer: u32,
        bytes: Vec<u8>,
    ) -> (MessageId, Arc<VecMemory>) {
        let (view, memory) = view(bytes);
        let message = Message {
            way,
            peer: Rank(peer),
            signature: 5,
            memory: &view,
        };
        (end.0.post(&message, &mut end.1).unwrap(), memory)
    }

    fn ends(ranks: u32, options: LoopbackOptions) -> Vec<(Messages, LoopbackExchange)> {
        let group = LoopbackGroup::new(ranks, options);
        let end = |rank| (Messages::new(ranks), group.exchange(Rank(rank)));
        (0..ranks).map(end).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Every pair of ranks sends each other messages, begun in any order on either side.
        #[test]
        fn messages_arrive_in_order_whoever_begins_what_first(
            ranks in 2u32..5,
            lens in prop::collection::vec(0usize..600, 1..6),
            room in 1usize..4,
            delay_max in 0u64..4,
            seed: u64,
        ) {
            let options = LoopbackOptions { seed, room, delay_max, ..LoopbackOptions::default() };
            let mut ends = ends(ranks, options);
            let mut chance = Seeded::new(seed);
            let (mut due, mut right) = (vec![Vec::new(); ranks as usize], Vec::new());
            for (own, end) in ends.iter_mut().enumerate() {
                // By direction and peer in order, and those among each other in any.
                let mut queues: Vec<(Way, u32, usize)> = (0..ranks)
                    .filter(|peer| *peer != own as u32)
                    .flat_map(|peer| [(Way::Send, peer, 0), (Way::Receive, peer, 0)])
                    .collect();
                while !queues.is_empty() {
                    let at = chance.below(queues.len() as u64) as usize;
                    let (way, peer, number) = &mut queues[at];
                    let (from, to) = match way {
                        Way::Send => (own as u8, *peer as u8),
                        Way::Receive => (*peer as u8, own as u8),
                    };
                    let said = vec![from ^ to << 2 ^ (*number as u8) << 4; lens[*number]];
                    let bytes = if *way == Way::Send { said.clone() } else { vec![0xff; lens[*number]] };
                    let (id, memory) = begin(end, *way, *peer, bytes);
                    due[own].push(id);
                    if *way == Way::Receive {
                        right.push((memory, said));
                    }
                    *number += 1;
                    if *number == lens.len() {
                        queues.swap_remove(at);
                    }
                }
            }
            for _ in 0..100_000 {
                if ends.iter().all(|(messages, _)| messages.is_empty()) {
                    break;
                }
                let (messages, exchange) = &mut ends[chance.below(u64::from(ranks)) as usize];
                let _ = messages.turn(exchange).unwrap();
            }
            for (own, (messages, _)) in ends.iter_mut().enumerate() {
                let mut ended: Vec<MessageId> = std::iter::from_fn(|| messages.next_ended()).collect();
                ended.sort_unstable();
                prop_assert_eq!(&ended, &due[own]);
            }
            for (memory, said) in right {
                prop_assert_eq!(memory.snapshot(), said);
            }
        }
    }

    #[test]
    fn a_message_of_another_length_is_not_touched() {
        let mut ends = ends(2, LoopbackOptions::default());
        begin(&mut ends[0], Way::Send, 1, vec![1; 8]);
        let (id, memory) = begin(&mut ends[1], Way::Receive, 0, vec![0; 7]);
        let (a, b) = ends.split_at_mut(1);
        let _ = a[0].0.turn(&mut a[0].1).unwrap();
        let trouble = b[0].0.turn(&mut b[0].1);
        assert!(matches!(trouble, Err(Trouble::WrongMessage { .. })), "{trouble:?}");
        assert_eq!((b[0].0.peer_of(id), b[0].0.awaits(Rank(0))), (Some(Rank(0)), true));
        assert_eq!(b[0].0.abandon(&mut b[0].1), Progress::Idle);
        assert_eq!((memory.snapshot(), b[0].0.is_empty()), (vec![0; 7], true));
        assert_eq!(memory.len(), 7);
    }
}
