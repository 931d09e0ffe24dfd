//! JSON as instances may be given it: checked, and written anew in the place where it was.
//!
//! Engines read more than the standard allows: numbers that are none, encodings other than UTF-8, lone surrogates, the same key twice. So
//! nothing that a client has written reaches an instance as it is. What is not JSON by the letter is refused. The rest is written
//! anew, in the order it had and with its numbers as they stood, without spaces and without the keys that belong to the router, at whatever
//! depth they are. What is written is never longer than what was read. So it is written over it, and the largest body needs no more memory
//! than itself.

use std::ops::Range;

use thiserror::Error;

/// Keys by which one side of a hand-off tells the other where to read. Only routers may say that.
const PRIVATE: [&[u8]; 2] = [b"kv_transfer_params", b"ec_transfer_params"];

/// Whether a key, as it is without escapes, belongs to routers.
pub fn is_private(key: &[u8]) -> bool {
    PRIVATE.contains(&key)
}

/// Python's reader of JSON takes some hundreds; nobody needs that many.
const DEPTH_MAX: usize = 128;
/// No number that means anything is longer.
const NUMBER_BYTES_MAX: usize = 512;
/// So many keys are compared with each other at a time, those of objects around an object included.
const KEYS_MAX: usize = 1 << 18;
const FIELDS_MAX: usize = 1024;

/// Why a text is not passed on. Where: the number of bytes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum JsonError {
    #[error("is not in UTF-8")]
    Encoding,
    #[error("is not JSON at byte {at}")]
    Syntax { at: usize },
    #[error("is no object")]
    NotAnObject,
    #[error("is deeper than {DEPTH_MAX} levels at byte {at}")]
    TooDeep { at: usize },
    #[error("has a number that is too large at byte {at}")]
    Number { at: usize },
    #[error("has half a character at byte {at}")]
    LoneSurrogate { at: usize },
    #[error("has a key twice in the object that ends at byte {at}")]
    DuplicateKey { at: usize },
    #[error("has too many keys at byte {at}")]
    TooManyKeys { at: usize },
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Null,
    True,
    False,
    Number,
    Text,
    /// With so many items; and whether the first of them is a number.
    Array {
        items: usize,
        of_numbers: bool,
    },
    Object,
}

/// A field of the object that a text is. Ranges are of the text as it was written anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Without its quotes, and with its escapes.
    pub key: Range<usize>,
    pub value: Range<usize>,
    pub kind: Kind,
}

/// Whether private keys stay: in answers of instances they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    Keep,
    LeaveOut,
}

/// Writes a text anew where it stands. How many bytes it has now, and which fields.
pub fn rewrite(text: &mut [u8], keys: Keys) -> Result<(usize, Vec<Field>), JsonError> {
    if std::str::from_utf8(text).is_err() {
        return Err(JsonError::Encoding);
    }
    let mut writer = Rewriter {
        text,
        read: 0,
        written: 0,
        keys,
        open_keys: Vec::new(),
        fields: Vec::new(),
    };
    writer.skip_space();
    if writer.peek() != Some(b'{') {
        return Err(match writer.value(0) {
            Ok(_) => JsonError::NotAnObject,
            Err(error) => error,
        });
    }
    writer.object(0)?;
    writer.skip_space();
    if writer.peek().is_some() {
        return Err(writer.wrong());
    }
    Ok((writer.written, writer.fields))
}

struct Rewriter<'a> {
    text: &'a mut [u8],
    /// Never behind `written`.
    read: usize,
    written: usize,
    keys: Keys,
    /// The keys of all objects that are open, as they were written: those of the innermost come last.
    open_keys: Vec<(u32, u32)>,
    /// Of the outermost object.
    fields: Vec<Field>,
}

