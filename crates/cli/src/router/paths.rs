//! Which requests are for instances at all.
//!
//! Engines have more than what clients should reach: they can be put to sleep, given other weights, or told to run something. So a path is passed on
//! when it is known to be one of inference, or when whoever runs the router has named it.

/// Paths that begin so, or are so.
const INFERENCE: [&str; 10] = [
    "/v1/",
    "/v2/",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/embeddings",
    "/version",
];

/// Among those, what changes an instance for all.
const ADMINISTRATION: [&str; 2] = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

/// Completions can be divided among two instances.
const COMPLETIONS: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

#[derive(Clone, Debug, Default)]
pub struct Paths {
    /// Beside the known ones.
    named: Vec<String>,
}

impl Paths {
    pub fn new(named: Vec<String>) -> Paths {
        Paths { named }
    }

    /// The path as instances are asked for it, if they are.
    pub fn passed<'a>(&self, path: &'a str) -> Option<&'a str> {
        let path = path.strip_suffix('/').filter(|path| !path.is_empty()).unwrap_or(path);
        // An engine undoes escapes and dots before it looks, and could find something else than what was looked at here.
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-.:@+~=,".contains(&byte);
        let within = path.strip_prefix('/')?;
        if !path.bytes().all(plain) || within.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return None;
        }
        let named = self.named.iter().any(|known| covers(known, path));
        let inference = INFERENCE.iter().any(|known| covers(known, path)) && !ADMINISTRATION.contains(&path);
        (named || inference).then_some(path)
    }

    pub fn is_completion(path: &str) -> bool {
        COMPLETIONS.contains(&path)
    }
}

/// A name that ends with a slash stands for everything below it.
fn covers(known: &str, path: &str) -> bool {
    match known.ends_with('/') {
        true => path.starts_with(known),
        false => path == known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_inference_pass_and_others_do_not() {
        let paths = Paths::new(vec!["/custom".to_owned(), "/inference/".to_owned()]);
        for (asked, passed) in [
            ("/v1/completions", Some("/v1/completions")),
            ("/v1/completions/", Some("/v1/completions")),
            (
                "/v1/responses/resp_1:2.3-4/cancel",
                Some("/v1/responses/resp_1:2.3-4/cancel"),
            ),
            ("/tokenize", Some("/tokenize")),
            ("/custom", Some("/custom")),
            ("/inference/v1/generate", Some("/inference/v1/generate")),
            ("/", None),
            ("", None),
            ("*", None),
            ("/v1", None),
            ("/metrics", None),
            ("/weft/instances", None),
            ("/weft/instances/", None),
            ("/sleep", None),
            ("/collective_rpc", None),
            ("/v1/load_lora_adapter", None),
            ("/v1/load_lora_adapter/", None),
            ("/customs", None),
            ("/custom/x", None),
            ("//v1/completions", None),
            ("/v1//completions", None),
            ("/v1/../sleep", None),
            ("/v1/./completions", None),
            ("/v1/%63ompletions", None),
            ("/v1/%2e%2e/sleep", None),
            ("/v1/x\\y", None),
            ("/v1/x;y", None),
        ] {
            assert_eq!(paths.passed(asked), passed, "{asked}");
        }
    }
}
