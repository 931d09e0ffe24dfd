//! What one class of ranks executes: ops, and whom their beginnings and ends release.

use weft_protocol::group::{Act, Compiled};

/// A step with more ops is crowded: a rank talks with many others in it.
const CROWDED_ABOVE: u32 = 64;

/// What a communicator would execute, and how classes follow it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(super) compiled: Compiled,
    /// A bit for each step: whether it is crowded.
    crowded: Vec<u64>,
    crowds: Option<Crowds>,
    befores: Befores,
}

/// What an op waits for: the beginning or the end of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Before(u32);

impl Before {
    pub(super) fn op(self) -> u32 {
        self.0 >> 1
    }
    pub(super) fn begins(self) -> bool {
        self.0 & 1 == 1
    }
}

/// By op: what it waits for, ascending.
#[derive(Debug, Default)]
struct Befores {
    starts: Vec<u32>,
    list: Vec<Before>,
}

impl Befores {
    /// Turns round who releases whom.
    fn of<'a>(count: u32, releases: impl Fn(u32, bool) -> &'a [u32]) -> Befores {
        let mut starts = vec![0; count as usize + 1];
        let each = |mut note: Box<dyn FnMut(u32, Before) + '_>| {
            for op in 0..count {
                for begins in [false, true] {
                    let before = Before(op << 1 | u32::from(begins));
                    releases(op, begins).iter().for_each(|&after| note(after, before));
                }
            }
        };
        each(Box::new(|after, _| starts[after as usize + 1] += 1));
        let mut sum = 0;
        for start in &mut starts {
            sum += *start;
            *start = sum;
        }
        let mut next = starts.clone();
        let mut list = vec![Before(0); sum as usize];
        each(Box::new(|after, before| {
            list[next[after as usize] as usize] = before;
            next[after as usize] += 1;
        }));
        Befores { starts, list }
    }
}

/// Ops of crowded steps that go together. Of those of one kind and size the first stands for all; what they wait for within the step is
/// left out.
#[derive(Debug)]
struct Crowds {
    /// By op: who stands for it.
    leader: Vec<u32>,
    first: Vec<u32>,
    on_begin: Edges,
    on_end: Edges,
    /// How many are left when those that go together count as one.
    len: u32,
}

/// Whom each op releases.
#[derive(Debug)]
struct Edges {
    starts: Vec<u32>,
    released: Vec<u32>,
}

impl Plan {
    pub(super) fn new(compiled: Compiled) -> Plan {
        let mut crowded = Vec::new();
        let mut first = 0;
        while first < compiled.len() as u32 {
            let step = compiled.listed(first).0;
            let ops = (first..compiled.len() as u32).take_while(|&op| compiled.listed(op).0 == step);
            let count = ops.count() as u32;
            crowded.resize(crowded.len().max(step as usize / 64 + 1), 0);
            crowded[step as usize / 64] |= u64::from(count > CROWDED_ABOVE) << (step % 64);
            first += count;
        }
        let befores = Befores::of(compiled.len() as u32, |op, begins| match begins {
            true => compiled.on_begin(op),
            false => compiled.on_end(op),
        });
        Plan {
            compiled,
            crowded,
            crowds: None,
            befores,
        }
    }

    /// Lets the ops of crowded steps go together.
    pub(super) fn crowd(&mut self) {
        if self.crowded.iter().any(|&bits| bits != 0) {
            let crowds = Crowds::new(&self.compiled, |step| self.is_crowded(step));
            self.befores = Befores::of(self.compiled.len() as u32, |op, begins| match begins {
                true => crowds.on_begin.of(op),
                false => crowds.on_end.of(op),
            });
            self.crowds = Some(crowds);
        }
    }

    /// Whether a rank does so much in a step that its messages are not told apart by how far they go.
    pub(super) fn is_crowded(&self, step: u32) -> bool {
        self.crowded[step as usize / 64] >> (step % 64) & 1 == 1
    }

