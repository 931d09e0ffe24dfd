//! `weft man`: the manual page, made from the same definitions as the help.

use std::path::PathBuf;

use clap::{Args, CommandFactory};

use crate::complaint::{Complain, Complaint, Exit};

/// Print the manual page, or write one page a verb into a directory
///
/// To read it at once: weft man | man -l -
#[derive(Debug, Args)]
pub struct Man {
    /// Write weft.1, weft-copy.1 and so on here instead of printing the first one
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,
}

impl Man {
    pub fn run(self) -> Result<(), Complaint> {
        let command = crate::Command::command();
        if let Some(directory) = self.into {
            return clap_mangen::generate_to(command, &directory).or_complain(Exit::Failed, || {
                format!("The manual pages could not be written to {}.", directory.display())
            });
        }
        let mut page = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut page)
            .or_complain(Exit::Failed, || "The manual page could not be made.".to_string())?;
        crate::out::print_whole(&page)
    }
}
