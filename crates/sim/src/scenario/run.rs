//! Running a scenario: one answer for each fidelity that is wanted.

use weft_model::fabric::{LinkId, Topology};
use weft_model::system::System;
use weft_model::workload::training::{TrainingError, TrainingJob};
use weft_plan::algorithms::Grid;
use weft_plan::collective::{Collective, Problem};
use weft_plan::cost::{Candidate, Placement, Profile, Selector};
use weft_plan::schedule::Program;
use weft_plan::{Bandwidth, Bytes, LinkCost, Picos, Rank};

use super::{Fidelity, Scenario, ScenarioError, ScenarioPlace, TransportChoice, Workload};
use crate::flow::{self, FlowOptions, Folding};
use crate::packet::{self, Overflow, PacketOptions, Recovery, Transport};
use crate::traffic::{Eager, Hot, LinkFault, MessageSpan, StepSpan, Transfer, permutation};
use crate::training::{self, Trained, TrainingChoice, TrainingRefused};

/// Timelines are kept of so many ranks, and of so many transfers, spread evenly.
const TRACED_RANKS: u32 = 64;
const TRACED_TRANSFERS: usize = 2048;

/// What a fidelity says.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub fidelity: Fidelity,
    pub time: Picos,
    pub ranks: u32,
    /// What was run: an algorithm, or the kind of traffic.
    pub what: String,
    /// Bytes in the larger of a rank's buffers, or of a transfer.
    pub bytes: Bytes,
    pub messages: u64,
    /// Ranks that were followed, each for all like it; none where there is a closed form.
    pub classes: u32,
    pub events: u64,
    pub packets: u64,
    pub trimmed: u64,
    pub dropped: u64,
    pub pauses: u64,
    pub hot: Vec<Hot>,
    pub spans: Vec<StepSpan>,
    pub message_spans: Vec<MessageSpan>,
    /// Bytes over each link, by its number, where they were asked for and the fidelity looks at links.
    pub carried: Vec<f64>,
    /// Of a step of training.
    pub trained: Option<Trained>,
}

/// What a scenario asks for, ready to run.
pub(super) struct Prepared {
    topology: Topology,
    subject: Subject,
    faults: Vec<LinkFault>,
}

enum Subject {
    Program {
        problem: Problem,
        grid: Grid,
        algorithm: Candidate,
        program: Box<dyn Program>,
        bytes: Bytes,
    },
    Transfers(Vec<Transfer>),
    Training(Box<(TrainingJob, System)>),
}

impl Scenario {
    /// All answers that are wanted, in the order of the file.
    pub fn run(&self) -> Result<Vec<Answer>, ScenarioError> {
        self.answers(false)
    }

    /// The same, with what every link carried.
    pub fn run_by_link(&self) -> Result<Vec<Answer>, ScenarioError> {
        self.answers(true)
    }

    fn answers(&self, by_link: bool) -> Result<Vec<Answer>, ScenarioError> {
        let prepared = self.prepare()?;
        let answer = |&fidelity: &Fidelity| match fidelity {
            Fidelity::Analytical => self.analytical(&prepared),
            Fidelity::Flow => self.flow(&prepared, by_link),
            Fidelity::Packet => self.packet(&prepared, by_link),
        };
        self.fidelities.iter().map(answer).collect()
    }

