//! The router: one address for many instances of an inference engine, some of which compute prompts and some of which go on from there.
//!
//! A completion is asked of a prefill instance first, for one token; its answer says where the KV cache of the prompt is. The decode instance is asked
//! with these words, and its answer goes to the client as it comes. A prefill instance that has said that it pushes is asked together with the
//! decode instance from then on, which makes room and tells it where. Wherever a side is missing or fails before the client has seen anything, the
//! request goes on without it: what cannot be fetched is computed. Instances may be added and drained while requests are under way, at an
//! address of its own and by whoever has the token.
//!
//! Clients are strangers. What they send is bounded in time and in memory over all of them (`guests.rs`, `listen.rs`), passed on at paths of
//! inference only (`paths.rs`), and never as they wrote it (`body.rs`, `json.rs`, `multipart.rs`).

mod admin;
mod body;
mod connect;
mod discovery;
mod forward;
mod guests;
pub mod harness;
mod headers;
mod instances;
mod json;
mod listen;
mod multipart;
mod paths;
mod request;
mod tls;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ClientConfig;
use weft::rendezvous::Rendezvous;

pub use admin::Token;
pub use body::BodyLimits;
pub use instances::{Instance, Instances, Role};
pub use listen::Manners;
pub use paths::Paths;
pub use tls::{acceptor, client};

use admin::Administration;
use forward::Forwarder;
use guests::Guests;

/// Administrators that are connected at a time.
const ADMINISTRATORS_MAX: usize = 16;

/// How long instances may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// The first answer of a prefill instance.
    pub prefill: Duration,
    /// Any silence of a decode instance.
    pub decode: Duration,
    /// Between two looks at an instance's health.
    pub health: Duration,
}

/// What the router goes by.
#[derive(Clone, Debug)]
pub struct Options {
    pub patience: Patience,
    pub manners: Manners,
    pub body: BodyLimits,
    /// Clients at a time.
    pub clients_max: usize,
    /// Bytes of all bodies together, beyond the first few of each.
    pub bodies_bytes_max: usize,
    /// What is passed on.
    pub paths: Paths,
    /// Whom instances behind TLS are believed by.
    pub instance_tls: Arc<ClientConfig>,
}

/// Where people come in.
#[derive(Debug)]
pub struct Doors {
    pub clients: TcpListener,
    pub administration: TcpListener,
    /// Who administers the router has it.
    pub token: Token,
}

/// Routes until `stop`, then lets the requests under way end.
///
/// Instances that have a name in `place` are found there.
pub async fn serve(
    doors: Doors,
    tls: Option<TlsAcceptor>,
    instances: Arc<Instances>,
    place: Option<Rendezvous>,
    options: Options,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let (guests, manners) = (
        Arc::new(Guests::new(options.clients_max, options.bodies_bytes_max)),
        options.manners,
    );
    let patience = options.patience;
    let forwarder = Arc::new(Forwarder::new(Arc::clone(&instances), Arc::clone(&guests), options));
    if let Some(place) = place {
        discovery::follow(place, Arc::downgrade(&instances), patience.health)?;
    }
    let watching = tokio::spawn(Arc::clone(&forwarder).watch());
    let (tell, stopped) = watch::channel(false);
    let administration = Administration::new(Arc::clone(&forwarder), doors.token);
    let administrators = Arc::new(Guests::new(ADMINISTRATORS_MAX, 0));
    let administered = listen::serve(
        doors.administration,
        tls.clone(),
        administrators,
        manners,
        administration,
        stopped.clone(),
    );
    let served = listen::serve(doors.clients, tls, guests, manners, forwarder, stopped);
    let stop = async {
        stop.await;
        // Both listen until this is said, so that somebody hears it.
        let _ = tell.send(true);
    };
    tokio::join!(administered, served, stop);
    watching.abort();
    Ok(())
}

/// An error in the form that clients of the OpenAI API understand.
fn complaint(status: StatusCode, message: &str) -> Response {
    let body = serde_json::json!({"error": {"message": message, "type": "weft_router", "code": status.as_u16()}});
    let mut response = (status, Json(body)).into_response();
    if status == StatusCode::SERVICE_UNAVAILABLE {
        let soon = HeaderValue::from_static("1");
        response.headers_mut().insert(RETRY_AFTER, soon);
    }
    response
}

#[cfg(test)]
mod tests;
