//! TLS from the client to the router, and from the router to its instances.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::*;

/// An authority with a certificate for this host, in a directory of its own that goes with it.
struct Authority {
    directory: PathBuf,
}

impl Authority {
    fn new(name: &str) -> Authority {
        let directory = std::env::temp_dir().join(format!("weft-router-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let own = KeyPair::generate().unwrap();
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let certificate = CertificateParams::new(names).unwrap().signed_by(&own, &issuer).unwrap();
        let authority = Authority { directory };
        std::fs::write(authority.root(), pem("CERTIFICATE", root.der())).unwrap();
        std::fs::write(authority.certificate(), pem("CERTIFICATE", certificate.der())).unwrap();
        std::fs::write(authority.key(), pem("PRIVATE KEY", &own.serialize_der())).unwrap();
        authority
    }
    fn root(&self) -> PathBuf {
        self.directory.join("root.pem")
    }
    fn certificate(&self) -> PathBuf {
        self.directory.join("certificate.pem")
    }
    fn key(&self) -> PathBuf {
        self.directory.join("key.pem")
    }
    fn acceptor(&self) -> TlsAcceptor {
        acceptor(&self.certificate(), &self.key()).unwrap()
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {label}-----\n");
    for chunk in der.chunks(48) {
        for three in chunk.chunks(3) {
            let word = (0..3).fold(0, |word, nth| {
                word << 8 | u32::from(three.get(nth).copied().unwrap_or(0))
            });
            for nth in 0..4 {
                let digit = char::from(DIGITS[(word >> (18 - 6 * nth) & 63) as usize]);
                text.push(if nth <= three.len() { digit } else { '=' });
            }
        }
        text.push('\n');
    }
    text + &format!("-----END {label}-----\n")
}

/// An engine behind TLS.
async fn start_tls(name: &'static str, kept: &Engine, authority: &Authority) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (acceptor, app) = (authority.acceptor(), engine(name, kept));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, app) = (acceptor.clone(), app.clone());
            tokio::spawn(async move {
                // One that does not trust us leaves.
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let service = hyper_util::service::TowerToHyperService::new(app);
                let io = hyper_util::rt::TokioIo::new(stream);
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(io, service)
                    .await;
            });
        }
    });
    format!("https://{address}")
}

/// What a client that trusts an authority is answered.
async fn ask_tls(address: SocketAddr, root: &Path, path: &str, headers: &str) -> std::io::Result<String> {
    let connector = TlsConnector::from(client(Some(root)).unwrap());
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut stream = connector.connect(name, stream).await?;
    let body = r#"{"prompt":"hello"}"#;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn https_from_the_client_through_the_router_to_the_instances() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let (prefill, decode) = (Engine::default(), Engine::default());
    let instances = vec![
        Instance::new(&start_tls("prefill", &prefill, &theirs).await, Role::Prefill).unwrap(),
        Instance::new(&start_tls("decode", &decode, &theirs).await, Role::Decode).unwrap(),
    ];
    let with_tls = Options {
        instance_tls: client(Some(&theirs.root())).unwrap(),
        ..options()
    };
    let router = route_with(instances, None, with_tls, Some(ours.acceptor())).await;
    let answer = ask_tls(router.address, &ours.root(), "/v1/completions", "")
        .await
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        answer.contains(r#""by":"decode""#) && answer.contains(r#""from":"prefill""#),
        "{answer}"
    );
    // A long body goes through TLS in both directions, too.
    let admin: SocketAddr = router.admin.strip_prefix("http://").unwrap().parse().unwrap();
    let refused = ask_tls(admin, &ours.root(), "/weft/instances", "").await.unwrap();
    assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    // A client that trusts somebody else does not ask.
    let error = ask_tls(router.address, &theirs.root(), "/v1/completions", "")
        .await
        .unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    // One that speaks no TLS is not answered.
    let mut plain = TcpStream::connect(router.address).await.unwrap();
    plain
        .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut heard = Vec::new();
    let _ = plain.read_to_end(&mut heard).await;
    assert!(!heard.starts_with(b"HTTP"));
}

#[tokio::test]
async fn an_instance_that_the_wrong_authority_vouches_for_is_not_asked() {
    let (right, wrong) = (Authority::new("right"), Authority::new("wrong"));
    let engine = Engine::default();
    let url = start_tls("decode", &engine, &wrong).await;
    let mut with_tls = options();
    with_tls.instance_tls = client(Some(&right.root())).unwrap();
    let router = route_with(vec![Instance::new(&url, Role::Decode).unwrap()], None, with_tls, None).await;
    assert_eq!(router.complete("hello").await.0, StatusCode::SERVICE_UNAVAILABLE);
    // Nor one whose certificate nobody here knows, by the authorities of the system.
    let router = route(vec![Instance::new(&url, Role::Decode).unwrap()]).await;
    assert_eq!(router.complete("hello").await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert!(engine.heard.lock().unwrap().is_empty());
}

#[test]
fn certificates_that_are_none_are_refused() {
    let authority = Authority::new("files");
    assert!(acceptor(&authority.key(), &authority.key()).is_err());
    assert!(acceptor(&authority.certificate(), &authority.certificate()).is_err());
    assert!(client(Some(&authority.key())).is_err());
    assert!(client(Some(Path::new("/nonexistent"))).is_err());
    // The key of another certificate.
    let other = Authority::new("other");
    assert!(acceptor(&authority.certificate(), &other.key()).is_err());
}
