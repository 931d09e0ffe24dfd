//! Agents that share an etcd cluster.
//!
//! An entry hangs on a lease that its holder keeps alive; when the holder dies, etcd itself takes the entry away. The client
//! library is asynchronous, so one thread per place runs it and the calls here wait for its answers.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use etcd_client::{Client, Compare, CompareOp, ConnectOptions, GetOptions, PutOptions, Txn, TxnOp, WatchOptions};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::entry::{ENTRIES_MAX, Entry};
use super::{Held, RendezvousError, RendezvousOptions};

const PREFIX: &str = "/weft";
/// How long one exchange with the server may take.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// Whoever waits longer waits for ever; the clock would not take more.
const TIMEOUT_MAX: Duration = Duration::from_secs(1 << 30);

/// The names of one job in an etcd cluster.
#[derive(Debug)]
pub(super) struct Etcd {
    cluster: Cluster,
    worker: Worker,
}

#[derive(Clone)]
struct Cluster {
    client: Client,
    endpoints: String,
    options: RendezvousOptions,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cluster({})", self.endpoints)
    }
}

#[derive(Debug)]
pub(super) struct EtcdHold {
    requests: UnboundedSender<Request>,
    keeper: AbortHandle,
    cluster: Cluster,
    lease: Arc<AtomicI64>,
}

impl Held for EtcdHold {}

impl Etcd {
    pub(super) fn connect(endpoints: &str, options: RendezvousOptions) -> Result<Etcd, RendezvousError> {
        let worker = Worker::start()?;
        let urls: Vec<String> = endpoints.split(';').map(|url| url.trim().to_owned()).collect();
        let named = endpoints.to_owned();
        let client = worker.run(async move {
            let connect = ConnectOptions::new()
                .with_connect_timeout(ANSWER_TIME_MAX)
                .with_timeout(ANSWER_TIME_MAX);
            let mut client = Client::connect(urls, Some(connect)).await.map_err(failed(&named))?;
            // Connecting is lazy; asking something tells whether anybody is there.
            client.get(PREFIX, None).await.map_err(failed(&named))?;
            Ok(client)
        })?;
        Ok(Etcd {
            cluster: Cluster {
                client,
                endpoints: endpoints.to_owned(),
                options,
            },
            worker,
        })
    }

    pub(super) fn register(&self, entry: &Entry) -> Result<EtcdHold, RendezvousError> {
        let (cluster, entry) = (self.cluster.clone(), entry.clone());
        let requests = self.worker.requests.clone();
        let lease_id = Arc::new(AtomicI64::new(0));
        let held = Arc::clone(&lease_id);
        let keeper = self.worker.run(async move {
            let lease = cluster.take(&entry).await?;
            held.store(lease, Ordering::Release);
            Ok(tokio::spawn(cluster.keep(entry, held)).abort_handle())
        })?;
        Ok(EtcdHold {
            requests,
            keeper,
            cluster: self.cluster.clone(),
            lease: lease_id,
        })
    }

    pub(super) fn lookup(&self, name: &str, timeout: Duration) -> Result<Option<Entry>, RendezvousError> {
        let (cluster, name) = (self.cluster.clone(), name.to_owned());
        self.worker.run(async move { cluster.wait_for(&name, timeout).await })
    }

    pub(super) fn list(&self) -> Result<Vec<Entry>, RendezvousError> {
        let cluster = self.cluster.clone();
        self.worker.run(async move { Ok(cluster.entries().await?.0) })
    }

    pub(super) fn list_changed(&self, known: &[Entry], timeout: Duration) -> Result<Vec<Entry>, RendezvousError> {
        let (cluster, known) = (self.cluster.clone(), known.to_vec());
        self.worker
            .run(async move { cluster.wait_for_change(&known, timeout).await })
    }
}

