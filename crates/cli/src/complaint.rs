//! What the person at the terminal is told when something did not work: one sentence, its cause, and what to do about it.

use std::error::Error;
use std::fmt;

use console::Style;

/// The command's exit codes. They are part of the interface: scripts branch on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// The work failed for a reason that the message gives.
    Failed = 1,
    /// The command line, the environment or a settings file was wrong. (clap uses the same code.)
    Usage = 2,
    /// The peer could not be reached, or was lost on the way.
    Unreachable = 3,
    /// The peer answered and said no: wrong secret, no such name, no permission.
    Refused = 4,
    /// Bytes at the two ends differ.
    Differs = 5,
    /// Whoever read the output has left. Nothing is said about it: it is what a shell shows of a command that SIGPIPE has ended.
    NobodyReads = 141,
}

/// The table of exit codes, as help and man page print it.
pub const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  the work failed, for the reason that the message gives
  2  the command line, the environment or a settings file was wrong
  3  the peer could not be reached, or was lost on the way
  4  the peer refused: wrong secret, no such name, no permission
  5  bytes at the two ends differ
  141  whoever read the output has left, as in `weft … | head -1`";

/// Something that went wrong, ready to be read by a person.
#[derive(Debug)]
pub struct Complaint {
    exit: Exit,
    sentence: String,
    cause: Option<String>,
    remedy: Option<String>,
}

impl Complaint {
    pub fn new(exit: Exit, sentence: impl Into<String>) -> Complaint {
        Complaint {
            exit,
            sentence: sentence.into(),
            cause: None,
            remedy: None,
        }
    }

    /// One that ends the command without a word.
    pub fn quiet(exit: Exit) -> Complaint {
        Complaint::new(exit, "")
    }

    /// Whether there is nothing to say.
    pub fn is_quiet(&self) -> bool {
        self.sentence.is_empty()
    }

    /// Adds the error underneath, with everything that lies underneath that.
    pub fn because(mut self, error: &dyn Error) -> Complaint {
        let mut cause = error.to_string();
        let mut next = error.source();
        while let Some(deeper) = next {
            let deeper_text = deeper.to_string();
            // Transparent wrappers repeat the text of what they wrap.
            if !cause.ends_with(&deeper_text) {
                cause.push_str(": ");
                cause.push_str(&deeper_text);
            }
            next = deeper.source();
        }
        self.cause = Some(cause);
        self
    }

    /// Adds what the reader can do about it.
    pub fn try_this(mut self, remedy: impl Into<String>) -> Complaint {
        self.remedy = Some(remedy.into());
        self
    }

    /// Everything on one line, for reports in which this is one entry of many.
    pub fn text(&self) -> String {
        let mut text = self.sentence.clone();
        for more in [&self.cause, &self.remedy].into_iter().flatten() {
            text.push_str(" | ");
            text.push_str(more);
        }
        text
    }

    pub fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = Style::new().for_stderr().bold();
        write!(
            f,
            "{} {}",
            Style::new().for_stderr().red().bold().apply_to("weft:"),
            self.sentence
        )?;
        if let Some(cause) = &self.cause {
            write!(f, "\n  {} {cause}", label.apply_to("cause:"))?;
        }
        if let Some(remedy) = &self.remedy {
            write!(f, "\n  {} {remedy}", label.apply_to("try:  "))?;
        }
        Ok(())
    }
}

/// Turns an error into a complaint by saying what was being attempted.
pub trait Complain<T> {
    fn or_complain(self, exit: Exit, sentence: impl FnOnce() -> String) -> Result<T, Complaint>;
}

impl<T, E: Error> Complain<T> for Result<T, E> {
    fn or_complain(self, exit: Exit, sentence: impl FnOnce() -> String) -> Result<T, Complaint> {
        self.map_err(|error| Complaint::new(exit, sentence()).because(&error))
    }
}
