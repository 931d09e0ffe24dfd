//! Calls of an etcd cluster: gRPC with the messages of [`wire`](super::wire).

use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use thiserror::Error;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::wire::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse, RangeRequest, RangeResponse, TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest,
    WatchResponse,
};

/// How long one exchange with the server may take.
pub(super) const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a server may take to take a connection, so that those behind a dead one are reached as well.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);
/// More than a page of entries can take. One entry is as large as etcd lets anybody write: 1.5 MiB, unless it was told otherwise.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// More servers than this is not a cluster but an accident.
const ENDPOINTS_MAX: usize = 64;

/// What a cluster of etcd servers, or the way to it, did not do for us.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EtcdError {
    #[error("{url:?} is no address of an etcd server: it must be like http://HOST:2379, without TLS")]
    BadUrl { url: String },
    #[error("{count} servers; at most {ENDPOINTS_MAX} can be named")]
    TooManyUrls { count: usize },
    #[error("no answer within {within:?}")]
    NoAnswer { within: Duration },
    #[error("cannot be reached: {why}")]
    Unreachable { why: String },
    #[error("{why}")]
    Refused { why: String },
}

/// A cluster. Clones share its connection, which is with one of its servers at a time.
#[derive(Clone)]
pub(super) struct Client {
    endpoints: Arc<[Endpoint]>,
    current: Arc<Mutex<Current>>,
}

/// The server that is asked now.
struct Current {
    /// Which of the endpoints.
    at: usize,
    /// Nothing before the first call, and after one that the server did not answer.
    channel: Option<Channel>,
}

