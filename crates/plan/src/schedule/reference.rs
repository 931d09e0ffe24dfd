//! The plainest executor there is, over vectors in one thread: what every other executor is compared with.
//!
//! It shares nothing with the verifier. Sends are buffered and ranks take turns as a seed decides, so that it runs in a world much laxer than
//! the one that programs are verified in, and must come to the same end.
//!
//! ```
//! use weft_plan::algorithms::Ring;
//! use weft_plan::collective::{Collective, Counts, Partition, Problem};
//! use weft_plan::schedule::{Program, reference};
//! let problem = Problem::new(Collective::AllReduce, 3);
//! let ring = Ring::new(problem).unwrap();
//! let partition = Partition::new(&problem, Counts::Equal(2), ring.shape().pieces)?;
//! let inputs = vec![vec![1, 10], vec![2, 20], vec![3, 30]];
//! let outputs = reference::run(&ring, &partition, inputs, |a, b| a + b, 1).unwrap();
//! assert_eq!(outputs, vec![vec![6, 60]; 3]);
//! # Ok::<(), weft_plan::collective::PartitionError>(())
//! ```

use std::collections::{HashMap, VecDeque};

use super::{Channel, Op, Ops, Program, Slice};
use crate::collective::{Buffer, Layout, Partition};
use crate::units::Rank;

/// One rank: its memory, and what it has still to do in its step.
struct Actor<T> {
    layout: Layout,
    /// By buffer. In place, one of input and output is empty and the other has the data of both.
    memory: [Vec<T>; 3],
    step: u32,
    left: VecDeque<Op>,
}

type Mail<T> = HashMap<(Rank, Rank, Channel), VecDeque<Vec<T>>>;

/// Runs `program` on these inputs and gives the outputs, rank by rank; `None` where it comes to no end.
pub fn run<T: Copy + Default>(
    program: &dyn Program,
    partition: &Partition,
    inputs: Vec<Vec<T>>,
    reduce: impl Fn(T, T) -> T,
    seed: u64,
) -> Option<Vec<Vec<T>>> {
    let shape = program.shape();
    let mut actors: Vec<Actor<T>> = (0..shape.ranks)
        .map(Rank)
        .zip(inputs)
        .map(|(rank, input)| Actor::new(Layout::new(partition, program, rank), input))
        .collect();
    let mut mail: Mail<T> = HashMap::new();
    let mut ops = Ops::new();
    let mut seed = seed;
    // Every turn of a rank that can go on does something, so that ranks × as many idle turns mean that none can.
    let mut idle = 0;
    let mut turn = 0usize;
    while actors.iter().any(|actor| actor.step < shape.steps) {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        turn = if idle > actors.len() {
            turn + 1
        } else {
            (seed >> 33) as usize
        };
        let index = turn % actors.len();
        let rank = Rank(index as u32);
        if idle > 3 * actors.len() {
            return None;
        }
        idle += 1;
        if actors[index].step == shape.steps {
            continue;
        }
        if actors[index].left.is_empty() {
            // All sends go before anything else of the step is done.
            let actor = &mut actors[index];
            for op in ops.fill(program, rank, actor.step) {
                match *op {
                    Op::Send { to, slice, channel } => {
                        let data = actor.read(slice);
                        mail.entry((rank, to, channel)).or_default().push_back(data);
                    }
                    _ => actor.left.push_back(*op),
                }
            }
            idle = 0;
        }
        while let Some(&op) = actors[index].left.front() {
            if !actors[index].perform(rank, op, &mut mail, &reduce) {
                break;
            }
            actors[index].left.pop_front();
            idle = 0;
        }
        if actors[index].left.is_empty() {
            actors[index].step += 1;
        }
    }
    Some(actors.into_iter().map(Actor::output).collect())
}

impl<T: Copy + Default> Actor<T> {
    fn new(layout: Layout, input: Vec<T>) -> Actor<T> {
        let room = |buffer| vec![T::default(); layout.elements(buffer) as usize];
        let mut memory = [room(Buffer::Input), room(Buffer::Output), room(Buffer::Scratch)];
        let (buffer, range) = layout.whole(Buffer::Input);
        memory[buffer as usize][range.start as usize..range.end as usize].copy_from_slice(&input);
        Actor {
            layout,
            memory,
            step: 0,
            left: VecDeque::new(),
        }
    }

    fn output(self) -> Vec<T> {
        let (buffer, range) = self.layout.whole(Buffer::Output);
        self.memory[buffer as usize][range.start as usize..range.end as usize].to_vec()
    }

    fn read(&self, slice: Slice) -> Vec<T> {
        let (buffer, range) = self.layout.locate(slice);
        self.memory[buffer as usize][range.start as usize..range.end as usize].to_vec()
    }

    fn write(&mut self, slice: Slice, data: &[T]) {
        let (buffer, range) = self.layout.locate(slice);
        self.memory[buffer as usize][range.start as usize..range.end as usize].copy_from_slice(data);
    }

    /// Whether it could be done; a receive cannot before its message is there.
    fn perform(&mut self, rank: Rank, op: Op, mail: &mut Mail<T>, reduce: &impl Fn(T, T) -> T) -> bool {
        let mut take = |from, channel| mail.get_mut(&(from, rank, channel)).and_then(VecDeque::pop_front);
        let both = |a: Vec<T>, b: Vec<T>| a.into_iter().zip(b).map(|(a, b)| reduce(a, b)).collect::<Vec<T>>();
        match op {
            Op::Send { .. } => {}
            Op::Receive { from, slice, channel } => match take(from, channel) {
                Some(data) => self.write(slice, &data),
                None => return false,
            },
            Op::ReceiveReduce {
                from,
                with,
                into,
                channel,
            } => match take(from, channel) {
                Some(data) => self.write(into, &both(self.read(with), data)),
                None => return false,
            },
            Op::Copy { from, to } => self.write(to, &self.read(from)),
            Op::Reduce { from, with, into } => self.write(into, &both(self.read(with), self.read(from))),
        }
        true
    }
}
