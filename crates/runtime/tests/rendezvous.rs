//! Every place keeps the same promises, also when a holder is killed without a word.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use weft::rendezvous::{Rendezvous, RendezvousError, RendezvousOptions, World};
use weft_protocol::Epoch;

const PATIENCE: Duration = Duration::from_secs(20);
const SECRET: &[u8] = b"a secret of the test";

fn options() -> RendezvousOptions {
    RendezvousOptions {
        job: "test".to_owned(),
        lease: Duration::from_secs(1),
    }
}

fn world(rank: u32, port: u16) -> World {
    World {
        rank,
        size: 4,
        local_rank: None,
        master: "127.0.0.1".to_owned(),
        master_port: port,
        job: None,
    }
}

fn by_world(rank: u32, port: u16) -> Rendezvous {
    Rendezvous::by_world(&world(rank, port), 0, SECRET, options()).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// What any place must do, seen by two that share it.
fn keeps_its_promises(here: &Rendezvous, there: &Rendezvous) {
    let held = here.register("prefill / 0", "tcp:127.0.0.1:4000", Epoch(7)).unwrap();
    let found = there.lookup("prefill / 0", PATIENCE).unwrap();
    assert_eq!((found.address.as_str(), found.epoch), ("tcp:127.0.0.1:4000", Epoch(7)));
    let second = there
        .register("prefill / 0", "tcp:127.0.0.1:5000", Epoch(8))
        .unwrap_err();
    assert!(
        matches!(&second, RendezvousError::NameTaken { holder, .. } if holder == "tcp:127.0.0.1:4000"),
        "{second}"
    );
    let other = there.register("decode", "tcp:127.0.0.1:6000", Epoch(9)).unwrap();
    let names: Vec<_> = here.list().unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["decode", "prefill / 0"]);
    drop(held);
    gone(there, "prefill / 0");
    let again = there.register("prefill / 0", "tcp:127.0.0.1:7000", Epoch(10)).unwrap();
    assert_eq!(here.lookup("prefill / 0", PATIENCE).unwrap().epoch, Epoch(10));
    drop((other, again));
    assert!(matches!(
        here.lookup("", PATIENCE),
        Err(RendezvousError::BadName { .. })
    ));
    assert!(matches!(
        here.register("x\n", "a", Epoch(1)),
        Err(RendezvousError::BadName { .. })
    ));
    // Who waits for a change gets it when somebody comes, and when somebody goes.
    gone(there, "decode");
    gone(there, "prefill / 0");
    std::thread::scope(|scope| {
        let known = there.list().unwrap();
        assert_eq!(there.list_changed(&known, Duration::from_millis(50)).unwrap(), known);
        let waiting = scope.spawn(move || there.list_changed(&known, PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let held = here.register("new", "tcp:127.0.0.1:8000", Epoch(12)).unwrap();
        let come = waiting.join().unwrap();
        assert_eq!(come.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["new"]);
        let waiting = scope.spawn(move || there.list_changed(&come, PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        drop(held);
        assert_eq!(waiting.join().unwrap(), []);
    });
    // Who waits for a name gets it when it is taken.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| there.lookup("late", PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let held = here.register("late", "tcp:127.0.0.1:8000", Epoch(11)).unwrap();
        assert_eq!(waiting.join().unwrap().epoch, Epoch(11));
        drop(held);
    });
}

fn gone(place: &Rendezvous, name: &str) {
    let start = Instant::now();
    while place.lookup(name, Duration::ZERO).is_ok() {
        assert!(start.elapsed() < PATIENCE, "{name} is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(matches!(
        place.lookup(name, Duration::ZERO),
        Err(RendezvousError::NotFound { .. })
    ));
}

/// Starts this binary again as a process that registers `victim` and waits to be killed.
fn holder(place: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "holds_a_name_until_killed", "--nocapture"])
        .env("HOLD_A_NAME_AT", place)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(
        lines.map_while(Result::ok).any(|line| line.contains("holding")),
        "the holder could not register"
    );
    child
}

