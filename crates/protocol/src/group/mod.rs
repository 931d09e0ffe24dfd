//! Groups: how ranks run a collective together, and what they tell each other when one of them does not.
//!
//! A program (a schedule, from the room `plan`) says what every rank does; this room runs it for one rank. It knows nothing of
//! sockets or of shared memory: messages go through an [`Exchange`], of which there is one a world, and bytes are moved and reduced on
//! this rank by [`Kernels`].

mod agree;
mod blame;
mod combine;
mod compile;
mod exchange;
mod execute;
mod history;
mod loopback;
mod messages;
mod record;

pub use agree::{Agreement, AgreementMessage, Decision};
pub use blame::Witness;
pub use combine::{At, Combiner, Function, Kernels, Reference};
pub use compile::{CompileError, Compiled, Scope, Source};
pub use exchange::{Board, Exchange, Lane, Lent, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View};
pub use execute::{Execution, Task, Turn};
pub use history::{History, Recent};
pub use loopback::{LoopbackExchange, LoopbackGroup, LoopbackOptions};
pub use messages::{Message, MessageId, Messages, Way};
pub use record::{Abort, CallRecord, Cause, Garbled, Status, Waiting};
