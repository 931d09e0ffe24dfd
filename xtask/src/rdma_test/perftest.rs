//! Runs the programs of perftest, both ends on this machine, and reads what they print.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::command::{Error, output};

/// How long a server may take until it listens.
const PATIENCE: Duration = Duration::from_secs(20);
/// The address of the first rail, over which both ends find each other.
const ADDRESS: &str = "10.77.0.1";
/// The RoCE v2 address over IPv4 in a device's table.
const GID_INDEX: &str = "1";
/// Ping-pongs of a measurement of latency.
const ROUNDS: u32 = 1000;

/// One measurement.
#[derive(Clone, Debug)]
pub struct Perftest {
    pub program: &'static str,
    pub bytes: u64,
    pub seconds: u32,
    /// How many messages are under way at a time; the program's own choice if none.
    pub depth: Option<u32>,
    /// Rails that are measured at once, each by a pair of programs. Their figures are added up.
    pub rails: u32,
}

impl Perftest {
    /// MiB/s and messages/s of a program that measures bandwidth.
    pub fn bandwidth(&self) -> Result<(f64, f64), Error> {
        let mut pairs = Vec::new();
        for rail in 0..self.rails {
            let mut more = vec![
                "-D".to_owned(),
                self.seconds.to_string(),
                "-f".to_owned(),
                "0".to_owned(),
            ];
            if let Some(depth) = self.depth {
                more.extend(["-t".to_owned(), depth.to_string()]);
            }
            pairs.push(Pair::start(self, rail, &more)?);
        }
        let mut sums = (0.0, 0.0);
        // Both clients at once: each has a thread that waits for what it says.
        let answers: Vec<_> = std::thread::scope(|scope| {
            let running: Vec<_> = pairs.iter().map(|pair| scope.spawn(|| pair.client())).collect();
            let ended = running
                .into_iter()
                .map(|thread| thread.join().expect("no panic in a client"));
            ended.collect()
        });
        for said in answers {
            // #bytes #iterations BW peak BW average[MB/sec] MsgRate[Mpps], where an MB is a MiB.
            let columns = columns(self.program, &said?, self.bytes, 5)?;
            sums.0 += columns[3];
            sums.1 += columns[4] * 1e6;
        }
        Ok(sums)
    }

    /// The typical latency, in µs, of a program that measures it.
    pub fn latency(&self) -> Result<f64, Error> {
        let pair = Pair::start(self, 0, &["-n".to_owned(), ROUNDS.to_string()])?;
        // #bytes #iterations t_min t_max t_typical …
        Ok(columns(self.program, &pair.client()?, self.bytes, 5)?[4])
    }
}

/// A server, and the command that connects to it.
struct Pair {
    server: Child,
    words: Vec<String>,
}

impl Pair {
    fn start(test: &Perftest, rail: u32, more: &[String]) -> Result<Pair, Error> {
        // A port of its own each time: the last one may still be busy closing.
        let port = unused_port();
        let device = format!("rxe{rail}");
        let bytes = test.bytes.to_string();
        let port_text = port.to_string();
        let mut words: Vec<String> = [
            test.program,
            "-d",
            &device,
            "-x",
            GID_INDEX,
            "-s",
            &bytes,
            "-p",
            &port_text,
            "-F",
        ]
        .map(str::to_owned)
        .to_vec();
        words.extend_from_slice(more);
        let server = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|source| Error::NotStarted {
                program: words[0].clone(),
                source,
            })?;
        let pair = Pair { server, words };
        let give_up = Instant::now() + PATIENCE;
        while !listens(port) {
            if Instant::now() > give_up {
                return Err(Error::NotUnderstood {
                    program: pair.words[0].clone(),
                    said: format!("it does not listen on port {port}"),
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(pair)
    }

    fn client(&self) -> Result<String, Error> {
        output(Command::new(&self.words[0]).args(&self.words[1..]).arg(ADDRESS))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // It ends with its client; one whose client has failed would wait for another.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// The figures in the line for messages of `bytes`.
fn columns(program: &str, said: &str, bytes: u64, count: usize) -> Result<Vec<f64>, Error> {
    let mut figures = said.lines().filter_map(|line| {
        let words: Option<Vec<f64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
        words.filter(|figures| figures.len() >= count && figures[0] == bytes as f64)
    });
    figures.next_back().ok_or_else(|| Error::NotUnderstood {
        program: program.to_owned(),
        said: said.to_owned(),
    })
}

fn unused_port() -> u16 {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(18_515);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Whether somebody waits for connections on a port. Connecting to find out would be taken for the client.
fn listens(port: u16) -> bool {
    const LISTEN: &str = "0A";
    let port = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        table.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            let local = words.next().unwrap_or_default();
            local.ends_with(&port) && words.nth(1) == Some(LISTEN)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_in_what_perftest_prints() {
        let said = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                    65536      833              0.00               52.00  \t\t   0.000832\n----\n";
        assert_eq!(columns("ib_write_bw", said, 65536, 5).unwrap()[3], 52.0);
        assert!(columns("ib_write_bw", "Couldn't connect", 65536, 5).is_err());
        assert!(columns("ib_write_bw", said, 8, 5).is_err());
    }
}
