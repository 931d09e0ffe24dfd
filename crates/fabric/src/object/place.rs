//! An object as memory that an agent registers.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use object_store::MultipartId;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use tokio::sync::OnceCell;
use weft_protocol::memory::Digest;
use weft_protocol::{HostBytes, Memory, Refusal};

use super::bucket::{Bucket, ObjectError};
use super::draft::{Draft, Stage};

/// The least that S3 takes as a part, but for the last.
pub const PART_BYTES_MIN: u64 = 5 << 20;
const PART_BYTES: u64 = 16 << 20;
const PARTS_MAX: u64 = 10_000;
const OBJECT_BYTES_MAX: u64 = 5 << 40;
/// How long opening waits for a server, where it has to ask.
const PATIENCE: Duration = Duration::from_secs(30);

/// How to open an object as a place. The default is one that is there, as long as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectOptions {
    /// How many bytes it has, or is to have; without it the server is asked.
    pub size: Option<u64>,
    pub write: bool,
    /// What goes to the server at once. An object of no more is put as one; a larger one goes part by part, each as soon as all of it has been written.
    pub part_bytes: u64,
}

impl Default for ObjectOptions {
    fn default() -> ObjectOptions {
        ObjectOptions {
            size: None,
            write: true,
            part_bytes: PART_BYTES,
        }
    }
}

impl ObjectOptions {
    /// An object of this many bytes; nobody is asked whether it is there.
    pub fn sized(bytes: u64) -> ObjectOptions {
        let size = Some(bytes);
        ObjectOptions {
            size,
            ..ObjectOptions::default()
        }
    }
    pub fn write(self, write: bool) -> ObjectOptions {
        ObjectOptions { write, ..self }
    }
    pub fn part_bytes(self, part_bytes: u64) -> ObjectOptions {
        ObjectOptions { part_bytes, ..self }
    }
}

/// An object as a place.
///
/// What is written to it is a *draft*, which this agent reads and nobody else; a commit makes it the object, at once and as a whole. What has gone to the server as a
/// part cannot be read before.
pub struct ObjectMemory {
    pub(super) bucket: Bucket,
    pub(super) key: Key,
    name: String,
    len: u64,
    writable: bool,
    draft: Mutex<Draft>,
    upload: Mutex<Arc<Upload>>,
}

/// Parts that are on their way to become an object.
#[derive(Debug, Default)]
pub(super) struct Upload {
    pub(super) id: OnceCell<MultipartId>,
}

impl ObjectMemory {
    /// Opens an object. Where its size is not said the server is asked, and waited for.
    pub fn open(bucket: &Bucket, name: &str, options: ObjectOptions) -> Result<ObjectMemory, ObjectError> {
        let key = bucket.key(name)?;
        let size = match options.size {
            Some(size) => Some(size),
            None => bucket.size(name, PATIENCE)?,
        };
        let len = size
            .filter(|size| *size > 0)
            .ok_or_else(|| ObjectError::Empty { key: name.to_owned() })?;
        if len > OBJECT_BYTES_MAX {
            return Err(ObjectError::TooLarge {
                key: name.to_owned(),
                bytes: len,
                max: OBJECT_BYTES_MAX,
            });
        }
        let least = len.div_ceil(PARTS_MAX).next_multiple_of(1 << 20);
        let part_bytes = options.part_bytes.max(PART_BYTES_MIN).max(least);
        Ok(ObjectMemory {
            bucket: bucket.clone(),
            key,
            name: name.to_owned(),
            len,
            writable: options.write,
            draft: Mutex::new(Draft::of(len, part_bytes)),
            upload: Mutex::default(),
        })
    }

