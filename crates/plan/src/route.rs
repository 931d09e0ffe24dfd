//! By which way bytes go from one place to another: at once, or through host memory on the way.
//!
//! A route follows from what the transports can do and what that costs, and from nothing else. Stages are charged one after
//! the other, as if the next began when the last byte of the one before had come: a bound that overlapping them only improves.
//!
//! ```
//! use weft_plan::route::{Carrier, Distance, Journey, Kinds, Reach, Route, route};
//! use weft_plan::{Bytes, Place, Platform};
//! let costs = Platform::laptop().transports;
//! let tcp = Carrier { transport: "tcp", reach: Reach::Anywhere, from: Kinds::DRAM, to: Kinds::DRAM, cost: costs["tcp"] };
//! let shared = Carrier { transport: "shared_memory", reach: Reach::SameHost, cost: costs["shared_memory"], ..tcp };
//! let mut journey = Journey { from: Place::DRAM, to: Place::DRAM, distance: Distance::SameHost, bytes: Bytes(1 << 20), spans: 1 };
//! assert_eq!(route(&journey, &[tcp, shared])?, Route::Direct { transport: "shared_memory" });
//! journey.distance = Distance::OtherHost;
//! assert_eq!(route(&journey, &[tcp, shared])?, Route::Direct { transport: "tcp" });
//! # Ok::<(), weft_plan::route::NoRoute>(())
//! ```

use std::fmt;

use thiserror::Error;

use crate::cost::LinkCost;
use crate::place::{Place, PlaceKind};
use crate::units::{Bytes, Picos};

/// What is to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Journey {
    pub from: Place,
    pub to: Place,
    pub distance: Distance,
    pub bytes: Bytes,
    pub spans: u64,
}

/// What a transport can do, and its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carrier<'a> {
    pub transport: &'a str,
    pub reach: Reach,
    /// The places it takes bytes from and brings them to.
    pub from: Kinds,
    pub to: Kinds,
    pub cost: LinkCost,
}

/// How far a transport reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reach {
    /// Among the places of this agent, which needs no peer.
    Here,
    /// Among the places of the agent at the far end, by that agent's own doing.
    There,
    SameHost,
    OtherHost,
    /// Any other agent.
    Anywhere,
}

/// How far apart two agents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Distance {
    /// They are one.
    Here,
    SameHost,
    OtherHost,
}

impl Reach {
    /// Whether it joins two agents that are so far apart, where the first is the one that has the transport.
    pub const fn joins(self, distance: Distance) -> bool {
        match self {
            Reach::Here => matches!(distance, Distance::Here),
            Reach::There => false,
            Reach::SameHost => matches!(distance, Distance::SameHost),
            Reach::OtherHost => matches!(distance, Distance::OtherHost),
            Reach::Anywhere => !matches!(distance, Distance::Here),
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Distance::Here => "of this agent",
            Distance::SameHost => "of an agent on the same host",
            Distance::OtherHost => "of an agent on another host",
        })
    }
}

/// A set of kinds of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kinds(u8);

/// The way to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route<'a> {
    /// One transport does it.
    Direct { transport: &'a str },
    /// Through host memory, on one host or on both: the stages in order.
    Staged { stages: Vec<Stage<'a>> },
}

/// One leg of a staged route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage<'a> {
    pub transport: &'a str,
    pub from: Place,
    pub to: Place,
}

/// Nothing that is there can do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no transport here moves bytes from {from} to {to} {distance}, not even through host memory")]
pub struct NoRoute {
    pub from: Place,
    pub to: Place,
    pub distance: Distance,
}

/// The cheapest way. Of equal ones, the one with fewer stages; of those, the one whose transports were named first.
pub fn route<'a>(journey: &Journey, carriers: &[Carrier<'a>]) -> Result<Route<'a>, NoRoute> {
    let Journey { from, to, distance, .. } = *journey;
    let apart = distance != Distance::Here;
    let near = |place| Site { place, far: false };
    let far = |place| Site { place, far: apart };
    let (start, goal) = (near(from), far(to));

    // Host memory on the way helps only where the bytes are not in that host memory already.
    let stops_near = from.kind() != PlaceKind::Dram;
    let stops_far = to.kind() != PlaceKind::Dram;
    let mut ways: Vec<Vec<Site>> = vec![vec![start, goal]];
    if stops_near && (stops_far || apart) {
        ways.push(vec![start, near(Place::DRAM), goal]);
    }
    if stops_far && apart {
        ways.push(vec![start, far(Place::DRAM), goal]);
    }
    if stops_near && stops_far && apart {
        ways.push(vec![start, near(Place::DRAM), far(Place::DRAM), goal]);
    }

    let mut best: Option<(Picos, Vec<Stage<'a>>)> = None;
    for way in ways {
        if let Some((time, stages)) = cheapest(&way, journey, carriers)
            && best.as_ref().is_none_or(|(least, _)| time < *least)
        {
            best = Some((time, stages));
        }
    }
    match best {
        Some((_, stages)) => Ok(match stages[..] {
            [only] => Route::Direct {
                transport: only.transport,
            },
            _ => Route::Staged { stages },
        }),
        None => Err(NoRoute { from, to, distance }),
    }
}

