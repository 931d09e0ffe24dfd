//! How a TCP transport is set up, and why it may not start.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use thiserror::Error;
use weft_plan::{LinkCost, Time};

use super::tls::TlsOptions;

/// How a TCP transport is set up. An agent with several NICs starts one transport for each.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Where to listen. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// The address that peers are told, where it is not the one listened on.
    pub advertise: Option<IpAddr>,
    /// The local address that connections leave from: the NIC that they use.
    pub source: Option<IpAddr>,
    /// Connections for each path that this side opens. The first one carries messages and small moves.
    pub connections: u32,
    /// How long a peer's kernel may be silent before the path is given up.
    pub silence_max: Time,
    /// How long opening a path may take.
    pub open_max: Time,
    /// The kernel's buffers for each socket; left to its own adaptation where not given.
    pub socket_buffer_bytes: Option<usize>,
    /// What is known of the link.
    pub cost: LinkCost,
    /// Encryption and mutual authentication by certificates.
    pub tls: Option<TlsOptions>,
}

impl Default for TcpOptions {
    fn default() -> TcpOptions {
        TcpOptions {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertise: None,
            source: None,
            connections: 2,
            silence_max: Time::from_secs(10),
            open_max: Time::from_secs(5),
            socket_buffer_bytes: None,
            cost: crate::cost_unmeasured("tcp"),
            tls: None,
        }
    }
}

/// Why a TCP transport did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TcpError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("the system refused {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("a path cannot have {0} connections; at least 1 and at most 64")]
    Connections(u32),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
}
