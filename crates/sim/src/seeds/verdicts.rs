//! What can be broken, in words.

use thiserror::Error;
use weft_plan::Time;
use weft_protocol::Failure;
use weft_protocol::agent::{AtomicId, ConnectError, UnderWay};
use weft_protocol::transfer::TransferId;

use super::counters::Told;
use super::ledger::Damage;

/// A promise that was not kept.
#[derive(Debug, Error)]
pub(super) enum Violation {
    #[error("node {node}: {what} was damaged at byte {}: found {:#04x}, wanted {:#04x}", .damage.offset, .damage.found, .damage.wanted)]
    Damaged { node: usize, what: String, damage: Damage },
    #[error("node {node}: {id:?} succeeded with wrong bytes in place, first at {at} of {total}")]
    WrongBytes {
        node: usize,
        id: TransferId,
        at: usize,
        total: usize,
    },
    #[error("node {node}: {id:?} failed, and byte {at}, which it says it moved, is wrong")]
    FalseReport { node: usize, id: TransferId, at: usize },
    #[error("node {node}: {id:?}, which nobody may do ({why}), succeeded")]
    Trespass {
        node: usize,
        id: TransferId,
        why: &'static str,
    },
    #[error("node {node}: {id:?} ended twice, or was never begun")]
    EndedTwice { node: usize, id: TransferId },
    #[error("node {node}: {id:?} has not ended by its deadline")]
    Overdue { node: usize, id: TransferId },
    #[error("node {node}: notification {note} came before its data")]
    Early { node: usize, note: u64 },
    #[error("node {node}: notification {note} came twice, or was never sent")]
    Repeated { node: usize, note: u64 },
    #[error("notification {note} of node {node} never came, although the session lives")]
    Undelivered { node: usize, note: u64 },
    #[error("node {node}: a region was free while a peer had a lease on it")]
    FreeUnderLease { node: usize },
    #[error("node {node}: a region could not be released for {seconds} s after the last lease")]
    NeverFree { node: usize, seconds: u64 },
    #[error("the world holds {queued} events, {wires} paths, {signals} signals at one end")]
    Unbounded {
        queued: usize,
        wires: usize,
        signals: usize,
    },
    #[error("in calm, node {node} could not connect to node {to}: {error}")]
    NoCalmSession {
        node: usize,
        to: usize,
        error: ConnectError,
    },
    #[error("in calm, node {node} has no session with node {to}")]
    NoCalmPeer { node: usize, to: usize },
    #[error("in calm, {id:?} of node {node} failed: {cause}")]
    CalmFailure {
        node: usize,
        id: TransferId,
        cause: Failure,
    },
    #[error("node {node}: {id:?} ended twice, or was never begun")]
    CountedTwice { node: usize, id: AtomicId },
    #[error("node {node}: {id:?} has not ended by its deadline")]
    CountOverdue { node: usize, id: AtomicId },
    #[error("node {node}: {id:?} found {ticket}, which another increment has found")]
    SameTicket { node: usize, id: AtomicId, ticket: u64 },
    #[error("node {node}: {id:?} was told as {told:?}, and its word holds {found}")]
    Miscounted {
        node: usize,
        id: AtomicId,
        told: Told,
        found: u64,
    },
    #[error("node {node}: {certain} increments and perhaps {unknown} more, but the sum is {sum}")]
    WrongSum {
        node: usize,
        certain: u64,
        unknown: u64,
        sum: u64,
    },
    #[error("in calm, {id:?} of node {node} failed: {cause}")]
    CalmMiscount { node: usize, id: AtomicId, cause: Failure },
    #[error("node {node} has not noticed for {waited:?} that node {to} is dead")]
    Undead { node: usize, to: usize, waited: Time },
    #[error("node {node} talks to {name:?}, {why}")]
    Stranger {
        node: usize,
        name: String,
        why: &'static str,
    },
    #[error("node {node} keeps {kept:?} although nothing is under way")]
    LeftOver { node: usize, kept: UnderWay },
    #[error("the world never comes to rest")]
    Restless,
}
