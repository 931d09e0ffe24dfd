//! A call as Python asks for it, before the group has checked it.

use weft::{Call, Communicator, Datatype, HostMemory, Operator, Part, Rank, Reduction};

use super::elements::Elements;

/// The collectives, numbered for `_raw` in this order.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    Send,
    Receive,
    Barrier,
}

impl Kind {
    pub const ALL: [Kind; 11] = [
        Kind::AllReduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::Gather,
        Kind::Scatter,
        Kind::AllToAll,
        Kind::Send,
        Kind::Receive,
        Kind::Barrier,
    ];

    /// As the method is called.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Send => "send",
            Kind::Receive => "receive",
            Kind::Barrier => "barrier",
        }
    }
}

pub struct Request {
    pub kind: Kind,
    pub input: Part,
    pub output: Part,
    pub datatype: Datatype,
    pub operator: Operator,
    /// The root, or the other end of a message.
    pub root: Rank,
    /// Elements of each rank's block, where they differ; in an all-to-all those sent.
    pub counts: Option<Vec<u64>>,
    pub received: Option<Vec<u64>>,
}

impl Request {
    /// With the datatype of the input.
    pub fn new(kind: Kind, input: Elements, output: Elements) -> Request {
        Request {
            kind,
            datatype: input.datatype,
            input: input.part,
            output: output.part,
            operator: Reduction::Sum.into(),
            root: Rank(0),
            counts: None,
            received: None,
        }
    }

    pub fn call(self, group: &Communicator) -> Call<'_> {
        let Request {
            kind,
            input,
            output,
            datatype,
            operator,
            root,
            counts,
            received,
        } = self;
        let counts = counts.as_deref();
        match kind {
            Kind::AllReduce => group.all_reduce(input, output, datatype, operator),
            Kind::AllGather => match counts {
                Some(counts) => group.all_gatherv(input, output, counts, datatype),
                None => group.all_gather(input, output, datatype),
            },
            Kind::ReduceScatter => match counts {
                Some(counts) => group.reduce_scatterv(input, output, counts, datatype, operator),
                None => group.reduce_scatter(input, output, datatype, operator),
            },
            Kind::Broadcast => group.broadcast(input, root, datatype),
            Kind::Reduce => group.reduce(input, output, root, datatype, operator),
            Kind::Gather => match counts {
                Some(counts) => group.gatherv(input, output, Some(counts), root, datatype),
                None => group.gather(input, output, root, datatype),
            },
            Kind::Scatter => match counts {
                Some(counts) => group.scatterv(input, output, Some(counts), root, datatype),
                None => group.scatter(input, output, root, datatype),
            },
            Kind::AllToAll => match (counts, received) {
                (Some(sent), Some(received)) => group.all_to_allv(input, output, sent, &received, datatype),
                _ => group.all_to_all(input, output, datatype),
            },
            Kind::Send => group.send(input, root, datatype),
            Kind::Receive => group.receive(input, root, datatype),
            Kind::Barrier => group.barrier(),
        }
    }
}

/// No bytes at all.
pub fn nothing() -> Part {
    HostMemory::from_vec(Vec::new()).into()
}
