//! `weft completions SHELL`: what the shell needs to complete the command line.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::complaint::Complaint;

/// Print a completion script for a shell
///
/// For bash: weft completions bash > ~/.local/share/bash-completion/completions/weft
#[derive(Debug, Args)]
pub struct Completions {
    shell: Shell,
}

impl Completions {
    pub fn run(self) -> Result<(), Complaint> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::Command::command(), "weft", &mut script);
        crate::out::print_whole(&script)
    }
}