    pub(super) fn prepare(&self) -> Result<Prepared, ScenarioError> {
        let topology = self.topology()?;
        if self.fidelities.is_empty() {
            return Err(ScenarioError::NoFidelity {
                place: ScenarioPlace::field("fidelities"),
            });
        }
        bounded("packet.loss", self.packet.loss, 0.0, 0.5)?;
        bounded("packet.payload", self.packet.payload.0 as f64, 64.0, f64::from(1 << 20))?;
        bounded("packet.header", self.packet.header.0 as f64, 1.0, 4096.0)?;
        if let Some(queue) = self.packet.queue {
            let packet = (self.packet.payload.0 + self.packet.header.0) as f64;
            bounded("packet.queue", queue.0 as f64, packet, f64::from(1 << 30))?;
        }
        let subject = self.subject(&topology)?;
        if self.fidelities.contains(&Fidelity::Analytical) && matches!(subject, Subject::Transfers(_)) {
            return Err(ScenarioError::NotAnalytical {
                place: ScenarioPlace::field("fidelities"),
            });
        }
        let simulated = self.fidelities.iter().any(|&fidelity| fidelity != Fidelity::Analytical);
        if simulated && matches!(subject, Subject::Training(_)) {
            return Err(only_analytical());
        }
        let faults = self.link_faults(&topology)?;
        Ok(Prepared {
            topology,
            subject,
            faults,
        })
    }

    fn subject(&self, topology: &Topology) -> Result<Subject, ScenarioError> {
        let all = topology.ranks();
        let known = |field: &str, rank: Rank| bounded(field, f64::from(rank.0), 0.0, f64::from(all - 1));
        let transfer = |from: Rank, to: Rank, bytes: Bytes, start: Picos| Transfer { from, to, bytes, start };
        Ok(match &self.workload {
            Workload::Training(choice) => Subject::Training(Box::new(self.training(choice, all)?)),
            Workload::Permutation { bytes } => {
                bounded("cluster", f64::from(all), 2.0, f64::from(u32::MAX))?;
                let pairs = permutation(all, self.seed).into_iter();
                Subject::Transfers(
                    pairs
                        .map(|(from, to)| transfer(from, to, *bytes, Picos::ZERO))
                        .collect(),
                )
            }
            Workload::Incast { senders, bytes } => {
                bounded("workload.senders", f64::from(*senders), 1.0, f64::from(all - 1))?;
                let from = (1..=*senders).map(Rank);
                Subject::Transfers(from.map(|from| transfer(from, Rank(0), *bytes, Picos::ZERO)).collect())
            }
            Workload::Transfers { list } => {
                for one in list {
                    known("workload.list.from", one.from)?;
                    known("workload.list.to", one.to)?;
                }
                let each = list.iter().map(|one| transfer(one.from, one.to, one.bytes, one.start));
                Subject::Transfers(each.collect())
            }
            Workload::Collective {
                collective,
                algorithm,
                bytes,
                ranks,
                root,
            } => {
                let ranks = ranks.unwrap_or(all);
                bounded("workload.ranks", f64::from(ranks), 1.0, f64::from(all))?;
                let to = Rank((root + 1) % ranks);
                let found = Collective::named(collective, Rank(*root), to);
                let collective = found.ok_or_else(|| ScenarioError::NoSuchCollective {
                    place: ScenarioPlace::field("workload.collective"),
                    name: collective.chars().take(80).collect(),
                })?;
                let problem = Problem::new(collective, ranks);
                problem.check().map_err(|source| ScenarioError::Problem {
                    place: ScenarioPlace::field("workload.root"),
                    source,
                })?;
                let grid = topology.grid(ranks).ok_or_else(|| ScenarioError::BrokenNodes {
                    place: ScenarioPlace::field("workload.ranks"),
                    ranks,
                    node: topology.node_ranks(),
                })?;
                let unsuited = || ScenarioError::Unsuited {
                    place: ScenarioPlace::field("workload.algorithm"),
                };
                let algorithm = match algorithm {
                    Some(name) => name
                        .parse::<Candidate>()
                        .map_err(|source| ScenarioError::NoSuchAlgorithm {
                            place: ScenarioPlace::field("workload.algorithm"),
                            source,
                        })?,
                    None => {
                        let selector = Selector::new(problem, self.placement(topology, grid));
                        selector.choose(*bytes).ok_or_else(unsuited)?
                    }
                };
                let program = algorithm.program(&problem, grid).ok_or_else(unsuited)?;
                Subject::Program {
                    problem,
                    grid,
                    algorithm,
                    program,
                    bytes: *bytes,
                }
            }
        })
    }

