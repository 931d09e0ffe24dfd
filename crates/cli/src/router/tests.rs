//! The router between real HTTP servers that answer as engines do.

mod hostile;
mod tls;

use std::net::SocketAddr;
use std::sync::Mutex;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::routing::get;
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::*;

const TOKEN: &str = "the token of these tests";

/// An engine that keeps what it was asked.
#[derive(Clone, Default)]
struct Engine {
    asked: Arc<Mutex<Vec<Value>>>,
    /// As it came.
    heard: Arc<Mutex<Vec<(String, HeaderMap, Bytes)>>>,
}

async fn answer(State((name, engine)): State<(&'static str, Engine)>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 8 << 20).await.unwrap();
    let path = parts.uri.to_string();
    engine.heard.lock().unwrap().push((path, parts.headers, body.clone()));
    let asked: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    engine.asked.lock().unwrap().push(asked.clone());
    if asked["prompt"] == "refuse" {
        return complaint(StatusCode::BAD_REQUEST, "no");
    }
    if asked["prompt"] == "fail" && name == "prefill" {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    if asked["prompt"] == "never" {
        std::future::pending::<()>().await;
    }
    if asked["kv_transfer_params"]["do_remote_decode"] == true {
        if asked["prompt"] == "slow" {
            // A prompt that is never computed, until whoever asked has gone.
            std::future::pending::<()>().await;
        }
        let mut weft = json!({"version": 3, "mode": "pull", "origin": name});
        if name == "pushing" {
            weft = json!({"version": 3, "mode": "push", "origin": name, "offer": "sealed", "offer_seconds": 300});
        }
        return Json(json!({"kv_transfer_params": {"do_remote_prefill": true, "weft": weft}})).into_response();
    }
    Json(json!({"by": name, "from": asked["kv_transfer_params"]["weft"]["origin"]})).into_response()
}

fn engine(name: &'static str, engine: &Engine) -> Router {
    Router::new()
        .route("/health", get(|| async {}))
        .fallback(answer)
        .with_state((name, engine.clone()))
}

async fn start(name: &'static str, kept: &Engine) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = engine(name, kept);
    tokio::spawn(async move { axum::serve(listener, app).await });
    format!("http://{address}")
}

struct Running {
    url: String,
    address: SocketAddr,
    admin: String,
    instances: Arc<Instances>,
    client: Client<HttpConnector, Body>,
    _stop: oneshot::Sender<()>,
}

/// As short as a test wants them, and long enough for a crowded machine.
fn options() -> Options {
    Options {
        patience: Patience {
            prefill: Duration::from_secs(5),
            decode: Duration::from_secs(5),
            health: Duration::from_millis(50),
        },
        manners: Manners {
            head: Duration::from_secs(30),
            take: Duration::from_secs(30),
        },
        body: BodyLimits {
            bytes: 4 << 20,
            time: Duration::from_secs(30),
        },
        clients_max: 64,
        bodies_bytes_max: 16 << 20,
        paths: Paths::default(),
        instance_tls: client(None).unwrap(),
    }
}

async fn route(instances: Vec<Instance>) -> Running {
    route_with(instances, None, options(), None).await
}

async fn route_with(
    instances: Vec<Instance>,
    place: Option<Rendezvous>,
    options: Options,
    tls: Option<TlsAcceptor>,
) -> Running {
    let doors = Doors {
        clients: TcpListener::bind("127.0.0.1:0").await.unwrap(),
        administration: TcpListener::bind("127.0.0.1:0").await.unwrap(),
        token: Token::new(&TOKEN.replace(' ', "-")).unwrap(),
    };
    let address = doors.clients.local_addr().unwrap();
    let admin = format!("http://{}", doors.administration.local_addr().unwrap());
    let instances = Arc::new(Instances::new(instances));
    let (stop, stopped) = oneshot::channel();
    let all = Arc::clone(&instances);
    tokio::spawn(serve(doors, tls, all, place, options, async {
        let _ = stopped.await;
    }));
    Running {
        url: format!("http://{address}"),
        address,
        admin,
        instances,
        client: Client::builder(TokioExecutor::new()).build_http(),
        _stop: stop,
    }
}

impl Running {
    async fn ask(&self, method: &str, path: &str, body: &Value) -> (StatusCode, Value) {
        let body = body.to_string();
        let json = [("content-type", "application/json")];
        self.send(method, &format!("{}{path}", self.url), &json, body).await
    }
    /// Asks at the address of administration.
    async fn administer(&self, method: &str, path: &str, body: &Value) -> (StatusCode, Value) {
        let bearer = format!("Bearer {}", TOKEN.replace(' ', "-"));
        let headers = [("content-type", "application/json"), ("authorization", bearer.as_str())];
        self.send(method, &format!("{}{path}", self.admin), &headers, body.to_string())
            .await
    }
    async fn complete(&self, prompt: &str) -> (StatusCode, Value) {
        let body = json!({"prompt": prompt, "max_tokens": 7, "stream": false});
        self.ask("POST", "/v1/completions", &body).await
    }
    async fn send(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> (StatusCode, Value) {
        let mut request = axum::http::Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.client.request(request.body(body.into()).unwrap()).await.unwrap();
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }
}

/// An address at which nobody listens.
async fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[tokio::test]
async fn a_completion_is_prefilled_by_one_and_decoded_by_the_other() {
    let (prefill, decode) = (Engine::default(), Engine::default());
    let instances = vec![
        Instance::new(&start("prefill", &prefill).await, Role::Prefill).unwrap(),
        Instance::new(&start("decode", &decode).await, Role::Decode).unwrap(),
    ];
    let router = route(instances).await;
    let (status, answer) = router.complete("hello").await;
    assert_eq!(
        (status, answer),
        (StatusCode::OK, json!({"by": "decode", "from": "prefill"}))
    );
    let asked = prefill.asked.lock().unwrap()[0].clone();
    assert_eq!((&asked["max_tokens"], &asked["stream"]), (&json!(1), &json!(false)));
    assert_eq!(decode.asked.lock().unwrap()[0]["max_tokens"], 7);
}

#[tokio::test]
async fn whoever_is_gone_is_done_without() {
    let decode = Engine::default();
    let instances = vec![
        Instance::new(&nobody().await, Role::Prefill).unwrap(),
        Instance::new(&nobody().await, Role::Decode).unwrap(),
        Instance::new(&start("decode", &decode).await, Role::Decode).unwrap(),
    ];
    let router = route(instances).await;
    for _ in 0..3 {
        let (status, answer) = router.complete("hello").await;
        assert_eq!(
            (status, answer),
            (StatusCode::OK, json!({"by": "decode", "from": null}))
        );
    }
    // Whoever computes it instead is told why, and so can tell.
    let asked = decode.asked.lock().unwrap();
    let told: Vec<_> = asked
        .iter()
        .map(|asked| &asked["kv_transfer_params"]["weft"]["without"])
        .collect();
    assert!(
        told.iter()
            .all(|why| why.as_str().is_some_and(|why| why.starts_with("no prefill instance"))),
        "{told:?}"
    );
}

#[test]
fn who_misses_one_look_is_up_and_who_misses_two_in_a_row_is_not() {
    let instance = Instance::new("http://127.0.0.1:1", Role::Prefill).unwrap();
    for _ in 0..3 {
        instance.is_slow();
        assert!(instance.is_up());
        instance.seen(true);
    }
    instance.is_slow();
    instance.is_slow();
    assert!(!instance.is_up());
}

#[tokio::test]
async fn a_prefill_that_fails_costs_a_computation_and_one_that_refuses_is_heard() {
    let (prefill, decode) = (Engine::default(), Engine::default());
    let instances = vec![
        Instance::new(&start("prefill", &prefill).await, Role::Prefill).unwrap(),
        Instance::new(&start("decode", &decode).await, Role::Decode).unwrap(),
    ];
    let router = route(instances).await;
    let (status, answer) = router.complete("fail").await;
    assert_eq!((status, answer["by"].as_str()), (StatusCode::OK, Some("decode")));
    let (status, answer) = router.complete("refuse").await;
    assert_eq!(
        (status, answer["error"]["message"].as_str()),
        (StatusCode::BAD_REQUEST, Some("no"))
    );
}

#[tokio::test]
async fn a_prefill_side_that_pushes_is_asked_together_with_the_decode_side() {
    let (prefill, decode) = (Engine::default(), Engine::default());
    let instances = vec![
        Instance::new(&start("pushing", &prefill).await, Role::Prefill).unwrap(),
        Instance::new(&start("decode", &decode).await, Role::Decode).unwrap(),
    ];
    let router = route(instances).await;
    // Nothing is known of it yet, so that the prompt is fetched.
    assert_eq!(router.complete("first").await.1["from"], "pushing");
    assert_eq!(router.complete("second").await.1["by"], "decode");
    let asked = decode.asked.lock().unwrap()[1].clone();
    let push = &asked["kv_transfer_params"]["weft"]["push"];
    assert_eq!(push["offer"], "sealed");
    assert_eq!(asked["kv_transfer_params"]["weft"]["version"], 3);
    let hand_off = push["hand_off"].clone();
    assert!(hand_off.as_str().is_some_and(|name| name.len() == 32));
    // Where the answer is there first, the prefill side may not even have been asked.
    let asked = prefill.asked.lock().unwrap().clone();
    if let Some(asked) = asked.get(1) {
        assert_eq!(asked["kv_transfer_params"]["weft"]["push"]["hand_off"], hand_off);
        assert_eq!(asked["max_tokens"], 1);
    }
    let listed = router.administer("GET", "/weft/instances", &Value::Null).await.1;
    assert_eq!(
        (&listed[0]["pushes"], &listed[1]["pushes"]),
        (&json!(true), &json!(false))
    );
    // The decode side answers without it.
    assert_eq!(router.complete("slow").await.1["by"], "decode");
}

#[tokio::test]
async fn what_is_not_pushed_is_asked_for_again() {
    let (prefill, decode) = (Engine::default(), Engine::default());
    let instances = vec![
        Instance::new(&start("pushing", &prefill).await, Role::Prefill).unwrap(),
        Instance::new(&start("decode", &decode).await, Role::Decode).unwrap(),
    ];
    let router = route(instances).await;
    router.complete("first").await;
    let offer = router.instances.present()[0].offer();
    assert!(offer.is_some());
    router.instances.present()[0].seen(false);
    // It may come back as somebody else.
    assert_eq!(router.instances.present()[0].offer(), None);
    let (status, answer) = router.complete("second").await;
    assert_eq!((status, answer["by"].as_str()), (StatusCode::OK, Some("decode")));
}

#[tokio::test]
async fn instances_are_added_and_drained_while_it_runs() {
    let (first, second) = (Engine::default(), Engine::default());
    let url = start("first", &first).await;
    let router = route(vec![Instance::new(&url, Role::Plain).unwrap()]).await;
    assert_eq!(router.complete("a").await.1["by"], "first");
    let other = start("second", &second).await;
    let (status, _) = router
        .administer("POST", "/weft/instances", &json!({"url": other, "role": "plain"}))
        .await;
    assert_eq!(status, StatusCode::OK);
    let (status, _) = router
        .administer("DELETE", &format!("/weft/instances?url={url}"), &Value::Null)
        .await;
    assert_eq!(status, StatusCode::OK);
    for _ in 0..4 {
        assert_eq!(router.complete("b").await.1["by"], "second");
    }
    // It had nothing left to do, so that it is forgotten with the next look.
    while router.instances.list().len() > 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (status, _) = router
        .administer("POST", "/weft/instances", &json!({"url": "ftp://x", "role": "plain"}))
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

/// Instances that come and go with the names of their agents, wherever these are held.
async fn come_and_go(place: impl Fn() -> Rendezvous) {
    let (first, second) = (Engine::default(), Engine::default());
    let router = route_with(Vec::new(), Some(place()), options(), None).await;
    assert_eq!(router.complete("a").await.0, StatusCode::SERVICE_UNAVAILABLE);
    let (urls, names) = (place(), place());
    let (one, other) = (start("first", &first).await, start("second", &second).await);
    let register = |held: &Rendezvous, url: &str| {
        let name = format!("vllm/2/pull/plain/0/1/{url}");
        held.register(&name, "tcp:127.0.0.1:1", weft::Epoch(1)).unwrap()
    };
    let held = tokio::task::block_in_place(|| register(&urls, &one));
    while router.complete("a").await.1["by"] != "first" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _other = tokio::task::block_in_place(|| register(&names, &other));
    tokio::task::block_in_place(|| drop(held));
    // The one comes, and the other goes, while there is always somebody.
    loop {
        let (status, answer) = router.complete("a").await;
        assert!(status == StatusCode::OK || status == StatusCode::SERVICE_UNAVAILABLE);
        if answer["by"] == "second" && router.instances.list().len() == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_are_found_by_name() {
    come_and_go(|| Rendezvous::in_process("instances are found by name")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_are_found_in_etcd() {
    let options = || weft::rendezvous::RendezvousOptions {
        job: "router".to_owned(),
        lease: Duration::from_secs(1),
    };
    if !weft_testing::has(weft_testing::Need::Etcd) {
        return;
    }
    let port = || {
        std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
    };
    let (url, peers) = (format!("http://{}", port()), format!("http://{}", port()));
    let data = std::env::temp_dir().join(format!("weft-router-etcd-{}", std::process::id()));
    let mut server = std::process::Command::new("etcd")
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
        .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
        .args(["--initial-cluster", &format!("default={peers}"), "--data-dir"])
        .arg(&data)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("etcd starts");
    let place = || {
        tokio::task::block_in_place(|| {
            loop {
                match Rendezvous::by_etcd(&url, options()) {
                    Ok(place) => return place,
                    // It has only just been started.
                    Err(_) => std::thread::sleep(Duration::from_millis(50)),
                }
            }
        })
    };
    come_and_go(place).await;
    server.kill().unwrap();
    server.wait().unwrap();
    std::fs::remove_dir_all(data).unwrap();
}

#[tokio::test]
async fn with_nobody_up_it_says_so() {
    let router = route(vec![Instance::new(&nobody().await, Role::Plain).unwrap()]).await;
    let (status, answer) = router.complete("hello").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer["error"]["message"], "no instance is up");
    assert_eq!(
        router.ask("GET", "/health", &Value::Null).await.0,
        StatusCode::SERVICE_UNAVAILABLE
    );
}

#[tokio::test]
async fn equally_idle_instances_take_turns_and_a_busy_one_is_spared() {
    let engines = [Engine::default(), Engine::default(), Engine::default()];
    let mut instances = Vec::new();
    for (kept, name) in engines.iter().zip(["a", "b", "c"]) {
        instances.push(Instance::new(&start(name, kept).await, Role::Plain).unwrap());
    }
    let router = route(instances).await;
    for _ in 0..9 {
        assert_eq!(router.complete("one after the other").await.0, StatusCode::OK);
    }
    let counts = || engines.each_ref().map(|kept| kept.asked.lock().unwrap().len());
    assert_eq!(counts(), [3, 3, 3]);
    // One has something to do for as long as this test lasts.
    let (address, body) = (router.url.clone(), json!({"prompt": "never"}).to_string());
    let client = router.client.clone();
    let stuck = tokio::spawn(async move {
        let request = axum::http::Request::post(format!("{address}/v1/completions"));
        client.request(request.body(Body::from(body)).unwrap()).await
    });
    while router
        .instances
        .list()
        .iter()
        .all(|said| serde_json::to_value(said).unwrap()["under_way"] == 0)
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for _ in 0..8 {
        assert_eq!(router.complete("beside it").await.0, StatusCode::OK);
    }
    let mut counts = counts();
    counts.sort_unstable();
    assert_eq!(counts, [4, 7, 7]);
    stuck.abort();
}

#[tokio::test]
async fn prefill_sides_take_turns_too() {
    let (one, other, decode) = (Engine::default(), Engine::default(), Engine::default());
    let instances = vec![
        Instance::new(&start("one", &one).await, Role::Prefill).unwrap(),
        Instance::new(&start("other", &other).await, Role::Prefill).unwrap(),
        Instance::new(&start("decode", &decode).await, Role::Decode).unwrap(),
    ];
    let router = route(instances).await;
    for _ in 0..8 {
        assert_eq!(router.complete("hello").await.1["by"], "decode");
    }
    assert_eq!(
        (one.asked.lock().unwrap().len(), other.asked.lock().unwrap().len()),
        (4, 4)
    );
}
