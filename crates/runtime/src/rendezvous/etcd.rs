//! Agents that share an etcd cluster.
//!
//! An entry hangs on a lease that its holder keeps alive; when the holder dies, etcd itself takes the entry away. The client
//! library is asynchronous, so one thread per place runs it and the calls here wait for its answers.

mod client;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::entry::{ENTRIES_MAX, Entry, escaped};
use super::{Held, RendezvousError, RendezvousOptions};

pub use client::EtcdError;

use client::{ANSWER_TIME_MAX, Client};
use wire::{
    Compare, Event, KeyValue, PutRequest, RangeRequest, Request as Asked, RequestOp, TxnRequest, WatchCreateRequest,
};

/// Entries that are asked for at once. Few enough that an answer has a bound, whatever others have written there.
const PAGE: usize = 32;
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
        let endpoints = endpoints.to_owned();
        let cluster = worker.run(async move {
            let client = Client::new(&endpoints).map_err(failed(&endpoints))?;
            let cluster = Cluster {
                client,
                endpoints,
                options,
            };
            // Connecting is lazy; asking something tells whether anybody is there.
            cluster.find(&cluster.key("")).await?;
            Ok(cluster)
        })?;
        Ok(Etcd { cluster, worker })
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
        let cluster = self.cluster.clone();
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
    /// Where the entry of a name is kept. Names of two jobs cannot meet, whatever slashes are in either.
    fn key(&self, name: &str) -> String {
        format!("{}{}", self.prefix(), escaped(name))
    }

    /// What the keys of this job, and of no other, begin with.
    fn prefix(&self) -> String {
        format!("/weft/{}/", escaped(&self.options.job))
    }

    /// The first key that no longer begins with `prefix`.
    fn prefix_end(&self) -> Vec<u8> {
        let mut end = self.prefix().into_bytes();
        // The last byte is a slash, and has a successor.
        end.pop();
        end.push(b'/' + 1);
        end
    }

    /// What is kept at a key, if anything is, and the revision of which that is true.
    async fn find(&self, key: &str) -> Result<(Option<KeyValue>, i64), RendezvousError> {
        let asked = self.client.range(one(key)).await;
        let found = asked.map_err(failed(&self.endpoints))?;
        let revision = found.header.map_or(0, |header| header.revision);
        Ok((found.kvs.into_iter().next(), revision))
    }

    /// Puts the entry there under a new lease. A dead holder's entry is waited for, or replaced where the death can be seen.
    async fn take(&self, entry: &Entry) -> Result<i64, RendezvousError> {
        let failed = failed(&self.endpoints);
        let seconds = i64::try_from(self.options.lease.as_secs()).unwrap_or(i64::MAX).max(1);
        let lease = self.client.lease_grant(seconds).await.map_err(&failed)?;
        let key = self.key(&entry.name);
        let patience = Instant::now() + self.options.lease + Duration::from_secs(1);
        let mut seen = 0;
        loop {
            let answer = self.client.txn(put_if_unchanged(&key, seen, entry, lease)).await;
            let answer = answer.map_err(&failed)?;
            if answer.succeeded {
                return Ok(lease);
            }
            let found = answer.responses.into_iter().find_map(|response| response.range);
            seen = 0;
            if let Some(pair) = found.and_then(|found| found.kvs.into_iter().next()) {
                let other = Entry::from_bytes(&pair.value);
                match other.as_ref().and_then(Entry::holder_lives) {
                    Some(false) => {
                        seen = pair.mod_revision;
                        continue;
                    }
                    Some(true) => {}
                    None if Instant::now() < patience => {
                        sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                    None => {}
                }
                let _ = self.client.lease_revoke(lease).await;
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
        loop {
            sleep(interval).await;
            let lease = held.load(Ordering::Acquire);
            // An error is a server that cannot be reached now; the next beat tries again.
            if let Ok(false) = self.client.lease_keep_alive(lease).await {
                match self.take(&entry).await {
                    Ok(lease) => held.store(lease, Ordering::Release),
                    Err(error) => tracing::warn!(name = entry.name, %error, "the name could not be taken again"),
                }
            }
        }
    }

    /// Every entry, in the order of their names, and the revision of which that is true.
    async fn entries(&self) -> Result<(Vec<Entry>, i64), RendezvousError> {
        let (mut entries, mut revision, mut seen) = (Vec::new(), 0, 0);
        let mut from = self.prefix().into_bytes();
        loop {
            let page = RangeRequest {
                key: from,
                range_end: self.prefix_end(),
                limit: PAGE as i64,
                // The pages after the first are of the same moment.
                revision,
            };
            let found = self.client.range(page).await.map_err(failed(&self.endpoints))?;
            seen += found.kvs.len();
            // One value that somebody else put there must not hide the others.
            entries.extend(found.kvs.iter().filter_map(|pair| {
                Entry::from_bytes(&pair.value).filter(|entry| self.key(&entry.name).as_bytes() == pair.key)
            }));
            if revision == 0 {
                revision = found.header.map_or(0, |header| header.revision);
            }
            let last = found.kvs.into_iter().next_back().filter(|_| found.more);
            let Some(last) = last else {
                // Keys are in another order, because they are escaped.
                entries.sort_by(|a: &Entry, b: &Entry| a.name.cmp(&b.name));
                return Ok((entries, revision));
            };
            if seen >= ENTRIES_MAX {
                return Err(RendezvousError::TooMany {
                    place: self.prefix(),
                    max: ENTRIES_MAX,
                });
            }
            from = last.key;
            // The next key after it.
            from.push(0);
        }
    }

    async fn wait_for_change(&self, known: &[Entry], timeout: Duration) -> Result<Vec<Entry>, RendezvousError> {
        let failed = failed(&self.endpoints);
        let end = Instant::now() + timeout.min(TIMEOUT_MAX);
        loop {
            let (entries, revision) = self.entries().await?;
            if entries != known {
                return Ok(entries);
            }
            let watch = WatchCreateRequest {
                key: self.prefix().into_bytes(),
                range_end: self.prefix_end(),
                // From the revision after the one we saw, so that nothing is missed in between.
                start_revision: revision.saturating_add(1),
            };
            let mut changes = self.client.watch(watch).await.map_err(&failed)?;
            loop {
                match timeout_at(end, changes.next()).await {
                    Err(_) => return Ok(entries),
                    Ok(change) => match change.map_err(&failed)? {
                        // That the watch has begun, or goes on.
                        Some(change) if change.events.is_empty() && !change.canceled => {}
                        _ => break,
                    },
                }
            }
        }
    }

    async fn wait_for(&self, name: &str, timeout: Duration) -> Result<Option<Entry>, RendezvousError> {
        let failed = failed(&self.endpoints);
        let key = self.key(name);
        let end = Instant::now() + timeout.min(TIMEOUT_MAX);
        let entry = |bytes: &[u8]| {
            Entry::from_bytes(bytes)
                .filter(|entry| entry.name == name)
                .ok_or_else(|| RendezvousError::BadEntry { place: key.clone() })
        };
        let (now, revision) = self.find(&key).await?;
        if let Some(pair) = now {
            return entry(&pair.value).map(Some);
        }
        if timeout.is_zero() {
            return Ok(None);
        }
        let watch = WatchCreateRequest {
            key: key.clone().into_bytes(),
            range_end: Vec::new(),
            // From the revision after the one we saw, so that nothing is missed in between.
            start_revision: revision.saturating_add(1),
        };
        let mut changes = self.client.watch(watch).await.map_err(&failed)?;
        while let Ok(change) = timeout_at(end, changes.next()).await {
            let Some(change) = change.map_err(&failed)? else { break };
            for event in change.events {
                if let (Event::PUT, Some(pair)) = (event.kind, event.kv) {
                    return entry(&pair.value).map(Some);
                }
            }
        }
        Ok(None)
    }
}

fn one(key: &str) -> RangeRequest {
    RangeRequest {
        key: key.into(),
        limit: 1,
        ..RangeRequest::default()
    }
}

/// Puts an entry where the last change was at revision `seen`, zero if there was nothing; elsewhere tells what is there.
fn put_if_unchanged(key: &str, seen: i64, entry: &Entry, lease: i64) -> TxnRequest {
    let op = |request| vec![RequestOp { request: Some(request) }];
    let unchanged = Compare {
        result: Compare::EQUAL,
        target: Compare::MOD_REVISION,
        key: key.into(),
        mod_revision: Some(seen),
    };
    let put = PutRequest {
        key: key.into(),
        value: entry.to_bytes(),
        lease,
    };
    TxnRequest {
        compare: vec![unchanged],
        success: op(Asked::Put(put)),
        failure: op(Asked::Range(one(key))),
    }
}

fn failed(endpoints: &str) -> impl Fn(EtcdError) -> RendezvousError {
    let endpoints = endpoints.to_owned();
    move |source| RendezvousError::Etcd {
        endpoints: endpoints.clone(),
        source,
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
