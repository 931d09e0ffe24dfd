//! This command as a program: how its verbs start it again, and how it ends when nobody reads what it says.

use std::ffi::OsString;
use std::panic::PanicHookInfo;
use std::process::Command;
use std::sync::OnceLock;

/// The words that start this command once more, whatever it was started as.
static AGAIN: OnceLock<Vec<OsString>> = OnceLock::new();

/// Says once how the command is started; later words change nothing.
pub fn is_started_by(words: Vec<OsString>) {
    let _ = AGAIN.set(words);
}

/// This command again, as another process.
pub fn again() -> Command {
    let words = AGAIN.get().map(Vec::as_slice).unwrap_or_default();
    let (program, first) = words.split_first().expect("the command knows how it was started");
    let mut command = Command::new(program);
    command.args(first);
    command
}

/// Makes a reader that has seen enough (`weft explain … | head -1`) the end of the command and no fault: printing panics then, and any
/// verb, in any of its threads, may print.
pub fn end_quietly_when_nobody_reads() {
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if nobody_reads(panic) {
            std::process::exit(0);
        }
        told(panic);
    }));
}

fn nobody_reads(panic: &PanicHookInfo<'_>) -> bool {
    // The words of the standard library; a test holds us to them.
    let printing = |words: &str| words.starts_with("failed printing to std") && words.contains("Broken pipe");
    panic.payload_as_str().is_some_and(printing)
}
