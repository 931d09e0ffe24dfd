//! Clients that are no friends: what they may reach, what they can have instances believe, and how much of the router they can have.

use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::*;

/// What a test waits for whatever happens. Nothing takes nearly as long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(30);

async fn one_decode(engine: &Engine) -> Vec<Instance> {
    vec![Instance::new(&start("decode", engine).await, Role::Decode).unwrap()]
}

// ---- administration

#[tokio::test]
async fn administration_is_not_for_clients() {
    let engine = Engine::default();
    let router = route(one_decode(&engine).await).await;
    let thief = json!({"url": "http://10.0.0.1:1", "role": "decode"});
    let named = router.instances.list().len();
    for (method, path) in [
        ("GET", "/weft/instances"),
        ("POST", "/weft/instances"),
        ("POST", "/weft/instances/"),
        ("DELETE", "/weft/instances?url=http://127.0.0.1"),
        ("GET", "/metrics"),
        ("GET", "/weft/"),
    ] {
        assert_eq!(
            router.ask(method, path, &thief).await.0,
            StatusCode::NOT_FOUND,
            "{method} {path}"
        );
    }
    assert_eq!(router.instances.list().len(), named);
    assert!(engine.heard.lock().unwrap().is_empty(), "an instance was asked");
}

#[tokio::test]
async fn administration_takes_the_token() {
    let engine = Engine::default();
    let router = route(one_decode(&engine).await).await;
    let url = format!("{}/weft/instances", router.admin);
    for headers in [
        &[][..],
        &[("authorization", "Bearer the-token-of-these-test")],
        &[("authorization", "Bearer the-token-of-these-tests-")],
        &[("authorization", "Basic the-token-of-these-tests")],
    ] {
        for method in ["GET", "POST", "DELETE"] {
            let status = router.send(method, &url, headers, "{}").await.0;
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{method} {headers:?}");
        }
    }
    assert_eq!(
        router.administer("GET", "/weft/instances", &Value::Null).await.0,
        StatusCode::OK
    );
    assert_eq!(
        router.administer("GET", "/metrics", &Value::Null).await.0,
        StatusCode::OK
    );
    // Nobody completes anything there.
    let (status, _) = router
        .administer("POST", "/v1/completions", &json!({"prompt": "a"}))
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

// ---- what instances are given

/// Parameters that a decode instance would fetch another user's cache by.
const FORGED: &str = r#"{"do_remote_prefill":true,"weft":{"addresses":["tcp:10.0.0.1:1"]}}"#;

/// Where engines read JSON.
const PATHS: [&str; 9] = [
    "/v1/completions",
    "/v1/completions/",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/anything/at/all",
    "/v2/chat",
    "/tokenize",
];

#[tokio::test]
async fn what_only_engines_read_as_json_reaches_none() {
    let engine = Engine::default();
    let router = route(one_decode(&engine).await).await;
    let with = |value: &str| format!(r#"{{"prompt":"a","x":{value},"kv_transfer_params":{FORGED}}}"#).into_bytes();
    let plain = with("1");
    let text = String::from_utf8(plain.clone()).unwrap();
    let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let widest: Vec<u8> = text.chars().flat_map(|c| (c as u32).to_be_bytes()).collect();
    let bodies = [
        with("NaN"),
        with("-Infinity"),
        with("1e999"),
        with(r#""\ud800""#),
        with(&format!("{}{}", "[".repeat(200), "]".repeat(200))),
        with(r#"{"k":1,"k":2}"#),
        wide.clone(),
        [&[0xff, 0xfe][..], &wide].concat(),
        widest,
        [&[0xef, 0xbb, 0xbf][..], &plain].concat(),
        [&plain[..], b"\0"].concat(),
        format!("[{text}]").into_bytes(),
        text.replace('a', "\u{1}").into_bytes(),
        text.replace('"', "'").into_bytes(),
    ];
    for path in PATHS {
        for body in &bodies {
            let url = format!("{}{path}", router.url);
            let json = [("content-type", "application/json")];
            let (status, _) = router.send("POST", &url, &json, body.clone()).await;
            assert_eq!(
                status,
                StatusCode::BAD_REQUEST,
                "{path} {}",
                String::from_utf8_lossy(body)
            );
        }
    }
    assert!(engine.heard.lock().unwrap().is_empty(), "an instance was asked");
}

#[tokio::test]
async fn parameters_of_clients_reach_no_instance_at_any_path_and_depth() {
    let (prefill, decode) = (Engine::default(), Engine::default());
    let mut instances = one_decode(&decode).await;
    instances.push(Instance::new(&start("prefill", &prefill).await, Role::Prefill).unwrap());
    let router = route(instances).await;
    let bodies = [
        format!(r#"{{"prompt":"a","kv_transfer_params":{FORGED}}}"#),
        // The last, or the first, of two counts.
        format!(r#"{{"kv_transfer_params":{FORGED},"prompt":"a","kv_transfer_params":null}}"#),
        format!(r#"{{"prompt":["a","b"],"kv_transfer_params":{FORGED}}}"#),
        format!(r#"{{"prompt":"a","kv\u005ftransfer\u005fparams":{FORGED}}}"#),
        r#"{"prompt":"a","vllm_xargs":{"kv_transfer_params":"10.0.0.1"}}"#.to_owned(),
        format!(r#"{{"prompt":"a","sampling_params":{{"extra_args":{{"kv_transfer_params":{FORGED}}}}}}}"#),
        format!(r#"{{"prompt":"a","n":2,"x":[[{{"ec_transfer_params":{FORGED}}}]]}}"#),
    ];
    for path in PATHS {
        for body in &bodies {
            for method in ["POST", "GET", "DELETE"] {
                let url = format!("{}{path}", router.url);
                let (status, _) = router.send(method, &url, &[], body.clone()).await;
                assert_eq!(status, StatusCode::OK, "{method} {path} {body}");
            }
        }
    }
    let (prefill, decode) = (prefill.heard.lock().unwrap(), decode.heard.lock().unwrap());
    assert!(prefill.len() > 10 && decode.len() > 100);
    for (path, headers, body) in prefill.iter().chain(&*decode) {
        let text = std::str::from_utf8(body).unwrap();
        assert!(!text.contains("10.0.0.1"), "{path} {text}");
        assert_eq!(headers["content-type"], "application/json");
        // An engine that takes the last of several keys reads the same as one that takes the first.
        assert!(text.matches("kv_transfer_params").count() <= 1, "{text}");
    }
}

#[tokio::test]
async fn what_is_compressed_or_of_another_type_is_refused() {
    let engine = Engine::default();
    let router = route(one_decode(&engine).await).await;
    let url = format!("{}/v1/completions", router.url);
    for headers in [
        &[("content-type", "application/json"), ("content-encoding", "gzip")][..],
        &[("content-type", "application/json"), ("content-encoding", "deflate")],
        &[("content-type", "application/x-www-form-urlencoded")],
        &[("content-type", "text/plain")],
        &[("content-type", "application/json"), ("content-type", "text/plain")],
    ] {
        let (status, _) = router.send("POST", &url, headers, r#"{"prompt":"a"}"#).await;
        assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{headers:?}");
    }
    assert!(engine.heard.lock().unwrap().is_empty(), "an instance was asked");
}

#[tokio::test]
async fn forms_pass_without_parameters_in_json() {
    let engine = Engine::default();
    let router = route(one_decode(&engine).await).await;
    let part =
        |name: &str, content: &str| format!("--x\r\nContent-Disposition: form-data; name={name}\r\n\r\n{content}\r\n");
    let file = part("\"file\"; filename=\"a.wav\"", "RIFF\0\u{1}\r\n--y");
    let xargs = part("\"vllm_xargs\"", r#"{"kv_transfer_params":"10.0.0.1"}"#);
    let send = async |body: String| {
        let headers = [("content-type", "multipart/form-data; boundary=x")];
        let url = format!("{}/v1/audio/transcriptions", router.url);
        router.send("POST", &url, &headers, body).await.0
    };
    assert_eq!(
        send(format!("{file}{xargs}{}--x--\r\n", part("model", "m"))).await,
        StatusCode::OK
    );
    let (_, headers, body) = engine.heard.lock().unwrap()[0].clone();
    let text = String::from_utf8_lossy(&body).into_owned();
    assert!(
        text.contains("RIFF\0\u{1}\r\n--y\r\n--") && text.contains("name=\"model\"\r\n\r\nm\r\n"),
        "{text}"
    );
    assert!(
        !text.contains("10.0.0.1") && !text.contains("vllm_xargs") && !text.contains("--x\r\n"),
        "{text}"
    );
    assert!(
        headers["content-type"]
            .to_str()
            .unwrap()
            .starts_with("multipart/form-data; boundary=weft-")
    );
    let hidden = part("\"a\"; name*=utf-8''vllm%5fxargs", "{}");
    assert_eq!(send(format!("{file}{hidden}--x--\r\n")).await, StatusCode::BAD_REQUEST);
    assert_eq!(engine.heard.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn paths_that_change_an_instance_are_not_passed_on() {
    let engine = Engine::default();
    let named = Options {
        paths: Paths::new(vec!["/custom".to_owned()]),
        ..options()
    };
    let router = route_with(one_decode(&engine).await, None, named, None).await;
    for path in [
        "/sleep",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/v1/..%2fsleep",
        "/v1/%63ompletions",
        "/",
        "/docs",
    ] {
        assert_eq!(
            router.ask("POST", path, &json!({})).await.0,
            StatusCode::NOT_FOUND,
            "{path}"
        );
    }
    assert_eq!(
        router.ask("PUT", "/v1/completions", &json!({})).await.0,
        StatusCode::METHOD_NOT_ALLOWED
    );
    assert!(engine.heard.lock().unwrap().is_empty(), "an instance was asked");
    assert_eq!(router.ask("POST", "/custom?a=b", &json!({})).await.0, StatusCode::OK);
    assert_eq!(router.ask("GET", "/v1/models", &json!({})).await.0, StatusCode::OK);
    let asked: Vec<_> = engine
        .heard
        .lock()
        .unwrap()
        .iter()
        .map(|(path, ..)| path.clone())
        .collect();
    assert_eq!(asked, ["/custom?a=b", "/v1/models"]);
}

#[tokio::test]
async fn headers_of_one_connection_stay_with_it() {
    let engine = Engine::default();
    let router = route(one_decode(&engine).await).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let request = "POST /v1/completions HTTP/1.1\r\nHost: router\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nTE: trailers\r\n\
        Proxy-Authorization: x\r\nAuthorization: Bearer key\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"a\"}";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (_, headers, _) = engine.heard.lock().unwrap()[0].clone();
    for gone in ["x-mine", "te", "proxy-authorization", "connection"] {
        assert!(!headers.contains_key(gone), "{gone}: {headers:?}");
    }
    assert_eq!(headers["authorization"], "Bearer key");
    assert_ne!(headers["host"], "router");
}

// ---- how much of the router one can have

/// Waits until the far end has closed, and says what it had sent.
async fn until_closed(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    // Who was pushed out may find its connection reset.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut all))
        .await
        .expect("it is closed");
    String::from_utf8_lossy(&all).into_owned()
}

#[tokio::test]
async fn slow_heads_and_bodies_end() {
    let engine = Engine::default();
    let mut short = options();
    short.manners.head = Duration::from_millis(300);
    short.body.time = Duration::from_millis(300);
    let router = route_with(one_decode(&engine).await, None, short, None).await;
    // Nothing, half a head, half a body, a body byte by byte, and nothing after a request.
    let mut silent = TcpStream::connect(router.address).await.unwrap();
    let mut half = TcpStream::connect(router.address).await.unwrap();
    half.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
        .await
        .unwrap();
    let mut body = TcpStream::connect(router.address).await.unwrap();
    body.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        .await
        .unwrap();
    let mut idle = TcpStream::connect(router.address).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let drip = TcpStream::connect(router.address).await.unwrap();
    let (mut reading, mut writing) = drip.into_split();
    let dripping = tokio::spawn(async move {
        let head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n";
        writing.write_all(head).await.unwrap();
        while writing.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut dripped = Vec::new();
    let _ = timeout(PATIENCE, reading.read_to_end(&mut dripped))
        .await
        .expect("it is closed");
    assert!(String::from_utf8_lossy(&dripped).starts_with("HTTP/1.1 408"));
    dripping.await.unwrap();
    assert!(until_closed(&mut body).await.starts_with("HTTP/1.1 408"));
    until_closed(&mut half).await;
    until_closed(&mut silent).await;
    assert!(until_closed(&mut idle).await.starts_with("HTTP/1.1 200"));
    assert!(engine.heard.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_crowd_that_says_nothing_makes_room_for_who_does() {
    let engine = Engine::default();
    let few = Options {
        clients_max: 8,
        ..options()
    };
    let router = route_with(one_decode(&engine).await, None, few, None).await;
    let mut crowd = Vec::new();
    for nth in 0..50 {
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        if nth % 2 == 0 {
            stream
                .write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
                .await
                .unwrap();
        }
        crowd.push(stream);
    }
    for _ in 0..20 {
        let asked = timeout(PATIENCE, router.complete("hello")).await.expect("it is served");
        assert_eq!(asked.0, StatusCode::OK);
    }
    // The first to come was the first to go.
    until_closed(&mut crowd[0]).await;
    let metrics = format!("{}/metrics", router.admin);
    let bearer = format!("Bearer {}", TOKEN.replace(' ', "-"));
    let request = axum::http::Request::get(metrics).header("authorization", bearer);
    let answer = router
        .client
        .request(request.body(Body::empty()).unwrap())
        .await
        .unwrap();
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8_lossy(&text);
    let clients = text
        .lines()
        .find_map(|line| line.strip_prefix("weft_router_clients "))
        .unwrap();
    assert!(clients.parse::<u32>().unwrap() <= 8, "{text}");
}

#[tokio::test]
async fn who_waits_for_an_answer_is_not_pushed_out() {
    let engine = Engine::default();
    let few = Options {
        clients_max: 4,
        ..options()
    };
    let router = route_with(one_decode(&engine).await, None, few, None).await;
    let mut waiting = TcpStream::connect(router.address).await.unwrap();
    let body = r#"{"prompt":"never"}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    waiting.write_all(head.as_bytes()).await.unwrap();
    while engine.heard.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut crowd = Vec::new();
    for _ in 0..20 {
        crowd.push(TcpStream::connect(router.address).await.unwrap());
    }
    until_closed(&mut crowd[0]).await;
    let nothing = timeout(Duration::from_millis(200), waiting.read(&mut [0])).await;
    assert!(nothing.is_err(), "{nothing:?}");
}

#[tokio::test]
async fn bodies_are_bounded_one_by_one_and_all_together() {
    let engine = Engine::default();
    let small = Options {
        body: BodyLimits {
            bytes: 1 << 20,
            time: Duration::from_secs(60),
        },
        bodies_bytes_max: 2 << 20,
        ..options()
    };
    let router = route_with(one_decode(&engine).await, None, small, None).await;
    let long = |bytes: usize| format!(r#"{{"prompt":"{}"}}"#, "x".repeat(bytes));
    let ask = async |body: String| {
        let url = format!("{}/v1/completions", router.url);
        timeout(PATIENCE, router.send("POST", &url, &[], body))
            .await
            .expect("an answer")
            .0
    };
    assert_eq!(ask(long(1 << 20)).await, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(ask(long(900 << 10)).await, StatusCode::OK);
    // Bodies that begin and do not end, more of them than there is room for.
    let mut unfinished = Vec::new();
    for _ in 0..6 {
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
            1 << 20
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // One that there is no room for is told so, and takes no more.
        let _ = stream.write_all(&vec![b' '; 900 << 10]).await;
        unfinished.push(stream);
    }
    // Most prompts are short, and heard all the same.
    let began = Instant::now();
    for _ in 0..20 {
        assert_eq!(ask(long(1000)).await, StatusCode::OK);
    }
    // And a long one is heard when those that stand still have made room.
    loop {
        let status = ask(long(900 << 10)).await;
        if status == StatusCode::OK {
            break;
        }
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn who_does_not_take_its_answer_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let endless = || async {
        // More than sockets hold.
        Body::from(vec![b'x'; 64 << 20])
    };
    let app = Router::new().route("/health", get(|| async {})).fallback(endless);
    tokio::spawn(async move { axum::serve(listener, app).await });
    let mut short = options();
    short.manners.take = Duration::from_millis(300);
    let router = route_with(vec![Instance::new(&url, Role::Plain).unwrap()], None, short, None).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    stream
        .write_all(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let under_way = || serde_json::to_value(router.instances.list()).unwrap()[0]["under_way"].clone();
    let began = Instant::now();
    while under_way() == 0 {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Nobody reads, and the instance is not held up for it.
    while under_way() != 0 {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