impl Client {
    /// URLs with semicolons between them. Nothing is sent yet; the first call tells whether anybody is there.
    pub(super) fn new(urls: &str) -> Result<Client, EtcdError> {
        let endpoints = urls.split(';').map(endpoint).collect::<Result<Arc<[_]>, _>>()?;
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(EtcdError::TooManyUrls { count: endpoints.len() });
        }
        let channel = None;
        Ok(Client {
            endpoints,
            current: Arc::new(Mutex::new(Current { at: 0, channel })),
        })
    }

    pub(super) async fn range(&self, request: RangeRequest) -> Result<RangeResponse, EtcdError> {
        self.call("/etcdserverpb.KV/Range", request).await
    }

    pub(super) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, EtcdError> {
        self.call("/etcdserverpb.KV/Txn", request).await
    }

    pub(super) async fn lease_grant(&self, ttl_seconds: i64) -> Result<i64, EtcdError> {
        let request = LeaseGrantRequest { ttl_seconds };
        let granted: LeaseGrantResponse = self.call("/etcdserverpb.Lease/LeaseGrant", request).await?;
        Ok(granted.id)
    }

    pub(super) async fn lease_revoke(&self, id: i64) -> Result<(), EtcdError> {
        let request = LeaseRevokeRequest { id };
        let LeaseRevokeResponse {} = self.call("/etcdserverpb.Lease/LeaseRevoke", request).await?;
        Ok(())
    }

    /// Keeps a lease for another term; false if it has ended. The call could go on with more requests, but one is all we have.
    pub(super) async fn lease_keep_alive(&self, id: i64) -> Result<bool, EtcdError> {
        let request = LeaseKeepAliveRequest { id };
        let kept: LeaseKeepAliveResponse = self.call("/etcdserverpb.Lease/LeaseKeepAlive", request).await?;
        Ok(kept.ttl_seconds > 0)
    }

    /// Changes of keys, from a revision on, until what is given back is dropped.
    pub(super) async fn watch(&self, create: WatchCreateRequest) -> Result<Changes, EtcdError> {
        let create = Some(create);
        // Our side of the call stays open: a server may take its end for the end of the watch.
        let requests = tokio_stream::once(WatchRequest { create }).chain(tokio_stream::pending());
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let begin = async move |mut grpc: Grpc<Channel>| {
            grpc.ready().await.map_err(|error| unreachable(&error))?;
            let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
            let answer = grpc.streaming(Request::new(requests), path, codec).await;
            answer.map_err(|status| refused(&status))
        };
        Ok(Changes(self.ask(begin).await?.into_inner()))
    }

    async fn call<M, A>(&self, path: &'static str, message: M) -> Result<A, EtcdError>
    where
        M: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = PathAndQuery::from_static(path);
        let call = async move |mut grpc: Grpc<Channel>| {
            grpc.ready().await.map_err(|error| unreachable(&error))?;
            let codec = ProstCodec::<M, A>::default();
            let answer = grpc.unary(Request::new(message), path, codec).await;
            answer.map_err(|status| refused(&status))
        };
        Ok(self.ask(call).await?.into_inner())
    }

    /// Asks a server that takes connections. One that then does not answer is not asked again, because it may have done what it was
    /// asked for; the next call goes to another one.
    async fn ask<A>(&self, call: impl AsyncFnOnce(Grpc<Channel>) -> Result<A, EtcdError>) -> Result<A, EtcdError> {
        let within = ANSWER_TIME_MAX;
        let (at, channel) = timeout(within, self.connected())
            .await
            .unwrap_or(Err(EtcdError::NoAnswer { within }))?;
        let grpc = Grpc::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
        let answer = timeout(within, call(grpc))
            .await
            .unwrap_or(Err(EtcdError::NoAnswer { within }));
        if let Err(EtcdError::NoAnswer { .. } | EtcdError::Unreachable { .. }) = answer {
            let mut current = self.current();
            if current.at == at {
                current.channel = None;
                current.at = (at + 1) % self.endpoints.len();
            }
        }
        answer
    }

    async fn connected(&self) -> Result<(usize, Channel), EtcdError> {
        let mut tried = 0;
        loop {
            let at = {
                let current = self.current();
                if let Some(channel) = &current.channel {
                    return Ok((current.at, channel.clone()));
                }
                current.at
            };
            let connecting = self.endpoints[at].connect().await;
            tried += 1;
            let mut current = self.current();
            match connecting {
                Ok(channel) => {
                    current.at = at;
                    current.channel = Some(channel.clone());
                    return Ok((at, channel));
                }
                Err(error) => {
                    current.at = (at + 1) % self.endpoints.len();
                    if tried >= self.endpoints.len() {
                        return Err(unreachable(&error));
                    }
                }
            }
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The changes that a watch tells of.
pub(super) struct Changes(Streaming<WatchResponse>);

impl Changes {
    /// The next changes; nothing when the server has ended the watch.
    pub(super) async fn next(&mut self) -> Result<Option<WatchResponse>, EtcdError> {
        self.0.message().await.map_err(|status| refused(&status))
    }
}

/// An address as people write it; without a scheme it is taken for plain HTTP.
fn endpoint(url: &str) -> Result<Endpoint, EtcdError> {
    let url = url.trim();
    let bad = || EtcdError::BadUrl { url: url.to_owned() };
    let whole = if url.contains("://") {
        url.to_owned()
    } else {
        format!("http://{url}")
    };
    let endpoint = Endpoint::from_shared(whole).map_err(|_| bad())?;
    if endpoint.uri().scheme_str() != Some("http") || endpoint.uri().host().is_none_or(str::is_empty) {
        return Err(bad());
    }
    Ok(endpoint.connect_timeout(CONNECT_TIME_MAX))
}

/// What the server said. What went wrong on the way there stands deeper, and says more.
fn refused(status: &Status) -> EtcdError {
    match status.source() {
        Some(cause) => unreachable(cause),
        None => EtcdError::Refused {
            why: format!("{} ({:?})", status.message(), status.code()),
        },
    }
}

/// The innermost cause says what happened; those around it only that something did.
fn unreachable(error: &dyn Error) -> EtcdError {
    let mut innermost = error;
    while let Some(deeper) = innermost.source() {
        innermost = deeper;
    }
    let why = innermost.to_string();
    EtcdError::Unreachable { why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked() {
        for good in [
            "http://127.0.0.1:2379",
            "127.0.0.1:2379",
            " http://a:1 ; http://b:2",
            "http://[::1]:2379",
        ] {
            assert!(Client::new(good).is_ok(), "{good}");
        }
        for bad in ["", ";", "https://a:1", "ftp://a:1", "http://", "http://a b", "\0"] {
            assert!(matches!(Client::new(bad), Err(EtcdError::BadUrl { .. })), "{bad:?}");
        }
        let many = ["a:1"; ENDPOINTS_MAX + 1].join(";");
        assert!(matches!(Client::new(&many), Err(EtcdError::TooManyUrls { .. })));
    }
}
