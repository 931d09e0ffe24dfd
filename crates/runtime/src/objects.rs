//! Objects in buckets as memory of an agent.

use std::sync::{Arc, Mutex, PoisonError};

use weft_fabric::object::{Bucket, BucketOptions, ObjectError, ObjectMemory, ObjectOptions};
use weft_plan::Place;

use crate::agent::Agent;
use crate::error::Error;
use crate::memory::Memory;
use crate::settings::{Settings, When};

/// Buckets that an agent remembers.
const BUCKETS_MAX: usize = 64;

pub(crate) type Buckets = Mutex<Vec<(String, BucketOptions, Bucket)>>;

impl Agent {
    /// Makes ready to ask for a bucket (`s3://BUCKET`, or `s3://BUCKET/PREFIX`), as the settings of this agent say. Nobody is asked yet.
    pub fn bucket(&self, url: &str) -> Result<Bucket, Error> {
        self.bucket_with(url, BucketOptions::default())
    }

    /// The same; what the options say comes before the settings.
    pub fn bucket_with(&self, url: &str, options: BucketOptions) -> Result<Bucket, Error> {
        let options = or_settings(options, self.settings());
        let mut known = self.buckets().lock().unwrap_or_else(PoisonError::into_inner);
        // Each has a thread and connections, which all who ask for it share.
        if let Some((.., bucket)) = known.iter().find(|(of, with, _)| of == url && *with == options) {
            return Ok(bucket.clone());
        }
        let bucket = Bucket::connect(url, &options)?;
        if known.len() < BUCKETS_MAX {
            known.push((url.to_owned(), options, bucket.clone()));
        }
        Ok(bucket)
    }

    /// Opens an object of a bucket and registers it: [`copy`](Agent::copy) moves bytes between it and memory, of the host or, through the host's, of a device,
    /// a file, or a peer. What is written becomes the object by a copy that [commits](crate::CopyBuilder::commit). See [docs/objects.md]. Where the size is
    /// not said, the call waits for the server.
    ///
    /// [docs/objects.md]: https://github.com/weft-ai/weft/blob/main/docs/objects.md
    pub fn open_object(&self, bucket: &Bucket, name: &str, options: ObjectOptions) -> Result<Memory, Error> {
        self.shared()?;
        let object = ObjectMemory::open(bucket, name, options)?;
        self.give_stage()?;
        self.register_at(Arc::new(object), Place::Object)
    }

    /// The same by its whole address, `s3://BUCKET/NAME`.
    pub fn open_object_at(&self, url: &str, with: BucketOptions, options: ObjectOptions) -> Result<Memory, Error> {
        let wrong = || ObjectError::Url { url: url.to_owned() };
        let rest = url.strip_prefix("s3://").ok_or_else(wrong)?;
        let (bucket, name) = rest.split_once('/').ok_or_else(wrong)?;
        let bucket = self.bucket_with(&format!("s3://{bucket}"), with)?;
        self.open_object(&bucket, name, options)
    }
}

fn or_settings(options: BucketOptions, settings: &Settings) -> BucketOptions {
    let mut all = options;
    all.endpoint = all.endpoint.or_else(|| settings.object_endpoint.clone());
    all.region = all.region.or_else(|| settings.object_region.clone());
    all.ca = all.ca.or_else(|| settings.object_ca.clone());
    all.virtual_host = all.virtual_host.or(match settings.object_virtual_host {
        When::Auto => None,
        When::On => Some(true),
        When::Off => Some(false),
    });
    all.retries = all.retries.or(u32::try_from(settings.object_retries).ok());
    all
}

/// How settings say that buckets are reached.
pub fn bucket_options(settings: &Settings) -> BucketOptions {
    or_settings(BucketOptions::default(), settings)
}