    fn training(&self, choice: &TrainingChoice, all: u32) -> Result<(TrainingJob, System), ScenarioError> {
        let chosen = self.system.as_ref().ok_or_else(|| ScenarioError::NoSystem {
            place: ScenarioPlace::field("cluster"),
        })?;
        let system = System::named(&chosen.name).map_err(|source| ScenarioError::System {
            place: ScenarioPlace::field("system.name"),
            source,
        })?;
        if let Some(gpus) = choice.gpus {
            bounded("workload.gpus", f64::from(gpus), 1.0, f64::from(all))?;
        }
        let job = choice.job(&system, all).map_err(refused)?;
        // What cannot be is told with the file, not after it.
        job.step(&system).map_err(|source| refused(source.into()))?;
        Ok((job, system))
    }

    /// The cluster as the closed form sees it: two kinds of links.
    fn placement(&self, topology: &Topology, grid: Grid) -> Placement {
        let twice = |time: Picos| time.saturating_add(time).saturating_add(self.work.message_overhead);
        let scale_up = topology.scale_up();
        let last = Rank(grid.ranks() - 1);
        let mut route = Vec::new();
        topology.route(
            Rank(0),
            grid.rank(topology.node(last).min(grid.nodes - 1), 0),
            0,
            &mut route,
        );
        let port = route.first().map_or(scale_up, |&link| topology.wire(link));
        let across = topology.latency(&route).saturating_add(self.work.message_overhead);
        let cost = |latency, bandwidth| LinkCost {
            latency,
            per_span: Picos::ZERO,
            bandwidth,
        };
        Placement {
            grid,
            local: cost(twice(scale_up.latency), scale_up.bandwidth),
            across: cost(across, port.bandwidth),
            rails: topology.node_ports(),
            reduction: self.work.reduction.unwrap_or(Bandwidth::MAX),
            copy: self.work.copy.unwrap_or(Bandwidth::MAX),
            arena: None,
            cores: 0,
            channels: u16::MAX,
        }
    }

    fn link_faults(&self, topology: &Topology) -> Result<Vec<LinkFault>, ScenarioError> {
        let mut faults = Vec::new();
        for (nth, fault) in self.faults.iter().enumerate() {
            let field = |name: &str| format!("faults[{nth}].{name}");
            bounded(&field("left"), fault.left, 0.0, 1.0)?;
            let links = match (fault.rank, fault.link) {
                (Some(rank), None) => {
                    bounded(&field("rank"), f64::from(rank.0), 0.0, f64::from(topology.ranks() - 1))?;
                    port_links(topology, rank)
                }
                (None, Some(link)) => {
                    bounded(&field("link"), f64::from(link), 0.0, f64::from(topology.links() - 1))?;
                    vec![LinkId(link)]
                }
                _ => {
                    return Err(ScenarioError::FaultNowhere {
                        place: ScenarioPlace::field(field("rank")),
                    });
                }
            };
            faults.extend(links.into_iter().map(|link| LinkFault {
                link,
                from: fault.from,
                until: fault.until.unwrap_or(Picos::MAX),
                left: fault.left,
            }));
        }
        Ok(faults)
    }

    fn analytical(&self, prepared: &Prepared) -> Result<Answer, ScenarioError> {
        if let Subject::Training(training) = &prepared.subject {
            let (job, system) = &**training;
            let trained = training::train(job, system).map_err(refused)?;
            let what = format!("{} {}", job.model.name, job.parallel);
            return Ok(Answer {
                time: Picos::from_ps((trained.step.seconds * 1e12).round() as u64),
                trained: Some(trained),
                ..blank(Fidelity::Analytical, job.gpus, what, Bytes(0))
            });
        }
        let Subject::Program {
            problem,
            grid,
            algorithm,
            program,
            bytes,
        } = &prepared.subject
        else {
            return Err(ScenarioError::NotAnalytical {
                place: ScenarioPlace::field("fidelities"),
            });
        };
        let placement = self.placement(&prepared.topology, *grid);
        let profile = Profile::of(problem, &**program, &placement);
        let prediction = profile.predict(*bytes);
        Ok(Answer {
            time: prediction.time,
            ..blank(Fidelity::Analytical, problem.ranks, algorithm.to_string(), *bytes)
        })
    }

