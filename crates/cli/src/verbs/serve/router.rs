//! `weft serve router`: one address for prefill and decode instances.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::net::TcpListener;
use weft::rendezvous::{Rendezvous, RendezvousOptions};

use crate::complaint::{Complain, Complaint, Exit};
use crate::router::{self, Instance, Instances, Patience, Role};

/// Send prompts to prefill instances and answers to decode instances of an OpenAI-compatible engine
///
/// A prefill instance that offers to push is asked together with the decode instance; from others prompts are fetched.
/// Instances may come and go: GET /weft/instances lists them, POST {"url": …, "role": "prefill"|"decode"|"plain"} adds one, and
/// DELETE /weft/instances?url=… drains one. Whatever fails before the first byte of an answer is done by somebody else.
#[derive(Debug, Args)]
pub struct Router {
    /// An instance that computes prompts, as http://host:8100
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
    /// How long a prompt may take, in seconds
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    prefill_timeout: u64,
    /// How long a decode instance may be silent, in seconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    decode_timeout: u64,
}

impl Router {
    pub fn run(self) -> Result<(), Complaint> {
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
        let options = RendezvousOptions {
            job: self.prefix.clone(),
            ..RendezvousOptions::default()
        };
        let place = match &self.etcd {
            Some(endpoints) => Some(
                Rendezvous::by_etcd(endpoints, options)
                    .or_complain(Exit::Failed, || "Instances cannot be found.".to_owned())?,
            ),
            None => None,
        };
        let patience = Patience {
            prefill: Duration::from_secs(self.prefill_timeout),
            decode: Duration::from_secs(self.decode_timeout),
            health: Duration::from_secs(1),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .or_complain(Exit::Failed, || "The router cannot start.".to_owned())?;
        runtime.block_on(async {
            let listener = TcpListener::bind(self.listen).await;
            let listener = listener.or_complain(Exit::Failed, || format!("{} cannot be listened on.", self.listen))?;
            let address = listener.local_addr().unwrap_or(self.listen);
            eprintln!("Routing at http://{address}");
            let stop = async {
                // Where the signal cannot be heard, the process ends by it.
                let _ = tokio::signal::ctrl_c().await;
            };
            router::serve(listener, Arc::new(Instances::new(instances)), place, patience, stop)
                .await
                .or_complain(Exit::Failed, || "The router has failed.".to_owned())
        })
    }
}
