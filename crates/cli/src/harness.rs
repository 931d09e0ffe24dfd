//! What must hold for any bytes at all, one function a decoder. The targets under `fuzz/` call them, and so does the suite.
//!
//! ```
//! weft_cli::harness::courier_words(b"anything");
//! ```

use crate::courier::{self, Word};

pub use crate::router::harness::{client_forms, client_json};

/// A word of `serve` and `copy` is refused, or means the same when it is said again.
pub fn courier_words(bytes: &[u8]) {
    if let Some(word) = Word::decode(bytes) {
        let again = courier::encode(&word);
        // Ours may be longer than a word may be: JSON can be written in several ways.
        assert_eq!(serde_json::from_slice(&again).ok(), Some(word));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SAID: [&str; 7] = [
        r#"{"word":"get","stream":18446744073709551615,"name":"a/\u00e4\"","have":null}"#,
        r#"{"word":"get","stream":3,"name":"a","have":{"bytes":5,"checksum":18446744073709551615}}"#,
        r#"{"word":"put","stream":0,"name":"","resume":true}"#,
        r#"{"word":"entries","stream":1,"entries":[{"path":"a/b","bytes":4},{"path":"c","bytes":null}],"more":false,"left_out":1}"#,
        r#"{"word":"chunk","stream":1,"index":2,"slot":3,"bytes":4}"#,
        r#"{"word":"end","stream":1,"chunks":0}"#,
        r#"{"word":"refuse","stream":7,"why":{"kind":"not_file","what":"a pipe"}}"#,
    ];

    proptest! {
        #[test]
        fn any_words(noise: Vec<u8>, which in 0..SAID.len(), changes: Vec<(prop::sample::Index, u8)>) {
            prop_assert!(Word::decode(SAID[which].as_bytes()).is_some());
            courier_words(&noise);
            let mut changed = SAID[which].as_bytes().to_vec();
            for (at, byte) in changes.into_iter().take(4) {
                let at = at.index(changed.len());
                changed[at] = byte;
            }
            courier_words(&changed);
        }
    }
}