impl Kinds {
    pub const DRAM: Kinds = Kinds::of(&[PlaceKind::Dram]);

    pub const fn of(kinds: &[PlaceKind]) -> Kinds {
        let mut bits = 0;
        let mut i = 0;
        while i < kinds.len() {
            bits |= 1 << kinds[i] as u8;
            i += 1;
        }
        Kinds(bits)
    }
    pub const fn contains(self, kind: PlaceKind) -> bool {
        self.0 & 1 << kind as u8 != 0
    }
}

/// A place of the agent where the bytes are, or of the one where they go.
#[derive(Clone, Copy, Debug)]
struct Site {
    place: Place,
    far: bool,
}

/// The cheapest transport for each stage of a way; `None` where some stage has none.
fn cheapest<'a>(way: &[Site], journey: &Journey, carriers: &[Carrier<'a>]) -> Option<(Picos, Vec<Stage<'a>>)> {
    let mut total = Picos::ZERO;
    let mut stages = Vec::with_capacity(way.len() - 1);
    for pair in way.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let (time, carrier) = carriers
            .iter()
            .filter(|c| c.carries(from, to, journey.distance))
            .map(|c| (c.cost.time(journey.bytes, journey.spans), c))
            .min_by_key(|(time, _)| *time)?;
        total = total.saturating_add(time);
        stages.push(Stage {
            transport: carrier.transport,
            from: from.place,
            to: to.place,
        });
    }
    Some((total, stages))
}

