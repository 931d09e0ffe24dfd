//! `weft copy SRC DST`: files, directories and streams to and from a machine that runs `weft serve`.

mod pull;
mod push;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::client::Url;
use crate::complaint::{Complaint, Exit};
use crate::ends::Overrides;

/// Copy files and directories from or to a machine that runs `weft serve`
///
/// One of the two is weft://host:port/name; the other a path, or - for standard input or output. `weft list weft://host:port/` says what is
/// there. Directories are copied with all that is in them; what is neither a file nor a directory is left out, and counted. Every chunk is
/// checked with a checksum. A file appears under its name when it is whole, and a copy that fails leaves nothing behind, unless it can be
/// resumed (--resume). The two ends need the same secret: set WEFT_SECRET as `weft serve` says.
#[derive(Debug, Args)]
pub struct Copy {
    /// From: a path, -, or weft://host:port/name
    #[arg(value_name = "SRC")]
    from: String,
    /// To: a path, -, or weft://host:port/name where the server was started with --writable
    #[arg(value_name = "DST")]
    to: String,
    /// Go on where an earlier copy with --resume has ended, and keep what this one brings, as NAME.weft-part, if it does not come to an
    /// end. What is there is compared by its checksum first; what differs is copied anew, and files that are whole already are left alone
    #[arg(long)]
    resume: bool,
    /// Show no progress bar
    #[arg(long, short)]
    quiet: bool,
}

impl Copy {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        match (Url::parse(&self.from), Url::parse(&self.to)) {
            (Some(url), None) => self.pull(&url?, overrides),
            (None, Some(url)) => self.push(&url?, overrides),
            _ => Err(Complaint::new(
                Exit::Usage,
                "One of the two, and only one, must be weft://host:port/name.",
            )
            .try_this("cp, for copies on this machine")),
        }
    }

    fn bar(&self, bytes: Option<u64>, name: &str) -> ProgressBar {
        if self.quiet {
            return ProgressBar::hidden();
        }
        let template = match bytes {
            Some(_) => "{msg}  {bar:30}  {binary_bytes} of {binary_total_bytes}  {binary_bytes_per_sec}  {eta}",
            None => "{msg}  {spinner}  {binary_bytes}  {binary_bytes_per_sec}",
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = match bytes {
            Some(bytes) => ProgressBar::new(bytes),
            None => ProgressBar::no_length(),
        };
        bar.with_style(style).with_message(shown(name))
    }

    /// Says what has been left out of a directory, if anything was.
    fn tell_left_out(&self, left_out: u64) {
        if left_out > 0 {
            note!("{left_out} things that are neither files nor directories, or cannot be had, were left out");
        }
    }
}

/// A name as a terminal may show it: it may come from elsewhere.
fn shown(name: &str) -> String {
    name.replace(char::is_control, "?")
}
