//! The 128 bytes by which one rank connects to another.

use crate::abi::{HANDLE_BYTES, NcclResult};
use crate::boundary::Failed;

const MARK: [u8; 4] = *b"weft";
const VERSION: u8 = 1;
const ADDRESS_BYTES: usize = 96;

/// Where a listener is, and the token that it lets in. NCCL copies it from rank to rank.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Handle {
    mark: [u8; 4],
    version: u8,
    address_bytes: u8,
    _unused: [u8; 2],
    /// Which attempt to connect this is, at the rank that connects; zero before the first.
    pub attempt: u64,
    token: [u8; 16],
    address: [u8; ADDRESS_BYTES],
}

const _: () = assert!(size_of::<Handle>() == HANDLE_BYTES);

impl Handle {
    /// Of an agent's addresses, as many as there is room for, those of other hosts first: agents tell each other the rest once they have met.
    pub fn new(address: &str, token: u128) -> Result<Handle, Failed> {
        let mut parts: Vec<&str> = address.split(',').collect();
        parts.sort_by_key(|part| part.starts_with("shared_memory:"));
        let mut told = String::new();
        for part in parts {
            let len = told.len() + usize::from(!told.is_empty()) + part.len();
            if len <= ADDRESS_BYTES {
                if !told.is_empty() {
                    told.push(',');
                }
                told.push_str(part);
            }
        }
        if told.is_empty() {
            let text = format!("no address of {address:?} fits into a handle of NCCL's");
            return Err(Failed::new(NcclResult::INTERNAL_ERROR, text));
        }
        let mut handle = Handle {
            mark: MARK,
            version: VERSION,
            address_bytes: told.len() as u8,
            _unused: [0; 2],
            attempt: 0,
            token: token.to_le_bytes(),
            address: [0; ADDRESS_BYTES],
        };
        handle.address[..told.len()].copy_from_slice(told.as_bytes());
        Ok(handle)
    }

    /// Address and token. The bytes come from another rank.
    pub fn read(&self) -> Result<(&str, u128), Failed> {
        let foreign =
            || Failed::argument("the handle is not one of this version of Weft: all ranks need the same plug-in");
        if self.mark != MARK || self.version != VERSION {
            return Err(foreign());
        }
        let address = self
            .address
            .get(..usize::from(self.address_bytes))
            .ok_or_else(foreign)?;
        let address = std::str::from_utf8(address).map_err(|_| foreign())?;
        Ok((address, u128::from_le_bytes(self.token)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_tells_what_it_was_told() {
        let handle = Handle::new("shared_memory:abc,tcp:10.0.0.7:5000", 7).unwrap();
        assert_eq!(handle.read().unwrap(), ("tcp:10.0.0.7:5000,shared_memory:abc", 7));
    }

    #[test]
    fn what_does_not_fit_is_left_out_and_foreign_bytes_are_refused() {
        let long = format!("shared_memory:{},tcp:[::1]:1", "x".repeat(90));
        assert_eq!(Handle::new(&long, 1).unwrap().read().unwrap().0, "tcp:[::1]:1");
        assert!(Handle::new(&"x".repeat(97), 1).is_err());
        let mut other = Handle::new("tcp:127.0.0.1:1", 1).unwrap();
        other.mark = *b"sock";
        assert!(other.read().unwrap_err().text.contains("same plug-in"));
        let mut spoiled = Handle::new("tcp:127.0.0.1:1", 1).unwrap();
        spoiled.address_bytes = 200;
        assert!(spoiled.read().is_err());
    }
}
