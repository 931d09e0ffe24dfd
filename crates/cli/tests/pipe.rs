//! What a reader that has seen enough, as in `weft explain … | head -1`, does to the command: nothing.

use std::process::{Command, Stdio};

#[test]
fn nobody_has_to_read_to_the_end() {
    let verbs: [&[&str]; 5] = [
        &["--help"],
        &["explain", "all-reduce", "--ranks", "16", "--bytes", "1MiB"],
        &["validate"],
        &["sim", "run", "ring"],
        &["man"],
    ];
    for verb in verbs {
        let (unread, pipe) = std::io::pipe().expect("a pipe");
        drop(unread);
        let ended = Command::new(env!("CARGO_BIN_EXE_weft"))
            .args(verb)
            .stdout(pipe)
            .stderr(Stdio::piped())
            .output()
            .expect("the command runs");
        assert!(
            ended.status.success(),
            "{verb:?}: {}",
            String::from_utf8_lossy(&ended.stderr)
        );
        assert!(
            ended.stderr.is_empty(),
            "{verb:?}: {}",
            String::from_utf8_lossy(&ended.stderr)
        );
    }
}
