//! This command as a program: how its verbs start it again.

use std::ffi::OsString;
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
