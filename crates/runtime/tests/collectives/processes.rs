//! Ranks in processes of their own, some of which are killed or stopped: who is named, and how the others go on.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use weft::{Agent, Communicator, Datatype, JoinOptions, Rank, Reduction};

use super::{WAYS, Way, failed, longs, read_longs};

/// A rank in a process of its own, which says what becomes of it, line by line.
struct Process {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Process {
    fn start(directory: &std::path::Path, rank: u32, size: u32, way: Way, role: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "processes::a_rank_of_its_own",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(
                "COLLECTIVES_RANK",
                format!("{rank} {size} {way:?} {role} {}", directory.display()),
            )
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Process { child, lines }
    }

    /// The next line that begins with `word`.
    fn say(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some(at) = line.find(word) {
                return line[at + word.len()..].trim().to_owned();
            }
            line.clear();
        }
        panic!("the process ended without saying {word}");
    }
}

/// What a process of its own does after the first failure.
const ROLES: [&str; 5] = ["shrinks", "dies", "grows", "joins", "ends"];

#[test]
fn a_rank_of_its_own() {
    let Ok(role) = std::env::var("COLLECTIVES_RANK") else {
        return;
    };
    let mut words = role.splitn(5, ' ');
    let mut word = || words.next().unwrap().to_owned();
    let (rank, size): (u32, u32) = (word().parse().unwrap(), word().parse().unwrap());
    let (way, role, directory) = (word(), word(), word());
    assert!(ROLES.contains(&role.as_str()), "{role}");
    let way = WAYS.into_iter().find(|it| format!("{it:?}") == way).unwrap();
    let transports = if way == Way::Tcp { "tcp" } else { "shared_memory,tcp" };
    let agent = Agent::builder(&format!("rank-{rank}-{role}"))
        .secret("collectives")
        .listen("127.0.0.1:0")
        .set("rendezvous", format!("dir:{directory}"))
        .set("transports", transports)
        .start()
        .unwrap();
    let name = if role == "joins" { "grown" } else { "all" };
    let options = JoinOptions {
        arena: way.has_arena(rank),
        ..JoinOptions::new(name, Rank(rank), size)
    };
    let group = Communicator::join(&agent, options).unwrap();
    println!("JOINED");
    let sum_of = |group: &Communicator, value: u32| {
        let data = longs(group, &[u64::from(value)]);
        let call = group.all_reduce(&data, &data, Datatype::U64, Reduction::Sum);
        call.deadline(Duration::from_secs(20))
            .run()
            .map(|()| read_longs(&data)[0])
    };
    if role == "joins" {
        println!("GROWN {} {}", group.size(), sum_of(&group, 100).unwrap());
        return group.barrier().run().unwrap();
    }
    let data = agent.allocate(1 << 20).unwrap();
    let error = loop {
        let call = group.all_reduce(&data, &data, Datatype::F32, Reduction::Sum);
        let seconds = if role == "ends" { 3 } else { 20 };
        if let Err(error) = call.deadline(Duration::from_secs(seconds)).run() {
            break failed(Err(error));
        }
    };
    println!("FAILED {} {:?} {error}", error.blamed().0, error.cause());
    if role == "ends" {
        return;
    }
    if role == "dies" {
        // Somewhere in what follows.
        let wait = Duration::from_micros(u64::from(std::process::id() % 8) * 2500);
        std::thread::spawn(move || {
            std::thread::sleep(wait);
            std::process::abort();
        });
    }
    let (mut left, gone) = (group, if role == "grows" { 1 } else { 2 });
    let sum = loop {
        left = left.shrink(Duration::from_secs(30)).unwrap();
        // Whoever is still to die may do so after they have come together: then they do so again.
        let outcome = loop {
            let outcome = sum_of(&left, rank + 1);
            if outcome.is_err() || left.size() + gone == size {
                break outcome;
            }
        };
        if let Ok(sum) = outcome {
            break sum;
        }
    };
    println!("SHRUNK {} {sum}", left.size());
    if role == "grows" {
        left = left.grow("grown", size).unwrap();
        println!("GROWN {} {}", left.size(), sum_of(&left, rank + 1).unwrap());
    }
    // Nobody goes before all have heard.
    left.barrier().run().ok();
}

/// Reads what is left, and waits for the end.
fn end(processes: impl IntoIterator<Item = Process>) {
    for mut process in processes {
        let mut rest = String::new();
        process.lines.read_to_string(&mut rest).ok();
        process.child.wait().unwrap();
    }
}

#[test]
fn kill_9_in_mid_all_reduce_names_the_rank_and_the_others_go_on() {
    for way in WAYS {
        let directory = tempfile::tempdir().unwrap();
        let start = |rank| Process::start(directory.path(), rank, 4, way, "grows");
        let mut processes: Vec<Process> = (0..4).map(start).collect();
        processes.iter_mut().for_each(|process| drop(process.say("JOINED")));
        std::thread::sleep(Duration::from_millis(200));
        let mut killed = processes.remove(2);
        killed.child.kill().unwrap();
        for process in &mut processes {
            let failed = process.say("FAILED ");
            println!("{way:?}: {failed}");
            assert!(failed.starts_with("2 Lost "), "{way:?}: {failed}");
            assert_eq!(process.say("SHRUNK "), "3 7", "{way:?}");
        }
        // A new one comes in its stead.
        processes.push(Process::start(directory.path(), 3, 4, way, "joins"));
        for process in &mut processes {
            assert_eq!(process.say("GROWN "), "4 107", "{way:?}");
        }
        end(processes.into_iter().chain([killed]));
    }
}

#[test]
fn a_rank_that_is_stopped_is_late_whatever_it_last_said() {
    for way in [Way::Arena, Way::Tcp] {
        let directory = tempfile::tempdir().unwrap();
        let start = |rank| Process::start(directory.path(), rank, 4, way, "ends");
        let mut processes: Vec<Process> = (0..4).map(start).collect();
        processes.iter_mut().for_each(|process| drop(process.say("JOINED")));
        std::thread::sleep(Duration::from_millis(100));
        let mut stopped = processes.remove(1);
        let stop = Command::new("kill")
            .args(["-STOP", &stopped.child.id().to_string()])
            .status();
        assert!(stop.unwrap().success());
        for process in &mut processes {
            let failed = process.say("FAILED ");
            assert!(failed.starts_with("1 "), "{way:?}: {failed}");
        }
        stopped.child.kill().unwrap();
        end(processes.into_iter().chain([stopped]));
    }
}

#[test]
fn a_second_rank_may_die_while_the_others_come_together() {
    for way in [Way::Arena, Way::Tcp, Way::Arena, Way::Tcp] {
        let directory = tempfile::tempdir().unwrap();
        let role = |rank| if rank == 1 { "dies" } else { "shrinks" };
        let start = |rank| Process::start(directory.path(), rank, 5, way, role(rank));
        let mut processes: Vec<Process> = (0..5).map(start).collect();
        processes.iter_mut().for_each(|process| drop(process.say("JOINED")));
        std::thread::sleep(Duration::from_millis(100));
        let mut killed = processes.remove(4);
        killed.child.kill().unwrap();
        let dies = processes.remove(1);
        for process in &mut processes {
            assert!(process.say("FAILED ").starts_with("4 Lost "), "{way:?}");
            assert_eq!(process.say("SHRUNK "), "3 8", "{way:?}");
        }
        end(processes.into_iter().chain([dies, killed]));
    }
}
