//! An owner dies, and its process number is given to a stranger that has memory at the same address.
//!
//! Usually the initiator hears of the death from the owner's socket. Here a child of the owner's, which no handler of forks saw, holds that
//! open. Giving a process a number of one's choice takes root.

mod peer;

use std::io::{BufRead, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use peer::second_process::SecondProcess;
use peer::{Near, whole_leg};
use weft_fabric::shared_memory::Foreign;
use weft_fabric::{Clock, HostMemory, SharedMemory, SharedMemoryOptions};
use weft_plan::Place;
use weft_protocol::{Access, Direction, Epoch, Failure, Loss, PeerAddress, Region, RegionKey, RemoteRegion, Transport};

const ROLE: &str = "WEFT_TEST_NUMBERS";
const LEN: usize = 64 << 10;
/// What the memory of each process is full of.
const OWNER: u8 = 0x22;
const STRANGER: u8 = 0x11;
const KEY: RegionKey = RegionKey {
    epoch: Epoch(42),
    slot: 0,
    secret: 77,
};

/// Not a test: the parent of the owner and of the stranger, when this binary is started as one.
#[test]
fn peer_process() {
    if std::env::var(ROLE).is_ok() {
        be_the_parent();
    }
}

#[test]
fn a_stranger_with_the_number_of_a_dead_owner_is_neither_read_nor_written() {
    for direction in [Direction::Read, Direction::Write] {
        let mut parent = SecondProcess::start(ROLE, "1");
        let address = PeerAddress(parent.reply());
        let options = SharedMemoryOptions {
            foreign: Foreign::ProcessVm,
            ..SharedMemoryOptions::default()
        };
        let mut near = Near::connected_to(options, &address);
        let local = near.local(HostMemory::from_vec(vec![0x33; LEN]));
        let far = RemoteRegion {
            key: KEY,
            len: LEN as u64,
            place: Place::DRAM,
            access: Access::READ_WRITE,
            grants: Arc::from([]),
        };
        let leg = whole_leg(&local, &far);
        let deadline = near.soon();
        let warm = near.op(Direction::Read, &leg, 0..1, deadline);
        near.carry_out(warm).unwrap();
        let mut byte = [0];
        local.memory.bytes().read(0, &mut byte);
        assert_eq!(byte, [OWNER]);

        parent.command("die");
        let reply = parent.reply();
        if reply != "reused" {
            return eprintln!("left out: {reply}");
        }
        // Whoever was seen alive a moment ago is not looked at again.
        std::thread::sleep(Duration::from_millis(10));
        let op = near.op(direction, &leg, 0..LEN as u64, deadline);
        let id = op.id;
        let outcome = match near.transport.post(near.path, &[op], near.clock.now()) {
            Ok(_) => near.completion(id).map(drop),
            Err(loss) => Err(Failure::PathLost { loss, fenced: true }),
        };
        parent.command("intact");
        let intact = parent.reply();
        parent.command("end");
        let lost = Failure::PathLost {
            loss: Loss::ClosedByPeer,
            fenced: true,
        };
        assert_eq!(outcome, Err(lost), "{direction:?}");
        assert_eq!(intact, "true", "{direction:?}: the stranger's memory was changed");
        assert_eq!(near.loss(), (Loss::ClosedByPeer, true));
    }
}

fn be_the_parent() {
    let memory = vec![STRANGER; LEN];
    let address = memory.as_ptr() as u64;
    // SAFETY: the child goes on with memory of its own, and ends without returning.
    let owner = unsafe { libc::fork() };
    if owner == 0 {
        be_the_owner(memory);
    }
    // SAFETY: a child of ours.
    assert_eq!(unsafe { libc::waitpid(owner, std::ptr::null_mut(), 0) }, owner);
    let stranger = match with_number(owner) {
        Ok(stranger) => {
            say("reused");
            stranger
        }
        Err(error) => return say(&format!("no process can be given a number: {error}")),
    };
    for command in std::io::stdin().lock().lines().map_while(Result::ok) {
        match command.as_str() {
            "intact" => {
                let mut found = vec![0; LEN];
                let file = std::fs::File::open(format!("/proc/{stranger}/mem")).unwrap();
                file.read_exact_at(&mut found, address).unwrap();
                say(&(found == memory).to_string());
            }
            _ => break,
        }
    }
    // SAFETY: a child of ours that has not been waited for.
    unsafe { libc::kill(stranger, libc::SIGKILL) };
}

/// Serves its memory until it is told to die. A child of its own then still holds its sockets.
fn be_the_owner(mut memory: Vec<u8>) -> ! {
    memory.fill(OWNER);
    let clock = Clock::start();
    let mut transport = SharedMemory::start(SharedMemoryOptions::default(), KEY.epoch, clock).unwrap();
    let region = Region {
        key: KEY,
        memory: Arc::new(HostMemory::from_vec(memory)),
        place: Place::DRAM,
        access: Access::READ_WRITE,
    };
    transport.register(&region).unwrap();
    say(&transport.capabilities().address.0);
    let (commands, inbox) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        std::io::stdin()
            .read_line(&mut String::new())
            .map(|_| commands.send(()))
    });
    let mut signals = Vec::new();
    while inbox.try_recv().is_err() {
        transport.poll(clock.now(), &mut signals);
        std::thread::yield_now();
    }
    // SAFETY: the child only sleeps, and not for ever; then this process ends.
    unsafe {
        if libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) == 0 {
            linger();
        }
        libc::kill(libc::getpid(), libc::SIGKILL);
        libc::_exit(0)
    }
}

/// A child that has the number, if the kernel lets us.
fn with_number(number: libc::pid_t) -> std::io::Result<libc::pid_t> {
    let numbers = [number];
    // SAFETY: all-zero arguments are valid ones.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.set_tid = numbers.as_ptr() as u64;
    arguments.set_tid_size = 1;
    // SAFETY: the arguments outlive the call, and the child only sleeps.
    match unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of_val(&arguments)) } {
        0 => linger(),
        -1 => Err(std::io::Error::last_os_error()),
        pid => Ok(pid as libc::pid_t),
    }
}

fn linger() -> ! {
    // SAFETY: it sleeps until it is killed, or for a minute.
    unsafe {
        libc::alarm(60);
        // Whoever reads what this test prints shall not wait for it.
        for fd in 0..3 {
            libc::close(fd);
        }
        loop {
            libc::pause();
        }
    }
}

fn say(line: &str) {
    println!("PEER {line}");
    std::io::stdout().flush().expect("the test listens");
}
