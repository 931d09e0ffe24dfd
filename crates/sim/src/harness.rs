//! What must hold for any text at all, one function a file format. The targets under `fuzz/` call them, and so does the suite.
//!
//! ```
//! weft_sim::harness::scenarios("name = 'empty'");
//! ```

use crate::scenario::Scenario;

/// A scenario is refused, or means the same when it is written again.
pub fn scenarios(text: &str) {
    if let Ok(scenario) = Scenario::from_toml(text) {
        let written = toml::to_string(&scenario).expect("what was read can be written");
        let read = Scenario::from_toml(&written);
        assert!(read.is_ok_and(|read| read == scenario), "{text}\nbecame\n{written}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        // Each input is a whole scenario, the networks of which are made to see whether they can be.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_scenario(noise in "\\PC*", which: prop::sample::Index, at: prop::sample::Index, change in "[0-9a-z=\"\\[\\]{}. -]{0,6}") {
            scenarios(&noise);
            let names: Vec<_> = Scenario::names().collect();
            let text = Scenario::shipped(names[which.index(names.len())]).expect("a shipped one");
            // In place of what stands at a random place: a few characters that files are made of.
            let mut places = text.char_indices().map(|(place, _)| place).cycle().skip(at.index(text.len()));
            let from = places.next().unwrap_or(0);
            let to = places.nth(change.len()).filter(|to| *to > from).unwrap_or(text.len());
            scenarios(&format!("{}{change}{}", &text[..from], &text[to..]));
        }
    }
}
