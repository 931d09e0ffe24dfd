//! The file in which other programs that speak S3 keep their keys.

use std::path::PathBuf;

/// More than any such file has.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What a profile says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub name: String,
    pub key: String,
    pub token: Option<String>,
}

/// What `~/.aws/credentials`, or the file that `AWS_SHARED_CREDENTIALS_FILE` names, says of the profile that is asked for.
pub(super) fn of_file() -> Option<Found> {
    use std::io::Read as _;
    let path = match std::env::var_os("AWS_SHARED_CREDENTIALS_FILE") {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".aws/credentials"),
    };
    let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
    let mut text = String::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    of_profile(&text, &profile)
}

fn of_profile(text: &str, profile: &str) -> Option<Found> {
    let mut found = Found::default();
    let mut is_it = false;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_it = name.trim() == profile;
        }
        let Some((key, value)) = line.split_once('=').filter(|_| is_it && !line.starts_with(['#', ';'])) else {
            continue;
        };
        let value = value.trim().to_owned();
        match key.trim() {
            "aws_access_key_id" => found.name = value,
            "aws_secret_access_key" => found.key = value,
            "aws_session_token" => found.token = Some(value),
            _ => {}
        }
    }
    (!found.name.is_empty() && !found.key.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_found_by_its_name_and_no_other() {
        let text = "# keys\n[default]\naws_access_key_id = one\naws_secret_access_key=two = 2\n\n[ other ]\n\
                    aws_access_key_id=three\naws_secret_access_key = four\naws_session_token = five\n[half]\naws_access_key_id = six\n";
        let found = |profile| of_profile(text, profile);
        let default = found("default").expect("it is there");
        assert_eq!(
            (default.name.as_str(), default.key.as_str(), default.token),
            ("one", "two = 2", None)
        );
        let other = found("other").expect("it is there");
        assert_eq!((other.name.as_str(), other.token.as_deref()), ("three", Some("five")));
        assert_eq!((found("half"), found("none")), (None, None));
    }
}
