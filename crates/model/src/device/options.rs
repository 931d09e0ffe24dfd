//! What the environment allows a collective to be done by.

use super::{DeviceAlgorithm, Protocol};

/// What may be chosen. By default all that NCCL chooses from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// None of them named: all.
    pub algorithms: Vec<DeviceAlgorithm>,
    pub protocols: Vec<Protocol>,
    /// The switches must not reduce.
    pub without_nvls: bool,
}

impl DeviceOptions {
    /// Reads settings as people note them beside a measurement: `NCCL_ALGO=Ring NCCL_PROTO=LL128 NCCL_NVLS_ENABLE=0`, or in words,
    /// `Ring+LL128, NVLS off`. What does not change the choice is passed over.
    pub fn parse(settings: &str) -> DeviceOptions {
        let mut options = DeviceOptions::default();
        let lower = settings.to_ascii_lowercase();
        let words: Vec<&str> = lower
            .split(|c: char| c.is_whitespace() || ",;+/()".contains(c))
            .filter(|word| !word.is_empty())
            .collect();
        if words.contains(&"defaults") || words.contains(&"default") {
            return options;
        }
        for (nth, word) in words.iter().enumerate() {
            let (key, value) = word.split_once('=').unwrap_or(("", word));
            let off = matches!(words.get(nth + 1), Some(&"off" | &"disabled"));
            match (key, value) {
                ("nccl_nvls_enable" | "nvls_enable" | "nvls", "0" | "off") => options.without_nvls = true,
                ("", "nvls") if off => options.without_nvls = true,
                ("" | "nccl_algo" | "algo" | "nccl_proto" | "proto", name) => {
                    let algorithm = DeviceAlgorithm::ALL
                        .into_iter()
                        .find(|a| a.name().eq_ignore_ascii_case(name));
                    options.algorithms.extend(algorithm);
                    let protocol = Protocol::ALL.into_iter().find(|p| p.name().eq_ignore_ascii_case(name));
                    options.protocols.extend(protocol);
                }
                _ => {}
            }
        }
        options
    }

    pub(super) fn allow(&self, algorithm: DeviceAlgorithm, protocol: Protocol) -> bool {
        let switch = matches!(algorithm, DeviceAlgorithm::Nvls | DeviceAlgorithm::NvlsTree);
        let named = match self.algorithms.is_empty() {
            // NCCL has no such algorithm, and exchanges are not chosen by name.
            true => algorithm != DeviceAlgorithm::Rail,
            false => self.algorithms.contains(&algorithm) || algorithm == DeviceAlgorithm::Exchange,
        };
        named
            && !(switch && self.without_nvls)
            && (self.protocols.is_empty()
                || self.protocols.contains(&protocol)
                || algorithm == DeviceAlgorithm::Exchange)
    }
}
