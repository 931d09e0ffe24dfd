//! The addresses of the interfaces, which `/sys` does not tell.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// Every address with its interface's name; none where the kernel refuses to say.
pub(super) fn of_interfaces() -> Vec<(String, IpAddr)> {
    let mut head: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: the kernel's list is written to a pointer that we own.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = head;
    while !next.is_null() {
        // SAFETY: every node of the list is valid until the list is freed below.
        let node = unsafe { &*next };
        next = node.ifa_next;
        if node.ifa_addr.is_null() || node.ifa_name.is_null() {
            continue;
        }
        // SAFETY: the name of a node is a C string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(node.ifa_name) };
        if let (Ok(name), Some(address)) = (name.to_str(), address(node.ifa_addr)) {
            found.push((name.to_owned(), address));
        }
    }
    // SAFETY: the list came from getifaddrs, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(head) };
    found
}

fn address(socket: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller passes the address of a live node, which begins with its family.
    let family = i32::from(unsafe { (*socket).sa_family });
    match family {
        libc::AF_INET => {
            // SAFETY: an address of this family has this layout; no alignment is assumed.
            let v4 = unsafe { socket.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family has this layout; no alignment is assumed.
            let v6 = unsafe { socket.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}
