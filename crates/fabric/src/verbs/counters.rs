//! What a rail has done, in the terms that carry over from one device to another.

/// Counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerbsCounters {
    /// Calls that handed a list of work requests to the device.
    pub doorbells: u64,
    pub work_requests: u64,
    /// Of those: with their bytes inside.
    pub inline_requests: u64,
    /// Completions taken from the device, of sends and of receives.
    pub completions: u64,
    /// Looks at the completion queue, those that found nothing included. None is a system call.
    pub polls: u64,
    /// How often the device was asked to wake a sleeper.
    pub arms: u64,
    /// How often it has.
    pub wakeups: u64,
    /// Packets of frames that were sent and received.
    pub packets_sent: u64,
    pub packets_received: u64,
    /// Arrivals that were told by an immediate, sent and received.
    pub immediates_sent: u64,
    pub immediates_received: u64,
    /// Atomic operations that were handed to the device.
    pub device_atomics: u64,
    /// Queue pairs that were reset because of an error, and why they were is told by the path's loss.
    pub failed_paths: u64,
    /// How often the queue pair for introductions had failed and was started again.
    pub datagram_revivals: u64,
}

impl VerbsCounters {
    /// Every count by its name.
    pub fn by_name(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("doorbells", self.doorbells),
            ("work_requests", self.work_requests),
            ("inline_requests", self.inline_requests),
            ("completions", self.completions),
            ("polls", self.polls),
            ("arms", self.arms),
            ("wakeups", self.wakeups),
            ("packets_sent", self.packets_sent),
            ("packets_received", self.packets_received),
            ("immediates_sent", self.immediates_sent),
            ("immediates_received", self.immediates_received),
            ("device_atomics", self.device_atomics),
            ("failed_paths", self.failed_paths),
            ("datagram_revivals", self.datagram_revivals),
        ]
    }
}
