//! A bucket, or what is below a prefix of one: who is asked, as whom, and by what thread.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, Certificate, ClientOptions, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload,
    RetryConfig,
};
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio_stream::StreamExt;
use weft_protocol::{Failure, Refusal};

use super::credentials;
use super::told::{Told, told};
use crate::fork::{Forked, OfProcess};

/// Names that a listing tells at most.
const LISTED_MAX: usize = 1 << 20;
const SCHEME: &str = "s3://";

/// How to reach a bucket. The default is what the environment says (`AWS_…`), as for every other program that speaks S3.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketOptions {
    /// `http://host:port` or `https://host`; without it `AWS_ENDPOINT_URL`, and else Amazon's.
    pub endpoint: Option<String>,
    pub region: Option<String>,
    /// The key's name, and the key. Without them: the environment, the shared credentials file, a web identity, a container's or a machine's own.
    pub credentials: Option<(String, SecretKey)>,
    /// The bucket is part of the host's name. Servers of one's own mostly want it in the path, which is the default where an endpoint is given.
    pub virtual_host: Option<bool>,
    /// Authorities (PEM) that are trusted beside the system's.
    pub ca: Option<PathBuf>,
    /// How often a request that failed for a reason that passes is made again, within the deadline.
    pub retries: Option<u32>,
}

impl BucketOptions {
    pub fn endpoint(self, endpoint: impl Into<String>) -> BucketOptions {
        let endpoint = Some(endpoint.into());
        BucketOptions { endpoint, ..self }
    }
    pub fn region(self, region: impl Into<String>) -> BucketOptions {
        let region = Some(region.into());
        BucketOptions { region, ..self }
    }
    pub fn credentials(self, name: impl Into<String>, key: impl Into<String>) -> BucketOptions {
        let credentials = Some((name.into(), SecretKey(key.into())));
        BucketOptions { credentials, ..self }
    }
    pub fn virtual_host(self, virtual_host: bool) -> BucketOptions {
        let virtual_host = Some(virtual_host);
        BucketOptions { virtual_host, ..self }
    }
    pub fn ca(self, ca: impl Into<PathBuf>) -> BucketOptions {
        let ca = Some(ca.into());
        BucketOptions { ca, ..self }
    }
    pub fn retries(self, retries: u32) -> BucketOptions {
        let retries = Some(retries);
        BucketOptions { retries, ..self }
    }
}

/// A key that is not printed.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretKey(pub String);

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Why a bucket or an object is no place: fix the call, or what serves it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ObjectError {
    #[error("{url:?} is not the address of a bucket: s3://BUCKET or s3://BUCKET/PREFIX")]
    Url { url: String },
    #[error("{key:?} is not the name of an object: {why}")]
    Key { key: String, why: String },
    #[error("authorities cannot be read from {}: {source}", path.display())]
    Ca { path: PathBuf, source: io::Error },
    #[error("the bucket cannot be reached like this: {why}")]
    Options { why: String },
    #[error("{key} is empty, or not there: say how many bytes it should have")]
    Empty { key: String },
    #[error("{key} cannot have {bytes} bytes: an object has {max} at most")]
    TooLarge { key: String, bytes: u64, max: u64 },
    /// What the server said, in its words.
    #[error("{step} {name}: {refusal} ({words})")]
    Refused {
        step: &'static str,
        name: String,
        refusal: Refusal,
        words: String,
    },
    #[error("{step} {name}: no answer came within {after:?}")]
    Late {
        step: &'static str,
        name: String,
        after: Duration,
    },
    #[error("starting the thread of objects: {0}")]
    Thread(io::Error),
    #[error(transparent)]
    Forked(#[from] Forked),
}

impl ObjectError {
    /// What it means, if it was the server that said no.
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            ObjectError::Refused { refusal, .. } => Some(*refusal),
            ObjectError::Late { .. } => Some(Refusal::NotReached),
            _ => None,
        }
    }
}

