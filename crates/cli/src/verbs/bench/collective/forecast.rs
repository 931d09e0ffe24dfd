//! What the model says of a point before it is measured.

use std::path::Path;

use weft_plan::algorithms::Grid;
use weft_plan::cost::{Candidate, Placement, Profile};
use weft_plan::schedule::encode::from_json;
use weft_plan::{Bandwidth, Bytes, Collective, Picos, Platform, Problem, Rank};

use super::Way;
use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::Allocation;
use crate::exercise::{Kind, ROOT};
use crate::ranks::Exercise;

/// The platform of a file, or the built-in one.
pub(super) fn platform(path: Option<&Path>) -> Result<Platform, Complaint> {
    let Some(path) = path else {
        return Ok(Platform::laptop());
    };
    let text = std::fs::read_to_string(path).or_complain(Exit::Usage, || {
        format!("The platform file {} cannot be read.", path.display())
    })?;
    Platform::from_toml(&text).or_complain(Exit::Usage, || format!("{} is not a platform file.", path.display()))
}

/// Predicts for ranks that reach each other in one way.
pub(super) struct Forecast {
    ranks: u32,
    /// By who allocated the buffers. A platform that says nothing of a way predicts nothing.
    mapped: Option<Placement>,
    foreign: Option<Placement>,
}

impl Forecast {
    pub(super) fn new(platform: &Platform, way: Way, ranks: u32) -> Forecast {
        let place = |platform: &Platform| {
            let placed = match way {
                Way::SharedMemory => Placement::on(platform, Grid::flat(ranks)),
                // As if each were on a node of its own, only that all of them move their bytes with the same cores.
                Way::Tcp | Way::Verbs => {
                    let grid = Grid { nodes: ranks, local: 1 };
                    Placement::over(platform, grid, &[way.name()]).map(|placement| match way {
                        Way::Tcp => crowded(placement),
                        _ => placement,
                    })
                }
            };
            placed.ok()
        };
        let mut known = platform.clone();
        let mapped = place(&known);
        let foreign = match way {
            Way::SharedMemory => {
                let cost = known.transports.get("shared_memory.foreign").copied();
                cost.and_then(|cost| {
                    known.transports.insert("shared_memory".to_string(), cost);
                    Some(through_slots(place(&known)?, platform))
                })
            }
            Way::Tcp | Way::Verbs => mapped,
        };
        Forecast { ranks, mapped, foreign }
    }

    pub(super) fn of(&self, exercise: &Exercise, algorithm: &str) -> Option<Picos> {
        if exercise.quantized.is_some() {
            // What encoding and decoding cost is not in platform files.
            return None;
        }
        let placement = match exercise.allocation {
            Allocation::Mapped | Allocation::Gpu => self.mapped?,
            Allocation::Foreign => self.foreign?,
        };
        let collective = Collective::named(&exercise.collective, ROOT, Rank(1))?;
        let can = Kind::named(&exercise.collective)?;
        let problem = Problem {
            in_place: can == Kind::Broadcast || exercise.in_place && can.has_in_place(),
            ..Problem::new(collective, self.ranks)
        };
        let profile = match &exercise.schedule {
            Some(text) => Profile::of(&problem, &from_json(text).ok()?.program, &placement),
            None => {
                let candidate: Candidate = algorithm.parse().ok()?;
                let program = candidate.program(&problem, placement.grid)?;
                Profile::of(&problem, &*program, &placement)
            }
        };
        Some(profile.predict(Bytes(exercise.bytes)).time)
    }
}

/// Where there are more ranks than cores, each gets its share of them.
fn crowded(mut placement: Placement) -> Placement {
    let (ranks, cores) = (placement.grid.ranks(), placement.cores);
    if cores > 0 && ranks > cores {
        let slower = |bandwidth: Bandwidth| {
            let share = bandwidth.bytes_per_sec() as f64 * f64::from(cores) / f64::from(ranks);
            Bandwidth::from_bytes_per_sec(share.max(1.0) as u64)
        };
        placement.across.bandwidth = slower(placement.across.bandwidth);
        placement.reduction = slower(placement.reduction);
        placement.copy = slower(placement.copy);
        let latency = placement.across.latency.as_ps() as f64 * f64::from(ranks) / f64::from(cores);
        placement.across.latency = Picos::from_ps(latency as u64);
    }
    placement
}

/// What ranks cannot see is copied once more, by whoever sends it.
fn through_slots(mut placement: Placement, platform: &Platform) -> Placement {
    let memcpy = platform.machines.first().and_then(|machine| machine.memcpy);
    if let (Some(arena), Some(memcpy)) = (&mut placement.arena, memcpy) {
        for speed in [&mut arena.copy, &mut arena.reduce] {
            speed.cached = one_after_the_other(speed.cached, memcpy.cached);
            speed.streaming = one_after_the_other(speed.streaming, memcpy.streaming);
        }
    }
    placement
}

fn one_after_the_other(a: Bandwidth, b: Bandwidth) -> Bandwidth {
    let (a, b) = (a.bytes_per_sec() as f64, b.bytes_per_sec() as f64);
    Bandwidth::from_bytes_per_sec((a * b / (a + b).max(1.0)) as u64)
}
