//! What is wrong with a scenario, and where.

use std::fmt;

use thiserror::Error;
use weft_model::fabric::FabricError;
use weft_model::system::SystemError;
use weft_plan::collective::ProblemError;
use weft_plan::cost::UnknownCandidate;
use weft_plan::spot::Spot;

use super::Fidelity;
use crate::flow::FlowError;
use crate::packet::PacketError;
use crate::training::TrainingRefused;

/// A field, and the line that says it, where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScenarioPlace {
    pub line: Option<usize>,
    pub field: String,
}

#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ScenarioError {
    #[error("a scenario of {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    /// Not TOML, or not the fields of a scenario.
    #[error("{0}")]
    Unreadable(Spot),
    #[error("{place}: a scenario has a system or a cluster, not both")]
    TwoClusters { place: ScenarioPlace },
    #[error("{place}: a scenario needs a system or a cluster")]
    NoCluster { place: ScenarioPlace },
    #[error("{place}: {}", source.fault)]
    Fabric { place: ScenarioPlace, source: FabricError },
    #[error("{place}: {source}")]
    System { place: ScenarioPlace, source: SystemError },
    #[error("{place}: there is no collective `{name}`")]
    NoSuchCollective { place: ScenarioPlace, name: String },
    #[error("{place}: {source}")]
    NoSuchAlgorithm {
        place: ScenarioPlace,
        source: UnknownCandidate,
    },
    #[error("{place}: not for this collective and so many ranks")]
    Unsuited { place: ScenarioPlace },
    #[error("{place}: {source}")]
    Problem { place: ScenarioPlace, source: ProblemError },
    #[error("{place}: {value} is not between {least} and {most}")]
    OutOfBounds {
        place: ScenarioPlace,
        value: f64,
        least: f64,
        most: f64,
    },
    #[error("{place}: {ranks} ranks do not fill whole nodes of {node}")]
    BrokenNodes {
        place: ScenarioPlace,
        ranks: u32,
        node: u32,
    },
    #[error("{place}: a fault is at a rank or at a link")]
    FaultNowhere { place: ScenarioPlace },
    #[error("{place}: no answer is wanted")]
    NoFidelity { place: ScenarioPlace },
    #[error("{place}: there is no closed form for this")]
    NotAnalytical { place: ScenarioPlace },
    #[error("{place}: a step of training has a closed form alone")]
    OnlyAnalytical { place: ScenarioPlace },
    #[error("{place}: GPUs are told by a `system`, not by a cluster")]
    NoSystem { place: ScenarioPlace },
    #[error("{place}: {source}")]
    Training {
        place: ScenarioPlace,
        source: TrainingRefused,
    },
    #[error("{fidelity}: {source}")]
    Flow { fidelity: Fidelity, source: FlowError },
    #[error("{fidelity}: {source}")]
    Packet { fidelity: Fidelity, source: PacketError },
}

impl ScenarioPlace {
    pub(crate) fn field(field: impl Into<String>) -> ScenarioPlace {
        ScenarioPlace {
            line: None,
            field: field.into(),
        }
    }
}

impl ScenarioError {
    pub(super) fn unreadable(text: &str, error: &toml::de::Error) -> ScenarioError {
        ScenarioError::Unreadable(Spot::of(text, error))
    }

    /// With the line that the text has for its field.
    pub(super) fn in_text(mut self, text: &str) -> ScenarioError {
        let place = match &mut self {
            ScenarioError::TwoClusters { place }
            | ScenarioError::NoCluster { place }
            | ScenarioError::Fabric { place, .. }
            | ScenarioError::System { place, .. }
            | ScenarioError::NoSuchCollective { place, .. }
            | ScenarioError::NoSuchAlgorithm { place, .. }
            | ScenarioError::Unsuited { place }
            | ScenarioError::Problem { place, .. }
            | ScenarioError::OutOfBounds { place, .. }
            | ScenarioError::BrokenNodes { place, .. }
            | ScenarioError::FaultNowhere { place }
            | ScenarioError::NoFidelity { place }
            | ScenarioError::NotAnalytical { place }
            | ScenarioError::OnlyAnalytical { place }
            | ScenarioError::NoSystem { place }
            | ScenarioError::Training { place, .. } => place,
            _ => return self,
        };
        place.line = line_of(text, &place.field);
        self
    }
}

/// The line of a field: its key in a table whose header begins like its path, or its own header, or the first that begins so.
pub(crate) fn line_of(text: &str, field: &str) -> Option<usize> {
    let (path, index) = match field.split_once('[') {
        Some((path, rest)) => (
            path,
            rest.split(']').next().and_then(|index| index.parse::<usize>().ok()),
        ),
        None => (field, None),
    };
    let first = path.split('.').next().unwrap_or(path);
    let key = field.rsplit('.').next().unwrap_or(field);
    let (mut inside, mut header, mut own_header, mut seen) = (false, None, None, 0);
    for (nth, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            let named = line.trim_start_matches('[').split(']').next().unwrap_or_default();
            inside = named.starts_with(first);
            if named == path && index.is_none() && own_header.is_none() {
                own_header = Some(nth + 1);
            }
            if inside {
                // Of a list, only the entry that is meant.
                inside = index.is_none_or(|index| index == seen);
                seen += 1;
            }
            if inside && header.is_none() {
                header = Some(nth + 1);
            }
        } else if let Some((left, right)) = line.split_once('=') {
            let left = left.trim();
            let here = inside || left.starts_with(first);
            let named = left == key || left.ends_with(&format!(".{key}")) || right.contains(&format!("{key} ="));
            if here && named {
                return Some(nth + 1);
            }
        }
    }
    own_header.or(header)
}

impl fmt::Display for ScenarioPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}, at `{}`", self.field),
            None => write!(f, "`{}`", self.field),
        }
    }
}

impl fmt::Display for Fidelity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Fidelity::Analytical => "analytical",
            Fidelity::Flow => "flow",
            Fidelity::Packet => "packet",
        })
    }
}