/// Not a test but the other process of the tests below; alone it does nothing.
#[test]
fn holds_a_name_until_killed() {
    let Ok(place) = std::env::var("HOLD_A_NAME_AT") else {
        return;
    };
    let (kind, rest) = place.split_once(':').unwrap();
    let place = match kind {
        "dir" => Rendezvous::by_directory(Path::new(rest), options()).unwrap(),
        "world" => by_world(1, rest.parse().unwrap()),
        "etcd" => Rendezvous::by_etcd(rest, options()).unwrap(),
        other => panic!("{other}"),
    };
    let _held = place.register("victim", "tcp:127.0.0.1:1", Epoch(1)).unwrap();
    println!("holding");
    loop {
        std::thread::park();
    }
}

fn forgets_a_killed_holder(place: &Rendezvous, described: &str) {
    let mut child = holder(described);
    assert_eq!(place.lookup("victim", PATIENCE).unwrap().epoch, Epoch(1));
    assert!(matches!(
        place.register("victim", "b", Epoch(2)),
        Err(RendezvousError::NameTaken { .. })
    ));
    child.kill().unwrap();
    child.wait().unwrap();
    gone(place, "victim");
    let restarted = place.register("victim", "tcp:127.0.0.1:2", Epoch(2)).unwrap();
    assert_eq!(place.lookup("victim", PATIENCE).unwrap().epoch, Epoch(2));
    drop(restarted);
}

#[test]
fn in_process() {
    keeps_its_promises(&Rendezvous::in_process("test"), &Rendezvous::in_process("test"));
    let _held = Rendezvous::in_process("one job").register("a", "b", Epoch(1)).unwrap();
    assert!(Rendezvous::in_process("another job").list().unwrap().is_empty());
}

#[test]
fn by_directory() {
    let directory = tempfile::tempdir().unwrap();
    let place = || Rendezvous::by_directory(directory.path(), options()).unwrap();
    keeps_its_promises(&place(), &place());
    forgets_a_killed_holder(&place(), &format!("dir:{}", directory.path().display()));
}

#[test]
fn a_directory_with_hostile_content() {
    let directory = tempfile::tempdir().unwrap();
    let place = Rendezvous::by_directory(directory.path(), options()).unwrap();
    let inside = directory.path().join("test");
    std::fs::write(inside.join("garbage.entry"), b"\xff\x00{").unwrap();
    std::fs::write(inside.join("huge.entry"), vec![b'x'; 1 << 20]).unwrap();
    std::fs::create_dir(inside.join("folder.entry")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", inside.join("link.entry")).unwrap();
    let _held = place.register("good", "a", Epoch(1)).unwrap();
    // Somebody else's entry under another name would send peers to the wrong place.
    std::fs::copy(inside.join("good.entry"), inside.join("copied.entry")).unwrap();
    assert_eq!(place.list().unwrap().len(), 1);
    for name in ["garbage", "huge", "copied", "folder"] {
        assert!(
            matches!(
                place.lookup(name, Duration::ZERO),
                Err(RendezvousError::BadEntry { .. })
            ),
            "{name}"
        );
    }
    assert!(place.lookup("link", Duration::ZERO).is_err());
    let traversal = place.register("../../escape", "a", Epoch(1)).unwrap();
    assert!(!directory.path().join("escape.entry").exists());
    drop(traversal);
}

#[test]
fn an_entry_from_another_host_lives_while_its_file_is_young() {
    let directory = tempfile::tempdir().unwrap();
    let place = Rendezvous::by_directory(directory.path(), options()).unwrap();
    let file = directory.path().join("test/far.entry");
    let text =
        r#"{"weft":1,"name":"far","address":"tcp:10.0.0.9:1","epoch":"ff","host":"elsewhere","process":1,"started":1}"#;
    std::fs::write(&file, text).unwrap();
    assert_eq!(place.lookup("far", Duration::ZERO).unwrap().epoch, Epoch(255));
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(60);
    std::fs::File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    assert!(matches!(
        place.lookup("far", Duration::ZERO),
        Err(RendezvousError::NotFound { .. })
    ));
    let _held = place.register("far", "tcp:10.0.0.1:1", Epoch(1)).unwrap();
    assert_eq!(place.lookup("far", Duration::ZERO).unwrap().epoch, Epoch(1));
}

#[test]
fn by_the_environment_of_a_launcher() {
    let port = free_port();
    let (first, second) = (by_world(0, port), by_world(1, port));
    keeps_its_promises(&first, &second);
    forgets_a_killed_holder(&first, &format!("world:{port}"));
}

#[test]
fn a_name_server_refuses_strangers() {
    let port = free_port();
    let first = by_world(0, port);
    let wrong = Rendezvous::by_world(&world(1, port), 0, b"another secret", options()).unwrap();
    assert!(matches!(
        wrong.register("a", "b", Epoch(1)),
        Err(RendezvousError::WrongSecret { .. })
    ));
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b""] {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let _ = std::io::Write::write_all(&mut stream, garbage);
    }
    let held = first.register("a", "b", Epoch(1)).unwrap();
    assert_eq!(first.list().unwrap().len(), 1);
    drop(held);
}

