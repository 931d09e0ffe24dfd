//! Whether a bucket is there and lets this process in, by asking it; and what to do where not.

use std::time::{Duration, Instant};

use serde::Serialize;
use weft::settings::Settings;
use weft::{Bucket, ObjectError, Refusal};

/// How long a server may take to answer before it is said not to.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is printed, and what `--json` has.
#[derive(Debug, Serialize)]
pub struct ObjectsReport {
    bucket: String,
    endpoint: Option<String>,
    answered_after_ms: Option<f64>,
    /// Why it cannot be used.
    trouble: Option<String>,
    fix: Option<&'static str>,
}

impl ObjectsReport {
    pub fn probe(url: &str, settings: &Settings) -> ObjectsReport {
        let asked = |bucket: Bucket| {
            let began = Instant::now();
            bucket.probe(PATIENCE).map(|()| began.elapsed())
        };
        let found = Bucket::connect(url, &weft::bucket_options(settings)).and_then(asked);
        let variables = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
        let endpoint = variables.iter().find_map(|variable| std::env::var(variable).ok());
        ObjectsReport {
            bucket: url.to_owned(),
            endpoint: settings.object_endpoint.clone().or(endpoint),
            answered_after_ms: found.as_ref().ok().map(|took| took.as_secs_f64() * 1e3),
            trouble: found.as_ref().err().map(ToString::to_string),
            fix: found.as_ref().err().and_then(fix),
        }
    }

    /// Lines, each indented by two.
    pub fn text(&self) -> String {
        let who = self.endpoint.as_deref().unwrap_or("Amazon, since no endpoint is named");
        let mut lines = vec![match self.answered_after_ms {
            Some(took) => format!(
                "{}: answered after {took:.1} ms, and lets this process in ({who})",
                self.bucket
            ),
            None => format!("{}: cannot be used ({who})", self.bucket),
        }];
        lines.extend(self.trouble.clone());
        lines.extend(self.fix.map(str::to_owned));
        lines.iter().map(|line| format!("  {line}\n")).collect()
    }
}

fn fix(error: &ObjectError) -> Option<&'static str> {
    match error.refusal()? {
        Refusal::Denied => Some(
            "give other credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials; and look at the region",
        ),
        Refusal::NoContainer => Some(
            "make the bucket, or look at its name, and at whether it belongs into the host's name (object.virtual_host)",
        ),
        Refusal::NotReached => Some("start the server, or name another one: object.endpoint, or AWS_ENDPOINT_URL"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use weft::settings::Sources;

    use super::*;

    #[test]
    fn a_bucket_that_nobody_serves_is_said_to_be_so_with_what_to_do() {
        // A port of this machine that nobody listens on: it was bound, and is not any more.
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr());
        let endpoint = format!("http://{}", free.expect("a port"));
        let sources = Sources::default()
            .set("object.endpoint", &endpoint)
            .set("object.retries", "0");
        let settings = Settings::from_sources(&sources).expect("valid");
        let report = ObjectsReport::probe("s3://blocks", &settings);
        assert!(report.trouble.is_some() && report.answered_after_ms.is_none());
        let report = ObjectsReport::probe("blocks", &settings);
        assert!(report.text().contains("s3://BUCKET"), "{}", report.text());
    }
}
