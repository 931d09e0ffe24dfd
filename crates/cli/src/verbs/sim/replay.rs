//! `weft sim replay`: a step of training as a tracer wrote it down, on a system of GPUs.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use console::style;
use serde_json::json;
use weft_model::system::System;
use weft_model::workload::trace::{ExecutionTrace, Replay as Replayed};

use crate::complaint::{Complain, Complaint, Exit};
use crate::out::print_whole;
use crate::system::SystemChoice;
use crate::table::{Align, Table};

/// Replay a Chakra execution trace of one rank on a system of GPUs
///
/// Compute takes as long as was recorded, or as the GPU would take for so many operations; collectives are among all ranks, as NCCL would run them
/// there. Compute and communication overlap as far as the trace allows. The file is what tracers write (`.et`), or its JSON form.
#[derive(Debug, Args)]
pub struct Replay {
    /// The trace
    trace: PathBuf,
    #[command(flatten)]
    system: SystemChoice,
    /// How many GPUs do the same
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    gpus: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

impl Replay {
    pub fn run(self) -> Result<(), Complaint> {
        let name = self.trace.display();
        let bytes = fs::read(&self.trace).or_complain(Exit::Usage, || format!("{name} cannot be read."))?;
        let trace = ExecutionTrace::read(&bytes).or_complain(Exit::Usage, || format!("{name} is not a trace."))?;
        let system = self.system.read()?;
        let replay = trace.replay(&system, self.gpus).or_complain(Exit::Failed, || {
            format!("{name} cannot be replayed on {}.", system.name)
        })?;
        let text = match self.json {
            true => format!(
                "{}\n",
                json!({ "system": system.name, "gpus": self.gpus, "replay": replay })
            ),
            false => self.as_table(&system, &replay),
        };
        print_whole(text.as_bytes())
    }

    fn as_table(&self, system: &System, replay: &Replayed) -> String {
        let title = format!("{} on {} × {}", self.trace.display(), self.gpus, system.gpu.name);
        let mut table = Table::new(&[("part", Align::Left), ("ms", Align::Right)]);
        for (part, seconds) in [
            ("step", replay.seconds),
            ("compute", replay.compute),
            ("communication", replay.communication),
            ("overlap", replay.compute + replay.communication - replay.seconds),
        ] {
            table.row(vec![part.to_owned(), format!("{:.3}", seconds.max(0.0) * 1e3)]);
        }
        format!("{}\n{}  {} nodes\n", style(title).bold(), table.render(), replay.nodes)
    }
}
