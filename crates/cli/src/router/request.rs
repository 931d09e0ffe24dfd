//! What a completion is asked for with, on either side.

use serde_json::{Map, Value, json};

/// What a prefill instance says of itself where it pushes prompts to whoever has made room for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Of what the two sides say to each other; the router only passes it on.
    pub version: u64,
    /// Where its agents are.
    pub addresses: Vec<String>,
}

/// The body of a completion that came from a client.
#[derive(Clone, Debug)]
pub struct Completion(Map<String, Value>);

impl Completion {
    /// `None` where the body is no JSON object: then an instance says what is wrong with it.
    pub fn parse(body: &[u8]) -> Option<Completion> {
        serde_json::from_slice(body).ok().map(Completion)
    }

    /// Whether prefill and decode can be done by two instances: one prompt, and one answer to it.
    pub fn can_be_split(&self) -> bool {
        let many = match self.0.get("prompt") {
            Some(Value::Array(items)) => match items.first() {
                // One prompt of tokens, or a list of prompts.
                Some(Value::Number(_)) => false,
                _ => items.len() != 1,
            },
            _ => false,
        };
        let one = |field: &str| self.0.get(field).is_none_or(|n| n.is_null() || n.as_u64() == Some(1));
        let asks_of_prompt = |field: &str| {
            self.0
                .get(field)
                .is_some_and(|v| !v.is_null() && v.as_bool() != Some(false))
        };
        // What is asked of the tokens of the prompt themselves is only known where they are computed.
        !many && one("n") && one("best_of") && !asks_of_prompt("echo") && !asks_of_prompt("prompt_logprobs")
    }

    /// What the prefill side is asked: the same prompt, one token, at once.
    pub fn for_prefill(&self) -> Vec<u8> {
        self.one_token(json!({"do_remote_decode": true, "do_remote_prefill": false}))
    }

    /// The same, where the decode side will say where the prompt is to be pushed.
    pub fn for_pushing(&self, hand_off: &str, offer: &Offer) -> Vec<u8> {
        let push = json!({"version": offer.version, "push": {"hand_off": hand_off}});
        self.one_token(json!({"do_remote_decode": true, "do_remote_prefill": false, "weft": push}))
    }

    /// What the decode side is asked when its prompt will be pushed: all of it, and who will do that.
    pub fn for_landing(&self, hand_off: &str, offer: &Offer) -> Vec<u8> {
        let push = json!({"version": offer.version, "push": {"hand_off": hand_off, "addresses": offer.addresses}});
        self.for_decode(Some(
            json!({"do_remote_prefill": true, "do_remote_decode": false, "weft": push}),
        ))
    }

    fn one_token(&self, params: Value) -> Vec<u8> {
        let mut body = self.0.clone();
        for limit in ["max_tokens", "max_completion_tokens"] {
            if limit == "max_tokens" || body.contains_key(limit) {
                body.insert(limit.to_owned(), json!(1));
            }
        }
        for field in ["stream_options", "min_tokens"] {
            body.remove(field);
        }
        body.insert("stream".to_owned(), json!(false));
        body.insert("kv_transfer_params".to_owned(), params);
        bytes(body)
    }

    /// What the decode side is asked: all of it, with where its prompt is, if that is known.
    pub fn for_decode(&self, origin: Option<Value>) -> Vec<u8> {
        let mut body = self.0.clone();
        match origin {
            Some(origin) => body.insert("kv_transfer_params".to_owned(), origin),
            None => body.remove("kv_transfer_params"),
        };
        bytes(body)
    }
}

/// Where the prefill side says that the prompt is.
pub fn origin(answer: &[u8]) -> Option<Value> {
    let answer: Map<String, Value> = serde_json::from_slice(answer).ok()?;
    let params = answer.get("kv_transfer_params")?;
    params.is_object().then(|| params.clone())
}

/// What a prefill instance offers, by what it says of a prompt.
pub fn offer(origin: &Value) -> Option<Offer> {
    let said = &origin["weft"];
    let addresses: Option<Vec<String>> = said["addresses"]
        .as_array()?
        .iter()
        .map(|address| address.as_str().map(str::to_owned))
        .collect();
    let offer = Offer {
        version: said["version"].as_u64()?,
        addresses: addresses?,
    };
    (said["mode"] == "push" && !offer.addresses.is_empty()).then_some(offer)
}

fn bytes(body: Map<String, Value>) -> Vec<u8> {
    serde_json::to_vec(&Value::Object(body)).expect("JSON that was read can be written")
}