impl Rewriter<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.read).copied()
    }

    fn next(&mut self) -> Result<u8, JsonError> {
        let byte = self.peek().ok_or_else(|| self.wrong())?;
        self.read += 1;
        Ok(byte)
    }

    fn wrong(&self) -> JsonError {
        JsonError::Syntax { at: self.read }
    }

    fn write(&mut self, byte: u8) {
        self.text[self.written] = byte;
        self.written += 1;
    }

    /// Reads one byte and writes it.
    fn copy(&mut self, wanted: u8) -> Result<(), JsonError> {
        if self.peek() != Some(wanted) {
            return Err(self.wrong());
        }
        self.read += 1;
        self.write(wanted);
        Ok(())
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.read += 1;
        }
    }

    fn value(&mut self, depth: usize) -> Result<Kind, JsonError> {
        if depth >= DEPTH_MAX {
            return Err(JsonError::TooDeep { at: self.read });
        }
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => self.string().map(|_| Kind::Text),
            Some(b't') => self.word(b"true", Kind::True),
            Some(b'f') => self.word(b"false", Kind::False),
            Some(b'n') => self.word(b"null", Kind::Null),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(self.wrong()),
        }
    }

    fn word(&mut self, word: &[u8], kind: Kind) -> Result<Kind, JsonError> {
        for byte in word {
            self.copy(*byte)?;
        }
        Ok(kind)
    }

    fn array(&mut self, depth: usize) -> Result<Kind, JsonError> {
        self.copy(b'[')?;
        let (mut items, mut of_numbers) = (0, false);
        self.skip_space();
        if self.peek() != Some(b']') {
            loop {
                self.skip_space();
                let kind = self.value(depth + 1)?;
                if items == 0 {
                    of_numbers = kind == Kind::Number;
                }
                items += 1;
                self.skip_space();
                if self.peek() != Some(b',') {
                    break;
                }
                self.copy(b',')?;
            }
        }
        self.copy(b']')?;
        Ok(Kind::Array { items, of_numbers })
    }

    fn object(&mut self, depth: usize) -> Result<Kind, JsonError> {
        self.copy(b'{')?;
        let keys_before = self.open_keys.len();
        self.skip_space();
        if self.peek() != Some(b'}') {
            let mut first = true;
            loop {
                first &= !self.member(depth, first)?;
                self.skip_space();
                if self.peek() != Some(b',') {
                    break;
                }
                self.read += 1;
            }
        }
        self.copy(b'}')?;
        let text = &*self.text;
        let key = |&(from, to): &(u32, u32)| &text[from as usize..to as usize];
        let keys = &mut self.open_keys[keys_before..];
        keys.sort_unstable_by(|a, b| key(a).cmp(key(b)));
        if keys.windows(2).any(|two| key(&two[0]) == key(&two[1])) {
            return Err(JsonError::DuplicateKey { at: self.read });
        }
        self.open_keys.truncate(keys_before);
        Ok(Kind::Object)
    }

    /// One key and its value. Whether it was written.
    fn member(&mut self, depth: usize, first: bool) -> Result<bool, JsonError> {
        let (before, keys_before) = (self.written, self.open_keys.len());
        if !first {
            // There was one where the reader stood a moment ago.
            self.write(b',');
        }
        self.skip_space();
        let key = self.string()?;
        if keys_before >= KEYS_MAX || (depth == 0 && self.fields.len() >= FIELDS_MAX) {
            return Err(JsonError::TooManyKeys { at: self.read });
        }
        self.skip_space();
        self.copy(b':')?;
        self.skip_space();
        let begin = self.written;
        let private = self.keys == Keys::LeaveOut && is_private(&self.text[key.clone()]);
        // A text that is longer than numbers of 32 bits can say is not accepted by anybody.
        let at = |index: usize| u32::try_from(index).map_err(|_| JsonError::TooManyKeys { at: index });
        self.open_keys.push((at(key.start)?, at(key.end)?));
        let kind = self.value(depth + 1)?;
        if private {
            self.written = before;
            self.open_keys.truncate(keys_before);
        } else if depth == 0 {
            let value = begin..self.written;
            self.fields.push(Field { key, value, kind });
        }
        Ok(!private)
    }

    /// A string, whose place without its quotes is returned.
    fn string(&mut self) -> Result<Range<usize>, JsonError> {
        self.copy(b'"')?;
        let begin = self.written;
        loop {
            match self.next()? {
                b'"' => break,
                b'\\' => self.escape()?,
                byte @ 0x20.. => self.write(byte),
                _ => {
                    self.read -= 1;
                    return Err(self.wrong());
                }
            }
        }
        let end = self.written;
        self.write(b'"');
        Ok(begin..end)
    }

    /// What follows a backslash. Each character has one form of all that there are, so that equal keys are equal bytes.
    fn escape(&mut self) -> Result<(), JsonError> {
        let short = self.next()?;
        let character = match short {
            b'"' | b'\\' | b'/' => char::from(short),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => self.four_digits()?,
            _ => {
                self.read -= 1;
                return Err(self.wrong());
            }
        };
        match character {
            '"' | '\\' => {
                self.write(b'\\');
                self.write(character as u8);
            }
            control @ '\0'..='\u{1f}' => {
                let short = match control {
                    '\u{8}' => b'b',
                    '\u{c}' => b'f',
                    '\n' => b'n',
                    '\r' => b'r',
                    '\t' => b't',
                    _ => b'u',
                };
                self.write(b'\\');
                self.write(short);
                if short == b'u' {
                    let digit = |nibble: u8| b"0123456789abcdef"[usize::from(nibble & 15)];
                    for byte in [b'0', b'0', digit(control as u8 >> 4), digit(control as u8)] {
                        self.write(byte);
                    }
                }
            }
            other => {
                for byte in other.encode_utf8(&mut [0; 4]).bytes() {
                    self.write(byte);
                }
            }
        }
        Ok(())
    }

    /// The character behind `\u`, which may take two of them.
    fn four_digits(&mut self) -> Result<char, JsonError> {
        let at = self.read;
        let lone = JsonError::LoneSurrogate { at };
        let high = self.hexadecimal()?;
        let code = match high {
            0xd800..=0xdbff => {
                if self.peek() != Some(b'\\') || self.text.get(self.read + 1) != Some(&b'u') {
                    return Err(lone);
                }
                self.read += 2;
                match self.hexadecimal()? {
                    low @ 0xdc00..=0xdfff => 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00),
                    _ => return Err(lone),
                }
            }
            other => other,
        };
        char::from_u32(code).ok_or(lone)
    }

    fn hexadecimal(&mut self) -> Result<u32, JsonError> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = char::from(self.next()?).to_digit(16);
            code = 16 * code + digit.ok_or_else(|| self.wrong())?;
        }
        Ok(code)
    }

    /// A number, which stays as it is written: nobody's precision is lost on the way.
    fn number(&mut self) -> Result<Kind, JsonError> {
        let (at, begin) = (self.read, self.written);
        if self.peek() == Some(b'-') {
            self.copy(b'-')?;
        }
        match self.peek() {
            Some(b'0') => self.copy(b'0')?,
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.copy(b'.')?;
            self.digits()?;
        }
        if let Some(e @ (b'e' | b'E')) = self.peek() {
            self.copy(e)?;
            if let Some(sign @ (b'+' | b'-')) = self.peek() {
                self.copy(sign)?;
            }
            self.digits()?;
        }
        let text = &self.text[begin..self.written];
        // Few digits without an exponent are no large number: most are tokens, and there may be millions of them.
        let small = text.len() < 300 && !text.iter().any(|byte| byte.eq_ignore_ascii_case(&b'e'));
        let finite = || std::str::from_utf8(text).is_ok_and(|text| text.parse::<f64>().is_ok_and(f64::is_finite));
        match small || (text.len() <= NUMBER_BYTES_MAX && finite()) {
            true => Ok(Kind::Number),
            false => Err(JsonError::Number { at }),
        }
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let begin = self.read;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            self.copy(digit)?;
        }
        match self.read > begin {
            true => Ok(()),
            false => Err(self.wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rewritten(text: impl AsRef<[u8]>) -> Result<String, JsonError> {
        let mut bytes = text.as_ref().to_vec();
        let (len, _) = rewrite(&mut bytes, Keys::LeaveOut)?;
        Ok(String::from_utf8(bytes[..len].to_vec()).unwrap())
    }

    #[test]
    fn what_is_json_stays_what_it_means() {
        for (text, expected) in [
            (r#" { } "#, r#"{}"#),
            (
                r#"{"a" : [ 1 , 2.50 , -0 , 1e-7 ] , "b":{"c":null}}"#,
                r#"{"a":[1,2.50,-0,1e-7],"b":{"c":null}}"#,
            ),
            // The order stays, and so do integers that no other type holds.
            (
                r#"{"z":1,"a":123456789012345678901234567890}"#,
                r#"{"z":1,"a":123456789012345678901234567890}"#,
            ),
            (
                r#"{"t":"\u0041\/\n\u000a\u001f\u00e9😀\uD83D\ude00\"\\"}"#,
                r#"{"t":"A/\n\n\u001fé😀😀\"\\"}"#,
            ),
            ("{\"t\":\"\u{7f}\u{2028}\"}", "{\"t\":\"\u{7f}\u{2028}\"}"),
            (r#"{"a":true,"b":false}"#, r#"{"a":true,"b":false}"#),
        ] {
            assert_eq!(rewritten(text).as_deref(), Ok(expected), "{text}");
            assert_eq!(
                serde_json::from_str::<Value>(text).unwrap(),
                serde_json::from_str::<Value>(expected).unwrap()
            );
        }
    }

    #[test]
    fn what_only_engines_call_json_is_refused() {
        for text in [
            r#"{"a":NaN}"#,
            r#"{"a":Infinity}"#,
            r#"{"a":-Infinity}"#,
            r#"{"a":1e999}"#,
            r#"{"a":-1E+999}"#,
            r#"{"a":01}"#,
            r#"{"a":.5}"#,
            r#"{"a":5.}"#,
            r#"{"a":+1}"#,
            r#"{"a":0x10}"#,
            r#"{"a":"\ud800"}"#,
            r#"{"a":"\ud800x"}"#,
            r#"{"a":"\ud800\u0041"}"#,
            r#"{"a":"\udc00"}"#,
            r#"{"\udfff":1}"#,
            "{\"a\":\"\n\"}",
            r#"{"a":'b'}"#,
            r#"{a:1}"#,
            r#"{"a":1,}"#,
            r#"{,"a":1}"#,
            r#"{"a":1 "b":2}"#,
            r#"{"a":1,,"b":2}"#,
            r#"{"a":[1,]}"#,
            r#"{"a":1}}"#,
            r#"{"a":1} x"#,
            r#"{"a":tru}"#,
            r#"{"a":"\x"}"#,
            r#"{"a":"\u12"}"#,
            r#"{"a""#,
            r#"{"a":1//x
}"#,
            "\u{feff}{}",
            "",
            " ",
        ] {
            assert!(rewritten(text).is_err(), "{text}");
        }
        for not_an_object in ["[1]", "1", "\"text\"", "null"] {
            assert_eq!(rewritten(not_an_object), Err(JsonError::NotAnObject));
        }
    }

    #[test]
    fn other_encodings_are_refused() {
        let text = r#"{"kv_transfer_params":{}}"#;
        let wide = |swap: fn(u16) -> [u8; 2]| text.encode_utf16().flat_map(swap).collect::<Vec<u8>>();
        let widest = |swap: fn(u32) -> [u8; 4]| text.chars().flat_map(|c| swap(c as u32)).collect::<Vec<u8>>();
        let marked = |mark: &[u8], bytes: Vec<u8>| [mark, &bytes].concat();
        for bytes in [
            wide(u16::to_le_bytes),
            wide(u16::to_be_bytes),
            marked(&[0xff, 0xfe], wide(u16::to_le_bytes)),
            marked(&[0xfe, 0xff], wide(u16::to_be_bytes)),
            widest(u32::to_le_bytes),
            widest(u32::to_be_bytes),
            marked(&[0xff, 0xfe, 0, 0], widest(u32::to_le_bytes)),
            marked(&[0xef, 0xbb, 0xbf], text.as_bytes().to_vec()),
            b"{\"a\":\"\xff\"}".to_vec(),
            // A character in more bytes than it has, and half a character.
            b"{\"a\":\"\xc0\xaf\"}".to_vec(),
            b"{\"a\":\"\xed\xa0\x80\"}".to_vec(),
        ] {
            assert!(rewritten(&bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn private_keys_are_left_out_at_every_depth_however_they_are_written() {
        for (text, expected) in [
            (r#"{"kv_transfer_params":{"a":1},"prompt":"x"}"#, r#"{"prompt":"x"}"#),
            (r#"{"prompt":"x","kv_transfer_params":{"a":1}}"#, r#"{"prompt":"x"}"#),
            (r#"{"a":1,"kv_transfer_params":[{}],"b":2}"#, r#"{"a":1,"b":2}"#),
            (r#"{"kv_transfer_params":1}"#, r#"{}"#),
            (r#"{"kv_transfer_params":1,"kv_transfer_params":2}"#, r#"{}"#),
            (r#"{"k\u0076_transfer_p\u0061rams":1,"a":0}"#, r#"{"a":0}"#),
            (
                r#"{"vllm_xargs":{"kv_transfer_params":"x","k":1}}"#,
                r#"{"vllm_xargs":{"k":1}}"#,
            ),
            (
                r#"{"sampling_params":{"extra_args":{"kv_transfer_params":{"x":{}}}}}"#,
                r#"{"sampling_params":{"extra_args":{}}}"#,
            ),
            (
                r#"{"a":[[{"kv_transfer_params":1},{"ec_transfer_params":1}]]}"#,
                r#"{"a":[[{},{}]]}"#,
            ),
            // As a value, or as a part of a key, it is a text like any other.
            (
                r#"{"prompt":"kv_transfer_params","kv_transfer_params2":1}"#,
                r#"{"prompt":"kv_transfer_params","kv_transfer_params2":1}"#,
            ),
        ] {
            assert_eq!(rewritten(text).as_deref(), Ok(expected), "{text}");
        }
        let mut kept = br#"{ "kv_transfer_params" : 1 }"#.to_vec();
        let (len, fields) = rewrite(&mut kept, Keys::Keep).unwrap();
        assert_eq!(&kept[..len], br#"{"kv_transfer_params":1}"#);
        assert_eq!(fields[0].value, 22..23);
    }

    #[test]
    fn the_same_key_twice_is_refused_at_every_depth() {
        for text in [
            r#"{"a":1,"a":1}"#,
            r#"{"a":1,"b":2,"\u0061":3}"#,
            r#"{"x":[{"a":1,"b":{"c":1},"a":2}]}"#,
        ] {
            assert!(matches!(rewritten(text), Err(JsonError::DuplicateKey { .. })), "{text}");
        }
        assert!(rewritten(r#"{"a":{"a":{"a":1}},"b":{"a":1}}"#).is_ok());
    }

    #[test]
    fn there_are_limits() {
        let deep = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
        assert!(rewritten(deep(127)).is_ok());
        assert!(matches!(rewritten(deep(128)), Err(JsonError::TooDeep { .. })));
        assert!(matches!(rewritten(deep(100_000)), Err(JsonError::TooDeep { .. })));
        let long = format!("{{\"a\":0.{}}}", "1".repeat(600));
        assert!(matches!(rewritten(long), Err(JsonError::Number { .. })));
        let many = (0..2000).map(|n| format!("\"{n}\":0")).collect::<Vec<_>>().join(",");
        assert!(matches!(
            rewritten(format!("{{{many}}}")),
            Err(JsonError::TooManyKeys { .. })
        ));
        assert!(rewritten(format!("{{\"a\":{{{many}}}}}")).is_ok());
    }

    #[test]
    fn fields_are_where_they_were_written() {
        let mut text =
            br#" {"drop":0, "kv_transfer_params":[1,2], "p\u0041" : [ 1, 2 ], "q":["a"], "e":[] } "#.to_vec();
        let (len, fields) = rewrite(&mut text, Keys::LeaveOut).unwrap();
        let text = std::str::from_utf8(&text[..len]).unwrap();
        let said: Vec<_> = fields
            .iter()
            .map(|field| (&text[field.key.clone()], &text[field.value.clone()], field.kind))
            .collect();
        let array = |items, of_numbers| Kind::Array { items, of_numbers };
        assert_eq!(
            said,
            [
                ("drop", "0", Kind::Number),
                ("pA", "[1,2]", array(2, true)),
                ("q", "[\"a\"]", array(1, false)),
                ("e", "[]", array(0, false)),
            ]
        );
    }

    /// Whatever bytes come, the answer is that of a reader by the letter, and what is written is what was read.
    #[test]
    fn any_bytes_at_all() {
        let sample = json!({"prompt": ["a", 1, {"kv_transfer_params": "\u{1}é"}], "n": 1.5, "z": {"a": [], "b": null}})
            .to_string();
        let mut state = 1u64;
        let mut chance = |below: usize| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let alphabet = br#"{}[]",:\u0123dDeE+-. tfn"#;
        let mut accepted = 0;
        for _ in 0..20_000 {
            let mut bytes = sample.clone().into_bytes();
            for _ in 0..chance(4) {
                let at = chance(bytes.len());
                match chance(3) {
                    0 => bytes[at] = alphabet[chance(alphabet.len())],
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, chance(256) as u8),
                }
            }
            let strict = serde_json::from_slice::<Value>(&bytes);
            let Ok(written) = rewritten(&bytes) else { continue };
            accepted += 1;
            assert!(written.len() <= bytes.len());
            let again: Value = serde_json::from_str(&written).unwrap();
            let mut meant = strict.unwrap();
            strip(&mut meant);
            assert_eq!(again, meant, "{written}");
        }
        assert!(accepted > 5000, "{accepted}");
    }

    fn strip(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.remove("kv_transfer_params");
                fields.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
}
