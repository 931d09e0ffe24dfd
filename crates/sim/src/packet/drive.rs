//! What makes flows begin: a list, or the ranks of a program.

use weft_model::fabric::{LinkId, Routing, Topology};
use weft_plan::collective::Problem;
use weft_plan::schedule::Program;
use weft_plan::{Bytes, Picos, Rank};

use super::network::{Event, NUMBER_BITS, Network};
use super::transport::Flows;
use super::{PacketError, PacketOptions, PacketReport, Recovery, Transport};
use crate::checks::{RunError, has_room, knows_link, knows_ranks};
use crate::execution::classes::Classes;
use crate::execution::look::Look;
use crate::execution::{Conduct, Execution, Plans, Symmetry, Trust, Wake};
use crate::traffic::{Hot, Transfer};

const HOT_MAX: usize = 16;

pub(super) fn transfers(
    topology: &Topology,
    transfers: &[Transfer],
    options: &PacketOptions,
) -> Result<PacketReport, PacketError> {
    knows_ranks(topology, transfers.iter().flat_map(Transfer::ends))?;
    let most = 1 << NUMBER_BITS;
    if transfers.len() as u64 >= most {
        return Err(PacketError::TooLarge { most });
    }
    let mut flows = begin(topology, options)?;
    for transfer in transfers {
        let flow = flows.add(transfer.from, transfer.to, transfer.bytes.0);
        flows.network.at(transfer.start.as_ps(), Event::Begin(flow));
    }
    let mut ends = vec![Picos::MAX; transfers.len()];
    let mut left = transfers.len();
    let overhead = options.message_overhead;
    while left > 0 {
        let Some(event) = flows.network.next() else {
            let waiting = left as u64;
            return Err(RunError::NeverEnds { waiting }.into());
        };
        happen(&mut flows, topology, options, event);
        while let Some(flow) = flows.ended.pop() {
            ends[flow as usize] = Picos::from_ps(flows.network.now).saturating_add(overhead);
            left -= 1;
        }
    }
    let time = ends.iter().copied().max().unwrap_or(Picos::ZERO);
    Ok(report(topology, options, &flows, time, ends))
}

pub(super) fn program(
    topology: &Topology,
    problem: &Problem,
    program: &dyn Program,
    bytes: Bytes,
    options: &PacketOptions,
) -> Result<PacketReport, PacketError> {
    let shape = program.shape();
    has_room(topology, &shape)?;
    let mut look = Look::new(topology, problem, program, bytes.0)?;
    let classes = Classes::by_links(shape.ranks);
    let mut flows = begin(topology, options)?;
    for trust in [Trust::Alike, Trust::Nobody] {
        let plans = Plans::new(&mut look, &classes, trust)?;
        let conduct = Conduct {
            eager: options.eager,
            reduction: options.reduction,
            copy: options.copy,
            traced_ranks: options.traced_ranks,
            ends: false,
        };
        let mut execution = Execution::new(classes, (&mut look, &plans), Symmetry::Shifted, &conduct);
        execute(&mut flows, &mut execution, topology, options)?;
        if execution.unlike {
            // Some rank does something else than those that it was thought to be like.
            flows = begin(topology, options)?;
            continue;
        }
        let time = Picos::from_ps(execution.last);
        return Ok(PacketReport {
            spans: std::mem::take(&mut execution.spans.steps),
            message_spans: std::mem::take(&mut execution.spans.messages),
            ..report(topology, options, &flows, time, Vec::new())
        });
    }
    let waiting = shape.ranks.into();
    Err(RunError::NeverEnds { waiting }.into())
}

/// Lets ranks execute a call until all have come to its end, or one was found to do something else than was thought.
fn execute(
    flows: &mut Flows<'_>,
    execution: &mut Execution<'_, '_>,
    topology: &Topology,
    options: &PacketOptions,
) -> Result<(), PacketError> {
    // By flow: which message it is, and of messages that are several flows how many are still under way.
    let mut messages: Vec<u32> = Vec::new();
    let mut under_way: Vec<u32> = Vec::new();
    let overhead = options.message_overhead.as_ps();
    let most = 1u64 << NUMBER_BITS;
    loop {
        while let Some((at, Wake(wake))) = execution.wakes.pop() {
            flows.network.at(at, Event::Actor(wake));
        }
        while let Some(message) = execution.starts.pop() {
            let start = execution.start(message);
            if under_way.len() <= message as usize {
                under_way.resize(message as usize + 1, 0);
            }
            under_way[message as usize] = start.count;
            for _ in 0..start.count {
                let flow = flows.add(Rank(start.from), Rank(start.to), start.bytes.ceil() as u64);
                if u64::from(flow) + 1 >= most {
                    return Err(PacketError::TooLarge { most });
                }
                messages.push(message);
                flows.begin(flow);
            }
        }
        if execution.left == 0 || execution.unlike {
            return Ok(());
        }
        let Some(event) = flows.network.next() else {
            let waiting = execution.left;
            return Err(RunError::NeverEnds { waiting }.into());
        };
        match event {
            Event::Actor(wake) => execution.happen(Wake(wake), flows.network.now),
            event => happen(flows, topology, options, event),
        }
        while let Some(flow) = flows.ended.pop() {
            let message = messages[flow as usize];
            let left = &mut under_way[message as usize];
            *left -= 1;
            if *left == 0 {
                execution.has_left(message, flows.network.now, overhead);
            }
        }
    }
}