impl Drop for EtcdHold {
    fn drop(&mut self) {
        self.keeper.abort();
        let lease = self.lease.load(Ordering::Acquire);
        let mut cluster = self.cluster.clone();
        let (done, wait) = sync_channel(1);
        let revoke = async move {
            // The entry hangs on our lease alone, so this takes away ours and nobody else's.
            let _ = cluster.client.lease_revoke(lease).await;
            let _ = done.send(());
        };
        if self.requests.send(Box::pin(revoke)).is_ok() {
            // If etcd does not answer, the lease ends by itself.
            let _ = wait.recv_timeout(ANSWER_TIME_MAX);
        }
    }
}

impl Cluster {
    fn key(&self, name: &str) -> String {
        format!("{PREFIX}/{}/{name}", self.options.job)
    }

    /// Puts the entry there under a new lease. A dead holder's entry is waited for, or replaced where the death can be seen.
    async fn take(&self, entry: &Entry) -> Result<i64, RendezvousError> {
        let mut client = self.client.clone();
        let failed = failed(&self.endpoints);
        let seconds = i64::try_from(self.options.lease.as_secs()).unwrap_or(i64::MAX).max(1);
        let lease = client.lease_grant(seconds, None).await.map_err(&failed)?.id();
        let key = self.key(&entry.name);
        let patience = Instant::now() + self.options.lease + Duration::from_secs(1);
        let mut seen = 0;
        loop {
            let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, seen);
            let put = TxnOp::put(
                key.as_str(),
                entry.to_bytes(),
                Some(PutOptions::new().with_lease(lease)),
            );
            let attempt = Txn::new()
                .when([unchanged])
                .and_then([put])
                .or_else([TxnOp::get(key.as_str(), None)]);
            let answer = client.txn(attempt).await.map_err(&failed)?;
            if answer.succeeded() {
                return Ok(lease);
            }
            let holder = answer.op_responses().into_iter().find_map(|response| match response {
                etcd_client::TxnOpResponse::Get(found) => found.kvs().first().cloned(),
                _ => None,
            });
            seen = 0;
            if let Some(pair) = holder {
                let other = Entry::from_bytes(pair.value());
                match other.as_ref().and_then(Entry::holder_lives) {
                    Some(false) => {
                        seen = pair.mod_revision();
                        continue;
                    }
                    Some(true) => {}
                    None if Instant::now() < patience => {
                        sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                    None => {}
                }
                let _ = client.lease_revoke(lease).await;
                return Err(match other {
                    Some(other) => RendezvousError::NameTaken {
                        name: entry.name.clone(),
                        holder: other.address,
                    },
                    None => RendezvousError::BadEntry { place: key },
                });
            }
        }
    }

    /// Keeps the lease alive, and takes the name again if etcd has let it go: a process may sleep longer than its lease.
    async fn keep(self, entry: Entry, held: Arc<AtomicI64>) {
        let interval = self.options.lease / 3;
        let mut client = self.client.clone();
        loop {
            sleep(interval).await;
            let lease = held.load(Ordering::Acquire);
            let alive = async {
                let (mut keeper, mut answers) = client.lease_keep_alive(lease).await?;
                keeper.keep_alive().await?;
                Ok::<_, etcd_client::Error>(answers.message().await?.is_some_and(|answer| answer.ttl() > 0))
            };
            // An error is a server that cannot be reached now; the next beat tries again.
            if let Ok(false) = alive.await {
                match self.take(&entry).await {
                    Ok(lease) => held.store(lease, Ordering::Release),
                    Err(error) => tracing::warn!(name = entry.name, %error, "the name could not be taken again"),
                }
            }
        }
    }

    /// Every entry, in the order of their names, and the revision of which that is true.
    async fn entries(&self) -> Result<(Vec<Entry>, i64), RendezvousError> {
        let options = GetOptions::new().with_prefix().with_limit(ENTRIES_MAX as i64);
        let mut client = self.client.clone();
        let asked = client.get(self.key(""), Some(options)).await;
        let found = asked.map_err(failed(&self.endpoints))?;
        // One value that somebody else put there must not hide the others.
        let entry = |pair: &etcd_client::KeyValue| {
            Entry::from_bytes(pair.value()).filter(|entry| self.key(&entry.name).as_bytes() == pair.key())
        };
        let revision = found.header().map_or(0, |header| header.revision());
        Ok((found.kvs().iter().filter_map(entry).collect(), revision))
    }

