//! `cargo xtask rdma-test`: the tests that need an RDMA device, in virtual machines that have one.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::vm::{Ended, Error, Host, Machine, cache};

#[derive(clap::Args)]
pub struct Arguments {
    /// Runs a command of bash in the machine instead of the tests. The exit code is the command's.
    #[arg(long, value_name = "COMMAND")]
    shell: Option<String>,
    /// How many machines run it: two are joined by one cable for each rail.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2), requires = "shell")]
    nodes: u8,
    /// RDMA devices of each machine.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=8), requires = "shell")]
    rails: u32,
    /// Memory of each machine, in MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Processors of each machine.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Further kernel modules.
    #[arg(long, value_delimiter = ',')]
    modules: Vec<String>,
    /// After how many seconds a machine is turned off.
    #[arg(long, default_value_t = 180)]
    timeout: u64,
    /// Keep the kernels' messages under target/vm.
    #[arg(long)]
    keep_console: bool,
    /// Use the processor's own virtualisation instead of emulation, where that works.
    #[arg(long)]
    kvm: bool,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let host = Host::prepare()?;
    let machine = Machine {
        memory_mib: arguments.memory,
        cpus: arguments.cpus,
        rails: arguments.rails,
        modules: arguments.modules.clone(),
        timeout: Duration::from_secs(arguments.timeout),
        console: console(arguments, "shell"),
        kvm: arguments.kvm,
    };
    if let Some(command) = &arguments.shell {
        return shell(&host, &machine, command, arguments.nodes);
    }
    Ok(ExitCode::SUCCESS)
}

fn console(arguments: &Arguments, name: &str) -> Option<PathBuf> {
    arguments.keep_console.then(|| cache().join(format!("console.{name}")))
}

fn shell(host: &Host, machine: &Machine, command: &str, nodes: u8) -> Result<ExitCode, Error> {
    let commands = vec![command; usize::from(nodes)];
    let ends = machine.run(host, &commands, |node, line| match nodes {
        1 => println!("{line}"),
        _ => println!("[{node}] {line}"),
    })?;
    let mut worst = 0;
    for (node, end) in ends.iter().enumerate() {
        let code = match end {
            Ended::Exited(code) => *code,
            Ended::TimedOut { last_words } => {
                eprintln!(
                    "machine {node} was turned off after {:?}; its last words:\n{last_words}",
                    machine.timeout
                );
                124
            }
            Ended::Died { last_words } => {
                eprintln!("machine {node} went away; its last words:\n{last_words}");
                125
            }
        };
        worst = worst.max(code);
    }
    Ok(ExitCode::from(worst))
}
