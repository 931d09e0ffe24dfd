//! The `weft` command as a program. The Python package starts the same command by itself.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::current_exe() {
        Ok(program) => ExitCode::from(weft_cli::run(std::env::args_os(), vec![program.into()])),
        Err(error) => {
            eprintln!("weft: The system does not say where this program is: {error}");
            ExitCode::FAILURE
        }
    }
}
