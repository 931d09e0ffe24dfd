//! `weft bench gpu`: what collectives by kernels take on a GPU, beside what the model says and the least that their bytes take.

use clap::Args;
use serde::Serialize;
use weft_fabric::cuda::{Collective, CollectiveError, Device, Gauge, predicted};
use weft_plan::cost::kernels::{DeviceCosts, Way};
use weft_plan::{Bytes, Datatype, Picos, Platform, Reduction};

use super::print_json;
use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::Overrides;
use crate::table::{Align, Table};
use crate::verbs::doctor::gpu::name;

const RANKS_MAX: usize = 8;
/// So many calls in a graph, where they are short and where they are long.
const CALLS: u32 = 20;
const CALLS_LONG: u32 = 5;
const LONG: u64 = 32 << 20;
const FIRST_BYTES: u64 = 1 << 10;

/// Measure collectives between ranks that share a GPU, beside what was predicted
///
/// Ranks are of this process, all of them in one launch, captured in a graph; bf16, sums. The prediction is made from the constants that `weft doctor --gpu --platform FILE` has measured, if
/// `--set platform=FILE` names them, else from those of an H200. The floor is each input read once and each output written once.
#[derive(Debug, Args)]
pub struct Gpu {
    /// Which GPU
    #[arg(long, default_value_t = 0)]
    device: u16,
    /// Between how many ranks
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2,4,8", value_parser = clap::value_parser!(u8).range(1..=RANKS_MAX as i64))]
    ranks: Vec<u8>,
    /// The largest buffer of a rank
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    max_bytes: Bytes,
    /// Measure every way that a call could go, and not only the one that is chosen
    #[arg(long)]
    ways: bool,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    op: &'static str,
    ranks: usize,
    bytes: u64,
    way: &'static str,
    chosen: bool,
    measured_us: f64,
    predicted_us: f64,
    measured_over_predicted: f64,
    floor_us: f64,
    share_of_floor: f64,
}

impl Gpu {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        let costs = costs(overrides)?;
        let failed = || format!("GPU {} could not be measured.", self.device);
        let device = Device::open(self.device).or_complain(Exit::Failed, failed)?;
        let mut table = Table::new(&[
            ("operation", Align::Left),
            ("ranks", Align::Right),
            ("bytes", Align::Right),
            ("kernels", Align::Left),
            ("measured µs", Align::Right),
            ("predicted µs", Align::Right),
            ("ratio", Align::Right),
            ("of the floor", Align::Right),
        ]);
        for ranks in self.ranks.iter().map(|ranks| usize::from(*ranks)) {
            let gauge = Gauge::new(&device, ranks, self.max_bytes.0, costs).or_complain(Exit::Failed, failed)?;
            let sizes = (0..).map(|nth| FIRST_BYTES << (3 * nth));
            for bytes in sizes.take_while(|bytes| *bytes <= self.max_bytes.0) {
                for (op, collective) in collectives(bytes, ranks as u64) {
                    for row in self
                        .rows(&gauge, op, collective, ranks, bytes, &costs)
                        .or_complain(Exit::Failed, failed)?
                    {
                        match self.json {
                            true => print_json(&row)?,
                            false => table.row(row.cells()),
                        }
                    }
                }
            }
        }
        if !self.json {
            out!("{}", table.render());
        }
        Ok(())
    }

    fn rows(
        &self,
        gauge: &Gauge,
        op: &'static str,
        collective: Collective,
        ranks: usize,
        bytes: u64,
        costs: &DeviceCosts,
    ) -> Result<Vec<Row>, CollectiveError> {
        let chosen = weft_fabric::cuda::chosen_way(&collective, ranks, costs)?;
        let calls = if bytes >= LONG { CALLS_LONG } else { CALLS };
        let (input, output) = collective.bytes(ranks)?;
        let floor = costs.memory.time_for(Bytes((input + output) * ranks as u64));
        let mut rows = Vec::new();
        for (way, predicted) in predicted(&collective, ranks, costs)? {
            let Some(predicted) = predicted.filter(|_| self.ways || way == chosen) else {
                continue;
            };
            let measured = match gauge.time(collective, Some(way), calls) {
                // There is no room for so much by packets.
                Err(CollectiveError::NotThisWay) => continue,
                measured => measured?,
            };
            rows.push(Row::new(op, (ranks, bytes), (way, chosen), measured, predicted, floor));
        }
        Ok(rows)
    }
}

impl Row {
    fn new(
        op: &'static str,
        (ranks, bytes): (usize, u64),
        (way, chosen): (Way, Way),
        measured: Picos,
        predicted: Picos,
        floor: Picos,
    ) -> Row {
        let us = |time: Picos| time.as_secs_f64() * 1e6;
        let measured_us = us(measured).max(f64::MIN_POSITIVE);
        Row {
            op,
            ranks,
            bytes,
            way: name(way),
            chosen: way == chosen,
            measured_us,
            predicted_us: us(predicted),
            measured_over_predicted: measured_us / us(predicted).max(f64::MIN_POSITIVE),
            floor_us: us(floor),
            share_of_floor: us(floor) / measured_us,
        }
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.op.to_owned(),
            self.ranks.to_string(),
            Bytes(self.bytes).to_string(),
            format!("{}{}", self.way, if self.chosen { "" } else { " (not chosen)" }),
            format!("{:.2}", self.measured_us),
            format!("{:.2}", self.predicted_us),
            format!("{:.2}", self.measured_over_predicted),
            format!("{:.0} %", 100.0 * self.share_of_floor),
        ]
    }
}

/// Those of a rank's buffer of so many bytes.
fn collectives(bytes: u64, ranks: u64) -> [(&'static str, Collective); 4] {
    let (datatype, reduction) = (Datatype::Bf16, Reduction::Sum);
    let part = bytes / ranks / 16 * 16;
    [
        (
            "all-reduce",
            Collective::AllReduce {
                count: bytes / 2,
                datatype,
                reduction,
            },
        ),
        ("all-gather", Collective::AllGather { bytes: part }),
        (
            "reduce-scatter",
            Collective::ReduceScatter {
                count: part / 2,
                datatype,
                reduction,
            },
        ),
        ("all-to-all", Collective::AllToAll { bytes: part }),
    ]
}

/// Those of the platform file, or an H200's.
fn costs(overrides: &Overrides) -> Result<DeviceCosts, Complaint> {
    let Some(path) = overrides.settings()?.platform else {
        return Ok(DeviceCosts::default());
    };
    let text =
        std::fs::read_to_string(&path).or_complain(Exit::Usage, || format!("{} cannot be read.", path.display()))?;
    let platform =
        Platform::from_toml(&text).or_complain(Exit::Usage, || format!("{} is no platform file.", path.display()))?;
    let mut known = platform.machines.iter().flat_map(|machine| &machine.gpus);
    Ok(known.find_map(|gpu| gpu.costs).unwrap_or_default())
}
