//! The file with the secret that agents of one user share when nothing else is configured.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::sources::configuration_home;

/// Shorter secrets can be guessed by whoever listens to a proof.
const SECRET_BYTES_MIN: usize = 16;
const SECRET_BYTES_MAX: u64 = 4096;

#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SecretError {
    #[error("no place for the secret file: set XDG_RUNTIME_DIR or HOME, or the setting secret_file")]
    NoPlace,
    #[error("cannot use the secret file {}: {source}", path.display())]
    Unusable { path: PathBuf, source: io::Error },
    #[error("the secret file {} belongs to another user", path.display())]
    NotOurs { path: PathBuf },
    #[error("the secret file {} can be read by others (mode {mode:o}); make it 0600", path.display())]
    Exposed { path: PathBuf, mode: u32 },
    #[error("the secret file {} holds fewer than {SECRET_BYTES_MIN} or more than {SECRET_BYTES_MAX} bytes", path.display())]
    Length { path: PathBuf },
    #[error(
        "the secret has {bytes} bytes, and {what} can be reached from other hosts, where it could be guessed: at least {SECRET_BYTES_MIN} are \
         needed beyond loopback"
    )]
    TooShort { bytes: usize, what: String },
    #[error("the system gave no random bytes: {0}")]
    NoRandomness(getrandom::Error),
}

/// Whether a secret is good enough for what other hosts can reach, or what reaches them.
pub(crate) fn long_enough(secret: &[u8], what: impl FnOnce() -> String) -> Result<(), SecretError> {
    match secret.len() {
        SECRET_BYTES_MIN.. => Ok(()),
        bytes => Err(SecretError::TooShort { bytes, what: what() }),
    }
}

pub(super) fn default_path() -> Result<PathBuf, SecretError> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|path| path.is_dir());
    let base = runtime.or_else(configuration_home).ok_or(SecretError::NoPlace)?;
    Ok(base.join("weft/secret"))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, SecretError> {
    let unusable = |source| SecretError::Unusable {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(unusable)?;
    // The open file is asked, not the path, so that what is checked is what is read.
    let metadata = file.metadata().map_err(unusable)?;
    // The owner of our own entry in /proc is the user that this process acts as.
    let user = fs::metadata("/proc/self").map_err(unusable)?.uid();
    if metadata.uid() != user {
        return Err(SecretError::NotOurs { path: path.to_owned() });
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(SecretError::Exposed {
            path: path.to_owned(),
            mode: metadata.mode() & 0o777,
        });
    }
    let mut bytes = Vec::new();
    file.take(SECRET_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unusable)?;
    // A line written by hand ends in a newline that is not part of the secret.
    let secret = bytes.trim_ascii().to_vec();
    if secret.len() < SECRET_BYTES_MIN || bytes.len() as u64 > SECRET_BYTES_MAX {
        return Err(SecretError::Length { path: path.to_owned() });
    }
    Ok(secret)
}

/// Agents that start together agree: each writes a file of its own and only the first can give it the name.
pub(super) fn read_or_make(path: &Path) -> Result<Vec<u8>, SecretError> {
    match read(path) {
        Err(SecretError::Unusable { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        settled => return settled,
    }
    let unusable = |source| SecretError::Unusable {
        path: path.to_owned(),
        source,
    };
    if let Some(directory) = path.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(unusable)?;
    }
    let mut random = [0u8; 40];
    getrandom::fill(&mut random).map_err(SecretError::NoRandomness)?;
    let (secret, suffix) = random.split_at(32);
    let own = path.with_extension(hex(suffix));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&own)
        .and_then(|mut file| file.write_all(hex(secret).as_bytes()));
    let named = written.and_then(|()| fs::hard_link(&own, path));
    let _ = fs::remove_file(&own);
    match named {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(unusable(error)),
        _ => read(path),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn agents_that_start_together_agree() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weft/secret");
        let secrets: Vec<_> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..8).map(|_| scope.spawn(|| read_or_make(&path).unwrap())).collect();
            starts.into_iter().map(|start| start.join().unwrap()).collect()
        });
        assert_eq!(secrets[0].len(), 64);
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn an_exposed_or_short_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(read(&path), Err(SecretError::Exposed { mode: 0o644, .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&path).unwrap(), b"0123456789abcdef");
        fs::write(&path, "short").unwrap();
        assert!(matches!(read_or_make(&path), Err(SecretError::Length { .. })));
        fs::write(&path, vec![b'x'; 5000]).unwrap();
        assert!(matches!(read(&path), Err(SecretError::Length { .. })));
    }
}
