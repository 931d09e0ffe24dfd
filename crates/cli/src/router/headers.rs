//! What of a request and of an answer goes further than one connection.

use axum::http::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, DATE, EXPECT, HOST, LOCATION,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue};

/// Those that belong to one connection, whether or not it says so.
const HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// What an instance is told of a client's head. The body is one that the router has written, and so are the headers that speak of it; an answer
/// that is compressed could not be read here.
pub fn of_request(mut headers: HeaderMap, content_type: Option<HeaderValue>) -> HeaderMap {
    without_hops(&mut headers);
    for name in [HOST, CONTENT_LENGTH, CONTENT_ENCODING, EXPECT, ACCEPT_ENCODING] {
        headers.remove(name);
    }
    match content_type {
        Some(content_type) => drop(headers.insert(CONTENT_TYPE, content_type)),
        None => drop(headers.remove(CONTENT_TYPE)),
    }
    headers
}

/// What a client is told of an instance's head. It is not sent elsewhere.
pub fn of_answer(mut headers: HeaderMap) -> HeaderMap {
    without_hops(&mut headers);
    for name in [CONTENT_LENGTH, DATE, LOCATION] {
        headers.remove(name);
    }
    headers
}

fn without_hops(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_belongs_to_a_connection_ends_with_it() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Private"),
            ("connection", "x-other"),
            ("x-private", "1"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("proxy-authorization", "Basic x"),
            ("authorization", "Bearer key"),
            ("x-request-id", "7"),
            ("content-type", "text/plain"),
            ("content-length", "3"),
            ("host", "router"),
            ("location", "http://10.0.0.1/"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let names = |headers: &HeaderMap| {
            let mut names: Vec<_> = headers.keys().map(|name| name.as_str().to_owned()).collect();
            names.sort();
            names
        };
        let asked = of_request(headers.clone(), Some(HeaderValue::from_static("application/json")));
        assert_eq!(
            names(&asked),
            ["authorization", "content-type", "location", "x-request-id"]
        );
        assert_eq!(asked[CONTENT_TYPE], "application/json");
        assert_eq!(
            names(&of_request(headers.clone(), None)),
            ["authorization", "location", "x-request-id"]
        );
        let answered = of_answer(headers);
        assert_eq!(
            names(&answered),
            ["authorization", "content-type", "host", "x-request-id"]
        );
    }
}
