//! Sends requests to instances, and their answers back.

use std::fmt::Write as _;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use thiserror::Error;
use tokio::time::{Sleep, timeout};

use super::body::{self, Content, Pieces};
use super::connect::Connector;
use super::guests::{Guest, Guests};
use super::instances::{Assigned, Instance, Instances, Role};
use super::listen::Host;
use super::paths::Paths;
use super::request::{self, Completion, Offer};
use super::{Options, complaint, headers};

/// Who answered a request, in its headers.
const PREFILL: HeaderName = HeaderName::from_static("x-weft-prefill");
const DECODE: HeaderName = HeaderName::from_static("x-weft-decode");

/// What clients may do with what a path names.
const METHODS: [Method; 5] = [Method::GET, Method::HEAD, Method::POST, Method::DELETE, Method::OPTIONS];

/// An answer of a prefill instance is one token, and where its prompt is.
const PREFILL_BYTES_MAX: usize = 16 << 20;

/// What a connection to an instance reads ahead.
const BUFFER_BYTES: usize = 64 << 10;
/// Connections to an instance that nothing is asked on: so many stay, and for so long.
const IDLE_MAX: usize = 32;
const IDLE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Forwarder {
    client: Client<Connector, Body>,
    instances: Arc<Instances>,
    guests: Arc<Guests>,
    options: Options,
    counts: Counts,
}

/// Requests, by how they were answered.
#[derive(Debug, Default)]
struct Counts {
    handed_off: AtomicU64,
    pushed: AtomicU64,
    without_prefill: AtomicU64,
    plain: AtomicU64,
    refused: AtomicU64,
    unacceptable: AtomicU64,
}

#[derive(Debug, Error)]
enum Unanswered {
    #[error("it cannot be reached: {0}")]
    Unreachable(#[from] hyper_util::client::legacy::Error),
    #[error("it did not answer in time")]
    Silent,
    #[error("its answer broke off: {0}")]
    BrokeOff(Box<dyn std::error::Error + Send + Sync>),
    #[error("it answered {0}")]
    Failed(StatusCode),
}

/// A request without its body, as instances are asked.
struct Asked {
    method: Method,
    /// With what follows it.
    path: String,
    headers: HeaderMap,
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
    Computed(Option<Bytes>),
    /// The request itself is at fault, so that its sender is told.
    Refused(Response),
    Nothing,
}

/// What became of asking the prefill side.
enum Prefilled {
    At(Assigned, Bytes),
    /// And why, where there are two sides.
    Nobody(Option<&'static str>),
    /// The request itself is at fault, so that its sender is told.
    Refused(Response),
}

impl Host for Arc<Forwarder> {
    async fn answer(&self, request: Request<Incoming>, guest: Arc<Guest>) -> Response {
        self.respond(request.map(Body::new), &guest).await
    }
}

impl Forwarder {
    pub fn new(instances: Arc<Instances>, guests: Arc<Guests>, options: Options) -> Forwarder {
        let connector = Connector::new(Arc::clone(&options.instance_tls));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_MAX)
            .http1_max_buf_size(BUFFER_BYTES)
            .build(connector);
        Forwarder {
            client,
            instances,
            guests,
            options,
            counts: Counts::default(),
        }
    }

    pub fn instances(&self) -> &Instances {
        &self.instances
    }

    /// Looks after the health of all instances, for ever.
    pub async fn watch(self: Arc<Forwarder>) {
        let pause = self.options.patience.health;
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
            tokio::time::sleep(pause).await;
        }
    }

    async fn look(&self, instance: &Instance) {
        let asked = Asked {
            method: Method::GET,
            path: "/health".to_owned(),
            headers: HeaderMap::new(),
        };
        let answer = self.ask(instance, &asked, Pieces::default());
        match timeout(self.options.patience.health.max(Duration::from_secs(1)), answer).await {
            Ok(answer) => instance.seen(answer.is_ok_and(|answer| answer.status().is_success())),
            Err(_) => instance.is_slow(),
        }
    }

    /// Answers a client, or has somebody answer it.
    async fn respond(&self, request: Request, guest: &Guest) -> Response {
        let (parts, body) = request.into_parts();
        if parts.uri.path() == "/health" {
            return self.health();
        }
        let Some(path) = self.options.paths.passed(parts.uri.path()) else {
            return complaint(StatusCode::NOT_FOUND, "there is nothing at this path");
        };
        if !METHODS.contains(&parts.method) {
            return complaint(StatusCode::METHOD_NOT_ALLOWED, "this is not what clients do");
        }
        let content = match body::read(&parts.headers, body, guest, self.options.body).await {
            Ok(content) => content,
            Err(error) => {
                self.counts.unacceptable.fetch_add(1, Ordering::Relaxed);
                return complaint(error.status(), &error.to_string());
            }
        };
        guest.is_served();
        let completes = parts.method == Method::POST && Paths::is_completion(path);
        let asked = Asked {
            method: parts.method,
            path: match parts.uri.query() {
                Some(query) => format!("{path}?{query}"),
                None => path.to_owned(),
            },
            headers: headers::of_request(parts.headers, content.content_type()),
        };
        match content {
            Content::Json(document) if completes => self.complete(&asked, Completion::new(document)).await,
            content => {
                let count = &self.counts.plain;
                self.answer(&asked, content.into_pieces(), Role::Decode, None, count)
                    .await
            }
        }
    }

