//! The option `--system`: the kind of GPU machine that a prediction is of.

use std::fs;
use std::path::Path;

use clap::Args;
use weft_model::system::System;

use crate::complaint::{Complain, Complaint, Exit};

// Not described in a comment of the documentation: that would become the help of every verb that has the option.
#[derive(Debug, Args)]
pub struct SystemChoice {
    /// The machines: the name of a shipped system (`weft list systems`), or the file of one
    #[arg(long = "system", value_name = "NAME|FILE", default_value = "dgx-h200")]
    pub name: String,
    /// What the option was called once.
    #[arg(long = "platform", hide = true, value_parser = renamed)]
    _platform: Option<String>,
}

impl SystemChoice {
    /// The system of that name, or of that file.
    pub fn read(&self) -> Result<System, Complaint> {
        let path = Path::new(&self.name);
        if path.is_file() {
            let text =
                fs::read_to_string(path).or_complain(Exit::Usage, || format!("{} could not be read.", self.name))?;
            return System::from_toml(&text)
                .or_complain(Exit::Usage, || format!("{} does not describe a system.", self.name));
        }
        System::named(&self.name)
            .or_complain(Exit::Usage, || format!("There is no system `{}`.", self.name))
            .map_err(|complaint| {
                let names: Vec<&str> = System::names().collect();
                complaint.try_this(format!("one of {}, or a file", names.join(", ")))
            })
    }
}

fn renamed(name: &str) -> Result<String, String> {
    Err(format!(
        "a system of GPUs is chosen by `--system {name}`; `--platform` is the file of a machine (`weft doctor --platform FILE`)"
    ))
}
