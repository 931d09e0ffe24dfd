//! How a path begins: who introduces itself, who answers, and what is left to others because it may take long.

use std::io;
use std::sync::Arc;

use weft_protocol::Loss;

use super::super::address::Doorstep;
use super::super::buffers::WINDOW;
use super::super::introduction::{Letter, QueueEnd};
use super::super::message::{Frame, PacketSize};
use super::super::queue::{Connecting, QueuePair};
use super::super::rail::Rail;
use super::super::setup::{Errand, Reach, Reached};
use super::{Parts, Path, Phase, REPEAT_FIRST, World};

impl Path {
    /// A path that this side opens. Its first introduction is among the letters.
    pub(in super::super) fn introducing(parts: Parts, from: Doorstep, world: &World<'_>) -> Path {
        let phase = Phase::Introducing {
            repeat: world.now.saturating_add(REPEAT_FIRST),
            gap: REPEAT_FIRST,
            until: world.now.saturating_add(world.options.open_max),
        };
        let mut path = Path::new(parts, true, phase);
        let end = path.end_here(world);
        path.letters.push(Letter::Introduction {
            token: path.token,
            from,
            end,
        });
        path.look_for_route(world);
        path
    }

    /// A path that a peer opens. It is answered once the way to it has been found.
    pub(in super::super) fn accepting(parts: Parts, end: &QueueEnd, world: &World<'_>) -> Path {
        let phase = Phase::Answering {
            until: world.now.saturating_add(world.options.open_max),
        };
        let mut path = Path::new(parts, false, phase);
        path.connect(end, world);
        path
    }

    /// Repeats the answer to an introduction that was repeated.
    pub(in super::super) fn answer(&mut self, world: &World<'_>) {
        if !matches!(self.phase, Phase::Accepting { .. } | Phase::Live) {
            return;
        }
        let end = self.end_here(world);
        self.letters.push(Letter::Answer { token: self.token, end });
        if self.route.is_none() {
            self.look_for_route(world);
        }
    }

    /// The peer has answered the introduction.
    pub(in super::super) fn on_answer(&mut self, end: &QueueEnd, world: &mut World<'_>) {
        let Phase::Introducing { until, .. } = self.phase else {
            return;
        };
        self.phase = Phase::Connecting { until };
        self.connect(end, world);
    }

    /// Something has come of looking for the peer.
    pub(in super::super) fn on_reached(&mut self, reached: Reached, world: &mut World<'_>) {
        self.routing = false;
        self.route = self.route.take().or(reached.route);
        match (self.phase, reached.connected) {
            (Phase::Connecting { until }, Some(Ok(()))) => {
                self.phase = Phase::Greeting { until };
                self.say(&Frame::Ready);
                self.pump(world);
            }
            (Phase::Answering { until }, Some(Ok(()))) => {
                self.phase = Phase::Accepting { until };
                self.answer(world);
            }
            (Phase::Connecting { .. } | Phase::Answering { .. }, Some(Err(error))) => {
                self.lose(why_not_connected(&error), world);
            }
            _ => {}
        }
    }

    /// Has the way to the peer looked for, which may take long.
    pub(super) fn look_for_route(&mut self, world: &World<'_>) {
        if !std::mem::replace(&mut self.routing, true) {
            let errand = self.errand(true, None, world);
            self.errands.push(errand);
        }
    }

    fn errand(&self, route: bool, connect: Option<(Arc<QueuePair>, Connecting)>, world: &World<'_>) -> Errand {
        Errand::Reach(Reach {
            path: Some(self.id),
            peer: self.peer.clone(),
            traffic_class: world.options.traffic_class,
            service_level: world.options.service_level,
            route,
            connect,
            letter: None,
        })
    }

    pub(super) fn end_here(&self, world: &World<'_>) -> QueueEnd {
        QueueEnd {
            qpn: self.number,
            psn: self.psn,
            mtu: mtu_here(world),
            reads: reads_here(world.rail),
            credits: WINDOW,
        }
    }

    /// Has the queue pair connected, which may take long.
    fn connect(&mut self, end: &QueueEnd, world: &World<'_>) {
        let Some(pair) = &self.pair else { return };
        let mtu = mtu_here(world).min(end.mtu);
        let asked = u8::try_from(world.rail.device.attributes().max_qp_init_rd_atom).unwrap_or(u8::MAX);
        let how = Connecting {
            end: *end,
            psn: self.psn,
            mtu,
            reads_here: reads_here(world.rail),
            reads_there: asked.min(end.reads),
            traffic_class: world.options.traffic_class,
            service_level: world.options.service_level,
            timeout_code: world.options.timeout_code(),
            retries: world.options.retries,
        };
        let errand = self.errand(self.route.is_none(), Some((Arc::clone(pair), how)), world);
        self.errands.push(errand);
        self.credits.open(end.credits);
        self.packet_size = PacketSize::of_mtu(mtu);
    }
}

/// The kernel's words for a peer that is not there differ.
fn why_not_connected(error: &io::Error) -> Loss {
    match error.raw_os_error() {
        Some(libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH) => Loss::Unreachable,
        other => Loss::System(other.unwrap_or(libc::EIO)),
    }
}

fn mtu_here(world: &World<'_>) -> u8 {
    let port = world.rail.mtu;
    let mtu = world.options.mtu.map_or(port, |mtu| mtu.min(port));
    mtu.code() as u8
}

fn reads_here(rail: &Rail) -> u8 {
    u8::try_from(rail.device.attributes().max_qp_rd_atom).unwrap_or(u8::MAX)
}
