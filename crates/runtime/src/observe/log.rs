//! Events as lines of a log, through `tracing`: what a person should look at is a warning, what happens per transfer is debug.

use tracing::{debug, info, warn};
use tracing_subscriber::EnvFilter;
use weft_plan::Time;

use super::ObserveError;
use super::event::{Event, Outcome, word};

/// Prints the log to standard error, as the setting `log` says. For programs that have no `tracing` subscriber of their own;
/// where there is one already, this changes nothing.
pub fn print_log(filter: &str) -> Result<(), ObserveError> {
    let wrong = |error: tracing_subscriber::filter::ParseError| ObserveError::LogFilter {
        filter: filter.to_owned(),
        reason: error.to_string(),
    };
    let filter = EnvFilter::try_new(filter).map_err(wrong)?;
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .try_init();
    Ok(())
}

pub(super) fn write(agent: &str, at: Time, event: &Event) {
    let at = at.as_secs_f64();
    match event {
        Event::AgentStarted { address } => info!(agent, at, address, "agent started"),
        Event::AgentStopped => info!(agent, at, "agent stopped"),
        Event::SessionEstablished { peer } => info!(agent, at, %peer, "session established"),
        // An end that somebody wanted is nothing to worry about.
        Event::SessionClosed { peer, cause } => info!(agent, at, %peer, %cause, "session closed"),
        Event::SessionLost { peer, cause } => warn!(agent, at, %peer, %cause, "session lost"),
        Event::PathOpened { peer, transport } => info!(agent, at, %peer, transport, "path opened"),
        Event::PathClosed { peer, transport } => info!(agent, at, %peer, transport, "path closed"),
        Event::PathLost { peer, transport, loss } => warn!(agent, at, %peer, transport, %loss, "path lost"),
        Event::TransferSubmitted {
            id,
            peer,
            direction,
            bytes,
        } => {
            debug!(agent, at, id, %peer, direction = word(*direction), bytes, "transfer submitted");
        }
        Event::TransferEnded {
            id,
            peer,
            transport,
            direction,
            bytes,
            started,
            ended,
            outcome,
        } => {
            let (seconds, direction) = (ended.saturating_sub(*started).as_secs_f64(), word(*direction));
            match outcome {
                Outcome::Done => debug!(agent, at, id, %peer, transport, direction, bytes, seconds, "transfer done"),
                outcome => {
                    info!(agent, at, id, %peer, transport, direction, bytes, seconds, %outcome, "transfer failed");
                }
            }
        }
        Event::CollectiveEnded {
            function,
            way,
            bytes,
            started,
            ended,
            ..
        } => {
            let seconds = ended.saturating_sub(*started).as_secs_f64();
            debug!(agent, at, function, %way, bytes, seconds, "collective ended");
        }
        Event::NotificationSent { peer, bytes } => debug!(agent, at, %peer, bytes, "notification sent"),
        Event::NotificationReceived { peer, bytes } => debug!(agent, at, %peer, bytes, "notification received"),
    }
}
