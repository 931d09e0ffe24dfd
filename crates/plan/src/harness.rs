//! What must hold for any text, or any bytes, at all, one function a file format. The targets under `fuzz/` call them, and so does the suite.
//!
//! ```
//! weft_plan::harness::platform("name = 'empty'");
//! ```

use crate::platform::Platform;
use crate::schedule::encode::{from_json, to_json};

/// A platform file is refused, or means the same when it is written again.
pub fn platform(text: &str) {
    if let Ok(platform) = Platform::from_toml(text) {
        assert_eq!(Platform::from_toml(&platform.to_toml()), Ok(platform));
    }
}

/// A schedule file is refused, or right, and means the same when it is written again.
pub fn schedule(text: &str) {
    if let Ok(schedule) = from_json(text) {
        let written = to_json(&schedule);
        let read = from_json(&written);
        assert_eq!(read.map(|read| to_json(&read)), Ok(written));
    }
}