#[test]
fn something_else_at_the_master_port_is_recognised() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = std::io::Write::write_all(&mut stream, &[b'x'; 256]);
    });
    // Rank 0 finds the port taken, takes the holder for its own server, and finds out.
    let error = by_world(0, port).register("a", "b", Epoch(1)).unwrap_err();
    assert!(matches!(error, RendezvousError::NotNameServer { .. }), "{error}");
    other.join().unwrap();
}

#[cfg(not(feature = "etcd"))]
#[test]
fn without_etcd_the_build_says_so() {
    let missing = Rendezvous::by_etcd("http://127.0.0.1:1", options());
    assert!(matches!(missing, Err(RendezvousError::NotBuilt { feature: "etcd" })));
}

#[cfg(feature = "etcd")]
mod etcd {
    use super::*;

    /// A real server, on loopback, with its data in a directory that vanishes.
    struct Server {
        process: Child,
        url: String,
        _data: tempfile::TempDir,
    }

    impl Server {
        fn start() -> Server {
            let data = tempfile::tempdir().unwrap();
            let (url, peers) = (
                format!("http://127.0.0.1:{}", free_port()),
                format!("http://127.0.0.1:{}", free_port()),
            );
            let process = Command::new("etcd")
                .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
                .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
                .args(["--initial-cluster", &format!("default={peers}"), "--data-dir"])
                .arg(data.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("these tests start a real etcd: install Debian's etcd-server");
            let server = Server {
                process,
                url,
                _data: data,
            };
            let start = Instant::now();
            while Rendezvous::by_etcd(&server.url, options()).is_err() {
                assert!(start.elapsed() < PATIENCE, "etcd did not start");
                std::thread::sleep(Duration::from_millis(50));
            }
            server
        }

        fn place(&self) -> Rendezvous {
            Rendezvous::by_etcd(&self.url, options()).unwrap()
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    #[test]
    fn by_etcd() {
        let server = Server::start();
        keeps_its_promises(&server.place(), &server.place());
        forgets_a_killed_holder(&server.place(), &format!("etcd:{}", server.url));
    }

    #[test]
    fn an_entry_outlives_many_leases_while_its_holder_lives() {
        let server = Server::start();
        let (here, there) = (server.place(), server.place());
        let held = here.register("steady", "a", Epoch(1)).unwrap();
        for _ in 0..12 {
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(there.lookup("steady", Duration::ZERO).unwrap().epoch, Epoch(1));
        }
        drop(held);
    }

    #[test]
    fn a_server_that_is_not_there_is_an_error() {
        let missing = Rendezvous::by_etcd(&format!("http://127.0.0.1:{}", free_port()), options());
        assert!(matches!(missing, Err(RendezvousError::Etcd { .. })));
    }
}
