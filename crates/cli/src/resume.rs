//! Going on with a copy that came to no good end: what both ends have of a file already, and how they make sure that it is the same.
//!
//! The end that has a part of it says how much, and the checksum of that; the other one compares it with the beginning of the whole. Only
//! what is the same is kept: a part of something else is thrown away, and the copy begins anew.

use std::fs::File;
use std::io::{Seek, SeekFrom};

use crate::courier::{CourierError, Have};
use crate::tree::{self, NewFile};

/// How much of the beginning of a file the other end has. The file stands behind that.
pub fn common(file: &mut File, bytes: u64, have: Option<Have>) -> Result<u64, CourierError> {
    let claimed = have.filter(|have| have.bytes > 0 && have.bytes <= bytes);
    let from = match claimed {
        Some(have) => match tree::checksum(file, have.bytes).map_err(CourierError::Reading)? {
            Some(checksum) if checksum == have.checksum => have.bytes,
            _ => 0,
        },
        None => 0,
    };
    file.seek(SeekFrom::Start(from)).map_err(CourierError::Reading)?;
    Ok(from)
}

/// What an earlier attempt has left.
pub fn held(new: &mut NewFile) -> Result<Option<Have>, CourierError> {
    let file = new.file();
    let bytes = file.metadata().map_err(CourierError::Reading)?.len();
    let checksum = tree::checksum(file, bytes).map_err(CourierError::Reading)?;
    Ok(checksum.filter(|_| bytes > 0).map(|checksum| Have { bytes, checksum }))
}

/// Goes on behind what both ends have, and forgets what only this one has.
pub fn go_on_from(new: &mut NewFile, from: u64, have: Option<Have>) -> Result<(), CourierError> {
    if from != 0 && have.map(|have| have.bytes) != Some(from) {
        return Err(CourierError::Protocol("a beginning that was never spoken of"));
    }
    let file = new.file();
    let cut = file.set_len(from).and_then(|()| file.seek(SeekFrom::Start(from)));
    cut.map(drop).map_err(CourierError::Writing)
}