    fn flow(&self, prepared: &Prepared, by_link: bool) -> Result<Answer, ScenarioError> {
        let fidelity = Fidelity::Flow;
        let options = FlowOptions {
            routing: self.routing,
            seed: self.seed,
            message_overhead: self.work.message_overhead,
            reduction: self.work.reduction.unwrap_or(Bandwidth::MAX),
            copy: self.work.copy.unwrap_or(Bandwidth::MAX),
            faults: prepared.faults.clone(),
            traced_ranks: TRACED_RANKS,
            by_link,
            eager: Eager::default(),
            folding: Folding::Alike,
        };
        let topology = &prepared.topology;
        let failed = |source| ScenarioError::Flow { fidelity, source };
        let (report, what, bytes) = match &prepared.subject {
            Subject::Program {
                problem,
                algorithm,
                program,
                bytes,
                ..
            } => {
                let report = flow::run_program(topology, problem, &**program, *bytes, &options).map_err(failed)?;
                (report, algorithm.to_string(), *bytes)
            }
            Subject::Transfers(list) => {
                let (mut report, ends) = flow::run_transfers(topology, list, &options).map_err(failed)?;
                report.message_spans = traced(list, &ends);
                (report, self.traffic().to_owned(), largest(list))
            }
            Subject::Training(_) => return Err(only_analytical()),
        };
        Ok(Answer {
            time: report.time,
            messages: report.messages,
            classes: report.classes,
            events: report.events,
            hot: report.hot,
            spans: report.spans,
            message_spans: report.message_spans,
            carried: report.carried,
            ..blank(fidelity, report.ranks, what, bytes)
        })
    }

    fn packet(&self, prepared: &Prepared, by_link: bool) -> Result<Answer, ScenarioError> {
        let fidelity = Fidelity::Packet;
        let options = PacketOptions {
            by_link,
            ..self.packet_options(&prepared.faults)
        };
        let topology = &prepared.topology;
        let failed = |source| ScenarioError::Packet { fidelity, source };
        let (report, what, bytes, ranks) = match &prepared.subject {
            Subject::Program {
                problem,
                algorithm,
                program,
                bytes,
                ..
            } => {
                let report = packet::run_program(topology, problem, &**program, *bytes, &options).map_err(failed)?;
                (report, algorithm.to_string(), *bytes, problem.ranks)
            }
            Subject::Transfers(list) => {
                let mut report = packet::run_transfers(topology, list, &options).map_err(failed)?;
                report.message_spans = traced(list, &report.ends);
                (report, self.traffic().to_owned(), largest(list), topology.ranks())
            }
            Subject::Training(_) => return Err(only_analytical()),
        };
        Ok(Answer {
            time: report.time,
            messages: report.messages,
            classes: ranks,
            events: report.events,
            packets: report.packets,
            trimmed: report.trimmed,
            dropped: report.dropped,
            pauses: report.pauses,
            hot: report.hot,
            spans: report.spans,
            message_spans: report.message_spans,
            carried: report.carried,
            ..blank(fidelity, ranks, what, bytes)
        })
    }

