//! What a completion is asked for with, on either side.

use std::time::{Duration, Instant};

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::{Document, Pieces};
use super::json::{self, Field, Keys, Kind};

const PARAMETERS: &str = "kv_transfer_params";

/// No offer is believed to be good for longer.
const OFFER_MAX: Duration = Duration::from_secs(3600);

/// What a prefill instance says of itself where it pushes prompts to whoever has made room for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Of what the two sides say to each other; the router only passes it on.
    pub version: u64,
    /// Where its agents are, under a seal that only they and the decode side know.
    pub sealed: String,
    /// When it is too old to be used.
    pub until: Instant,
}

/// The body of a completion that came from a client.
#[derive(Clone, Debug)]
pub struct Completion(Document);

impl Completion {
    pub fn new(document: Document) -> Completion {
        Completion(document)
    }

    /// Whether prefill and decode can be done by two instances: one prompt, and one answer to it.
    pub fn can_be_split(&self) -> bool {
        let many = match self.field("prompt").map(|field| field.kind) {
            // One prompt of tokens, or a list of prompts.
            Some(Kind::Array { of_numbers: true, .. }) => false,
            Some(Kind::Array { items, .. }) => items != 1,
            _ => false,
        };
        let one = |name: &str| {
            self.field(name)
                .is_none_or(|field| field.kind == Kind::Null || self.0.text[field.value.clone()] == *b"1")
        };
        let asks_of_prompt = |name: &str| {
            self.field(name)
                .is_some_and(|field| !matches!(field.kind, Kind::Null | Kind::False))
        };
        // What is asked of the tokens of the prompt themselves is only known where they are computed.
        !many && one("n") && one("best_of") && !asks_of_prompt("echo") && !asks_of_prompt("prompt_logprobs")
    }

    /// What the prefill side is asked: the same prompt, one token, at once.
    pub fn for_prefill(&self) -> Pieces {
        self.one_token(&json!({"do_remote_decode": true, "do_remote_prefill": false}))
    }

    /// The same, where the decode side will say where the prompt is to be pushed.
    pub fn for_pushing(&self, hand_off: &str, offer: &Offer) -> Pieces {
        let push = json!({"version": offer.version, "push": {"hand_off": hand_off}});
        self.one_token(&json!({"do_remote_decode": true, "do_remote_prefill": false, "weft": push}))
    }

    /// What the decode side is asked when its prompt will be pushed: all of it, and who will do that.
    pub fn for_landing(&self, hand_off: &str, offer: &Offer) -> Pieces {
        let push = json!({"version": offer.version, "push": {"hand_off": hand_off, "offer": offer.sealed}});
        let params = json!({"do_remote_prefill": true, "do_remote_decode": false, "weft": push});
        self.for_decode(Some(Bytes::from(params.to_string())))
    }

    /// What the decode side is asked: all of it, with where its prompt is, if that is known.
    pub fn for_decode(&self, origin: Option<Bytes>) -> Pieces {
        let params = origin.map(|origin| (PARAMETERS, origin));
        self.changed(&[], params.into_iter().collect())
    }

    fn one_token(&self, params: &Value) -> Pieces {
        let one = Bytes::from_static(b"1");
        let mut said = vec![
            ("stream", Bytes::from_static(b"false")),
            ("max_tokens", one.clone()),
            (PARAMETERS, Bytes::from(params.to_string())),
        ];
        if self.field("max_completion_tokens").is_some() {
            said.push(("max_completion_tokens", one));
        }
        self.changed(&["stream_options", "min_tokens"], said)
    }

