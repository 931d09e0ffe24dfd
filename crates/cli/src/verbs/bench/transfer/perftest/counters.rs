//! What transports counted while something was measured: what carries over from one machine to another, unlike its times.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::complaint::Complaint;
use crate::desk::counts;
use crate::pair::Pair;

/// Blocks to which counts refer.
const BLOCKS: f64 = 1024.0;

/// Counts at both ends, at one moment.
#[derive(Debug)]
pub struct Reading {
    near: Vec<(String, u64)>,
    far: Vec<(String, u64)>,
}

/// How often what happened for every 1,024 blocks.
#[derive(Debug, Serialize)]
pub struct Counted {
    /// At the end that posted, and at the one that was written to or read from.
    pub initiator: BTreeMap<String, f64>,
    pub target: BTreeMap<String, f64>,
}

impl Reading {
    pub fn take(pair: &mut Pair) -> Result<Reading, Complaint> {
        Ok(Reading {
            near: counts(&pair.agent),
            far: pair.partner.counters()?,
        })
    }

    /// What has happened since, if the transports count at all.
    pub fn since(&self, before: &Reading, blocks: u64) -> Option<Counted> {
        let share = BLOCKS / blocks.max(1) as f64;
        let grown = |after: &[(String, u64)], before: &[(String, u64)]| {
            let of = |(name, count): &(String, u64)| {
                let earlier = before
                    .iter()
                    .find(|(known, _)| known == name)
                    .map_or(0, |(_, count)| *count);
                (name.clone(), count.saturating_sub(earlier) as f64 * share)
            };
            after.iter().map(of).collect::<BTreeMap<_, _>>()
        };
        let initiator = grown(&self.near, &before.near);
        let target = grown(&self.far, &before.far);
        (!initiator.is_empty()).then_some(Counted { initiator, target })
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |counts: &BTreeMap<String, f64>| {
            let words: Vec<String> = counts
                .iter()
                .map(|(name, count)| format!("{name} {count:.1}"))
                .collect();
            words.join(", ")
        };
        write!(f, "{}; at the other end: {}", list(&self.initiator), list(&self.target))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_grow_by_the_block() {
        let at = |doorbells| Reading {
            near: vec![("doorbells".to_string(), doorbells)],
            far: Vec::new(),
        };
        let counted = at(130).since(&at(30), 51_200).expect("it counts");
        assert_eq!(counted.initiator["doorbells"], 2.0);
        let nothing = Reading {
            near: Vec::new(),
            far: Vec::new(),
        };
        assert!(nothing.since(&nothing, 1).is_none());
    }
}
