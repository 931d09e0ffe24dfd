//! What the command prints. Whoever reads may leave early, as in `weft explain all-reduce | head -1`: that ends the verb, and is no fault.
//!
//! The macros of the standard library panic in that case, so verbs use these instead: `out!` and `outln!` for `print!` and `println!`, which
//! end the function with a [`Complaint`] where nobody reads, and `note!` for `eprintln!`, which says nothing more about it.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use crate::complaint::{Complaint, Exit};

/// Prints to standard output, in a function that returns `Result<_, Complaint>`.
macro_rules! out {
    ($($text:tt)*) => {
        $crate::out::print(format_args!($($text)*))?
    };
}

/// Prints a line to standard output, in a function that returns `Result<_, Complaint>`.
macro_rules! outln {
    () => {
        $crate::out::print(format_args!("\n"))?
    };
    ($($text:tt)*) => {
        $crate::out::print(format_args!("{}\n", format_args!($($text)*)))?
    };
}

/// Prints a line to standard error, for whoever looks.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::out::note(format_args!($($text)*))
    };
}

pub fn print(text: fmt::Arguments<'_>) -> Result<(), Complaint> {
    io::stdout().lock().write_fmt(text).map_err(unprinted)
}

/// Prints bytes, and hands them over before it returns.
pub fn print_whole(bytes: &[u8]) -> Result<(), Complaint> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(unprinted)
}

/// Hands over what was printed and may still wait.
pub fn flush() -> Result<(), Complaint> {
    io::stdout().lock().flush().map_err(unprinted)
}

pub fn note(text: fmt::Arguments<'_>) {
    // There is nobody else to tell.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Why something was not printed.
pub fn unprinted(error: io::Error) -> Complaint {
    match error.kind() {
        ErrorKind::BrokenPipe => Complaint::quiet(Exit::NobodyReads),
        _ => Complaint::new(Exit::Failed, "The output could not be written.").because(&error),
    }
}
