//! The test binary itself, started again as a process of its own that obeys commands, and can be frozen and killed.
// Each of the test files that share this uses a part of it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub struct SecondProcess {
    child: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl SecondProcess {
    /// Runs the test `peer_process` of this binary, told who it is by a variable of its environment.
    pub fn start(role: &str, value: &str) -> SecondProcess {
        let mut child = Command::new(std::env::current_exe().expect("a test binary"))
            .args(["--exact", "peer_process", "--nocapture", "--test-threads=1"])
            .env(role, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test binary starts again");
        let replies = BufReader::new(child.stdout.take().expect("piped"));
        let commands = child.stdin.take().expect("piped");
        SecondProcess {
            child,
            commands,
            replies,
        }
    }

    pub fn command(&mut self, command: &str) {
        writeln!(self.commands, "{command}").expect("the peer listens");
    }
    pub fn reply(&mut self) -> String {
        loop {
            let mut line = String::new();
            let len = self.replies.read_line(&mut line).expect("the peer speaks");
            assert_ne!(len, 0, "the peer has ended");
            // The test harness of the peer talks too, and not always in lines of its own.
            if let Some((_, reply)) = line.trim_end().split_once("PEER ") {
                return reply.to_owned();
            }
        }
    }
    pub fn ask(&mut self, command: &str) -> String {
        self.command(command);
        self.reply()
    }
    /// Stops the process, and returns when it has stopped.
    pub fn freeze(&self) {
        self.signal(libc::SIGSTOP);
        let pid = self.child.id() as libc::pid_t;
        let mut status = 0;
        // SAFETY: our own child, which has not been waited for.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, libc::WUNTRACED) }, pid);
        assert!(libc::WIFSTOPPED(status));
    }
    pub fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }
    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a plain call; the child has not been waited for, so its number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }
    /// Kills the process and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
    }
}

impl Drop for SecondProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