impl Carrier<'_> {
    fn carries(&self, from: Site, to: Site, distance: Distance) -> bool {
        let joins = match (from.far, to.far) {
            (false, false) => self.reach.joins(Distance::Here),
            (true, true) => self.reach == Reach::There,
            _ => self.reach.joins(distance),
        };
        joins && self.from.contains(from.place.kind()) && self.to.contains(to.place.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bandwidth;
    use proptest::prelude::*;

    const GPU: Place = Place::Gpu { ordinal: 0 };

    const fn carrier(
        transport: &'static str,
        reach: Reach,
        from: PlaceKind,
        to: PlaceKind,
        us: u64,
    ) -> Carrier<'static> {
        Carrier {
            transport,
            reach,
            from: Kinds::of(&[from]),
            to: Kinds::of(&[to]),
            cost: LinkCost {
                latency: Picos::from_us(us),
                per_span: Picos::ZERO,
                bandwidth: Bandwidth::MAX,
            },
        }
    }

    const DOWN: Carrier<'static> = carrier("cuda", Reach::Here, PlaceKind::Gpu, PlaceKind::Dram, 5);
    const UP: Carrier<'static> = carrier("cuda", Reach::Here, PlaceKind::Dram, PlaceKind::Gpu, 5);
    const UP_THERE: Carrier<'static> = carrier("cuda", Reach::There, PlaceKind::Dram, PlaceKind::Gpu, 5);
    const TCP: Carrier<'static> = carrier("tcp", Reach::Anywhere, PlaceKind::Dram, PlaceKind::Dram, 20);
    const RDMA: Carrier<'static> = carrier("verbs", Reach::OtherHost, PlaceKind::Gpu, PlaceKind::Gpu, 3);
    const SLOW_RDMA: Carrier<'static> = carrier("verbs", Reach::OtherHost, PlaceKind::Gpu, PlaceKind::Gpu, 90);
    const WRITE: Carrier<'static> = carrier("file", Reach::Here, PlaceKind::Dram, PlaceKind::File, 50);

    fn journey(from: Place, to: Place, distance: Distance) -> Journey {
        Journey {
            from,
            to,
            distance,
            bytes: Bytes(4096),
            spans: 1,
        }
    }

    fn transports<'a>(route: Result<Route<'a>, NoRoute>) -> Vec<&'a str> {
        match route.unwrap() {
            Route::Direct { transport } => vec![transport],
            Route::Staged { stages } => stages.iter().map(|s| s.transport).collect(),
        }
    }

    #[test]
    fn between_gpus_of_two_machines() {
        let gpus = journey(GPU, GPU, Distance::OtherHost);
        assert_eq!(
            transports(route(&gpus, &[DOWN, UP_THERE, TCP])),
            ["cuda", "tcp", "cuda"],
            "through both hosts"
        );
        assert_eq!(
            transports(route(&gpus, &[DOWN, UP_THERE, TCP, RDMA])),
            ["verbs"],
            "at once"
        );
        assert_eq!(
            transports(route(&gpus, &[DOWN, UP_THERE, TCP, SLOW_RDMA])),
            ["cuda", "tcp", "cuda"],
            "capability alone does not decide"
        );
        assert_eq!(
            route(&gpus, &[DOWN, UP, TCP]),
            Err(NoRoute {
                from: GPU,
                to: GPU,
                distance: Distance::OtherHost
            }),
            "nothing goes up again over there"
        );
    }

    #[test]
    fn a_spill_from_a_gpu_goes_through_host_memory() {
        assert_eq!(
            route(&journey(GPU, Place::File, Distance::Here), &[WRITE, DOWN]),
            Ok(Route::Staged {
                stages: vec![
                    Stage {
                        transport: "cuda",
                        from: GPU,
                        to: Place::DRAM
                    },
                    Stage {
                        transport: "file",
                        from: Place::DRAM,
                        to: Place::File
                    },
                ]
            })
        );
    }

    #[test]
    fn size_decides_between_latency_and_bandwidth() {
        let quick = Carrier {
            transport: "quick",
            cost: LinkCost {
                latency: Picos::from_us(1),
                per_span: Picos::ZERO,
                bandwidth: Bandwidth::from_gigabytes_per_sec(1.0),
            },
            ..TCP
        };
        let wide = Carrier {
            transport: "wide",
            cost: LinkCost {
                latency: Picos::from_us(100),
                bandwidth: Bandwidth::from_gigabytes_per_sec(50.0),
                ..quick.cost
            },
            ..TCP
        };
        let small = journey(Place::DRAM, Place::DRAM, Distance::OtherHost);
        let large = Journey {
            bytes: Bytes(1 << 30),
            ..small
        };
        assert_eq!(transports(route(&small, &[wide, quick])), ["quick"]);
        assert_eq!(transports(route(&large, &[wide, quick])), ["wide"]);
    }

    fn any_place() -> impl Strategy<Value = Place> {
        prop::sample::select(vec![
            Place::DRAM,
            Place::Dram { numa: Some(1) },
            GPU,
            Place::Gpu { ordinal: 1 },
            Place::File,
            Place::Object,
        ])
    }

    proptest! {
        #[test]
        fn a_route_leads_from_start_to_goal_by_transports_that_can(
            from in any_place(), to in any_place(),
            distance in prop::sample::select(vec![Distance::Here, Distance::SameHost, Distance::OtherHost]),
            picks in prop::collection::vec((0usize..7, 0u64..1000), 0..8),
        ) {
            let all = [DOWN, UP, UP_THERE, TCP, RDMA, SLOW_RDMA, WRITE];
            let carriers: Vec<Carrier> = picks.into_iter().map(|(i, us)| {
                Carrier { cost: LinkCost { latency: Picos::from_us(us), ..all[i].cost }, ..all[i] }
            }).collect();
            let Ok(Route::Staged { stages }) = route(&journey(from, to, distance), &carriers) else { return Ok(()) };
            prop_assert!((2..=3).contains(&stages.len()));
            prop_assert_eq!((stages[0].from, stages[stages.len() - 1].to), (from, to));
            for pair in stages.windows(2) {
                prop_assert_eq!((pair[0].to, pair[1].from), (Place::DRAM, Place::DRAM));
            }
            for stage in &stages {
                let able = |c: &Carrier| c.from.contains(stage.from.kind()) && c.to.contains(stage.to.kind());
                prop_assert!(carriers.iter().any(|c| c.transport == stage.transport && able(c)));
            }
        }
    }
}
