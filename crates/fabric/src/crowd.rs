//! Whom a crowd of strangers costs a place: itself.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// Which of those who are waiting has to go, the first being the oldest: the oldest of the largest crowd, and of equal crowds that with the oldest.
///
/// ```
/// let from = ["10.0.0.1", "10.0.0.2", "10.0.0.2"].map(|address| address.parse().expect("an address"));
/// assert_eq!(weft_fabric::crowd::who_goes(from), Some(1));
/// ```
pub fn who_goes(from: impl IntoIterator<Item = IpAddr>) -> Option<usize> {
    let mut crowds: BTreeMap<IpAddr, (usize, usize)> = BTreeMap::new();
    for (nth, address) in from.into_iter().enumerate() {
        crowds.entry(host_of(address)).or_insert((0, nth)).0 += 1;
    }
    let crowds = crowds.into_values();
    let largest = crowds.max_by_key(|(members, oldest)| (*members, Reverse(*oldest)));
    largest.map(|(_, oldest)| oldest)
}

/// Whoever has one address of IPv6 has the 2⁶⁴ around it.
fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn goes(from: &[&str]) -> Option<usize> {
        who_goes(from.iter().map(|address| address.parse().expect("an address")))
    }

    #[test]
    fn a_crowd_pushes_out_itself() {
        assert_eq!(goes(&[]), None);
        assert_eq!(goes(&["10.0.0.1"]), Some(0));
        assert_eq!(goes(&["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"]), Some(1));
        // Of equals the oldest.
        assert_eq!(goes(&["10.0.0.9", "10.0.0.1", "10.0.0.1", "10.0.0.9"]), Some(0));
        assert_eq!(goes(&["::ffff:10.0.0.1", "10.0.0.2", "::1", "10.0.0.2"]), Some(1));
        assert_eq!(goes(&["10.0.0.2", "::ffff:10.0.0.1", "10.0.0.1"]), Some(1));
    }

    #[test]
    fn a_host_with_very_many_addresses_is_one_crowd() {
        let mut from = vec!["2001:db8:1::7".to_owned()];
        from.extend((1..200).map(|nth| format!("2001:db8:0:5:{nth:x}::{nth:x}")));
        let from: Vec<&str> = from.iter().map(String::as_str).collect();
        assert_eq!(goes(&from), Some(1), "not whoever is alone");
    }
}