    /// Whether a request that came now would be answered.
    fn health(&self) -> Response {
        match self.instances.anybody_up() {
            true => StatusCode::OK.into_response(),
            false => complaint(StatusCode::SERVICE_UNAVAILABLE, "no instance is up"),
        }
    }

    async fn complete(&self, asked: &Asked, completion: Completion) -> Response {
        let mut prefilled = Prefilled::Nobody(None);
        // Without a decode instance, whoever computes the prompt may as well go on.
        if completion.can_be_split() && self.instances.anybody(Role::Decode) && self.instances.knows(Role::Prefill) {
            let prefill = self.instances.next(Role::Prefill, &[]);
            prefilled = match prefill.map(|prefill| (prefill.0.offer(), prefill)) {
                Some((Some(offer), prefill)) => match self.push(asked, &completion, prefill, &offer).await {
                    Some(answer) => return answer,
                    None => self.prefill(asked, &completion, None).await,
                },
                Some((None, prefill)) => self.prefill(asked, &completion, Some(prefill)).await,
                None => Prefilled::Nobody(Some("no prefill instance is up")),
            };
        }
        match prefilled {
            Prefilled::At(instance, origin) => {
                let body = completion.for_decode(Some(origin));
                let from = Some(instance.0.url().to_owned());
                let count = &self.counts.handed_off;
                self.answer(asked, body, Role::Decode, from, count).await
            }
            Prefilled::Nobody(why) => {
                let body = completion.for_decode(why.map(request::without));
                let count = &self.counts.without_prefill;
                self.answer(asked, body, Role::Plain, None, count).await
            }
            Prefilled::Refused(response) => response,
        }
    }