/// An object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Below the bucket's prefix.
    pub key: String,
    pub bytes: u64,
}

/// A bucket, or what is below a prefix of one. Clones are the same one.
#[derive(Clone)]
pub struct Bucket {
    inner: OfProcess<Arc<Inner>>,
}

pub(super) struct Inner {
    pub store: AmazonS3,
    url: String,
    prefix: String,
    worker: Worker,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bucket({})", self.url())
    }
}

impl Bucket {
    /// Makes ready to ask for a bucket, by its address. Nothing is asked yet: [`probe`](Bucket::probe) does.
    pub fn connect(url: &str, options: &BucketOptions) -> Result<Bucket, ObjectError> {
        let rest = url
            .strip_prefix(SCHEME)
            .filter(|rest| !rest.starts_with('/') && !rest.is_empty());
        let rest = rest.ok_or_else(|| ObjectError::Url { url: url.to_owned() })?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/').to_owned();
        // Whoever already has chosen keeps it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = builder(bucket, options)?
            .build()
            .map_err(|error| ObjectError::Options { why: error.to_string() })?;
        let inner = Inner {
            store,
            url: url.trim_end_matches('/').to_owned(),
            prefix,
            worker: Worker::start().map_err(ObjectError::Thread)?,
        };
        Ok(Bucket {
            inner: OfProcess::new(Arc::new(inner)),
        })
    }

    /// Its address.
    pub fn url(&self) -> &str {
        self.inner
            .get()
            .map_or("s3://(of a parent process)", |inner| inner.url.as_str())
    }

    pub(super) fn inner(&self) -> Result<&Arc<Inner>, Forked> {
        self.inner.get()
    }

    /// Where an object of this name is.
    pub(super) fn key(&self, name: &str) -> Result<Key, ObjectError> {
        let inner = self.inner()?;
        let whole = match inner.prefix.as_str() {
            "" => name.to_owned(),
            prefix => format!("{prefix}/{name}"),
        };
        let wrong = |why: String| ObjectError::Key {
            key: name.to_owned(),
            why,
        };
        if name.is_empty() || name.starts_with('/') || name.ends_with('/') || whole.len() > 1024 {
            return Err(wrong("1 to 1024 bytes, with no slash at either end".to_owned()));
        }
        Key::parse(&whole).map_err(|error| wrong(error.to_string()))
    }

    /// Whether it is there, and lets this process in.
    pub fn probe(&self, patience: Duration) -> Result<(), ObjectError> {
        let inner = Arc::clone(self.inner()?);
        let asked = self.ask("asking for", self.url().to_owned(), None, async move {
            let prefix = (!inner.prefix.is_empty()).then(|| Key::from(inner.prefix.as_str()));
            let mut listed = inner.store.list(prefix.as_ref());
            match listed.next().await {
                Some(Err(error)) => Err(error),
                Some(Ok(_)) | None => Ok(()),
            }
        })?;
        asked.wait(patience)
    }

    /// What there is, by name.
    pub fn list(&self, patience: Duration) -> Result<Vec<ListedObject>, ObjectError> {
        let inner = Arc::clone(self.inner()?);
        let asked = self.ask("listing", self.url().to_owned(), None, async move {
            let prefix = (!inner.prefix.is_empty()).then(|| Key::from(inner.prefix.as_str()));
            let mut listed = inner.store.list(prefix.as_ref());
            let mut all = Vec::new();
            while let Some(object) = listed.next().await {
                let object = object?;
                let whole = object.location.as_ref();
                let key = match inner.prefix.as_str() {
                    "" => Some(whole),
                    prefix => whole.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/')),
                };
                if let Some(key) = key
                    && all.len() < LISTED_MAX
                {
                    let (key, bytes) = (key.to_owned(), object.size);
                    all.push(ListedObject { key, bytes });
                }
            }
            Ok(all)
        })?;
        asked.wait(patience)
    }