fn begin<'a>(topology: &'a Topology, options: &'a PacketOptions) -> Result<Flows<'a>, PacketError> {
    let bound = |field, value: u32, least: u64, most: u64| match (least..=most).contains(&u64::from(value)) {
        true => Ok(()),
        false => Err(PacketError::OutOfBounds {
            field,
            value: value.into(),
            least,
            most,
        }),
    };
    bound("payload", options.payload, 64, 1 << 20)?;
    bound("header", options.header, 1, 1 << 12)?;
    bound(
        "queue",
        options.queue,
        u64::from(options.payload + options.header),
        1 << 30,
    )?;
    let marking = match &options.transport {
        Transport::Rate { recovery, dcqcn } => {
            if *recovery == Recovery::GoBackN && options.routing == Routing::Spray {
                return Err(PacketError::SprayedGoBackN);
            }
            dcqcn.clone()
        }
        Transport::Pull { .. } => None,
    };
    if let Some(marking) = &marking {
        bound("mark_all", marking.mark_all, u64::from(marking.mark_from) + 1, 1 << 30)?;
    }
    let mut network = Network::new(topology, options, marking)?;
    for (nth, fault) in options.faults.iter().enumerate() {
        knows_link(topology, fault.link)?;
        network.at(fault.from.as_ps(), Event::Fault(2 * nth as u32));
        if fault.until < Picos::MAX {
            network.at(fault.until.as_ps(), Event::Fault(2 * nth as u32 + 1));
        }
    }
    Ok(Flows::new(topology, options, network))
}

fn happen(flows: &mut Flows<'_>, topology: &Topology, options: &PacketOptions, event: Event) {
    let Event::Fault(nth) = event else {
        return flows.happen(event);
    };
    let fault = options.faults[(nth / 2) as usize];
    let whole = topology.wire(fault.link).bandwidth.bytes_per_sec() as f64;
    let left = if nth.is_multiple_of(2) {
        fault.left.clamp(0.0, 1.0)
    } else {
        1.0
    };
    flows.network.set_bandwidth(fault.link.0, whole * left);
}

fn report(
    topology: &Topology,
    options: &PacketOptions,
    flows: &Flows<'_>,
    time: Picos,
    ends: Vec<Picos>,
) -> PacketReport {
    let tally = flows.network.tally;
    let mut used: Vec<(u64, u32)> = flows.network.links.iter().map(|link| link.carried).zip(0..).collect();
    used.retain(|(carried, _)| *carried > 0);
    let busy = |&(carried, link): &(u64, u32)| {
        let all = topology.wire(LinkId(link)).bandwidth.bytes_per_sec() as f64 * time.as_secs_f64();
        if all > 0.0 { carried as f64 / all } else { 0.0 }
    };
    used.sort_by(|a, b| busy(b).total_cmp(&busy(a)).then(a.1.cmp(&b.1)));
    used.truncate(HOT_MAX);
    let hot = used.iter().map(|one| Hot {
        name: topology.link_name(LinkId(one.1)),
        link: LinkId(one.1),
        utilisation: busy(one),
        carried: Bytes(one.0),
        width: 1,
        flows_max: 0,
    });
    PacketReport {
        time,
        ends,
        messages: flows.flows.len() as u64,
        events: tally.events,
        packets: tally.packets,
        again: tally.again,
        trimmed: tally.trimmed,
        dropped: tally.dropped,
        marked: tally.marked,
        pauses: tally.pauses,
        queue_max: Bytes(tally.queue_max.into()),
        hot: hot.collect(),
        spans: Vec::new(),
        message_spans: Vec::new(),
        carried: match options.by_link {
            true => flows.network.links.iter().map(|link| link.carried as f64).collect(),
            false => Vec::new(),
        },
    }
}
