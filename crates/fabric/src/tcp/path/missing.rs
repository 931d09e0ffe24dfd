//! Memory that turns out not to be there when its bytes are due: the move that it belongs to is refused, and the path goes on.

use weft_protocol::{Failure, Refusal};

use super::{Path, World};
use crate::tcp::frame::Ended;
use crate::tcp::inbound::Sink;
use crate::tcp::outbound::Missing;

impl Path {
    /// Ends what is being sent from memory that is not there. `false`: all of it is.
    pub(super) fn end_missing(&mut self, index: usize, world: &mut World<'_>) -> bool {
        let Some(connection) = &mut self.connections[index] else {
            return false;
        };
        let missing = connection.outbound.missing();
        for Missing { job, op, is_response } in &missing {
            match (is_response, &mut self.connections[index]) {
                (true, Some(connection)) => connection.outbound.end(*job, Ended::Refused(Refusal::NoMemory)),
                (true, None) => {}
                (false, _) => self.end(*op, Failure::Refused(Refusal::NoMemory), world),
            }
        }
        !missing.is_empty()
    }

    /// Ends what was being received into memory that is not there. What still comes of it goes nowhere.
    pub(super) fn refuse_missed(&mut self, index: usize, world: &mut World<'_>) {
        let Some(connection) = &mut self.connections[index] else {
            return;
        };
        match connection.inbound.missed.take() {
            None => {}
            Some(Sink::Read { op }) => self.end(op, Failure::Refused(Refusal::NoMemory), world),
            Some(Sink::Write) => {
                if let Some(write) = &mut connection.inbound.write {
                    write.refuse(Refusal::NoMemory, &mut connection.outbound);
                }
            }
        }
    }
}
