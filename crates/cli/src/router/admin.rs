//! Administration, at an address of its own: which instances there are, and what the router counts. Whoever asks shows the token.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use hyper::body::Incoming;
use serde::Deserialize;
use thiserror::Error;
use tower_service::Service;

use super::complaint;
use super::forward::Forwarder;
use super::guests::Guest;
use super::instances::{Instance, Role};
use super::listen::Host;

const TOKEN_BYTES_MIN: usize = 16;
const TOKEN_BYTES_MAX: u64 = 4096;
const BODY_BYTES_MAX: usize = 64 << 10;
const TIME_MAX: Duration = Duration::from_secs(10);

/// What whoever administers the router has to show.
#[derive(Clone)]
pub struct Token(Arc<[u8]>);

#[derive(Debug, Error)]
pub enum TokenError {
    #[error("the token file {} cannot be used: {source}", path.display())]
    Unusable { path: PathBuf, source: io::Error },
    #[error("the token file {} can be read by others (mode {mode:o}); make it 0600", path.display())]
    Exposed { path: PathBuf, mode: u32 },
    #[error("a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} printable characters, and no spaces")]
    Form,
    #[error("the system gives no random numbers: {0}")]
    NoRandomness(getrandom::Error),
}

impl Token {
    pub fn new(text: &str) -> Result<Token, TokenError> {
        let text = text.trim();
        let fits = text.len() >= TOKEN_BYTES_MIN && text.len() as u64 <= TOKEN_BYTES_MAX;
        match fits && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Token(text.as_bytes().into())),
            false => Err(TokenError::Form),
        }
    }

    /// One that nobody can guess, and how it reads.
    pub fn made_up() -> Result<(Token, String), TokenError> {
        let mut random = [0; 24];
        getrandom::fill(&mut random).map_err(TokenError::NoRandomness)?;
        let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((Token(text.as_bytes().into()), text))
    }

    /// From a file that only its owner can read. Where there is none, one is made with a token that nobody can guess.
    pub fn from_file(path: &Path) -> Result<Token, TokenError> {
        let unusable = |source| TokenError::Unusable {
            path: path.to_owned(),
            source,
        };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let (token, text) = Token::made_up()?;
                let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
                file.and_then(|mut file| writeln!(file, "{text}")).map_err(unusable)?;
                return Ok(token);
            }
            Err(error) => return Err(unusable(error)),
        };
        // The open file is asked, not the path, so that what is checked is what is read.
        let mode = file.metadata().map_err(unusable)?.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Exposed {
                path: path.to_owned(),
                mode,
            });
        }
        let mut text = String::new();
        file.take(TOKEN_BYTES_MAX + 2)
            .read_to_string(&mut text)
            .map_err(unusable)?;
        Token::new(&text)
    }

    /// Whether a request shows it.
    fn is_shown(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        match shown.and_then(|shown| shown.split_first_chunk::<7>()) {
            Some((scheme, token)) => scheme.eq_ignore_ascii_case(b"bearer ") && same(&self.0, token),
            None => false,
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Compared as a whole, so that the time taken tells nothing about how much of a guess was right.
fn same(a: &[u8], b: &[u8]) -> bool {
    let difference = a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && std::hint::black_box(difference) == 0
}

/// Answers whoever shows the token.
#[derive(Clone, Debug)]
pub struct Administration {
    token: Token,
    routes: Router,
}

impl Administration {
    pub fn new(forwarder: Arc<Forwarder>, token: Token) -> Administration {
        let routes = Router::new()
            .route("/weft/instances", get(list).post(add).delete(drain))
            .route("/metrics", get(metrics))
            .fallback(async || {
                complaint(
                    StatusCode::NOT_FOUND,
                    "administration is at /weft/instances and /metrics",
                )
            })
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(forwarder);
        Administration { token, routes }
    }
}

impl Host for Administration {
    async fn answer(&self, request: Request<Incoming>, _: Arc<Guest>) -> Response {
        if !self.token.is_shown(request.headers()) {
            let mut response = complaint(StatusCode::UNAUTHORIZED, "administration takes the router's token");
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
            return response;
        }
        let mut routes = self.routes.clone();
        let answer = routes.call(request.map(Body::new));
        match tokio::time::timeout(TIME_MAX, answer).await {
            Ok(Ok(answer)) => answer,
            _ => complaint(StatusCode::REQUEST_TIMEOUT, "the request did not come in time"),
        }
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn shown(token: &Token, authorization: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, HeaderValue::from_str(authorization).unwrap());
        token.is_shown(&headers)
    }

    #[test]
    fn only_the_whole_token_is_the_token() {
        let token = Token::new(" 0123456789abcdef\n").unwrap();
        assert!(shown(&token, "Bearer 0123456789abcdef"));
        assert!(shown(&token, "bearer 0123456789abcdef"));
        for wrong in [
            "Bearer",
            "Bearer ",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdef0",
            "Bearer 1123456789abcdef",
            "Basic 0123456789abcdef",
            "0123456789abcdef",
        ] {
            assert!(!shown(&token, wrong), "{wrong}");
        }
        assert!(!token.is_shown(&HeaderMap::new()));
        assert!(Token::new("short").is_err());
        assert!(Token::new("with a space in the middle").is_err());
    }

    #[test]
    fn a_token_file_is_made_once_and_is_for_its_owner_alone() {
        let directory = std::env::temp_dir().join(format!("weft-token-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("token");
        let made = Token::from_file(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Token::from_file(&path).unwrap().0, made.0);
        assert_eq!(made.0.len(), 48);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert!(matches!(
            Token::from_file(&path),
            Err(TokenError::Exposed { mode: 0o640, .. })
        ));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert!(matches!(Token::from_file(&path), Err(TokenError::Form)));
        std::fs::remove_dir_all(directory).unwrap();
    }
}
