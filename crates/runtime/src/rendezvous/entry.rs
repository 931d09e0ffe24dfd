//! One name, who holds it and whether that process can still be alive.

use std::fs;

use serde_json::{Value, json};
use weft_protocol::Epoch;

use super::RendezvousError;

/// Escaped in the worst way, a name still fits into a file name.
pub(super) const NAME_BYTES_MAX: usize = 80;
pub(super) const ADDRESS_BYTES_MAX: usize = 8192;
/// An entry as it is stored.
pub(super) const ENTRY_BYTES_MAX: usize = 32 * 1024;
/// More names than this in one place is not a job but an accident.
pub(super) const ENTRIES_MAX: usize = 1 << 17;

/// A name and the agent that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub address: String,
    pub epoch: Epoch,
    holder: Holder,
}

/// The process behind an entry, told apart from others that have had or will have its number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holder {
    /// This boot of this host, and the numbering of processes that the holder sees: a container has its own.
    host: String,
    process: u32,
    /// When the process started, in clock ticks since the boot.
    started: u64,
}

impl Entry {
    pub(super) fn of_process(name: &str, address: &str, epoch: Epoch) -> Result<Entry, RendezvousError> {
        check_name(name)?;
        if !sound(address, ADDRESS_BYTES_MAX) {
            return Err(RendezvousError::BadAddress);
        }
        let process = std::process::id();
        let holder = Holder {
            host: host(),
            process,
            started: started(process).unwrap_or(0),
        };
        Ok(Entry {
            name: name.to_owned(),
            address: address.to_owned(),
            epoch,
            holder,
        })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        // The epoch is text, because many readers of JSON round large numbers.
        json!({
            "weft": 1,
            "name": self.name,
            "address": self.address,
            "epoch": format!("{:x}", self.epoch.0),
            "host": self.holder.host,
            "process": self.holder.process,
            "started": self.holder.started,
        })
        .to_string()
        .into_bytes()
    }

    /// The entry in `bytes`, which anyone may have written.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Entry> {
        if bytes.len() > ENTRY_BYTES_MAX {
            return None;
        }
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let text = |key: &str, max| value[key].as_str().filter(|text| sound(text, max)).map(str::to_owned);
        if value["weft"] != 1 {
            return None;
        }
        Some(Entry {
            name: text("name", NAME_BYTES_MAX)?,
            address: text("address", ADDRESS_BYTES_MAX)?,
            epoch: Epoch(u64::from_str_radix(value["epoch"].as_str()?, 16).ok()?),
            holder: Holder {
                host: text("host", NAME_BYTES_MAX)?,
                process: u32::try_from(value["process"].as_u64()?).ok()?,
                started: value["started"].as_u64()?,
            },
        })
    }

    /// Whether this process can see for itself if the holder lives: `None` where it cannot.
    pub(super) fn holder_lives(&self) -> Option<bool> {
        (self.holder.host == host()).then(|| started(self.holder.process) == Some(self.holder.started))
    }
}

pub(super) fn check_name(name: &str) -> Result<(), RendezvousError> {
    if sound(name, NAME_BYTES_MAX) {
        return Ok(());
    }
    Err(RendezvousError::BadName {
        name: name.chars().take(NAME_BYTES_MAX).collect(),
    })
}

/// A name as one part of a path, of a file or of a key, that no other name has: letters, digits, `-`, `_` and `.` as they are, everything
/// else as `%xx`. A dot at its beginning is escaped too, because `..` leads elsewhere.
pub(super) fn escaped(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => out.push(byte.into()),
            b'.' if at > 0 => out.push('.'),
            _ => out.push_str(&format!("%{byte:02x}")),
        }
    }
    out
}

fn sound(text: &str, max: usize) -> bool {
    !text.is_empty() && text.len() <= max && !text.chars().any(char::is_control)
}

fn host() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let numbering = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), numbering.display())
}

/// When a process started; `None` when there is none, or only the remains of one that its parent has not looked at.
fn started(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command, in parentheses, may contain anything; what follows its end does not.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_entry_survives_its_encoding() {
        let entry = Entry::of_process("a/b \"c\" ü", "tcp:[::1]:1", Epoch(u64::MAX)).unwrap();
        assert_eq!(Entry::from_bytes(&entry.to_bytes()), Some(entry.clone()));
        assert_eq!(entry.holder_lives(), Some(true));
    }

    #[test]
    fn a_holder_that_cannot_be_is_dead_and_one_elsewhere_is_unknown() {
        let mut entry = Entry::of_process("a", "b", Epoch(1)).unwrap();
        entry.holder.started += 1;
        assert_eq!(entry.holder_lives(), Some(false));
        entry.holder.host = "elsewhere".to_owned();
        assert_eq!(entry.holder_lives(), None);
    }

    #[test]
    fn unsound_names_and_addresses_are_refused() {
        for name in ["", "a\nb", "\0", &"x".repeat(81)] {
            assert!(Entry::of_process(name, "a", Epoch(1)).is_err(), "{name:?}");
        }
        assert!(Entry::of_process("a", "", Epoch(1)).is_err());
        assert!(Entry::of_process("a", &"x".repeat(ADDRESS_BYTES_MAX + 1), Epoch(1)).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = Entry::from_bytes(&bytes);
        }

        #[test]
        fn a_damaged_entry_does_not_panic(at in 0usize..100, byte: u8) {
            let mut bytes = Entry::of_process("a", "b", Epoch(1)).unwrap().to_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = Entry::from_bytes(&bytes);
            let _ = Entry::from_bytes(&bytes[..at]);
        }
    }
}