    /// Bytes of an object; fewer where it ends before.
    pub fn read(&self, name: &str, range: Range<u64>, waker: Option<Waker>) -> Result<Asked<Vec<u8>>, ObjectError> {
        let (inner, key) = (Arc::clone(self.inner()?), self.key(name)?);
        self.ask("reading", key.to_string(), waker, async move {
            let most = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let options = GetOptions::new().with_range(Some(GetRange::Bounded(range)));
            let mut stream = inner.store.get_opts(&key, options).await?.into_stream();
            let mut bytes = Vec::new();
            while let Some(chunk) = stream.next().await {
                let chunk = chunk?;
                let room = most - bytes.len();
                bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
            }
            Ok(bytes)
        })
    }

    /// How many bytes an object has; none where it is not there.
    pub fn size(&self, name: &str, patience: Duration) -> Result<Option<u64>, ObjectError> {
        let (inner, key) = (Arc::clone(self.inner()?), self.key(name)?);
        let asked = self.ask("asking for", key.to_string(), None, async move {
            Ok(inner.store.head(&key).await?.size)
        })?;
        match asked.wait(patience) {
            Ok(size) => Ok(Some(size)),
            Err(error) if error.refusal() == Some(Refusal::NoMemory) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes an object of these bytes.
    pub fn put(&self, name: &str, bytes: Vec<u8>, waker: Option<Waker>) -> Result<Asked<()>, ObjectError> {
        let (inner, key) = (Arc::clone(self.inner()?), self.key(name)?);
        self.ask("writing", key.to_string(), waker, async move {
            inner.store.put(&key, PutPayload::from(bytes)).await?;
            Ok(())
        })
    }

    /// Removes an object; one that is not there is removed already.
    pub fn remove(&self, name: &str, waker: Option<Waker>) -> Result<Asked<()>, ObjectError> {
        let (inner, key) = (Arc::clone(self.inner()?), self.key(name)?);
        self.ask("removing", key.to_string(), waker, async move {
            match inner.store.delete(&key).await {
                // Of a bucket that is not there it is not known whether it comes back with all that was in it.
                Err(error) if told(&error).failure == Refusal::NoMemory.into() => Ok(()),
                ended => ended,
            }
        })
    }

    fn ask<T: Send + 'static>(
        &self,
        step: &'static str,
        name: String,
        waker: Option<Waker>,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<Asked<T>, ObjectError> {
        let answer = Arc::new(Answer::default());
        let told_to = Arc::clone(&answer);
        let task = self.inner()?.spawn(async move {
            let ended = request.await.map_err(|error| told(&error));
            told_to.tell(ended, waker);
        });
        Ok(Asked {
            step,
            name,
            answer,
            task,
        })
    }
}

impl Inner {
    /// Has the thread of this bucket carry something out.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.worker.handle.spawn(work).abort_handle()
    }
}

/// Something that was asked for, and is under way. It is given up when this is dropped.
#[derive(Debug)]
#[must_use = "what nobody waits for is given up"]
pub struct Asked<T> {
    step: &'static str,
    name: String,
    answer: Arc<Answer<T>>,
    task: AbortHandle,
}

struct Answer<T> {
    ended: Mutex<Option<Result<T, Told>>>,
    come: std::sync::Condvar,
    is_ended: AtomicBool,
}

impl<T> Default for Answer<T> {
    fn default() -> Answer<T> {
        Answer {
            ended: Mutex::new(None),
            come: std::sync::Condvar::new(),
            is_ended: AtomicBool::new(false),
        }
    }
}

impl<T> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Answer(ended: {})", self.is_ended.load(Ordering::Relaxed))
    }
}

