//! Forms of several parts, by which engines are given sound: taken apart, and put together anew.
//!
//! Readers of forms differ in what they call the name of a part. So an instance is given nothing that a client has written around its parts: each gets
//! a head of the router's, with a plain name and, for a file, a plain file name, between boundaries of the router's. Parts that engines read
//! parameters in JSON from are left out.

use axum::body::Bytes;
use axum::http::HeaderValue;
use thiserror::Error;

const PARTS_MAX: usize = 128;
const HEAD_BYTES_MAX: usize = 4096;
const NAME_BYTES_MAX: usize = 64;
const FILE_NAME_BYTES_MAX: usize = 128;
const BOUNDARY_BYTES_MAX: usize = 70;

/// Parts from which engines would read what only routers may say.
pub const LEFT_OUT: [&str; 6] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "extra_args",
    "extra_body",
    "sampling_params",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MultipartError {
    #[error("is a form without a boundary")]
    Boundary,
    #[error("is no form of several parts at byte {at}")]
    Shape { at: usize },
    #[error("has a part without a plain name before byte {at}")]
    Name { at: usize },
    #[error("has more than {PARTS_MAX} parts")]
    TooManyParts,
    #[error("cannot be passed on: the system gives no random numbers")]
    NoRandomness,
}

/// The boundary that a content type names.
pub fn boundary(content_type: &str) -> Result<String, MultipartError> {
    let (_, parameters) = content_type.split_once(';').ok_or(MultipartError::Boundary)?;
    let mut found = None;
    for (name, value) in parse_parameters(parameters).ok_or(MultipartError::Boundary)? {
        if name == "boundary" && found.replace(value).is_some() {
            return Err(MultipartError::Boundary);
        }
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(&byte);
    found
        .filter(|text| !text.is_empty() && text.len() <= BOUNDARY_BYTES_MAX && text.bytes().all(plain))
        .ok_or(MultipartError::Boundary)
}

/// A form with the same parts, save those that are left out; and its content type.
pub fn rewrite(body: &Bytes, boundary: &str) -> Result<(HeaderValue, Vec<Bytes>), MultipartError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|_| MultipartError::NoRandomness)?;
    let fresh = format!("weft-{:032x}", u128::from_le_bytes(random));
    let between = format!("--{boundary}");
    let mut at = match body.starts_with(between.as_bytes()) {
        true => between.len(),
        false => return Err(MultipartError::Shape { at: 0 }),
    };
    let mut pieces = Vec::new();
    for parts in 0.. {
        let rest = &body[at..];
        if rest.starts_with(b"--") {
            let end = &rest[2..];
            if !end.is_empty() && end != b"\r\n" {
                return Err(MultipartError::Shape { at: at + 2 });
            }
            break;
        }
        if parts >= PARTS_MAX {
            return Err(MultipartError::TooManyParts);
        }
        if !rest.starts_with(b"\r\n") {
            return Err(MultipartError::Shape { at });
        }
        let head = at + 2;
        let searched = &body[head..body.len().min(head + HEAD_BYTES_MAX)];
        let length = find(searched, b"\r\n\r\n").ok_or(MultipartError::Shape { at: head })?;
        let content = head + length + 4;
        let part = Part::parse(&body[head..head + length]).ok_or(MultipartError::Name { at: content })?;
        let length = find_boundary(&body[content..], between.as_bytes());
        let end = content + length.ok_or(MultipartError::Shape { at: content })?;
        if !LEFT_OUT.iter().any(|name| name.eq_ignore_ascii_case(&part.name)) {
            pieces.push(Bytes::from(part.head(&fresh)));
            pieces.push(body.slice(content..end));
            pieces.push(Bytes::from_static(b"\r\n"));
        }
        at = end + 2 + between.len();
    }
    pieces.push(Bytes::from(format!("--{fresh}--\r\n")));
    let content_type = HeaderValue::from_str(&format!("multipart/form-data; boundary={fresh}"));
    Ok((content_type.map_err(|_| MultipartError::Boundary)?, pieces))
}

/// What the head of a part says, as far as it is passed on.
struct Part {
    name: String,
    file_name: Option<String>,
    content_type: Option<String>,
}

impl Part {
    /// `None` where its name is not plain to see.
    fn parse(head: &[u8]) -> Option<Part> {
        let head = std::str::from_utf8(head).ok()?;
        let (mut disposition, mut content_type) = (None, None);
        for line in head.split("\r\n") {
            let (name, value) = line.split_once(':')?;
            let kept = match name.trim().to_ascii_lowercase().as_str() {
                "content-disposition" => &mut disposition,
                "content-type" => &mut content_type,
                _ => continue,
            };
            if kept.replace(value.trim()).is_some() {
                return None;
            }
        }
        let (kind, parameters) = disposition?.split_once(';')?;
        if !kind.trim().eq_ignore_ascii_case("form-data") {
            return None;
        }
        let (mut name, mut file_name, mut is_file) = (None, None, false);
        for (key, value) in parse_parameters(parameters)? {
            match key.as_str() {
                "name" => {
                    if name.replace(value).is_some() {
                        return None;
                    }
                }
                "filename" => (file_name, is_file) = (Some(value), true),
                // The same in another encoding.
                "filename*" => is_file = true,
                _ => return None,
            }
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.[]".contains(&byte);
        let name =
            name.filter(|name: &String| !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(plain))?;
        let file_name = is_file.then(|| plain_file_name(file_name.as_deref().unwrap_or("file")));
        let printable =
            |text: &&str| text.len() <= NAME_BYTES_MAX && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        Some(Part {
            name,
            file_name,
            content_type: content_type.filter(printable).map(str::to_owned),
        })
    }

    fn head(&self, boundary: &str) -> String {
        let mut head = format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{}\"", self.name);
        if let Some(file_name) = &self.file_name {
            head.push_str(&format!("; filename=\"{file_name}\""));
        }
        if let Some(content_type) = &self.content_type {
            head.push_str(&format!("\r\nContent-Type: {content_type}"));
        }
        head + "\r\n\r\n"
    }
}

