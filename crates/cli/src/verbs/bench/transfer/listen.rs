//! The end that waits for another host, and does what that one asks for.
//!
//! Orders come as notifications to an agent over TCP that does nothing else, and only from whoever has proved the secret. For each
//! measurement it starts an agent of its own over the transport that is measured.

use std::net::SocketAddr;
use std::time::Duration;

use weft::Notification;

use crate::complaint::{Complaint, Exit};
use crate::desk::{Desk, Post};
use crate::ends::{self, Overrides};
use crate::partner::{Answer, Order};

/// The largest region that another host may ask for.
const REGION_BYTES_MAX: u64 = 8 << 30;
const LISTEN: Duration = Duration::from_secs(3600);

pub fn serve(address: SocketAddr, overrides: &Overrides) -> Result<(), Complaint> {
    let orders = overrides
        .with("transports", "tcp")
        .with("listen", address.to_string())
        .start("bench-listener")?;
    let told = orders.address();
    let port = told.rsplit(':').next().unwrap_or_default();
    // At which of its addresses the other host reaches this one is not known here.
    let told = match address.ip() {
        ip if ip.is_unspecified() => format!("THIS-HOST:{port}"),
        ip => format!("{ip}:{port}"),
    };
    note!("  Listening. On the other host, with the same WEFT_SECRET:");
    note!("  weft bench transfer --connect {told} --transport tcp --mode write_bw");
    // Data over TCP comes to the same address, at a port of its own.
    let overrides = overrides.with("listen", SocketAddr::new(address.ip(), 0).to_string());
    let mut desk: Option<Desk> = None;
    loop {
        let Some(Notification { from, payload }) = orders.next_notification(LISTEN) else {
            continue;
        };
        let answer = match carry_out(&payload, &mut desk, &overrides) {
            Ok(answer) => answer,
            Err(complaint) => Answer::Failed {
                reason: complaint.to_string(),
            },
        };
        let Ok(text) = serde_json::to_vec(&answer) else {
            continue;
        };
        if let Err(error) = from.notify(&text) {
            // Whoever asked has left; the next one is welcome.
            note!("{}", ends::explain(&error, "An answer could not be given."));
        }
    }
}

fn carry_out(payload: &[u8], desk: &mut Option<Desk>, overrides: &Overrides) -> Result<Answer, Complaint> {
    let no_order = |error| Complaint::new(Exit::Usage, "That is no order.").because(&error);
    let order: Order = serde_json::from_slice(payload).map_err(no_order)?;
    if let Order::Open {
        transport,
        region_bytes,
        allocation,
        echo,
    } = &order
    {
        if *region_bytes > REGION_BYTES_MAX {
            let sentence = format!("No region is larger than {}.", weft_plan::Bytes(REGION_BYTES_MAX));
            return Err(Complaint::new(Exit::Usage, sentence));
        }
        // The one before goes first, so that there is room for its successor.
        *desk = None;
        let post = Post {
            name: "partner",
            region_bytes: *region_bytes,
            allocation: *allocation,
            echo: *echo,
        };
        *desk = Some(Desk::open(&post, &overrides.with("transports", transport))?);
    }
    match desk {
        Some(desk) => desk.carry_out(&order),
        None => Err(Complaint::new(Exit::Usage, "Nothing has been opened.")),
    }
}
