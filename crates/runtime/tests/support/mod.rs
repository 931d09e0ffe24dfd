//! A second process for the tests: the test binary itself, started again in another role.
//!
//! A file of tests that uses this declares `#[test] fn second_process() { support::second_process() }`, which does nothing in the
//! ordinary run and becomes the second process when [`Child::spawn`] starts the binary with only that test and a role. On another
//! machine somebody else starts it, and [`Child::accept`] takes the connection that it makes.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child as Process, Command, Stdio};
use std::time::{Duration, Instant};

use weft::{Access, Agent, AgentBuilder, Memory};

pub const LONG: Duration = Duration::from_secs(20);
const ROLE: &str = "SECOND_PROCESS_ROLE";

/// How the two ends reach each other and whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Shared memory that Weft allocated.
    Mapped,
    /// Shared memory that Weft did not allocate.
    Foreign,
    /// The same where the kernel refuses to copy between processes.
    Bounce,
    Tcp,
    /// RDMA, and TCP behind it. Not among [`Way::ALL`], because it needs a device.
    Verbs,
}

impl Way {
    pub const ALL: [Way; 4] = [Way::Mapped, Way::Foreign, Way::Bounce, Way::Tcp];

    pub fn transport(self) -> &'static str {
        match self {
            Way::Tcp => "tcp",
            Way::Verbs => "verbs",
            _ => "shared_memory",
        }
    }

    fn transports(self) -> &'static str {
        match self {
            Way::Verbs => "verbs,tcp",
            _ => self.transport(),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Way::Mapped => "mapped",
            Way::Foreign => "foreign",
            Way::Bounce => "bounce",
            Way::Tcp => "tcp",
            Way::Verbs => "verbs",
        }
    }

    fn parse(word: &str) -> Way {
        Way::ALL
            .into_iter()
            .chain([Way::Verbs])
            .find(|way| way.word() == word)
            .expect("a way that exists")
    }

    pub fn builder(self, name: &str) -> AgentBuilder {
        let builder = Agent::builder(name)
            .set("transports", self.transports())
            .secret("a secret for tests");
        if self == Way::Bounce {
            builder.set("shared_memory.foreign", "bounce")
        } else {
            builder
        }
    }

    pub fn agent(self, name: &str) -> Agent {
        self.builder(name).start().expect("an agent starts")
    }

    pub fn memory(self, agent: &Agent, bytes: usize) -> Memory {
        match self {
            Way::Mapped | Way::Tcp | Way::Verbs => agent.allocate(bytes).expect("memory"),
            Way::Foreign | Way::Bounce => agent.register_vec(vec![0; bytes]).expect("memory"),
        }
    }
}

/// Bytes that tell where they came from.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed)
        .collect()
}

/// The second process. It holds one region, `data`, readable and writable, filled with `pattern(1, …)`.
pub struct Child {
    /// None on another machine.
    process: Option<Process>,
    stdin: Box<dyn Write>,
    stdout: BufReader<Box<dyn Read>>,
    pub address: String,
}

impl Child {
    pub fn spawn(way: Way, name: &str, bytes: usize) -> Child {
        Child::spawn_with(way, name, bytes, |command| command)
    }

