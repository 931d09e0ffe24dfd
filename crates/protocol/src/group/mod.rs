//! Groups: how ranks run a collective together, and what they tell each other when one of them does not.
//!
//! A program (a schedule, from the room `plan`) says what every rank does; this room runs it for one rank. It knows nothing of
//! sockets or of shared memory: messages go through an [`Exchange`], of which there is one a world, and bytes are moved and reduced on
//! this rank by [`Kernels`].

mod agree;
mod blame;
mod combine;
mod compile;
pub mod conformance;
mod exchange;
mod execute;
mod failing;
mod far;
mod forming;
mod history;
mod inquiry;
mod loopback;
mod messages;
mod notes;
mod record;
mod seat;
mod shrink;

pub use agree::{Agreement, AgreementMessage, Decision, NoQuorum, Quorum};
pub use blame::Witness;
pub use combine::{At, Combiner, Function, Kernels, Reference};
pub use compile::{Act, CompileError, Compiled, Scope, Source};
pub use exchange::{Board, Exchange, Lane, Lent, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View};
pub use execute::{Execution, Task, Turn};
pub use failing::{Failing, Failure, Stuck};
pub use far::Far;
pub use forming::{Forming, FormingError, HELLO, Hello, group_id};
pub use history::{History, Recent};
pub use loopback::{LoopbackExchange, LoopbackGroup, LoopbackOptions};
pub use messages::{Message, MessageId, Messages, Way};
pub use notes::{Note, Notes};
pub use record::{Abort, CallRecord, Cause, Garbled, Status, Waiting};
pub use seat::Seat;
pub use shrink::{Next, ShrinkError, Shrinking};

/// Messages up to this size are copied even where their receiver on the same host could read them in place: the sender is done sooner.
pub const EAGER_BYTES_MAX: u64 = 4 << 10;
/// From this size on a message to another host waits in its sender's memory, and is read from there.
pub const LONG_BYTES: u64 = 128 << 10;
