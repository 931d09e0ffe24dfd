//! What any bytes may do to an agent that takes them for parcels: see [`crate::harness`].

use weft_plan::Time;

use super::parcels::is_parcel;
use super::paths::Stage;
use super::{Core, Event, Reach, Settings, Slot, Target};
use crate::loopback::{Loopback, LoopbackEndpoint};
use crate::region::Epoch;
use crate::seeded::Seeded;
use crate::session::{Config, Secret};

/// Rounds in which two agents of one process have found each other many times over.
const TURNS_MAX: usize = 10_000;

/// Lets a peer with the right secret say pieces of `bytes` as parcels and receipts, between what it rightfully says. The victim drops them, or
/// hands out what came with a whole head, and goes on.
pub(crate) fn parcels(bytes: &[u8]) {
    let network = Loopback::new();
    let mut victim = agent(&network, "victim", 1);
    let mut liar = agent(&network, "liar", 2);
    let mut now = Time::ZERO;
    let target = Target::at(liar.addresses()[0].clone(), Time::from_secs(5));
    let peer = victim.connect(target, now).expect("the address is understood");
    let mut paths = [0, 0];
    for _ in 0..TURNS_MAX {
        turn(&mut [&mut victim, &mut liar], &mut now, &mut paths);
        if paths == [1, 1] {
            break;
        }
    }
    assert_eq!(paths, [1, 1], "two agents with one secret find each other");
    let mut rest = bytes;
    while let Some((head, more)) = rest.split_first_chunk::<2>() {
        let (piece, more) = more.split_at(usize::from(head[1]).min(more.len()));
        rest = more;
        let group = u64::from(head[0] % 4);
        match head[0] >> 6 {
            0 => victim.open_parcels(group),
            1 => victim.drop_parcels(group),
            2 => {
                let _ = victim.send_parcel(peer, group, &[piece], now);
            }
            _ => {}
        }
        let joined = victim.paths.iter().find(|(_, path)| path.stage == Stage::Joined);
        if let (Some((via, _)), true) = (joined, is_parcel(piece)) {
            victim.on_parcel(via, piece.to_vec(), now);
        }
        turn(&mut [&mut victim, &mut liar], &mut now, &mut paths);
        while let Some(parcel) = victim.next_parcel(group) {
            assert!(parcel.payload().len() <= super::MAX_PARCEL_BYTES);
        }
    }
}

fn agent(network: &Loopback, name: &str, epoch: u64) -> Core<LoopbackEndpoint> {
    let slot = Slot {
        reach: Reach::Anywhere,
        preference: 0,
        paths: 1,
        transport: Box::new(network.endpoint(name, Epoch(epoch))),
    };
    let config = Config::new(name, Epoch(epoch), Secret::new(b"a secret of the harness"));
    let mut chance = Seeded::new(epoch);
    let random = Box::new(move || {
        let mut bytes = [0; 32];
        chance.fill(&mut bytes);
        bytes
    });
    Core::new(Settings::new(config), vec![slot], random)
}

/// One turn of everybody, and how many paths each has heard of.
fn turn(agents: &mut [&mut Core<LoopbackEndpoint>; 2], now: &mut Time, paths: &mut [usize; 2]) {
    *now = now.saturating_add(Time::from_ms(1));
    for (agent, paths) in agents.iter_mut().zip(paths) {
        agent.pump(*now);
        let heard = std::iter::from_fn(|| agent.next_event());
        *paths += heard.filter(|event| matches!(event, Event::PathUp { .. })).count();
    }
}