    /// How many ops there are, those that go together as one.
    pub(super) fn len(&self) -> u32 {
        self.crowds
            .as_ref()
            .map_or(self.compiled.len() as u32, |crowds| crowds.len)
    }
    pub(super) fn first(&self) -> &[u32] {
        self.crowds
            .as_ref()
            .map_or(self.compiled.first(), |crowds| &crowds.first)
    }
    /// What an op waits for, in the order of the program.
    pub(super) fn befores(&self, op: u32) -> &[Before] {
        let Befores { starts, list } = &self.befores;
        &list[starts[op as usize] as usize..starts[op as usize + 1] as usize]
    }
    pub(super) fn on_begin(&self, op: u32) -> &[u32] {
        match &self.crowds {
            Some(crowds) => crowds.on_begin.of(op),
            None => self.compiled.on_begin(op),
        }
    }
    pub(super) fn on_end(&self, op: u32) -> &[u32] {
        match &self.crowds {
            Some(crowds) => crowds.on_end.of(op),
            None => self.compiled.on_end(op),
        }
    }
    /// The ops that go together with this one, itself among them, where it goes with others.
    pub(super) fn crowd_of(&self, leader: u32) -> Option<impl Iterator<Item = u32> + '_> {
        let crowds = self.crowds.as_ref()?;
        let step = self.compiled.listed(leader).0;
        let all = leader..self.compiled.len() as u32;
        self.is_crowded(step).then(|| {
            all.take_while(move |&op| self.compiled.listed(op).0 == step)
                .filter(move |&op| crowds.leader[op as usize] == leader)
        })
    }
}

impl Crowds {
    fn new(compiled: &Compiled, is_crowded: impl Fn(u32) -> bool) -> Crowds {
        let count = compiled.len() as u32;
        let mut leader: Vec<u32> = (0..count).collect();
        let mut known: Vec<(u64, u32)> = Vec::new();
        let mut step = u32::MAX;
        for op in 0..count {
            let here = compiled.listed(op).0;
            if here != step {
                step = here;
                known.clear();
            }
            if !is_crowded(step) {
                continue;
            }
            let kind = kind(compiled, op);
            match known.iter().find(|(other, _)| *other == kind) {
                Some(&(_, first)) => leader[op as usize] = first,
                None => known.push((kind, op)),
            }
        }
        let mut waits = vec![0; count as usize];
        let mut edges = |whom: fn(&Compiled, u32) -> &[u32]| {
            let mut edges: Vec<(u32, u32)> = Vec::new();
            for op in 0..count {
                let step = compiled.listed(op).0;
                for &after in whom(compiled, op) {
                    // Within a crowded step nothing waits.
                    if compiled.listed(after).0 == step && is_crowded(step) {
                        continue;
                    }
                    let edge = (leader[op as usize], leader[after as usize]);
                    if edges.last() != Some(&edge) {
                        edges.push(edge);
                    }
                }
            }
            edges.sort_unstable();
            edges.dedup();
            edges.iter().for_each(|(_, after)| waits[*after as usize] += 1);
            Edges::new(&edges, count)
        };
        let (on_begin, on_end) = (edges(Compiled::on_begin), edges(Compiled::on_end));
        let leads = |op: &u32| leader[*op as usize] == *op;
        Crowds {
            first: (0..count).filter(|op| leads(op) && waits[*op as usize] == 0).collect(),
            len: (0..count).filter(leads).count() as u32,
            leader,
            on_begin,
            on_end,
        }
    }
}

impl Edges {
    /// Of a list that ascends.
    fn new(edges: &[(u32, u32)], count: u32) -> Edges {
        let mut starts = vec![0; count as usize + 1];
        edges.iter().for_each(|(before, _)| starts[*before as usize + 1] += 1);
        let mut sum = 0;
        for start in &mut starts {
            sum += *start;
            *start = sum;
        }
        Edges {
            starts,
            released: edges.iter().map(|(_, after)| *after).collect(),
        }
    }
    fn of(&self, op: u32) -> &[u32] {
        &self.released[self.starts[op as usize] as usize..self.starts[op as usize + 1] as usize]
    }
}

/// A number for what an op is, without whom it is about and when.
pub(super) fn kind(compiled: &Compiled, op: u32) -> u64 {
    let act = compiled.act(op);
    let (kind, channel) = match act {
        Act::Send { lane, .. } => (0, lane.channel),
        Act::Receive { lane, .. } => (1, lane.channel),
        Act::ReceiveReduce { lane, .. } => (2, lane.channel),
        Act::Copy { .. } => (3, 0),
        Act::Reduce { .. } => (4, 0),
        Act::Divide { .. } => (5, 0),
    };
    act.bytes() << 24 | kind << 16 | u64::from(channel)
}
