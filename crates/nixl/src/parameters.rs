//! What `create_backend` was given: any of Weft's settings by its own name, above the environment and the settings file.

use weft::settings::TABLE;
use weft::{Agent, AgentBuilder};

use crate::trouble::{Level, Trouble, log};

/// What is offered in NIXL's list of parameters: those that a user of NIXL may want. Each is empty there, which leaves it to the environment, so that
/// whoever hands the list back as it is changes nothing.
pub const OFFERED: &[&str] = &[
    "deadline",
    "checksum",
    "listen",
    "advertise",
    "transports",
    "secret_file",
    "tcp.connections",
    "silence_max",
];

/// The name that this back end has of itself. Under others, which are somebody else's, parameters of theirs are passed over.
pub const OWN_NAME: &str = "WEFT";

/// Describes the agent of a back end.
pub fn describe(name: &str, kind: &str, parameters: &[(String, String)]) -> Result<AgentBuilder, Trouble> {
    let mut builder = Agent::builder(name);
    for (key, value) in parameters {
        // NIXL's own parameters are not written with dots everywhere, and values from lists may be empty.
        let (key, value) = (key.trim(), value.trim());
        if value.is_empty() {
            continue;
        }
        if key == "name" {
            return Err(Trouble::Invalid("the name is that of the NIXL agent".to_owned()));
        }
        if kind != OWN_NAME && !TABLE.iter().any(|row| row.key == key) {
            log(
                Level::Warning,
                &format!("{kind}, which is Weft here: passing over the parameter {key}={value}"),
            );
            continue;
        }
        builder = builder.set(key, value);
    }
    Ok(builder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(kind: &str, pairs: &[(&str, &str)]) -> Result<String, String> {
        let pairs: Vec<_> = pairs
            .iter()
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .collect();
        let agent = describe("a", kind, &pairs).and_then(|builder| Ok(builder.start()?));
        agent
            .map(|agent| {
                agent
                    .settings()
                    .rows()
                    .iter()
                    .find(|row| row.0.key == "deadline")
                    .unwrap()
                    .1
                    .clone()
            })
            .map_err(|error| error.to_string())
    }

    #[test]
    fn every_parameter_that_is_offered_is_a_setting() {
        for key in OFFERED {
            assert!(TABLE.iter().any(|row| row.key == *key), "{key}");
        }
    }

    #[test]
    fn a_parameter_is_a_setting_and_an_empty_one_is_none() {
        assert_eq!(
            described("WEFT", &[("deadline", " 3s"), ("checksum", "")]).unwrap(),
            "3s"
        );
        assert_eq!(described("WEFT", &[("deadline", "")]).unwrap(), "30s");
    }

    #[test]
    fn what_is_no_setting_is_refused_with_the_nearest_one_but_not_under_others_names() {
        assert!(
            described("WEFT", &[("deadlin", "3s")])
                .unwrap_err()
                .contains("did you mean deadline?")
        );
        assert_eq!(
            described("UCX", &[("num_threads", "4"), ("deadline", "4s")]).unwrap(),
            "4s"
        );
        assert!(described("WEFT", &[("deadline", "soon")]).is_err());
        assert!(described("WEFT", &[("name", "b")]).is_err());
    }
}
