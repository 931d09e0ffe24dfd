//! What must hold for any bytes at all. The target under `fuzz/` calls it, and so does the suite.
//!
//! ```
//! weft_nixl::harness::blobs(b"anything");
//! ```

use crate::blobs::{Connection, Introduction, Registration};

/// What agents say of themselves is refused, or is said the same way again.
pub fn blobs(bytes: &[u8]) {
    if let Ok(connection) = Connection::decode(bytes) {
        assert_eq!(connection.encode(), bytes);
    }
    if let Ok(registration) = Registration::decode(bytes) {
        assert_eq!(registration.encode(), bytes);
        assert!(registration.base.checked_add(registration.len).is_some());
    }
    if let Ok(introduction) = Introduction::decode(bytes) {
        assert_eq!(introduction.encode(), bytes);
    }
}
