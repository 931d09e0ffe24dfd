//! What the core tells, in the words of [`observe`](crate::observe).

use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::agent::Event as CoreEvent;
use weft_protocol::transfer::PeerId;

use crate::driver::{PeerState, World};
use crate::error::Error;
use crate::observe::{Event, Observer, Outcome};

/// Reports a core event before the world takes it in.
pub(crate) fn report(observer: &Observer, world: &World, event: &CoreEvent, now: Time) {
    let name = |peer| -> Arc<str> {
        match world.peers.get(&peer) {
            Some(PeerState::Connected { name }) => name.as_str().into(),
            Some(PeerState::Gone(Error::PeerLost { peer, .. })) => peer.as_str().into(),
            _ => "".into(),
        }
    };
    match event {
        CoreEvent::Ended { id, outcome } => observer.trace(now, || {
            let about = world.transfers.get(id);
            let (peer, direction) = about.map_or(("".into(), weft_protocol::Direction::Read), |c| {
                (c.peer.clone(), c.direction)
            });
            let (transport, bytes, started, ended, outcome) = match outcome {
                Ok(summary) => (
                    summary.transport(),
                    summary.bytes,
                    summary.started,
                    summary.ended,
                    Outcome::Done,
                ),
                Err(error) => {
                    let started = about.map_or(now, |c| c.started);
                    (
                        error.transport,
                        error.bytes_done,
                        started,
                        now,
                        Outcome::Failed(error.cause),
                    )
                }
            };
            Event::TransferEnded {
                id: id.0,
                peer,
                transport,
                direction,
                bytes,
                started,
                ended,
                outcome,
            }
        }),
        CoreEvent::Notified { peer, payload } => {
            let bytes = payload.len() as u64;
            observer.trace(now, || Event::NotificationReceived {
                peer: name(*peer),
                bytes,
            });
        }
        CoreEvent::Connected { identity, .. } => {
            observer.report(now, || Event::SessionEstablished {
                peer: identity.name.as_str().into(),
            });
        }
        CoreEvent::PeerLost { name, cause, .. } => {
            observer.report(now, || {
                let (peer, cause) = (name.as_str().into(), cause.clone());
                match cause.is_orderly() {
                    true => Event::SessionClosed { peer, cause },
                    false => Event::SessionLost { peer, cause },
                }
            });
        }
        // Lanes to the agent's own places lead to no peer.
        CoreEvent::PathUp { peer, .. } if *peer == PeerId::HERE => {}
        CoreEvent::PathUp { peer, transport } => {
            observer.report(now, || Event::PathOpened {
                peer: name(*peer),
                transport,
            });
        }
        CoreEvent::PathDown { peer, transport, loss } => {
            // The paths of a session go after it, whoever has closed it.
            observer.report(now, || match world.peers.get(peer) {
                Some(PeerState::Gone(Error::PeerLost { peer, cause })) if cause.is_orderly() => Event::PathClosed {
                    peer: peer.as_str().into(),
                    transport,
                },
                _ => Event::PathLost {
                    peer: name(*peer),
                    transport,
                    loss: *loss,
                },
            });
        }
        _ => {}
    }
}