    async fn wait_for_change(&self, known: &[Entry], timeout: Duration) -> Result<Vec<Entry>, RendezvousError> {
        let failed = failed(&self.endpoints);
        let end = Instant::now() + timeout.min(TIMEOUT_MAX);
        loop {
            let (entries, revision) = self.entries().await?;
            if entries != known {
                return Ok(entries);
            }
            // From the revision after the one we saw, so that nothing is missed in between.
            let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
            let mut client = self.client.clone();
            let mut changes = client.watch(self.key(""), Some(options)).await.map_err(&failed)?;
            loop {
                match timeout_at(end, changes.message()).await {
                    Err(_) => return Ok(entries),
                    Ok(change) => match change.map_err(&failed)? {
                        // That the watch has begun, or goes on.
                        Some(change) if change.events().is_empty() && !change.canceled() => {}
                        _ => break,
                    },
                }
            }
        }
    }

    async fn wait_for(&self, name: &str, timeout: Duration) -> Result<Option<Entry>, RendezvousError> {
        let mut client = self.client.clone();
        let failed = failed(&self.endpoints);
        let key = self.key(name);
        let end = Instant::now() + timeout.min(TIMEOUT_MAX);
        let entry = |bytes: &[u8]| {
            Entry::from_bytes(bytes)
                .filter(|entry| entry.name == name)
                .ok_or_else(|| RendezvousError::BadEntry { place: key.clone() })
        };
        let now = client.get(key.as_str(), None).await.map_err(&failed)?;
        if let Some(pair) = now.kvs().first() {
            return entry(pair.value()).map(Some);
        }
        if timeout.is_zero() {
            return Ok(None);
        }
        // From the revision after the one we saw, so that nothing is missed in between.
        let next = now.header().map_or(0, |header| header.revision() + 1);
        let options = WatchOptions::new().with_start_revision(next);
        let mut changes = client.watch(key.as_str(), Some(options)).await.map_err(&failed)?;
        while let Ok(change) = timeout_at(end, changes.message()).await {
            let Some(change) = change.map_err(&failed)? else { break };
            for event in change.events() {
                if let (etcd_client::EventType::Put, Some(pair)) = (event.event_type(), event.kv()) {
                    return entry(pair.value()).map(Some);
                }
            }
        }
        Ok(None)
    }
}

fn failed(endpoints: &str) -> impl Fn(etcd_client::Error) -> RendezvousError {
    let endpoints = endpoints.to_owned();
    move |source| RendezvousError::Etcd {
        endpoints: endpoints.clone(),
        source: Box::new(source),
    }
}

type Request = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// The thread that the asynchronous client lives on.
#[derive(Debug)]
struct Worker {
    requests: UnboundedSender<Request>,
}

impl Worker {
    fn start() -> Result<Worker, RendezvousError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(RendezvousError::Thread)?;
        let (requests, mut queue) = unbounded_channel::<Request>();
        let work = move || {
            runtime.block_on(async move {
                while let Some(request) = queue.recv().await {
                    tokio::spawn(request);
                }
            });
        };
        // It ends when the last handle and the last registration are gone.
        std::thread::Builder::new()
            .name("weft-etcd".to_owned())
            .spawn(work)
            .map_err(RendezvousError::Thread)?;
        Ok(Worker { requests })
    }

    fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = Result<T, RendezvousError>> + Send + 'static,
    ) -> Result<T, RendezvousError> {
        let (answer, wait): (SyncSender<_>, _) = sync_channel(1);
        let request = async move {
            let _ = answer.send(future.await);
        };
        // The thread lives as long as this handle and answers everything it is asked, unless it panicked.
        let gone = || RendezvousError::Thread(std::io::ErrorKind::BrokenPipe.into());
        self.requests.send(Box::pin(request)).map_err(|_| gone())?;
        wait.recv().map_err(|_| gone())?
    }
}
