//! What must hold for whatever a client may send as a body. [`crate::harness`] has it for fuzzers.

use axum::body::Bytes;
use serde_json::Value;

use super::json::{self, Keys};
use super::multipart;

/// What a client calls JSON is refused, or is JSON to everybody, means what it did, and says nothing that only routers may say.
pub fn client_json(bytes: &[u8]) {
    let mut text = bytes.to_vec();
    let Ok((len, fields)) = json::rewrite(&mut text, Keys::LeaveOut) else {
        return;
    };
    let text = &text[..len];
    assert!(len <= bytes.len());
    for field in &fields {
        // Between its quotes, and right before its value.
        assert_eq!(text[field.key.start - 1], b'"');
        assert_eq!(text[field.key.end..field.value.start], *b"\":");
    }
    let mut again = text.to_vec();
    let rewritten = json::rewrite(&mut again, Keys::LeaveOut);
    assert_eq!(rewritten, Ok((len, fields)));
    assert_eq!(again, text);
    let meant = match serde_json::from_slice::<Value>(bytes) {
        Ok(meant) => meant,
        // A level less than here, and nothing else.
        Err(error) => return assert!(error.to_string().contains("recursion limit"), "{error}"),
    };
    let written: Value = serde_json::from_slice(text).expect("it was JSON before");
    assert_eq!(written, without_private(meant));
}

fn without_private(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(without_private).collect(),
        Value::Object(fields) => {
            let public = fields.into_iter().filter(|(key, _)| !json::is_private(key.as_bytes()));
            public.map(|(key, value)| (key, without_private(value))).collect()
        }
        other => other,
    }
}

/// What a client calls a form is refused, or comes out with parts of plain names between boundaries that were not in it.
pub fn client_forms(bytes: &[u8]) {
    let body = Bytes::copy_from_slice(bytes);
    let Ok((content_type, pieces)) = multipart::rewrite(&body, "B") else {
        return;
    };
    let fresh = multipart::boundary(content_type.to_str().expect("written here")).expect("one boundary");
    let whole = Bytes::from(pieces.concat());
    let (_, again) = multipart::rewrite(&whole, &fresh).expect("a form to everybody");
    assert_eq!(again.len(), pieces.len());
    // Head, content and end of a line, part by part, and the last boundary.
    for (before, after) in pieces
        .chunks(3)
        .zip(again.chunks(3))
        .filter(|(before, _)| before.len() == 3)
    {
        assert_eq!(before[1..], after[1..]);
        let head = String::from_utf8_lossy(&before[0]).to_ascii_lowercase();
        let head = head.lines().nth(1).expect("the line that names it");
        assert_eq!(
            head.matches("name=\"").count() - head.matches("filename=\"").count(),
            1,
            "{head}"
        );
        assert!(
            !multipart::LEFT_OUT
                .iter()
                .any(|name| head.contains(&format!("; name=\"{name}\"")))
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const JSON: [&str; 5] = [
        r#"{"prompt":"é\n\u0041\ud83d\ude00","max_tokens":7,"kv_transfer_params":{"x":[1,{"y":2}]},"stream":true}"#,
        r#"{ "a" : [ 1 , 2.50 , -0 , 1e-7 , null ] , "vllm_xargs":{"kv_transfer_params":"x","b":{"ec_transfer_params":1}} }"#,
        r#"{"kv\u005ftransfer_params":1,"messages":[{"role":"user","content":"{\"kv_transfer_params\":1}"}]}"#,
        r#"{"a":{"kv_transfer_params":1},"b":{"kv_transfer_params":1,"c":2},"d":{"c":2,"kv_transfer_params":1}}"#,
        "{}",
    ];
    const FORM: &str = "--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--B\r\n\
        Content-Disposition: form-data; name=\"vllm_xargs\"\r\n\r\n{}\r\n--B\r\n\
        Content-Disposition: form-data; name=file; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n\r\n--\r\n--A\r\n--B--\r\n";
    /// What changes the meaning of a text where it stands.
    const MARKS: &[u8] = b"{}[]\",:\\u0dt-.e \x00\x1f\xff\r\n=;B";

    fn changed(sample: &str, changes: &[(prop::sample::Index, prop::sample::Index, u8)]) -> Vec<u8> {
        let mut bytes = sample.as_bytes().to_vec();
        for (at, mark, how) in changes {
            let (at, mark) = (at.index(bytes.len() + 1), MARKS[mark.index(MARKS.len())]);
            match how % 4 {
                0 => bytes.insert(at, mark),
                1 if at < bytes.len() => bytes[at] = mark,
                2 if at < bytes.len() => drop(bytes.remove(at)),
                // A stretch of it once more.
                _ => {
                    let stretch = bytes[at..].iter().copied().take(usize::from(*how)).collect::<Vec<u8>>();
                    bytes.splice(at..at, stretch);
                }
            }
        }
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_json(which in 0..JSON.len(), changes in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index, u8)>(), 0..6)) {
            client_json(&changed(JSON[which], &changes));
        }

        #[test]
        fn any_form(changes in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index, u8)>(), 0..6)) {
            client_forms(&changed(FORM, &changes));
        }

        #[test]
        fn any_bytes(bytes: Vec<u8>) {
            client_json(&bytes);
            client_forms(&bytes);
        }
    }

    #[test]
    fn the_samples_are_what_they_are_for() {
        for sample in JSON {
            let mut text = sample.as_bytes().to_vec();
            let (len, _) = json::rewrite(&mut text, Keys::LeaveOut).expect("it is JSON");
            let left = String::from_utf8_lossy(&text[..len]);
            let quoted = left.replace(r#"\"kv_transfer_params\""#, "");
            assert!(!quoted.contains("transfer_params"), "{left}");
        }
        let (_, pieces) = multipart::rewrite(&Bytes::from_static(FORM.as_bytes()), "B").expect("a form");
        assert_eq!(pieces.len(), 7, "two parts of three, and the end");
    }
}
