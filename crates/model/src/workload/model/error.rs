//! What can be wrong with a model's name or description.

/// Why there is no such model, or why its description does not hold together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    #[error("no model is called {name:?}; the closest are {}", closest.join(", "))]
    Unknown { name: String, closest: Vec<String> },
    #[error("the description is not a model: {0}")]
    Syntax(String),
    #[error("the description has {bytes} bytes, more than {max}")]
    TooLong { bytes: usize, max: usize },
    #[error("{model}: {field} is {value}, which is not between {least} and {most}")]
    OutOfRange {
        model: String,
        field: &'static str,
        value: u32,
        least: u32,
        most: u32,
    },
    #[error("{model} has no layers")]
    NoLayers { model: String },
    #[error("{model}: {what} ({part}) does not divide {whole}")]
    Indivisible {
        model: String,
        what: &'static str,
        part: u32,
        whole: u32,
    },
}
