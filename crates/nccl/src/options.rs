//! What the plug-ins take from the environment, beside Weft's own settings (`WEFT_…`).
//!
//! A name that begins with `NCCL_WEFT_` and is none of these is refused, with those that are: a variable that is spelled wrongly is not one that works.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::abi::NcclResult;
use crate::boundary::Failed;

const EAGER: &str = "NCCL_WEFT_EAGER";
const WAIT: &str = "NCCL_WEFT_WAIT";
const SPEED: &str = "NCCL_WEFT_SPEED";
const TRACE: &str = "NCCL_WEFT_TRACE";
const METRICS: &str = "NCCL_WEFT_METRICS";
const SYSTEM: &str = "NCCL_WEFT_SYSTEM";
const ALL: [&str; 6] = [EAGER, WAIT, SPEED, TRACE, METRICS, SYSTEM];

/// How the plug-ins are to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The longest message that goes without waiting for its receive, in bytes.
    pub eager_bytes: u64,
    /// How long a message may wait for a peer that lives, and never comes to its part.
    pub wait: Duration,
    /// What NCCL is told of the network, in Mbit/s: it chooses the number of channels and the algorithms by it.
    pub speed: i32,
    /// A directory for traces and summaries.
    pub trace: Option<PathBuf>,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// The system that the tuner has a model of: a name, or a file.
    pub system: Option<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            eager_bytes: 16 << 10,
            wait: Duration::from_secs(30 * 60),
            speed: 100_000,
            trace: None,
            metrics: None,
            system: None,
        }
    }
}

impl Options {
    /// From these variables.
    pub fn from_variables(variables: impl IntoIterator<Item = (String, String)>) -> Result<Options, Failed> {
        let mut options = Options::default();
        for (name, value) in variables {
            if !name.starts_with("NCCL_WEFT_") {
                continue;
            }
            let number = || {
                let read = value.trim().parse::<u64>().ok();
                let wrong = || usage(format!("{name} is {value:?}, and should be a whole number"));
                read.ok_or_else(wrong)
            };
            match name.as_str() {
                EAGER => options.eager_bytes = number()?.min(weft::matched::EAGER_MAX),
                WAIT => options.wait = Duration::from_secs(number()?.clamp(1, 30 * 24 * 3600)),
                SPEED => options.speed = i32::try_from(number()?.max(1)).unwrap_or(i32::MAX),
                TRACE => options.trace = Some(PathBuf::from(&value)),
                METRICS => {
                    let wrong = |_| usage(format!("{name} is {value:?}, and should be address:port"));
                    options.metrics = Some(value.trim().parse().map_err(wrong)?);
                }
                SYSTEM => options.system = Some(value.trim().to_owned()),
                _ => {
                    return Err(usage(format!(
                        "{name} is not a variable of Weft's: there are {}",
                        ALL.join(", ")
                    )));
                }
            }
        }
        Ok(options)
    }

    /// From those of the process.
    pub fn of_process() -> Result<Options, Failed> {
        let variables =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Options::from_variables(variables)
    }
}

fn usage(text: String) -> Failed {
    Failed::new(NcclResult::INVALID_USAGE, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, value: &str) -> Result<Options, Failed> {
        Options::from_variables([(name.to_owned(), value.to_owned())])
    }

    #[test]
    fn variables_are_read_and_others_are_refused() {
        assert_eq!(of("NCCL_DEBUG", "INFO").unwrap(), Options::default());
        assert_eq!(of(EAGER, "4096").unwrap().eager_bytes, 4096);
        assert_eq!(of(EAGER, "99999999").unwrap().eager_bytes, weft::matched::EAGER_MAX);
        assert_eq!(of(WAIT, "7").unwrap().wait, Duration::from_secs(7));
        assert_eq!(of(SYSTEM, "dgx-h200").unwrap().system.as_deref(), Some("dgx-h200"));
        assert_eq!(
            of(METRICS, "127.0.0.1:9000").unwrap().metrics,
            "127.0.0.1:9000".parse().ok()
        );
        assert!(of(METRICS, "9000").unwrap_err().text.contains("address:port"));
        assert!(of(WAIT, "soon").unwrap_err().text.contains("whole number"));
        let unknown = of("NCCL_WEFT_EAGERNESS", "1").unwrap_err();
        assert!(unknown.text.contains(EAGER), "{}", unknown.text);
        assert_eq!(unknown.result, NcclResult::INVALID_USAGE);
    }
}
