//! Reading a peer's memory where it lies, under a lease.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::Seen;
use weft_protocol::session::LeaseId;

use crate::driver::{LeaseState, PeerState, World};
use crate::error::Error;
use crate::memory::after;
use crate::peer::{Peer, Remote};

/// A peer's region, mapped read-only: its pages are shared and nothing was copied. The lease is given back on drop.
///
/// While the lease is held the owner does not release the memory, but it may write to it, so bytes are copied out, or read
/// through a raw pointer by whoever has agreed with the owner on when it writes.
#[derive(Debug)]
pub struct Borrowed {
    peer: Peer,
    lease: LeaseId,
    mapping: Arc<dyn Seen>,
}

impl Peer {
    /// Maps a published region of a peer on this host, for as long as `lease`.
    pub fn borrow(&self, remote: &Remote, lease: Duration) -> Result<Borrowed, Error> {
        let shared = self.shared.get()?;
        let key = remote.region.key;
        let timeout = self.defaults.deadline;
        let id = shared.act(|world, now| {
            let id = world
                .core
                .borrow(self.id, key, lease.into(), now)
                .map_err(Error::from)?;
            world.leases.insert((self.id, id), LeaseState::Asked);
            Ok::<LeaseId, Error>(id)
        });
        let id = id.map_err(|error| self.explain(shared, error))?;
        let mut give_back = GiveBack {
            peer: self,
            lease: id,
            armed: true,
        };
        let refused = |refusal| Error::Refused {
            what: format!("borrowing {:?} of {:?}", remote.name(), self.name()),
            refusal,
        };
        let look = |world: &mut World| {
            if let Some(PeerState::Gone(error)) = world.peers.get(&self.id) {
                return Some(Err(error.clone()));
            }
            match world.leases.get(&(self.id, id)) {
                Some(LeaseState::Refused(refusal)) => return Some(Err(refused(*refusal))),
                Some(LeaseState::Held { .. }) => {}
                Some(LeaseState::Asked) => return None,
                _ => return Some(Err(Error::LeaseEnded)),
            }
            match self.mapped(world, remote) {
                Ok(mapping) => mapping.map(Ok),
                Err(error) => Some(Err(error)),
            }
        };
        let deadline = after(shared, timeout);
        // A mapping arrives inside the transport, which wakes no sleeper.
        let found = shared.wait_looking(deadline, look);
        let mapping = found.unwrap_or_else(|| Err(shared.in_vain(|| format!("a lease on {:?}", remote.name()))))?;
        give_back.armed = false;
        Ok(Borrowed {
            peer: self.clone(),
            lease: id,
            mapping,
        })
    }

    fn mapped(&self, world: &mut World, remote: &Remote) -> Result<Option<Arc<dyn Seen>>, Error> {
        let not_borrowable = |why| Error::NotBorrowable {
            name: remote.name().to_owned(),
            why,
        };
        let Some((transport, path)) = world.core.path_over(self.id, "shared_memory") else {
            return Err(not_borrowable("the peer is not reached through shared memory"));
        };
        transport
            .borrow(path, &remote.region.key)
            .map_err(|failure| match failure {
                weft_protocol::Failure::Refused(weft_protocol::Refusal::Unsupported) => {
                    not_borrowable("its memory was not allocated by Weft, so it cannot be mapped")
                }
                weft_protocol::Failure::Refused(refusal) => Error::Refused {
                    what: format!("borrowing {:?}", remote.name()),
                    refusal,
                },
                _ => not_borrowable("the path to the peer was lost"),
            })
    }

    fn give_back(&self, lease: LeaseId) {
        // The lease is the parent's, also where a forked child has a copy of what was borrowed.
        let Ok(shared) = self.shared.get() else { return };
        shared.act(|world, now| {
            world.leases.remove(&(self.id, lease));
            world.core.give_back(self.id, lease, now);
        });
    }
}

/// Gives a lease back if the borrowing does not come about.
struct GiveBack<'a> {
    peer: &'a Peer,
    lease: LeaseId,
    armed: bool,
}

impl Drop for GiveBack<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.peer.give_back(self.lease);
        }
    }
}

impl Borrowed {
    pub fn len(&self) -> u64 {
        self.mapping.bytes()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How much longer the lease holds; `None` once it is over.
    pub fn remaining(&self) -> Option<Duration> {
        let shared = self.peer.shared.get().ok()?;
        let now = shared.clock.now();
        let world = shared.lock();
        match world.leases.get(&(self.peer.id, self.lease)) {
            Some(LeaseState::Held { until }) if *until > now && self.mapping.is_live() => {
                Some(until.saturating_sub(now).into())
            }
            _ => None,
        }
    }

    /// Copies bytes out. After the lease it is an error, also if it ended while they were being copied.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.peer.shared.get()?;
        self.remaining().ok_or(Error::LeaseEnded)?;
        self.mapping.copy_out(offset, into);
        self.remaining().map(drop).ok_or(Error::LeaseEnded)
    }

    /// The first byte. The pages stay mapped while this value lives; what they mean is only as good as the lease.
    pub fn as_ptr(&self) -> *const u8 {
        self.mapping.as_ptr()
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.peer.give_back(self.lease);
    }
}
