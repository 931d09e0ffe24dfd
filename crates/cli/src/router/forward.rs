//! Sends requests to instances, and their answers back.

use std::fmt::Write as _;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::response::Response;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use thiserror::Error;
use tokio::time::{Sleep, timeout};

use super::instances::{Assigned, Instance, Instances, Role};
use super::request::{self, Completion, Offer};
use super::{BODY_BYTES_MAX, Patience, complaint, full};

/// Who answered a request, in its headers.
const PREFILL: HeaderName = HeaderName::from_static("x-weft-prefill");
const DECODE: HeaderName = HeaderName::from_static("x-weft-decode");

#[derive(Debug)]
pub struct Forwarder {
    client: Client<HttpConnector, Body>,
    instances: Arc<Instances>,
    patience: Patience,
    counts: Counts,
}

/// Completions, by how they were answered.
#[derive(Debug, Default)]
struct Counts {
    handed_off: AtomicU64,
    pushed: AtomicU64,
    without_prefill: AtomicU64,
    plain: AtomicU64,
    refused: AtomicU64,
}

#[derive(Debug, Error)]
enum Unanswered {
    #[error("it cannot be reached: {0}")]
    Unreachable(#[from] hyper_util::client::legacy::Error),
    #[error("it did not answer in time")]
    Silent,
    #[error("its answer broke off: {0}")]
    BrokeOff(#[from] hyper::Error),
    #[error("it answered {0}")]
    Failed(StatusCode),
}

/// An answer of which something is there.
struct Begun {
    head: axum::http::response::Parts,
    first: Option<Frame<Bytes>>,
    body: Incoming,
}

/// How a prefill instance has taken a request.
enum Heard {
    /// It has computed the prompt, and says where it is, if it says that.
    Computed(Option<serde_json::Value>),
    /// The request itself is at fault, so that its sender is told.
    Refused(Response),
    Nothing,
}

/// What became of asking the prefill side.
enum Prefilled {
    At(Assigned, serde_json::Value),
    Nobody,
    /// The request itself is at fault, so that its sender is told.
    Refused(Response),
}

impl Forwarder {
    pub fn new(instances: Arc<Instances>, patience: Patience) -> Forwarder {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(Duration::from_secs(2)));
        connector.set_nodelay(true);
        Forwarder {
            client: Client::builder(TokioExecutor::new()).build(connector),
            instances,
            patience,
            counts: Counts::default(),
        }
    }

    pub fn instances(&self) -> &Instances {
        &self.instances
    }

    /// Looks after the health of all instances, for ever.
    pub async fn watch(self: Arc<Forwarder>) {
        loop {
            let looks: Vec<_> = self
                .instances
                .present()
                .into_iter()
                .map(|instance| {
                    let forwarder = Arc::clone(&self);
                    tokio::spawn(async move { forwarder.look(&instance).await })
                })
                .collect();
            for look in looks {
                // A look that panicked has seen nothing.
                let _ = look.await;
            }
            tokio::time::sleep(self.patience.health).await;
        }
    }

    async fn look(&self, instance: &Instance) {
        let asked = self.ask(instance, Method::GET, "/health", HeaderMap::new(), Body::empty());
        let well = matches!(timeout(self.patience.health.max(Duration::from_secs(1)), asked).await,
            Ok(Ok(answer)) if answer.status().is_success());
        instance.seen(well);
    }

    pub async fn complete(&self, asked: axum::extract::Request) -> Response {
        let (parts, body) = asked.into_parts();
        let Ok(body) = axum::body::to_bytes(body, BODY_BYTES_MAX).await else {
            return complaint(StatusCode::PAYLOAD_TOO_LARGE, "the request is too long, or broke off");
        };
        let completion = Completion::parse(&body);
        let Some(completion) = completion else {
            return self.answer(&parts, &body, Role::Decode, None, &self.counts.plain).await;
        };
        if completion.can_be_split()
            && let Some(answer) = self.push(&parts, &completion).await
        {
            return answer;
        }
        let prefilled = match completion.can_be_split() {
            true => self.prefill(&parts, &completion).await,
            false => Prefilled::Nobody,
        };
        match prefilled {
            Prefilled::At(instance, origin) => {
                let body = Bytes::from(completion.for_decode(Some(origin)));
                let from = Some(instance.0.url().to_owned());
                self.answer(&parts, &body, Role::Decode, from, &self.counts.handed_off)
                    .await
            }
            Prefilled::Nobody => {
                let body = Bytes::from(completion.for_decode(None));
                let count = &self.counts.without_prefill;
                self.answer(&parts, &body, Role::Plain, None, count).await
            }
            Prefilled::Refused(response) => response,
        }
    }

    /// Sends what is no completion to whoever is there.
    pub async fn pass_on(&self, asked: axum::extract::Request) -> Response {
        let (parts, body) = asked.into_parts();
        match axum::body::to_bytes(body, BODY_BYTES_MAX).await {
            Ok(body) => self.answer(&parts, &body, Role::Decode, None, &self.counts.plain).await,
            Err(_) => complaint(StatusCode::PAYLOAD_TOO_LARGE, "the request is too long, or broke off"),
        }
    }

    /// Asks both sides at once, where the prefill side offers to push: the decode side makes room and tells the prefill side where, which
    /// fills it while it computes. `None` where that cannot be, or has failed before the client has seen anything.
    async fn push(&self, parts: &Parts, completion: &Completion) -> Option<Response> {
        let prefill = self.instances.next(Role::Prefill, &[])?;
        let offer = prefill.0.offer()?;
        let decode = self.instances.next(Role::Decode, &[])?;
        let hand_off = name_of_hand_off()?;
        let begun = self
            .both(parts, completion, &hand_off, (&prefill.0, &decode.0), &offer)
            .await?;
        match begun {
            Ok(begun) => {
                self.counts.pushed.fetch_add(1, Ordering::Relaxed);
                Some(self.hand_back(begun, decode, Some(prefill.0.url())))
            }
            Err(refused) => Some(refused),
        }
    }

    /// What the decode side begins to answer, or how the prefill side refuses the request itself. Whichever is not waited for any more is
    /// dropped, so that its instance ends the request.
    async fn both(
        &self,
        parts: &Parts,
        completion: &Completion,
        hand_off: &str,
        (prefill, decode): (&Instance, &Instance),
        offer: &Offer,
    ) -> Option<Result<Begun, Response>> {
        // Room should be there when the first layer is computed, so that the decode side is asked first.
        let mut decoding = pin!(self.begun(decode, parts, completion.for_landing(hand_off, offer)));
        let mut prefilling = pin!(self.prefill_at(prefill, parts, completion.for_pushing(hand_off, offer)));
        let mut computed = false;
        loop {
            tokio::select! {
                biased;
                begun = &mut decoding => match begun {
                    Ok(begun) => return Some(Ok(begun)),
                    Err(error) => {
                        eprintln!("decode at {} failed: {error}", decode.url());
                        // One that answers with an error is there.
                        decode.seen(matches!(error, Unanswered::Failed(_)));
                        return None;
                    }
                },
                heard = &mut prefilling, if !computed => match heard {
                    Heard::Computed(_) => computed = true,
                    Heard::Refused(response) => return Some(Err(response)),
                    Heard::Nothing => return None,
                },
            }
        }
    }

    /// The answer of an instance, from its first piece on.
    async fn begun(&self, instance: &Instance, parts: &Parts, body: Vec<u8>) -> Result<Begun, Unanswered> {
        let begun = async {
            let path = path_of(&parts.uri);
            let asked = self.ask(instance, parts.method.clone(), path, parts.headers.clone(), full(body));
            let (head, mut body) = asked.await?.into_parts();
            if head.status.is_server_error() {
                return Err(Unanswered::Failed(head.status));
            }
            let first = body.frame().await.transpose()?;
            Ok(Begun { head, first, body })
        };
        // It is rightly silent while the prompt is computed elsewhere.
        timeout(self.patience.prefill + self.patience.decode, begun)
            .await
            .unwrap_or(Err(Unanswered::Silent))
    }

    /// Asks one prefill instance after the other, until one has computed the prompt.
    async fn prefill(&self, parts: &Parts, completion: &Completion) -> Prefilled {
        let mut tried = Vec::new();
        // Without a decode instance, whoever computes the prompt may as well go on.
        if self.instances.next(Role::Decode, &[]).is_none() {
            return Prefilled::Nobody;
        }
        while let Some(assigned) = self.instances.next(Role::Prefill, &tried) {
            match self.prefill_at(&assigned.0, parts, completion.for_prefill()).await {
                Heard::Computed(Some(origin)) => return Prefilled::At(assigned, origin),
                // It speaks, but not of where its blocks are: then they are of no use.
                Heard::Computed(None) => return Prefilled::Nobody,
                Heard::Refused(response) => return Prefilled::Refused(response),
                Heard::Nothing => tried.push(Arc::clone(&assigned.0)),
            }
        }
        Prefilled::Nobody
    }

    /// Has one prefill instance compute the prompt, and takes note of what that says of the instance.
    async fn prefill_at(&self, instance: &Instance, parts: &Parts, body: Vec<u8>) -> Heard {
        let path = path_of(&parts.uri);
        let whole = async {
            let asked = self.ask(instance, parts.method.clone(), path, parts.headers.clone(), full(body));
            let (answer, body) = asked.await?.into_parts();
            if answer.status.is_server_error() {
                return Err(Unanswered::Failed(answer.status));
            }
            Ok((answer, body.collect().await?.to_bytes()))
        };
        let answered = timeout(self.patience.prefill, whole).await;
        match answered.unwrap_or(Err(Unanswered::Silent)) {
            Ok((head, body)) if head.status.is_client_error() => {
                Heard::Refused(response(head.status, &head.headers, full(body.to_vec())))
            }
            Ok((_, body)) => {
                let origin = request::origin(&body);
                // It may be another process than the one that was asked.
                instance.offers(origin.as_ref().and_then(request::offer));
                Heard::Computed(origin)
            }
            Err(error) => {
                eprintln!("prefill at {} failed: {error}", instance.url());
                // One that answers with an error is there.
                instance.seen(matches!(error, Unanswered::Failed(_)));
                Heard::Nothing
            }
        }
    }

    /// The answer of an instance of a role, or of another where there is none. Nothing has been seen of it by the client before the first
    /// instance that answers at all.
    async fn answer(
        &self,
        parts: &Parts,
        body: &Bytes,
        first: Role,
        prefill: Option<String>,
        count: &AtomicU64,
    ) -> Response {
        let order = match first {
            Role::Plain => [Role::Plain, Role::Decode, Role::Prefill],
            _ => [Role::Decode, Role::Plain, Role::Prefill],
        };
        let mut tried = Vec::new();
        for role in order {
            while let Some(assigned) = self.instances.next(role, &tried) {
                let asked = self.ask(
                    &assigned.0,
                    parts.method.clone(),
                    path_of(&parts.uri),
                    parts.headers.clone(),
                    Body::from(body.clone()),
                );
                let answer = timeout(self.patience.decode, asked).await;
                match answer.unwrap_or(Err(Unanswered::Silent)) {
                    Ok(answer) => {
                        count.fetch_add(1, Ordering::Relaxed);
                        let (head, body) = answer.into_parts();
                        let first = None;
                        return self.hand_back(Begun { head, first, body }, assigned, prefill.as_deref());
                    }
                    Err(error) => {
                        eprintln!("{role} at {} failed: {error}", assigned.0.url());
                        assigned.0.seen(false);
                        tried.push(Arc::clone(&assigned.0));
                    }
                }
            }
        }
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        complaint(StatusCode::SERVICE_UNAVAILABLE, "no instance is up")
    }

    fn hand_back(&self, begun: Begun, assigned: Assigned, prefill: Option<&str>) -> Response {
        let Begun { head, first, body } = begun;
        let decode = assigned.0.url().to_owned();
        let watched = Watched {
            first,
            body,
            idle: self.patience.decode,
            sleep: Box::pin(tokio::time::sleep(self.patience.decode)),
            _assigned: assigned,
        };
        let mut response = response(head.status, &head.headers, Body::new(watched));
        let mut say = |name: HeaderName, value: &str| {
            if let Ok(value) = HeaderValue::from_str(value) {
                response.headers_mut().insert(name, value);
            }
        };
        say(DECODE, &decode);
        if let Some(prefill) = prefill {
            say(PREFILL, prefill);
        }
        response
    }

    async fn ask(
        &self,
        instance: &Instance,
        method: Method,
        path: &str,
        mut headers: HeaderMap,
        body: Body,
    ) -> Result<Response<Incoming>, Unanswered> {
        // These belong to the connection, and this is another one.
        for name in [HOST, CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING] {
            headers.remove(name);
        }
        let uri = format!("http://{}{path}", instance.authority);
        let mut request = axum::http::Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = uri.parse().unwrap_or_default();
        *request.headers_mut() = headers;
        Ok(self.client.request(request).await?)
    }

    /// The counts as Prometheus reads them.
    pub fn metrics(&self) -> String {
        let mut text = String::from(
            "# HELP weft_router_requests Requests, by how they were answered.\n# TYPE weft_router_requests counter\n",
        );
        let counts = &self.counts;
        for (how, count) in [
            ("handed_off", &counts.handed_off),
            ("pushed", &counts.pushed),
            ("without_prefill", &counts.without_prefill),
            ("plain", &counts.plain),
            ("refused", &counts.refused),
        ] {
            let count = count.load(Ordering::Relaxed);
            writeln!(text, "weft_router_requests_total{{how=\"{how}\"}} {count}").expect("a string takes everything");
        }
        text.push_str(
            "# HELP weft_router_instance_up Whether an instance is up.\n# TYPE weft_router_instance_up gauge\n",
        );
        for instance in self.instances.present() {
            let (url, role, up) = (instance.url(), instance.role, u8::from(instance.is_up()));
            writeln!(text, "weft_router_instance_up{{url=\"{url}\",role=\"{role}\"}} {up}")
                .expect("a string takes everything");
        }
        text
    }
}

/// Nobody else's, also of other routers.
fn name_of_hand_off() -> Option<String> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).ok()?;
    Some(format!("{:032x}", u128::from_le_bytes(random)))
}

fn path_of(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", |path| path.as_str())
}

fn response(status: StatusCode, headers: &HeaderMap, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    for (name, value) in headers {
        if *name == CONTENT_TYPE || name.as_str().starts_with("x-") {
            response.headers_mut().append(name.clone(), value.clone());
        }
    }
    response
}

/// The body of an answer as it comes, which ends with an error where nothing comes for too long.
struct Watched {
    /// What has been read of it already.
    first: Option<Frame<Bytes>>,
    body: Incoming,
    idle: Duration,
    sleep: Pin<Box<Sleep>>,
    _assigned: Assigned,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(frame) => {
                let next = tokio::time::Instant::now() + self.idle;
                self.sleep.as_mut().reset(next);
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => match self.sleep.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Some(Err("the instance fell silent".into()))),
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }
}