    /// Asks both sides at once, where the prefill side offers to push: the decode side makes room and tells the prefill side where, which
    /// fills it while it computes. `None` where that cannot be, or has failed before the client has seen anything.
    async fn push(&self, asked: &Asked, completion: &Completion, prefill: Assigned, offer: &Offer) -> Option<Response> {
        let decode = self.instances.next(Role::Decode, &[])?;
        let hand_off = name_of_hand_off()?;
        let begun = self
            .both(asked, completion, &hand_off, (&prefill.0, &decode.0), offer)
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
        asked: &Asked,
        completion: &Completion,
        hand_off: &str,
        (prefill, decode): (&Instance, &Instance),
        offer: &Offer,
    ) -> Option<Result<Begun, Response>> {
        // Room should be there when the first layer is computed, so that the decode side is asked first.
        let mut decoding = pin!(self.begun(decode, asked, completion.for_landing(hand_off, offer)));
        let mut prefilling = pin!(self.prefill_at(prefill, asked, completion.for_pushing(hand_off, offer)));
        let mut computed = false;
        loop {
            tokio::select! {
                biased;
                begun = &mut decoding => match begun {
                    Ok(begun) => return Some(Ok(begun)),
                    Err(error) => {
                        note!("decode at {} failed: {error}", decode.url());
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
    async fn begun(&self, instance: &Instance, asked: &Asked, body: Pieces) -> Result<Begun, Unanswered> {
        let begun = async {
            let (head, mut body) = self.ask(instance, asked, body).await?.into_parts();
            if head.status.is_server_error() {
                return Err(Unanswered::Failed(head.status));
            }
            let first = body.frame().await.transpose();
            let first = first.map_err(|error| Unanswered::BrokeOff(error.into()))?;
            Ok(Begun { head, first, body })
        };
        // It is rightly silent while the prompt is computed elsewhere.
        let patience = self.options.patience;
        timeout(patience.prefill + patience.decode, begun)
            .await
            .unwrap_or(Err(Unanswered::Silent))
    }

    /// Asks one prefill instance after the other, until one has computed the prompt.
    async fn prefill(&self, asked: &Asked, completion: &Completion, mut first: Option<Assigned>) -> Prefilled {
        let mut tried = Vec::new();
        while let Some(assigned) = first.take().or_else(|| self.instances.next(Role::Prefill, &tried)) {
            match self.prefill_at(&assigned.0, asked, completion.for_prefill()).await {
                Heard::Computed(Some(origin)) => return Prefilled::At(assigned, origin),
                // It speaks, but not of where its blocks are: then they are of no use.
                Heard::Computed(None) => return Prefilled::Nobody(Some("the prefill instance holds nothing")),
                Heard::Refused(response) => return Prefilled::Refused(response),
                Heard::Nothing => tried.push(Arc::clone(&assigned.0)),
            }
        }
        Prefilled::Nobody(Some("no prefill instance has computed the prompt"))
    }

    /// Has one prefill instance compute the prompt, and takes note of what that says of the instance.
    async fn prefill_at(&self, instance: &Instance, asked: &Asked, body: Pieces) -> Heard {
        let whole = async {
            let (answer, body) = self.ask(instance, asked, body).await?.into_parts();
            if answer.status.is_server_error() {
                return Err(Unanswered::Failed(answer.status));
            }
            let body = Limited::new(body, PREFILL_BYTES_MAX).collect().await;
            Ok((answer, body.map_err(Unanswered::BrokeOff)?.to_bytes()))
        };
        let answered = timeout(self.options.patience.prefill, whole).await;
        match answered.unwrap_or(Err(Unanswered::Silent)) {
            Ok((head, body)) if head.status.is_client_error() => Heard::Refused(response(head, Body::from(body))),
            Ok((_, body)) => {
                let origin = request::origin(body.into());
                // It may be another process than the one that was asked.
                instance.offers(origin.as_deref().and_then(request::offer));
                Heard::Computed(origin)
            }
            Err(error) => {
                note!("prefill at {} failed: {error}", instance.url());
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
        asked: &Asked,
        body: Pieces,
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
                let answer = timeout(self.options.patience.decode, self.ask(&assigned.0, asked, body.clone())).await;
                match answer.unwrap_or(Err(Unanswered::Silent)) {
                    Ok(answer) => {
                        count.fetch_add(1, Ordering::Relaxed);
                        let (head, body) = answer.into_parts();
                        let first = None;
                        return self.hand_back(Begun { head, first, body }, assigned, prefill.as_deref());
                    }
                    Err(error) => {
                        note!("{role} at {} failed: {error}", assigned.0.url());
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
        let idle = self.options.patience.decode;
        let watched = Watched {
            first,
            body,
            idle,
            sleep: Box::pin(tokio::time::sleep(idle)),
            _assigned: assigned,
        };
        let mut response = response(head, Body::new(watched));
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

    async fn ask(&self, instance: &Instance, asked: &Asked, body: Pieces) -> Result<Response<Incoming>, Unanswered> {
        let uri = format!("{}{}", instance.url(), asked.path);
        let mut request = Request::new(body.into_body());
        *request.method_mut() = asked.method.clone();
        *request.uri_mut() = uri.parse().unwrap_or_default();
        *request.headers_mut() = asked.headers.clone();
        Ok(self.client.request(request).await?)
    }

    /// The counts as Prometheus reads them.
    pub fn metrics(&self) -> String {
        let mut text = String::new();
        let mut about = |name: &str, kind: &str, help: &str, values: &[(String, u64)]| {
            writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string takes everything");
            let suffix = if kind == "counter" { "_total" } else { "" };
            for (labels, value) in values {
                writeln!(text, "{name}{suffix}{labels} {value}").expect("a string takes everything");
            }
        };
        let counts = &self.counts;
        let how = [
            ("handed_off", &counts.handed_off),
            ("pushed", &counts.pushed),
            ("without_prefill", &counts.without_prefill),
            ("plain", &counts.plain),
            ("refused", &counts.refused),
            ("unacceptable", &counts.unacceptable),
        ]
        .map(|(how, count)| (format!("{{how=\"{how}\"}}"), count.load(Ordering::Relaxed)));
        about(
            "weft_router_requests",
            "counter",
            "Requests, by how they were answered.",
            &how,
        );
        let up: Vec<_> = self
            .instances
            .present()
            .iter()
            .map(|instance| {
                let labels = format!("{{url=\"{}\",role=\"{}\"}}", instance.url(), instance.role);
                (labels, u64::from(instance.is_up()))
            })
            .collect();
        about("weft_router_instance_up", "gauge", "Whether an instance is up.", &up);
        let crowd = self.guests.crowd();
        let one = |value: u64| [(String::new(), value)];
        about(
            "weft_router_clients",
            "gauge",
            "Clients that are connected.",
            &one(crowd.guests as u64),
        );
        let pushed_out = one(crowd.pushed_out);
        let help = "Clients that had to leave because there was no room for others.";
        about("weft_router_clients_pushed_out", "counter", help, &pushed_out);
        let help = "Bytes of long bodies that are being read or passed on.";
        about("weft_router_body_bytes", "gauge", help, &one(crowd.bytes as u64));
        text
    }
}

/// Nobody else's, also of other routers.
fn name_of_hand_off() -> Option<String> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).ok()?;
    Some(format!("{:032x}", u128::from_le_bytes(random)))
}

fn response(head: axum::http::response::Parts, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = headers::of_answer(head.headers);
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