    /// The body without some fields, and with others as they are said here.
    fn changed(&self, without: &[&str], said: Vec<(&'static str, Bytes)>) -> Pieces {
        let Document { text, fields } = &self.0;
        let stays = |field: &&Field| {
            let key = &text[field.key.clone()];
            let named = |name: &str| name.as_bytes() == key;
            !without.iter().any(|name| named(name)) && !said.iter().any(|(name, _)| named(name))
        };
        let mut pieces = Vec::new();
        let mut join = Bytes::from_static(b"{");
        for field in fields.iter().filter(stays) {
            pieces.push(std::mem::replace(&mut join, Bytes::from_static(b",")));
            // From the quote before its key on.
            pieces.push(text.slice(field.key.start - 1..field.value.end));
        }
        for (name, value) in said {
            pieces.push(std::mem::replace(&mut join, Bytes::from_static(b",")));
            pieces.push(Bytes::from(format!("\"{name}\":")));
            pieces.push(value);
        }
        pieces.push(Bytes::from_static(if pieces.is_empty() { b"{}" } else { b"}" }));
        Pieces(pieces)
    }

    fn field(&self, name: &str) -> Option<&Field> {
        let Document { text, fields } = &self.0;
        fields.iter().find(|field| text[field.key.clone()] == *name.as_bytes())
    }
}

/// What the decode side is asked with where it has to compute the prompt, though there are others for that: it counts it, and tells the client.
pub fn without(why: &str) -> Bytes {
    Bytes::from(json!({"weft": {"without": why}}).to_string())
}

/// Where the prefill side says that the prompt is.
pub fn origin(mut answer: Vec<u8>) -> Option<Bytes> {
    let (_, fields) = json::rewrite(&mut answer, Keys::Keep).ok()?;
    let params = fields
        .iter()
        .find(|field| answer[field.key.clone()] == *PARAMETERS.as_bytes() && field.kind == Kind::Object)?;
    Some(Bytes::copy_from_slice(&answer[params.value.clone()]))
}

/// What a prefill instance offers, by what it says of a prompt.
pub fn offer(origin: &[u8]) -> Option<Offer> {
    #[derive(Deserialize)]
    struct Said {
        weft: Words,
    }
    #[derive(Deserialize)]
    struct Words {
        version: u64,
        mode: String,
        offer: String,
        offer_seconds: f64,
    }
    let Said { weft: said } = serde_json::from_slice(origin).ok()?;
    let lasts = Duration::try_from_secs_f64(said.offer_seconds).ok()?.min(OFFER_MAX);
    // Half of it is left to whoever is asked with it.
    (said.mode == "push").then(|| Offer {
        version: said.version,
        sealed: said.offer,
        until: Instant::now() + lasts / 2,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(text: &str) -> Completion {
        let mut bytes = text.as_bytes().to_vec();
        let (len, fields) = json::rewrite(&mut bytes, Keys::LeaveOut).unwrap();
        bytes.truncate(len);
        let text = Bytes::from(bytes);
        Completion::new(Document { text, fields })
    }

    fn text(pieces: &Pieces) -> String {
        String::from_utf8(pieces.0.concat()).unwrap()
    }

    #[test]
    fn what_two_cannot_share_is_not_split() {
        let split = |body: &str| completion(body).can_be_split();
        assert!(split(r#"{"prompt":"a"}"#));
        assert!(split(r#"{"prompt":[1,2,3],"n":1}"#));
        assert!(split(r#"{"prompt":["a"],"n":null,"echo":false}"#));
        assert!(split(r#"{"messages":[]}"#));
        assert!(!split(r#"{"prompt":["a","b"]}"#));
        assert!(!split(r#"{"prompt":[[1],[2]]}"#));
        assert!(!split(r#"{"prompt":[]}"#));
        assert!(!split(r#"{"prompt":"a","n":2}"#));
        assert!(!split(r#"{"prompt":"a","n":"1"}"#));
        assert!(!split(r#"{"prompt":"a","best_of":3}"#));
        assert!(!split(r#"{"prompt":"a","echo":true}"#));
        assert!(!split(r#"{"prompt":"a","prompt_logprobs":0}"#));
    }

    #[test]
    fn both_sides_are_asked_for_the_same_prompt_in_its_own_words() {
        let asked = completion(
            r#"{"prompt":"é\n","max_tokens":7,"kv_transfer_params":{"x":1},"stream":true,"min_tokens":3,"seed":12345678901234567890,"z":{"b":1,"a":2}}"#,
        );
        assert_eq!(
            text(&asked.for_prefill()),
            r#"{"prompt":"é\n","seed":12345678901234567890,"z":{"b":1,"a":2},"stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#
        );
        assert_eq!(
            text(&asked.for_decode(Some(Bytes::from_static(b"{\"o\":1}")))),
            r#"{"prompt":"é\n","max_tokens":7,"stream":true,"min_tokens":3,"seed":12345678901234567890,"z":{"b":1,"a":2},"kv_transfer_params":{"o":1}}"#
        );
        assert_eq!(text(&completion("{}").for_decode(None)), "{}");
        assert_eq!(text(&completion(r#"{"kv_transfer_params":1}"#).for_decode(None)), "{}");
        let chat = completion(r#"{"messages":[],"max_completion_tokens":9}"#);
        assert!(text(&chat.for_prefill()).contains(r#""max_completion_tokens":1"#));
    }

    #[test]
    fn what_prefill_sides_say() {
        let answer = br#"{"id":"x","kv_transfer_params": {"weft": {"version":3, "mode":"push", "offer":"c2VhbGVk", "offer_seconds":300}}}"#;
        let said = origin(answer.to_vec()).unwrap();
        assert_eq!(
            said,
            r#"{"weft":{"version":3,"mode":"push","offer":"c2VhbGVk","offer_seconds":300}}"#
        );
        let offered = offer(&said).unwrap();
        assert_eq!((offered.version, offered.sealed.as_str()), (3, "c2VhbGVk"));
        assert!(offered.until > Instant::now());
        for wrong in [
            r#"{"weft":{"version":3,"mode":"pull","offer":"x","offer_seconds":1}}"#,
            r#"{"weft":{"version":3,"mode":"push","offer":"x","offer_seconds":-1}}"#,
            r#"{"weft":{"version":-3,"mode":"push","offer":"x","offer_seconds":1}}"#,
            r#"{"weft":{"version":3,"mode":"push","offer_seconds":1}}"#,
            r#"{"weft":[]}"#,
            "[]",
        ] {
            assert_eq!(offer(wrong.as_bytes()), None, "{wrong}");
        }
        for wrong in [
            "",
            "{}",
            r#"{"kv_transfer_params":7}"#,
            "[",
            r#"{"kv_transfer_params":null}"#,
        ] {
            assert_eq!(origin(wrong.as_bytes().to_vec()), None, "{wrong}");
        }
    }
}
