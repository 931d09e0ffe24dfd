//! `weft serve router`: one address for prefill and decode instances.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use weft::rendezvous::{Rendezvous, RendezvousOptions};
use weft_plan::Bytes;

use crate::complaint::{Complain, Complaint, Exit};
use crate::router::{self, BodyLimits, Doors, Instance, Instances, Manners, Options, Paths, Patience, Role, Token};

/// Where the token may be, beside a file.
const TOKEN_VARIABLE: &str = "WEFT_ADMIN_TOKEN";

/// Descriptors that are not of clients and their requests.
const DESCRIPTORS_OURS: u64 = 64;
/// Those of a client: its own connection, and one to an instance of each side.
const DESCRIPTORS_EACH: u64 = 3;
const CLIENTS_MAX: u64 = 2048;

/// Threads that look at long bodies and look names of hosts up.
const HELPERS_MAX: usize = 16;

/// Send prompts to prefill instances and answers to decode instances of an OpenAI-compatible engine
///
/// A prefill instance that offers to push is asked together with the decode instance; from others prompts are fetched.
/// Whatever fails before the first byte of an answer is done by somebody else.
///
/// Instances may come and go. At the address of administration, with the token as `Authorization: Bearer TOKEN`: GET /weft/instances
/// lists them, POST {"url": …, "role": "prefill"|"decode"|"plain"} adds one, DELETE /weft/instances?url=… drains one; GET /metrics is for
/// Prometheus.
#[derive(Debug, Args)]
pub struct Router {
    /// An instance that computes prompts, as http://host:8100 or https://host:8100
    #[arg(long, value_name = "URL")]
    prefill: Vec<String>,
    /// An instance that goes on from there
    #[arg(long, value_name = "URL")]
    decode: Vec<String>,
    /// An instance that does both, for requests that cannot be split or when a side is gone
    #[arg(long, value_name = "URL")]
    plain: Vec<String>,
    /// Find instances that have registered themselves in etcd, as http://host:2379; several with semicolons between them
    #[arg(long, value_name = "ENDPOINTS")]
    etcd: Option<String>,
    /// Under which name they have done so
    #[arg(long, value_name = "NAME", default_value = "default", requires = "etcd")]
    prefix: String,
    /// The address to listen on
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// The address of administration. One that others than this host can reach takes --tls-cert
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8001")]
    admin: SocketAddr,
    /// A file with the token of administration, readable by its owner only; made where it is not there. Without it the token is that of the
    /// variable WEFT_ADMIN_TOKEN, or one that is made up and printed
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// A certificate chain (PEM): with it clients are served over HTTPS, and so is administration
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The certificates that instances at https:// must be signed by (PEM); by default those that the system trusts
    #[arg(long, value_name = "FILE")]
    instance_ca: Option<PathBuf>,
    /// A path beside those of inference to pass on, as /rerank_all; with a slash at its end, all below it
    #[arg(long = "pass", value_name = "PATH")]
    passed: Vec<String>,
    /// Clients that may be connected at a time; by default as many as descriptors allow, up to 2048. For one more, the one that has been
    /// silent for the longest time has to leave
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    clients_max: Option<u64>,
    /// How long the body of a request may be
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    body_max: Bytes,
    /// How long all bodies under way may be together, the first 64 KiB of each not counted
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    bodies_max: Bytes,
    /// How long a client may take for the head of a request, or ask nothing, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86400))]
    head_timeout: u64,
    /// How long a client may take for the body of a request, or to take the next bytes of an answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    body_timeout: u64,
    /// How long a prompt may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    prefill_timeout: u64,
    /// How long a decode instance may be silent, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    decode_timeout: u64,
}

