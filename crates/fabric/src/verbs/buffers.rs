//! Registered memory for packets: what is received into, and what is sent from where it does not fit into a request.

use std::io;
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::Memory;
use weft_protocol::atomic::WORD_BYTES;
use weft_sys::verbs as sys;

use super::credits::RESERVE;
use super::message::PACKET_BYTES;
use super::options::VerbsError;
use super::queue::ReceiveQueue;
use super::registration::{Registration, Registrations, RemoteAccess};
use crate::HostMemory;
use crate::memory::AllocateOptions;

/// Packets that a peer may send before it has heard of a free buffer.
pub(super) const WINDOW: u16 = 64;
/// Buffers that every path needs.
pub(super) const BUFFERS_PER_PATH: u16 = WINDOW + RESERVE;

/// Buffers of one size in one registered memory.
#[derive(Debug)]
pub(super) struct Buffers {
    memory: Arc<HostMemory>,
    registration: Registration,
    bytes_each: usize,
    count: usize,
}

impl Buffers {
    pub(super) fn new(
        count: usize,
        bytes_each: usize,
        registrations: &mut Registrations,
    ) -> Result<Buffers, VerbsError> {
        let memory = Arc::new(HostMemory::allocate(count * bytes_each, AllocateOptions::default())?);
        let whole: Arc<dyn Memory> = Arc::clone(&memory) as Arc<dyn Memory>;
        Ok(Buffers {
            registration: registrations.register(&whole, RemoteAccess::NONE)?,
            memory,
            bytes_each,
            count,
        })
    }

    /// Ends the registration with the memory. One that is only dropped would stay pinned until somebody looked for it.
    pub(super) fn give_back(self, registrations: &mut Registrations, now: Time) {
        let Buffers {
            memory, registration, ..
        } = self;
        drop(memory);
        registrations.release(registration, now);
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// All of a buffer, as the device calls it.
    pub(super) fn piece(&self, index: usize) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.registration.iova() + (index * self.bytes_each) as u64,
            length: self.bytes_each as u32,
            lkey: self.registration.lkey(),
        }
    }

    /// The first `len` bytes of a buffer.
    ///
    /// # Safety
    /// The device does not have the buffer.
    pub(super) unsafe fn bytes(&self, index: usize, len: usize) -> &[u8] {
        assert!(
            index < self.count && len <= self.bytes_each,
            "bytes outside of a buffer"
        );
        // SAFETY: within the memory, which lives as long as this value; nobody writes to it, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(index * self.bytes_each), len) }
    }

    /// A buffer to write to.
    ///
    /// # Safety
    /// The device does not have the buffer.
    pub(super) unsafe fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        assert!(index < self.count, "a buffer that is not there");
        // SAFETY: the buffer is there, the device does not have it by the caller's promise, and `self` is borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(index * self.bytes_each), self.bytes_each) }
    }
}

/// Registered words that answers of the device land in.
#[derive(Debug)]
pub(super) struct Landing {
    words: Buffers,
    free: Vec<u32>,
}

impl Landing {
    pub(super) fn new(count: usize, registrations: &mut Registrations) -> Result<Landing, VerbsError> {
        Ok(Landing {
            words: Buffers::new(count, WORD_BYTES as usize, registrations)?,
            free: (0..count as u32).collect(),
        })
    }

    /// A free word, and what the device calls it.
    pub(super) fn take(&mut self) -> Option<(u32, sys::ibv_sge)> {
        let place = self.free.pop()?;
        Some((place, self.words.piece(place as usize)))
    }

    /// Frees a word that the device is done with, and returns what it has left there.
    pub(super) fn give_back(&mut self, place: u32) -> u64 {
        self.free.push(place);
        // SAFETY: the request that named the word has come back.
        let bytes = unsafe { self.words.bytes(place as usize, WORD_BYTES as usize) };
        bytes.try_into().map_or(0, u64::from_ne_bytes)
    }

    pub(super) fn into_buffers(self) -> Buffers {
        self.words
    }
}

/// The receive buffers of all paths. There are as many as all windows together.
#[derive(Debug, Default)]
pub(super) struct Pool {
    chunks: Vec<Buffers>,
    /// Paths that buffers have been found for.
    paths: usize,
    /// Buffers that have been read and are to be offered again.
    spent: Vec<u32>,
}

/// Where a buffer is: its chunk above, its place in the chunk below.
const PLACE_BITS: u32 = 16;

impl Pool {
    /// Finds buffers for one more path.
    pub(super) fn add_path(
        &mut self,
        receives: &ReceiveQueue,
        registrations: &mut Registrations,
        number: impl Fn(u32) -> u64,
    ) -> Result<(), VerbsError> {
        if self.paths == self.chunks.len() {
            let chunk = Buffers::new(BUFFERS_PER_PATH.into(), PACKET_BYTES, registrations)?;
            let base = (self.chunks.len() as u32) << PLACE_BITS;
            let fresh = (0..chunk.count()).map(|i| (number(base | i as u32), chunk.piece(i)));
            // SAFETY: fresh memory that only completions give back, and that outlives the queue.
            let offered = unsafe { receives.offer(fresh) };
            self.chunks.push(chunk);
            offered.map_err(|source| VerbsError::System {
                step: "offering receive buffers",
                source,
            })?;
        }
        self.paths += 1;
        Ok(())
    }

    /// A path is gone. Its buffers stay with the device, for the next one.
    pub(super) fn remove_path(&mut self) {
        self.paths -= 1;
    }

    /// What was received into a buffer that a completion has given back.
    pub(super) fn received(&self, buffer: u32, len: u32) -> Option<&[u8]> {
        let chunk = self.chunks.get((buffer >> PLACE_BITS) as usize)?;
        let place = (buffer & ((1 << PLACE_BITS) - 1)) as usize;
        // SAFETY: the device has given the buffer back, and does not get it again before `offer_spent`.
        (place < chunk.count() && len as usize <= PACKET_BYTES).then(|| unsafe { chunk.bytes(place, len as usize) })
    }

    /// A buffer has been read.
    pub(super) fn spend(&mut self, buffer: u32) {
        self.spent.push(buffer);
    }

    /// Offers the device what has been read.
    pub(super) fn offer_spent(&mut self, receives: &ReceiveQueue, number: impl Fn(u32) -> u64) -> io::Result<()> {
        if self.spent.is_empty() {
            return Ok(());
        }
        let chunks = &self.chunks;
        let again = self.spent.iter().map(|&buffer| {
            let place = (buffer & ((1 << PLACE_BITS) - 1)) as usize;
            (number(buffer), chunks[(buffer >> PLACE_BITS) as usize].piece(place))
        });
        // SAFETY: nobody looks at a spent buffer any more, and the memory outlives the queue.
        let offered = unsafe { receives.offer(again) };
        self.spent.clear();
        offered
    }
}