    /// Below the bucket's prefix.
    pub fn name(&self) -> &str {
        &self.name
    }
    pub fn bucket(&self) -> &Bucket {
        &self.bucket
    }
    pub fn is_writable(&self) -> bool {
        self.writable
    }
    /// Forgets what was written and not committed.
    pub fn forget_draft(&self) {
        let upload = std::mem::take(&mut *self.upload.lock().unwrap_or_else(PoisonError::into_inner));
        self.draft().clear();
        self.give_up(&upload);
    }
    /// What a draft has of these bytes is put over them.
    pub fn lay_draft_over(&self, offset: u64, bytes: &mut [u8]) {
        let laid: Result<(), std::convert::Infallible> =
            self.draft().each(offset..offset + bytes.len() as u64, |at, drafted| {
                bytes[(at - offset) as usize..][..drafted.len()].copy_from_slice(drafted);
                Ok(())
            });
        match laid {
            Ok(()) => {}
        }
    }

    pub(super) fn draft(&self) -> MutexGuard<'_, Draft> {
        self.draft.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(super) fn upload(&self) -> Arc<Upload> {
        Arc::clone(&self.upload.lock().unwrap_or_else(PoisonError::into_inner))
    }
    /// The object is made of what was sent: the next parts are another's.
    pub(super) fn next_upload(&self) {
        *self.upload.lock().unwrap_or_else(PoisonError::into_inner) = Arc::default();
    }

    /// Parts that will never be an object cost their owner room at the server until they are given up.
    fn give_up(&self, upload: &Arc<Upload>) {
        let Some(id) = upload.id.get().cloned() else { return };
        if let Ok(inner) = self.bucket.inner() {
            let (bucket, key) = (Arc::clone(inner), self.key.clone());
            inner.spawn(async move {
                let _ = bucket.store.abort_multipart(&key, &id).await;
            });
        }
    }

    /// What is to be sent of a part: its bytes and their generation.
    pub(super) fn begin_sending(&self, nth: u64) -> Option<(Arc<Vec<u8>>, u64)> {
        let mut draft = self.draft();
        let part = draft.part(nth).filter(|part| part.is_whole())?;
        part.stage = Stage::Sending;
        Some((part.bytes(), part.generation))
    }
}

impl Drop for ObjectMemory {
    fn drop(&mut self) {
        let upload = self.upload();
        self.give_up(&upload);
    }
}

impl fmt::Debug for ObjectMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ObjectMemory({}/{}, {} bytes)",
            self.bucket.url(),
            self.name,
            self.len
        )
    }
}

impl Memory for ObjectMemory {
    fn len(&self) -> u64 {
        self.len
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The bytes as whoever opened the object sees them, by requests that wait; what is written makes the object anew, as a whole. A server that fails is a panic here;
/// transfers tell.
impl HostBytes for ObjectMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let end = offset + into.len() as u64;
        let missing = self
            .draft()
            .missing(offset..end)
            .expect("no part of it is at the server only");
        if !missing.is_empty() {
            let asked = self
                .bucket
                .read(&self.name, offset..end, None)
                .expect("a bucket of this process");
            let bytes = asked.wait(PATIENCE).expect("the object can be read");
            into.copy_from_slice(&bytes);
        }
        self.lay_draft_over(offset, into);
    }

    fn write(&self, offset: u64, from: &[u8]) {
        let mut whole = vec![0; self.len as usize];
        if self
            .bucket
            .size(&self.name, PATIENCE)
            .expect("the bucket can be asked")
            .is_some()
        {
            let asked = self
                .bucket
                .read(&self.name, 0..self.len, None)
                .expect("a bucket of this process");
            let there = asked.wait(PATIENCE).expect("the object can be read");
            whole[..there.len()].copy_from_slice(&there);
        }
        self.lay_draft_over(0, &mut whole);
        whole[offset as usize..][..from.len()].copy_from_slice(from);
        let asked = self
            .bucket
            .put(&self.name, whole, None)
            .expect("a bucket of this process");
        asked.wait(PATIENCE).expect("the object can be written");
        self.forget_draft();
    }

    fn digest(&self, offset: u64, len: u64, digest: &mut Digest) -> Result<(), Refusal> {
        let mut bytes = vec![0; len as usize];
        self.read(offset, &mut bytes);
        digest.update(&bytes);
        Ok(())
    }
}
