//! The router: one address for many instances of an inference engine, some of which compute prompts and some of which go on from there.
//!
//! A completion is asked of a prefill instance first, for one token; its answer says where the KV cache of the prompt is. The decode instance is asked
//! with these words, and its answer goes to the client as it comes. A prefill instance that has said that it pushes is asked together with the
//! decode instance from then on, which makes room and tells it where. Wherever a side is missing or fails before the client has seen anything, the
//! request goes on without it: what cannot be fetched is computed. Instances may be added and drained while requests are under way.

mod discovery;
mod forward;
mod instances;
mod request;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use tokio::net::TcpListener;
use weft::rendezvous::Rendezvous;

pub use instances::{Instance, Instances, Role};

use forward::Forwarder;

/// Prompts with images are this large, and nothing that an engine accepts is larger.
const BODY_BYTES_MAX: usize = 64 << 20;

/// How long what may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// The first answer of a prefill instance.
    pub prefill: Duration,
    /// Any silence of a decode instance.
    pub decode: Duration,
    /// Between two looks at an instance's health.
    pub health: Duration,
}

/// Routes until the process is told to stop, then lets the requests under way end.
///
/// Instances that have a name in `place` are found there.
pub async fn serve(
    listener: TcpListener,
    instances: Arc<Instances>,
    place: Option<Rendezvous>,
    patience: Patience,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let forwarder = Arc::new(Forwarder::new(Arc::clone(&instances), patience));
    let watching = tokio::spawn(Arc::clone(&forwarder).watch());
    if let Some(place) = place {
        discovery::follow(place, Arc::downgrade(&instances), patience.health)?;
    }
    let app = Router::new()
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(complete))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/weft/instances", get(list).post(add).delete(drain))
        .fallback(anything)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(forwarder);
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    let served = axum::serve(listener, app).with_graceful_shutdown(stop).await;
    watching.abort();
    served
}

async fn complete(State(forwarder): State<Arc<Forwarder>>, request: axum::extract::Request) -> Response {
    forwarder.complete(request).await
}

async fn anything(State(forwarder): State<Arc<Forwarder>>, request: axum::extract::Request) -> Response {
    forwarder.pass_on(request).await
}

/// Whether a request that came now would be answered.
async fn health(State(forwarder): State<Arc<Forwarder>>) -> Response {
    match forwarder.instances().anybody_up() {
        true => StatusCode::OK.into_response(),
        false => complaint(StatusCode::SERVICE_UNAVAILABLE, "no instance is up"),
    }
}

async fn metrics(State(forwarder): State<Arc<Forwarder>>) -> Response {
    forwarder.metrics().into_response()
}

async fn list(State(forwarder): State<Arc<Forwarder>>) -> Response {
    Json(forwarder.instances().list()).into_response()
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    url: String,
    role: Option<Role>,
}

async fn add(State(forwarder): State<Arc<Forwarder>>, Json(named): Json<Named>) -> Response {
    let role = named.role.unwrap_or(Role::Plain);
    match Instance::new(&named.url, role) {
        Ok(instance) => {
            forwarder.instances().add(instance);
            Json(forwarder.instances().list()).into_response()
        }
        Err(error) => complaint(StatusCode::BAD_REQUEST, &error.to_string()),
    }
}

/// Gives an instance no more requests, and forgets it when those it has are done.
async fn drain(State(forwarder): State<Arc<Forwarder>>, Query(named): Query<Named>) -> Response {
    match forwarder.instances().drain(&named.url) {
        true => Json(forwarder.instances().list()).into_response(),
        false => complaint(StatusCode::NOT_FOUND, &format!("there is no instance {}", named.url)),
    }
}

/// An error in the form that clients of the OpenAI API understand.
fn complaint(status: StatusCode, message: &str) -> Response {
    let body = serde_json::json!({"error": {"message": message, "type": "weft_router", "code": status.as_u16()}});
    (status, Json(body)).into_response()
}

/// A body that is complete.
fn full(bytes: Vec<u8>) -> Body {
    Body::from(bytes)
}

#[cfg(test)]
mod tests;