impl Router {
    pub fn run(self) -> Result<(), Complaint> {
        let instances = self.instances()?;
        let place = self.place()?;
        let usage = |error: &dyn std::error::Error| Complaint::new(Exit::Usage, error.to_string());
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Some(router::acceptor(certificate, key).map_err(|error| usage(&error))?),
            _ => None,
        };
        if tls.is_none() && !self.admin.ip().is_loopback() {
            let what = "Who can read the network would read the token of administration: --admin beyond this host takes --tls-cert and --tls-key.";
            return Err(Complaint::new(Exit::Usage, what));
        }
        let (token, made_up) = self.token()?;
        let options = self.options()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .max_blocking_threads(HELPERS_MAX)
            .enable_all()
            .build()
            .or_complain(Exit::Failed, || "The router cannot start.".to_owned())?;
        runtime.block_on(async {
            let doors = Doors {
                clients: listen(self.listen).await?,
                administration: listen(self.admin).await?,
                token,
            };
            let scheme = if tls.is_some() { "https" } else { "http" };
            let at = |listener: &TcpListener, named| listener.local_addr().unwrap_or(named);
            note!("Routing at {scheme}://{}", at(&doors.clients, self.listen));
            let administration = at(&doors.administration, self.admin);
            match made_up {
                Some(text) => note!("Administration at {scheme}://{administration}, token {text}"),
                None => note!("Administration at {scheme}://{administration}"),
            }
            let stop = async {
                // Where the signal cannot be heard, the process ends by it.
                let _ = tokio::signal::ctrl_c().await;
            };
            router::serve(doors, tls, Arc::new(Instances::new(instances)), place, options, stop)
                .await
                .or_complain(Exit::Failed, || "The router has failed.".to_owned())
        })
    }

    fn instances(&self) -> Result<Vec<Instance>, Complaint> {
        let named = [
            (Role::Prefill, &self.prefill),
            (Role::Decode, &self.decode),
            (Role::Plain, &self.plain),
        ];
        let mut instances = Vec::new();
        for (role, urls) in named {
            for url in urls {
                let instance = Instance::new(url, role);
                instances.push(instance.map_err(|error| Complaint::new(Exit::Usage, error.to_string()))?);
            }
        }
        Ok(instances)
    }

    fn place(&self) -> Result<Option<Rendezvous>, Complaint> {
        let options = RendezvousOptions {
            job: self.prefix.clone(),
            ..RendezvousOptions::default()
        };
        let place = self.etcd.as_ref().map(|endpoints| {
            Rendezvous::by_etcd(endpoints, options)
                .or_complain(Exit::Failed, || "Instances cannot be found.".to_owned())
        });
        place.transpose()
    }

    /// The token, and how it reads where nobody else knows it.
    fn token(&self) -> Result<(Token, Option<String>), Complaint> {
        let variable = std::env::var(TOKEN_VARIABLE).ok();
        let token = match (&self.admin_token_file, variable) {
            (Some(path), _) => Token::from_file(path).map(|token| (token, None)),
            (None, Some(text)) => Token::new(&text).map(|token| (token, None)),
            (None, None) => Token::made_up().map(|(token, text)| (token, Some(text))),
        };
        token.map_err(|error| Complaint::new(Exit::Usage, error.to_string()))
    }

    fn options(&self) -> Result<Options, Complaint> {
        let size = |bytes: Bytes, name: &str| {
            usize::try_from(bytes.0)
                .ok()
                .filter(|bytes| (1 << 10..=1 << 40).contains(bytes))
                .ok_or_else(|| Complaint::new(Exit::Usage, format!("{name} is between 1 KiB and 1 TiB.")))
        };
        let body_bytes = size(self.body_max, "--body-max")?;
        if body_bytes > u32::MAX as usize {
            return Err(Complaint::new(Exit::Usage, "--body-max is below 4 GiB."));
        }
        if let Some(wrong) = self.passed.iter().find(|path| !path.starts_with('/')) {
            return Err(Complaint::new(
                Exit::Usage,
                format!("--pass {wrong}: a path begins with a slash."),
            ));
        }
        let instance_tls = router::client(self.instance_ca.as_deref())
            .map_err(|error| Complaint::new(Exit::Usage, error.to_string()))?;
        let (affordable, body_time) = (clients_affordable(), Duration::from_secs(self.body_timeout));
        Ok(Options {
            patience: Patience {
                prefill: Duration::from_secs(self.prefill_timeout),
                decode: Duration::from_secs(self.decode_timeout),
                health: Duration::from_secs(1),
            },
            manners: Manners {
                head: Duration::from_secs(self.head_timeout),
                take: body_time,
            },
            body: BodyLimits {
                bytes: body_bytes,
                time: body_time,
            },
            clients_max: usize::try_from(self.clients_max.unwrap_or(affordable)).unwrap_or(usize::MAX),
            bodies_bytes_max: size(self.bodies_max, "--bodies-max")?,
            paths: Paths::new(self.passed.clone()),
            instance_tls,
        })
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Complaint> {
    let listener = TcpListener::bind(address).await;
    listener.or_complain(Exit::Failed, || format!("{address} cannot be listened on."))
}

/// So many clients have descriptors for all that they need. As many descriptors are taken as the system gives for the asking.
fn clients_affordable() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let descriptors = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    // None means that there is no limit.
    let clients = descriptors.map_or(CLIENTS_MAX, |all| {
        all.saturating_sub(DESCRIPTORS_OURS) / DESCRIPTORS_EACH
    });
    clients.clamp(1, CLIENTS_MAX)
}
