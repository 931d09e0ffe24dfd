//! Where a peer on this host is reached, and how one on another host is recognised.

use std::sync::OnceLock;

use weft_protocol::PeerAddress;

/// The name of this transport, in addresses and in what is reported.
pub(super) const NAME: &str = "shared_memory";

/// What tells this host, as booted this time, from every other. Empty where the kernel does not say.
pub fn host_identity() -> &'static str {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        boot.trim().to_owned()
    })
}

pub(super) fn address(name: &str) -> PeerAddress {
    PeerAddress(format!("{NAME}:@{name}/{}", host_identity()))
}

/// The socket's name, where the address is one of this transport on this host.
pub(super) fn name_here(address: &PeerAddress) -> Option<&str> {
    if address.transport() != NAME {
        return None;
    }
    let (name, host) = address.rest().strip_prefix('@')?.split_once('/')?;
    (host == host_identity() && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_this_host_have_a_name_here() {
        assert_eq!(name_here(&address("weft-1")), Some("weft-1"));
        for other in [
            "shared_memory:@weft-1/00000000-0000-0000-0000-000000000000".to_owned(),
            format!("tcp:@weft-1/{}", host_identity()),
            format!("shared_memory:weft-1/{}", host_identity()),
            format!("shared_memory:@/{}", host_identity()),
            "shared_memory:@weft-1".to_owned(),
            String::new(),
        ] {
            assert_eq!(name_here(&PeerAddress(other)), None);
        }
    }
}
