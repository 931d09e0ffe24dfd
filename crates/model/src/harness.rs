//! What must hold for any bytes at all, one function a file format. The targets under `fuzz/` call them, and so does the suite.

use crate::system::System;
use crate::workload::trace::ExecutionTrace;

/// A trace, in either form, is refused, or can be replayed or refused for what it asks of a system.
pub fn trace(bytes: &[u8]) {
    if let (Ok(trace), Ok(system)) = (ExecutionTrace::read(bytes), System::named("dgx-h100")) {
        let replay = trace.replay(&system, 16);
        assert!(replay.is_err() || replay.is_ok_and(|replay| replay.seconds >= 0.0 && replay.nodes > 0));
    }
}