    pub fn spawn_with(way: Way, name: &str, bytes: usize, prepare: impl FnOnce(&mut Command) -> &mut Command) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("the test binary"));
        Child::start(prepare(&mut command), way, name, bytes)
    }

    /// Starts the second process by a command of the caller's, to which the test binary's arguments are added.
    pub fn start(command: &mut Command, way: Way, name: &str, bytes: usize) -> Child {
        let mut process = command
            .args(["--exact", "second_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{} {name} {bytes}", way.word()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the second process starts");
        let stdin = process.stdin.take().expect("its input");
        let stdout = process.stdout.take().expect("its output");
        Child::greet(Some(process), Box::new(stdin), Box::new(stdout))
    }

    /// Waits for the second process to connect from another machine. It is told its role in the first line.
    pub fn accept(listener: &TcpListener, way: Way, name: &str, bytes: usize) -> Child {
        let (mut stream, _) = listener.accept().expect("the other machine connects");
        writeln!(stream, "{} {name} {bytes}", way.word()).expect("the other machine listens");
        let answers = stream.try_clone().expect("a second handle");
        Child::greet(None, Box::new(stream), Box::new(answers))
    }

    fn greet(process: Option<Process>, stdin: Box<dyn Write>, stdout: Box<dyn Read>) -> Child {
        let mut child = Child {
            process,
            stdin,
            stdout: BufReader::new(stdout),
            address: String::new(),
        };
        child.address = child.answer();
        child
    }

    fn process(&self) -> &Process {
        self.process.as_ref().expect("a process of this machine")
    }

    /// Sends a command and returns the answer.
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").expect("the second process listens");
    }

    /// As [`tell`](Child::tell), where it may be dead.
    pub fn tell_if_it_listens(&mut self, command: &str) {
        let _ = writeln!(self.stdin, "{command}");
    }

    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.stdout.read_line(&mut line).expect("an answer") > 0,
                "the second process has ended"
            );
            // The test harness prints lines of its own.
            if let Some((_, answer)) = line.split_once("ANSWER ") {
                return answer.trim().to_owned();
            }
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the process is ours and has not been waited for, so the number is still its own.
        assert_eq!(unsafe { libc::kill(self.process().id() as i32, signal) }, 0);
    }

    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        let process = self.process.as_mut().expect("a process of this machine");
        process.wait().expect("it is dead");
    }

    /// Stops the process and waits until it stands still.
    pub fn freeze(&self) {
        self.signal(libc::SIGSTOP);
        let path = format!("/proc/{}/stat", self.process().id());
        let stopped =
            || std::fs::read_to_string(&path).is_ok_and(|s| s.rsplit(") ").next().is_some_and(|r| r.starts_with('T')));
        let give_up = Instant::now() + LONG;
        while !stopped() {
            assert!(Instant::now() < give_up, "the process did not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// User and system time used so far, in ticks of 10 ms.
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process().id())).expect("it lives");
        let fields: Vec<&str> = stat.rsplit(") ").next().expect("a line").split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    pub fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // On another machine, the end of its input ends it.
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The body of the second process; returns at once in the first.
pub fn second_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let mut words = role.split(' ');
    let (way, name, bytes) = (
        words.next().unwrap(),
        words.next().unwrap(),
        words.next().unwrap().parse().unwrap(),
    );
    let way = Way::parse(way);
    let mut builder = way.builder(name);
    if let Ok(listen) = std::env::var("SECOND_PROCESS_LISTEN") {
        builder = builder.listen(&listen);
    }
    let agent = builder.start().expect("an agent starts");
    let memory = way.memory(&agent, bytes);
    memory.write(0, &pattern(1, bytes));
    agent
        .publish("data", &memory, Access::READ_WRITE)
        .expect("it is published");
    let answer = |text: &str| println!("ANSWER {text}");
    answer(&agent.address());
    for line in std::io::stdin().lines() {
        let line = line.expect("a command");
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["fill", byte] => {
                memory.write(0, &vec![byte.parse().unwrap(); bytes]);
                answer("filled");
            }
            ["pattern", seed] => {
                memory.write(0, &pattern(seed.parse().unwrap(), bytes));
                answer("filled");
            }
            ["count", byte] => {
                let byte: u8 = byte.parse().unwrap();
                answer(&memory.to_vec().iter().filter(|b| **b == byte).count().to_string());
            }
            ["matches", seed] => answer(&(memory.to_vec() == pattern(seed.parse().unwrap(), bytes)).to_string()),
            ["withdraw"] => {
                agent.withdraw("data").expect("it was published");
                answer("withdrawn");
            }
            ["release"] => answer(&format!("{:?}", memory.release(LONG).is_ok())),
            ["publish-read-only"] => {
                agent
                    .publish("read-only", &memory, Access::READ)
                    .expect("it is published");
                answer("published");
            }
            // Expects notifications "N": that all bytes were N when it came. Answers with the first that was not so.
            ["expect", count] => {
                let mut verdict = "all good".to_owned();
                for expected in 0..count.parse::<u32>().unwrap() {
                    let Some(told) = agent.next_notification(LONG) else {
                        verdict = format!("notification {expected} did not come");
                        break;
                    };
                    let number: u32 = String::from_utf8(told.payload).unwrap().parse().unwrap();
                    let wrong = memory.to_vec().iter().filter(|b| **b != number as u8).count();
                    if number != expected || wrong > 0 {
                        verdict = format!("notification {number} where {expected} was due, with {wrong} bytes missing");
                        break;
                    }
                    told.from.notify(b"next").unwrap();
                }
                answer(&verdict);
            }
            ["echo"] => {
                answer("echoing");
                while let Some(told) = agent.next_notification(LONG) {
                    if told.payload == b"stop" {
                        break;
                    }
                    told.from.notify(&told.payload).unwrap();
                }
                answer("stopped");
            }
            ["cable", ref arguments @ ..] => {
                let done = Command::new("cable")
                    .args(arguments)
                    .status()
                    .expect("cables are there");
                answer(&done.success().to_string());
            }
            // A child that does nothing, and not for ever.
            ["fork"] => {
                // SAFETY: the child only sleeps.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: as above. Whoever reads what this process prints shall not wait for the child.
                    unsafe {
                        libc::alarm(120);
                        (0..3).for_each(|fd| {
                            libc::close(fd);
                        });
                        loop {
                            libc::pause();
                        }
                    }
                }
                answer(&child.to_string());
            }
            ["peers"] => answer(&agent.peers().len().to_string()),
            ["quit"] => break,
            _ => panic!("an unknown command: {line}"),
        }
    }
}