    fn packet_options(&self, faults: &[LinkFault]) -> PacketOptions {
        let kind = match self.packet.transport {
            TransportChoice::Pull => PacketOptions {
                routing: self.routing,
                ..PacketOptions::default()
            },
            // Go-back-N needs packets in order, whatever flows do.
            TransportChoice::Roce => PacketOptions::roce(),
            TransportChoice::RoceLossy => PacketOptions {
                transport: Transport::Rate {
                    recovery: Recovery::SelectiveRepeat,
                    dcqcn: Some(packet::Dcqcn::default()),
                },
                overflow: Overflow::Drop,
                queue: 1 << 20,
                ..PacketOptions::roce()
            },
        };
        PacketOptions {
            payload: self.packet.payload.0 as u32,
            header: self.packet.header.0 as u32,
            queue: self.packet.queue.map_or(kind.queue, |queue| queue.0 as u32),
            seed: self.seed,
            loss: self.packet.loss,
            message_overhead: self.work.message_overhead,
            reduction: self.work.reduction.unwrap_or(Bandwidth::MAX),
            copy: self.work.copy.unwrap_or(Bandwidth::MAX),
            faults: faults.to_vec(),
            traced_ranks: TRACED_RANKS,
            ..kind
        }
    }

    fn traffic(&self) -> &'static str {
        match self.workload {
            Workload::Permutation { .. } => "permutation",
            Workload::Incast { .. } => "incast",
            _ => "transfers",
        }
    }
}

fn blank(fidelity: Fidelity, ranks: u32, what: String, bytes: Bytes) -> Answer {
    Answer {
        fidelity,
        time: Picos::ZERO,
        ranks,
        what,
        bytes,
        messages: 0,
        classes: 0,
        events: 0,
        packets: 0,
        trimmed: 0,
        dropped: 0,
        pauses: 0,
        hot: Vec::new(),
        spans: Vec::new(),
        message_spans: Vec::new(),
        carried: Vec::new(),
        trained: None,
    }
}

fn only_analytical() -> ScenarioError {
    ScenarioError::OnlyAnalytical {
        place: ScenarioPlace::field("fidelities"),
    }
}

/// What is wrong with a step of training, at the field that says so.
fn refused(source: TrainingRefused) -> ScenarioError {
    let field = match &source {
        TrainingRefused::Model(_) => "workload.model",
        TrainingRefused::Training(TrainingError::Roofline(_)) => "workload.precision",
        TrainingRefused::Training(TrainingError::Zero { what }) => match *what {
            "the number of GPUs" => "workload.gpus",
            "sequences" => "workload.batch.sequences",
            "micro" => "workload.batch.micro",
            "tokens" => "workload.batch.tokens",
            _ => "workload.parallel",
        },
        TrainingRefused::NothingFits { .. } => "workload.gpus",
        TrainingRefused::Training(_) => "workload.parallel",
    };
    ScenarioError::Training {
        place: ScenarioPlace::field(field),
        source,
    }
}

/// Transfers as messages, some of them where they are many.
fn traced(list: &[Transfer], ends: &[Picos]) -> Vec<MessageSpan> {
    let stride = list.len().div_ceil(TRACED_TRANSFERS).max(1);
    let some = list.iter().zip(ends).step_by(stride);
    let span = |(transfer, &end): (&Transfer, &Picos)| MessageSpan {
        from: transfer.from,
        to: transfer.to,
        step: 0,
        count: 1,
        bytes: transfer.bytes,
        reduces: false,
        begin: transfer.start,
        end,
    };
    some.map(span).collect()
}

fn largest(list: &[Transfer]) -> Bytes {
    list.iter().map(|transfer| transfer.bytes).max().unwrap_or(Bytes(0))
}

/// The cable between a rank's port and the fabric, both directions.
fn port_links(topology: &Topology, rank: Rank) -> Vec<LinkId> {
    let away = (0..topology.ranks())
        .map(Rank)
        .find(|&other| topology.node(other) != topology.node(rank));
    let Some(away) = away else {
        return vec![LinkId(rank.0), LinkId(topology.ranks() + rank.0)];
    };
    let (mut there, mut back) = (Vec::new(), Vec::new());
    topology.route(rank, away, 0, &mut there);
    topology.route(away, rank, 0, &mut back);
    there.first().into_iter().chain(back.last()).copied().collect()
}

fn bounded(field: &str, value: f64, least: f64, most: f64) -> Result<(), ScenarioError> {
    match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(ScenarioError::OutOfBounds {
            place: ScenarioPlace::field(field),
            value,
            least,
            most,
        }),
    }
}