impl<T> Answer<T> {
    fn tell(&self, ended: Result<T, Told>, waker: Option<Waker>) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
        self.is_ended.store(true, Ordering::Release);
        self.come.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Asked<T> {
    pub fn is_ended(&self) -> bool {
        self.answer.is_ended.load(Ordering::Acquire)
    }

    /// What came of it, once.
    pub fn poll(&self) -> Option<Result<T, ObjectError>> {
        let ended = self.answer.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
        ended.map(|ended| ended.map_err(|told| self.error(told)))
    }

    /// Waits so long at most, and then gives it up.
    pub fn wait(self, patience: Duration) -> Result<T, ObjectError> {
        let ended = self.answer.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .answer
            .come
            .wait_timeout_while(ended, patience, |ended| ended.is_none());
        let (mut ended, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match ended.take() {
            Some(ended) => ended.map_err(|told| self.error(told)),
            None => Err(ObjectError::Late {
                step: self.step,
                name: self.name.clone(),
                after: patience,
            }),
        }
    }

    fn error(&self, told: Told) -> ObjectError {
        let refusal = match told.failure {
            Failure::Refused(refusal) => refusal,
            _ => Refusal::DeviceFailed,
        };
        ObjectError::Refused {
            step: self.step,
            name: self.name.clone(),
            refusal,
            words: told.words,
        }
    }
}

impl<T> Drop for Asked<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn builder(bucket: &str, options: &BucketOptions) -> Result<AmazonS3Builder, ObjectError> {
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_checksum_algorithm(Checksum::CRC64NVME);
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let endpoint = endpoint.iter().find_map(|key| builder.get_config_value(key));
    let is_plain = endpoint
        .as_ref()
        .is_some_and(|endpoint| endpoint.starts_with("http://"));
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    let has_key = builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).is_some();
    match &options.credentials {
        Some((name, key)) => builder = builder.with_access_key_id(name).with_secret_access_key(&key.0),
        None if !has_key => {
            if let Some(found) = credentials::of_file() {
                builder = builder.with_access_key_id(found.name).with_secret_access_key(found.key);
                if let Some(token) = found.token {
                    builder = builder.with_token(token);
                }
            }
        }
        None => {}
    }
    let virtual_host = options.virtual_host.unwrap_or(endpoint.is_none());
    // Over TLS nobody can change what is sent; elsewhere its digest is signed.
    builder = builder
        .with_virtual_hosted_style_request(virtual_host)
        .with_unsigned_payload(!is_plain)
        .with_disable_bulk_delete(true);
    // A request ends by its own deadline, and not by a general one.
    let mut client = ClientOptions::new()
        .with_allow_http(is_plain)
        .with_timeout_disabled()
        .with_connect_timeout(Duration::from_secs(3))
        .with_pool_idle_timeout(Duration::from_secs(30));
    if let Some(path) = &options.ca {
        let unreadable = |source| ObjectError::Ca {
            path: path.clone(),
            source,
        };
        let pem = std::fs::read(path).map_err(unreadable)?;
        let wrong = |error: object_store::Error| unreadable(io::Error::other(error.to_string()));
        for certificate in Certificate::from_pem_bundle(&pem).map_err(wrong)? {
            client = client.with_root_certificate(certificate);
        }
    }
    let retry = RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(2),
            base: 2.0,
        },
        max_retries: options.retries.unwrap_or(4) as usize,
        retry_timeout: Duration::from_secs(20),
    };
    Ok(builder.with_client_options(client).with_retry(retry))
}

/// The thread that the asynchronous client lives on, and no other.
#[derive(Debug)]
struct Worker {
    handle: Handle,
    /// It ends when this is dropped.
    _until: tokio::sync::oneshot::Sender<()>,
}

impl Worker {
    fn start() -> io::Result<Worker> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (until, dropped) = tokio::sync::oneshot::channel::<()>();
        let work = move || {
            let _ = runtime.block_on(dropped);
        };
        std::thread::Builder::new().name("weft-object".to_owned()).spawn(work)?;
        Ok(Worker { handle, _until: until })
    }
}