fn plain_file_name(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || " ._-".contains(c);
    let name = name.chars().map(|c| if plain(c) { c } else { '_' });
    name.take(FILE_NAME_BYTES_MAX).collect()
}

/// `; name=value` as often as there is one, names in lower case. `None` for what has another form.
fn parse_parameters(text: &str) -> Option<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ';']);
        if rest.is_empty() {
            return Some(found);
        }
        let (name, after) = rest.split_once('=')?;
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => {
                let (value, after) = quoted.split_once('"')?;
                // An escape may mean one thing to us and another to somebody else.
                if value.contains('\\') {
                    return None;
                }
                (value, after)
            }
            None => after.split_at(after.find(';').unwrap_or(after.len())),
        };
        let after = after.trim_start_matches([' ', '\t']);
        if !after.is_empty() && !after.starts_with(';') {
            return None;
        }
        found.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        rest = after;
    }
}

/// Where the line before a boundary ends.
fn find_boundary(body: &[u8], between: &[u8]) -> Option<usize> {
    let mut from = 0;
    // Only ends of lines are compared, so that bytes which are almost a boundary cost no more than others.
    while let Some(found) = find(&body[from..], b"\r\n--") {
        let at = from + found;
        if body[at + 2..].starts_with(between) {
            return Some(at);
        }
        from = at + 2;
    }
    None
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(body: &str) -> Result<String, MultipartError> {
        let (content_type, pieces) = rewrite(&Bytes::copy_from_slice(body.as_bytes()), "B")?;
        let fresh = boundary(content_type.to_str().unwrap()).unwrap();
        let text = String::from_utf8(pieces.concat()).unwrap();
        Ok(text.replace(&fresh, "F"))
    }

    fn part(head: &str, content: &str) -> String {
        format!("--B\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}\r\n")
    }

    #[test]
    fn parts_pass_with_heads_of_our_own() {
        let body = format!(
            "{}{}--B--\r\n",
            part("name=\"model\"", "whisper"),
            part(
                "name=\"file\"; filename=\"a/ü.wav\"\r\nContent-Type: audio/wav\r\nX-Odd: 1",
                "\r\n--\r\n--A\0"
            )
        );
        let expected = "--F\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n\
            --F\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a__.wav\"\r\nContent-Type: audio/wav\r\n\r\n\
            \r\n--\r\n--A\0\r\n--F--\r\n";
        assert_eq!(rewritten(&body).as_deref(), Ok(expected));
        assert_eq!(rewritten("--B--").as_deref(), Ok("--F--\r\n"));
    }

    #[test]
    fn parameters_in_json_are_left_out() {
        for name in ["vllm_xargs", "kv_transfer_params", "VLLM_XARGS", "sampling_params"] {
            let body = format!(
                "{}{}--B--",
                part(&format!("name=\"{name}\""), "{}"),
                part("name=a", "1")
            );
            let expected = "--F\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--F--\r\n";
            assert_eq!(rewritten(&body).as_deref(), Ok(expected), "{name}");
        }
    }

    #[test]
    fn names_that_others_may_read_otherwise_are_refused() {
        for head in [
            "name*=utf-8''vllm%5fxargs",
            "name*0=\"vllm_\"; name*1=\"xargs\"",
            "name=\"a\"; name=\"vllm_xargs\"",
            "name=\"vllm\\_xargs\"",
            "name=\"\"",
            "filename=\"x\"",
            "name=\"a b\"",
            "name=\"ä\"",
            "name=\"a\" name=\"b\"",
            "name=\"a\"\r\nContent-Disposition: form-data; name=\"vllm_xargs\"",
            "name=\"a\"\r\n folded: x\r\nno colon",
        ] {
            let body = format!("{}--B--", part(head, "{}"));
            assert!(matches!(rewritten(&body), Err(MultipartError::Name { .. })), "{head}");
        }
    }

    #[test]
    fn what_is_no_form_is_refused() {
        for body in [
            "",
            "{}",
            "--B",
            "--B\r\n",
            "--B\r\n\r\n",
            "preamble\r\n--B--",
            "--B--\r\nepilogue",
            "--B\nContent-Disposition: form-data; name=a\n\n1\n--B--",
            "--B\r\nContent-Disposition: form-data; name=a\r\n\r\n1",
            "--B\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--Bx--",
        ] {
            assert!(rewritten(body).is_err(), "{body}");
        }
        let many: String = (0..200).map(|_| part("name=a", "1")).collect();
        assert_eq!(rewritten(&(many + "--B--")), Err(MultipartError::TooManyParts));
        let long = part(&format!("name=a; filename=\"{}\"", "x".repeat(5000)), "1") + "--B--";
        assert!(rewritten(&long).is_err());
    }

    #[test]
    fn boundaries() {
        assert_eq!(boundary("multipart/form-data; boundary=a-b").as_deref(), Ok("a-b"));
        assert_eq!(
            boundary("multipart/form-data; charset=x; boundary=\"a b\"").as_deref(),
            Ok("a b")
        );
        for wrong in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=a; boundary=b",
            "multipart/form-data; boundary=\"a",
            "multipart/form-data; boundary=a\"b",
            &format!("multipart/form-data; boundary={}", "x".repeat(71)),
        ] {
            assert_eq!(boundary(wrong), Err(MultipartError::Boundary), "{wrong}");
        }
    }
}
