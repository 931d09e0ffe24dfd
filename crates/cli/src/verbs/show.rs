//! `weft show`: what is shipped with the command, as the file that describes it.

use clap::{Args, ValueEnum};
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_sim::scenario::Scenario;

use crate::complaint::{Complain, Complaint, Exit};
use crate::out::print_whole;
use crate::verbs::sim::serving;

/// Print a scenario, a system of GPUs or a model as the file that describes it
///
/// What is printed can be changed and given back: `weft show scenario ring > mine.toml`, `weft sim run mine.toml`. `weft list` names what there
/// is.
#[derive(Debug, Args)]
pub struct Show {
    kind: Kind,
    /// Its name, as `weft list` prints it, or another that it is known by
    name: String,
    /// Of a system that says only what differs from another: all of it, without the sources of its constants
    #[arg(long)]
    whole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// For `weft sim run` and `weft sim serving`
    Scenario,
    /// For `weft plan-training`, `weft plan-serving` and scenarios
    System,
    /// For the same
    Model,
}

impl Show {
    pub fn run(self) -> Result<(), Complaint> {
        let name = self.name.as_str();
        let absent = |kind: &str, known: Vec<&str>| {
            Complaint::new(Exit::Usage, format!("There is no {kind} `{name}`."))
                .try_this(format!("one of {}", known.join(", ")))
        };
        let text = match self.kind {
            Kind::Scenario if name == serving::NAME => serving::SHIPPED.to_owned(),
            Kind::Scenario => {
                let known = || Scenario::names().chain([serving::NAME]).collect();
                Scenario::shipped(name)
                    .ok_or_else(|| absent("scenario", known()))?
                    .to_owned()
            }
            Kind::System => {
                let known = || System::names().collect();
                let text = System::shipped(name).ok_or_else(|| absent("system", known()))?;
                match self.whole {
                    true => System::from_toml(text)
                        .or_complain(Exit::Failed, || format!("{name} is not a system."))?
                        .to_toml(),
                    false => text.to_owned(),
                }
            }
            Kind::Model => Model::named(name)
                .or_complain(Exit::Usage, || format!("There is no model `{name}`."))
                .map_err(|complaint| complaint.try_this("`weft list models` names them all"))?
                .to_toml(),
        };
        print_whole(text.as_bytes())
    }
}
